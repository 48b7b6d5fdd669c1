"""Where a run's job stands, judged from three witnesses. Pure: asking them is elsewhere.

    scontrol           SchedulerView ──┐
    sacct              AccountingView ─┼── judge ──▶ JobVerdict: a state, the evidence as a sentence, warnings
    the run's records  OwnRecords ─────┘

| Slurm | who is believed |
|---|---|
| lists the job | Slurm; own records tell starting, running and ending apart, and what contradicts them is a warning |
| doesn't know it (any more) | sacct where it tells an end, else the attempt's own outcome, else nobody: UNKNOWN |
| doesn't answer | sacct where it tells an end, else own records while they are fresh, else nobody: UNKNOWN |

An exit code proves nothing (srun's was 0 after a node loss): only the run's own records say that it is complete, or
that it saved its state and wants another allocation (PAUSED while none is queued).

`cluster.jobs` has a judge of its own, for any job of Slurm's: it asks sacct only when scontrol has nothing, knows of no
attempts, requeues and follow-ups, and its answer is for waiting, not for reading. Words, ends and exit codes are those
of `slurm_states` in both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from miles_hpc.cluster.accounting import AccountingRecord
from miles_hpc.cluster.pending import explain_reason
from miles_hpc.cluster.slurm import ComponentState
from miles_hpc.cluster.slurm_states import JobState, exit_words, most_telling, slurm_state

__all__ = ["AccountingView", "JobVerdict", "OwnRecords", "SchedulerView", "judge", "span_text"]

#: Clocks of slurmctld's host and of the batch host may differ by so much.
_SKEW_S = 30.0


@dataclass(frozen=True)
class SchedulerView:
    """What `scontrol show job` said: all components, none for an unknown job, or why there was no answer."""

    components: tuple[ComponentState, ...] = ()
    failure: str = ""


@dataclass(frozen=True)
class AccountingView:
    """What sacct said of the job's newest start, a record per component; or why there is no answer."""

    records: tuple[AccountingRecord, ...] = ()
    failure: str = ""


@dataclass(frozen=True)
class OwnRecords:
    """The newest attempt by events and outcome.json. Times are epoch seconds of the hosts that wrote them."""

    complete: bool = False  # the run, not only the attempt
    attempt: int = 0  # 0 = none yet
    job_id: int | None = None  # whose start the attempt was
    restart: int | None = None  # which start of that job: how often Slurm had restarted it; None = not recorded
    started: float | None = None
    ready: bool = False  # the controller has had trainer and rollout in it
    ended: float | None = None
    outcome: str = ""  # completed | continue | stopped | failed | fenced
    reason: str = ""
    last_event: float | None = None
    controller_lost: float | None = None  # hosts lost the controller then, and it has written nothing since
    silent_after_s: float = 120.0  # rollout hosts write every 2 s; file systems may show it a minute later


@dataclass(frozen=True)
class JobVerdict:
    """The answer. `evidence` is one sentence without its full stop; `warnings` are contradictions and what to do."""

    job_id: int | None
    state: JobState
    evidence: str
    warnings: tuple[str, ...] = ()

    @property
    def over(self) -> bool:
        """Whether nothing of the run is queued or running, as far as anybody says."""
        return self.state.over

    @property
    def line(self) -> str:
        """State and evidence in one line; warnings are told apart."""
        return f"{self.state}: {self.evidence}" if self.evidence else str(self.state)


def judge(
    job_id: int | None, scheduler: SchedulerView, accounting: AccountingView, own: OwnRecords, now: float
) -> JobVerdict:
    """The verdict at `now` (epoch seconds) on the run's job `job_id`; None = never submitted, or run without Slurm."""
    if job_id is None:
        return _without_job(own, now)
    mine = own if own.job_id == job_id else OwnRecords(complete=own.complete, silent_after_s=own.silent_after_s)
    if scheduler.components:
        return _Listed(job_id, scheduler.components, mine, now).verdict()
    return _unlisted(job_id, scheduler, accounting, mine, now)


