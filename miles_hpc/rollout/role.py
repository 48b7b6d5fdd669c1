"""The rollout host: what a rollout node's agent does besides looking after its children.

    controller ── GenerateGroup ──▶ handle ─▶ task per group: run_group ─▶ spool ─▶ GroupDone until acknowledged
               ── SyncWeights ────▶ engine.sync ─▶ version of that engine ─▶ HostStatus
               ── AbortGroups ────▶ cancels those tasks
               ── ScoreTokens ────▶ engine.score

| who waits | for whom | how long |
|---|---|---|
| a trajectory | a generation slot | control.step_deadline_s |
| a trajectory | engine, sandbox | GenerateGroup.deadline_s |
| GroupDone | the controller's Ack | until the term ends; the agent's lease bounds that |

A group whose engine failed is played once more on what is left, then GroupFailed is sent. Everything belongs to one
event loop; file writes go to a thread.
"""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import msgspec
import numpy as np

from miles_hpc.core.config import RunConfig
from miles_hpc.core.errors import (
    DeadlineExpired,
    FencedError,
    MilesError,
    PeerLost,
    ProtocolError,
    RemoteError,
    UserError,
)
from miles_hpc.core.messages import (
    AbortGroups,
    Ack,
    GenerateGroup,
    GroupDone,
    GroupFailed,
    HostStatus,
    Message,
    Scores,
    ScoreTokens,
    SyncWeights,
    WeightsSynced,
)
from miles_hpc.core.paths import RunPaths
from miles_hpc.core.registry import resolve
from miles_hpc.core.telemetry import EventLog
from miles_hpc.core.transport import Buffer, Reply
from miles_hpc.core.types import GroupPurpose, GroupSummary
from miles_hpc.rollout.agent_player import load_player
from miles_hpc.rollout.engine import RolloutEngine
from miles_hpc.rollout.environments.base import Environment, Sandboxes
from miles_hpc.rollout.sampler import Bounds, EngineFailed, run_group
from miles_hpc.rollout.session.client import SessionClient
from miles_hpc.rollout.session.tokenizer import ChatTokenizer
from miles_hpc.rollout.slots import EngineSlots
from miles_hpc.rollout.spool import spool_group

__all__ = ["RolloutHost"]

#: Sends a message to the controller and waits for its answer.
Report = Callable[[Message], Awaitable[Reply]]

_LOCAL_ATTEMPTS = 2
_DEMONSTRATIONS_AT_ONCE = 16
_RETRY_FIRST_S, _RETRY_LAST_S = 0.2, 2.0


