"""The blocking face of the transport: calls that wait in place, for a thread without an event loop.

    call   ─▶ Conversation.begin ─▶ flush ─▶ PlainLoop.run_until(answered)
    serve  ─▶ PlainLoop.run_until(...)             handlers run between two events, never inside one another's parsing

While one call waits, everything else of the transport is served: other endpoints, incoming calls, new connections.
A handler may itself call; what else arrives meanwhile is served inside that wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from miles_hpc.control.auth import SessionKeys
from miles_hpc.control.conversation import STREAM_WINDOW, Conversation, Exchange, Face, Incoming
from miles_hpc.control.frames import Limits
from miles_hpc.control.greeting import Dialing, Greeter, Terms
from miles_hpc.control.plain_loop import PlainLoop
from miles_hpc.control.wire import Carrier, Loop, Wire
from miles_hpc.core.errors import DeadlineExpired, MilesError, ProtocolError
from miles_hpc.core.messages import Message
from miles_hpc.core.transport import (
    BlockingEndpoint,
    BlockingHandler,
    BlockingListener,
    BlockingTransport,
    Buffer,
    Credentials,
    HandlerResult,
    PendingCall,
    Reply,
)
from miles_hpc.core.version import PROTOCOL_VERSION

__all__ = ["SPIN_S", "PlainTransport"]

#: How long a wait looks again and again before it sleeps: about what waking a process costs on a virtual machine.
SPIN_S = 100e-6
_CLOSE_S = 1.0


class _Pending(PendingCall):
    __slots__ = ("_endpoint", "_exchange")

    def __init__(self, endpoint: PlainEndpoint, exchange: Exchange) -> None:
        self._endpoint = endpoint
        self._exchange = exchange

    @property
    def done(self) -> bool:
        return self._exchange.result is not None

    def result(self) -> Reply:
        exchange = self._exchange
        if exchange.result is None:
            self._endpoint._wait(exchange)
        result = exchange.result
        if isinstance(result, Reply):
            return result
        raise result or ProtocolError("a call ended without a result")

    def cancel(self) -> None:
        self._endpoint.conversation.give_up(self._exchange, DeadlineExpired("the call was cancelled"))


class PlainEndpoint(BlockingEndpoint, Face):
    """One conversation, for a thread without a loop."""

    def __init__(
        self,
        loop: PlainLoop,
        wire: Wire,
        keys: SessionKeys,
        handler: BlockingHandler | None,
        limits: Limits,
        *,
        dialer: bool,
    ) -> None:
        self.peer = keys.peer
        self.on_ended: Callable[[], None] | None = None
        self._loop = loop
        self._handler = handler
        self.conversation = Conversation(loop, wire, keys, limits, self, dialer=dialer)

    @property
    def closed(self) -> bool:
        return self.conversation.is_closed

    @property
    def close_reason(self) -> str:  # type: ignore[override]
        """Why it ended; empty while it's open."""
        return self.conversation.close_reason

    # ------------------------------------------------------------------------------ our calls

    def call(self, message: Message, *, payload: Sequence[Buffer] = (), deadline_s: float) -> Reply:
        exchange = self.conversation.begin(message, payload, deadline_s)
        self._wait(exchange)
        result = exchange.result
        if isinstance(result, Reply):
            return result
        raise result or ProtocolError("a call ended without a result")

    def begin(self, message: Message, *, payload: Sequence[Buffer] = (), deadline_s: float) -> PendingCall:
        exchange = self.conversation.begin(message, payload, deadline_s)
        if not exchange.call_id:  # the window is used up
            self._loop.run_until(lambda: bool(exchange.call_id) or exchange.result is not None)
            if not exchange.call_id and isinstance(exchange.result, Exception):
                raise exchange.result
        return _Pending(self, exchange)

    @contextmanager
    def stream(
        self, message: Message, *, payload: Sequence[Buffer] = (), deadline_s: float
    ) -> Iterator[Iterator[Reply]]:
        arrived: deque[Reply] = deque()
        conversation = self.conversation
        exchange = conversation.begin(message, payload, deadline_s, stream=True, on_item=arrived.append)

        def items() -> Iterator[Reply]:
            taken = 0
            while True:
                if not arrived:
                    conversation.flush()
                    self._loop.run_until(lambda: bool(arrived) or exchange.result is not None)
                if arrived:
                    yield arrived.popleft()
                    taken += 1
                    if 2 * taken >= STREAM_WINDOW:
                        conversation.item_taken(exchange, taken)
                        taken = 0
                elif isinstance(exchange.result, Exception):
                    raise exchange.result
                else:
                    return

        try:
            yield items()
        finally:
            conversation.give_up(exchange, DeadlineExpired("the stream was left"))
            conversation.flush()

    def notify(self, message: Message, *, payload: Sequence[Buffer] = (), deadline_s: float) -> None:
        exchange = self.conversation.notify(message, payload)
        self.conversation.flush()
        if exchange.result is None:
            start = self._loop.time()
            if not self._loop.run_until(lambda: exchange.result is not None, start + deadline_s):
                name = type(message).__name__
                error = DeadlineExpired(f"{self.peer.name}: {name}: not taken after {deadline_s:.1f} s")
                self.conversation.give_up(exchange, error)
        if isinstance(exchange.result, Exception):
            raise exchange.result

    def close(self, reason: str = "") -> None:
        self.conversation.close(reason)
        self._loop.run_until(lambda: True)

    def _wait(self, exchange: Exchange) -> None:
        self.conversation.flush()
        # Its deadline is the conversation's business: expiry settles the exchange.
        self._loop.run_until(lambda: exchange.result is not None)

    # ------------------------------------------------------------------------------ the peer's calls

    def serve(self, incoming: Incoming) -> None:
        self._loop.call_soon(self._handle, incoming)

    def _handle(self, incoming: Incoming) -> None:
        handler = self._handler
        conversation = self.conversation
        try:
            if handler is None:
                raise ProtocolError(f"{type(incoming.message).__name__}: nobody handles calls on this side")
            answer = handler(self, incoming.message, incoming.payload)
            if answer is None or isinstance(answer, tuple | Message):
                conversation.answer(incoming, answer)
            elif incoming.wants_stream:
                self._send_items(incoming, answer)
            else:
                raise ProtocolError(f"{type(incoming.message).__name__}: its answer is a stream; ask with stream()")
        except Exception as error:
            self._failed(incoming, error)

    def _send_items(self, incoming: Incoming, items: Iterator[HandlerResult]) -> None:
        """Take items while the reader has room; goes on by itself when it has again."""
        conversation = self.conversation
        planned = False

        def close() -> None:
            if hasattr(items, "close"):
                items.close()

        def stop() -> None:
            self._loop.call_soon(close)
            conversation.fail(incoming, DeadlineExpired("the reader has left the stream"))

        def more() -> None:
            nonlocal planned
            if not planned:
                planned = True
                self._loop.call_soon(step)

        def step() -> None:
            nonlocal planned
            planned = False
            try:
                if incoming.more is not None and conversation.ready_for_item(incoming):
                    conversation.item(incoming, next(items))
                    more()
            except StopIteration:
                conversation.answer(incoming, None)
            except Exception as error:
                close()
                self._failed(incoming, error)

        incoming.stop, incoming.more = stop, more
        more()

    def _failed(self, incoming: Incoming, error: Exception) -> None:
        if not (isinstance(error, MilesError) and incoming.call_id):
            import logging

            logging.getLogger(__name__).error(
                "handler of %s from %s failed", type(incoming.message).__name__, self.peer.name, exc_info=error
            )
        self.conversation.fail(incoming, error)

    def ended(self) -> None:
        if self.on_ended is not None:
            self.on_ended()


