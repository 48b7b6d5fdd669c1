"""Checks of a node's GPUs: do they answer, have they faults now, is their memory free. NVIDIA's; others are skipped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from miles_hpc.cluster.preflight.contract import Check, Comparison, Context, Finding, Machine, fail, fine, skip, warn
from miles_hpc.cluster.preflight.parse_gpu import GPU_QUERY, REMAPPED_QUERY, GpuState, gpu_states, remapped_pending
from miles_hpc.cluster.preflight.wording import bytes_text, listed, nodes_by_value

__all__ = ["CHECKS", "COMPARISONS"]

_CSV = "--format=csv,noheader,nounits"
#: A driver that starts up takes seconds; one that hangs never answers.
_SMI_S = 20.0
#: What a driver and an idle GPU may hold by themselves; a process left behind holds a model.
_IDLE_BYTES = 2 * 1024**3
_NODE = "exclude this node and tell the site's support"


def _no_gpus(machine: Machine, context: Context) -> str:
    """Why there is nothing to look at; "" when there is."""
    vendor = context.site.node.gpu_vendor if context.site is not None else ""
    if vendor == "amd":
        return "AMD GPUs aren't looked at"
    return ""


def _states(machine: Machine, context: Context) -> list[GpuState] | Finding:
    """The node's GPUs, or what is wrong with asking for them."""
    if why := _no_gpus(machine, context):
        return skip(why)
    answer = machine.run("nvidia-smi", f"--query-gpu={GPU_QUERY}", _CSV, timeout_s=_SMI_S)
    if answer.missing:
        if context.site is None or not context.gpus:
            return skip("no nvidia-smi here")
        return fail(
            "no nvidia-smi on a node that should have GPUs", _NODE + "; in a container: let the driver's tools in"
        )
    if answer.timed_out:
        return fail(f"nvidia-smi hangs: no answer within {_SMI_S:.0f} s", _NODE)
    if answer.problem:
        return fail(answer.problem, _NODE)
    try:
        return gpu_states(answer.stdout)
    except ValueError as error:
        return fail(f"nvidia-smi says '{error}'", _NODE)


def _health(machine: Machine, context: Context) -> Iterator[Finding]:
    gpus = _states(machine, context)
    if isinstance(gpus, Finding):
        yield gpus
        return
    if not gpus:
        yield fail("nvidia-smi lists no GPU", _NODE)
        return
    if context.run is not None and len(gpus) < context.gpus:
        yield warn(
            f"{len(gpus)} GPUs are seen, a node of the run has {context.gpus}",
            "on the right partition? else " + _NODE,
        )
    sick = [gpu for gpu in gpus if gpu.volatile_errors]
    if sick:
        counts = listed(f"GPU {gpu.index}: {gpu.volatile_errors}" for gpu in sick)
        yield fail(f"uncorrected ECC errors since the driver was loaded: {counts}", _NODE)
    yield from _remapped(machine, gpus)
    if not sick:
        past = sum(1 for gpu in gpus if gpu.aggregate_errors)
        history = f" ({past} with errors in their past, which is no fault)" if past else ""
        unknown = sum(1 for gpu in gpus if gpu.volatile_errors is None)
        ecc = f", {unknown} without ECC" if unknown else ""
        yield fine(f"{len(gpus)} GPUs, no uncorrected ECC error since the driver was loaded{history}{ecc}")


def _remapped(machine: Machine, gpus: list[GpuState]) -> Iterator[Finding]:
    answer = machine.run("nvidia-smi", f"--query-remapped-rows={REMAPPED_QUERY}", _CSV, timeout_s=_SMI_S)
    if answer.timed_out:
        yield fail(f"nvidia-smi hangs: no answer within {_SMI_S:.0f} s", _NODE)
        return
    index = {gpu.uuid: gpu.index for gpu in gpus}
    for uuid, what in remapped_pending(answer.stdout).items() if not answer.problem else ():
        which = f"GPU {index.get(uuid, uuid)}"
        if what == "failure":
            yield fail(f"{which}: a row of its memory couldn't be remapped", _NODE)
        else:
            yield fail(
                f"{which}: a remapped row waits for a reset", "ask the site to reset it; exclude the node until then"
            )


