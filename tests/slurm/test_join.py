"""Hosts from a second, plain Slurm job: they join a run, produce, leave, and follow it to its next start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from shutil import rmtree
from typing import Any

import pytest

from checkpoints.journal import BatchFormed, GroupOwned, read_journals
from miles_hpc.core.telemetry import read_events
from tests.slurm.conftest import fresh_box, until
from tests.slurm.test_run import SMALL
from tools.kill_test import rl_step
from tools.slurm_box import Box, BoxSpec


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """Short, because agents' sockets and Slurm's output lie below it."""
    root = Path(tempfile.mkdtemp(prefix="mj-", dir="/tmp"))
    root.chmod(0o755)
    yield root / "run"
    rmtree(root, ignore_errors=True)


def cli(box: Box, *arguments: str) -> None:
    command = [sys.executable, "-P", "-m", "miles_hpc.cli.main", *arguments]
    done = subprocess.run(command, env=box.env(), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def lend(box: Box, run_dir: Path, *, name: str, node: str = "rollout2") -> int:
    """A job of its own that joins the run as a rollout host; returns its id."""
    join = f"{sys.executable} -P -m miles_hpc.cli.main join {run_dir} --role rollout --wait 120"
    words = ["--parsable", "--partition=rollout", f"--nodelist={node}", "--time=10", f"--job-name={name}"]
    words += [f"--output={run_dir.parent}/{name}.log", f"--wrap=srun --ntasks=1 {join}"]
    return int(box.run("sbatch", *words).strip())


def owned_by(run_dir: Path, attempt: int | None = None) -> Counter[str]:
    """Groups that the journals of an attempt own (of all: None), by the host that played them."""
    found: Counter[str] = Counter()
    for read in read_journals(run_dir / "journal").values():
        if attempt is None or (read.started is not None and read.started.attempt == attempt):
            found.update(Path(r.path).parent.name for r in read.records() if isinstance(r, GroupOwned))
    return found


def verdicts(run_dir: Path, name: str) -> list[dict[str, Any]]:
    return [e for e in read_events(run_dir / "events") if e["kind"] in ("verdict", "note") and e["name"] == name]


def logs(run_dir: Path) -> str:
    return "\n".join(f"{p.name}: {p.read_text()[-1500:]}" for p in sorted(run_dir.parent.glob("*.log")))


@pytest.mark.slurm
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_hosts_of_a_second_job_join_produce_leave_and_follow_the_run(clean_box: Box, run_dir: Path) -> None:
    box = clean_box
    sets = [
        *SMALL,
        "groups.rollout.nodes=1",
        "groups.trainer.nodes=1",
        "job.time=00:10:00",
        "rollout.n_steps=2000",
    ]
    cli(
        box,
        "submit",
        "demo",
        "--site",
        "slurm_box",
        "--run-dir",
        str(run_dir),
        *(w for s in sets for w in ("--set", s)),
    )
    until(lambda: sum(owned_by(run_dir).values()) >= 8, "groups of the run's own host", 180)

    # one joins, and is taken away by scancel
    first = lend(box, run_dir, name="lent1")
    host = f"rollout2-j{first}"
    until(lambda: owned_by(run_dir)[host] >= 6, f"groups of {host}: {logs(run_dir)}", 120)
    box.run("scancel", str(first))
    until(lambda: [e for e in verdicts(run_dir, "left") if e["peer"] == host], f"{host} to have left", 60)
    assert "closed" in next(e for e in verdicts(run_dir, "lost") if e["peer"] == f"rollout-{host}")["evidence"]

    # another one joins, and stays when the run's own job is cancelled and started again
    second = lend(box, run_dir, name="lent2")
    host = f"rollout2-j{second}"
    until(lambda: owned_by(run_dir)[host] >= 3, f"groups of {host}: {logs(run_dir)}", 120)
    cli(box, "cancel", str(run_dir))
    until(lambda: (run_dir / "attempts" / "0001" / "outcome.json").exists(), "the cancelled job to go", 90)
    until(lambda: box.run("squeue", "-h", "-o", "%j").split() == ["lent2"], "only the lent host to be left", 60)
    n_steps = rl_step(run_dir) - 4 + 20  # less the warm start's 4
    cli(box, "resume", str(run_dir), "--set", f"rollout.n_steps={n_steps}")
    until(lambda: owned_by(run_dir, attempt=2)[host] >= 3, f"groups of {host} under attempt 2: {logs(run_dir)}", 180)
    until(lambda: verdicts(run_dir, "run_complete"), "the run's end", 240)
    until(lambda: not box.run("squeue", "-h", "-a", "-o", "%i").split(), "the lent host's job to end by itself", 60)
    (ended,) = [r for r in box.history() if r.job_id == second]
    assert (ended.state, "the run is complete" in logs(run_dir)) == ("COMPLETED", True), logs(run_dir)

    # nothing lost, nothing twice; groups of both lent hosts were trained; nobody tried to start the lent ones again
    audit = subprocess.run(
        [sys.executable, "-P", "-m", "tools.audit_run", str(run_dir), "--json"], capture_output=True, check=False
    )
    result = json.loads(audit.stdout)
    assert (audit.returncode, result["lost"], result["twice"], result["conflicts"]) == (0, [], [], []), result
    assert result["trained"] == result["asked"] == n_steps * 4
    journals = read_journals(run_dir / "journal")
    where = {
        r.group_id: Path(r.path).parent.name
        for j in journals.values()
        for r in j.records()
        if isinstance(r, GroupOwned)
    }
    trained = {g for j in journals.values() for r in j.records() if isinstance(r, BatchFormed) for g in r.group_ids}
    assert {where[g] for g in trained if "-j" in where[g]} == {f"rollout2-j{first}", f"rollout2-j{second}"}
    assert [e for e in verdicts(run_dir, "restart") if any("-j" in h for h in e["hosts"])] == []


@pytest.mark.slurm
@pytest.mark.slow
@pytest.mark.netns
@pytest.mark.timeout(400)
@pytest.mark.skipif(os.getuid() != 0, reason="namespaces need root")
def test_a_lent_host_that_was_cut_off_ends_its_engines_and_joins_again(run_dir: Path) -> None:
    """Another host for real: its own network namespace, addresses found through its routes, a cable to pull."""
    with fresh_box(
        BoxSpec.parse("trainer:1,rollout:2,sandbox:1", netns=True, cluster="lent", node_timeout_s=60)
    ) as box:
        sets = [*SMALL, "groups.rollout.nodes=1", "groups.trainer.nodes=1", "rollout.n_steps=2000", "job.time=00:10:00"]
        words = [w for s in sets for w in ("--set", s)]
        cli(box, "submit", "demo", "--site", "slurm_box", "--run-dir", str(run_dir), *words)
        until(lambda: len(set(owned_by(run_dir))) == 1, "groups of the run's own host", 180)
        node = "rollout2" if "rollout1" in owned_by(run_dir) else "rollout1"
        host = f"{node}-j{lend(box, run_dir, name='lent', node=node)}"
        until(lambda: owned_by(run_dir)[host] >= 4, f"groups of {host}: {logs(run_dir)}", 120)

        box.cut(node)
        until(lambda: [e for e in verdicts(run_dir, "left") if e["peer"] == host], f"{host} to be declared lost", 60)
        (lost,) = [e for e in verdicts(run_dir, "lost") if e["peer"] == f"rollout-{host}"]
        assert "no heartbeat for" in lost["evidence"]
        starts = run_dir / "attempts" / "0001" / "joined" / f"rollout-{host}"
        until(lambda: (starts / "0002").exists(), "the lease of the lent host to end, and its next try", 60)
        before = owned_by(run_dir)[host]
        box.restore(node)
        until(lambda: owned_by(run_dir)[host] >= before + 4, f"groups after its return: {logs(run_dir)}", 120)

        cli(box, "cancel", str(run_dir))
        until(lambda: (run_dir / "attempts" / "0001" / "outcome.json").exists(), "the cancelled job to go", 90)
    assert [e for e in verdicts(run_dir, "restart") if any("-j" in h for h in e["hosts"])] == []
    audit = subprocess.run(
        [sys.executable, "-P", "-m", "tools.audit_run", str(run_dir), "--json"], capture_output=True, check=False
    )
    result = json.loads(audit.stdout)
    assert (audit.returncode, result["lost"], result["twice"], result["conflicts"]) == (0, [], [], []), result
