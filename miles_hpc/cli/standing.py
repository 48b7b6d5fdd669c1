"""Where a run stands: the witnesses are asked here, `cluster.job_state` judges them. Read by status and watch.

    job.json ─▶ Witnesses.ask ─▶ scontrol, sacct ─┐
    events/*.jsonl ─▶ RunStory ─▶ own_records ────┴─ judge ─▶ Standing

Nothing here raises because Slurm is away: that is part of the answer. At most three questions are asked, each with the
client's timeout, and no further one of scontrol after one without an answer.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from miles_hpc.cli.story import Allocation, RunStory, role_of
from miles_hpc.cluster.accounting import AccountingRecord, NodeHours, OwnUsage, newest_start, spent
from miles_hpc.cluster.chain import AttemptStart, read_starts
from miles_hpc.cluster.job_state import AccountingView, JobVerdict, OwnRecords, SchedulerView, judge
from miles_hpc.cluster.slurm import ComponentState
from miles_hpc.core.config import RunConfig
from miles_hpc.core.errors import MilesError, UserError
from miles_hpc.core.paths import RunPaths

__all__ = ["AskedScheduler", "Attempt", "Standing", "Witnesses", "attempts_of", "own_records"]

_ACCOUNTING_EVERY_S = 30.0  # a watching command doesn't ask slurmdbd more often


class AskedScheduler(Protocol):
    """The part of `Slurm` that is asked."""

    def components(self, job_id: int) -> list[ComponentState]: ...

    def accounting(self, job_ids: Sequence[int]) -> list[AccountingRecord]: ...


@dataclass(frozen=True)
class Attempt:
    """One Slurm start, or one start of `miles-hpc local`. Times are epoch seconds; None = not recorded."""

    number: int
    job_id: int | None
    restart: int | None  # which start of the job it was
    start: float | None
    end: float | None
    last_seen: float | None
    nodes: int  # 0 = not recorded
    outcome: str  # "" = not recorded
    reason: str
    steps: tuple[int, ...]  # of the lineage that counts, trained in it


@dataclass(frozen=True)
class Standing:
    """The answer to "where does it stand?"."""

    verdict: JobVerdict
    components: tuple[ComponentState, ...]  # of the verdict's job, as Slurm lists them
    follow_up: JobVerdict | None  # a job of this run that waits behind the verdict's
    attempts: tuple[Attempt, ...]
    node_hours: NodeHours | None
    time_left_s: float | None  # of the present allocation; None = none runs, or it has no end


class Witnesses:
    """Asks Slurm about one run. Keeps what sacct said for a while; otherwise without state."""

    def __init__(self, run: RunConfig, paths: RunPaths, slurm: AskedScheduler) -> None:
        self._run, self._paths, self._slurm = run, paths, slurm
        self._asked_at = float("-inf")
        self._records: list[AccountingRecord] = []
        self._no_accounting = ""

    def ask(
        self, jobs: Sequence[int], story: RunStory, *, follow_up: int | None = None, always_accounting: bool = True
    ) -> Standing:
        """Where the run stands; `jobs` are the leaders' ids of its jobs, oldest first, and `follow_up` the next one's.

        Without `always_accounting` sacct is asked only about a job that slurmctld doesn't tell of.
        """
        now = time.time()
        attempts = attempts_of(self._paths, story)
        own = own_records(self._run, story, attempts)
        current = jobs[-1] if jobs else None
        view = SchedulerView() if current is None else self._components(current)
        behind: tuple[int, SchedulerView] | None = None
        if follow_up is not None and not view.failure:
            behind = (follow_up, self._components(follow_up))
            if not any(c.active for c in view.components) and any(c.active for c in behind[1].components):
                (current, view), behind = behind, None  # its turn has come
            elif not behind[1].components:
                behind = None
        if jobs and (always_accounting or not view.components):
            self._ask_accounting(jobs)
        accounting = self._accounting_of(current)
        return Standing(
            verdict=judge(current, view, accounting, own, now),
            components=view.components,
            follow_up=None if behind is None else judge(behind[0], behind[1], AccountingView(), own, now),
            attempts=attempts,
            node_hours=spent(self._records, jobs, _usage(attempts, view, now)) if jobs else None,
            time_left_s=_time_left_s(view, story, now),
        )

    def _components(self, job_id: int) -> SchedulerView:
        """Ids start anew when a cluster is set up again: a job of another name isn't ours."""
        try:
            found = self._slurm.components(job_id)
        except MilesError as error:
            return SchedulerView(failure=_short(error))
        return SchedulerView(components=tuple(found) if all(self._is_ours(c.name) for c in found) else ())

    def _ask_accounting(self, jobs: Sequence[int]) -> None:
        if time.monotonic() - self._asked_at < _ACCOUNTING_EVERY_S:
            return
        try:
            self._records = [r for r in self._slurm.accounting(jobs) if self._is_ours(r.name)]
            self._no_accounting = ""
        except MilesError as error:
            self._records, self._no_accounting = [], _short(error)
        self._asked_at = time.monotonic()

    def _accounting_of(self, job_id: int | None) -> AccountingView:
        records = [] if job_id is None else newest_start(self._records, job_id)
        return AccountingView(tuple(records), self._no_accounting)

    def _is_ours(self, job_name: str) -> bool:
        """Components are called <run>-<role>, a job of one component may be called like the run."""
        return job_name == self._run.name or job_name.startswith(f"{self._run.name}-")


