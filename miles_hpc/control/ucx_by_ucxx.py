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

#: By default UCX waits inside connect(2) for a host that doesn't answer, and everything of this process with it.
_SETTINGS = {"TCP_CONN_NB": "y"}
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
        self._wanted: deque[tuple[memoryview | None, Callable[..., None]]] = deque()
        self._arrived: deque[Any] = deque()  # not wanted yet
        self._coming: deque[tuple[Any, memoryview | None, Callable[..., None]]] = deque()
        self._open = True

    def attach(self, path: Path) -> None:
        assert isinstance(path, _UcxxPath)
        self._path = path
        self._look()

    def expect_message(self, done: Callable[[memoryview], None]) -> None:
        self._wanted.append((None, done))
        self._look()

    def expect_piece(self, target: memoryview, done: Done) -> None:
        self._wanted.append((target, done))
        self._look()

    def _look(self) -> None:
        if self._arrived:  # what is here already is for the next progress
            self._api.receivers[self] = None
            self._api.unseen = True

    def arrive(self, probe: Any) -> None:
        """A message was found. Called by progress."""
        if not self._wanted or self._arrived or self._path is None:
            self._arrived.append(probe)
        else:
            self._receive(probe)

    def reap(self) -> bool:
        """Report what has come, oldest first, and begin what has arrived. Returns whether there was anything."""
        coming = self._coming
        worked = False
        while True:
            while coming and coming[0][0].completed:
                self._complete(*coming.popleft())
                worked = True
            if not (self._arrived and self._wanted and self._path is not None):
                break
            self._receive(self._arrived.popleft())
            worked = True
        if not coming:
            self._api.receivers.pop(self, None)
        return worked

    def _receive(self, probe: Any) -> None:
        path, api = self._path, self._api
        assert path is not None
        target, done = self._wanted.popleft()
        n = probe.length
        limit = MESSAGE_BYTES if target is None else target.nbytes
        if n > limit or (target is not None and n < limit):
            api.discard(probe)
            self._fail(f"protocol error: message of {n} bytes, expected {'at most ' if target is None else ''}{limit}")
            return
        if target is None:
            room, array = api.room
            request = path.endpoint.tag_recv_with_handle(array, probe)
            if request.completed and not self._coming:
                self._complete(request, None, done)
                return
            api.new_room()  # this one is taken until the request ends
            self._coming.append((request, room, lambda: done(room)))
        else:
            request = path.endpoint.tag_recv_with_handle(api.array(target), probe)
            if request.completed and not self._coming:
                self._complete(request, target, done)
                return
            self._coming.append((request, target, done))
        api.receivers[self] = None

    def _complete(self, request: Any, target: memoryview | None, done: Callable[..., None]) -> None:
        if not self._open:
            return
        try:
            request.check_error()
        except Exception as error:
            if self._path is not None and self._path.alive:
                self._fail(f"endpoint closed: {error}")
            return  # else the path tells
        if target is None:
            done(self._api.room[0])
        else:
            done()

    def _fail(self, reason: str) -> None:
        if self._open:
            self.close()
            self._failed(reason)

    def close(self) -> None:
        if self._open:
            self._open = False
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
        self._context = module.UCXContext(_SETTINGS, feature_flags=(module.Feature.TAG, module.Feature.WAKEUP))
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
            endpoint = module.UCXEndpoint.create_from_worker_address(self._worker, where, False)
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
        probe_for, anything, no_mask = worker.tag_probe, self._any, self._no_mask
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
            known = self.inboxes.get(probe.sender_tag.value)
            if known is None:
                self.discard(probe)
            else:
                known.arrive(probe)
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
