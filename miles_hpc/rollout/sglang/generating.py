"""Requests to the server, each one or more of its own: an update ends what is under way, and it is asked on.

| who waits | for what | until |
|---|---|---|
| generate | its answer | the request's deadline; then it is aborted and answers with what it has |
| an aborted request | the answer to its abort | `_ABORT_S`, not counting updates; then DeadlineExpired |
| a part | an update's end, memory that was given back | the request's deadline |
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import time

import numpy as np
import numpy.typing as npt

from miles_hpc.core.deadline import Deadline
from miles_hpc.core.errors import MilesError, PeerLost, ProtocolError
from miles_hpc.core.types import FinishReason, SamplingParams
from miles_hpc.rollout.engine import Generation, check_request
from miles_hpc.rollout.sglang.api import Layers, generate_request, parse_generation
from miles_hpc.rollout.sglang.client import EngineRefused
from miles_hpc.rollout.sglang.parts import Parts, Request
from miles_hpc.rollout.sglang.state import EngineState

__all__ = ["Generating"]

_POLL_S = 0.25
_ABORT_AGAIN_S = 0.5  # an abort that came before its request had arrived there did nothing
_ABORT_S = 20.0
_LAST_RESORT_S = 3600.0
_MOST_FRUITLESS = 20  # parts without a token, one after the other


class Generating:
    """The requests under way of one engine."""

    def __init__(self, state: EngineState, layers: Layers | None, end_tokens: tuple[int, ...]) -> None:
        """`layers`: how routed experts come, None for no rows; `end_tokens`: where the server stops by itself."""
        self._state = state
        self._layers = layers
        self._ends = end_tokens
        self._requests: dict[str, Request] = {}
        self._endings: set[asyncio.Task[None]] = set()

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
        """See RolloutEngine. Raises DeadlineExpired when the server doesn't answer an abort either."""
        state = self._state
        check_request(
            input_ids,
            sampling,
            routed_experts_start,
            max_length=state.max_length,
            vocab_size=state.shape.vocab_size,
        )
        state.check_alive()
        if state.may_start.is_set():
            state.check_serving()
        if any(r.session_id == session_id for r in self._requests.values()):
            raise ProtocolError(f"session {session_id}: a request is under way already")
        request = Request(request_id, session_id)
        key = secrets.token_hex(8)
        self._requests[key] = request
        task = asyncio.ensure_future(
            self._in_parts(request, key, input_ids, sampling, routed_experts_start, deadline_s)
        )
        request.task = task
        try:
            done, _ = await asyncio.wait({task}, timeout=deadline_s)
            if not done:
                await self._end(request, task)
            return task.result()
        finally:
            if not task.done():  # the caller left
                self._start_ending(request)
            self._requests.pop(key, None)

    def abort(self, request_id: str = "") -> None:
        """End these requests, all without an id, in the background; who waits for one hears of it."""
        self._state.check_alive()
        for request in list(self._requests.values()):
            if request_id in ("", request.request_id):
                self._start_ending(request)

    def fail(self, failure: MilesError) -> None:
        """The weights under all that is under way are lost."""
        for request in self._requests.values():
            request.failure = failure
            request.aborted = True

    def close(self) -> None:
        """Nobody is told any more."""
        for task in self._endings:
            task.cancel()

    # ------------------------------------------------------------------------------------------- parts

    async def _in_parts(
        self,
        request: Request,
        key: str,
        input_ids: npt.NDArray[np.int32],
        sampling: SamplingParams,
        start: int,
        deadline_s: float,
    ) -> Generation:
        """Ask, and ask on where an update ended what was under way."""
        state = self._state
        # `generate` looks after the request's own deadline; an update may hold the answer back for longer.
        deadline = Deadline(deadline_s + _LAST_RESORT_S, f"engine {state.name}: {request.request_id}")
        limit = min(sampling.max_new_tokens, state.max_length - len(input_ids))
        parts = Parts()
        rows = None if self._layers is None else self._layers.decode("", 0)
        fruitless = 0
        for number in itertools.count():
            await self._may_go_on(request)
            if request.aborted:
                return parts.whole(FinishReason.ABORT, no_rows=rows)
            version = state.check_serving()
            ids = np.concatenate((input_ids, *parts.output_ids)) if number else input_ids
            request.rid = f"{key}.{number}"
            body = generate_request(
                request.rid,
                ids,
                sampling,
                max_new_tokens=limit - parts.n_output,
                routed_experts_start=None if self._layers is None else start + parts.n_rows,
                namespace=state.namespace(request.session_id, version),
            )
            data = await self._ask(request, body, deadline)
            part = await asyncio.to_thread(  # megabytes of JSON and base64, where there are routed experts
                parse_generation,
                data,
                n_input=len(ids),
                max_new_tokens=limit - parts.n_output,
                stop_token_ids=(*sampling.stop_token_ids, *self._ends),
                layers=self._layers,
                routed_experts_start=start + parts.n_rows,
                spans=state.can.spans,
            )
            if request.failure is not None:
                raise request.failure
            parts.add(part)
            interrupted = part.finish_reason is FinishReason.ABORT and not request.aborted
            if interrupted and parts.n_output < limit:
                fruitless = 0 if len(part.output_ids) else fruitless + 1
                if fruitless > _MOST_FRUITLESS:
                    raise EngineRefused(
                        f"{state.name}: {request.request_id} was aborted {fruitless} times by the server"
                    )
                await asyncio.sleep(_POLL_S if fruitless > 1 else 0)
                continue
            reason = FinishReason.LENGTH if interrupted else part.finish_reason
            return parts.whole(reason, no_rows=rows)
        raise AssertionError("unreachable")

    async def _may_go_on(self, request: Request) -> None:
        """Wait while nothing may start. Who is aborted meanwhile isn't at the server, and needn't wait on."""
        while not self._state.may_start.is_set() and not request.aborted:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._state.may_start.wait(), _POLL_S)
        if request.failure is not None:
            raise request.failure

    async def _ask(self, request: Request, body: dict[str, object], deadline: Deadline) -> bytes:
        state = self._state
        try:
            data = await state.client.generate(body, deadline)
        except PeerLost as error:
            raise PeerLost(f"{error}; {state.lost}" if state.lost else str(error)) from error
        state.heard = time.monotonic()
        if request.failure is not None:
            raise request.failure
        return data

    # ------------------------------------------------------------------------------------------- aborts

    async def _end(self, request: Request, task: asyncio.Future[Generation]) -> None:
        """Abort until it answers; an abort that overtook its request did nothing. During an update nothing answers."""
        state = self._state
        request.aborted = True
        deadline = Deadline(_ABORT_S, f"engine {state.name}: {request.request_id} was aborted and didn't answer")
        while not task.done():
            if not state.may_start.is_set():
                await asyncio.wait({task}, timeout=_POLL_S)
                deadline = Deadline(_ABORT_S, deadline.what)
                continue
            if deadline.expired:
                task.cancel()
                raise deadline.error()
            if request.rid:
                with contextlib.suppress(EngineRefused):
                    await state.client.abort(request.rid, deadline.remaining_s)
            await asyncio.wait({task}, timeout=_ABORT_AGAIN_S)

    def _start_ending(self, request: Request) -> None:
        """End it without waiting for that here."""
        request.aborted = True
        if request.task is not None and not request.task.done():
            ending = asyncio.ensure_future(self._end(request, request.task))
            self._endings.add(ending)
            ending.add_done_callback(self._ended)

    def _ended(self, ending: asyncio.Task[None]) -> None:
        self._endings.discard(ending)
        if not ending.cancelled():
            ending.exception()  # the request was cancelled then, and its waiter told
