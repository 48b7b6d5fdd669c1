"""What sacct says, as frozen data, and the node-hours that a run has spent. Pure; `slurm.Slurm.accounting` asks.

sacct lags behind slurmctld by some seconds (up to 6 measured), prints het ids as 123+0, and has a record for each start
of a requeued job when it is asked for duplicates. Without slurmdbd it fails; the run's own events are left then.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from miles_hpc.cluster.slurm_states import epoch_of, known_text

__all__ = ["SACCT_FIELDS", "AccountingRecord", "NodeHours", "OwnUsage", "newest_start", "parse_sacct", "spent"]

#: Columns of `sacct --parsable2` that `parse_sacct` reads, in this order; a name may hold "|", so it comes last.
SACCT_FIELDS = ("JobID", "State", "ExitCode", "ElapsedRaw", "AllocNodes", "NodeList", "Start", "End", "JobName")
_ID = re.compile(r"(\d+)(?:\+(\d+))?\Z")


@dataclass(frozen=True)
class AccountingRecord:
    """One start of one component. A job that was requeued has several; the newest comes last."""

    leader: int
    offset: int  # 0 for the leader and for plain jobs
    name: str
    state: str  # RUNNING, COMPLETED, REQUEUED, CANCELLED, ...: the first word
    exit_code: str  # sacct takes 128 off a code above it: scontrol's 137:0 is its 9:0 (seen with 22.05)
    elapsed_s: int
    nodes: int  # 0 before the start
    start: float | None  # epoch seconds; None before the start
    end: float | None = None  # None before the end
    hosts: str = ""  # a host list; "" before the start
    cancelled_by: str = ""  # user id; "" = not said


@dataclass(frozen=True)
class OwnUsage:
    """What one attempt's own events say of its use of nodes."""

    attempt: int
    job_id: int | None
    seconds: float  # from its first event to its end as far as that is known
    nodes: int


@dataclass(frozen=True)
class NodeHours:
    """Node-hours spent so far, and who says so: "sacct", "own events", or which jobs are from where."""

    hours: float
    source: str


def parse_sacct(text: str) -> list[AccountingRecord]:
    """Records of `sacct -n -P -X -D -o SACCT_FIELDS` in sacct's order, by start. Lines of another form are left out."""
    records = []
    for line in text.splitlines():
        fields = line.split("|", len(SACCT_FIELDS) - 1)
        if len(fields) != len(SACCT_FIELDS):
            continue
        job_id, state, exit_code, elapsed, nodes, hosts, start, end, name = fields
        found = _ID.match(job_id)
        if found is None or not state.strip() or not elapsed.isdigit() or not nodes.isdigit():
            continue  # a step, an array's task
        records.append(
            AccountingRecord(
                leader=int(found[1]),
                offset=int(found[2] or 0),
                name=name,
                state=state.split()[0],
                exit_code=exit_code,
                elapsed_s=int(elapsed),
                nodes=int(nodes),
                start=epoch_of(start),
                end=epoch_of(end),
                hosts=known_text(hosts),
                cancelled_by=by[1] if (by := re.search(r"\bby (\d+)", state)) else "",  # "CANCELLED by 1000"
            )
        )
    return records


def newest_start(records: Iterable[AccountingRecord], leader: int) -> list[AccountingRecord]:
    """The newest record of each component of one job, by offset; empty when sacct has none of it."""
    newest: dict[int, AccountingRecord] = {}
    for record in records:
        if record.leader == leader:
            newest[record.offset] = record
    return [newest[offset] for offset in sorted(newest)]


def spent(records: Sequence[AccountingRecord], jobs: Sequence[int], own: Sequence[OwnUsage]) -> NodeHours | None:
    """Node-hours of all `jobs`: from sacct where it has records, else from the run's own events; None without either.

    sacct counts from the job's start, own events from the supervisor's: the latter miss some seconds of each attempt.
    """
    by_sacct: Mapping[int, float] = _by_job(records)
    known = [job for job in jobs if job in by_sacct]
    left = [usage for usage in own if usage.job_id not in by_sacct]
    if not known and not left:
        return None
    hours = sum(by_sacct[job] for job in known) + sum(usage.seconds * usage.nodes for usage in left) / 3600
    if not left:
        return NodeHours(hours, "sacct")
    if not known:
        return NodeHours(hours, "own events")
    attempts = ", ".join(str(usage.attempt) for usage in left)
    return NodeHours(hours, f"sacct; attempt{'s' * (len(left) > 1)} {attempts} by own events")


def _by_job(records: Iterable[AccountingRecord]) -> dict[int, float]:
    """Leader -> node-hours over its components and starts."""
    hours: dict[int, float] = {}
    for record in records:
        hours[record.leader] = hours.get(record.leader, 0.0) + record.elapsed_s * record.nodes / 3600
    return hours
