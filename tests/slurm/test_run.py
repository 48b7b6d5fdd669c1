"""Whole runs on the real box: cut by the time limit, shot at, cut off, and always complete."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from miles_hpc.core.telemetry import read_events
from tests.slurm.conftest import fresh_box, until
from tools.kill_test import kill_test, rl_step
from tools.slurm_box import Box, BoxSpec

#: A few more than the faults of the kill tests need, which are spread over the first four fifths.
N_STEPS = 24

SMALL = (
    "sft.steps=4",
    "sft.n_demonstrations=32",
    "sft.batch_size=16",
    "eval.n_episodes=16",
    f"rollout.n_steps={N_STEPS}",
    "rollout.rollout_batch_size=4",
    "rollout.n_samples_per_prompt=4",
    "checkpoint.interval_steps=4",
    "job.time=00:03:00",
)


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """Short, because agents' sockets and Slurm's output lie below it."""
    root = Path(tempfile.mkdtemp(prefix="mr-", dir="/tmp"))
    root.chmod(0o755)
    yield root / "run"
    shutil.rmtree(root, ignore_errors=True)


def _notes(run_dir: Path, name: str) -> list[dict[str, object]]:
    return [e for e in read_events(run_dir / "events") if e["kind"] == "note" and e["name"] == name]


@pytest.mark.slurm
@pytest.mark.slow
@pytest.mark.lifecycle
@pytest.mark.timeout(500)
def test_a_run_survives_kills_and_trains_every_group_once(clean_box: Box, run_dir: Path) -> None:
    faults = ["engine", "agent", "rank", "controller", "srun"]
    result = kill_test(clean_box, run_dir, faults, seed=1, settings=SMALL)
    events = (run_dir.with_suffix(".watch.log")).read_text()[-3000:]
    assert result["faults"] == faults, events
    assert (result["exit"], result["audit_exit"]) == (0, 0), (result, events)
    assert (result["lost"], result["twice"], result["conflicts"]) == ([], [], []), result
    (done,) = _notes(run_dir, "run_complete")
    assert done["trained_groups"] == N_STEPS * 4
    # a killed rank and a killed controller cost a term each; engines, agents and sruns of rollout hosts cost none
    assert int(str(result["terms"])) >= int(str(result["allocations"])) + 2
    steps = [
        e for e in read_events(run_dir / "events") if e["kind"] == "metric" and "rollout/raw_reward" in e["values"]
    ]
    assert max(e["values"]["rollout/staleness_max"] for e in steps) <= 2
    for e in steps:
        assert e["values"]["routing/replayed_positions"] == e["values"]["routing/recorded_positions"]
    probes = [
        e["values"]["sync/probe_logprob_abs_diff_mean"]
        for e in steps
        if "sync/probe_logprob_abs_diff_mean" in e["values"]
    ]
    assert probes and max(probes) <= 1e-5


def _cli(box: Box, *arguments: str) -> str:
    command = [sys.executable, "-P", "-m", "miles_hpc.cli.main", *arguments]
    done = subprocess.run(command, env=box.env(), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slurm
@pytest.mark.slow
@pytest.mark.lifecycle
@pytest.mark.timeout(500)
def test_the_time_limit_cuts_and_the_next_allocation_goes_on(clean_box: Box, run_dir: Path) -> None:
    """Cut by the limit, resumed by itself; then cancelled, and resumed by hand with fewer steps left to do."""
    settings = (*SMALL, "rollout.n_steps=2000", "job.time=00:01:00", "job.signal_s=30")
    sets = [word for setting in settings for word in ("--set", setting)]
    _cli(clean_box, "submit", "demo", "--site", "slurm_box", "--run-dir", str(run_dir), *sets)
    until(lambda: len(_notes(run_dir, "allocation_start")) >= 2, "the second allocation", 150)
    outcome = json.loads((run_dir / "attempts" / "0001" / "outcome.json").read_text())
    assert outcome["outcome"] == "continue", outcome
    (cut,) = [n["step"] for n in _notes(run_dir, "checkpoint")][-1:]
    assert isinstance(cut, int)
    until(lambda: rl_step(run_dir) >= cut + 2, "steps of the second allocation", 120)
    job_id = json.loads((run_dir / "job.json").read_text())["job_id"]
    records = [r for r in clean_box.history() if r.het_job_id == job_id]
    assert {(r.het_offset, r.state) for r in records} == {(0, "REQUEUED"), (1, "REQUEUED"), (2, "REQUEUED")}

    _cli(clean_box, "cancel", str(run_dir))
    until(lambda: not clean_box.run("squeue", "-h", "-a", "-o", "%i").split(), "the cancelled job to go", 60)
    n_steps = rl_step(run_dir) - 4 + 12  # less the warm start's 4
    _cli(clean_box, "resume", str(run_dir), "--set", f"rollout.n_steps={n_steps}", "--set", "job.time=00:10:00")
    until(lambda: _notes(run_dir, "run_complete"), "the run's end", 180)
    audit = subprocess.run(
        [sys.executable, "-P", "-m", "tools.audit_run", str(run_dir), "--json", "--strict"],
        capture_output=True,
        check=False,
    )
    result = json.loads(audit.stdout)
    assert (audit.returncode, result["trained"]) == (0, n_steps * 4), result


@pytest.mark.slurm
@pytest.mark.slow
@pytest.mark.netns
@pytest.mark.timeout(400)
@pytest.mark.skipif(os.getuid() != 0, reason="namespaces need root")
def test_a_node_that_is_cut_off_and_runs_on_changes_nothing_that_counts(run_dir: Path) -> None:
    """The batch host itself, with supervisor, controller and the trainer's rank 0 on it; its file system stays."""
    with fresh_box(BoxSpec.parse("trainer:3,rollout:2,sandbox:1", netns=True, cluster="cut")) as box:
        command = [sys.executable, "-P", "-m", "miles_hpc.cli.main", "submit", "demo", "--site", "slurm_box"]
        command += ["--run-dir", str(run_dir)]
        for setting in (*SMALL, "rollout.n_steps=60", "job.time=00:10:00"):
            command += ["--set", setting]
        subprocess.run(command, env=box.env(), check=True, capture_output=True, timeout=60)
        until(lambda: rl_step(run_dir) >= 10, "ten steps before the cut", 120)
        hosts = _notes(run_dir, "allocation_start")[0]["hosts"]
        assert isinstance(hosts, dict) and hosts["trainer"][0] == "trainer1"
        box.cut("trainer1")
        until(lambda: len(_notes(run_dir, "allocation_start")) >= 2, "the next allocation", 120)
        until(lambda: _notes(run_dir, "run_complete"), "the run's end", 240)
        events = read_events(run_dir / "events")
        begun = _notes(run_dir, "allocation_start")[1]["t"]
        late = [e for e in events if e.get("attempt") == 1 and e["t"] > begun]  # type: ignore[operator]
        assert late, "the cut-off attempt should have run on for a while: nothing was tested"
        assert {e["name"] for e in late if e["kind"] == "verdict"} >= {"fenced"}, late
        audit = subprocess.run(
            [sys.executable, "-P", "-m", "tools.audit_run", str(run_dir), "--json"], capture_output=True, check=False
        )
        result = json.loads(audit.stdout)
        assert (audit.returncode, result["lost"], result["twice"], result["conflicts"]) == (0, [], [], [])
        assert result["trained"] == result["asked"] == 60 * 4
        box.restore("trainer1", resume=True)
