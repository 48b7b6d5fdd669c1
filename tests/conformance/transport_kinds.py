"""What the transport suites run on: transports by kind, and pairs of endpoints for both faces.

asyncio ↔ asyncio      pair(kind, ...)                both ends in one loop
blocking ↔ blocking    plain_pair(kind, ...)          both ends in one PlainLoop, for kinds that have no threads too
blocking ↔ blocking    BlockingServer + make_plain    the listener in a thread of its own
blocking ↔ asyncio     AsyncServer + make_plain       the listener's loop in a thread
asyncio ↔ blocking     BlockingServer + make
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from miles_hpc.control.asyncio_face import AsyncTransport
from miles_hpc.control.auth import new_secret
from miles_hpc.control.frames import Limits
from miles_hpc.control.opening import open_blocking_transport, open_transport
from miles_hpc.core.messages import EndSession, Generate, Message
from miles_hpc.core.transport import (
    BlockingEndpoint,
    BlockingListener,
    BlockingTransport,
    Buffer,
    Credentials,
    Endpoint,
    Listener,
    PeerIdentity,
    Transport,
)
from miles_hpc.core.types import SamplingParams
from miles_hpc.core.version import PROTOCOL_VERSION

SECRET = new_secret()
#: A bound against hanging, not an expectation.
WAIT_S = 60.0
_STEP_S = 0.02

_made: list[tuple[asyncio.AbstractEventLoop, AsyncTransport]] = []


#: A message whose handler may be stopped when its caller gives up.
CANCELLABLE = Generate(request_id="", session_id="", n_input=0, sampling=SamplingParams(max_new_tokens=1))


def numbered(n: int) -> EndSession:
    """A message that carries a number."""
    return EndSession(session_id=str(n))


def number_of(message: Message) -> int:
    """The number that `numbered` put into it."""
    assert isinstance(message, EndSession)
    return int(message.session_id)


class NotInTheVocabulary(Message, frozen=True, kw_only=True):
    """A message that no decoder knows."""


def credentials(
    name: str,
    *,
    secret: bytes = SECRET,
    attempt: int = 1,
    term: int = 1,
    on_newer: Callable[[PeerIdentity], None] | None = None,
) -> Credentials:
    identity = PeerIdentity(role="trainer", name=name, host="host", pid=os.getpid(), attempt=attempt, term=term)
    return Credentials(secret, identity, on_newer)


def make(
    kind: str, name: str, *, version: int = PROTOCOL_VERSION, limits: Limits | None = None, **who: Any
) -> Transport:
    transport = open_transport(kind, credentials(name, **who), version=version, limits=limits)
    _made.append((asyncio.get_running_loop(), transport))
    return transport


def make_plain(
    kind: str, name: str, *, version: int = PROTOCOL_VERSION, limits: Limits | None = None, **who: Any
) -> BlockingTransport:
    return open_blocking_transport(kind, credentials(name, **who), version=version, limits=limits, spin_s=0.0)


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        try:
            async with asyncio.timeout(WAIT_S * 2):
                await main()
        finally:
            await release()

    asyncio.run(bounded())


async def release() -> None:
    """Give back what the transports of this loop opened: hundreds of tests run in one process."""
    for _ in range(10):  # goodbyes arrive
        await asyncio.sleep(0)
    loop = asyncio.get_running_loop()
    for entry in list(_made):
        if entry[0] is loop:
            _made.remove(entry)
            entry[1].close()


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that has no event of its own."""
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.005)


async def echo(endpoint: Endpoint, message: Message, payload: memoryview) -> tuple[Message, Sequence[Buffer]]:
    return message, [payload]


def plain_echo(endpoint: Any, message: Message, payload: memoryview) -> tuple[Message, Sequence[Buffer]]:
    """For either face."""
    return message, [payload]


@asynccontextmanager
async def pair(
    kind: str, server: Any = echo, client: Any = None, *, limits: Limits | None = None, **options: Any
) -> AsyncIterator[tuple[Endpoint, Endpoint, Listener]]:
    """The dialer's endpoint, the listener's endpoint, the listener. `limits` are the listener's."""
    accepted: asyncio.Queue[Endpoint] = asyncio.Queue()

    async def on_connect(endpoint: Endpoint) -> None:
        accepted.put_nowait(endpoint)

    listener = await make(kind, "listener", limits=limits).listen(server, on_connect=on_connect, **options)
    try:
        endpoint = await make(kind, "dialer").connect(listener.address, client, deadline_s=WAIT_S)
        try:
            yield endpoint, await accepted.get(), listener
        finally:
            await endpoint.close("test ended")
    finally:
        await listener.close()


