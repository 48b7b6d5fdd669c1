"""`submit --dry-run` on a real Slurm: stdout is a batch script, nothing is written, nothing is submitted."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from miles_hpc.cli.main import main
from tests.unit.runs import write_run
from tools.slurm_box import Box

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(170)]


@pytest.fixture
def here(tmp_path: Path, clean_box: Box, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    for name, value in clean_box.env().items():
        monkeypatch.setenv(name, value)
    return tmp_path


def tree(folder: Path) -> list[str]:
    return sorted(str(path) for path in folder.rglob("*"))


def test_the_script_on_stdout_is_the_one_that_would_be_submitted(
    here: Path, clean_box: Box, capsys: pytest.CaptureFixture[str]
) -> None:
    before = tree(here)
    assert main(["submit", "run.toml", "--dry-run", "--set", "job.time=00:10:00"]) == 0
    shown = capsys.readouterr()
    assert tree(here) == before and clean_box.run("squeue", "-h") == ""
    subprocess.run(["bash", "-n"], input=shown.out, text=True, check=True, timeout=60)
    assert shown.err.splitlines()[0] == f"run          tiny, would start in {here}/runs/tiny"
    assert "allocation   00:10:00, 0.833 node-hours\n" in shown.err
    assert shown.err.endswith("dry run: nothing written, nothing submitted\n")

    job_id = clean_box.run("sbatch", "--parsable", "--hold", _written(here / "job.sh", shown.out)).strip()
    assert clean_box.run("squeue", "-h", "--jobs", job_id).count("tiny") == 3
    clean_box.run("scancel", job_id)
    assert main(["submit", "run.toml", "--set", "job.time=00:10:00", "--set", "job.extra_directives=['--hold']"]) == 0
    capsys.readouterr()
    written = (here / "runs" / "tiny" / "job.sbatch").read_text()
    assert written.replace("#SBATCH --hold\n", "") == shown.out


def test_as_json(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", "run.toml", "--dry-run", "--json", "--set", "job.time=00:30:00"]) == 0
    shown = capsys.readouterr()
    told = json.loads(shown.out)
    assert shown.err == ""
    assert (told["nodes"], told["gpus"], told["node_hours"], told["max_node_hours"]) == (5, 0, 2.5, 250.0)
    assert (told["roles"]["trainer"]["partition"], told["next_allocation"]) == ("trainer", "requeue")
    assert told["script"].startswith("#!/bin/bash\n#SBATCH --job-name=tiny-trainer\n")


def test_what_slurm_would_refuse_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", "run.toml", "--dry-run", "--set", "groups.trainer.nodes=90"]) == 2
    shown = capsys.readouterr()
    assert (
        shown.out == ""
        and shown.err.startswith("miles-hpc: error: Slurm refused the job")
        and shown.err.count("\n") == 1
    )


def _written(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)
