"""MPI inside a role and UCX between roles, in one process: each brings a UCX library, and the first one serves both."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MPIEXEC = Path(sys.executable).with_name("mpiexec")

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(not MPIEXEC.exists(), reason=f"{MPIEXEC} is missing: pip install mpi4py mpich"),
    pytest.mark.skipif(importlib.util.find_spec("ucxx") is None, reason="ucxx isn't installed: pip install ucxx-cu12"),
]

BOTH = """
import os
from miles_hpc.control.opening import open_blocking_transport, open_carrier
from miles_hpc.core.messages import Heartbeat
from miles_hpc.core.transport import Credentials, PeerIdentity

open_carrier("ucx")
from miles_hpc.control.mpi import open_world

group = open_world(2)
me = PeerIdentity(role="trainer", name="both", host="host", pid=os.getpid(), attempt=1, term=1)
for kind in ("ucx", "mpi"):
    transport = open_blocking_transport(kind, Credentials(bytes(32), me))
    listener = transport.listen(lambda endpoint, message, payload: (message, [payload]))
    endpoint = transport.connect(listener.address, deadline_s=60)
    for n in (0, 100, 1 << 20, 9 << 20):
        assert len(endpoint.call(Heartbeat(), payload=[bytes(n)], deadline_s=60).payload) == n
    assert group.run_as_one(lambda: kind, deadline_s=60) == kind
    assert group.broadcast(b"x" * 300_000 if group.rank == 0 else None, deadline_s=60) == b"x" * 300_000
    transport.close()
os.write(1, b"fine\\n")
"""

WRONG_WAY_ROUND = """
from miles_hpc.control.mpi import open_world
open_world(1)
from miles_hpc.control.opening import open_carrier
from miles_hpc.core.errors import UserError
try:
    open_carrier("ucx")
    print("fine")
except UserError as error:
    print(error)
"""


def python(*arguments: str, limit_s: float = 150.0) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        arguments, env=environment, capture_output=True, text=True, timeout=limit_s, check=False, cwd=ROOT
    )


def test_both_in_one_process(tmp_path: Path) -> None:
    (tmp_path / "both.py").write_text(BOTH)
    done = python(str(MPIEXEC), "-n", "2", sys.executable, "-P", str(tmp_path / "both.py"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("fine") == 2


def test_the_wrong_way_round_is_one_clear_line() -> None:
    done = python(sys.executable, "-P", "-c", WRONG_WAY_ROUND)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "fine\n" or (done.stdout.count("\n") == 1 and "another UCX is loaded already" in done.stdout)


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """Short, because agents' sockets lie below it."""
    root = Path(tempfile.mkdtemp(prefix="mu-", dir="/tmp"))
    yield root / "run"
    shutil.rmtree(root, ignore_errors=True)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_whole_run_over_ucx(run_dir: Path) -> None:
    command = [sys.executable, "-P", "-m", "miles_hpc.cli.main", "local", "demo", "--run-dir", str(run_dir)]
    for setting in (
        "groups.trainer.nodes=2",
        "groups.rollout.nodes=1",
        "groups.sandbox.nodes=1",
        "sft.steps=2",
        "sft.n_demonstrations=16",
        "sft.batch_size=8",
        "eval.n_episodes=4",
        "rollout.n_steps=3",
        "rollout.rollout_batch_size=2",
        "rollout.n_samples_per_prompt=4",
        "control.transport=ucx",
    ):
        command += ["--set", setting]
    done = python(*command, limit_s=280.0)
    logs = "\n".join(f"{p.name}: {p.read_text()[-800:]}" for p in sorted(run_dir.glob("attempts/*/logs/*.log")))
    assert (done.returncode, "the run is complete" in done.stdout) == (0, True), done.stdout + done.stderr + logs
    published = [p.read_text() for p in run_dir.glob("terms/*/rendezvous/controller.json")]
    assert published and all("ucx://" in text for text in published), published
