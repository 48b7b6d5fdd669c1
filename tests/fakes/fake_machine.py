"""A machine in memory for the checks of cluster/preflight: what a test puts in is what a check sees."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from miles_hpc.cluster.preflight.contract import COMMAND_S, Output, Probe

__all__ = ["HANGS", "FakeMachine", "place"]

#: As a command's or probe's answer: it doesn't end in time.
HANGS = object()


def place(path: str = "/scratch/run", **changes: Any) -> list[dict[str, Any]]:
    """An answer of the probe `place` for a roomy Lustre."""
    answer = {
        "path": path,
        "real": path,
        "exists": True,
        "mount": "/scratch",
        "kind": "lustre",
        "options": "rw,flock",
        "free_bytes": 10**15,
        "total_bytes": 2 * 10**15,
        "free_inodes": 10**9,
        "total_inodes": 2 * 10**9,
        "inode": 7,
        "fsid": 11,
        "writable": True,
    }
    return [{**answer, **changes}]


@dataclass
class FakeMachine:
    """Commands and probes by how their calls begin: the longest such key answers. None = no such program.

    A command's answer is its stdout, or (exit code, stderr); a probe's is its value, or an OSError.
    """

    commands: Mapping[str, Any] = field(default_factory=dict)
    probes: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    folders: Mapping[str, Sequence[str]] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)
    limits: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    taken_ports: Sequence[int] = ()
    host: str = "n1"
    time: float = 1000.0

    def run(self, *argv: str, timeout_s: float = COMMAND_S) -> Output:
        answer = _answer(self.commands, argv)
        if answer is None:
            return Output(code=127, problem=f"'{argv[0]}' is not on PATH", missing=True)
        if answer is HANGS:
            return Output(code=-9, problem=f"{argv[0]}: no answer within {timeout_s:.0f} s", timed_out=True)
        if isinstance(answer, tuple):
            code, complaint = answer
            return Output(code=code, stderr=complaint, problem=f"{' '.join(argv)}: {complaint.splitlines()[0]}")
        return Output(stdout=answer)

    def probe(self, what: str, *arguments: str, timeout_s: float = COMMAND_S, python: str = "") -> Probe:
        if what == "place" and len(arguments) > 1:
            return self._places(arguments, timeout_s)
        answer = _answer(self.probes, (what, *arguments))
        if answer is HANGS:
            return Probe(problem=f"no answer within {timeout_s:.0f} s", timed_out=True)
        if isinstance(answer, OSError):
            return Probe(problem=str(answer))
        return Probe(value=answer)

    def _places(self, paths: Sequence[str], timeout_s: float) -> Probe:
        """As one process that asks for one path after the other: the first that doesn't answer ends it."""
        told = [self.probe("place", path, timeout_s=timeout_s) for path in paths]
        return next((one for one in told if one.problem), Probe(value=[one.value[0] for one in told if one.value]))

    def read(self, path: str) -> str | None:
        return self.files.get(path)

    def listing(self, path: str) -> list[str]:
        return sorted(self.folders.get(path, ()))

    def limit(self, name: Literal["nofile", "memlock"]) -> tuple[float, float]:
        return self.limits.get(name, (math.inf, math.inf))

    def can_bind(self, port: int) -> str:
        return "Address already in use" if port in self.taken_ports else ""

    def now(self) -> float:
        return self.time


def _answer(table: Mapping[str, Any], words: Sequence[str]) -> Any:
    call = " ".join(words)
    key = max((key for key in table if call.startswith(key)), key=len, default=None)
    return None if key is None else table[key]
