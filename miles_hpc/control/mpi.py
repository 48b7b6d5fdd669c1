"""SPMD groups: one command reaches all ranks of an MPI world and succeeds or fails as one.

    rank 0   broadcast(command) ─▶ run_as_one(fn) ─▶ result, or one SpmdError with rank, host and traceback
    rank k   broadcast(None) ────▶ run_as_one(fn) ─▶ result, or the same SpmdError

Bytes only, no pickle. Every wait polls with a back-off: sleeps grow from nothing to `max_sleep_s`, so that an idle rank
leaves its core to others (MPI's own blocking calls spin). README.md has the measured price.

A rank that raises often leaves others in a collective that never ends. Outcomes are therefore sent one by one, and once
a failure is known, rank 0 waits for the others only `grace_s` longer; the error then names the silent ranks, and the
world must end: nothing can be said about the state of those ranks, and MPI itself can't be continued.

All MPI calls come from the thread that opened the group.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from miles_hpc.control.mpi_start import start_mpi
from miles_hpc.core.deadline import Deadline
from miles_hpc.core.errors import DeadlineExpired, MilesError, ProtocolError, UserError

__all__ = ["RankFailure", "SpanningWorld", "SpmdError", "SpmdGroup", "open_spanning_world", "open_world"]

T = TypeVar("T")

#: Longest sleep between two looks at a request.
MAX_SLEEP_S = 0.002
#: How long rank 0 waits for the other outcomes after one rank has failed.
GRACE_S = 30.0

_INLINE_BYTES = 4096  # a broadcast's first message: length and the first bytes
_CHUNK_BYTES = 1 << 30  # MPI counts are 32-bit
_LENGTH = struct.Struct("<Q")
_OUTCOME_TAG = 1
_FIRST_SLEEP_S = 20e-6
_YIELDS = 50  # looks before the first real sleep


class RankFailure(msgspec.Struct, frozen=True, array_like=True):
    """What one rank raised."""

    rank: int
    host: str
    kind: str
    text: str
    traceback: str


class SpmdError(MilesError):
    """One or more ranks raised in `run_as_one`. `silent` ranks gave no outcome; unless empty, the world must end."""

    def __init__(self, failures: tuple[RankFailure, ...], silent: tuple[int, ...], size: int) -> None:
        first = failures[0]
        text = f"rank {first.rank} of {size} on {first.host}: {first.kind}: {first.text}"
        if len(failures) > 1:
            text += f" (and {len(failures) - 1} other ranks: {_ranks(tuple(f.rank for f in failures[1:]))})"
        if silent:
            text += f"; no outcome from ranks {_ranks(silent)}"
        super().__init__(f"{text}\n{first.traceback}")
        self.failures = failures
        self.silent = silent


class SpmdGroup:
    """The ranks of one communicator, as one caller. Collective: all ranks make the same calls in the same order."""

    def __init__(self, comm: Any, *, max_sleep_s: float = MAX_SLEEP_S, grace_s: float = GRACE_S) -> None:
        self._comm = comm.Dup()  # nobody else's messages can be taken for ours
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()
        self.max_sleep_s = max_sleep_s
        self.grace_s = grace_s
        self._thread = threading.get_ident()

    def broadcast(self, data: bytes | None, *, deadline_s: float | None = None) -> bytes:
        """Rank 0's bytes on every rank; other ranks pass None.

        Without a deadline, waits as long as the world lives: that is how idle ranks wait for work, and it is the
        node's agent that ends them. Raises DeadlineExpired, after which the group can't be used any more.
        """
        if (data is None) == (self.rank == 0):
            raise ProtocolError(f"broadcast on rank {self.rank}: rank 0 passes the data, all others None")
        deadline = _deadline(deadline_s, "broadcast")
        first = bytearray(_INLINE_BYTES)
        if data is not None:
            first[: _LENGTH.size] = _LENGTH.pack(len(data))
            head = data[: _INLINE_BYTES - _LENGTH.size]
            first[_LENGTH.size : _LENGTH.size + len(head)] = head
        self._broadcast_buffer(first, deadline)
        (n_bytes,) = _LENGTH.unpack_from(first)
        n_inline = _INLINE_BYTES - _LENGTH.size
        if n_bytes <= n_inline:
            return data if data is not None else bytes(first[_LENGTH.size : _LENGTH.size + n_bytes])
        if data is not None:
            rest = memoryview(data)[n_inline:]
            for start in range(0, len(rest), _CHUNK_BYTES):
                self._broadcast_buffer(rest[start : start + _CHUNK_BYTES], deadline)
            return data
        whole = bytearray(n_bytes)
        whole[:n_inline] = first[_LENGTH.size :]
        target = memoryview(whole)[n_inline:]
        for start in range(0, len(target), _CHUNK_BYTES):
            self._broadcast_buffer(target[start : start + _CHUNK_BYTES], deadline)
        del target
        return bytes(whole)

    def gather_outcomes(self, outcome: bytes, *, deadline_s: float | None = None) -> list[bytes] | None:
        """Every rank's bytes, by rank, on rank 0; None elsewhere. Raises DeadlineExpired naming the silent ranks."""
        deadline = _deadline(deadline_s, "gather")
        if self.rank:
            self._send_outcome(outcome, deadline)
            return None
        outcomes = self._collect(outcome, deadline, failed=lambda _: False)
        return [outcomes[rank] for rank in range(self.size)]

    def barrier(self, *, deadline_s: float | None = None) -> None:
        """Wait until every rank is here. Raises DeadlineExpired."""
        self._check_thread()
        self._wait(self._comm.Ibarrier(), _deadline(deadline_s, "barrier"))

    def agree(self, ok: bool, *, deadline_s: float | None = None) -> bool:
        """True on every rank when `ok` was true on every rank. Raises DeadlineExpired."""
        from mpi4py import MPI

        self._check_thread()
        ours, all_ok = bytearray([1 if ok else 0]), bytearray(1)
        request = self._comm.Iallreduce([ours, MPI.UNSIGNED_CHAR], [all_ok, MPI.UNSIGNED_CHAR], op=MPI.MIN)
        self._wait(request, _deadline(deadline_s, "agree"))
        return bool(all_ok[0])

    def run_as_one(self, fn: Callable[[], T], *, deadline_s: float | None = None) -> T:
        """Run `fn` on this rank and learn how it went on all: this rank's result, or SpmdError on every rank.

        The deadline is for the outcomes, counted from this rank's own. Raises DeadlineExpired when ranks are silent
        though nobody has failed.
        """
        result: Any = None
        outcome = b""
        try:
            result = fn()
        except Exception as error:
            text = "".join(traceback.format_exception(error))
            failure = RankFailure(self.rank, socket.gethostname(), type(error).__name__, str(error), text)
            outcome = msgspec.msgpack.encode(failure)
        deadline = _deadline(deadline_s, "outcomes")
        if self.rank:
            self._send_outcome(outcome, deadline)
            verdict = self.broadcast(None, deadline_s=None if deadline is None else deadline.remaining_s + self.grace_s)
            failures = msgspec.msgpack.decode(verdict, type=tuple[RankFailure, ...])
        else:
            outcomes = self._collect(outcome, deadline, failed=bool)
            silent = tuple(rank for rank in range(self.size) if rank not in outcomes)
            failures = tuple(
                msgspec.msgpack.decode(data, type=RankFailure) for _, data in sorted(outcomes.items()) if data
            )
            if silent:
                raise SpmdError(failures, silent, self.size)
            self.broadcast(msgspec.msgpack.encode(failures))
        if failures:
            raise SpmdError(failures, (), self.size)
        value: T = result
        return value

    def abort(self, exit_code: int) -> None:
        """End the whole world now; for a world that can't be continued. Does not return."""
        self._comm.Abort(exit_code)

    # ------------------------------------------------------------------------------ pieces

    def _broadcast_buffer(self, buffer: bytearray | memoryview, deadline: Deadline | None) -> None:
        from mpi4py import MPI

        self._check_thread()
        self._wait(self._comm.Ibcast([buffer, MPI.BYTE], root=0), deadline)

    def _send_outcome(self, outcome: bytes, deadline: Deadline | None) -> None:
        from mpi4py import MPI

        self._check_thread()
        self._wait(self._comm.Isend([outcome, MPI.BYTE], dest=0, tag=_OUTCOME_TAG), deadline)

    def _collect(self, own: bytes, deadline: Deadline | None, *, failed: Callable[[bytes], bool]) -> dict[int, bytes]:
        """Rank 0: outcomes by rank; incomplete only when one has failed and the grace is over."""
        from mpi4py import MPI

        self._check_thread()
        outcomes = {0: own}
        grace = Deadline(self.grace_s, "outcomes") if failed(own) else None
        sleeper = _Sleeper(self.max_sleep_s)
        status = MPI.Status()
        while len(outcomes) < self.size:
            # Rank by rank, never "any source": a quick rank may have sent its next outcome already.
            found = False
            for rank in range(self.size):
                if rank in outcomes or not self._comm.Iprobe(source=rank, tag=_OUTCOME_TAG, status=status):
                    continue
                data = bytearray(status.Get_count(MPI.BYTE))
                self._comm.Recv([data, MPI.BYTE], source=rank, tag=_OUTCOME_TAG)
                outcomes[rank] = bytes(data)
                if grace is None and failed(outcomes[rank]):
                    grace = Deadline(self.grace_s, "outcomes")
                found = True
            if found:
                sleeper = _Sleeper(self.max_sleep_s)
                continue
            if grace is not None and grace.expired:
                return outcomes
            if deadline is not None and deadline.expired and grace is None:
                silent = tuple(rank for rank in range(self.size) if rank not in outcomes)
                raise DeadlineExpired(f"{deadline.error()}; silent ranks: {_ranks(silent)}")
            sleeper.sleep()
        return outcomes

    def _wait(self, request: Any, deadline: Deadline | None) -> None:
        sleeper = _Sleeper(self.max_sleep_s)
        while not request.Test():
            if deadline is not None:
                deadline.check()
            sleeper.sleep()

    def _check_thread(self) -> None:
        if threading.get_ident() != self._thread:
            raise ProtocolError("MPI was called from another thread than the one that opened the world")


