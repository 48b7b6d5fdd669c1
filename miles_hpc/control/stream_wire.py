"""The bytes of messages and frames on a connected stream socket, TCP or Unix.

    readable ─▶ recv_into(64 KiB, shared) ─▶ whole messages and small frames ─▶ callbacks; the rest is kept per wire
                 └─ a large frame ─▶ recv_into(its own buffer), MAC updated as it arrives
    flush    ─▶ sendmsg(what is queued, large payloads MACed piece by piece); the rest waits for writable
                 └─ large payloads to a process of this host ─▶ shared memory (shared_ring.py); the rest waits for slots

Payloads aren't copied in Python: sent from the caller's buffers, received into one buffer of the announced (and
authenticated) size. Many small frames leave in one system call and arrive in one. A callback must not run the loop, or
other wires would write over the shared input that is being parsed.

A peer that was killed is noticed by the closed socket at once. A cut link is what heartbeats (roster.py) are for; where
there are none, dead_paths.py ends the connection later.
"""

from __future__ import annotations

import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence

from miles_hpc.control.auth import MAX_HANDSHAKE_BYTES
from miles_hpc.control.dead_paths import PathWatch, keep_alive
from miles_hpc.control.frames import (
    HEAD,
    HEAD_BYTES,
    INLINE_BYTES,
    MAX_KIND,
    TAG_BYTES,
    BodyMac,
    Frame,
    Head,
    Opener,
    Sealer,
    aligned_buffer,
)
from miles_hpc.control.shared_ring import (
    LEAST_BYTES,
    LEAST_VIEW_BYTES,
    MAX_HEADER_BYTES,
    SLOTS,
    Passed,
    PassedIn,
    RingIn,
    RingOut,
    is_for_sender,
)
from miles_hpc.control.wire import LOW_WATER_BYTES, Loop, TimerHandle, Wire
from miles_hpc.core.errors import AuthenticationError, ProtocolError

__all__ = ["INPUT_BYTES", "StreamWire"]

#: Size of the room for input, which the wires of a loop share.
INPUT_BYTES = 64 * 1024

_STEP_BYTES = 512 << 10  # of a large payload per step: MACed and handed over while it's in the cache
_READ_BYTES = 256 << 10  # of a large payload that should have arrived before it's read on
_TURN_BYTES = 8 << 20  # received per callback, so that a large payload leaves room for other wires
_MAX_PIECES = 512  # below IOV_MAX
_UNIX_BUFFER_BYTES = 1 << 20  # of a Unix socket, which has no automatic growth as TCP's have
_SMALL_BODY_BYTES = INLINE_BYTES - HEAD_BYTES - TAG_BYTES
_LENGTH = struct.Struct("<H")
_EMPTY = memoryview(b"")
_FREED = int(Frame.FREED)

_Done = Callable[[], None]


class _Large:
    """A large frame that is being sent: the views that aren't MACed yet."""

    __slots__ = ("handed_over", "mac", "views")

    def __init__(self, mac: BodyMac, views: Sequence[memoryview], handed_over: _Done | None) -> None:
        self.mac = mac
        self.views = deque(views)
        self.handed_over = handed_over

    def next_piece(self) -> memoryview:
        """The next step's bytes, MACed."""
        view = self.views[0]
        piece = view[:_STEP_BYTES]
        if len(piece) == len(view):
            self.views.popleft()
        else:
            self.views[0] = view[_STEP_BYTES:]
        self.mac.update(piece)
        return piece


