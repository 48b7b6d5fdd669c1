"""What every arm implements, and the loop that times it."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

from tools.bench_control.plan import Cell
from tools.bench_control.raw import pattern

__all__ = ["DEADLINE_S", "Arm", "pin", "timed"]

#: Limit on one call.
DEADLINE_S = 60.0
_ECHO_BYTES = 64 << 10


class Arm(ABC):
    """One library inside a caller process. `folder` is the stage's own; the arm's peers live from start to stop.

    `peer_pids` are known from `start` on. `cores` are those that may be used; a cell's placement says how.

    `start`, `check`, `measure` and `stop` are called in this order, `check` and `measure` once per cell.
    """

    def __init__(self, folder: Path, cores: list[int]) -> None:
        self.folder = folder
        self.cores = cores
        self.peer_pids: list[int] = []
        self._checked: set[tuple[int, int, int]] = set()

    @abstractmethod
    def start(self, n_peers: int) -> None:
        """Bring the peers up; returns when each can be called."""

    @abstractmethod
    def operation(self, cell: Cell) -> Callable[[], object]:
        """What is timed, with buffers and connections ready."""

    @abstractmethod
    def echo(self, peer: int, data: bytes) -> bytes:
        """Send `data` to a peer, which sends back what it got."""

    @abstractmethod
    def fetch(self, peer: int, n_bytes: int) -> bytes:
        """The content of a result of n bytes."""

    @abstractmethod
    def stop(self) -> None:
        """End the peers."""

    def check(self, cell: Cell) -> None:
        """Content that arrives is content that was sent, there and back: once per size and number of peers.

        Not timed. Raises ValueError.
        """
        sizes = (cell.peers, cell.argument_bytes, cell.result_bytes)
        if sizes in self._checked:
            return
        self._checked.add(sizes)
        for peer in range(cell.peers):
            sent = pattern(min(cell.argument_bytes, _ECHO_BYTES) or 1024)
            if self.echo(peer, sent) != sent:
                raise ValueError(f"{cell.name}: peer {peer} got something else than was sent")
        if cell.argument_bytes > _ECHO_BYTES:
            sent = pattern(cell.argument_bytes)
            if self.echo(0, sent) != sent:
                raise ValueError(f"{cell.name}: the argument arrived changed")
        if cell.result_bytes and self.fetch(0, cell.result_bytes) != pattern(cell.result_bytes):
            raise ValueError(f"{cell.name}: the result arrived changed")

    def place(self, placement: str) -> None:
        """Free: the kernel's scheduler decides. Apart: the caller on the first core, peers in turn on the others."""
        first, *others = self.cores
        everywhere = set(self.cores)
        pin(os.getpid(), everywhere if placement == "free" else {first})
        for index, pid in enumerate(self.peer_pids):
            core = others[index % len(others)] if others else first
            pin(pid, everywhere if placement == "free" else {core})

    def measure(self, cell: Cell) -> list[float]:
        """Seconds of each timed operation, after the warm-up."""
        operation = self.operation(cell)
        timed(operation, cell.warmup, cell.limit_s / 4)
        return timed(operation, cell.operations, cell.limit_s)

    def describe(self) -> dict[str, str]:
        """What it runs on."""
        return {}

    def close(self) -> None:  # noqa: B027 - not every arm has something to end
        """End everything that outlives a stage."""


def timed(operation: Callable[[], object], operations: int, limit_s: float) -> list[float]:
    """Run it `operations` times, fewer when `limit_s` is over; the duration of each."""
    clock = time.perf_counter
    samples = []
    end = clock() + limit_s
    for _ in range(operations):
        start = clock()
        operation()
        now = clock()
        samples.append(now - start)
        if now > end:
            break
    return samples


def pin(pid: int, cores: set[int]) -> None:
    """Bind all threads of a process; those that it starts later inherit it from the thread that starts them."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        try:
            os.sched_setaffinity(int(thread.name), cores)
        except ProcessLookupError:
            pass  # ended meanwhile
