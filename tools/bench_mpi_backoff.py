"""What polling costs the mpi transport: processor time of an idle rank, latency of calls after idleness and without.

    python -m tools.bench_mpi_backoff [--quick] [--json]

Two ranks under mpiexec; rank 1 calls, rank 0 answers. Arms in random order: the face of both ranks, and the longest
sleep between two looks (0: the processor is only yielded).

| figure | how |
|---|---|
| idle_percent | processor time of rank 0 over a while in which nobody calls, in percent of one core |
| after_idle_ms | a Heartbeat call after 200 ms of silence on both sides: median |
| busy_us | Heartbeat calls one after the other: median |
| bulk_ms | 8 MiB to rank 0 and back: median |
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from miles_hpc.control.opening import open_blocking_transport, open_transport
from miles_hpc.core.env import read
from miles_hpc.core.messages import EndSession, Heartbeat, Message, Shutdown
from miles_hpc.core.transport import Buffer, Credentials, PeerIdentity, Reply
from miles_hpc.core.version import __version__

__all__ = ["main"]

FACES = ("blocking", "asyncio")
SLEEPS_MS = (0.0, 0.5, 2.0, 10.0)
PAUSE_S = 0.2
WAIT_S = 60.0
BULK = bytes(8 << 20)
Samples = tuple[float, int, int, int]
#: Seconds idle, calls after idleness, calls without, bulk calls.
FULL: Samples = (3.0, 20, 2000, 10)
QUICK: Samples = (1.0, 5, 300, 3)


def credentials(rank: int) -> Credentials:
    return Credentials(
        bytes(32), PeerIdentity(role="trainer", name=f"rank{rank}", host="", pid=os.getpid(), attempt=1, term=1)
    )


class Answering:
    """Rank 0's handler, plain, so that it suits both faces; measures this process between two orders."""

    def __init__(self) -> None:
        self.ended = False
        self._since = (0.0, 0.0)

    def __call__(self, endpoint: Any, message: Message, payload: memoryview) -> tuple[Message, list[Buffer]] | Message:
        if isinstance(message, Shutdown):
            self.ended = True
        if isinstance(message, EndSession):
            before, self._since = self._since, (time.process_time(), time.monotonic())
            used = (self._since[0] - before[0]) / (self._since[1] - before[1])
            return EndSession(session_id=f"{100 * used:.3f}")
        return message, [payload]


async def measure(
    call: Callable[..., Awaitable[Reply]], rest: Callable[[float], Awaitable[Any]], samples: Samples
) -> dict[str, float]:
    """Rank 1's part."""
    idle_s, n_after, n_busy, n_bulk = samples

    async def timed(message: Message, payload: Sequence[Buffer] = ()) -> float:
        start = time.perf_counter()
        await call(message, payload=payload, deadline_s=WAIT_S)
        return time.perf_counter() - start

    await timed(Heartbeat(), [BULK])
    busy = [await timed(Heartbeat()) for _ in range(n_busy)]
    bulk = [await timed(Heartbeat(), [BULK]) for _ in range(n_bulk)]
    after = []
    for _ in range(n_after):
        await rest(PAUSE_S)
        after.append(await timed(Heartbeat()))
    await call(EndSession(session_id=""), deadline_s=WAIT_S)
    await rest(idle_s)
    idle = (await call(EndSession(session_id=""), deadline_s=WAIT_S)).message
    assert isinstance(idle, EndSession)
    await call(Shutdown(reason=""), deadline_s=WAIT_S)
    return {
        "idle_percent": float(idle.session_id),
        "after_idle_ms": 1e3 * statistics.median(after),
        "busy_us": 1e6 * statistics.median(busy),
        "bulk_ms": 1e3 * statistics.median(bulk),
    }


