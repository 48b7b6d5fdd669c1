"""A job whose batch host is gone and that goes on (--no-kill): nobody is left who would end it or start the next one.

Slurm keeps such a job running, without a script, until its time limit (seen with 22.05). So agents that have lost their
controller for good look whether Slurm has given the batch host up, and then ask for the next allocation in its place:
requeue, or the end of this job, for which a follow-up waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from miles_hpc.cluster.nodelist import expand
from miles_hpc.core.deadline import Deadline
from miles_hpc.core.errors import MilesError

__all__ = ["batch_host", "release_orphaned_job"]

_LOOK_S = 3.0


class OrphanScheduler(Protocol):
    """The part of `Slurm` that is needed."""

    def failed_nodes(self, names: Sequence[str]) -> dict[str, str]: ...

    def requeue(self, leader: int) -> None: ...

    def cancel(self, job_id: int) -> None: ...


def batch_host(environ: Mapping[str, str]) -> str:
    """The node of the batch script: the job's first; "" outside a job."""
    nodes = environ.get("SLURM_JOB_NODELIST_HET_GROUP_0") or environ.get("SLURM_JOB_NODELIST", "")
    return expand(nodes)[0] if nodes else ""


def release_orphaned_job(
    slurm: OrphanScheduler,
    job_id: int,
    host: str,
    *,
    requeue: bool,
    over: Callable[[], bool],
    wait_s: float,
    sleep: Callable[[float], None] = time.sleep,
) -> str:
    """Wait until Slurm has given `host` up, then end or requeue the job; returns what was done, "" when nothing was.

    `over` says that somebody else has taken the run on. Several agents may do this at once: the second one's request
    meets a job that waits already, which Slurm refuses.
    """
    deadline = Deadline(wait_s, f"Slurm's word on {host}")
    while not deadline.expired and not over():
        try:
            failed = slurm.failed_nodes([host])
            if host in failed:
                if requeue:
                    slurm.requeue(job_id)
                else:
                    slurm.cancel(job_id)
                done = "requeued" if requeue else "cancelled, for its follow-up"
                return f"batch host {host} is {failed[host]}: job {job_id} {done}"
        except MilesError as error:
            if "pending" in str(error).lower() or "already" in str(error).lower():
                return ""  # another agent was first
        sleep(_LOOK_S)
    return ""
