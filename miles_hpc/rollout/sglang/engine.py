"""SGLang behind the engine contract.

    launcher's process (no model)                       SGLang's environment
    SglangEngine ── child, keys in a 0600 file ───────▶ server ── scheduler of each rank
      generating.py ── POST /generate, input_ids ─────▶
      updating.py   ── pause ─▶ load, check ─▶ label ─▶
      watch         ── its exit, /health ─────────────▶

| waits | for | until |
|---|---|---|
| start | the server to compute | `start_deadline_s` |
| score | its answers | `deadline_s` |
| watch | an answer of /health, unless requests or an update show that it lives | `_HEALTH_S`, three times |

A version is a label "term.step" at this edge only. It is set after every rank has found its live parameters equal to
what was fetched; until then the label is "none", and tokens sampled under that are refused.
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import json
import time
from collections.abc import Collection, Coroutine, Iterable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from miles_hpc.core.deadline import Deadline
from miles_hpc.core.errors import DeadlineExpired, PeerLost, UserError
from miles_hpc.core.messages import EngineDescription, WeightsSynced
from miles_hpc.core.types import SamplingParams, WeightVersion
from miles_hpc.rollout.engine import EngineSpec, Generation, RolloutEngine, check_ids
from miles_hpc.rollout.session.tokenizer import shape_of
from miles_hpc.rollout.sglang.api import Layers, parse_scores, score_request
from miles_hpc.rollout.sglang.capabilities import probe
from miles_hpc.rollout.sglang.generating import Generating
from miles_hpc.rollout.sglang.memory import Memory
from miles_hpc.rollout.sglang.server import SglangServer
from miles_hpc.rollout.sglang.settings import SglangOptions
from miles_hpc.rollout.sglang.state import EngineState
from miles_hpc.rollout.sglang.updating import Updating

__all__ = ["SglangEngine"]

T = TypeVar("T")

_EXIT_POLL_S = 0.5
_POLL_S = 0.25
_WATCH_EVERY_S = 5.0
_HEALTH_S = 20.0
_HEALTH_FAILURES = 3


class SglangEngine(RolloutEngine):
    """See the module. `options` of the spec: SglangOptions."""

    def __init__(self, spec: EngineSpec, server: SglangServer | None = None) -> None:
        """Raises UserError for options or a model that can't be served. `server`: one that serves already and stays."""
        self.name = spec.name
        options, shape = SglangOptions.of(spec.options), shape_of(spec.model_path)
        config = json.loads((spec.model_path / "config.json").read_text())
        config = config.get("text_config", config)
        wanted = shape.n_experts > 0 and options.routed_experts
        self._layers = Layers(int(config["num_hidden_layers"]), shape) if wanted else None
        self._owns_server = server is None
        self.state = EngineState(spec, options, shape, server or SglangServer(spec, options, shape))
        self._generating = Generating(self.state, self._layers, _end_tokens(spec.model_path))
        self.updating = Updating(
            self.state,
            self._generating,
            model_type=str(config.get("model_type", "")),
            tied=bool(config.get("tie_word_embeddings", False)),
        )
        self._memory = Memory(self.state, self.updating)
        self._scores = 0
        self._watcher: asyncio.Task[None] | None = None

    # ------------------------------------------------------------------------------------------ the server

    async def start(self) -> None:
        """Start the server and find out what it can. Raises UserError when it can't serve this, DeadlineExpired."""
        state = self.state
        deadline = Deadline(state.options.start_deadline_s, f"engine {self.name}: finding out what SGLang can")
        if self._owns_server:
            await state.server.start()
        client = state.server.connect()
        state.client = client  # `close` closes it, whatever comes
        state.connected(client, await probe(client, self._layers, state.max_length, deadline))
        await asyncio.to_thread(importlib.import_module, "torch")  # takes seconds, and the first pause shouldn't
        self._watcher = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        """Notice a server that ended or hangs; it is killed then, and `describe` tells the agent."""
        state = self.state
        failures, looked = 0, time.monotonic()
        while state.server.exit_code is None:
            await asyncio.sleep(_EXIT_POLL_S)
            if not state.may_start.is_set():  # an update has a deadline of its own
                failures, looked = 0, time.monotonic()
            elif time.monotonic() - max(looked, state.heard) >= _WATCH_EVERY_S:
                try:
                    failures = 0 if await state.client.healthy(_HEALTH_S) else failures + 1
                except (PeerLost, DeadlineExpired):
                    failures += 1
                looked = time.monotonic()
                if failures >= _HEALTH_FAILURES and state.may_start.is_set():
                    state.lost = f"no answer to {failures} health checks of {_HEALTH_S:.0f} s"
                    state.server.kill()
        if not state.lost:
            state.lost = f"SGLang ended with {state.server.exit_code}: {state.server.last_words()}"

    async def describe(self) -> EngineDescription:
        """See RolloutEngine. Raises PeerLost when the server has ended or hangs."""
        state = self.state
        state.check_alive()
        return EngineDescription(
            shape=state.shape,
            slots=state.spec.slots,
            version=state.version,
            device=state.spec.device,
            dtype=state.spec.dtype,
        )

    async def close(self) -> None:
        self.updating.close()  # first: who is asked to end may not get far
        if self._watcher is not None:
            self._watcher.cancel()
        if self._owns_server:
            self.state.server.kill()  # it has nothing to save
        self._generating.close()
        if hasattr(self.state, "client"):
            await self.state.client.close()
        if self._owns_server:
            await self.state.server.end()

    # ------------------------------------------------------------------------------------------ generation

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
        """See RolloutEngine. SGLang also stops at the model's own end tokens. Raises DeadlineExpired when the server
        doesn't answer an abort either."""
        return await self._generating.generate(
            request_id,
            session_id,
            input_ids,
            sampling,
            routed_experts_start=routed_experts_start,
            deadline_s=deadline_s,
        )

    async def abort(self, request_id: str = "") -> None:
        self._generating.abort(request_id)

    async def end_session(self, session_id: str) -> None:
        """Its prefix may be another session's as well: it goes when its room is needed."""
        self.state.born.pop(session_id, None)

    async def score(self, tokens: npt.NDArray[np.int32], *, deadline_s: float) -> npt.NDArray[np.float32]:
        state = self.state
        if tokens.ndim != 2 or tokens.shape[1] < 2:
            raise UserError(f"score: tokens of shape {tokens.shape}: expected [n, length] with length at least 2")
        check_ids(tokens, state.shape.vocab_size)
        state.check_serving()
        deadline = Deadline(deadline_s, f"engine {self.name}: score")
        self._scores += 1
        room = asyncio.Semaphore(state.spec.slots)

        async def one(row: int) -> npt.NDArray[np.float32]:
            async with room:
                for number in itertools.count():  # again where an update ended it
                    deadline.check()
                    await asyncio.wait_for(state.may_start.wait(), deadline.remaining_s)
                    state.check_serving()
                    body = score_request(f"score.{self._scores}.{row}.{number}", tokens[row])
                    data = await state.client.generate(body, deadline)
                    scores = parse_scores(data, tokens[row], state.shape.vocab_size)
                    if scores is not None:
                        return scores
                    await asyncio.sleep(_POLL_S)
            raise AssertionError("unreachable")

        try:
            return np.stack(await _all(one(i) for i in range(len(tokens))))
        except TimeoutError:
            raise deadline.error() from None

    # ------------------------------------------------------------------------------------------ weights

    async def sync(
        self, version: WeightVersion, source: str, plan_digest: bytes, *, deadline_s: float
    ) -> WeightsSynced:
        """See RolloutEngine and updating.py."""
        return await self.updating.sync(version, source, plan_digest, deadline_s=deadline_s)

    async def release_memory(self, tags: Collection[str], *, deadline_s: float) -> None:
        """See RolloutEngine and memory.py."""
        await self._memory.release(tags, deadline_s=deadline_s)

    async def resume_memory(self, tags: Collection[str], *, deadline_s: float) -> None:
        """See RolloutEngine and memory.py."""
        await self._memory.resume(tags, deadline_s=deadline_s)


async def _all(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Their results; the first failure cancels the others."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


def _end_tokens(folder: Path) -> tuple[int, ...]:
    """The model's own end tokens, from all the places where SGLang looks."""
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        path = folder / name
        table = json.loads(path.read_text()) if path.is_file() else {}
        for value in (table.get("eos_token_id"), table.get("text_config", {}).get("eos_token_id")):
            found |= set(value if isinstance(value, list) else [] if value is None else [value])
    return tuple(sorted(found))
