"""The relay between MPI_Init and Slurm's process manager."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from miles_hpc.control import mpi_start
from miles_hpc.control.pmi_relay import VALUE_BYTES, short_values, shorten

LIMITS = b"cmd=maxes rc=0 kvsname_max=256 keylen_max=64 vallen_max=%d\n"


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """A rank's connection to its process manager: the rank's end, and the manager's."""
    rank, manager = socket.socketpair()
    for end in (rank, manager):
        end.settimeout(10.0)
    with rank, manager:
        yield rank, manager


@pytest.mark.parametrize(
    ("said", "heard"),
    [
        (LIMITS % 1024, LIMITS % VALUE_BYTES),
        (LIMITS % 512, LIMITS % 512),
        (b"cmd=get_result rc=0 value=vallen_max=1024\n", b"cmd=get_result rc=0 value=vallen_max=1024\n"),
        (b"    54cmd=kvs-get-response;rc=0;value=cmd=maxes vallen_max=1024;", None),
    ],
    ids=["too large", "small", "a value that looks like it", "PMI-2"],
)
def test_only_the_limit_is_rewritten(said: bytes, heard: bytes | None) -> None:
    assert shorten(said) == (said if heard is None else heard)


def test_the_longest_line_fits() -> None:
    """Slurm takes 1023 bytes a line; job and step ids are 32 bit."""
    line = f"cmd=put kvsname={2**32 - 1}.{2**32 - 1} key=-allgather-1-99999-seg-9/9 value={'5A' * (VALUE_BYTES // 2)}\n"
    assert len(line) <= 1023
    assert (VALUE_BYTES - 2) // 2 == (VALUE_BYTES - 1) // 2  # MPICH's put and get cut at the same place


def test_the_relay_is_there_for_the_start_only(ends: tuple[socket.socket, socket.socket]) -> None:
    rank, manager = ends
    before, others = os.fstat(rank.fileno()).st_ino, _children()
    with short_values(rank.fileno()):
        assert os.fstat(rank.fileno()).st_ino != before
        rank.sendall(b"cmd=get_maxes\n")
        assert manager.recv(100) == b"cmd=get_maxes\n"
        manager.sendall(LIMITS % 1024)
        assert rank.recv(100) == LIMITS % VALUE_BYTES
        assert len(_children() - others) == 1
        rank.sendall(b"cmd=barrier_in\n")  # on its way when MPI_Init fails, say
    assert manager.recv(100) == b"cmd=barrier_in\n"
    assert not _children() - others
    assert os.fstat(rank.fileno()).st_ino == before
    rank.sendall(b"cmd=finalize\n")
    assert manager.recv(100) == b"cmd=finalize\n"
    manager.sendall(LIMITS % 1024)
    assert rank.recv(100) == LIMITS % 1024


def test_a_start_that_fails_gives_the_connection_back(ends: tuple[socket.socket, socket.socket]) -> None:
    rank, manager = ends
    with pytest.raises(RuntimeError), short_values(rank.fileno()):
        raise RuntimeError
    rank.sendall(b"cmd=finalize\n")
    assert manager.recv(100) == b"cmd=finalize\n"


def test_a_manager_that_ends_is_noticed(ends: tuple[socket.socket, socket.socket]) -> None:
    rank, manager = ends
    with short_values(rank.fileno()):
        manager.close()
        assert rank.recv(100) == b""


def test_a_descriptor_that_is_closed_is_none() -> None:
    """PMI_FD may have been inherited without its descriptor."""
    read_end, write_end = os.pipe()
    assert mpi_start._is_open(read_end)
    os.close(read_end)
    os.close(write_end)
    assert not mpi_start._is_open(read_end)


def _children() -> set[int]:
    return {int(pid) for path in Path("/proc/self/task").iterdir() for pid in (path / "children").read_text().split()}
