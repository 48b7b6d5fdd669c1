"""Frames: how one message lies on the wire after the handshake, and the MACs that protect it.

    small   head 24 bytes │ header │ payload │ MAC 16                              at most INLINE_BYTES altogether
    large   head 24 bytes │ head MAC 16 │ header │ payload │ body MAC 16
    head    kind u8, 3 zero bytes, header length u32, payload length u64, call id u64; all little-endian

A small frame has one MAC over everything: its length is believed before that is checked, but the buffer for it is there
already. The head of a large frame has a MAC of its own, so that nothing is allocated for a length that doesn't
come from the peer. All MACs cover the frame's sequence number, which is counted on both sides and never sent: a frame
that is replayed, reordered, left out or reflected doesn't verify. After the first mismatch the endpoint is closed;
there is no way back into step.

Heads and small frames: keyed BLAKE2b (RFC 7693), the standard library's fastest MAC for a few hundred bytes. Bodies of
large frames: AES-256-GMAC (NIST SP 800-38D, GCM with associated data only) from `cryptography`; its nonce is the
sequence number under a key that no other direction or connection has, so it never repeats. README.md has the cost.
"""

from __future__ import annotations

import enum
import hashlib
import struct
from collections.abc import Sequence
from hmac import compare_digest
from typing import Any, NamedTuple, Self

import msgspec

from miles_hpc.core.errors import AuthenticationError, ProtocolError
from miles_hpc.core.transport import Buffer

__all__ = [
    "HEAD",
    "HEAD_BYTES",
    "INLINE_BYTES",
    "MAX_KIND",
    "TAG_BYTES",
    "BodyMac",
    "Failure",
    "Frame",
    "Head",
    "Limits",
    "Opener",
    "Sealer",
    "aligned_buffer",
    "byte_views",
    "check_sizes",
    "read_head",
]

TAG_BYTES = 16
HEAD_BYTES = 24
#: A frame of at most so many bytes, MAC included, is small.
INLINE_BYTES = 16 * 1024

HEAD = struct.Struct("<BxxxIQQ")
_SEQUENCE = struct.Struct("<Q")
_NUMBERED_HEAD = struct.Struct("<QBxxxIQQ")  # what the MAC of a small frame begins with
_ALIGNMENT = 64


class Frame(enum.IntEnum):
    """What a frame is."""

    CALL = 1
    REPLY = 2  # ends a call or a stream
    FAILURE = 3  # a handler raised; header is Failure
    NOTIFY = 4
    ADMIT = 5  # listener -> dialer: on_connect accepted you
    REFUSE = 6  # listener -> dialer: on_connect raised; header is Failure
    CLOSE = 7  # orderly end; header is Failure with the reason as text
    STREAM = 8  # as CALL, answered by ITEMs and then REPLY
    ITEM = 9  # one answer of a stream
    CANCEL = 10  # the caller of this id has given up
    CREDIT = 11  # window given back: for notifies (call id 0), or for the items of a stream; header is Credit
    # Between the wires of two processes of one host; conversations don't see them. shared_ring.py has their contents.
    RING = 12  # about shared memory
    PASSED = 13  # a frame whose payload comes through it
    PIECE = 14  # the payload's next piece
    FREED = 15  # the oldest piece isn't needed any more


#: The last kind that a conversation knows.
MAX_KIND = int(Frame.CREDIT)


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """An exception on the wire: class name and text."""

    kind: str
    text: str


class Limits(msgspec.Struct, frozen=True):
    """What a receiver accepts, in bytes and messages. The window is announced in the handshake."""

    header_bytes: int = 16 << 20
    payload_bytes: int = 4 << 30
    window_messages: int = 4096
    window_bytes: int = 64 << 20


class Head(NamedTuple):
    """A head: of a small frame, not verified yet, or of a large one, to be verified by Opener.large."""

    kind: int
    header_bytes: int
    payload_bytes: int
    call_id: int