def span_text(seconds: float) -> str:
    """A length of time in one unit: "8 s", "12 min", "3 h", "2 d"."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


# --------------------------------------------------------------------------------------------- Slurm lists the job


@dataclass(frozen=True)
class _Listed:
    """A job that slurmctld knows."""

    job_id: int
    components: tuple[ComponentState, ...]
    own: OwnRecords
    now: float

    def verdict(self) -> JobVerdict:
        active = [c for c in self.components if c.active]
        if not active:
            ends = [(c.state, c.exit_code) for c in self.components]
            return _ended(self.job_id, ends, self._own_of_this_start(), "Slurm says")
        found = self._active(active)
        return replace(found, warnings=(*self._ended_components(active), *found.warnings))

    def _active(self, active: Sequence[ComponentState]) -> JobVerdict:
        states = {slurm_state(c.state) for c in active}
        if states == {JobState.QUEUED}:
            again = any(c.restarts for c in active)
            return self._say(JobState.REQUEUED if again else JobState.QUEUED, waiting_text(active, self.now))
        known = [c.state for c in active if slurm_state(c.state) is not JobState.UNKNOWN]
        if not known:
            word = active[0].state
            return self._say(JobState.UNKNOWN, f"Slurm says {word}, which this version doesn't know: see 'man squeue'")
        word, leader = known[0], slurm_state(known[0])
        if leader is JobState.SUSPENDED:
            return self._say(leader, f"Slurm says {word}: it holds its nodes and computes nothing")
        if JobState.STARTING in states:
            return self._say(JobState.STARTING, "Slurm sets its nodes up (CONFIGURING)")
        if leader in (JobState.REQUEUED, JobState.ENDING):
            return self._say(leader, f"Slurm says {word}")
        return self._running(word)

    def _running(self, slurm_says: str) -> JobVerdict:
        own = self._own_of_this_start()
        since = min((c.start_time for c in self.components if c.start_time is not None), default=None)
        if own.attempt == 0 or own.started is None:
            waited = 0.0 if since is None else self.now - since
            evidence = f"Slurm says {slurm_says}" + (f" for {span_text(waited)}" if since is not None else "")
            late = f"no attempt has begun since: see attempts/slurm-{self.job_id}.out"
            return self._say(
                JobState.STARTING, evidence + "; no attempt has begun", *([late] if waited > own.silent_after_s else [])
            )
        if own.ended is not None:
            past = self.now - own.ended
            holds = f"it still holds its nodes {span_text(past)} later: 'miles-hpc cancel' gives them back"
            return self._say(
                JobState.ENDING,
                f"{_told(own)}; Slurm still says {slurm_says}",
                *([holds] if past > own.silent_after_s else []),
            )
        age = self.now - (own.last_event if own.last_event is not None else own.started)
        warnings = []
        if age > own.silent_after_s:
            warnings.append(
                f"Slurm says {slurm_says}, but the run has written nothing for {span_text(age)}: its batch host may be "
                "gone, as under --no-kill, or its file system hangs: 'miles-hpc cancel', then 'miles-hpc resume'"
            )
        elif own.controller_lost is not None and self.now - own.controller_lost > own.silent_after_s:
            silent = span_text(self.now - own.controller_lost)
            warnings.append(
                f"hosts lost the controller {silent} ago and no other has come: "
                "'miles-hpc cancel', then 'miles-hpc resume'"
            )
        evidence = f"Slurm says {slurm_says}; newest event {span_text(age)} ago"
        return self._say(JobState.RUNNING if own.ready else JobState.STARTING, evidence, *warnings)

    def _own_of_this_start(self) -> OwnRecords:
        restarts = self.components[0].restarts
        if self.own.restart is not None and not self.own.complete:
            return self.own if self.own.restart == restarts else OwnRecords(silent_after_s=self.own.silent_after_s)
        if not restarts:
            return self.own
        begun = [c for c in self.components if slurm_state(c.state) is not JobState.QUEUED]
        starts = [c.start_time for c in begun if c.start_time is not None]
        return _of_this_start(self.own, min(starts, default=None))

    def _ended_components(self, active: Sequence[ComponentState]) -> list[str]:
        gone = [c for c in self.components if not c.active]
        if not gone:
            return []
        names = ", ".join(f"{c.name} is {c.state}" + _exit_text(c.exit_code) for c in gone)
        if any(slurm_state(c.state) is JobState.QUEUED for c in active):
            return [f"{names}: the rest of the job can't start: 'miles-hpc cancel', then 'miles-hpc resume'"]
        return [f"{names}: the job goes on without these nodes"]

    def _say(self, state: JobState, evidence: str, *warnings: str) -> JobVerdict:
        return JobVerdict(self.job_id, state, evidence, warnings)


def waiting_text(components: Sequence[ComponentState], now: float) -> str:
    """Which component waits for what, and when Slurm expects it to start; one clause for each different reason."""
    reasons: dict[str, list[ComponentState]] = {}
    for component in components:
        reasons.setdefault(component.reason, []).append(component)
    clauses = []
    for reason, waiting in reasons.items():
        sentence = explain_reason(reason).sentence
        if reason == "Dependency" and waiting[0].dependency:
            sentence += f" ({waiting[0].dependency})"
        who = ", ".join(c.name for c in waiting)
        clauses.append(f"{who}: {sentence}" if len(reasons) > 1 else sentence)
    expected = [c.start_time for c in components if c.start_time is not None]
    if len(expected) == len(components) and max(expected) > now:
        clauses.append(f"Slurm expects the start in {span_text(max(expected) - now)}")
    return "; ".join(clauses)


def _of_this_start(own: OwnRecords, start: float | None) -> OwnRecords:
    """A requeued job keeps its id: an attempt from before the job's present start says nothing about it."""
    if start is None or own.started is None or own.complete:
        return own
    newest = own.started if own.last_event is None else own.last_event
    mine = own.started >= start or (own.started >= start - _SKEW_S and newest >= start)
    return own if mine else OwnRecords(silent_after_s=own.silent_after_s)


# --------------------------------------------------------------------------------------------- it doesn't


