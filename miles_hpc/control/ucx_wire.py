"""Frames over UCX: the wire of one connection.

    dial, accept ─▶ Line (TCP) ─ handshake ─▶ start_frames ─ worker's address, our tag ─▶ path numbers ─▶ frames
                                                              └─ sealed, as all on the line from here on

| waits | for | bounded by |
|---|---|---|
| frames | the peer's address and path numbers, over the line | the dialer's deadline, the line's end |
| pieces | IN_FLIGHT_BYTES of earlier ones to have left | the path's end, the line's end |
| the orderly end | the peer's end, over the line | flush_s |
| the loss of a peer that said goodbye | what it sent before, over UCX | LAST_WORDS_S |

**Goodbye.** A wire that ends on purpose says over its line how many messages it has sent, so that the peer takes them
all before it calls it lost. A line that ends without that is a process that died, or a link that broke.
"""

from __future__ import annotations

import functools
import secrets
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from miles_hpc.control.frames import (
    HEAD_BYTES,
    INLINE_BYTES,
    TAG_BYTES,
    BodyMac,
    Frame,
    Head,
    Opener,
    Sealer,
    aligned_buffer,
    read_head,
)
from miles_hpc.control.ucx_api import MESSAGE_BYTES, Inbox, Path
from miles_hpc.control.ucx_line import MAX_LINE_BYTES, Line
from miles_hpc.control.ucx_pieces import LENGTH, PACK_BYTES, LargeFrame, header_inline, piece_bytes, take_piece
from miles_hpc.control.ucx_worker import SharedPath, UcxWorker, agree_on_path
from miles_hpc.control.wire import LOW_WATER_BYTES, TimerHandle, Wire
from miles_hpc.core.errors import AuthenticationError, ProtocolError, UserError
from miles_hpc.core.transport import Buffer

__all__ = ["IN_FLIGHT_BYTES", "LAST_WORDS_S", "UcxWire"]

#: Bytes of a wire that are in UCX's hands, from which on the rest waits.
IN_FLIGHT_BYTES = 8 << 20
#: How long messages may follow a goodbye.
LAST_WORDS_S = 1.0

_TURN_BYTES = 8 << 20  # sent per callback, so that a large payload leaves room for other wires
_RECORD = struct.Struct("<cQQ")
_PATH_NUMBERS, _GOODBYE = b"P", b"E"
_EMPTY = memoryview(b"")

_Done = Callable[[], None]


class _Where(msgspec.Struct, frozen=True, array_like=True):
    """How to reach a wire's receiving end."""

    address: bytes  # of its UCX worker
    tag: int


_where_decoder = msgspec.msgpack.Decoder(_Where)