def attempts_of(paths: RunPaths, story: RunStory) -> tuple[Attempt, ...]:
    """All attempts by their folders and by the events; the outcome file counts where events lack the end."""
    allocations = {a.attempt: a for a in story.allocations}
    folders = {int(path.name) for path in paths.attempts.glob("[0-9]*") if path.is_dir() and path.name.isdigit()}
    starts = {start.attempt: start for start in read_starts(paths)}
    steps: dict[int, list[int]] = {}
    for step in story.steps:
        steps.setdefault(step.attempt, []).append(step.step)
    return tuple(
        _attempt(number, paths, allocations.get(number), starts.get(number), tuple(steps.get(number, ())))
        for number in sorted(folders | allocations.keys())
        if number > 0
    )


def own_records(run: RunConfig, story: RunStory, attempts: Sequence[Attempt]) -> OwnRecords:
    """What the run's own files say of its newest attempt."""
    total = run.sft.steps + run.rollout.n_steps
    complete = story.complete and story.current_step >= total  # more steps may have been asked for since
    if not attempts:
        return OwnRecords(complete=complete)
    newest = attempts[-1]
    joined = {role_of(v.peer) for v in story.verdicts if v.name == "joined" and v.attempt == newest.number}
    return OwnRecords(
        complete=complete,
        attempt=newest.number,
        job_id=newest.job_id,
        restart=newest.restart,
        started=newest.start,
        ready=joined >= {"trainer", "rollout"} or bool(newest.steps),
        ended=newest.end,
        outcome=newest.outcome,
        reason=newest.reason,
        last_event=newest.last_seen,
        controller_lost=_controller_lost(story, newest.number),
    )


def _attempt(
    number: int, paths: RunPaths, allocation: Allocation | None, begun: AttemptStart | None, steps: tuple[int, ...]
) -> Attempt:
    record = _outcome(paths, number)
    ended = record.get("time")
    end = float(ended) if isinstance(ended, int | float) else None
    hosts = {host for of in allocation.hosts.values() for host in of} if allocation is not None else set()
    job_id = int(allocation.job_id) if allocation is not None and allocation.job_id.isdigit() else None
    return Attempt(
        number=number,
        job_id=job_id if begun is None else begun.job_id,
        restart=None if begun is None else begun.restart,
        start=allocation.start if allocation is not None else (None if begun is None else begun.time),
        end=allocation.end if allocation is not None and allocation.end is not None else end,
        last_seen=None if allocation is None else allocation.closed,
        nodes=len(hosts),
        outcome=str(record.get("outcome") or (allocation.outcome if allocation is not None else "")),
        reason=str(record.get("reason") or (allocation.reason if allocation is not None else "")),
        steps=steps,
    )


def _outcome(paths: RunPaths, attempt: int) -> dict[str, Any]:
    """An attempt's outcome.json; empty when it isn't there (yet) or can't be read."""
    try:
        record = json.loads(paths.outcome(attempt).read_bytes())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def _controller_lost(story: RunStory, attempt: int) -> float | None:
    """When hosts of this attempt last lost the controller, if neither it nor the supervisor has written since."""
    lost = max((v.t for v in story.verdicts if v.name == "controller_lost" and v.attempt == attempt), default=None)
    heard = max((p.last_seen for p in story.peers if p.role in ("controller", "supervisor")), default=0.0)
    return lost if lost is not None and lost > heard else None


def _usage(attempts: Sequence[Attempt], view: SchedulerView, now: float) -> list[OwnUsage]:
    """An attempt that recorded no end lasts as long as Slurm says of its job, else until its last event."""
    by_slurm = {c.job_id: now if c.state == "RUNNING" else c.end_time for c in view.components if c.state != "PENDING"}
    usage = []
    for a in attempts:
        killed = by_slurm.get(a.job_id or 0) if a is attempts[-1] else None  # earlier ones: of an earlier start
        end = a.end or killed or a.last_seen
        if a.start is not None and end is not None and a.nodes:
            usage.append(OwnUsage(attempt=a.number, job_id=a.job_id, seconds=max(0.0, end - a.start), nodes=a.nodes))
    return usage


def _time_left_s(view: SchedulerView, story: RunStory, now: float) -> float | None:
    """By Slurm; while it is away by what the supervisor noted at the start of an allocation that hasn't ended."""
    ends = [c.end_time for c in view.components if c.state == "RUNNING" and c.end_time is not None]
    if not ends and view.failure and story.allocations and story.allocations[-1].end is None:
        newest = story.allocations[-1]
        ends = [newest.start + newest.time_limit_s] if newest.time_limit_s is not None else []
        ends = [end for end in ends if end > now]
    return max(0.0, min(ends) - now) if ends else None


def _short(error: MilesError) -> str:
    """Without a command's options; the advice of a UserError is for whoever needs Slurm now, which a view doesn't."""
    first, _, rest = str(error).partition(": ")
    return first if isinstance(error, UserError) else f"{first.split(' ', 1)[0]}: {rest}"
