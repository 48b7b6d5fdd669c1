"""The receiving end of a fan-out: run a command once, pass it on at the same time, answer for the whole branch.

    Relay ─┬─▶ Spread to the branch's targets ─────────────────────────────┬─▶ RelayDone
           └─▶ CommandMemory ─┬─ unknown id ─▶ the process's own handler ──┤
                              ├─ under way ──▶ wait for that run ──────────┤
                              └─ done ───────▶ the kept answer ────────────┘

Any other message goes to the process's own handler untouched.

An asker that is lost takes nothing with it: what it asked for goes on, since another one will ask again, and find what
has been done by then. An asker that gives up (its call was cancelled) stops its part, and the last one stops all.

| waits | for | bounded by |
|---|---|---|
| Relay's handler | its own handler's answer, the branch's outcomes | the deadline in Relay |
| drain | commands under way here | its deadline |
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeAlias

import msgspec

from miles_hpc.control.links import Links
from miles_hpc.control.multihomed import Listening, listen_on
from miles_hpc.control.spread import MAX_TEXT_CHARS, Spread, total_bytes
from miles_hpc.core.deadline import Deadline
from miles_hpc.core.errors import MilesError, PeerLost, ProtocolError
from miles_hpc.core.messages import Ack, Message, Relay, RelayDone, RelayOutcome, RelayProbe, decode, encode
from miles_hpc.core.transport import Answer, Buffer, Endpoint, Handler, Transport

__all__ = ["CommandMemory", "Execution", "RelayHandler", "RelayPoint"]

logger = logging.getLogger(__name__)

Answered: TypeAlias = tuple[bytes, Sequence[Buffer]]  # encoded reply, payload
Done: TypeAlias = tuple[RelayDone, Sequence[Buffer]]


class Execution:
    """The one run of a command in this process, and its answer for as long as that is kept."""

    def __init__(
        self, work: Coroutine[Any, Any, Answered], *, what: str, cancellable: bool, kept: Callable[[int], None]
    ) -> None:
        """`kept` is told how many bytes are kept more."""
        self._kept = kept
        self._answer_bytes = 0
        self._answer: Answered | None = None
        self._failure = ("CancelledError", f"{what} was stopped: nobody waited for it any more")
        self._what = what
        self._cancellable = cancellable
        self._waiters = 0
        self._task = asyncio.get_running_loop().create_task(self._run(work))

    @property
    def idle(self) -> bool:
        """Ended, and nobody is about to read the answer."""
        return self._task.done() and not self._waiters

    def forget_answer(self) -> None:
        """Keep only that it ran."""
        if self._answer is not None:
            self._answer = None
            self._failure = ("ProtocolError", f"{self._what} ran here already, and its answer isn't kept any more")
        self._kept(-self._answer_bytes)
        self._answer_bytes = 0

    async def outcome(self, name: str, via: str, deadline: Deadline) -> tuple[RelayOutcome, Sequence[Buffer]]:
        """Wait for the answer; what went wrong is an outcome as well.

        When the last one who waits gives up, a cancellable command is stopped.
        """
        self._waiters += 1
        try:
            await asyncio.wait({self._task}, timeout=deadline.remaining_s)
        finally:
            self._waiters -= 1
            if not self._waiters and self._cancellable and not self._task.done():
                self._task.cancel()
        if self._answer is not None:
            message, payload = self._answer
            return RelayOutcome(name, via, deadline.elapsed_s, message, total_bytes(payload)), payload
        error, (kind, text) = "RemoteError", self._failure
        if not self._task.done():
            error, kind, text = "DeadlineExpired", "", f"{name}: {deadline.error()}"
        text = text[:MAX_TEXT_CHARS]
        return RelayOutcome(name, via, deadline.elapsed_s, error=error, kind=kind, text=text), ()

    async def _run(self, work: Coroutine[Any, Any, Answered]) -> None:
        try:
            message, payload = await work
            self._answer = (message, [_frozen(buffer) for buffer in payload])
            self._answer_bytes = total_bytes((message, *payload))
            self._kept(self._answer_bytes)
        except Exception as error:
            self._failure = (type(error).__name__, str(error))


class CommandMemory:
    """Which commands ran here, so that one that comes twice runs once. Bounded in ids and in bytes of answers.

    Numbers of one root rise, so it is enough to remember how far its forgotten ones go: an unknown number up to there
    is refused, since it may have run.
    """

    def __init__(self, *, ids: int = 1024, roots: int = 1024, answer_bytes: int = 16 << 20) -> None:
        self._max_ids = ids
        self._max_roots = roots
        self._max_answer_bytes = answer_bytes
        self._executions: dict[tuple[str, int], Execution] = {}  # oldest first
        self._floors: dict[str, int] = {}  # root -> largest forgotten number; raised longest ago first
        self.kept_bytes = 0  # of answers

    def __len__(self) -> int:
        return len(self._executions)

    def find(self, root: str, number: int) -> Execution | None:
        """The run of this id, or None when it may start. Raises ProtocolError for one that may be forgotten."""
        found = self._executions.get((root, number))
        if found is None and number <= self._floors.get(root, 0):
            raise ProtocolError(f"command {number} of {root} is too old to know whether it ran here")
        return found

    def start(
        self, root: str, number: int, work: Coroutine[Any, Any, Answered], *, what: str, cancellable: bool
    ) -> Execution:
        """Run an unknown id. What is too much is forgotten, the oldest first, but for what is in use."""
        if len(self._executions) >= self._max_ids or self.kept_bytes > self._max_answer_bytes:
            self._forget()
        execution = Execution(work, what=what, cancellable=cancellable, kept=self._count)
        self._executions[root, number] = execution
        return execution

    def _count(self, n_bytes: int) -> None:
        self.kept_bytes += n_bytes

    def _forget(self) -> None:
        for key, execution in list(self._executions.items()):
            too_many = len(self._executions) >= self._max_ids
            if not too_many and self.kept_bytes <= self._max_answer_bytes:
                return
            if not execution.idle:
                continue
            execution.forget_answer()
            if too_many:
                del self._executions[key]
                self._raise_floor(*key)

    def _raise_floor(self, root: str, number: int) -> None:
        self._floors[root] = max(number, self._floors.pop(root, 0))
        if len(self._floors) > self._max_roots:
            del self._floors[next(iter(self._floors))]


class RelayHandler:
    """Wraps a process's handler (`Handler` of the contract); give it to `listen` and `connect` in its place.

    The inner handler sees a relayed command as if its asker had called it, over the asker's endpoint: who gave the
    command isn't `endpoint.peer`. It may answer anything but a stream. An answer is copied unless its buffers are
    bytes or read-only, since it is kept for a while.
    """

    def __init__(self, inner: Handler, links: Links, *, name: str, memory: CommandMemory | None = None) -> None:
        """`name` is this process's own; `links` connects to the branch, with this process's credentials."""
        self._inner = inner
        self._links = links
        self._name = name
        self._memory = CommandMemory() if memory is None else memory
        # What is under way for each id: one piece of work per asker, and whether its asker is still there.
        self._works: dict[tuple[str, int], dict[asyncio.Task[Done], bool]] = {}
        self._idle = asyncio.Event()

    def __call__(self, endpoint: Endpoint, message: Message, payload: memoryview) -> Answer | Awaitable[Answer]:
        if isinstance(message, Relay):
            return self._relay(endpoint, message, payload)
        if isinstance(message, RelayProbe):
            return None
        return self._inner(endpoint, message, payload)

    async def drain(self, *, deadline_s: float) -> bool:
        """Wait until every command here was passed on and answered; False when the time is over before."""
        try:
            async with asyncio.timeout(deadline_s):
                while self._works:
                    self._idle.clear()
                    await self._idle.wait()
        except TimeoutError:
            return False
        await asyncio.sleep(0)  # the handlers' answers leave when their tasks go on
        return True

    async def _relay(self, endpoint: Endpoint, relay: Relay, payload: memoryview) -> Done:
        """Answer one asker. Its end isn't the end of the command: whoever stands in for it asks again."""
        key = (relay.root, relay.number)
        work = asyncio.get_running_loop().create_task(self._work(endpoint, relay, payload))
        others = self._works.setdefault(key, {})
        others[work] = True
        work.add_done_callback(lambda _: self._ended(key, work))
        try:
            await asyncio.wait({work})
        except asyncio.CancelledError:
            if endpoint.closed.is_set():
                others[work] = False  # nobody's work, until its deadline or until the last asker gives up
            else:
                work.cancel()
                if not any(asked for other, asked in others.items() if other is not work):
                    for other in others:
                        other.cancel()
            raise
        return work.result()

    def _ended(self, key: tuple[str, int], work: asyncio.Task[Done]) -> None:
        works = self._works[key]
        del works[work]
        if not works:
            del self._works[key]
        if not self._works:
            self._idle.set()
        if not work.cancelled():
            work.exception()  # an asker that was lost doesn't look

    async def _work(self, endpoint: Endpoint, relay: Relay, payload: memoryview) -> Done:
        """Run the command and pass it on; the outcomes of both."""
        try:
            message = decode(relay.message)
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"Relay with a command that can't be decoded: {error}") from None
        if isinstance(message, Relay):
            raise ProtocolError("Relay with a Relay inside")
        deadline = Deadline(relay.deadline_s, type(message).__name__)
        execution = self._memory.find(relay.root, relay.number)
        spread = None
        if relay.targets:
            spread = Spread(self._links, relay, [payload] if payload else [], deadline, me=self._name)
            spread.start(relay.targets)  # its tasks come before the one of our own handler
        try:
            if execution is None:
                execution = self._execute(endpoint, relay, message, payload)
            own, own_payload = await execution.outcome(self._name, endpoint.peer.name, deadline)
            if spread is not None:
                await spread.finish()
        finally:
            if spread is not None:
                await spread.stop()
        found = [] if spread is None else [spread.found[target.name] for target in relay.targets]
        outcomes = (own, *(outcome for outcome, _ in found))
        return RelayDone(outcomes=outcomes, took_s=deadline.elapsed_s), [*own_payload, *(part for _, part in found)]

    def _execute(self, endpoint: Endpoint, relay: Relay, message: Message, payload: memoryview) -> Execution:
        return self._memory.start(
            relay.root,
            relay.number,
            self._run(endpoint, message, payload),
            what=f"{type(message).__name__} (command {relay.number} of {relay.root})",
            cancellable=message.cancellable,
        )

    async def _run(self, endpoint: Endpoint, message: Message, payload: memoryview) -> Answered:
        try:
            answer = self._inner(endpoint, message, payload)
            if inspect.isawaitable(answer):
                answer = await answer
            if answer is None:
                return encode(Ack()), ()
            if isinstance(answer, Message):
                return encode(answer), ()
            if isinstance(answer, tuple):
                return encode(answer[0]), answer[1]
            raise ProtocolError(f"{type(message).__name__}: a streamed answer can't be relayed")
        except Exception as error:
            level = logging.DEBUG if isinstance(error, MilesError) else logging.ERROR
            logger.log(
                level,
                "handler of %s, relayed by %s, failed",
                type(message).__name__,
                endpoint.peer.name,
                exc_info=error,
            )
            raise


