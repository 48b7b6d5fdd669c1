"""States of jobs from what witnesses say, in tables; waiting on a fake clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import pytest

from miles_hpc.cluster.accounting import AccountingRecord
from miles_hpc.cluster.jobs import JobFailed, JobStatus, Sighting, await_end, judge, look
from miles_hpc.cluster.run_job import with_outcome
from miles_hpc.cluster.slurm import ComponentState, SlurmError
from miles_hpc.cluster.slurm_states import JobState, exit_words, most_telling, slurm_state
from miles_hpc.core.errors import DeadlineExpired, UserError

S = JobState
T = TypeVar("T")


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


def record(state: str, offset: int = 0, **fields: object) -> AccountingRecord:
    values = {
        "leader": 10,
        "offset": offset,
        "name": f"tiny-{offset}",
        "state": state,
        "exit_code": "0:0",
        "elapsed_s": 9,
        "nodes": 1,
        "start": 1.0,
        "hosts": f"n{offset}",
    }
    return AccountingRecord(**(values | fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("word", "state"),
    [
        ("PENDING", S.QUEUED),
        ("CONFIGURING", S.STARTING),
        ("REQUEUED", S.REQUEUED),
        ("SPECIAL_EXIT", S.QUEUED),
        ("RUNNING", S.RUNNING),
        ("COMPLETING", S.ENDING),
        ("SUSPENDED", S.SUSPENDED),
        ("COMPLETED", S.COMPLETED),
        ("FAILED", S.FAILED),
        ("LAUNCH_FAILED", S.FAILED),
        ("CANCELLED", S.CANCELLED),
        ("CANCELLED+", S.CANCELLED),
        ("CANCELLED by 1000", S.CANCELLED),
        ("TIMEOUT", S.TIMEOUT),
        ("DEADLINE", S.DEADLINE),
        ("NODE_FAIL", S.NODE_FAIL),
        ("BOOT_FAIL", S.BOOT_FAIL),
        ("OUT_OF_MEMORY", S.OUT_OF_MEMORY),
        ("PREEMPTED", S.PREEMPTED),
        ("", S.UNKNOWN),
        ("SOMETHING_NEW", S.UNKNOWN),
        ("PAUSED", S.UNKNOWN),  # a word of ours
        ("ENDED", S.UNKNOWN),
    ],
)
def test_slurm_words(word: str, state: JobState) -> None:
    assert slurm_state(word) is state
    assert component(word).active != state.over  # what isn't known may hold nodes


def test_a_state_is_alive_or_over_or_not_known() -> None:
    assert {s for s in S if s.alive == s.over} == {S.UNKNOWN, S.NOT_SUBMITTED}
    assert {s for s in S if s.from_outside} < {s for s in S if s.over}
    assert most_telling([S.COMPLETED, S.CANCELLED, S.OUT_OF_MEMORY, S.CANCELLED]) == 2
    assert most_telling([S.COMPLETED, S.COMPLETED]) == 0


@pytest.mark.parametrize(
    ("components", "state", "reason"),
    [
        (["RUNNING", "RUNNING"], S.RUNNING, ""),
        (["COMPLETED", "RUNNING"], S.RUNNING, ""),
        (["COMPLETING", "COMPLETED"], S.ENDING, "its processes are being ended"),
        (["PENDING", "PENDING"], S.QUEUED, ""),
        (["COMPLETED", "COMPLETED"], S.COMPLETED, ""),
        (["CANCELLED", "NODE_FAIL"], S.NODE_FAIL, "a node went down, of n1"),
        (["FAILED", "CANCELLED"], S.FAILED, ""),
        (["TIMEOUT", "TIMEOUT"], S.TIMEOUT, "the time limit was reached"),
        (["COMPLETED", "SOMETHING_NEW"], S.UNKNOWN, "Slurm says SOMETHING_NEW, which this version doesn't know"),
    ],
)
def test_components_make_one_state(components: list[str], state: JobState, reason: str) -> None:
    seen = judge(Sighting(components=tuple(component(word, i) for i, word in enumerate(components))))
    assert (seen.state, seen.reason, seen.witness, seen.nodes) == (state, reason, "scontrol", "n0,n1")


def test_accounting_counts_for_ends_only() -> None:
    ended = judge(Sighting(recorded=(record("CANCELLED", cancelled_by="7"),)))
    assert (ended.state, ended.reason, ended.witness) == (S.CANCELLED, "by user id 7", "sacct")
    ended = judge(Sighting(recorded=(record("FAILED", exit_code="0:9"),), complaint="slurmctld is away"))
    assert (ended.state, ended.reason) == (S.FAILED, "ended by SIGKILL")
    runaway = judge(Sighting(recorded=(record("RUNNING"),)))
    assert (runaway.state, runaway.forgotten) == (S.UNKNOWN, False)
    assert "accounting still has it as RUNNING" in runaway.reason
    waited = judge(Sighting(components=(component("CANCELLED", reason="Priority"),)))
    assert (waited.state, waited.reason) == (S.CANCELLED, "")


def test_silence_is_no_end() -> None:
    away = judge(Sighting(complaint="no answer"))
    gone = judge(Sighting())
    assert (away.state, away.forgotten, away.ended) == (S.UNKNOWN, False, False)
    assert (gone.state, gone.forgotten, gone.ended) == (S.UNKNOWN, True, False)


@dataclass
class Witnesses:
    by_scontrol: list[ComponentState] | Exception = field(default_factory=list)
    by_sacct: list[AccountingRecord] | Exception = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def components(self, job_id: int) -> list[ComponentState]:
        return self._answer("scontrol", self.by_scontrol)

    def accounting(self, job_ids: Sequence[int]) -> list[AccountingRecord]:
        return self._answer("sacct", self.by_sacct)

    def cancel(self, job_id: int) -> None:
        raise AssertionError

    def _answer(self, name: str, answer: list[T] | Exception) -> list[T]:
        self.asked.append(name)
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.mark.parametrize("error", [SlurmError("x"), DeadlineExpired("x"), UserError("x")])
def test_a_failing_command_is_no_witness(error: Exception) -> None:
    assert look(Witnesses(error, error), 10, "tiny") == Sighting(complaint="x")
    recorded = record("FAILED")
    assert look(Witnesses(error, [recorded]), 10, "tiny") == Sighting(recorded=(recorded,), complaint="x")


def test_sacct_is_asked_when_scontrol_has_nothing() -> None:
    known = Witnesses([component("RUNNING")], [record("FAILED")])
    assert judge(look(known, 10, "tiny")).state is S.RUNNING
    assert known.asked == ["scontrol"]
    requeued = Witnesses([], [record("REQUEUED"), record("REQUEUED", 1), record("CANCELLED"), record("NODE_FAIL", 1)])
    assert judge(look(requeued, 10, "tiny")).state is S.NODE_FAIL, "the newest start counts"


def test_another_job_of_the_same_id_is_not_ours() -> None:
    """A cluster that lost its state gives ids out again."""
    stranger = component("RUNNING", name="other")
    assert look(Witnesses([stranger], [record("FAILED", name="other")]), 10, "tiny") == Sighting()


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
        (JobStatus(S.QUEUED, witness="scontrol"), "completed", S.QUEUED, "scontrol"),
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
