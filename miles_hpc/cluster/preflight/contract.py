"""What a check is, what it sees, what it answers. Nothing here touches the machine.

    Machine (commands, /proc, environment, clock) ─┐
    Context (site, run, run directory)  ───────────┴─▶ Check.look ─▶ findings: ok | warn | FAIL | skip

A `Check` looks at one machine. A `Comparison` has a part that gathers a value on each node, and a part that compares
them. Both are frozen and registered in `catalogue`; others come in through the entry-point group `miles_hpc`, as
"check:<name>". A finding that isn't fine says what to do about it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from miles_hpc.cluster.site import role_environment
from miles_hpc.core.config import RunConfig, SiteConfig
from miles_hpc.core.paths import RunPaths

__all__ = [
    "COMMAND_S",
    "Check",
    "Comparison",
    "Context",
    "Finding",
    "Machine",
    "Need",
    "Output",
    "Probe",
    "Status",
    "fail",
    "fine",
    "skip",
    "warn",
]

#: ok: as it should be. warn: may hurt. FAIL: the run would break or hang. skip: not looked at, and why.
Status = Literal["ok", "warn", "FAIL", "skip"]
#: slurm: the site has Slurm. compute: a machine that runs roles (in a job, or a site without Slurm). Others by name.
Need = Literal["site", "slurm", "compute", "job", "run", "run directory", "gpus"]
#: Seconds that one command of a check may take; a healthy machine answers in a fraction of it.
COMMAND_S = 10.0


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at: what was seen and, unless it is fine, what to do. Raises ValueError without."""

    status: Status
    saw: str
    do: str = ""

    def __post_init__(self) -> None:
        if self.status in ("warn", "FAIL") and not self.do:
            raise ValueError(f"a finding that isn't fine says what to do: {self.saw}")

    @property
    def ok(self) -> bool:
        """Whether a run can go on."""
        return self.status != "FAIL"

    @property
    def mark(self) -> str:
        return self.status

    @property
    def text(self) -> str:
        return self.saw


def fine(saw: str) -> Finding:
    return Finding("ok", saw)


def warn(saw: str, do: str) -> Finding:
    return Finding("warn", saw, do)


def fail(saw: str, do: str) -> Finding:
    return Finding("FAIL", saw, do)


def skip(saw: str) -> Finding:
    return Finding("skip", saw)


@dataclass(frozen=True)
class Output:
    """How a command ended. `problem` is "" when it ran to its end with code 0, otherwise one line on what is wrong."""

    stdout: str = ""
    stderr: str = ""
    code: int = 0
    problem: str = ""
    timed_out: bool = False
    missing: bool = False  # no such program

    @property
    def text(self) -> str:
        """Both streams: some Slurm versions list things on stderr."""
        return self.stdout + self.stderr


@dataclass(frozen=True)
class Probe:
    """What a probe of `probe.py` answered; `problem` is "" when it did."""

    value: Any = None
    problem: str = ""
    timed_out: bool = False


class Machine(Protocol):
    """The way out of a check: everything that it learns of the machine comes through here. All methods return.

    Commands and probes run in children of their own, so that what hangs there (a sick GPU, a dead file system) ends in
    a time-out. A child in uninterruptible sleep can't be killed: it is left behind, never waited for.
    """

    environ: Mapping[str, str]

    @property
    def host(self) -> str:
        """Slurm's name of this node, else the host's."""
        ...

    def run(self, *argv: str, timeout_s: float = COMMAND_S) -> Output:
        """Run a command; never raises."""
        ...

    def probe(self, what: str, *arguments: str, timeout_s: float = COMMAND_S, python: str = "") -> Probe:
        """Run a probe of `probe.py` in a child, by `python` when that is given; never raises."""
        ...

    def read(self, path: str) -> str | None:
        """Text of a kernel's file below /proc, /sys or /dev; None when it can't be read. Not for other file systems."""
        ...

    def listing(self, path: str) -> list[str]:
        """Sorted names in a folder of the kernel's; empty when there is none."""
        ...

    def limit(self, name: Literal["nofile", "memlock"]) -> tuple[float, float]:
        """Soft and hard limit, bytes for memlock; math.inf = unlimited."""
        ...

    def can_bind(self, port: int) -> str:
        """ "" when a TCP socket can listen on the port of all addresses here, otherwise the kernel's complaint."""
        ...

    def now(self) -> float:
        """Wall clock, epoch seconds."""
        ...


