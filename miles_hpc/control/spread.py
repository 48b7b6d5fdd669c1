"""One command on its way from one process: branches, probes, standing in for lost heads, outcomes.

    start ─▶ branch: connect ─▶ Relay ─▶ RelayDone ─▶ outcomes known
                │                 └─ lost, refused, reply without them ─▶ rest of the branch is asked from here
                └─ watch: silent for too long ─▶ the same, while the head's reply is still taken
    finish ─▶ nothing more can come, or the deadline has come

| waits | for | bounded by |
|---|---|---|
| a branch | the connection, then RelayDone | the deadline less a margin, in which the asker can still report |
| a watch of a branch | the answer to a probe | `silent_s`, or a quarter of the time when that is less |
| finish | an outcome of every target | the deadline; the missing ones are named |
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from miles_hpc.control.links import Links
from miles_hpc.control.tree import plan_branches
from miles_hpc.core.deadline import Deadline
from miles_hpc.core.errors import DeadlineExpired, MilesError, PeerLost, ProtocolError, RemoteError
from miles_hpc.core.messages import Relay, RelayDone, RelayOutcome, RelayProbe, RelayTarget, decode, encode
from miles_hpc.core.transport import Buffer, Endpoint, Reply

__all__ = ["MAX_TEXT_CHARS", "Spread", "total_bytes"]

#: Of the text of one target's error, so that an answer for thousands of targets stays below the limit for headers.
MAX_TEXT_CHARS = 2048
#: What a process keeps of its time for its own report, and for standing in for one that didn't report.
_MARGIN_S = 1.0
_MARGIN_PART = 0.1
#: A payload may hold up the answer to a probe for as long as it takes at this rate.
_SLOW_BYTES_PER_S = 50e6


@dataclass(eq=False, slots=True)
class _Asked:
    """A branch that was sent to. `endpoint` is None until it is connected."""

    head: RelayTarget
    rest: tuple[RelayTarget, ...]
    endpoint: Endpoint | None = None
    adopted: bool = False  # somebody else was asked for the rest


class Spread:
    """One command on its way from this process to its targets. `start`, then `finish`, at last `stop`."""

    def __init__(
        self,
        links: Links,
        command: Relay,
        payload: Sequence[Buffer],
        deadline: Deadline,
        *,
        me: str,
        insist: bool = False,
    ) -> None:
        """`insist`: try targets that others couldn't reach once more from here."""
        self._links = links
        self._command = command
        self._payload = payload
        self._deadline = deadline
        self._me = me
        self._insist = insist
        self._silent_s = command.silent_s + total_bytes(payload) / _SLOW_BYTES_PER_S
        self._targets: dict[str, RelayTarget] = {}
        self._open: set[str] = set()  # nothing final is known of these
        self._covering: dict[str, int] = {}  # branches under way that have the target
        self._hoped_for = 0  # open ones that are covered
        self._tasks: set[asyncio.Task[None]] = set()
        self._settled = asyncio.Event()
        self._over = False
        self._fault: BaseException | None = None  # what no branch should raise
        self.found: dict[str, tuple[RelayOutcome, Buffer]] = {}
        self.sent = 0

    def start(self, targets: Sequence[RelayTarget], *, direct: Sequence[RelayTarget] = ()) -> None:
        """Begin to send: to `targets` as a tree, to `direct` from here."""
        every = (*direct, *targets)
        self._targets = {target.name: target for target in every}
        self._open = set(self._targets)
        self._covering = dict.fromkeys(self._targets, 0)
        for target in direct:
            self._ask(target, ())
        self._pass_on(targets)
        self._look()

    async def finish(self) -> None:
        """Wait until nothing more will come, or the deadline has come. `found` has every target then.

        Raises what sending raised for any other reason than the peer, such as a payload that is no buffer.
        """
        try:
            async with asyncio.timeout(self._deadline.remaining_s):
                await self._settled.wait()
        except TimeoutError:
            pass
        await self.stop()
        if self._fault is not None:
            raise self._fault
        for name in self._targets.keys() - self.found.keys():
            self._expired(name)

    async def stop(self) -> None:
        """Give up what is under way; who was asked is told. Idempotent."""
        self._over = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.gather(*tasks, return_exceptions=True)

    # ------------------------------------------------------------------------------ asking

    def _pass_on(self, targets: Sequence[RelayTarget]) -> None:
        for branch in plan_branches(targets, self._command.arity):
            self._ask(branch.head, branch.rest)

    def _ask(self, head: RelayTarget, rest: tuple[RelayTarget, ...]) -> None:
        asked = _Asked(head, rest)
        for target in (head, *rest):
            covering = self._covering[target.name]
            self._covering[target.name] = covering + 1
            self._hoped_for += not covering and target.name in self._open
        self._start(self._serve(asked))

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)
        return task

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fault = self._fault or error
            self._settled.set()

    async def _serve(self, asked: _Asked) -> None:
        """One branch, from the connection to what is known of it in the end."""
        watch = self._start(self._watch(asked)) if asked.rest else None
        try:
            await self._call(asked)
        except DeadlineExpired:
            self._expired(asked.head.name)
        except MilesError as error:
            self._failed(asked.head.name, error)
        finally:
            if watch is not None:
                watch.cancel()
            self._adopt(asked)
            for target in (asked.head, *asked.rest):
                self._release(target)
            self._look()

    async def _call(self, asked: _Asked) -> None:
        """Send, once more over a new connection when an old one turns out to have ended."""
        head = asked.head
        while True:
            async with self._links.use(head, deadline_s=self._shares()[1]) as link:
                asked.endpoint = link.endpoint
                sent_at = self._deadline.elapsed_s
                share_s, limit_s = self._shares()
                relays = bool(head.addresses)
                message = (
                    msgspec.structs.replace(self._command, targets=asked.rest, deadline_s=share_s)
                    if relays
                    else decode(self._command.message)
                )
                self.sent += 1
                try:
                    reply = await link.endpoint.call(message, payload=self._payload, deadline_s=limit_s)
                except PeerLost:
                    if link.fresh or not relays:  # without an id it might run twice
                        raise
                    asked.endpoint = None
                    continue
            took_s = self._deadline.elapsed_s - sent_at
            if relays:
                self._take_in(head, reply, sent_at, took_s)
            else:
                n_bytes = len(reply.payload)
                outcome = RelayOutcome(head.name, self._me, sent_at + took_s, encode(reply.message), n_bytes)
                self._know(outcome, reply.payload)
            return

    def _shares(self) -> tuple[float, float]:
        """Seconds that a process gets which is asked at this moment, and after how many its answer isn't waited for."""
        remaining_s = self._deadline.remaining_s
        margin_s = min(_MARGIN_S, remaining_s * _MARGIN_PART)
        return remaining_s - margin_s, remaining_s - margin_s / 2

    async def _watch(self, asked: _Asked) -> None:
        """Probe a head that has others behind it; stand in for it when it is silent."""
        while True:
            silent_s = min(self._silent_s, self._deadline.remaining_s / 4)
            await asyncio.sleep(silent_s)
            try:
                if asked.endpoint is None:
                    raise DeadlineExpired("still connecting")
                self.sent += 1
                await asked.endpoint.call(RelayProbe(), deadline_s=silent_s)
            except DeadlineExpired:
                self._adopt(asked)
                return
            except MilesError:
                return  # what was asked of it fails as well

    def _adopt(self, asked: _Asked) -> None:
        """Send to the rest of a branch from here, but for those that something is known of."""
        if asked.adopted or self._over:
            return
        asked.adopted = True
        orphans = [target for target in asked.rest if target.name not in self.found]
        self._pass_on(orphans)

    # ------------------------------------------------------------------------------ knowing

    def _take_in(self, head: RelayTarget, reply: Reply, sent_at: float, took_s: float) -> None:
        done = reply.message
        if not isinstance(done, RelayDone):
            raise ProtocolError(f"{head.name}: answered Relay with {type(done).__name__}, expected RelayDone")
        if sum(outcome.payload_bytes for outcome in done.outcomes) != len(reply.payload):
            raise ProtocolError(f"{head.name}: RelayDone with {len(reply.payload)} bytes of payload, but other sizes")
        began = sent_at + max(0.0, took_s - done.took_s) / 2  # at the head, on our clock
        position = 0
        for outcome in done.outcomes:
            payload = reply.payload[position : position + outcome.payload_bytes]
            position += outcome.payload_bytes
            self._know(msgspec.structs.replace(outcome, latency_s=began + outcome.latency_s), payload)
        if head.name not in self.found:
            raise ProtocolError(f"{head.name}: RelayDone without an outcome of its own")

    def _expired(self, name: str) -> None:
        self._failed(name, DeadlineExpired(f"{name}: {self._deadline.error()}"))

    def _failed(self, name: str, error: MilesError) -> None:
        kind = error.kind if isinstance(error, RemoteError) else ""
        text = error.text if isinstance(error, RemoteError) else str(error)
        self._know(
            RelayOutcome(
                name,
                self._me,
                self._deadline.elapsed_s,
                error=type(error).__name__,
                kind=kind,
                text=text[:MAX_TEXT_CHARS],
            ),
            b"",
        )

    def _know(self, outcome: RelayOutcome, payload: Buffer) -> None:
        """An answer of the target itself is final; that it can't be reached may be overruled by another way to it."""
        name = outcome.name
        if name not in self._open:
            return
        self.found[name] = (outcome, payload)
        if outcome.error in ("", "RemoteError"):
            self._open.remove(name)
            self._hoped_for -= self._covering[name] > 0

    def _release(self, target: RelayTarget) -> None:
        """A branch that had the target has ended."""
        name = target.name
        self._covering[name] -= 1
        if self._covering[name] or name not in self._open:
            return
        self._hoped_for -= 1
        if self._insist and not self._over:
            found = self.found.get(name)
            if found is not None and found[0].error == "PeerLost" and found[0].via != self._me:
                self._ask(target, ())

    def _look(self) -> None:
        """See whether anything more can come."""
        if not self._hoped_for:
            self._settled.set()


def total_bytes(buffers: Sequence[Buffer]) -> int:
    """Size of a payload."""
    return sum(memoryview(buffer).nbytes for buffer in buffers)
