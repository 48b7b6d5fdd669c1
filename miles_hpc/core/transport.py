"""The transport contract: authenticated endpoints between processes, over which both sides may call.

    listener ──accept──▶ endpoint ◀──connect── dialer
        handler(endpoint, message, payload) answers the other side's calls, on either side

| promise | |
|---|---|
| authentication | both sides prove knowledge of the run's secret before anything else is read |
| order | messages of one endpoint arrive in order; handlers run concurrently, each as its own task |
| payload | raw buffers behind the header, delivered as one read-only memoryview, valid until released by the receiver |
| loss | a dead or closed peer fails every pending call with PeerLost at once; `closed` is set |
| deadline | every call has one; expiry raises DeadlineExpired naming peer, message and elapsed time |
| thread | everything runs in the event loop that made the endpoint; nothing here blocks it |

A handler that raises fails the caller with RemoteError (class name and text, no traceback objects on the wire).
Returning None from a handler answers Ack.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from miles_hpc.core.messages import Message

__all__ = ["Buffer", "Credentials", "Endpoint", "Handler", "Listener", "PeerIdentity", "Reply", "Transport"]

Buffer: TypeAlias = bytes | bytearray | memoryview


class PeerIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Who stands at the other end, as told in its authenticated hello."""

    role: str  # controller | supervisor | trainer | rollout | sandbox | engine | weights
    name: str  # unique within the run: role-host-rank
    host: str
    pid: int
    attempt: int  # which Slurm start of the run this process belongs to
    term: int
    incarnation: int = 0  # which start of this role within the term; newer ones fence older ones
    rank: int = 0


@dataclass(frozen=True)
class Credentials:
    """What a process needs to join: the run's secret and who it says it is.

    Attempt and term are part of the handshake's transcript. A listener refuses peers of another attempt always,
    and of another term unless it was opened with `any_term`.
    """

    secret: bytes
    identity: PeerIdentity


@dataclass(frozen=True)
class Reply:
    """What a call returns. `payload` is empty when the peer sent none."""

    message: Message
    payload: memoryview


HandlerResult: TypeAlias = Message | tuple[Message, Sequence[Buffer]] | None
Handler: TypeAlias = Callable[["Endpoint", Message, memoryview], Awaitable[HandlerResult]]


class Endpoint(ABC):
    """One authenticated connection."""

    peer: PeerIdentity
    closed: asyncio.Event
    close_reason: str

    @abstractmethod
    async def call(self, message: Message, *, payload: Sequence[Buffer] = (), deadline_s: float) -> Reply:
        """Send and wait for the answer. Raises DeadlineExpired, PeerLost, RemoteError."""

    @abstractmethod
    async def notify(self, message: Message, *, payload: Sequence[Buffer] = ()) -> None:
        """Send without an answer. Returns when the message is handed to the operating system. Raises PeerLost."""

    @abstractmethod
    async def close(self, reason: str = "") -> None:
        """Close; idempotent. Pending calls on both sides fail with PeerLost."""


class Listener(ABC):
    """Accepts endpoints until closed. `address` is what `Transport.connect` takes, with the bound port in it."""

    address: str

    @abstractmethod
    async def close(self) -> None:
        """Stop accepting and close all accepted endpoints."""


class Transport(ABC):
    """Makes listeners and endpoints. One instance belongs to one event loop."""

    @abstractmethod
    async def listen(
        self,
        handler: Handler,
        *,
        bind: str = "127.0.0.1",
        on_connect: Callable[[Endpoint], Awaitable[None]] | None = None,
        on_close: Callable[[Endpoint], Awaitable[None]] | None = None,
        any_term: bool = False,
    ) -> Listener:
        """Bind a port chosen by the system on address `bind`, then accept.

        `on_connect` runs after authentication and before any message of that endpoint is handled; raising in it
        refuses the peer. `on_close` runs once per accepted endpoint. A peer of another term is refused with a
        FencedError on its side unless `any_term` is set (an engine outlives terms; its host's agent adopts new ones).
        """

    @abstractmethod
    async def connect(self, address: str, handler: Handler | None = None, *, deadline_s: float) -> Endpoint:
        """Connect and authenticate. Raises DeadlineExpired, AuthenticationError, FencedError, PeerLost."""
