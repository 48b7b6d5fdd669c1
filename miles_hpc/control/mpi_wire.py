"""One connection of the MPI carrier: handshake messages and frames as MPI messages.

    small frames   ─▶ joined to envelopes of up to 32 KiB ─▶ the peer's lane          whole items, in order
    large frame    ─▶ head, MAC, header ─▶ the peer's lane
                      payload ─▶ pieces of 1 MiB, Isend from its buffers ─▶ the connection's own tag ─▶ Irecv in place
                      MAC ─▶ the peer's lane, behind the last piece (with the head when there is only one piece)

MPI keeps messages of one tag in order, not those of two: what arrives on the lane behind the head of a large frame is
held until its pieces are complete. Where a piece spans several buffers of the caller, it's joined: the only copy. A
header of more than 4 KiB travels as pieces too, before the payload.

    OPEN ── close ─▶ CLOSING (sends what is queued) ─▶ LEFT ── both ENDs, all pieces gone ─▶ forgotten
      └── abandon, the peer's END ──────────────────────▶

Each side says END once, with the number of pieces that it has sent. A wire that was left receives the peer's pieces up
to that number, so that no request stays behind on either side. When the peer is dead, they stay for ever: a send can't
be cancelled. Where MPI reports an error instead, the wire is lost.
"""

from __future__ import annotations

import enum
import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from miles_hpc.control.auth import MAX_HANDSHAKE_BYTES
from miles_hpc.control.frames import (
    HEAD_BYTES,
    INLINE_BYTES,
    TAG_BYTES,
    BodyMac,
    Head,
    Opener,
    Sealer,
    aligned_buffer,
    read_head,
)
from miles_hpc.control.mpi_pieces import PIECE_BYTES, ArrivingBody, OutgoingBody, cut, last_line
from miles_hpc.control.wire import LOW_WATER_BYTES, TimerHandle, Wire
from miles_hpc.core.errors import AuthenticationError, ProtocolError
from miles_hpc.core.transport import Buffer

if TYPE_CHECKING:
    from miles_hpc.control.mpi_carrier import MpiCarrier

__all__ = ["ENVELOPE", "ENVELOPE_BYTES", "MAGIC", "Kind", "MpiWire"]

#: Largest message on a lane.
ENVELOPE_BYTES = 32 << 10
#: In front of every message on a lane: magic, kind, number of the connection (or port) at the receiver.
ENVELOPE = struct.Struct("<4sBxxxQ")
MAGIC = b"mhpc"

_INLINE_HEADER_BYTES = 4096
_DEPTH = 8  # pieces of one wire with MPI at a time
_MAX_FLYING = 64  # messages of one wire with MPI at a time
_TURN_BYTES = 8 << 20  # received per look, so that a large payload leaves room for other wires
_LENGTH = struct.Struct("<H")
_NUMBER = struct.Struct("<Q")
_EMPTY = memoryview(b"")

_Done = Callable[[], None]


class Kind(enum.IntEnum):
    """What an envelope is."""

    CONNECT = 1  # to a port; lane u32 and number u64 of the dialer follow
    ACCEPT = 2  # to the dialer; number u64 of the acceptor follows
    REFUSE = 3  # to the dialer: that port is closed
    DATA = 4  # whole handshake messages or frames follow
    END = 5  # the sender reads and sends nothing more; the number u64 of its pieces follows


class _State(enum.Enum):
    OPEN = 1
    CLOSING = 2
    LEFT = 3


