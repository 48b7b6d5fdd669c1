"""The command lines that start the checks on N nodes: inside an allocation, or by a small job of their own. Pure."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from miles_hpc.cluster.job_plan import gpu_option, memory_option
from miles_hpc.cluster.nodelist import compress, expand
from miles_hpc.cluster.placement import step_environ, step_mpi
from miles_hpc.cluster.preflight.contract import Context
from miles_hpc.cluster.site import role_environment, role_python, source_root
from miles_hpc.core import env
from miles_hpc.core.config import SiteConfig, SitePartition
from miles_hpc.core.errors import UserError
from miles_hpc.core.layouts import is_split, layout_of, role_partition, roles_in_use
from miles_hpc.core.site_rules import directive_complaints, option_name

__all__ = ["JOB_MINUTES", "JOB_NAME", "JobRequest", "NodeSteps", "plan_steps"]

JOB_NAME = "miles-hpc-doctor"
JOB_MINUTES = 5
#: Of sbatch's options those that srun hasn't got; a site's or run's directives may hold them.
_SBATCH_ONLY = frozenset(
    {"--array", "--batch", "--open-mode", "--output", "--error", "--requeue", "--no-requeue", "--signal", "--wrap"}
)


@dataclass(frozen=True)
class JobRequest:
    """What a job of one's own asks for, beside what site and run say; "" = as they say."""

    account: str = ""
    qos: str = ""
    partition: str = ""


@dataclass(frozen=True)
class NodeSteps:
    """Steps that run at once, and on how many nodes. `hosts` are their names where they are known beforehand."""

    commands: tuple[tuple[str, ...], ...]
    nodes: int
    hosts: tuple[str, ...]
    environ: Mapping[str, str]
    own_job: bool
    partition: str = ""  # that a job of one's own names


def plan_steps(
    context: Context, nodes: int, program: Sequence[str], request: JobRequest | None = None
) -> NodeSteps:  # fmt: skip
    """One task a node. Raises UserError when the allocation has fewer nodes, or the site's rules are broken.

    `program` is what follows the interpreter. Inside a het job there is one step per component: a site may forbid
    steps that span.
    """
    if nodes < 1:
        raise UserError(f"--on-nodes {nodes}: expected 1 or more")
    if context.site is None:
        raise UserError("--on-nodes: no site is chosen, and it says how GPUs are asked for: give --site")
    if context.site.scheduler == "none":
        raise UserError(f"--on-nodes: site '{context.site.name}' has no scheduler: leave it out")
    python = role_python(context.run, context.site, "trainer") if context.run is not None else ""
    task = (*_with_modules(context.site.modules), python or sys.executable, "-P", *program)
    environ = _environ(context, context.site)
    if "SLURM_JOB_ID" in context.environ:
        return _inside(context, context.site, nodes, task, environ)
    mpi = f"--mpi={step_mpi(context.site, trains=False)}"
    command = (*_job_options(context, nodes, request or JobRequest()), mpi, *_STEP, *task)
    named = next((option.partition("=")[2] for option in command if option.startswith("--partition=")), "")
    return NodeSteps((command,), nodes, (), environ, own_job=True, partition=named)


#: Of every step: a task that fails must not end the others, and nobody reads stdin.
_STEP = ("--ntasks-per-node=1", "--input=none", "--kill-on-bad-exit=0", "--wait=0")


def _with_modules(modules: Sequence[str]) -> tuple[str, ...]:
    """What loads the site's modules as the batch script does, then becomes the rest of the command line."""
    if not modules:
        return ()
    loads = "; ".join(f"module load {shlex.quote(module)}" for module in modules)
    return ("bash", "-c", f'{loads}; exec "$@"', JOB_NAME)


def _environ(context: Context, site: SiteConfig) -> dict[str, str]:
    """The caller's without step inputs, with what the site sets for roles and the import path of the tasks."""
    root = source_root()
    path = [*([str(root)] if root is not None else []), *(context.run.python_path if context.run is not None else [])]
    stated = role_environment(site, nodes=context.nodes)
    return {
        **step_environ(context.environ),
        **stated,
        "PYTHONSAFEPATH": "1",
        **({"PYTHONPATH": ":".join(path)} if path else {}),
    }


# ------------------------------------------------------------------------------------------------ inside a job


