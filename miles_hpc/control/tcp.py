"""The transport over TCP sockets: listening, connecting and the handshake; frames are in `tcp_endpoint.py`.

A peer that was killed is noticed by the closed socket; a cut link isn't: heartbeats (roster.py) are for that.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import struct

from miles_hpc.control.accepting import Accepted
from miles_hpc.control.auth import MAX_HANDSHAKE_BYTES, Acceptor, Dialer
from miles_hpc.control.calls import EndpointHook
from miles_hpc.control.frames import Limits
from miles_hpc.control.tcp_endpoint import TcpEndpoint
from miles_hpc.core.errors import (
    AuthenticationError,
    DeadlineExpired,
    FencedError,
    MilesError,
    PeerLost,
    UserError,
)
from miles_hpc.core.transport import Credentials, Handler, Listener, Transport
from miles_hpc.core.version import PROTOCOL_VERSION

__all__ = ["TcpTransport"]

logger = logging.getLogger(__name__)

#: A connection that hasn't authenticated after so long is dropped.
HANDSHAKE_DEADLINE_S = 5.0
#: So many connections may be in their handshake at once; beyond that the oldest is dropped.
MAX_HALF_OPEN = 1024

_LENGTH = struct.Struct("<H")


class TcpListener(Listener):
    """A bound socket with its accepted endpoints."""

    def __init__(
        self,
        transport: TcpTransport,
        sock: socket.socket,
        handler: Handler,
        on_connect: EndpointHook | None,
        on_close: EndpointHook | None,
        any_term: bool,
    ) -> None:
        self.address = _format_address(sock)
        self._transport = transport
        self._sock = sock
        self._handler = handler
        self._accepted = Accepted(self.address, on_connect, on_close)
        self._any_term = any_term
        self._loop = asyncio.get_running_loop()
        self._half_open: dict[asyncio.Task[None], None] = {}  # in order of arrival
        self._loop.add_reader(sock.fileno(), self._on_acceptable)

    def _on_acceptable(self) -> None:
        for _ in range(64):
            try:
                sock, address = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    raise
                logger.error("%s: can't accept: %s", self.address, error.strerror)
                self._loop.remove_reader(self._sock.fileno())  # else the loop would spin until a descriptor is free
                self._loop.call_later(0.5, self._resume)
                return
            sock.setblocking(False)
            if len(self._half_open) >= MAX_HALF_OPEN:
                next(iter(self._half_open)).cancel()
            task = self._loop.create_task(self._welcome(sock, str(address[0])))
            self._half_open[task] = None
            task.add_done_callback(lambda done: self._half_open.pop(done, None))

    def _resume(self) -> None:
        if self._sock.fileno() >= 0:
            self._loop.add_reader(self._sock.fileno(), self._on_acceptable)

    async def _welcome(self, sock: socket.socket, host: str) -> None:
        """Authenticate one connection, then hand it to `_serve`. Every way out but success closes the socket."""
        try:
            async with asyncio.timeout(HANDSHAKE_DEADLINE_S):
                _no_delay(sock)
                acceptor = Acceptor(
                    self._transport.credentials, any_term=self._any_term, version=self._transport.version
                )
                await _write(sock, acceptor.challenge(await _read(sock)))
                if acceptor.error is not None:
                    raise acceptor.error
                message, keys = acceptor.welcome(await _read(sock))
                await _write(sock, message)
                if keys is None:
                    raise acceptor.error or AuthenticationError("refused")
        except (OSError, TimeoutError, MilesError) as error:
            logger.warning(
                "%s: connection from %s refused: %s", self.address, host, str(error) or "no handshake in time"
            )
            sock.close()
            return
        except BaseException:
            sock.close()
            raise
        self._accepted.add(TcpEndpoint(sock, keys, self._handler, self._transport.limits, dialer=False))

    async def close(self) -> None:
        fd = self._sock.fileno()
        if fd >= 0:
            self._loop.remove_reader(fd)
            self._sock.close()
        for task in list(self._half_open):
            task.cancel()
        await self._accepted.close()


class TcpTransport(Transport):
    """TCP with the shared handshake and frames. Addresses look like tcp://host:port, tcp://[::1]:port for IPv6."""

    def __init__(
        self, credentials: Credentials, *, limits: Limits | None = None, version: int = PROTOCOL_VERSION
    ) -> None:
        self.credentials = credentials
        self.limits = limits or Limits()
        self.version = version

    async def listen(
        self,
        handler: Handler,
        *,
        bind: str = "127.0.0.1",
        on_connect: EndpointHook | None = None,
        on_close: EndpointHook | None = None,
        any_term: bool = False,
    ) -> Listener:
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(bind, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
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
        return TcpListener(self, sock, handler, on_connect, on_close, any_term)

    async def connect(self, address: str, handler: Handler | None = None, *, deadline_s: float) -> TcpEndpoint:
        try:
            async with asyncio.timeout(deadline_s):
                return await self._connect(address, handler)
        except TimeoutError:
            raise DeadlineExpired(f"{address}: no connection after {deadline_s:.1f} s") from None

    async def _connect(self, address: str, handler: Handler | None) -> TcpEndpoint:
        sock = await _open_socket(address)
        try:
            dialer = Dialer(self.credentials, version=self.version)
            try:
                await _write(sock, dialer.opening())
                proof = dialer.proof(await _read(sock))
                await _write(sock, proof)
            except OSError as error:
                raise PeerLost(f"{address}: closed in the handshake: {error.strerror or error}") from error
            try:
                keys = dialer.finish(await _read(sock))
            except OSError as error:
                raise AuthenticationError(
                    f"{address}: hung up on our proof; its run has another secret, or the process just died"
                ) from error
        except (AuthenticationError, FencedError) as error:
            sock.close()
            if str(error).startswith(address):
                raise
            raise type(error)(f"{address}: {error}") from error
        except BaseException:
            sock.close()
            raise
        endpoint = TcpEndpoint(sock, keys, handler, self.limits, dialer=True)
        try:
            await endpoint.admitted()
        except BaseException:
            endpoint._lost("connect was given up")
            raise
        return endpoint


async def _open_socket(address: str) -> socket.socket:
    """Connect to the first address that answers. Raises PeerLost."""
    host, port = parse_address(address)
    loop = asyncio.get_running_loop()
    last: OSError = OSError("no address")
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        found, last = [], error
    for family, _, _, _, target in found:
        sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            _no_delay(sock)
            await loop.sock_connect(sock, target)
            return sock
        except OSError as error:
            last = error
            sock.close()
        except BaseException:
            sock.close()
            raise
    raise PeerLost(f"{address}: can't connect: {last.strerror or last}")


def parse_address(address: str) -> tuple[str, int]:
    """Host and port of tcp://host:port. Raises UserError."""
    host, colon, port = address.removeprefix("tcp://").rpartition(":")
    if not address.startswith("tcp://") or not colon or not port.isdecimal() or not host:
        raise UserError(f"address {address!r}: expected tcp://host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _format_address(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _no_delay(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


async def _read(sock: socket.socket) -> bytes:
    """One handshake message; never more than it, what follows belongs to the frames. Raises OSError at the end."""
    (length,) = _LENGTH.unpack(await _read_exactly(sock, _LENGTH.size))
    if length > MAX_HANDSHAKE_BYTES:
        raise AuthenticationError(f"handshake message of {length} bytes, limit {MAX_HANDSHAKE_BYTES}")
    return await _read_exactly(sock, length)


async def _read_exactly(sock: socket.socket, n: int) -> bytes:
    loop = asyncio.get_running_loop()
    data = b""
    while len(data) < n:
        piece = await loop.sock_recv(sock, n - len(data))
        if not piece:
            raise ConnectionError(errno.ECONNRESET, "the peer hung up")
        data += piece
    return data


async def _write(sock: socket.socket, message: bytes) -> None:
    await asyncio.get_running_loop().sock_sendall(sock, _LENGTH.pack(len(message)) + message)
