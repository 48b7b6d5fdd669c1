"""How frames are cut into UCX messages; both sides know the rules, so sizes aren't sent.

small frames    whole ones, joined up to PACK_BYTES: u32 length │ frame │ frame │ ...
large frame     u32 length │ head │ its MAC │ header if that is short,   pieces,   body MAC
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from miles_hpc.control.frames import HEAD_BYTES, TAG_BYTES, BodyMac
from miles_hpc.core.transport import Buffer

__all__ = ["LENGTH", "PACK_BYTES", "PIECE_BYTES", "LargeFrame", "header_inline", "piece_bytes", "take_piece"]

#: Small frames leave together in messages of at most so many bytes: below the 8192 from which ucxx has UCX ask first.
PACK_BYTES = 8000
#: Payloads travel in pieces of this size. Measured over TCP: more and less are slower.
PIECE_BYTES = 1 << 20
#: Of the bytes that follow in a message of frames.
LENGTH = struct.Struct("<I")


def piece_bytes(n_header: int, n_payload: int) -> Iterator[int]:
    """Sizes of the messages between the first one of a large frame and its MAC, in order.

    Both sides know them: the header by itself unless it travels in the first message, then the payload, each cut at
    multiples of PIECE_BYTES.
    """
    for total in (0 if header_inline(n_header) else n_header, n_payload):
        for start in range(0, total, PIECE_BYTES):
            yield min(PIECE_BYTES, total - start)


def header_inline(n_header: int) -> bool:
    """Whether a large frame's header travels in its first message."""
    return HEAD_BYTES + TAG_BYTES + n_header <= PACK_BYTES


def take_piece(views: deque[memoryview], n: int) -> Buffer:
    """Take the next `n` bytes from the views; copied only when they lie in more than one."""
    view = views[0]
    if view.nbytes > n:
        views[0] = view[n:]
        return view[:n]
    views.popleft()
    if view.nbytes == n:
        return view
    parts = [view]
    missing = n - view.nbytes
    while missing:
        view = views[0]
        if view.nbytes > missing:
            views[0] = view[missing:]
            view = view[:missing]
        else:
            views.popleft()
        parts.append(view)
        missing -= view.nbytes
    return b"".join(parts)


class LargeFrame:
    """A large frame on its way out, message by message."""

    __slots__ = ("first", "handed_over", "mac", "sizes", "views")

    def __init__(
        self,
        prefix: bytes,
        header: bytes,
        views: Sequence[memoryview],
        n_payload: int,
        mac: BodyMac,
        handed_over: Callable[[], None] | None,
    ) -> None:
        inline = header_inline(len(header))
        first = prefix + header if inline else prefix
        self.first: bytes | None = LENGTH.pack(len(first)) + first
        if inline:
            mac.update(header)
        self.mac = mac
        self.views = deque(views)
        if not inline:
            self.views.appendleft(memoryview(header))
        self.sizes = deque(piece_bytes(len(header), n_payload))
        self.handed_over = handed_over
