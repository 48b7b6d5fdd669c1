"""UCX underneath: the worker that an event loop progresses, and one endpoint after its handshake.

    event loop ── worker's epoll descriptor readable ─▶ UcxWorker.progress ─▶ callbacks of completed requests
    small frame  one tag message: head, header, payload, body MAC together, at most INLINE_BYTES
    large frame  head and piece sizes │ header │ pieces (rendezvous, straight into their place) │ body MAC

No thread and no polling: the worker is progressed when its descriptor is readable and after each submission, and armed
again before the loop sleeps. ucxx's own asyncio face isn't used: without its Python-future build it waits by spinning.
The tags of a direction are derived from its session key, so that another peer of the worker can't send into it.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import logging
import struct
from collections.abc import Callable
from typing import Any

from miles_hpc.control.auth import SessionKeys
from miles_hpc.control.frames import HEAD_BYTES, TAG_BYTES, Frame, Head, Limits, aligned_buffer, check_body
from miles_hpc.control.sealed import SealedEndpoint
from miles_hpc.core.errors import AuthenticationError, PeerLost, ProtocolError
from miles_hpc.core.transport import Buffer, Handler

__all__ = ["UcxEndpoint", "UcxWorker", "ucx_array"]

logger = logging.getLogger(__name__)

#: A frame of at most so many bytes is one message; also the size of the buffer that waits for the next frame.
INLINE_BYTES = 16 * 1024
#: Large buffers are sent in pieces of this size, so that the receiver checks one while the next travels.
PIECE_BYTES = 4 << 20

_FLUSH_S = 1.0
_MAX_PIECES = (INLINE_BYTES - HEAD_BYTES - 2) // 8
_LENGTH = struct.Struct("<H")
_MAX_ROUNDS = 64

Completed = Callable[[Exception | None], None]


class UcxWorker:
    """One UCX worker, progressed by one event loop. Callbacks run inside `progress`, on the loop's thread."""

    def __init__(self, api: Any) -> None:
        self._loop = asyncio.get_running_loop()
        features = (api.Feature.TAG, api.Feature.STREAM, api.Feature.WAKEUP)
        self._context = api.UCXContext({}, feature_flags=features)
        self.handle = api.UCXWorker(self._context, enable_delayed_submission=False, enable_python_future=False)
        self.handle.init_blocking_progress_mode()
        self._fd = self.handle.epoll_file_descriptor
        self._watched: dict[Any, tuple[Completed, object]] = {}
        self._inside = False
        self._loop.add_reader(self._fd, self.progress)
        config = self._context.config
        version = ".".join(map(str, api.get_ucx_version()))
        logger.info("UCX %s: TLS=%s NET_DEVICES=%s", version, config.get("TLS"), config.get("NET_DEVICES"))

    def watch(self, request: Any, completed: Completed, buffers: object) -> None:
        """Call `completed` with None or the error when the request ends; keeps its buffers alive until then."""
        self._watched[request] = (completed, buffers)
        self.progress()

    async def wait(self, request: Any, buffers: object) -> None:
        """Wait for one request. Raises what UCX reports."""
        future = self._loop.create_future()

        def completed(error: Exception | None) -> None:
            if not future.done():
                if error is None:
                    future.set_result(None)
                else:
                    future.set_exception(error)

        self.watch(request, completed, buffers)
        await future

    def progress(self) -> None:
        """Let UCX work, run callbacks, and arm the descriptor once nothing is left to do."""
        if self._inside:
            return  # called from a callback: the loop below goes round again
        self._inside = True
        try:
            for _ in range(_MAX_ROUNDS):
                self.handle.progress()
                done = [request for request in self._watched if request.completed]
                for request in done:
                    completed, _ = self._watched.pop(request)
                    try:
                        request.check_error()
                    except Exception as error:
                        completed(error)
                    else:
                        completed(None)
                if not done and self.handle.arm():
                    return
        finally:
            self._inside = False
        self._loop.call_soon(self.progress)  # still busy: let others run in between

    def retire(self, endpoint: Any) -> None:
        """Close a UCX endpoint without waiting for it."""
        endpoint.remove_close_callback()
        if endpoint.alive:
            request = endpoint.close()
            if request is not None:

                def closed(error: Exception | None) -> None:
                    self._loop.call_soon(_close_finally, endpoint)

                self.watch(request, closed, endpoint)
        else:
            _close_finally(endpoint)
            self.progress()


