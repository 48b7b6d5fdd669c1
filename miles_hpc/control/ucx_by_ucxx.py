"""The ucx carrier's UCX by ucxx (tried with 0.52; needs 0.47), through its low-level module.

    progress ─▶ UCX works ─▶ the oldest send and receive of each path and inbox that has one on its way
                          ─▶ probe for any tag ─▶ inbox of that tag: received into its place  │  no inbox: into nothing
                          ─▶ paths that UCX has given up

Requests have no callbacks in this module, so they are asked; only those on their way are. Receives aren't posted: a
message that has arrived waits in UCX, is found by probing, and is received with its handle. That costs nothing for idle
peers, keeps the order, tells the length before a buffer is needed, and lets what carries an unknown tag be dropped at
once. ucxx's asyncio face isn't used, since it waits by spinning.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from typing import Any

from miles_hpc.control.ucx_api import MESSAGE_BYTES, Done, Inbox, Path, UcxApi
from miles_hpc.core.transport import Buffer

__all__ = ["UcxxApi"]

# A reference that nobody gives back by itself, neither the collector nor the interpreter's end.
_keep, _let_go = ctypes.pythonapi.Py_IncRef, ctypes.pythonapi.Py_DecRef
_keep.argtypes = _let_go.argtypes = [ctypes.py_object]
_keep.restype = _let_go.restype = None

_ARRIVALS = 256  # taken per call of progress, so that a flood leaves room for other wires


class _UcxxPath(Path):
    def __init__(self, api: UcxxApi, endpoint: Any, failed: Callable[[str], None]) -> None:
        self._api = api
        self._failed = failed
        self.endpoint = endpoint
        self.on_its_way: deque[tuple[Any, Buffer, Done]] = deque()
        self.closed = False
        self._told = False
        endpoint.set_close_callback(api.ended.append, (self,), {})
        _keep(endpoint)

    @property
    def alive(self) -> bool:
        return not self.closed and bool(self.endpoint.alive)

    @property
    def busy(self) -> bool:
        return bool(self.on_its_way)

    def send(self, tag: int, data: Buffer, done: Done) -> bool:
        api = self._api
        if self.closed or not self.endpoint.alive:
            api.ended.append(self)
            return False
        request = self.endpoint.tag_send(api.array(data), api.tag(tag))
        on_its_way = self.on_its_way
        if not on_its_way:
            if request.completed:
                return True  # with an error, perhaps: then the path has failed and tells
            api.senders[self] = None
        on_its_way.append((request, data, done))
        return False

    def reap(self) -> bool:
        """Report what has left, oldest first. Returns whether there was anything."""
        on_its_way = self.on_its_way
        worked = False
        while on_its_way and on_its_way[0][0].completed:
            done = on_its_way.popleft()[2]
            worked = True
            if not self.closed:
                done()
        if not on_its_way:
            self._api.senders.pop(self, None)
        return worked

    def end(self) -> None:
        """UCX has given it up."""
        if not self._told and not self.closed:
            self._told = True
            try:
                self.endpoint.raise_on_error()
                why = "closed"
            except Exception as error:  # UCX's errors have no common base of ours
                why = str(error).rpartition("error: ")[2] or type(error).__name__
            self._failed(f"endpoint closed: {why}")

    def handle(self) -> int:
        return int(self.endpoint.handle)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.endpoint.remove_close_callback()
            # Forced, since it handles errors. Buffers that were on their way stay until UCX has let go of them.
            self.endpoint.close_blocking(period=10**8, max_attempts=1)
            _let_go(self.endpoint)
            self.endpoint = None  # holds the worker
            self._api.unseen = True  # closing progresses


class _UcxxInbox(Inbox):
    def __init__(self, api: UcxxApi, tag: int, failed: Callable[[str], None]) -> None:
        self._api = api
        self._tag = tag
        self._failed = failed
        self._path: _UcxxPath | None = None
        self._on_message: Callable[[memoryview], None] | None = None
        self._wanted: deque[tuple[memoryview, Done]] = deque()  # pieces
        self._arrived: deque[Any] = deque()  # not begun to be received
        self._coming: deque[tuple[Any, memoryview, Done | None]] = deque()
        self._open = True
        self.ready = False  # for a small message, with nothing before it

    def attach(self, path: Path) -> None:
        assert isinstance(path, _UcxxPath)
        self._path = path
        self._settle()

    def listen(self, on_message: Callable[[memoryview], None]) -> None:
        self._on_message = on_message
        self._settle()

    def expect_piece(self, target: memoryview, done: Done) -> None:
        self._wanted.append((target, done))

    def _settle(self) -> None:
        """Whether the next message can be received at once, as nearly all are."""
        attached = self._open and self._path is not None and self._on_message is not None
        self.ready = attached and not (self._wanted or self._arrived or self._coming)
        if attached and not self.ready:
            self._api.receivers[self] = None
            self._api.unseen = True

    def small(self, probe: Any) -> None:
        """A message was found while the inbox was ready. Called by progress."""
        path, on_message = self._path, self._on_message
        assert path is not None and on_message is not None
        if probe.length > MESSAGE_BYTES:
            self._wrong_size(probe, f"at most {MESSAGE_BYTES}")
            return
        room, array = self._api.room
        request = path.endpoint.tag_recv_with_handle(array, probe)
        if request.completed:
            if self._went_well(request):
                on_message(room[: probe.length])  # what lies behind it is of an earlier message
                if self._wanted:
                    self._settle()
        else:
            self._api.new_room()  # this one is taken until the request ends
            self._coming.append((request, room[: probe.length], None))
            self._settle()

    def arrive(self, probe: Any) -> None:
        """A message was found while the inbox wasn't ready. Called by progress."""
        self._arrived.append(probe)
        self._api.receivers[self] = None

    def reap(self) -> bool:
        """Begin to receive what has arrived, report what has come, oldest first. Returns whether there was anything."""
        worked = False
        while self._open and self._path is not None and self._on_message is not None:
            if self._coming and self._coming[0][0].completed:
                request, target, done = self._coming.popleft()
                if self._went_well(request):
                    if done is None:
                        self._on_message(target)
                    else:
                        done()
            elif self._arrived and self._wanted:
                self._receive(self._arrived.popleft())
            elif self._arrived and not self._coming:
                self.small(self._arrived.popleft())
            else:
                break
            worked = True
        if not self._open:
            while self._coming and self._coming[0][0].completed:
                self._coming.popleft()
        if not (self._coming or (self._arrived and self._path is not None)):
            self._api.receivers.pop(self, None)
            self._settle()
        return worked

    def _receive(self, probe: Any) -> None:
        """Begin to receive a piece."""
        assert self._path is not None
        target, done = self._wanted.popleft()
        if probe.length != target.nbytes:
            self._wrong_size(probe, str(target.nbytes))
            return
        request = self._path.endpoint.tag_recv_with_handle(self._api.array(target), probe)
        self._coming.append((request, target, done))

    def _went_well(self, request: Any) -> bool:
        try:
            request.check_error()
        except Exception as error:  # UCX's errors have no common base of ours
            if self._path is not None and self._path.alive:
                self._fail(f"endpoint closed: {error}")
            return False  # else the path tells
        return True

    def _wrong_size(self, probe: Any, expected: str) -> None:
        self._api.discard(probe)
        self._fail(f"protocol error: message of {probe.length} bytes, expected {expected}")

    def _fail(self, reason: str) -> None:
        if self._open:
            self.close()
            self._failed(reason)

    def close(self) -> None:
        if self._open:
            self._open = self.ready = False
            self._api.inboxes.pop(self._tag, None)
            self._wanted.clear()
            while self._arrived:
                self._api.discard(self._arrived.popleft())