class _Sleeper:
    """Back-off of one wait: some yields, then sleeps that double up to the longest."""

    def __init__(self, max_sleep_s: float) -> None:
        self._max_sleep_s = max_sleep_s
        self._looks = 0
        self._next_s = _FIRST_SLEEP_S

    def sleep(self) -> None:
        self._looks += 1
        if self._looks <= _YIELDS:
            time.sleep(0)
            return
        time.sleep(min(self._next_s, self._max_sleep_s))
        self._next_s = min(2 * self._next_s, self._max_sleep_s)


class SpanningWorld:
    """MPI's world over the tasks of all roles. `group` has the ranks that train; None in all other tasks.

    Its end is agreed upon by a barrier that every task enters when its part is over, so that nobody is taken for
    crashed by the process manager, and nobody waits for ever for a task that did crash.
    """

    def __init__(self, comm: Any, group: SpmdGroup | None) -> None:
        self._comm = comm
        self._end: Any = None
        self.group = group

    def is_over(self) -> bool:
        """Whether every task has said that its part is over; the first call says so for this one."""
        if self._end is None:
            self._end = self._comm.Ibarrier()
        return bool(self._end.Test())

    def finish(self, deadline_s: float = 5.0) -> bool:
        """Wait for all others to be over and end MPI. False when some aren't in time: then leave without MPI's end."""
        from mpi4py import MPI

        deadline = Deadline(deadline_s, "the end of MPI's world")
        while not self.is_over():
            if deadline.expired:
                return False
            time.sleep(0.01)
        MPI.Finalize()
        return True


