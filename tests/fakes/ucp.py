"""A stand-in for ucx-py's low-level modules, as of 0.45, that records calls and moves bytes within one process.

`install(monkeypatch)` makes `ucp`, `ucp._libs.ucx_api`, `ucp._libs.arr` and `ucp.exceptions` importable. Names,
arguments and completion follow ucx-py's sources: a send of less than RNDV_BYTES completes at once and returns None
without a callback; a larger one completes when its receiver takes it. A receive whose message has arrived calls back
before it returns None; one shorter than its buffer fails with UCXMsgTruncated. What the real package forbids (progress
inside a callback, sending on a failed endpoint, a receive into read-only memory) fails here.
"""

from __future__ import annotations

import enum
import itertools
import os
import sys
import types
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

__all__ = ["RNDV_BYTES", "install", "kill", "modules"]

RNDV_BYTES = 8192

_numbers = itertools.count(1)
_workers: dict[bytes, UCXWorker] = {}
#: Names of the functions and methods that were called, in order.
calls: list[str] = []


class UCXError(Exception):
    pass


class UCXCanceled(UCXError):
    pass


class UCXMsgTruncated(UCXError):
    pass


class Array:
    """As ucp._libs.arr.Array: a view of a buffer."""

    def __init__(self, obj: Any) -> None:
        self.view = memoryview(obj)
        self.nbytes = self.view.nbytes
        self.readonly = self.view.readonly


class Feature(enum.Enum):
    TAG = 1
    RMA = 2
    WAKEUP = 16
    STREAM = 32
    AM = 64


class UCXContext:
    def __init__(self, config_dict: Any = None, feature_flags: Any = ()) -> None:
        assert Feature.TAG in feature_flags and Feature.WAKEUP in feature_flags

    def get_config(self) -> dict[str, str]:
        return {"TLS": "all", "NET_DEVICES": "all"}

    def info(self) -> str:
        return "#      resource 0  :  md 0  dev 0  flags -- fake/memory\n"

    def close(self) -> None:
        calls.append("UCXContext.close")


class UCXAddress:
    def __init__(self, data: bytes) -> None:
        self.data = data

    @classmethod
    def from_buffer(cls, buffer: Any) -> UCXAddress:
        return cls(bytes(buffer))

    def __bytes__(self) -> bytes:
        return self.data


class UCXRequest:
    """A receive that waits, or a send that isn't taken yet."""

    def __init__(self, array: Array, nbytes: int, tag: int, callback: Callable[..., None], ep: Any) -> None:
        self.array, self.nbytes, self.tag, self.callback, self.ep = array, nbytes, tag, callback, ep


class UCXWorker:
    def __init__(self, context: UCXContext) -> None:
        self.address = f"fake worker {next(_numbers)}".encode()
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.endpoints: list[UCXEndpoint] = []
        self.waiting: list[UCXRequest] = []
        self.arrived: deque[tuple[int, bytes | UCXRequest]] = deque()
        self.due: deque[Callable[[], None]] = deque()
        self.to_cancel: list[UCXRequest] = []
        self.inside = False
        self.closed = False
        _workers[self.address] = self

    def init_blocking_progress_mode(self) -> int:
        return self.fd

    def get_address(self) -> UCXAddress:
        return UCXAddress(self.address)

    def arm(self) -> bool:
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            pass
        return not self.due

    def progress(self) -> None:
        assert not self.inside, "progress inside a callback"
        self.inside = True
        try:
            while self.due:
                self.due.popleft()()
        finally:
            self.inside = False

    def cancel_inflight_messages(self) -> int:
        requests, self.to_cancel = self.to_cancel, []
        for request in requests:
            if request in self.waiting:
                self.waiting.remove(request)
            request.callback(request, UCXCanceled("<tag_recv_nb>: "))
        return len(requests)

    def close(self) -> None:
        calls.append("UCXWorker.close")
        if not self.closed:
            self.closed = True
            for endpoint in list(self.endpoints):
                endpoint.close()
            del _workers[self.address]
            os.close(self.fd)

    # For the fake only.

    def soon(self, callback: Callable[[], None]) -> None:
        """Something for the next progress."""
        self.due.append(callback)
        os.eventfd_write(self.fd, 1)

    def take(self, tag: int, message: bytes | UCXRequest) -> None:
        """A message comes in."""
        for request in self.waiting:
            if request.tag == tag:
                self.waiting.remove(request)
                error = _fill(request, message)
                request.callback(request, error)
                return
        self.arrived.append((tag, message))


