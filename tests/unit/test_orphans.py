"""Jobs that outlive their batch host: what agents do when they are alone."""

from __future__ import annotations

import pytest

from miles_hpc.cluster.orphans import batch_host, release_orphaned_job
from miles_hpc.cluster.slurm import SlurmError
from tests.fakes.fake_slurm import FakeSlurm

JOB = "#!/bin/bash\n#SBATCH --job-name=a\n#SBATCH hetjob\n#SBATCH --job-name=b\n"


@pytest.mark.parametrize(
    ("environ", "host"),
    [
        ({}, ""),
        ({"SLURM_JOB_NODELIST": "a[3-4],b1"}, "a3"),
        ({"SLURM_JOB_NODELIST": "r1", "SLURM_JOB_NODELIST_HET_GROUP_0": "t[01-02]"}, "t01"),
    ],
)
def test_the_batch_host(environ: dict[str, str], host: str) -> None:
    assert batch_host(environ) == host


def release(slurm: FakeSlurm, job: int, *, requeue: bool = True, over: bool = False, down_after: int = 0) -> str:
    looks = 0

    def sleep(seconds: float) -> None:
        nonlocal looks
        looks += 1
        if looks == down_after:
            slurm.down["t1"] = "down: power"
        if looks > 5:
            slurm.now += 1e9

    return release_orphaned_job(
        slurm, job, "t1", requeue=requeue, over=lambda: over or looks > 5, wait_s=60, sleep=sleep
    )


def test_the_job_goes_back_once_slurm_has_given_the_host_up() -> None:
    slurm = FakeSlurm()
    job = slurm.submit(JOB)
    slurm.start(job, ["t[1-2]", "r1"], limit_s=60)
    assert release(slurm, job, down_after=2) == f"batch host t1 is down: power: job {job} requeued"
    assert (slurm.state(job)[0], slurm.components(job)[0].restarts) == ("PENDING", 1)


def test_without_requeue_the_follow_up_gets_its_turn() -> None:
    slurm = FakeSlurm(down={"t1": "down"})
    job = slurm.submit(JOB)
    assert release(slurm, job, requeue=False).endswith("cancelled, for its follow-up")
    assert slurm.state(job)[0] == "CANCELLED"


def test_a_host_that_is_up_and_a_run_that_others_took_on_are_left_alone() -> None:
    slurm = FakeSlurm()
    job = slurm.submit(JOB)
    slurm.start(job, ["t[1-2]", "r1"], limit_s=60)
    assert release(slurm, job) == ""
    slurm.down["t1"] = "down"
    assert release(slurm, job, over=True) == ""
    assert slurm.state(job)[0] == "RUNNING"


def test_another_agent_was_first() -> None:
    class Second(FakeSlurm):
        def requeue(self, leader: int) -> None:
            raise SlurmError("scontrol requeue 7: Job is pending execution")

    slurm = Second(down={"t1": "down"})
    assert release(slurm, slurm.submit(JOB)) == ""
