"""An engine in another process, as its host sees it: RolloutEngine over an endpoint."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from miles_hpc.core.errors import ProtocolError
from miles_hpc.core.messages import (
    AbortGeneration,
    EndSession,
    EngineDescription,
    EngineInfo,
    EngineSync,
    Generate,
    Generated,
    Scores,
    ScoreTokens,
    WeightsSynced,
)
from miles_hpc.core.transport import Endpoint
from miles_hpc.core.types import ModelShape, SamplingParams, WeightVersion
from miles_hpc.rollout.engine import Generation, RolloutEngine

__all__ = ["RemoteEngine"]

#: The engine answers at a request's deadline with what it has; the call may take this much longer.
_GRACE_S = 10.0
_SHORT_S = 30.0


class RemoteEngine(RolloutEngine):
    """Owns its endpoint. Errors of the engine arrive as RemoteError whose kind is the class's name."""

    def __init__(self, endpoint: Endpoint, *, name: str = "") -> None:
        self.endpoint = endpoint
        self.name = name or endpoint.peer.name
        self._shape: ModelShape | None = None

    async def describe(self) -> EngineDescription:
        reply = await self.endpoint.call(EngineInfo(), deadline_s=_SHORT_S)
        if not isinstance(reply.message, EngineDescription):
            raise ProtocolError(f"{self.name}: EngineInfo was answered with {type(reply.message).__name__}")
        self._shape = reply.message.shape
        return reply.message

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
        shape = self._shape or (await self.describe()).shape
        message = Generate(
            request_id=request_id,
            session_id=session_id,
            n_input=len(input_ids),
            sampling=sampling,
            routed_experts_start=routed_experts_start,
            deadline_s=deadline_s,
        )
        reply = await self.endpoint.call(
            message, payload=[np.ascontiguousarray(input_ids, "<i4").tobytes()], deadline_s=deadline_s + _GRACE_S
        )
        answer = reply.message
        if not isinstance(answer, Generated):
            raise ProtocolError(f"{self.name}: Generate was answered with {type(answer).__name__}")
        n = answer.n_output
        row_type = np.dtype("u1" if shape.n_experts <= 256 else "<u2")
        row_bytes = len(shape.moe_layers) * shape.top_k * row_type.itemsize
        if reply.payload.nbytes != 8 * n + answer.n_rows * row_bytes:
            raise ProtocolError(
                f"{self.name}: {n} tokens and {answer.n_rows} rows came in {reply.payload.nbytes} bytes: "
                f"expected {8 * n + answer.n_rows * row_bytes}"
            )
        data = bytes(reply.payload)
        rows: npt.NDArray[np.unsignedinteger] | None = None
        if shape.n_experts:
            rows = np.frombuffer(data, row_type, offset=8 * n).reshape(-1, len(shape.moe_layers), shape.top_k)
        return Generation(
            output_ids=np.frombuffer(data, "<i4", n),
            log_probs=np.frombuffer(data, "<f4", n, 4 * n),
            versions=answer.versions,
            finish_reason=answer.finish_reason,
            routed_experts=rows,
            cached_tokens=answer.cached_tokens,
            queue_s=answer.queue_s,
        )

    async def score(self, tokens: npt.NDArray[np.int32], *, deadline_s: float) -> npt.NDArray[np.float32]:
        n, length = tokens.shape
        reply = await self.endpoint.call(
            ScoreTokens(n=n, length=length),
            payload=[np.ascontiguousarray(tokens, "<i4").tobytes()],
            deadline_s=deadline_s,
        )
        if not isinstance(reply.message, Scores) or reply.payload.nbytes != 4 * n * (length - 1):
            raise ProtocolError(f"{self.name}: ScoreTokens [{n}, {length}] was answered with {reply.message}")
        return np.frombuffer(bytes(reply.payload), "<f4").reshape(n, length - 1)

    async def end_session(self, session_id: str) -> None:
        await self.endpoint.call(EndSession(session_id=session_id), deadline_s=_SHORT_S)

    async def abort(self, request_id: str = "") -> None:
        await self.endpoint.call(AbortGeneration(request_id=request_id), deadline_s=_SHORT_S)

    async def sync(
        self, version: WeightVersion, source: str, plan_digest: bytes, *, deadline_s: float
    ) -> WeightsSynced:
        reply = await self.endpoint.call(
            EngineSync(version=version, source=source, plan_digest=plan_digest, deadline_s=deadline_s),
            deadline_s=deadline_s + _GRACE_S,
        )
        if not isinstance(reply.message, WeightsSynced):
            raise ProtocolError(f"{self.name}: EngineSync was answered with {type(reply.message).__name__}")
        return reply.message

    async def close(self) -> None:
        await self.endpoint.close("host lets go of the engine")
