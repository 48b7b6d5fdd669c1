"""What a session server needs of engines: a generation for a session, from whichever engine can give it.

    generate ─▶ route (waits while no engine can take the session) ─▶ lane ─▶ engine.generate ─▶ Generation
                  ▲                                                              │ fails, or aborts
                  ╰───── elsewhere or there again, with all tokens so far ◀──────╯

| an engine answers with | what becomes of the request | of the engine |
|---|---|---|
| an abort that nobody here asked for (an update) | goes on from what was sampled (partial.py) | stays |
| PeerLost, also told by its process; OSError | goes to another | out until it is added again; its sessions move |
| other RemoteError, ProtocolError | goes to another; to the same after a pause if there is none | stays |
| RemoteError of kind UserError | BadRequest (400): no engine would take it | stays |
| nothing, until the deadline | aborted; what it has so far, else OutOfTime (504) | stays; the session leaves it |

| who waits | for what | how long |
|---|---|---|
| generate | an engine with the current weights | the request's deadline, then NoEngine (503) |
| generate | the engine | the request's deadline, then `ABORT_GRACE_S` for what it has |
| end, a client that went away | nobody: engines are told in the background, `FREE_S` at most | |

Engines take one request per session at a time, so a session's concurrent requests go in lanes, each a session of its
own to the engine. Everything belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from miles_hpc.core.deadline import Deadline
from miles_hpc.core.errors import DeadlineExpired, MilesError, PeerLost, ProtocolError, RemoteError, UserError
from miles_hpc.core.types import FinishReason, SamplingParams, WeightVersion
from miles_hpc.rollout.engine import Generation, RolloutEngine
from miles_hpc.rollout.routing import NoRoute, Route, SessionRouter
from miles_hpc.rollout.routing_stats import RoutingStats
from miles_hpc.rollout.session.errors import BadRequest, EngineFailure, NoEngine, OutOfTime, SessionGone
from miles_hpc.rollout.session.partial import Partial

__all__ = ["ABORT_GRACE_S", "FREE_S", "EngineGateway"]

#: An engine that was told to abort has so long to answer with what it has.
ABORT_GRACE_S = 5.0
#: The longest wait for an engine to hear that a session ended.
FREE_S = 10.0
_LOOK_S = 1.0  # a router may also be full of busy sessions, and nobody tells when one is idle again


@dataclass
class _Engine:
    engine: RolloutEngine
    version: WeightVersion | None
    joined: bool = False  # known to the router


@dataclass
class _Lanes:
    """Which engine sessions one session uses: its own name, and more names while requests overlap."""

    busy: set[int] = field(default_factory=set)
    used: set[tuple[str, str]] = field(default_factory=set)  # (engine, engine session)
    starved: bool = False  # its newest request met no engine, or one that failed, and has no answer yet
    ended: bool = False


@dataclass
class _Request:
    """One call of `generate`: what was sampled so far, and who failed."""

    key: str
    partial: Partial
    known_tokens: int  # of the session's context, before the request
    deadline: Deadline
    lanes: _Lanes
    failures: list[str] = field(default_factory=list)
    tried: set[str] = field(default_factory=set)
    lost_at: float | None = None  # when an engine was lost in the middle of it

    @property
    def is_over(self) -> bool:
        return self.deadline.expired or self.lanes.ended


class EngineGateway:
    """Engines by name, and the router over them. See the module's tables.

    An engine takes part while it holds a version that is the newest that any engine was said to hold, or already had
    sessions when a newer one came.
    """

    def __init__(
        self,
        *,
        max_tries: int = 3,
        max_sessions: int = 100_000,
        session_ttl_s: float = 4 * 3600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises UserError for bounds that bound nothing."""
        if max_tries < 1:
            raise UserError(f"engine gateway: max_tries {max_tries}: expected at least 1")
        self._router = SessionRouter(WeightVersion(0, 0), ttl_s=session_ttl_s, max_sessions=max_sessions)
        self._max_tries = max_tries
        self._clock = clock
        self.failovers = 0  # requests that ended well though their engine was lost in the middle
        self.slowest_failover_s = 0.0  # from the loss to the answer
        self._engines: dict[str, _Engine] = {}
        self._lanes: dict[str, _Lanes] = {}
        self._numbers = itertools.count()
        self._changed = asyncio.Event()
        self._background: set[asyncio.Task[None]] = set()

    # ------------------------------------------------------------------------------------------- engines

    def add_engine(self, name: str, engine: RolloutEngine, version: WeightVersion | None) -> None:
        """Take an engine in, with the weights that it was verified to hold; None: none yet.

        One of the same name is replaced: its sessions are rebuilt. The caller keeps owning the engine.
        """
        self.remove_engine(name)
        self._engines[name] = _Engine(engine, None)
        self.set_version(name, version)

    def remove_engine(self, name: str) -> None:
        """Forget an engine; its sessions move. Requests under way there may still end well. Unknown names are fine."""
        entry = self._engines.pop(name, None)
        if entry is not None and entry.joined:
            self._router.lose(name)

    def set_version(self, name: str, version: WeightVersion | None) -> None:
        """The engine holds these weights now; with None it serves nothing until it holds some. Raises UserError for a
        name that isn't in.
        """
        entry = self._engines.get(name)
        if entry is None:
            raise UserError(f"weights {version} of engine '{name}': it isn't in: add it first")
        entry.version = version
        if version is None:
            if entry.joined:
                self._router.lose(name)
            entry.joined = False
            return
        self._router.set_current(max(version, self.current))
        if entry.joined:
            self._router.set_version(name, version)
        elif version >= self.current:
            self._router.join(name, version)
            entry.joined = True
        self._wake()

    @property
    def current(self) -> WeightVersion:
        """The newest weights that any engine was said to hold; (0, 0) before there were any."""
        return self._router.current

    @property
    def engines(self) -> tuple[str, ...]:
        """Names of the engines that are in and hold weights, sorted."""
        return tuple(sorted(name for name, entry in self._engines.items() if entry.version is not None))

    def has(self, name: str) -> bool:
        """Whether the engine is in; one that was lost in the middle of a request isn't any more."""
        return name in self._engines

    def stats(self) -> RoutingStats:
        """Of the router."""
        return self._router.stats()

    # ------------------------------------------------------------------------------------------- sessions

    def restore(self, key: str, *, context_tokens: int) -> None:
        """A session of an earlier process: placed at its next request, and rebuilt there."""
        self._router.restore(key, "", context_tokens=context_tokens, now_s=self._clock())

    def end(self, key: str) -> None:
        """Forget a session; engines hear of it in the background, and requests under way end with what they have.

        Unknown keys are fine.
        """
        self._router.end(key)
        lanes = self._lanes.pop(key, _Lanes())
        lanes.ended = True
        for name, session in lanes.used:
            entry = self._engines.get(name)
            if entry is not None:
                self._later(entry.engine.end_session(session))
        self._wake()

    def starved(self, key: str) -> bool:
        """Whether the session's newest request has no answer because engines failed or weren't there."""
        lanes = self._lanes.get(key)
        return lanes is not None and lanes.starved

    async def generate(
        self,
        key: str,
        input_ids: npt.NDArray[np.int32],
        sampling: SamplingParams,
        *,
        new_tokens: int,
        routed_experts_start: int,
        deadline_s: float,
    ) -> Generation:
        """Continue `input_ids` [n_input], whose last `new_tokens` weren't in the session's context before.

        Routed-expert rows start at `routed_experts_start`. It ends with FinishReason.ABORT only at the deadline or when
        the session ended, or when no engine was left to go on with. Raises BadRequest, EngineFailure, NoEngine,
        OutOfTime, SessionGone, and UserError without a key. When it is cancelled the engine is told to abort.
        """
        request = _Request(
            key=key,
            partial=Partial(input_ids, sampling, routed_experts_start),
            known_tokens=len(input_ids) - new_tokens,
            deadline=Deadline(deadline_s, f"session {key}: generation after {len(input_ids)} tokens"),
            lanes=self._lanes.setdefault(key, _Lanes()) if key else _Lanes(),
        )
        while True:
            try:
                await self._try(await self._route(request), request)
                if len(request.failures) >= self._max_tries:
                    raise EngineFailure(
                        f"session {key}: {len(request.failures)} engines failed the request: "
                        f"{'; '.join(request.failures)}"
                    )
            except (EngineFailure, NoEngine, OutOfTime, SessionGone):
                if request.partial.so_far is None or request.partial.n_output == 0:
                    raise
                return request.partial.so_far  # aborted, with what it has
            whole = request.partial.so_far
            if whole is not None and whole.finish_reason is not FinishReason.ABORT:
                request.lanes.starved = False
                if request.lost_at is not None:
                    self.failovers += 1
                    self.slowest_failover_s = max(self.slowest_failover_s, self._clock() - request.lost_at)
                return whole
            if request.is_over:
                if whole is not None and request.partial.n_output > 0:
                    return whole
                if request.lanes.ended:
                    raise SessionGone(f"session {key} was closed meanwhile")
                raise OutOfTime(f"{request.deadline.error()}: nothing was sampled")

    async def close(self) -> None:
        """Wait for what is told in the background; engines stay their owner's."""
        while self._background:
            await asyncio.wait(self._background)

    # ------------------------------------------------------------------------------------------- one request

    async def _route(self, request: _Request) -> Route:
        key, n_prompt = request.key, len(request.partial.input_ids)
        while True:
            if request.lanes.ended:
                raise SessionGone(f"session {key} was closed meanwhile")
            self._changed.clear()
            try:
                if request.tried:
                    self._router.move(key, request.tried)
                new = n_prompt - request.known_tokens
                return self._router.route(key, prompt_tokens=n_prompt, new_tokens=new, now_s=self._clock())
            except NoRoute as error:
                request.lanes.starved = True
                if request.deadline.expired:
                    raise NoEngine(f"{error} (waited {request.deadline.elapsed_s:.0f} s)") from error
                request.tried.clear()  # nobody else: after a pause, those that failed
            try:
                await asyncio.wait_for(self._changed.wait(), min(_LOOK_S, request.deadline.remaining_s))
            except TimeoutError:
                pass

    async def _try(self, route: Route, request: _Request) -> None:
        """One engine: `request` has what it gave then, or one failure more."""
        entry = self._engines[route.engine]
        context, cached, failure, hung = request.known_tokens, None, "", False
        try:
            part = await self._ask(entry.engine, route, request)
            context, cached = len(request.partial.input_ids) + len(part.output_ids), part.cached_tokens
            request.partial = request.partial.after(part)
            if part.finish_reason is FinishReason.ABORT and len(part.output_ids) == 0:
                failure = "aborted before anything was sampled"
        except (PeerLost, OSError) as error:
            failure = f"{type(error).__name__}: {error}"
            self._lost(route.engine, entry, request)
        except RemoteError as error:
            if error.kind == "UserError":
                raise BadRequest(f"engine {route.engine} refuses the request: {error.text}") from error
            failure = str(error)
            if error.kind == "PeerLost":  # its process is there, what computes behind it isn't
                self._lost(route.engine, entry, request)
            else:
                request.tried.add(route.engine)
        except ProtocolError as error:
            request.tried.add(route.engine)
            failure = f"{type(error).__name__}: {error}"
        except UserError as error:  # of an engine in this process
            raise BadRequest(f"engine {route.engine} refuses the request: {error}") from error
        except OutOfTime:
            hung = True
            raise
        finally:
            if failure:
                request.lanes.starved = True
                request.failures.append(f"{route.engine}: {failure}")
            self._router.finish(route, context_tokens=context, cached_tokens=cached, now_s=self._clock())
            if hung:
                self._leave(route.key, route.engine)

    async def _ask(self, engine: RolloutEngine, route: Route, request: _Request) -> Generation:
        """One engine's answer, in a lane of its own."""
        lanes, partial, deadline = request.lanes, request.partial, request.deadline
        lane = next(n for n in itertools.count() if n not in lanes.busy)
        session = route.key if lane == 0 else f"{route.key}~{lane}"
        name = f"{route.key}-{next(self._numbers)}"
        lanes.busy.add(lane)
        lanes.used.add((route.engine, session))
        answer = asyncio.ensure_future(
            engine.generate(
                name,
                session,
                partial.input_ids,
                partial.sampling,
                routed_experts_start=partial.start,
                deadline_s=deadline.remaining_s + ABORT_GRACE_S,
            )
        )
        try:
            done, _ = await asyncio.wait({answer}, timeout=deadline.remaining_s)
            if not done:
                self._later(engine.abort(name))
                done, _ = await asyncio.wait({answer}, timeout=ABORT_GRACE_S)
            if not done:
                raise OutOfTime(f"{deadline.error()}; engine {route.engine} doesn't answer its abort either")
            return answer.result()
        except DeadlineExpired as error:  # the engine's own
            raise OutOfTime(str(error)) from error
        finally:
            if answer.done():
                lanes.busy.discard(lane)
            else:  # the lane is taken as long as the engine is at it: the client may ask again at once
                self._later(_give_up(engine, name, answer, lambda: lanes.busy.discard(lane)))

    # ------------------------------------------------------------------------------------------- inside

    def _lost(self, name: str, entry: _Engine, request: _Request) -> None:
        if self._engines.get(name) is entry:  # not one of the same name that came meanwhile
            self.remove_engine(name)
        if request.lost_at is None:
            request.lost_at = self._clock()

    def _leave(self, key: str, engine: str) -> None:
        """The session's next request goes elsewhere, if anybody else can take it."""
        try:
            self._router.move(key, {engine})
        except NoRoute:
            pass

    def _wake(self) -> None:
        self._changed.set()

    def _later(self, call: Coroutine[Any, Any, None]) -> None:
        """For what changes nothing here if it fails: a dead engine frees everything anyway."""

        async def run() -> None:
            try:
                await asyncio.wait_for(call, FREE_S)
            except (MilesError, OSError, TimeoutError):
                pass

        task = asyncio.create_task(run())
        self._background.add(task)
        task.add_done_callback(self._background.discard)


async def _give_up(
    engine: RolloutEngine, request: str, answer: asyncio.Future[Generation], ended: Callable[[], None]
) -> None:
    """Tell the engine that nobody waits any more, and see that it ends, for a while."""
    try:
        await engine.abort(request)
        await asyncio.wait({answer}, timeout=ABORT_GRACE_S)
    finally:
        answer.cancel()
        if answer.done() and not answer.cancelled():
            answer.exception()  # known now, not to be reported as forgotten
        ended()
