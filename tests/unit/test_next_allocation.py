"""What the supervisor asks Slurm for at the start and at the end of an allocation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest

from miles_hpc.cluster.chain import is_cancelled, set_cancelled
from miles_hpc.cluster.next_allocation import Chain
from miles_hpc.cluster.slurm import SlurmError
from miles_hpc.cluster.submit import job_before, prepare, read_follow_up, read_job, submit_prepared
from miles_hpc.core import exits
from miles_hpc.core.config import RunConfig, SiteConfig
from miles_hpc.core.errors import UserError
from miles_hpc.core.paths import RunPaths
from tests.fakes.fake_slurm import FakeSlurm
from tests.unit.runs import make_run, make_site

JOB = "#!/bin/bash\n#SBATCH --job-name=a\n"
FOLLOW = msgspec.structs.replace(make_site(), requeue=False)


class Moody(FakeSlurm):
    """Away for a number of requests; refuses to leave nodes out when told so; `meanwhile` happens at a hand-in."""

    absences = 0
    too_few = False
    slept = 0
    meanwhile: Callable[[], None] | None = None

    def sleep(self, seconds: float) -> None:
        self.slept += 1

    def _answer(self, what: str) -> None:
        if self.absences:
            self.absences -= 1
            raise SlurmError(f"{what}: Unable to contact slurm controller (connect failure)")

    def submit(self, script: str | Path, *, dependency: str = "", exclude: Sequence[str] = ()) -> int:
        self._answer("sbatch")
        if exclude and self.too_few:
            raise UserError("Slurm refused the job: sbatch: Requested node configuration is not available")
        job_id = super().submit(script, dependency=dependency, exclude=exclude)
        if self.meanwhile is not None:
            self.meanwhile()
        return job_id

    def requeue(self, leader: int) -> None:
        self._answer("scontrol requeue")
        super().requeue(leader)

    def cancel(self, job_id: int, *, signal: str = "") -> None:
        self._answer("scancel")
        super().cancel(job_id, signal=signal)


class Allocation:
    """A submitted run whose job runs."""

    def __init__(self, root: Path, site: SiteConfig, run: RunConfig | None = None) -> None:
        self.run, self.site, self.paths, self.slurm = run or make_run(), site, RunPaths(root / "run"), Moody()
        prepare(self.run, site, self.paths, source="x", job_text=JOB)
        self.job = submit_prepared(self.paths, self.slurm)
        self.slurm.start(self.job, ["n1"], limit_s=600)
        self.attempt = 0

    def begin(self, job: int | None = None, *, patience_s: float = 60.0) -> tuple[Chain, str]:
        self.attempt += 1
        self.paths.attempt(self.attempt).mkdir()
        chain = Chain(
            self.run,
            self.site,
            self.paths,
            self.slurm,  # type: ignore[arg-type]
            job or self.job,
            self.attempt,
            patience_s=patience_s,
            sleep=self.slurm.sleep,
        )
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


def test_a_follow_up_that_the_queue_lost_is_asked_for_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = Allocation(tmp_path, FOLLOW)
    chain, _ = one.begin()
    chain.look()
    lost = read_follow_up(one.paths)
    assert lost is not None and len(one.slurm.submitted) == 2  # it waits: nothing is done
    del one.slurm.jobs[lost]
    one.slurm.absences = 2
    chain.look()
    chain.look()
    assert capsys.readouterr().err.count("asked again later") == 1  # told once
    chain.look()
    again = read_follow_up(one.paths)
    assert again not in (None, lost) and len(one.slurm.submitted) == 3
    chain.end(exits.NEXT_ALLOCATION, "", terminated=False)
    chain.next()
    assert (chain.outlook(), len(one.slurm.submitted)) == (f"next allocation is job {again}", 3)


@pytest.mark.parametrize("how", ["scancel", "miles-hpc cancel", "halted", "last"])
def test_a_look_asks_for_none_where_none_is_wanted(tmp_path: Path, how: str) -> None:
    one = Allocation(tmp_path, FOLLOW, make_run(f"job.max_allocations={1 if how == 'last' else 9}"))
    chain, _ = one.begin()
    follower, before = read_follow_up(one.paths), len(one.slurm.submitted)
    if how == "scancel":
        assert follower is not None
        one.slurm.finish(follower, "CANCELLED")
        chain.look()
    elif how == "miles-hpc cancel":
        set_cancelled(one.paths, True)
    elif how == "halted":
        chain.end(exits.DONE, "", terminated=False)
    if follower is not None:
        one.slurm.jobs[follower] = []  # forgotten, after some minutes
    chain.look()
    if how != "halted":
        chain.end(exits.NEXT_ALLOCATION, "", terminated=False)
        chain.next()
    assert (len(one.slurm.submitted), chain.outlook()) == (before, "no next allocation")


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
    class Refusing(Moody):
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
    one.slurm.finish(one.job, "CANCELLED")
    submit_prepared(one.paths, one.slurm)
    assert not is_cancelled(one.paths)
    few = Allocation(tmp_path / "2", make_site(), make_run("job.max_allocations=1"))
    few.begin()
    assert few.begin()[1] == ""  # a supervisor that takes over in the same allocation
    assert few.begin(few.job + 1)[1].startswith("allocation 1 was the last of job.max_allocations = 1")


def test_supervisors_that_take_over_use_up_no_allocations(tmp_path: Path) -> None:
    one = Allocation(tmp_path, FOLLOW, make_run("job.max_allocations=2", "job.max_idle_allocations=9"))
    for _ in range(3):
        chain, why = one.begin()
        assert why == ""
    follower = read_follow_up(one.paths)
    assert follower is not None
    one.slurm.finish(one.job, "TIMEOUT")
    chain, why = one.begin(follower)
    assert (why, read_follow_up(one.paths)) == ("", None)  # the second is the last
    chain.end(exits.NEXT_ALLOCATION, "", terminated=False)
    assert not chain._wanted


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


@pytest.mark.parametrize("requeue", [False, True])
def test_slurmctld_is_away_at_the_end(tmp_path: Path, requeue: bool, capsys: pytest.CaptureFixture[str]) -> None:
    one = Allocation(tmp_path, make_site() if requeue else FOLLOW)
    one.slurm.absences = 0 if requeue else 1
    chain, why = one.begin()
    assert (why, read_follow_up(one.paths)) == ("", None)  # away at the start as well: no reason to give up
    one.slurm.absences = 3
    chain.end(exits.NEXT_ALLOCATION, "", terminated=False)
    chain.next()
    assert one.slurm.slept == 3
    assert capsys.readouterr().err.count("asking again for up to 60 s") == 1
    if requeue:
        assert one.slurm.components(one.job)[0].restarts == 1
    else:
        assert one.slurm.dependencies[-1] == f"afterany:{one.job}"
        assert read_follow_up(one.paths) == max(one.slurm.jobs)


@pytest.mark.parametrize("requeue", [False, True])
def test_patience_ends_and_the_end_of_the_chain_is_said(tmp_path: Path, requeue: bool) -> None:
    one = Allocation(tmp_path, make_site() if requeue else FOLLOW)
    one.slurm.absences = 10**6
    chain, _ = one.begin(patience_s=0.0)
    chain.end(exits.NEXT_ALLOCATION, "", terminated=False)
    chain.next()
    outcome = msgspec.json.decode(one.paths.outcome(1).read_bytes())
    assert outcome["outcome"] == "stopped"
    assert "Unable to contact slurm controller" in outcome["reason"] and "resume" in outcome["reason"]


def test_a_cancel_ends_the_waiting(tmp_path: Path) -> None:
    one = Allocation(tmp_path, make_site())
    chain, _ = one.begin()
    chain.end(exits.NEXT_ALLOCATION, "", terminated=False)
    one.slurm.absences = 10**6
    one.slurm.sleep = lambda seconds: set_cancelled(one.paths, True)  # type: ignore[method-assign]
    chain._sleep = one.slurm.sleep
    chain.next()
    assert (one.slurm.state(one.job), len(one.slurm.submitted)) == (["RUNNING"], 1)


def test_scancel_between_the_decision_and_the_requeue(tmp_path: Path) -> None:
    one = Allocation(tmp_path, make_site())
    chain, _ = one.begin()
    chain.end(exits.NEXT_ALLOCATION, "", terminated=False)
    one.paths.output(one.job).write_text("error: *** JOB 1 ON n1 CANCELLED AT 2026-11-30T02:53:31 ***\n")
    chain.next()
    assert one.slurm.components(one.job)[0].restarts == 0
    assert msgspec.json.decode(one.paths.outcome(1).read_bytes())["reason"] == "the job was cancelled"


def test_a_cancel_that_comes_while_the_follow_up_is_handed_in(tmp_path: Path) -> None:
    one = Allocation(tmp_path, FOLLOW)
    one.slurm.meanwhile = lambda: set_cancelled(one.paths, True)
    one.begin()
    assert one.slurm.state(max(one.slurm.jobs)) == ["CANCELLED"]


def test_too_few_nodes_are_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = Allocation(tmp_path, FOLLOW)
    chain, _ = one.begin()
    first = read_follow_up(one.paths)
    assert first is not None
    chain.end(exits.NEXT_ALLOCATION, "", terminated=False)
    chain.note_nodes({"n7": "started again 3 times"})
    one.slurm.too_few = True
    chain.next()
    second = read_follow_up(one.paths)
    assert second not in (None, first) and one.slurm.excluded[-1] == ()
    assert (one.slurm.state(first), one.slurm.state(second)) == (["CANCELLED"], ["PENDING"])  # type: ignore[arg-type]
    assert "handing it in without --exclude" in capsys.readouterr().err


def test_a_follow_up_that_knows_of_the_bad_nodes_keeps_its_place_in_the_queue(tmp_path: Path) -> None:
    one = Allocation(tmp_path, FOLLOW)
    one.paths.bad_nodes.write_text('[{"node": "n7", "reason": "ECC", "attempt": 1, "time": 1.0}]')
    one.end(exits.NEXT_ALLOCATION)
    assert (one.slurm.excluded[1:], len(one.slurm.submitted)) == ([("n7",)], 2)


@pytest.mark.parametrize("text", ["", "{", "[1]", '[{"node": "n7"}]'])
@pytest.mark.parametrize("requeue", [False, True])
def test_a_list_of_bad_nodes_that_cant_be_read_ends_no_chain(tmp_path: Path, text: str, requeue: bool) -> None:
    one = Allocation(tmp_path, make_site() if requeue else FOLLOW)
    one.paths.bad_nodes.write_text(text)
    one.end(exits.NEXT_ALLOCATION)
    goes_on = one.slurm.state(one.job) == ["PENDING"] if requeue else read_follow_up(one.paths) is not None
    assert goes_on and not one.paths.outcome(1).exists()


@pytest.mark.parametrize(
    ("fate", "another"), [("CANCELLED", False), ("NODE_FAIL", True), ("forgotten", True), ("PENDING", False)]
)
def test_a_follow_up_that_is_gone_at_the_end(tmp_path: Path, fate: str, another: bool) -> None:
    one = Allocation(tmp_path, FOLLOW)
    chain, _ = one.begin()
    follower = read_follow_up(one.paths)
    assert follower is not None
    if fate == "forgotten":
        one.slurm.forget(follower)
    else:
        one.slurm.finish(follower, fate)
    chain.end(exits.NEXT_ALLOCATION, "", terminated=False)
    chain.next()
    assert (read_follow_up(one.paths) != follower) == another
    assert one.paths.outcome(1).exists() == (fate == "CANCELLED")


def test_a_follow_up_that_nobody_noted(tmp_path: Path) -> None:
    """A supervisor was killed between sbatch and job.json, and the one after it handed in another."""
    one = Allocation(tmp_path, FOLLOW)
    lost = one.slurm.submit(JOB, dependency=f"afterany:{one.job}")
    one.begin()
    noted = read_follow_up(one.paths)
    assert noted is not None
    one.slurm.finish(one.job, "TIMEOUT")
    one.slurm.start(lost, ["n1"], limit_s=600)
    assert job_before(one.paths, one.slurm, lost) == noted
    assert job_before(one.paths, one.slurm, noted) is None
    one.slurm.finish(noted, "NODE_FAIL")  # then the lost one is what is left
    assert job_before(one.paths, one.slurm, lost) is None
    one.begin(lost)
    assert read_job(one.paths) == lost


def test_no_follow_up_is_queued_when_the_note_cant_be_read(tmp_path: Path) -> None:
    one = Allocation(tmp_path, FOLLOW)
    chain, _ = one.begin()
    one.paths.job.write_text("")
    chain.end(exits.NEXT_ALLOCATION, "", terminated=False)
    chain.next()
    assert len(one.slurm.submitted) == 2
    assert "job.json: can't be read" in msgspec.json.decode(one.paths.outcome(1).read_bytes())["reason"]
