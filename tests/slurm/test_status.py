"""status on a real Slurm: with accounting and without, a vanished job, jobs that wait, a slurmctld that is gone.

The supervisor is a small program that writes the events of one.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from miles_hpc.cli.main import main
from miles_hpc.cluster.slurm import Slurm, SlurmError
from miles_hpc.cluster.submit import submit_follow_up
from tests.slurm.conftest import fresh_box, until
from tests.slurm.test_submit import Launch
from tools.slurm_box import Box, BoxSpec

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(170)]

#: Runs until <run>/end appears, whose text is outcome, reason and exit code.
SUPERVISOR = """
    import json, os, sys, time
    from pathlib import Path
    from miles_hpc.control.terms import claim_attempt
    from miles_hpc.core.paths import RunPaths
    from miles_hpc.core.telemetry import EventLog

    paths = RunPaths(Path(sys.argv[1]))
    attempt = claim_attempt(paths)
    events = EventLog(paths.events, "supervisor", attempt=attempt)
    hosts = {"trainer": ["trainer1", "trainer2"], "rollout": ["rollout1", "rollout2"], "sandbox": ["sandbox1"]}
    events.note("allocation_start", job_id=int(os.environ["SLURM_JOB_ID"]), hosts=hosts, time_limit_s=300.0)
    for role in ("trainer", "rollout"):
        events.verdict("joined", peer=f"{role}-{role}1-0", evidence="")
    events.metric(attempt, {"rollout/raw_reward": 0.5})
    limit = time.monotonic() + 120
    while not (paths.root / "end").exists() and time.monotonic() < limit:
        events.note("utilisation", role="rollout", busy_s=0.1, window_s=0.2)
        time.sleep(0.2)
    outcome, reason, code = json.loads((paths.root / "end").read_text())
    events.note("allocation_end", outcome=outcome, reason=reason)
    paths.outcome(attempt).write_text(json.dumps({"outcome": outcome, "reason": reason, "time": time.time()}))
    sys.exit(code)
