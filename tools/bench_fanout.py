"""The fan-out against loops over all targets: time, messages and processor time of the root.

    python -m tools.bench_fanout [--quick] [--json]

Three parts, each with its own conditions:

model      all processes in one, on a clock that only moves when everybody waits: a message keeps its sender busy for a
           while and then travels for a while, nothing else takes time. Shows the shape: O(N) or O(log N).
in_process the same processes on the real clock, without artificial delays: all of them share this process's core.
processes  N real processes over tcp on this machine: they share its cores.

Arms, in random order within each repeat: `one_by_one` awaits each target's answer before it asks the next; `loop` asks
all at once from the root, with bare calls; `direct` is FanOut without a tree (ids, but N messages from the root);
`tree` is FanOut with its arity.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import signal
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from miles_hpc.control.fanout import FanOut, FanOutResult
from miles_hpc.control.links import Links
from miles_hpc.control.opening import open_transport
from miles_hpc.control.relay import RelayHandler
from miles_hpc.core.messages import Ack, Message, RelayTarget, Shutdown
from miles_hpc.core.transport import Buffer, Endpoint, Handler, Listener, Reply, Transport
from miles_hpc.core.version import __version__
from tests.fakes.fleet import credentials, fleet
from tests.fakes.virtual_time import run_virtually

__all__ = ["main"]

ARITY = 8
SIZES = (8, 16, 32, 64, 128, 256, 512)
PROCESSES = 64
SEND_S = 0.001
TRAVEL_S = 0.001
DEADLINE_S = 120.0
MESSAGE = Shutdown(reason="bench")
PAYLOADS = (0, 1 << 20)
ARMS = ("one_by_one", "loop", "direct", "tree")

# ------------------------------------------------------------------------------------------------ the model


class _SlowEndpoint(Endpoint):
    """Calls that keep the sender busy for SEND_S, one at a time per process, and travel TRAVEL_S each way."""

    def __init__(self, endpoint: Endpoint, lane: asyncio.Lock) -> None:
        self.peer = endpoint.peer
        self.closed = endpoint.closed
        self._endpoint = endpoint
        self._lane = lane

    async def call(self, message: Message, *, payload: Sequence[Buffer] = (), deadline_s: float) -> Reply:
        async with self._lane:
            await asyncio.sleep(SEND_S)
        await asyncio.sleep(TRAVEL_S)
        reply = await self._endpoint.call(message, payload=payload, deadline_s=deadline_s)
        await asyncio.sleep(TRAVEL_S)
        return reply

    def stream(self, message: Message, *, payload: Sequence[Buffer] = (), deadline_s: float) -> Any:
        return self._endpoint.stream(message, payload=payload, deadline_s=deadline_s)

    async def notify(self, message: Message, *, payload: Sequence[Buffer] = ()) -> None:
        await self._endpoint.notify(message, payload=payload)

    async def close(self, reason: str = "") -> None:
        await self._endpoint.close(reason)


class SlowTransport(Transport):
    """The transport of one process of the model."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._lane = asyncio.Lock()

    async def listen(self, handler: Handler, **options: Any) -> Listener:
        return await self._transport.listen(handler, **options)

    async def connect(self, address: str, handler: Handler | None = None, *, deadline_s: float) -> Endpoint:
        return _SlowEndpoint(await self._transport.connect(address, handler, deadline_s=deadline_s), self._lane)

    def chosen(self) -> dict[str, str]:
        return self._transport.chosen()

    def close(self) -> None:
        self._transport.close()


# ------------------------------------------------------------------------------------------------ arms


@dataclass
class Arm:
    """Measurements of one way to reach `n` targets. Times in seconds, of the root."""

    part: str
    arm: str
    n: int
    payload_bytes: int
    times_s: list[float]
    cpu_s: list[float]
    sent: int

    def row(self) -> dict[str, Any]:
        return {
            "part": self.part,
            "arm": self.arm,
            "n": self.n,
            "payload_bytes": self.payload_bytes,
            "repeats": len(self.times_s),
            "median_ms": 1e3 * statistics.median(self.times_s),
            "min_ms": 1e3 * min(self.times_s),
            "max_ms": 1e3 * max(self.times_s),
            "root_cpu_median_ms": 1e3 * statistics.median(self.cpu_s),
            "sent_by_root": self.sent,
        }


