"""Two conversations over a wire in memory on which nothing moves by itself, and a loop whose clock stands still.

    a.send ─▶ a.queue ── a.transmit(n) ─▶ b.arriving ── b.deliver(n) ─▶ b.on_frame

A frame in `queue` is what the kernel didn't take yet: it counts in `queued_bytes`, and its buffers are still needed
when it is large. No MACs: nobody else touches the frames.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from miles_hpc.control.auth import SessionKeys
from miles_hpc.control.conversation import Conversation, Face
from miles_hpc.control.exchange import Incoming
from miles_hpc.control.frames import INLINE_BYTES, Frame, Limits, Opener, Sealer
from miles_hpc.control.wire import LOW_WATER_BYTES, Wire
from miles_hpc.core.transport import PeerIdentity

__all__ = ["FakeLoop", "Party", "ScriptedWire", "SentFrame", "parties"]


class _Timer:
    def __init__(self, callback: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.callback, self.args, self.cancelled = callback, args, False

    def cancel(self) -> None:
        self.cancelled = True


class FakeLoop:
    """What wires and conversations need of a loop. Time passes in `advance` only."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._ready: deque[tuple[Callable[..., Any], tuple[Any, ...]]] = deque()
        self._timers: list[tuple[float, int, _Timer]] = []
        self._numbers = itertools.count()

    def time(self) -> float:
        return self.now

    def call_soon(self, callback: Callable[..., Any], *args: Any) -> None:
        self._ready.append((callback, args))

    call_soon_threadsafe = call_soon

    def call_later(self, delay: float, callback: Callable[..., Any], *args: Any) -> _Timer:
        timer = _Timer(callback, args)
        heapq.heappush(self._timers, (self.now + delay, next(self._numbers), timer))
        return timer

    def add_reader(self, fd: int, callback: Callable[..., Any]) -> None:
        raise NotImplementedError

    remove_reader = add_writer = remove_writer = add_reader

    @property
    def live_timers(self) -> int:
        """Timers that will still fire."""
        return sum(not timer.cancelled for _, _, timer in self._timers)

    def run_ready(self) -> None:
        """Run callbacks until none is left."""
        while self._ready:
            callback, args = self._ready.popleft()
            callback(*args)

    def advance(self, seconds: float) -> None:
        """Let time pass; timers fire in their order, each at its time."""
        end = self.now + seconds
        self.run_ready()
        while self._timers and self._timers[0][0] <= end:
            at, _, timer = heapq.heappop(self._timers)
            self.now = max(self.now, at)
            if not timer.cancelled:
                timer.callback(*timer.args)
                self.run_ready()
        self.now = end


@dataclass
class SentFrame:
    """One frame on its way."""

    kind: Frame
    call_id: int
    header: bytes
    payload: bytes
    handed_over: Callable[[], None] | None

    @property
    def n_bytes(self) -> int:
        return len(self.header) + len(self.payload)


class ScriptedWire(Wire):
    """One end."""

    low_water_bytes = LOW_WATER_BYTES

    def __init__(self, loop: FakeLoop) -> None:
        super().__init__("nowhere")
        self.queue: deque[SentFrame] = deque()
        self.arriving: deque[SentFrame] = deque()
        self.other: ScriptedWire | None = None
        self.ended = ""  # how we ended it: closed | abandoned
        self._loop = loop
        self._was_high = False

    @property
    def queued_bytes(self) -> int:
        return sum(frame.n_bytes for frame in self.queue)

    def send_message(self, data: bytes) -> None:
        raise NotImplementedError

    def start_frames(self, sealer: Sealer, opener: Opener) -> None:
        return

    def send(
        self,
        kind: int,
        call_id: int,
        header: bytes,
        views: Sequence[memoryview],
        n_bytes: int,
        handed_over: Callable[[], None] | None = None,
    ) -> bool:
        if self.ended:
            return False
        frame = SentFrame(Frame(kind), call_id, header, b"".join(views), handed_over)
        assert len(frame.payload) == n_bytes
        self.queue.append(frame)
        self._was_high = self._was_high or self.queued_bytes >= self.low_water_bytes
        if frame.n_bytes <= INLINE_BYTES:
            frame.handed_over = None
            return True
        return False

    def flush(self) -> None:
        return

    def transmit(self, n: int = 1 << 30) -> None:
        """The kernel takes up to n frames."""
        while self.queue and n:
            n -= 1
            frame = self.queue.popleft()
            if frame.handed_over is not None and not self.ended:
                self._loop.call_soon(frame.handed_over)
            if self.other is not None:
                self.other.arriving.append(frame)
        if self._was_high and self.queued_bytes < self.low_water_bytes:
            self._was_high = False
            self._loop.call_soon(lambda: self.on_drained())

    def deliver(self, n: int = 1 << 30) -> None:
        """Up to n frames arrive here."""
        while self.arriving and n and not self.ended:
            n -= 1
            frame = self.arriving.popleft()
            payload = memoryview(frame.payload).toreadonly()
            self.on_frame(int(frame.kind), frame.call_id, frame.header, payload)
        if self.ended:
            self.arriving.clear()

    def lose(self) -> None:
        """The connection breaks, seen from here; what had arrived is lost as well."""
        lost = self.on_lost
        self.abandon()
        lost("endpoint closed: the script says so")

    def close(self, flush_s: float) -> None:
        self.transmit()
        self.silence()
        self.ended = self.ended or "closed"

    def abandon(self) -> None:
        self.silence()
        self.queue.clear()
        self.ended = self.ended or "abandoned"


class Party(Face):
    """One side: its conversation, and what its handlers got. Nothing is answered by itself."""

    def __init__(self, name: str, loop: FakeLoop) -> None:
        self.name = name
        self.loop = loop
        self.wire = ScriptedWire(loop)
        self.incoming: list[Incoming] = []  # not answered yet
        self.seen: list[Incoming] = []  # everything, in order of arrival
        self.stopped: list[Incoming] = []  # told that nobody waits for them
        self.told_more: set[int] = set()  # ids of streams that were told to go on
        self.times_ended = 0
        self.conversation: Conversation

    def serve(self, incoming: Incoming) -> None:
        incoming.stop = lambda: self.stopped.append(incoming)
        incoming.more = lambda: self._go_on(incoming)
        self.incoming.append(incoming)
        self.seen.append(incoming)

    def _go_on(self, incoming: Incoming) -> None:
        if self.conversation.ready_for_item(incoming):  # else a sender would look, and wait on
            self.told_more.add(id(incoming))

    def ended(self) -> None:
        self.times_ended += 1


def _identity(name: str) -> PeerIdentity:
    return PeerIdentity(role="trainer", name=name, host="host", pid=1, attempt=1, term=1)


def parties(
    limits: Limits, *, listener_limits: Limits | None = None, admit: bool = True
) -> tuple[FakeLoop, Party, Party]:
    """A dialer and a listener on one loop, admitted unless said otherwise."""
    loop = FakeLoop()
    dialer, listener = Party("dialer", loop), Party("listener", loop)
    dialer.wire.other, listener.wire.other = listener.wire, dialer.wire
    theirs = listener_limits or limits
    for us, them, ours, other in ((dialer, listener, limits, theirs), (listener, dialer, theirs, limits)):
        keys = SessionKeys(_identity(them.name), bytes(32), bytes(32), (other.window_messages, other.window_bytes))
        us.conversation = Conversation(loop, us.wire, keys, ours, us, dialer=us is dialer)
    if admit:
        listener.conversation.admit()
        listener.wire.transmit()
        dialer.wire.deliver()
        loop.run_ready()
    return loop, dialer, listener
