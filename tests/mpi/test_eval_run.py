"""A whole run with evaluations beside training: real trainer, engines and sandboxes, on one machine."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from checkpoints.journal import Evaluated, EvaluationBegun, EvaluationSkipped, read_journals
from checkpoints.lineage import account, evaluations, fork_steps
from checkpoints.manifest import newest_complete
from miles_hpc.cli.story_reducer import reduce_events
from miles_hpc.core.deadline import Deadline
from miles_hpc.core.telemetry import read_events
from tools.kill_test import VICTIMS, processes

SMALL = (
    "groups.trainer.nodes=1",
    "groups.rollout.nodes=1",
    "groups.sandbox.nodes=1",
    "sft.steps=0",
    "eval.n_episodes=16",
    "eval.n_samples_per_eval_prompt=2",
    "eval.interval=2",
    "rollout.n_steps=6",
    "rollout.rollout_batch_size=2",
    "rollout.n_samples_per_prompt=4",
)
SET_ASIDE = ("rollout.engines_per_host=2", "eval.engines_per_host=1")


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """Short, because agents' sockets lie below it."""
    root = Path(tempfile.mkdtemp(prefix="me-", dir="/tmp"))
    yield root / "run"
    shutil.rmtree(root, ignore_errors=True)


def _command(run_dir: Path, *settings: str) -> list[str]:
    command = [sys.executable, "-P", "-m", "miles_hpc.cli.main", "local", "demo", "--run-dir", str(run_dir)]
    return command + [word for setting in (*SMALL, *settings) for word in ("--set", setting)]


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "settings", [(), pytest.param(SET_ASIDE, marks=pytest.mark.lifecycle)], ids=["shared", "set aside"]
)
def test_evaluations_every_two_steps_while_training_goes_on(run_dir: Path, settings: tuple[str, ...]) -> None:
    done = subprocess.run(_command(run_dir, *settings), capture_output=True, text=True, timeout=280, check=False)
    logs = "\n".join(f"{p.name}: {p.read_text()[-800:]}" for p in sorted(run_dir.glob("attempts/*/logs/*.log")))
    assert (done.returncode, "the run is complete" in done.stdout) == (0, True), done.stdout + done.stderr + logs
    events = read_events(run_dir / "events")

    told = _named(events, "note", "evaluation")
    assert [(e["step"], e["when"]) for e in told] == [(0, "before"), (2, "during"), (4, "during"), (6, "after")]
    assert {(e["n"], e["n_samples"], tuple(e["pass_at"])) for e in told} == {(16, 2, ("1", "2"))}
    assert [e["version"] for e in told] == ["1.0", "1.2", "1.4", "1.6"]
    assert [e["oldest"] for e in told] == [e["version"] for e in told]  # never by older weights
    journal = read_journals(run_dir / "journal")[1]
    assert [r.step for r in journal.records() if isinstance(r, Evaluated)] == [0, 2, 4, 6]
    assert [r.step for r in journal.records() if isinstance(r, EvaluationBegun)] == [2, 4]
    metrics = {e["step"]: e["values"] for e in events if e["kind"] == "metric" and "eval/shell" in e["values"]}
    assert sorted(metrics) == [0, 2, 4, 6] and all("eval/shell-pass@2" in values for values in metrics.values())

    # Training went on meanwhile: steps were done between the begin and the end of evaluations beside it.
    steps = {e["step"]: e["t"] for e in events if e["kind"] == "metric" and "rollout/raw_reward" in e["values"]}
    assert sorted(steps) == [1, 2, 3, 4, 5, 6]
    spans = {e["step"]: (e["start"], e["end"]) for e in _named(events, "span", "eval")}
    beside = {number: [s for s, t in steps.items() if spans[number][0] < t < spans[number][1]] for number in (2, 4)}
    assert any(beside.values()), (spans, steps)
    lags = {e["step"]: e["lag_steps"] for e in told if e["when"] == "during"}
    # a step counts when the trainer has answered; its metrics come when its weights are staged
    assert all(len(during) <= lags[number] <= len(during) + 1 for number, during in beside.items()), (lags, beside)

    kept = sorted(path.name for path in (run_dir / "archive").glob("eval.*"))
    assert kept == [f"eval.v{step:06d}.t000001.h5" for step in (0, 2, 4, 6)]
    assert list((run_dir / "journal" / "spool").rglob("eval-*")) == []
    if settings:
        assert {(e["oldest"], e["newest"], e["version_share"]) for e in told} == {
            (e["version"], e["version"], 1.0) for e in told
        }
        synced = _named(events, "verdict", "engine_synced")
        held = {name: [e["version"] for e in synced if e["peer"] == f"rollout1-{name}"] for name in ("e0", "e1")}
        assert held["e1"] == ["1.0", "1.2", "1.4", "1.6"]
        assert held["e0"][-1] == "1.6" and set(held["e0"]) - set(held["e1"])


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.lifecycle
@pytest.mark.timeout(300)
def test_an_evaluation_that_a_lost_trainer_cuts_has_one_outcome(run_dir: Path) -> None:
    """With a checkpoint of every step the run goes on behind the evaluation's: then its weights are gone."""
    settings = (
        "rollout.n_steps=10",
        "checkpoint.interval_steps=1",
        "eval.n_episodes=64",
        "eval.slot_share=0.1",
        "eval.max_in_flight=2",
    )
    run = subprocess.Popen(_command(run_dir, *settings), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        deadline = Deadline(120.0, "a checkpoint behind the evaluation of step 2")
        while not any(n["step"] >= 3 for n in _named(read_events(run_dir / "events"), "note", "checkpoint")):
            deadline.check()
            assert run.poll() is None, run.communicate()[0]
            time.sleep(0.05)
        (rank,) = processes(VICTIMS["rank"], run_dir)
        os.kill(rank, signal.SIGKILL)
        output, _ = run.communicate(timeout=150)
    finally:
        if run.poll() is None:
            run.terminate()
            run.wait(timeout=30)
    assert (run.returncode, "the run is complete" in output) == (0, True), output
    journals = read_journals(run_dir / "journal")
    newest = newest_complete(run_dir / "checkpoints")
    assert newest is not None and len(journals) == 2, journals
    counted = account(journals, newest[1])
    assert counted.sound and len(counted.trained) == 20
    outcomes = evaluations(journals, fork_steps(journals, counted.segments))
    assert sorted(outcomes) == [0, 2, 4, 6, 8, 10]
    skipped = sorted(step for step, outcome in outcomes.items() if isinstance(outcome, EvaluationSkipped))
    evaluated = sorted(step for step, outcome in outcomes.items() if isinstance(outcome, Evaluated))
    assert 2 in skipped and {0, 10} <= set(evaluated) and len(skipped) + len(evaluated) == 6
    records = [r for journal in journals.values() for r in journal.records()]
    told = [r.step for r in records if isinstance(r, Evaluated | EvaluationSkipped)]
    assert sorted(told) == sorted(outcomes)  # none lost, none twice
    events = read_events(run_dir / "events")
    assert [(e["step"], e["reason"]) for e in _named(events, "verdict", "evaluation_skipped")] == [
        (step, "cut") for step in skipped
    ]
    assert sorted(e.step for e in reduce_events(events).evaluations) == evaluated


def _named(events: list[dict[str, Any]], kind: str, name: str) -> list[dict[str, Any]]:
    return [e for e in events if e["kind"] == kind and e.get("name") == name]