def _nonce(sequence: int) -> bytes:
    return bytes(4) + _SEQUENCE.pack(sequence)


class BodyMac:
    """The running MAC of a large frame's header and payload."""

    def __init__(self, key: bytes, sequence: int) -> None:
        # Not at the top: a process that never sees a large frame starts without it.
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

        self._gcm: Any = Cipher(algorithms.AES(key), modes.GCM(_nonce(sequence))).encryptor()

    def update(self, data: Buffer) -> None:
        self._gcm.authenticate_additional_data(data)

    def tag(self) -> bytes:
        """The MAC; ends it."""
        self._gcm.finalize()
        tag: bytes = self._gcm.tag
        return tag

    def check(self, tag: Buffer) -> None:
        """Raise AuthenticationError unless `tag` is the MAC of what was seen."""
        if not compare_digest(self.tag(), tag):
            raise AuthenticationError("the body doesn't carry the peer's MAC")


class _Direction:
    """MAC states of one direction; copying a keyed state is cheaper than keying one."""

    def __init__(self, key: bytes, limits: Limits) -> None:
        self._small = hashlib.blake2b(key=key, person=b"mhpc small", digest_size=TAG_BYTES)
        self._head = hashlib.blake2b(key=key, person=b"mhpc head", digest_size=TAG_BYTES)
        self._body_key = hashlib.blake2b(key=key, person=b"mhpc body", digest_size=32).digest()
        self._beside_key = hashlib.blake2b(key=key, person=b"mhpc beside", digest_size=32).digest()
        self._limits = limits
        self._sequence = 0
        self._aead: Any = None

    @property
    def limits(self) -> Limits:
        """What the frames of this direction keep to."""
        return self._limits

    def beside(self) -> Self:
        """The same for a second channel in this direction, with a key and a sequence of its own."""
        return type(self)(self._beside_key, self._limits)

    def _piece_tag(self, sequence: int, data: Buffer) -> bytes:
        if self._aead is None:
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM

            self._aead = AESGCM(self._body_key)
        tag: bytes = self._aead.encrypt(_nonce(sequence), b"", data)  # nothing to encrypt: GMAC
        return tag

    def _head_tag(self, head: Buffer) -> bytes:
        mac = self._head.copy()
        mac.update(_SEQUENCE.pack(self._sequence))
        mac.update(head)
        return mac.digest()


class Sealer(_Direction):
    """Makes the frames of one direction. Frames must be sent in the order of their sequence numbers."""

    def reserve(self, n: int) -> int:
        """The first of `n` numbers for small frames that are sealed later, and sent before any other."""
        first = self._sequence
        self._sequence += n
        return first

    def reserved(self, sequence: int, kind: int, header: bytes, payload: bytes) -> bytes:
        """The small frame with a reserved number."""
        following, self._sequence = self._sequence, sequence
        frame = self.small(kind, 0, header, payload)
        self._sequence = following
        return frame

    def piece_tag(self, sequence: int, data: Buffer) -> bytes:
        """The MAC of bytes beside the small frame with a reserved number."""
        return self._piece_tag(sequence, data)

    def small(self, kind: int, call_id: int, header: bytes, payload: bytes) -> bytes:
        """A whole small frame. The caller has checked that it is one."""
        sequence = self._sequence
        self._sequence = sequence + 1
        numbered = _NUMBERED_HEAD.pack(sequence, kind, len(header), len(payload), call_id) + header + payload
        mac = self._small.copy()
        mac.update(numbered)
        return numbered[_SEQUENCE.size :] + mac.digest()

    def large(self, kind: int, call_id: int, header: bytes, payload_bytes: int) -> tuple[bytes, BodyMac]:
        """Head and head MAC of a large frame, and the MAC that must be fed header and payload and sent behind them.

        Raises ProtocolError when it's larger than the limits.
        """
        check_sizes(self._limits, len(header), payload_bytes)
        head = HEAD.pack(kind, len(header), payload_bytes, call_id)
        tag = self._head_tag(head)
        mac = BodyMac(self._body_key, self._sequence)
        self._sequence += 1
        return head + tag, mac


