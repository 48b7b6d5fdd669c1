"""Sockets whose peer's host has gone: found out by the kernel's own evidence, for connections without heartbeats.

| what waits | who finds out | after |
|---|---|---|
| an idle connection | keep-alive probes | KEEPALIVE_IDLE_S + KEEPALIVE_PROBES * KEEPALIVE_INTERVAL_S |
| one whose data isn't acknowledged | `PathWatch`, from each sending on until all of it is | UNANSWERED_S |

The second is needed beside the first: while a single byte isn't acknowledged, the kernel doesn't probe.

By default Linux gives up on unacknowledged data after a quarter of an hour and on an idle connection never (tcp(7),
tcp_retries2, tcp_keepalive_time). TCP_USER_TIMEOUT would be one option for both, but it also ends a connection to a
living host whose process just doesn't read, stopped or busy: what's held up there is probing a closed window, and the
kernel counts that as well. The two are told apart by TCP_INFO: a living host answers probes.
"""

from __future__ import annotations

import fcntl
import socket
import struct
import termios
from collections.abc import Callable

from miles_hpc.control.wire import Loop, TimerHandle

__all__ = ["UNANSWERED_S", "PathWatch", "keep_alive"]

KEEPALIVE_IDLE_S = 10
KEEPALIVE_INTERVAL_S = 5
KEEPALIVE_PROBES = 2

#: A connection whose data wasn't acknowledged for so long is lost.
UNANSWERED_S = 20.0

_LOOK_S = 5.0  # how often to ask while something isn't acknowledged

_ENOUGH = 3  # retransmissions or probes in a row without an answer
# struct tcp_info of linux/tcp.h: eight bytes, then 32-bit words
_RETRANSMITS, _PROBES = 2, 3
_LAST_ACK = struct.Struct("=56xI")  # tcpi_last_ack_recv, milliseconds
_COUNT = struct.Struct("=i")


def keep_alive(sock: socket.socket) -> None:
    """Let the kernel end the connection when the peer's host has gone while nothing is sent. Only TCP sockets."""
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)
    except OSError:
        pass  # the peer is gone already; reading will tell


class PathWatch:
    """Looks after what was sent through a TCP socket: says when the peer's host went before it acknowledged that."""

    __slots__ = ("_loop", "_next", "_on_gone", "_sock")

    def __init__(self, loop: Loop, sock: socket.socket, on_gone: Callable[[str], None]) -> None:
        """`on_gone` gets the reason, once. A socket of another family is accepted and never found gone."""
        self._loop = loop
        self._sock = sock
        self._on_gone = on_gone
        self._next: TimerHandle | None = None

    def sent(self) -> None:
        """Something was handed to the kernel, or waits for it. Costs one look in _LOOK_S however often it's called."""
        if self._next is None:
            self._next = self._loop.call_later(_LOOK_S, self._look)

    def close(self) -> None:
        """No callback follows."""
        if self._next is not None:
            self._next.cancel()
            self._next = None

    def _look(self) -> None:
        self._next = None
        if not _unacknowledged_bytes(self._sock):
            return
        silent_s = _unanswered_s(self._sock)
        if silent_s >= UNANSWERED_S:
            self._on_gone(f"the peer's host has acknowledged nothing for {silent_s:.0f} s")
        else:
            self.sent()


def _unacknowledged_bytes(sock: socket.socket) -> int:
    """Bytes that the kernel holds for the peer, its end of stream included (SIOCOUTQ of tcp(7))."""
    if sock.family == socket.AF_UNIX:
        return 0
    try:
        (n_bytes,) = _COUNT.unpack(fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(_COUNT.size)))
    except OSError:
        return 0  # reading will tell
    return int(n_bytes)


def _unanswered_s(sock: socket.socket) -> float:
    """For how long the peer's host has acknowledged nothing although ours keeps asking; 0 when it may be just slow."""
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_ACK.size)
    except OSError:
        return 0.0
    if len(info) < _LAST_ACK.size or max(info[_RETRANSMITS], info[_PROBES]) < _ENOUGH:
        return 0.0
    (last_ack_ms,) = _LAST_ACK.unpack(info)
    return float(last_ack_ms) / 1000.0
