"""What the supervisor does about the next allocation: at the start of this one, and at its end.

| what goes wrong | what is done |
|---|---|
| at the start no follow-up can be handed in | the allocation is used, and it is asked for again at the end |
| slurmctld is away at the end | asked again for `_PATIENCE_S` |
| sbatch refuses to leave the bad nodes out | handed in with them |
| the owner cancelled the run between question and answer | the follow-up is taken out again |
| a follow-up that was noted is gone | another one, at the next look or at the end; after the owner's scancel none |

An end of the chain is always said: on the batch script's output, and in outcome.json.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from typing import TypeVar

from miles_hpc.cluster.chain import (
    AttemptStart,
    BadNode,
    allocations_used,
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
from miles_hpc.cluster.slurm import Slurm, is_away
from miles_hpc.cluster.submit import (
    adopt_job,
    drop_follow_up,
    read_first_attempt,
    read_follow_up,
    submit_follow_up,
)
from miles_hpc.core import env, exits
from miles_hpc.core.config import RunConfig, SiteConfig
from miles_hpc.core.deadline import Deadline
from miles_hpc.core.errors import MilesError, UserError
from miles_hpc.core.paths import RunPaths

__all__ = ["Chain"]

#: Causes after which Slurm puts a job back into the queue by itself, when that may be requeued.
_SLURM_REQUEUES = ("NODE FAILURE", "PREEMPTION", "JOB REQUEUE")
#: How long the end of an allocation waits for a slurmctld that is away: a restart or a fail-over takes minutes.
_PATIENCE_S = 300.0
_ASK_AGAIN_S = 5.0

T = TypeVar("T")


class Chain:
    """This allocation's place in the run's chain. See cluster/chain.py for when it goes on."""

    def __init__(
        self,
        run: RunConfig,
        site: SiteConfig,
        paths: RunPaths,
        slurm: Slurm,
        job_id: int,
        attempt: int,
        *,
        patience_s: float = _PATIENCE_S,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Reads job.json. `patience_s` bounds how long `next` waits for a Slurm that is away."""
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
        self._excluded: list[str] = []  # what the follow-up that waits was told to leave out
        self._taken_out: int | None = None  # a follow-up that was seen cancelled; Slurm forgets that in minutes
        self._complaint = ""  # of the newest look, told once
        self._patience_s = patience_s
        self._sleep = sleep

    def begin(self) -> str:
        """Record the start and hand in the follow-up where jobs aren't requeued; returns why this mustn't start."""
        progress = progress_of(self._paths)
        adopt_job(self._paths, self._job_id)
        cancelled = is_cancelled(self._paths)
        start = AttemptStart(
            attempt=self._attempt,
            job_id=self._job_id,
            restart=env.read("SLURM_RESTART_COUNT"),
            time=time.time(),
            progress=progress,
        )
        before = decide(
            self._run.job,
            # An allocation that has begun goes on: its own earlier attempts are no reason against it.
            [earlier for earlier in read_starts(self._paths) if earlier.allocation != start.allocation],
            progress,
            attempt=self._attempt - 1,
            first=self._first,
            cancelled=cancelled,
        )
        if not before.go:
            return before.why
        record_start(self._paths, start)
        # One may wait already, when this supervisor takes over from one that was killed.
        waits = self._site.requeue or read_follow_up(self._paths) is not None
        if not waits and allocations_used(read_starts(self._paths)) < self._run.job.max_allocations:
            try:
                self._hand_in()
            except MilesError as error:
                print(f"supervisor: {error}: no follow-up yet, asked again at the end", file=sys.stderr, flush=True)
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

    def look(self) -> None:
        """Hand in the follow-up again when the queue has lost it. Blocks while Slurm is asked; what fails is printed.

        One that was cancelled stays so, and a chain that ends asks for none.
        """
        if self._site.requeue or not self._wanted or is_cancelled(self._paths):
            return
        try:
            follower = read_follow_up(self._paths)
            state = "" if follower is None else self._state(follower)
            if state == "queued" or allocations_used(read_starts(self._paths)) >= self._run.job.max_allocations:
                return
            if state == "CANCELLED":
                if self._taken_out is None:
                    print(f"supervisor: job {follower}, the next allocation, was cancelled: none follows", flush=True)
                self._taken_out = follower
            elif follower is None or follower != self._taken_out:
                if follower is not None:
                    print(f"supervisor: job {follower}, the next allocation, is gone: asking for another", flush=True)
                self._hand_in()
        except (MilesError, OSError) as error:
            if str(error) != self._complaint:
                print(f"supervisor: {error}: no follow-up yet, asked again later", file=sys.stderr, flush=True)
            self._complaint = str(error)

    def outlook(self) -> str:
        """What comes after this allocation, once `next` has settled it."""
        if not self._wanted:
            return "no next allocation"
        if self._requeued:
            return f"job {self._job_id} is queued again"
        follower = read_follow_up(self._paths)
        return "the next allocation is queued" if follower is None else f"next allocation is job {follower}"

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
        if self._wanted and self._called_off():
            self._stop("the job was cancelled")
        try:
            if not self._wanted:
                self._insist(lambda: drop_follow_up(self._paths, self._slurm))
            elif not self._requeued:
                self._ask()
        except MilesError as error:
            if self._wanted:
                self._stop(f"{error}: 'miles-hpc resume' goes on")
            else:
                print(f"supervisor: {error}: the follow-up is still queued", file=sys.stderr, flush=True)

    def _ask(self) -> None:
        """Ask Slurm for the next allocation. Raises MilesError when there is none to be had."""
        exclude = self._left_out()
        if not self._site.requeue:
            follower = read_follow_up(self._paths)
            state = "" if follower is None else self._state(follower)
            if state == "CANCELLED" or (follower is not None and follower == self._taken_out):
                self._stop(f"its job {follower} was cancelled")
            elif state in ("", "ended") or set(exclude) - set(self._excluded):  # those weren't known at the start
                self._insist(self._hand_in)
                if follower is not None and state == "queued":
                    self._slurm.cancel(follower)
            return
        if not exclude:  # a requeued job can't be told of nodes to leave out
            try:
                print(f"supervisor: job {self._job_id} is queued again for the next allocation", flush=True)
                self._insist(lambda: self._slurm.requeue(self._job_id))  # Slurm ends this script now
                self._requeued = True
                return
            except MilesError as error:
                print(f"supervisor: {error}: handing in a follow-up job instead", file=sys.stderr, flush=True)
        self._insist(self._hand_in)

    def _insist(self, request: Callable[[], T]) -> T:
        """Make a request; again and again while Slurm is away. Raises its error when patience is at its end."""
        deadline, told = Deadline(self._patience_s, "Slurm's answer"), False
        while True:
            try:
                return request()
            except MilesError as error:
                if not is_away(error) or deadline.expired or (self._wanted and self._called_off()):
                    raise
                if not told:
                    again = f"asking again for up to {self._patience_s:.0f} s"
                    print(f"supervisor: {error}: {again}", file=sys.stderr, flush=True)
                told = True
            self._sleep(_ASK_AGAIN_S)

    def _hand_in(self) -> None:
        exclude = self._left_out()
        try:
            try:
                follower = submit_follow_up(self._paths, self._slurm, self._job_id, exclude=exclude)
            except UserError as error:
                if not exclude:
                    raise
                # Too few nodes are left, say; a job with a doubtful node is better than none.
                print(f"supervisor: {error}: handing it in without --exclude", file=sys.stderr, flush=True)
                exclude = []
                follower = submit_follow_up(self._paths, self._slurm, self._job_id)
        except OSError as error:
            print(f"supervisor: {error}: the next allocation is queued but not noted", file=sys.stderr, flush=True)
            return
        self._excluded = exclude
        if is_cancelled(self._paths):  # the owner came in between, and saw no follow-up yet
            self._slurm.cancel(follower)
            return
        without = f", without {', '.join(exclude)}" if exclude else ""
        print(f"supervisor: next allocation is job {follower}{without}", flush=True)

    def _left_out(self) -> list[str]:
        """Nodes that the next allocation is to do without, where the site lets a job say so."""
        if self._site.sbatch.exclude_allowed is False:
            return []
        try:
            return [one.node for one in bad_nodes(self._paths)]
        except (UserError, OSError) as error:
            print(f"supervisor: {error}: no node is left out", file=sys.stderr, flush=True)
            return []

    def _state(self, follower: int) -> str:
        """ "queued", "ended" or "CANCELLED"; "queued" where Slurm doesn't say."""
        try:
            found = self._slurm.components(follower)
        except MilesError:
            return "queued"
        if any(component.active for component in found):
            return "queued"
        return "CANCELLED" if any(component.state == "CANCELLED" for component in found) else "ended"

    def _called_off(self) -> bool:
        """Whether the owner has ended the chain or this job."""
        return is_cancelled(self._paths) or self._cause() == ""

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
