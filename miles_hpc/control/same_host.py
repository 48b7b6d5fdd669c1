"""A shorter way between processes of one host: beside each TCP port a Unix socket, named by the port's address.

    listen tcp://10.1.2.3:4567 ─▶ also the abstract name  miles_hpc 10.1.2.3:4567
    dial   tcp://10.1.2.3:4567 ─▶ that name, if somebody of our user listens there ─▶ else TCP

TCP over loopback spends most of a large transfer in the network stack; a Unix socket takes a third of the time
(README.md has the figures). Whether a peer is on the same host needn't be known: an abstract name (unix(7)) is seen
within one network namespace only, as the port is, and dialing one that isn't there fails at once. It isn't a file, so
there's nothing to clean up.

The name gives no rights: the same handshake follows. Another user of the host could take the name first; that keeps the
listener to TCP, and dialers turn away from a socket that isn't their own user's.
"""

from __future__ import annotations

import os
import socket
import struct

__all__ = ["connect_on_host", "listen_on_host", "who_is_there"]

_CREDENTIALS = struct.Struct("=iII")  # pid, uid, gid: struct ucred of unix(7)


def _name(host: str, port: int) -> bytes:
    return f"\0miles_hpc {host}:{port}".encode()


def _socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)


def listen_on_host(host: str, port: int) -> socket.socket | None:
    """A listening socket beside the TCP port, or None when the name is taken."""
    sock = _socket()
    try:
        sock.bind(_name(host, port))
        sock.listen(1024)
    except OSError:
        sock.close()
        return None
    return sock


def connect_on_host(host: str, port: int) -> socket.socket | None:
    """A connected socket to the listener of this TCP port, or None: it's on another host, busy, or somebody else's."""
    sock = _socket()
    try:
        sock.connect(_name(host, port))
        _, uid = _pid_and_user(sock)
    except OSError:  # nobody there, or its queue is full: TCP waits, and says what's wrong
        sock.close()
        return None
    if uid != os.geteuid():
        sock.close()
        return None
    return sock


def who_is_there(sock: socket.socket) -> str:
    """The process at the other end of a connected Unix socket, for logs."""
    try:
        pid, uid = _pid_and_user(sock)
    except OSError:
        return "this host"
    return f"pid {pid} (user {uid}) of this host"


def _pid_and_user(sock: socket.socket) -> tuple[int, int]:
    """As the kernel saw them when the connection was made, or the port opened."""
    pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid
