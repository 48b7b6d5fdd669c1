"""miles-hpc doctor: options, the table, JSON, exit codes."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from miles_hpc.cli.doctor_view import Report, Row, print_table, rows_of, verdict
from miles_hpc.cli.main import main
from miles_hpc.cluster.preflight.contract import Check, fail, fine, skip, warn
from miles_hpc.cluster.preflight.runner import Result
from miles_hpc.core import registry
from tests.unit.runs import write_run


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with run.toml on a machine without Slurm and without a site of its own."""
    write_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(("SLURM_", "MILES_HPC_"))]:
        monkeypatch.delenv(name)
    folders = os.environ["PATH"].split(":")
    bare = [folder for folder in folders if not (Path(folder) / "sbatch").exists()]
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "sh").symlink_to("/bin/sh")
    monkeypatch.setenv("PATH", ":".join([str(programs), *bare]))
    return tmp_path


RESULTS = [
    Result("flock", fine("/scratch: a second process is kept out"), "n1"),
    Result("flock", fine("/scratch: a second process is kept out"), "n2"),
    Result("flock", fine("/scratch: a second process is kept out")),
    Result("tmp-space", fine("/tmp has 12.5 GB free"), "n1"),
    Result("tmp-space", fine("/tmp has 900 MB free"), "n2"),
    Result("limits", warn("ulimit -n is 256", "raise it"), "n2"),
    Result("gpu-health", fail("nvidia-smi hangs", "exclude it"), "n2"),
    Result("stripe", skip("not Lustre")),
    Result("quota", skip("not Lustre")),
]


def test_rows_are_grouped_and_the_worst_comes_first() -> None:
    assert rows_of(RESULTS) == [
        Row("FAIL", "gpu-health", ("n2",), "nvidia-smi hangs", "exclude it"),
        Row("warn", "limits", ("n2",), "ulimit -n is 256", "raise it"),
        Row("ok", "flock", ("n1", "n2", ""), "/scratch: a second process is kept out"),
        Row("ok", "tmp-space", ("n1", "n2"), "/tmp has 12.5 GB free (numbers of n1)"),
        Row("skip", "stripe, quota", ("",), "not Lustre"),
    ]
    assert verdict(RESULTS) == "FAIL: 1 FAIL, 1 warn, 5 ok, 2 skip; gpu-health n2"
    assert verdict([]) == "ok: nothing looked at"


def test_the_table_says_what_to_do_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(Report(versions=[("python", "3"), ("miles-hpc", "1")], results=RESULTS))
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == ["python     3", "miles-hpc  1", ""]
    assert lines[3] == "FAIL  gpu-health  n2: nvidia-smi hangs"
    assert lines[4].split() == ["do:", "exclude", "it"]
    assert lines[5].strip().startswith("why: one sick GPU ends or slows the whole step")
    assert "ok    flock       here, n[1-2]: /scratch: a second process is kept out" in lines
    assert lines[-1] == "FAIL: 1 FAIL, 1 warn, 5 ok, 2 skip; gpu-health n2"


def test_a_machine_without_slurm_passes(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    begun = time.monotonic()
    assert main(["doctor", "--site", "laptop", "--run-dir", "run"]) == 0
    assert time.monotonic() - begun < 30.0
    out = capsys.readouterr().out
    assert out.startswith("miles-hpc ")
    assert "ok    flock" in out
    assert "a site without Slurm" in out
    assert not (here / "run").exists()
    assert sorted(path.name for path in here.iterdir()) == ["bin", "run.toml"]


def test_slurm_that_is_missing_where_the_site_has_it_fails(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--run", "run.toml", "--only", "slurm,quota"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("FAIL  slurm  'scontrol' is not on PATH")
    assert main(["doctor", "--run", "run.toml", "--only", "slurm", "--verdict"]) == 0
    assert capsys.readouterr().out == "miles-hpc doctor: FAIL: 1 FAIL; slurm\n"


def test_json(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--site", "laptop", "--json", "--only", "flock", "--run-dir", "run"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["ok"], told["site"], told["counts"]) == (True, "laptop", {"FAIL": 0, "warn": 0, "ok": 1, "skip": 0})
    (finding,) = told["findings"]
    assert finding["check"] == "flock"
    assert finding["why"]
    assert finding["source"]


def test_lists_and_versions_alone(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--list", "--only", "nics,quota"]) == 0
    out = capsys.readouterr().out
    assert "nics   different adapters" in out
    assert "once; needs run directory" in out
    assert main(["doctor", "--versions"]) == 0
    assert "msgspec" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--only", "flok"], "did you mean 'flock'?"),
        (["--site", "perlmuter"], "did you mean 'perlmutter'?"),
        (["--run", "nope.toml"], "no such run file or recipe"),
        (["--set", "a=1"], "add --run RUN.toml"),
        (["--on-nodes", "2"], "no site is chosen"),
        (["--on-nodes", "0", "--site", "slurm_box"], "--on-nodes 0: expected 1 or more"),
        (["--on-nodes", "2", "--site", "laptop"], "has no scheduler"),
        (["--on-nodes", "2", "--site", "perlmutter"], "the doctor takes --account and --qos"),
        (["--on-nodes", "1", "--site", "slurm_box", "--timeout", "0"], "--timeout 0.0: expected seconds"),
        (["--on-nodes", "1", "--site", "slurm_box", "--only", "ports"], "no srun on PATH"),
    ],
)
def test_bad_input_is_one_line(
    here: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert main(["doctor", *options]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


@pytest.mark.parametrize(
    ("sinfo", "message"),
    [
        ("printf '2\\n1\\n'", "--on-nodes 4: partition 'trainer' has only 3 nodes: ask for at most 3"),
        ("echo 4", "no srun on PATH"),
        ("exit 1", "no srun on PATH"),  # without Slurm's word it is tried
    ],
)
def test_more_nodes_than_the_partition_has(
    here: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    sinfo: str,
    message: str,
) -> None:
    told = tmp_path / "bin" / "sinfo"
    told.parent.mkdir(exist_ok=True)
    told.write_text(f'#!/bin/sh\n[ "$2" = --partition=trainer ] || exit 2\n{sinfo}\n')
    told.chmod(0o755)
    monkeypatch.setenv("PATH", f"{told.parent}:/usr/bin:/bin" if "srun" not in message else str(told.parent))
    assert main(["doctor", "--on-nodes", "4", "--site", "slurm_box", "--only", "ports"]) == 2
    captured = capsys.readouterr()
    assert (message in captured.err, captured.err.count("\n"), captured.out) == (True, 1, "")


def test_a_check_of_ones_own(here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    own = Check(name="moon", why="the tide matters here", source="us", look=lambda machine, context: [fine("full")])
    monkeypatch.setattr(registry, "names", lambda kind: ["moon"] if kind == "check" else [])
    monkeypatch.setattr(registry, "resolve", lambda kind, name: own)
    assert main(["doctor", "--only", "moon"]) == 0
    assert capsys.readouterr().out.startswith("ok    moon  full")
    monkeypatch.setattr(registry, "resolve", lambda kind, name: "no check")
    assert main(["doctor", "--only", "moon"]) == 2
    assert "expected a Check or Comparison" in capsys.readouterr().err
