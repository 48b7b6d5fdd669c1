"""miles-hpc jobs: which jobs it lists, and how wide the table is."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from miles_hpc.cli.jobs import JobRow, table_lines
from miles_hpc.cli.main import main
from miles_hpc.cluster.submit import adopt_job, prepare, submit_follow_up, submit_prepared
from miles_hpc.core.paths import RunPaths
from tests.fakes.fake_slurm import FakeSlurm
from tests.unit.runs import make_run, make_site

ROOT = Path("/projects/of-somebody/with-a-long-name/runs/experiment-17")
SCRIPT = "#!/bin/bash\n#SBATCH --job-name=tiny-trainer\n#SBATCH hetjob\n#SBATCH --job-name=tiny-rollout\n"


def row(**fields: Any) -> JobRow:
    known = JobRow(
        kind="side",
        side=3,
        job="37842023",
        name="a-sweep-over-nodes-of-this-site",
        state="OUT_OF_MEMORY",
        reason="exit code 2: " + "one word after the other " * 8,
        witness="result",
        nodes="n1",
        age_s=7265.0,
        stdout=str(ROOT / "side_jobs/0003/37842023_0_log.out"),
        stderr="",
    )
    return replace(known, **fields)


ROWS = [row(kind="run", side=None, name="run-" + "x" * 90, state="QUEUED", age_s=9.0), row(), row(side=12, reason="")]


@pytest.mark.parametrize("width", [200, 132, 100, 80, 60])
def test_lines_fit_the_terminal(width: int) -> None:
    lines = table_lines(ROWS, ROOT, width)
    assert max(map(len, lines)) <= width
    text = " ".join(" ".join(lines).split())
    for one in ROWS:
        assert one.job in text and one.state in text and one.reason.strip() in text
        assert Path(one.stdout).name in text
    assert ("RUN_DIR/side_jobs/0003/37842023_0_log.out" in text) == (width <= 80)


def test_names_lose_their_middle_only() -> None:
    (line,) = [line for line in table_lines(ROWS, ROOT, 80) if line.startswith("run ")]
    name = line.split()[2]
    assert name.startswith("run-xx") and name.endswith("xx") and name.count("…") == 1


def test_nothing_is_cut_in_a_pipe() -> None:
    header, *lines = table_lines(ROWS, ROOT, None)
    assert header.split() == ["side", "job", "name", "state", "age", "output"]
    assert [line.split()[0] for line in lines if not line.startswith(" ")] == ["run", "3", "12"]
    tops = [line for line in lines if not line.startswith(" ")]
    assert all(one.name in line and line.endswith(one.stdout) for one, line in zip(ROWS, tops, strict=True))


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    fake = FakeSlurm()
    monkeypatch.setattr("miles_hpc.cli.jobs.Slurm", lambda **_: fake)
    return fake


def test_the_next_allocation_is_listed(slurm: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = RunPaths(tmp_path / "run")
    prepare(make_run(), make_site(), paths, source="x", job_text=SCRIPT)
    first = submit_prepared(paths, slurm)
    slurm.start(first, ["n1", "n2"], limit_s=60)
    second = submit_follow_up(paths, slurm, first)
    slurm.jobs[second] = [replace(c, reason="Dependency") for c in slurm.jobs[second]]

    def told() -> list[tuple[str, ...]]:
        assert main(["jobs", str(paths.root), "--json"]) == 0
        rows = json.loads(capsys.readouterr().out)
        assert all(0 <= one["age_s"] < 100 for one in rows)
        return [(one["kind"], one["job"], one["state"], one["reason"]) for one in rows]

    assert told() == [("run", str(first), "RUNNING", ""), ("next", str(second), "QUEUED", "Dependency")]
    slurm.finish(first, "TIMEOUT")
    adopt_job(paths, second)  # its turn has come
    assert told() == [("run", str(second), "QUEUED", "Dependency")]
    assert main(["jobs", str(paths.root)]) == 0
    assert f"run   {second}" in capsys.readouterr().out


def test_a_job_that_nobody_noted_has_no_age(
    slurm: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = RunPaths(tmp_path / "run")
    prepare(make_run(), make_site(), paths, source="x", job_text=SCRIPT)
    submit_prepared(paths, slurm)
    adopt_job(paths, slurm.submit(SCRIPT))
    assert main(["jobs", str(paths.root), "--json"]) == 0
    assert [one["age_s"] for one in json.loads(capsys.readouterr().out)] == [None]
