"""Frames: how one message lies on the wire after the handshake, and the MACs that protect it.

    head 24 bytes │ head MAC 16 │ header (MessagePack) │ payload │ body MAC 16
    kind u8, 3 zero bytes, header length u32, payload length u64, call id u64; all little-endian

The head has a MAC of its own, so that no length is believed, and nothing allocated, before it is known to come from the
peer. A frame without header and payload ends after the head MAC. Both MACs cover the frame's sequence number, which is
counted on both sides and never sent: a frame that is replayed, reordered, left out or reflected doesn't verify. After
the first mismatch the endpoint is closed; there is no way back into step.

Body MAC: keyed BLAKE2b below BULK_BYTES, HMAC-SHA-256 cut to 16 bytes (RFC 2104) from there on: CPUs of this decade
have SHA-256 instructions and none for BLAKE2b. The choice depends on the length alone. README.md has the cost.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np

from miles_hpc.core.errors import AuthenticationError, ProtocolError
from miles_hpc.core.transport import Buffer

__all__ = [
    "BULK_BYTES",
    "HEAD_BYTES",
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
    "check_body",
    "check_sizes",
]

TAG_BYTES = 16
#: Head with its MAC.
HEAD_BYTES = 24 + TAG_BYTES
#: Bodies (header + payload) of at least so many bytes take the bulk MAC.
BULK_BYTES = 64 * 1024

_HEAD = struct.Struct("<BxxxIQQ")
_SEQUENCE = struct.Struct("<Q")
_ALIGNMENT = 64


class Frame(enum.IntEnum):
    """What a frame is."""

    CALL = 1
    REPLY = 2
    FAILURE = 3  # a handler raised; header is Failure
    NOTIFY = 4
    ADMIT = 5  # listener -> dialer: on_connect accepted you
    REFUSE = 6  # listener -> dialer: on_connect raised; header is Failure
    CLOSE = 7  # orderly end; header is Failure with the reason as text


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """An exception on the wire: class name and text."""

    kind: str
    text: str


@dataclass(frozen=True)
class Limits:
    """Largest header and payload that a receiver accepts, in bytes."""

    header_bytes: int = 16 << 20
    payload_bytes: int = 4 << 30


class BodyMac(Protocol):
    """A running MAC, as hashlib and hmac have it."""

    def update(self, data: Buffer, /) -> None: ...

    def digest(self) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Head:
    """A verified head. `mac` is to be fed with header and payload and compared with the body MAC."""

    kind: Frame
    call_id: int
    header_bytes: int
    payload_bytes: int
    mac: BodyMac

    @property
    def body_bytes(self) -> int:
        """Header, payload and body MAC: what follows the head."""
        n = self.header_bytes + self.payload_bytes
        return n + TAG_BYTES if n else 0


class _Direction:
    """MAC states of one direction; copying a keyed state is cheaper than keying a new one."""

    def __init__(self, key: bytes) -> None:
        self._head = hashlib.blake2b(key=key, person=b"mhpc head", digest_size=TAG_BYTES)
        self._body = hashlib.blake2b(key=key, person=b"mhpc body", digest_size=TAG_BYTES)
        bulk_key = hashlib.blake2b(key=key, person=b"mhpc bulk", digest_size=32).digest()
        self._bulk = hmac.new(bulk_key, digestmod="sha256")
        self._sequence = 0

    def _head_tag(self, head: bytes | memoryview) -> bytes:
        mac = self._head.copy()
        mac.update(_SEQUENCE.pack(self._sequence))
        mac.update(head)
        return mac.digest()

    def _body_mac(self, n_bytes: int) -> BodyMac:
        mac: BodyMac = self._body.copy() if n_bytes < BULK_BYTES else self._bulk.copy()
        mac.update(_SEQUENCE.pack(self._sequence))
        return mac


class Sealer(_Direction):
    """Makes the frames of one direction. Frames must be sent in the order in which they were sealed."""

    def __init__(self, key: bytes, limits: Limits | None = None) -> None:
        super().__init__(key)
        self._limits = limits or Limits()

    def begin(self, kind: Frame, call_id: int, header: bytes, payload_bytes: int) -> tuple[bytes, BodyMac]:
        """Head, head MAC and header as one piece, and the body MAC, which has seen the header already.

        Raises ProtocolError when the frame is larger than the receiver accepts.
        """
        check_sizes(self._limits, len(header), payload_bytes)
        head = _HEAD.pack(kind, len(header), payload_bytes, call_id)
        tag = self._head_tag(head)
        mac = self._body_mac(len(header) + payload_bytes)
        mac.update(header)
        self._sequence += 1
        return b"".join((head, tag, header)), mac

    def seal(self, kind: Frame, call_id: int, header: bytes = b"", payload: Sequence[Buffer] = ()) -> list[Buffer]:
        """The whole frame as pieces; payload buffers are passed through, not copied."""
        views, n_bytes = byte_views(payload)
        prefix, mac = self.begin(kind, call_id, header, n_bytes)
        if not header and not n_bytes:
            return [prefix]
        for view in views:
            mac.update(view)
        tag = mac.digest()[:TAG_BYTES]
        return [prefix, *views, tag] if views else [prefix + tag]


class Opener(_Direction):
    """Checks the frames of one direction, in order."""

    def __init__(self, key: bytes, limits: Limits | None = None) -> None:
        super().__init__(key)
        self._limits = limits or Limits()

    def head(self, data: bytes | memoryview) -> Head:
        """Verify HEAD_BYTES bytes. Raises AuthenticationError for a wrong MAC, ProtocolError for sizes or kind."""
        head = data[: _HEAD.size]
        if not hmac.compare_digest(self._head_tag(head), data[_HEAD.size : HEAD_BYTES]):
            raise AuthenticationError(f"frame {self._sequence}: the head doesn't carry the peer's MAC")
        kind, header_bytes, payload_bytes, call_id = _HEAD.unpack(head)
        check_sizes(self._limits, header_bytes, payload_bytes)
        try:
            frame = Frame(kind)
        except ValueError:
            raise ProtocolError(f"frame {self._sequence}: unknown kind {kind}") from None
        mac = self._body_mac(header_bytes + payload_bytes)
        self._sequence += 1
        return Head(frame, call_id, header_bytes, payload_bytes, mac)


def check_body(mac: BodyMac, tag: bytes | memoryview) -> None:
    """Raises AuthenticationError unless `tag` is the MAC of the body that `mac` has seen."""
    if not hmac.compare_digest(mac.digest()[:TAG_BYTES], tag):
        raise AuthenticationError("the body doesn't carry the peer's MAC")


def byte_views(payload: Sequence[Buffer]) -> tuple[list[memoryview], int]:
    """Flat byte views of the buffers (empty ones left out) and their total length; nothing is copied."""
    views = []
    total = 0
    for buffer in payload:
        view = memoryview(buffer)
        if view.nbytes == 0:
            continue
        if view.format != "B" or view.ndim != 1:
            view = view.cast("B")
        views.append(view)
        total += view.nbytes
    return views, total


def aligned_buffer(header_bytes: int, rest_bytes: int) -> memoryview:
    """A buffer for header and rest in which the rest starts at a multiple of 64 bytes, unzeroed."""
    raw = np.empty(header_bytes + rest_bytes + _ALIGNMENT, np.uint8)
    pad = -(raw.ctypes.data + header_bytes) % _ALIGNMENT
    return memoryview(raw.data)[pad : pad + header_bytes + rest_bytes]


def check_sizes(limits: Limits, header_bytes: int, payload_bytes: int) -> None:
    """Raises ProtocolError for a frame larger than the limits."""
    if header_bytes > limits.header_bytes:
        raise ProtocolError(f"header of {header_bytes} bytes, limit {limits.header_bytes}")
    if payload_bytes > limits.payload_bytes:
        raise ProtocolError(f"payload of {payload_bytes} bytes, limit {limits.payload_bytes}; send it in parts")
