"""Frames: how bodies of bytes stand in an append-only file, so that a torn end is found.

    frame = length u32 LE | crc32 u32 LE | body      crc32 over length and body

A frame is good or it isn't there: after a crash only the last one of a file can be torn.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator

__all__ = ["HEADER_BYTES", "MAX_BODY_BYTES", "body_at", "frame_of", "good_frames"]

#: No append of this project comes near it; a length above it is damage, not data.
MAX_BODY_BYTES = 1 << 28
_HEADER = struct.Struct("<II")
#: What stands before a body.
HEADER_BYTES = _HEADER.size


def frame_of(body: bytes) -> bytes:
    """The frame of a body. Raises ValueError for one that is too long."""
    if len(body) > MAX_BODY_BYTES:
        raise ValueError(f"journal: one append of {len(body)} bytes; at most {MAX_BODY_BYTES} are allowed")
    length = len(body).to_bytes(4, "little")
    return length + zlib.crc32(body, zlib.crc32(length)).to_bytes(4, "little") + body


def body_at(data: memoryview, offset: int) -> memoryview | None:
    """The body of a good frame at `offset`, or None."""
    if offset + HEADER_BYTES > len(data):
        return None
    length, crc = _HEADER.unpack_from(data, offset)
    start = offset + HEADER_BYTES
    if length == 0 or length > MAX_BODY_BYTES or start + length > len(data):
        return None
    body = data[start : start + length]
    return body if zlib.crc32(body, zlib.crc32(data[offset : offset + 4])) == crc else None


def good_frames(data: memoryview) -> Iterator[tuple[int, memoryview]]:
    """(offset behind the frame, body) of the good frames in front; ends at the first that isn't."""
    offset = 0
    while (body := body_at(data, offset)) is not None:
        offset += HEADER_BYTES + len(body)
        yield offset, body
