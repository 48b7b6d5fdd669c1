"""What sandboxes and their commands cost, by how many run at once. Peer: plain bwrap(1), started for each command.

    python -m tools.bench_sandbox [--quick] [--json] [--repeats N] [--at-once 1,8,64,256] [--arms ARM,ARM]

| operation | what is done | wall time is of |
|---|---|---|
| sandbox | made with two small files, a first command that starts no program, ended | all of it |
| episode | the same, and `wc`, `grep`, `cat` and `sort` into `tail` in between | each of the four |
| first | made; 0.5 to 1 s later, as after a model's first message, one of the four; ended (ours) | that command |
| later | the same, where another command was answered before the pause | that command |

| arm | a sandbox is | a command is |
|---|---|---|
| unshare, bubblewrap | `SandboxHost` of that kind | a request to its PID 1 |
| bwrap | a new folder | a process of bwrap with that folder as /work; namespaces, but no limits, no filter, no state |

Operation `command` is computed: processor time of an episode less that of a sandbox, over four. Processor time is of
everything: this process, the launcher, sandboxes, commands; what the kernel does later on its own threads (network
namespaces are taken apart there) isn't in it. Wall time is under so many at once. Arms run in random order within each
repeat. An arm that can't run is reported with its reason.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Protocol

from rich.console import Console
from rich.table import Table

from miles_hpc.core.errors import UserError
from miles_hpc.core.version import __version__
from miles_hpc.rollout.sandbox_host import SandboxHost

__all__ = ["ARMS", "OPERATIONS", "Cell", "main"]

ARMS = ("unshare", "bubblewrap", "bwrap")
OPERATIONS = ("sandbox", "episode", "first", "later")
_FILES = {"a": "11\n12\n13\n", "b": "21\n22\n"}
#: Command and what it prints, so that a figure is only of work that was done.
_COMMANDS = (
    ("wc -l <a", "3\n"),
    ("grep 12 a", "12\n"),
    ("cat a b", "11\n12\n13\n21\n22\n"),
    ("sort -r a | tail -n1", "11\n"),
)
_NOTHING = (":", "")
_PLURAL = {"sandbox": "sandboxes", "command": "commands"}
_PAUSED = ("first", "later")
_PAUSE_S = (0.5, 1.0)
_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")


class Place(Protocol):
    """Where sandboxes are made: a host of ours, or the peer."""

    async def open(self) -> None: ...

    async def make(self, name: str) -> None: ...

    async def run(self, name: str, command: str) -> str: ...

    async def end(self, name: str) -> None: ...

    async def cpu_s(self) -> float:
        """Processor time of all that was done until now, once what was ended is gone."""
        ...

    async def close(self) -> None: ...


class Ours:
    """A SandboxHost of one kind."""

    def __init__(self, kind: str) -> None:
        self._host = SandboxHost(isolation=kind)  # type: ignore[arg-type]

    async def open(self) -> None:
        await self._host.start()

    async def make(self, name: str) -> None:
        self._host.create(name, _FILES)

    async def run(self, name: str, command: str) -> str:
        return (await self._host.execute(name, command, timeout_s=120.0, max_output_bytes=1024)).output

    async def end(self, name: str) -> None:
        self._host.destroy(name)

    async def cpu_s(self) -> float:
        link = self._host.runner.link
        assert link is not None
        outer = link.process.pid
        (inner,) = _children(outer)
        live = self._host.status().live
        async with asyncio.timeout(60):
            while len(_children(inner)) > live:
                await asyncio.sleep(0.01)
        return time.process_time() + _cpu_s(outer) + _cpu_s(inner) + sum(map(_cpu_s, _below(inner)))

    async def close(self) -> None:
        await self._host.close()


class Bwrap:
    """A bwrap process per command."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="bench-sandbox-"))
        # fmt: off
        self._command = [
            "bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL",
            "--ro-bind", "/usr", "/usr", *(part for name in ("bin", "lib", "lib64") for part in _link(name)),
            "--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp", "--chdir", "/work",
        ]
        # fmt: on

    async def open(self) -> None:
        if shutil.which("bwrap") is None:
            raise UserError("no bwrap on this node's PATH")
        await self.make("probe")
        if await self.run("probe", *_COMMANDS[0][:1]) != _COMMANDS[0][1]:
            raise UserError("bwrap can't run a command on this node")

    async def make(self, name: str) -> None:
        folder = self._folder / name
        folder.mkdir()
        for file, text in _FILES.items():
            (folder / file).write_text(text)

    async def run(self, name: str, command: str) -> str:
        process = await asyncio.create_subprocess_exec(
            *self._command,
            *("--bind", str(self._folder / name), "/work", "/bin/bash", "--noprofile", "--norc", "-c", command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        output, _ = await asyncio.wait_for(process.communicate(), 120.0)
        return output.decode()

    async def end(self, name: str) -> None:
        shutil.rmtree(self._folder / name)

    async def cpu_s(self) -> float:
        times = os.times()  # children that were waited for are in it
        return time.process_time() + times.children_user + times.children_system

    async def close(self) -> None:
        shutil.rmtree(self._folder)


def _link(name: str) -> list[str]:
    """How the peer's root gets /bin and the like, which are links into /usr on most systems."""
    path = Path("/") / name
    if path.is_symlink():
        return ["--symlink", str(path.readlink()), str(path)]
    return ["--ro-bind", str(path), str(path)] if path.is_dir() else []


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _below(pid: int) -> list[int]:
    return [each for child in _children(pid) for each in (child, *_below(child))]


def _cpu_s(pid: int) -> float:
    """Of a process and of its children that ended: proc(5), stat, fields 14 to 17."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(int(ticks) for ticks in fields[11:15]) * _TICK_S


@dataclass
class Cell:
    """One operation of one arm at one width; a value per repeat."""

    arm: str
    operation: str
    at_once: int
    n: int  # operations in each repeat
    cpu_ms: list[float] = field(default_factory=list)  # per operation
    wall_ms: list[float] = field(default_factory=list)  # median of the operations
    wall_p90_ms: list[float] = field(default_factory=list)

    def row(self) -> dict[str, Any]:
        cpu = statistics.median(self.cpu_ms)
        return {
            "arm": self.arm,
            "operation": self.operation,
            "at_once": self.at_once,
            "operations_per_repeat": self.n,
            "cpu_median_ms": round(cpu, 3),
            "cpu_min_ms": round(min(self.cpu_ms), 3),
            "cpu_max_ms": round(max(self.cpu_ms), 3),
            "per_core_second": round(1e3 / cpu, 1) if cpu > 0 else None,
            "wall_median_ms": round(statistics.median(self.wall_ms), 3),
            "wall_p90_ms": round(statistics.median(self.wall_p90_ms), 3),
            "medians_cpu_ms": [round(value, 3) for value in self.cpu_ms],
        }


async def _checked(place: Place, name: str, command: tuple[str, str]) -> None:
    output = await place.run(name, command[0])
    if output != command[1]:
        raise RuntimeError(f"{command[0]!r} printed {output[:200]!r}, expected {command[1]!r}")


async def measure(place: Place, cell: Cell) -> None:
    """One repeat: `cell.n` operations, `cell.at_once` of them at a time. Raises RuntimeError for a wrong answer."""
    walls: list[float] = []
    rng = Random(cell.at_once)

    async def timed(operation: Awaitable[None]) -> None:
        began = time.perf_counter()
        await operation
        walls.append((time.perf_counter() - began) * 1e3)

    async def worker(name: str, numbers: range) -> None:
        for number in numbers:
            if cell.operation == "sandbox":
                await timed(alone(name))
                continue
            await place.make(name)
            if cell.operation != "first":
                await _checked(place, name, _NOTHING)
            if cell.operation == "episode":
                for command in _COMMANDS:
                    await timed(_checked(place, name, command))
            else:
                await asyncio.sleep(rng.uniform(*_PAUSE_S))
                await timed(_checked(place, name, _COMMANDS[number % len(_COMMANDS)]))
            await place.end(name)

    async def alone(name: str) -> None:
        await place.make(name)
        await _checked(place, name, _NOTHING)
        await place.end(name)

    before = await place.cpu_s()
    await asyncio.gather(*(worker(f"s{i}", range(i, cell.n, cell.at_once)) for i in range(cell.at_once)))
    after = await place.cpu_s()
    walls.sort()
    cell.cpu_ms.append((after - before) / cell.n * 1e3)
    cell.wall_ms.append(statistics.median(walls))
    cell.wall_p90_ms.append(walls[-(-9 * len(walls) // 10) - 1])


async def run(
    arms: Sequence[str], widths: Sequence[int], repeats: int, n: int, seed: int
) -> tuple[list[Cell], dict[str, str]]:
    """All cells, and why arms are missing."""
    rng = Random(seed)
    missing: dict[str, str] = {}
    cells = [
        Cell(arm, operation, width, max(n // 8 if operation in _PAUSED else n, width))
        for arm in arms
        for operation in OPERATIONS
        for width in widths
        if operation not in _PAUSED or (arm != "bwrap" and width <= 64)  # the peer makes nothing before a command
    ]
    for repeat in range(repeats):
        for arm in rng.sample(arms, len(arms)):
            place: Place = Bwrap() if arm == "bwrap" else Ours(arm)
            try:
                await place.open()
                mine = [cell for cell in cells if cell.arm == arm]
                for cell in rng.sample(mine, len(mine)):
                    await measure(place, cell)
                    print(f"bench_sandbox: repeat {repeat + 1}: {arm} {cell.operation} {cell.at_once}", file=sys.stderr)
            except UserError as error:
                missing[arm] = str(error)
            finally:
                await place.close()
    measured = [cell for cell in cells if cell.cpu_ms]
    return [*measured, *_commands(measured)], missing


def _commands(cells: Sequence[Cell]) -> list[Cell]:
    """Of each arm and width the computed operation."""
    by_key = {(cell.arm, cell.operation, cell.at_once): cell for cell in cells}
    result = []
    for cell in cells:
        if cell.operation == "episode":
            command = Cell(cell.arm, "command", cell.at_once, cell.n * len(_COMMANDS))
            alone = by_key[cell.arm, "sandbox", cell.at_once]
            command.cpu_ms = [(a - b) / len(_COMMANDS) for a, b in zip(cell.cpu_ms, alone.cpu_ms, strict=True)]
            command.wall_ms, command.wall_p90_ms = cell.wall_ms, cell.wall_p90_ms
            result.append(command)
    return result


def conditions(repeats: int) -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    bwrap = shutil.which("bwrap")
    said = subprocess.run([bwrap, "--version"], capture_output=True, text=True, timeout=10).stdout if bwrap else ""
    return {
        "cpu": next((line.split(":", 1)[1].strip() for line in lines if "model name" in line), platform.processor()),
        "cores": os.cpu_count(),
        "user": "root" if os.getuid() == 0 else "ordinary",
        "nice": os.nice(0),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "miles_hpc": __version__,
        "bwrap": said.strip() or "not installed",
        "repeats": repeats,
        "load_average_at_start": round(os.getloadavg()[0], 2),
    }


def summary(cells: Sequence[Cell]) -> dict[str, float]:
    """Rates by arm and width, and the peer's processor time over ours."""
    cpu = {(cell.arm, cell.operation, cell.at_once): statistics.median(cell.cpu_ms) for cell in cells}
    wall = {(cell.arm, cell.operation, cell.at_once): statistics.median(cell.wall_ms) for cell in cells}
    result: dict[str, float] = {}
    for (arm, operation, width), ms in cpu.items():
        if operation in ("sandbox", "command") and ms > 0:  # else below the clock's tick
            result[f"{_PLURAL[operation]}_per_core_s_{arm}_{width}"] = round(1e3 / ms, 1)
            peer = cpu.get(("bwrap", operation, width))
            if peer is not None and arm != "bwrap":
                result[f"{operation}_cpu_bwrap_over_{arm}_{width}"] = round(peer / ms, 3)
        elif operation == "first":
            later = wall[arm, "later", width]
            result[f"first_over_later_wall_{arm}_{width}"] = round(wall[arm, "first", width] / later, 3)
    return result


def print_table(result: dict[str, Any]) -> None:
    table = Table(title="Cost of an operation: processor time and wall time, ms")
    for column in ("operation", "arm", "at once", "cpu", "min to max", "per core second", "wall", "wall p90"):
        table.add_column(column, justify="left" if column in ("operation", "arm") else "right")
    for row in sorted(result["arms"], key=lambda row: (row["operation"], row["arm"], row["at_once"])):
        spread = f"{row['cpu_min_ms']:.2f} to {row['cpu_max_ms']:.2f}"
        walls = [f"{row[key]:.1f}" for key in ("wall_median_ms", "wall_p90_ms")]
        rate = str(row["per_core_second"])
        table.add_row(
            row["operation"], row["arm"], str(row["at_once"]), f"{row['cpu_median_ms']:.2f}", spread, rate, *walls
        )
    console = Console()
    console.print(table)
    for key, value in {**result["conditions"], **result["not_measured"]}.items():
        console.print(f"{key.replace('_', ' ')}: {value}", highlight=False)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench_sandbox", description="Benchmark sandboxes and their commands.")
    parser.add_argument(
        "--quick", action="store_true", help="one repeat of few operations: about 20 s of processor time"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--repeats", type=int, help="default 5, quick 1")
    parser.add_argument("--operations", type=int, help="of each cell in a repeat, at least; default 256, quick 16")
    parser.add_argument("--at-once", default="1,8,64,256")
    parser.add_argument("--arms", default=",".join(ARMS), help=f"some of {', '.join(ARMS)}")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    arms = options.arms.split(",")
    widths = [int(part) if part.isdecimal() else 0 for part in options.at_once.split(",")]
    if not set(arms) <= set(ARMS) or min(widths) < 1:
        print(f"bench_sandbox: error: expected arms of {', '.join(ARMS)}, and widths of 1 or more", file=sys.stderr)
        return 2
    repeats = options.repeats or (1 if options.quick else 5)
    n = options.operations or (16 if options.quick else 256)
    about = conditions(repeats)
    cells, missing = asyncio.run(run(arms, widths, repeats, n, options.seed))
    about["load_average_at_end"] = round(os.getloadavg()[0], 2)
    result = {
        "conditions": about,
        "arms": [cell.row() for cell in cells],
        "summary": summary(cells),
        "not_measured": missing,
    }
    if options.json:
        json.dump(result, sys.stdout, indent=1)
        print()
    else:
        print_table(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