class RelayPoint:
    """A process's part in fan-outs of one term: its handler, its links, and its listener once that is asked for."""

    def __init__(self, transport: Transport, inner: Handler, *, name: str, memory: CommandMemory) -> None:
        """`memory` outlives this: a command may come again after the process has joined again."""
        self._transport = transport
        self._links = Links(transport)
        self._listening: asyncio.Task[Listening] | None = None
        self._closed = False
        self.handler = RelayHandler(inner, self._links, name=name, memory=memory)

    async def listen(self, bind: Sequence[str]) -> tuple[str, ...]:
        """The addresses at which others can pass commands on to this process.

        Raises UserError when none can be bound, PeerLost when this is closed.
        """
        if self._closed:
            raise PeerLost("this process is leaving")
        if self._listening is None:
            listen = listen_on(self._transport, self._relayed, bind)
            self._listening = asyncio.get_running_loop().create_task(listen)
        return (await asyncio.shield(self._listening)).addresses

    def _relayed(self, endpoint: Endpoint, message: Message, payload: memoryview) -> Answer | Awaitable[Answer]:
        if not isinstance(message, Relay | RelayProbe):
            raise ProtocolError(f"{type(message).__name__}: only commands that are passed on are taken here")
        return self.handler(endpoint, message, payload)

    async def close(self, *, drain_s: float = 0.0) -> None:
        """Pass on and answer what is under way, for so long, and hang up."""
        self._closed = True
        await self.handler.drain(deadline_s=drain_s)
        if self._listening is not None:
            done = await asyncio.gather(self._listening, return_exceptions=True)
            if isinstance(done[0], Listening):
                await done[0].close()
        await self._links.close()


def _frozen(buffer: Buffer) -> Buffer:
    """The same bytes in a buffer that its owner can't change any more."""
    return buffer if isinstance(buffer, memoryview) and buffer.readonly else bytes(buffer)