def run_blocking(rank: int, max_sleep_s: float, samples: Samples) -> dict[str, float] | None:
    transport = open_blocking_transport("mpi", credentials(rank), max_sleep_s=max_sleep_s)
    try:
        if not rank:
            answering = Answering()
            transport.listen(answering)
            transport.serve(lambda: answering.ended)
            return None
        endpoint = transport.connect("mpi://0", deadline_s=WAIT_S)

        async def call(message: Message, *, payload: Sequence[Buffer] = (), deadline_s: float) -> Reply:
            return endpoint.call(message, payload=payload, deadline_s=deadline_s)

        async def rest(seconds: float) -> None:
            transport.serve(lambda: False, deadline_s=seconds)

        return asyncio.run(measure(call, rest, samples))  # nothing in it waits for this loop
    finally:
        transport.close()


async def run_asyncio(rank: int, max_sleep_s: float, samples: Samples) -> dict[str, float] | None:
    transport = open_transport("mpi", credentials(rank), max_sleep_s=max_sleep_s)
    if rank:
        endpoint = await transport.connect("mpi://0", deadline_s=WAIT_S)
        return await measure(endpoint.call, asyncio.sleep, samples)
    answering = Answering()
    listener = await transport.listen(answering)
    while not answering.ended:
        await asyncio.sleep(0.5)
    await listener.close()
    return None


def run_rank(face: str, max_sleep_s: float, samples: Samples) -> None:
    rank = read("PMI_RANK")
    if face == "blocking":
        found = run_blocking(rank, max_sleep_s, samples)
    else:
        found = asyncio.run(run_asyncio(rank, max_sleep_s, samples))
    if found is not None:
        print(json.dumps(found), flush=True)


def run_arm(face: str, sleep_ms: float, quick: bool) -> dict[str, Any]:
    mpiexec = Path(sys.executable).with_name("mpiexec")
    rank = ["--rank", face, str(sleep_ms / 1e3)]
    command = [str(mpiexec), "-n", "2", sys.executable, "-m", "tools.bench_mpi_backoff", *rank]
    done = subprocess.run(
        [*command, "--quick"] if quick else command, stdout=subprocess.PIPE, text=True, timeout=300, check=True
    )
    load = os.getloadavg()[0]
    return {"face": face, "max_sleep_ms": sleep_ms, "load_average": load, **json.loads(done.stdout)}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.bench_mpi_backoff")
    parser.add_argument("--quick", action="store_true", help="fewer samples: about half a minute")
    parser.add_argument("--json", action="store_true", help="one object on stdout")
    parser.add_argument("--rank", nargs=2, metavar=("FACE", "SECONDS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.rank:
        run_rank(arguments.rank[0], float(arguments.rank[1]), QUICK if arguments.quick else FULL)
        return 0
    arms = [(face, sleep_ms) for face in FACES for sleep_ms in SLEEPS_MS]
    random.shuffle(arms)
    found = sorted((run_arm(*arm, arguments.quick) for arm in arms), key=lambda arm: (arm["face"], arm["max_sleep_ms"]))
    conditions = {
        "version": __version__,
        "python": platform.python_version(),
        "system": f"{os.uname().sysname} {os.uname().release}",
        "cores": os.cpu_count(),
        "ranks": 2,
        "samples": dict(zip(("idle_s", "after_idle", "busy", "bulk"), QUICK if arguments.quick else FULL, strict=True)),
    }
    if arguments.json:
        print(json.dumps({"conditions": conditions, "arms": found}))
        return 0
    print(", ".join(f"{name} {value}" for name, value in conditions.items()))
    print(f"{'face':9}{'max_sleep':>10}{'idle CPU':>10}{'after idle':>12}{'busy':>10}{'8 MiB echo':>12}{'load':>7}")
    for arm in found:
        print(
            f"{arm['face']:9}{arm['max_sleep_ms']:7g} ms{arm['idle_percent']:8.2f} %{arm['after_idle_ms']:9.2f} ms"
            f"{arm['busy_us']:7.0f} us{arm['bulk_ms']:9.1f} ms{arm['load_average']:7.1f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
