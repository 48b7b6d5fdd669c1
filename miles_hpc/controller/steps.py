"""Starting roles: as Slurm steps of this allocation, or as plain processes on one machine.

A step covers some hosts of one role with one incarnation number. Incarnations count up over all starts of the role, so
that a newer agent of a host always has the higher number and fences the one before it.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from miles_hpc.cluster.placement import place, role_environ, role_srun_args, span_srun_args
from miles_hpc.cluster.site import role_python
from miles_hpc.cluster.slurm import Slurm
from miles_hpc.control.children import ChildProcess
from miles_hpc.core.config import RunConfig, SiteConfig
from miles_hpc.core.deadline import Deadline
from miles_hpc.core.errors import MilesError, UserError
from miles_hpc.core.layouts import is_split, roles_in_use, spans
from miles_hpc.core.paths import RunPaths

__all__ = ["LocalStarter", "SlurmStarter", "Step", "StepStarter"]

#: How long agents go on after SIGTERM: longer than any save, and Slurm's own grace is mostly shorter.
_NOTICE_S = 300.0
#: How long an interrupted step may take to end its children before it is killed.
_INTERRUPTED_S = 8.0


@dataclass
class Step:
    """One start of one or more roles, or of a part of one."""

    name: str
    hosts: dict[str, tuple[str, ...]]  # by role
    incarnation: int
    process: ChildProcess

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(self.hosts)


class StepStarter(ABC):
    """Knows the hosts of each role and how to start agents on them."""

    def __init__(self, run: RunConfig, site: SiteConfig, paths: RunPaths, attempt: int) -> None:
        self.run = run
        self.site = site
        self.paths = paths
        self.attempt = attempt
        self.roles = roles_in_use(run)

    @property
    def units(self) -> tuple[tuple[str, ...], ...]:
        """Roles that start together, because one step or one MPI world holds them."""
        return tuple((role,) for role in self.roles)

    @abstractmethod
    def hosts(self, role: str) -> tuple[str, ...]:
        """All hosts of a role, in rank order."""

    @abstractmethod
    def start(self, hosts: Mapping[str, Sequence[str]], incarnation: int) -> list[Step]:
        """Start agents of these roles on these hosts: whole roles of one unit, or some hosts of one role."""

    @abstractmethod
    async def end(self, step: Step) -> None:
        """End whatever is left of a step, also when its starter process is gone already."""

    async def failed_nodes(self) -> dict[str, str]:
        """Hosts that Slurm has given up, with its reason; none where nobody knows."""
        return {}

    def replace(self, role: str, host: str) -> str | None:
        """Take a host out of its role for good; returns the spare that is in its place, None when there is none."""
        return None

    def agent_command(self, role: str, incarnation: int, *extra: str) -> list[str]:
        return [
            role_python(self.run, self.site, "controller" if role == "auto" else role),
            "-P",
            "-m",
            "launchers.agent",
            "--run-dir",
            str(self.paths.root),
            "--role",
            role,
            "--attempt",
            str(self.attempt),
            "--incarnation",
            str(incarnation),
            *extra,
        ]


class SlurmStarter(StepStarter):
    """One srun per role, or one over all; a lost rollout or sandbox host gets an srun of its own."""

    def __init__(
        self,
        run: RunConfig,
        site: SiteConfig,
        paths: RunPaths,
        attempt: int,
        *,
        slurm: Slurm,
        job_id: int,
        environ: Mapping[str, str],
    ) -> None:
        super().__init__(run, site, paths, attempt)
        self._slurm = slurm
        self._job_id = job_id
        self._environ = dict(environ)
        self._placement = place(run, site, environ)

    @property
    def units(self) -> tuple[tuple[str, ...], ...]:
        return (self.roles,) if spans(self._placement.layout) else super().units

    def hosts(self, role: str) -> tuple[str, ...]:
        return self._placement.hosts[role]

    def start(self, hosts: Mapping[str, Sequence[str]], incarnation: int) -> list[Step]:
        roles = tuple(hosts)
        spanning = roles in self.units and spans(self._placement.layout)
        name = f"{'all' if spanning else roles[0]}-a{self.attempt}-i{incarnation}"
        logs = self.paths.logs(self.attempt)
        extra = ["--notice", str(_NOTICE_S)]
        if spanning:
            extra = ["--span", *extra]
            wanted = ("auto",) if is_split(self._placement.layout) else roles
            programs = {"" if r == "auto" else r: self.agent_command(r, incarnation, *extra) for r in wanted}
            command = span_srun_args(self.run, self.site, programs, name=name, placement=self._placement, logs=logs)
        else:
            (role,) = roles
            srun = role_srun_args(
                self.run,
                self.site,
                role,
                name=name,
                placement=self._placement,
                hosts=None if tuple(hosts[role]) == self.hosts(role) else hosts[role],
                logs=logs,
            )
            command = [*srun, *self.agent_command(role, incarnation, *extra)]
        environ = role_environ(self._environ, self.run, self.site, roles)
        process = ChildProcess(name, command, log=logs / f"{name}.log", env=environ)
        return [Step(name, {role: tuple(hosts[role]) for role in roles}, incarnation, process)]

    async def end(self, step: Step) -> None:
        """Interrupt the step by its name, then kill it: an srun that was killed leaves its tasks running.

        SIGINT, because agents take SIGTERM for a notice of Slurm's and go on until the run is saved.
        """
        try:
            await self._end_tasks(step)
        except MilesError as error:  # what is left is fenced by the newer start, and ends with the job
            print(f"supervisor: step {step.name}: {error}", file=sys.stderr, flush=True)
        if step.process.exit_code is None:
            await step.process.end(grace_s=5.0)

    async def _end_tasks(self, step: Step) -> None:
        deadline = Deadline(_INTERRUPTED_S, f"the end of step {step.name}")
        left = await asyncio.to_thread(self._slurm.cancel_step, self._job_id, step.name, signal="INT")
        while left and not deadline.expired:
            await asyncio.sleep(0.3)
            left = [one.id for one in await asyncio.to_thread(self._slurm.steps, self._job_id) if one.name == step.name]
        if left:
            await asyncio.to_thread(self._slurm.cancel_step, self._job_id, step.name, signal="KILL")

    async def failed_nodes(self) -> dict[str, str]:
        here = self._placement
        known = {host for some in (*here.hosts.values(), *here.spares.values()) for host in some}
        failed = await asyncio.to_thread(self._slurm.failed_nodes, sorted(known)) if known else {}
        self._placement = self._placement.without_spares(failed)
        return failed

    def replace(self, role: str, host: str) -> str | None:
        self._placement, spare = self._placement.replaced(role, host)
        return spare


class LocalStarter(StepStarter):
    """The same agents on this machine: mpiexec for the trainer world, one process per other host."""

    def hosts(self, role: str) -> tuple[str, ...]:
        group = getattr(self.run.groups, role)
        count = group.nodes * (group.ranks_per_node if role == "trainer" else 1)
        return tuple(f"{role}{i + 1}" for i in range(count))

    def start(self, hosts: Mapping[str, Sequence[str]], incarnation: int) -> list[Step]:
        ((role, chosen),) = hosts.items()
        if role == "trainer":
            name = f"{role}-a{self.attempt}-i{incarnation}"
            command = [*self._mpiexec(len(chosen)), *self.agent_command(role, incarnation, "--host-prefix", role)]
            return [Step(name, {role: tuple(chosen)}, incarnation, self._child(name, command))]
        steps = []
        for host in chosen:
            name = f"{host}-a{self.attempt}-i{incarnation}"
            child = self._child(name, self.agent_command(role, incarnation, "--host", host))
            steps.append(Step(name, {role: (host,)}, incarnation, child))
        return steps

    async def end(self, step: Step) -> None:
        if step.process.exit_code is None:
            await step.process.end(grace_s=5.0)

    def _child(self, name: str, command: list[str]) -> ChildProcess:
        return ChildProcess(name, command, log=self.paths.logs(self.attempt) / f"{name}.log")

    def _mpiexec(self, ranks: int) -> list[str]:
        beside = Path(role_python(self.run, self.site, "trainer")).with_name("mpiexec")
        found = str(beside) if beside.exists() else shutil.which("mpiexec")
        if found is None:
            raise UserError(
                "the trainer world needs mpiexec: none beside the trainer's Python and none on PATH; "
                "install the extra 'mpich' into that environment"
            )
        return [found, "-n", str(ranks)]
