"""The TCP connection beside each ucx wire: handshake, exchange of UCX addresses, and sign of life.

    socket ─▶ u16 length │ message ─▶ on_message(bytes)
           ├─ a length above the limit ─▶ on_broken(reason), once; what follows is dropped
           └─ end of stream, reset ─▶ on_end(reason, answered), once; answered: the peer's host did it

UCX would connect by itself, but its listeners (as ucxx and ucx-py open them) bind every IPv4 interface and no IPv6 one,
and take any amount of data from whoever connects. Over a socket of our own the handshake is the one of tcp, with its
limits; and the kernel closes it when a process dies, whichever transport UCX has chosen and however that notices.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable

from miles_hpc.control.auth import MAX_HANDSHAKE_BYTES
from miles_hpc.control.dead_paths import PathWatch, keep_alive
from miles_hpc.control.wire import Loop

__all__ = ["MAX_LINE_BYTES", "Line"]

#: The largest message after the handshake: a worker's address, which grows with the number of its devices.
MAX_LINE_BYTES = 65_535

_LENGTH = struct.Struct("<H")
_INPUT_BYTES = 64 * 1024


class Line:
    """Few and small messages over a connected, non-blocking socket."""

    def __init__(
        self,
        loop: Loop,
        sock: socket.socket,
        on_message: Callable[[bytes], None],
        on_end: Callable[[str, bool], None],
        on_broken: Callable[[str], None],
    ) -> None:
        self._loop = loop
        self._sock = sock
        self._fd = sock.fileno()
        self._on_message = on_message
        self._on_end = on_end
        self._on_broken = on_broken
        self._dropping = False
        self._limit = MAX_HANDSHAKE_BYTES
        self._in = b""
        self._out = b""
        self._finishing = False
        self._over = False
        self._open = True
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError:
            pass  # the peer is gone already; reading will tell
        keep_alive(sock)
        self._path = PathWatch(loop, sock, lambda evidence: self._ended(evidence, answered=False))
        loop.add_reader(self._fd, self._readable)

    def believe(self) -> None:
        """The peer has proven itself: messages up to MAX_LINE_BYTES from now on."""
        self._limit = MAX_LINE_BYTES

    def send(self, message: bytes) -> None:
        """Send as soon as the socket takes it."""
        if self._open and not self._finishing:
            waiting = bool(self._out)
            self._out += _LENGTH.pack(len(message)) + message
            if not waiting:
                self._write()

    def finish(self) -> None:
        """Send our end behind what is queued; reading goes on."""
        if self._open and not self._finishing:
            self._finishing = True
            if not self._out:
                self._write()

    def close(self) -> None:
        """Close now. No callback follows."""
        if self._open:
            self._open = False
            self._loop.remove_reader(self._fd)
            self._loop.remove_writer(self._fd)
            self._path.close()
            self._sock.close()

    def _write(self) -> None:
        try:
            if self._out:
                self._out = self._out[self._sock.send(self._out) :]
            if not self._out and self._finishing:
                self._sock.shutdown(socket.SHUT_WR)
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self._out = b""  # reading will tell
        if not self._over:
            self._path.sent()
        if self._out:
            self._loop.add_writer(self._fd, self._write)
        else:
            self._loop.remove_writer(self._fd)

    def _readable(self) -> None:
        try:
            data = self._sock.recv(_INPUT_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._ended(error.strerror or str(error), answered=isinstance(error, ConnectionError))
            return
        if not data:
            self._ended("the peer's socket is gone", answered=True)
            return
        if self._dropping:
            return
        data = self._in + data
        start = 0
        while self._open and len(data) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(data, start)
            if length > self._limit:
                self._in, self._dropping = b"", True
                self._on_broken(f"message of {length} bytes, limit {self._limit}")
                return
            begin = start + _LENGTH.size
            if len(data) - begin < length:
                break
            start = begin + length
            self._on_message(data[begin:start])
        self._in = data[start:]

    def _ended(self, reason: str, *, answered: bool) -> None:
        if self._open and not self._over:
            self._over = True
            self._loop.remove_reader(self._fd)  # else a socket at its end would wake the loop again and again
            self._path.close()
            self._on_end(reason, answered)
