"""Large payloads between two processes of one host: through a ring of shared memory instead of their Unix socket.

    sender                                   receiver
    ?  may I?                        ──▶     binds a datagram socket
    N  memory, by descriptor, to it  ◀──     its name
    H  a nonce, as with the memory   ──▶     maps it, if it can't shrink
                                     ◀──     O: go on, or X: use the socket
    PASSED  kind, size │ header      ──▶     allocates
    PIECE   slot, length │ MAC       ──▶     copies it from the slot to its place, checks the copy's MAC
                                     ◀──     FREED: a slot, the oldest one

All of these are small frames (frames.py), with the order and the MACs that these have; FREED has an order and a key of
its own, since it overtakes what waits for slots: both sides may wait at once. A socket copies as often, but
its buffers are allocated and freed page by page, on two cores; README.md has the figures. What is sent while both sides
still agree goes through the socket.

The memory is sealed (memfd_create(2), fcntl(2)): a peer that made it smaller would end us with SIGBUS. The descriptor
doesn't come over the connection itself, since each read of it would have to look for one. A stranger can see the
datagram socket's name, but doesn't know the nonce.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from hmac import compare_digest

from miles_hpc.control.frames import MAX_KIND, Frame, Limits, Opener, Sealer, aligned_buffer, check_sizes
from miles_hpc.core.errors import ProtocolError

__all__ = [
    "LEAST_BYTES",
    "LEAST_VIEW_BYTES",
    "MAX_HEADER_BYTES",
    "SLOTS",
    "Passed",
    "PassedIn",
    "RingIn",
    "RingOut",
    "is_for_sender",
]

#: Smaller payloads go through the socket.
LEAST_BYTES = 512 << 10
#: As do those of smaller views, on average: each takes a slot, and a frame in both directions.
LEAST_VIEW_BYTES = 32 << 10
#: Larger headers as well: PASSED is a small frame.
MAX_HEADER_BYTES = 8 << 10

_SLOT_BYTES = 512 << 10
SLOTS = 4
_RING_BYTES = SLOTS * _SLOT_BYTES
_NONCE_BYTES = 16
_ASK, _NAME, _HERE, _OPEN, _REFUSED = b"?", b"N", b"H", b"O", b"X"
_PASSED = struct.Struct("<BxxxxxxxQ")  # kind, size of the payload
_PIECE = struct.Struct("<II")  # slot, length
_CAN_SEAL = hasattr(os, "memfd_create") and hasattr(fcntl, "F_ADD_SEALS")  # not if Python was built for an old libc
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL if _CAN_SEAL else 0
_MAX_STRAY = 16  # datagrams of others that are looked at


def is_for_sender(words: bytes) -> bool:
    """Whether a RING frame is about our ring, not the peer's."""
    return words[:1] in (_NAME, _OPEN, _REFUSED)


class RingOut:
    """Ours: payloads to the peer."""

    def __init__(self) -> None:
        self.is_open = False
        self.n_free = SLOTS
        self._asked = False
        self._settled = False
        self._slot = 0
        self._memory: memoryview | None = None

    def ask(self) -> bytes | None:
        """What to tell the peer, before the first use; None when that was done."""
        if self._asked or not _SEALS:
            return None
        self._asked = True
        return _ASK

    def hear(self, words: bytes) -> bytes | None:
        """What the peer tells, and what to answer. Raises ProtocolError."""
        is_answer = words[:1] == (_NAME if self._memory is None else _OPEN) and not self._settled
        if not self._asked or self.is_open or not (is_answer or words[:1] == _REFUSED):
            raise ProtocolError(f"unexpected answer {words[:1]!r} about shared memory")
        if words[:1] == _NAME:
            nonce = os.urandom(_NONCE_BYTES)
            try:
                self._memory = _pass_memory(words[1:], nonce)
            except OSError:
                # No memory, no descriptor, or a name that isn't known here: the socket does as well. It's said all the
                # same, so that the peer looks, finds nothing, and closes its end.
                self._settled = True
            return _HERE + nonce
        self._settled = True
        self.is_open = words[:1] == _OPEN
        if not self.is_open:
            self._memory = None
        return None

    def put(self, data: memoryview) -> bytes:
        """Copy a piece into the next slot, and return what tells the peer. One must be free."""
        assert self._memory is not None and self.n_free
        start = self._slot * _SLOT_BYTES
        self._memory[start : start + data.nbytes] = data
        words = _PIECE.pack(self._slot, data.nbytes)
        self._slot = (self._slot + 1) % SLOTS
        self.n_free -= 1
        return words

    def freed(self) -> None:
        """The peer has copied the oldest piece. Raises ProtocolError."""
        if self.n_free == SLOTS:
            raise ProtocolError("a slot was freed that isn't in use")
        self.n_free += 1