class RolloutHost:
    """Plays groups on this host's engines. The agent owns it and hands it the controller's messages.

    `report` sends to the current controller and may raise PeerLost, DeadlineExpired or RemoteError. The model folder
    (`paths.model`) must exist. Raises UserError for an environment or tokenizer that can't be used.
    """

    def __init__(
        self,
        run: RunConfig,
        paths: RunPaths,
        host: str,
        sandboxes: Sandboxes,
        report: Report,
        *,
        term: int = 0,
        events: EventLog | None = None,
        on_engines: Callable[[], None] | None = None,
    ) -> None:
        """`on_engines` is called whenever `slots.status()` may have changed."""
        self.host = host
        self.term = term
        self.slots = EngineSlots()
        self._run = run
        self._paths = paths
        self._sandboxes = sandboxes
        self._report = report
        self._events = events
        self._on_engines = on_engines
        self._environment: Environment = resolve("environment", run.environment.name)(run.environment.options)
        self.sessions = SessionClient()
        # An agent's turns go through the session server, whose templates may be more than append-only.
        agents = bool(run.rollout.custom_agent_function_path)
        self._tokenizer = ChatTokenizer(paths.model, append_only=not agents or run.sft.steps > 0)
        self._player = load_player(
            run, self.sessions, tokenizer=self._tokenizer, environment=self._environment, sandboxes=sandboxes
        )
        # (purpose, group id) -> (attempt, task): evaluations and demonstrations have ids of their own
        self._groups: dict[tuple[GroupPurpose, int], tuple[int, asyncio.Task[None]]] = {}
        self._others: set[asyncio.Task[None]] = set()
        self._syncing: set[str] = set()  # engines with an update under way
        self._demonstrations = asyncio.Semaphore(_DEMONSTRATIONS_AT_ONCE)

    # ------------------------------------------------------------------------------------------- engines

    async def add_engine(self, engine: RolloutEngine, *, set_aside: bool = False) -> None:
        """Take an engine in, `set_aside` for evaluations only, and announce it. Raises what `describe` raises."""
        about = await engine.describe()
        self.slots.add(engine, slots=about.slots, shape=about.shape, version=about.version, set_aside=set_aside)
        self.announce()

    def remove_engine(self, name: str) -> None:
        """The engine is gone; what it was sampling fails. Announced."""
        self.slots.remove(name)
        self.announce()

    def status(self) -> HostStatus:
        engines = self.slots.status()
        return HostStatus(engines=engines, ready=any(e.alive for e in engines))

    def announce(self) -> None:
        """Tell the controller about the engines, in the background."""
        self._engines_changed()
        self._start(self._send(self.status))

    def _engines_changed(self) -> None:
        if self._on_engines is not None:
            self._on_engines()

    # ------------------------------------------------------------------------------------------- messages

    async def handle(
        self, message: Message, payload: memoryview | bytes = b""
    ) -> Message | tuple[Message, Sequence[Buffer]]:
        """Answer one message of the controller. Raises ProtocolError for one that isn't for rollout hosts."""
        if isinstance(message, GenerateGroup):
            self._generate(message)
            return Ack()
        if isinstance(message, AbortGroups):
            for group_id in message.group_ids:
                self._drop((message.purpose, group_id))
            return Ack()
        if isinstance(message, SyncWeights):
            return await self._sync(message)
        if isinstance(message, ScoreTokens):
            return await self._score(message, payload)
        raise ProtocolError(f"a rollout host doesn't take {type(message).__name__}")

    async def reset(self, term: int) -> None:
        """A new term begins: drop everything that was in flight for the old one."""
        self.term = term
        tasks = [task for _, task in self._groups.values()] + list(self._others)
        self._groups.clear()
        await _end(tasks)

    async def close(self) -> None:
        """End all tasks; idempotent. Engines, sandboxes and the session server belong to the agent."""
        await self.reset(self.term)
        if self._player is not None:
            await self._player.close()
        await self.sessions.close()

    @property
    def groups_in_flight(self) -> int:
        return len(self._groups)

    # ------------------------------------------------------------------------------------------- groups

    def _generate(self, job: GenerateGroup) -> None:
        key = (job.purpose, job.group_id)
        known = self._groups.get(key)
        if known is not None:
            if known[0] >= job.attempt:
                return  # sent again; it is under way
            self._drop(key)
        if not job.prompt.messages:
            prompt = self._environment.prompt(job.prompt.seed, split=job.purpose.value)
            job = msgspec.structs.replace(job, prompt=prompt)
        task = asyncio.create_task(self._produce(job), name=f"group {job.group_id}")
        self._groups[key] = (job.attempt, task)
        task.add_done_callback(lambda _: self._forget(job))

    def _drop(self, key: tuple[GroupPurpose, int]) -> None:
        known = self._groups.pop(key, None)
        if known is not None:
            known[1].cancel()

    def _forget(self, job: GenerateGroup) -> None:
        key = (job.purpose, job.group_id)
        known = self._groups.get(key)
        if known is not None and known[0] == job.attempt:
            del self._groups[key]

    async def _produce(self, job: GenerateGroup) -> None:
        """Play, spool, report. Ends without a report only when it is cancelled."""
        began, wall = time.monotonic(), time.time()
        answer: Message
        try:
            played = await self._play(job)
            answer = GroupDone(summary=await self._spool(job, played, time.monotonic() - began))
        except asyncio.CancelledError:
            raise
        except Exception as error:  # whatever it was, the controller must hear that this group won't come
            answer = GroupFailed(
                group_id=job.group_id,
                attempt=job.attempt,
                purpose=job.purpose,
                reason=f"{self.host}: {type(error).__name__}: {error}",
            )
        if self._events is not None:
            ok = isinstance(answer, GroupDone)
            self._events.emit(
                "span", name="group", start=round(wall, 4), end=round(time.time(), 4), group=job.group_id, ok=ok
            )
        await self._send(lambda: answer)

    async def _spool(self, job: GenerateGroup, played: Any, duration_s: float) -> GroupSummary:
        """Spool the group. While storage refuses it, out of space or over quota, it waits: what was sampled is good."""
        pause = _RETRY_FIRST_S
        while True:
            try:
                return await asyncio.to_thread(
                    spool_group,
                    job,
                    played,
                    paths=self._paths,
                    term=self.term,
                    host=self.host,
                    duration_s=duration_s,
                )
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
            await asyncio.sleep(pause)
            pause = min(2 * pause, _RETRY_LAST_S)

    async def _play(self, job: GenerateGroup) -> Any:
        for attempt in range(_LOCAL_ATTEMPTS):
            try:
                if job.purpose is GroupPurpose.DEMO:
                    async with self._demonstrations:
                        return await self._run_group(job)
                return await self._run_group(job)
            except EngineFailed as error:
                self._engine_failed(error)
                if attempt + 1 == _LOCAL_ATTEMPTS:
                    raise
        raise AssertionError("unreachable")

    async def _run_group(self, job: GenerateGroup) -> Any:
        return await run_group(
            job,
            tokenizer=self._tokenizer,
            environment=self._environment,
            sandboxes=self._sandboxes,
            bounds=Bounds.of(self._run, job.purpose),
            lease=lambda: self._lease(job),
            play_agent=None if self._player is None else self._player.play,
        )

    def _lease(self, job: GenerateGroup) -> AbstractAsyncContextManager[RolloutEngine]:
        deadline_s = self._run.control.step_deadline_s
        return self.slots.lease(deadline_s, set_aside=job.set_aside, at_least=job.at_least)

    def _engine_failed(self, error: EngineFailed) -> None:
        """An engine that is gone gets nothing more; one that merely refused a request stays."""
        if self._events is not None:
            self._events.verdict("engine_failed", engine=error.engine, evidence=str(error))
        if error.engine in self._syncing:
            return  # nothing answers in an update's pause; whether it succeeds will be seen
        if error.gone and self.slots.set_alive(error.engine, False):
            self.announce()

    def has_engine(self, name: str) -> bool:
        """Whether this engine was taken in and not removed since."""
        return self.slots.engine(name) is not None

    def gave_up(self, engine: str) -> bool:
        """Whether nothing is sent to this engine any more: who started it should start another."""
        return engine not in self._syncing and self.slots.is_dead(engine)

    # ------------------------------------------------------------------------------------------- weights

    async def _sync(self, message: SyncWeights) -> WeightsSynced:
        engine = self._engine(message.engine)
        self._syncing.add(message.engine)
        try:
            synced = await engine.sync(
                message.version, message.source, message.plan_digest, deadline_s=message.deadline_s
            )
        except BaseException as error:
            # A fetch that failed leaves the old weights; only the engine knows, so ask before anything is sent to it.
            self.slots.set_version(message.engine, None)
            self._engines_changed()
            if isinstance(error, MilesError):
                self._start(self._refresh(engine))
            raise
        finally:
            self._syncing.discard(message.engine)
        self.slots.set_version(message.engine, synced.version)
        self.slots.set_alive(message.engine, True)
        self.announce()
        return synced

    async def _refresh(self, engine: RolloutEngine) -> None:
        try:
            about = await engine.describe()
        except MilesError:
            self.slots.set_alive(engine.name, False)
        else:
            self.slots.set_version(engine.name, about.version)
            self.slots.set_alive(engine.name, True)
        self._engines_changed()
        await self._send(self.status)

    async def _score(self, message: ScoreTokens, payload: memoryview | bytes) -> tuple[Message, Sequence[Buffer]]:
        engine = self._engine(message.engine) if message.engine else self.slots.any_engine()
        if engine is None:
            raise UserError(f"{self.host}: no engine holds weights: sync one before scoring")
        if len(payload) != 4 * message.n * message.length:
            raise ProtocolError(f"ScoreTokens of {message.n} x {message.length} tokens with {len(payload)} bytes")
        tokens = np.frombuffer(payload, dtype="<i4").reshape(message.n, message.length).astype(np.int32)
        log_probs = await engine.score(tokens, deadline_s=self._run.control.call_deadline_s)
        scores = Scores(version=self.slots.version(engine.name), n=message.n, length=message.length)
        return scores, [np.ascontiguousarray(log_probs, dtype="<f4").tobytes()]

    def _engine(self, name: str) -> RolloutEngine:
        engine = self.slots.engine(name)
        if engine is None:
            known = ", ".join(e.name for e in self.slots.status()) or "none"
            raise UserError(f"{self.host}: no engine {name!r}: this host has {known}")
        return engine

    # ------------------------------------------------------------------------------------------- reports

    async def _send(self, make: Callable[[], Message]) -> None:
        """Report until acknowledged. A controller that is lost ends this through `reset` or the agent's lease."""
        pause = _RETRY_FIRST_S
        while True:
            try:
                await self._report(make())
                return
            except FencedError:
                return
            except RemoteError as error:
                if error.kind in ("FencedError", "ProtocolError", "UserError"):
                    return  # refused, not lost: the same words would be refused again
            except (PeerLost, DeadlineExpired):
                pass
            await asyncio.sleep(pause)
            pause = min(2 * pause, _RETRY_LAST_S)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._others.add(task)
        task.add_done_callback(self._others.discard)


async def _end(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
