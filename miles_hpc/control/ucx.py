"""The transport over UCX, through ucxx: RDMA, shared memory or TCP, whatever UCX finds.

Listening, connecting and the handshake, which runs over the endpoint's stream; frames are in `ucx_endpoint.py`.

What differs from tcp: UCX listens on all interfaces (`bind` is only the address that is published; UCX_NET_DEVICES
restricts the interfaces), and it buffers what an unauthenticated peer sends until the handshake's deadline.
To see which transports UCX chose for a message, start with UCX_PROTO_INFO=y; UCX prints a table on first use.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from typing import Any

from miles_hpc.control.accepting import Accepted
from miles_hpc.control.auth import MAX_HANDSHAKE_BYTES, Acceptor, Dialer
from miles_hpc.control.calls import EndpointHook
from miles_hpc.control.frames import Limits
from miles_hpc.control.ucx_endpoint import UcxEndpoint, UcxWorker, ucx_array
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

__all__ = ["UcxTransport"]

logger = logging.getLogger(__name__)

#: A connection that hasn't authenticated after so long is dropped.
HANDSHAKE_DEADLINE_S = 5.0
#: So many connections may be in their handshake at once; beyond that the oldest is dropped.
MAX_HALF_OPEN = 1024

_LENGTH = struct.Struct("<H")


def _import_ucxx() -> Any:
    try:
        import ucxx._lib.libucxx as api
    except ImportError as error:
        raise UserError(
            f"transport ucx: {error}; install ucxx (pip install ucxx-cu12 or ucxx-cu13), or set transport = 'tcp'"
        ) from error
    return api


class UcxListener(Listener):
    def __init__(
        self,
        transport: UcxTransport,
        handler: Handler,
        bind: str,
        on_connect: EndpointHook | None,
        on_close: EndpointHook | None,
        any_term: bool,
    ) -> None:
        self._transport = transport
        self._worker = transport.worker()
        self._handler = handler
        self._any_term = any_term
        self._loop = asyncio.get_running_loop()
        self._half_open: dict[asyncio.Task[None], None] = {}

        def connected(ucx: Any) -> None:  # called by UCX while it progresses
            self._loop.call_soon(self._on_connection, ucx)

        self._ucx = transport.api.UCXListener.create(
            worker=self._worker.handle, port=0, cb_func=connected, cb_args=(), deliver_endpoint=True
        )
        self._worker.progress()
        host = f"[{bind}]" if ":" in bind else bind
        self.address = f"ucx://{host}:{self._ucx.port}"
        self._accepted = Accepted(self.address, on_connect, on_close)

    def _on_connection(self, ucx: Any) -> None:
        if self._ucx is None:
            self._worker.retire(ucx)
            return
        if len(self._half_open) >= MAX_HALF_OPEN:
            next(iter(self._half_open)).cancel()
        task = self._loop.create_task(self._welcome(ucx))
        self._half_open[task] = None
        task.add_done_callback(lambda done: self._half_open.pop(done, None))

    async def _welcome(self, ucx: Any) -> None:
        """Authenticate one connection. Every way out but success closes the UCX endpoint."""
        worker, ours = self._worker, self._transport
        try:
            async with asyncio.timeout(HANDSHAKE_DEADLINE_S):
                acceptor = Acceptor(ours.credentials, any_term=self._any_term, version=ours.version)
                await _write(worker, ucx, acceptor.challenge(await _read(worker, ucx)))
                if acceptor.error is not None:
                    await _settle(ucx)
                    raise acceptor.error
                message, keys = acceptor.welcome(await _read(worker, ucx))
                await _write(worker, ucx, message)
                if keys is None:
                    await _settle(ucx)
                    raise acceptor.error or AuthenticationError("refused")
        except asyncio.CancelledError:
            worker.retire(ucx)
            raise
        except Exception as error:  # UCX's errors have no common base of ours
            why = str(error) or "no handshake in time"
            logger.warning("%s: connection refused: %s", self.address, why)
            worker.retire(ucx)
            return
        self._accepted.add(UcxEndpoint(worker, ucx, keys, self._handler, ours.limits, dialer=False))

    async def close(self) -> None:
        self._ucx = None
        for task in list(self._half_open):
            task.cancel()
        await self._accepted.close()


class UcxTransport(Transport):
    """UCX with the shared handshake and frames. Addresses look like ucx://host:port."""

    def __init__(
        self, credentials: Credentials, *, limits: Limits | None = None, version: int = PROTOCOL_VERSION
    ) -> None:
        self.credentials = credentials
        self.limits = limits or Limits()
        self.version = version
        self.api = _import_ucxx()
        self._worker: UcxWorker | None = None

    def worker(self) -> UcxWorker:
        """The worker of this transport's loop, made on first use."""
        if self._worker is None:
            self._worker = UcxWorker(self.api)
        return self._worker

    async def listen(
        self,
        handler: Handler,
        *,
        bind: str = "127.0.0.1",
        on_connect: EndpointHook | None = None,
        on_close: EndpointHook | None = None,
        any_term: bool = False,
    ) -> Listener:
        return UcxListener(self, handler, bind, on_connect, on_close, any_term)

    async def connect(self, address: str, handler: Handler | None = None, *, deadline_s: float) -> UcxEndpoint:
        try:
            async with asyncio.timeout(deadline_s):
                return await self._connect(address, handler)
        except TimeoutError:
            raise DeadlineExpired(f"{address}: no connection after {deadline_s:.1f} s") from None

    async def _connect(self, address: str, handler: Handler | None) -> UcxEndpoint:
        host, port = _parse(address)
        worker = self.worker()
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        ucx = self.api.UCXEndpoint.create(worker.handle, str(found[0][4][0]), port, True)
        worker.progress()
        proven = False
        try:
            dialer = Dialer(self.credentials, version=self.version)
            await _write(worker, ucx, dialer.opening())
            proof = dialer.proof(await _read(worker, ucx))
            await _write(worker, ucx, proof)
            proven = True
            keys = dialer.finish(await _read(worker, ucx))
        except (AuthenticationError, FencedError) as error:
            worker.retire(ucx)
            raise type(error)(f"{address}: {error}") from error
        except (asyncio.CancelledError, MilesError):
            worker.retire(ucx)
            raise
        except Exception as error:  # of UCX
            worker.retire(ucx)
            if proven:
                raise AuthenticationError(
                    f"{address}: hung up on our proof; its run has another secret, or the process just died"
                ) from error
            raise PeerLost(f"{address}: can't connect: {error}") from error
        endpoint = UcxEndpoint(worker, ucx, keys, handler, self.limits, dialer=True)
        try:
            await endpoint.admitted()
        except BaseException:
            endpoint._lost("connect was given up")
            raise
        return endpoint