class StreamWire(Wire):
    """One connected socket."""

    def __init__(self, loop: Loop, sock: socket.socket, remote: str, room: memoryview) -> None:
        """`room` is where input arrives; all wires of a loop share it, since none keeps anything there."""
        super().__init__(remote)
        self._loop = loop
        self._sock = sock
        self._room = room
        self._fd = sock.fileno()
        self._open = True
        self._reading = True  # whether what arrives is of interest
        self._sealer: Sealer | None = None
        self._opener: Opener | None = None
        # Outgoing: `_pieces` are ready for the socket, `_backlog` follows them: bytes, or large frames to be MACed.
        self._pieces: deque[memoryview | bytes] = deque()
        self._backlog: deque[bytes | _Large | Passed] = deque()
        self._queued = 0
        self._sent = 0  # bytes of all time, as are the positions in _handed_over
        self._ready_until = 0
        self._handed_over: deque[tuple[int, _Done]] = deque()
        self._writing = False
        self._was_high = False
        # Incoming.
        self._rest = b""  # of a message or small frame that isn't whole yet
        self._head: Head | None = None  # of the large frame that arrives
        self._mac: BodyMac | None = None
        self._body = _EMPTY  # header, payload and MAC of it
        self._body_got = 0
        self._low_water = 1
        # Within a host.
        self._last_kind = MAX_KIND
        self._ring_out: RingOut | None = None
        self._ring_in: RingIn | None = None
        self._passed: PassedIn | None = None
        self._freed_sealer: Sealer | None = None
        self._freed_opener: Opener | None = None
        self._n_freed = 0  # slots of the peer that we have to tell of once the large frame in between has left
        self._freed_at: deque[int] = deque(maxlen=SLOTS)  # up to where those that we told of last were sent
        self._closing: TimerHandle | None = None
        self._is_tcp = sock.family != socket.AF_UNIX
        self._path = PathWatch(loop, sock, self._host_gone) if self._is_tcp else None
        _tune(sock)
        loop.add_reader(self._fd, self._readable)

    # ------------------------------------------------------------------------------ sending

    @property
    def queued_bytes(self) -> int:
        return self._queued

    def send_message(self, data: bytes) -> None:
        if self._open:
            self._queue(_LENGTH.pack(len(data)) + data)
            self.flush()

    def start_frames(self, sealer: Sealer, opener: Opener) -> None:
        self._sealer, self._opener = sealer, opener
        if not self._is_tcp:
            self._last_kind = int(Frame.FREED)
            self._ring_out, self._ring_in = RingOut(), RingIn()
            self._freed_sealer, self._freed_opener = sealer.beside(), opener.beside()

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
        if len(header) + n_bytes <= _SMALL_BODY_BYTES:
            data = sealer.small(kind, call_id, header, b"".join(views) if views else b"")
            if self._backlog or self._queued >= LOW_WATER_BYTES:
                self._queue(data)
            else:  # as _queue, which is called for the rest
                n = len(data)
                self._queued += n
                self._ready_until += n
                self._pieces.append(data)
            return True
        ring = self._ring_out
        if (
            ring is not None
            and n_bytes >= max(LEAST_BYTES, len(views) * LEAST_VIEW_BYTES)
            and len(header) <= MAX_HEADER_BYTES
        ):
            if ring.is_open:
                passed = Passed(sealer, kind, call_id, header, views, n_bytes, handed_over)
                self._queue(passed.first)
                self._backlog.append(passed)
                self._queued += n_bytes
                self._was_high = self._was_high or self._queued >= LOW_WATER_BYTES
                return False
            words = ring.ask()
            if words is not None:
                self._queue(sealer.small(Frame.RING, 0, words, b""))
        prefix, mac = sealer.large(kind, call_id, header, n_bytes)
        mac.update(header)
        self._queue(prefix + header)
        self._backlog.append(_Large(mac, views, handed_over))
        self._queued += n_bytes + TAG_BYTES
        self._was_high = self._was_high or self._queued >= LOW_WATER_BYTES
        return False

    def _queue(self, data: bytes) -> None:
        self._queued += len(data)
        if self._queued >= LOW_WATER_BYTES:
            self._was_high = True
        if self._backlog:
            self._backlog.append(data)
        else:
            self._pieces.append(data)
            self._ready_until += len(data)

    def _queue_freed(self) -> None:
        """Tell of a slot, ahead of the backlog: that may wait for slots of the peer, and the peer for this one."""
        assert self._freed_sealer is not None
        data = self._freed_sealer.small(Frame.FREED, 0, b"", b"")
        self._pieces.append(data)
        self._queued += len(data)
        self._ready_until += len(data)
        self._freed_at.append(self._ready_until)

    def flush(self) -> None:
        if self._queued and not self._writing and self._open:
            self._write()

    def _write(self) -> None:
        """Send as much as the kernel takes and ask to be called again for the rest."""
        pieces = self._pieces
        sock = self._sock
        try:
            while pieces or self._backlog:
                if len(pieces) == 1 and not self._backlog:  # by far the most frequent case
                    piece = pieces[0]
                    sent = sock.send(piece)
                    self._sent += sent
                    self._queued -= sent
                    if sent == len(piece):
                        pieces.clear()
                        break
                    pieces[0] = memoryview(piece)[sent:]
                    continue
                ready = sum(map(len, pieces)) if self._backlog else 0
                while self._backlog and ready < _STEP_BYTES and not self._waits_for_slot:
                    ready += self._prepare()
                if not pieces:
                    break
                batch = list(pieces) if len(pieces) <= _MAX_PIECES else [pieces[i] for i in range(_MAX_PIECES)]
                sent = sock.sendmsg(batch)
                self._sent += sent
                self._queued -= sent
                while sent:
                    n_first = len(pieces[0])
                    if sent >= n_first:
                        sent -= n_first
                        pieces.popleft()
                    else:
                        pieces[0] = memoryview(pieces[0])[sent:]
                        sent = 0
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            self._loop.call_soon(self._send_failed, f"endpoint closed: {error.strerror or error}")
            return
        if self._path is not None:
            self._path.sent()
        if self._handed_over and self._handed_over[0][0] <= self._sent:
            self._tell_handed_over()
        if self._was_high and self._queued < LOW_WATER_BYTES:
            self._was_high = False
            self._loop.call_soon(self._tell_drained)
        wants = bool(pieces or (self._backlog and not self._waits_for_slot))
        if wants != self._writing and self._open:
            self._writing = wants
            if wants:
                self._loop.add_writer(self._fd, self._write)
            else:
                self._loop.remove_writer(self._fd)
        if self._closing is not None and not pieces and not self._backlog:
            self._say_end()

    @property
    def _waits_for_slot(self) -> bool:
        """Whether the backlog can't go on before the peer has freed some of the ring."""
        ring = self._ring_out
        return ring is not None and not ring.n_free and bool(self._backlog) and isinstance(self._backlog[0], Passed)

    def _host_gone(self, evidence: str) -> None:
        self._fail(f"endpoint closed: {evidence}")

    def _prepare(self) -> int:
        """Move the next piece of the backlog to the ready ones; returns its size, wherever that lies."""
        first = self._backlog[0]
        if isinstance(first, bytes):
            self._backlog.popleft()
            self._pieces.append(first)
            self._ready_until += len(first)
            return len(first)
        if isinstance(first, Passed):
            assert self._ring_out is not None
            frame, n = first.next_frame(self._ring_out)
            self._pieces.append(frame)
            self._ready_until += len(frame)
            self._queued += len(frame) - n
            if not first.pieces:
                self._backlog.popleft()
                if first.handed_over is not None:
                    self._loop.call_soon(first.handed_over)
            return n
        if first.views:
            piece = first.next_piece()
            self._pieces.append(piece)
            self._ready_until += len(piece)
            return len(piece)
        self._backlog.popleft()
        self._pieces.append(first.mac.tag())
        self._ready_until += TAG_BYTES
        if first.handed_over is not None:
            self._handed_over.append((self._ready_until, first.handed_over))
        while self._n_freed:
            self._n_freed -= 1
            self._queue_freed()
        return TAG_BYTES

    def _tell_handed_over(self) -> None:
        while self._handed_over and self._handed_over[0][0] <= self._sent:
            self._loop.call_soon(self._handed_over.popleft()[1])

    def _tell_drained(self) -> None:
        self.on_drained()

    # ------------------------------------------------------------------------------ receiving

    def _readable(self) -> None:
        turn = 0
        try:
            while self._open and turn < _TURN_BYTES:
                if self._mac is not None:
                    n = self._sock.recv_into(self._body[self._body_got : self._body_got + _STEP_BYTES])
                    room = kept = 0
                else:
                    target = self._room
                    kept = len(self._rest)
                    if kept:
                        target[:kept] = self._rest
                        target = target[kept:]
                    room = len(target)
                    n = self._sock.recv_into(target)
                if n == 0:
                    self._fail("endpoint closed: the peer's socket is gone")
                    return
                if not self._reading:
                    return  # we have said goodbye and only wait for the peer's end
                if self._mac is not None:
                    self._bulk_arrived(n)
                else:
                    self._rest = b""
                    self._parse(kept + n)
                    if self._mac is None and n < room:
                        break  # the socket is most likely empty
                turn += n
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            self._fail(f"endpoint closed: {error.strerror or error}")
        except (AuthenticationError, ProtocolError) as error:
            self._violated(str(error))
        except struct.error as error:
            self._violated(f"protocol error: {error}")
        except MemoryError:
            self._violated("no memory for a frame of the announced size")

    def _violated(self, reason: str) -> None:
        self._reading = False
        self._passed = None
        self._rest, self._head, self._mac, self._body = b"", None, None, _EMPTY
        self.on_violated(reason)

    def _parse(self, stop: int) -> None:
        """Deliver all whole messages and frames of the first `stop` bytes and keep the rest for the next call."""
        start, view = 0, self._room
        while self._reading:
            opener = self._opener
            if opener is None:
                taken = self._parse_message(start, stop)
                if not taken:
                    break
                start += taken
                continue
            available = stop - start
            if available < HEAD_BYTES:
                break
            kind, n_header, n_payload, call_id = HEAD.unpack_from(view, start)
            if not 1 <= kind <= self._last_kind:
                raise ProtocolError(f"frame of unknown kind {kind}")
            if n_header + n_payload > _SMALL_BODY_BYTES:
                if kind > MAX_KIND:
                    raise ProtocolError(f"{Frame(kind).name} of {n_header + n_payload} bytes")
                if available < HEAD_BYTES + TAG_BYTES:
                    break
                start = self._begin_large(Head(kind, n_header, n_payload, call_id), start, stop)
                continue
            cut = HEAD_BYTES + n_header
            total = cut + n_payload + TAG_BYTES
            if available < total:
                break
            frame = bytes(view[start : start + total])
            if kind == _FREED:
                assert self._freed_opener is not None
                opener = self._freed_opener
            opener.small(frame)
            start += total
            payload = memoryview(frame)[cut:-TAG_BYTES] if n_payload else _EMPTY
            if kind <= MAX_KIND:
                self.on_frame(kind, call_id, frame[HEAD_BYTES:cut], payload)
            else:
                self._within_host(kind, call_id, frame[HEAD_BYTES:cut], payload)
        if start < stop and self._reading:
            self._rest = bytes(view[start:stop])

    def _within_host(self, kind: int, call_id: int, header: bytes, payload: memoryview) -> None:
        """Act on a frame that is between two wires of one host."""
        sealer, opener, out, ring, passed = self._sealer, self._opener, self._ring_out, self._ring_in, self._passed
        assert sealer is not None and opener is not None and out is not None and ring is not None
        if kind == Frame.PIECE and passed is not None:
            freed, back = self._freed_at, SLOTS - self._n_freed
            if back <= 0 or (len(freed) >= back and freed[-back] > self._sent):
                raise ProtocolError("a piece in a slot that wasn't freed")  # else our queue could grow without bound
            passed.take(opener, header, payload)
            if self._backlog and isinstance(self._backlog[0], _Large):
                self._n_freed += 1
            else:
                self._queue_freed()
                self.flush()  # the sender may wait for it
            if passed.is_whole:
                self._passed = None
                self.on_frame(passed.kind, passed.call_id, passed.header, passed.body.toreadonly())
        elif kind == Frame.PASSED and passed is None:
            self._passed = PassedIn(ring, opener.limits, call_id, header, payload)
        elif kind == Frame.FREED:
            out.freed()
            if self._backlog:
                self._loop.call_soon(self.flush)
        elif kind == Frame.RING:
            words = (out if is_for_sender(header) else ring).hear(header)
            if words is not None:
                self._queue(sealer.small(Frame.RING, 0, words, b""))
                self._loop.call_soon(self.flush)
        else:
            raise ProtocolError(f"unexpected {Frame(kind).name}")

    def _parse_message(self, start: int, stop: int) -> int:
        """Deliver one handshake message; returns the bytes it took, 0 when it isn't whole yet."""
        if stop - start < _LENGTH.size:
            return 0
        (length,) = _LENGTH.unpack_from(self._room, start)
        if length > MAX_HANDSHAKE_BYTES:
            raise AuthenticationError(f"handshake message of {length} bytes, limit {MAX_HANDSHAKE_BYTES}")
        begin = start + _LENGTH.size
        if stop - begin < length:
            return 0
        self.on_message(bytes(self._room[begin : begin + length]))
        return _LENGTH.size + int(length)

    def _begin_large(self, head: Head, start: int, stop: int) -> int:
        """Check the head, allocate the frame's own buffer, and move what has arrived of it there; returns the end."""
        assert self._opener is not None
        after = start + HEAD_BYTES
        mac = self._opener.large(head, self._room[start:after], self._room[after : after + TAG_BYTES])
        start = after + TAG_BYTES
        self._body = aligned_buffer(head.header_bytes, head.payload_bytes + TAG_BYTES)
        self._head, self._mac = head, mac
        self._body_got = 0
        n = min(stop - start, len(self._body))
        if n:
            self._body[:n] = self._room[start : start + n]
            self._bulk_arrived(n)
        return start + n

    def _wait_for(self, n_bytes: int) -> None:
        """Be called when so much has arrived. Of a large payload, thousands of small pieces would else be read."""
        n_bytes = max(1, min(n_bytes, _READ_BYTES))
        if n_bytes != self._low_water and self._is_tcp:
            self._low_water = n_bytes
            try:
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, n_bytes)
            except OSError:
                pass  # only slower; a socket that is gone tells when it's read

    def _bulk_arrived(self, n: int) -> None:
        body, head, mac = self._body, self._head, self._mac
        assert head is not None and mac is not None
        end_of_data = len(body) - TAG_BYTES
        mac.update(body[self._body_got : min(self._body_got + n, end_of_data)])
        self._body_got += n
        if self._body_got < len(body):
            self._wait_for(len(body) - self._body_got)
            return
        self._wait_for(1)
        self._body, self._head, self._mac = _EMPTY, None, None
        mac.check(body[end_of_data:])
        payload = body[head.header_bytes : end_of_data].toreadonly()
        self.on_frame(head.kind, head.call_id, bytes(body[: head.header_bytes]), payload)

    # ------------------------------------------------------------------------------ the end

    def _send_failed(self, reason: str) -> None:
        self._readable()  # the peer's last words may be here already: why it closed, and its last answers
        self._fail(reason)

    def _fail(self, reason: str) -> None:
        """The socket is gone."""
        if not self._open:
            return
        lost = self.on_lost
        self.abandon()
        lost(reason)

    def close(self, flush_s: float) -> None:
        """Flush, send our end, wait shortly for the peer's, close: a close with unread input would reset the
        connection, and the peer might never read why."""
        self.silence()
        # Where the peer has to free slots first, that is still read.
        self._reading = self._reading and self._open and any(isinstance(one, Passed) for one in self._backlog)
        if not self._open:
            return
        self._closing = self._loop.call_later(flush_s, self.abandon)
        self.flush()
        if self._open and not self._pieces and not self._backlog:
            self._say_end()

    def _say_end(self) -> None:
        self._reading = False
        try:
            self._sock.shutdown(socket.SHUT_WR)
        except OSError:
            self.abandon()

    def abandon(self) -> None:
        self.silence()
        if not self._open:
            return
        self._open = False
        self._reading = False
        if self._closing is not None:
            self._closing.cancel()
        if self._path is not None:
            self._path.close()
        self._loop.remove_reader(self._fd)
        self._loop.remove_writer(self._fd)
        self._sock.close()
        self._pieces.clear()
        self._backlog.clear()
        self._handed_over.clear()
        self._queued = 0
        if self._ring_in is not None:
            self._ring_in.close()
        self._ring_out = self._ring_in = self._passed = None


def _tune(sock: socket.socket) -> None:
    try:
        if sock.family == socket.AF_UNIX:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_BUFFER_BYTES)
        else:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            keep_alive(sock)
    except OSError:
        pass  # the peer is gone already; reading will tell
