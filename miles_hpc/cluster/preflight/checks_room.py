"""Checks of the room for a run: how its files are striped, and whether they fit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from miles_hpc.cluster.preflight.contract import Check, Context, Finding, Machine, fail, fine, skip, warn
from miles_hpc.cluster.preflight.model_file import model_config
from miles_hpc.cluster.preflight.parse_storage import Quota, parse_lfs_quota, parse_quota, parse_stripes, stripe_at
from miles_hpc.cluster.preflight.places import ANSWER_S, file_system_of, place_of
from miles_hpc.cluster.preflight.plan_size import RunSize, run_size
from miles_hpc.cluster.preflight.wording import bytes_text, count_text
from miles_hpc.core.site import SiteFileSystem

__all__ = ["CHECKS"]

_FULL = 0.8  # of what is left: above it, little room for a mistake of the estimate


# ------------------------------------------------------------------------------------------------ stripe


def _stripe(machine: Machine, context: Context) -> Iterator[Finding]:
    place = place_of(machine, str(context.run_dir))
    if isinstance(place, Finding):
        yield place
        return
    if place["kind"] != "lustre":
        yield skip(f"{place['mount']} is {place['kind']}, not Lustre")
        return
    told = machine.run("lfs", "getstripe", "-d", place["real"])
    if told.problem:
        yield fail(told.problem, "is Lustre's client installed in this image?" if told.missing else "look at the mount")
        return
    parts = parse_stripes(told.stdout)
    size = _size(context)
    largest = size.largest_file_bytes if size is not None else 0
    part = stripe_at(parts, largest)
    if part is None:
        yield warn(
            f"lfs getstripe tells no layout of {place['real']}", "lfs getstripe -d by hand; set one by lfs setstripe"
        )
        return
    entry = file_system_of(context, place["real"])
    advised = [row for row in (entry.stripes if entry else []) if row.from_bytes <= largest]
    seen = f"{place['real']}: {_targets(part.count)} of {bytes_text(part.stripe_bytes)}"
    about = f" for files of {bytes_text(largest)}" if largest else ""
    if not advised:
        if part.count == -1:
            yield warn(f"{seen}{about}: small files go over all targets", f"lfs setstripe -c 1 {place['real']}")
        else:
            yield fine(f"{seen}{about}; the site file advises nothing")
        return
    advice = max(advised, key=lambda row: row.from_bytes)
    if part.count == advice.count:
        yield fine(f"{seen}{about}, as the site advises")
        return
    option = f" -S {advice.stripe_bytes}" if advice.stripe_bytes else ""
    yield warn(
        f"{seen}{about}, the site advises {_targets(advice.count)}",
        f"before the first save: lfs setstripe -c {advice.count}{option} {place['real']}/checkpoints",
    )


def _targets(count: int) -> str:
    return "all targets" if count == -1 else "1 target" if count == 1 else f"{count} targets"


def _size(context: Context) -> RunSize | None:
    return run_size(context.run, model_config(context.run)) if context.run is not None else None


# ------------------------------------------------------------------------------------------------ room


def _quota(machine: Machine, context: Context) -> Iterator[Finding]:
    place = place_of(machine, str(context.run_dir))
    if isinstance(place, Finding):
        yield place
        return
    size = _size(context)
    quota = _ask_quota(machine, place)
    if isinstance(quota, Finding):
        yield quota
        quota = None
    if quota is not None and quota.over:
        yield fail(
            f"{place['mount']}: you are over your quota with {bytes_text(quota.used_bytes)} "
            f"and {count_text(quota.used_files)} files",
            "remove files: some sites refuse jobs meanwhile",
        )
        return
    free_bytes, free_files = _left(place, quota, file_system_of(context, place["real"]))
    room = f"{place['mount']} has room for {bytes_text(free_bytes)}"
    room += f" and {count_text(free_files)} files" if free_files is not None else ""
    if size is None:
        yield fine(f"{room}; how much the run needs isn't known without --run and its model's sizes")
        return
    needs = (
        f"the run needs about {bytes_text(size.total_bytes)} "
        f"(checkpoints of {bytes_text(size.checkpoint_bytes)}) and {count_text(size.total_files)} files"
    )
    worst = max(
        size.total_bytes / max(1, free_bytes),
        size.total_files / max(1, free_files) if free_files is not None else 0.0,
    )
    do = "lower checkpoint.keep or checkpoint.interval_steps, clear old runs, or choose another --run-dir"
    if worst > 1:
        yield fail(f"{room}; {needs}", do)
    elif worst > _FULL:
        yield warn(f"{room}; {needs}", do)
    else:
        yield fine(f"{room}; {needs}")


def _ask_quota(machine: Machine, place: dict[str, Any]) -> Quota | Finding | None:
    """The user's own quota; None where there is none or nobody can be asked."""
    user = machine.environ.get("USER") or machine.environ.get("LOGNAME") or ""
    if place["kind"] == "lustre":
        told = machine.run("lfs", "quota", "-q", *(["-u", user] if user else []), place["mount"])
        if told.timed_out:
            return fail(f"{told.problem}", "look at that file system")
        return parse_lfs_quota(told.stdout)
    told = machine.run("quota", "-w", "--show-mntpoint", "--hide-device", timeout_s=ANSWER_S)
    return parse_quota(told.stdout, place["mount"])


def _left(place: dict[str, Any], quota: Quota | None, stated: SiteFileSystem | None) -> tuple[int, int | None]:
    """Bytes and files that may still be written: the least of file system, quota, and the site's rule for a quota."""
    sizes = [int(place["free_bytes"])]
    files = [int(place["free_inodes"])] if place["total_inodes"] else []
    if quota is not None and quota.limit_bytes:
        sizes.append(max(0, quota.limit_bytes - quota.used_bytes))
    if quota is not None and quota.limit_files:
        files.append(max(0, quota.limit_files - quota.used_files))
    if quota is None and stated is not None:
        sizes += [stated.quota_bytes] if stated.quota_bytes else []
        files += [stated.quota_inodes] if stated.quota_inodes else []
    return min(sizes), min(files, default=None)


CHECKS = (
    Check(
        name="stripe",
        why="a large file on one target is slow, a small one over all targets slower, for everybody",
        source="file system guides of CSCS, OLCF and NERSC; SOAP PR#188",
        look=_stripe,
        needs=("run directory",),
        once=True,
    ),
    Check(
        name="quota",
        why="a save that runs out of room ends the run, and some sites refuse jobs of users over quota",
        source="bio2zarr#366; NERSC's quota gate at submission",
        look=_quota,
        needs=("run directory",),
        once=True,
    ),
)
