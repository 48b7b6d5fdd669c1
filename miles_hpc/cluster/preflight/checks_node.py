"""Checks of a node itself: limits, local room, user namespaces, what a container hides, clocks."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any

from miles_hpc.cluster.preflight.contract import Check, Comparison, Context, Finding, Machine, fail, fine, skip, warn
from miles_hpc.cluster.preflight.wording import bytes_text, count_text, listed, nodes_by_value

__all__ = ["CHECKS", "COMPARISONS"]

#: Descriptors of one process: two connections per peer, what its engine opens, and room for logs and libraries.
_FILES_PER_PEER = 2
_FILES_BESIDE = 512
#: A policy, not a need: below it, compilers' caches and libraries' scratch files fill the place in one run.
_TMP_BYTES = 5 * 10**9
_SHM_BYTES = 10**9
_TMP_FILES = 1000
#: Of the median of nodes: nodes of one kind differ by little when they are empty.
_MEMORY_SHARE = 0.8
_CLOCK_WARN_S = 2.0
_CLOCK_FAIL_S = 30.0
_CONTAINERS = {
    "APPTAINER_CONTAINER": "apptainer",
    "SINGULARITY_CONTAINER": "singularity",
    "ENROOT_ROOTFS": "enroot",
    "PYXIS_RUNTIME_PATH": "pyxis",
    "SHIFTER_RUNTIME": "shifter",
    "SHIFTER_IMAGE": "shifter",
    "container": "",  # set to the runtime's name by podman and systemd-nspawn
}


# ------------------------------------------------------------------------------------------------ limits


def _limits(machine: Machine, context: Context) -> Iterator[Finding]:
    soft, hard = machine.limit("nofile")
    run = context.run
    groups = run.groups if run is not None else None
    peers = (
        groups.trainer.nodes * groups.trainer.ranks_per_node + groups.rollout.nodes + groups.sandbox.nodes
        if groups is not None
        else context.nodes
    )
    needed = _FILES_PER_PEER * peers + _FILES_BESIDE
    # Host agents raise the soft limit themselves; what counts is how far they can.
    if hard < needed:
        yield fail(
            f"a process may open {hard:.0f} files, {needed} are needed for {peers} peers", "ask for a higher limit"
        )
    elif soft < needed:
        yield warn(
            f"ulimit -n is {soft:.0f}, {needed} are needed for {peers} peers", f"ulimit -n {hard:.0f} in the profile"
        )
    else:
        yield fine(f"a process may open {_limit(soft)} files")
    kind = context.site.fabric.kind if context.site is not None else ""
    locked, _ = machine.limit("memlock")
    if kind in ("ib", "roce") and not math.isinf(locked):
        yield fail(
            f"ulimit -l is {bytes_text(locked)}: RDMA can't register buffers",
            "start it by srun with PropagateResourceLimitsExcept=MEMLOCK set, or ask the site for an unlimited memlock",
        )
    else:
        yield fine(f"a process may lock {'any amount of' if math.isinf(locked) else bytes_text(locked)} memory")


def _limit(value: float) -> str:
    return "any number of" if math.isinf(value) else count_text(int(value))


# ------------------------------------------------------------------------------------------------ room


def _tmp_space(machine: Machine, context: Context) -> Iterator[Finding]:
    temporary = machine.environ.get("TMPDIR") or "/tmp"
    for path, wanted, use, do in (
        (temporary, _TMP_BYTES, "scratch files", "empty it, or set TMPDIR to another folder of this node"),
        ("/dev/shm", _SHM_BYTES, "NCCL's buffers", "mount it larger: containers often have 64 MB"),
    ):
        asked = machine.probe("place", path)
        if asked.problem:
            yield fail(f"{path} can't be looked at: {asked.problem}", do)
            continue
        place = asked.value[0]
        room = f"{bytes_text(place['free_bytes'])} free"
        if not place["exists"]:
            yield fail(f"{path} isn't there; {use} go there", do)
        elif not place["writable"]:
            yield fail(f"{path} can't be written; {use} go there", do)
        elif place["free_bytes"] < wanted:
            yield warn(f"{path} has {room} only; {use} go there", do)
        elif place["total_inodes"] and place["free_inodes"] < _TMP_FILES:
            yield warn(f"{path} has room for {count_text(place['free_inodes'])} files only; {use} go there", do)
        else:
            yield fine(f"{path} has {room} ({place['kind']})")


# ------------------------------------------------------------------------------------------------ user namespaces


def _userns(machine: Machine, context: Context) -> Iterator[Finding]:
    asked = machine.probe("user_namespace")
    complaint = asked.problem or str(asked.value)
    stated = context.site.userns if context.site is not None else "unknown"
    wanted = context.run is not None and context.run.groups.sandbox.nodes > 0
    if not complaint:
        beside = ", though the site file says no" if stated == "no" else ""
        yield fine(f"users can make user namespaces here{beside}")
    elif stated == "yes":
        do = "correct 'userns' in the site file; look at kernel.unprivileged_userns_clone"
        yield fail(f"the site file allows user namespaces, the kernel says: {complaint}", do)
    elif wanted:
        yield warn(
            f"no user namespaces here ({complaint}): sandboxes run without isolation, or not at all",
            "choose another partition for groups.sandbox, or a model that you trust with isolation = none",
        )
    else:
        yield fine(f"no user namespaces here ({complaint}); only sandboxes need them")


# ------------------------------------------------------------------------------------------------ containers


def container_of(machine: Machine) -> str:
    """The container runtime that this process is in; "" outside."""
    for name, runtime in _CONTAINERS.items():
        if machine.environ.get(name):
            return runtime or machine.environ[name]
    if ".containerenv" in machine.listing("/run"):
        return "podman"
    return "docker" if ".dockerenv" in machine.listing("/") else ""


def _asks_munge(psec: str) -> bool:
    """Whether PMIx uses munge by PMIX_MCA_psec: a list of what to use, "^" in front makes it one of what not to."""
    names = psec.lstrip("^").split(",")
    return not psec or ("munge" in names) != psec.startswith("^")


def _container_munge(machine: Machine, context: Context) -> Iterator[Finding]:
    runtime = container_of(machine)
    if not runtime:
        yield skip("not in a container")
        return
    munge = any(name.startswith("munge.socket") for name in machine.listing("/run/munge"))
    # The socket may lie elsewhere (AuthInfo in slurm.conf): what a command that authenticates says decides.
    asked = machine.run("sinfo", "--noheader", "--format=%R")
    munge = munge or not asked.problem
    if context.site is None and asked.missing:
        yield skip(f"in {runtime}, without Slurm")
        return
    psec = context.role_environment.get("PMIX_MCA_psec", "")
    mpi = context.site.mpi if context.site is not None else ""
    let_in = "let /run/munge (the socket) into the container"
    if not munge:
        do = f"{let_in}: scontrol and srun authenticate by it"
        yield warn(f"in {runtime} without munge's socket: Slurm's commands are refused", do)
    if mpi.startswith("pmix") and not munge and _asks_munge(psec):
        yield fail(
            f"PMIx asks for munge, which isn't in this container (PMIX_MCA_psec={psec or '(unset)'})",
            f'set PMIX_MCA_psec = "^munge" in env of the site file, or {let_in}',
        )
    elif munge or mpi.startswith("pmix"):
        reached = "munge is within reach" if munge else "munge is out of reach"
        yield fine(f"in {runtime}: {reached}, PMIX_MCA_psec={psec or '(unset)'}")


# ------------------------------------------------------------------------------------------------ clocks


def _gather_clock(machine: Machine, context: Context) -> float:
    return machine.now()


def _compare_clock(values: Mapping[str, Any], context: Context) -> Iterator[Finding]:
    """Values are seconds by which a node's clock is ahead of the time at which its line arrived (`gather`)."""
    middle = median(values.values())
    apart = {node: value - middle for node, value in values.items()}
    worst = max(apart, key=lambda node: abs(apart[node]))
    seconds = abs(apart[worst])
    which = f"the clock of {worst} is {seconds:.1f} s {'ahead' if apart[worst] > 0 else 'behind'}"
    if seconds >= _CLOCK_FAIL_S:
        yield fail(f"{which}: munge refuses what is dated too far off", "exclude the node and tell the site's support")
    elif seconds >= _CLOCK_WARN_S:
        yield warn(f"{which}: it drains before the end of the allocation by as much too late or too early",
                   "tell the site's support; raise job.signal_s")  # fmt: skip
    else:
        yield fine(f"clocks agree within {max(seconds, 0.1):.1f} s over {len(values)} nodes")


