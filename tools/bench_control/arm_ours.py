"""Ours: the same calls over any transport and with either face. Both sides use the same face; MACs are on.

A call without payload is Heartbeat answered by Ack. An argument travels with ScoreTokens and is answered by Ack; a
result is what FetchPieces is answered with. Messages are made anew for each call, as a role would.
"""

from __future__ import annotations

import asyncio
import functools
import os
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from miles_hpc.control.opening import open_blocking_transport, open_transport
from miles_hpc.core.deadline import Deadline
from miles_hpc.core.messages import Ack, FetchPieces, Heartbeat, Message, PieceBucket, ScoreTokens
from miles_hpc.core.transport import BlockingTransport, Credentials, HandlerResult, PeerIdentity, Transport
from miles_hpc.core.types import WeightVersion
from tools.bench_control.arm import DEADLINE_S, Arm
from tools.bench_control.peers import ForkedPeers, addresses, publish
from tools.bench_control.plan import Cell
from tools.bench_control.raw import pattern

_VERSION = WeightVersion(1, 0)
_ECHO = ("echo",)
_SECRET_FILE = "secret"
_SECRET_BYTES = 32


def credentials(folder: Path, role: str, rank: int) -> Credentials:
    """Those of a process of this session."""
    path = folder / _SECRET_FILE
    identity = PeerIdentity(
        role=role,
        name=f"{role}-{socket.gethostname()}-{rank}",
        host=socket.gethostname(),
        pid=os.getpid(),
        attempt=1,
        term=1,
        rank=rank,
    )
    return Credentials(path.read_bytes(), identity)


def new_session(folder: Path) -> Path:
    """Make the session's secret; returns its file."""
    path = folder / _SECRET_FILE
    path.touch(mode=0o600)
    path.write_bytes(os.urandom(_SECRET_BYTES))
    return path


class Answering:
    """The peer's handler, for both faces: a plain function that doesn't wait."""

    def __init__(self) -> None:
        self._patterns: dict[int, bytes] = {}

    def __call__(self, endpoint: object, message: Message, payload: memoryview) -> HandlerResult:
        match message:
            case Heartbeat(children=()):
                return Ack()
            case FetchPieces(first=first, last=last):
                data = self._patterns.get(last - first)
                if data is None:
                    data = self._patterns[last - first] = pattern(last - first)
                return PieceBucket(version=_VERSION, first=first, last=last), (data,)
            case Heartbeat():
                return Ack(), (bytes(payload),)
        return Ack()


def message_of(cell: Cell) -> tuple[Callable[[], Message], dict[str, Any]]:
    """What makes the message of a call, and the keywords of the call."""
    keywords: dict[str, Any] = {"deadline_s": DEADLINE_S}
    if cell.argument_bytes:
        keywords["payload"] = (pattern(cell.argument_bytes),)
        length = cell.argument_bytes // 4
        return functools.partial(ScoreTokens, n=1, length=length), keywords
    if cell.result_bytes:
        return functools.partial(FetchPieces, version=_VERSION, first=0, last=cell.result_bytes), keywords
    return Heartbeat, keywords


class _Ours(Arm):
    """What both faces share: peers are forked, except under MPI, where they are the other ranks."""

    face: str

    def __init__(self, folder: Path, cores: list[int], kind: str) -> None:
        super().__init__(folder, cores)
        self._kind = kind
        self._peers: ForkedPeers | None = None
        new_session(folder)
        self._session = folder

    def _addresses(self, n_peers: int) -> list[str]:
        if self._kind == "mpi":  # ranks 1.. have started already, and know nothing of stages
            return addresses(self._session, n_peers)
        if self._peers is None:
            self._peers = ForkedPeers(__name__, self._session / "peers.log")
        options = (self._kind, str(self._session))
        self.peer_pids = self._peers.start(n_peers, self.folder, f"serve_{self.face}", *options)
        return addresses(self.folder, n_peers)

    def close(self) -> None:
        if self._peers is not None:
            self._peers.close()


class BlockingOurs(_Ours):
    face = "blocking"
    spin_s: float | None = None  # the transport's own default
    _transport: BlockingTransport

    def start(self, n_peers: int) -> None:
        found = self._addresses(n_peers)
        self._transport = open_blocking_transport(
            self._kind, credentials(self._session, "controller", 0), spin_s=self.spin_s
        )
        self._endpoints = [self._transport.connect(address, deadline_s=DEADLINE_S) for address in found]

    def operation(self, cell: Cell) -> Callable[[], object]:
        make, keywords = message_of(cell)
        if cell.calls == 1:
            call = self._endpoints[0].call
            return lambda: call(make(), **keywords)
        begins = [endpoint.begin for endpoint in self._endpoints[: cell.peers]] * cell.window

        def batch() -> None:
            for pending in [begin(make(), **keywords) for begin in begins]:
                pending.result()

        return batch

    def echo(self, peer: int, data: bytes) -> bytes:
        reply = self._endpoints[peer].call(Heartbeat(children=_ECHO), payload=(data,), deadline_s=DEADLINE_S)
        return bytes(reply.payload)

    def fetch(self, peer: int, n_bytes: int) -> bytes:
        wanted = FetchPieces(version=_VERSION, first=0, last=n_bytes)
        return bytes(self._endpoints[peer].call(wanted, deadline_s=DEADLINE_S).payload)

    def stop(self) -> None:
        self._transport.close()
        if self._peers is not None:
            self._peers.stop()

    def describe(self) -> dict[str, str]:
        return self._transport.chosen()


