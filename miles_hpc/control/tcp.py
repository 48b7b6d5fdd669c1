"""The carrier over TCP sockets, and over Unix sockets between processes of one host: listening and connecting.

What goes over a connected socket is stream_wire.py's business; when it is a Unix socket, same_host.py's.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable

from miles_hpc.control.same_host import connect_on_host, listen_on_host, who_is_there
from miles_hpc.control.stream_wire import INPUT_BYTES, StreamWire
from miles_hpc.control.wire import Carrier, Loop, Port, Wire
from miles_hpc.core.errors import PeerLost, UserError

__all__ = ["TcpCarrier", "parse_address"]

_ACCEPTS = 64  # per callback, so that a flood leaves room for others
_PAUSE_S = 0.5  # before accepting again when there was no descriptor left


class _ListeningSocket:
    """Takes connections in: accepted(socket, its address)."""

    def __init__(
        self, loop: Loop, sock: socket.socket, name: str, accepted: Callable[[socket.socket, object], None]
    ) -> None:
        self._loop = loop
        self._sock = sock
        self._fd = sock.fileno()
        self._name = name
        self._accepted = accepted
        self._open = True
        loop.add_reader(self._fd, self._acceptable)

    def _acceptable(self) -> None:
        for _ in range(_ACCEPTS):
            if not self._open:
                return
            try:
                sock, address = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    raise
                import logging

                logging.getLogger(__name__).error("%s: can't accept: %s", self._name, error.strerror)
                self._loop.remove_reader(self._fd)  # else the loop would spin until a descriptor is free
                self._loop.call_later(_PAUSE_S, self._resume)
                return
            sock.setblocking(False)
            self._accepted(sock, address)

    def _resume(self) -> None:
        if self._open:
            self._loop.add_reader(self._fd, self._acceptable)

    def close(self) -> None:
        if self._open:
            self._open = False
            self._loop.remove_reader(self._fd)
            self._sock.close()


class TcpPort(Port):
    """A bound TCP socket, and with `same_host` the Unix socket beside it."""

    def __init__(
        self,
        loop: Loop,
        sock: socket.socket,
        scheme: str,
        accepted: Callable[[socket.socket, str], None],
        *,
        same_host: bool,
    ) -> None:
        host, port = sock.getsockname()[:2]
        self.address = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
        self._sockets = [
            _ListeningSocket(loop, sock, self.address, lambda sock, peer: accepted(sock, str(peer[0])))  # type: ignore[index]
        ]
        beside = listen_on_host(host, port) if same_host else None
        if beside is not None:
            self._sockets.append(
                _ListeningSocket(loop, beside, self.address, lambda sock, _: accepted(sock, who_is_there(sock)))
            )

    def close(self) -> None:
        for sock in self._sockets:
            sock.close()


class TcpCarrier(Carrier):
    """Addresses look like tcp://10.1.2.3:4567, tcp://[fd00::1]:4567 for IPv6."""

    scheme = "tcp"

    def __init__(self, loop: Loop, *, same_host: bool = True) -> None:
        """`same_host`: whether processes of one host talk over a Unix socket."""
        self._loop = loop
        self._same_host = same_host
        self._room = memoryview(bytearray(INPUT_BYTES))

    def _wire(self, sock: socket.socket, remote: str) -> Wire:
        """What talks over a connected, non-blocking socket."""
        return StreamWire(self._loop, sock, remote, self._room)

    def listen(self, bind: str, accepted: Callable[[Wire], None]) -> Port:
        try:
            found = socket.getaddrinfo(bind, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            family, _, _, _, address = found[0]
            sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
            try:
                sock.bind(address)
                sock.listen(1024)
            except OSError:
                sock.close()
                raise
        except OSError as error:
            raise UserError(
                f"can't listen on {bind!r}: {error.strerror or error}; "
                "expected an address of this host, check the site's interface"
            ) from error
        return TcpPort(
            self._loop,
            sock,
            self.scheme,
            lambda sock, remote: accepted(self._wire(sock, remote)),
            same_host=self._same_host,
        )

    def dial(
        self, address: str, connected: Callable[[Wire], None], failed: Callable[[Exception], None]
    ) -> Callable[[], None]:
        family, target = parse_address(address, self.scheme)
        sock: socket.socket | None = None
        code = 0
        try:
            sock = connect_on_host(*target[:2]) if self._same_host else None
            if sock is None:
                sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
                code = sock.connect_ex(target)
        except OSError as error:  # no descriptor is left, which passes: whoever dials again must not die of it
            code = error.errno or errno.EMFILE
        return _Dial(self._loop, sock, code, address, lambda sock: connected(self._wire(sock, address)), failed).give_up

    def chosen(self) -> dict[str, str]:
        within = "unix sockets" if self._same_host else "tcp"
        return {"transport": "tcp", "within_a_host": within, "system": f"{os.uname().sysname} {os.uname().release}"}

    def close(self) -> None:
        return


class _Dial:
    """A socket that connects."""

    def __init__(
        self,
        loop: Loop,
        sock: socket.socket | None,
        code: int,
        address: str,
        connected: Callable[[socket.socket], None],
        failed: Callable[[Exception], None],
    ) -> None:
        """`code` is what connect returned: 0, EINPROGRESS, or why it failed, or there is no socket."""
        self._loop = loop
        self._sock = sock
        self._code = code
        self._address = address
        self._connected = connected
        self._failed = failed
        self._waiting = True
        if sock is not None and code == errno.EINPROGRESS:
            loop.add_writer(sock.fileno(), self._writable)
        else:
            loop.call_soon(self._decided)

    def _writable(self) -> None:
        assert self._sock is not None
        self._loop.remove_writer(self._sock.fileno())
        self._code = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        self._decided()

    def _decided(self) -> None:
        if not self._waiting:
            return
        self._waiting = False
        if self._sock is None or self._code:
            if self._sock is not None:
                self._sock.close()
            self._failed(PeerLost(f"{self._address}: can't connect: {os.strerror(self._code)}"))
        else:
            self._connected(self._sock)

    def give_up(self) -> None:
        if self._waiting:
            self._waiting = False
            if self._sock is not None:
                self._loop.remove_writer(self._sock.fileno())
                self._sock.close()


def parse_address(address: str, scheme: str = "tcp") -> tuple[int, tuple[str, int]]:
    """Address family and target of scheme://host:port with a numeric host. Raises UserError."""
    host, colon, port = address.removeprefix(f"{scheme}://").rpartition(":")
    wrong = UserError(f"address {address!r}: expected {scheme}://address:port with a numeric IPv4 or [IPv6] address")
    if not address.startswith(f"{scheme}://") or not colon or not port.isdecimal() or int(port) > 65535 or not host:
        raise wrong
    if ":" in host:  # only in brackets is it clear where the address ends
        if not (host.startswith("[") and host.endswith("]")):
            raise wrong
        host = host[1:-1]
    try:
        found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except OSError as error:
        raise wrong from error
    family, _, _, _, target = found[0]
    return family, target  # type: ignore[return-value]  # IPv6 targets carry scope and flow label as well
