"""Where a path really lies, and what the site file says of that place."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from miles_hpc.cluster.preflight.contract import Context, Finding, Machine, fail
from miles_hpc.core.site import SiteFileSystem

__all__ = ["ANSWER_S", "LOCAL_KINDS", "NETWORK_KINDS", "file_system_of", "place_of", "places_of"]

#: Types of mounts whose files other hosts see (mountinfo).
NETWORK_KINDS = frozenset(
    {"lustre", "nfs", "nfs4", "gpfs", "beegfs", "ceph", "fuse.ceph", "wekafs", "panfs", "pvfs2", "orangefs", "cifs",
     "smb3", "9p", "afs", "dvs", "cvmfs", "fuse.sshfs", "fuse.juicefs", "glusterfs", "fuse.glusterfs"}
)  # fmt: skip
LOCAL_KINDS = frozenset({"tmpfs", "ramfs", "xfs", "ext4", "ext3", "btrfs", "overlay", "zfs"})
#: Seconds for a question to a file system; one that is alive answers in milliseconds, a busy one in some seconds.
ANSWER_S = 5.0


def place_of(machine: Machine, path: str) -> dict[str, Any] | Finding:
    """What the probe `place` tells of a path, or the finding that it doesn't answer."""
    return places_of(machine, [path])[0]


def places_of(machine: Machine, paths: Sequence[str]) -> list[dict[str, Any] | Finding]:
    """The same for several paths: by one process while all of them answer, one by one otherwise."""
    together = machine.probe("place", *paths, timeout_s=ANSWER_S)
    if not together.problem:
        return [dict(place) for place in together.value]
    if len(paths) > 1:
        return [place_of(machine, path) for path in paths]
    saw = f"{paths[0]}: {together.problem.removeprefix(f'{paths[0]}: ')}"
    return [fail(saw, "see the check 'file-systems'")]


def file_system_of(context: Context, real: str) -> SiteFileSystem | None:
    """The site file's entry for a place: by its path, or by its name as one of the folders of the place."""
    best: SiteFileSystem | None = None
    depth = -1
    for entry in context.site.file_systems if context.site is not None else []:
        path = context.expand(entry.path)
        inside = path.startswith("/") and f"{real}/".startswith(path.rstrip("/") + "/")
        if inside and len(path) > depth:
            best, depth = entry, len(path)
        elif depth < 0 and path and "/" not in path and path.lower() in (part.lower() for part in Path(real).parts):
            best = entry
    return best
