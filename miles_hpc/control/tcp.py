"""The transport over TCP sockets, on the event loop's readiness callbacks.

    readable ─▶ recv_into(64 KiB buffer) ─▶ whole frames ─▶ calls.py
                 └─ a frame that doesn't fit ─▶ recv_into(its own buffer), MAC updated as it arrives
    send     ─▶ sendmsg(head, buffers, tag) at once; what the kernel doesn't take waits for writable

Payloads aren't copied in Python: sent from the caller's buffers, received into one buffer of the announced (and
authenticated) size. asyncio's streams and transports would copy on both sides with Python 3.11.
A peer that was killed is noticed by the closed socket; a cut link isn't: heartbeats (roster.py) are for that.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import struct
from collections import deque
from collections.abc import Sequence

from miles_hpc.control.accepting import Accepted
from miles_hpc.control.auth import MAX_HANDSHAKE_BYTES, Acceptor, Dialer, SessionKeys
from miles_hpc.control.calls import EndpointHook
from miles_hpc.control.frames import (
    HEAD_BYTES,
    TAG_BYTES,
    Frame,
    Head,
    Limits,
    aligned_buffer,
    check_body,
)
from miles_hpc.control.sealed import SealedEndpoint
from miles_hpc.core.errors import (
    AuthenticationError,
    DeadlineExpired,
    FencedError,
    MilesError,
    PeerLost,
    ProtocolError,
    UserError,
)
from miles_hpc.core.transport import Buffer, Credentials, Handler, Listener, Transport
from miles_hpc.core.version import PROTOCOL_VERSION

__all__ = ["TcpTransport"]

logger = logging.getLogger(__name__)

#: A connection that hasn't authenticated after so long is dropped.
HANDSHAKE_DEADLINE_S = 5.0
#: So many connections may be in their handshake at once; beyond that the oldest is dropped.
MAX_HALF_OPEN = 1024

_INPUT_BYTES = 64 * 1024
_BULK_STEP_BYTES = 1 << 20  # received per callback, so that a large payload leaves room for other endpoints
_MAX_PIECES = 512  # below IOV_MAX
_FLUSH_S = 1.0
_LENGTH = struct.Struct("<H")


class TcpEndpoint(SealedEndpoint):
    """One connected socket."""

    def __init__(
        self, sock: socket.socket, keys: SessionKeys, handler: Handler | None, limits: Limits, *, dialer: bool
    ) -> None:
        super().__init__(keys, handler, limits, dialer=dialer)
        self._sock = sock
        self._out: deque[memoryview] = deque()
        self._queued_bytes = 0  # all that was ever queued and sent
        self._sent_bytes = 0
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._writing = False
        self._open = True
        self._eof = asyncio.Event()
        self._in = memoryview(bytearray(_INPUT_BYTES))
        self._start = 0
        self._end_of_input = 0
        self._head: Head | None = None
        self._body: memoryview | None = None  # header, padding not included, payload, tag of a large frame
        self._body_got = 0
        self._loop.add_reader(sock.fileno(), self._on_readable)

    # ------------------------------------------------------------------------------ sending

    @property
    def _connected(self) -> bool:
        return self._open

    def _transmit_whole(
        self, kind: Frame, call_id: int, header: bytes, views: list[memoryview], n_bytes: int
    ) -> asyncio.Future[None] | None:
        return self._queue(self._sealer.seal(kind, call_id, header, views))

    def _transmit_start(self, prefix: bytes, views: list[memoryview]) -> None:
        self._queue([prefix, *views])

    def _transmit_tag(self, tag: bytes) -> asyncio.Future[None] | None:
        return self._queue([tag])

    def _queue(self, pieces: Sequence[Buffer]) -> asyncio.Future[None] | None:
        for piece in pieces:
            view = memoryview(piece)
            self._out.append(view)
            self._queued_bytes += view.nbytes
        if not self._writing:
            self._flush()
        if not self._out or not self._open:
            return None
        future = self._promise()
        self._waiters.append((self._queued_bytes, future))
        return future

    def _flush(self) -> None:
        """Send as much as the kernel takes and ask to be called again for the rest."""
        out = self._out
        try:
            while out:
                pieces = list(out) if len(out) <= _MAX_PIECES else [out[i] for i in range(_MAX_PIECES)]
                sent = self._sock.sendmsg(pieces)
                self._sent_bytes += sent
                while sent:
                    first = out[0]
                    if sent >= first.nbytes:
                        sent -= first.nbytes
                        out.popleft()
                    else:
                        out[0] = first[sent:]
                        sent = 0
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            self._lost(f"endpoint closed: {error.strerror or error}")
            return
        while self._waiters and self._waiters[0][0] <= self._sent_bytes:
            future = self._waiters.popleft()[1]
            if not future.done():
                future.set_result(None)
        if bool(out) != self._writing:
            self._writing = bool(out)
            if self._writing:
                self._loop.add_writer(self._sock.fileno(), self._flush)
            else:
                self._loop.remove_writer(self._sock.fileno())

    # ------------------------------------------------------------------------------ receiving

    def _on_readable(self) -> None:
        try:
            if self._body is not None:
                target = self._body[self._body_got : self._body_got + _BULK_STEP_BYTES]
            else:
                target = self._in[self._end_of_input :]
            n = self._sock.recv_into(target)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._gone(f"endpoint closed: {error.strerror or error}")
            return
        if n == 0:
            self._gone("endpoint closed: the peer's socket is gone")
            return
        if self.closed.is_set():
            return  # we have said goodbye and only wait for the peer's end
        try:
            if self._body is not None:
                self._bulk_arrived(n)
            else:
                self._end_of_input += n
                self._parse()
        except (AuthenticationError, ProtocolError) as error:
            self._violated(str(error))

    def _gone(self, reason: str) -> None:
        self._eof.set()
        if self.closed.is_set():
            self._abandon()
        else:
            self._lost(reason)

    def _parse(self) -> None:
        """Deliver all whole frames of the input buffer and keep the rest for the next call."""
        while not self.closed.is_set():
            available = self._end_of_input - self._start
            if self._head is None:
                if available < HEAD_BYTES:
                    break
                self._head = self._opener.head(self._in[self._start : self._start + HEAD_BYTES])
                self._start += HEAD_BYTES
                available -= HEAD_BYTES
            head = self._head
            n_body = head.body_bytes
            if n_body > _INPUT_BYTES:
                self._begin_bulk(head, available)
                return
            if available < n_body:
                break
            body = self._in[self._start : self._start + n_body]
            self._start += n_body
            self._head = None
            self._deliver_small(head, body)
        rest = self._end_of_input - self._start
        if rest and self._start:
            self._in[:rest] = bytes(self._in[self._start : self._end_of_input])
        self._start, self._end_of_input = 0, rest

    def _deliver_small(self, head: Head, body: memoryview) -> None:
        if body:
            head.mac.update(body[:-TAG_BYTES])
            check_body(head.mac, body[-TAG_BYTES:])
        header = bytes(body[: head.header_bytes])
        payload = memoryview(bytes(body[head.header_bytes : -TAG_BYTES])) if head.payload_bytes else memoryview(b"")
        self._received(head.kind, head.call_id, header, payload)

    def _begin_bulk(self, head: Head, available: int) -> None:
        """Allocate the frame's own buffer and move what has arrived of it there."""
        self._body = aligned_buffer(head.header_bytes, head.payload_bytes + TAG_BYTES)
        self._body_got = 0
        self._body[:available] = self._in[self._start : self._end_of_input]
        self._start = self._end_of_input = 0
        if available:
            self._bulk_arrived(available)

    def _bulk_arrived(self, n: int) -> None:
        body, head = self._body, self._head
        assert body is not None and head is not None
        end_of_data = body.nbytes - TAG_BYTES
        head.mac.update(body[self._body_got : min(self._body_got + n, end_of_data)])
        self._body_got += n
        if self._body_got < body.nbytes:
            return
        self._body = self._head = None
        check_body(head.mac, body[end_of_data:])
        payload = body[head.header_bytes : end_of_data].toreadonly()
        self._received(head.kind, head.call_id, body[: head.header_bytes], payload)

    # ------------------------------------------------------------------------------ the end

    async def _shutdown(self) -> None:
        """Flush, send our end, wait shortly for the peer's, close: a close with unread input would reset the
        connection, and the peer might never read why."""
        loop = self._loop
        end = loop.time() + _FLUSH_S
        try:
            while self._open and (self._out or self._hashing) and loop.time() < end:
                await asyncio.sleep(0.005)
            if self._open and not self._out and not self._hashing:
                self._sock.shutdown(socket.SHUT_WR)
                async with asyncio.timeout_at(end):
                    await self._eof.wait()
        except (OSError, TimeoutError):
            pass
        finally:
            self._abandon()

    def _abandon(self) -> None:
        if not self._open:
            return
        self._open = False
        self._eof.set()
        fd = self._sock.fileno()
        self._loop.remove_reader(fd)
        self._loop.remove_writer(fd)
        self._sock.close()
        self._out.clear()
        for _, future in self._waiters:
            if not future.done():
                future.set_exception(self._peer_lost())
        self._waiters.clear()
        self._drop_backlog()


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