class UcxxApi(UcxApi):
    """By ucxx's low-level module."""

    def __init__(self, module: Any) -> None:
        from ucxx import __version__
        from ucxx._lib.arr import Array
        from ucxx.types import Tag, TagMask

        self.package = f"ucxx {__version__}"
        self.array = Array
        self.tag = Tag
        self._module = module
        self._any, self._no_mask = Tag(0), TagMask(0)
        self._context = module.UCXContext({}, feature_flags=(module.Feature.TAG, module.Feature.WAKEUP))
        self._worker = module.UCXWorker(self._context, enable_delayed_submission=False, enable_python_future=False)
        self._worker.init_blocking_progress_mode()
        for lasting in (self._context, self._worker):  # the interpreter's end would destroy them
            _keep(lasting)
        self.fd = self._worker.epoll_file_descriptor
        self.address = self._worker.address.tobytes()
        self.unseen = False  # something may be there that `arm` doesn't know of
        self.ended: deque[_UcxxPath] = deque()
        self.senders: dict[_UcxxPath, None] = {}  # with something on its way
        self.receivers: dict[_UcxxInbox, None] = {}
        self.inboxes: dict[int, _UcxxInbox] = {}
        self._dropping: deque[tuple[Any, Any]] = deque()
        self._nothing = Array(bytearray(1))
        self.new_room()

    def new_room(self) -> None:
        """Where small messages arrive; the former one is in use."""
        room = memoryview(bytearray(MESSAGE_BYTES))
        self.room = room, self.array(room)

    def connect(self, address: bytes, failed: Callable[[str], None]) -> Path:
        module = self._module
        try:
            where = module.UCXAddress.create_from_buffer(bytearray(address))
            # With error handling: without it a dead peer's endpoint never ends, and closing one may wait for ever.
            endpoint = module.UCXEndpoint.create_from_worker_address(self._worker, where, True)
        except Exception as error:
            raise ConnectionError(str(error)) from error
        return _UcxxPath(self, endpoint, failed)

    def inbox(self, tag: int, failed: Callable[[str], None]) -> Inbox:
        inbox = self.inboxes[tag] = _UcxxInbox(self, tag, failed)
        return inbox

    def progress(self) -> bool:
        worker = self._worker
        worker.progress()
        self.unseen = worked = False
        probe_for, anything, no_mask, inboxes = worker.tag_probe, self._any, self._no_mask, self.inboxes
        if self.senders:
            for path in list(self.senders):
                worked = path.reap() or worked
        if self.receivers:
            for inbox in list(self.receivers):
                worked = inbox.reap() or worked
        for _ in range(_ARRIVALS):
            probe = probe_for(anything, no_mask, True)
            if not probe.matched:
                break
            worked = True
            found = inboxes.get(probe.sender_tag.value)
            if found is None:
                self.discard(probe)
            elif found.ready:
                found.small(probe)
            else:
                found.arrive(probe)
                found.reap()
        else:
            self.unseen = True
        while self.ended:  # after what they sent before
            self.ended.popleft().end()
            worked = True
        while self._dropping and self._dropping[0][0].completed:
            self._dropping.popleft()
        return worked

    def discard(self, probe: Any) -> None:
        """Receive it into nothing: a large one is refused without being transferred."""
        request = self._worker.tag_recv_with_handle(self._nothing, probe)
        if not request.completed:
            self._dropping.append((request, probe))

    def arm(self) -> bool:
        return not (self.unseen or self.ended) and bool(self._worker.arm())

    def version(self) -> str:
        return ".".join(map(str, self._module.get_ucx_version()))

    def settings(self) -> dict[str, str]:
        return dict(self._context.config)

    def context_info(self) -> str:
        return str(self._context.info)

    def close(self) -> None:
        for _ in range(100):  # let what was cancelled go
            if not (self.senders or self.receivers or self._dropping):
                break
            self.progress()
        self.senders.clear()
        self.receivers.clear()
        self._dropping.clear()
        self.ended.clear()
        for lasting in (self._worker, self._context):
            _let_go(lasting)
        del self._worker, self._context, lasting  # ends them: nothing else refers to them
