"""A session's samples as one safetensors file: what `POST /sessions/{id}/samples` answers with.

    i.tokens          int32   [T]              i counts samples from 0, in order of recording
    i.loss_mask       uint8   [T]              1 on sampled tokens that this sample trains
    i.log_probs       float32 [T]              the engine's where the mask is 1, 0.0 elsewhere
    i.routed_experts  uint8 or uint16 [T - 1, moe_layers, top_k]      MoE models only
    __metadata__      {"_samples_meta": JSON of SamplesMeta}          safetensors' header holds text only

Types are those of the record: nothing is converted on the way. The form is Miles' (tensors by sample, the rest as JSON
under `_samples_meta`). A file with tensors that the JSON doesn't name, or without some that it does, is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load, save

from miles_hpc.core.errors import IntegrityError
from miles_hpc.core.types import FinishReason, SampleStatus
from miles_hpc.rollout.session.routed_rows import routed_rows
from miles_hpc.rollout.session.samples import SessionSample

__all__ = ["SampleMeta", "SamplesMeta", "TurnMeta", "WireSample", "read_samples", "write_samples"]

_META = "_samples_meta"
_FORMAT = 1


class TurnMeta(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of a sample's path."""

    number: int
    finish_reason: FinishReason
    n_new: int  # tokens that its request added
    n_output: int
    drop: int  # of the turn before


class SampleMeta(msgspec.Struct, frozen=True, kw_only=True):
    """What isn't a tensor of one sample."""

    status: SampleStatus
    versions: tuple[tuple[int, int, int, int], ...]  # term, step, start, end: cover the tokens with mask 1, in order
    turns: tuple[TurnMeta, ...]
    routed_experts: bool


class SamplesMeta(msgspec.Struct, frozen=True, kw_only=True):
    """What isn't a tensor of the file. `metadata` is what its owner said of the session."""

    format: int
    session_id: str
    samples: tuple[SampleMeta, ...]
    metadata: dict[str, Any] = {}


@dataclass(frozen=True, eq=False)
class WireSample:
    """A sample as it was read."""

    tokens: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]
    log_probs: npt.NDArray[np.float32]
    routed_experts: npt.NDArray[np.unsignedinteger] | None
    meta: SampleMeta


def write_samples(session_id: str, samples: Sequence[SessionSample], metadata: dict[str, Any]) -> bytes:
    """The file's bytes. Raises NoSample when rows of routed experts don't fit the tokens."""
    tensors: dict[str, npt.NDArray[Any]] = {}
    metas = []
    for i, sample in enumerate(samples):
        rows = routed_rows(sample.path)
        tensors |= {
            f"{i}.tokens": sample.tokens,
            f"{i}.loss_mask": sample.loss_mask,
            f"{i}.log_probs": sample.log_probs,
        }
        if rows is not None:
            tensors[f"{i}.routed_experts"] = rows
        metas.append(_meta_of(sample, rows is not None))
    meta = SamplesMeta(format=_FORMAT, session_id=session_id, samples=tuple(metas), metadata=metadata)
    data: bytes = save(tensors, {_META: msgspec.json.encode(meta).decode()})
    return data


def _meta_of(sample: SessionSample, routed_experts: bool) -> SampleMeta:
    return SampleMeta(
        status=sample.status,
        versions=tuple((s.version.term, s.version.step, s.start, s.end) for s in sample.versions),
        turns=tuple(
            TurnMeta(
                number=turn.number,
                finish_reason=turn.finish_reason,
                n_new=len(turn.new_ids),
                n_output=len(turn.output_ids),
                drop=turn.drop,
            )
            for turn in sample.path
        ),
        routed_experts=routed_experts,
    )


def read_samples(data: bytes) -> tuple[SamplesMeta, list[WireSample]]:
    """Inverse of write_samples. Raises IntegrityError for anything else."""
    try:
        tensors = load(data)
        n_header = int.from_bytes(data[:8], "little")
        header = msgspec.json.decode(data[8 : 8 + n_header])
        meta = msgspec.json.decode(header["__metadata__"][_META], type=SamplesMeta)
    except (SafetensorError, msgspec.MsgspecError, KeyError, TypeError, ValueError) as error:
        raise IntegrityError(f"samples of {len(data)} bytes: {type(error).__name__}: {error}") from error
    if meta.format != _FORMAT:
        raise IntegrityError(f"samples: format {meta.format}, expected {_FORMAT}")
    found = [_sample_of(tensors, i, one) for i, one in enumerate(meta.samples)]
    if tensors:
        raise IntegrityError(f"samples: tensors that belong to no sample: {', '.join(sorted(tensors))}")
    return meta, found


def _sample_of(tensors: dict[str, npt.NDArray[Any]], i: int, meta: SampleMeta) -> WireSample:
    """Takes its tensors out of `tensors`."""

    def take(name: str, types: tuple[str, ...], length: int | None = None) -> npt.NDArray[Any]:
        array = tensors.pop(f"{i}.{name}", None)
        if array is None or array.dtype.name not in types or (length is not None and len(array) != length):
            seen = "nothing" if array is None else f"{array.dtype.name} {list(array.shape)}"
            expected = f"{' or '.join(types)}{'' if length is None else f' of length {length}'}"
            raise IntegrityError(f"samples: {i}.{name}: found {seen}, expected {expected}")
        return array

    tokens = take("tokens", ("int32",))
    return WireSample(
        tokens=tokens,
        loss_mask=take("loss_mask", ("uint8",), len(tokens)),
        log_probs=take("log_probs", ("float32",), len(tokens)),
        routed_experts=take("routed_experts", ("uint8", "uint16"), len(tokens) - 1) if meta.routed_experts else None,
        meta=meta,
    )
