"""The Slurm box, on a real Slurm: its life, its faults, and what Slurm does to jobs in it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from miles_hpc.core.errors import UserError
from tests.slurm.conftest import fresh_box, until
from tools.slurm_box import Box, BoxSpec
from tools.slurm_box.processes import Process, end, process_of, read_record, spawn

pytestmark = pytest.mark.slurm

REPOSITORY = Path(__file__).parents[2]

HET = """#!/bin/bash
#SBATCH --job-name=train --time=5 --requeue -p trainer -N1 -n1
#SBATCH hetjob
#SBATCH --job-name=roll -p rollout -N2 -n2
#SBATCH hetjob
#SBATCH --job-name=sand -p sandbox -N1 -n1
"""

STAYS = """echo "start ${SLURM_RESTART_COUNT:-0}"
srun --het-group=0,1,2 sh -c 'echo "on $SLURMD_NODENAME"; sleep 300'
"""


def submit(box: Box, text: str, output: Path, *options: str) -> int:
    """Job id of a script whose output is appended to a file."""
    script = output.with_suffix(".sh")
    script.write_text(text)
    said = box.run("sbatch", "--parsable", "--open-mode=append", f"--output={output}", *options, str(script))
    return int(said.strip())


def lines(path: Path, start: str) -> list[str]:
    """Lines of a job's output that begin with a word."""
    return [x for x in path.read_text().splitlines() if x.startswith(start)] if path.exists() else []


def finished(box: Box, job: int) -> bool:
    """Whether no component of the job is pending, running or completing."""
    ids = box.run("squeue", "-h", "-a", "-o", "%i", "-t", "PD,R,CG,S").split()
    return str(job) not in {name.partition("+")[0] for name in ids}


def sockets_below(root: Path) -> list[str]:
    """Unix sockets of the host that lie below a folder."""
    table = [x.split(maxsplit=7) for x in Path("/proc/net/unix").read_text().splitlines()]
    return [x[7] for x in table if len(x) == 8 and x[7].startswith(f"{root}/")]


