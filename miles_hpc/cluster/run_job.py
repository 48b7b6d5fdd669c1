"""The run's own batch job, het components and all, in the shape that side jobs have.

Slurm's state is of the job, not of the run: a job that saved its state and wants another allocation ends with an exit
code that Slurm calls FAILED. So the attempt's outcome.json, which its supervisor writes last, has a say.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from miles_hpc.cluster.chain import read_starts
from miles_hpc.cluster.jobs import JobFailed, JobStatus, Witness, await_end, judge, look
from miles_hpc.cluster.slurm_states import JobState
from miles_hpc.cluster.submit import read_follow_up, read_job, read_submitted
from miles_hpc.core.paths import RunPaths

__all__ = ["RunJob", "with_outcome"]


class RunJob:
    """One job of a run, known by its leader's id: the latest, or the one that waits behind it. A JobHandle.

    `open` and `open_next` make one.
    """

    def __init__(self, paths: RunPaths, job_id: int, run_name: str, slurm: Witness | None) -> None:
        self._paths = paths
        self._job_id = job_id
        self._name = run_name
        self._slurm = slurm

    @classmethod
    def open(cls, paths: RunPaths, run_name: str, slurm: Witness | None) -> RunJob | None:
        """The handle of the run's latest submission; None when it was never submitted. Raises UserError (job.json)."""
        job_id = read_job(paths)
        return None if job_id is None else cls(paths, job_id, run_name, slurm)

    @classmethod
    def open_next(cls, paths: RunPaths, run_name: str, slurm: Witness | None) -> RunJob | None:
        """The handle of the follow-up: the next allocation, which waits for the latest; None without one."""
        job_id = read_follow_up(paths)
        return None if job_id is None else cls(paths, job_id, run_name, slurm)

    @property
    def id(self) -> str:
        return str(self._job_id)

    @property
    def name(self) -> str:
        return self._name

    @property
    def submitted(self) -> float | None:
        return read_submitted(self._paths, self._job_id)

    @property
    def stdout_path(self) -> Path:
        return self._paths.attempts / f"slurm-{self._job_id}.out"

    @property
    def stderr_path(self) -> Path:
        return self.stdout_path

    def status(self) -> JobStatus:
        """See JobHandle: one state for all components, and what the newest attempt says of its end."""
        if self._slurm is None:
            status = JobStatus(JobState.UNKNOWN, "no Slurm on this machine")
        else:
            status = judge(look(self._slurm, self._job_id, self._name))
        return with_outcome(status, self._outcome())

    def state(self) -> JobState:
        return self.status().state

    def done(self) -> bool:
        return self.status().ended

    def result(self, deadline_s: float) -> dict[str, Any]:
        """See JobHandle: the outcome of the newest attempt, `outcome` being "completed" or "continue"."""
        status = await_end(self, deadline_s)
        outcome = self._outcome()
        if status.state is not JobState.COMPLETED or outcome is None:
            raise self._failure(status)
        return outcome

    def exception(self) -> JobFailed | None:
        status = self.status()
        return self._failure(status) if status.ended and status.state is not JobState.COMPLETED else None

    def cancel(self) -> None:
        if self._slurm is not None and not self.status().ended:
            self._slurm.cancel(self._job_id)

    def _failure(self, status: JobStatus) -> JobFailed:
        what = status if status.state is not JobState.COMPLETED else "COMPLETED, and there is no outcome.json"
        return JobFailed(f"job {self._job_id} of run '{self._name}' {what}; see {self.stdout_path}", status)

    def _outcome(self) -> dict[str, Any] | None:
        """outcome.json of this job's newest attempt (a requeued job has several); None while it goes on."""
        mine = [start.attempt for start in read_starts(self._paths) if start.job_id == self._job_id]
        if not mine:
            return None
        try:
            outcome: dict[str, Any] = json.loads(self._paths.outcome(max(mine)).read_bytes())
        except (OSError, ValueError):
            return None
        return outcome


def with_outcome(status: JobStatus, outcome: dict[str, Any] | None) -> JobStatus:
    """What follows from Slurm's state and the attempt's outcome together; pure.

    A job that goes on, goes on: the outcome is then of a start before a requeue.
    """
    if outcome is None or status.state.alive:
        return status
    told = str(outcome.get("outcome", ""))
    if told == "completed":
        return JobStatus(JobState.COMPLETED, "the run is complete", "result", status.nodes)
    if told == "continue" and status.ended:
        reason = "its state is saved, and the run goes on in the next allocation"
        return JobStatus(JobState.COMPLETED, reason, "result", status.nodes)
    if told in ("failed", "fenced", "stopped"):
        state = JobState.FAILED if status.state in (JobState.UNKNOWN, JobState.COMPLETED) else status.state
        reason = str(outcome.get("reason") or status.reason or told)
        return JobStatus(state, reason, "result" if state is JobState.FAILED else status.witness, status.nodes)
    return status
