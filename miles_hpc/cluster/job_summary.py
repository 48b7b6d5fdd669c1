"""What a submission would ask for and cost, in plain words: a pure function of run, site and plan. For --dry-run.

The numbers are those that Slurm bills at the most: every allocation used to its end, every allocation used.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_hpc.cluster.job_plan import JobPlan, tasks_per_node
from miles_hpc.cluster.lifecycle import format_time, parse_time
from miles_hpc.cluster.site_facts import unknown_facts
from miles_hpc.core.config import RunConfig, SiteConfig
from miles_hpc.core.layouts import is_split, role_partition, roles_in_use
from miles_hpc.core.paths import RunPaths

__all__ = ["JobSummary", "RoleSummary", "summarise_job"]

#: Facts of a site that decide whether a job does what is expected of it: key, what isn't known.
_MATTERS = {
    "layouts": "which job layouts it allows",
    "mpi": "which 'srun --mpi' it has",
    "fabric.bootstrap_interface": "which interface collectives should bind",
    "fabric.slurm_network": "whether steps may share a Slingshot network",
    "fabric.vni_strategy": "how steps share a Slingshot network",
    "userns": "whether users may make user namespaces, in which sandboxes run",
    "lifecycle.max_requeues": "how often it requeues a job before it is held",
    "file_systems": "purge and quotas of its file systems",
    "service_ports.first": "which ports services may listen on",
}


@dataclass(frozen=True)
class RoleSummary:
    """What one role gets."""

    role: str
    nodes: int
    spare_nodes: int  # beside `nodes`; they are paid for as well
    gpus_per_node: int
    cpus_per_node: int  # of those that are asked for
    partition: str  # "" = Slurm finds it
    constraint: str

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def text(self) -> str:
        """Its nodes, GPUs, CPUs and where they are from."""
        nodes = _count(self.nodes, "node")
        gpus = f"{nodes} x {_count(self.gpus_per_node, 'GPU')} = {_count(self.gpus, 'GPU')}"
        parts = [gpus if self.gpus_per_node else f"{nodes} without GPUs", f"{_count(self.cpus_per_node, 'CPU')} a node"]
        parts.append(f"partition {self.partition}" if self.partition else "partition found by Slurm")
        parts += [_count(self.spare_nodes, "spare node")] if self.spare_nodes else []
        return ", ".join([*parts, *([f"constraint {self.constraint}"] if self.constraint else [])])


@dataclass(frozen=True)
class JobSummary:
    """One submission. Hours are None where the time limit is the partition's default, or there is none."""

    run: str
    run_dir: Path
    continues: bool  # an earlier submission's run
    site: str
    verified: str  # date of the site file's facts; "" = not stated
    layout: str
    roles: tuple[RoleSummary, ...]
    components: int
    nodes: int  # spare ones included
    gpus: int  # of all nodes, also where a role doesn't use its nodes' GPUs
    account: str
    qos: str
    time: str  # as sbatch is given it
    signal_s: int
    max_allocations: int
    max_idle_allocations: int  # so many in a row without progress end the chain
    requeues: bool  # itself; otherwise it submits a follow-up job
    places: dict[str, str]  # what: where, and how much of it is kept
    unknown: tuple[str, ...]  # facts of the site that matter for this job

    @property
    def hours(self) -> float | None:
        """Time limit of one allocation, None without one; Slurm rounds it up to whole minutes (sbatch(1), --time)."""
        seconds = parse_time(self.time) if self.time else math.inf
        return math.ceil(seconds / 60) / 60 if math.isfinite(seconds) else None

    def lines(self) -> list[str]:
        """For people, a line per subject."""
        rows = [
            ("run", f"{self.run}, would {'continue' if self.continues else 'start'} in {self.run_dir}"),
            (
                "site",
                self.site + (f", its facts are of {self.verified}" if self.verified else ", its facts are undated"),
            ),
            *((role.role, role.text) for role in self.roles),
            ("in all", self._in_all()),
            ("account", f"{self.account or 'your default'}, QOS {self.qos or 'your default'}"),
            ("allocation", self._cost(1)),
            (
                "at most",
                f"{_count(self.max_allocations, 'allocation')} in the run's life: {self._cost(self.max_allocations)}",
            ),
            ("at the end", self._end()),
            ("breaker", f"{_count(self.max_idle_allocations, 'allocation')} in a row without progress ends the chain"),
            *self.places.items(),
        ]
        rows += [("not known" if i == 0 else "", fact) for i, fact in enumerate(self.unknown)]
        if self.unknown:
            rows.append(("", f"all that isn't known of this site: 'miles-hpc sites check {self.site}'"))
        width = max(len(name) for name, _ in rows)
        return [f"{name:<{width}}  {text}" for name, text in rows]

    def facts(self) -> dict[str, Any]:
        """For programs."""
        hours = self.hours
        in_all = None if hours is None else hours * self.max_allocations
        return {
            "run": self.run,
            "run_dir": str(self.run_dir),
            "continues": self.continues,
            "site": self.site,
            "site_verified": self.verified or None,
            "layout": self.layout,
            "roles": {
                role.role: {
                    "nodes": role.nodes,
                    "spare_nodes": role.spare_nodes,
                    "gpus_per_node": role.gpus_per_node,
                    "gpus": role.gpus,
                    "cpus_per_node": role.cpus_per_node,
                    "partition": role.partition or None,
                }
                for role in self.roles
            },
            "nodes": self.nodes,
            "gpus": self.gpus,
            "account": self.account or None,
            "qos": self.qos or None,
            "hours": hours,
            "node_hours": None if hours is None else hours * self.nodes,
            "gpu_hours": None if hours is None else hours * self.gpus,
            "max_allocations": self.max_allocations,
            "max_node_hours": None if in_all is None else in_all * self.nodes,
            "max_gpu_hours": None if in_all is None else in_all * self.gpus,
            "max_idle_allocations": self.max_idle_allocations,
            "next_allocation": "requeue" if self.requeues else "follow-up job",
            "places": self.places,
            "unknown": list(self.unknown),
        }

    def _in_all(self) -> str:
        text = f"{_count(self.nodes, 'node')}, {_count(self.gpus, 'GPU') if self.gpus else 'no GPUs'}"
        text += f", layout {self.layout}"
        if self.components > 1:  # each component is a job of its own to the limits on a user's jobs
            text += f": {self.components} components, which limits on jobs count as {self.components}"
        return text

    def _cost(self, allocations: int) -> str:
        hours = self.hours
        if hours is None:
            limit = "no time limit" if self.time else "the partition's default time limit"
            return f"{limit}: node-hours aren't known"
        spent = hours * allocations
        gpu_hours = f", {_hours(spent * self.gpus)} GPU-hours" if self.gpus else ""
        time = format_time(hours * 3600) + (" each, " if allocations > 1 else ", ")
        return f"{time}{_hours(spent * self.nodes)} node-hours{gpu_hours}"

    def _end(self) -> str:
        saved = f"{self.signal_s} s before the time limit Slurm gives notice and state is saved"
        if self.max_allocations == 1:
            return f"{saved}; there is no next allocation (job.max_allocations = 1)"
        if self.requeues:
            return f"{saved}; while steps are left, the job requeues itself under its id"
        return f"{saved}; a follow-up job, queued when this one starts, goes on while steps are left"