class UCXEndpoint:
    def __init__(self, worker: UCXWorker, peer: bytes) -> None:
        self.worker, self.peer = worker, peer
        self.alive = True
        self.closed = False
        self.on_close: Callable[[], None] | None = None
        worker.endpoints.append(self)

    @classmethod
    def create_from_worker_address(
        cls, worker: UCXWorker, address: UCXAddress, endpoint_error_handling: bool
    ) -> UCXEndpoint:
        assert endpoint_error_handling
        if address.data not in _workers:
            raise UCXError("Destination is unreachable")
        return cls(worker, address.data)

    @property
    def handle(self) -> int:
        return 0  # none that could be asked

    def is_alive(self) -> bool:
        return self.alive

    def set_close_callback(self, cb_func: Callable[[], None] | None) -> None:
        self.on_close = cb_func

    def close(self) -> None:
        calls.append("UCXEndpoint.close")
        if not self.closed:
            self.closed = True
            self.worker.endpoints.remove(self)

    def fail(self) -> None:
        """For the fake only: the peer is gone."""
        if self.alive:
            self.alive = False
            self.worker.to_cancel += [request for request in self.worker.waiting if request.ep is self]
            if self.on_close is not None:
                self.on_close()


def tag_send_nb(
    ep: UCXEndpoint,
    buffer: Array,
    nbytes: int,
    tag: int,
    cb_func: Callable[..., None],
    cb_args: tuple[Any, ...] | None = None,
    cb_kwargs: dict[str, Any] | None = None,
    name: str | None = None,
) -> UCXRequest | None:
    calls.append("tag_send_nb")
    assert ep.alive and not ep.closed, "UCX would spin for ever"
    peer = _workers.get(ep.peer)
    if nbytes < RNDV_BYTES:
        data = bytes(buffer.view[:nbytes])
        if peer is not None:
            peer.soon(lambda: peer.take(tag, data))
        return None
    request = UCXRequest(buffer, nbytes, tag, cb_func, ep)
    if peer is not None:
        peer.soon(lambda: peer.take(tag, request))
    return request


def tag_recv_nb(
    worker: UCXWorker,
    buffer: Array,
    nbytes: int,
    tag: int,
    cb_func: Callable[..., None],
    tag_mask: int = -1,
    cb_args: tuple[Any, ...] | None = None,
    cb_kwargs: dict[str, Any] | None = None,
    name: str | None = None,
    ep: UCXEndpoint | None = None,
) -> UCXRequest | None:
    calls.append("tag_recv_nb")
    assert not buffer.readonly, "writing to readonly buffer!"
    request = UCXRequest(buffer, nbytes, tag, cb_func, ep)
    for n, (there, message) in enumerate(worker.arrived):
        if there == tag:
            del worker.arrived[n]
            error = _fill(request, message)
            if error is not None:
                raise error
            cb_func(request, None)
            return None
    worker.waiting.append(request)
    return request


def _fill(request: UCXRequest, message: bytes | UCXRequest) -> UCXError | None:
    """Copy a message to where it's received; its sender learns of that when it progresses."""
    data = message if isinstance(message, bytes) else bytes(message.array.view[: message.nbytes])
    if isinstance(message, UCXRequest):
        sent = message
        sent.ep.worker.soon(lambda: sent.callback(sent, None))
    if len(data) > request.nbytes:
        return UCXError("<tag_recv_nb>: Message truncated")
    request.array.view.cast("B")[: len(data)] = data
    if len(data) < request.nbytes:
        return UCXMsgTruncated(f"<tag_recv_nb>: length mismatch: {len(data)} (got) != {request.nbytes} (expected)")
    return None


def kill(address: bytes) -> None:
    """A worker's process dies: endpoints to it fail."""
    _workers.pop(address)
    for worker in _workers.values():
        for endpoint in list(worker.endpoints):
            if endpoint.peer == address:
                worker.soon(endpoint.fail)


def modules() -> dict[str, types.ModuleType]:
    """The modules by name."""
    package, libs = types.ModuleType("ucp"), types.ModuleType("ucp._libs")
    api, arr, exceptions = (types.ModuleType(name) for name in ("ucp._libs.ucx_api", "ucp._libs.arr", "ucp.exceptions"))
    package.__version__ = "0.45.fake"  # type: ignore[attr-defined]
    libs.ucx_api = api  # type: ignore[attr-defined]
    arr.Array = Array  # type: ignore[attr-defined]
    exceptions.UCXMsgTruncated = UCXMsgTruncated  # type: ignore[attr-defined]
    exceptions.UCXCanceled = UCXCanceled  # type: ignore[attr-defined]
    for thing in (Feature, UCXAddress, UCXContext, UCXEndpoint, UCXWorker, tag_recv_nb, tag_send_nb):
        setattr(api, thing.__name__, thing)
    api.get_ucx_version = lambda: (1, 18, 0)  # type: ignore[attr-defined]
    return {"ucp": package, "ucp._libs": libs, api.__name__: api, arr.__name__: arr, exceptions.__name__: exceptions}


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the fake the process's only UCX package."""
    calls.clear()
    for name, module in modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("ucxx", "ucxx._lib", "ucxx._lib.libucxx"):
        monkeypatch.setitem(sys.modules, name, None)
