"""Starting roles: as Slurm steps of this allocation, or as plain processes on one machine.

A step covers some hosts of one role with one incarnation number. Incarnations count up over all starts of the role, so
that a newer agent of a host always has the higher number and fences the one before it.
"""

from __future__ import annotations

import asyncio
import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from miles_hpc.cluster.hetjob import job_roles
from miles_hpc.cluster.placement import het_group_hosts, role_environ, role_srun_args
from miles_hpc.cluster.site import role_python
from miles_hpc.cluster.slurm import Slurm
from miles_hpc.control.children import ChildProcess
from miles_hpc.core.config import RunConfig, SiteConfig
from miles_hpc.core.errors import UserError
from miles_hpc.core.paths import RunPaths

__all__ = ["LocalStarter", "SlurmStarter", "Step", "StepStarter"]


@dataclass
class Step:
    """One start of (a part of) a role."""

    role: str
    name: str
    hosts: tuple[str, ...]
    incarnation: int
    process: ChildProcess


class StepStarter(ABC):
    """Knows the hosts of each role and how to start agents on them."""

    def __init__(self, run: RunConfig, site: SiteConfig, paths: RunPaths, attempt: int) -> None:
        self.run = run
        self.site = site
        self.paths = paths
        self.attempt = attempt
        self.roles = tuple(job_roles(run))

    @abstractmethod
    def hosts(self, role: str) -> tuple[str, ...]:
        """All hosts of a role, in rank order."""

    @abstractmethod
    def start(self, role: str, hosts: Sequence[str], incarnation: int) -> list[Step]:
        """Start agents of `role` on `hosts`."""

    @abstractmethod
    async def end(self, step: Step) -> None:
        """End whatever is left of a step, also when its starter process is gone already."""

    def agent_command(self, role: str, incarnation: int, *extra: str) -> list[str]:
        return [
            role_python(self.run, self.site, role),
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
    """One srun per role; a lost rollout or sandbox host gets an srun of its own."""

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
        self._hosts = het_group_hosts(environ)

    def hosts(self, role: str) -> tuple[str, ...]:
        return tuple(self._hosts[role])

    def start(self, role: str, hosts: Sequence[str], incarnation: int) -> list[Step]:
        name = f"{role}-a{self.attempt}-i{incarnation}"
        whole = tuple(hosts) == self.hosts(role)
        logs = self.paths.logs(self.attempt)
        srun = role_srun_args(
            self.run,
            self.site,
            role,
            name=name,
            hosts=None if whole else list(hosts),
            environ=self._environ,
            logs=logs,
        )
        command = [*srun, *self.agent_command(role, incarnation)]
        process = ChildProcess(
            name, command, log=logs / f"{name}.log", env=role_environ(self._environ, self.run, self.site, role)
        )
        return [Step(role, name, tuple(hosts), incarnation, process)]

    async def end(self, step: Step) -> None:
        """Cancel the step by its name: an srun that was killed leaves its tasks running."""
        await asyncio.to_thread(self._slurm.cancel_step, self._job_id, step.name)
        if step.process.exit_code is None:
            await step.process.end(grace_s=5.0)


class LocalStarter(StepStarter):
    """The same agents on this machine: mpiexec for the trainer world, one process per other host."""

    def hosts(self, role: str) -> tuple[str, ...]:
        group = getattr(self.run.groups, role)
        count = group.nodes * (group.ranks_per_node if role == "trainer" else 1)
        return tuple(f"{role}{i + 1}" for i in range(count))

    def start(self, role: str, hosts: Sequence[str], incarnation: int) -> list[Step]:
        if role == "trainer":
            name = f"{role}-a{self.attempt}-i{incarnation}"
            command = [*self._mpiexec(len(hosts)), *self.agent_command(role, incarnation, "--host-prefix", role)]
            return [Step(role, name, tuple(hosts), incarnation, self._child(name, command))]
        steps = []
        for host in hosts:
            name = f"{host}-a{self.attempt}-i{incarnation}"
            child = self._child(name, self.agent_command(role, incarnation, "--host", host))
            steps.append(Step(role, name, (host,), incarnation, child))
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