"""


class Status(Launch):
    """A launched run that is asked where it stands."""

    capsys: pytest.CaptureFixture[str]

    def facts(self) -> dict[str, Any]:
        self.capsys.readouterr()
        assert main(["status", "run.toml", "--json"]) == 0
        facts: dict[str, Any] = json.loads(self.capsys.readouterr().out)
        return facts

    def text(self) -> str:
        self.capsys.readouterr()
        assert main(["status", "run.toml"]) == 0
        return self.capsys.readouterr().out

    def await_state(self, state: str, timeout_s: float = 60.0) -> dict[str, Any]:
        limit = time.monotonic() + timeout_s
        while (facts := self.facts())["job"]["state"] != state:
            assert time.monotonic() < limit, f"waited {timeout_s:.0f} s for {state}, seen {facts}; {self.output()}"
            time.sleep(0.1)
        return facts

    def end(self, outcome: str, reason: str, code: int) -> None:
        (self.paths.root / "end.new").write_text(json.dumps([outcome, reason, code]))
        (self.paths.root / "end.new").rename(self.paths.root / "end")


@pytest.fixture
def run(tmp_path: Path, clean_box: Box, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Status:
    status = Status(tmp_path, clean_box, monkeypatch)
    status.capsys = capsys
    return status


@pytest.fixture
def counting_box() -> Iterator[Box]:
    """With slurmdbd. One for each test: they kill its slurmctld, and one that lost its state gives out the same ids."""
    with fresh_box(BoxSpec.parse("trainer:2,rollout:2,sandbox:2", accounting=True)) as running:
        yield running


@pytest.fixture
def counted(
    tmp_path: Path, counting_box: Box, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Status:
    status = Status(tmp_path, counting_box, monkeypatch)
    status.capsys = capsys
    return status


def kill_slurmctld(box: Box) -> None:
    pid = box.daemons()["slurmctld"]
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    until(lambda: box.daemons()["slurmctld"] is None, "slurmctld to be gone", 20.0)


def test_without_accounting_a_run_from_queue_to_saved_state(run: Status) -> None:
    job_id = run.submit(SUPERVISOR, "--set", "job.time=00:05:00")
    facts = run.await_state("RUNNING")
    assert facts["job"]["job_id"] == job_id and facts["job"]["warnings"] == []
    assert [c["name"] for c in facts["job"]["components"]] == ["tiny-trainer", "tiny-rollout", "tiny-sandbox"]
    assert 0 < facts["time_left_s"] <= 300
    assert facts["node_hours"]["source"] == "own events"
    assert (facts["step"], facts["attempts"][0]["nodes"], facts["attempts"][0]["job_id"]) == (1, 5, job_id)
    with pytest.raises(SlurmError, match="accounting storage is disabled"):
        run.slurm.accounting([job_id])
    run.end("continue", "the allocation ends", 10)
    facts = run.await_state("PAUSED")
    assert "'miles-hpc resume' continues" in facts["job"]["evidence"] and facts["job"]["over"]
    assert facts["attempts"][0]["outcome"] == "continue"


def test_waiting_jobs_say_what_for(run: Status, tmp_path: Path) -> None:
    extra = ["--set", "job.time=00:05:00", "--set", "job.extra_directives=['--exclusive']"]
    run.submit(SUPERVISOR, *extra)
    run.await_state("RUNNING")
    (tmp_path / "second").mkdir()
    assert main(["submit", "run.toml", "--run-dir", "second/run", *extra]) == 0
    shown = ""

    def waits() -> bool:
        nonlocal shown
        run.capsys.readouterr()
        assert main(["status", "second/run"]) == 0
        shown = run.capsys.readouterr().out
        return "Slurm expects the start in" in shown

    until(waits, f"an expected start: {shown}", 60.0)
    assert "QUEUED: " in shown and "waiting helps" in shown
    held = ["--set", "job.extra_directives=['--hold']"]
    assert main(["submit", "run.toml", "--run-dir", "held", *held]) == 0
    run.capsys.readouterr()
    assert main(["status", "held"]) == 0
    assert (
        "JobHeldUser: you have put it on hold; waiting doesn't help; 'scontrol release" in run.capsys.readouterr().out
    )
    run.end("completed", "", 0)


def test_a_requeued_job_is_told_from_a_new_one(run: Status) -> None:
    job_id = run.submit(SUPERVISOR, "--set", "job.time=00:05:00")
    run.await_state("RUNNING")
    run.slurm.requeue(job_id)
    facts = run.await_state("REQUEUED")
    assert "BeginTime" in facts["job"]["evidence"] or "requeue" in facts["job"]["evidence"].lower()
    facts = run.await_state("RUNNING")
    assert len(facts["attempts"]) == 2
    run.slurm.cancel(job_id)
    assert "Slurm says CANCELLED" in run.await_state("CANCELLED")["job"]["evidence"]


def test_a_follow_up_job_waits_behind_the_running_one(run: Status) -> None:
    first = run.submit(SUPERVISOR, "--set", "job.time=00:05:00")
    run.await_state("RUNNING")
    second = submit_follow_up(run.paths, run.slurm, first)
    facts = run.facts()
    assert (facts["job"]["job_id"], facts["job"]["state"]) == (first, "RUNNING")
    assert (facts["follow_up"]["job_id"], facts["follow_up"]["state"]) == (second, "QUEUED")
    assert f"it starts after another job; waiting helps (afterany:{first}" in facts["follow_up"]["evidence"]
    run.end("continue", "the allocation ends", 10)
    until(lambda: run.facts()["job"]["job_id"] == second, "the follow-up's turn", 60.0)
    assert run.facts()["follow_up"] is None
    run.slurm.cancel(second)


def test_a_vanished_job_is_known_by_sacct(counted: Status, counting_box: Box) -> None:
    counted.submit(SUPERVISOR, "--set", "job.time=00:05:00")
    counted.await_state("RUNNING")
    until(lambda: counted.facts()["node_hours"]["source"] == "sacct", "sacct's record of the running job", 60.0)
    counted.end("failed", "no engine came up", 1)
    counted.await_state("FAILED")
    # slurmctld starts anew without its jobs: the same as after MinJobAge, without the wait.
    time.sleep(1.0)  # the record of the end is on its way to slurmdbd
    kill_slurmctld(counting_box)
    for path in (counting_box.root / "state").glob("job_state*"):
        path.unlink()
    counting_box.up()
    job_id = counted.facts()["job"]["job_id"]
    assert counted.slurm.components(job_id) == []
    until(lambda: "sacct says FAILED" in counted.facts()["job"]["evidence"], "sacct's word", 60.0)
    facts = counted.facts()
    assert facts["job"]["state"] == "FAILED" and facts["job"]["components"] == []
    assert "no engine came up; Slurm doesn't know the job (any more)" in facts["job"]["evidence"]
    assert facts["node_hours"]["source"] == "sacct" and facts["node_hours"]["hours"] > 0
    # Without its records nobody knows.
    shutil.rmtree(counted.paths.events)
    shutil.rmtree(counted.paths.attempt(1))
    assert "sacct says FAILED (exit code 1)" in counted.facts()["job"]["evidence"]


def test_status_answers_while_slurmctld_is_gone(counted: Status, counting_box: Box) -> None:
    job_id = counted.submit(SUPERVISOR, "--set", "job.time=00:05:00")
    counted.await_state("RUNNING")
    running_since, saved = time.time(), counting_box.root / "state" / "job_state"
    counting_box.run("scontrol", "update", f"jobid={job_id}", "comment=x")  # a change makes it save its state
    until(lambda: saved.stat().st_mtime > running_since, "slurmctld to save that the job runs", 60.0)
    kill_slurmctld(counting_box)
    begin = time.monotonic()
    facts = counted.facts()
    assert time.monotonic() - begin < 60.0  # two questions of ten seconds each, on a busy machine
    assert facts["job"]["state"] == "RUNNING"
    assert "by its own records: newest event" in facts["job"]["evidence"]
    assert "Slurm doesn't answer (scontrol" in facts["job"]["evidence"]
    assert 0 < facts["time_left_s"] <= 300
    assert "Slurm doesn't answer" in counted.text()
    counting_box.up()
    assert "Slurm says RUNNING" in counted.await_state("RUNNING")["job"]["evidence"]
    counted.end("continue", "the allocation ends", 10)
    counted.await_state("PAUSED")
    assert Slurm(environ=counting_box.env()).components(job_id)[0].exit_code == "10:0"
