"""The supervisor's program around the run: what happens to the chain when the run can't even begin."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from launchers import supervisor
from miles_hpc.cluster.chain import record_outcome
from miles_hpc.cluster.submit import prepare, read_follow_up, submit_prepared
from miles_hpc.core import exits
from miles_hpc.core.config import SiteConfig
from miles_hpc.core.paths import RunPaths
from tests.fakes.fake_slurm import FakeSlurm
from tests.unit.runs import make_run, make_site

JOB = "#!/bin/bash\n#SBATCH --job-name=a\n#SBATCH hetjob\n#SBATCH --job-name=b\n#SBATCH hetjob\n#SBATCH --job-name=c\n"
NODES = ("trainer[1-2]", "rollout[1-2]", "sandbox1")
FOLLOW = msgspec.structs.replace(make_site(), requeue=False)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


class Job:
    """A submitted run whose job runs; `start` is the batch script's call, in this process."""

    def __init__(self, root: Path, site: SiteConfig, monkeypatch: pytest.MonkeyPatch) -> None:
        self.paths, self.slurm = RunPaths(root / "run"), FakeSlurm()
        prepare(make_run(), site, self.paths, source="x", job_text=JOB)
        self.id = submit_prepared(self.paths, self.slurm)
        self.slurm.start(self.id, list(NODES), limit_s=600)
        monkeypatch.setattr(supervisor, "Slurm", lambda: self.slurm)
        monkeypatch.setattr(sys, "argv", ["supervisor", "--run-dir", str(self.paths.root)])
        monkeypatch.setenv("SLURM_JOB_ID", str(self.id))
        monkeypatch.setenv("SLURM_HET_SIZE", str(len(NODES)))
        for i, nodes in enumerate(NODES):
            monkeypatch.setenv(f"SLURM_JOB_NODELIST_HET_GROUP_{i}", nodes)

    def outcome(self) -> dict[str, str]:
        record: dict[str, str] = msgspec.json.decode(self.paths.outcome(1).read_bytes())
        return record


def test_roles_that_cant_be_placed_take_the_follow_up_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(tmp_path, FOLLOW, monkeypatch)
    monkeypatch.setenv("SLURM_JOB_NODELIST_HET_GROUP_1", "rollout1")
    assert supervisor.main() == exits.USER_ERROR
    assert (read_follow_up(job.paths), job.slurm.state(max(job.slurm.jobs))[0]) == (None, "CANCELLED")
    assert (job.outcome()["outcome"], "'rollout' needs 2 nodes" in job.outcome()["reason"]) == ("failed", True)


@pytest.mark.parametrize("requeue", [True, False])
def test_sigterm_before_there_is_an_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, requeue: bool) -> None:
    """The limit or a preemption comes during the start: the chain goes on."""
    job = Job(tmp_path, make_site() if requeue else FOLLOW, monkeypatch)

    def ended(job_id: int) -> float:
        os.kill(os.getpid(), signal.SIGTERM)
        return 60.0

    monkeypatch.setattr(job.slurm, "remaining_s", ended)
    assert supervisor.main() == exits.FAILED
    assert job.outcome()["reason"] == "ended from outside before it had started"
    follower = read_follow_up(job.paths)
    if requeue:
        assert job.slurm.components(job.id)[0].restarts == 1
    else:
        assert follower is not None and job.slurm.state(follower)[0] == "PENDING"


def test_an_error_of_our_own_stops_the_chain_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(tmp_path, FOLLOW, monkeypatch)
    monkeypatch.setattr(supervisor, "run_unless_ended", lambda *_: 1 // 0)
    assert supervisor.main() == exits.FAILED
    assert read_follow_up(job.paths) is None
    assert (job.outcome()["outcome"], job.outcome()["reason"]) == (
        "stopped",
        "ZeroDivisionError: integer division or modulo by zero",
    )


@pytest.mark.parametrize(
    ("code", "last"),
    [
        (exits.NEXT_ALLOCATION, "supervisor: exit code 10: paused, next allocation is job {follower}"),
        (exits.DONE, "supervisor: exit code 0: complete, no next allocation"),
        (exits.FAILED, "supervisor: exit code 1: failed, no next allocation"),
    ],
)
def test_the_last_line_tells_what_the_exit_code_means(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], code: int, last: str
) -> None:
    job = Job(tmp_path, FOLLOW, monkeypatch)
    monkeypatch.setattr(supervisor, "run_unless_ended", lambda *_: code)
    assert supervisor.main() == code
    assert capsys.readouterr().out.splitlines()[-1] == last.format(follower=max(job.slurm.jobs))


def test_one_too_many_leaves_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A claimed attempt would fence the job that has the run."""
    job = Job(tmp_path, make_site(), monkeypatch)
    surplus = job.slurm.submit(JOB)
    monkeypatch.setenv("SLURM_JOB_ID", str(surplus))
    assert supervisor.main() == exits.FENCED
    assert not job.paths.attempt(1).exists()
    assert f"job {job.id} has this run, job {surplus} is one too many" in capsys.readouterr().out


def test_an_outcome_that_cant_be_written_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record_outcome(RunPaths(tmp_path / "gone"), 3, "continue", "why")
    assert capsys.readouterr().err.endswith("the outcome of attempt 3 is continue: why\n")