class RingIn:
    """The peer's: payloads to us."""

    def __init__(self) -> None:
        self._port: socket.socket | None = None
        self._memory: memoryview | None = None

    def hear(self, words: bytes) -> bytes | None:
        """What the peer tells, and what to answer. Raises ProtocolError."""
        if self._memory is not None or (self._port is None) != (words == _ASK):
            raise ProtocolError(f"unexpected word {words[:1]!r} about shared memory")
        if self._port is None:
            name = os.urandom(16).hex().encode()
            self._port = _bound(name) if _SEALS else None
            return _REFUSED if self._port is None else _NAME + name
        port, self._port = self._port, None
        with port:
            self._memory = _received_memory(port, words[1:])
        return _REFUSED if self._memory is None else _OPEN

    def take(self, words: bytes, target: memoryview) -> memoryview:
        """Copy a piece to the start of `target`, which is what's left of the payload; returns that part of it.

        Raises ProtocolError, struct.error.
        """
        slot, n_bytes = _PIECE.unpack(words)
        if self._memory is None or slot >= SLOTS or not 0 < n_bytes <= min(_SLOT_BYTES, target.nbytes):
            raise ProtocolError(f"piece of {n_bytes} bytes in slot {slot}, {target.nbytes} are missing")
        start = slot * _SLOT_BYTES
        piece = target[:n_bytes]
        piece[:] = self._memory[start : start + n_bytes]
        return piece

    def close(self) -> None:
        """The connection has ended."""
        if self._port is not None:
            self._port.close()
            self._port = None
        self._memory = None


class Passed:
    """A payload of ours on its way through the ring."""

    def __init__(
        self,
        sealer: Sealer,
        kind: int,
        call_id: int,
        header: bytes,
        views: Sequence[memoryview],
        n_bytes: int,
        handed_over: Callable[[], None] | None,
    ) -> None:
        """`first` is the frame that begins it. Raises ProtocolError when it's larger than the limits."""
        check_sizes(sealer.limits, len(header), n_bytes)
        self.handed_over = handed_over
        self.first = sealer.small(Frame.PASSED, call_id, header, _PASSED.pack(kind, n_bytes))
        self.pieces = deque(
            view[start : start + _SLOT_BYTES] for view in views for start in range(0, view.nbytes, _SLOT_BYTES)
        )
        self._sealer = sealer
        self._sequence = sealer.reserve(len(self.pieces))

    def next_frame(self, ring: RingOut) -> tuple[bytes, int]:
        """Put the next piece into the ring; returns its frame and its size."""
        piece, sequence = self.pieces.popleft(), self._sequence
        self._sequence = sequence + 1
        tag = self._sealer.piece_tag(sequence, piece)  # first, so that it's in the cache for the copy
        frame = self._sealer.reserved(sequence, Frame.PIECE, ring.put(piece), tag)
        return frame, piece.nbytes


class PassedIn:
    """A payload of the peer on its way through its ring."""

    def __init__(self, ring: RingIn, limits: Limits, call_id: int, header: bytes, words: memoryview) -> None:
        """By its first frame. Raises ProtocolError, struct.error, MemoryError."""
        self.kind, n_bytes = _PASSED.unpack(words)
        if not 1 <= self.kind <= MAX_KIND or not n_bytes:
            raise ProtocolError(f"payload of {n_bytes} bytes for a frame of kind {self.kind}")
        check_sizes(limits, len(header), n_bytes)
        self.call_id = call_id
        self.header = header
        self.body = aligned_buffer(0, n_bytes)
        self._ring = ring
        self._got = 0

    def take(self, opener: Opener, words: bytes, tag: memoryview) -> None:
        """Copy the piece of the frame that was opened last.

        Raises ProtocolError, AuthenticationError, struct.error.
        """
        piece = self._ring.take(words, self.body[self._got :])
        opener.check_piece(piece, tag)  # of our copy: the peer could change its own
        self._got += piece.nbytes

    @property
    def is_whole(self) -> bool:
        return self._got == self.body.nbytes


def _address(name: bytes) -> bytes:
    return b"\0miles_hpc ring " + name


def _bound(name: bytes) -> socket.socket | None:
    """A datagram socket of this name, if there can be one."""
    try:
        port = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    except OSError:  # no descriptor is left
        return None
    try:
        port.bind(_address(name))
    except OSError:
        port.close()
        return None
    return port


def _pass_memory(name: bytes, nonce: bytes) -> memoryview:
    """New sealed memory, sent to the socket of this name. Raises OSError."""
    fd = os.memfd_create("miles_hpc ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, _RING_BYTES)  # now, or there might be none when it's written to
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        memory = memoryview(mmap.mmap(fd, _RING_BYTES))
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC) as sender:
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", fd))
            sender.sendmsg([nonce], [rights], 0, _address(name))
        return memory
    finally:
        os.close(fd)


def _received_memory(port: socket.socket, nonce: bytes) -> memoryview | None:
    """What was sent with this nonce, if it is as it should be."""
    for _ in range(_MAX_STRAY):
        try:
            data, fds, _, _ = socket.recv_fds(port, _NONCE_BYTES + 1, 1)
        except OSError:
            return None
        try:
            if len(fds) == 1 and compare_digest(data, nonce):
                sealed = fcntl.fcntl(fds[0], fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
                if not sealed or os.fstat(fds[0]).st_size != _RING_BYTES:
                    return None
                return memoryview(mmap.mmap(fds[0], _RING_BYTES, prot=mmap.PROT_READ))
        except OSError:
            return None
        finally:
            for fd in fds:
                os.close(fd)
    return None