def _gather_versions(machine: Machine, context: Context) -> dict[str, str]:
    from miles_hpc.core.version import __version__

    kernel = machine.read("/proc/sys/kernel/osrelease") or ""
    return {"miles-hpc": __version__, "kernel": kernel.strip()}


def _compare_versions(values: Mapping[str, Any], context: Context) -> Iterator[Finding]:
    for what, bad in (("miles-hpc", fail), ("kernel", warn)):
        by_version = nodes_by_value({node: value[what] for node, value in values.items()})
        if len(by_version) == 1:
            yield fine(f"{what} {next(iter(by_version))} on all nodes")
            continue
        parts = "; ".join(f"{version} on {listed(nodes)}" for version, nodes in sorted(by_version.items()))
        do = (
            "use one installation for all nodes"
            if what == "miles-hpc"
            else "the site may be in the middle of an update"
        )
        yield bad(f"{what} differs: {parts}", do)


# ------------------------------------------------------------------------------------------------ host memory


def _gather_memory(machine: Machine, context: Context) -> int | None:
    """Bytes that programs can still get. The total tells nothing: on GH200 it counts the GPUs' memory too."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", machine.read("/proc/meminfo") or "", re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def _compare_memory(values: Mapping[str, Any], context: Context) -> Iterator[Finding]:
    usual = median(values.values())
    short = {node: value for node, value in values.items() if value < _MEMORY_SHARE * usual}
    for node, value in sorted(short.items()):
        yield warn(
            f"{node} has {bytes_text(value)} of memory available, the others about {bytes_text(usual)}",
            "does somebody share the node? Otherwise an earlier job's memory is lost there: exclude the node",
        )
    if not short:
        yield fine(f"about {bytes_text(usual)} of memory are available on each of {len(values)} nodes")


CHECKS = (
    Check(
        name="limits",
        why="a process that can't open its connections or lock its buffers fails when the run is largest",
        source="setrlimit(2); Slurm FAQ on memlock; libibverbs, ibv_reg_mr(3)",
        look=_limits,
        needs=("compute",),
    ),
    Check(
        name="tmp-space",
        why="compilers' caches, sockets and NCCL's shared memory fill small local file systems",
        source="NCCL documentation, troubleshooting of shared memory; LUMI on MIOpen's cache",
        look=_tmp_space,
        needs=("compute",),
    ),
    Check(
        name="userns",
        why="sandboxes are made of user namespaces, which some sites switch off",
        source="user_namespaces(7)",
        look=_userns,
        needs=("compute",),
    ),
    Check(
        name="container-munge",
        needs=("slurm",),
        why="inside a container PMIx and Slurm's commands look for munge, whose socket is outside",
        source="pmix-standard#363, podman-hpc#158; CSCS documentation on the container engine",
        look=_container_munge,
    ),
)
COMPARISONS = (
    Comparison(
        name="host-memory",
        why="on a node that lost memory to earlier jobs a process of the run is killed when it has grown",
        source="a preflight used on JUPITER: nodes with leaked host memory, each tied to a lost allocation",
        gather=_gather_memory,
        compare=_compare_memory,
        needs=("compute",),
    ),
    Comparison(
        name="clock",
        why="the end of the allocation is a time of day, and munge refuses credentials that are dated too far off",
        source="Slurm's quick start for administrators: clocks are in step; munge, expired and rewound credentials",
        gather=_gather_clock,
        compare=_compare_clock,
        needs=("compute",),
    ),
    Comparison(
        name="versions",
        why="processes of different versions refuse one another's messages",
        source="this project's protocol version",
        gather=_gather_versions,
        compare=_compare_versions,
        needs=("compute",),
    ),
)
