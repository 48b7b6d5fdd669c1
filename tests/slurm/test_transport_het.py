"""Transports between three het groups of a real Slurm job: the contract, a rank that dies, a world that isn't one."""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from miles_hpc.control.auth import new_secret
from tests.slurm.conftest import fresh_box, until, why_not
from tests.slurm.test_box import finished, submit
from tools.slurm_box import Box, BoxSpec

ROOT = Path(__file__).parents[2]
N_RANKS = 4

HET = f"""#!/bin/bash
#SBATCH --job-name=train --time=5 -p trainer -N2 -n2
#SBATCH hetjob
#SBATCH --job-name=roll -p rollout -N1 -n1
#SBATCH hetjob
#SBATCH --job-name=sand -p sandbox -N1 -n1
export PYTHONPATH={ROOT} PYTHONDONTWRITEBYTECODE=1
"""

pytestmark = [pytest.mark.slurm, pytest.mark.mpi]


@pytest.fixture
def folder() -> Iterator[Path]:
    """With the run's secret in it."""
    path = Path(tempfile.mkdtemp(prefix="mt-", dir="/tmp"))
    path.chmod(0o755)
    secret = path / "secret"
    secret.touch(mode=0o600)
    secret.write_bytes(new_secret())
    yield path
    shutil.rmtree(path, ignore_errors=True)


def span(box: Box, folder: Path, program: str, *, mpi: str, options: str = "", environment: str = "") -> str:
    """What a step over all three groups printed, and its exit code in the last line."""
    step = f"{environment} srun --mpi={mpi} --het-group=0,1,2 {options} {sys.executable} -P {program} 2>&1\n"
    out = Path(tempfile.mkdtemp(prefix="out-", dir=folder)) / "out"
    job = submit(box, f"{HET}{step}echo code $?\n", out)
    until(lambda: finished(box, job), f"job {job} to end", 170.0)
    return out.read_text()


def conformance(box: Box, folder: Path, kind: str, interface: str) -> None:
    program = f"-m tests.conformance.transport_program {kind} {folder} --interface={interface}"
    mpi = "pmi2" if kind == "mpi" else "none"
    said = span(box, folder, program, mpi=mpi, options="--kill-on-bad-exit=1")
    fine = sorted(line.split()[:4] for line in said.splitlines() if line.startswith("fine "))
    faces = ("asyncio", "blocking")
    assert fine == [["fine", str(rank), kind, faces[rank % 2]] for rank in range(N_RANKS)], said
    assert said.endswith("code 0\n"), said


@pytest.mark.parametrize("kind", ["mpi", "tcp", "ucx", "loopback"])
def test_the_contract_between_three_het_groups(clean_box: Box, folder: Path, kind: str) -> None:
    if reason := why_not(kind):
        pytest.skip(reason)
    conformance(clean_box, folder, kind, "lo")


@pytest.mark.slow
@pytest.mark.netns
@pytest.mark.timeout(600)
def test_the_contract_between_hosts(folder: Path) -> None:
    """Nodes with networks and shared memory of their own, as hosts have them."""
    if os.getuid() != 0:
        pytest.skip("network namespaces need root")
    with fresh_box(BoxSpec.parse("trainer:2,rollout:1,sandbox:1", netns=True)) as box:
        for kind in ("mpi", "tcp", "ucx"):
            if not why_not(kind):
                conformance(box, folder, kind, "")
        # With UCX over TCP, MPICH 5.0.2 ends a process that sends to a dead rank with SIGSEGV; libfabric reports it.
        said = dead_rank(box, folder, "MPIR_CVAR_CH4_NETMOD=ofi")
        assert said.count("gave up: rank2 (trainer on h, pid ") == 2 * (N_RANKS - 1), said
        assert said.count("endpoint closed: MPI: ") == 2 * (N_RANKS - 1), said


def test_without_pmi2_every_task_says_why_it_ends(clean_box: Box, folder: Path) -> None:
    said = span(clean_box, folder, f"-m tests.conformance.transport_program mpi {folder}", mpi="none")
    assert said.count("transport mpi: MPI world of 1 ranks, expected 4: ") == N_RANKS, said
    assert said.count("srun --mpi=pmi2") == N_RANKS
    assert "Traceback" not in said
    assert said.endswith("code 2\n"), said