async def measure(
    part: str, links: Links, targets: Sequence[RelayTarget], *, repeats: int, payload_bytes: int = 0
) -> list[Arm]:
    """All arms over the same connections, in random order, after one call of each that opens them."""
    n = len(targets)
    data = os.urandom(payload_bytes)
    direct = FanOut(links, name="root", arity=2, direct_up_to=n)
    tree = FanOut(links, name="root", arity=ARITY, direct_up_to=0)

    async def one_by_one() -> int:
        for target in targets:
            async with links.use(target, deadline_s=DEADLINE_S) as link:
                await link.endpoint.call(MESSAGE, payload=[data], deadline_s=DEADLINE_S)
        return n

    async def loop() -> int:
        async def ask(target: RelayTarget) -> None:
            async with links.use(target, deadline_s=DEADLINE_S) as link:
                await link.endpoint.call(MESSAGE, payload=[data], deadline_s=DEADLINE_S)

        await asyncio.gather(*(ask(target) for target in targets))
        return n

    def fan_out(which: FanOut) -> Callable[[], Awaitable[int]]:
        async def call() -> int:
            result = await which.call(MESSAGE, targets, payload=[data], deadline_s=DEADLINE_S)
            _check(result, n)
            return result.sent

        return call

    ways = {"one_by_one": one_by_one, "loop": loop, "direct": fan_out(direct), "tree": fan_out(tree)}
    arms = {name: Arm(part, name, n, payload_bytes, [], [], 0) for name in ways}
    now = asyncio.get_running_loop().time
    for repeat in range(-1, repeats):
        for name in random.sample(list(ways), len(ways)):
            started, cpu = now(), time.process_time()
            sent = await ways[name]()
            if repeat >= 0:
                arms[name].times_s.append(now() - started)
                arms[name].cpu_s.append(time.process_time() - cpu)
                arms[name].sent = sent
    return list(arms.values())


def _check(result: FanOutResult, n: int) -> None:
    if result.errors or len(result.replies) != n:
        raise SystemExit(f"bench_fanout: {len(result.errors)} of {n} targets failed: {result.errors}")


async def _one_process(part: str, n: int, repeats: int, *, wrap: Callable[[Transport], Transport]) -> list[Arm]:
    async with fleet(n, wrap=wrap, links={"keep": n, "idle_s": 1e6}) as some:
        return await measure(part, some.links, some.targets, repeats=repeats)


def model(sizes: Sequence[int]) -> list[Arm]:
    arms = []
    for n in sizes:
        arms += run_virtually(_one_process("model", n, 1, wrap=SlowTransport))
    return arms


def in_process(sizes: Sequence[int], repeats: int) -> list[Arm]:
    arms = []
    for n in sizes:
        arms += asyncio.run(_one_process("in_process", n, repeats, wrap=lambda transport: transport))
    return arms


# ------------------------------------------------------------------------------------------------ processes


async def _worker(name: str, pipe: int) -> None:
    transport = open_transport("tcp", credentials(name))

    async def handle(endpoint: Endpoint, message: Message, payload: memoryview) -> Message:
        return Ack()

    links = Links(transport, keep=PROCESSES, idle_s=1e6)
    listener = await transport.listen(RelayHandler(handle, links, name=name))
    os.write(pipe, listener.address.encode())
    os.close(pipe)
    await asyncio.Event().wait()  # until it's killed


@contextmanager
def workers(n: int) -> Iterator[tuple[list[RelayTarget], list[int]]]:
    """`n` forked processes that listen, and their pids. They are killed at the end."""
    pids, pipes = [], []
    targets = []
    try:
        for number in range(n):
            name = f"worker{number:03}"
            reading, writing = os.pipe()
            pid = os.fork()
            if pid == 0:
                try:
                    os.close(reading)
                    asyncio.run(_worker(name, writing))
                finally:
                    os._exit(1)
            os.close(writing)
            pids.append(pid)
            pipes.append(reading)
        for number, pipe in enumerate(pipes):
            targets.append(RelayTarget(f"worker{number:03}", (os.read(pipe, 200).decode(),)))
            os.close(pipe)
        yield targets, pids
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def processes(n: int, repeats: int) -> tuple[list[Arm], list[float]]:
    """The arms, and the times of the first command after a head was killed, in seconds."""
    with workers(n) as (targets, pids):

        async def main() -> tuple[list[Arm], list[float]]:
            links = Links(open_transport("tcp", credentials("root")), keep=n, idle_s=1e6)
            arms = []
            for payload_bytes in PAYLOADS:
                arms += await measure("processes", links, targets, repeats=repeats, payload_bytes=payload_bytes)
            tree = FanOut(links, name="root", arity=ARITY, direct_up_to=0)
            losses = []
            alive = list(targets)
            for number in range(0, 3 * ARITY, ARITY):  # heads of the root's branches
                victim = alive[0]
                os.kill(pids[targets.index(victim)], signal.SIGKILL)
                started = time.monotonic()
                result = await tree.call(MESSAGE, alive, deadline_s=DEADLINE_S)
                losses.append(time.monotonic() - started)
                if list(result.errors) != [victim.name]:
                    raise SystemExit(f"bench_fanout: {victim.name} was killed, but {result.errors} (loss {number})")
                alive.remove(victim)
            await links.close()
            return arms, losses

        return asyncio.run(main())


