"""The run's own het job as a handle, on a real Slurm, with and without accounting."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from miles_hpc.cluster.jobs import JobFailed, judge, look
from miles_hpc.cluster.run_job import RunJob
from miles_hpc.cluster.slurm import ComponentState, Slurm, SlurmError
from miles_hpc.cluster.slurm_states import JobState
from tests.slurm.conftest import fresh_box, settle, until
from tests.slurm.test_submit import Launch
from tools.slurm_box import Box, BoxSpec

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(170)]

#: What supervisors do here: begin an attempt, wait for `go`, write the outcome that `go` holds, end with its code.
SUPERVISOR = """
    import os, sys, time
    from pathlib import Path
    from miles_hpc.cluster.chain import AttemptStart, Progress, record_outcome, record_start
    from miles_hpc.core.paths import RunPaths
    paths = RunPaths(Path(sys.argv[1]))
    number = 1 + len(list(paths.attempts.glob("[0-9]*")))
    paths.attempt(number).mkdir()
    job_id = int(os.environ["SLURM_JOB_ID"])
    record_start(paths, AttemptStart(attempt=number, job_id=job_id, time=time.time(), progress=Progress()))
    print("attempt", number, flush=True)
    end = time.monotonic() + 150
    while not (paths.root / "go").exists() and time.monotonic() < end:
        time.sleep(0.05)
    outcome, code = (paths.root / "go").read_text().split()
    record_outcome(paths, number, outcome, "because")
    sys.exit(int(code))
"""


@pytest.fixture(scope="module", params=["without accounting", "with accounting"])
def het_box(request: pytest.FixtureRequest) -> Iterator[Box]:
    spec = BoxSpec.parse("trainer:2,rollout:3,sandbox:1", accounting=request.param == "with accounting")
    with fresh_box(spec) as box:
        yield box


@pytest.fixture
def launch(het_box: Box, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launch]:
    settle(het_box)
    yield Launch(tmp_path, het_box, monkeypatch)
    settle(het_box)


def begun(launch: Launch, *options: str) -> RunJob:
    launch.submit(SUPERVISOR, *options)
    job = RunJob.open(launch.paths, "tiny", launch.slurm)
    assert job is not None
    until(lambda: "attempt 1" in launch.output(), f"the supervisor to begin: {job.status()}", 60.0)
    return job


def go(launch: Launch, outcome: str, code: int) -> None:
    (launch.paths.root / "go.tmp").write_text(f"{outcome} {code}")
    (launch.paths.root / "go.tmp").rename(launch.paths.root / "go")


@pytest.mark.parametrize(("outcome", "code"), [("completed", 0), ("continue", 10)])
def test_what_a_run_job_returns(launch: Launch, outcome: str, code: int) -> None:
    job = begun(launch)
    assert job.state() is JobState.RUNNING
    assert (job.name, job.stdout_path.read_text().splitlines()[0]) == ("tiny", "attempt 1")
    assert job.submitted is not None and abs(time.time() - job.submitted) < 100
    go(launch, outcome, code)
    assert job.result(60.0)["outcome"] == outcome
    assert (job.state(), job.exception()) == (JobState.COMPLETED, None)


def test_a_failed_and_a_cancelled_one(launch: Launch) -> None:
    job = begun(launch)
    since = time.monotonic()
    job.cancel()
    until(job.done, "its end")
    print(f"{job.status()} seen after {time.monotonic() - since:.1f} s")
    assert job.state() is JobState.CANCELLED
    assert len(launch.slurm.components(int(job.id))) == 3
    with pytest.raises(JobFailed, match="CANCELLED"):
        job.result(1.0)
    job.cancel()
    recorded = launch.box.spec()
    assert recorded is not None
    if recorded.accounting:  # what is left when slurmctld has forgotten it; at first under the name "allocation"
        until(lambda: len(by_sacct(launch, job)) == 3 and by_sacct(launch, job)[0][1] != "allocation", "sacct to know")
        assert by_sacct(launch, job) == [
            (0, "tiny-trainer", "CANCELLED"),
            (1, "tiny-rollout", "CANCELLED"),
            (2, "tiny-sandbox", "CANCELLED"),
        ]
        assert judge(look(Forgetful(launch.slurm), int(job.id), job.name)).state is JobState.CANCELLED
    else:
        assert by_sacct(launch, job) == []


def by_sacct(launch: Launch, job: RunJob) -> list[tuple[int, str, str]]:
    """Offset, name and state of each component by accounting; nothing without."""
    try:
        return [(one.offset, one.name, one.state) for one in launch.slurm.accounting([int(job.id)])]
    except SlurmError:
        return []


class Forgetful:
    """A slurmctld that has forgotten its jobs, beside the accounting that hasn't."""

    def __init__(self, slurm: Slurm) -> None:
        self.accounting, self.cancel = slurm.accounting, slurm.cancel

    def components(self, job_id: int) -> list[ComponentState]:
        return []


def test_a_lost_node_puts_it_back_into_the_queue(launch: Launch) -> None:
    job = begun(launch)
    lost = next(c.nodes for c in launch.slurm.components(int(job.id)) if c.name == "tiny-rollout")
    launch.box.kill_node("rollout1" if "1" in lost else "rollout2")
    until(lambda: "attempt 2" in launch.output(), f"the second attempt: {job.status()}", 90.0)
    assert job.state() is JobState.RUNNING
    go(launch, "failed", 1)
    with pytest.raises(JobFailed, match="FAILED: because"):
        job.result(60.0)
