"""An engine behind a transport: answers the messages of core.messages' engine section for any RolloutEngine.

An engine outlives terms. Whoever connects under a newer term takes it over: from then on peers of older terms are
refused, and `newest_term` is what the engine itself joins weight sources with.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

import numpy as np

from miles_hpc.core.errors import FencedError, PeerLost, ProtocolError
from miles_hpc.core.messages import (
    AbortGeneration,
    EndSession,
    EngineInfo,
    EngineSync,
    Generate,
    Generated,
    Message,
    Scores,
    ScoreTokens,
    Shutdown,
)
from miles_hpc.core.transport import Buffer, Endpoint, Listener, Transport
from miles_hpc.rollout.engine import RolloutEngine

__all__ = ["EngineServer"]

#: Scoring has no deadline of its own in its message; the caller's call expires first.
_SCORE_DEADLINE_S = 600.0


class EngineServer:
    """Serves one engine. `stopped` is set by a Shutdown message."""

    def __init__(self, engine: RolloutEngine, *, term: int) -> None:
        self.engine = engine
        self.newest_term = term
        self.stopped = asyncio.Event()
        self.heard = False  # an agent sent something since this was last set to False
        self._under_way: dict[Endpoint, set[str]] = {}

    async def listen(self, transport: Transport, *, bind: str = "127.0.0.1") -> Listener:
        """Accept host agents of this and any newer term."""
        return await transport.listen(
            self.handle, bind=bind, on_connect=self._admit, on_close=self._left, any_term=True
        )

    async def handle(
        self, endpoint: Endpoint, message: Message, payload: memoryview
    ) -> Message | tuple[Message, Sequence[Buffer]] | None:
        """A Transport handler. Raises FencedError for a peer of an older term, ProtocolError for other messages."""
        self._fence(endpoint)
        self.heard = True
        if isinstance(message, Generate):
            return await self._generate(endpoint, message, payload)
        if isinstance(message, EngineInfo):
            return await self.engine.describe()
        if isinstance(message, EndSession):
            await self.engine.end_session(message.session_id)
            return None
        if isinstance(message, AbortGeneration):
            await self.engine.abort(message.request_id)
            return None
        if isinstance(message, EngineSync):
            return await self.engine.sync(
                message.version, message.source, message.plan_digest, deadline_s=message.deadline_s
            )
        if isinstance(message, ScoreTokens):
            return await self._score(message, payload)
        if isinstance(message, Shutdown):
            self.stopped.set()
            return None
        raise ProtocolError(f"an engine doesn't answer {type(message).__name__}")

    async def _generate(
        self, endpoint: Endpoint, message: Generate, payload: memoryview
    ) -> tuple[Message, Sequence[Buffer]]:
        input_ids = _int32(payload, message.n_input, "Generate")
        names = self._under_way.setdefault(endpoint, set())
        names.add(message.request_id)
        try:
            result = await self.engine.generate(
                message.request_id,
                message.session_id,
                input_ids,
                message.sampling,
                routed_experts_start=message.routed_experts_start,
                deadline_s=message.deadline_s,
            )
        finally:
            names.discard(message.request_id)
        reply = Generated(
            request_id=message.request_id,
            n_output=len(result.output_ids),
            finish_reason=result.finish_reason,
            versions=result.versions,
            n_rows=0 if result.routed_experts is None else len(result.routed_experts),
            cached_tokens=result.cached_tokens,
            queue_s=result.queue_s,
        )
        parts = [result.output_ids.astype("<i4").tobytes(), result.log_probs.astype("<f4").tobytes()]
        if result.routed_experts is not None:
            rows = result.routed_experts
            parts.append(rows.astype(rows.dtype.newbyteorder("<"), copy=False).tobytes())
        return reply, parts

    async def _score(self, message: ScoreTokens, payload: memoryview) -> tuple[Message, Sequence[Buffer]]:
        """Scores carry the version that gave them: asked before and after, and once more when a sync came between."""
        tokens = _int32(payload, message.n * message.length, "ScoreTokens").reshape(message.n, message.length)
        while True:
            before = (await self.engine.describe()).version
            scores = await self.engine.score(tokens, deadline_s=_SCORE_DEADLINE_S)
            if (await self.engine.describe()).version == before:
                break
        reply = Scores(version=before, n=message.n, length=message.length)
        return reply, [scores.astype("<f4").tobytes()]

    # ------------------------------------------------------------------------------------------ peers

    async def _admit(self, endpoint: Endpoint) -> None:
        self._fence(endpoint)
        self.newest_term = max(self.newest_term, endpoint.peer.term)

    async def _left(self, endpoint: Endpoint) -> None:
        """Nobody reads the answers any more: free the slots."""
        for request_id in self._under_way.pop(endpoint, set()):
            with contextlib.suppress(PeerLost):  # an engine that is gone frees everything anyway
                await self.engine.abort(request_id)

    def _fence(self, endpoint: Endpoint) -> None:
        if endpoint.peer.term < self.newest_term:
            raise FencedError(
                f"engine {self.engine.name} belongs to term {self.newest_term}; {endpoint.peer.name} is of term "
                f"{endpoint.peer.term} and must end itself"
            )


def _int32(payload: memoryview, n: int, what: str) -> np.ndarray:
    """The payload's own copy as int32 [n]; the transport may reuse its memory."""
    if payload.nbytes != 4 * n:
        raise ProtocolError(f"{what} of {n} tokens came with {payload.nbytes} bytes: expected {4 * n}")
    return np.frombuffer(payload, "<i4").astype(np.int32)
