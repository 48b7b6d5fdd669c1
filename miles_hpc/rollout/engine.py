"""The engine contract: one inference instance over one or more devices, as the rollout host uses it.

| promise | |
|---|---|
| tokens | takes and returns token ids; tokenisation isn't an engine's business |
| log-probs | of the sampled tokens, under the distribution after temperature, in float32 |
| versions | every sampled token says under which weight version it was sampled |
| sync | a version is served only after its digests, computed from the live parameters, equal the source's |
| update under way | `sync` pauses between two tokens; requests go on with their old KV cache, and their spans say so |
| sessions | a session's earlier tokens may be reused from its KV cache; `end_session` frees them |
| routed experts | row i is the routing of token i as an input, never recomputed under newer weights |
| abort | an aborted request answers with what it has and FinishReason.ABORT |

All methods are coroutines of one event loop; none blocks it. Raises what `Transport` calls raise.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from miles_hpc.core.errors import UserError
from miles_hpc.core.messages import EngineDescription, WeightsSynced
from miles_hpc.core.transport import Endpoint
from miles_hpc.core.types import FinishReason, SamplingParams, VersionSpan, WeightVersion

__all__ = ["MEMORY_TAGS", "Connect", "EngineSpec", "Generation", "RolloutEngine", "check_ids", "check_request"]

#: What an engine's device memory holds.
MEMORY_TAGS = ("kv_cache", "weights")

#: Opens an endpoint to an address within so many seconds: `Transport.connect` with its handler left out.
Connect: TypeAlias = Callable[[str, float], Awaitable[Endpoint]]


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """What an engine is built from. Every class registered as kind `engine` is called with one of these, alone.

    `model_path` is a folder with config.json; weights in it aren't read, since an engine serves only what it was
    synced. `max_length` bounds input and output of one request together; None means what the model allows.
    """

    name: str
    model_path: Path
    connect: Connect
    slots: int = 64
    max_length: int | None = None
    dtype: str = "float32"  # float32 | bfloat16
    device: str = "cpu"  # cpu | cuda:0
    threads: int = 1  # CPU threads of tensor operations
    experts_implementation: str = "grouped_mm"
    options: dict[str, Any] = field(default_factory=dict)  # of one implementation only


@dataclass(frozen=True)
class Generation:
    """What one request returned. N is the number of output tokens."""

    output_ids: npt.NDArray[np.int32]  # [N]
    log_probs: npt.NDArray[np.float32]  # [N]
    versions: tuple[VersionSpan, ...]  # cover [0, N)
    finish_reason: FinishReason
    routed_experts: npt.NDArray[np.unsignedinteger] | None  # [rows, moe_layers, top_k]; None for dense models
    cached_tokens: int
    queue_s: float = 0.0  # waited for a slot


class RolloutEngine(ABC):
    """One engine. See the module's table for what it promises."""

    name: str

    async def start(self) -> None:  # noqa: B027 - most have nothing to start
        """What takes long before anything can be asked; awaited once. Raises UserError, DeadlineExpired."""

    @abstractmethod
    async def describe(self) -> EngineDescription:
        """Shape, slots and current version."""

    @abstractmethod
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
        """Continue `input_ids` [n_input]. Routed-expert rows start at `routed_experts_start`."""

    @abstractmethod
    async def score(self, tokens: npt.NDArray[np.int32], *, deadline_s: float) -> npt.NDArray[np.float32]:
        """Log-probs of tokens[:, 1:] given what precedes them: [n, length] -> [n, length - 1]. Temperature 1."""

    @abstractmethod
    async def end_session(self, session_id: str) -> None:
        """Free what is kept for this session; unknown sessions are fine."""

    @abstractmethod
    async def abort(self, request_id: str = "") -> None:
        """Abort one request, or all when empty."""

    @abstractmethod
    async def sync(
        self, version: WeightVersion, source: str, plan_digest: bytes, *, deadline_s: float
    ) -> WeightsSynced:
        """Fetch `version` from the weight source, load it, verify the digests of the live parameters.

        Raises IntegrityError (as RemoteError's kind) when they differ; the engine then holds no version and serves
        nothing until a sync succeeds.
        """

    async def release_memory(self, tags: Collection[str], *, deadline_s: float) -> None:
        """Give device memory back, of `MEMORY_TAGS`. What is released already stays so.

        kv_cache: requests under way stop, keep what was sampled, and go on after it is resumed; prefixes are forgotten.
        weights: the engine holds no version until they are resumed and synced. Raises UserError where it can't.
        """
        raise UserError(f"engine {self.name}: this kind of engine can't give memory back")

    async def resume_memory(self, tags: Collection[str], *, deadline_s: float) -> None:
        """Take memory again that was released. Raises as `release_memory` does."""
        raise UserError(f"engine {self.name}: this kind of engine can't give memory back")

    @abstractmethod
    async def close(self) -> None:
        """Let go of the engine; its process is ended by its agent."""


def check_request(
    input_ids: npt.NDArray[np.int32],
    sampling: SamplingParams,
    routed_experts_start: int,
    *,
    max_length: int,
    vocab_size: int,
) -> None:
    """Raises UserError for a request that no engine of this size can serve."""
    n = len(input_ids)
    if not 0 < n < max_length:
        raise UserError(
            f"request of {n} input tokens: this engine takes 1 to {max_length - 1} (max_length {max_length})"
        )
    if sampling.max_new_tokens < 1:
        raise UserError(f"max_new_tokens={sampling.max_new_tokens}: expected at least 1")
    if sampling.temperature < 0.0 or not 0.0 < sampling.top_p <= 1.0:
        raise UserError(
            f"temperature={sampling.temperature}, top_p={sampling.top_p}: expected temperature >= 0 and 0 < top_p <= 1"
        )
    if not 0 <= routed_experts_start <= n:
        raise UserError(f"routed_experts_start={routed_experts_start}: expected 0 to {n}, the number of input tokens")
    check_ids(input_ids, vocab_size)


def check_ids(ids: npt.NDArray[np.int32], vocab_size: int) -> None:
    """Raises UserError for a token outside the vocabulary: some engines would not survive it."""
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        raise UserError(f"token id {low if low < 0 else high}: this model's vocabulary is 0 to {vocab_size - 1}")
