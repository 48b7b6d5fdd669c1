"""SPMD groups in real MPI worlds, started with the mpiexec that lies beside this interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

MPIEXEC = Path(sys.executable).with_name("mpiexec")
ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(not MPIEXEC.exists(), reason=f"{MPIEXEC} is missing: pip install mpi4py mpich"),
]


def world(tmp_path: Path, n: int, program: str, *, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
    """Run `program` on n ranks; `group` is open in it already."""
    script = tmp_path / "program.py"
    script.write_text(
        "import os, sys, time\n"
        "from miles_hpc.control.mpi import SpmdError, open_world\n"
        "from miles_hpc.core.errors import DeadlineExpired, ProtocolError, UserError\n"
        f"n = {n}\n" + textwrap.dedent(program)
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [str(MPIEXEC), "-n", str(n), sys.executable, str(script)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False)


def test_broadcast_gather_agree_and_barrier(tmp_path: Path) -> None:
    done = world(
        tmp_path,
        3,
        """
        group = open_world(n)
        assert group.size == 3
        for size in (0, 1, 4087, 4088, 4089, 300_000):
            data = bytes(i * 7 % 251 for i in range(size))
            assert group.broadcast(data if group.rank == 0 else None, deadline_s=60) == data, size
        for round in range(20):  # quick ranks run ahead: outcomes of two rounds must not mix
            outcomes = group.gather_outcomes(b"%d/%d" % (round, group.rank), deadline_s=60)
            assert outcomes == ([b"%d/%d" % (round, r) for r in range(3)] if group.rank == 0 else None)
        assert group.gather_outcomes(b"", deadline_s=60) in ([b""] * 3, None)
        assert group.agree(True, deadline_s=60)
        assert not group.agree(group.rank != 2, deadline_s=60)
        group.barrier(deadline_s=60)
        print("fine", group.rank)
        """,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("fine") == 3


def test_exception_of_a_rank_arrives_everywhere_as_one_error(tmp_path: Path) -> None:
    done = world(
        tmp_path,
        2,
        """
        group = open_world(n)
        def explode():
            if group.rank == 1:
                raise ValueError("no such tensor")
            return 7
        try:
            group.run_as_one(explode, deadline_s=60)
        except SpmdError as error:
            import socket
            failure, = error.failures
            assert (failure.rank, failure.kind, failure.text) == (1, "ValueError", "no such tensor")
            assert failure.host == socket.gethostname()
            assert "in explode" in failure.traceback and "in explode" in str(error)
            assert error.silent == ()
            print("caught", flush=True)
        assert group.run_as_one(lambda: group.rank * 10, deadline_s=60) == group.rank * 10
        """,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("caught") == 2


def test_a_failure_is_told_though_another_rank_hangs(tmp_path: Path) -> None:
    done = world(
        tmp_path,
        3,
        """
        group = open_world(n, grace_s=1.0)
        def work():
            if group.rank == 1:
                raise RuntimeError("out of memory")
            if group.rank == 2:
                time.sleep(10)
        try:
            group.run_as_one(work, deadline_s=300)
        except SpmdError as error:
            if group.rank == 0:
                print(error.failures[0].rank, error.silent, str(error).splitlines()[0], flush=True)
                group.abort(3)
        """,
    )
    assert done.returncode != 0
    assert "1 (2,) rank 1 of 3 on " in done.stdout, done.stdout + done.stderr
    assert "RuntimeError: out of memory; no outcome from ranks 2" in done.stdout


def test_deadline_names_the_silent_ranks(tmp_path: Path) -> None:
    done = world(
        tmp_path,
        3,
        """
        group = open_world(n)
        if group.rank == 0:
            try:
                group.gather_outcomes(b"", deadline_s=1.0)
            except DeadlineExpired as error:
                print(error, flush=True)
                group.abort(3)
        elif group.rank == 1:
            group.gather_outcomes(b"")
        time.sleep(10)
        """,
    )
    assert "MPI gather: nothing after" in done.stdout, done.stdout + done.stderr
    assert "silent ranks: 2" in done.stdout


def test_wrong_world_size_is_a_user_error(tmp_path: Path) -> None:
    done = world(
        tmp_path,
        2,
        """
        try:
            open_world(16)
        except UserError as error:
            assert "\\n" not in str(error)
            print(error, flush=True)
        """,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("MPI world of 2 ranks, expected 16") == 2
    assert "--mpi=pmi2" in done.stdout


def test_misuse_is_refused(tmp_path: Path) -> None:
    done = world(
        tmp_path,
        1,
        """
        import threading
        group = open_world(n)
        try:
            group.broadcast(None)
        except ProtocolError as error:
            print(error)
        def elsewhere():
            try:
                group.barrier()
            except ProtocolError as error:
                print(error)
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        """,
    )
    assert "rank 0 passes the data" in done.stdout, done.stdout + done.stderr
    assert "another thread" in done.stdout
