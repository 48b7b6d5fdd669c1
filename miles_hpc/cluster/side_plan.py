"""What a side job asks of the site: a pure function from run, site and request to a frozen plan.

The plan is in submitit's words: `parameters` are those of its SlurmExecutor, where options that submitit has no name
for, or whose form the site decides (GPUs), are `additional_parameters`. What submitit states on its own account
(`SUBMITIT_STATES`) is checked against the site's rules with the rest.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from miles_hpc.cluster.job_plan import gpu_option, memory_option
from miles_hpc.cluster.lifecycle import parse_time
from miles_hpc.cluster.site import job_environment, role_python
from miles_hpc.core.config import GroupConfig, RunConfig, SiteConfig, SitePartition
from miles_hpc.core.errors import UserError
from miles_hpc.core.layouts import ROLES, partition_of
from miles_hpc.core.paths import RunPaths
from miles_hpc.core.site_rules import directive_complaints, option_name

__all__ = ["OUR_PACKAGES", "SUBMITIT_STATES", "SidePlan", "SideRequest", "plan_side_job", "split_directive"]

#: Options that submitit puts into every script by itself.
SUBMITIT_STATES = ("--error", "--open-mode", "--output", "--signal")
#: Packages whose functions a side job may call; beside them those in the run's `python_path`.
OUR_PACKAGES = ("miles_hpc", "checkpoints", "launchers")
_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*\Z", re.ASCII)
_NAME = re.compile(r"[a-z][a-z0-9-]{0,31}\Z")
#: submitit's own default: USR2 so many seconds before the limit.
_SIGNAL_S = 90


@dataclass(frozen=True, kw_only=True)
class SideRequest:
    """What a side job is to do, and what for. Everything in `arguments` is JSON."""

    name: str
    function: str  # "module:attribute", called with `arguments` in every task
    arguments: Mapping[str, Any] = field(default_factory=dict)
    roles: tuple[str, ...]  # the first that the site has a partition for gives partition and interpreter
    python_role: str = ""  # interpreter of another role, controller among them; "" = of the same
    nodes: int = 1
    tasks_per_node: int = 1
    gpus_per_node: int = 0
    cpus_per_task: int = 1
    mem: str = ""  # as sbatch takes it; "" = what the role's group asks for
    time: str = "00:30:00"
    mpi: bool = False  # start the tasks as the site starts MPI programs; on Slingshot it gives them the network
    start_again: bool = False  # at the time limit, instead of ending: for functions that go on where they were


@dataclass(frozen=True)
class SidePlan:
    """One side job. Frozen; `parameters` is handed to submitit as it is."""

    job_name: str
    role: str
    python: str  # interpreter of the tasks
    tasks: int
    time_limit_s: float
    signal_s: int
    parameters: Mapping[str, Any]  # of SlurmExecutor.update_parameters
    directives: tuple[str, ...]  # every option that the script will state, submitit's own without their values
    environment: Mapping[str, str]


def plan_side_job(
    run: RunConfig, site: SiteConfig, paths: RunPaths, request: SideRequest, *, number: int, local: bool = False
) -> SidePlan:
    """The plan of side job `number` of a run; `local`: for this machine, where the site's rules for jobs don't hold.

    Raises UserError for a request that makes no sense, a path that sbatch or submitit can't take, a site without a
    partition for it, and an option that the site forbids or misses.
    """
    _check(request)
    if re.search(r"[%\"'\\\n]", str(paths.root)):  # submitit and sbatch replace %j, %t, %A
        raise UserError(f"'{paths.root}': side jobs need a path without quotes, backslashes, '%' and line breaks")
    if local and request.nodes > 1:
        raise UserError(f"side job '{request.name}': nodes = {request.nodes}: this machine is one: leave --local out")
    role, partition = _place(run, site, request, local=local)
    group: GroupConfig = getattr(run.groups, role)
    limit_s = parse_time(request.time)
    if not 60 <= limit_s < math.inf:
        raise UserError(f"side job '{request.name}': time {request.time}: expected a limit of a minute or more")
    minutes = math.ceil(limit_s / 60)
    plan: dict[str, Any] = {
        "job_name": f"{run.name}-side{number:04d}-{request.name}",
        "role": role,
        "python": role_python(run, site, request.python_role or role),
        "tasks": request.nodes * request.tasks_per_node,
        "time_limit_s": 60.0 * minutes,
        "signal_s": min(_SIGNAL_S, 60 * minutes // 4),  # of a short job most is left
        "environment": job_environment(run, site, nodes=request.nodes),
    }
    if local or partition is None:
        return SidePlan(**plan, parameters={}, directives=())
    parameters = _parameters(run, site, paths, request, partition, group, plan, minutes)
    directives = tuple(_directives(parameters))
    for complaint in directive_complaints(site, list(directives), run.job.extra_directives):
        raise UserError(f"side job '{request.name}': {complaint}")
    return SidePlan(**plan, parameters=parameters, directives=directives)


def _check(request: SideRequest) -> None:
    what = f"side job '{request.name}'"
    if not _NAME.match(request.name):
        raise UserError(f"{what}: expected a name of up to 32 small letters, digits and '-'")
    if not _FUNCTION.match(request.function):
        raise UserError(f"{what}: function '{request.function}': expected package.module:function")
    for key in ("nodes", "tasks_per_node", "cpus_per_task"):
        if getattr(request, key) < 1:
            raise UserError(f"{what}: {key} = {getattr(request, key)}: expected 1 or more")
    if request.gpus_per_node < 0:
        raise UserError(f"{what}: gpus_per_node = {request.gpus_per_node}: expected 0 or more")


def _place(run: RunConfig, site: SiteConfig, request: SideRequest, *, local: bool) -> tuple[str, SitePartition | None]:
    unknown = [role for role in request.roles if role not in ROLES]
    if unknown or not request.roles:
        raise UserError(f"side job '{request.name}': role '{' '.join(unknown)}': expected one of {', '.join(ROLES)}")
    if local:
        return request.roles[0], None
    for role in request.roles:
        partition = partition_of(site, role, getattr(run.groups, role))
        if partition is not None:
            return role, partition
    raise UserError(
        f"side job '{request.name}': site '{site.name}' has no partition for {' or '.join(request.roles)}: "
        "run it here with --local"
    )


def _parameters(
    run: RunConfig,
    site: SiteConfig,
    paths: RunPaths,
    request: SideRequest,
    partition: SitePartition,
    group: GroupConfig,
    plan: Mapping[str, Any],
    minutes: int,
) -> dict[str, Any]:
    gpus = request.gpus_per_node
    cpus = max(request.cpus_per_task, -(-site.sbatch.cpus_per_gpu_min * gpus // request.tasks_per_node))
    if site.gpu_request == "gpus-per-task" and gpus % request.tasks_per_node:
        raise UserError(
            f"side job '{request.name}': site '{site.name}' takes GPUs per task: gpus_per_node = {gpus} isn't a "
            f"multiple of {request.tasks_per_node} tasks"
        )
    stated = [
        f"--chdir={paths.root}",
        "--requeue" if site.requeue else "--no-requeue",
        gpu_option(site, partition, gpus, request.tasks_per_node),
        f"--gpu-bind={site.sbatch.gpu_bind}" if site.sbatch.gpu_bind and gpus else "",
        f"--network={site.fabric.slurm_network}" if site.fabric.slurm_network else "",
        *site.directives,
        *run.job.extra_directives,
    ]
    # srun takes less and less over from sbatch with its versions, and refuses what contradicts: state it again.
    srun = [
        f"--ntasks-per-node={request.tasks_per_node}",
        f"--cpus-per-task={cpus}",
        f"--mpi={site.mpi if request.mpi else 'none'}",
        "--kill-on-bad-exit=0",  # other nodes' answers are wanted when one fails
        "--wait=0",
    ]
    parameters: dict[str, Any] = {
        "job_name": plan["job_name"],
        "partition": partition.name if site.sbatch.partition_stated else None,
        "time": minutes,
        "nodes": request.nodes,
        "ntasks_per_node": request.tasks_per_node,
        "cpus_per_task": cpus,
        "mem": memory_option(site, request.mem or group.mem) or None,
        "constraint": group.constraint or partition.constraint or None,
        "account": run.job.account or None,
        "qos": run.job.qos or None,
        "signal_delay_s": plan["signal_s"],
        "additional_parameters": dict(split_directive(text) for text in stated if text),
        "srun_args": srun,
        "setup": _setup(plan["environment"], site.modules),
    }
    # submitit says --wckey=submitit unless told otherwise, which a cluster with wckeys refuses.
    return {key: value for key, value in parameters.items() if value is not None} | {"wckey": None}


def _setup(environment: Mapping[str, str], modules: Iterable[str]) -> list[str]:
    """Lines of the batch script before srun."""
    exports = [f"export {name}={shlex.quote(value)}" for name, value in environment.items()]
    return [*exports, *(f"module load {shlex.quote(module)}" for module in modules)]


def split_directive(text: str) -> tuple[str, str | bool]:
    """An sbatch option as submitit's name and value: "--gres=gpu:4", "-w n1", "--exclusive" (True)."""
    name = option_name(text)
    if not name.startswith("--"):
        raise UserError(f"directive '{text}': side jobs need the long form of the option")
    if text.startswith("--"):
        value = text[len(name) :].lstrip("= \t")
    else:
        value = text[2:].lstrip("= \t")
    return name[2:], value.strip("\"'") or True


def _directives(parameters: Mapping[str, Any]) -> Iterable[str]:
    """Every option of the script, as the site's rules read them."""
    inner = ("additional_parameters", "setup", "signal_delay_s", "srun_args")
    named = {key.replace("_", "-"): value for key, value in parameters.items() if key not in inner}
    for key, value in {**named, **parameters["additional_parameters"]}.items():
        if value is not None:
            yield f"--{key}" if value is True else f"--{key}={value}"
    yield from SUBMITIT_STATES
