"""Raw sockets of an attacker: connect, send, count what comes back."""

from __future__ import annotations

import socket
import struct
import time

from miles_hpc.control.tcp import parse_address

__all__ = ["CHALLENGE_BYTES", "RawClient", "message"]

#: A challenge of 38 bytes behind its length: all that a stranger may ever get.
CHALLENGE_BYTES = 40
_LENGTH = struct.Struct("<H")
_PATIENCE_S = 20.0


def message(data: bytes) -> bytes:
    """A handshake message as it lies on the wire of tcp."""
    return _LENGTH.pack(len(data)) + data


class RawClient:
    """A TCP connection that follows no protocol. All waits are bounded; `got` counts what arrived."""

    def __init__(self, address: str) -> None:
        family, target = parse_address(address, address.partition(":")[0])
        self.got = 0
        self.ended = False
        self._buffer = b""
        self.sock = socket.socket(family, socket.SOCK_STREAM)
        self.sock.settimeout(_PATIENCE_S)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock.connect(target)

    def send(self, data: bytes) -> None:
        """Send unless the other side has hung up already."""
        try:
            self.sock.sendall(data)
        except OSError:
            self.ended = True

    def receive(self, n: int) -> bytes:
        """Exactly n bytes, or fewer when the other side hung up."""
        while len(self._buffer) < n and not self.ended:
            try:
                data = self.sock.recv(65536)
            except TimeoutError:
                raise
            except OSError:
                data = b""
            self.ended = not data
            self.got += len(data)
            self._buffer += data
        data, self._buffer = self._buffer[:n], self._buffer[n:]
        return data

    def receive_message(self) -> bytes:
        """One handshake message; empty when the other side hung up."""
        prefix = self.receive(_LENGTH.size)
        return self.receive(_LENGTH.unpack(prefix)[0]) if len(prefix) == _LENGTH.size else b""

    def finish(self) -> bytes:
        """Say that nothing more comes, and read until the other side hangs up. Raises TimeoutError when it doesn't."""
        try:
            self.sock.shutdown(socket.SHUT_WR)
        except OSError:
            pass
        end = time.monotonic() + _PATIENCE_S
        rest = b""
        while True:
            piece = self.receive(65536)
            rest += piece
            if self.ended and not self._buffer:
                break
            if time.monotonic() > end:
                raise TimeoutError
        self.sock.close()
        return rest

    def reset(self) -> None:
        """End with a reset instead of an orderly close."""
        try:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        except OSError:
            pass
        self.sock.close()
