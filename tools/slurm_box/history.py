"""The history of a box: one record per end of a job or het component, read from Slurm's jobcomp/filetxt file.

A requeued job has one record per start; Slurm 22.05 writes PENDING as the state of a start that a requeue ended, which
is called REQUEUED here. A line reads (Slurm 22.05, jobcomp_filetxt.c, JOB_FORMAT):

    JobId=4 UserId=root(0) ... Name=x JobState=REQUEUED ... StartTime=... EndTime=... NodeList=a[1-2] ... HetJobId=3 ...
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

__all__ = ["JobRecord", "expand_nodes", "parse_history", "read_history"]

_FIELD = re.compile(r"(?:^| )([A-Z][A-Za-z]*)=")


@dataclass(frozen=True, kw_only=True)
class JobRecord:
    """One end of a job. Times are local ISO 8601 text, or "Unknown" when it never started."""

    job_id: int
    het_job_id: int | None  # the leader's job id; None for a job without components
    het_offset: int | None
    name: str
    user: str
    partition: str
    state: str  # COMPLETED, FAILED, CANCELLED, REQUEUED, NODE_FAIL, TIMEOUT, ...
    start: str
    end: str
    nodes: tuple[str, ...]


def parse_history(text: str) -> list[JobRecord]:
    """Records in file order, which is the order of ends. Lines that are incomplete are left out."""
    records = []
    for line in text.splitlines():
        fields: dict[str, str] = {}
        marks = list(_FIELD.finditer(line))
        for mark, following in zip(marks, [*marks[1:], None], strict=True):
            value = line[mark.end() : following.start() if following else len(line)]
            fields.setdefault(mark[1], value.strip())
        if not fields.get("JobId", "").isdigit() or "EndTime" not in fields:
            continue
        het = fields.get("HetJobId", "")
        nodes = fields.get("NodeList", "")
        records.append(
            JobRecord(
                job_id=int(fields["JobId"]),
                het_job_id=int(het) if het.isdigit() and het != "0" else None,
                het_offset=int(fields["HetJobOffset"]) if het.isdigit() and het != "0" else None,
                name=fields.get("Name", ""),
                user=fields.get("UserId", "").partition("(")[0],
                partition=fields.get("Partition", ""),
                state="REQUEUED" if fields.get("JobState") == "PENDING" else fields.get("JobState", ""),
                start=fields.get("StartTime", ""),
                end=fields["EndTime"],
                nodes=expand_nodes(nodes) if nodes not in ("", "(null)") else (),
            )
        )
    return records


def read_history(path: Path) -> list[JobRecord]:
    """Records of a box; none before the first job has ended."""
    try:
        return parse_history(path.read_text(errors="replace"))
    except FileNotFoundError:
        return []


def expand_nodes(text: str) -> tuple[str, ...]:
    """`a[1-2,4],b1` -> a1, a2, a4, b1: the names that a box gives its nodes, in Slurm's bracket notation."""
    names: list[str] = []
    for item in re.findall(r"[^,\[]+(?:\[[^\]]*\])?", text):
        prefix, bracket, ranges = item.partition("[")
        if not bracket:
            names.append(prefix)
            continue
        for part in ranges.rstrip("]").split(","):
            first, _, last = part.partition("-")
            names += [f"{prefix}{k}" for k in range(int(first), int(last or first) + 1)]
    return tuple(names)
