"""SGLang's HTTP contract as far as it is used: requests to send, and what an answer must hold to be believed. Pure.

Fields and encodings are those of SGLang 0.5.15 to 0.5.23 (its io_struct.py and http_server.py). An answer with status
200 may still lack what was asked for: without the server's flag, routed experts are left out silently. So every field
that a trajectory is made of is checked here, and an answer that contradicts itself is an IntegrityError.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from miles_hpc.core.errors import IntegrityError
from miles_hpc.core.types import FinishReason, ModelShape, SamplingParams, VersionSpan, WeightVersion
from miles_hpc.rollout.engine import Generation

__all__ = ["NO_VERSION", "Layers", "generate_request", "parse_generation", "parse_scores", "score_request"]

#: The label of weights that nobody verified: a server starts with it, and a failed update goes back to it.
NO_VERSION = "none"


@dataclass(frozen=True)
class Layers:
    """How routed experts come: SGLang returns every layer, dense ones too (their rows mean nothing)."""

    n_layers: int
    shape: ModelShape

    def decode(self, text: str, n_rows: int) -> npt.NDArray[np.unsignedinteger]:
        """base64 of int32 [n_rows, n_layers, top_k] -> [n_rows, moe_layers, top_k].

        uint8 up to 256 experts, uint16 above. Raises IntegrityError for another size and for ids that aren't experts.
        """
        try:
            data = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError) as error:
            raise IntegrityError(f"routed experts aren't base64: {error}") from error
        expected = 4 * n_rows * self.n_layers * self.shape.top_k
        if len(data) != expected:
            raise IntegrityError(
                f"routed experts: {len(data)} bytes, expected {expected}: {n_rows} rows of {self.n_layers} layers "
                f"and {self.shape.top_k} experts as int32"
            )
        rows = np.frombuffer(data, "<i4").reshape(n_rows, self.n_layers, self.shape.top_k)
        rows = rows[:, list(self.shape.moe_layers)]
        if rows.size and (rows.min() < 0 or rows.max() >= self.shape.n_experts):
            bad = int(rows.min()) if rows.min() < 0 else int(rows.max())
            raise IntegrityError(f"routed experts: id {bad}, expected 0 to {self.shape.n_experts - 1}")
        return rows.astype(np.uint8 if self.shape.n_experts <= 256 else np.uint16)


def generate_request(
    request_id: str,
    input_ids: npt.NDArray[np.int32],
    sampling: SamplingParams,
    *,
    max_new_tokens: int,
    routed_experts_start: int | None,
    namespace: str,
) -> dict[str, Any]:
    """Body of POST /generate. `routed_experts_start` None: a model without experts, or nobody wants them.

    Prefixes are shared within a `namespace` only. With stop tokens the model's own end tokens end it as well: SGLang
    knows no other way.
    """
    parameters: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "no_stop_trim": True,
    }
    if sampling.stop_token_ids:
        parameters["ignore_eos"] = False
        parameters["stop_token_ids"] = list(sampling.stop_token_ids)
    if sampling.seed is not None:
        parameters["sampling_seed"] = sampling.seed
    body: dict[str, Any] = {
        "rid": request_id,
        "input_ids": input_ids.tolist(),
        "sampling_params": parameters,
        "return_logprob": True,
        "logprob_start_len": -1,
        "extra_key": namespace,
    }
    if routed_experts_start is not None:
        body["return_routed_experts"] = True
        body["routed_experts_start_len"] = routed_experts_start
    return body


def score_request(request_id: str, tokens: npt.NDArray[np.int32]) -> dict[str, Any]:
    """Body of POST /generate that returns the log-probs of one sequence's tokens; the one token sampled is ignored."""
    return {
        "rid": request_id,
        "input_ids": tokens.tolist(),
        "sampling_params": {"max_new_tokens": 1, "temperature": 1.0, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": 0,
        "extra_key": request_id,  # scored by the weights of now, whatever is cached
    }


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


class _Reason(msgspec.Struct):
    type: str
    message: str = ""


class _Meta(msgspec.Struct):
    finish_reason: _Reason
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int = 0
    weight_version: str | None = None
    num_retractions: int = 0
    weight_versions: list[_Span] | None = None
    output_token_logprobs: list[tuple[float | None, int, Any]] | None = None
    input_token_logprobs: list[tuple[float | None, int, Any]] | None = None
    routed_experts: str | None = None


class _Answer(msgspec.Struct):
    meta_info: _Meta
    output_ids: list[int] | None = None


_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT}


def _decode(data: bytes) -> _Answer:
    try:
        return msgspec.json.decode(data, type=_Answer)
    except msgspec.MsgspecError as error:
        raise IntegrityError(f"the server's answer isn't a generation: {error}: {data[:200]!r}") from error


