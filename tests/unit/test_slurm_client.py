"""Parsing of what Slurm prints, and what happens where there is no Slurm or it misbehaves."""

from __future__ import annotations

import inspect
import math
from datetime import datetime
from pathlib import Path

import pytest

from miles_hpc.cluster.slurm import PartitionLimits, Slurm, SlurmError, Step, is_away, parse_jobs, parse_limits
from miles_hpc.core.errors import DeadlineExpired, MilesError, UserError
from tests.fakes.fake_slurm import FakeSlurm

# Printed by scontrol 22.05.8 for a job whose output path and component name hold spaces; shortened in the middle.
HET_JOB = """\
JobId=4 HetJobId=4 HetJobOffset=0 JobName=x-trainer HetJobIdSet=4-6 UserId=root(0) JobState=RUNNING \
Reason=None Dependency=(null) Requeue=1 Restarts=2 ExitCode=0:0 RunTime=00:00:03 TimeLimit=00:02:00 \
StartTime=2026-11-29T16:21:54 EndTime=2026-11-29T16:23:54 Partition=trainer AllocNode:Sid=localhost:3578 \
ReqNodeList=(null) ExcNodeList=(null) NodeList=t[1-2] BatchHost=t1 NumNodes=2 CPUs/Task=1 ReqB:S:C:T=0:0:*:* \
TRES=cpu=2,node=2,billing=2 Command=/tmp/p.sh StdErr=/tmp/a b/slurm-4.out StdOut=/tmp/a b/slurm-4.out Power=
JobId=6 HetJobId=4 HetJobOffset=2 JobName=x sandbox JobState=PENDING Reason=Resources Restarts=0 ExitCode=0:0 \
EndTime=Unknown NodeList=(null)
JobId=5 HetJobId=4 HetJobOffset=1 JobName=x-rollout JobState=FAILED Reason=NonZeroExitCode Restarts=0 ExitCode=3:0 \
EndTime=2026-11-29T16:22:10 NodeList=r[1-2]
"""


def test_components_of_a_het_job() -> None:
    trainer, rollout, sandbox = parse_jobs(HET_JOB)
    assert (trainer.job_id, trainer.offset, trainer.name, trainer.state) == (4, 0, "x-trainer", "RUNNING")
    assert (trainer.nodes, trainer.restarts, trainer.reason) == ("t[1-2]", 2, "")
    assert trainer.end_time == datetime(2026, 11, 29, 16, 23, 54).timestamp()
    assert (rollout.state, rollout.exit_code, rollout.active) == ("FAILED", "3:0", False)
    assert (sandbox.name, sandbox.nodes, sandbox.reason, sandbox.end_time) == ("x sandbox", "", "Resources", None)
    assert sandbox.active
    assert trainer.start_time == datetime(2026, 11, 29, 16, 21, 54).timestamp()
    assert (sandbox.start_time, trainer.dependency) == (None, "")


def test_what_a_waiting_job_waits_for() -> None:
    (job,) = parse_jobs(
        "JobId=7 JobName=a JobState=PENDING Reason=Dependency Dependency=afterany:6(unfulfilled) "
        "StartTime=2026-11-29T18:00:00 EndTime=2026-11-29T19:00:00"
    )
    assert (job.reason, job.dependency) == ("Dependency", "afterany:6(unfulfilled)")
    assert job.start_time == datetime(2026, 11, 29, 18, 0).timestamp()


def test_a_plain_job_and_nothing() -> None:
    assert parse_jobs("JobId=7 JobName=a JobState=COMPLETED EndTime=Unknown")[0].offset == 0
    assert parse_jobs("No jobs in the system\n") == []


def test_no_slurm_on_the_machine(tmp_path: Path) -> None:
    slurm = Slurm(environ={"PATH": str(tmp_path)})
    for call in (slurm.require, slurm.partitions, lambda: slurm.components(1), lambda: slurm.submit("#!/bin/bash")):
        with pytest.raises(UserError, match=r"no Slurm on this machine: '.*' is not on PATH"):
            call()


def program(folder: Path, name: str, body: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)


def client(folder: Path, **more: str) -> Slurm:
    return Slurm(environ={"PATH": f"{folder}:/usr/bin:/bin", **more}, timeout_s=20.0)


def test_accounting_is_asked_for_every_start_of_these_jobs(tmp_path: Path) -> None:
    line = "5+1|CANCELLED by 0|0:15|90|2|r[1-2]|2026-11-30T02:12:23|2026-11-30T02:13:53|x-rollout"
    program(tmp_path, "sacct", f'echo "$@" > {tmp_path}/arguments; echo "{line}"')
    (record,) = client(tmp_path).accounting([5, 8])
    assert (record.leader, record.offset, record.state, record.elapsed_s) == (5, 1, "CANCELLED", 90)
    assert (tmp_path / "arguments").read_text() == (
        "--noheader --parsable2 --allocations --duplicates "
        "--format=JobID,State,ExitCode,ElapsedRaw,AllocNodes,NodeList,Start,End,JobName --jobs=5,8\n"
    )
    program(tmp_path, "sacct", "echo Slurm accounting storage is disabled >&2; exit 1")
    with pytest.raises(SlurmError, match=r"sacct .*: Slurm accounting storage is disabled"):
        client(tmp_path).accounting([5])


def test_submission_hands_over_text_and_reads_the_leaders_id(tmp_path: Path) -> None:
    program(tmp_path, "sbatch", f'echo "$@" > {tmp_path}/arguments; cat > {tmp_path}/script; echo "123;cluster"')
    assert client(tmp_path).submit("#!/bin/bash\ntrue\n", dependency="afterany:7") == 123
    assert (tmp_path / "arguments").read_text() == "--parsable --dependency=afterany:7\n"
    assert (tmp_path / "script").read_text() == "#!/bin/bash\ntrue\n"
    script = tmp_path / "job.sbatch"
    script.write_text("#!/bin/bash\n# from a file\n")
    client(tmp_path).submit(script)
    assert "from a file" in (tmp_path / "script").read_text()


