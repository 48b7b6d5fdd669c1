"""Which hosts a role has and how its srun is called, seen from inside the allocation. Pure: environ is an argument.

    SLURM_JOB_NODELIST[_HET_GROUP_i] ──place──▶ Placement (hosts and spares by role)
                                                   ├─▶ role_srun_args   one role's step, whole or on some hosts
                                                   └─▶ span_srun_args   one step over all roles

All steps overlap, so that a second step on a node (one rollout host started anew while the first step of its group runs
on) begins at once instead of waiting for the first to end. A step over a split job has as many tasks on every node as
the trainer has ranks, since srun takes one number for all nodes: an agent finds its role by its node (`role_of_node`),
and the tasks beside it only make MPI's world whole.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from miles_hpc.cluster.job_plan import gpu_option, memory_option, tasks_per_node
from miles_hpc.cluster.nodelist import compress, expand
from miles_hpc.cluster.site import role_environment, width_variables
from miles_hpc.core import env
from miles_hpc.core.config import GroupConfig, RunConfig, SiteConfig
from miles_hpc.core.errors import UserError
from miles_hpc.core.layouts import ROLES, is_split, layout_of, role_partition, roles_in_use
from miles_hpc.core.site import Layout

__all__ = [
    "Placement",
    "place",
    "role_environ",
    "role_of_node",
    "role_srun_args",
    "span_srun_args",
    "step_environ",
    "step_mpi",
    "task_environ",
]

# What srun needs of the batch script's environment. All else that Slurm or a user's shell put there describes the first
# component or other commands, and srun would take it for every step: tasks, CPUs, memory, GPUs, host file.
_NEEDED = re.compile(
    r"SLURM_(CONF|JWT|CLUSTER_NAME|JOB_ID|JOBID|HET_SIZE|JOB_ID_HET_GROUP_\d+|JOB_NODELIST(_HET_GROUP_\d+)?"
    r"|JOB_(NAME|USER|UID|ACCOUNT|QOS|END_TIME|START_TIME)|RESTART_COUNT|SUBMIT_DIR|SUBMIT_HOST|NODE_ALIASES)\Z"
)
_INPUT = re.compile(r"(SLURM|SRUN|SBATCH|SALLOC)_")


@dataclass(frozen=True)
class Placement:
    """Who works where in this allocation; hosts in Slurm's order, which follows the topology."""

    layout: Layout
    hosts: dict[str, tuple[str, ...]]  # by role, () for a role without nodes
    spares: dict[str, tuple[str, ...]]  # by role; those of a split job are one pool, listed for each
    whole: bool  # the hosts of each role are all nodes of its component

    def replaced(self, role: str, host: str) -> tuple[Placement, str | None]:
        """The same without `host`, with a spare in its place while there is one; and which."""
        spare = next(iter(self.spares[role]), None)
        members = [spare if member == host else member for member in self.hosts[role]]
        hosts = {**self.hosts, role: tuple(member for member in members if member is not None)}
        spares = {name: tuple(s for s in some if s != spare) for name, some in self.spares.items()}
        return Placement(self.layout, hosts, spares, whole=False), spare

    def without_spares(self, names: Collection[str]) -> Placement:
        """The same with none of `names` among the spares: they may fail while they wait."""
        spares = {role: tuple(s for s in some if s not in names) for role, some in self.spares.items()}
        return Placement(self.layout, self.hosts, spares, whole=self.whole)


def place(run: RunConfig, site: SiteConfig, environ: Mapping[str, str]) -> Placement:
    """Divide the allocation's nodes. Raises UserError outside a job and when there are fewer nodes than asked for."""
    layout = layout_of(run, site)
    used = roles_in_use(run)
    hosts: dict[str, tuple[str, ...]] = {role: () for role in ROLES}
    spares: dict[str, tuple[str, ...]] = {role: () for role in ROLES}
    if is_split(layout):
        left = _nodes(environ, "SLURM_JOB_NODELIST")
        for role in used:
            count = getattr(run.groups, role).nodes
            hosts[role], left = _take(left, count, role)
        return Placement(layout, hosts, {role: left if hosts[role] else () for role in ROLES}, whole=False)
    size = env.read("SLURM_HET_SIZE", environ)
    for index, role in enumerate(used):
        # One component alone is a plain job, whose nodes are in no group.
        name = "SLURM_JOB_NODELIST" if len(used) == 1 and not size else f"SLURM_JOB_NODELIST_HET_GROUP_{index}"
        hosts[role], spares[role] = _take(_nodes(environ, name), getattr(run.groups, role).nodes, role)
    return Placement(layout, hosts, spares, whole=not any(spares.values()))


def _nodes(environ: Mapping[str, str], name: str) -> tuple[str, ...]:
    if name not in environ:
        raise UserError(f"{name} is not set: expected to run inside the job that 'miles-hpc submit' made for this run")
    return tuple(expand(environ[name]))


