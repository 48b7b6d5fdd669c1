"""What to ask Slurm for: a pure function from run, site and run directory to a frozen plan.

    hetjob, hetjob_span                                  split, split_span
    component 0  trainer   batch script on node 0        one component: trainer's nodes, rollout's, sandbox's, spares
    component 1  rollout                                 what a node is asked for is the most that any role needs
    component 2  sandbox   when it has nodes

The batch script runs supervisor and controller on the first node. Partition, nodes, constraint, gres, exclusive and
others don't carry over from one component to the next, and what does carry over differs between Slurm versions: so
every component states everything. Each has its own job name, because --dependency=singleton makes components of one
name wait for each other.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from miles_hpc.cluster.site import job_environment, role_python
from miles_hpc.core.config import GroupConfig, RunConfig, SiteConfig, SitePartition
from miles_hpc.core.errors import UserError
from miles_hpc.core.layouts import asked_nodes, is_split, layout_of, role_partition, roles_in_use
from miles_hpc.core.paths import RunPaths
from miles_hpc.core.site import Layout
from miles_hpc.core.site_rules import directive_complaints

__all__ = ["JobComponent", "JobPlan", "gpu_option", "memory_option", "plan_job", "tasks_per_node"]


@dataclass(frozen=True)
class JobComponent:
    """One component of the job. "" and None mean: not asked for."""

    roles: tuple[str, ...]
    name: str
    partition: str  # "" where the site finds it from QOS and constraint
    nodes: int
    ntasks: int
    ntasks_per_node: int
    cpus_per_task: int
    gpus: str  # "--gres=gpu:h100:8", "--gpus-per-node=8" or "--gpus-per-task=1"
    gpu_bind: str
    constraint: str
    mem: str
    time: str
    extra: tuple[str, ...]  # further options, each stated as it is

    @property
    def directives(self) -> tuple[str, ...]:
        """Every option of this component as sbatch reads it."""
        optional = (
            self.gpus,
            f"--gpu-bind={self.gpu_bind}" if self.gpu_bind else "",
            f"--constraint={_quoted(self.constraint)}" if self.constraint else "",
            f"--mem={self.mem}" if self.mem else "",
        )
        return (
            f"--job-name={self.name}",
            *([f"--partition={self.partition}"] if self.partition else []),
            f"--nodes={self.nodes}",
            f"--ntasks={self.ntasks}",
            f"--ntasks-per-node={self.ntasks_per_node}",
            f"--cpus-per-task={self.cpus_per_task}",
            *(option for option in optional if option),
            *([f"--time={self.time}"] if self.time else []),  # "" is the partition's default; sbatch takes no empty one
            *self.extra,
        )


@dataclass(frozen=True)
class JobPlan:
    """One batch job."""

    run_name: str
    run_dir: Path
    layout: Layout
    components: tuple[JobComponent, ...]
    python: str  # of the supervisor and the controller
    exports: dict[str, str]  # for the batch script and everything below it
    modules: tuple[str, ...]


def tasks_per_node(run: RunConfig, role: str) -> int:
    """Tasks of a role's own step on each of its nodes: an agent a rank, or one agent."""
    return run.groups.trainer.ranks_per_node if role == "trainer" else 1


def gpu_option(site: SiteConfig, partition: SitePartition, gpus_per_node: int, tasks_per_node: int = 1) -> str:
    """The one form of GPU request that the site accepts; "" when no GPUs are asked for or the node implies them."""
    if gpus_per_node == 0 or site.gpu_request == "none":
        return ""
    kind = f"{partition.gres}:" if partition.gres else ""
    if site.gpu_request == "gres":
        return f"--gres=gpu:{kind}{gpus_per_node}"
    if site.gpu_request == "gpus-per-task":
        return f"--gpus-per-task={kind}{gpus_per_node // tasks_per_node}"
    return f"--gpus-per-node={kind}{gpus_per_node}"


def memory_option(site: SiteConfig, mem: str) -> str:
    """The value of --mem: what the group asks for, or 0 (the whole node) where the site wants that; "" = not stated."""
    return mem or ("0" if site.sbatch.mem == "zero" else "")


