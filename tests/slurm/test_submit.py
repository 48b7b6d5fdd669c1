"""Submission, steps, signals and requeue on a real Slurm. The supervisor is a small program of each test's own."""

from __future__ import annotations

import json
import random
import re
import sys
import textwrap
from pathlib import Path

import pytest

from miles_hpc.cli.main import main
from miles_hpc.cluster.nodelist import compress, expand
from miles_hpc.cluster.slurm import Slurm
from miles_hpc.cluster.submit import read_job
from miles_hpc.core.errors import UserError
from miles_hpc.core.paths import RunPaths
from tests.slurm.conftest import until
from tests.unit.runs import write_run
from tools.slurm_box import Box

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(170)]


class Launch:
    """A folder with run.toml whose supervisor is `program`, a Python text that sees the run directory as argv[1]."""

    def __init__(self, folder: Path, box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.box = folder, box
        self.slurm = Slurm(environ=box.env(), timeout_s=60.0)
        self.paths = RunPaths(folder / "runs" / "tiny")
        write_run(folder)
        monkeypatch.chdir(folder)
        for name, value in box.env().items():
            monkeypatch.setenv(name, value)

    def supervisor(self, program: str) -> str:
        """The interpreter option that makes the batch script start `program` instead of our supervisor."""
        (self.folder / "program.py").write_text(textwrap.dedent(program))
        stub = self.folder / "python"
        stub.write_text(f'#!/bin/bash\nexec {sys.executable} -P {self.folder}/program.py "${{@: -1}}"\n')
        stub.chmod(0o755)
        return f"python.controller={stub}"

    def submit(self, program: str, *options: str) -> int:
        assert main(["submit", "run.toml", "--set", self.supervisor(program), *options]) == 0
        job_id = read_job(self.paths)
        assert job_id is not None
        return job_id

    def output(self) -> str:
        return "".join(path.read_text() for path in self.paths.attempts.glob("slurm-*.out"))

    def wait(self, job_id: int, state: str) -> None:
        until(lambda: set(self.slurm.state(job_id)) == {state}, f"job {job_id} to be {state}: {self.output()}", 90.0)


@pytest.fixture
def launch(tmp_path: Path, clean_box: Box, monkeypatch: pytest.MonkeyPatch) -> Launch:
    return Launch(tmp_path, clean_box, monkeypatch)


STEPS = """
    import json, os, subprocess, sys, time
    from pathlib import Path
    from miles_hpc.core.load import load_prepared
    from miles_hpc.core.paths import RunPaths
    from miles_hpc.cluster.placement import place, role_srun_args, step_environ

    paths = RunPaths(Path(sys.argv[1]))
    run, site = load_prepared(paths.root)
    placement = place(run, site, os.environ)
    hosts = placement.hosts
    environ = step_environ(os.environ)
    tell = "echo $SLURMD_NODENAME $SLURM_PROCID $SLURM_LOCALID $SLURM_NTASKS $PYTHONSAFEPATH"

    def start(role, name, then, only=None):
        logs = paths.root / "logs"
        logs.mkdir(exist_ok=True)
        args = role_srun_args(run, site, role, name=name, hosts=only, placement=placement, logs=logs)
        return subprocess.Popen([*args, "bash", "-c", f"{tell}; {then}"], env=environ)

    def written(name):
        end = time.monotonic() + 60
        while not (paths.root / "logs" / name).exists() or not (paths.root / "logs" / name).read_text():
            assert time.monotonic() < end, name
            time.sleep(0.05)

    wait = f"until [ -e {paths.root}/go ]; do sleep 0.1; done"
    first = [start(role, f"{role}-1", wait) for role in ("trainer", "rollout", "sandbox")]
    for name in ("trainer-1-3.log", "rollout-1-1.log", "sandbox-1-0.log"):
        written(name)
    # The first rollout step still runs on this host: a second one must start at once.
    again = start("rollout", "rollout-2", "true", only=hosts["rollout"][1:])
    code = again.wait(timeout=60)
    running = [process.poll() for process in first]
    (paths.root / "seen.json").write_text(json.dumps({"hosts": hosts, "code": code, "running": running}))
    (paths.root / "hold").touch()
    codes = [process.wait(timeout=120) for process in first]
    (paths.root / "codes.json").write_text(json.dumps(codes))
"""


def test_roles_get_their_steps_and_one_host_can_start_again(launch: Launch) -> None:
    job_id = launch.submit(STEPS, "--set", "groups.trainer.ranks_per_node=2", "--set", "job.time=00:05:00")
    until((launch.paths.root / "hold").exists, f"the steps to run: {launch.output()}", 90.0)
    seen = json.loads((launch.paths.root / "seen.json").read_text())
    assert (seen["code"], seen["running"]) == (0, [None, None, None])
    assert (seen["hosts"]["trainer"], seen["hosts"]["rollout"]) == (["trainer1", "trainer2"], ["rollout1", "rollout2"])
    assert len(seen["hosts"]["sandbox"]) == 1
    logs = launch.paths.root / "logs"
    # Ranks of a node are neighbours.
    told = [(logs / f"trainer-1-{rank}.log").read_text().split() for rank in range(4)]
    assert told == [
        ["trainer1", "0", "0", "4", "1"],
        ["trainer1", "1", "1", "4", "1"],
        ["trainer2", "2", "0", "4", "1"],
        ["trainer2", "3", "1", "4", "1"],
    ]
    assert (logs / "rollout-2-0.log").read_text().split()[:2] == ["rollout2", "0"]

    # Steps are found and ended by name, over all components.
    slurm = launch.slurm
    assert {step.name for step in slurm.steps(job_id)} == {"trainer-1", "rollout-1", "sandbox-1"}
    assert 0 < slurm.remaining_s(job_id) <= 300
    assert len(slurm.cancel_step(job_id, "rollout-1")) == 1
    assert slurm.cancel_step(job_id, "no-such-step") == []
    until(lambda: {s.name for s in slurm.steps(job_id)} == {"trainer-1", "sandbox-1"}, "the step to end", 60.0)
    (launch.paths.root / "go").touch()
    launch.wait(job_id, "COMPLETED")
    trainer, rollout, sandbox = json.loads((launch.paths.root / "codes.json").read_text())
    assert (trainer, sandbox) == (0, 0)
    assert rollout != 0
    assert slurm.steps(job_id) == []


def test_the_batch_script_forwards_signals_and_keeps_the_exit_code(launch: Launch) -> None:
    program = """
        import signal, sys, time
        from pathlib import Path
        seen = []
        for number in (signal.SIGUSR2, signal.SIGTERM):
            signal.signal(number, lambda n, frame: seen.append(signal.Signals(n).name))
        print("ready", flush=True)
        end = time.monotonic() + 100
        shown = 0
        while "SIGTERM" not in seen and time.monotonic() < end:
            time.sleep(0.05)
            if len(seen) > shown:
                shown = len(seen)
                print(*seen, flush=True)
        time.sleep(1.0)
        print("end", *seen, flush=True)
        sys.exit(7)
    """
    job_id = launch.submit(program)
    until(lambda: "ready" in launch.output(), "the supervisor to start", 90.0)
    launch.slurm.cancel(job_id, signal="USR2")
    until(lambda: "SIGUSR2" in launch.output(), "the supervisor to see USR2", 60.0)
    launch.slurm.cancel(job_id, signal="USR2")
    until(lambda: "SIGUSR2 SIGUSR2" in launch.output(), "the supervisor to see USR2 again", 60.0)
    launch.slurm.cancel(job_id, signal="TERM")
    until(lambda: "end SIGUSR2 SIGUSR2 SIGTERM" in launch.output(), "the supervisor to end", 60.0)
    until(lambda: launch.slurm.components(job_id)[0].state == "FAILED", "the job to end", 60.0)
    assert launch.slurm.components(job_id)[0].exit_code == "7:0"


def test_requeue_from_inside_keeps_the_id_and_appends_output(launch: Launch) -> None:
    program = """
        import os, time
        from miles_hpc.cluster.slurm import Slurm
        from miles_hpc.core import env
        restarts, job_id = env.read("SLURM_RESTART_COUNT"), env.read("SLURM_JOB_ID")
        print("restarts", restarts, flush=True)
        if restarts == 0:
            Slurm().requeue(job_id)
            time.sleep(60)
    """
    job_id = launch.submit(program)
    until(lambda: "restarts 0" in launch.output(), "the first start", 90.0)
    until(lambda: launch.slurm.components(job_id)[0].restarts == 1, "the requeue", 60.0)
    launch.slurm.release_now(job_id)
    launch.wait(job_id, "COMPLETED")
    assert re.findall(r"restarts \d", launch.output()) == ["restarts 0", "restarts 1"]


def test_a_follow_up_job_where_requeue_is_not_allowed(launch: Launch) -> None:
    """From inside the allocation: what it left in the environment must not reach the next job."""
    program = """
        import sys
        from pathlib import Path
        from miles_hpc.cluster.slurm import Slurm
        from miles_hpc.cluster.submit import adopt_job, submit_follow_up
        from miles_hpc.core import env
        from miles_hpc.core.paths import RunPaths
        paths, job_id = RunPaths(Path(sys.argv[1])), env.read("SLURM_JOB_ID")
        print("job", job_id, flush=True)
        adopt_job(paths, job_id)
        if not (paths.root / "chained").exists():
            (paths.root / "chained").touch()
            submit_follow_up(paths, Slurm(), job_id, exclude=["sandbox1", "gone9"])
    """
    site = launch.folder / "chained.toml"
    text = (Path(__file__).parents[2] / "site_configs" / "slurm_box.toml").read_text()
    site.write_text(text.replace('"slurm_box"', '"chained"').replace("requeue = true", "requeue = false"))
    first = launch.submit(program, "--site", str(site))
    until(lambda: read_job(launch.paths) not in (None, first), f"the follow-up: {launch.output()}", 90.0)
    second = read_job(launch.paths)
    assert second is not None
    launch.wait(first, "COMPLETED")
    launch.wait(second, "COMPLETED")
    assert json.loads(launch.paths.job.read_text())["previous"] == [first]
    assert sorted(launch.output().split("\n")) == ["", f"job {first}", f"job {second}"]
    components = launch.slurm.components(second)
    assert [component.name for component in components] == ["tiny-trainer", "tiny-rollout", "tiny-sandbox"]
    assert (
        components[2].nodes == "sandbox2"
    )  # --exclude holds for every component, and unknown names are no reason to fail


@pytest.mark.mpi
def test_the_trainers_step_is_one_mpi_world(launch: Launch) -> None:
    pytest.importorskip("mpi4py")
    program = """
        import os, subprocess, sys
        from pathlib import Path
        from miles_hpc.core.load import load_prepared
        from miles_hpc.cluster.placement import place, role_srun_args, step_environ
        run, site = load_prepared(Path(sys.argv[1]))
        args = role_srun_args(run, site, "trainer", name="world", placement=place(run, site, os.environ))
        code = "from mpi4py import MPI; w = MPI.COMM_WORLD; print('sum', w.allreduce(w.rank), 'of', w.size, flush=True)"
        sys.exit(subprocess.run([*args, sys.executable, "-P", "-c", code], env=step_environ(os.environ)).returncode)
    """
    job_id = launch.submit(program, "--set", "groups.trainer.ranks_per_node=2")
    launch.wait(job_id, "COMPLETED")
    assert launch.output().count("sum 6 of 4") == 4


def test_submit_status_cancel_resume(launch: Launch, capsys: pytest.CaptureFixture[str]) -> None:
    job_id = launch.submit("import time; print('up', flush=True); time.sleep(120)")
    capsys.readouterr()
    until(lambda: "up" in launch.output(), "the job to run", 90.0)
    assert main(["status", "run.toml"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"tiny-trainer +RUNNING trainer\[1-2\]", shown)
    assert "time left" in shown
    # While it runs, nobody submits it a second time, whatever the way.
    assert main(["resume", str(launch.paths.root)]) == 2
    assert f"job {job_id} of this run is RUNNING" in capsys.readouterr().err
    assert main(["cancel", "run.toml"]) == 0
    launch.wait(job_id, "CANCELLED")
    capsys.readouterr()
    assert main(["cancel", "run.toml"]) == 0
    assert "already ended" in capsys.readouterr().out
    launch.supervisor("print('second', flush=True)")
    assert main(["resume", str(launch.paths.root), "--set", "job.time=00:02:00"]) == 0
    second = read_job(launch.paths)
    assert second is not None
    assert second != job_id
    launch.wait(second, "COMPLETED")
    assert "second" in launch.output()
    assert json.loads(launch.paths.job.read_text())["previous"] == [job_id]
    assert "--time=00:02:00" in launch.paths.job_script.read_text()


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("groups.rollout.nodes=5", "Slurm refused the job: "),
        ("job.extra_directives=['--no-such-option']", "Slurm refused the job: "),
        ("job.extra_directives=['--constraint=nowhere']", "Slurm refused the job: "),
    ],
)
def test_what_slurm_would_refuse_is_seen_before_anything_is_written(
    launch: Launch, option: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", "run.toml", "--set", option]) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1
    assert not launch.paths.root.exists()


def test_a_partition_that_the_cluster_lacks(launch: Launch, capsys: pytest.CaptureFixture[str]) -> None:
    site = launch.folder / "mine.toml"
    site.write_text('name = "mine"\n[[partitions]]\nname = "rollouts"\nroles = ["trainer", "rollout", "sandbox"]\n')
    assert main(["submit", "run.toml", "--site", "mine.toml"]) == 2
    assert "this cluster has no partition 'rollouts': did you mean 'rollout'?" in capsys.readouterr().err
    assert not launch.paths.root.exists()
    assert main(["sites", "check", str(site)]) == 1
    assert "FAIL  partition 'rollouts' is not among" in capsys.readouterr().out
    assert main(["sites", "check", "slurm_box"]) == 0


def test_odd_names_and_a_singleton(launch: Launch) -> None:
    """A run called hetjob, in a folder with spaces; and components of one singleton job don't wait for each other."""
    launch.paths = RunPaths(launch.folder / "#SBATCH hetjob" / "out put")
    job_id = launch.submit(
        "print('fine', flush=True)",
        "--set",
        "name=hetjob",
        "--set",
        "job.extra_directives=['--dependency=singleton']",
        "--run-dir",
        str(launch.paths.root),
    )
    launch.wait(job_id, "COMPLETED")
    assert launch.output().strip() == "fine"
    assert [component.name for component in launch.slurm.components(job_id)] == [
        "hetjob-trainer",
        "hetjob-rollout",
        "hetjob-sandbox",
    ]


def test_host_lists_agree_with_scontrol(clean_box: Box) -> None:
    draw = random.Random(7)

    def ranges() -> str:
        items = []
        for _ in range(draw.randint(1, 3)):
            low, width = draw.randint(0, 120), draw.randint(1, 4)
            high = low + draw.randint(0, 12)
            items.append(f"{low:0{width}d}" if draw.random() < 0.4 else f"{low:0{width}d}-{high:0{width}d}")
        return f"[{','.join(items)}]"

    def name() -> str:
        text = draw.choice(["n", "nid", "gpu-", "rack1-b", "c4_"])
        for _ in range(draw.choice([0, 1, 1, 1, 2])):
            text += ranges() + draw.choice(["", "", "x", "-"])
        return text if text.count("[") == 0 or text.endswith("]") else text[: text.rindex("]") + 1]

    for _ in range(300):
        text = ",".join(name() for _ in range(draw.randint(1, 3)))
        theirs = clean_box.run("scontrol", "show", "hostnames", text).split()
        assert expand(text) == theirs, text
        assert expand(compress(theirs)) == theirs, text
    for text in ("node[]", "node[3-1]", "c[1-2]-ib", "jwb[0001-0002].juwels"):
        assert clean_box.run("scontrol", "show", "hostnames", text).split() == []
        with pytest.raises(UserError):
            expand(text)
    hosts = [f"n{draw.randint(1, 30)}" for _ in range(60)]
    assert expand(clean_box.run("scontrol", "show", "hostlist", ",".join(hosts)).strip()) == hosts
