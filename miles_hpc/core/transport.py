"""The transport contract: authenticated endpoints between processes, over which both sides may call.

    listener ──accept──▶ endpoint ◀──connect── dialer
        handler(endpoint, message, payload) answers the other side's calls, on either side

It has two faces with the same promises. `Transport` belongs to an asyncio loop and suits processes that do many things
at once (controller, agents). `BlockingTransport` belongs to a thread without a loop and has the lower latency; while
one of its calls waits, all of its endpoints are served. The wire is the same: either face talks to either.

| promise | |
|---|---|
| authentication | both sides prove knowledge of the run's secret before anything else is read |
| order | messages of one endpoint arrive in order; handlers start in that order and run concurrently |
| payload | raw buffers behind the header, delivered as one read-only memoryview; its memory lives as long as the view |
| loss | a dead or closed peer fails every pending call with PeerLost at once; `closed` is set |
| deadline | every call has one; expiry raises DeadlineExpired naming peer, message and elapsed time |
| cancellation | a caller that gives up tells the peer, which stops handlers of `cancellable` messages and of streams |
| back-pressure | a peer that doesn't answer takes at most a window of messages and bytes from us; then callers wait |
| thread | everything runs in the loop or thread that made the endpoint; nothing here blocks an asyncio loop |

A handler that raises fails the caller with RemoteError (class name and text, no traceback objects on the wire).
Returning None from a handler answers Ack. A handler may be a plain function: then it answers without a task of its own,
and must not wait. For a streamed reply it returns an iterator (of either kind) of results.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import TYPE_CHECKING, TypeAlias, Union

import msgspec

from miles_hpc.core.messages import Message

if TYPE_CHECKING:
    import asyncio  # a worker with the blocking face starts without it

__all__ = [
    "BlockingEndpoint",
    "BlockingHandler",
    "BlockingListener",
    "BlockingTransport",
    "Buffer",
    "Credentials",
    "Endpoint",
    "Handler",
    "HandlerResult",
    "Listener",
    "PeerIdentity",
    "PendingCall",
    "Reply",
    "Transport",
]

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


class Credentials(msgspec.Struct, frozen=True, eq=False):
    """What a process needs to join: the run's secret and who it says it is.

    Attempt and term are part of the handshake's transcript. A listener refuses peers of another attempt always,
    and of another term unless it was opened with `any_term`. A newer peer is proof that the listener's owner is
    fenced: `on_newer` is called with its identity then, in the listener's loop or thread, and must not wait.
    """

    secret: bytes
    identity: PeerIdentity
    on_newer: Callable[[PeerIdentity], None] | None = None

    def __repr__(self) -> str:
        return f"Credentials(identity={self.identity!r})"  # never the secret


class Reply(msgspec.Struct, frozen=True):
    """What a call returns, and what a stream yields. `payload` is empty when the peer sent none."""

    message: Message
    payload: memoryview


HandlerResult: TypeAlias = Message | tuple[Message, Sequence[Buffer]] | None
Answer: TypeAlias = Union[HandlerResult, AsyncIterator[HandlerResult], Iterator[HandlerResult]]  # noqa: UP007
Handler: TypeAlias = Callable[["Endpoint", Message, memoryview], Answer | Awaitable[Answer]]
BlockingHandler: TypeAlias = Callable[
    ["BlockingEndpoint", Message, memoryview], HandlerResult | Iterator[HandlerResult]
]

# ------------------------------------------------------------------------------------------------ asyncio


class Endpoint(ABC):
    """One authenticated connection."""

    peer: PeerIdentity
    closed: asyncio.Event
    close_reason: str

    @abstractmethod
    async def call(self, message: Message, *, payload: Sequence[Buffer] = (), deadline_s: float) -> Reply:
        """Send and wait for the answer. Raises DeadlineExpired, PeerLost, RemoteError.

        Cancelling it, or its expiry, tells the peer to stop. Payload buffers must stay as they are until it returns.
        """

    @abstractmethod
    def stream(
        self, message: Message, *, payload: Sequence[Buffer] = (), deadline_s: float
    ) -> AbstractAsyncContextManager[AsyncIterator[Reply]]:
        """Send, and iterate over the answers as they come; leaving the context early stops the peer's handler.

        The deadline is for the whole stream. The peer is at most a window of items ahead of the reader.
        Iterating raises DeadlineExpired, PeerLost, RemoteError.
        """

    @abstractmethod
    async def notify(self, message: Message, *, payload: Sequence[Buffer] = ()) -> None:
        """Send without an answer. Returns when the buffers aren't needed any more. Raises PeerLost."""

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
        refuses the peer. `on_close` runs once per accepted endpoint. A peer of another term is refused unless
        `any_term` is set (an engine outlives terms; its host's agent adopts new ones): an older peer gets a
        FencedError, a newer one a PeerLost, since it is this listener that is left over.
        """

    @abstractmethod
    async def connect(self, address: str, handler: Handler | None = None, *, deadline_s: float) -> Endpoint:
        """Connect and authenticate. Raises DeadlineExpired, AuthenticationError, FencedError, PeerLost."""

    @abstractmethod
    def chosen(self) -> dict[str, str]:
        """What the transport runs on, for logs and `doctor`: library, version, devices, where it knows them."""

    @abstractmethod
    def close(self) -> None:
        """Release what its listeners and endpoints shared; they were closed before."""


# ------------------------------------------------------------------------------------------------ blocking


class PendingCall(ABC):
    """A call on its way. Many may be in flight on one endpoint; they leave together when somebody waits."""

    @property
    @abstractmethod
    def done(self) -> bool:
        """Whether `result` returns at once."""

    @abstractmethod
    def result(self) -> Reply:
        """Wait for the answer. Raises DeadlineExpired, PeerLost, RemoteError."""

    @abstractmethod
    def cancel(self) -> None:
        """Give up; the peer is told. `result` raises DeadlineExpired from then on."""


class BlockingEndpoint(ABC):
    """One authenticated connection of a thread without an event loop. Not for use from other threads."""

    peer: PeerIdentity
    close_reason: str

    @property
    @abstractmethod
    def closed(self) -> bool:
        """Whether the connection has ended."""

    @abstractmethod
    def call(self, message: Message, *, payload: Sequence[Buffer] = (), deadline_s: float) -> Reply:
        """As Endpoint.call. Other endpoints of the transport, and incoming calls, are served meanwhile."""

    @abstractmethod
    def begin(self, message: Message, *, payload: Sequence[Buffer] = (), deadline_s: float) -> PendingCall:
        """Queue a call and return. Waits only when the peer's window is used up. Raises PeerLost, DeadlineExpired."""

    @abstractmethod
    def stream(
        self, message: Message, *, payload: Sequence[Buffer] = (), deadline_s: float
    ) -> AbstractContextManager[Iterator[Reply]]:
        """As Endpoint.stream."""

    @abstractmethod
    def notify(self, message: Message, *, payload: Sequence[Buffer] = (), deadline_s: float) -> None:
        """As Endpoint.notify; the deadline is for back-pressure. Raises PeerLost, DeadlineExpired."""

    @abstractmethod
    def close(self, reason: str = "") -> None:
        """As Endpoint.close."""


class BlockingListener(ABC):
    """Accepts endpoints whenever the transport's thread waits in one of its calls."""

    address: str
    endpoints: dict[str, BlockingEndpoint]  # admitted and open, by the peer's name; the newest of a name

    @abstractmethod
    def close(self) -> None:
        """Stop accepting and close all accepted endpoints."""


class BlockingTransport(ABC):
    """As Transport, for a thread without an event loop. One instance belongs to one thread."""

    @abstractmethod
    def listen(
        self,
        handler: BlockingHandler,
        *,
        bind: str = "127.0.0.1",
        on_connect: Callable[[BlockingEndpoint], None] | None = None,
        on_close: Callable[[BlockingEndpoint], None] | None = None,
        any_term: bool = False,
    ) -> BlockingListener:
        """As Transport.listen."""

    @abstractmethod
    def connect(self, address: str, handler: BlockingHandler | None = None, *, deadline_s: float) -> BlockingEndpoint:
        """As Transport.connect."""

    @abstractmethod
    def serve(self, until: Callable[[], bool], *, deadline_s: float | None = None) -> bool:
        """Serve all endpoints until `until()` is true, or the time is over: False then.

        `until` is asked after every event and at least once a second, so that a signal's handler may make it true.
        """

    @abstractmethod
    def chosen(self) -> dict[str, str]:
        """As Transport.chosen."""

    @abstractmethod
    def close(self) -> None:
        """Close all listeners and endpoints."""
