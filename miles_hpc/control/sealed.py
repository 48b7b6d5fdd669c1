"""Endpoints whose frames carry MACs: sealing in order, with large payloads hashed beside the event loop.

    _send ─┬─ below THREADED_BYTES ─▶ sealed here ─▶ _transmit_whole
           └─ above ─▶ _transmit_start at once, MAC in a thread meanwhile ─▶ _transmit_tag ─▶ backlog
                       (frames that come up in between wait in the backlog: their order is part of the MAC)

So a payload of gigabytes neither blocks the loop nor waits for its own MAC before the first byte leaves.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections import deque
from collections.abc import Sequence

from miles_hpc.control.auth import SessionKeys
from miles_hpc.control.calls import CallEndpoint
from miles_hpc.control.frames import TAG_BYTES, BodyMac, Frame, Limits, Opener, Sealer, byte_views, check_sizes
from miles_hpc.core.errors import MilesError
from miles_hpc.core.transport import Buffer, Handler

__all__ = ["SealedEndpoint"]

#: Payloads from this size on are hashed in a thread.
THREADED_BYTES = 1 << 20

_Waiting = tuple[Frame, int, bytes, Sequence[Buffer], asyncio.Future[None]]


class SealedEndpoint(CallEndpoint):
    """An endpoint after the handshake, over a wire that isn't trusted."""

    def __init__(self, keys: SessionKeys, handler: Handler | None, limits: Limits, *, dialer: bool) -> None:
        super().__init__(keys.peer, handler, dialer=dialer)
        self._limits = limits
        self._sealer = Sealer(keys.send_key, limits)
        self._opener = Opener(keys.receive_key, limits)
        self._hashing = False
        self._backlog: deque[_Waiting] = deque()

    # ------------------------------------------------------------------------------ for subclasses

    @abstractmethod
    def _transmit_whole(
        self, kind: Frame, call_id: int, header: bytes, views: list[memoryview], n_bytes: int
    ) -> asyncio.Future[None] | None:
        """Seal one frame and queue it. Returns None when it is handed over already, else a future for that."""

    @abstractmethod
    def _transmit_start(self, prefix: bytes, views: list[memoryview]) -> None:
        """Queue a large frame but for its body MAC. `prefix` is head, head MAC and header."""

    @abstractmethod
    def _transmit_tag(self, tag: bytes) -> asyncio.Future[None] | None:
        """Queue the body MAC that ends the large frame."""

    @property
    @abstractmethod
    def _connected(self) -> bool:
        """Whether frames can still be queued."""

    # ------------------------------------------------------------------------------ sending

    def _send(
        self, kind: Frame, call_id: int, header: bytes, payload: Sequence[Buffer] = ()
    ) -> asyncio.Future[None] | None:
        if not self._connected:
            raise self._peer_lost()
        views, n_bytes = byte_views(payload)
        if self._hashing:
            check_sizes(self._limits, len(header), n_bytes)
            waiting = self._promise()
            self._backlog.append((kind, call_id, header, views, waiting))
            return waiting
        if n_bytes < THREADED_BYTES:
            return self._transmit_whole(kind, call_id, header, views, n_bytes)
        prefix, mac = self._sealer.begin(kind, call_id, header, n_bytes)
        self._hashing = True
        self._transmit_start(prefix, views)
        handed_over = self._promise()
        self._keep(self._loop.create_task(self._finish(mac, views, handed_over)))
        return handed_over

    async def _finish(self, mac: BodyMac, views: list[memoryview], handed_over: asyncio.Future[None]) -> None:
        tag = await self._loop.run_in_executor(None, _body_tag, mac, views)
        self._hashing = False
        if not self._connected:
            self._drop_backlog(handed_over)
            return
        _follow(self._transmit_tag(tag), handed_over)
        while self._backlog and not self._hashing:
            kind, call_id, header, payload, waiting = self._backlog.popleft()
            try:
                _follow(self._send(kind, call_id, header, payload), waiting)
            except MilesError as error:
                if not waiting.done():
                    waiting.set_exception(error)

    def _drop_backlog(self, *others: asyncio.Future[None]) -> None:
        """The connection is gone: nothing that waits will be sent."""
        for future in (*others, *(waiting for *_, waiting in self._backlog)):
            if not future.done():
                future.set_exception(self._peer_lost())
        self._backlog.clear()

    def _promise(self) -> asyncio.Future[None]:
        """A future that may be forgotten: who cares for its error awaits it, all others learn of it by the loss."""
        future: asyncio.Future[None] = self._loop.create_future()
        future.add_done_callback(_mark_retrieved)
        return future


def _body_tag(mac: BodyMac, views: list[memoryview]) -> bytes:
    for view in views:
        mac.update(view)  # lets other threads run meanwhile
    return mac.digest()[:TAG_BYTES]


def _follow(source: asyncio.Future[None] | None, target: asyncio.Future[None]) -> None:
    """Let `target` end as `source` does."""

    def copy(done: asyncio.Future[None]) -> None:
        if target.done() or done.cancelled():
            return
        error = done.exception()
        if error is None:
            target.set_result(None)
        else:
            target.set_exception(error)

    if source is not None:
        source.add_done_callback(copy)
    elif not target.done():
        target.set_result(None)


def _mark_retrieved(future: asyncio.Future[None]) -> None:
    if not future.cancelled():
        future.exception()
