"""Sockets whose peer's host has gone: found out by the kernel's own evidence, for connections without heartbeats.

| what waits | who finds out | after |
|---|---|---|
| an idle connection | keep-alive probes | KEEPALIVE_IDLE_S + KEEPALIVE_PROBES * KEEPALIVE_INTERVAL_S |
| one whose data isn't acknowledged | `unanswered_s`, asked while sending is held up | UNANSWERED_S |

By default Linux gives up on unacknowledged data after a quarter of an hour and on an idle connection never (tcp(7),
tcp_retries2, tcp_keepalive_time). TCP_USER_TIMEOUT would be one option for both, but it also ends a connection to a
living host whose process just doesn't read, stopped or busy: what's held up there is probing a closed window, and the
kernel counts that as well. The two are told apart by TCP_INFO: a living host answers probes.
"""

from __future__ import annotations

import socket
import struct

__all__ = ["LOOK_S", "UNANSWERED_S", "keep_alive", "unanswered_s"]

KEEPALIVE_IDLE_S = 10
KEEPALIVE_INTERVAL_S = 5
KEEPALIVE_PROBES = 2

#: A connection whose data wasn't acknowledged for so long is lost.
UNANSWERED_S = 20.0
#: How often to ask while sending is held up.
LOOK_S = 5.0

_ENOUGH = 3  # retransmissions or probes in a row without an answer
# struct tcp_info of linux/tcp.h: eight bytes, then 32-bit words
_RETRANSMITS, _PROBES = 2, 3
_LAST_ACK = struct.Struct("=56xI")  # tcpi_last_ack_recv, milliseconds


def keep_alive(sock: socket.socket) -> None:
    """Let the kernel end the connection when the peer's host has gone while nothing is sent. Only TCP sockets."""
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)
    except OSError:
        pass  # the peer is gone already; reading will tell


def unanswered_s(sock: socket.socket) -> float:
    """For how long the peer's host has acknowledged nothing although ours keeps asking; 0 when it may be just slow."""
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_ACK.size)
    except OSError:
        return 0.0
    if len(info) < _LAST_ACK.size or max(info[_RETRANSMITS], info[_PROBES]) < _ENOUGH:
        return 0.0
    (last_ack_ms,) = _LAST_ACK.unpack(info)
    return float(last_ack_ms) / 1000.0
