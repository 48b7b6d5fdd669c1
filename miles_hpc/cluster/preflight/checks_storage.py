"""Checks of file systems: do they answer, lock, keep the time; who may read the secret; where caches lie."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from miles_hpc.cluster.preflight.contract import Check, Comparison, Context, Finding, Machine, fail, fine, skip, warn
from miles_hpc.cluster.preflight.places import ANSWER_S, LOCAL_KINDS, NETWORK_KINDS, file_system_of, place_of, places_of
from miles_hpc.cluster.preflight.wording import listed, nodes_by_value

__all__ = ["CHECKS", "COMPARISONS"]

_TIME_WARN_S = 2.0

#: Compilers' caches: variable, place without it.
_CACHES = (
    ("TRITON_CACHE_DIR", "~/.triton"),
    ("TORCHINDUCTOR_CACHE_DIR", "/tmp"),
    ("TORCH_EXTENSIONS_DIR", "~/.cache/torch_extensions"),
    ("CUDA_CACHE_PATH", "~/.nv/ComputeCache"),
    ("FLASHINFER_WORKSPACE_BASE", "~"),
)
_CACHES_AMD = (("MIOPEN_USER_DB_PATH", "~/.config/miopen"), ("MIOPEN_CUSTOM_CACHE_DIR", "~/.cache/miopen"))


# ------------------------------------------------------------------------------------------------ do they answer


def _file_systems(machine: Machine, context: Context) -> Iterator[Finding]:
    wanted = {
        "the run directory": str(context.run_dir or ""),
        "HOME": machine.environ.get("HOME", ""),
        "Python's folder": sys.prefix,
    }
    for entry in context.site.file_systems if context.site is not None else []:
        path = context.expand(entry.path)
        if path.startswith("/") and path not in wanted.values():
            wanted[f"'{entry.path}' of the site file"] = path
    fine_ones, real_ones = [], []
    for what, path in wanted.items():
        if not path:
            continue
        asked = machine.probe("place", path, timeout_s=ANSWER_S)
        if asked.timed_out:
            do = "exclude this node, it may list the mount and yet hang; tell the site's support"
            yield fail(f"{what}, {path}: no answer within {ANSWER_S:.0f} s", do)
        elif asked.problem:
            yield fail(f"{what}, {path}: {asked.problem}", "look at the path and its mount")
        else:
            fine_ones.append(what)
            real_ones.append(asked.value[0])
    for what, place in zip(fine_ones, real_ones, strict=True):
        if what == "the run directory" and not place["writable"]:
            yield fail(f"the run directory: {place['real']} can't be written by you", "choose another --run-dir")
    if fine_ones:
        yield fine(f"answer in time: {listed(fine_ones)}")


def _gather_run_dir(machine: Machine, context: Context) -> dict[str, Any] | None:
    place = place_of(machine, str(context.run_dir))
    return (
        None if isinstance(place, Finding) else {key: place[key] for key in ("real", "mount", "kind", "inode", "fsid")}
    )


def _compare_run_dir(values: Mapping[str, Any], context: Context) -> Iterator[Finding]:
    """One folder has one inode number everywhere. Its file system's id is equal too, where the file system is local."""
    first = next(iter(values.values()))
    where = f"{first['real']} on {first['mount']} ({first['kind']})"
    own = {node: value["fsid"] if value["kind"] in LOCAL_KINDS else 0 for node, value in values.items()}
    folders = nodes_by_value({node: (value["kind"], value["inode"], own[node]) for node, value in values.items()})
    if len(folders) == 1:
        yield fine(f"the run directory is one folder on all nodes: {where}")
        return
    groups = " and ".join(listed(nodes) for nodes in folders.values())
    yield fail(
        f"the run directory isn't the same folder on {groups}: {where}",
        "choose a run directory on a file system that all nodes share",
    )


# ------------------------------------------------------------------------------------------------ flock


def _flock(machine: Machine, context: Context) -> Iterator[Finding]:
    place = place_of(machine, str(context.run_dir))
    if isinstance(place, Finding):
        yield place
        return
    stated = file_system_of(context, place["real"])
    asked = machine.probe("flock", str(context.run_dir))
    where = f"{place['mount']} ({place['kind']})"
    off = context.role_environment.get("HDF5_USE_FILE_LOCKING", "").upper() in ("FALSE", "0", "BEST_EFFORT")
    if asked.timed_out:
        yield fail(f"{where}: flock hangs", "choose another --run-dir; on Lustre the mount needs the option flock")
        return
    works = not asked.problem and bool(asked.value["works"])
    saw = asked.problem or asked.value["saw"]
    if not works:
        do = "set HDF5_USE_FILE_LOCKING=FALSE in env of the site file, or choose another --run-dir"
        text = f"{where}: {saw}"
        yield warn(text, "keep the run directory to one run at a time") if off else fail(text, do)
        return
    if "localflock" in place["options"].split(","):
        yield warn(
            f"{where} is mounted localflock: a lock keeps out this node only", "let one host write a file at a time"
        )
        return
    beside = ", though the site file says no" if stated is not None and stated.flock == "no" else ""
    yield fine(f"{where}: {saw}{beside}")