class NoSpinOurs(BlockingOurs):
    """Waits sleep at once, on both sides."""

    face = "nospin"
    spin_s = 0.0


class AsyncioOurs(_Ours):
    """The loop runs while something is asked of the arm; a cell is timed inside of it."""

    face = "asyncio"

    def __init__(self, folder: Path, cores: list[int], kind: str) -> None:
        super().__init__(folder, cores, kind)
        self._runner = asyncio.Runner()
        self._local: list[Transport] = []

    def _run(self, work: Awaitable[Any]) -> Any:
        async def bounded() -> Any:
            return await work

        return self._runner.run(bounded())

    def start(self, n_peers: int) -> None:
        self._run(self._start(n_peers, [] if self._kind == "loopback" else self._addresses(n_peers)))

    async def _start(self, n_peers: int, found: list[str]) -> None:
        if self._kind == "loopback":
            self._local = [
                open_transport(self._kind, credentials(self._session, "rollout", index)) for index in range(n_peers)
            ]
            self._listeners = [await transport.listen(Answering()) for transport in self._local]
            found = [listener.address for listener in self._listeners]
        self._transport = open_transport(self._kind, credentials(self._session, "controller", 0))
        self._endpoints = [await self._transport.connect(address, deadline_s=DEADLINE_S) for address in found]

    def operation(self, cell: Cell) -> Callable[[], object]:
        raise NotImplementedError("timed inside the loop")

    def measure(self, cell: Cell) -> list[float]:
        samples: list[float] = self._run(self._measure(cell))
        return samples

    async def _measure(self, cell: Cell) -> list[float]:
        make, keywords = message_of(cell)
        if cell.calls == 1:
            call = self._endpoints[0].call

            async def operation() -> None:
                await call(make(), **keywords)

        else:
            calls = [endpoint.call for endpoint in self._endpoints[: cell.peers]] * cell.window

            async def operation() -> None:
                await asyncio.gather(*(one(make(), **keywords) for one in calls))

        await timed_async(operation, cell.warmup, cell.limit_s / 4)
        return await timed_async(operation, cell.operations, cell.limit_s)

    def echo(self, peer: int, data: bytes) -> bytes:
        wanted = Heartbeat(children=_ECHO)
        return bytes(self._run(self._endpoints[peer].call(wanted, payload=(data,), deadline_s=DEADLINE_S)).payload)

    def fetch(self, peer: int, n_bytes: int) -> bytes:
        wanted = FetchPieces(version=_VERSION, first=0, last=n_bytes)
        return bytes(self._run(self._endpoints[peer].call(wanted, deadline_s=DEADLINE_S)).payload)

    def stop(self) -> None:
        self._run(self._stop())
        if self._peers is not None:
            self._peers.stop()

    async def _stop(self) -> None:
        for endpoint in self._endpoints:
            await endpoint.close()
        if self._local:
            for listener in self._listeners:
                await listener.close()

    def describe(self) -> dict[str, str]:
        return self._transport.chosen()

    def close(self) -> None:
        super().close()
        self._runner.close()


async def timed_async(operation: Callable[[], Awaitable[None]], operations: int, limit_s: float) -> list[float]:
    """As `timed`, inside a loop."""
    clock = time.perf_counter
    samples = []
    end = clock() + limit_s
    for _ in range(operations):
        start = clock()
        await operation()
        now = clock()
        samples.append(now - start)
        if now > end:
            break
    return samples


# ------------------------------------------------------------------------------------------------ the peers' side


def preload() -> None:
    """Import what peers need before they are forked."""


def serve_nospin(index: int, folder: Path, kind: str, session: str) -> None:
    """As serve_blocking, sleeping at once."""
    serve_blocking(index, folder, kind, session, spin_s=0.0)


def serve_blocking(index: int, folder: Path, kind: str, session: str, spin_s: float | None = None) -> None:
    """A peer with the blocking face, until it is killed."""
    transport = open_blocking_transport(kind, credentials(Path(session), "rollout", index), spin_s=spin_s)
    listener = transport.listen(Answering())
    publish(folder, index, listener.address)
    transport.serve(lambda: False)


def serve_asyncio(index: int, folder: Path, kind: str, session: str) -> None:
    """A peer with the asyncio face, until it is killed."""

    async def serve() -> None:
        transport = open_transport(kind, credentials(Path(session), "rollout", index))
        listener = await transport.listen(Answering())
        publish(folder, index, listener.address)
        await asyncio.Event().wait()

    asyncio.run(serve())


def serve_rank(rank: int, folder: Path, cls: str, kind: str) -> None:
    """A peer that is an MPI rank, until it is killed."""
    deadline = Deadline(DEADLINE_S, "the session's secret")
    while not (folder / _SECRET_FILE).exists() or (folder / _SECRET_FILE).stat().st_size < _SECRET_BYTES:
        deadline.check()
        time.sleep(0.005)
    serve = serve_blocking if cls == "BlockingOurs" else serve_asyncio
    serve(rank - 1, folder, kind, str(folder))
