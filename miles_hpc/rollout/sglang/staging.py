"""Host memory that a version is fetched into while the one before is served, and that the server's ranks map.

A memfd: it has no name that could be left behind, and is gone with this process. Other processes of the same user reach
it through /proc (proc(5), /proc/pid/fd).
"""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from miles_hpc.core.errors import IntegrityError
from miles_hpc.core.types import WeightPiece
from miles_hpc.weights.bucket import unpack

__all__ = ["Staging", "Verdict"]


class Verdict(msgspec.Struct):
    """What one rank's loader says of an update (inside/miles_hpc_in_sglang.py)."""

    token: str
    ok: bool
    error: str
    compared: int  # elements of live parameters
    unused: list[str]
    seconds: float = 0.0


class Staging:
    """One version's bytes, and the folder for verdicts. Not for two updates at once."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("miles-hpc-weights", os.MFD_CLOEXEC)
        self._size = 0
        self._mapped: mmap.mmap | None = None
        self._offsets: dict[str, int] = {}
        self._folder = Path(tempfile.mkdtemp(prefix="miles-hpc-sglang-"))

    @property
    def path(self) -> str:
        """Where other processes of this user open it, as long as this process lives."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    @property
    def verdicts(self) -> str:
        """Path of a rank's verdict, with {rank} in it."""
        return str(self._folder / "verdict-{rank}.json")

    def lay_out(self, pieces: Sequence[WeightPiece]) -> None:
        """Room for these pieces, one after the other."""
        size = sum(piece.n_bytes for piece in pieces)
        if size != self._size:
            self._unmap()
            os.ftruncate(self._fd, size)
            self._size = size
        if self._mapped is None and size:
            self._mapped = mmap.mmap(self._fd, size)
        self._offsets, at = {}, 0
        for piece in pieces:
            self._offsets[piece.name] = at
            at += piece.n_bytes

    def put(self, pieces: Sequence[WeightPiece], data: memoryview) -> None:
        """A bucket that `weights.broadcast.fetch` has verified."""
        for piece, view in unpack(pieces, data):
            if self._mapped is not None and piece.n_bytes:
                at = self._offsets[piece.name]
                self._mapped[at : at + piece.n_bytes] = view

    def take_verdicts(self, token: str, n_ranks: int) -> list[Verdict]:
        """The verdicts on the update with this token; they are removed. Raises IntegrityError when one is missing."""
        found = []
        for rank in range(n_ranks):
            path = Path(self.verdicts.format(rank=rank))
            try:
                verdict = msgspec.json.decode(path.read_bytes(), type=Verdict)
            except (OSError, msgspec.MsgspecError) as error:
                raise IntegrityError(f"rank {rank} left no verdict on the update: {error}") from error
            path.unlink(missing_ok=True)
            if verdict.token != token:
                raise IntegrityError(f"rank {rank}'s verdict is on another update")
            found.append(verdict)
        return found

    def order(self, tensors: Sequence[Any], token: str, *, check: bool) -> str:
        """Write down what the loader is to do; returns the path. `tensors` are checkpoint.StagedTensor."""
        told = {
            "staging": self.path,
            "tensors": [(t.name, t.dtype, t.shape, t.offset) for t in tensors],
            "verdict": self.verdicts,
            "token": token,
            "check": check,
        }
        path = self._folder / "order.json"
        path.write_bytes(msgspec.json.encode(told))
        return str(path)

    def close(self) -> None:
        """Idempotent."""
        if self._fd >= 0:
            self._unmap()
            os.close(self._fd)
            self._fd = -1
            shutil.rmtree(self._folder, ignore_errors=True)

    def _unmap(self) -> None:
        if self._mapped is not None:
            self._mapped.close()
            self._mapped = None
