"""Slurm's host lists, both ways, without calling scontrol (containers often lack it).

    node[001-003,007]      node001 node002 node003 node007      padding is each item's own
    rack[0-1]_blade[0-1]   rack0_blade0 rack0_blade1 ...         two brackets: the last one runs fastest
    x[1-2][3-4]y[5]        x13y5 x23y5 x14y5 x24y5               more: of the others the first one runs fastest
    a1,a2 / a1 a2          order and duplicates are kept

`expand` takes what `scontrol show hostnames` of 22.05 takes, with the same hosts, and refuses what it refuses: text
after the last bracket, empty brackets and items, falling ranges, ranges of more than 65,536. tests/slurm compares them
over generated lists. Slurm reads numbers with strtoul(3), so "[1,+2]", "[1, 2]", "[3-]" and "[1a-2]" are lists too.

Brackets that don't pair are where the two part. scontrol takes these and answers with something else than was meant;
here they are refused:

    a[1       a]          cut off, as by a column of squeue
    a[1][2    a[1]]       the end of the first bracket becomes part of a name
    a]        a]          a bracket that nothing opened
    a],b[1]   a] b1
    [         (a blank)

A line break separates names, as a blank does and as it does for Slurm from 23.02 on (CHANGELOG 23.02). For 22.05 it is
part of a name: "a\\nb[1-2]" comes out as a, b1, a, b2.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import product
from math import prod

from miles_hpc.core.errors import UserError

__all__ = ["MAX_HOSTS", "compress", "expand"]

#: Slurm separates names by these alone: a no-break space or a carriage return is part of a name.
_NAME = re.compile(r"(?:[^\[\], \t\n]+|\[[^\[\]]*\])+")
_SEPARATORS = ", \t\n"
_PART = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")
#: strtoul(3) in the C locale; a minus can't come, since the item is split at it.
_NUMBER = re.compile(r"[ \t\n\v\f\r]*\+?([0-9]+)")
_NUMBERED = re.compile(r"(.*?)([0-9]+)\Z", re.DOTALL)
#: Slurm's own bound on one range (hostlist.c, MAX_RANGE).
_MAX_RANGE = 64 * 1024
_ULONG_MAX = 2**64 - 1
#: Ours: Slurm has none, and a slip such as n[1-60000][1-60000] would fill the memory.
MAX_HOSTS = 2**20


def expand(text: str) -> list[str]:
    """Host names of a host list, in its order. Raises UserError for what Slurm calls an invalid host list."""
    hosts: list[str] = []
    for found in _NAME.finditer(text):
        hosts += _expand_name(found.group(), text, MAX_HOSTS - len(hosts))
    rest = _NAME.sub("", text).strip(_SEPARATORS)
    if rest:
        raise _invalid(text, f"'{rest[0]}' without its partner: is the list cut off?")
    return hosts


def _expand_name(name: str, text: str, room: int) -> list[str]:
    parts: list[list[str]] = []
    bracket_last = False
    for found in _PART.finditer(name):
        bracket_last = found[1] is not None
        parts.append(_expand_ranges(found[1], text) if bracket_last else [found[2]])
    if len(parts) > 1 and not bracket_last:
        raise _invalid(text, f"text after the brackets of '{name}'")
    if prod(len(part) for part in parts) > room:
        raise _invalid(text, f"more than {MAX_HOSTS} members")
    # product() runs its last argument fastest: Slurm's order is the last bracket, then the others from the left.
    return ["".join((*reversed(head), last)) for *head, last in product(*reversed(parts[:-1]), parts[-1])]


def _expand_ranges(ranges: str, text: str) -> list[str]:
    """Numbers of a bracket, padded with zeros to the length of their range's first end as it is written."""
    numbers: list[str] = []
    for item in ranges.split(","):
        low, _, high = item.partition("-")
        first, last = _NUMBER.match(low), _NUMBER.match(high or low)
        if first is None or last is None or last.end() != len(high or low) or "x" in item:
            raise _invalid(text, f"'{item}' is not a number or a range")
        begin, end = (min(int(found[1]), _ULONG_MAX) for found in (first, last))
        if not 1 <= end - begin + 1 <= _MAX_RANGE:
            raise _invalid(text, f"range {item} has {max(end - begin + 1, 0)} members, expected 1 to {_MAX_RANGE}")
        width = len(low.encode(errors="surrogateescape"))
        numbers += [str(n).zfill(width) for n in range(begin, end + 1)]
    return numbers


def compress(hosts: Iterable[str]) -> str:
    """The list in the same order that `expand` turns back into `hosts`: node3,node1,node2 -> node[3,1-2].

    It is what `scontrol show hostlist` prints. Raises UserError for an empty name and one with a comma, a bracket or
    a blank, which a list can't hold.
    """
    groups: list[tuple[str, list[list[str]]]] = []  # (prefix, runs of [first, last] as text); prefix alone: no runs
    for host in hosts:
        if not host or re.search(r"[\[\], \t\n]", host):
            raise UserError(f"host name {host!r}: expected a name without commas, brackets and blanks")
        found = _NUMBERED.match(host)
        if found is None or int(found[2]) > _ULONG_MAX:
            groups.append((host, []))
            continue
        prefix, number = found[1], found[2]
        if not groups or groups[-1][0] != prefix or not groups[-1][1]:
            groups.append((prefix, []))
        runs = groups[-1][1]
        if runs and _follows(number, runs[-1]):
            runs[-1][1] = number
        else:
            runs.append([number, number])
    names = []
    for prefix, runs in groups:
        items = [first if first == last else f"{first}-{last}" for first, last in runs]
        single = len(items) == 1 and "-" not in items[0]
        names.append(prefix if not items else prefix + items[0] if single else f"{prefix}[{','.join(items)}]")
    return ",".join(names)


def _follows(number: str, run: list[str]) -> bool:
    first, last = run
    return number == str(int(last) + 1).zfill(len(first)) and int(number) - int(first) < _MAX_RANGE


def _invalid(text: str, why: str) -> UserError:
    return UserError(f"host list '{text}': {why}")