def _leftovers(machine: Machine, context: Context) -> Iterator[Finding]:
    gpus = _states(machine, context)
    if isinstance(gpus, Finding):
        # The check 'gpu-health' says what is wrong with them.
        yield skip(gpus.saw)
        return
    held = [gpu for gpu in gpus if gpu.used_bytes is not None and gpu.used_bytes > _IDLE_BYTES]
    if not held:
        yield fine(f"{len(gpus)} GPUs, each holds less than {bytes_text(_IDLE_BYTES)}")
        return
    apps = machine.run("nvidia-smi", "--query-compute-apps=gpu_uuid,pid", _CSV, timeout_s=_SMI_S)
    owners = [line.split(",")[1].strip() for line in apps.stdout.splitlines() if line.count(",") == 1]
    seen = [pid for pid in owners if pid.isdecimal() and machine.read(f"/proc/{pid}/stat") is not None]
    what = listed(f"GPU {gpu.index}: {bytes_text(gpu.used_bytes or 0)}" for gpu in held)
    if seen:
        yield warn(f"GPU memory is in use: {what}, by processes {listed(seen)}", "end them, or wait, if they are yours")
    else:
        do = "a process of an earlier job is left behind: exclude this node and tell the site's support"
        yield fail(f"GPU memory is held by nobody who can be seen: {what}", do)


def _imex(machine: Machine, context: Context) -> Iterator[Finding]:
    domain = context.site.topology.domain_nodes if context.site is not None else 0
    if domain < 2:
        yield skip("no NVLink domain over several nodes")
        return
    channels = machine.listing("/dev/nvidia-caps-imex-channels")
    if channels:
        yield fine(f"IMEX channels {listed(channels)}")
    else:
        yield fail(
            "no /dev/nvidia-caps-imex-channels here: GPU memory of other nodes can't be reached over NVLink",
            "start it as a job's step (switch/nvidia_imex gives the channel); in a container, let the devices in; "
            "otherwise NCCL_MNNVL_ENABLE=0",
        )


def _gather_driver(machine: Machine, context: Context) -> str | None:
    if _no_gpus(machine, context):
        return None
    answer = machine.run("nvidia-smi", "--query-gpu=driver_version,name", _CSV, timeout_s=_SMI_S)
    kinds = sorted({line.strip() for line in answer.stdout.splitlines() if line.strip()})
    return " / ".join(kinds) if not answer.problem and kinds else None


def _compare_driver(values: Mapping[str, Any], context: Context) -> Iterator[Finding]:
    by_kind = nodes_by_value({node: value for node, value in values.items() if value is not None})
    if not by_kind:
        yield skip("no GPUs")
    elif len(by_kind) == 1:
        yield fine(f"driver and GPU are the same on all nodes: {next(iter(by_kind))}")
    else:
        parts = "; ".join(f"{kind} on {listed(nodes)}" for kind, nodes in sorted(by_kind.items()))
        yield warn(f"driver or GPU differ: {parts}", "ask for one kind by groups.<role>.constraint")


CHECKS = (
    Check(
        name="gpu-health",
        why="one sick GPU ends or slows the whole step; aggregate ECC counts are history and flag healthy nodes",
        source="a preflight used on JUPITER: 71 healthy nodes failed by aggregate ECC; nvidia-smi -L that hangs",
        look=_health,
        needs=("gpus", "compute"),
    ),
    Check(
        name="gpu-leftovers",
        why="memory that an earlier job's process holds makes the first large allocation fail",
        source="sgl-project/sglang#23627",
        look=_leftovers,
        needs=("gpus", "compute"),
    ),
    Check(
        name="imex",
        why="without an IMEX channel, NVLink between nodes of a rack fails at initialisation",
        source="NVIDIA/nccl#2186, #1647; Slurm, switch/nvidia_imex",
        look=_imex,
        needs=("site", "gpus", "compute"),
    ),
)
COMPARISONS = (
    Comparison(
        name="gpu-driver",
        why="a step is as slow as its slowest GPU, and a driver that differs tells of a node that is being updated",
        source="by construction: every rank takes part in every step",
        gather=_gather_driver,
        compare=_compare_driver,
        needs=("gpus", "compute"),
    ),
)