@contextmanager
def plain_pair(
    kind: str, server: Any = plain_echo, client: Any = None, *, limits: Limits | None = None, **options: Any
) -> Iterator[tuple[BlockingEndpoint, BlockingEndpoint, BlockingListener, BlockingTransport]]:
    """The dialer's endpoint, the listener's, the listener, and the transport that both of them belong to."""
    accepted: list[BlockingEndpoint] = []
    transport = make_plain(kind, "both", limits=limits)
    try:
        listener = transport.listen(server, on_connect=accepted.append, **options)
        endpoint = transport.connect(listener.address, client, deadline_s=WAIT_S)
        yield endpoint, accepted[0], listener, transport
    finally:
        transport.close()


def server_of(face: str, kind: str, handler: Any = None, **options: Any) -> AsyncServer | BlockingServer:
    """A server of either face; `handler` is a plain function then, echo by default."""
    server = AsyncServer if face == "asyncio" else BlockingServer
    return server(kind, handler or plain_echo, **options)


class BlockingServer:
    """A blocking listener whose thread serves it while the context is entered."""

    def __init__(
        self, kind: str, handler: Any = plain_echo, *, who: dict[str, Any] | None = None, **options: Any
    ) -> None:
        """`who` are arguments of make, as `limits`; `options` those of listen."""
        self.address = ""
        self.transport: BlockingTransport
        self.listener: BlockingListener
        self._args = (kind, handler, who or {}, options)
        self._orders: list[tuple[Callable[[], Any], list[Any], threading.Event]] = []
        self._ready = threading.Event()
        self._stopped = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="blocking server", daemon=True)

    def __enter__(self) -> BlockingServer:
        self._thread.start()
        assert self._ready.wait(WAIT_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped = True
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        if self._error is not None:
            raise self._error

    def do(self, order: Callable[[], Any]) -> Any:
        """Run it in the server's thread, between two events, and return what it returns or raises."""
        result: list[Any] = []
        done = threading.Event()
        self._orders.append((order, result, done))
        assert done.wait(WAIT_S)
        if isinstance(result[0], BaseException):
            raise result[0]
        return result[0]

    def _run(self) -> None:
        kind, handler, who, options = self._args
        try:
            self.transport = make_plain(kind, "listener", **who)
            try:
                self.listener = self.transport.listen(handler, **options)
                self.address = self.listener.address
                self._ready.set()
                while not self._stopped:
                    self.transport.serve(lambda: self._stopped or bool(self._orders), deadline_s=_STEP_S)
                    while self._orders:
                        order, result, done = self._orders.pop(0)
                        try:
                            result.append(order())
                        except Exception as error:
                            result.append(error)
                        done.set()
            finally:
                self.transport.close()
        except BaseException as error:
            self._error = error
        finally:
            self._ready.set()


class AsyncServer:
    """An asyncio listener whose loop runs in a thread while the context is entered."""

    def __init__(self, kind: str, handler: Any = echo, *, who: dict[str, Any] | None = None, **options: Any) -> None:
        """`who` are arguments of make, as `limits`; `options` those of listen."""
        self.address = ""
        self.listener: Listener
        self._args = (kind, handler, who or {}, options)
        self._ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="asyncio server", daemon=True)

    def __enter__(self) -> AsyncServer:
        self._thread.start()
        assert self._ready.wait(WAIT_S)
        return self

    def __exit__(self, *_: object) -> None:
        if self._loop is not None and self._stop is not None:
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        if self._error is not None:
            raise self._error

    def do(self, order: Awaitable[Any]) -> Any:
        """Run a coroutine in the server's loop and return its result."""
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(order, self._loop).result(WAIT_S)  # type: ignore[arg-type]

    async def _main(self) -> None:
        kind, handler, who, options = self._args
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self.listener = await make(kind, "listener", **who).listen(handler, **options)
        self.address = self.listener.address
        self._ready.set()
        await self._stop.wait()
        await self.listener.close()
        await release()

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as error:
            self._error = error
        finally:
            self._ready.set()
