"""The asyncio face of the transport: futures and tasks over a conversation, for any carrier.

    call    ─▶ Conversation.begin ─▶ future          coroutine handlers run as tasks, plain ones at once
    stream  ─▶ Conversation.begin ─▶ queue           async generators as tasks that wait for the reader
    accepted wire ─▶ authenticated ─▶ on_connect ─▶ ADMIT ─▶ served until closed ─▶ on_close
                                          └─ raises ─▶ REFUSE, closed, no on_close

A handler isn't cancelled when its endpoint ends, unless its message is `cancellable` or it's a stream: half-loaded
weights would be worse than an answer that nobody reads.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from miles_hpc.control.auth import SessionKeys
from miles_hpc.control.conversation import Conversation, Face
from miles_hpc.control.exchange import STREAM_WINDOW, Exchange, Incoming
from miles_hpc.control.frames import Limits
from miles_hpc.control.greeting import ConnectionSettings, Dialing, Greeter
from miles_hpc.control.wire import Carrier, Loop, Wire
from miles_hpc.core.errors import DeadlineExpired, MilesError, ProtocolError
from miles_hpc.core.messages import Message
from miles_hpc.core.transport import Buffer, Credentials, Endpoint, Handler, HandlerResult, Listener, Reply, Transport
from miles_hpc.core.version import PROTOCOL_VERSION

__all__ = ["AsyncEndpoint", "AsyncTransport", "EndpointHook"]

logger = logging.getLogger(__name__)

EndpointHook = Callable[[Endpoint], Awaitable[None]]


class AsyncEndpoint(Endpoint, Face):
    """One conversation, for an asyncio loop."""

    def __init__(self, wire: Wire, keys: SessionKeys, handler: Handler | None, limits: Limits, *, dialer: bool) -> None:
        self.peer = keys.peer
        self.closed = asyncio.Event()
        self.on_ended: Callable[[], None] | None = None
        self._loop = asyncio.get_running_loop()
        self._handler = handler
        self._tasks: set[asyncio.Task[Any]] = set()
        self.conversation = Conversation(self._loop, wire, keys, limits, self, dialer=dialer)

    @property
    def close_reason(self) -> str:  # type: ignore[override]
        """Why it ended; empty while it's open."""
        return self.conversation.close_reason

    # ------------------------------------------------------------------------------ our calls

    async def call(self, message: Message, *, payload: Sequence[Buffer] = (), deadline_s: float) -> Reply:
        future: asyncio.Future[Reply] = self._loop.create_future()
        conversation = self.conversation

        def done(exchange: Exchange) -> None:
            if future.done():
                return
            result = exchange.result
            if isinstance(result, Reply):
                future.set_result(result)
            else:
                future.set_exception(result or ProtocolError("a call ended without a result"))

        exchange = conversation.begin(message, payload, deadline_s, on_done=done)
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                future.exception()  # lost in the same turn of the loop: known now, not to be reported as forgotten
            conversation.give_up(exchange, DeadlineExpired("the call was cancelled"))
            raise

    @asynccontextmanager
    async def stream(
        self, message: Message, *, payload: Sequence[Buffer] = (), deadline_s: float
    ) -> AsyncIterator[AsyncIterator[Reply]]:
        queue: asyncio.Queue[Reply | Exception | None] = asyncio.Queue()

        def done(exchange: Exchange) -> None:
            queue.put_nowait(None if isinstance(exchange.result, Reply) else exchange.result)

        conversation = self.conversation
        exchange = conversation.begin(message, payload, deadline_s, stream=True, on_done=done, on_item=queue.put_nowait)

        async def items() -> AsyncIterator[Reply]:
            taken = 0
            while True:
                item = await queue.get()
                if item is None:
                    return
                if isinstance(item, Exception):
                    raise item
                yield item
                taken += 1
                if 2 * taken >= STREAM_WINDOW:
                    conversation.item_taken(exchange, taken)
                    taken = 0

        iterator = items()
        try:
            yield iterator
        finally:
            conversation.give_up(exchange, DeadlineExpired("the stream was left"))
            await iterator.aclose()  # type: ignore[attr-defined]

    async def notify(self, message: Message, *, payload: Sequence[Buffer] = ()) -> None:
        exchange = self.conversation.notify(message, payload)
        if exchange.result is None:
            future: asyncio.Future[None] = self._loop.create_future()

            def done(_: Exchange) -> None:
                if not future.done():
                    future.set_result(None)

            exchange.on_done = done
            try:
                await future
            except asyncio.CancelledError:
                self.conversation.give_up(exchange, DeadlineExpired("the notify was cancelled"))
                raise
        if isinstance(exchange.result, Exception):
            raise exchange.result

    async def close(self, reason: str = "") -> None:
        self.conversation.close(reason)
        await asyncio.sleep(0)  # the goodbye leaves before the caller goes on to end the loop

    # ------------------------------------------------------------------------------ the peer's calls

    def serve(self, incoming: Incoming) -> None:
        handler = self._handler
        if handler is None:
            text = f"{type(incoming.message).__name__}: nobody handles calls on this side"
            self._failed(incoming, ProtocolError(text))
            return
        try:
            answer = handler(self, incoming.message, incoming.payload)
        except Exception as error:
            self._failed(incoming, error)
            return
        if answer is None or isinstance(answer, tuple | Message):
            self.conversation.answer(incoming, answer)
        else:
            task = self._loop.create_task(self._handle(incoming, answer))
            self._keep(task)

            def stop() -> None:
                task.cancel()

            def ended(task: asyncio.Task[None]) -> None:
                if task.cancelled():  # perhaps before it began: then nothing in it has run
                    if inspect.iscoroutine(answer):
                        answer.close()
                    self.conversation.fail(incoming, asyncio.CancelledError())

            incoming.stop = stop
            task.add_done_callback(ended)

    async def _handle(self, incoming: Incoming, answer: Any) -> None:
        try:
            if inspect.isawaitable(answer):
                answer = await answer
            if hasattr(answer, "__anext__") or hasattr(answer, "__next__"):
                await self._send_items(incoming, answer)
                answer = None
        except Exception as error:
            self._failed(incoming, error)
            return
        self.conversation.answer(incoming, answer)

    async def _send_items(
        self, incoming: Incoming, items: AsyncIterator[HandlerResult] | Iterator[HandlerResult]
    ) -> None:
        if not incoming.wants_stream:
            raise ProtocolError(f"{type(incoming.message).__name__}: its answer is a stream; ask with stream()")
        conversation = self.conversation
        room = asyncio.Event()
        incoming.more = room.set
        try:
            await self._wait_for_room(incoming, room)  # first: else it would be an item ahead of the window
            if isinstance(items, AsyncIterator):
                async for item in items:
                    conversation.item(incoming, item)
                    await self._wait_for_room(incoming, room)
            else:
                for item in items:
                    conversation.item(incoming, item)
                    await self._wait_for_room(incoming, room)
        finally:
            if hasattr(items, "aclose"):
                await items.aclose()
            elif hasattr(items, "close"):
                items.close()

    async def _wait_for_room(self, incoming: Incoming, room: asyncio.Event) -> None:
        while not self.conversation.ready_for_item(incoming):
            room.clear()
            await room.wait()

    def _failed(self, incoming: Incoming, error: Exception) -> None:
        expected = isinstance(error, MilesError) and incoming.call_id
        logger.log(
            logging.DEBUG if expected else logging.ERROR,
            "handler of %s from %s failed",
            type(incoming.message).__name__,
            self.peer.name,
            exc_info=error,
        )
        self.conversation.fail(incoming, error)

    def _keep(self, task: asyncio.Task[Any]) -> None:
        """The loop itself holds tasks weakly only."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ------------------------------------------------------------------------------ admission and end

    async def admitted(self) -> None:
        """Dialer: wait for the listener's decision. Raises FencedError, RemoteError, PeerLost."""
        future: asyncio.Future[Exception | None] = self._loop.create_future()
        self.conversation.when_admitted(lambda error: None if future.done() else future.set_result(error))
        error = await future
        if error is not None:
            raise error

    def ended(self) -> None:
        self.closed.set()
        if self.on_ended is not None:
            self.on_ended()


