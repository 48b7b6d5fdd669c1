"""Calls over one wire: what both faces of the transport share. Callbacks only; nothing here waits or has a thread.

    begin ─▶ (waits for window) ─▶ CALL ───▶ Incoming ─▶ face.serve ─▶ answer | fail ─▶ REPLY | FAILURE ─▶ Exchange
    begin ─▶ (waits for window) ─▶ STREAM ─▶ Incoming ─▶ item, item, ... ─▶ ITEM ... REPLY ─▶ Exchange
    notify ▶ (waits for window) ─▶ NOTIFY ─▶ Incoming ─▶ face.serve ─▶ finished ─▶ CREDIT, for many at a time

| waits | for | bounded by |
|---|---|---|
| an Exchange | its answer | its deadline, the connection's end |
| a message | room in the peer's window | its Exchange's deadline, the connection's end |
| the sender of items | CREDIT of the reader, room in the outgoing queue | the stream's deadline at the caller |
| the dialer | ADMIT or REFUSE | connect's deadline |
| messages before ADMIT, or while we have much to send | ADMIT, a drained queue | the window |

**Window.** Each side announces how many messages and bytes of calls and notifies it takes before they are done. The
sender counts: a message leaves when, with it, both stay within the window, or when less than half of the bytes are in
use (so that a payload larger than the window can travel, alone). An answer gives a call's share back; CREDIT gives back
what notifies took, as soon as that is half of what isn't in work. Messages marked `urgent` don't wait; but of those
beyond the window there are at most 64, each of 64 KiB, or a stopped peer would be drowned when it goes on.

**Giving up.** An expired or cancelled call sends CANCEL; its share of the window stays in use until the peer answers,
which it always does.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from miles_hpc.control.auth import SessionKeys
from miles_hpc.control.exchange import (
    ACKED,
    MAX_REASON_CHARS,
    STREAM_WINDOW,
    Exchange,
    Incoming,
    content_of,
    failure_header,
    read_failure,
)
from miles_hpc.control.frames import Frame, Limits, Opener, Sealer, byte_views
from miles_hpc.control.wire import Loop, TimerHandle, Wire
from miles_hpc.core.errors import DeadlineExpired, FencedError, MilesError, PeerLost, ProtocolError, RemoteError
from miles_hpc.core.messages import Message, decode, encode
from miles_hpc.core.transport import Buffer, HandlerResult, PeerIdentity, Reply

__all__ = ["Conversation", "Face"]

#: With more than so many bytes on their way to a peer, its calls wait.
HIGH_WATER_BYTES = 64 << 20
#: How long an orderly end may take to leave.
FLUSH_S = 1.0

_EARLY_BYTES = 1024  # so much isn't kept for the loop's next round: about 16 small frames
_URGENT_SLACK = 64  # urgent messages that may be on their way beyond the window
_URGENT_BYTES = 64 << 10  # size of such a message
_CREDIT = struct.Struct("<IQ")  # messages, bytes
_EMPTY = memoryview(b"")
_ACK = encode(ACKED)
_ACK_REPLY = Reply(ACKED, _EMPTY)

_CALL, _REPLY, _FAILURE, _NOTIFY = int(Frame.CALL), int(Frame.REPLY), int(Frame.FAILURE), int(Frame.NOTIFY)
_STREAM, _ITEM, _CANCEL, _CREDIT_FRAME = int(Frame.STREAM), int(Frame.ITEM), int(Frame.CANCEL), int(Frame.CREDIT)

_ASKING = frozenset((_CALL, _NOTIFY, _STREAM))
_KINDS = frozenset(map(int, Frame))


class Face(ABC):
    """What the owner of a conversation does."""

    @abstractmethod
    def serve(self, incoming: Incoming) -> None:
        """Run the handler; sooner or later call `answer` or `fail`, exactly once."""

    @abstractmethod
    def ended(self) -> None:
        """The conversation has ended; `close_reason` says why. Called once."""


class Conversation:
    """The protocol of one authenticated wire."""

    def __init__(self, loop: Loop, wire: Wire, keys: SessionKeys, limits: Limits, face: Face, *, dialer: bool) -> None:
        self.peer: PeerIdentity = keys.peer
        self.close_reason = ""
        self.is_closed = False
        self._loop = loop
        self._wire = wire
        self._face = face
        self._limits = limits
        self._window_messages, self._window_bytes = keys.peer_window
        self._used_messages = 0  # of the peer's window
        self._used_bytes = 0
        self._notified_messages = 0  # of what is used: by notifies, which CREDIT gives back
        self._notified_bytes = 0
        self._taken_messages = 0  # of our window
        self._taken_bytes = 0
        self._owed_messages = 0  # of our window, by notifies that are done
        self._owed_bytes = 0
        self._exchanges: dict[int, Exchange] = {}
        self._waiting: deque[Exchange] = deque()
        self._notifies: set[Exchange] = set()  # sent, buffers still needed
        self._next_id = 1
        self._serving: dict[int, Incoming] = {}
        self._held: deque[Incoming] = deque()
        self._admitted = dialer  # the dialer serves the listener's calls at once
        self._on_admission: Callable[[Exception | None], None] | None = None
        self._awaits_admission = dialer
        self._admission: Exception | None = None
        self._flush_planned = False
        self._timer: TimerHandle | None = None
        self._timer_at = float("inf")
        wire.on_frame = self._frame
        wire.on_lost = self.abandon
        wire.on_violated = self._violated
        wire.on_drained = self._drained
        wire.start_frames(Sealer(keys.send_key, limits), Opener(keys.receive_key, limits))

    @property
    def was_admitted(self) -> bool:
        """Whether the listener has let the peer in."""
        return self._admitted

    # ------------------------------------------------------------------------------ our calls

    def begin(
        self,
        message: Message,
        payload: Sequence[Buffer],
        deadline_s: float,
        *,
        stream: bool = False,
        on_done: Callable[[Exchange], None] | None = None,
        on_item: Callable[[Reply], None] | None = None,
    ) -> Exchange:
        """Start a call or a stream. Raises PeerLost, ProtocolError when it's larger than the limits."""
        exchange = self._exchange(_STREAM if stream else _CALL, message, payload)
        if on_done is not None:
            exchange.on_done = on_done
        if on_item is not None:
            exchange.on_item = on_item
        now = self._loop.time()
        exchange.start = now
        exchange.end = end = now + deadline_s
        if end < self._timer_at:
            self._watch_deadlines(end)
        self._submit(exchange, message.urgent)
        return exchange

    def notify(
        self, message: Message, payload: Sequence[Buffer], on_done: Callable[[Exchange], None] | None = None
    ) -> Exchange:
        """Start a notify; it has ended when its buffers aren't needed any more. Raises PeerLost, ProtocolError."""
        exchange = self._exchange(_NOTIFY, message, payload)
        exchange.on_done = on_done
        self._submit(exchange, message.urgent)
        return exchange

    def give_up(self, exchange: Exchange, error: Exception) -> None:
        """The caller doesn't wait any longer. Tells the peer."""
        if exchange.result is not None:
            return
        if exchange.call_id:
            if not self.is_closed and exchange.call_id in self._exchanges:
                self._send(_CANCEL, exchange.call_id, b"")
        elif exchange in self._waiting:
            self._waiting.remove(exchange)
            self._room_appeared()  # it may have been too large for what is free, and the next one isn't
        exchange.settle(error)

    def item_taken(self, exchange: Exchange, n: int) -> None:
        """`n` items of a stream were read: the peer may send as many more."""
        if exchange.result is None and not self.is_closed:
            exchange.item_room += n
            self._send(_CREDIT_FRAME, exchange.call_id, _CREDIT.pack(n, 0))

    def _exchange(self, kind: int, message: Message, payload: Sequence[Buffer]) -> Exchange:
        if self.is_closed:
            raise self.peer_lost()
        header = encode(message)
        views: Sequence[memoryview] = ()
        n_bytes = 0
        if payload:
            views, n_bytes = byte_views(payload)
        n_header = len(header)
        if n_header > self._limits.header_bytes or n_bytes > self._limits.payload_bytes:
            raise ProtocolError(
                f"{type(message).__name__}: header of {n_header} bytes, limit {self._limits.header_bytes}; "
                f"payload of {n_bytes} bytes, limit {self._limits.payload_bytes}; send it in parts"
            )
        return Exchange(kind, type(message).__name__, header, views, n_header + n_bytes)

    def _submit(self, exchange: Exchange, urgent: bool) -> None:
        if (not self._waiting and self._has_room(exchange.cost)) or (urgent and self._passes(exchange.cost)):
            self._dispatch(exchange)
        else:
            self._waiting.append(exchange)

    def _passes(self, cost: int) -> bool:
        return self._used_messages < self._window_messages + _URGENT_SLACK and cost <= _URGENT_BYTES

    def _has_room(self, cost: int) -> bool:
        if self._used_messages >= self._window_messages:
            return False
        used = self._used_bytes
        return used + cost <= self._window_bytes or 2 * used < self._window_bytes

    def _dispatch(self, exchange: Exchange) -> None:
        self._used_messages += 1
        self._used_bytes += exchange.cost
        header, views, n_bytes = exchange.header, exchange.views, 0
        if views:
            n_bytes = exchange.cost - len(header)
            exchange.header, exchange.views = b"", ()  # not to live as long as the exchange
        if exchange.kind == _NOTIFY:
            self._notified_messages += 1
            self._notified_bytes += exchange.cost

            def handed_over() -> None:
                self._notifies.discard(exchange)
                exchange.settle(_ACK_REPLY)

            if self._send(_NOTIFY, 0, header, views, n_bytes, handed_over):
                exchange.settle(_ACK_REPLY)
            else:
                self._notifies.add(exchange)
            return
        call_id = self._next_id
        self._next_id = call_id + 1
        exchange.call_id = call_id
        self._exchanges[call_id] = exchange
        self._send(exchange.kind, call_id, header, views, n_bytes)

    def _room_appeared(self) -> None:
        while self._waiting and self._has_room(self._waiting[0].cost):
            self._dispatch(self._waiting.popleft())

    # ------------------------------------------------------------------------------ the peer's calls

    def answer(self, incoming: Incoming, result: HandlerResult) -> None:
        """The handler is done."""
        if incoming.kind == _NOTIFY:
            self._notify_done(incoming)
            return
        if not self._finish(incoming):
            return
        if result is None:
            self._send(_REPLY, incoming.call_id, _ACK)
            return
        try:
            if incoming.kind == _STREAM:
                raise ProtocolError(f"{type(incoming.message).__name__}: its answer isn't a stream; ask with call()")
            header, views, n_bytes = content_of(result)
            self._send(_REPLY, incoming.call_id, header, views, n_bytes)
        except Exception as error:  # too large for the peer, or not to be encoded: tell it, instead of letting it wait
            self._send(_FAILURE, incoming.call_id, failure_header(type(error).__name__, str(error)))

    def fail(self, incoming: Incoming, error: BaseException) -> None:
        """The handler raised."""
        if incoming.kind == _NOTIFY:
            self._notify_done(incoming)
        elif self._finish(incoming):
            cancelled = not isinstance(error, Exception)  # asyncio.CancelledError, which has no text
            text = "the handler was cancelled" if cancelled else str(error)
            self._send(_FAILURE, incoming.call_id, failure_header(type(error).__name__, text))

    def ready_for_item(self, incoming: Incoming) -> bool:
        """Whether the reader has room for another item, and the wire as well."""
        return incoming.credit > 0 and not self.is_closed and self._wire.queued_bytes <= HIGH_WATER_BYTES

    def item(self, incoming: Incoming, result: HandlerResult) -> None:
        """Send one item of a stream; only when `ready_for_item`. Raises ProtocolError when it's too large."""
        if self.is_closed or incoming.call_id not in self._serving:
            return
        header, views, n_bytes = content_of(result)
        self._send(_ITEM, incoming.call_id, header, views, n_bytes)
        incoming.credit -= 1

    def _finish(self, incoming: Incoming) -> bool:
        incoming.stop = incoming.more = None
        if self._serving.pop(incoming.call_id, None) is None or self.is_closed:
            return False
        self._taken_messages -= 1
        self._taken_bytes -= incoming.cost
        return True

    def _notify_done(self, incoming: Incoming) -> None:
        self._taken_messages -= 1
        self._taken_bytes -= incoming.cost
        self._owed_messages += 1
        self._owed_bytes += incoming.cost
        if not self.is_closed:
            self._give_credit()

    def _give_credit(self) -> None:
        """Give back what is owed, unless it's little in comparison to what the peer still has."""
        limits = self._limits
        if (
            2 * self._owed_messages >= limits.window_messages - self._taken_messages
            or 2 * self._owed_bytes >= limits.window_bytes - self._taken_bytes
        ):
            credit = _CREDIT.pack(self._owed_messages, self._owed_bytes)
            self._owed_messages = self._owed_bytes = 0
            self._send(_CREDIT_FRAME, 0, credit)

    # ------------------------------------------------------------------------------ admission

    def admit(self) -> None:
        """Listener: let the peer's messages in."""
        if self.is_closed:
            raise self.peer_lost()
        self._send(Frame.ADMIT, 0, b"")
        self._admitted = True
        self._serve_held()

    def refuse(self, error: Exception) -> None:
        """Listener: on_connect raised."""
        if not self.is_closed:
            self._send(Frame.REFUSE, 0, failure_header(type(error).__name__, str(error)))
            self._end(f"refused: {error}")
            self._wire.close(FLUSH_S)

    def when_admitted(self, callback: Callable[[Exception | None], None]) -> None:
        """Dialer: call back when the listener has decided; with FencedError, RemoteError or PeerLost if it's a no."""
        if self._awaits_admission:
            self._on_admission = callback
        else:
            callback(self._admission)

    def _decided(self, error: Exception | None) -> None:
        self._awaits_admission = False
        self._admission = error
        if self._on_admission is not None:
            self._on_admission(error)

    # ------------------------------------------------------------------------------ incoming

    def _frame(self, kind: int, call_id: int, header: bytes, payload: memoryview) -> None:
        """Act on one verified frame. A frame that the contract doesn't allow ends the connection."""
        if self.is_closed:
            return
        try:
            if kind == _REPLY:
                # Read first: an exchange that was taken out and not settled would wait for ever.
                is_ack = header == _ACK and not payload
                self._answered(call_id, _ACK_REPLY if is_ack else Reply(decode(header), payload))
            elif kind in _ASKING:
                self._take(Incoming(kind, call_id, decode(header), payload, len(header) + len(payload)))
            else:
                self._rare_frame(kind, call_id, header, payload)
        except (ProtocolError, msgspec.MsgspecError, struct.error, RecursionError) as error:
            name = Frame(kind).name if kind in _KINDS else f"frame of kind {kind}"
            self._violated(f"protocol error in {name}: {error}")
        except Exception as error:  # ours: end this connection only, since the wire can't go on after half a frame
            import logging

            logging.getLogger(__name__).exception("%s: a frame of kind %d failed", self.peer.name, kind)
            self._violated(f"{type(error).__name__} while a frame was taken: {error}")

    def _rare_frame(self, kind: int, call_id: int, header: bytes, payload: memoryview) -> None:
        if kind == _FAILURE:
            failure = read_failure(header)
            self._answered(call_id, RemoteError(failure.text, kind=failure.kind, peer=self.peer.name))
        elif kind == _ITEM:
            exchange = self._exchanges.get(call_id)
            if exchange is None or exchange.kind != _STREAM:
                raise ProtocolError(f"item of stream {call_id}, which isn't open")
            exchange.item_room -= 1
            if exchange.item_room < 0:
                raise ProtocolError(f"stream {call_id} is more than {STREAM_WINDOW} items ahead of its reader")
            if exchange.result is None and exchange.on_item is not None:
                exchange.on_item(Reply(decode(header), payload))
        elif kind == _CREDIT_FRAME:
            self._credited(call_id, *_CREDIT.unpack(header))
        elif kind == _CANCEL:
            incoming = self._serving.get(call_id)  # none: its answer is on its way already
            if incoming is not None:
                self._stop(incoming)
        elif kind == Frame.CLOSE:
            reason = read_failure(header).text
            self.abandon(f"closed by the peer: {reason}" if reason else "closed by the peer")
        elif not self._awaits_admission:
            raise ProtocolError(f"unexpected {Frame(kind).name}")
        elif kind == Frame.ADMIT:
            self._decided(None)
        else:
            failure = read_failure(header)
            self._decided(
                FencedError(failure.text)
                if failure.kind == "FencedError"
                else RemoteError(failure.text, kind=failure.kind, peer=self.peer.name)
            )
            self.abandon(f"refused by the peer: {failure.text}")

    def _answered(self, call_id: int, result: Reply | Exception) -> None:
        """End the exchange that this answers; its share of the peer's window is free again."""
        exchange = self._exchanges.pop(call_id, None)
        if exchange is None:
            raise ProtocolError(f"answer to call {call_id}, which isn't open")
        self._used_messages -= 1
        self._used_bytes -= exchange.cost
        exchange.settle(result)
        if self._waiting:
            self._room_appeared()

    def _credited(self, call_id: int, messages: int, n_bytes: int) -> None:
        if call_id:
            incoming = self._serving.get(call_id)
            if incoming is not None:
                incoming.credit = min(incoming.credit + messages, STREAM_WINDOW)
                if incoming.more is not None:
                    incoming.more()
            return
        if messages > self._notified_messages or n_bytes > self._notified_bytes:
            raise ProtocolError(f"credit for {messages} messages of {n_bytes} bytes, which weren't sent")
        self._notified_messages -= messages
        self._notified_bytes -= n_bytes
        self._used_messages -= messages
        self._used_bytes -= n_bytes
        self._room_appeared()

    def _take(self, incoming: Incoming) -> None:
        limits = self._limits
        taken, cost = self._taken_bytes, incoming.cost
        if (
            self._taken_messages >= limits.window_messages
            or (taken + cost > limits.window_bytes and 2 * taken >= limits.window_bytes)
        ) and not (
            incoming.message.urgent
            and cost <= _URGENT_BYTES
            and self._taken_messages < limits.window_messages + _URGENT_SLACK
        ):
            raise ProtocolError(
                f"{self._taken_messages + 1} messages of {taken + cost} bytes in work; the window "
                f"is {limits.window_messages} messages of {limits.window_bytes} bytes"
            )
        self._taken_messages += 1
        self._taken_bytes = taken + cost
        if self._owed_messages:
            self._give_credit()
        if incoming.kind != _NOTIFY:
            if incoming.call_id in self._serving:
                raise ProtocolError(f"call {incoming.call_id} twice")
            self._serving[incoming.call_id] = incoming
        if self._admitted and not self._held and self._wire.queued_bytes <= HIGH_WATER_BYTES:
            self._face.serve(incoming)
        else:
            incoming.held = True
            self._held.append(incoming)

    def _serve_held(self) -> None:
        while self._held and self._admitted and not self.is_closed and self._wire.queued_bytes <= HIGH_WATER_BYTES:
            incoming = self._held.popleft()
            incoming.held = False
            if incoming.unwanted:
                self.fail(incoming, DeadlineExpired("the caller gave up before the call was begun"))
            else:
                self._face.serve(incoming)

    def _stop(self, incoming: Incoming) -> None:
        """Nobody waits for this handler any more."""
        if incoming.held:
            # Answered in its turn: at once, a peer that reads nothing could make our queue grow without bound.
            incoming.unwanted = True
            incoming.payload = _EMPTY
        elif incoming.wants_stream or incoming.message.cancellable:
            incoming.unwanted = True
            stop, incoming.stop = incoming.stop, None  # once: a second one would hit the handler's own cleaning up
            if stop is not None:
                stop()

    def _drained(self) -> None:
        self._serve_held()
        for incoming in list(self._serving.values()):
            if incoming.more is not None:
                incoming.more()

    # ------------------------------------------------------------------------------ sending

    def _send(
        self,
        kind: int,
        call_id: int,
        header: bytes,
        views: Sequence[memoryview] = (),
        n_bytes: int = 0,
        handed_over: Callable[[], None] | None = None,
    ) -> bool:
        wire = self._wire
        done = wire.send(kind, call_id, header, views, n_bytes, handed_over)
        if wire.queued_bytes >= _EARLY_BYTES:
            wire.flush()  # so that the peer begins with these while we make the next
        elif not self._flush_planned:
            self._flush_planned = True
            self._loop.call_soon(self._planned_flush)
        return done

    def flush(self) -> None:
        """Hand over what was queued; happens by itself in the loop's next round."""
        if not self.is_closed:
            self._wire.flush()

    def _planned_flush(self) -> None:
        self._flush_planned = False
        if not self.is_closed:
            self._wire.flush()

    # ------------------------------------------------------------------------------ deadlines

    def _watch_deadlines(self, end: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = end
        self._timer = self._loop.call_later(max(0.0, end - self._loop.time()), self._expire)

    def _expire(self) -> None:
        """One timer for all: it fires at the earliest deadline, whose call was most often answered long ago."""
        self._timer, self._timer_at = None, float("inf")
        now = self._loop.time()
        next_end = float("inf")
        for exchange in [*self._exchanges.values(), *self._waiting]:
            if exchange.result is not None or exchange.kind == _NOTIFY:
                continue
            if exchange.end <= now:
                self.give_up(exchange, exchange.expired(self.peer.name, now))
            else:
                next_end = min(next_end, exchange.end)
        if next_end < self._timer_at and not self.is_closed:
            self._watch_deadlines(next_end)

    # ------------------------------------------------------------------------------ the end

    def peer_lost(self) -> PeerLost:
        """The error for whoever still wants something."""
        peer = self.peer
        return PeerLost(f"{peer.name} ({peer.role} on {peer.host}, pid {peer.pid}): {self.close_reason}")

    def close(self, reason: str) -> None:
        """Orderly end; idempotent."""
        if self.is_closed:
            return
        self._say_goodbye(reason)
        self._end(f"closed here: {reason}" if reason else "closed here")
        self._wire.close(FLUSH_S)

    def abandon(self, reason: str) -> None:
        """End without a word; idempotent."""
        if not self.is_closed:
            self._end(reason)
            self._wire.abandon()

    def _violated(self, reason: str) -> None:
        """The peer broke the protocol: tell it why, as far as it still listens, and end."""
        if self.is_closed:
            return
        import logging

        reason = reason[:MAX_REASON_CHARS]
        logging.getLogger(__name__).warning("%s: %s", self.peer.name, reason)
        self._say_goodbye(reason)
        self._end(reason)
        self._wire.close(FLUSH_S)

    def _say_goodbye(self, reason: str) -> None:
        try:
            self._wire.send(int(Frame.CLOSE), 0, failure_header("", reason), [], 0)
        except (OSError, MilesError):
            pass

    def _end(self, reason: str) -> None:
        self.close_reason = reason
        self.is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._held.clear()
        exchanges = [*self._exchanges.values(), *self._waiting, *self._notifies]
        self._exchanges.clear()
        self._notifies.clear()
        self._waiting.clear()
        for exchange in exchanges:
            exchange.settle(self.peer_lost())
        for incoming in list(self._serving.values()):
            self._stop(incoming)
        self._serving.clear()
        if self._awaits_admission:
            self._decided(self.peer_lost())
        self._face.ended()
