"""ZeroMQ through pyzmq: REQ/REP where one call is in flight per peer, DEALER/ROUTER where more are.

Messages of 64 KiB and more are sent and received without a copy in Python (copy=False).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.bench_control.arm import DEADLINE_S, Arm
from tools.bench_control.peers import ForkedPeers, addresses, publish
from tools.bench_control.plan import Cell
from tools.bench_control.raw import ECHO, HEAD_BYTES, Answers, request, stamped

_ZERO_COPY_BYTES = 64 << 10


def preload() -> None:
    """Import what peers need before they are forked."""
    import zmq  # noqa: F401


class ZmqArm(Arm):
    """REP peers have the even numbers, ROUTER peers the odd ones."""

    def __init__(self, folder: Path, cores: list[int], transport: str) -> None:
        import zmq

        super().__init__(folder, cores)
        self._transport = transport
        self._zmq: Any = zmq
        self._context = zmq.Context()
        self._peers = ForkedPeers(__name__, folder / "peers.log")
        self._requests: list[Any] = []
        self._dealers: list[Any] = []

    def start(self, n_peers: int) -> None:
        self.peer_pids = self._peers.start(2 * n_peers, self.folder, "serve", self._transport)
        for index, address in enumerate(addresses(self.folder, 2 * n_peers)):
            socket = self._context.socket(self._zmq.DEALER if index % 2 else self._zmq.REQ)
            socket.linger = 0
            socket.rcvtimeo = socket.sndtimeo = int(DEADLINE_S * 1000)
            socket.connect(address)
            (self._dealers if index % 2 else self._requests).append(socket)

    def operation(self, cell: Cell) -> Callable[[], object]:
        message = request(cell)
        copy = len(message) < _ZERO_COPY_BYTES
        copy_back = cell.result_bytes < _ZERO_COPY_BYTES
        if cell.calls == 1:
            send, receive = self._requests[0].send, self._requests[0].recv

            def call() -> None:
                send(message, copy=copy)
                receive(copy=copy_back)

            return call
        if cell.window == 1:
            sockets = self._requests[: cell.peers]

            def a_round() -> None:
                for socket in sockets:
                    socket.send(message, copy=copy)
                for socket in sockets:
                    socket.recv(copy=copy_back)

            return a_round
        dealers = self._dealers[: cell.peers]
        window = range(cell.window)

        def batch() -> None:
            for _ in window:
                for socket in dealers:
                    socket.send(message, copy=copy)
            for socket in dealers:
                for _ in window:
                    socket.recv(copy=copy_back)

        return batch

    def echo(self, peer: int, data: bytes) -> bytes:
        answers = []
        for socket in (self._requests[peer], self._dealers[peer]):
            socket.send(stamped(ECHO, data))
            answers.append(socket.recv())
        if answers[0] != answers[1] or answers[0] != stamped(ECHO, data):
            raise ValueError(f"peer {peer}: the echo arrived changed")
        return data

    def fetch(self, peer: int, n_bytes: int) -> bytes:
        self._requests[peer].send(stamped(max(HEAD_BYTES, n_bytes), b""))
        return bytes(self._requests[peer].recv())

    def stop(self) -> None:
        for socket in (*self._requests, *self._dealers):
            socket.close()
        self._requests.clear()
        self._dealers.clear()
        self._peers.stop()

    def describe(self) -> dict[str, str]:
        return {"libzmq": self._zmq.zmq_version(), "pyzmq": self._zmq.pyzmq_version(), "transport": self._transport}

    def close(self) -> None:
        self._peers.close()


def serve(index: int, folder: Path, transport: str) -> None:
    """A peer: REP or ROUTER, until it is killed."""
    import zmq

    context = zmq.Context()
    routed = bool(index % 2)
    socket = context.socket(zmq.ROUTER if routed else zmq.REP)
    socket.bind("tcp://127.0.0.1:*" if transport == "tcp" else f"ipc://{folder}/{index}.ipc")
    publish(folder, index, socket.last_endpoint.decode())
    answers = Answers()
    if not routed:
        while True:
            answer = answers.to(socket.recv(copy=False).buffer)
            assert answer is not None
            socket.send(answer, copy=len(answer) < _ZERO_COPY_BYTES)
    while True:
        identity, message = socket.recv_multipart(copy=False)
        answer = answers.to(message.buffer)
        assert answer is not None
        socket.send(identity, zmq.SNDMORE)
        socket.send(answer, copy=len(answer) < _ZERO_COPY_BYTES)
