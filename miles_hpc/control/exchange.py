"""One call, stream or notify on its way: at the side that asks, at the side that answers, and what an answer holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from miles_hpc.control.frames import Failure, Frame, byte_views
from miles_hpc.core.errors import DeadlineExpired
from miles_hpc.core.messages import Ack, Message, encode
from miles_hpc.core.transport import Buffer, Reply

__all__ = [
    "ACKED",
    "MAX_REASON_CHARS",
    "STREAM_WINDOW",
    "Exchange",
    "Incoming",
    "content_of",
    "failure_header",
    "read_failure",
]

#: Items of a stream that may be on their way or unread.
STREAM_WINDOW = 16
#: Of what a peer's broken frame can make us say and log.
MAX_REASON_CHARS = 500
#: What a handler that gives nothing has answered.
ACKED = Ack()

_MAX_FAILURE_CHARS = 16_384
_failure_decoder = msgspec.msgpack.Decoder(Failure)


def failure_header(kind: str, text: str) -> bytes:
    """An exception as a frame's header."""
    text = text[:_MAX_FAILURE_CHARS]
    try:
        return msgspec.msgpack.encode(Failure(kind, text))
    except UnicodeEncodeError:  # Python keeps the odd bytes of file names as lone surrogates
        return msgspec.msgpack.encode(Failure(kind, text.encode(errors="replace").decode()))


def read_failure(header: bytes) -> Failure:
    """An exception of the peer, shortened. Raises msgspec.MsgspecError."""
    failure = _failure_decoder.decode(header)
    return Failure(failure.kind[:MAX_REASON_CHARS], failure.text[:_MAX_FAILURE_CHARS])


def content_of(result: Message | tuple[Message, Sequence[Buffer]] | None) -> tuple[bytes, Sequence[memoryview], int]:
    """Header and payload of what a handler gave. Raises TypeError when that isn't a message."""
    message, payload = result if isinstance(result, tuple) else (ACKED if result is None else result, ())
    if not isinstance(message, Message):
        raise TypeError(f"a handler answered {type(message).__name__}, expected a Message, or one and its payload")
    views, n_bytes = byte_views(payload) if payload else ((), 0)
    return encode(message), views, n_bytes


class Exchange(msgspec.Struct, eq=False):
    """One call, stream or notify of ours. `result` is None until it has ended; then a Reply or an error.

    A struct, as Incoming is: it's made in C, once for every call.
    """

    kind: int
    name: str
    header: bytes
    views: Sequence[memoryview]
    cost: int  # bytes of the peer's window
    call_id: int = 0  # 0 until it has left
    item_room: int = STREAM_WINDOW  # items that the peer may still send
    start: float = 0.0
    end: float = 0.0
    result: Reply | Exception | None = None
    on_done: Callable[[Exchange], None] | None = None
    on_item: Callable[[Reply], None] | None = None

    def expired(self, peer: str, now: float) -> DeadlineExpired:
        """The error of a deadline that has passed."""
        limit = self.end - self.start
        return DeadlineExpired(f"{peer}: {self.name}: nothing after {now - self.start:.1f} s (limit {limit:.1f} s)")

    def settle(self, result: Reply | Exception) -> None:
        """End it, unless it has ended."""
        if self.result is None:
            self.result = result
            if self.on_done is not None:
                self.on_done(self)


class Incoming(msgspec.Struct, eq=False):
    """A message of the peer that a handler works on."""

    kind: int
    call_id: int
    message: Message
    payload: memoryview
    cost: int
    credit: int = STREAM_WINDOW  # items that may still be sent
    held: bool = False  # not given to the face yet
    unwanted: bool = False  # the caller gave up; for faces that begin handlers later
    stop: Callable[[], None] | None = None  # set by the face: end the handler, nobody waits for it
    more: Callable[[], None] | None = None  # set by the face: `ready_for_item` may have become true

    @property
    def wants_stream(self) -> bool:
        return self.kind == Frame.STREAM
