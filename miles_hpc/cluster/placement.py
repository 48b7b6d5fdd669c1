"""Which hosts a role has and how its srun is called, seen from inside the allocation. Pure: environ is an argument.

One step per role. All steps overlap, so that a second step on a node (one rollout host started anew while the first
step of its group runs on) begins at once instead of waiting for the first to end.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from miles_hpc.cluster.hetjob import ROLES, gpu_option, job_roles, memory_option
from miles_hpc.cluster.nodelist import compress, expand
from miles_hpc.cluster.site import role_environment, width_variables
from miles_hpc.core import env
from miles_hpc.core.config import GroupConfig, RunConfig, SiteConfig
from miles_hpc.core.errors import UserError
from miles_hpc.core.validate import partition_of

__all__ = ["het_group_hosts", "role_environ", "role_of_node", "role_srun_args", "step_environ"]

# What the batch script's own component leaves in the environment and srun would take for other components too:
# tasks, CPUs, memory, GPUs, distribution, host file. Everything that a step needs is stated on its command line.
_STEP_INPUT = re.compile(
    r"SLURM_(NTASKS|NPROCS|CPUS_PER_|TRES_|MEM_PER_|GPUS|GRES|NTASKS_PER_|DISTRIBUTION|HOSTFILE|NNODES|STEP_|EXACT|"
    r"OVERLAP|WHOLE|MPI_TYPE|CPU_BIND|GPU_BIND|MEM_BIND|KILL_BAD_EXIT|WAIT|OPEN_MODE|EXPORT_ENV|THREADS|LABELIO|"
    r"UNBUFFEREDIO|STD\w+MODE|WORKING_DIR|REMOTE_CWD|EXCLUSIVE|CORE_SPEC|HINT)"
)


def het_group_hosts(environ: Mapping[str, str]) -> dict[str, list[str]]:
    """Hosts of each role, in Slurm's order, from SLURM_JOB_NODELIST_HET_GROUP_i; none for a sandbox role left out.

    Raises UserError outside a het job.
    """
    size = env.read("SLURM_HET_SIZE", environ)
    hosts: dict[str, list[str]] = {role: [] for role in ROLES}
    for group, role in zip(range(size), ROLES, strict=False):
        name = f"SLURM_JOB_NODELIST_HET_GROUP_{group}"
        if name not in environ:
            raise UserError(f"{name} is not set: expected to run inside a het job of {len(ROLES)} components")
        hosts[role] = expand(environ[name])
    return hosts


def role_of_node(environ: Mapping[str, str]) -> str:
    """This task's role: no variable of Slurm names the het group, so the node's name is looked up in the lists."""
    node = env.read("SLURMD_NODENAME", environ)
    for role, hosts in het_group_hosts(environ).items():
        if node in hosts:
            return role
    raise UserError(f"node '{node}' is in no het group of this job")


def role_srun_args(
    run: RunConfig,
    site: SiteConfig,
    role: str,
    *,
    name: str,
    hosts: Sequence[str] | None = None,
    environ: Mapping[str, str],
    logs: Path | None = None,
) -> list[str]:
    """The command line up to the program: ["srun", "--het-group=1", ...].

    `name` is the step's name (unique in the run: a step is cancelled by it); `hosts` limits the step to these nodes
    of the role's group; `logs` is where each task's output goes, as <name>-<task>.log. Run it with `step_environ`.
    Raises UserError when a host isn't the group's.
    """
    group: GroupConfig = getattr(run.groups, role)
    members = het_group_hosts(environ)[role]
    chosen = list(members if hosts is None else hosts)
    foreign = [host for host in chosen if host not in members]
    if foreign or not chosen:
        raise UserError(f"step '{name}': hosts {foreign or '(none)'} are not in the {role} group {compress(members)}")
    trainer = role == "trainer"
    per_node = group.ranks_per_node if trainer else 1
    partition = partition_of(site, role, group)
    gpus = gpu_option(site, partition, group.gpus_per_node, per_node) if partition is not None else ""
    bind = site.sbatch.gpu_bind if group.gpus_per_node else ""
    mem = memory_option(site, group.mem)
    return [
        "srun",
        f"--het-group={job_roles(run).index(role)}",
        f"--job-name={name}",
        f"--nodes={len(chosen)}",
        f"--ntasks={len(chosen) * per_node}",
        f"--ntasks-per-node={per_node}",
        f"--cpus-per-task={group.cpus_per_task}",
        *([gpus] if gpus else []),
        *([f"--gpu-bind={bind}"] if bind else []),
        *([f"--mem={mem}"] if mem else []),
        *([f"--nodelist={compress(chosen)}"] if hosts is not None else []),
        # The default is cyclic for up to one task a node and block above; ranks of a node must be neighbours.
        "--distribution=block",
        "--overlap",
        f"--mpi={site.mpi if trainer else 'none'}",
        # One rank's end ends the trainer's step; agents of other roles live and end on their own.
        f"--kill-on-bad-exit={1 if trainer else 0}",
        "--wait=0",
        "--export=ALL",
        "--input=none",
        *([f"--output={logs}/{name}-%t.log", "--open-mode=append"] if logs is not None else []),
    ]


def step_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` for srun, without the step inputs of the batch script's own component."""
    return {key: value for key, value in environ.items() if not _STEP_INPUT.match(key)}


def role_environ(environ: Mapping[str, str], run: RunConfig, site: SiteConfig, role: str) -> dict[str, str]:
    """`step_environ` for a role: of the site's settings for one node and for several, those of the role's own width.

    The batch script has those of the widest role, and what is right between nodes may not even start on one.
    """
    other = width_variables(site)
    kept = {key: value for key, value in step_environ(environ).items() if key not in other}
    return kept | role_environment(site, nodes=getattr(run.groups, role).nodes)