class PlainListener(BlockingListener):
    """A port with its accepted endpoints."""

    def __init__(
        self,
        loop: PlainLoop,
        carrier: Carrier,
        bind: str,
        terms: Terms,
        handler: BlockingHandler,
        on_connect: Callable[[BlockingEndpoint], None] | None,
        on_close: Callable[[BlockingEndpoint], None] | None,
        any_term: bool,
    ) -> None:
        self.endpoints = {}
        self._loop = loop
        self._terms = terms
        self._handler = handler
        self._on_connect = on_connect
        self._on_close = on_close
        self._open: set[PlainEndpoint] = set()
        self._greeter = Greeter(loop, carrier, bind, terms, self._authenticated, any_term=any_term)
        self.address = self._greeter.address

    def _authenticated(self, wire: Wire, keys: SessionKeys) -> None:
        endpoint = PlainEndpoint(self._loop, wire, keys, self._handler, self._terms.limits, dialer=False)
        self._open.add(endpoint)
        endpoint.on_ended = lambda: self._loop.call_soon(self._ended, endpoint)
        self._loop.call_soon(self._admit, endpoint)

    def _admit(self, endpoint: PlainEndpoint) -> None:
        try:
            if self._on_connect is not None:
                self._on_connect(endpoint)
            endpoint.conversation.admit()
        except Exception as error:
            import logging

            logging.getLogger(__name__).warning("%s: %s refused: %s", self.address, endpoint.peer.name, error)
            self._open.discard(endpoint)
            endpoint.conversation.refuse(error)
            return
        self.endpoints[endpoint.peer.name] = endpoint

    def _ended(self, endpoint: PlainEndpoint) -> None:
        self._open.discard(endpoint)
        name = endpoint.peer.name
        admitted = self.endpoints.get(name) is endpoint
        if admitted:
            del self.endpoints[name]
        if self._on_close is not None and endpoint.conversation.was_admitted:
            self._on_close(endpoint)

    def close(self) -> None:
        self._greeter.close()
        for endpoint in list(self._open):
            endpoint.conversation.close("listener closed")
        self._loop.run_until(lambda: True)