def _close_finally(endpoint: Any) -> None:
    """Cancels what is still posted on a closed endpoint; returns at once then."""
    endpoint.close_blocking(period=10**8, max_attempts=1)


class UcxEndpoint(SealedEndpoint):
    """One UCX endpoint after its handshake."""

    def __init__(
        self, worker: UcxWorker, ucx: Any, keys: SessionKeys, handler: Handler | None, limits: Limits, *, dialer: bool
    ) -> None:
        super().__init__(keys, handler, limits, dialer=dialer)
        self._worker = worker
        self._ucx = ucx
        self._send_tag = _tag(keys.send_key)
        self._receive_tag = _tag(keys.receive_key)
        self._open = True
        self._gone = asyncio.Event()
        self._small = memoryview(bytearray(INLINE_BYTES))
        ucx.set_close_callback(lambda: self._loop.call_soon(self._peer_gone), (), {})
        self._expect_frame()
        if not ucx.alive:
            self._loop.call_soon(self._peer_gone)

    # ------------------------------------------------------------------------------ sending

    @property
    def _connected(self) -> bool:
        return self._open and bool(self._ucx.alive)

    def _transmit_whole(
        self, kind: Frame, call_id: int, header: bytes, views: list[memoryview], n_bytes: int
    ) -> asyncio.Future[None] | None:
        if HEAD_BYTES + len(header) + n_bytes + TAG_BYTES <= INLINE_BYTES:
            return self._queue([b"".join(self._sealer.seal(kind, call_id, header, views))])
        prefix, mac = self._sealer.begin(kind, call_id, header, n_bytes)
        for view in views:
            mac.update(view)
        return self._queue([*_large_messages(prefix, views), mac.digest()[:TAG_BYTES]])

    def _transmit_start(self, prefix: bytes, views: list[memoryview]) -> None:
        self._queue(_large_messages(prefix, views))

    def _transmit_tag(self, tag: bytes) -> asyncio.Future[None] | None:
        return self._queue([tag])

    def _queue(self, messages: list[Buffer]) -> asyncio.Future[None] | None:
        """Submit tag messages; the future ends with the last of them."""
        left = len(messages)
        future = self._promise()

        def completed(error: Exception | None) -> None:
            nonlocal left
            left -= 1
            if error is not None:
                self._loop.call_soon(self._lost, f"endpoint closed: {error}")
            if not future.done() and (left == 0 or error is not None):
                if error is None:
                    future.set_result(None)
                else:
                    future.set_exception(PeerLost(f"{self.peer.name}: endpoint closed: {error}"))

        for message in messages:
            if not self._ucx.alive:  # it may have failed since the previous message
                completed(PeerLost("the peer is gone"))
                break
            request = self._ucx.tag_send(ucx_array(message), self._send_tag)
            self._worker.watch(request, completed, message)
        return None if future.done() and future.exception() is None else future

    # ------------------------------------------------------------------------------ receiving

    def _post(self, buffer: memoryview, completed: Callable[[], None]) -> None:
        """Receive one message into `buffer`."""

        def ended(error: Exception | None) -> None:
            if self.closed.is_set():
                return
            if error is not None:
                # After the close callback: the goodbye that explains the end may be right behind.
                self._loop.call_soon(self._lost, f"endpoint closed: {error}")
                return
            try:
                completed()
            except (AuthenticationError, ProtocolError, struct.error) as problem:
                self._violated(str(problem))

        if self._open and self._ucx.alive:
            request = self._ucx.tag_recv(ucx_array(buffer), self._receive_tag)
            self._worker.watch(request, ended, buffer)

    def _expect_frame(self) -> None:
        self._post(self._small, self._frame_arrived)

    def _frame_arrived(self) -> None:
        data = self._small
        head = self._opener.head(data[:HEAD_BYTES])
        if HEAD_BYTES + head.body_bytes > INLINE_BYTES:
            self._large_arrives(head)
            return
        body = bytes(data[HEAD_BYTES : HEAD_BYTES + head.body_bytes])
        if body:
            head.mac.update(body[:-TAG_BYTES])
            check_body(head.mac, body[-TAG_BYTES:])
        payload = memoryview(body)[head.header_bytes : head.header_bytes + head.payload_bytes]
        self._received(head.kind, head.call_id, body[: head.header_bytes], payload)
        self._expect_frame()

    def _large_arrives(self, head: Head) -> None:
        """Post a receive for every piece at its place; `step` runs as they come in, in order."""
        (n_pieces,) = _LENGTH.unpack_from(self._small, HEAD_BYTES)
        sizes = struct.unpack_from(f"<{n_pieces}Q", self._small, HEAD_BYTES + _LENGTH.size)
        if sum(sizes) != head.payload_bytes or 0 in sizes:
            raise ProtocolError(f"pieces of {sum(sizes)} bytes for a payload of {head.payload_bytes}")
        body = aligned_buffer(head.header_bytes, head.payload_bytes + TAG_BYTES)
        end_of_data = head.header_bytes + head.payload_bytes
        cuts = [head.header_bytes] if head.header_bytes else []
        targets = []
        start = 0
        for size in (*cuts, *sizes):
            targets.append(body[start : start + size])
            start += size

        def arrived(target: memoryview) -> None:
            head.mac.update(target)

        def finished() -> None:
            check_body(head.mac, body[end_of_data:])
            payload = body[head.header_bytes : end_of_data].toreadonly()
            self._received(head.kind, head.call_id, body[: head.header_bytes], payload)
            self._expect_frame()

        steps: list[Callable[[], None]] = [functools.partial(arrived, target) for target in targets]
        self._post_in_order([*targets, body[end_of_data:]], [*steps, finished])

    def _post_in_order(self, targets: list[memoryview], steps: list[Callable[[], None]]) -> None:
        """Post all receives at once, but run their steps in order."""
        done = [False] * len(targets)
        position = 0

        def completed(n: int) -> None:
            nonlocal position
            done[n] = True
            while position < len(done) and done[position]:
                position += 1
                steps[position - 1]()

        for n, target in enumerate(targets):
            self._post(target, functools.partial(completed, n))

    # ------------------------------------------------------------------------------ the end

    def _peer_gone(self) -> None:
        self._gone.set()
        self._lost("endpoint closed: the peer is gone")

    async def _shutdown(self) -> None:
        """Let the goodbye arrive: the peer answers it by closing. Then close."""
        try:
            async with asyncio.timeout(_FLUSH_S):
                if self._open and self._ucx.alive:
                    await self._gone.wait()
        except TimeoutError:
            pass
        finally:
            self._abandon()

    def _abandon(self) -> None:
        if self._open:
            self._open = False
            self._gone.set()
            self._drop_backlog()
            self._worker.retire(self._ucx)


