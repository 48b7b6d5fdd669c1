"""An engine without a model: plays token sequences from a function, for tests of everything around an engine.

It keeps the whole contract (versions, verified sync from a real weight source, spans, abort, deadlines, slots,
sessions), so that tests of hosts and controllers run without torch. Faults are part of it: see `Faults`.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from miles_hpc.core.deadline import Deadline
from miles_hpc.core.errors import IntegrityError, PeerLost, ProtocolError, UserError
from miles_hpc.core.messages import EngineDescription, WeightsSynced
from miles_hpc.core.types import FinishReason, ModelShape, SamplingParams, VersionSpan, WeightPiece, WeightVersion
from miles_hpc.rollout.engine import EngineSpec, Generation, RolloutEngine
from miles_hpc.weights.broadcast import fetch
from miles_hpc.weights.bucket import digest_bytes, unpack

__all__ = ["Faults", "Script", "ScriptedEngine"]

#: (session_id, input_ids) -> the tokens to play. They are cut at a stop token and at max_new_tokens.
Script = Callable[[str, npt.NDArray[np.int32]], Sequence[int]]


@dataclass
class Faults:
    """What goes wrong, and when. Counts are of `generate` calls; changing them while it runs is fine."""

    die_after_calls: int | None = None  # the call after so many ends the process
    hang_after_calls: int | None = None  # calls after so many never answer
    hold_after_tokens: int | None = None  # requests hold there until a sync, an abort or their deadline
    corrupt_next_sync: bool = False  # one byte differs after loading, once
    die: Callable[[], None] = lambda: os._exit(86)


class ScriptedEngine(RolloutEngine):
    """Plays a script; log-probs are 0. `options`: script ("module:function"), token_delay_s, sync_delay_s.

    Its shape is read from the model's config.json. For a MoE model it returns rows that follow from the token alone:
    expert (token + layer + k) modulo the number of experts. A script that ends without a stop token and short of
    max_new_tokens counts as stopped.
    """

    def __init__(self, spec: EngineSpec, *, script: Script | None = None, faults: Faults | None = None) -> None:
        """Raises UserError when there is no script, or no readable config.json."""
        self.name = spec.name
        self.faults = faults or Faults()
        self.calls = 0
        self._spec = spec
        self._script = script or _load_script(spec.options.get("script", ""))
        self._token_delay_s = float(spec.options.get("token_delay_s", 0.0))
        self._sync_delay_s = float(spec.options.get("sync_delay_s", 0.0))
        self._shape = _read_shape(spec)
        self._max_length = min(
            spec.max_length or self._shape.max_position_embeddings, self._shape.max_position_embeddings
        )
        self._slots = asyncio.Semaphore(spec.slots)
        self._sync_lock = asyncio.Lock()
        self._running = asyncio.Event()
        self._running.set()
        self._asked = asyncio.Event()  # a sync or an abort came
        self._version: WeightVersion | None = None
        self._sessions: dict[str, npt.NDArray[np.int32]] = {}
        self._requests: dict[str, _Playing] = {}
        self._closed = False

    async def describe(self) -> EngineDescription:
        return EngineDescription(
            shape=self._shape,
            slots=self._spec.slots,
            version=self._version,
            device=self._spec.device,
            dtype=self._spec.dtype,
        )

    async def generate(
        self,
        request_id: str,
        session_id: str,
        input_ids: npt.NDArray[np.int32],
        sampling: SamplingParams,
        *,
        routed_experts_start: int,
        deadline_s: float,
    ) -> Generation:
        if self._closed:
            raise PeerLost(f"engine {self.name} is closed")
        if not 0 < len(input_ids) < self._max_length:
            raise UserError(f"request of {len(input_ids)} input tokens: this engine takes 1 to {self._max_length - 1}")
        if any(p.session_id == session_id for p in self._requests.values()):
            raise ProtocolError(f"session '{session_id}' has a request under way already")
        self.calls += 1
        if self.faults.die_after_calls is not None and self.calls > self.faults.die_after_calls:
            self.faults.die()
        if self.faults.hang_after_calls is not None and self.calls > self.faults.hang_after_calls:
            await asyncio.Event().wait()
        deadline = Deadline(deadline_s, f"engine {self.name}: {request_id}")
        playing = _Playing(session_id, np.array(input_ids, np.int32), sampling, deadline)
        self._requests[request_id] = playing
        try:
            try:
                await asyncio.wait_for(self._slots.acquire(), deadline.remaining_s)
            except TimeoutError:
                return self._result(playing, FinishReason.ABORT, routed_experts_start)
            playing.queue_s = deadline.elapsed_s
            try:
                reason = await self._play(playing)
            finally:
                self._slots.release()
            return self._result(playing, reason, routed_experts_start)
        finally:
            self._requests.pop(request_id, None)

    async def _play(self, playing: _Playing) -> FinishReason:
        """Emit the script's tokens one by one, each under the version that is held at that moment."""
        await self._running.wait()
        self._held_version()
        known = self._sessions.get(playing.session_id, playing.input_ids[:0])
        common = min(len(known), len(playing.input_ids) - 1)
        differs = np.flatnonzero(known[:common] != playing.input_ids[:common])
        playing.cached = int(differs[0]) if len(differs) else common
        limit = min(playing.sampling.max_new_tokens, self._max_length - len(playing.input_ids))
        for token in self._script(playing.session_id, playing.input_ids):
            await asyncio.sleep(self._token_delay_s)
            if len(playing.output) == self.faults.hold_after_tokens:
                await self._hold(playing)
            await self._running.wait()
            if playing.aborted or playing.deadline.expired or self._closed:
                return FinishReason.ABORT
            playing.output.append(int(token))
            playing.versions.append(self._held_version())
            if token in playing.sampling.stop_token_ids:
                return FinishReason.STOP
            if len(playing.output) >= limit:
                return FinishReason.LENGTH
        return FinishReason.STOP

    async def _hold(self, playing: _Playing) -> None:
        if playing.aborted:
            return
        self._asked.clear()
        try:
            await asyncio.wait_for(self._asked.wait(), playing.deadline.remaining_s)
        except TimeoutError:
            pass

    def _held_version(self) -> WeightVersion:
        if self._version is None:
            raise ProtocolError("this engine holds no verified weights: sync it before generating")
        return self._version

    def _result(self, playing: _Playing, reason: FinishReason, start: int) -> Generation:
        output = np.asarray(playing.output, np.int32)
        seen = np.concatenate((playing.input_ids, output))[:-1]  # what has been an input
        if playing.output:
            self._sessions[playing.session_id] = seen
        else:
            seen = seen[:0]
        spans: list[VersionSpan] = []
        for i, version in enumerate(playing.versions):
            if spans and spans[-1].version == version:
                spans[-1] = VersionSpan(version=version, start=spans[-1].start, end=i + 1)
            else:
                spans.append(VersionSpan(version=version, start=i, end=i + 1))
        return Generation(
            output_ids=output,
            log_probs=np.zeros(len(output), np.float32),
            versions=tuple(spans),
            finish_reason=reason,
            routed_experts=self._experts(seen[start:]) if self._shape.n_experts else None,
            cached_tokens=playing.cached,
            queue_s=playing.queue_s,
        )

    def _experts(self, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.unsignedinteger]:
        layers = np.asarray(self._shape.moe_layers)[None, :, None]
        ids = (tokens[:, None, None] + layers + np.arange(self._shape.top_k)[None, None, :]) % self._shape.n_experts
        return np.asarray(ids, np.uint8 if self._shape.n_experts <= 256 else np.uint16)

    async def score(self, tokens: npt.NDArray[np.int32], *, deadline_s: float) -> npt.NDArray[np.float32]:
        """Zeros, as for what it samples."""
        self._held_version()
        return np.zeros((tokens.shape[0], tokens.shape[1] - 1), np.float32)

    async def end_session(self, session_id: str) -> None:
        for playing in self._requests.values():
            if playing.session_id == session_id:
                playing.aborted = True
        self._asked.set()
        self._sessions.pop(session_id, None)

    async def abort(self, request_id: str = "") -> None:
        for name, playing in self._requests.items():
            if request_id in ("", name):
                playing.aborted = True
        self._asked.set()

    async def sync(
        self, version: WeightVersion, source: str, plan_digest: bytes, *, deadline_s: float
    ) -> WeightsSynced:
        deadline = Deadline(deadline_s, f"engine {self.name}: sync of weights {version} from {source}")
        held: dict[str, bytearray] = {}

        def keep(pieces: Sequence[WeightPiece], data: memoryview) -> None:
            held.update((piece.name, bytearray(view)) for piece, view in unpack(pieces, data))

        async with self._sync_lock:
            endpoint = await self._spec.connect(source, deadline.remaining_s)
            try:
                manifest = await fetch(endpoint.call, version, plan_digest, keep, deadline=deadline)
            finally:
                await endpoint.close("fetched")
            paused = Deadline(deadline.remaining_s, "pause")
            self._running.clear()
            try:
                await asyncio.sleep(self._sync_delay_s)
                if self.faults.corrupt_next_sync:
                    self.faults.corrupt_next_sync = False
                    held[manifest.pieces[0].name][0] ^= 1
                digests = {name: digest_bytes(data) for name, data in held.items()}
                wrong = [p.name for p in manifest.pieces if digests[p.name] != p.digest]
                self._version = None if wrong else version
                if wrong:
                    raise IntegrityError(
                        f"engine {self.name} serves nothing until a sync succeeds: weight '{wrong[0]}' of {version} "
                        f"has another digest after loading"
                    )
            finally:
                self._running.set()
                self._asked.set()
            return WeightsSynced(
                engine=self.name,
                version=version,
                digests=digests,
                n_bytes=sum(p.n_bytes for p in manifest.pieces),
                paused_s=paused.elapsed_s,
                total_s=deadline.elapsed_s,
            )

    async def close(self) -> None:
        self._closed = True
        await self.abort()


