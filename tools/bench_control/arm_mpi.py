"""MPI through mpi4py, buffers only: the caller is rank 0, every other rank a peer.

Both sides wait inside MPI, which polls without pause: each takes a whole core, also while nothing happens. The figures
are MPI's best; a process that has other things to do can't have them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.bench_control.arm import Arm
from tools.bench_control.plan import Cell
from tools.bench_control.raw import ECHO, HEAD_BYTES, MAX_BYTES, STOP, Answers, request, stamped


class MpiArm(Arm):
    """Receives are posted before anything is sent; buffers are made once and used again."""

    def __init__(self, folder: Path, cores: list[int]) -> None:
        from mpi4py import MPI

        super().__init__(folder, cores)
        self._mpi: Any = MPI
        self._world = MPI.COMM_WORLD

    def start(self, n_peers: int) -> None:
        if self._world.size != n_peers + 1:
            raise RuntimeError(f"MPI world of {self._world.size}; expected {n_peers + 1}: is mpiexec of the same MPI?")
        self._world.Barrier()

    def operation(self, cell: Cell) -> Callable[[], object]:
        world, byte = self._world, self._mpi.BYTE
        message = [request(cell), byte]
        size = max(HEAD_BYTES, cell.result_bytes)
        if cell.calls == 1:
            answer = [bytearray(size), byte]

            def call() -> None:
                world.Send(message, dest=1)
                world.Recv(answer, source=1)

            return call
        wait = self._mpi.Request.Waitall
        ranks = [rank for _ in range(cell.window) for rank in range(1, cell.peers + 1)]
        targets = [(rank, [bytearray(size), byte]) for rank in ranks]

        def batch() -> None:
            pending = [world.Irecv(buffer, source=rank) for rank, buffer in targets]
            pending += [world.Isend(message, dest=rank) for rank in ranks]
            wait(pending)

        return batch

    def echo(self, peer: int, data: bytes) -> bytes:
        message = stamped(ECHO, data)
        answer = bytearray(len(message))
        pending = self._world.Irecv([answer, self._mpi.BYTE], source=peer + 1)
        self._world.Send([message, self._mpi.BYTE], dest=peer + 1)
        pending.Wait()
        if answer != message:
            raise ValueError(f"rank {peer + 1}: the echo arrived changed")
        return data

    def fetch(self, peer: int, n_bytes: int) -> bytes:
        answer = bytearray(max(HEAD_BYTES, n_bytes))
        self._world.Send([stamped(len(answer), b""), self._mpi.BYTE], dest=peer + 1)
        self._world.Recv([answer, self._mpi.BYTE], source=peer + 1)
        return bytes(answer)

    def stop(self) -> None:
        for rank in range(1, self._world.size):
            self._world.Send([stamped(STOP, b""), self._mpi.BYTE], dest=rank)

    def close(self) -> None:
        self._mpi.Finalize()  # waits for the peers to do the same

    def describe(self) -> dict[str, str]:
        return {"library": self._mpi.Get_library_version().split("\n")[0].strip("\0 \t")[:80]}


def serve_rank(rank: int, folder: Path, cls: str) -> None:
    """A peer, until rank 0 says stop."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    world.Barrier()
    answers = Answers()
    buffer = bytearray(MAX_BYTES)
    while True:
        world.Recv([buffer, MPI.BYTE], source=0)
        answer = answers.to(buffer)
        if answer is None:
            break
        world.Send([answer, MPI.BYTE], dest=0)
    MPI.Finalize()
