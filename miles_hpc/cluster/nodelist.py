"""Slurm's host lists, both ways, without calling scontrol (containers often lack it).

    node[001-003,007]      node001 node002 node003 node007      padding is each item's own
    rack[0-1]_blade[0-1]   rack0_blade0 rack0_blade1 ...         two brackets: the last one runs fastest
    x[1-2][3-4]y[5]        x13y5 x23y5 x14y5 x24y5               more: of the others the first one runs fastest
    a1,a2 / a1 a2          order and duplicates are kept

Agrees with `scontrol show hostnames` (tests/slurm compares): text after the last bracket, empty brackets and falling
ranges are refused as there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import product
from math import prod

from miles_hpc.core.errors import UserError

__all__ = ["compress", "expand"]

_NAME = re.compile(r"(?:[^\[\],\s]+|\[[^\[\]]*\])+")
_PART = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?\Z")
_NUMBERED = re.compile(r"(.*?)(\d+)\Z", re.DOTALL)
#: Slurm's own bound on one range (hostlist.c, MAX_RANGE).
_MAX_RANGE = 64 * 1024


def expand(text: str) -> list[str]:
    """Host names of a host list, in its order. Raises UserError for what Slurm calls an invalid host list."""
    hosts: list[str] = []
    rest = text
    for found in _NAME.finditer(text):
        hosts += _expand_name(found.group(), text)
    rest = _NAME.sub("", rest).replace(",", "").strip()
    if rest:
        raise _invalid(text, f"'{rest}' doesn't belong to a name")
    return hosts


def _expand_name(name: str, text: str) -> list[str]:
    parts: list[list[str]] = []
    bracket_last = False
    for found in _PART.finditer(name):
        bracket_last = found[1] is not None
        parts.append(_expand_ranges(found[1], text) if bracket_last else [found[2]])
    if len(parts) > 1 and not bracket_last:
        raise _invalid(text, f"text after the brackets of '{name}'")
    if prod(len(part) for part in parts) > _MAX_RANGE:
        raise _invalid(text, f"'{name}' has more than {_MAX_RANGE} members")
    # product() runs its last argument fastest: Slurm's order is the last bracket, then the others from the left.
    return ["".join((*reversed(head), last)) for *head, last in product(*reversed(parts[:-1]), parts[-1])]


def _expand_ranges(ranges: str, text: str) -> list[str]:
    numbers: list[str] = []
    for item in ranges.split(","):
        found = _RANGE.match(item)
        if found is None:
            raise _invalid(text, f"'{item}' is not a number or a range")
        low, high = found[1], found[2] if found[2] is not None else found[1]
        count = int(high) - int(low) + 1
        if not 1 <= count <= _MAX_RANGE:
            raise _invalid(text, f"range {item} has {max(count, 0)} members, expected 1 to {_MAX_RANGE}")
        numbers += [str(n).zfill(len(low)) for n in range(int(low), int(high) + 1)]
    return numbers


def compress(hosts: Iterable[str]) -> str:
    """The shortest list in the same order that `expand` turns back into `hosts`: node3,node1,node2 -> node[3,1-2]."""
    groups: list[tuple[str, list[list[str]]]] = []  # (prefix, runs of [first, last] as text); prefix alone: no runs
    for host in hosts:
        found = _NUMBERED.match(host)
        if found is None or not found[1]:
            groups.append((host, []))
            continue
        prefix, number = found[1], found[2]
        if not groups or groups[-1][0] != prefix or not groups[-1][1]:
            groups.append((prefix, []))
        runs = groups[-1][1]
        if runs and number == str(int(runs[-1][1]) + 1).zfill(len(runs[-1][0])):
            runs[-1][1] = number
        else:
            runs.append([number, number])
    names = []
    for prefix, runs in groups:
        items = [first if first == last else f"{first}-{last}" for first, last in runs]
        single = len(items) == 1 and "-" not in items[0]
        names.append(prefix if not items else prefix + items[0] if single else f"{prefix}[{','.join(items)}]")
    return ",".join(names)


def _invalid(text: str, why: str) -> UserError:
    return UserError(f"host list '{text}': {why}")