class _Playing:
    """One request under way."""

    def __init__(
        self, session_id: str, input_ids: npt.NDArray[np.int32], sampling: SamplingParams, deadline: Deadline
    ) -> None:
        self.session_id = session_id
        self.input_ids = input_ids
        self.sampling = sampling
        self.deadline = deadline
        self.output: list[int] = []
        self.versions: list[WeightVersion] = []
        self.cached = 0
        self.queue_s = 0.0
        self.aborted = False


def _load_script(target: str) -> Script:
    module, _, attribute = target.partition(":")
    try:
        script: Script = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"scripted engine: script {target!r}: {error}; expected module:function") from error
    return script


def _read_shape(spec: EngineSpec) -> ModelShape:
    """The model's shape from its config.json, without transformers. Names as in Llama's, Qwen3's and Mixtral's."""
    file = spec.model_path / "config.json"
    try:
        config = json.loads(file.read_text())
        n_experts = int(config.get("num_experts") or config.get("num_local_experts") or 0)
        skipped, every = config.get("mlp_only_layers") or [], config.get("decoder_sparse_step") or 1
        layers = [i for i in range(config["num_hidden_layers"]) if i not in skipped and (i + 1) % every == 0]
        return ModelShape(
            vocab_size=config["vocab_size"],
            max_position_embeddings=config["max_position_embeddings"],
            moe_layers=tuple(layers) if n_experts else (),
            n_experts=n_experts,
            top_k=int(config["num_experts_per_tok"]) if n_experts else 0,
        )
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"engine model {file}: {error!r}: expected a Hugging Face config.json") from error
