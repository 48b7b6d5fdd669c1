"""The blocking face of the transport: calls that wait in place, for a thread without an event loop.

    call   ─▶ Conversation.begin ─▶ flush ─▶ PlainLoop.run_until(answered)
    serve  ─▶ PlainLoop.run_until(...)             handlers run between two events, never inside one another's parsing

While one call waits, everything else of the transport is served: other endpoints, incoming calls, new connections.
A handler may itself call; what else arrives meanwhile is served inside that wait, so waits lie within one another, and
the outer one returns after the inner one. Beyond _NESTED of them an endpoint that has handlers at work begins further
ones when waits have ended, or when nothing happens any more; beyond _MOST_NESTED they fail before the stack is used up.

A handler that has begun isn't stopped when its caller gives up, since it runs in place. What hasn't begun is, if its
message is `cancellable`, and so is a stream, between two items.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from miles_hpc.control.auth import SessionKeys
from miles_hpc.control.conversation import Conversation, Face
from miles_hpc.control.exchange import STREAM_WINDOW, Exchange, Incoming
from miles_hpc.control.frames import Limits
from miles_hpc.control.greeting import ConnectionSettings, Dialing, Greeter
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
#: Waits within one another before handlers are put off. A level takes about seven frames of Python's stack.
_NESTED = 16
_MOST_NESTED = 64


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
        self._at_work = 0  # handlers that have begun, each but the last within the wait of the one before
        self._put_off: deque[Incoming] = deque()  # until fewer waits lie within one another
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
        if self._put_off or self._too_deep():
            self._put_off.append(incoming)
            self._loop.put_off(self._handle_next, _NESTED)
        else:
            self._run_handler(incoming)

    def _too_deep(self) -> bool:
        return self._loop.depth > (_NESTED if self._at_work else _MOST_NESTED)

    def _handle_next(self, stuck: bool) -> None:
        if not stuck and self._too_deep():
            self._loop.put_off(self._handle_next, _NESTED)
            return
        incoming = self._put_off.popleft()
        if self._loop.depth <= _MOST_NESTED:
            self._run_handler(incoming)
        else:
            name = type(incoming.message).__name__
            self._failed(incoming, ProtocolError(f"{name}: {_MOST_NESTED} handlers wait within one another already"))
        self._loop.resume()

    def _run_handler(self, incoming: Incoming) -> None:
        handler = self._handler
        conversation = self.conversation
        self._at_work += 1
        try:
            if incoming.unwanted:
                raise DeadlineExpired("the caller gave up before the call was begun")
            if handler is None:
                raise ProtocolError(f"{type(incoming.message).__name__}: nobody handles calls on this side")
            answer = handler(self, incoming.message, incoming.payload)
            if answer is None or isinstance(answer, tuple | Message):
                conversation.answer(incoming, answer)
            elif not hasattr(answer, "__next__"):
                raise TypeError(
                    f"a handler answered {type(answer).__name__}, expected a Message or an iterator of them"
                )
            elif incoming.wants_stream:
                _Items(self._loop, self, incoming, answer)
            else:
                raise ProtocolError(f"{type(incoming.message).__name__}: its answer is a stream; ask with stream()")
        except Exception as error:
            self._failed(incoming, error)
        finally:
            self._at_work -= 1

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


class _Items:
    """A stream that we answer: takes items while the reader has room, and goes on by itself when it has again."""

    def __init__(
        self, loop: PlainLoop, endpoint: PlainEndpoint, incoming: Incoming, items: Iterator[HandlerResult]
    ) -> None:
        self._loop = loop
        self._endpoint = endpoint
        self._incoming = incoming
        self._items = items
        self._planned = False
        self._running = False  # the iterator may wait, and we be called within that wait
        incoming.stop, incoming.more = self._stop, self._more
        self._more()

    def _more(self) -> None:
        if not self._planned:
            self._planned = True
            self._loop.call_soon(self._step)

    def _step(self) -> None:
        self._planned = False
        if self._running:
            return
        conversation = self._endpoint.conversation
        incoming = self._incoming
        if not conversation.ready_for_item(incoming) or self._over():
            return
        self._running = True
        try:
            conversation.item(incoming, next(self._items))
        except StopIteration:
            conversation.answer(incoming, None)
        except Exception as error:
            self._endpoint._failed(incoming, error)
        finally:
            self._running = False
        if self._over():
            self._close()
        else:
            self._more()

    def _over(self) -> bool:
        return self._incoming.more is None  # answered, failed or stopped

    def _stop(self) -> None:
        self._endpoint.conversation.fail(self._incoming, DeadlineExpired("the reader has left the stream"))
        self._loop.call_soon(self._close)

    def _close(self) -> None:
        if not self._running and hasattr(self._items, "close"):
            self._items.close()


class PlainListener(BlockingListener):
    """A port with its accepted endpoints."""

    def __init__(
        self,
        loop: PlainLoop,
        carrier: Carrier,
        bind: str,
        settings: ConnectionSettings,
        handler: BlockingHandler,
        on_connect: Callable[[BlockingEndpoint], None] | None,
        on_close: Callable[[BlockingEndpoint], None] | None,
        any_term: bool,
    ) -> None:
        self.endpoints = {}
        self._loop = loop
        self._settings = settings
        self._handler = handler
        self._on_connect = on_connect
        self._on_close = on_close
        self._open: set[PlainEndpoint] = set()
        self._accepted: set[PlainEndpoint] = set()  # by on_connect; on_close is owed to them
        self._greeter = Greeter(loop, carrier, bind, settings, self._authenticated, any_term=any_term)
        self.address = self._greeter.address

    def _authenticated(self, wire: Wire, keys: SessionKeys) -> None:
        endpoint = PlainEndpoint(self._loop, wire, keys, self._handler, self._settings.limits, dialer=False)
        self._open.add(endpoint)
        endpoint.on_ended = lambda: self._loop.call_soon(self._ended, endpoint)
        self._loop.call_soon(self._admit, endpoint)

    def _admit(self, endpoint: PlainEndpoint) -> None:
        try:
            if self._on_connect is not None:
                self._on_connect(endpoint)
        except Exception as error:
            import logging

            logging.getLogger(__name__).warning("%s: %s refused: %s", self.address, endpoint.peer.name, error)
            self._open.discard(endpoint)
            endpoint.conversation.refuse(error)
            return
        self._accepted.add(endpoint)
        if endpoint.closed:  # it ended meanwhile; its owner has it, so that it hears of the end
            self._loop.call_soon(self._ended, endpoint)
        else:
            self.endpoints[endpoint.peer.name] = endpoint
            endpoint.conversation.admit()

    def _ended(self, endpoint: PlainEndpoint) -> None:
        self._open.discard(endpoint)
        if self.endpoints.get(endpoint.peer.name) is endpoint:
            del self.endpoints[endpoint.peer.name]
        if endpoint in self._accepted:
            self._accepted.discard(endpoint)
            if self._on_close is not None:
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
        self.settings = ConnectionSettings(credentials, limits or Limits(), version)
        self._loop = PlainLoop(spin_s=spin_s)
        self._carrier = carrier(self._loop)
        self._listeners: list[PlainListener] = []
        self._dialed: set[PlainEndpoint] = set()
        self._closed = False

    def listen(
        self,
        handler: BlockingHandler,
        *,
        bind: str = "127.0.0.1",
        on_connect: Callable[[BlockingEndpoint], None] | None = None,
        on_close: Callable[[BlockingEndpoint], None] | None = None,
        any_term: bool = False,
    ) -> BlockingListener:
        self._check_open()
        listener = PlainListener(
            self._loop, self._carrier, bind, self.settings, handler, on_connect, on_close, any_term
        )
        self._listeners.append(listener)
        return listener

    def connect(self, address: str, handler: BlockingHandler | None = None, *, deadline_s: float) -> BlockingEndpoint:
        self._check_open()
        loop = self._loop
        end = loop.time() + deadline_s
        found: list[PlainEndpoint] = []
        decided: list[Exception | None] = []

        def authenticated(wire: Wire, keys: SessionKeys) -> None:
            endpoint = PlainEndpoint(loop, wire, keys, handler, self.settings.limits, dialer=True)
            found.append(endpoint)
            self._dialed.add(endpoint)
            endpoint.on_ended = lambda: self._dialed.discard(endpoint)
            endpoint.conversation.when_admitted(decided.append)

        dialing = Dialing(self._carrier, address, self.settings, authenticated, decided.append)
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
        return found[0]

    def serve(self, until: Callable[[], bool], *, deadline_s: float | None = None) -> bool:
        end = None if deadline_s is None else self._loop.time() + deadline_s
        return self._loop.run_until(until, end)

    def chosen(self) -> dict[str, str]:
        return self._carrier.chosen()

    def _check_open(self) -> None:
        if self._closed:
            raise ProtocolError("this transport is closed")

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for listener in self._listeners:
            listener.close()
        for endpoint in list(self._dialed):
            endpoint.close("transport closed")
        # A goodbye needs the loop until the peer has answered it or has had its time.
        self._loop.run_until(lambda: not self._loop.busy, self._loop.time() + _CLOSE_S)
        self._carrier.close()
        self._loop.close()