def open_world(expected: int, *, max_sleep_s: float = MAX_SLEEP_S, grace_s: float = GRACE_S) -> SpmdGroup:
    """The group of all ranks of this step.

    Raises UserError when MPI's world has another size than `expected` (Slurm's number of tasks): with the wrong
    --mpi, srun starts as many worlds of one rank, and every one of them would train on its own.
    """
    return SpmdGroup(_whole_world(expected).COMM_WORLD, max_sleep_s=max_sleep_s, grace_s=grace_s)


def open_spanning_world(expected: int, *, works: bool) -> SpanningWorld:
    """The world of a step over all roles; tasks that train say `works`. Collective over all tasks.

    Raises UserError as `open_world` does.
    """
    MPI = _whole_world(expected)
    comm = MPI.COMM_WORLD.Split(0 if works else 1, MPI.COMM_WORLD.Get_rank())
    return SpanningWorld(MPI.COMM_WORLD, SpmdGroup(comm) if works else None)


def _whole_world(expected: int) -> Any:
    """mpi4py.MPI, started, with a world of the expected size."""
    MPI = start_mpi()  # with threads: rank 0 may call from a thread of its own, beside an event loop
    size = MPI.COMM_WORLD.Get_size()
    if size != expected:
        library = MPI.Get_library_version().split("\n")[0].strip()
        raise UserError(
            f"MPI world of {size} ranks, expected {expected}: this library ({library}) doesn't understand how it was "
            "started; MPICH needs srun --mpi=pmi2, Open MPI --mpi=pmix, or mpiexec of the same installation"
        )
    return MPI


def _deadline(seconds: float | None, what: str) -> Deadline | None:
    return None if seconds is None else Deadline(seconds, f"MPI {what}")


def _ranks(ranks: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"{shown} and {len(ranks) - 8} more" if len(ranks) > 8 else shown
