"""A whole run whose roles talk over UCX: controller, agents, rank 0 beside its MPI, weights to engines."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from miles_hpc.core.telemetry import read_events
from tests.slurm.conftest import why_not

SMALL = (
    "control.transport=ucx",
    "groups.rollout.nodes=1",
    "groups.sandbox.nodes=1",
    "sft.steps=2",
    "sft.n_demonstrations=16",
    "sft.batch_size=8",
    "eval.n_episodes=4",
    "rollout.n_steps=3",
    "rollout.rollout_batch_size=2",
    "rollout.n_samples_per_prompt=4",
)


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """Short, because agents' sockets lie below it."""
    root = Path(tempfile.mkdtemp(prefix="mu-", dir="/tmp"))
    yield root / "run"
    shutil.rmtree(root, ignore_errors=True)


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_whole_run_over_ucx(run_dir: Path) -> None:
    if reason := why_not("ucx"):
        pytest.skip(reason)
    command = [sys.executable, "-P", "-m", "miles_hpc.cli.main", "local", "demo", "--run-dir", str(run_dir)]
    for setting in SMALL:
        command += ["--set", setting]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    logs = "\n".join(f"{p.name}: {p.read_text()[-800:]}" for p in sorted(run_dir.glob("attempts/*/logs/*.log")))
    assert (done.returncode, "the run is complete" in done.stdout) == (0, True), done.stdout + done.stderr + logs
    published = [json.loads(p.read_text()) for p in run_dir.glob("terms/*/rendezvous/*.json")]
    assert published and all(address.startswith("ucx://") for p in published for address in p["addresses"])
    notes = {e["name"]: e for e in read_events(run_dir / "events") if e["kind"] == "note"}
    assert notes["transport"]["transport"] == "ucx" and "libucp.so" in notes["transport"]["library"]
    assert set(notes["transport_in_use"]["in_use"].split()) <= set(notes["transport"]["devices"].split())
    assert notes["run_complete"]["trained_groups"] == 6
    metrics = [e["values"] for e in read_events(run_dir / "events") if e["kind"] == "metric"]
    probe = "sync/probe_logprob_abs_diff_mean"
    assert max(values[probe] for values in metrics if probe in values) <= 1e-5
