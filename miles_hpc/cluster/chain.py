"""The chain of allocations: whether there is a next one. Decisions are pure; records are files.

    attempt starts ─▶ record progress ─▶ idle too often? budget used up? cancelled? ─▶ stop, and say why
                                   └─▶ [no requeue at this site] follow-up job now: afterany, singleton
    attempt ends   ─▶ complete, or stop ─▶ cancel the follow-up
                   └▶ goes on           ─▶ requeue, or the follow-up that waits already

Progress is what a restart finds: the newest complete checkpoint. The follow-up is handed in at the start because a
batch host that loses power hands in nothing.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from checkpoints.manifest import newest_complete
from checkpoints.publish import publish_bytes
from miles_hpc.core.config import JobConfig
from miles_hpc.core.errors import UserError
from miles_hpc.core.paths import RunPaths

__all__ = [
    "AttemptStart",
    "BadNode",
    "Decision",
    "Progress",
    "allocations_used",
    "bad_nodes",
    "decide",
    "idle_attempts",
    "is_cancelled",
    "progress_of",
    "read_starts",
    "record_bad_nodes",
    "record_outcome",
    "record_start",
    "set_cancelled",
]


class Progress(msgspec.Struct, frozen=True, order=True):
    """How far the newest complete checkpoint is; grows with each save that got further."""

    step: int = -1  # -1: there is none
    evaluations: int = 0


class AttemptStart(msgspec.Struct, frozen=True, kw_only=True):
    """What an attempt found when it started: attempts/0001/start.json."""

    attempt: int
    job_id: int | None
    restart: int = 0  # how often Slurm had restarted the job; with job_id the allocation
    time: float
    progress: Progress

    @property
    def allocation(self) -> tuple[int | None, int]:
        """The start of a job that it belongs to: a supervisor that was killed and started again made attempts too."""
        return self.job_id, self.restart


class BadNode(msgspec.Struct, frozen=True, kw_only=True):
    """Why a node is left out of later allocations."""

    node: str
    reason: str
    attempt: int
    time: float


@dataclass(frozen=True)
class Decision:
    """Whether the chain goes on, and why not."""

    go: bool
    why: str = ""


def progress_of(paths: RunPaths) -> Progress:
    """What a restart would find now."""
    newest = newest_complete(paths.checkpoints)
    return Progress() if newest is None else Progress(newest[1].step, newest[1].counters.evaluations)


def idle_attempts(starts: Sequence[AttemptStart], now: Progress, *, first: int = 1) -> int:
    """How many allocations in a row, up to the newest one started, have left the run where they found it.

    `now` is the progress after the newest; attempts before `first` belong to an earlier submission and don't count.
    """
    found: dict[tuple[int | None, int], Progress] = {}  # of each allocation, oldest first
    for start in sorted((s for s in starts if s.attempt >= first), key=lambda s: s.attempt):
        found.setdefault(start.allocation, start.progress)
    idle, after = 0, now
    for progress in reversed(found.values()):
        if after > progress:
            break
        idle, after = idle + 1, progress
    return idle


def allocations_used(starts: Sequence[AttemptStart]) -> int:
    """How many allocations these attempts were made in: what job.max_allocations counts."""
    return len({start.allocation for start in starts})


def decide(
    job: JobConfig, starts: Sequence[AttemptStart], now: Progress, *, attempt: int, first: int, cancelled: bool
) -> Decision:
    """Whether another allocation follows that of `attempt`, whose start is the newest of `starts`."""
    if cancelled:
        return Decision(False, "the run was cancelled: 'miles-hpc resume' goes on")
    idle = idle_attempts(starts, now, first=first)
    if idle >= job.max_idle_allocations:
        stood = "before its first checkpoint" if now.step < 0 else f"at step {now.step}"
        return Decision(
            False,
            f"{idle} allocations in a row made no progress: the run stands {stood}: look at the logs of the last "
            f"attempts, up to {attempt}, mend the cause, then 'miles-hpc resume'",
        )
    if (used := allocations_used(starts)) >= job.max_allocations:
        last = f"allocation {used} was the last of job.max_allocations = {job.max_allocations}"
        return Decision(False, f"{last}: to go on, raise it and resume")
    return Decision(True)


# ---------------------------------------------------------------------------------------------- records


def record_start(paths: RunPaths, start: AttemptStart) -> None:
    """Write attempts/<n>/start.json."""
    publish_bytes(paths.attempt_start(start.attempt), msgspec.json.encode(start))


def record_outcome(paths: RunPaths, attempt: int, outcome: str, reason: str) -> None:
    """Say how an attempt ended: completed, continue, failed, fenced, or stopped (no next one; the reason says why).

    Where it can't be written (a full file system), it is printed: what comes after an attempt doesn't depend on it.
    """
    record = {"attempt": attempt, "outcome": outcome, "reason": reason, "time": time.time()}
    try:
        publish_bytes(paths.outcome(attempt), msgspec.json.encode(record))
    except OSError as error:
        told = f"{outcome}: {reason}" if reason else outcome
        print(f"supervisor: {error}: the outcome of attempt {attempt} is {told}", file=sys.stderr, flush=True)


def read_starts(paths: RunPaths) -> list[AttemptStart]:
    """All attempts' starts, oldest first; one whose record is missing or unreadable is left out."""
    starts = []
    for path in sorted(paths.attempts.glob("[0-9]*/start.json")):
        try:
            starts.append(msgspec.json.decode(path.read_bytes(), type=AttemptStart))
        except (OSError, msgspec.DecodeError):
            continue
    return starts


def set_cancelled(paths: RunPaths, cancelled: bool) -> None:
    """Leave word for every supervisor of this run, queued ones included, that nothing more starts; or take it back."""
    if cancelled:
        publish_bytes(paths.cancelled, b"{}\n")
    else:
        paths.cancelled.unlink(missing_ok=True)


def is_cancelled(paths: RunPaths) -> bool:
    """Whether the chain was cancelled by its owner."""
    return paths.cancelled.exists()


def bad_nodes(paths: RunPaths) -> list[BadNode]:
    """Nodes that later allocations leave out. Raises UserError for a file that a user has broken."""
    try:
        data = paths.bad_nodes.read_bytes()
    except FileNotFoundError:
        return []
    try:
        return msgspec.json.decode(data, type=list[BadNode])
    except msgspec.DecodeError as error:
        raise UserError(f"{paths.bad_nodes}: {error}: mend or remove it") from error


def record_bad_nodes(paths: RunPaths, nodes: Sequence[BadNode]) -> None:
    """Add nodes to the list; those on it stay with their first reason."""
    known = bad_nodes(paths)
    names = {one.node for one in known}
    new = [one for one in nodes if one.node not in names]
    if new:
        publish_bytes(Path(paths.bad_nodes), msgspec.json.format(msgspec.json.encode([*known, *new])))
