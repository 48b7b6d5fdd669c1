"""How times, numbers and hosts are worded for people; shared by watch and report."""

from __future__ import annotations

import math
import re

from miles_hpc.cli.story import RunStory

__all__ = ["HostNames", "duration", "quantity"]

_ADDRESS = re.compile(r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?(?![\w.]*\d)")


def duration(seconds: float) -> str:
    """Two units at most: `0.8 s`, `42 s`, `3 min 07 s`, `2 h 05 min`, `1 d 03 h`."""
    if not math.isfinite(seconds):
        return "unknown"
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600:02d} h"


def quantity(value: float) -> str:
    """Three significant digits; integers up to a million in full; scientific where that is shorter."""
    if not math.isfinite(value):
        return "not a number" if math.isnan(value) else "infinite"
    if value == int(value) and abs(value) < 1_000_000:
        return f"{int(value)}"
    if 1e-3 <= abs(value) < 1000:
        digits = 2 - math.floor(math.log10(abs(value)))
        return f"{value:.{max(0, digits)}f}"
    return f"{value:.3g}"


class HostNames:
    """Replaces host names and addresses by what they stand for, so that a report can be shown to anyone.

    A host of one role becomes `rollout node 2`, a host of several `node 1`, numbered in the order of appearance.
    Known hosts are those that the allocations list, with or without their domain. Peers are called role-host-rank:
    `rollout-n17-0` becomes `rollout node 2`, with its rank where some node of the run has several.
    """

    def __init__(self, story: RunStory) -> None:
        roles: dict[str, list[str]] = {}
        for allocation in story.allocations:
            for role, hosts in allocation.hosts.items():
                for host in hosts:
                    found = roles.setdefault(host.split(".")[0], [])
                    if host and role not in found:
                        found.append(role)
        self._labels: dict[str, str] = {}
        counts: dict[str, int] = {}
        for host, of in roles.items():
            label = f"{of[0]} node" if len(of) == 1 else "node"
            counts[label] = counts.get(label, 0) + 1
            self._labels[host] = f"{label} {counts[label]}"
        peers = [p.name for p in story.peers] + [v.peer for v in story.verdicts]
        self._ranks = any(re.search(r"-[1-9]\d*$", peer) for peer in peers)
        names = "|".join(re.escape(h) for h in sorted(self._labels, key=len, reverse=True) if h)
        self._pattern = (
            re.compile(rf"(?<![A-Za-z0-9])(?:([a-z]+)[-/@:])?({names})(?:\.[A-Za-z]\w*)*(?:-(\d+))?(?![A-Za-z0-9])")
            if names
            else None
        )

    def hide(self, text: str) -> str:
        """`text` with every known host replaced, and every IPv4 address."""

        def label(match: re.Match[str]) -> str:
            role, host, rank = match[1], self._labels[match[2]], match[3]
            words = f"{role} on {host}" if role is not None and not host.startswith(role) else host
            return f"{words} rank {rank}" if rank is not None and self._ranks else words

        return _ADDRESS.sub("an address", self._pattern.sub(label, text) if self._pattern else text)
