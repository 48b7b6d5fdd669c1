"""The smallest protocol that a library without calls needs to be called: one message there, one back.

A request starts with HEAD: how many bytes the answer has, and how many the request has. So a call without payload is a
message of 16 bytes, and an argument of 8 MiB is one message of 8 MiB of which the first 16 bytes are the head.
"""

from __future__ import annotations

import functools
import random
import struct

from tools.bench_control.plan import Cell

__all__ = ["ECHO", "HEAD_BYTES", "MAX_BYTES", "STOP", "Answers", "pattern", "request", "stamped"]

HEAD = struct.Struct("<qq")
HEAD_BYTES = HEAD.size
MAX_BYTES = 8 << 20
ECHO = -1  # answer with the request itself
STOP = -2  # don't answer; end


@functools.lru_cache
def pattern(n_bytes: int) -> bytes:
    """Bytes that look random, the same for the same size in every process."""
    return random.Random(n_bytes).randbytes(n_bytes)


def request(cell: Cell) -> bytearray:
    """The request of one call of a cell."""
    return stamped(max(HEAD_BYTES, cell.result_bytes), pattern(cell.argument_bytes))


def stamped(wanted: int, data: bytes) -> bytearray:
    """`data`, with the head written over its first bytes."""
    message = bytearray(data.ljust(HEAD_BYTES, b"\0"))
    HEAD.pack_into(message, 0, wanted, len(message))
    return message


class Answers:
    """The answering side's buffers, made on first use."""

    def __init__(self) -> None:
        self._patterns: dict[int, bytes] = {}

    def to(self, message: bytes | bytearray | memoryview) -> bytes | memoryview | None:
        """The answer to a request; None: end."""
        wanted, size = HEAD.unpack_from(message)
        if wanted == ECHO:
            return memoryview(message)[:size]
        if wanted == STOP:
            return None
        found = self._patterns.get(wanted)
        if found is None:
            found = self._patterns[wanted] = pattern(wanted)
        return found