def _parse(address: str) -> tuple[str, int]:
    host, colon, port = address.removeprefix("ucx://").rpartition(":")
    if not address.startswith("ucx://") or not colon or not port.isdecimal() or not host:
        raise UserError(f"address {address!r}: expected ucx://host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


async def _read(worker: UcxWorker, ucx: Any) -> bytes:
    """One handshake message. Raises what UCX raises when the peer hangs up."""
    size = bytearray(_LENGTH.size)
    _check_alive(ucx)
    await worker.wait(ucx.stream_recv(ucx_array(size)), size)
    (length,) = _LENGTH.unpack(size)
    if not 0 < length <= MAX_HANDSHAKE_BYTES:
        raise AuthenticationError(f"handshake message of {length} bytes, limit {MAX_HANDSHAKE_BYTES}")
    data = bytearray(length)
    _check_alive(ucx)
    await worker.wait(ucx.stream_recv(ucx_array(data)), data)
    return bytes(data)


def _check_alive(ucx: Any) -> None:
    """Before each send: UCX 1.21 spins for ever in a send on an endpoint that has failed already."""
    if not ucx.alive:
        raise ConnectionError("nobody answers there, or the peer hung up")


async def _write(worker: UcxWorker, ucx: Any, message: bytes) -> None:
    data = _LENGTH.pack(len(message)) + message
    _check_alive(ucx)
    await worker.wait(ucx.stream_send(ucx_array(data)), data)


async def _settle(ucx: Any) -> None:
    """Wait shortly for the peer to close: our last message may still be on its way through another transport."""
    for _ in range(50):
        if not ucx.alive:
            return
        await asyncio.sleep(0.02)