def _take(nodes: tuple[str, ...], count: int, role: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    if len(nodes) < count:
        raise UserError(f"role '{role}' needs {count} nodes, and {len(nodes)} are left of the allocation")
    return nodes[:count], nodes[count:]


def role_of_node(placement: Placement, environ: Mapping[str, str]) -> str:
    """This task's role: no variable of Slurm names it, so the node's name is looked up."""
    node = env.read("SLURMD_NODENAME", environ)
    for role, hosts in placement.hosts.items():
        if node in hosts:
            return role
    raise UserError(f"node '{node}' has no role in this job")


def role_srun_args(
    run: RunConfig,
    site: SiteConfig,
    role: str,
    *,
    name: str,
    placement: Placement,
    hosts: Sequence[str] | None = None,
    logs: Path | None = None,
) -> list[str]:
    """The command line up to the program: ["srun", "--het-group=1", ...].

    `name` is the step's name (unique in the run: a step is cancelled by it); `hosts` limits the step to these nodes,
    which are the role's or its spares; `logs` is where each task's output goes, as <name>-<task>.log. Run it with
    `role_environ`. Raises UserError when a host isn't the role's.
    """
    members = placement.hosts[role]
    known = {*members, *placement.spares[role]}
    chosen = list(members if hosts is None else hosts)
    foreign = [host for host in chosen if host not in known]
    if foreign or not chosen:
        raise UserError(f"step '{name}': hosts {foreign or '(none)'} are not in the {role} group {compress(members)}")
    trainer = role == "trainer"
    return [
        "srun",
        f"--mpi={step_mpi(site, trains=trainer)}",
        # One rank's end ends the trainer's step; agents of other roles live and end on their own.
        *_common(name, logs, f"--kill-on-bad-exit={1 if trainer else 0}"),
        *_share(run, site, placement, (role,), chosen, tasks_per_node(run, role), listed=hosts is not None),
    ]


def span_srun_args(
    run: RunConfig,
    site: SiteConfig,
    programs: Mapping[str, Sequence[str]],
    *,
    name: str,
    placement: Placement,
    logs: Path | None = None,
) -> list[str]:
    """One step over all hosts of all roles, complete with its programs.

    With components, `programs` has a command line per role; in a split job there is one for all, under "". MPI ranks
    count through the roles in order, so that the trainer's are the first.
    """
    # An agent that ends must not end the trainer: who has to is told by the controller.
    common = _common(name, logs, "--kill-on-bad-exit=0")
    head = ["srun", f"--mpi={site.mpi}", *common]
    used = roles_in_use(run)
    if is_split(placement.layout):
        tasks = max(tasks_per_node(run, role) for role in used)
        hosts = [host for role in used for host in placement.hosts[role]]
        return [*head, *_share(run, site, placement, used, hosts, tasks), *programs[""]]
    words = head
    for role in used:
        tasks, chosen = tasks_per_node(run, role), placement.hosts[role]
        share = _share(run, site, placement, (role,), chosen, tasks)
        words += [*([":", *common] if role != used[0] else []), *share, *programs[role]]
    return words


def _common(name: str, logs: Path | None, kill: str) -> list[str]:
    """Options that every component of a step states."""
    return [
        f"--job-name={name}",
        # The default is cyclic for up to one task a node and block above; ranks of a node must be neighbours.
        "--distribution=block",
        "--overlap",
        kill,
        "--wait=0",
        "--export=ALL",
        "--input=none",
        *([f"--output={logs}/{name}-%t.log", "--open-mode=append"] if logs is not None else []),
    ]


def _share(
    run: RunConfig,
    site: SiteConfig,
    placement: Placement,
    roles: Sequence[str],
    hosts: Sequence[str],
    tasks: int,
    *,
    listed: bool = False,
) -> list[str]:
    """What a step asks for on these hosts, each kind of resource stated: `tasks` on each host."""
    groups: list[GroupConfig] = [getattr(run.groups, role) for role in roles]
    cpus = max(g.cpus_per_task * tasks_per_node(run, role) for role, g in zip(roles, groups, strict=True))
    gpus_per_node = max(group.gpus_per_node for group in groups)
    partition = role_partition(run, site, roles[0])
    gpus = gpu_option(site, partition, gpus_per_node, tasks) if partition is not None else ""
    mem = memory_option(site, next((group.mem for group in groups if group.mem), ""))
    used = roles_in_use(run)
    het = not is_split(placement.layout) and len(used) > 1
    return [
        *([f"--het-group={used.index(roles[0])}"] if het else []),
        f"--nodes={len(hosts)}",
        f"--ntasks={len(hosts) * tasks}",
        f"--ntasks-per-node={tasks}",
        f"--cpus-per-task={-(-cpus // tasks)}",
        *([gpus] if gpus else []),
        *([f"--gpu-bind={site.sbatch.gpu_bind}"] if site.sbatch.gpu_bind and gpus_per_node else []),
        *([f"--mem={mem}"] if mem else []),
        *([f"--nodelist={compress(hosts)}"] if listed or not placement.whole else []),
    ]


def step_mpi(site: SiteConfig, *, trains: bool) -> str:
    """The value of a step's --mpi. Agents that don't train need none, but on Slingshot daemons started with none had no
    virtual network (prrte#2004, VNI_NOT_FOUND), and their children send over it."""
    return site.mpi if trains or site.fabric.kind == "cxi" else "none"


def step_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` for srun, without what describes the batch script's own component or steers Slurm's commands."""
    return {key: value for key, value in environ.items() if not _INPUT.match(key) or _NEEDED.match(key)}


def task_environ(run: RunConfig, role: str) -> dict[str, str]:
    """What a task sets right after its start: in a step over components, Slurm 22.05 gives some the last one's."""
    return {"SLURM_CPUS_PER_TASK": str(getattr(run.groups, role).cpus_per_task)}


def role_environ(environ: Mapping[str, str], run: RunConfig, site: SiteConfig, roles: Sequence[str]) -> dict[str, str]:
    """`step_environ` for a step of these roles: of the site's settings for one node and for several, those of the
    step's own width.

    The batch script has those of the widest role, and what is right between nodes may not even start on one.
    """
    other = width_variables(site)
    kept = {key: value for key, value in step_environ(environ).items() if key not in other}
    return kept | role_environment(site, nodes=sum(getattr(run.groups, role).nodes for role in roles))