class AsyncListener(Listener):
    """A port with its accepted endpoints."""

    def __init__(
        self,
        carrier: Carrier,
        bind: str,
        settings: ConnectionSettings,
        handler: Handler,
        on_connect: EndpointHook | None,
        on_close: EndpointHook | None,
        any_term: bool,
    ) -> None:
        self._settings = settings
        self._handler = handler
        self._on_connect = on_connect
        self._on_close = on_close
        self._endpoints: set[AsyncEndpoint] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._greeter = Greeter(self._loop, carrier, bind, settings, self._authenticated, any_term=any_term)
        self.address = self._greeter.address

    def _authenticated(self, wire: Wire, keys: SessionKeys) -> None:
        endpoint = AsyncEndpoint(wire, keys, self._handler, self._settings.limits, dialer=False)
        self._endpoints.add(endpoint)
        endpoint.on_ended = lambda: self._endpoints.discard(endpoint)
        task = self._loop.create_task(self._serve(endpoint))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, endpoint: AsyncEndpoint) -> None:
        try:
            if self._on_connect is not None:
                await self._on_connect(endpoint)
        except Exception as error:
            endpoint.conversation.refuse(error)
            expected = isinstance(error, MilesError)
            logger.warning(
                "%s: %s refused: %s", self.address, endpoint.peer.name, error, exc_info=None if expected else error
            )
            return
        if not endpoint.closed.is_set():  # else it ended meanwhile; its owner has it, so that it hears of the end
            endpoint.conversation.admit()
        await endpoint.closed.wait()
        if self._on_close is not None:
            await self._on_close(endpoint)

    async def close(self) -> None:
        self._greeter.close()
        for endpoint in list(self._endpoints):
            endpoint.conversation.close("listener closed")
        await asyncio.sleep(0)