def test_an_outer_allocations_variables_do_not_reach_sbatch(tmp_path: Path) -> None:
    program(tmp_path, "sbatch", f"env > {tmp_path}/environment; cat > /dev/null; echo 1")
    leak = {"SLURM_CPUS_PER_TASK": "4", "SBATCH_PARTITION": "x", "SLURM_CONF": "/c", "HOME": "/home/me"}
    client(tmp_path, **leak).submit("#!/bin/bash\n")
    seen = (tmp_path / "environment").read_text()
    assert "SLURM_CONF=/c" in seen
    assert "HOME=/home/me" in seen
    assert "CPUS_PER_TASK" not in seen
    assert "SBATCH" not in seen


def test_a_refusal_carries_sbatchs_words(tmp_path: Path) -> None:
    program(tmp_path, "sbatch", 'cat > /dev/null; echo "sbatch: error: invalid partition specified: x" >&2; exit 1')
    with pytest.raises(UserError, match=r"Slurm refused the job: .*invalid partition specified: x"):
        client(tmp_path).submit("#!/bin/bash\n")


def test_an_unknown_job_has_no_components_and_other_failures_are_errors(tmp_path: Path) -> None:
    program(tmp_path, "scontrol", 'echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1')
    assert client(tmp_path).components(9) == []
    assert client(tmp_path).steps(9) == []
    program(tmp_path, "scontrol", 'echo "Unable to contact slurm controller" >&2; exit 1')
    with pytest.raises(SlurmError, match=r"scontrol -o show job 9: .*Unable to contact"):
        client(tmp_path).components(9)


def test_no_configuration_reads_as_no_slurm(tmp_path: Path) -> None:
    program(tmp_path, "sinfo", 'echo "sinfo: fatal: Could not establish a configuration source" >&2; exit 1')
    with pytest.raises(UserError, match=r"no Slurm on this machine: .*set SLURM_CONF"):
        client(tmp_path).partitions()


def test_a_command_that_hangs_is_ended(tmp_path: Path) -> None:
    program(tmp_path, "sinfo", "exec sleep 60")
    slurm = Slurm(environ={"PATH": f"{tmp_path}:/usr/bin:/bin"}, timeout_s=0.5)
    with pytest.raises(DeadlineExpired, match=r"sinfo .*: no answer after"):
        slurm.partitions()


def test_steps_of_all_components(tmp_path: Path) -> None:
    program(tmp_path, "scontrol", f"cat <<'END'\n{HET_JOB}END")
    program(
        tmp_path, "squeue", f'echo "$@" > {tmp_path}/arguments; printf "4.0|t[1-2]|trainer-1\\n4.batch|t1|batch\\n"'
    )
    assert client(tmp_path).steps(4) == [Step(id="4.0", name="trainer-1", nodes="t[1-2]")]
    assert "--jobs=4,6" in (tmp_path / "arguments").read_text()


def test_the_fake_has_the_clients_interface() -> None:
    for name, method in inspect.getmembers(Slurm, inspect.isfunction):
        if not name.startswith("_") and name != "release_now":
            assert inspect.signature(getattr(FakeSlurm, name)) == inspect.signature(method), name


def test_limits_of_partitions_as_sinfo_prints_them() -> None:
    text = "gpu|1-00:00:00|1-infinite\ngpu|1-00:00:00|1-infinite\ndebug|30:00|1-4\none|infinite|1\nodd|n/a|\n"
    assert parse_limits(text) == {
        "gpu": PartitionLimits(max_time_s=86400.0, max_nodes=None),
        "debug": PartitionLimits(max_time_s=1800.0, max_nodes=4),
        "one": PartitionLimits(max_time_s=math.inf, max_nodes=1),
        "odd": PartitionLimits(max_time_s=math.inf, max_nodes=None),
    }
    assert parse_limits("") == {}


@pytest.mark.parametrize(
    ("error", "away"),
    [
        (SlurmError("sbatch: error: Batch job submission failed: Unable to contact slurm controller"), True),
        (SlurmError("scontrol requeue 7: Unexpected message received for job 7"), True),
        (SlurmError("squeue: slurm_load_jobs error: Socket timed out on send/recv operation"), True),
        (DeadlineExpired("sinfo: no answer after 30 s; is slurmctld up?"), True),
        (SlurmError("scontrol requeue 7: Requested operation is presently disabled"), False),
        (UserError("Slurm refused the job: Requested node configuration is not available"), False),
    ],
)
def test_no_answer_is_no_refusal(error: MilesError, away: bool) -> None:
    assert is_away(error) == away


def test_a_step_that_ends_before_it_is_cancelled_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen on a busy machine: scancel's complaint ended the watcher of the step, and the run hung."""
    slurm, asked = Slurm(environ={}), []
    monkeypatch.setattr(slurm, "steps", lambda job_id: [Step(id="7.2", name="a", nodes="n"), Step("8.2", "a", "n")])

    def run(command: str, *arguments: str, stdin: str = "") -> str:
        asked.append(arguments[-1])
        if arguments[-1] == "7.2":
            raise SlurmError("scancel 7.2: scancel: error: Kill job error on job step id 7: Invalid job id specified")
        return ""

    monkeypatch.setattr(slurm, "_run", run)
    assert slurm.cancel_step(7, "a", signal="INT") == ["7.2", "8.2"]
    assert asked == ["7.2", "8.2"]
