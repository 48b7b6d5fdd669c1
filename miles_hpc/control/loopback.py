"""The carrier within one process: frames handed over as objects, between loops of the same or of different threads.

For tests and for `local` runs in one process. The handshake, limits and order are those of every other carrier; there
are no frame MACs, since nobody else can touch the frames. Payload buffers are joined when sent, so that sender and
receiver never share memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from miles_hpc.control.frames import Opener, Sealer
from miles_hpc.control.wire import Carrier, Loop, Port, Wire
from miles_hpc.core.errors import PeerLost, UserError

__all__ = ["LoopbackCarrier"]

_numbers = itertools.count(1)
_ports: dict[str, LoopbackPort] = {}
_EMPTY = memoryview(b"")


class LoopbackWire(Wire):
    """One half of a pair. `_post` runs in the other half's loop, in the order of the calls."""

    def __init__(self, loop: Loop, remote: str) -> None:
        super().__init__(remote)
        self._loop = loop
        self._other: LoopbackWire | None = None

    def _post(self, callback: str, *args: object) -> None:
        other = self._other
        if other is None:
            return
        try:
            other._loop.call_soon_threadsafe(other._arrive, callback, *args)
        except RuntimeError:  # asyncio: its loop is closed, as a process that has ended
            self._loop.call_soon_threadsafe(self._arrive, "on_lost", "endpoint closed: the peer's loop has ended")

    def _arrive(self, callback: str, *args: object) -> None:
        if self._other is not None:
            if callback == "on_lost":
                self._other = None
            getattr(self, callback)(*args)

    @property
    def queued_bytes(self) -> int:
        return 0

    def send_message(self, data: bytes) -> None:
        self._post("on_message", data)

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
        self._post("on_frame", kind, call_id, header, memoryview(b"".join(views)) if views else _EMPTY)
        return True

    def flush(self) -> None:
        return

    def close(self, flush_s: float) -> None:
        self.abandon()  # what was sent is in the other loop's queue already

    def abandon(self) -> None:
        self.silence()
        self._post("on_lost", "endpoint closed: the peer is gone")
        self._other = None


class LoopbackPort(Port):
    """A listener of this process."""

    def __init__(self, loop: Loop, accepted: Callable[[Wire], None]) -> None:
        self.address = f"loopback://{next(_numbers)}"
        self.loop = loop
        self._accepted = accepted
        _ports[self.address] = self

    def arrived(self, wire: LoopbackWire) -> None:
        """A connection has come; in our loop, so that we may be closed meanwhile."""
        if self.address in _ports:
            self._accepted(wire)
        else:
            wire.abandon()

    def close(self) -> None:
        _ports.pop(self.address, None)


class LoopbackCarrier(Carrier):
    """Addresses look like loopback://number."""

    scheme = "loopback"

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        wakeable = getattr(loop, "wakeable", None)  # asyncio's loops always are
        if wakeable is not None:
            wakeable()

    def listen(self, bind: str, accepted: Callable[[Wire], None]) -> Port:
        return LoopbackPort(self._loop, accepted)

    def dial(
        self, address: str, connected: Callable[[Wire], None], failed: Callable[[Exception], None]
    ) -> Callable[[], None]:
        if not address.startswith("loopback://"):
            raise UserError(f"address {address!r}: expected loopback://number")
        port = _ports.get(address)
        given_up = False

        def give_up() -> None:
            nonlocal given_up
            given_up = True

        ours = LoopbackWire(self._loop, address)

        def finish() -> None:
            if given_up:
                ours.abandon()
            elif ours._other is None:
                failed(PeerLost(f"{address}: can't connect: nobody listens there in this process"))
            else:
                connected(ours)

        self._loop.call_soon(finish)  # before the other side can say anything
        if port is not None:
            theirs = LoopbackWire(port.loop, "this process")
            ours._other, theirs._other = theirs, ours
            try:
                port.loop.call_soon_threadsafe(port.arrived, theirs)
            except RuntimeError:  # asyncio: its loop is closed
                ours._other = None
        return give_up

    def chosen(self) -> dict[str, str]:
        return {"transport": "loopback"}

    def close(self) -> None:
        return
