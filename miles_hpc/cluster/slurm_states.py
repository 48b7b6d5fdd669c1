"""One vocabulary for where a job stands, and the way from Slurm's words to it. Pure.

    scontrol's or sacct's word ──slurm_state──▶ JobState ◀── a verdict on a run's records   (job_state)
                                                         ◀── a side job's results           (jobs, side_jobs)

Slurm's words are those of squeue(1), JOB STATE CODES, and of sacct(1). A word that isn't known is UNKNOWN and no end:
newer versions add some.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from datetime import datetime
from enum import StrEnum

__all__ = ["JobState", "epoch_of", "exit_words", "known_text", "most_telling", "slurm_state"]


class JobState(StrEnum):
    """Where a job stands. The names of ends are Slurm's where Slurm has one."""

    NOT_SUBMITTED = "NOT SUBMITTED"
    QUEUED = "QUEUED"
    REQUEUED = "REQUEUED"  # in the queue again after a start
    STARTING = "STARTING"  # has nodes; they are set up, or the run's trainer and rollout aren't both there yet
    RUNNING = "RUNNING"
    SUSPENDED = "SUSPENDED"
    ENDING = "ENDING"
    COMPLETED = "COMPLETED"  # of a run or a side job: by its own records
    PAUSED = "PAUSED"  # a run's state is saved, no next allocation is queued
    HALTED = "HALTED"  # by the chain's own rules: no progress, or the budget of allocations is used up
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    NODE_FAIL = "NODE_FAIL"
    TIMEOUT = "TIMEOUT"
    PREEMPTED = "PREEMPTED"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    BOOT_FAIL = "BOOT_FAIL"
    DEADLINE = "DEADLINE"
    ENDED = "ENDED"  # it is over, and nobody says how
    UNKNOWN = "UNKNOWN"  # it may be over or not: evidence may still come

    @property
    def alive(self) -> bool:
        """Whether it waits for nodes or holds some, by a witness's word."""
        return self in _ALIVE

    @property
    def over(self) -> bool:
        """Whether somebody says that it has ended. UNKNOWN is neither alive nor over."""
        return self not in _ALIVE and self not in (JobState.UNKNOWN, JobState.NOT_SUBMITTED)

    @property
    def from_outside(self) -> bool:
        """Whether it is an end that Slurm knows better than the job, which was only killed."""
        return self in _TELLING and self is not JobState.FAILED


_ALIVE = frozenset(
    {
        JobState.QUEUED,
        JobState.REQUEUED,
        JobState.STARTING,
        JobState.RUNNING,
        JobState.SUSPENDED,
        JobState.ENDING,
    }
)

#: Ends by what tells most of the cause: a component that failed takes the others along as CANCELLED.
_TELLING = (
    JobState.NODE_FAIL,
    JobState.OUT_OF_MEMORY,
    JobState.BOOT_FAIL,
    JobState.TIMEOUT,
    JobState.PREEMPTED,
    JobState.DEADLINE,
    JobState.FAILED,
    JobState.CANCELLED,
)

_SLURM = {
    "PENDING": JobState.QUEUED,
    "RESV_DEL_HOLD": JobState.QUEUED,
    "SPECIAL_EXIT": JobState.QUEUED,
    "REQUEUED": JobState.REQUEUED,
    "REQUEUE_FED": JobState.REQUEUED,
    "REQUEUE_HOLD": JobState.REQUEUED,
    "CONFIGURING": JobState.STARTING,
    "RESIZING": JobState.RUNNING,
    "RUNNING": JobState.RUNNING,
    "SIGNALING": JobState.RUNNING,
    "STOPPED": JobState.SUSPENDED,
    "SUSPENDED": JobState.SUSPENDED,
    "COMPLETING": JobState.ENDING,
    "STAGE_OUT": JobState.ENDING,
    "COMPLETED": JobState.COMPLETED,
    "LAUNCH_FAILED": JobState.FAILED,
    "RECONFIG_FAIL": JobState.FAILED,
    "REVOKED": JobState.CANCELLED,
    **{state.value: state for state in _TELLING},
}


def slurm_state(word: str) -> JobState:
    """The state that a word of Slurm's stands for, also "CANCELLED by 1000" and "CANCELLED+"; UNKNOWN for others."""
    name = (word.split() or [""])[0].rstrip("+").upper()
    return _SLURM.get(name, JobState.UNKNOWN)


def known_text(text: str) -> str:
    """A field of scontrol or sacct; "" where it holds one of their words for nothing."""
    return "" if text in ("(null)", "None", "None assigned", "Unknown") else text


def epoch_of(text: str) -> float | None:
    """Epoch seconds of a time as scontrol and sacct print it, local and without a zone; None for "Unknown" and such."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


def most_telling(states: Sequence[JobState]) -> int:
    """Index of the end that tells most of a job whose components have all ended; the first of equals.

    Raises ValueError for none.
    """
    rank = {state: n for n, state in enumerate(_TELLING)}
    return min(range(len(states)), key=lambda i: rank.get(states[i], len(rank)))


def exit_words(code: str) -> str:
    """Slurm's "exit code:signal" in words; "" for success and for what isn't one.

    A shell says 128 + n for a child that signal n ended, and srun does the same.
    """
    found = re.match(r"(\d+):(\d+)", code)
    if found is None:
        return ""
    status, number = int(found[1]), int(found[2])
    if number:
        return f"ended by {_signal_name(number)}"
    if 128 < status < 128 + signal.NSIG:
        return f"exit code {status}: a process was ended by {_signal_name(status - 128)}"
    return f"exit code {status}" if status else ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