@dataclass(frozen=True, kw_only=True)
class Context:
    """What the checks are about. Each part may be missing; a check names those that it needs."""

    site: SiteConfig | None = None
    run: RunConfig | None = None
    run_dir: Path | None = None  # absolute; need not exist yet
    compute: bool = False  # roles run on a machine like this one: a compute node, or a site without Slurm
    environ: Mapping[str, str] = field(default_factory=dict)

    @property
    def paths(self) -> RunPaths | None:
        return RunPaths(self.run_dir) if self.run_dir is not None else None

    @property
    def nodes(self) -> int:
        """Nodes of the run's widest role; 2 without a run, since that is what checks of the fabric are for."""
        if self.run is None:
            return 2
        groups = self.run.groups
        return max(groups.trainer.nodes, groups.rollout.nodes, groups.sandbox.nodes)

    @property
    def role_environment(self) -> dict[str, str]:
        """This process's environment under what the site sets for the run's widest role."""
        if self.site is None:
            return dict(self.environ)
        return {**self.environ, **role_environment(self.site, nodes=self.nodes)}

    @property
    def gpus(self) -> int:
        """The most GPUs that a node of the run has, or of the site when there is no run; 0 = none, or unknown."""
        if self.run is not None:
            return max(self.run.groups.trainer.gpus_per_node, self.run.groups.rollout.gpus_per_node)
        if self.site is None:
            return 0
        return max([self.site.node.gpus, *(partition.gpus_per_node for partition in self.site.partitions)])

    def missing(self, needs: Iterable[Need]) -> str:
        """Why a check with these needs can't look: "" when it can, otherwise a short clause with the way out."""
        site, here = self.site, self.environ
        answers: dict[Need, tuple[bool, str]] = {
            "site": (site is not None, "needs --site"),
            "slurm": (site is None or site.scheduler == "slurm", "a site without Slurm"),
            "job": ("SLURM_JOB_ID" in here, "for inside a job: --on-nodes N"),
            "compute": (self.compute, "for machines that run roles: --on-nodes N, or a --site without Slurm"),
            "run": (self.run is not None, "needs --run"),
            "run directory": (self.run_dir is not None, "needs --run-dir or --run"),
            "gpus": (site is None or self.gpus > 0, "no GPUs"),
        }
        return next((clause for there, clause in map(answers.__getitem__, needs) if not there), "")

    def expand(self, path: str) -> str:
        """`path` with this process's variables and ~ in it; "" when one of them isn't set."""
        expanded = os.path.expanduser(path)  # noqa: PTH111 - text in, text out
        for name in sorted(self.environ, key=len, reverse=True):
            expanded = expanded.replace(f"${name}", self.environ[name]).replace(f"${{{name}}}", self.environ[name])
        return "" if "$" in expanded else expanded


@dataclass(frozen=True, kw_only=True)
class Check:
    """A question about one machine."""

    name: str
    why: str  # what happens otherwise, in one sentence
    source: str  # where that was seen: public reports, documentation
    look: Callable[[Machine, Context], Iterable[Finding]]
    needs: tuple[Need, ...] = ()
    once: bool = False  # about the cluster or the run directory, not about a machine: not asked again on each node


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A question about nodes that must be alike. `gather` runs on each and answers plain JSON data.

    `compare` gets the values by node, two nodes or more; a node that gathered None has nothing to compare.
    """

    name: str
    why: str
    source: str
    gather: Callable[[Machine, Context], Any]
    compare: Callable[[Mapping[str, Any], Context], Iterable[Finding]]
    needs: tuple[Need, ...] = ()
