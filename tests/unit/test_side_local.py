"""Side jobs on this machine, through submitit's local executor and the command line."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from checkpoints.manifest import COMPLETE, Counters, JournalPosition, Manifest, extend_lineage, publish_manifest
from checkpoints.verify import file_entry
from miles_hpc.cli.main import main
from miles_hpc.cluster.jobs import JobFailed
from miles_hpc.cluster.side_folder import SideFolder
from miles_hpc.cluster.side_jobs import SideJob, list_side_jobs
from miles_hpc.cluster.side_keeper import is_alive
from miles_hpc.cluster.slurm_states import JobState
from miles_hpc.cluster.submit import prepare
from miles_hpc.core.paths import RunPaths
from tests.slurm import side_probe
from tests.unit.runs import make_run, make_site


@pytest.fixture
def paths(tmp_path: Path) -> Iterator[RunPaths]:
    """A prepared run whose python_path has side_probe; what a failed test leaves running is ended."""
    own = tmp_path / "own"
    own.mkdir()
    shutil.copy(side_probe.__file__, own / "side_probe.py")
    paths = RunPaths(tmp_path / "run")
    prepare(make_run("site=laptop", f'python_path=["{own}"]'), make_site("laptop"), paths, source="")
    yield paths
    for folder in paths.side_jobs.glob("[0-9]*"):
        folder.chmod(0o700)
        SideJob(SideFolder(folder), None).cancel()


def side(paths: RunPaths, *argv: str) -> int:
    return main(["side", str(paths.root), *argv])


def newest(paths: RunPaths) -> SideJob:
    return list_side_jobs(paths, None)[-1]


def until(condition: object, timeout_s: float = 30.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.05)


def checkpoint(paths: RunPaths, step: int) -> Path:
    folder = paths.checkpoint(1, step)
    folder.mkdir(parents=True)
    (folder / "weights").write_bytes(b"w" * 1000)
    publish_manifest(
        folder,
        Manifest(
            run="tiny",
            term=1,
            step=step,
            attempt=1,
            lineage=extend_lineage((), 1, step),
            counters=Counters(next_group_id=0),
            journal=JournalPosition(term=1, offset=0),
            files={"weights": file_entry(folder / "weights", digest=True)},
        ),
        lambda: None,
    )
    return folder


def test_a_checkpoint_is_verified(paths: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint(paths, 5)
    folder = checkpoint(paths, 10)
    assert side(paths, "verify-checkpoint", "--wait", "60") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["checkpoint"], told["step"], told["n_bytes"], told["without_crc"]) == (folder.name, 10, 1000, [])
    data = bytearray((folder / "weights").read_bytes())
    data[500] ^= 1  # of the same size: only its CRC tells
    (folder / "weights").write_bytes(data)
    assert side(paths, "verify-checkpoint", "--arg", "step=10", "--wait", "60") == 1
    error = capsys.readouterr().err
    assert "FAILED: IntegrityError" in error and "weights: CRC-32" in error
    assert side(paths, "verify-checkpoint", "--arg", "step=5", "--wait", "60") == 0
    (folder / COMPLETE).unlink()
    capsys.readouterr()
    assert side(paths, "verify-checkpoint", "--wait", "60") == 0
    assert json.loads(capsys.readouterr().out)["step"] == 5
    capsys.readouterr()
    assert side(paths, "verify-checkpoint", "--arg", "step=7", "--wait", "60") == 2
    assert "no checkpoint of step 7: there are 5, 10" in capsys.readouterr().err


def test_a_program_and_what_it_prints(paths: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    assert side(paths, "doctor", "--arg", 'module="json.tool"', "--arg", 'arguments=["--help"]', "--wait", "60") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["exit_code"] == 0 and "json" in told["output"]
    assert side(paths, "doctor", "--arg", 'arguments=["--no-such-option"]', "--wait", "60") == 1
    assert "exit code 2" in capsys.readouterr().err


def test_gpus_of_this_machine(paths: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    for count, visible in ((0, ""), (2, "0,1")):
        assert side(paths, "side_probe:tell", "--gpus-per-node", str(count), "--wait", "60") == 0
        assert json.loads(capsys.readouterr().out)["gpus"] == visible


def test_how_local_jobs_end(paths: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    assert side(paths, "side_probe:fail", "--wait", "60") == 1
    assert "FAILED: ValueError: no good" in capsys.readouterr().err
    assert side(paths, "side_probe:die", "--wait", "60") == 1
    job = newest(paths)
    assert job.state() is JobState.FAILED
    assert "without a result" in str(job.exception())
    assert side(paths, "side_probe:odd", "--wait", "60") == 1
    assert "returned what JSON doesn't have" in capsys.readouterr().err
    with pytest.raises(JobFailed):
        newest(paths).result(1.0)
    assert main(["jobs", str(paths.root), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(r["side"], r["name"], r["state"]) for r in rows] == [(n, name, "FAILED") for n, name in (
        (1, "fail"), (2, "die"), (3, "odd"))]  # fmt: skip
    assert all(Path(r["stdout"]).is_file() and r["age_s"] > 0 for r in rows)


def begun(paths: RunPaths, mark: Path) -> SideJob:
    assert side(paths, "side_probe:wait_for", "--arg", f"mark={mark}") == 0
    until(lambda: has_begun(mark))
    return newest(paths)


def has_begun(mark: Path) -> bool:
    path = Path(f"{mark}.begun")
    return path.exists() and path.read_text().endswith("\n")


def test_cancelled_and_nothing_is_left(paths: RunPaths, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = begun(paths, tmp_path / "one")
    task = int(Path(tmp_path / "one.begun").read_text().split()[0])
    assert job.state() is JobState.RUNNING
    began = time.monotonic()
    assert main(["jobs", str(paths.root), "--cancel", "1"]) == 0
    assert "was RUNNING" in capsys.readouterr().out
    until(job.done, 10.0)
    assert time.monotonic() - began < 10.0
    assert (job.state(), job.status().reason) == (JobState.CANCELLED, "on request")
    submitted = job.folder.submitted()
    assert submitted is not None
    until(lambda: not is_alive(submitted))
    assert not Path(f"/proc/{task}").exists()
    assert main(["jobs", str(paths.root), "--cancel", "1"]) == 0
    assert "already ended: CANCELLED" in capsys.readouterr().out
    assert main(["jobs", str(paths.root), "--cancel", "9"]) == 2


def test_it_outlives_the_command_and_its_keeper_tells(paths: RunPaths, tmp_path: Path) -> None:
    mark = tmp_path / "one"
    command = [sys.executable, "-m", "miles_hpc.cli.main", "side", str(paths.root), "side_probe:wait_for"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run([*command, "--arg", f"mark={mark}"], env=environment, check=True, timeout=60)
    job = newest(paths)
    until(lambda: has_begun(mark))
    assert job.state() is JobState.RUNNING
    Path(f"{mark}.go").touch()
    assert job.result(30.0) == "went"


def test_a_killed_keeper_is_noticed(paths: RunPaths, tmp_path: Path) -> None:
    job = begun(paths, tmp_path / "one")
    submitted = job.folder.submitted()
    assert submitted is not None
    elsewhere = msgspec.structs.replace(submitted, host="another-host")
    job.folder.write(elsewhere)
    assert (job.state(), "another-host" in job.status().reason) == (JobState.UNKNOWN, True)
    rebooted = msgspec.structs.replace(submitted, boot="another-boot")
    assert is_alive(rebooted) is False
    assert is_alive(msgspec.structs.replace(submitted, pid_start=1)) is False  # the number was given out again
    job.folder.write(submitted)
    os.killpg(submitted.pid, signal.SIGKILL)
    until(job.done, 10.0)
    assert (job.state(), job.status().reason) == (JobState.FAILED, "its keeper was killed")


def test_bad_input_is_one_line(paths: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    cases = [
        (("verify",), "no side job 'verify'"),
        (("json:loads",), "no module json"),
        (("miles_hpc.nothing:here",), "no module miles_hpc.nothing"),
        (("export", "--arg", "step"), "KEY=VALUE"),
        (("export", "--time", "soon"), "time 'soon'"),
        (("export", "--wait", "-1"), "expected seconds"),
        (("export", "--nodes", "0"), "nodes = 0"),
    ]
    for argv, says in cases:
        assert side(paths, *argv) == 2, argv
        error = capsys.readouterr().err
        assert says in error and error.count("\n") == 1, error
    assert not paths.side_jobs.exists()


def test_a_call_that_cannot_work_is_not_submitted(paths: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    """What the node would fail on; the rows before the checkpoint is there come first."""
    none = [
        (("verify-checkpoint",), "no complete checkpoint"),
        (("export", "--arg", "step=3"), "no checkpoint of step 3"),
        (("eval",), "no complete checkpoint"),
    ]
    cases = [
        (("verify-checkpoint", "--arg", "stp=5"), "'stp'", "did you mean 'step'?"),
        (("verify-checkpoint", "--arg", "colour=5"), "'colour'", "expected some of run_dir, step"),
        (("verify-checkpoint", "--arg", "step=7"), "no checkpoint of step 7: there are 5"),
        (("verify-checkpoint", "--arg", "step=five"), "step = 'five'", "Expected `int | null`"),
        (("verify-checkpoint", "--arg", "run_dir=/elsewhere"), "takes the run directory before its name"),
        (("export", "--arg", "dtype=float64"), "dtype = 'float64'"),
        (("export", "--arg", "output=here"), "output = 'here'", "absolute"),
        (("eval", "--arg", "n_episodes=1", "--arg", "devise=cpu"), "did you mean 'device'?"),
        (("doctor", "--arg", "module=miles_hpc.nothing"), "'miles_hpc.nothing'", "no such module"),
        (("doctor", "--arg", "arguments=--json"), "arguments = '--json'", "Expected `array`"),
        (("miles_hpc.trainer.export:export_checkpoint", "--arg", "run_dir=/no/such"), "'/no/such'", "no such dir"),
        (("miles_hpc.trainer.export:export_checkpoint",), "needs run_dir"),
        (("miles_hpc.trainer.export:export_checkpont",), "did you mean 'export_checkpoint'?"),
        (("side_probe:tel",), "did you mean 'tell'?"),
        (("side_probe:tell", "--arg", "y=5"), "argument 'y'", "expected some of x"),
        (("side_probe.deeper:tell",), "no module side_probe.deeper"),
    ]
    for argv, *says in none:
        assert side(paths, *argv) == 2, argv
        error = capsys.readouterr().err
        assert all(text in error for text in says) and error.count("\n") == 1, error
    checkpoint(paths, 5)
    for argv, *says in cases:
        assert side(paths, *argv) == 2, argv
        error = capsys.readouterr().err
        assert all(text in error for text in says) and error.count("\n") == 1, error
    assert not paths.side_jobs.exists()


def test_help_does_not_load_submitit() -> None:
    code = "import sys; import miles_hpc.cli.main as m, miles_hpc.cli.side, miles_hpc.cli.jobs; m._parser();"
    code += "print([n for n in ('submitit', 'cloudpickle', 'torch', 'asyncio') if n in sys.modules])"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    loaded = done.stdout.strip()
    assert "submitit" not in loaded and "torch" not in loaded and loaded, done.stderr


def test_a_folder_opened_to_others_is_refused(paths: RunPaths) -> None:
    assert side(paths, "side_probe:tell", "--wait", "60") == 0
    SideFolder(paths.side_jobs / "0001").root.chmod(0o777)
    assert main(["jobs", str(paths.root)]) == 2
