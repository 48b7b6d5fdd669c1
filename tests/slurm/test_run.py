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

SMALL = (
    "sft.steps=4",
    "sft.n_demonstrations=32",
    "sft.batch_size=16",
    "eval.n_episodes=16",
    "rollout.n_steps=30",
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
@pytest.mark.timeout(500)
def test_a_run_survives_kills_and_trains_every_group_once(clean_box: Box, run_dir: Path) -> None:
    faults = ["engine", "agent", "rank", "controller", "srun"]
    result = kill_test(clean_box, run_dir, faults, seed=1, settings=SMALL)
    events = (run_dir.with_suffix(".watch.log")).read_text()[-3000:]
    assert result["faults"] == faults, events
    assert (result["exit"], result["audit_exit"]) == (0, 0), (result, events)
    assert (result["lost"], result["twice"], result["conflicts"]) == ([], [], []), result
    (done,) = _notes(run_dir, "run_complete")
    assert done["trained_groups"] == 30 * 4
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


@pytest.mark.slurm
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_time_limit_cuts_and_the_next_allocation_goes_on(clean_box: Box, run_dir: Path) -> None:
    command = [sys.executable, "-P", "-m", "miles_hpc.cli.main", "submit", "demo", "--site", "slurm_box", "--watch"]
    command += ["--run-dir", str(run_dir)]
    settings = (*SMALL, "rollout.n_steps=70", "job.time=00:01:00", "job.signal_s=30")
    for setting in settings:
        command += ["--set", setting]
    done = subprocess.run(command, env=clean_box.env(), capture_output=True, text=True, timeout=380, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    last = len(list((run_dir / "attempts").glob("[0-9]*")))
    until(lambda: (run_dir / "attempts" / f"{last:04d}" / "outcome.json").exists(), "the supervisor's end", 60)
    outcomes = [json.loads(p.read_text())["outcome"] for p in sorted((run_dir / "attempts").glob("*/outcome.json"))]
    assert outcomes[-1] == "completed" and set(outcomes[:-1]) == {"continue"} and len(outcomes) >= 2
    job_id = json.loads((run_dir / "job.json").read_text())["job_id"]
    records = [r for r in clean_box.history() if r.het_job_id == job_id]
    assert {r.het_offset for r in records} == {0, 1, 2}
    assert len({r.start for r in records if r.het_offset == 0}) == len(outcomes)
    audit = subprocess.run([sys.executable, "-P", "-m", "tools.audit_run", str(run_dir), "--strict"], check=False)
    assert audit.returncode == 0


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
