"""miles-hpc cancel, whatever stands in the queue."""

from __future__ import annotations

from pathlib import Path

import pytest

from miles_hpc.cli.main import main
from miles_hpc.cluster.chain import is_cancelled
from miles_hpc.cluster.submit import prepare, read_follow_up, submit_follow_up, submit_prepared
from miles_hpc.core.paths import RunPaths
from tests.fakes.fake_slurm import FakeSlurm
from tests.unit.runs import make_run, make_site

JOB = "#!/bin/bash\n#SBATCH --job-name=a\n"


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    fake = FakeSlurm()
    monkeypatch.setattr("miles_hpc.cli.cancel.Slurm", lambda: fake)
    return fake


@pytest.fixture
def paths(tmp_path: Path, slurm: FakeSlurm) -> RunPaths:
    """A run whose job runs, with a follow-up behind it."""
    paths = RunPaths(tmp_path / "run")
    prepare(make_run(), make_site(), paths, source="x", job_text=JOB)
    job = submit_prepared(paths, slurm)
    slurm.start(job, ["n1"], limit_s=60)
    submit_follow_up(paths, slurm, job)
    return paths


def test_the_whole_chain_ends_and_again(paths: RunPaths, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cancel", str(paths.root)]) == 0
    assert [states[0].state for states in slurm.jobs.values()] == ["CANCELLED", "CANCELLED"]
    assert (is_cancelled(paths), read_follow_up(paths)) == (True, None)
    assert "cancelled job 1 (RUNNING), job 2 (PENDING)" in capsys.readouterr().out
    assert main(["cancel", str(paths.root)]) == 0
    assert (capsys.readouterr().out, is_cancelled(paths)) == ("job 1 has already ended\n", True)


def test_a_run_that_has_ended_isnt_cancelled(paths: RunPaths, slurm: FakeSlurm) -> None:
    slurm.finish(1, "COMPLETED")
    slurm.forget(2)
    assert main(["cancel", str(paths.root)]) == 0
    assert not is_cancelled(paths)


def test_while_slurm_is_away_the_word_is_left(
    paths: RunPaths, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm.away = "Unable to contact slurm controller"
    assert main(["cancel", str(paths.root)]) == 1
    assert is_cancelled(paths)
    said = capsys.readouterr().err
    assert "Unable to contact" in said and "cancel again when Slurm answers" in said and said.count("\n") == 1
