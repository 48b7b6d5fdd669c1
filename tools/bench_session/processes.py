"""Programs that the benchmark starts: each says on one line of stdout where it listens, and ends with the benchmark."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import msgspec

from miles_hpc.core.deadline import Deadline

__all__ = ["Child", "cpu_s", "own_cpu_s", "wait_until"]

_START_S = 30.0
_END_S = 5.0


class Child:
    """A started program. `told` is the JSON object of its first line; with `tells` False it says nothing."""

    def __init__(self, command: list[str], log: Path, *, tells: bool = True, env: dict[str, str] | None = None) -> None:
        """Raises DeadlineExpired or RuntimeError, with the log's last line, for one that doesn't get that far."""
        self._log = log
        with open(log, "ab") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if tells else errors,
                stderr=errors,
                env=env,
                preexec_fn=_die_with_parent,
            )
        self.pid = self._process.pid
        self.told: dict[str, Any] = {}
        if tells:
            try:
                self.told = msgspec.json.decode(self._line(), type=dict[str, Any])
            except BaseException:
                self.close()
                raise

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def last_words(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "nothing"

    def close(self) -> None:
        """Idempotent."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(_END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(_END_S)
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _line(self) -> bytes:
        assert self._process.stdout is not None
        deadline = Deadline(_START_S, f"{self._process.args!r:.80} to say where it listens")
        answers = select.poll()
        answers.register(self._process.stdout, select.POLLIN)
        if not answers.poll(deadline.remaining_s * 1000):
            raise deadline.error()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._process.args!r:.80} ended at its start: {self.last_words()}")
        return bytes(line)


def cpu_s(pid: int) -> float:
    """Processor time of all threads of a process up to now, in seconds, to the nanosecond.

    Source: /proc/PID/task/TID/schedstat, whose first number is the time on a processor in ns (sched-stats.rst).
    """
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            total += int((task / "schedstat").read_text().split()[0])
        except (OSError, ValueError):
            continue  # a thread that ended meanwhile
    return total / 1e9


def _die_with_parent() -> None:
    """Have the kernel end this process when its parent ends (prctl(2), PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)


def wait_until(check: Any, what: str, seconds: float = _START_S) -> None:
    """Ask again and again; DeadlineExpired when it is never true."""
    deadline = Deadline(seconds, what)
    while not check():
        deadline.check()
        time.sleep(0.02)


def own_cpu_s() -> float:
    """Of this process."""
    return cpu_s(os.getpid())
