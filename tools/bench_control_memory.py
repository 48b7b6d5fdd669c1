"""What connected peers cost an idle controller: memory, processor time, descriptors, and the time to let them in.

    python -m tools.bench_control_memory [--peers 512] [--kinds tcp,loopback] [--quick] [--json]

    controller process (measured)  ◀── heartbeat of each peer, once a second ──  2 processes with half of the peers each

Each kind of transport is measured with either face at the controller; peers have the asyncio face. They all connect at
once. Under loopback the peers live in a thread of the controller's process, so the figures hold both ends.
Memory is the resident set, after a collection of garbage; the kernel's socket buffers aren't in it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from miles_hpc.control.auth import load_secret, new_secret
from miles_hpc.control.opening import open_blocking_transport, open_transport
from miles_hpc.core.messages import Heartbeat, Message
from miles_hpc.core.transport import Credentials, Endpoint, PeerIdentity

_FACES = ("asyncio", "blocking")
_N_PROCESSES = 2
_HEARTBEAT_S = 1.0
_WINDOW_S = 10.0
_DEADLINE_S = 120.0


def _credentials(name: str, secret: Path) -> Credentials:
    identity = PeerIdentity(role="rollout", name=name, host="host", pid=os.getpid(), attempt=1, term=1)
    return Credentials(load_secret(secret), identity)


# ------------------------------------------------------------------------------------------------ the peers


class _Peers:
    """Many endpoints in one loop, which all call once per heartbeat interval while `beating` is set.

    Each has a transport of its own, hence a UCX worker: to the controller they look like as many processes.
    """

    def __init__(self, kind: str, address: str, secret: Path, first: int, n: int) -> None:
        self.beating = asyncio.Event()
        self._address = address
        self._transports = [open_transport(kind, _credentials(f"peer-{first + i}", secret)) for i in range(n)]
        for transport in self._transports:
            transport.chosen()  # opens it
        self._endpoints: list[Endpoint] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def join(self) -> None:
        """Connect all of them at once."""
        connecting = [transport.connect(self._address, deadline_s=_DEADLINE_S) for transport in self._transports]
        self._endpoints = await asyncio.gather(*connecting)
        for position, endpoint in enumerate(self._endpoints):
            delay_s = _HEARTBEAT_S * position / len(self._endpoints)
            self._tasks.append(asyncio.create_task(self._beat(endpoint, delay_s)))

    async def _beat(self, endpoint: Endpoint, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        while True:
            await self.beating.wait()
            await endpoint.call(Heartbeat(), deadline_s=_DEADLINE_S)
            await asyncio.sleep(_HEARTBEAT_S)

    async def leave(self) -> None:
        """End the tasks and the endpoints."""
        for task in self._tasks:
            task.cancel()
        ended = await asyncio.gather(*self._tasks, return_exceptions=True)
        for endpoint in self._endpoints:
            await endpoint.close()
        for error in ended:
            if isinstance(error, Exception):
                raise error


async def _obey(args: argparse.Namespace) -> None:
    """Commands come over stdin, answers leave over stdout."""
    peers = _Peers(args.kind, args.address, args.secret, args.first, args.peers)
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    print("ready", flush=True)
    while line := (await reader.readline()).decode().strip():
        if line == "join":
            await peers.join()
        elif line == "beat":
            peers.beating.set()
        elif line == "rest":
            peers.beating.clear()
        print("done", flush=True)
    await peers.leave()


class _ThreadedPeers:
    """The peers of loopback, in a thread of the controller's process with a loop of its own."""

    def __init__(self, address: str, secret: Path, n: int) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._peers = self._run(self._make(address, secret, n))

    async def _make(self, address: str, secret: Path, n: int) -> _Peers:
        return _Peers("loopback", address, secret, 0, n)

    def _run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_DEADLINE_S)

    def ask(self, command: str) -> None:
        if command == "join":
            self._run(self._peers.join())
        elif command == "beat":
            self._loop.call_soon_threadsafe(self._peers.beating.set)
        else:
            self._run(self._peers.leave())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


# ------------------------------------------------------------------------------------------------ the controller