def _unlisted(
    job_id: int, scheduler: SchedulerView, accounting: AccountingView, own: OwnRecords, now: float
) -> JobVerdict:
    """Slurm doesn't know the job, or doesn't answer."""
    away = bool(scheduler.failure)
    slurm = f"Slurm doesn't answer ({scheduler.failure})" if away else "Slurm doesn't know the job (any more)"
    states = {record.state for record in accounting.records}
    if states and all(slurm_state(word).over for word in states):
        ends = [(record.state, record.exit_code) for record in accounting.records]
        start = min((record.start for record in accounting.records if record.start is not None), default=None)
        return _ended(job_id, ends, _of_this_start(own, start), f"{slurm}; sacct says")
    if own.complete:
        return JobVerdict(job_id, JobState.COMPLETED, f"the run is complete; {slurm}")
    sacct = f"sacct says {'/'.join(sorted(states))}, which may lag" if states else _no_records(accounting)
    age = None if own.last_event is None else now - own.last_event
    fresh = age is not None and age <= own.silent_after_s
    if own.outcome in ("failed", "stopped") or (own.outcome and not away):
        found = _ended(job_id, [], own, "")
        return replace(found, evidence=f"{found.evidence}; {slurm}; {sacct}")
    if own.outcome:
        evidence = f"{_told(own)}; whether the next allocation is queued isn't known: {slurm}; {sacct}"
        return JobVerdict(job_id, JobState.UNKNOWN, evidence)
    if away and age is not None and fresh:
        state = JobState.RUNNING if own.ready else JobState.STARTING
        return JobVerdict(job_id, state, f"by its own records: newest event {span_text(age)} ago; {slurm}; {sacct}")
    if away and own.attempt == 0 and states == {"PENDING"}:
        return JobVerdict(job_id, JobState.QUEUED, f"sacct says PENDING; {slurm}")
    if age is None:
        told = "the job has left no records of its own"
    else:
        told = f"attempt {own.attempt} recorded no end, its newest event is {span_text(age)} old"
    warnings = []
    if fresh:
        warnings.append(f"something of it still runs: its newest event is {span_text(age or 0.0)} old")
    elif not away:
        warnings.append("'miles-hpc resume' continues it; what may still run of it is fenced by the next attempt")
    return JobVerdict(job_id, JobState.UNKNOWN, f"{slurm}; {sacct}; {told}", tuple(warnings))


def _without_job(own: OwnRecords, now: float) -> JobVerdict:
    """Never submitted; a run on one machine has attempts all the same."""
    if own.attempt == 0 and not own.complete:
        return JobVerdict(None, JobState.NOT_SUBMITTED, "")
    if own.complete:
        return JobVerdict(None, JobState.COMPLETED, "the run is complete")
    if own.outcome:
        return _ended(None, [], own, "")
    age = None if own.last_event is None else now - own.last_event
    if age is not None and age <= own.silent_after_s:
        state = JobState.RUNNING if own.ready else JobState.STARTING
        return JobVerdict(None, state, f"by its own records: newest event {span_text(age)} ago")
    silent = "no events" if age is None else f"its newest event is {span_text(age)} old"
    return JobVerdict(None, JobState.UNKNOWN, f"attempt {own.attempt} recorded no end; {silent}")


def _ended(job_id: int | None, ends: Sequence[tuple[str, str]], own: OwnRecords, who: str) -> JobVerdict:
    """A job of which every component has ended. `ends` are (state, exit code) by component, "" when nobody says."""
    word, exit_code = ends[most_telling([slurm_state(word) for word, _ in ends])] if ends else ("", "")
    state = slurm_state(word)
    slurm = f"{who} {word}{_exit_text(exit_code)}" if word else ""
    told = _told(own) if own.outcome else ""
    evidence = "; ".join(part for part in (told, slurm) if part)
    if own.complete:
        return JobVerdict(job_id, JobState.COMPLETED, "; ".join(p for p in ("the run is complete", slurm) if p))
    if own.outcome == "continue":
        go_on = "no next allocation is queued: 'miles-hpc resume' continues"
        return JobVerdict(job_id, JobState.PAUSED, f"{evidence}; {go_on}")
    if state.from_outside:
        return JobVerdict(job_id, state, evidence)
    if own.outcome == "stopped":
        return JobVerdict(job_id, JobState.HALTED, evidence)
    if state is JobState.FAILED or own.outcome == "failed":
        return JobVerdict(job_id, JobState.FAILED, evidence)
    if state is JobState.COMPLETED:
        evidence += "; that says nothing of the run, whose records don't call it complete"
    return JobVerdict(job_id, JobState.ENDED, evidence)


def _told(own: OwnRecords) -> str:
    """The attempt's own account of its end."""
    words = {
        "continue": "ended with its state saved",
        "completed": "completed the run",
        "stopped": "ended the chain",
    }
    end = words.get(own.outcome, own.outcome or "ended")
    return f"attempt {own.attempt} {end}" + (f": {own.reason}" if own.reason else "")


def _no_records(accounting: AccountingView) -> str:
    return f"no accounting ({accounting.failure})" if accounting.failure else "sacct has no record of it"


def _exit_text(exit_code: str) -> str:
    words = exit_words(exit_code)
    return f" ({words})" if words else ""