# ------------------------------------------------------------------------------------------------ report


def conditions(repeats: int) -> dict[str, Any]:
    model_name = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.processor(),
    )
    return {
        "cpu": model_name,
        "cores": os.cpu_count(),
        "load_average_1min": os.getloadavg()[0],
        "kernel": platform.release(),
        "python": platform.python_version(),
        "miles_hpc": __version__,
        "arity": ARITY,
        "model_send_ms": 1e3 * SEND_S,
        "model_travel_ms": 1e3 * TRAVEL_S,
        "repeats": repeats,
        "processes": PROCESSES,
        "message": "Shutdown answered by Ack, MACs on over tcp, none in one process",
    }


def report(arms: list[Arm], losses: list[float], about: dict[str, Any]) -> None:
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    titles = {
        "model": f"model: {1e3 * SEND_S:g} ms of its sender and {1e3 * TRAVEL_S:g} ms of travel per message (exact)",
        "in_process": "in_process: loopback, all in this process, median ms",
        "processes": "processes: tcp, median ms (processor time of the root)",
    }
    for part, title in titles.items():
        chosen = [arm for arm in arms if arm.part == part]
        if not chosen:
            continue
        heads = "".join(f"{name:>18}" for name in ARMS)
        print(f"\n{title}\n{'N':>5} {'payload':>8}{heads}   sent by root: loop, tree")
        for n, size in dict.fromkeys((arm.n, arm.payload_bytes) for arm in chosen):
            row = {arm.arm: arm for arm in chosen if (arm.n, arm.payload_bytes) == (n, size)}
            cells = ""
            for name in ARMS:
                line = row[name].row()
                cpu = f" ({line['root_cpu_median_ms']:.2f})" if part == "processes" else ""
                cells += f"{line['median_ms']:.2f}{cpu}".rjust(18)
            print(f"{n:>5} {size:>8}{cells}   {row['loop'].sent}, {row['tree'].sent}")
    if losses:
        print(f"\nfirst command after kill -9 of a head, ms: {', '.join(f'{1e3 * loss:.1f}' for loss in losses)}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer repeats and sizes")
    parser.add_argument("--json", action="store_true", help="one object on standard output")
    options = parser.parse_args(arguments)
    repeats = 5 if options.quick else 20
    sizes = SIZES[::2] if options.quick else SIZES
    about = conditions(repeats)
    arms, losses = processes(PROCESSES, repeats)  # first: it forks, and the others leave much behind in memory
    arms += model(sizes) + in_process(sizes, repeats)
    if not options.json:
        report(arms, losses, about)
        return
    by_key = {(arm.part, arm.arm, arm.n, arm.payload_bytes): arm.row() for arm in arms}
    largest = sizes[-1]
    summary = {
        "model_tree_over_smallest": by_key["model", "tree", largest, 0]["median_ms"]
        / by_key["model", "tree", sizes[0], 0]["median_ms"],
        "model_loop_over_tree": by_key["model", "loop", largest, 0]["median_ms"]
        / by_key["model", "tree", largest, 0]["median_ms"],
        "root_cpu_loop_over_tree": by_key["processes", "loop", PROCESSES, 0]["root_cpu_median_ms"]
        / by_key["processes", "tree", PROCESSES, 0]["root_cpu_median_ms"],
        "loss_of_a_head_ms": [1e3 * loss for loss in losses],
    }
    json.dump({"conditions": about, "arms": list(by_key.values()), "summary": summary}, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
