"""The transport within one process: the same handshake, admission, limits and order, without sockets or frame MACs.

For tests and for `local` runs in one process. Two transports with different credentials find each other by address.
Payload buffers are joined when sent, so that sender and receiver never share memory.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

from miles_hpc.control.accepting import Accepted
from miles_hpc.control.auth import Acceptor, Dialer, SessionKeys
from miles_hpc.control.calls import CallEndpoint, EndpointHook
from miles_hpc.control.frames import Frame, Limits, byte_views, check_sizes
from miles_hpc.core.errors import AuthenticationError, DeadlineExpired, FencedError, PeerLost
from miles_hpc.core.transport import Buffer, Credentials, Handler, Listener, Transport
from miles_hpc.core.version import PROTOCOL_VERSION

__all__ = ["LoopbackTransport"]

_numbers = itertools.count(1)
_listeners: dict[str, LoopbackListener] = {}


class LoopbackEndpoint(CallEndpoint):
    """One half of a pair."""

    def __init__(self, keys: SessionKeys, handler: Handler | None, limits: Limits, *, dialer: bool) -> None:
        super().__init__(keys.peer, handler, dialer=dialer)
        self._limits = limits
        self._other: LoopbackEndpoint | None = None

    def _send(
        self, kind: Frame, call_id: int, header: bytes, payload: Sequence[Buffer] = ()
    ) -> asyncio.Future[None] | None:
        other = self._other
        if other is None:
            raise self._peer_lost()
        views, n_bytes = byte_views(payload)
        check_sizes(self._limits, len(header), n_bytes)
        self._loop.call_soon(other._received, kind, call_id, header, memoryview(b"".join(views)))
        return None

    async def _shutdown(self) -> None:
        self._abandon()
        await asyncio.sleep(0)

    def _abandon(self) -> None:
        other, self._other = self._other, None
        if other is not None:
            self._loop.call_soon(other._lost, "endpoint closed: the peer is gone")


class LoopbackListener(Listener):
    def __init__(
        self,
        transport: LoopbackTransport,
        handler: Handler,
        on_connect: EndpointHook | None,
        on_close: EndpointHook | None,
        any_term: bool,
    ) -> None:
        self.address = f"loopback://{next(_numbers)}"
        self._transport = transport
        self._handler = handler
        self._accepted = Accepted(self.address, on_connect, on_close)
        self._any_term = any_term
        _listeners[self.address] = self

    def pair(self, transport: LoopbackTransport, handler: Handler | None) -> LoopbackEndpoint:
        """Shake hands with a dialer of this process; returns its half."""
        dialer = Dialer(transport.credentials, version=transport.version)
        acceptor = Acceptor(self._transport.credentials, any_term=self._any_term, version=self._transport.version)
        try:
            challenge = acceptor.challenge(dialer.opening())
            message, accepted = acceptor.welcome(dialer.proof(challenge))
            keys = dialer.finish(message)
        except (AuthenticationError, FencedError) as error:
            raise type(error)(f"{self.address}: {error}") from error
        assert accepted is not None
        ours = LoopbackEndpoint(accepted, self._handler, self._transport.limits, dialer=False)
        theirs = LoopbackEndpoint(keys, handler, transport.limits, dialer=True)
        ours._other, theirs._other = theirs, ours
        self._accepted.add(ours)
        return theirs

    async def close(self) -> None:
        _listeners.pop(self.address, None)
        await self._accepted.close()


class LoopbackTransport(Transport):
    """Addresses look like loopback://number."""

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
        return LoopbackListener(self, handler, on_connect, on_close, any_term)

    async def connect(self, address: str, handler: Handler | None = None, *, deadline_s: float) -> LoopbackEndpoint:
        listener = _listeners.get(address)
        if listener is None:
            raise PeerLost(f"{address}: can't connect: nobody listens there in this process")
        endpoint = listener.pair(self, handler)
        try:
            async with asyncio.timeout(deadline_s):
                await endpoint.admitted()
        except TimeoutError:
            endpoint._lost("connect was given up")
            raise DeadlineExpired(f"{address}: no connection after {deadline_s:.1f} s") from None
        except BaseException:
            endpoint._lost("connect was given up")
            raise
        return endpoint
