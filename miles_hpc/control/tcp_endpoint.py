"""One TCP socket after its handshake, on the event loop's readiness callbacks.

    readable ─▶ recv_into(64 KiB buffer) ─▶ whole frames ─▶ calls.py
                 └─ a frame that doesn't fit ─▶ recv_into(its own buffer), MAC updated as it arrives
    send     ─▶ sendmsg(head, buffers, tag) at once; what the kernel doesn't take waits for writable

Payloads aren't copied in Python: sent from the caller's buffers, received into one buffer of the announced (and
authenticated) size. asyncio's streams and transports would copy on both sides with Python 3.11.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Sequence

from miles_hpc.control.auth import SessionKeys
from miles_hpc.control.frames import HEAD_BYTES, TAG_BYTES, Frame, Head, Limits, aligned_buffer, check_body
from miles_hpc.control.sealed import SealedEndpoint
from miles_hpc.core.errors import AuthenticationError, ProtocolError
from miles_hpc.core.transport import Buffer, Handler

__all__ = ["TcpEndpoint"]

_INPUT_BYTES = 64 * 1024
_BULK_STEP_BYTES = 1 << 20  # received per callback, so that a large payload leaves room for other endpoints
_MAX_PIECES = 512  # below IOV_MAX
_FLUSH_S = 1.0


class TcpEndpoint(SealedEndpoint):
    """One connected socket."""

    def __init__(
        self, sock: socket.socket, keys: SessionKeys, handler: Handler | None, limits: Limits, *, dialer: bool
    ) -> None:
        super().__init__(keys, handler, limits, dialer=dialer)
        self._sock = sock
        self._out: deque[memoryview] = deque()
        self._queued_bytes = 0  # all that was ever queued and sent
        self._sent_bytes = 0
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._writing = False
        self._open = True
        self._eof = asyncio.Event()
        self._in = memoryview(bytearray(_INPUT_BYTES))
        self._start = 0
        self._end_of_input = 0
        self._head: Head | None = None
        self._body: memoryview | None = None  # header, padding not included, payload, tag of a large frame
        self._body_got = 0
        self._loop.add_reader(sock.fileno(), self._on_readable)

    # ------------------------------------------------------------------------------ sending

    @property
    def _connected(self) -> bool:
        return self._open

    def _transmit_whole(
        self, kind: Frame, call_id: int, header: bytes, views: list[memoryview], n_bytes: int
    ) -> asyncio.Future[None] | None:
        return self._queue(self._sealer.seal(kind, call_id, header, views))

    def _transmit_start(self, prefix: bytes, views: list[memoryview]) -> None:
        self._queue([prefix, *views])

    def _transmit_tag(self, tag: bytes) -> asyncio.Future[None] | None:
        return self._queue([tag])

    def _queue(self, pieces: Sequence[Buffer]) -> asyncio.Future[None] | None:
        for piece in pieces:
            view = memoryview(piece)
            self._out.append(view)
            self._queued_bytes += view.nbytes
        if not self._writing:
            self._flush()
        if not self._out or not self._open:
            return None
        future = self._promise()
        self._waiters.append((self._queued_bytes, future))
        return future

    def _flush(self) -> None:
        """Send as much as the kernel takes and ask to be called again for the rest."""
        out = self._out
        try:
            while out:
                pieces = list(out) if len(out) <= _MAX_PIECES else [out[i] for i in range(_MAX_PIECES)]
                sent = self._sock.sendmsg(pieces)
                self._sent_bytes += sent
                while sent:
                    first = out[0]
                    if sent >= first.nbytes:
                        sent -= first.nbytes
                        out.popleft()
                    else:
                        out[0] = first[sent:]
                        sent = 0
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            self._lost(f"endpoint closed: {error.strerror or error}")
            return
        while self._waiters and self._waiters[0][0] <= self._sent_bytes:
            future = self._waiters.popleft()[1]
            if not future.done():
                future.set_result(None)
        if bool(out) != self._writing:
            self._writing = bool(out)
            if self._writing:
                self._loop.add_writer(self._sock.fileno(), self._flush)
            else:
                self._loop.remove_writer(self._sock.fileno())

    # ------------------------------------------------------------------------------ receiving

    def _on_readable(self) -> None:
        try:
            if self._body is not None:
                target = self._body[self._body_got : self._body_got + _BULK_STEP_BYTES]
            else:
                target = self._in[self._end_of_input :]
            n = self._sock.recv_into(target)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._gone(f"endpoint closed: {error.strerror or error}")
            return
        if n == 0:
            self._gone("endpoint closed: the peer's socket is gone")
            return
        if self.closed.is_set():
            return  # we have said goodbye and only wait for the peer's end
        try:
            if self._body is not None:
                self._bulk_arrived(n)
            else:
                self._end_of_input += n
                self._parse()
        except (AuthenticationError, ProtocolError) as error:
            self._violated(str(error))

    def _gone(self, reason: str) -> None:
        self._eof.set()
        if self.closed.is_set():
            self._abandon()
        else:
            self._lost(reason)

    def _parse(self) -> None:
        """Deliver all whole frames of the input buffer and keep the rest for the next call."""
        while not self.closed.is_set():
            available = self._end_of_input - self._start
            if self._head is None:
                if available < HEAD_BYTES:
                    break
                self._head = self._opener.head(self._in[self._start : self._start + HEAD_BYTES])
                self._start += HEAD_BYTES
                available -= HEAD_BYTES
            head = self._head
            n_body = head.body_bytes
            if n_body > _INPUT_BYTES:
                self._begin_bulk(head, available)
                return
            if available < n_body:
                break
            body = self._in[self._start : self._start + n_body]
            self._start += n_body
            self._head = None
            self._deliver_small(head, body)
        rest = self._end_of_input - self._start
        if rest and self._start:
            self._in[:rest] = bytes(self._in[self._start : self._end_of_input])
        self._start, self._end_of_input = 0, rest

    def _deliver_small(self, head: Head, body: memoryview) -> None:
        if body:
            head.mac.update(body[:-TAG_BYTES])
            check_body(head.mac, body[-TAG_BYTES:])
        header = bytes(body[: head.header_bytes])
        payload = memoryview(bytes(body[head.header_bytes : -TAG_BYTES])) if head.payload_bytes else memoryview(b"")
        self._received(head.kind, head.call_id, header, payload)

    def _begin_bulk(self, head: Head, available: int) -> None:
        """Allocate the frame's own buffer and move what has arrived of it there."""
        self._body = aligned_buffer(head.header_bytes, head.payload_bytes + TAG_BYTES)
        self._body_got = 0
        self._body[:available] = self._in[self._start : self._end_of_input]
        self._start = self._end_of_input = 0
        if available:
            self._bulk_arrived(available)

    def _bulk_arrived(self, n: int) -> None:
        body, head = self._body, self._head
        assert body is not None and head is not None
        end_of_data = body.nbytes - TAG_BYTES
        head.mac.update(body[self._body_got : min(self._body_got + n, end_of_data)])
        self._body_got += n
        if self._body_got < body.nbytes:
            return
        self._body = self._head = None
        check_body(head.mac, body[end_of_data:])
        payload = body[head.header_bytes : end_of_data].toreadonly()
        self._received(head.kind, head.call_id, body[: head.header_bytes], payload)

    # ------------------------------------------------------------------------------ the end

    async def _shutdown(self) -> None:
        """Flush, send our end, wait shortly for the peer's, close: a close with unread input would reset the
        connection, and the peer might never read why."""
        loop = self._loop
        end = loop.time() + _FLUSH_S
        try:
            while self._open and (self._out or self._hashing) and loop.time() < end:
                await asyncio.sleep(0.005)
            if self._open and not self._out and not self._hashing:
                self._sock.shutdown(socket.SHUT_WR)
                async with asyncio.timeout_at(end):
                    await self._eof.wait()
        except (OSError, TimeoutError):
            pass
        finally:
            self._abandon()

    def _abandon(self) -> None:
        if not self._open:
            return
        self._open = False
        self._eof.set()
        fd = self._sock.fileno()
        self._loop.remove_reader(fd)
        self._loop.remove_writer(fd)
        self._sock.close()
        self._out.clear()
        for _, future in self._waiters:
            if not future.done():
                future.set_exception(self._peer_lost())
        self._waiters.clear()
        self._drop_backlog()
