"""States of jobs from what witnesses say, in tables; waiting on a fake clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from miles_hpc.cluster.jobs import (
    JobFailed,
    JobState,
    JobStatus,
    Sighting,
    await_end,
    exit_words,
    judge,
    look,
    slurm_state,
)
from miles_hpc.cluster.run_job import with_outcome
from miles_hpc.cluster.slurm import ComponentState, SlurmError, parse_records
from miles_hpc.core.errors import DeadlineExpired, UserError

S = JobState


def component(state: str, offset: int = 0, **fields: object) -> ComponentState:
    values = {
        "job_id": 10 + offset,
        "offset": offset,
        "name": f"tiny-{offset}",
        "state": state,
        "reason": "",
        "nodes": f"n{offset}",
        "restarts": 0,
        "exit_code": "0:0",
        "end_time": None,
    }
    return ComponentState(**(values | fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("word", "state"),
    [
        ("PENDING", S.PENDING),
        ("CONFIGURING", S.PENDING),
        ("REQUEUED", S.PENDING),
        ("SPECIAL_EXIT", S.PENDING),
        ("RUNNING", S.RUNNING),
        ("COMPLETING", S.RUNNING),
        ("SUSPENDED", S.RUNNING),
        ("COMPLETED", S.COMPLETED),
        ("FAILED", S.FAILED),
        ("LAUNCH_FAILED", S.FAILED),
        ("CANCELLED", S.CANCELLED),
        ("CANCELLED+", S.CANCELLED),
        ("CANCELLED by 1000", S.CANCELLED),
        ("TIMEOUT", S.TIMEOUT),
        ("DEADLINE", S.TIMEOUT),
        ("NODE_FAIL", S.NODE_FAIL),
        ("BOOT_FAIL", S.NODE_FAIL),
        ("OUT_OF_MEMORY", S.OUT_OF_MEMORY),
        ("PREEMPTED", S.PREEMPTED),
        ("", S.UNKNOWN),
        ("SOMETHING_NEW", S.UNKNOWN),
    ],
)
def test_slurm_words(word: str, state: JobState) -> None:
    assert slurm_state(word) is state


@pytest.mark.parametrize(
    ("components", "state", "reason"),
    [
        (["RUNNING", "RUNNING"], S.RUNNING, ""),
        (["COMPLETED", "RUNNING"], S.RUNNING, ""),
        (["COMPLETING", "COMPLETED"], S.RUNNING, "its processes are being ended"),
        (["PENDING", "PENDING"], S.PENDING, ""),
        (["COMPLETED", "COMPLETED"], S.COMPLETED, ""),
        (["CANCELLED", "NODE_FAIL"], S.NODE_FAIL, "a node went down, of n1"),
        (["FAILED", "CANCELLED"], S.FAILED, ""),
        (["TIMEOUT", "TIMEOUT"], S.TIMEOUT, "the time limit was reached"),
        (["COMPLETED", "SOMETHING_NEW"], S.UNKNOWN, ""),
    ],
)
def test_components_make_one_state(components: list[str], state: JobState, reason: str) -> None:
    seen = judge(Sighting(components=tuple(component(word, i) for i, word in enumerate(components))))
    assert (seen.state, seen.reason, seen.witness, seen.nodes) == (state, reason, "scontrol", "n0,n1")


def test_accounting_counts_for_ends_only() -> None:
    ended = judge(Sighting(recorded=(component("CANCELLED by 7"),)))
    assert (ended.state, ended.reason, ended.witness) == (S.CANCELLED, "by user id 7", "sacct")
    ended = judge(Sighting(recorded=(component("FAILED", exit_code="0:9"),), complaint="slurmctld is away"))
    assert (ended.state, ended.reason) == (S.FAILED, "ended by SIGKILL")
    runaway = judge(Sighting(recorded=(component("RUNNING"),)))
    assert (runaway.state, runaway.forgotten) == (S.UNKNOWN, False)
    assert "accounting still has it as RUNNING" in runaway.reason


def test_silence_is_no_end() -> None:
    away = judge(Sighting(complaint="no answer"))
    gone = judge(Sighting())
    assert (away.state, away.forgotten, away.ended) == (S.UNKNOWN, False, False)
    assert (gone.state, gone.forgotten, gone.ended) == (S.UNKNOWN, True, False)


@dataclass
class Witnesses:
    by_scontrol: list[ComponentState] | Exception = field(default_factory=list)
    by_sacct: list[ComponentState] | Exception = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def components(self, job_id: int) -> list[ComponentState]:
        return self._answer("scontrol", self.by_scontrol)

    def recorded(self, job_id: int) -> list[ComponentState]:
        return self._answer("sacct", self.by_sacct)

    def cancel(self, job_id: int) -> None:
        raise AssertionError

    def _answer(self, name: str, answer: list[ComponentState] | Exception) -> list[ComponentState]:
        self.asked.append(name)
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.mark.parametrize("error", [SlurmError("x"), DeadlineExpired("x"), UserError("x")])
def test_a_failing_command_is_no_witness(error: Exception) -> None:
    assert look(Witnesses(error, error), 10, "tiny") == Sighting(complaint="x")
    recorded = component("FAILED")
    assert look(Witnesses(error, [recorded]), 10, "tiny") == Sighting(recorded=(recorded,), complaint="x")


def test_sacct_is_asked_when_scontrol_has_nothing() -> None:
    known = Witnesses([component("RUNNING")], [component("FAILED")])
    assert judge(look(known, 10, "tiny")).state is S.RUNNING
    assert known.asked == ["scontrol"]


def test_another_job_of_the_same_id_is_not_ours() -> None:
    """A cluster that lost its state gives ids out again."""
    stranger = component("RUNNING", name="other")
    assert look(Witnesses([stranger], [stranger]), 10, "tiny") == Sighting()


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("0:0", ""),
        ("1:0", "exit code 1"),
        ("10:0", "exit code 10"),
        ("0:9", "ended by SIGKILL"),
        ("0:15", "ended by SIGTERM"),
        ("137:0", "exit code 137: a process was ended by SIGKILL"),
        ("255:0", "exit code 255"),
        ("0:250", "ended by signal 250"),
        ("", ""),
        ("None", ""),
    ],
)
def test_exit_codes(code: str, words: str) -> None:
    assert exit_words(code) == words


def test_sacct_lines() -> None:
    text = (
        "12+0|NODE_FAIL|0:0|gb[1-2]|2026-11-30T02:13:53|tiny-trainer\n"
        "12+1|CANCELLED by 0|0:15|None assigned|Unknown|tiny|rollout\n"
        "12+0.batch|FAILED|1:0|gb1|Unknown|batch\n"
        "13_[1-3]|PENDING|0:0|None assigned|Unknown|array\n"
        "garbage\n"
    )
    trainer, rollout = parse_records(text)
    assert (trainer.job_id, trainer.offset, trainer.state, trainer.nodes) == (12, 0, "NODE_FAIL", "gb[1-2]")
    assert trainer.end_time is not None
    assert (rollout.job_id, rollout.offset, rollout.name) == (13, 1, "tiny|rollout")
    assert (rollout.state, rollout.nodes, rollout.end_time) == ("CANCELLED by 0", "", None)
    assert parse_records("") == []


# ---------------------------------------------------------------------------------------------- waiting


@dataclass
class Scripted:
    """A handle whose status follows a script: [(from second, status), ...], on a clock of its own."""

    script: list[tuple[float, JobStatus]]
    now: float = 0.0
    polls: list[float] = field(default_factory=list)
    id: str = "10"
    name: str = "tiny"
    submitted: float | None = None
    stdout_path: Path = Path("out")
    stderr_path: Path = Path("err")

    def status(self) -> JobStatus:
        self.polls.append(self.now)
        return [status for since, status in self.script if since <= self.now][-1]

    def state(self) -> JobState:
        return self.status().state

    def done(self) -> bool:
        return self.status().ended

    def result(self, deadline_s: float) -> object:
        return self.wait(deadline_s)

    def exception(self) -> JobFailed | None:
        return None

    def cancel(self) -> None:
        raise AssertionError

    def wait(self, deadline_s: float) -> JobStatus:
        return await_end(self, deadline_s, clock=lambda: self.now, sleep=self._sleep)

    def _sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.now += max(seconds, 1e-6)


RUNS, ENDS = JobStatus(S.RUNNING), JobStatus(S.FAILED, "why")
AWAY, GONE = JobStatus(S.UNKNOWN, "no answer"), JobStatus(S.UNKNOWN, "forgotten", forgotten=True)


def test_waiting_goes_on_while_slurm_is_silent() -> None:
    job = Scripted([(0, RUNS), (5, AWAY), (500, RUNS), (600, ENDS)])
    assert job.wait(1000.0) == ENDS
    assert 600 <= job.now < 604
    assert max(b - a for a, b in zip(job.polls, job.polls[1:], strict=False)) <= 3.0
    assert job.polls[1] - job.polls[0] <= 0.2


def test_waiting_has_a_deadline() -> None:
    job = Scripted([(0, RUNS), (50, AWAY)])
    with pytest.raises(DeadlineExpired, match=r"job 10 \(tiny\) to end: .*last seen UNKNOWN: no answer"):
        job.wait(60.0)
    assert 60 <= job.now < 61
    with pytest.raises(DeadlineExpired, match="last seen RUNNING"):
        Scripted([(0, RUNS)]).wait(0.0)


def test_a_forgotten_job_is_given_up_after_a_while() -> None:
    job = Scripted([(0, RUNS), (10, GONE)])
    assert job.wait(1000.0) == GONE
    assert 40 <= job.now < 46
    late = Scripted([(0, GONE), (20, ENDS)])  # its result was on the way
    assert late.wait(1000.0) == ENDS
    flickering = Scripted([(0, GONE), (20, AWAY), (25, GONE), (50, ENDS)])
    assert flickering.wait(1000.0) == ENDS


# ---------------------------------------------------------------------------------------------- the run's own job


@pytest.mark.parametrize(
    ("status", "outcome", "state", "witness"),
    [
        (JobStatus(S.RUNNING, witness="scontrol"), "continue", S.RUNNING, "scontrol"),
        (JobStatus(S.PENDING, witness="scontrol"), "completed", S.PENDING, "scontrol"),
        (JobStatus(S.FAILED, "exit code 10", "scontrol"), "continue", S.COMPLETED, "result"),
        (JobStatus(S.COMPLETED, witness="scontrol"), "completed", S.COMPLETED, "result"),
        (JobStatus(S.UNKNOWN), "completed", S.COMPLETED, "result"),
        (JobStatus(S.UNKNOWN), "continue", S.UNKNOWN, ""),  # it may be in the queue again
        (JobStatus(S.UNKNOWN), "failed", S.FAILED, "result"),
        (JobStatus(S.COMPLETED, witness="scontrol"), "failed", S.FAILED, "result"),
        (JobStatus(S.COMPLETED, witness="scontrol"), "stopped", S.FAILED, "result"),
        (JobStatus(S.NODE_FAIL, "a node", "scontrol"), "failed", S.NODE_FAIL, "scontrol"),
        (JobStatus(S.CANCELLED, witness="scontrol"), None, S.CANCELLED, "scontrol"),
        (JobStatus(S.UNKNOWN), "something", S.UNKNOWN, ""),
    ],
)
def test_outcome_and_slurm(status: JobStatus, outcome: str | None, state: JobState, witness: str) -> None:
    told = with_outcome(status, None if outcome is None else {"outcome": outcome, "reason": "because"})
    assert (told.state, told.witness) == (state, witness)