def _tag(key: bytes) -> Any:
    from ucxx.types import Tag

    return Tag(int.from_bytes(hashlib.blake2b(key, person=b"mhpc ucx tag", digest_size=8).digest(), "little"))


def ucx_array(buffer: Buffer) -> Any:
    """The buffer as ucxx takes it; nothing is copied."""
    from ucxx._lib.arr import Array

    return Array(buffer)


def _large_messages(prefix: bytes, views: list[memoryview]) -> list[Buffer]:
    """Head with the sizes of the pieces, header, pieces."""
    pieces = _pieces(views)
    sizes = struct.pack(f"<H{len(pieces)}Q", len(pieces), *(piece.nbytes for piece in pieces))
    header = [prefix[HEAD_BYTES:]] if len(prefix) > HEAD_BYTES else []
    return [prefix[:HEAD_BYTES] + sizes, *header, *pieces]


def _pieces(views: list[memoryview]) -> list[memoryview]:
    """Cut large buffers; join them all when there would be too many pieces for the first message."""
    if sum(-(-view.nbytes // PIECE_BYTES) for view in views) > _MAX_PIECES // 2:
        views = [memoryview(b"".join(views))]
    total = sum(view.nbytes for view in views)
    step = max(PIECE_BYTES, total // (_MAX_PIECES // 2))
    return [view[start : start + step] for view in views for start in range(0, view.nbytes, step)]