def parse_generation(
    data: bytes,
    *,
    n_input: int,
    max_new_tokens: int,
    stop_token_ids: Sequence[int],
    layers: Layers | None,
    routed_experts_start: int,
    spans: bool,
) -> Generation:
    """What POST /generate answered with status 200.

    `spans` False: the server tells one version for all tokens, since its updates end what is under way. `layers` None:
    no routed experts were asked for. Raises IntegrityError.
    """
    answer = _decode(data)
    meta = answer.meta_info
    reason = _REASONS.get(meta.finish_reason.type)
    if reason is None:
        raise IntegrityError(f"finish reason '{meta.finish_reason.type}': expected one of {', '.join(_REASONS)}")
    output = answer.output_ids or []
    log_probs = meta.output_token_logprobs
    if reason is FinishReason.ABORT and layers is not None and meta.routed_experts is None:
        output, log_probs = [], []  # it ended in a queue, retracted, and its tokens' rows are lost
    n = len(output)
    if n > max_new_tokens or (n == 0 and reason is not FinishReason.ABORT):
        raise IntegrityError(f"{n} output tokens with finish reason {reason}: expected 1 to {max_new_tokens}")
    for name, seen, expected in (
        ("prompt_tokens", meta.prompt_tokens, n_input),
        ("completion_tokens", meta.completion_tokens, n),
    ):
        if seen is not None and seen != expected and not (reason is FinishReason.ABORT and n == 0):
            raise IntegrityError(f"{name} is {seen}: expected {expected}")
    if reason is FinishReason.STOP and output[-1] not in stop_token_ids:
        raise IntegrityError(f"stopped at token {output[-1]}: expected one of {sorted(stop_token_ids)}")
    versions = _versions(meta, n, spans)
    if meta.num_retractions and layers is not None and len(versions) > 1:
        raise IntegrityError("retracted after an update: the rows of its earlier tokens are those of the newer weights")
    return Generation(
        output_ids=np.asarray(output, np.int32),
        log_probs=_log_probs(log_probs, output),
        versions=versions,
        finish_reason=reason,
        routed_experts=_rows(meta.routed_experts, layers, n_input, n, routed_experts_start),
        cached_tokens=meta.cached_tokens,
    )


def parse_scores(data: bytes, tokens: npt.NDArray[np.int32], vocab_size: int) -> npt.NDArray[np.float32] | None:
    """Log-probs of tokens[1:], float32; None when it was aborted. Raises IntegrityError."""
    meta = _decode(data).meta_info
    if meta.finish_reason.type == "abort":
        return None
    entries = meta.input_token_logprobs or []
    if len(entries) != len(tokens):
        raise IntegrityError(f"{len(entries)} scored tokens: expected {len(tokens)}")
    # The vocabulary's last token is told as 0 (SGLang clips what could be an image's hash, one too many); its log-prob
    # is right.
    told = np.where(tokens == vocab_size - 1, 0, tokens)
    if any(entry[1] == vocab_size - 1 for entry in entries):
        told = tokens
    return _log_probs(entries[1:], told[1:].tolist())


def _log_probs(entries: Sequence[tuple[float | None, int, Any]] | None, ids: Sequence[int]) -> npt.NDArray[np.float32]:
    entries = entries or []
    if [entry[1] for entry in entries] != list(ids):
        raise IntegrityError(f"log-probs of {len(entries)} tokens that aren't the {len(ids)} output tokens")
    values = np.asarray([entry[0] for entry in entries], np.float64)  # None becomes NaN
    if not np.isfinite(values).all():
        where = int(np.flatnonzero(~np.isfinite(values))[0])
        raise IntegrityError(f"log-prob of token {where} is {entries[where][0]}")
    return np.minimum(values, 0.0).astype(np.float32)  # rounding may give a hair over 0


def _versions(meta: _Meta, n: int, spans: bool) -> tuple[VersionSpan, ...]:
    if n == 0:
        return ()
    if not spans:
        return (VersionSpan(version=_version(meta.weight_version or "(none told)"), start=0, end=n),)
    if not meta.weight_versions:
        raise IntegrityError("weight_versions is missing: which weights sampled which token isn't known")
    found, at = [], 0
    for span in meta.weight_versions:
        if span.start != at or span.end < span.start:
            raise IntegrityError(f"weight_versions has [{span.start}, {span.end}) after token {at}")
        at = span.end
        if span.end > span.start:
            found.append(VersionSpan(version=_version(span.version), start=span.start, end=span.end))
    if at != n:
        raise IntegrityError(f"weight_versions covers {at} of {n} output tokens")
    return tuple(found)


def _version(text: str) -> WeightVersion:
    try:
        return WeightVersion.parse(text)
    except ValueError:
        raise IntegrityError(f"tokens were sampled by weights '{text}', which nobody verified") from None


def _rows(
    text: str | None, layers: Layers | None, n_input: int, n_output: int, start: int
) -> npt.NDArray[np.unsignedinteger] | None:
    if layers is None:
        return None
    n_rows = max(0, n_input + n_output - 1 - start)
    if text is None:
        if n_output == 0:  # aborted before it ran: there are no rows, and none are made up
            return layers.decode("", 0)
        raise IntegrityError("routed_experts is missing: start the server with --enable-return-routed-experts")
    return layers.decode(text, n_rows)