def summarise_job(run: RunConfig, site: SiteConfig, plan: JobPlan, paths: RunPaths, *, continues: bool) -> JobSummary:
    """The summary of a submission whose run and site have passed `validate`. Raises UserError for a malformed time."""
    partitions = {role: component.partition for component in plan.components for role in component.roles}
    roles = tuple(_role(run, site, role, partitions[role]) for role in roles_in_use(run))
    per_node = max(role.gpus_per_node for role in roles)  # in a split job every node is asked for as many
    gpus = [
        (role.nodes + role.spare_nodes) * (per_node if is_split(plan.layout) else role.gpus_per_node) for role in roles
    ]
    interval = run.checkpoint.interval_steps
    return JobSummary(
        run=run.name,
        run_dir=paths.root,
        continues=continues,
        site=site.name,
        verified=site.verified,
        layout=plan.layout,
        roles=roles,
        components=len(plan.components),
        nodes=sum(component.nodes for component in plan.components),
        gpus=sum(gpus),
        account=run.job.account,
        qos=run.job.qos,
        time=run.job.time,
        signal_s=run.job.signal_s,
        max_allocations=run.job.max_allocations,
        max_idle_allocations=run.job.max_idle_allocations,
        requeues=site.requeue,
        places={
            "output": f"{paths.attempts}/slurm-<job id>.out",
            "logs": f"{paths.attempts}/<attempt>/logs",
            "checkpoints": f"{paths.checkpoints}, every {_count(interval, 'step') if interval > 1 else 'step'}, "
            f"the newest {run.checkpoint.keep} are kept",
        },
        unknown=_unknown(run, site),
    )


def _role(run: RunConfig, site: SiteConfig, role: str, partition: str) -> RoleSummary:
    group = getattr(run.groups, role)
    stated = role_partition(run, site, role)
    return RoleSummary(
        role=role,
        nodes=group.nodes,
        spare_nodes=group.spare_nodes,
        gpus_per_node=group.gpus_per_node,
        cpus_per_node=group.cpus_per_task * tasks_per_node(run, role),
        partition=partition,
        constraint=group.constraint or (stated.constraint if stated is not None else ""),
    )


def _unknown(run: RunConfig, site: SiteConfig) -> tuple[str, ...]:
    """In the words of `_MATTERS`, without what this job doesn't touch."""
    keys = [key.partition(" ")[0] for key in unknown_facts(site)]  # "mpi (pmi2 is tried)"
    beside = set() if run.groups.sandbox.nodes else {"userns"}
    if not site.requeue:
        beside.add("lifecycle.max_requeues")
    return tuple(_MATTERS[key] for key in keys if key in _MATTERS and key not in beside)


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'s' * (n != 1)}"


def _hours(hours: float) -> str:
    """Three digits at least: "0.833", "8.5", "12,345"."""
    return f"{hours:,.0f}" if hours >= 100 else f"{hours:.3g}"
