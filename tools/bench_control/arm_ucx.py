"""UCX through ucxx's low-level module: tag messages between workers in blocking progress mode, buffers used again.

One worker per process, one endpoint per peer. Who waits lets UCX work, and sleeps on the worker's epoll descriptor once
nothing is left to do: no core is burnt.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.bench_control.arm import DEADLINE_S, Arm
from tools.bench_control.peers import ForkedPeers, addresses, publish
from tools.bench_control.plan import Cell
from tools.bench_control.raw import ECHO, HEAD_BYTES, MAX_BYTES, Answers, request, stamped

_REQUEST_TAG = 1
_ANSWER_TAG = 1000  # plus the peer's number: the caller has one worker for all


def preload() -> None:
    """Import what peers need before they are forked."""
    import ucxx._lib.arr
    import ucxx._lib.libucxx
    import ucxx.types  # noqa: F401


class _Worker:
    """A UCX worker that is driven by whoever waits."""

    def __init__(self) -> None:
        import ucxx._lib.libucxx as api
        from ucxx._lib.arr import Array
        from ucxx.types import Tag

        self.api: Any = api
        self.array = Array
        self.tag = Tag
        features = (api.Feature.TAG, api.Feature.WAKEUP)
        self.context = api.UCXContext({}, feature_flags=features)
        self.handle = api.UCXWorker(self.context, enable_delayed_submission=False, enable_python_future=False)
        self.handle.init_blocking_progress_mode()
        self._poll = select.poll()
        self._poll.register(self.handle.epoll_file_descriptor, select.POLLIN)

    def wait(self, request: Any, deadline_s: float | None = DEADLINE_S) -> None:
        """Until one request is complete. Raises TimeoutError, or what UCX reports."""
        progress, arm = self.handle.progress, self.handle.arm
        while True:
            progress()
            if request.completed:
                request.check_error()
                return
            if arm() and not self._poll.poll(None if deadline_s is None else deadline_s * 1000):
                raise TimeoutError(f"nothing from UCX within {deadline_s:.0f} s")

    def wait_for(self, condition: Callable[[], bool], deadline_s: float) -> None:
        """Until something holds that a callback makes true."""
        end = time.monotonic() + deadline_s
        while True:
            self.handle.progress()
            if condition():
                return
            if time.monotonic() > end:
                raise TimeoutError(f"nothing from UCX within {deadline_s:.0f} s")
            if self.handle.arm():
                self._poll.poll(100)


class UcxArm(Arm):
    """Receives are posted before anything is sent."""

    def __init__(self, folder: Path, cores: list[int]) -> None:
        super().__init__(folder, cores)
        self._worker = _Worker()
        self._peers = ForkedPeers(__name__, folder / "peers.log")
        self._endpoints: list[Any] = []
        self._tag = self._worker.tag(_REQUEST_TAG)

    def start(self, n_peers: int) -> None:
        self.peer_pids = self._peers.start(n_peers, self.folder, "serve")
        for port in addresses(self.folder, n_peers):
            create = self._worker.api.UCXEndpoint.create
            self._endpoints.append(create(self._worker.handle, "127.0.0.1", int(port), True))
        self._answer_tags = [self._worker.tag(_ANSWER_TAG + peer) for peer in range(n_peers)]

    def operation(self, cell: Cell) -> Callable[[], object]:
        array, wait, tag = self._worker.array, self._worker.wait, self._tag
        message = array(request(cell))
        size = max(HEAD_BYTES, cell.result_bytes)
        if cell.calls == 1:
            answer = array(bytearray(size))
            endpoint, answer_tag = self._endpoints[0], self._answer_tags[0]

            def call() -> None:
                arrival = endpoint.tag_recv(answer, answer_tag)
                departure = endpoint.tag_send(message, tag)
                wait(arrival)
                wait(departure)

            return call
        pairs = list(zip(self._endpoints, self._answer_tags, strict=True))[: cell.peers] * cell.window
        targets = [(endpoint, answer_tag, array(bytearray(size))) for endpoint, answer_tag in pairs]

        def batch() -> None:
            pending = [endpoint.tag_recv(buffer, answer_tag) for endpoint, answer_tag, buffer in targets]
            pending += [endpoint.tag_send(message, tag) for endpoint, _, _ in targets]
            for one in pending:
                wait(one)

        return batch

    def _exchange(self, peer: int, message: bytearray, size: int) -> bytes:
        answer = bytearray(size)
        array = self._worker.array
        arrival = self._endpoints[peer].tag_recv(array(answer), self._answer_tags[peer])
        departure = self._endpoints[peer].tag_send(array(message), self._tag)
        self._worker.wait(departure)
        self._worker.wait(arrival)
        return bytes(answer)

    def echo(self, peer: int, data: bytes) -> bytes:
        message = stamped(ECHO, data)
        if self._exchange(peer, message, len(message)) != message:
            raise ValueError(f"peer {peer}: the echo arrived changed")
        return data

    def fetch(self, peer: int, n_bytes: int) -> bytes:
        size = max(HEAD_BYTES, n_bytes)
        return self._exchange(peer, stamped(size, b""), size)

    def stop(self) -> None:
        for endpoint in self._endpoints:
            endpoint.close_blocking(period=10**8, max_attempts=10)
        self._endpoints.clear()
        self._peers.stop()

    def describe(self) -> dict[str, str]:
        config = self._worker.context.config
        version = ".".join(map(str, self._worker.api.get_ucx_version()))
        return {"ucx": version, "TLS": str(config.get("TLS")), "NET_DEVICES": str(config.get("NET_DEVICES"))}

    def close(self) -> None:
        self._peers.close()


def serve(index: int, folder: Path) -> None:
    """A peer: answers one caller, until it is killed or the caller hangs up."""
    worker = _Worker()
    callers: list[Any] = []
    listener = worker.api.UCXListener.create(
        worker=worker.handle, port=0, cb_func=callers.append, cb_args=(), deliver_endpoint=True
    )
    publish(folder, index, str(listener.port))
    worker.wait_for(lambda: bool(callers), DEADLINE_S)
    endpoint = callers[0]
    answers = Answers()
    buffer = bytearray(MAX_BYTES)
    target, tag, answer_tag = worker.array(buffer), worker.tag(_REQUEST_TAG), worker.tag(_ANSWER_TAG + index)
    arrays: dict[int, Any] = {}
    while True:
        worker.wait(endpoint.tag_recv(target, tag), None)
        answer = answers.to(buffer)
        assert answer is not None
        found = worker.array(answer) if isinstance(answer, memoryview) else arrays.get(len(answer))
        if found is None:
            found = arrays[len(answer)] = worker.array(answer)
        worker.wait(endpoint.tag_send(found, answer_tag), None)
