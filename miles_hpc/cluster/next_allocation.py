"""What the supervisor does about the next allocation: at the start of this one, and at its end."""

from __future__ import annotations

import math
import sys
import time

from miles_hpc.cluster.chain import (
    AttemptStart,
    BadNode,
    bad_nodes,
    decide,
    is_cancelled,
    progress_of,
    read_starts,
    record_bad_nodes,
    record_outcome,
    record_start,
)
from miles_hpc.cluster.lifecycle import cause_of_end
from miles_hpc.cluster.slurm import Slurm
from miles_hpc.cluster.submit import (
    adopt_follow_up,
    drop_follow_up,
    read_first_attempt,
    read_follow_up,
    submit_follow_up,
)
from miles_hpc.core import env, exits
from miles_hpc.core.config import RunConfig, SiteConfig
from miles_hpc.core.errors import MilesError, UserError
from miles_hpc.core.paths import RunPaths

__all__ = ["Chain"]

#: Causes after which Slurm puts a job back into the queue by itself, when that may be requeued.
_SLURM_REQUEUES = ("NODE FAILURE", "PREEMPTION", "JOB REQUEUE")


class Chain:
    """This allocation's place in the run's chain. See cluster/chain.py for when it goes on."""

    def __init__(
        self, run: RunConfig, site: SiteConfig, paths: RunPaths, slurm: Slurm, job_id: int, attempt: int
    ) -> None:
        self._run = run
        self._site = site
        self._paths = paths
        self._slurm = slurm
        self._job_id = job_id
        self._attempt = attempt
        self._first = read_first_attempt(paths)
        self._output = paths.output(job_id)
        self._output_before = self._output.stat().st_size if self._output.is_file() else 0
        self._wanted = True  # whether there is to be a next allocation
        self._requeued = False  # by Slurm, after a lost node or a preemption

    def begin(self) -> str:
        """Record the start and hand in the follow-up where jobs aren't requeued; returns why this mustn't start."""
        progress = progress_of(self._paths)
        adopt_follow_up(self._paths, self._job_id)
        cancelled = is_cancelled(self._paths)
        before = decide(
            self._run.job,
            read_starts(self._paths),
            progress,
            attempt=self._attempt - 1,
            first=self._first,
            cancelled=cancelled,
        )
        if not before.go:
            return before.why
        record_start(
            self._paths,
            AttemptStart(
                attempt=self._attempt,
                job_id=self._job_id,
                restart=env.read("SLURM_RESTART_COUNT"),
                time=time.time(),
                progress=progress,
            ),
        )
        # One may wait already, when this supervisor takes over from one that was killed.
        waits = self._site.requeue or read_follow_up(self._paths) is not None
        if not waits and self._attempt < self._run.job.max_allocations:
            self._hand_in()
        return ""

    def end_time(self) -> float | None:
        """Epoch second at which the allocation ends: what Slurm says now, else what it said at the start."""
        try:
            remaining_s = self._slurm.remaining_s(self._job_id)
        except MilesError as error:
            told = env.read("SLURM_JOB_END_TIME")
            print(f"supervisor: {error}; the job's end from its environment: {told}", file=sys.stderr, flush=True)
            return None if told is None else float(told)
        return None if math.isinf(remaining_s) else time.time() + remaining_s

    def end(self, code: int, reason: str, *, terminated: bool) -> None:
        """Decide whether there is a next allocation."""
        if code not in (exits.NEXT_ALLOCATION, exits.FAILED):
            self._wanted = False
            return
        cause = self._cause() if terminated else None
        if cause == "":
            self._stop("the job was cancelled")
            return
        self._requeued = self._site.requeue and cause in _SLURM_REQUEUES
        decision = decide(
            self._run.job,
            read_starts(self._paths),
            progress_of(self._paths),
            attempt=self._attempt,
            first=self._first,
            cancelled=is_cancelled(self._paths),
        )
        if not decision.go:
            self._stop(decision.why + (f"; this one ended with: {reason}" if reason else ""))
        elif code == exits.FAILED and not terminated:
            self._stop(reason or "the allocation failed")

    def note_nodes(self, troubled: dict[str, str]) -> None:
        """Remember nodes that later allocations do without."""
        nodes = [
            BadNode(node=node, reason=why, attempt=self._attempt, time=time.time()) for node, why in troubled.items()
        ]
        try:
            record_bad_nodes(self._paths, nodes)
        except (UserError, OSError) as error:
            print(f"supervisor: {error}", file=sys.stderr, flush=True)

    def next(self) -> None:
        """Requeue this job, let the follow-up come, or take it out of the queue."""
        if not self._wanted:
            drop_follow_up(self._paths, self._slurm)
            return
        if self._requeued:
            return
        if not self._site.requeue:
            if bad_nodes(self._paths):  # it was handed in before they were known
                drop_follow_up(self._paths, self._slurm)
                self._hand_in()
            return
        if bad_nodes(self._paths) and self._site.sbatch.exclude_allowed is not False:
            self._hand_in()  # a requeued job can't be told of nodes to leave out
            return
        try:
            self._slurm.requeue(self._job_id)  # Slurm ends this script now
        except MilesError as error:
            print(f"supervisor: {error}: handing in a follow-up job instead", file=sys.stderr, flush=True)
            self._hand_in()

    def _hand_in(self) -> None:
        exclude = [] if self._site.sbatch.exclude_allowed is False else [one.node for one in bad_nodes(self._paths)]
        follower = submit_follow_up(self._paths, self._slurm, self._job_id, exclude=exclude)
        without = f", without {', '.join(exclude)}" if exclude else ""
        print(f"supervisor: next allocation is job {follower}{without}", flush=True)

    def _stop(self, why: str) -> None:
        self._wanted = False
        print(f"supervisor: no next allocation: {why}", flush=True)
        record_outcome(self._paths, self._attempt, "stopped", why)

    def _cause(self) -> str | None:
        """Why this job got SIGTERM: the owner's cancel, the time limit, a preemption and a lost node all send it."""
        try:
            with self._output.open("rb") as file:
                file.seek(self._output_before)
                return cause_of_end(file.read().decode(errors="replace"))
        except OSError:
            return None