class _Controller:
    """The measured process: counts heartbeats and reports about itself."""

    def __init__(self, secret: Path) -> None:
        self.beats = 0
        self.joined = 0
        self.last_joined = 0.0
        self.address = ""
        self._secret = secret
        self._peers: _ThreadedPeers | None = None  # loopback only

    def handle(self, endpoint: Any, message: Message, payload: memoryview) -> None:
        self.beats += 1

    def note_joined(self) -> None:
        self.joined += 1
        self.last_joined = time.monotonic()

    def report(self) -> dict[str, Any]:
        end = time.monotonic(), time.process_time()  # of an interval: the collection isn't part of idling
        gc.collect()
        return {
            "end": end,
            "begin": (time.monotonic(), time.process_time()),
            "rss_bytes": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
            "descriptors": sum(1 for _ in Path("/proc/self/fd").iterdir()),
            "beats": self.beats,
            "joined": self.joined,
            "last_joined": self.last_joined,
        }

    def answer(self, stop: Any) -> None:
        """Called when stdin is readable."""
        for line in os.read(0, 4096).decode().split() or ["quit"]:
            if line == "quit":
                stop()
            elif line == "report":
                print(json.dumps(self.report()), flush=True)
            else:
                threading.Thread(target=self._tell_peers, args=line.split(":")).start()

    def _tell_peers(self, command: str, n: str) -> None:
        if self._peers is None:
            self._peers = _ThreadedPeers(self.address, self._secret, int(n))
        self._peers.ask(command)
        print("done", flush=True)


async def _control_asyncio(kind: str, secret: Path) -> None:
    controller, over = _Controller(secret), asyncio.Event()

    async def on_connect(endpoint: Endpoint) -> None:
        controller.note_joined()

    transport = open_transport(kind, _credentials("controller", secret))
    listener = await transport.listen(controller.handle, on_connect=on_connect)
    controller.address = listener.address
    asyncio.get_running_loop().add_reader(0, controller.answer, over.set)
    print(listener.address, flush=True)
    await over.wait()
    asyncio.get_running_loop().remove_reader(0)
    await listener.close()


def _control_blocking(kind: str, secret: Path) -> None:
    controller, over = _Controller(secret), [False]
    transport = open_blocking_transport(kind, _credentials("controller", secret), spin_s=0.0)
    listener = transport.listen(controller.handle, on_connect=lambda _: controller.note_joined())
    controller.address = listener.address

    def stop() -> None:
        over[0] = True

    transport._loop.add_reader(0, lambda: controller.answer(stop))
    print(listener.address, flush=True)
    transport.serve(lambda: over[0])
    transport._loop.remove_reader(0)
    transport.close()


def _inside(args: argparse.Namespace) -> None:
    """A started process: the controller, or some of the peers."""
    if args.part == "peers":
        asyncio.run(_obey(args))
    elif args.face == "asyncio":
        asyncio.run(_control_asyncio(args.kind, args.secret))
    else:
        _control_blocking(args.kind, args.secret)


# ------------------------------------------------------------------------------------------------ measuring


