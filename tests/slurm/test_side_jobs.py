"""Side jobs and the run's own job on a real Slurm, with and without accounting: how each of them ends, and how soon."""

from __future__ import annotations

import json
import pickletools
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from miles_hpc.cli.main import main
from miles_hpc.cluster.jobs import JobFailed
from miles_hpc.cluster.side_jobs import SideJob, list_side_jobs, submit_side_job
from miles_hpc.cluster.side_plan import SideRequest
from miles_hpc.cluster.slurm import Slurm
from miles_hpc.cluster.slurm_states import JobState
from miles_hpc.cluster.submit import prepare
from miles_hpc.core.errors import DeadlineExpired, UserError
from miles_hpc.core.paths import RunPaths
from tests.slurm import side_probe
from tests.slurm.conftest import fresh_box, settle, until
from tests.unit.runs import make_run, make_site
from tools.slurm_box import Box, BoxSpec
from tools.slurm_box.daemons import daemon

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(170)]

#: From the event to the handle's word of it. Slurm itself needs a second or two; the machine may be busy.
SOON_S = 20.0


@pytest.fixture(scope="module", params=["without accounting", "with accounting"])
def side_box(request: pytest.FixtureRequest) -> Iterator[Box]:
    spec = BoxSpec.parse("trainer:2,rollout:1,sandbox:1", accounting=request.param == "with accounting")
    with fresh_box(spec) as box:
        yield box


class Beside:
    """A prepared run on the box, and side jobs of it."""

    def __init__(self, folder: Path, box: Box, *, requeue: bool = True) -> None:
        folder = folder / "my runs"  # a space, which every layer has to quote
        own = folder / "own"
        own.mkdir(parents=True)
        shutil.copy(side_probe.__file__, own / "side_probe.py")
        self.folder, self.box = folder, box
        self.slurm = Slurm(environ=box.env(), timeout_s=20.0)
        self.run = make_run(f'python_path=["{own}"]')
        self.site = msgspec.structs.replace(make_site(), requeue=requeue)
        self.paths = RunPaths(folder / "run")
        prepare(self.run, self.site, self.paths, source="")

    def start(self, function: str, roles: tuple[str, ...] = ("trainer",), **fields: Any) -> SideJob:
        arguments = fields.pop("arguments", {})
        request = SideRequest(
            name="probe", function=f"side_probe:{function}", roles=roles, arguments=arguments, **fields
        )
        return submit_side_job(self.run, self.site, self.paths, request, slurm=self.slurm)

    def start_waiting(self, name: str, **fields: Any) -> tuple[SideJob, Path]:
        """A job that has begun and waits for <returned path>.go."""
        mark = self.folder / name
        job = self.start("wait_for", arguments={"mark": str(mark)}, **fields)
        until(lambda: self.begun(mark), f"{name} to begin: {job.status()}", 60.0)
        return job, mark

    def begun(self, mark: Path) -> list[list[str]]:
        """pid and node of each start."""
        path = Path(f"{mark}.begun")
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def beside(side_box: Box, tmp_path: Path) -> Iterator[Beside]:
    settle(side_box)
    yield Beside(tmp_path, side_box)
    settle(side_box)


def ends(job: SideJob, since: float) -> tuple[JobState, str]:
    """State and reason at the end, which must come soon after `since`, a monotonic time."""
    until(job.done, f"the end of job {job.id}: {job.status()}", SOON_S + 10.0)
    took = time.monotonic() - since
    status = job.status()
    print(f"{status.state} seen after {took:.1f} s by {status.witness}: {status.reason}")
    assert took < SOON_S
    return status.state, status.reason


def test_a_result_comes_back(beside: Beside) -> None:
    job = beside.start("tell", arguments={"x": 7})
    value = job.result(60.0)
    assert (value["x"], value["conf"]) == (7, True)
    assert value["node"].startswith("trainer")
    assert (job.state(), job.exception()) == (JobState.COMPLETED, None)
    assert "told 7" in job.stdout_path.read_text()
    assert job.folder.root.stat().st_mode & 0o777 == 0o700
    # What submitit unpickles on the node names this project's function, and a folder.
    pickled = (job.folder.root / f"{job.id}_submitted.pkl").read_bytes()
    strings = [arg for _, arg, _ in pickletools.genops(pickled) if isinstance(arg, str)]
    assert {"miles_hpc.cluster.side_call", "run_call", str(job.folder.root)} <= set(strings)
    assert {s for s in strings if s.endswith("_probe")} == set()
    # Another process finds it as it is.
    again = list_side_jobs(beside.paths, beside.slurm)[0]
    assert (again.id, again.name, again.result(1.0)) == (job.id, "probe", value)


