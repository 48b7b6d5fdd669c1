"""Side jobs on a Slurm in memory: submission through submitit, and states when results, Slurm or both are late."""

from __future__ import annotations

import json
import pickletools
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from miles_hpc.cli.side import show_result
from miles_hpc.cluster.accounting import AccountingRecord
from miles_hpc.cluster.chain import BadNode, record_bad_nodes
from miles_hpc.cluster.jobs import JobFailed
from miles_hpc.cluster.side_folder import SideFolder, TaskResult
from miles_hpc.cluster.side_jobs import SideJob, list_side_jobs, submit_side_job
from miles_hpc.cluster.side_plan import SideRequest
from miles_hpc.cluster.slurm_states import JobState
from miles_hpc.cluster.submit import prepare
from miles_hpc.core.errors import DeadlineExpired, UserError
from miles_hpc.core.paths import RunPaths
from tests.fakes.fake_slurm import FakeSlurm
from tests.unit.runs import make_run, make_site

REQUEST = SideRequest(
    name="verify",
    function="miles_hpc.cluster.side_tasks:run_program",
    arguments={"module": "json.tool", "arguments": ["--help"]},
    roles=("trainer",),
)


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    paths = RunPaths(tmp_path / "run")
    prepare(make_run(), make_site(), paths, source="")
    return paths


def start(paths: RunPaths, slurm: Any, **fields: Any) -> SideJob:
    return submit_side_job(make_run(), make_site(), paths, replace(REQUEST, **fields), slurm=slurm)


def leave(job: SideJob, task: int = 0, **fields: Any) -> None:
    """A task's result."""
    values: dict[str, Any] = {"ok": True, "host": "n1", "started": 1.0, "ended": 2.0, **fields}
    job.folder.write(TaskResult(task=task, **values))


def test_what_is_submitted(paths: RunPaths) -> None:
    slurm = FakeSlurm()
    job = start(paths, slurm)
    (script,) = slurm.submitted
    assert "#SBATCH --job-name=tiny-side0001-verify" in script
    assert (job.folder.root / f"{job.id}_submission.sh").read_text() == script
    assert slurm.components(int(job.id))[0].name == job.call.job_name
    again = start(paths, slurm, start_again=True)
    assert [j.folder.number for j in list_side_jobs(paths, slurm)] == [1, 2]
    names = []
    for one in (job, again):
        pickled = (one.folder.root / f"{one.id}_submitted.pkl").read_bytes()
        names.append([arg for _, arg, _ in pickletools.genops(pickled) if arg in ("run_call", "CallAgain")])
    assert names == [["run_call"], ["CallAgain"]]


def test_bad_nodes_are_left_out_where_that_is_allowed(paths: RunPaths) -> None:
    slurm = FakeSlurm()
    record_bad_nodes(paths, [BadNode(node="n7", reason="its GPU", attempt=1, time=1.0)])
    start(paths, slurm)
    site = make_site()
    site = msgspec.structs.replace(site, sbatch=msgspec.structs.replace(site.sbatch, exclude_allowed=False))
    submit_side_job(make_run(), site, paths, REQUEST, slurm=slurm)
    assert slurm.excluded == [("n7",), ()]


def test_states_follow_slurm_and_results(paths: RunPaths) -> None:
    slurm = FakeSlurm()
    job = start(paths, slurm)
    assert (job.state(), job.status().reason, job.done()) == (JobState.QUEUED, "Priority", False)
    slurm.start(int(job.id), ["n1"], limit_s=100.0)
    assert (job.state(), job.status().nodes, job.exception()) == (JobState.RUNNING, "n1", None)
    leave(job, value={"step": 3})
    assert (job.state(), job.status().witness, job.result(0.0)) == (JobState.COMPLETED, "result", {"step": 3})
    slurm.finish(int(job.id), "NODE_FAIL")  # afterwards: it has done its work
    assert job.state() is JobState.COMPLETED


@pytest.mark.parametrize(
    ("fields", "state", "reason"),
    [
        ({"kind": "ValueError", "error": "no good"}, JobState.FAILED, "ValueError: no good"),
        ({"kind": "UncompletedJobError", "error": "timed-out"}, JobState.TIMEOUT, "timed-out"),
    ],
)
def test_what_a_task_raised(paths: RunPaths, fields: dict[str, Any], state: JobState, reason: str) -> None:
    job = start(paths, FakeSlurm())
    leave(job, ok=False, **fields)
    assert (job.state(), job.status().reason) == (state, reason)
    with pytest.raises(JobFailed, match=reason):
        job.result(0.0)


