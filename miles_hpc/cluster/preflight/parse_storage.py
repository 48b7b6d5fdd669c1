"""What lfs and quota print, as data. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["Quota", "StripePart", "parse_lfs_quota", "parse_quota", "parse_stripes", "stripe_at"]

_KIB = 1024
_CELL = re.compile(r"\[?(\d+)\]?(\*?)\Z")


@dataclass(frozen=True)
class StripePart:
    """How bytes from `start` on are striped; a plain layout has one part."""

    start: int
    count: int  # targets; -1 = all of the file system's
    stripe_bytes: int


@dataclass(frozen=True)
class Quota:
    """Use and limits of one owner on one file system. 0 = no limit; `limit` is the soft one where there is one."""

    used_bytes: int
    limit_bytes: int
    used_files: int
    limit_files: int
    over: bool = False  # marked with "*": the grace period runs, or nothing more can be written


def parse_stripes(text: str) -> list[StripePart]:
    """`lfs getstripe -d DIR`, of a plain layout or a progressive one (PFL), by start; [] when it tells none."""
    parts: list[StripePart] = []
    start, count = 0, None
    for line in text.splitlines():
        if found := re.search(r"lcme_extent\.e_start:\s*(\d+)", line):
            start = int(found[1])
        if found := re.search(r"\b(?:lmm_)?stripe_count:\s*(-?\d+)", line):
            count = int(found[1])
        found = re.search(r"\b(?:lmm_)?stripe_size:\s*(\d+)", line)
        if found and count is not None:
            parts.append(StripePart(start, count, int(found[1])))
            count = None
    return sorted(parts, key=lambda part: part.start)


def stripe_at(parts: list[StripePart], size_bytes: int) -> StripePart | None:
    """The part in which the end of a file of `size_bytes` lies."""
    return next((part for part in reversed(parts) if part.start < max(1, size_bytes)), None)


def parse_lfs_quota(text: str) -> Quota | None:
    """`lfs quota -q -u USER MOUNT`: kibibytes and files; None when the file system tells no quota.

    A long mount point has a line of its own; numbers stand in brackets when a target didn't answer, and carry "*"
    when the limit is exceeded.
    """
    words = text.split()
    cells = [_CELL.match(word) for word in words]
    for at in range(len(words)):
        # kbytes quota limit grace files quota limit grace; a grace is "-", "none" or a time such as "6d23h".
        row = cells[at : at + 8]
        if len(row) >= 7 and all(row[i] for i in (0, 1, 2, 4, 5, 6)) and row[3] is None:
            values = [int(cell[1]) if cell else 0 for cell in row]
            return Quota(
                used_bytes=values[0] * _KIB,
                limit_bytes=(values[1] or values[2]) * _KIB,
                used_files=values[4],
                limit_files=values[5] or values[6],
                over=any(cell is not None and cell[2] == "*" for cell in row),
            )
    return None


def parse_quota(text: str, mount: str) -> Quota | None:
    """`quota -w`: the line of the file system that is mounted at `mount` or bears its name; None without one.

    The grace column is left out while a limit isn't exceeded: columns are counted by their kinds.
    """
    for line in text.splitlines():
        words = line.split()
        if len(words) < 7 or words[0] not in (mount, mount.rstrip("/")):
            continue
        numbers = [cell for cell in map(_CELL.match, words[1:]) if cell is not None]
        if len(numbers) < 6:
            continue
        values = [int(cell[1]) for cell in numbers[:6]]
        return Quota(
            used_bytes=values[0] * _KIB,
            limit_bytes=(values[1] or values[2]) * _KIB,
            used_files=values[3],
            limit_files=values[4] or values[5],
            over=any(cell[2] == "*" for cell in numbers[:6]),
        )
    return None