def test_a_sweep_has_a_task_on_every_node(beside: Beside) -> None:
    job = beside.start("tell", nodes=2, mpi=True)
    assert sorted(value["node"] for value in job.result(60.0)) == ["trainer1", "trainer2"]


def test_what_a_function_raises_is_the_reason(beside: Beside) -> None:
    since = time.monotonic()
    job = beside.start("fail")
    assert ends(job, since) == (JobState.FAILED, "ValueError: no good")
    with pytest.raises(JobFailed, match="no good"):
        job.result(1.0)
    odd = beside.start("odd")
    assert "JSON" in str(odd.exception() if odd.done() else wait(odd))


def wait(job: SideJob) -> JobFailed | None:
    with pytest.raises(JobFailed) as failed:
        job.result(60.0)
    return failed.value


def test_a_killed_task_is_a_failure(beside: Beside) -> None:
    """It leaves no result, of which submitit without accounting would never hear."""
    since = time.monotonic()
    state, reason = ends(beside.start("die"), since)
    assert state is JobState.FAILED
    assert "SIGKILL" in reason and "no result of task 0" in reason


def test_cancelled(beside: Beside) -> None:
    job, _ = beside.start_waiting("one")
    with pytest.raises(DeadlineExpired, match="last seen RUNNING"):
        job.result(0.3)
    since = time.monotonic()
    job.cancel()
    assert ends(job, since)[0] is JobState.CANCELLED
    assert time.monotonic() - since < 10.0, "sooner than KillWait, which is 15 s here"
    job.cancel()  # of one that has ended: nothing

    nodes, _ = beside.start_waiting("both", nodes=2)
    queued = beside.start("tell")
    until(lambda: queued.state() is JobState.QUEUED, "the job to wait")
    since = time.monotonic()
    queued.cancel()
    assert ends(queued, since)[0] is JobState.CANCELLED
    nodes.cancel()


def test_a_lost_node(beside: Beside) -> None:
    job, _ = beside.start_waiting("one", roles=("rollout",))
    job_with, mark = beside.start_waiting("two")
    beside.site = msgspec.structs.replace(beside.site, requeue=False)
    job_without, _ = beside.start_waiting("three", roles=("sandbox",))
    since = time.monotonic()
    beside.box.kill_node("sandbox1")
    state, reason = ends(job_without, since)
    assert (state, "sandbox1" in reason) == (JobState.NODE_FAIL, True)
    assert job.state() is JobState.RUNNING

    # With requeue it isn't an end: the job starts again on the other node.
    beside.box.kill_node(beside.begun(mark)[0][1])
    until(lambda: len(beside.begun(mark)) == 2, "the second start", 60.0)
    assert beside.begun(mark)[0][1] != beside.begun(mark)[1][1]
    Path(f"{mark}.go").touch()
    assert job_with.result(60.0) == "went"


def test_preempted(beside: Beside) -> None:
    """Long before its limit USR2 means that: back into the queue, and again from the beginning."""
    job, mark = beside.start_waiting("one")
    beside.box.run("scancel", "--signal=USR2", job.id)
    until(lambda: len(beside.begun(mark)) == 2, f"the second start: {job.status()}", 60.0)
    assert job.state() is JobState.RUNNING
    Path(f"{mark}.go").touch()
    assert job.result(30.0) == "went"


@pytest.mark.parametrize("accounting", [False, True])
def test_slurmctld_is_away(accounting: bool, tmp_path: Path) -> None:
    """On a box of its own: Slurm takes a minute to clean up after a job whose end nobody heard of."""
    with fresh_box(BoxSpec.parse("trainer:1", accounting=accounting)) as box:
        beside = Beside(tmp_path, box)
        job, mark = beside.start_waiting("one")
        killed, _ = beside.start_waiting("two")
        process = daemon(box.root, "slurmctld")
        assert process is not None
        process.kill(signal.SIGTERM)  # it saves its state; killed outright it may lose a job of the last seconds
        until(lambda: not process.alive, "slurmctld to be gone")
        since = time.monotonic()
        status = killed.status()
        print(f"UNKNOWN after {time.monotonic() - since:.1f} s: {status.reason}")
        assert status.state is JobState.UNKNOWN and "no answer" in status.reason and not status.forgotten
        with pytest.raises(DeadlineExpired, match="last seen UNKNOWN"):
            killed.result(0.2)
        # A result is evidence enough.
        Path(f"{mark}.go").touch()
        assert job.result(30.0) == "went"
        box.up()
        until(lambda: killed.state() is JobState.RUNNING, "Slurm to answer again")
        since = time.monotonic()
        killed.cancel()
        assert ends(killed, since)[0] is JobState.CANCELLED