class _Process:
    """A process of this program that answers each line with one line."""

    def __init__(self, *args: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tools.bench_control_memory", *args],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.first_line = self._read()

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if not line:
            raise RuntimeError(f"a process of the benchmark ended with exit code {self._process.wait(10)}")
        return line

    def send(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def ask(self, line: str) -> str:
        self.send(line)
        return self._read()

    def end(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


@contextlib.contextmanager
def _secret_file() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="bench-control-") as folder:
        path = Path(folder) / "secret"
        path.touch(0o600)
        path.write_bytes(new_secret())
        yield path


def _measure(kind: str, face: str, n: int, window_s: float) -> dict[str, Any]:
    """One controller and its peers."""
    with _secret_file() as secret, contextlib.ExitStack() as stack:
        controller = _Process("--part", "controller", "--kind", kind, "--face", face, "--secret", str(secret))
        stack.callback(controller.end)
        groups: list[_Process] = []
        for number in range(0 if kind == "loopback" else _N_PROCESSES):
            first = n * number // _N_PROCESSES
            size = n * (number + 1) // _N_PROCESSES - first
            where = ("--kind", kind, "--address", controller.first_line, "--secret", str(secret))
            groups.append(_Process("--part", "peers", *where, "--first", str(first), "--peers", str(size)))
            stack.callback(groups[-1].end)

        def report() -> dict[str, Any]:
            found: dict[str, Any] = json.loads(controller.ask("report"))
            return found

        def tell(line: str) -> None:
            if kind == "loopback":
                controller.ask(f"{line}:{n}")
                return
            for group in groups:
                group.send(line)
            for group in groups:
                group._read()

        before = report()
        start = time.monotonic()
        tell("join")
        joined = report()
        if joined["joined"] != n:
            raise RuntimeError(f"{joined['joined']} peers joined, expected {n}")
        time.sleep(window_s / 2)
        silent = report()
        tell("beat")
        time.sleep(3 * _HEARTBEAT_S)
        begin = report()
        time.sleep(window_s)
        end = report()
        tell("rest")
    join_s = joined["last_joined"] - start
    return {
        "kind": kind,
        "face": face,
        "peers": n,
        "both_ends": kind == "loopback",
        "rss_before_bytes": before["rss_bytes"],
        "rss_after_bytes": end["rss_bytes"],
        "bytes_per_peer": (end["rss_bytes"] - before["rss_bytes"]) / n,
        "descriptors_per_peer": (end["descriptors"] - before["descriptors"]) / n,
        "cpu_silent_percent": 100 * _cpu(joined, silent),
        "cpu_percent": 100 * _cpu(begin, end),
        "heartbeats_per_s": (end["beats"] - begin["beats"]) / (end["end"][0] - begin["begin"][0]),
        "join_s": join_s,
        "joins_per_s": n / join_s,
        "join_cpu_ms": 1000 * (joined["end"][1] - before["begin"][1]) / n,
    }


def _cpu(begin: dict[str, Any], end: dict[str, Any]) -> float:
    """Share of a core between two reports."""
    share: float = (end["end"][1] - begin["begin"][1]) / (end["end"][0] - begin["begin"][0])
    return share


def _print(console: Console, results: list[dict[str, Any]], conditions: dict[str, Any]) -> None:
    table = Table(title=f"an idle controller with {results[0]['peers']} connected peers")
    table.add_column("transport, controller's face")
    for name in (
        "memory before, after, MiB",
        "per peer, KiB",
        "descriptors per peer",
        "CPU silent",
        "CPU with heartbeats (per s)",
        "all joined in",
        "joins per s",
        "CPU per join",
    ):
        table.add_column(name, justify="right")
    for found in results:
        table.add_row(
            f"{found['kind']}, {found['face']}" + (" (both ends)" if found["both_ends"] else ""),
            f"{found['rss_before_bytes'] / 2**20:.1f}, {found['rss_after_bytes'] / 2**20:.1f}",
            f"{found['bytes_per_peer'] / 1024:.1f}",
            f"{found['descriptors_per_peer']:.2f}",
            f"{found['cpu_silent_percent']:.2f} %",
            f"{found['cpu_percent']:.1f} % ({found['heartbeats_per_s']:.0f})",
            f"{found['join_s']:.2f} s",
            f"{found['joins_per_s']:.0f}",
            f"{found['join_cpu_ms']:.2f} ms",
        )
    console.print(table)
    console.print(", ".join(f"{name} {value}" for name, value in conditions.items()))


def main(argv: list[str] | None = None) -> int:
    """Measure each kind with both faces."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench_control_memory", description="Memory and CPU of an idle controller."
    )
    parser.add_argument("--peers", type=int, help="(default: 512, quick: 64)")
    parser.add_argument("--kinds", default="tcp,loopback", help="separated by commas (default: tcp,loopback)")
    parser.add_argument("--quick", action="store_true", help="fewer peers, shorter windows")
    parser.add_argument("--json", action="store_true", help="one object on stdout instead of a table")
    for hidden in ("--part", "--kind", "--face", "--address"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--secret", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--first", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.part:
        _inside(args)
        return 0
    load = Path("/proc/loadavg").read_text().split()[0]
    peers = args.peers or (64 if args.quick else 512)
    window_s = 2.0 if args.quick else _WINDOW_S
    results = [_measure(kind, face, peers, window_s) for kind in args.kinds.split(",") for face in _FACES]
    conditions = {
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cores": os.cpu_count(),
        "load before": load,
        "peers": f"{peers} in {_N_PROCESSES} processes, asyncio face",
        "heartbeat s": _HEARTBEAT_S,
        "window s": window_s,
        "repeats": 1,
    }
    if args.json:
        print(json.dumps({"conditions": conditions, "arms": results}))
    else:
        _print(Console(width=170), results, conditions)
    return 0


if __name__ == "__main__":
    sys.exit(main())