class PlainTransport(BlockingTransport):
    """A carrier on a PlainLoop."""

    def __init__(
        self,
        carrier: Callable[[Loop], Carrier],
        credentials: Credentials,
        *,
        limits: Limits | None = None,
        version: int = PROTOCOL_VERSION,
        spin_s: float = SPIN_S,
    ) -> None:
        self.terms = Terms(credentials, limits or Limits(), version)
        self._loop = PlainLoop(spin_s=spin_s)
        self._carrier = carrier(self._loop)
        self._listeners: list[PlainListener] = []
        self._dialed: set[PlainEndpoint] = set()

    def listen(
        self,
        handler: BlockingHandler,
        *,
        bind: str = "127.0.0.1",
        on_connect: Callable[[BlockingEndpoint], None] | None = None,
        on_close: Callable[[BlockingEndpoint], None] | None = None,
        any_term: bool = False,
    ) -> BlockingListener:
        listener = PlainListener(self._loop, self._carrier, bind, self.terms, handler, on_connect, on_close, any_term)
        self._listeners.append(listener)
        return listener

    def connect(self, address: str, handler: BlockingHandler | None = None, *, deadline_s: float) -> BlockingEndpoint:
        loop = self._loop
        end = loop.time() + deadline_s
        found: list[PlainEndpoint] = []
        decided: list[Exception | None] = []

        def authenticated(wire: Wire, keys: SessionKeys) -> None:
            endpoint = PlainEndpoint(loop, wire, keys, handler, self.terms.limits, dialer=True)
            found.append(endpoint)
            endpoint.conversation.when_admitted(decided.append)

        dialing = Dialing(self._carrier, address, self.terms, authenticated, decided.append)
        if not loop.run_until(lambda: bool(decided), end):
            if found:
                found[0].conversation.abandon("connect was given up")
            else:
                dialing.give_up()
            raise DeadlineExpired(f"{address}: no connection after {deadline_s:.1f} s")
        if decided[0] is not None:
            if found:
                found[0].conversation.abandon("refused")
            raise decided[0]
        endpoint = found[0]
        self._dialed.add(endpoint)
        endpoint.on_ended = lambda: self._dialed.discard(endpoint)
        return endpoint

    def serve(self, until: Callable[[], bool], *, deadline_s: float | None = None) -> bool:
        end = None if deadline_s is None else self._loop.time() + deadline_s
        return self._loop.run_until(until, end)

    def chosen(self) -> dict[str, str]:
        return self._carrier.chosen()

    def close(self) -> None:
        for listener in self._listeners:
            listener.close()
        for endpoint in list(self._dialed):
            endpoint.close("transport closed")
        # A goodbye needs the loop until the peer has answered it or has had its time.
        self._loop.run_until(lambda: not self._loop.busy, self._loop.time() + _CLOSE_S)
        self._carrier.close()
        self._loop.close()