class UcxWire(Wire):
    """One connection: a line, and a pair of tags over the path to the peer's worker."""

    def __init__(self, worker: UcxWorker, sock: socket.socket, remote: str) -> None:
        super().__init__(remote)
        self._worker = worker
        self._loop = worker.loop
        self._line = Line(worker.loop, sock, self._line_message, self._line_ended, self._violated)
        self._open = True
        self._reading = True  # whether what arrives is of interest
        self._sealer: Sealer | None = None
        self._opener: Opener | None = None
        self._line_sealer: Sealer | None = None
        self._line_opener: Opener | None = None
        self._inbox: Inbox | None = None
        self.shared: SharedPath | None = None
        self._told_numbers = (0, 0)  # to the peer
        self._path: Path | None = None  # once both sides know that they take the same one
        self._tag = 0  # under which the peer receives
        # Outgoing.
        self._out: deque[bytes | LargeFrame] = deque()
        self._queued = 0
        self._on_its_way = 0
        self._n_sent = 0  # messages
        self._pumping = False
        self._was_high = False
        self._closing: TimerHandle | None = None
        self._said_goodbye = False
        # Incoming.
        self._n_received = 0
        self._n_announced: int | None = None  # by the peer's goodbye
        self._last_words: TimerHandle | None = None
        self._head: Head | None = None  # of the large frame that arrives
        self._mac: BodyMac | None = None
        self._body = _EMPTY  # header, payload and MAC of it
        worker.enter()

    # ------------------------------------------------------------------------------ connecting

    def send_message(self, data: bytes) -> None:
        self._line.send(data)

    def start_frames(self, sealer: Sealer, opener: Opener) -> None:
        self._sealer, self._opener = sealer, opener
        self._line_sealer, self._line_opener = sealer.beside(), opener.beside()
        self._line.believe()
        api = self._worker.api
        tag = secrets.randbits(64)
        self._inbox = api.inbox(tag, self._broken)
        self._inbox.listen(self._message_arrived)
        where = msgspec.msgpack.encode(_Where(api.address, tag))
        if len(where) > MAX_LINE_BYTES - HEAD_BYTES - TAG_BYTES:
            raise UserError(
                f"transport ucx: the worker's address takes {len(where)} bytes, expected less than {MAX_LINE_BYTES}; "
                "choose fewer devices by UCX_NET_DEVICES"
            )
        self._say(where)

    def _say(self, words: bytes) -> None:
        """Tell the peer beside the frames."""
        assert self._line_sealer is not None
        self._line.send(self._line_sealer.small(int(Frame.NOTIFY), 0, words, b""))

    def _line_message(self, data: bytes) -> None:
        try:
            if self._line_opener is None:
                self.on_message(data)
                return
            head = read_head(data)
            self._line_opener.small(data)
            words = data[HEAD_BYTES : HEAD_BYTES + head.header_bytes]
            if self.shared is None:
                where = _where_decoder.decode(words)
                self._tag = where.tag
                self.take_path(where.address)
            else:
                kind, number, other = _RECORD.unpack(words)
                if kind == _PATH_NUMBERS:
                    self._told_path((number, other))
                elif kind == _GOODBYE:
                    self._n_announced = number
                else:
                    raise ProtocolError(f"unexpected {kind!r} beside the frames")
        except (ProtocolError, AuthenticationError, msgspec.MsgspecError, struct.error, RecursionError) as error:
            self._violated(str(error))

    @property
    def is_new(self) -> bool:
        """Whether nothing was sent yet, because the peer hasn't told which path it takes."""
        return self._path is None

    def take_path(self, address: bytes) -> None:
        """Send and receive over the path to this worker, and tell the peer which one it is."""
        assert self._inbox is not None
        try:
            shared = self._worker.path_to(address)
        except ConnectionError as error:
            self.fail(f"endpoint closed: UCX finds no way to the peer ({error}); check UCX_TLS and UCX_NET_DEVICES")
            return
        self.shared = shared
        shared.wires.add(self)
        self._inbox.attach(shared.path)
        self.tell_numbers()

    def tell_numbers(self) -> None:
        if self.shared is not None and self._told_numbers != self.shared.numbers:
            self._told_numbers = self.shared.numbers
            self._say(_RECORD.pack(_PATH_NUMBERS, *self._told_numbers))

    def _told_path(self, numbers: tuple[int, int]) -> None:
        shared = agree_on_path(self, numbers)
        if shared is not None:
            self._path = shared.path
            self._pump()

    # ------------------------------------------------------------------------------ sending

    @property
    def queued_bytes(self) -> int:
        return self._queued

    def send(
        self,
        kind: int,
        call_id: int,
        header: bytes,
        views: Sequence[memoryview],
        n_bytes: int,
        handed_over: Callable[[], None] | None = None,
    ) -> bool:
        sealer = self._sealer
        assert sealer is not None, "frames before start_frames"
        if not self._open:
            return False
        small = HEAD_BYTES + len(header) + n_bytes + TAG_BYTES
        if small <= INLINE_BYTES:
            self._out.append(sealer.small(kind, call_id, header, b"".join(views) if views else b""))
            self._queued += small
        else:
            prefix, mac = sealer.large(kind, call_id, header, n_bytes)
            self._out.append(LargeFrame(prefix, header, views, n_bytes, mac, handed_over))
            self._queued += small + TAG_BYTES
        if self._queued >= LOW_WATER_BYTES:
            self._was_high = True
        return small <= INLINE_BYTES

    def flush(self) -> None:
        out, path = self._out, self._path
        if not out or path is None:
            return
        if len(out) == 1 and not self._on_its_way and not self._was_high and not self._pumping:
            frame = out[0]
            if isinstance(frame, bytes):  # by far the most frequent case
                out.clear()
                self._post(path, LENGTH.pack(len(frame)) + frame, len(frame))
                return
        self._pump()

    def _pump(self) -> None:
        """Hand to UCX what is queued, as long as not too much is on its way."""
        path = self._path
        if path is None or self._pumping or not self._open:
            return
        self._pumping = True
        out = self._out
        turn = 0
        while out and self._on_its_way < IN_FLIGHT_BYTES:
            first = out[0]
            if isinstance(first, bytes):
                turn += self._send_small(path)
            else:
                turn += self._send_next(path, first)
            if turn >= _TURN_BYTES:
                self._loop.call_soon(self._pump)
                break
        self._pumping = False
        if self._was_high and self._queued < LOW_WATER_BYTES:
            self._was_high = False
            self._loop.call_soon(self._tell_drained)
        if self._closing is not None:
            self._say_goodbye()

    def _send_small(self, path: Path) -> int:
        """One message with the small frames at the front of the queue."""
        out = self._out
        frame = out.popleft()
        assert isinstance(frame, bytes)
        n = len(frame)
        if out and n < PACK_BYTES:
            frames = [frame]
            while out and isinstance(out[0], bytes) and n + len(out[0]) <= PACK_BYTES:
                frame = out.popleft()
                assert isinstance(frame, bytes)
                frames.append(frame)
                n += len(frame)
            frame = b"".join(frames)
        self._post(path, LENGTH.pack(n) + frame, n)
        return n

    def _send_next(self, path: Path, large: LargeFrame) -> int:
        """The next message of the large frame at the front of the queue."""
        if large.first is not None:
            first, large.first = large.first, None
            n = len(first) - LENGTH.size
            self._post(path, first, n)
            return n
        if large.sizes:
            n = large.sizes.popleft()
            piece = take_piece(large.views, n)
            self._post(path, piece, n, None if large.sizes else large.handed_over)
            large.mac.update(piece)  # while it travels
            return n
        self._out.popleft()
        self._post(path, large.mac.tag(), TAG_BYTES)
        return TAG_BYTES

    def _post(self, path: Path, data: Buffer, n: int, handed_over: _Done | None = None) -> None:
        self._n_sent += 1
        assert self.shared is not None
        self.shared.unheard = True
        if path.send(self._tag, data, functools.partial(self._has_left, n, handed_over)):
            self._queued -= n
            if handed_over is not None:
                self._loop.call_soon(handed_over)
        else:
            self._on_its_way += n
            self._worker.kick()

    def _has_left(self, n: int, handed_over: _Done | None) -> None:
        self._on_its_way -= n
        self._queued -= n
        if handed_over is not None and self._open:
            handed_over()
        if self._out or self._was_high:
            self._pump()

    def _tell_drained(self) -> None:
        self.on_drained()

    # ------------------------------------------------------------------------------ receiving

    def _message_arrived(self, data: memoryview) -> None:
        """A message of small frames, or the first one of a large frame."""
        opener, shared = self._opener, self.shared
        assert opener is not None and shared is not None
        self._n_received += 1
        if not shared.heard:
            shared.hear(self.remote)
        try:
            (n,) = LENGTH.unpack_from(data)
            start, stop = LENGTH.size, LENGTH.size + n
            if stop > data.nbytes:
                raise ProtocolError(f"message of {n} bytes, limit {MESSAGE_BYTES - LENGTH.size}")
            while start < stop:
                head = read_head(data, start)
                kind, n_header, n_payload, call_id = head
                total = HEAD_BYTES + n_header + n_payload + TAG_BYTES
                if total > INLINE_BYTES:
                    self._begin_large(head, data[start:stop])
                    return
                if start + total > stop:
                    raise ProtocolError("a frame is longer than its message")
                frame = bytes(data[start : start + total])
                opener.small(frame)
                start += total
                cut = HEAD_BYTES + n_header
                payload = memoryview(frame)[cut:-TAG_BYTES] if n_payload else _EMPTY
                self.on_frame(kind, call_id, frame[HEAD_BYTES:cut], payload)
                if not self._reading:
                    return
        except (AuthenticationError, ProtocolError, struct.error) as error:
            self._violated(str(error))
            return
        except MemoryError:
            self._violated("no memory for a frame of the announced size")
            return
        if self._last_words is not None:
            self._check_last_words()

    def _begin_large(self, head: Head, data: memoryview) -> None:
        """Check the head, allocate the frame's own buffer, and expect each piece at its place."""
        assert self._opener is not None and self._inbox is not None
        _, n_header, n_payload, _ = head
        cut = HEAD_BYTES + TAG_BYTES
        inline = n_header if header_inline(n_header) else 0
        if data.nbytes != cut + inline:
            raise ProtocolError(f"first message of a large frame of {data.nbytes} bytes, expected {cut + inline}")
        self._mac = mac = self._opener.large(head, data[:HEAD_BYTES], data[HEAD_BYTES:cut])
        self._head = head
        self._body = body = aligned_buffer(n_header, n_payload + TAG_BYTES)
        if inline:
            body[:inline] = data[cut:]
            mac.update(body[:inline])
        start = inline
        for n in piece_bytes(n_header, n_payload):
            piece = body[start : start + n]
            self._inbox.expect_piece(piece, functools.partial(self._piece_arrived, piece))
            start += n
        self._inbox.expect_piece(body[start:], self._body_arrived)

    def _piece_arrived(self, piece: memoryview) -> None:
        self._n_received += 1
        if self._mac is not None:
            self._mac.update(piece)

    def _body_arrived(self) -> None:
        head, mac, body = self._head, self._mac, self._body
        assert head is not None and mac is not None
        self._n_received += 1
        self._head, self._mac, self._body = None, None, _EMPTY
        end_of_data = len(body) - TAG_BYTES
        try:
            mac.check(body[end_of_data:])
        except AuthenticationError as error:
            self._violated(str(error))
            return
        payload = body[head.header_bytes : end_of_data].toreadonly()
        self.on_frame(head.kind, head.call_id, bytes(body[: head.header_bytes]), payload)
        if self._last_words is not None:
            self._check_last_words()

    def _violated(self, reason: str) -> None:
        if self._reading:
            self._stop_reading()
            self.on_violated(reason)

    def _stop_reading(self) -> None:
        self._reading = False
        self._head, self._mac, self._body = None, None, _EMPTY
        if self._inbox is not None:
            self._inbox.close()

    def _broken(self, reason: str) -> None:
        """The inbox got what wasn't expected, or failed."""
        if reason.startswith("protocol error"):
            self._violated(reason)
        else:
            self.fail(reason)

    # ------------------------------------------------------------------------------ the end

    def _line_ended(self, reason: str, answered: bool) -> None:
        if not self._open:
            return
        if self._closing is not None:
            if not answered:
                self._leave_path()
            elif self.shared is not None and self._said_goodbye:
                self.shared.unheard = False  # it has taken everything
            self.abandon()
        elif self._n_announced is not None:
            self._last_words = self._loop.call_later(LAST_WORDS_S, self._check_last_words, True)
            self._worker.drain()
            self._check_last_words()
        elif self.shared is None:
            self.fail(f"endpoint closed: {reason}")
        else:
            self._worker.drain()  # what it sent before, its reason for the end perhaps
            self._leave_path()
            self.fail(f"endpoint closed: {reason}")

    def _check_last_words(self, too_late: bool = False) -> None:
        if self._last_words is None or not self._open:
            return
        if too_late:
            self._leave_path()
        if too_late or self._n_received >= (self._n_announced or 0):
            self.fail("endpoint closed: the peer has closed the connection")

    def fail(self, reason: str) -> None:
        """The connection is gone."""
        if not self._open:
            return
        lost = self.on_lost
        self._end(goodbye=False)
        lost(reason)

    def close(self, flush_s: float) -> None:
        """Send what is queued and our goodbye, wait shortly for the peer's end, close."""
        self.silence()
        if not self._open or self._closing is not None:
            return
        self._stop_reading()
        self._closing = self._loop.call_later(flush_s, self._unanswered)
        self._pump()
        self._say_goodbye()

    def _say_goodbye(self) -> None:
        """Once nothing is queued. The peer ends the line when it has taken everything."""
        if not self._said_goodbye and not self._out:
            self._said_goodbye = True
            if self.shared is not None:
                self._say(_RECORD.pack(_GOODBYE, self._n_sent, 0))
            self._line.finish()

    def _unanswered(self) -> None:
        self._leave_path()
        self.abandon()

    def _leave_path(self) -> None:
        """The end wasn't as it should be. If this was the last wire, the next one takes another path."""
        shared = self.shared
        if shared is not None and len(shared.wires) == 1:
            shared.wires.clear()
            shared.leave("")

    def abandon(self) -> None:
        self._end(goodbye=True)

    def _end(self, *, goodbye: bool) -> None:
        self.silence()
        if not self._open:
            return
        if goodbye and self.shared is not None and not self._said_goodbye:
            self._say(_RECORD.pack(_GOODBYE, self._n_sent, 0))
        self._open = False
        self._stop_reading()
        for timer in (self._closing, self._last_words):
            if timer is not None:
                timer.cancel()
        self._line.close()
        self._out.clear()
        self._queued = 0
        if self.shared is not None:
            self.shared.wires.discard(self)
            self.shared = None
        self._path = None
        self._worker.leave()
