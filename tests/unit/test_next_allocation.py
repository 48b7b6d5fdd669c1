"""What the supervisor asks Slurm for at the start and at the end of an allocation."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from miles_hpc.cluster.chain import is_cancelled, set_cancelled
from miles_hpc.cluster.next_allocation import Chain
from miles_hpc.cluster.slurm import SlurmError
from miles_hpc.cluster.submit import prepare, read_follow_up, read_job, submit_prepared
from miles_hpc.core import exits
from miles_hpc.core.config import RunConfig, SiteConfig
from miles_hpc.core.paths import RunPaths
from tests.fakes.fake_slurm import FakeSlurm
from tests.unit.runs import make_run, make_site

JOB = "#!/bin/bash\n#SBATCH --job-name=a\n"
FOLLOW = msgspec.structs.replace(make_site(), requeue=False)


class Allocation:
    """A submitted run whose job runs."""

    def __init__(self, root: Path, site: SiteConfig, run: RunConfig | None = None) -> None:
        self.run, self.site, self.paths, self.slurm = run or make_run(), site, RunPaths(root / "run"), FakeSlurm()
        prepare(self.run, site, self.paths, source="x", job_text=JOB)
        self.job = submit_prepared(self.paths, self.slurm)
        self.slurm.start(self.job, ["n1"], limit_s=600)
        self.attempt = 0

    def begin(self, job: int | None = None) -> tuple[Chain, str]:
        self.attempt += 1
        self.paths.attempt(self.attempt).mkdir()
        chain = Chain(self.run, self.site, self.paths, self.slurm, job or self.job, self.attempt)  # type: ignore[arg-type]
        return chain, chain.begin()

    def end(self, code: int, *, job: int | None = None, terminated: bool = False, reason: str = "") -> None:
        chain, why = self.begin(job)
        assert why == ""
        chain.end(code, reason, terminated=terminated)
        chain.next()


def test_where_the_site_lets_users_requeue(tmp_path: Path) -> None:
    one = Allocation(tmp_path, make_site())
    one.end(exits.NEXT_ALLOCATION)
    assert (one.slurm.state(one.job), read_follow_up(one.paths), len(one.slurm.submitted)) == (["PENDING"], None, 1)


def test_elsewhere_the_follow_up_waits_from_the_start(tmp_path: Path) -> None:
    one = Allocation(tmp_path, FOLLOW)
    chain, _ = one.begin()
    follower = read_follow_up(one.paths)
    assert follower is not None and one.slurm.dependencies[-1] == f"afterany:{one.job}"
    chain.end(exits.NEXT_ALLOCATION, "", terminated=False)
    chain.next()
    assert (read_follow_up(one.paths), one.slurm.state(follower)) == (follower, ["PENDING"])
    one.slurm.finish(one.job, "TIMEOUT")
    one.begin(follower)
    assert read_job(one.paths) == follower
    assert read_follow_up(one.paths) not in (None, follower)


def test_a_supervisor_that_takes_over_hands_in_no_second_follow_up(tmp_path: Path) -> None:
    one = Allocation(tmp_path, FOLLOW)
    one.begin()
    one.begin()
    assert len(one.slurm.submitted) == 2


@pytest.mark.parametrize("code", [exits.DONE, exits.USER_ERROR, exits.FAILED])
def test_a_run_that_is_over_takes_its_follow_up_along(tmp_path: Path, code: int) -> None:
    one = Allocation(tmp_path, FOLLOW)
    one.end(code, reason="why")
    follower = max(one.slurm.jobs)
    assert (one.slurm.state(follower), read_follow_up(one.paths)) == (["CANCELLED"], None)


@pytest.mark.parametrize(
    ("cause", "goes_on"),
    [
        ("", False),
        (" DUE TO TIME LIMIT", True),
        (" DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS", True),
        (" DUE TO PREEMPTION", True),
        (None, True),  # the output is elsewhere
    ],
)
@pytest.mark.parametrize("requeue", [False, True])
def test_of_all_that_sends_sigterm_only_the_owner_ends_the_chain(
    tmp_path: Path, cause: str | None, goes_on: bool, requeue: bool
) -> None:
    one = Allocation(tmp_path, make_site() if requeue else FOLLOW)
    one.paths.output(one.job).write_text("*** JOB 1 ON n1 CANCELLED AT 2026-01-01T00:00:00 ***\n")  # an earlier start's
    chain, _ = one.begin()
    if cause is not None:
        with one.paths.output(one.job).open("a") as file:
            file.write(f"slurmstepd-n1: error: *** JOB 1 ON n1 CANCELLED AT 2026-11-30T02:53:31{cause} ***\n")
    chain.end(exits.NEXT_ALLOCATION, "ended from outside", terminated=True)
    chain.next()
    if requeue:  # after a lost node or a preemption Slurm does it, and asking again would be refused
        asked = goes_on and (cause is None or "TIME" in cause)
        assert (one.slurm.components(one.job)[0].restarts, len(one.slurm.submitted)) == (int(asked), 1)
    else:
        assert (read_follow_up(one.paths) is not None) == goes_on
    assert one.paths.outcome(1).exists() == (not goes_on)


def test_a_refused_requeue_becomes_a_follow_up(tmp_path: Path) -> None:
    class Refusing(FakeSlurm):
        def requeue(self, leader: int) -> None:
            raise SlurmError("scontrol requeue: Requested operation is presently disabled")

    one = Allocation(tmp_path, make_site())
    one.slurm = Refusing(jobs=one.slurm.jobs, _next_id=50)
    one.end(exits.NEXT_ALLOCATION)
    assert (one.slurm.dependencies, read_follow_up(one.paths)) == ([f"afterany:{one.job}"], 50)


def test_nodes_that_made_trouble_are_left_out_by_a_job_of_its_own(tmp_path: Path) -> None:
    one = Allocation(tmp_path, make_site())
    chain, _ = one.begin()
    chain.end(exits.NEXT_ALLOCATION, "", terminated=False)
    chain.note_nodes({"n7": "started again 3 times"})
    chain.next()
    assert (one.slurm.excluded[-1], one.slurm.state(one.job)) == (("n7",), ["RUNNING"])
    forbidding = msgspec.structs.replace(
        make_site(), sbatch=msgspec.structs.replace(make_site().sbatch, exclude_allowed=False)
    )
    two = Allocation(tmp_path / "2", forbidding)
    chain, _ = two.begin()
    chain.end(exits.NEXT_ALLOCATION, "", terminated=False)
    chain.note_nodes({"n7": "started again 3 times"})
    chain.next()
    assert (len(two.slurm.submitted), two.slurm.state(two.job)) == (1, ["PENDING"])


def test_what_must_not_start(tmp_path: Path) -> None:
    one = Allocation(tmp_path, make_site())
    set_cancelled(one.paths, True)
    assert one.begin()[1] == "the run was cancelled: 'miles-hpc resume' goes on"
    submit_prepared(one.paths, one.slurm)
    assert not is_cancelled(one.paths)
    few = Allocation(tmp_path / "2", make_site(), make_run("job.max_allocations=1"))
    few.begin()
    assert few.begin()[1].startswith("allocation 1 was the last of job.max_allocations = 1")


def test_a_chain_without_progress_stops_at_the_end_and_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = Allocation(tmp_path, FOLLOW)
    one.end(exits.NEXT_ALLOCATION)
    second = read_follow_up(one.paths)
    assert second is not None
    one.end(exits.NEXT_ALLOCATION, job=second, reason="no trainer")
    assert read_follow_up(one.paths) is None
    outcome = msgspec.json.decode(one.paths.outcome(2).read_bytes())
    assert outcome["outcome"] == "stopped"
    assert outcome["reason"].startswith("2 allocations in a row made no progress: the run stands before its first")
    assert outcome["reason"].endswith("this one ended with: no trainer")
    assert "no next allocation: 2 allocations in a row" in capsys.readouterr().out