# ------------------------------------------------------------------------------------------------ caches


def _jit_caches(machine: Machine, context: Context) -> Iterator[Finding]:
    environ = context.role_environment
    amd = context.site is not None and context.site.node.gpu_vendor == "amd"
    shared: list[tuple[str, str]] = []
    local = 0
    caches = {
        variable: environ.get(variable) or default.replace("~", environ.get("HOME", "/"))
        for variable, default in (*_CACHES, *(_CACHES_AMD if amd else ()))
    }
    places = places_of(machine, list(caches.values()))
    for (variable, path), place in zip(caches.items(), places, strict=True):
        if isinstance(place, Finding):
            yield place
        elif place["kind"] in NETWORK_KINDS:
            shared.append((variable, f"{path} ({place['kind']})"))
        else:
            local += 1
    if shared:
        names = listed(f"{variable}: {where}" for variable, where in shared)
        stated = ", ".join(f'{variable} = "/tmp/<you>/{variable.lower()}"' for variable, _ in shared[:2])
        yield warn(
            f"compilers' caches lie on a shared file system: {names}", f"in [env] of the site file: {stated}, ..."
        )
    elif local:
        yield fine(f"{local} compilers' caches lie on this node")


# ------------------------------------------------------------------------------------------------ secret, dates


def _secret(machine: Machine, context: Context) -> Iterator[Finding]:
    paths = context.paths
    if paths is None:
        return
    asked = machine.probe("mode", str(paths.secret), timeout_s=ANSWER_S)
    if asked.problem:
        yield fail(f"{paths.secret}: {asked.problem}", "look at that file system")
    elif asked.value is None:
        yield skip("no secret yet: submit makes it")
    elif not asked.value["regular"]:
        yield fail(f"{paths.secret} isn't a regular file", "remove it; submit makes a new one")
    elif not asked.value["own"]:
        yield fail(f"{paths.secret} belongs to somebody else", "use a run directory of your own")
    elif asked.value["mode"] & 0o077:
        yield fail(
            f"{paths.secret} has mode {asked.value['mode']:04o}, others can read it", f"chmod 600 {paths.secret}"
        )
    else:
        yield fine(f"secret.key has mode {asked.value['mode']:04o}")


def _file_clock(machine: Machine, context: Context) -> Iterator[Finding]:
    asked = machine.probe("file_time", str(context.run_dir))
    if asked.problem:
        yield fail(f"a file in the run directory can't be dated: {asked.problem}", "look at that file system")
        return
    ahead = float(asked.value)
    which = f"{abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} this host's clock"
    if abs(ahead) > _TIME_WARN_S:
        yield warn(f"new files are dated {which}", "tell the site's support: what goes by dates is off by as much")
    else:
        yield fine("new files are dated by this host's clock, or one that agrees with it")


CHECKS = (
    Check(
        name="file-systems",
        why="a file system that hangs on one node stops the whole run in silence, and /proc/mounts still lists it",
        source="a report of JUPITER: a project file system unmounted on one of its nodes",
        look=_file_systems,
    ),
    Check(
        name="flock",
        why="HDF5 locks the files it opens, and fails or hangs where flock isn't there",
        source="NERSC on CFS; HDF5 documentation, HDF5_USE_FILE_LOCKING",
        look=_flock,
        needs=("run directory",),
    ),
    Check(
        name="jit-caches",
        why="caches that all ranks share over the network break by stale handles, locks and races",
        source="prime-rl PR#2305, sglang#31347, tvm-ffi#667, triton#11512, pytorch#173679; LUMI on MIOpen",
        look=_jit_caches,
    ),
    Check(
        name="secret",
        why="whoever reads the run's secret can command its processes",
        source="this project's authentication (control/auth.py)",
        look=_secret,
        needs=("run directory",),
        once=True,
    ),
    Check(
        name="file-clock",
        why="a file system with another clock misleads what goes by dates: purges, staleness of rendezvous files",
        source="RFC 1813: a file server may set dates by its own clock",
        look=_file_clock,
        needs=("run directory",),
    ),
)
COMPARISONS = (
    Comparison(
        name="shared-run-dir",
        why="roles meet in the run directory: on a node's own disk each waits for the others until its deadline",
        source="NeMo-RL ray.sub looks for a canary file on each node",
        gather=_gather_run_dir,
        compare=_compare_run_dir,
        needs=("run directory", "compute"),
    ),
)
