"""Slurm in memory, with the interface of `cluster.slurm.Slurm`: what a test sets up is what the client sees."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from miles_hpc.cluster.accounting import AccountingRecord
from miles_hpc.cluster.slurm import ComponentState, PartitionLimits, SlurmError, Step
from miles_hpc.core.errors import UserError

__all__ = ["FakeSlurm"]


@dataclass
class FakeSlurm:
    """Jobs start PENDING; `start`, `finish` and `add_step` move them on. `now` is the fake clock, epoch seconds.

    A script's components are counted as sbatch does, by its "#SBATCH hetjob" lines.
    """

    known_partitions: tuple[str, ...] = ("trainer", "rollout", "sandbox")
    refusal: str = ""  # what sbatch complains of; "" = it takes every script
    installed: bool = True
    limits: dict[str, PartitionLimits] = field(default_factory=dict)  # of partitions; without one there is no limit
    now: float = 0.0
    submitted: list[str] = field(default_factory=list)
    dependencies: list[str] = field(default_factory=list)
    excluded: list[tuple[str, ...]] = field(default_factory=list)
    down: dict[str, str] = field(default_factory=dict)  # nodes that Slurm gave up, with its reason
    jobs: dict[int, list[ComponentState]] = field(default_factory=dict)
    running_steps: dict[int, list[Step]] = field(default_factory=dict)
    records: list[AccountingRecord] = field(default_factory=list)  # what sacct has; nothing here adds to it
    away: str = ""  # what scontrol complains of instead of answering
    no_accounting: str = "sacct: Slurm accounting storage is disabled"  # "" = there is accounting
    _next_id: int = 1

    # ---- the interface of Slurm

    def require(self) -> None:
        if not self.installed:
            raise UserError("no Slurm on this machine: 'sbatch' is not on PATH")

    def version(self) -> str:
        return "slurm-fake 0"

    def partitions(self) -> list[str]:
        self.require()
        return list(self.known_partitions)

    def partition_limits(self) -> dict[str, PartitionLimits]:
        self.require()
        return dict(self.limits)

    def node_count(self, partition: str) -> int:
        self.require()
        return 0

    def test(self, script: str | Path) -> None:
        self.require()
        if self.refusal:
            raise UserError(f"Slurm refused the job: {self.refusal}")

    def submit(self, script: str | Path, *, dependency: str = "", exclude: Sequence[str] = ()) -> int:
        self.test(script)
        text = script.read_text() if isinstance(script, Path) else script
        self.submitted.append(text)
        self.dependencies.append(dependency)
        self.excluded.append(tuple(exclude))
        names = re.findall(r"^#SBATCH --job-name=(\S+)", text, re.MULTILINE)
        leader = self._next_id
        self._next_id += len(names)
        self.jobs[leader] = [
            ComponentState(
                job_id=leader + i,
                offset=i,
                name=name,
                state="PENDING",
                reason="Priority",
                nodes="",
                restarts=0,
                exit_code="0:0",
                end_time=None,
            )
            for i, name in enumerate(names)
        ]
        return leader

    def components(self, job_id: int) -> list[ComponentState]:
        if self.away:
            raise SlurmError(f"scontrol -o show job {job_id}: {self.away}")
        return list(self.jobs.get(job_id, []))

    def accounting(self, job_ids: Sequence[int]) -> list[AccountingRecord]:
        if self.no_accounting:
            raise SlurmError(self.no_accounting)
        return [record for record in self.records if record.leader in job_ids]

    def state(self, job_id: int) -> list[str]:
        return [component.state for component in self.components(job_id)]

    def steps(self, job_id: int) -> list[Step]:
        return list(self.running_steps.get(job_id, []))

    def cancel(self, job_id: int, *, signal: str = "") -> None:
        if not signal:
            self.finish(job_id, "CANCELLED")

    def cancel_step(self, job_id: int, name: str, *, signal: str = "") -> list[str]:
        ended = [step for step in self.steps(job_id) if step.name == name]
        if not signal:
            self.running_steps[job_id] = [step for step in self.steps(job_id) if step not in ended]
        return [step.id for step in ended]

    def requeue(self, leader: int) -> None:
        self._change(leader, state="PENDING", restarts=self.jobs[leader][0].restarts + 1, end_time=None, nodes="")
        self.running_steps.pop(leader, None)

    def failed_nodes(self, names: Sequence[str]) -> dict[str, str]:
        return {name: self.down[name] for name in names if name in self.down}

    def end_time(self, job_id: int) -> float | None:
        return min((c.end_time for c in self.components(job_id) if c.end_time is not None), default=None)

    def remaining_s(self, job_id: int) -> float:
        end = self.end_time(job_id)
        return math.inf if end is None else max(0.0, end - self.now)

    # ---- what the cluster does

    def start(self, job_id: int, nodes: list[str], *, limit_s: float) -> None:
        """The job runs on `nodes`, a host list per component."""
        for i, hosts in enumerate(nodes):
            self.jobs[job_id][i] = replace(
                self.jobs[job_id][i], state="RUNNING", reason="", nodes=hosts, end_time=self.now + limit_s
            )

    def finish(self, job_id: int, state: str, *, exit_code: str = "0:0") -> None:
        self._change(job_id, state=state, exit_code=exit_code)
        self.running_steps.pop(job_id, None)

    def forget(self, job_id: int) -> None:
        """MinJobAge has passed: the job is no longer known."""
        self.jobs.pop(job_id)

    def add_step(self, job_id: int, offset: int, name: str) -> None:
        steps = self.running_steps.setdefault(job_id, [])
        component = self.jobs[job_id][offset]
        steps.append(Step(id=f"{component.job_id}.{len(steps)}", name=name, nodes=component.nodes))

    def _change(self, job_id: int, **changes: object) -> None:
        self.jobs[job_id] = [replace(component, **changes) for component in self.jobs[job_id]]  # type: ignore[arg-type]