def mentions(root: Path) -> list[int]:
    """Pids of live processes whose command line or environment names a path below a folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) in (os.getpid(), os.getppid()):
            continue
        process = process_of(int(entry.name))
        try:
            text = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
        except OSError:
            continue
        if process is not None and process.alive and f"{root}/".encode() in text:
            found.append(process.pid)
    return found


@pytest.fixture
def folder() -> Iterator[Path]:
    """An empty folder that munged accepts above its socket."""
    path = Path(tempfile.mkdtemp(prefix="mb-", dir="/tmp"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path, ignore_errors=True)


def cli(*argv: str, **rest: object) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "tools.slurm_box", *argv]
    return subprocess.run(command, **{"env": environ, "capture_output": True, "text": True, "timeout": 120, **rest})


# -- life -------------------------------------------------------------------------------------------------------------


def test_up_again_changes_nothing(clean_box: Box) -> None:
    before = clean_box.daemons()
    assert None not in before.values()
    clean_box.up()
    assert clean_box.started == ()
    assert clean_box.daemons() == before


def test_up_repairs_what_is_missing(clean_box: Box) -> None:
    pids = clean_box.daemons()
    for name in ("munged", "slurmctld", "node-sandbox2"):
        process = process_of(pids[name] or 0)
        assert process is not None
        end([process], grace_s=0.0)
    clean_box.up()
    assert clean_box.started == ("munged", "slurmctld", "node-sandbox2")
    assert set(clean_box.nodes().values()) == {"idle"}
    names = clean_box.run("srun", "-p", "sandbox", "-N2", "printenv", "SLURMD_NODENAME")
    assert sorted(names.split()) == ["sandbox1", "sandbox2"]


def test_a_running_box_refuses_another_spec(clean_box: Box) -> None:
    with pytest.raises(UserError, match=r"trainer:2.*trainer:3.*run `down` first"):
        clean_box.up(BoxSpec.parse("trainer:3"))


def test_down_leaves_no_process_behind(folder: Path) -> None:
    box = Box(folder)
    box.up(BoxSpec.parse("trainer:2"))
    stubborn = "trap '' TERM INT; echo runs $$; setsid sleep 300 & sleep 300 & wait"
    submit(box, f'#!/bin/bash\nsrun -n2 -N2 bash -c "{stubborn}"\n', folder / "log" / "job", "-N2", "-p", "trainer")
    until(lambda: len(lines(folder / "log" / "job", "runs")) == 2, "both tasks to run")
    assert len(mentions(folder)) > 8
    box.down()
    assert mentions(folder) == []
    assert sockets_below(folder) == []
    assert set(box.daemons().values()) == {None}
    box.down()  # again: nothing to do
    assert [record.state for record in box.history()] == ["CANCELLED"]
    box.up()
    assert set(box.nodes().values()) == {"idle"}
    box.down()


def test_two_boxes_started_at_once_live_side_by_side(folder: Path) -> None:
    command = [sys.executable, "-m", "tools.slurm_box", "up", "--nodes", "trainer:2", "--gpus", "trainer:2"]
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONDONTWRITEBYTECODE": "1"}
    boxes = [Box(folder / "a"), Box(folder / "b")]
    try:
        starts = [
            subprocess.Popen([*command, "--root", str(box.root)], env=environ, stdout=subprocess.PIPE, text=True)
            for box in boxes
        ]
        for box, start in zip(boxes, starts, strict=True):
            said, _ = start.communicate(timeout=120)
            assert start.returncode == 0
            assert said.startswith("up in ") and said.endswith(f"; export SLURM_CONF={box.root}/slurm.conf\n")
        ports = [json.loads((box.root / "box.json").read_text())["base_port"] for box in boxes]
        assert abs(ports[0] - ports[1]) >= 64
        for box in boxes:
            script = "echo $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES $SLURM_CONF"
            got = box.run("srun", "-N2", "--gres=gpu:2", "sh", "-c", script)
            assert sorted(got.splitlines()) == [f"trainer{k} 0,1 {box.root}/slurm.conf" for k in (1, 2)]
        boxes[0].down()
        assert boxes[1].run("srun", "-N2", "echo", "still here").split("\n")[0] == "still here"
    finally:
        for box in boxes:
            box.down()
    assert mentions(folder) == []


def test_two_calls_of_up_start_one_box(folder: Path) -> None:
    command = [sys.executable, "-m", "tools.slurm_box", "up", "--nodes", "trainer:1", "--root", str(folder)]
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        calls = [subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) for _ in range(2)]
        said = sorted(call.communicate(timeout=120)[0].partition(" ")[0] for call in calls)
        assert said == ["already", "up"]
    finally:
        Box(folder).down()


def test_up_resumes_a_node_that_an_operator_took_down(clean_box: Box) -> None:
    clean_box.run("scontrol", "update", "nodename=sandbox1", "state=down", "reason=test")
    assert clean_box.nodes()["sandbox1"] == "down"
    clean_box.up()
    assert clean_box.nodes()["sandbox1"] == "idle"


def test_a_crash_of_everything_is_cleaned_up(folder: Path) -> None:
    box = Box(folder)
    try:
        box.up(BoxSpec.parse("trainer:2"))
        submit(box, "#!/bin/bash\necho runs\nsleep 300\n", folder / "log" / "job", "--no-requeue", "-w", "trainer1")
        until(lambda: lines(folder / "log" / "job", "runs"), "the job to run")
        daemons = [process_of(pid) for pid in box.daemons().values() if pid is not None]
        end([process for process in daemons if process is not None], grace_s=0.0, sig=signal.SIGKILL)
        orphans = {pid for pid in mentions(folder) if b"sleep\x00300" in Path(f"/proc/{pid}/cmdline").read_bytes()}
        assert len(orphans) == 1, "a task outlives its slurmd"
        box.up()
        assert not orphans & set(mentions(folder))
        until(lambda: set(box.nodes().values()) == {"idle"}, "idle nodes")
    finally:
        box.down()
    assert mentions(folder) == []


def test_an_ordinary_user_has_a_box_of_their_own(folder: Path) -> None:
    if os.getuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("only root can become another user")
    python = next((p for p in (sys.executable, "/usr/bin/python3") if _runs_as_nobody(p)), None)
    if python is None:
        pytest.skip("no Python 3.11 that user nobody may run")
    os.chown(folder, 65534, 65534)
    nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    environ = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(REPOSITORY), "PYTHONDONTWRITEBYTECODE": "1"}
    root = folder / "box"

    def box(*argv: str) -> subprocess.CompletedProcess[str]:
        command = [*nobody, python, "-m", "tools.slurm_box", *argv, "--root", str(root)]
        return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, cwd=REPOSITORY)

    try:
        assert box("up", "--nodes", "trainer:2").returncode == 0
        conf = {"PATH": "/usr/bin:/bin", "SLURM_CONF": f"{root}/slurm.conf"}
        ran = subprocess.run([*nobody, "srun", "-N2", "id", "-u"], env=conf, capture_output=True, text=True, timeout=60)
        assert ran.stdout.split() == ["65534", "65534"], ran.stderr
        with pytest.raises(UserError, match="belongs to another box"):
            Box(root).up()
        refused = box("up", "--nodes", "trainer:2", "--netns")
        assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
        assert "needs root" in refused.stderr
    finally:
        assert box("down").returncode == 0
    assert mentions(root) == []


def _runs_as_nobody(python: str) -> bool:
    check = "import sys; sys.exit(sys.version_info < (3, 11))"
    command = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", python, "-c", check]
    return subprocess.run(command, capture_output=True, timeout=30).returncode == 0


def test_a_recycled_pid_is_never_ended(folder: Path) -> None:
    record = folder / "daemon.json"
    sleeper = spawn(["/bin/sleep", "300"], os.environ, log=folder / "log", record=record)
    try:
        assert read_record(record) == sleeper
        other = Process(sleeper.pid, sleeper.start_ticks - 1, sleeper.boot_id)
        assert not other.alive
        end([other], grace_s=0.1)
        assert sleeper.alive
    finally:
        end([sleeper], grace_s=5.0)
    assert read_record(record) is None


# -- jobs and faults --------------------------------------------------------------------------------------------------


def test_three_components_start_together_and_leave_a_history(clean_box: Box, folder: Path) -> None:
    step = "srun --het-group=0,1,2 sh -c 'echo \"on $SLURMD_NODENAME of $SLURM_HET_SIZE\"'"
    job = submit(clean_box, f"{HET}{step}\n", folder / "out")
    until(lambda: finished(clean_box, job), f"job {job} to end")
    assert sorted(lines(folder / "out", "on")) == [
        f"on {n} of 3" for n in ("rollout1", "rollout2", "sandbox1", "trainer1")
    ]
    until(lambda: len([r for r in clean_box.history() if r.het_job_id == job]) == 3, "three records")
    records = sorted((r for r in clean_box.history() if r.het_job_id == job), key=lambda r: r.het_offset or 0)
    assert [(r.het_offset, r.job_id - job, r.name, r.state) for r in records] == [
        (0, 0, "train", "COMPLETED"),
        (1, 1, "roll", "COMPLETED"),
        (2, 2, "sand", "COMPLETED"),
    ]
    assert records[1].nodes == ("rollout1", "rollout2")


def test_requeue_of_the_leader_restarts_all_components(clean_box: Box, folder: Path) -> None:
    job = submit(clean_box, HET + STAYS, folder / "out")
    until(lambda: len(lines(folder / "out", "on")) == 4, "the first start")
    with pytest.raises(UserError):
        clean_box.run("scontrol", "requeue", str(job + 1))
    clean_box.run("scontrol", "requeue", str(job))
    until(lambda: len(lines(folder / "out", "on")) == 8, "the second start")
    assert lines(folder / "out", "start") == ["start 0", "start 1"]
    clean_box.run("scancel", str(job))
    until(lambda: len([r for r in clean_box.history() if r.het_job_id == job]) == 6, "six records")
    states = {k: [r.state for r in clean_box.history() if r.het_job_id == job and r.het_offset == k] for k in range(3)}
    assert states == {k: ["REQUEUED", "CANCELLED"] for k in range(3)}


def test_a_power_cut_moves_the_job_to_another_node(clean_box: Box, folder: Path) -> None:
    job = submit(clean_box, HET + STAYS, folder / "out")
    until(lambda: len(lines(folder / "out", "on")) == 4, "the first start")
    lost = next(x.split()[1] for x in lines(folder / "out", "on") if x.startswith("on sandbox"))
    clean_box.kill_node(lost)
    assert clean_box.nodes()[lost].startswith("down")
    assert clean_box.daemons()[f"node-{lost}"] is None
    until(lambda: len(lines(folder / "out", "on")) == 8, "the second start")
    first, second = [x for x in lines(folder / "out", "on") if x.startswith("on sandbox")]
    assert first != second
    clean_box.run("scancel", str(job))
    clean_box.start_node(lost)
    assert clean_box.nodes()[lost] == "idle"


def test_a_power_cut_without_requeue_is_a_node_failure(clean_box: Box, folder: Path) -> None:
    script = "#!/bin/bash\necho runs\nsleep 300\n"
    job = submit(clean_box, script, folder / "out", "--no-requeue", "-p", "rollout", "-w", "rollout2")
    until(lambda: lines(folder / "out", "runs"), "the job to run")
    clean_box.kill_node("rollout2")
    until(
        lambda: [r.state for r in clean_box.history() if r.job_id == job] == ["NODE_FAIL"],
        "the record of a node failure",
    )


@pytest.mark.slow
@pytest.mark.netns
def test_a_pulled_cable_splits_the_job_and_heals(folder: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("network namespaces need root")
    with fresh_box(BoxSpec.parse("trainer:2,rollout:1", netns=True, node_timeout_s=3)) as box:
        beat = folder / "beat"
        beat.mkdir()
        script = f"#!/bin/bash\nwhile :; do date +%s%N > {beat}/$(hostname); sleep 0.1; done\n"
        submit(box, script, folder / "out", "--requeue", "-p", "trainer")
        until(lambda: any(beat.iterdir()), "the job's first start")
        lost = next(beat.iterdir()).name
        other = {"trainer1": "trainer2", "trainer2": "trainer1"}[lost]
        box.cut(lost)
        assert box.cables() == {lost: False, other: True, "rollout1": True}
        until(lambda: "down" in box.nodes()[lost], f"{lost} to be down", 90.0)
        until(lambda: (beat / other).exists(), f"the job's second start, on {other}")
        before = (beat / lost).read_text()
        until(lambda: (beat / lost).read_text() not in ("", before), "the cut-off task to run on")
        box.restore(lost, resume=True)
        until(lambda: box.nodes()[lost] == "idle", f"{lost} to be idle again")
        box.kill_node("trainer1")
        assert box.cables()["trainer1"] is False
        with pytest.raises(UserError, match="trainer1 is off"):
            box.cut("trainer1")
        box.start_node("trainer1")
        bridge = json.loads((box.root / "box.json").read_text())["slot"]
        assert Path(f"/sys/class/net/mbox{bridge}").exists()
    assert not Path(f"/sys/class/net/mbox{bridge}").exists()
    assert mentions(box.root) == []


def test_a_cable_needs_namespaces(clean_box: Box) -> None:
    with pytest.raises(UserError, match="started with --netns"):
        clean_box.cut("trainer1")


PARENT = """import os, subprocess, sys
fd = int(os.environ["PMI_FD"])
pmi = {name: os.environ[name] for name in ("PMI_FD", "PMI_RANK", "PMI_SIZE")}
rank = "from mpi4py.MPI import COMM_WORLD as w; print('rank', w.rank, 'of', w.size, 'sum', w.allreduce(1), flush=True)"
child = subprocess.Popen([sys.executable, "-c", rank], env={"PATH": os.environ["PATH"], **pmi}, pass_fds=(fd,))
os.close(fd)
sys.exit(child.wait(timeout=100))
"""


@pytest.mark.mpi
def test_a_task_may_start_its_rank_as_a_child(clean_box: Box, folder: Path) -> None:
    """One world over both nodes of a component although srun's task isn't the MPI program itself.

    The rank needs PMI_FD, PMI_RANK, PMI_SIZE and the open descriptor, nothing else of Slurm's environment.
    """
    pytest.importorskip("mpi4py")
    (folder / "parent.py").write_text(PARENT)
    script = HET.replace("-p trainer -N1 -n1", "-p trainer -N2 -n2")
    step = f"srun --mpi=pmi2 --het-group=0 --kill-on-bad-exit=1 {sys.executable} {folder}/parent.py\n"
    job = submit(clean_box, script + step, folder / "out")
    until(lambda: finished(clean_box, job), f"job {job} to end", 120.0)
    assert sorted(lines(folder / "out", "rank")) == ["rank 0 of 2 sum 2", "rank 1 of 2 sum 2"]


@pytest.mark.slow
def test_accounting_tells_het_components_apart(folder: Path) -> None:
    # With namespaces where possible: then slurmdbd listens on the bridge, which must be there before it.
    with fresh_box(BoxSpec.parse("trainer:1,rollout:1", accounting=True, netns=os.getuid() == 0)) as box:
        head = "#!/bin/bash\n#SBATCH -J train -p trainer\n#SBATCH hetjob\n#SBATCH -J roll -p rollout\n"
        job = submit(box, f"{head}srun --het-group=0,1 true\n", folder / "out")
        ended = [f"{job}+0|train|COMPLETED", f"{job}+1|roll|COMPLETED"]
        ask = ("sacct", "-n", "-P", "-X", "-o", "jobid,jobname,state")
        until(lambda: box.run(*ask).split() == ended, "both components in sacct")
    assert mentions(box.root) == []


# -- command line -----------------------------------------------------------------------------------------------------


def test_the_command_line_shows_a_box(clean_box: Box) -> None:
    root = ("--root", str(clean_box.root))
    again = cli("up", *root)
    assert again.stdout == f"already up; export SLURM_CONF={clean_box.root}/slurm.conf\n"
    assert cli("env", *root).stdout == f"export SLURM_CONF={clean_box.root}/slurm.conf\n"
    clean_box.run("srun", "-p", "sandbox", "--job-name=seen", "true")
    until(lambda: any(r.name == "seen" for r in clean_box.history()), "the record of a job")
    records = [json.loads(x) for x in cli("history", "--json", *root).stdout.splitlines()]
    assert [(r["name"], r["state"]) for r in records][-1] == ("seen", "COMPLETED")
    assert " seen COMPLETED " in cli("history", *root).stdout
    assert cli("kill", "sandbox2", *root).returncode == 0
    status = cli("status", *root).stdout
    assert f"pid {clean_box.daemons()['slurmctld']}" in status
    assert "node-sandbox2    off" in status
    assert cli("start", "sandbox2", *root).returncode == 0
    assert clean_box.nodes()["sandbox2"] == "idle"


def test_each_thing_that_can_be_missing_is_one_line(folder: Path) -> None:
    closed = folder / "closed"
    closed.mkdir(mode=0o700)
    full = folder / "full"
    full.mkdir()
    (full / "letter").write_text("dear reader")
    loose = folder / "loose"
    loose.mkdir()
    loose.chmod(0o777)
    busy = folder / "file"
    busy.write_text("")
    root = ("--root", str(folder / "box"))
    cases: list[tuple[tuple[str, ...], str]] = [
        (("up", "--root", "/tmp/" + "x" * 100), "bytes; expected"),
        (("up", "--root", str(closed / "box")), "others can't enter"),
        (("up", "--root", str(loose / "box")), "others may write"),
        (("up", "--root", str(full)), "holds other files"),
        (("up", "--root", str(busy)), "expected a folder"),
        (("up", "--root", str(folder / "a b")), "without spaces"),
        (("up", "--nodes", "trainer", *root), "GROUP:COUNT"),
        (("up", "--nodes", "trainer:1", "--gpus", "rollout:1", *root), "no group 'rollout'"),
        (("status", *root), "no box here"),
        (("env", *root), "no box here"),
        (("kill", "trainer1", *root), "no box here"),
    ]
    for argv, says in cases:
        result = cli(*argv)
        assert result.returncode == 2, argv
        assert result.stderr.count("\n") == 1 and says in result.stderr, result.stderr
        assert "Traceback" not in result.stderr
    assert not (folder / "box").exists() and not (closed / "box").exists()
    environ = {"PATH": "/nonexistent", "PYTHONPATH": str(REPOSITORY)}
    missing = cli("up", *root, env=environ)
    assert missing.returncode == 2
    assert "isn't installed; run: apt-get install --no-install-recommends" in missing.stderr
    assert cli("down", *root).stdout.endswith("no box here, nothing to end\n")


def test_an_unknown_node_is_refused(clean_box: Box) -> None:
    result = cli("kill", "trainer9", "--root", str(clean_box.root))
    assert result.returncode == 2
    assert "no node 'trainer9'" in result.stderr and "trainer1, trainer2" in result.stderr


def test_a_taken_port_is_left_alone(folder: Path) -> None:
    with socket.socket() as holder:
        box = Box(folder)
        box.up(BoxSpec.parse("trainer:1"))
        first = json.loads((folder / "box.json").read_text())["base_port"]
        box.down()
        try:
            holder.bind(("127.0.0.1", first + 9))
            holder.listen()
            box.up()
            assert json.loads((folder / "box.json").read_text())["base_port"] != first
        finally:
            box.down()
