"""Large frames of the MPI carrier: their payload in pieces, cut from the caller's buffers and received in place."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from miles_hpc.control.frames import BodyMac, Head
from miles_hpc.core.transport import Buffer

__all__ = ["PIECE_BYTES", "ArrivingBody", "OutgoingBody", "cut", "last_line"]

#: A large frame's payload travels in pieces of this size.
PIECE_BYTES = 1 << 20


class OutgoingBody:
    """A large frame that is being sent: what isn't handed to MPI yet."""

    __slots__ = ("_left", "_ready", "_views", "handed_over", "mac")

    def __init__(
        self,
        header: bytes,
        views: Sequence[memoryview],
        n_bytes: int,
        mac: BodyMac | None,
        handed_over: Callable[[], None] | None,
    ) -> None:
        self._ready = deque(cut(memoryview(header)))
        self._views = deque(views)
        self._left = n_bytes
        self.mac = mac  # None when it has gone with the head
        self.handed_over = handed_over

    @property
    def is_over(self) -> bool:
        return not self._ready and not self._left

    def next_piece(self) -> Buffer:
        if self._ready:
            return self._ready.popleft()
        want = min(PIECE_BYTES, self._left)
        self._left -= want
        views = self._views
        piece: Buffer
        if len(views[0]) >= want:
            piece = self._take(want)
        else:
            parts = []
            while want:
                parts.append(self._take(min(want, len(views[0]))))
                want -= len(parts[-1])
            piece = b"".join(parts)
        if self.mac is not None:
            self.mac.update(piece)
        return piece

    def _take(self, n_bytes: int) -> memoryview:
        view = self._views[0]
        if len(view) == n_bytes:
            self._views.popleft()
            return view
        self._views[0] = view[n_bytes:]
        return view[:n_bytes]


class ArrivingBody:
    """A large frame that arrives. `places` are the pieces that weren't asked for yet, as views of `body`."""

    __slots__ = ("body", "head", "mac", "places", "tag")

    def __init__(self, head: Head, mac: BodyMac, body: memoryview, places: deque[memoryview], tag: bytes) -> None:
        self.head = head
        self.mac = mac
        self.body = body
        self.places = places
        self.tag = tag  # empty: it follows


def last_line(error: Exception) -> str:
    """What an MPI error's stack of messages comes down to."""
    return str(error).strip().splitlines()[-1].strip()


def cut(view: memoryview) -> list[memoryview]:
    return [view[start : start + PIECE_BYTES] for start in range(0, len(view), PIECE_BYTES)]