def _inside(
    context: Context, site: SiteConfig, nodes: int, task: Sequence[str], environ: Mapping[str, str]
) -> NodeSteps:
    groups = _groups(context.environ)
    available = [host for hosts in groups for host in hosts]
    if nodes > len(available):
        raise UserError(f"--on-nodes {nodes}: this allocation has {len(available)} nodes, {compress(available)}")
    chosen = available[:nodes]
    commands = []
    for i, hosts in enumerate(groups):
        mine = [host for host in hosts if host in chosen]
        if not mine:
            continue
        het = (f"--het-group={i}",) if len(groups) > 1 else ()
        commands.append(
            (
                "srun",
                *het,
                f"--job-name={JOB_NAME}",
                f"--nodes={len(mine)}",
                f"--ntasks={len(mine)}",
                "--cpus-per-task=1",
                f"--nodelist={compress(mine)}",
                *_gpus_inside(context, i),
                "--overlap",
                f"--mpi={step_mpi(site, trains=False)}",
                *_STEP,
                *task,
            )
        )
    return NodeSteps(tuple(commands), nodes, tuple(chosen), environ, own_job=False)


def _groups(environ: Mapping[str, str]) -> list[list[str]]:
    size = env.read("SLURM_HET_SIZE", environ)
    if size > 1:
        return [expand(environ.get(f"SLURM_JOB_NODELIST_HET_GROUP_{i}", "")) for i in range(size)]
    listed = environ.get("SLURM_JOB_NODELIST", "")
    if not listed:
        raise UserError("SLURM_JOB_ID is set, SLURM_JOB_NODELIST isn't: expected both inside an allocation")
    return [expand(listed)]


def _gpus_inside(context: Context, group: int) -> tuple[str, ...]:
    """The component's GPUs, so that all of a node are looked at; a step may not ask for more than its job has."""
    site = context.site
    run = context.run
    if site is None or run is None:
        return ()
    roles = roles_in_use(run)
    roles = roles if is_split(layout_of(run, site)) else roles[group : group + 1]
    partition = role_partition(run, site, roles[0]) if roles else None
    gpus = max((getattr(run.groups, role).gpus_per_node for role in roles), default=0)
    option = gpu_option(site, partition, gpus) if partition is not None else ""
    return (option, *((f"--gpu-bind={site.sbatch.gpu_bind}",) if site.sbatch.gpu_bind else ())) if option else ()


# ------------------------------------------------------------------------------------------------ a job of one's own


def _job_options(context: Context, nodes: int, request: JobRequest) -> tuple[str, ...]:
    site, run = context.site, context.run
    assert site is not None
    partition = _partition(context, site, request.partition)
    gpus = partition.gpus_per_node
    if run is not None and run.groups.trainer.gpus_per_node:
        gpus = min(gpus, run.groups.trainer.gpus_per_node) or gpus
    job = run.job if run is not None else None
    account, qos = request.account or (job.account if job else ""), request.qos or (job.qos if job else "")
    constraint = (run.groups.trainer.constraint if run is not None else "") or partition.constraint
    mem = memory_option(site, "")
    extra = [*site.directives, *(job.extra_directives if job else [])]
    stated = [
        f"--job-name={JOB_NAME}",
        *([f"--partition={partition.name}"] if site.sbatch.partition_stated else []),
        f"--nodes={nodes}",
        f"--ntasks={nodes}",
        f"--cpus-per-task={max(1, site.sbatch.cpus_per_gpu_min * gpus)}",
        f"--time={JOB_MINUTES}",
        *([option] if (option := gpu_option(site, partition, gpus)) else []),
        *([f"--gpu-bind={site.sbatch.gpu_bind}"] if site.sbatch.gpu_bind and gpus else []),
        *([f"--constraint={constraint}"] if constraint else []),
        *([f"--mem={mem}"] if mem else []),
        *([f"--account={account}"] if account else []),
        *([f"--qos={qos}"] if qos else []),
        *([f"--network={site.fabric.slurm_network}"] if site.fabric.slurm_network else []),
        *(option for option in extra if option_name(option) not in _SBATCH_ONLY),
    ]
    complaint = next(directive_complaints(site, [*stated, *_STEP], []), "")
    if not complaint and site.requires_account and not account:
        complaint = f"site '{site.name}' refuses jobs without an account"
    if complaint:
        text = re.sub(r"\bjob\.(account|qos)\b", r"--\1", complaint)
        raise UserError(f"--on-nodes: {text}; the doctor takes --account and --qos, or those of --run")
    return ("srun", *stated)


def _partition(context: Context, site: SiteConfig, name: str) -> SitePartition:
    if name:
        named = next((partition for partition in site.partitions if partition.name == name), None)
        if named is None:
            known = ", ".join(partition.name for partition in site.partitions)
            raise UserError(f"--partition {name}: site '{site.name}' has {known or 'none'}")
        return named
    if context.run is not None:
        found = role_partition(context.run, site, "trainer")
    else:
        found = next((partition for partition in site.partitions if "trainer" in partition.roles), None)
    if found is None:
        raise UserError(f"--on-nodes: site '{site.name}' has no partition for trainers: give --partition")
    return found
