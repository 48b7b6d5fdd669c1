"""Where a job stands: one row per combination of witnesses, with the public reports that made it a row.

"report 56" is the kind of facts reported for toil#4431, nextflow#193, reframe#283, maestrowf#441, slurm-pipeline#45,
Model-Optimizer PR#1900 and Parsl#2207: a finished job vanishes from the queue, or accounting is purged or lags.
"prime-rl #2574" is: one component ends, the others go on and hold all nodes.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace

import pytest

from miles_hpc.cluster.accounting import AccountingRecord
from miles_hpc.cluster.job_state import (
    AccountingView,
    OwnRecords,
    SchedulerView,
    judge,
    span_text,
)
from miles_hpc.cluster.slurm import ComponentState
from miles_hpc.cluster.slurm_states import JobState, slurm_state

NOW = 100_000.0
JOB = 12
AWAY = SchedulerView(failure="scontrol -o show job 12: Unable to contact slurm controller (connect failure)")
VANISHED = SchedulerView()
DISABLED = AccountingView(failure="sacct: Slurm accounting storage is disabled")


def component(state: str, offset: int = 0, **more: object) -> ComponentState:
    role = ("trainer", "rollout", "sandbox")[offset]
    known = ComponentState(
        job_id=JOB + offset,
        offset=offset,
        name=f"tiny-{role}",
        state=state,
        reason="",
        nodes="",
        restarts=0,
        exit_code="0:0",
        end_time=None,
        start_time=None if state == "PENDING" else NOW - 600,
    )
    return replace(known, **more)  # type: ignore[arg-type]


def slurm(*states: str, **more: object) -> SchedulerView:
    return SchedulerView(tuple(component(state, i, **more) for i, state in enumerate(states)))


def sacct(*states: str, exit_code: str = "0:0", start: float | None = NOW - 600) -> AccountingView:
    return AccountingView(
        tuple(
            AccountingRecord(
                leader=JOB, offset=i, name="tiny", state=state, exit_code=exit_code, elapsed_s=9, nodes=1, start=start
            )
            for i, state in enumerate(states)
        )
    )


def own(**more: object) -> OwnRecords:
    known = OwnRecords(attempt=1, job_id=JOB, started=NOW - 590, ready=True, last_event=NOW - 3)
    return replace(known, **more)  # type: ignore[arg-type]


SILENT = own(last_event=NOW - 3600)
SAVED = own(ended=NOW - 2, last_event=NOW - 2, outcome="continue", reason="time is up")
BROKEN = own(
    ended=NOW - 2, last_event=NOW - 2, outcome="failed", reason="role rollout was started 21 times: step ended"
)


@dataclass(frozen=True)
class Row:
    scheduler: SchedulerView
    accounting: AccountingView
    own: OwnRecords
    state: JobState
    says: tuple[str, ...] = ()  # in the evidence
    warns: tuple[str, ...] = field(default=())  # each in some warning; () = no warning at all


NONE = OwnRecords()
ROWS = {
    # Slurm lists it
    "waits": Row(slurm("PENDING", reason="Priority"), DISABLED, NONE, JobState.QUEUED, ("Priority: jobs of higher",)),
    "het job before backfill has looked": Row(
        slurm("PENDING", "PENDING"), DISABLED, NONE, JobState.QUEUED, ("backfill loop only",)
    ),
    "components wait for different things": Row(
        SchedulerView(
            (component("PENDING", 0, reason="Priority"), component("PENDING", 1, reason="QOSMaxJobsPerUserLimit"))
        ),
        DISABLED,
        NONE,
        JobState.QUEUED,
        ("tiny-trainer: Priority", "tiny-rollout: QOSMaxJobsPerUserLimit"),
    ),
    "expected start": Row(
        slurm("PENDING", "PENDING", reason="Resources", start_time=NOW + 7200),
        DISABLED,
        NONE,
        JobState.QUEUED,
        ("expects the start in 2 h",),
    ),
    "waits for another job": Row(
        slurm("PENDING", reason="Dependency", dependency="afterany:7(unfulfilled)"),
        DISABLED,
        NONE,
        JobState.QUEUED,
        ("starts after another job", "afterany:7(unfulfilled)"),
    ),
    "requeued": Row(
        slurm("PENDING", reason="BeginTime", restarts=2), DISABLED, SAVED, JobState.REQUEUED, ("earliest start",)
    ),
    "requeued, on hold": Row(slurm("REQUEUE_HOLD"), DISABLED, SAVED, JobState.REQUEUED, ("REQUEUE_HOLD",)),
    "requeued too often": Row(
        slurm("PENDING", reason="JobHeldAdmin", restarts=5), DISABLED, SAVED, JobState.REQUEUED, ("MaxBatchRequeue",)
    ),
    "nodes boot": Row(slurm("CONFIGURING"), DISABLED, NONE, JobState.STARTING, ("CONFIGURING",)),
    "no attempt yet": Row(
        slurm("RUNNING", start_time=NOW - 5), DISABLED, NONE, JobState.STARTING, ("for 5 s; no attempt has begun",)
    ),
    "no attempt for long": Row(
        slurm("RUNNING"), DISABLED, NONE, JobState.STARTING, ("no attempt",), ("attempts/slurm-12.out",)
    ),
    "roles come up": Row(slurm("RUNNING"), DISABLED, own(ready=False), JobState.STARTING, ("newest event 3 s ago",)),
    "runs": Row(slurm("RUNNING", "RUNNING"), DISABLED, own(), JobState.RUNNING, ("newest event 3 s ago",)),
    "runs; the attempt before the requeue isn't this one": Row(
        slurm("RUNNING", start_time=NOW - 1, restarts=1), DISABLED, SAVED, JobState.STARTING, ("no attempt has begun",)
    ),
    "runs; the attempt before the requeue was short": Row(
        slurm("RUNNING", start_time=NOW - 1, restarts=1),
        DISABLED,
        own(started=NOW - 9, last_event=NOW - 6),
        JobState.STARTING,
        ("no attempt has begun",),
    ),
    "requeued and running, on a host whose clock is late": Row(
        slurm("RUNNING", start_time=NOW - 60, restarts=1),
        DISABLED,
        own(started=NOW - 75, last_event=NOW - 20),
        JobState.RUNNING,
        ("newest event 20 s ago",),
    ),
    "runs; the newest attempt is of another job": Row(
        slurm("RUNNING", start_time=NOW - 5), DISABLED, own(job_id=7), JobState.STARTING, ("no attempt has begun",)
    ),
    "batch host dead under --no-kill": Row(
        slurm("RUNNING", "RUNNING"), DISABLED, SILENT, JobState.RUNNING, ("60 min ago",), ("nothing for 60 min",)
    ),
    "hosts lost the controller": Row(
        slurm("RUNNING"),
        DISABLED,
        own(controller_lost=NOW - 600),
        JobState.RUNNING,
        (),
        ("lost the controller 10 min ago",),
    ),
    "prime-rl #2574: a component ended, the others go on": Row(
        SchedulerView((component("RUNNING"), component("FAILED", 1, exit_code="3:0"))),
        DISABLED,
        own(),
        JobState.RUNNING,
        ("newest event 3 s ago",),
        ("tiny-rollout is FAILED (exit code 3): the job goes on without these nodes",),
    ),
    "prime-rl #2577: the run is over and holds its nodes": Row(
        slurm("RUNNING", "RUNNING"),
        DISABLED,
        own(ended=NOW - 300, outcome="failed", reason="trainer lost"),
        JobState.ENDING,
        ("attempt 1 failed: trainer lost",),
        ("still holds its nodes 5 min later",),
    ),
    "requeued leader whose others failed never starts": Row(
        SchedulerView((component("PENDING", restarts=1), component("FAILED", 1))),
        DISABLED,
        NONE,
        JobState.REQUEUED,
        (),
        ("can't start: 'miles-hpc cancel'",),
    ),
    "has just ended": Row(slurm("RUNNING"), DISABLED, SAVED, JobState.ENDING, ("Slurm still says RUNNING",)),
    "completing": Row(slurm("COMPLETING"), DISABLED, BROKEN, JobState.ENDING, ("COMPLETING",)),
    "suspended": Row(slurm("SUSPENDED"), DISABLED, own(), JobState.SUSPENDED, ("computes nothing",)),
    "complete": Row(
        slurm("COMPLETED"), DISABLED, own(complete=True, outcome="completed"), JobState.COMPLETED, ("run is complete",)
    ),
    "state saved, nothing queued": Row(
        slurm("FAILED", exit_code="10:0"),
        DISABLED,
        SAVED,
        JobState.PAUSED,
        ("ended with its state saved: time is up", "exit code 10", "'miles-hpc resume' continues"),
    ),
    "the chain stopped itself": Row(
        slurm("FAILED", exit_code="10:0"),
        DISABLED,
        own(ended=NOW, outcome="stopped", reason="2 allocations in a row made no progress"),
        JobState.HALTED,
        ("ended the chain: 2 allocations in a row made no progress", "exit code 10"),
    ),
    "vanished, the chain stopped itself": Row(
        VANISHED,
        DISABLED,
        own(ended=NOW, outcome="stopped", reason="budget"),
        JobState.HALTED,
        ("ended the chain: budget",),
    ),
    "away, the chain stopped itself": Row(
        AWAY,
        DISABLED,
        own(ended=NOW, outcome="stopped", reason="budget"),
        JobState.HALTED,
        ("ended the chain: budget",),
    ),
    "cancelled while the chain stopped": Row(
        slurm("CANCELLED"),
        DISABLED,
        own(ended=NOW, outcome="stopped", reason="the job was cancelled"),
        JobState.CANCELLED,
        ("the job was cancelled; Slurm says CANCELLED",),
    ),
    "the attempt is of the start before": Row(
        slurm("RUNNING", start_time=NOW - 5, restarts=1),
        DISABLED,
        own(restart=0, started=NOW - 9),
        JobState.STARTING,
        ("no attempt has begun",),
    ),
    "the attempt is of this start, whatever the clocks say": Row(
        slurm("RUNNING", start_time=NOW + 100, restarts=1), DISABLED, own(restart=1), JobState.RUNNING, ("3 s ago",)
    ),
    "failed, with its own reason": Row(
        slurm("FAILED", "FAILED", exit_code="1:0"),
        DISABLED,
        BROKEN,
        JobState.FAILED,
        ("role rollout was started 21 times", "Slurm says FAILED (exit code 1)"),
    ),
    "killed by a signal": Row(
        slurm("FAILED", exit_code="0:9"), DISABLED, SILENT, JobState.FAILED, ("ended by SIGKILL",)
    ),
    "cancelled": Row(
        slurm("CANCELLED"),
        DISABLED,
        own(ended=NOW, outcome="failed", reason="ended from outside, by SIGTERM"),
        JobState.CANCELLED,
        ("by SIGTERM; Slurm says CANCELLED",),
    ),
    "a node took the others along": Row(
        slurm("CANCELLED", "NODE_FAIL", "CANCELLED"), DISABLED, SILENT, JobState.NODE_FAIL, ("NODE_FAIL",)
    ),
    "time limit": Row(slurm("TIMEOUT"), DISABLED, SILENT, JobState.TIMEOUT, ("TIMEOUT",)),
    "time limit after the save": Row(slurm("TIMEOUT"), DISABLED, SAVED, JobState.PAUSED, ("Slurm says TIMEOUT",)),
    "preempted": Row(slurm("PREEMPTED"), DISABLED, SILENT, JobState.PREEMPTED, ("PREEMPTED",)),
    "Parsl#2207: the end of the time limit reported as COMPLETED": Row(
        slurm("COMPLETED"), DISABLED, SILENT, JobState.ENDED, ("says nothing of the run",)
    ),
    "it could not be launched": Row(slurm("LAUNCH_FAILED"), DISABLED, NONE, JobState.FAILED, ("LAUNCH_FAILED",)),
    "a state of another version": Row(
        slurm("SOMETHING_NEW"), DISABLED, NONE, JobState.UNKNOWN, ("SOMETHING_NEW, which this version doesn't know",)
    ),
    "a state of another version, in accounting": Row(
        VANISHED, sacct("SOMETHING_NEW"), NONE, JobState.UNKNOWN, ("SOMETHING_NEW, which may lag",), ("resume",)
    ),
    # report 56: it vanished
    "vanished, nobody knows": Row(
        VANISHED,
        DISABLED,
        SILENT,
        JobState.UNKNOWN,
        ("doesn't know the job", "accounting storage is disabled", "attempt 1 recorded no end, its newest event is 60"),
        ("'miles-hpc resume' continues it",),
    ),
    "vanished without a trace": Row(
        VANISHED, sacct(), NONE, JobState.UNKNOWN, ("sacct has no record", "no records of its own"), ("resume",)
    ),
    "vanished, sacct knows": Row(
        VANISHED, sacct("FAILED", exit_code="1:0"), SILENT, JobState.FAILED, ("sacct says FAILED (exit code 1)",)
    ),
    "vanished, sacct says node failure": Row(
        VANISHED, sacct("CANCELLED", "NODE_FAIL"), SILENT, JobState.NODE_FAIL, ("sacct says NODE_FAIL",)
    ),
    "vanished, sacct lags": Row(
        VANISHED, sacct("RUNNING", "RUNNING"), SILENT, JobState.UNKNOWN, ("RUNNING, which may lag",), ("resume",)
    ),
    "vanished, the newest record is a requeue's": Row(
        VANISHED, sacct("REQUEUED"), NONE, JobState.UNKNOWN, ("REQUEUED, which may lag",), ("resume",)
    ),
    "vanished, the start after the saved one left no attempt": Row(
        VANISHED, sacct("NODE_FAIL", start=NOW - 60), SAVED, JobState.NODE_FAIL, ("sacct says NODE_FAIL",)
    ),
    "vanished, saved in its last start": Row(
        VANISHED, sacct("FAILED", exit_code="10:0"), SAVED, JobState.PAUSED, ("exit code 10", "'miles-hpc resume'")
    ),
    "vanished, outcome recorded": Row(VANISHED, DISABLED, BROKEN, JobState.FAILED, ("was started 21 times",)),
    "vanished, state saved": Row(VANISHED, DISABLED, SAVED, JobState.PAUSED, ("no next allocation is queued",)),
    "vanished, complete": Row(VANISHED, DISABLED, own(complete=True), JobState.COMPLETED, ("run is complete",)),
    "vanished, and it writes on: cut off": Row(
        VANISHED, DISABLED, own(), JobState.UNKNOWN, ("newest event is 3 s old",), ("still runs",)
    ),
    # Slurm doesn't answer
    "away, records are fresh": Row(
        AWAY, DISABLED, own(), JobState.RUNNING, ("by its own records: newest event 3 s ago", "doesn't answer")
    ),
    "away, roles come up": Row(AWAY, DISABLED, own(ready=False), JobState.STARTING, ("by its own records",)),
    "away, sacct lags": Row(AWAY, sacct("RUNNING"), own(), JobState.RUNNING, ("RUNNING, which may lag",)),
    "away, silent": Row(AWAY, DISABLED, SILENT, JobState.UNKNOWN, ("doesn't answer", "is 60 min old")),
    "away, sacct knows": Row(AWAY, sacct("TIMEOUT"), SILENT, JobState.TIMEOUT, ("doesn't answer", "sacct says TIME")),
    "away, sacct says it waits": Row(AWAY, sacct("PENDING"), NONE, JobState.QUEUED, ("sacct says PENDING",)),
    "away, failed": Row(AWAY, DISABLED, BROKEN, JobState.FAILED, ("was started 21 times", "doesn't answer")),
    "away, state saved: requeued or not?": Row(
        AWAY, DISABLED, SAVED, JobState.UNKNOWN, ("whether the next allocation is queued isn't known",)
    ),
    "away, complete": Row(AWAY, DISABLED, own(complete=True), JobState.COMPLETED, ("run is complete",)),
    "away, never started": Row(AWAY, DISABLED, NONE, JobState.UNKNOWN, ("no records of its own",)),
}


@pytest.mark.parametrize("name", ROWS)
def test_verdict(name: str) -> None:
    row = ROWS[name]
    verdict = judge(JOB, row.scheduler, row.accounting, row.own, NOW)
    assert verdict.state == row.state, verdict
    for words in row.says:
        assert words in verdict.evidence
    assert len(verdict.warnings) == len(row.warns), verdict.warnings
    for words in row.warns:
        assert any(words in warning for warning in verdict.warnings), verdict.warnings
    assert "\n" not in verdict.line and not verdict.line.endswith((".", ";", " "))
    assert ";;" not in verdict.line and "; ;" not in verdict.line


def test_every_state_has_a_row() -> None:
    told = {row.state for row in ROWS.values()} | {JobState.NOT_SUBMITTED}
    # Ends that Slurm tells and that are passed on as they are, like NODE_FAIL.
    assert set(JobState) - told == {JobState.OUT_OF_MEMORY, JobState.BOOT_FAIL, JobState.DEADLINE}


@pytest.mark.parametrize("word", ["OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE", "NODE_FAIL", "PREEMPTED", "TIMEOUT"])
def test_ends_from_outside_keep_slurms_word(word: str) -> None:
    for view, records in ((slurm(word), DISABLED), (VANISHED, sacct(word)), (AWAY, sacct(word))):
        verdict = judge(JOB, view, records, SILENT, NOW)
        assert (verdict.state, verdict.over) == (JobState(word), True)


@pytest.mark.parametrize(
    ("records", "state"),
    [
        (OwnRecords(), JobState.NOT_SUBMITTED),
        (own(job_id=None), JobState.RUNNING),
        (own(job_id=None, ready=False), JobState.STARTING),
        (own(job_id=None, last_event=NOW - 3600), JobState.UNKNOWN),
        (own(job_id=None, outcome="failed", reason="x", ended=NOW), JobState.FAILED),
        (own(job_id=None, outcome="continue", ended=NOW), JobState.PAUSED),
        (own(job_id=None, outcome="fenced", ended=NOW), JobState.ENDED),
        (own(job_id=None, complete=True, outcome="completed", ended=NOW), JobState.COMPLETED),
    ],
)
def test_a_run_without_a_job(records: OwnRecords, state: JobState) -> None:
    assert judge(None, SchedulerView(), AccountingView(), records, NOW).state == state


def test_what_is_over_is_not_unknown() -> None:
    for state in (JobState.UNKNOWN, JobState.RUNNING, JobState.QUEUED, JobState.REQUEUED, JobState.ENDING):
        row = next(r for r in ROWS.values() if r.state == state)
        assert not judge(JOB, row.scheduler, row.accounting, row.own, NOW).over


@pytest.mark.parametrize(
    ("seconds", "text"), [(-1, "0 s"), (8.4, "8 s"), (119, "119 s"), (120, "2 min"), (7200, "2 h"), (2 * 86400, "2 d")]
)
def test_span_text(seconds: float, text: str) -> None:
    assert span_text(seconds) == text


def test_rules_that_hold_for_all_witnesses_together() -> None:
    views = list(dict.fromkeys(row.scheduler for row in ROWS.values()))
    accountings = list(dict.fromkeys(row.accounting for row in ROWS.values()))
    records = list(dict.fromkeys(row.own for row in ROWS.values()))
    assert len(views) * len(accountings) * len(records) > 2000
    for view, accounting, mine in itertools.product(views, accountings, records):
        verdict = judge(JOB, view, accounting, mine, NOW)
        active = [c for c in view.components if c.active]
        assert verdict.evidence and "\n" not in verdict.line
        assert not (verdict.over and active), "what Slurm still lists as active isn't over"
        words = {slurm_state(c.state) for c in view.components} - {JobState.UNKNOWN}
        assert not (verdict.state == JobState.UNKNOWN and words), "Slurm's word is a word"
        if verdict.state in (JobState.RUNNING, JobState.STARTING):
            assert active or view.failure, "only Slurm, or its silence, leaves a job running"
        if mine.complete and not active and not accounting.records:
            assert verdict.state == JobState.COMPLETED
        if verdict.state == JobState.COMPLETED:
            assert mine.complete, "no exit code makes a run complete"
        if view.components:
            assert verdict == judge(JOB, view, AccountingView(), mine, NOW), "slurmctld knows it before sacct"
