"""The ucx carrier's UCX by ucx-py, for sites that have it: its low-level module `ucp._libs.ucx_api` as of 0.45.

    callbacks of UCX ─▶ events ─▶ run by progress, outside UCX, where progress may not be called

Never run against the real package, which the package index that we used can't install. Written from ucx-py's sources
and tested against `tests/fakes/ucp.py`, a stand-in that records calls and moves bytes within a process. What differs
from ucxx: a receive is posted for each message that is expected, so an inbox has a buffer of its own; messages with
unknown tags stay in UCX until the worker ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from miles_hpc.control.ucx_api import MESSAGE_BYTES, Done, Inbox, Path, UcxApi
from miles_hpc.core.transport import Buffer

__all__ = ["UcpApi"]


class _UcpPath(Path):
    def __init__(self, api: UcpApi, endpoint: Any, failed: Callable[[str], None]) -> None:
        self._api = api
        self._failed = failed
        self.endpoint = endpoint
        self._closed = False
        self._n_on_its_way = 0
        endpoint.set_close_callback(lambda: api.events.append(self._end))

    @property
    def alive(self) -> bool:
        return not self._closed and bool(self.endpoint.is_alive())

    @property
    def busy(self) -> bool:
        return self._n_on_its_way > 0

    def send(self, tag: int, data: Buffer, done: Done) -> bool:
        api = self._api
        if not self.alive:
            api.events.append(self._end)
            return False

        pending = False

        def sent(request: Any, error: Exception | None) -> None:  # inside UCX, or inside tag_send_nb
            api.pinned.pop(number, None)
            if pending:
                self._n_on_its_way -= 1
                if error is None:
                    api.events.append(done)

        array = api.array(data)
        number = api.pin(array)
        request = api.module.tag_send_nb(self.endpoint, array, array.nbytes, tag, cb_func=sent)
        if request is None:
            api.pinned.pop(number, None)
            return True
        pending = True
        self._n_on_its_way += 1
        return False

    def _end(self) -> None:
        if not self._closed:
            failed, self._failed = self._failed, lambda _: None
            failed("endpoint closed: UCX reports that the peer is gone")

    def handle(self) -> int:
        return int(self.endpoint.handle)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.endpoint.set_close_callback(None)
            self.endpoint.close()


class _UcpInbox(Inbox):
    """One receive is posted for each message that is expected: a small one, or the pieces that were announced."""

    def __init__(self, api: UcpApi, tag: int, failed: Callable[[str], None]) -> None:
        self._api = api
        self._tag = tag
        self._failed = failed
        self._path: _UcpPath | None = None
        self._on_message: Callable[[memoryview], None] | None = None
        self._room = memoryview(bytearray(MESSAGE_BYTES))
        self._n_posted = 0
        self._open = True

    def attach(self, path: Path) -> None:
        assert isinstance(path, _UcpPath)
        self._path = path
        self._post_next()

    def listen(self, on_message: Callable[[memoryview], None]) -> None:
        self._on_message = on_message
        self._post_next()

    def expect_piece(self, target: memoryview, done: Done) -> None:
        self._post(target, done, False)

    def _post_next(self) -> None:
        """For the next small message, unless pieces are expected before it."""
        on_message = self._on_message
        if self._open and self._path is not None and on_message is not None and not self._n_posted:
            self._post(self._room, lambda: on_message(self._room), True)

    def _post(self, target: memoryview, done: Done, shorter: bool) -> None:
        api, path = self._api, self._path
        assert path is not None
        self._n_posted += 1
        array = api.array(target)
        number = api.pin(array)
        told = False

        def received(request: Any, error: Exception | None) -> None:  # inside UCX, or inside tag_recv_nb
            nonlocal told
            told = True
            api.pinned.pop(number, None)
            # A message shorter than its buffer has arrived whole, and ucx-py calls that an error too.
            if shorter and isinstance(error, api.shorter):
                error = None
            api.events.append(lambda: self._complete(target, done, shorter, error))

        try:
            request = api.module.tag_recv_nb(
                api.worker, array, array.nbytes, self._tag, cb_func=received, ep=path.endpoint
            )
        except Exception as error:  # it had arrived before; ucx-py's errors have no common base of ours
            received(None, error)
            return
        if request is None and not told:
            received(None, None)

    def _complete(self, target: memoryview, done: Done, shorter: bool, error: Exception | None) -> None:
        self._n_posted -= 1
        if not self._open:
            return
        if error is None:
            done()
            self._post_next()
        elif self._path is None or not self._path.alive:
            return  # the path tells
        elif isinstance(error, self._api.cancelled):  # with the path that it was posted for
            self._post(target, done, shorter)
        else:
            self._open = False
            self._failed(f"protocol error: {error}")

    def close(self) -> None:
        self._open = False


class UcpApi(UcxApi):
    """By ucx-py's low-level module `ucp._libs.ucx_api`."""

    def __init__(self, module: Any) -> None:
        from ucp import __version__
        from ucp._libs.arr import Array
        from ucp.exceptions import UCXCanceled, UCXMsgTruncated

        self.package = f"ucx-py {__version__}"
        self.array = Array
        self.shorter, self.cancelled = UCXMsgTruncated, UCXCanceled
        self.module = module
        self.context = module.UCXContext(feature_flags=(module.Feature.TAG, module.Feature.WAKEUP))
        self.worker = module.UCXWorker(self.context)
        self.fd = self.worker.init_blocking_progress_mode()
        self.address = bytes(self.worker.get_address())
        self.events: deque[Callable[[], None]] = deque()  # of UCX's callbacks, to be run outside them
        self.pinned: dict[int, Any] = {}  # buffers in UCX's hands
        self._next = 0

    def pin(self, array: Any) -> int:
        """Keep a buffer until its callback."""
        self._next += 1
        self.pinned[self._next] = array
        return self._next

    def connect(self, address: bytes, failed: Callable[[str], None]) -> Path:
        try:
            where = self.module.UCXAddress.from_buffer(address)
            endpoint = self.module.UCXEndpoint.create_from_worker_address(
                self.worker, where, endpoint_error_handling=True
            )
        except Exception as error:
            raise ConnectionError(str(error)) from error
        return _UcpPath(self, endpoint, failed)

    def inbox(self, tag: int, failed: Callable[[str], None]) -> Inbox:
        return _UcpInbox(self, tag, failed)

    def progress(self) -> bool:
        self.worker.progress()
        self.worker.cancel_inflight_messages()  # those of endpoints that have failed
        n = len(self.events)
        for _ in range(n):
            self.events.popleft()()
        return n > 0

    def arm(self) -> bool:
        return not self.events and bool(self.worker.arm())

    def version(self) -> str:
        return ".".join(map(str, self.module.get_ucx_version()))

    def settings(self) -> dict[str, str]:
        return dict(self.context.get_config())

    def context_info(self) -> str:
        return str(self.context.info())

    def close(self) -> None:
        self.worker.close()
        self.context.close()