class AsyncTransport(Transport):
    """A carrier on an asyncio loop. It's opened when it's first used, inside the loop."""

    def __init__(
        self,
        carrier: Callable[[Loop], Carrier],
        credentials: Credentials,
        *,
        limits: Limits | None = None,
        version: int = PROTOCOL_VERSION,
    ) -> None:
        self.settings = ConnectionSettings(credentials, limits or Limits(), version)
        self._open_carrier = carrier
        self._carrier: Carrier | None = None

    @property
    def carrier(self) -> Carrier:
        """The carrier, opened in the running loop."""
        if self._carrier is None:
            self._carrier = self._open_carrier(asyncio.get_running_loop())
            logger.info("transport: %s", ", ".join(f"{k}={v}" for k, v in self._carrier.chosen().items()))
        return self._carrier

    async def listen(
        self,
        handler: Handler,
        *,
        bind: str = "127.0.0.1",
        on_connect: EndpointHook | None = None,
        on_close: EndpointHook | None = None,
        any_term: bool = False,
    ) -> Listener:
        return AsyncListener(self.carrier, bind, self.settings, handler, on_connect, on_close, any_term)

    async def connect(self, address: str, handler: Handler | None = None, *, deadline_s: float) -> Endpoint:
        try:
            async with asyncio.timeout(deadline_s):
                return await self._connect(address, handler)
        except TimeoutError:
            raise DeadlineExpired(f"{address}: no connection after {deadline_s:.1f} s") from None

    async def _connect(self, address: str, handler: Handler | None) -> AsyncEndpoint:
        future: asyncio.Future[AsyncEndpoint] = asyncio.get_running_loop().create_future()

        def authenticated(wire: Wire, keys: SessionKeys) -> None:
            endpoint = AsyncEndpoint(wire, keys, handler, self.settings.limits, dialer=True)
            if future.done():
                endpoint.conversation.abandon("connect was given up")
            else:
                future.set_result(endpoint)

        def failed(error: Exception) -> None:
            if not future.done():
                future.set_exception(error)

        dialing = Dialing(self.carrier, address, self.settings, authenticated, failed)
        try:
            endpoint = await future
        except asyncio.CancelledError:
            dialing.give_up()
            raise
        try:
            await endpoint.admitted()
        except BaseException:
            endpoint.conversation.abandon("connect was given up")
            raise
        return endpoint

    def chosen(self) -> dict[str, str]:
        return self.carrier.chosen()

    def close(self) -> None:
        if self._carrier is not None:
            self._carrier.close()
            self._carrier = None