def test_a_result_may_be_late(paths: RunPaths) -> None:
    slurm = FakeSlurm()
    job = start(paths, slurm)
    slurm.finish(int(job.id), "COMPLETED")
    slurm.jobs[int(job.id)] = [replace(c, end_time=time.time()) for c in slurm.jobs[int(job.id)]]
    assert (job.state(), "isn't here yet" in job.status().reason) == (JobState.ENDING, True)
    slurm.jobs[int(job.id)] = [replace(c, end_time=time.time() - 60) for c in slurm.jobs[int(job.id)]]
    job.stderr_path.write_text("first\nslurmstepd: error: the last word\n\n")
    assert job.state() is JobState.FAILED
    assert (
        job.status().reason
        == "Slurm says COMPLETED, and there is no result of task 0: slurmstepd: error: the last word"
    )
    leave(job, value=1)  # so late: it counts all the same
    assert job.result(0.0) == 1


@pytest.mark.parametrize("word", ["CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "FAILED"])
def test_an_end_is_kept_when_slurm_has_forgotten(paths: RunPaths, word: str) -> None:
    slurm = FakeSlurm()
    job, unseen = start(paths, slurm), start(paths, slurm)
    for one in (job, unseen):
        slurm.finish(int(one.id), word, exit_code="1:0")
    assert job.state() is JobState(word)
    slurm.forget(int(job.id))
    slurm.forget(int(unseen.id))
    assert SideJob(SideFolder(job.folder.root), slurm).state() is JobState(word)
    assert SideJob(SideFolder(job.folder.root), None).state() is JobState(word)
    assert (unseen.state(), unseen.status().forgotten) == (JobState.UNKNOWN, True)
    assert SideJob(unseen.folder, None).status().reason == "no Slurm on this machine"


def test_accounting_is_the_second_witness(paths: RunPaths) -> None:
    slurm = FakeSlurm()
    job = start(paths, slurm)
    slurm.finish(int(job.id), "FAILED", exit_code="0:9")
    slurm.no_accounting = ""
    record = AccountingRecord(
        leader=int(job.id), offset=0, name=job.call.job_name, state="", exit_code="0:0", elapsed_s=9, nodes=1, start=1
    )
    slurm.records = [replace(record, state="REQUEUED"), replace(record, state="FAILED", exit_code="0:9")]
    slurm.forget(int(job.id))
    assert (job.state(), job.status().witness) == (JobState.FAILED, "sacct")
    assert "SIGKILL" in job.status().reason


def test_several_tasks(paths: RunPaths) -> None:
    slurm = FakeSlurm()
    job = start(paths, slurm, nodes=3)
    slurm.start(int(job.id), ["n[1-3]"], limit_s=100.0)
    for task in (0, 2):
        leave(job, task, value=task)
    assert job.state() is JobState.RUNNING
    assert [result.value if result else None for result in job.results()] == [0, None, 2]
    leave(job, 1, ok=False, kind="ValueError", error="no good")
    assert (job.state(), job.status().reason) == (JobState.FAILED, "task 1: ValueError: no good")
    leave(job, 1, value=1)
    assert job.result(0.0) == [0, 1, 2]


def test_what_came_is_shown_when_a_node_failed(paths: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    slurm = FakeSlurm()
    job = start(paths, slurm, nodes=2)
    leave(job, 0, value={"host": "n1"})
    slurm.finish(int(job.id), "NODE_FAIL")
    with pytest.raises(JobFailed, match="NODE_FAIL"):
        show_result(job, 0.0)
    assert json.loads(capsys.readouterr().out) == [{"host": "n1"}]


def test_a_cancel_leaves_word_for_the_tasks(paths: RunPaths) -> None:
    slurm = FakeSlurm()
    job = start(paths, slurm)
    assert not job.folder.cancelled()
    job.cancel()
    assert job.folder.cancelled() and job.state() is JobState.CANCELLED
    other = start(paths, slurm)
    leave(other, value=1)
    other.cancel()
    assert not other.folder.cancelled() and slurm.state(int(other.id)) == ["PENDING"]


def test_a_refused_job_leaves_nothing(paths: RunPaths) -> None:
    with pytest.raises(UserError, match="no such partition"):
        start(paths, FakeSlurm(refusal="no such partition"))
    assert list(paths.side_jobs.iterdir()) == []


def test_no_answer_of_sbatch_is_not_a_refusal(paths: RunPaths) -> None:
    class Silent(FakeSlurm):
        def submit(self, script: str | Path, *, dependency: str = "", exclude: Sequence[str] = ()) -> int:
            raise DeadlineExpired("sbatch: no answer after 30 s")

    with pytest.raises(DeadlineExpired):
        start(paths, Silent())
    (job,) = list_side_jobs(paths, FakeSlurm())
    assert job.state() is JobState.UNKNOWN
    assert "squeue --name=tiny-side0001-verify" in job.status().reason
    with pytest.raises(UserError, match="never submitted"):
        job.cancel()
