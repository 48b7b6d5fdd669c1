"""Gathering what is known of a run: which witness is asked when, and what is made of attempts and events."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from miles_hpc.cli.main import main
from miles_hpc.cli.standing import Standing, Witnesses
from miles_hpc.cli.story_reducer import reduce_events
from miles_hpc.cluster.accounting import AccountingRecord
from miles_hpc.cluster.chain import AttemptStart, Progress, record_start
from miles_hpc.cluster.slurm import ComponentState
from miles_hpc.cluster.slurm_states import JobState
from miles_hpc.cluster.submit import prepare, read_jobs
from miles_hpc.core.paths import RunPaths
from miles_hpc.core.telemetry import EventLog, read_events
from tests.fakes.fake_slurm import FakeSlurm
from tests.unit.runs import make_run, make_site

SCRIPT = "#!/bin/bash\n#SBATCH --job-name=tiny-trainer\n#SBATCH hetjob\n#SBATCH --job-name=tiny-rollout\n"


class Asked(FakeSlurm):
    """Counts the questions."""

    def components(self, job_id: int) -> list[ComponentState]:
        self.questions.append(f"scontrol {job_id}")
        return super().components(job_id)

    def accounting(self, job_ids: Sequence[int]) -> list[AccountingRecord]:
        self.questions.append("sacct")
        return super().accounting(job_ids)

    def __init__(self) -> None:
        super().__init__()
        self.questions: list[str] = []


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    paths = RunPaths(tmp_path / "run")
    prepare(make_run(), make_site(), paths, source="x")
    return paths


def ask(paths: RunPaths, slurm: FakeSlurm, jobs: list[int], **options: Any) -> Standing:
    witnesses = Witnesses(make_run(), paths, slurm)
    return witnesses.ask(jobs, reduce_events(read_events(paths.events)), **options)


def begin(paths: RunPaths, attempt: int, job_id: int | None) -> EventLog:
    paths.logs(attempt).mkdir(parents=True)
    log = EventLog(paths.events, "supervisor", attempt=attempt)
    hosts = {"trainer": ["t1", "t2"], "rollout": ["r1"]}
    log.note("allocation_start", job_id=job_id, hosts=hosts, time_limit_s=600.0)
    return log


def record(job_id: int, state: str, offset: int = 0, name: str = "tiny-trainer") -> AccountingRecord:
    return AccountingRecord(
        leader=job_id, offset=offset, name=name, state=state, exit_code="0:0", elapsed_s=1800, nodes=2, start=None
    )


def test_running_with_its_follow_up_behind_it(paths: RunPaths) -> None:
    slurm = Asked()
    first, second = slurm.submit(SCRIPT), slurm.submit(SCRIPT)
    slurm.start(first, ["t[1-2]", "r1"], limit_s=600)
    slurm.jobs[second] = [replace(c, reason="Dependency") for c in slurm.jobs[second]]
    log = begin(paths, 1, first)
    log.verdict("joined", peer="trainer-t1-0")
    log.verdict("joined", peer="rollout-r1-0")
    found = ask(paths, slurm, [first], follow_up=second)
    assert (found.verdict.job_id, found.verdict.state) == (first, JobState.RUNNING)
    assert found.follow_up is not None
    assert (found.follow_up.job_id, found.follow_up.state) == (second, JobState.QUEUED)
    assert [c.name for c in found.components] == ["tiny-trainer", "tiny-rollout"]
    assert found.time_left_s == 0.0  # the fake's clock is long ago
    assert found.node_hours is not None and found.node_hours.source == "own events"
    assert slurm.questions == [f"scontrol {first}", f"scontrol {second}", "sacct"]


def test_a_silent_job_goes_on_costing(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = FakeSlurm()
    job_id = slurm.submit(SCRIPT)
    slurm.start(job_id, ["t[1-2]", "r1"], limit_s=600)
    hour_ago = time.time() - 3600
    monkeypatch.setattr("miles_hpc.core.telemetry.time.time", lambda: hour_ago)
    begin(paths, 1, job_id)
    monkeypatch.undo()
    found = ask(paths, slurm, [job_id])
    assert found.node_hours is not None and found.node_hours.hours == pytest.approx(3.0, abs=0.1)
    assert "nothing for 60 min" in found.verdict.warnings[0]
    slurm.jobs[job_id] = [replace(c, state="CANCELLED", end_time=hour_ago + 1800) for c in slurm.jobs[job_id]]
    found = ask(paths, slurm, [job_id])
    assert found.node_hours is not None and found.node_hours.hours == pytest.approx(1.5, abs=0.1)
    slurm.forget(job_id)
    found = ask(paths, slurm, [job_id])
    assert found.node_hours is not None and found.node_hours.hours == 0.0  # nobody knows for how long it ran


def test_queued_after_an_earlier_job_has_ended(paths: RunPaths) -> None:
    slurm = Asked()
    first, second = slurm.submit(SCRIPT), slurm.submit(SCRIPT)
    slurm.finish(first, "FAILED", exit_code="10:0")
    found = ask(paths, slurm, [first], follow_up=second, always_accounting=False)
    assert (found.verdict.job_id, found.verdict.state, found.follow_up) == (second, JobState.QUEUED, None)
    assert "sacct" not in slurm.questions  # slurmctld tells it all


def test_a_vanished_job_is_known_by_accounting(paths: RunPaths) -> None:
    slurm = Asked()
    job_id = slurm.submit(SCRIPT)
    slurm.forget(job_id)
    assert ask(paths, slurm, [job_id]).verdict.state == JobState.UNKNOWN
    slurm.no_accounting = ""
    slurm.records = [record(job_id, "TIMEOUT"), record(job_id, "TIMEOUT", 1), record(job_id, "COMPLETED", 2, "other")]
    found = ask(paths, slurm, [job_id], always_accounting=False)
    assert found.verdict.state == JobState.TIMEOUT
    assert found.node_hours is not None
    assert (found.node_hours.hours, found.node_hours.source) == (2.0, "sacct")  # without the other's record


def test_an_id_that_belongs_to_somebody_else_now(paths: RunPaths) -> None:
    slurm = Asked()
    job_id = slurm.submit(SCRIPT.replace("tiny", "tinier"))
    slurm.start(job_id, ["t1", "r1"], limit_s=600)
    found = ask(paths, slurm, [job_id])
    assert found.verdict.state == JobState.UNKNOWN and "doesn't know the job" in found.verdict.evidence
    assert found.components == () and found.time_left_s is None


def test_slurm_is_away(paths: RunPaths) -> None:
    slurm = Asked()
    slurm.away = "Unable to contact slurm controller (connect failure)"
    log = begin(paths, 1, 5)
    found = ask(paths, slurm, [4, 5])
    assert found.verdict.state == JobState.STARTING
    assert "Slurm doesn't answer (scontrol: Unable to contact slurm controller (connect failure))" in (
        found.verdict.evidence
    )
    assert "no accounting (sacct: Slurm accounting storage is disabled)" in found.verdict.evidence
    assert found.time_left_s == pytest.approx(600, abs=60)
    assert slurm.questions == ["scontrol 5", "sacct"]
    for peer in ("trainer-t1-0", "rollout-r1-0"):
        log.verdict("joined", peer=peer)
    assert ask(paths, slurm, [4, 5]).verdict.state == JobState.RUNNING
    log.note("allocation_end", outcome="failed", reason="no trainer came up")
    found = ask(paths, slurm, [4, 5])
    assert found.verdict.state == JobState.FAILED and "no trainer came up" in found.verdict.evidence
    assert found.time_left_s is None


def test_accounting_is_asked_now_and_then_only(paths: RunPaths) -> None:
    slurm = Asked()
    witnesses = Witnesses(make_run(), paths, slurm)
    story = reduce_events([])
    for _ in range(5):
        witnesses.ask([7], story, always_accounting=False)
    assert slurm.questions.count("sacct") == 1


def test_attempts_by_folders_events_and_outcomes(paths: RunPaths) -> None:
    log = begin(paths, 1, 5)
    log.note("allocation_end", outcome="continue", reason="time is up")
    begin(paths, 2, 6)
    paths.outcome(2).write_text(json.dumps({"outcome": "failed", "reason": "a", "time": time.time() + 30}))
    record_start(paths, AttemptStart(attempt=2, job_id=6, restart=3, time=time.time(), progress=Progress()))
    paths.attempt(3).mkdir()  # its supervisor died before it could say anything
    (paths.attempts / "slurm-5.out").touch()
    paths.outcome(3).write_text("{")
    first, second, third = ask(paths, FakeSlurm(), []).attempts
    assert (first.number, first.job_id, first.nodes, first.outcome) == (1, 5, 3, "continue")
    assert (second.outcome, second.reason, second.job_id, second.restart) == ("failed", "a", 6, 3)
    assert second.start is not None and second.end is not None and second.end > second.start
    assert (third.number, third.job_id, third.outcome, third.start) == (3, None, "", None)


def test_a_controller_that_hosts_lost(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = FakeSlurm()
    job_id = slurm.submit(SCRIPT)
    slurm.start(job_id, ["t1", "r1"], limit_s=600)
    clock = itertools.count(time.time() - 1000)
    monkeypatch.setattr("miles_hpc.core.telemetry.time.time", lambda: next(clock))
    begin(paths, 1, job_id)
    agent = EventLog(paths.events, "agent-rollout-r1", attempt=1)
    agent.verdict("controller_lost", peer="controller", evidence="silent")
    monkeypatch.undo()
    agent.note("utilisation", role="rollout", busy_s=0.0, window_s=2.0)  # the hosts live on
    (warning,) = ask(paths, slurm, [job_id]).verdict.warnings
    assert "hosts lost the controller 17 min ago" in warning
    EventLog(paths.events, "controller", attempt=1, term=2).note("phase", phase="rl", first_step=1)
    assert ask(paths, slurm, [job_id]).verdict.warnings == ()


def test_more_steps_than_the_complete_run_had(paths: RunPaths) -> None:
    log = begin(paths, 1, None)
    log.metric(5, {"train/loss": 1.0})
    log.note("run_complete", steps=5, trained_groups=4)
    log.note("allocation_end", outcome="completed", reason="")
    assert ask(paths, FakeSlurm(), []).verdict.state == JobState.ENDED  # 100 steps are asked for
    log.metric(100, {"train/loss": 1.0})
    assert ask(paths, FakeSlurm(), []).verdict.state == JobState.COMPLETED


def test_status_as_json(paths: RunPaths, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    paths.job.write_text('{"job_id": 5, "previous": [3]}')
    assert read_jobs(paths) == (3, 5)
    begin(paths, 1, 5).metric(7, {"rollout/raw_reward": 0.25})
    assert main(["status", str(paths.root), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["job"]["state"], told["job"]["job_id"], told["job"]["over"]) == ("RUNNING", 5, False)
    assert "no Slurm on this machine" in told["job"]["evidence"]
    assert (told["step"], told["steps"], told["follow_up"]) == (7, 100, None)
    assert told["attempts"][0]["outcome"] is None and told["attempts"][0]["steps"] == 1
    assert told["node_hours"]["source"] == "own events"


def test_status_of_evaluations(
    paths: RunPaths, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first and the newest three, in words; all of them for programs."""
    monkeypatch.setenv("PATH", "")
    log = begin(paths, 1, None)
    log.note("evaluation", step=0, when="before", n=16, mean=0.125)
    for step in (2, 4, 6, 8):
        pass_at = {"1": step / 10, "2": step / 9}
        log.note("evaluation", step=step, when="during", n=16, n_samples=2, mean=step / 10, pass_at=pass_at)
    assert main(["status", str(paths.root)]) == 0
    shown = [line.split(maxsplit=1)[1] for line in capsys.readouterr().out.splitlines() if line.startswith("held-out")]
    assert shown == [
        "0.125 before RL, over 16 episodes",
        "0.400 at step 4, over 16 prompts × 2 episodes",
        "0.600 at step 6, over 16 prompts × 2 episodes",
        "0.800 at step 8, over 16 prompts × 2 episodes",
    ]
    assert main(["status", str(paths.root), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["evaluations"]
    assert [e["step"] for e in told] == [0, 2, 4, 6, 8]
    assert told[1] == {
        "when": "during",
        "step": 2,
        "mean": 0.2,
        "n": 16,
        "n_samples": 2,
        "pass_at": {"1": 0.2, "2": 2 / 9},
    }