USED_HEAP = """
import ctypes, random
from miles_hpc.control.mpi_start import start_mpi
from miles_hpc.core.env import read

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
rng = random.Random(read("SLURM_PROCID"))
for block in [libc.malloc(rng.randrange(100, 6000)) for _ in range(3000)]:
    ctypes.memset(ctypes.c_void_p(block), 0x5A, libc.malloc_usable_size(ctypes.c_void_p(block)))
    if rng.random() < 0.6:
        libc.free(ctypes.c_void_p(block))
MPI = start_mpi()
print("here:", *MPI.COMM_WORLD.allgather(MPI.COMM_WORLD.rank), flush=True)
"""


def test_what_lies_behind_the_address_does_not_matter(clean_box: Box, folder: Path) -> None:
    """MPICH 5.0.2 sends its neighbours in the heap along, in lines that Slurm cuts unless they're short."""
    if not hasattr(ctypes.CDLL(None), "malloc_usable_size"):
        pytest.skip("another malloc")
    (folder / "heap.py").write_text(USED_HEAP)
    said = span(clean_box, folder, f"{folder}/heap.py", mpi="pmi2", options="--kill-on-bad-exit=1")
    assert said.count("here: 0 1 2 3\n") == N_RANKS, said
    assert said.endswith("code 0\n"), said


DEAD_RANK = """
import os, signal, sys, time
from miles_hpc.control import mpi_world
from miles_hpc.control.auth import load_secret
from miles_hpc.control.opening import open_blocking_transport
from miles_hpc.core.errors import DeadlineExpired, PeerLost
from miles_hpc.core.messages import Heartbeat, Shutdown
from miles_hpc.core.transport import Credentials, PeerIdentity
from pathlib import Path

mpi_world.LEAVE_S = 2.0
world = mpi_world.enter_world()
rank = world.rank
identity = PeerIdentity(role="trainer", name=f"rank{rank}", host="h", pid=os.getpid(), attempt=1, term=1, rank=rank)
transport = open_blocking_transport("mpi", Credentials(load_secret(Path(sys.argv[1]) / "secret"), identity))

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

for mapped in open("/proc/self/maps"):
    if "/dev/shm/" in mapped:
        say("shares", mapped.split()[-1])

def echo(endpoint, message, payload):
    if isinstance(message, Shutdown):
        os.kill(os.getpid(), signal.SIGKILL)
    return message, [payload]

transport.listen(echo)
ready = {other: transport.connect(f"mpi://{other}", deadline_s=60) for other in range(world.size) if other != rank}
for endpoint in ready.values():
    endpoint.call(Heartbeat(), payload=[bytes(3 << 20)], deadline_s=60)
transport.serve(lambda: False, deadline_s=1.0)
victim = ready.pop(2) if rank != 2 else None
if rank == 2:
    transport.serve(lambda: False, deadline_s=60)
if rank == 0:
    victim.notify(Shutdown(reason=""), deadline_s=60)
transport.serve(lambda: False, deadline_s=1.0)
for payload in ([], [bytes(20 << 20)]):
    try:
        victim.call(Heartbeat(), payload=payload, deadline_s=1.0)
    except (DeadlineExpired, PeerLost) as error:
        say("gave up:", error)
for other, endpoint in ready.items():
    reply = endpoint.call(Heartbeat(), payload=[bytes(5 << 20)], deadline_s=60)
    say("alive:", rank, other, len(reply.payload))
transport.serve(lambda: False, deadline_s=3.0)
start = time.monotonic()
transport.close()
import atexit
world_leave = world.leave
def leave():
    world_leave()
    say("left in", round(time.monotonic() - start, 1), "s")
atexit.unregister(world.leave)
atexit.register(leave)
sys.exit(7)
"""


def dead_rank(box: Box, folder: Path, environment: str = "") -> str:
    """Rank 2 dies. The others go on among each other, and end by themselves, with an exit code of their own."""
    (folder / "dead.py").write_text(DEAD_RANK)
    program = f"{folder}/dead.py {folder}"
    said = span(box, folder, program, mpi="pmi2", options="--kill-on-bad-exit=0", environment=environment)
    assert said.count("gave up: rank2") == 2 * (N_RANKS - 1), said
    assert said.count("alive: ") == (N_RANKS - 1) * (N_RANKS - 2), said
    assert said.count("left in ") == N_RANKS - 1, said
    assert "Exited with exit code 7" in said, said
    return said


def test_a_dead_rank_hangs_nobody(clean_box: Box, folder: Path) -> None:
    """Over shared memory MPI doesn't notice: calls to it expire."""
    said = dead_rank(clean_box, folder)
    for line in said.splitlines():
        if line.startswith("shares "):  # ranks that end without MPI_Finalize leave these behind
            Path(line.split()[1]).unlink(missing_ok=True)
    assert said.count("gave up: rank2: Heartbeat: nothing after 1.") == 2 * (N_RANKS - 1), said