class MpiWire(Wire):
    """One end of a connection; `number` is ours, `peer_number` the other end's."""

    def __init__(self, carrier: MpiCarrier, number: int, rank: int, lane: int, peer_number: int) -> None:
        super().__init__(f"mpi rank {rank}")
        self.number = number
        self.rank = rank
        self._carrier = carrier
        self._loop = carrier.loop
        self._comm = carrier.world.comm
        self._byte = carrier.world.MPI.BYTE
        self._mpi_error = carrier.world.MPI.Exception
        self._lane_tag = carrier.world.lane_tag(lane)
        self._send_tag = carrier.world.body_tag(peer_number)
        self._receive_tag = carrier.world.body_tag(number)
        self._peer_number = peer_number
        self._prefix = ENVELOPE.pack(MAGIC, Kind.DATA, peer_number)
        self._state = _State.OPEN
        self._sealer: Sealer | None = None
        self._opener: Opener | None = None
        # Outgoing.
        self._queue: deque[bytes | OutgoingBody] = deque()
        self._flying: deque[tuple[Any, int, bool, _Done | None]] = deque()  # request, bytes, is a piece, handed over
        self._queued = 0
        self._was_high = False
        self._pieces_flying = 0
        self._pieces_sent = 0
        self._closing: TimerHandle | None = None
        # Incoming.
        self._reading = True  # whether what arrives is of interest
        self._arriving: ArrivingBody | None = None
        self._held: deque[bytes | None] = deque()  # came on the lane behind a large frame's head; None: the peer's END
        self._asked: deque[tuple[Any, memoryview]] = deque()  # pieces: request, place
        self._pieces_asked = 0
        self._peer_pieces: int | None = None  # known from its END

    # ------------------------------------------------------------------------------ sending

    @property
    def queued_bytes(self) -> int:
        return self._queued

    def send_message(self, data: bytes) -> None:
        if self._state is _State.OPEN:
            self._put(_LENGTH.pack(len(data)) + data)
            self._write()

    def start_frames(self, sealer: Sealer, opener: Opener) -> None:
        self._sealer, self._opener = sealer, opener

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
        if self._state is not _State.OPEN:
            return False
        if HEAD_BYTES + len(header) + n_bytes + TAG_BYTES <= INLINE_BYTES:
            self._put(sealer.small(kind, call_id, header, b"".join(views) if views else b""))
            return True
        prefix, body_mac = sealer.large(kind, call_id, header, n_bytes)
        body_mac.update(header)
        mac: BodyMac | None = body_mac
        if len(header) <= _INLINE_HEADER_BYTES:
            prefix += header
            header = b""
            if n_bytes <= PIECE_BYTES:
                for view in views:
                    body_mac.update(view)
                prefix += body_mac.tag()
                mac = None
        self._put(prefix)
        self._queue.append(OutgoingBody(header, views, n_bytes, mac, handed_over))
        self._queued += len(header) + n_bytes + (0 if mac is None else TAG_BYTES)
        self._was_high = self._was_high or self._queued >= LOW_WATER_BYTES
        return False

    def _put(self, data: bytes) -> None:
        self._queue.append(data)
        self._queued += len(data)
        if self._queued >= LOW_WATER_BYTES:
            self._was_high = True

    def flush(self) -> None:
        if self._queue and self._state is not _State.LEFT:
            self._write()
            self._carrier.hurry()

    def _write(self) -> None:
        """Give MPI what is queued, as much as may be with it at a time."""
        queue = self._queue
        while queue and len(self._flying) < _MAX_FLYING:
            first = queue[0]
            if isinstance(first, bytes):
                self._send_envelope()
            elif self._pieces_flying < _DEPTH:
                self._send_piece(first)
            else:
                break
        if not queue and self._state is _State.CLOSING:
            self._leave()

    def _send_envelope(self) -> None:
        queue = self._queue
        parts = [self._prefix]
        n_bytes = 0
        room = ENVELOPE_BYTES - ENVELOPE.size
        while queue:
            item = queue[0]
            if not isinstance(item, bytes) or len(item) > room:
                break
            queue.popleft()
            parts.append(item)
            n_bytes += len(item)
            room -= len(item)
        self._post(b"".join(parts), self._lane_tag, n_bytes)

    def _send_piece(self, large: OutgoingBody) -> None:
        piece = large.next_piece()
        handed_over = None
        if large.is_over:
            self._queue.popleft()
            handed_over = large.handed_over
            if large.mac is not None:
                self._queue.appendleft(large.mac.tag())
        self._pieces_sent += 1
        self._pieces_flying += 1
        self._post(piece, self._send_tag, len(piece), is_piece=True, handed_over=handed_over)

    def _post(
        self, data: Buffer, tag: int, n_bytes: int, *, is_piece: bool = False, handed_over: _Done | None = None
    ) -> None:
        try:
            request = self._comm.Isend([data, self._byte], self.rank, tag)  # keeps the buffer alive as long as itself
        except self._mpi_error as error:
            self.break_off(error)
            return
        self._flying.append((request, n_bytes, is_piece, handed_over))
        self._sweep()  # most small messages are gone at once
        if self._flying:
            self._carrier.sending.add(self)

    def _sweep(self) -> bool:
        """Forget what has gone; whether anything has."""
        flying = self._flying
        worked = False
        while flying and self._is_done(flying[0][0]):
            _, n_bytes, is_piece, handed_over = flying.popleft()
            worked = True
            self._queued -= n_bytes
            if is_piece:
                self._pieces_flying -= 1
            if handed_over is not None and self._state is _State.OPEN:
                self._loop.call_soon(handed_over)
        if self._was_high and self._queued < LOW_WATER_BYTES and self._state is _State.OPEN:
            self._was_high = False
            self._loop.call_soon(self._tell_drained)
        return worked

    def _tell_drained(self) -> None:
        self.on_drained()

    def advance(self) -> bool:
        """For the carrier's looks, while it's in `sending`: go on sending. Whether anything happened."""
        worked = self._sweep()
        if worked and self._queue:
            self._write()
        if not self._flying:
            self._carrier.sending.discard(self)
            self._forget_if_over()
        return worked

    # ------------------------------------------------------------------------------ receiving

    def arrived(self, data: memoryview) -> None:
        """An envelope's content; the memory is the carrier's and reused."""
        if not self._reading:
            return
        if self._is_held_up:
            self._held.append(bytes(data))
        else:
            self._take(data)

    @property
    def _is_held_up(self) -> bool:
        """Whether pieces of a large frame are missing; only its MAC may be read before they are complete."""
        return bool(self._held) or (self._arriving is not None and bool(self._asked))

    def _take(self, data: memoryview) -> None:
        try:
            self._parse(data)
        except (AuthenticationError, ProtocolError) as error:
            self._violated(str(error))
        except MemoryError:
            self._violated("no memory for a frame of the announced size")

    def _violated(self, reason: str) -> None:
        self._reading = False
        self._held.clear()
        self.on_violated(reason)

    def _parse(self, data: memoryview) -> None:
        """Deliver the items of an envelope, as far as no large frame is in the way."""
        start, stop = 0, len(data)
        while start < stop and self._reading:
            if self._arriving is not None:
                if self._asked:
                    self._held.appendleft(bytes(data[start:]))
                    return
                start += TAG_BYTES
                self._deliver_large(bytes(data[start - TAG_BYTES : start]))
                continue
            opener = self._opener
            if opener is None:
                start += self._parse_message(data, start)
                continue
            if stop - start < HEAD_BYTES:
                raise ProtocolError(f"{stop - start} bytes instead of a frame")
            head = read_head(data, start)
            kind, n_header, n_payload, call_id = head
            total = HEAD_BYTES + n_header + n_payload + TAG_BYTES
            if total > INLINE_BYTES:
                start = self._begin_large(opener, head, data, start)
                continue
            if total > stop - start:
                raise ProtocolError(f"{stop - start} bytes of a frame of {total}")
            frame = bytes(data[start : start + total])
            opener.small(frame)
            start += total
            cut = HEAD_BYTES + n_header
            payload = memoryview(frame)[cut:-TAG_BYTES] if n_payload else _EMPTY
            self.on_frame(kind, call_id, frame[HEAD_BYTES:cut], payload)

    def _parse_message(self, data: memoryview, start: int) -> int:
        """Deliver one handshake message; returns the bytes it took."""
        begin = start + _LENGTH.size
        length = _LENGTH.unpack_from(data, start)[0] if begin <= len(data) else 0
        if not 0 < length <= min(MAX_HANDSHAKE_BYTES, len(data) - begin):
            raise AuthenticationError(f"handshake message of {length} bytes in {len(data) - start}")
        self.on_message(bytes(data[begin : begin + length]))
        return _LENGTH.size + int(length)

    def _begin_large(self, opener: Opener, head: Head, data: memoryview, start: int) -> int:
        """Check the head, allocate the frame's own buffer, ask for its pieces; returns where the next item begins."""
        after = start + HEAD_BYTES
        mac = opener.large(head, data[start:after], data[after : after + TAG_BYTES])
        start = after + TAG_BYTES
        n_header = head.header_bytes
        body = aligned_buffer(n_header, head.payload_bytes)
        places = deque(cut(body[n_header:]))
        tag = b""
        if n_header > _INLINE_HEADER_BYTES:
            places.extendleft(reversed(cut(body[:n_header])))
        else:
            n_tag = TAG_BYTES if head.payload_bytes <= PIECE_BYTES else 0
            header = data[start : start + n_header]
            start += n_header + n_tag
            if start > len(data):
                raise ProtocolError("a large frame's head is cut short")
            body[:n_header] = header
            mac.update(header)
            tag = bytes(data[start - n_tag : start])
        self._arriving = ArrivingBody(head, mac, body, places, tag)
        if self._peer_pieces is not None and self._pieces_asked + len(places) > self._peer_pieces:
            self._fail()
        else:
            self._ask()
        return start

    def _ask(self) -> None:
        """Post receives for the next pieces."""
        arriving = self._arriving
        while arriving is not None and arriving.places and len(self._asked) < _DEPTH:
            self._ask_for(arriving.places.popleft())

    def _ask_for(self, place: memoryview) -> None:
        try:
            request = self._comm.Irecv([place, self._byte], self.rank, self._receive_tag)
        except self._mpi_error as error:
            self.break_off(error)
            return
        self._asked.append((request, place))
        self._pieces_asked += 1
        self._carrier.receiving.add(self)

    def take_pieces(self) -> bool:
        """For the carrier's looks, while it's in `receiving`: take what has arrived. Whether anything has."""
        asked = self._asked
        turn = 0
        while asked and turn < _TURN_BYTES and self._is_done(asked[0][0]):
            _, place = asked.popleft()
            turn += len(place)
            if self._reading and self._arriving is not None:
                self._arriving.mac.update(place)
                self._ask()
                if not asked:
                    self._complete(self._arriving)
        if self._state is _State.LEFT:
            self._receive_rest()
        if not asked:
            self._carrier.receiving.discard(self)
            self._forget_if_over()
        return bool(turn)

    def _complete(self, arriving: ArrivingBody) -> None:
        """All pieces of a large frame are here: deliver it when its MAC is, and then what came behind it."""
        if arriving.tag:
            try:
                self._deliver_large(arriving.tag)
            except AuthenticationError as error:
                self._violated(str(error))
        held = self._held
        while held and self._reading and not self._asked:
            item = held.popleft()
            if item is None:
                self._fail()
            else:
                self._take(memoryview(item))

    def _deliver_large(self, tag: bytes) -> None:
        arriving = self._arriving
        assert arriving is not None
        self._arriving = None
        arriving.mac.check(tag)
        head, body = arriving.head, arriving.body
        payload = body[head.header_bytes :].toreadonly()
        self.on_frame(head.kind, head.call_id, bytes(body[: head.header_bytes]), payload)

    # ------------------------------------------------------------------------------ the end

    def peer_left(self, pieces: int) -> None:
        """The peer's END."""
        self._peer_pieces = pieces
        if self._state is not _State.OPEN:
            self.abandon()
            self._receive_rest()
            self._forget_if_over()
            return
        missing = len(self._arriving.places) if self._arriving is not None else 0
        if self._reading and self._is_held_up and self._pieces_asked + missing <= pieces:
            self._held.append(None)  # the rest of what it sent is still on its way
        else:
            self._fail()

    def _is_done(self, request: Any) -> bool:
        try:
            return bool(request.Test())
        except self._mpi_error as error:
            self.break_off(error)
            return False

    def break_off(self, error: Exception) -> None:
        """MPI says that the peer is gone; not all do. Nothing more is asked of it for this connection."""
        lost = self.on_lost
        self.silence()
        self._state = _State.LEFT
        self._reading = False
        if self._closing is not None:
            self._closing.cancel()
        self._queue.clear()
        self._held.clear()
        self._arriving = None
        self.orphan()
        self._carrier.forget(self)
        if lost != self.on_lost:  # somebody listens
            self._loop.call_soon(lost, f"endpoint closed: MPI: {last_line(error)}")

    def _fail(self) -> None:
        lost = self.on_lost
        self.abandon()
        lost("endpoint closed: the peer has left")

    def close(self, flush_s: float) -> None:
        self.silence()
        self._reading = False
        if self._state is _State.OPEN:
            self._state = _State.CLOSING
            self._closing = self._loop.call_later(flush_s, self.abandon)
            self._write()

    def abandon(self) -> None:
        self.silence()
        if self._state is not _State.LEFT:
            self._leave()

    def _leave(self) -> None:
        """Say END. What MPI has of us stays with it."""
        self._state = _State.LEFT
        self._reading = False
        if self._closing is not None:
            self._closing.cancel()
            self._closing = None
        self._queue.clear()
        self._held.clear()
        self._arriving = None
        end = ENVELOPE.pack(MAGIC, Kind.END, self._peer_number) + _NUMBER.pack(self._pieces_sent)
        self._post(end, self._lane_tag, 0)
        if self._peer_pieces is not None:
            self._receive_rest()
            self._forget_if_over()

    def _receive_rest(self) -> None:
        """Left, and the peer too: receive exactly the pieces that it sent."""
        if self._peer_pieces is None:
            return
        while self._asked and self._pieces_asked > self._peer_pieces:  # it gave up in the middle of a large frame
            request, place = self._asked.pop()
            self._pieces_asked -= 1
            request.Cancel()
            self._carrier.world.keep(request, place)
        while self._pieces_asked < self._peer_pieces and len(self._asked) < _DEPTH:
            self._ask_for(memoryview(bytearray(PIECE_BYTES)))

    def _forget_if_over(self) -> None:
        over = self._peer_pieces is not None and self._pieces_asked >= self._peer_pieces
        if self._state is _State.LEFT and over and not self._asked and not self._flying:
            self._carrier.forget(self)

    def orphan(self) -> None:
        """Leave what is with MPI to the world."""
        world = self._carrier.world
        for request, place in self._asked:
            request.Cancel()
            world.keep(request, place)
        for request, _, _, _ in self._flying:
            world.keep(request)
        self._asked.clear()
        self._flying.clear()