def plan_job(run: RunConfig, site: SiteConfig, paths: RunPaths) -> JobPlan:
    """The plan of one batch job. `run` and `site` have passed `validate`.

    Raises UserError for paths sbatch can't take, and for an option that the site forbids or misses.

    `paths` is absolute: the job starts in the run directory whatever the submitting shell's folder was.
    """
    common = [
        f"--output={_quoted(str(paths.attempts / 'slurm-%A.out'), percent=True)}",
        f"--chdir={_quoted(str(paths.root))}",
        "--open-mode=append",
        "--requeue" if site.requeue else "--no-requeue",
        f"--signal=B:USR2@{run.job.signal_s}",
    ]
    common += [f"--account={run.job.account}"] if run.job.account else []
    common += [f"--qos={run.job.qos}"] if run.job.qos else []
    common += [f"--network={site.fabric.slurm_network}"] if site.fabric.slurm_network else []
    common += [*site.directives, *run.job.extra_directives]
    layout = layout_of(run, site)
    used = roles_in_use(run)
    if any(getattr(run.groups, role).spare_nodes for role in used):
        common.append("--no-kill")
    components = tuple(_component(run, site, roles, common) for roles in ([used] if is_split(layout) else zip(used)))
    for component in components:
        for complaint in directive_complaints(site, list(component.directives), run.job.extra_directives):
            raise UserError(f"run '{run.name}': {complaint}")
    return JobPlan(
        run_name=run.name,
        run_dir=paths.root,
        layout=layout,
        components=components,
        python=role_python(run, site, "controller"),
        exports=job_environment(run, site, nodes=max(getattr(run.groups, role).nodes for role in used)),
        modules=tuple(site.modules),
    )


def _component(run: RunConfig, site: SiteConfig, roles: tuple[str, ...], common: list[str]) -> JobComponent:
    """The component of these roles. A node of several roles is asked for what the greediest of them needs."""
    partition = role_partition(run, site, roles[0])
    if partition is None:
        raise UserError(f"groups.{roles[0]}: site '{site.name}' has no partition for {' and '.join(roles)}")
    groups: list[GroupConfig] = [getattr(run.groups, role) for role in roles]
    tasks = max(tasks_per_node(run, role) for role in roles)
    cpus = max(group.cpus_per_task * tasks_per_node(run, role) for role, group in zip(roles, groups, strict=True))
    gpus = max(group.gpus_per_node for group in groups)
    nodes = sum(map(asked_nodes, groups))
    return JobComponent(
        roles=roles,
        name=f"{run.name}-{roles[0]}" if len(roles) == 1 else run.name,
        partition=partition.name if site.sbatch.partition_stated else "",
        nodes=nodes,
        ntasks=nodes * tasks,
        ntasks_per_node=tasks,
        cpus_per_task=-(-cpus // tasks),
        gpus=gpu_option(site, partition, gpus, tasks),
        gpu_bind=site.sbatch.gpu_bind if gpus else "",
        constraint=next((group.constraint for group in groups if group.constraint), partition.constraint),
        mem=memory_option(site, next((group.mem for group in groups if group.mem), "")),
        time=run.job.time,
        extra=(*_segment(site, nodes), *common),
    )


def _segment(site: SiteConfig, nodes: int) -> tuple[str, ...]:
    """--segment has no effect when all nodes fit into one segment (topology.html), so it isn't stated then."""
    size = site.topology.segment_nodes
    return (f"--segment={size}",) if site.topology.segment_directive and 0 < size < nodes else ()


def _quoted(text: str, *, percent: bool = False) -> str:
    """A directive's value; sbatch takes double quotes. `percent` allows file name patterns such as %A."""
    if re.search(r'["\\\n]', text) or ("%" in text.replace("%A", "") and percent):
        raise UserError(f"'{text}': sbatch can't take this path: expected no quotes, backslashes, '%' or line breaks")
    return text if re.match(r"[A-Za-z0-9_./:@,=+%&|*()\[\]-]*\Z", text) and "&" not in text else f'"{text}"'
