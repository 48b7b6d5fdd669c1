"""miles-hpc doctor on a real Slurm: nodes that are asked by a job, inside a job, and nodes that are down."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from miles_hpc.cli.main import main
from tests.slurm.conftest import until
from tests.unit.runs import write_run
from tools.slurm_box import Box

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(170)]

REPOSITORY = Path(__file__).parents[2]


def doctor(box: Box, *options: str, **environ: str) -> tuple[int, dict[str, Any]]:
    """Exit code and JSON of a doctor in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "miles_hpc.cli.main", "doctor", "--json", *options],
        env={**os.environ, **box.env(), "PYTHONPATH": str(REPOSITORY), **environ},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, json.loads(done.stdout)


def findings(told: dict[str, Any], check: str, status: str = "") -> list[dict[str, Any]]:
    return [f for f in told["findings"] if f["check"] == check and status in ("", f["status"])]


def no_jobs(box: Box) -> bool:
    return box.run("squeue", "-h", "-a", "-o", "%i").split() == []


def test_two_nodes_pass(clean_box: Box, tmp_path: Path) -> None:
    code, told = doctor(clean_box, "--site", "slurm_box", "--on-nodes", "2", "--run-dir", str(tmp_path / "run"))
    failed = [f for f in told["findings"] if f["status"] == "FAIL"]
    assert (code, failed) == (0, [])
    assert [f["saw"] for f in findings(told, "nodes")] == ["2 nodes answered: trainer[1-2]"]
    assert {f["node"] for f in findings(told, "flock", "ok")} == {"", "trainer1", "trainer2"}
    assert {f["node"] for f in findings(told, "limits", "ok")} == {"trainer1", "trainer2"}
    for comparison in ("clock", "versions", "shared-run-dir", "nics"):
        assert findings(told, comparison, "ok"), comparison
    assert findings(told, "het-jobs", "ok")
    assert not (tmp_path / "run").exists()


def test_a_run_is_looked_at_with_what_it_asks_for(clean_box: Box, tmp_path: Path) -> None:
    write_run(tmp_path)
    code, told = doctor(
        clean_box, "--run", str(tmp_path / "run.toml"), "--set", "groups.trainer.nodes=3", "--only", "slurm,mpi"
    )
    assert code == 1
    (finding,) = findings(told, "slurm", "FAIL")
    assert finding["saw"] == "partition 'trainer': 2 of 2 nodes can be used, the run asks for 3"
    assert findings(told, "mpi", "ok")


def test_an_mpi_plugin_that_is_not_there(clean_box: Box, tmp_path: Path) -> None:
    site = tmp_path / "mine.toml"
    site.write_text('name = "mine"\ninherits = "slurm_box"\nmpi = "pmix_v99"\n')
    code, told = doctor(clean_box, "--site", str(site), "--on-nodes", "2", "--only", "mpi")
    assert code == 1
    failed = findings(told, "mpi", "FAIL")
    assert {f["node"] for f in failed} == {"", "trainer1", "trainer2"}
    assert all("srun has no --mpi=pmix_v99: it has" in f["saw"] and "pmi2" in f["saw"] for f in failed)


def test_a_node_that_is_down(clean_box: Box) -> None:
    clean_box.kill_node("trainer2")
    code, told = doctor(clean_box, "--site", "slurm_box", "--on-nodes", "2", "--timeout", "6", "--only", "slurm,clock")
    assert code == 1
    (silent,) = findings(told, "nodes", "FAIL")
    assert "2 of 2 nodes didn't answer within" in silent["saw"]
    assert "PENDING, reason" in silent["saw"]
    assert any("1 of 2 nodes can be used" in f["saw"] for f in findings(told, "slurm"))
    assert no_jobs(clean_box)


def test_a_node_that_goes_silent_is_named(clean_box: Box, tmp_path: Path) -> None:
    """One task of two stops for ever before it says a word: its interpreter is a script that sleeps on that node."""
    stub = tmp_path / "python"
    stub.write_text(f'#!/bin/bash\n[ "$SLURMD_NODENAME" = trainer2 ] && exec sleep 100\nexec {sys.executable} "$@"\n')
    stub.chmod(0o755)
    tmp_path.chmod(0o755)
    write_run(tmp_path)
    code, told = doctor(
        clean_box, "--run", str(tmp_path / "run.toml"), "--set", f"python.trainer={stub}",
        "--on-nodes", "2", "--timeout", "8", "--only", "clock,limits",
    )  # fmt: skip
    assert code == 1
    (silent,) = findings(told, "nodes", "FAIL")
    assert "from trainer2" in silent["saw"]
    assert {f["node"] for f in findings(told, "limits", "ok")} == {"trainer1"}
    assert no_jobs(clean_box)


def test_a_prepared_run_directory_brings_its_run_and_site(
    clean_box: Box, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path)
    tmp_path.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    for name, value in clean_box.env().items():
        monkeypatch.setenv(name, value)
    assert main(["submit", "run.toml", "--set", "python.controller=/bin/true"]) == 0
    until(lambda: no_jobs(clean_box), "the job to end")
    code, told = doctor(
        clean_box, "--run-dir", "runs/tiny", "--on-nodes", "2", "--only", "secret,limits,shared-run-dir,quota,flock"
    )
    assert (code, told["site"]) == (0, "slurm_box")
    assert [f["saw"] for f in findings(told, "secret")] == ["secret.key has mode 0600"]
    assert {f["node"] for f in findings(told, "flock", "ok")} == {"", "trainer1", "trainer2"}
    (shared,) = findings(told, "shared-run-dir", "ok")
    assert str(tmp_path / "runs" / "tiny") in shared["saw"]
    (tmp_path / "runs" / "tiny" / "secret.key").chmod(0o640)
    code, told = doctor(clean_box, "--run-dir", "runs/tiny", "--only", "secret")
    assert (code, findings(told, "secret")[0]["status"]) == (1, "FAIL")


def test_inside_a_het_job_nodes_of_all_components_answer(clean_box: Box, tmp_path: Path) -> None:
    said = tmp_path / "said.json"
    tmp_path.chmod(0o755)
    script = tmp_path / "job.sh"
    command = f"{sys.executable} -P -m miles_hpc.cli.main doctor --site slurm_box --on-nodes 4 --json"
    script.write_text(
        "#!/bin/bash\n#SBATCH --job-name=a -p trainer -N2 -n2 --time=5\n#SBATCH hetjob\n"
        "#SBATCH --job-name=b -p rollout -N2 -n2\n"
        f"export PYTHONPATH={REPOSITORY}\n{command} --only clock,limits,quota > {said}.part; mv {said}.part {said}\n"
    )
    clean_box.run("sbatch", "--wait", f"--output={tmp_path}/out", str(script), timeout_s=120.0)
    told = json.loads(said.read_text())
    assert {f["node"] for f in findings(told, "limits", "ok")} == {"trainer1", "trainer2", "rollout1", "rollout2"}
    assert [f["saw"] for f in findings(told, "nodes")] == ["4 nodes answered: rollout[1-2],trainer[1-2]"]
    assert findings(told, "clock", "ok")