@pytest.mark.slow
@pytest.mark.lifecycle
@pytest.mark.timeout(420)
def test_the_time_limit(beside: Beside) -> None:
    """Slurm looks every 30 s: a limit of a minute ends between 60 and 90 s, and is signalled early by as much."""
    # Two minutes, so that at least 30 s lie between signal and limit: a busy machine needs some to store a result.
    plain = beside.start("wait_for", arguments={"mark": str(beside.folder / "never"), "seconds": 300.0}, time="2")
    stubborn = beside.start("stubborn", arguments={"seconds": 160.0}, time="1")
    again, mark = beside.start_waiting("again", time="1", start_again=True)
    until(stubborn.done, f"the limit: {stubborn.status()}", 150.0)
    assert stubborn.state() is JobState.TIMEOUT
    assert stubborn.status().reason == "the time limit was reached"
    assert "ignored UncompletedJobError" in stubborn.stdout_path.read_text()
    until(plain.done, f"the signal: {plain.status()}", 150.0)
    status = plain.status()
    assert (status.state, status.witness) == (JobState.TIMEOUT, "result")
    assert "timed-out" in status.reason
    # One that asked for it goes back into the queue instead, under the same id.
    until(lambda: len(beside.begun(mark)) > 1, f"the second start: {again.status()}", 60.0)
    Path(f"{mark}.go").touch()
    assert again.result(30.0) == "went"


@pytest.mark.slow
@pytest.mark.lifecycle
def test_slurmctld_forgets(beside: Beside) -> None:
    accounting = beside.box.spec()
    assert accounting is not None
    seen = beside.start("die")
    until(seen.done, "the first end")
    unseen = beside.start("die")
    until(lambda: beside.slurm.state(int(unseen.id)) == ["FAILED"], "the second end")
    conf = beside.box.root / "slurm.conf"
    text = conf.read_text()
    conf.write_text(text.replace("MinJobAge=600", "MinJobAge=2"))
    try:
        beside.box.run("scontrol", "reconfigure")
        until(lambda: beside.slurm.components(int(unseen.id)) == [], "slurmctld to forget", 140.0)
    finally:
        conf.write_text(text)
        beside.box.run("scontrol", "reconfigure")
    assert seen.status().state is JobState.FAILED, "kept in the folder"
    status = unseen.status()
    if accounting.accounting:
        assert (status.state, status.witness) == (JobState.FAILED, "sacct")
        assert "exit code 9, and there is no result of task 0" in status.reason
    else:
        assert (status.state, status.forgotten) == (JobState.UNKNOWN, True)


def test_bad_requests_leave_nothing_behind(beside: Beside) -> None:
    with pytest.raises(UserError, match="no module json"):
        submit_side_job(
            beside.run,
            beside.site,
            beside.paths,
            SideRequest(name="probe", function="json:loads", roles=("trainer",)),
            slurm=beside.slurm,
        )
    partitions = [msgspec.structs.replace(p, name="elsewhere") for p in beside.site.partitions]
    beside.site = msgspec.structs.replace(beside.site, partitions=partitions)
    with pytest.raises(UserError, match=r"Slurm refused the job.*invalid partition"):
        beside.start("tell")
    with pytest.raises(UserError, match="aren't JSON"):
        beside.start("tell", arguments={"x": object()})
    assert list_side_jobs(beside.paths, beside.slurm) == []
    assert list(beside.paths.side_jobs.iterdir()) == []


def test_the_command_line(beside: Beside, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in beside.box.env().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "7")  # as in an allocation: it must not leak into the job
    root = str(beside.paths.root)
    assert main(["side", root, "doctor", "--role", "trainer", "--nodes", "2", "--wait", "100"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [node["exit_code"] for node in told] == [0, 0]
    assert all(result["check"] and result["status"] for node in told for result in node["output"]["results"])
    assert all(node["output"]["results"] for node in told)
    assert main(["side", root, "verify-checkpoint", "--wait", "60"]) == 2
    assert "no complete checkpoint" in capsys.readouterr().err
    assert main(["side", root, "side_probe:fail", "--wait", "60"]) == 1
    assert "ValueError: no good" in capsys.readouterr().err
    mark = beside.folder / "one"
    assert main(["side", root, "side_probe:wait_for", "--arg", f"mark={mark}"]) == 0
    until(lambda: beside.begun(mark), "the job to begin")
    assert main(["jobs", root, "--cancel", "3"]) == 0
    assert "was RUNNING" in capsys.readouterr().out
    job = list_side_jobs(beside.paths, beside.slurm)[-1]
    until(job.done, "its end", SOON_S)
    assert main(["jobs", root]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith(" ")]
    assert [line.split()[2:4] for line in lines[1:]] == [
        ["doctor", "COMPLETED"],
        ["fail", "FAILED"],
        ["wait-for", "CANCELLED"],
    ]
    assert "SLURM_CPUS_PER_TASK" not in (job.folder.root / f"{job.id}_submission.sh").read_text()
