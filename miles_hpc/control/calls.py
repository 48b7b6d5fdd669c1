"""What every transport shares: calls by id, handlers as tasks, deadlines, and the end of an endpoint.

    call() ── CALL ──▶ peer's handler task ── REPLY | FAILURE ──▶ future of that id
    notify() ─ NOTIFY ─▶ peer's handler task
    lost() ── every pending future: PeerLost; `closed` set; on_close

| waits | for | bounded by |
|---|---|---|
| call() | REPLY or FAILURE of its id | its deadline, the endpoint's end |
| connect() | ADMIT or REFUSE | its deadline, the endpoint's end |
| listener, from welcome to ADMIT | on_connect | the endpoint's end; calls of the peer are held meanwhile |

A subclass moves frames: it implements `_send` and `_shutdown` and calls `_received` and `_lost`. A handler isn't
cancelled when its endpoint ends: half-loaded weights would be worse than an answer that nobody reads.
"""

from __future__ import annotations

import asyncio
import logging
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from miles_hpc.control.frames import Failure, Frame
from miles_hpc.core.deadline import Deadline
from miles_hpc.core.errors import FencedError, MilesError, PeerLost, ProtocolError, RemoteError
from miles_hpc.core.messages import Ack, Message, decode, encode
from miles_hpc.core.transport import Buffer, Endpoint, Handler, PeerIdentity, Reply

__all__ = ["CallEndpoint", "EndpointHook"]

logger = logging.getLogger(__name__)

EndpointHook = Callable[[Endpoint], Awaitable[None]]

#: Frames that are held for a peer whose on_connect is still running; more is a flood.
MAX_HELD_FRAMES = 1024
_MAX_FAILURE_CHARS = 16_384
_EMPTY = memoryview(b"")
_ACK = encode(Ack())
_failure_decoder = msgspec.msgpack.Decoder(Failure)


def _failure(kind: str, text: str) -> bytes:
    return msgspec.msgpack.encode(Failure(kind, text[:_MAX_FAILURE_CHARS]))


