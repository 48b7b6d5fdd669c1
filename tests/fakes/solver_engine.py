"""An engine that solves the short shell task by rule, for tests of the rollout host without a model."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from miles_hpc.core.errors import PeerLost
from miles_hpc.core.messages import EngineDescription, WeightsSynced
from miles_hpc.core.types import FinishReason, ModelShape, SamplingParams, VersionSpan, WeightVersion
from miles_hpc.rollout.engine import Generation, RolloutEngine
from miles_hpc.rollout.session.tokenizer import ChatTokenizer

__all__ = ["SolverEngine", "solve"]

_OF_FILE = {"len": "wc -l <{}", "top": "head -n1 {}", "end": "tail -n1 {}", "max": "sort {}|tail -n1"}


def solve(text: str) -> str:
    """The next right assistant text of a rendered conversation."""
    kind, argument = re.match(r"<bos><ask>(\w+) (\w+)<", text).groups()  # type: ignore[union-attr]
    outputs = re.findall(r"<obs>(.*?)<act>", text, re.DOTALL)
    find = kind == "who" or kind.startswith("w")
    if find and not outputs:
        return f"grep -l {argument} *"
    if kind == "who" or len(outputs) == 1 + (len(kind) == 4):
        return f"ans {outputs[-1]}"
    return _OF_FILE[kind[-3:]].format(outputs[0] if find else argument)


class SolverEngine(RolloutEngine):
    """Plays `say(rendered text)`; MoE rows follow from the tokens. Faults: `die_after`, `hang`, `delay_s`."""

    def __init__(
        self,
        name: str,
        tokenizer: ChatTokenizer,
        *,
        slots: int = 4,
        shape: ModelShape | None = None,
        version: WeightVersion | None = WeightVersion(1, 0),  # noqa: B008
        say: Callable[[str], str] = solve,
    ) -> None:
        self.name = name
        self.tokenizer = tokenizer
        self.slots = slots
        self.shape = shape or ModelShape(vocab_size=64, max_position_embeddings=256)
        self.version = version
        self.say = say
        self.calls = 0
        self.running = 0
        self.most_running = 0
        self.die_after: int | None = None
        self.hang = False
        self.delay_s = 0.0
        self.ended: list[str] = []
        self.aborted = asyncio.Event()
        self.seeds: dict[str, int | None] = {}

    async def describe(self) -> EngineDescription:
        return EngineDescription(
            shape=self.shape, slots=self.slots, version=self.version, device="cpu", dtype="float32"
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
        self.calls += 1
        self.seeds[request_id] = sampling.seed
        if self.die_after is not None and self.calls > self.die_after:
            raise PeerLost(f"engine {self.name} died")
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(self.delay_s)
            ids: list[int] = []
            reason = FinishReason.ABORT
            if self.hang:
                await self.aborted.wait()
            else:
                ids = [*self.tokenizer.encode(self.say(self.tokenizer.decode(input_ids))), sampling.stop_token_ids[0]]
                reason = FinishReason.STOP if len(ids) <= sampling.max_new_tokens else FinishReason.LENGTH
                ids = ids[: sampling.max_new_tokens]
        finally:
            self.running -= 1
        output = np.asarray(ids, dtype=np.int32)
        spans = (VersionSpan(version=self.version or WeightVersion(0, 0), start=0, end=len(ids)),) if ids else ()
        seen = np.concatenate((input_ids, output))[routed_experts_start:-1]
        return Generation(
            output_ids=output,
            log_probs=np.full(len(ids), -0.5, np.float32),
            versions=spans,
            finish_reason=reason,
            routed_experts=self.rows(seen) if self.shape.n_experts and ids else None,
            cached_tokens=0,
        )

    def rows(self, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.uint8]:
        """[n, moe_layers, top_k], a function of the token alone."""
        layers = np.asarray(self.shape.moe_layers)[None, :, None]
        return ((tokens[:, None, None] + layers + np.arange(self.shape.top_k)) % self.shape.n_experts).astype(np.uint8)

    async def score(self, tokens: npt.NDArray[np.int32], *, deadline_s: float) -> npt.NDArray[np.float32]:
        return -tokens[:, 1:].astype(np.float32)

    async def end_session(self, session_id: str) -> None:
        self.ended.append(session_id)

    async def abort(self, request_id: str = "") -> None:
        self.aborted.set()

    async def sync(
        self, version: WeightVersion, source: str, plan_digest: bytes, *, deadline_s: float
    ) -> WeightsSynced:
        if source == "nowhere":
            raise PeerLost("weight source is gone")
        self.version = version
        return WeightsSynced(engine=self.name, version=version, digests={}, n_bytes=0, paused_s=0.0, total_s=0.0)

    async def close(self) -> None: ...