class Opener(_Direction):
    """Checks the frames of the other direction, in the order of their arrival."""

    def small(self, data: bytes) -> None:
        """Check a whole small frame. Raises AuthenticationError."""
        mac = self._small.copy()
        mac.update(_SEQUENCE.pack(self._sequence) + data[:-TAG_BYTES])
        if not compare_digest(mac.digest(), data[-TAG_BYTES:]):
            raise AuthenticationError("a frame doesn't carry the peer's MAC, or isn't the next one")
        self._sequence += 1

    def check_piece(self, data: Buffer, tag: Buffer) -> None:
        """Check the bytes beside the small frame that was opened last. Raises AuthenticationError."""
        if not compare_digest(self._piece_tag(self._sequence - 1, data), tag):
            raise AuthenticationError("a piece in shared memory doesn't carry the peer's MAC")

    def large(self, head: Head, data: Buffer, tag: Buffer) -> BodyMac:
        """Check the head of a large frame and return the MAC for its body.

        Raises AuthenticationError, or ProtocolError when it's larger than the limits.
        """
        if not compare_digest(self._head_tag(data), tag):
            raise AuthenticationError("a frame's head doesn't carry the peer's MAC, or isn't the next one")
        check_sizes(self._limits, head.header_bytes, head.payload_bytes)
        mac = BodyMac(self._body_key, self._sequence)
        self._sequence += 1
        return mac


def read_head(data: Buffer, offset: int = 0) -> Head:
    """The head at `offset`. Raises ProtocolError for an unknown kind."""
    head = Head._make(HEAD.unpack_from(data, offset))
    if not 1 <= head[0] <= MAX_KIND:
        raise ProtocolError(f"frame of unknown kind {head[0]}")
    return head


def small_frame_bytes(header_bytes: int, payload_bytes: int) -> int:
    """Size of the frame on the wire if it's a small one; it is when this is at most INLINE_BYTES."""
    return HEAD_BYTES + header_bytes + payload_bytes + TAG_BYTES


def byte_views(payload: Sequence[Buffer]) -> tuple[list[memoryview], int]:
    """Flat byte views of the buffers (empty ones left out) and their total length; nothing is copied.

    Raises TypeError for what isn't a buffer, or isn't contiguous.
    """
    if isinstance(payload, bytes | bytearray | memoryview):
        raise TypeError(f"payload: expected a list of buffers, got one of type {type(payload).__name__}")
    views = []
    total = 0
    for buffer in payload:
        view = memoryview(buffer)
        if view.nbytes == 0:
            continue
        if not view.c_contiguous:
            raise TypeError(f"a payload buffer of shape {view.shape} isn't contiguous; send a contiguous copy")
        if view.format != "B" or view.ndim != 1:
            view = view.cast("B")
        views.append(view)
        total += view.nbytes
    return views, total


def aligned_buffer(header_bytes: int, rest_bytes: int) -> memoryview:
    """A buffer for header and rest in which the rest starts at a multiple of 64 bytes, unzeroed."""
    import numpy as np  # the only way to memory that isn't cleared first

    raw = np.empty(header_bytes + rest_bytes + _ALIGNMENT, np.uint8)
    pad = -(raw.ctypes.data + header_bytes) % _ALIGNMENT
    return memoryview(raw.data)[pad : pad + header_bytes + rest_bytes]


def check_sizes(limits: Limits, header_bytes: int, payload_bytes: int) -> None:
    """Raises ProtocolError for a frame larger than the limits."""
    if header_bytes > limits.header_bytes:
        raise ProtocolError(f"header of {header_bytes} bytes, limit {limits.header_bytes}")
    if payload_bytes > limits.payload_bytes:
        raise ProtocolError(f"payload of {payload_bytes} bytes, limit {limits.payload_bytes}; send it in parts")