class CallEndpoint(Endpoint):
    """An endpoint over anything that moves frames in order."""

    def __init__(self, peer: PeerIdentity, handler: Handler | None, *, dialer: bool) -> None:
        self.peer = peer
        self.closed = asyncio.Event()
        self.close_reason = ""
        self.on_lost: Callable[[], None] | None = None
        self._loop = asyncio.get_running_loop()
        self._handler = handler
        self._pending: dict[int, asyncio.Future[tuple[memoryview | bytes, memoryview]]] = {}
        self._next_id = 1
        self._tasks: set[asyncio.Task[None]] = set()
        self._admitted = dialer  # the dialer serves the listener's calls at once
        self._admission: asyncio.Future[None] | None = self._loop.create_future() if dialer else None
        if self._admission is not None:
            self._admission.add_done_callback(_mark_retrieved)
        self._held: list[tuple[Frame, int, Message, memoryview]] = []

    # ------------------------------------------------------------------------------ for subclasses

    @abstractmethod
    def _send(
        self, kind: Frame, call_id: int, header: bytes, payload: Sequence[Buffer] = ()
    ) -> asyncio.Future[None] | None:
        """Queue one frame, at once and in order. Returns None when it is handed over, else a future for that."""

    @abstractmethod
    async def _shutdown(self) -> None:
        """Flush what is queued for a short, bounded time and release the connection."""

    def _abandon(self) -> None:
        """Release the connection at once, without flushing. Called when the endpoint is lost."""

    # ------------------------------------------------------------------------------ the contract

    async def call(self, message: Message, *, payload: Sequence[Buffer] = (), deadline_s: float) -> Reply:
        self._check_open()
        deadline = Deadline(deadline_s, f"{self.peer.name}: {type(message).__name__}")
        call_id = self._next_id
        self._next_id += 1
        future = self._loop.create_future()
        self._pending[call_id] = future
        timer = self._loop.call_later(deadline_s, _expire, future, deadline)
        try:
            self._send(Frame.CALL, call_id, encode(message), payload)
            header, body = await future
            return Reply(self._decode(header), body)
        finally:
            timer.cancel()
            self._pending.pop(call_id, None)

    async def notify(self, message: Message, *, payload: Sequence[Buffer] = ()) -> None:
        self._check_open()
        handed_over = self._send(Frame.NOTIFY, 0, encode(message), payload)
        if handed_over is not None:
            await handed_over

    async def close(self, reason: str = "") -> None:
        if self.closed.is_set():
            return
        try:
            self._send(Frame.CLOSE, 0, _failure("", reason))
        except (OSError, MilesError):
            pass
        self._end(f"closed here: {reason}" if reason else "closed here")
        await self._shutdown()

    # ------------------------------------------------------------------------------ admission

    async def admit(self, on_connect: EndpointHook | None) -> None:
        """Listener side: ask on_connect, then let the peer's messages in. Raises what on_connect raised."""
        try:
            if on_connect is not None:
                await on_connect(self)
        except Exception as error:
            if not self.closed.is_set():
                self._send(Frame.REFUSE, 0, _failure(type(error).__name__, str(error)))
                self._end(f"refused: {error}")
                await self._shutdown()
            raise
        self._check_open()
        self._send(Frame.ADMIT, 0, b"")
        self._admitted = True
        held, self._held = self._held, []
        for kind, call_id, message, payload in held:
            self._start_handler(kind, call_id, message, payload)

    async def admitted(self) -> None:
        """Dialer side: wait for ADMIT. Raises FencedError, RemoteError or PeerLost."""
        assert self._admission is not None
        await self._admission

    # ------------------------------------------------------------------------------ incoming

    def _received(self, kind: Frame, call_id: int, header: bytes | memoryview, payload: memoryview = _EMPTY) -> None:
        """Act on one verified frame. A frame that the contract doesn't allow ends the endpoint."""
        if self.closed.is_set():
            return
        try:
            self._dispatch(kind, call_id, header, payload)
        except (ProtocolError, msgspec.MsgspecError) as error:
            self._violated(f"protocol error: {error}")

    def _dispatch(self, kind: Frame, call_id: int, header: bytes | memoryview, payload: memoryview) -> None:
        if kind is Frame.CALL or kind is Frame.NOTIFY:
            message = decode(header)
            if self._admitted:
                self._start_handler(kind, call_id, message, payload)
            elif len(self._held) < MAX_HELD_FRAMES:
                self._held.append((kind, call_id, message, payload))
            else:
                raise ProtocolError(f"{MAX_HELD_FRAMES} messages before admission")
        elif kind is Frame.REPLY:
            future = self._pending.get(call_id)
            if future is None:
                self._check_known(call_id)
            elif not future.done():
                future.set_result((bytes(header), payload))
        elif kind is Frame.FAILURE:
            failure = _failure_decoder.decode(header)
            future = self._pending.get(call_id)
            if future is None:
                self._check_known(call_id)
            elif not future.done():
                future.set_exception(RemoteError(failure.text, kind=failure.kind, peer=self.peer.name))
        elif kind is Frame.CLOSE:
            reason = _failure_decoder.decode(header).text
            self._lost(f"closed by the peer: {reason}" if reason else "closed by the peer")
        elif self._admission is None or self._admission.done():
            raise ProtocolError(f"unexpected {kind.name}")
        elif kind is Frame.ADMIT:
            self._admission.set_result(None)
        else:
            failure = _failure_decoder.decode(header)
            error = (
                FencedError(failure.text)
                if failure.kind == "FencedError"
                else RemoteError(failure.text, kind=failure.kind, peer=self.peer.name)
            )
            self._admission.set_exception(error)
            self._lost(f"refused by the peer: {failure.text}")

    def _check_known(self, call_id: int) -> None:
        """A late answer to a call that expired or was cancelled is dropped; an answer to no call isn't allowed."""
        if not 0 < call_id < self._next_id:
            raise ProtocolError(f"answer to call {call_id}, which was never made")

    def _start_handler(self, kind: Frame, call_id: int, message: Message, payload: memoryview) -> None:
        self._keep(self._loop.create_task(self._handle(kind, call_id, message, payload)))

    def _keep(self, task: asyncio.Task[None]) -> None:
        """The loop itself holds tasks weakly only."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _handle(self, kind: Frame, call_id: int, message: Message, payload: memoryview) -> None:
        result: Message | None = None
        out: Sequence[Buffer] = ()
        try:
            if self._handler is None:
                raise ProtocolError(f"{type(message).__name__}: nobody handles calls on this side")
            answer = await self._handler(self, message, payload)
            result, out = answer if isinstance(answer, tuple) else (answer, ())
        except asyncio.CancelledError:
            if kind is Frame.CALL:
                self._answer(Frame.FAILURE, call_id, _failure("CancelledError", "the handler was cancelled"))
            raise
        except Exception as error:
            expected = isinstance(error, MilesError) and kind is Frame.CALL
            logger.log(
                logging.DEBUG if expected else logging.ERROR,
                "handler of %s from %s failed",
                type(message).__name__,
                self.peer.name,
                exc_info=error,
            )
            if kind is Frame.CALL:
                self._answer(Frame.FAILURE, call_id, _failure(type(error).__name__, str(error)))
            return
        if kind is Frame.CALL:
            handed_over = self._answer(Frame.REPLY, call_id, _ACK if result is None else encode(result), out)
            if handed_over is not None:
                await asyncio.wait((handed_over,))  # keeps the buffers alive; loss is dealt with elsewhere

    def _answer(
        self, kind: Frame, call_id: int, header: bytes, payload: Sequence[Buffer] = ()
    ) -> asyncio.Future[None] | None:
        if self.closed.is_set():
            return None
        try:
            return self._send(kind, call_id, header, payload)
        except PeerLost:
            return None
        except ProtocolError as error:  # too large for the peer: tell it, instead of letting it wait
            return self._send(Frame.FAILURE, call_id, _failure("ProtocolError", str(error)))

    # ------------------------------------------------------------------------------ the end

    def _check_open(self) -> None:
        if self.closed.is_set():
            raise self._peer_lost()

    def _peer_lost(self) -> PeerLost:
        return PeerLost(
            f"{self.peer.name} ({self.peer.role} on {self.peer.host}, pid {self.peer.pid}): {self.close_reason}"
        )

    def _decode(self, header: bytes | memoryview) -> Message:
        try:
            return decode(header)
        except msgspec.MsgspecError as error:
            self._violated(f"protocol error: {error}")
            raise self._peer_lost() from error

    def _violated(self, reason: str) -> None:
        """The peer broke the protocol: tell it why, as far as it still listens, and end."""
        if self.closed.is_set():
            return
        logger.warning("%s: %s", self.peer.name, reason)
        try:
            self._send(Frame.CLOSE, 0, _failure("", reason))
        except (OSError, MilesError):
            pass
        self._end(reason)
        self._keep(self._loop.create_task(self._shutdown()))

    def _lost(self, reason: str) -> None:
        """The connection is gone. Idempotent."""
        if not self.closed.is_set():
            self._end(reason)
            self._abandon()

    def _end(self, reason: str) -> None:
        self.close_reason = reason
        self.closed.set()
        self._held.clear()
        for future in self._pending.values():
            if not future.done():
                future.set_exception(self._peer_lost())
        if self._admission is not None and not self._admission.done():
            self._admission.set_exception(self._peer_lost())
        if self.on_lost is not None:
            self.on_lost()


def _expire(future: asyncio.Future[tuple[memoryview | bytes, memoryview]], deadline: Deadline) -> None:
    if not future.done():
        future.set_exception(deadline.error())


def _mark_retrieved(future: asyncio.Future[None]) -> None:
    """A refusal that nobody waits for any more (the deadline came first) isn't worth a warning."""
    if not future.cancelled():
        future.exception()
