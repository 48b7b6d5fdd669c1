"""The process's MPI world as the ground of a transport: checked when it's entered, shared out in lanes, left in time.

    enter_world ─▶ thread level, world size ─▶ lanes (one per carrier) ─▶ ... ─▶ interpreter exit: leave

**Communicator.** COMM_WORLD itself. A duplicate would be collective, and ranks open their transports at different
times, some never. In return the tags from FIRST_TAG on belong to the transport: nobody else uses them on COMM_WORLD,
nor receives there with MPI_ANY_TAG (SpmdGroup has a communicator of its own). What comes with these tags and isn't ours
is dropped with a warning.

    FIRST_TAG       leaving
    + 1 + lane      envelopes, read by the carrier that has the lane
    + 1025 + n      bodies of large frames, a tag per connection

**Leaving.** A dead rank hangs MPI_Finalize, and under mpiexec a rank that ends without it takes all others along. So
at exit each rank ends its connections, waits up to FLUSH_S until what it sent is gone, and tells rank 0, which answers
when all have: then all finalize at once. Whoever hears nothing for LEAVE_S (somebody is dead, or works on), or ends by
an exception, goes without MPI_Finalize: srun doesn't mind, mpiexec ends the world. Its file in /dev/shm stays then, 1
MiB with MPICH; Slurm's job_container/tmpfs removes such. Should MPI_Finalize hang nevertheless, SIGALRM ends the rank.
"""

from __future__ import annotations

import atexit
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from miles_hpc.control.mpi_start import start_mpi
from miles_hpc.control.polling import BackOff
from miles_hpc.core.env import read
from miles_hpc.core.errors import UserError

__all__ = ["FIRST_TAG", "LANES", "MpiWorld", "Occupant", "enter_world"]

#: Tags below are free for others.
FIRST_TAG = 1 << 14
#: Carriers that may be open in one process.
LANES = 1024
#: How long a process that ends waits for what it sent.
FLUSH_S = 1.0
#: How long a process that ends waits for the others to end as well.
LEAVE_S = 10.0

_FIRST_LANE_TAG = FIRST_TAG + 1
_FIRST_BODY_TAG = _FIRST_LANE_TAG + LANES
_MIN_BODY_TAGS = 1024
_FINALIZE_S = 5
_REAP_ROUNDS = 64
_MAX_SLEEP_S = 0.002

_lock = threading.Lock()
_world: MpiWorld | None = None


class Occupant(Protocol):
    """A carrier, as the world sees it."""

    @property
    def is_stranded(self) -> bool:
        """Whether nobody asks it any more."""

    def abandon_all(self) -> None:
        """End all connections."""

    def progress(self) -> bool:
        """Send and receive what goes without waiting."""


class MpiWorld:
    """MPI in this process; one instance, made by `enter_world`."""

    def __init__(self, MPI: Any) -> None:
        self.MPI = MPI
        self.comm = MPI.COMM_WORLD
        self.rank: int = self.comm.Get_rank()
        self.size: int = self.comm.Get_size()
        self.library: str = " ".join(MPI.Get_library_version().split("\n")[0].split())
        self.threads = {
            MPI.THREAD_SINGLE: "single",
            MPI.THREAD_FUNNELED: "funneled",
            MPI.THREAD_SERIALIZED: "serialized",
            MPI.THREAD_MULTIPLE: "multiple",
        }[MPI.Query_thread()]
        tag_bound: int = self.comm.Get_attr(MPI.TAG_UB)
        self._body_tags = tag_bound - _FIRST_BODY_TAG
        if self._body_tags < _MIN_BODY_TAGS:
            least = _FIRST_BODY_TAG + _MIN_BODY_TAGS
            raise UserError(f"transport mpi: tags of {self.library} end at {tag_bound}, expected {least} or more")
        #: This process has ended its part; threads that still run must not touch MPI.
        self.left = False
        self._pid = os.getpid()
        self._numbers = itertools.count(1)
        self._lanes: set[int] = set()
        self._reaping = threading.Lock()
        #: Carriers with a port or a connection.
        self.active: set[Occupant] = set()
        #: Requests that may never complete, with their buffers; see `keep`.
        self.orphans: list[tuple[Any, Any]] = []

    # ------------------------------------------------------------------------------ shared out

    def check_thread(self) -> None:
        """Raise UserError when this thread mustn't call MPI: without MPI_THREAD_MULTIPLE, only the main one may."""
        if self.threads != "multiple" and not self.MPI.Is_thread_main():
            raise UserError(
                f"transport mpi: this MPI was started with threads {self.threads!r}, expected 'multiple' for a "
                "transport outside of the main thread; open it there, or take an MPI that has MPI_THREAD_MULTIPLE"
            )

    def take_lane(self) -> int:
        """The lowest lane that is free. Raises UserError when none is."""
        with _lock:
            for lane in range(LANES):
                if lane not in self._lanes:
                    self._lanes.add(lane)
                    return lane
        raise UserError(f"transport mpi: {LANES} transports are open in this process; close some")

    def free_lane(self, lane: int) -> None:
        with _lock:
            self._lanes.discard(lane)

    def next_number(self) -> int:
        """A number for a connection, never given twice."""
        return next(self._numbers)

    def lane_tag(self, lane: int) -> int:
        return _FIRST_LANE_TAG + lane

    def body_tag(self, number: int) -> int:
        """The tag of the large frames that come to our connection `number`."""
        return _FIRST_BODY_TAG + number % self._body_tags

    def discard(self, rank: int, tag: int) -> None:
        """Take a message without making room for it."""
        self.keep(self.comm.Irecv([bytearray(0), self.MPI.BYTE], rank, tag))

    def keep(self, request: Any, buffer: Any = None) -> None:
        """A request that nobody waits for any more; nor its buffer, but MPI may still touch that."""
        with _lock:
            if not self.is_over(request):
                self.orphans.append((request, buffer))

    def is_over(self, request: Any) -> bool:
        """Whether MPI is done with a request, one way or the other."""
        try:
            return bool(request.Test())
        except self.MPI.Exception:  # its peer is gone, or it was truncated, as `discard` wants it
            return True

    def reap(self) -> None:
        """Go on with the ends of connections whose carrier or loop was closed; lanes come back when they are over."""
        with self._reaping:
            stranded = [carrier for carrier in list(self.active) if carrier.is_stranded]
            for carrier in stranded:
                carrier.abandon_all()
            for _ in range(_REAP_ROUNDS if stranded else 0):
                for carrier in stranded:
                    carrier.progress()
        self._sweep()

    def _sweep(self) -> None:
        with _lock:
            self.orphans = [orphan for orphan in self.orphans if not self.is_over(orphan[0])]

    # ------------------------------------------------------------------------------ leaving

    def leave(self) -> None:
        """At exit: flush, and finalize when that can't hang. Takes at most FLUSH_S + LEAVE_S + _FINALIZE_S."""
        import mpi4py

        if os.getpid() != self._pid or self.MPI.Is_finalized():  # a fork has no part in MPI
            return
        crashed = getattr(sys, "last_value", None) is not None
        delivered = self._flush()
        self.left = True
        if crashed or not delivered or not self._all_leave():
            if mpi4py.rc.finalize is not False and self.size > 1:
                self.comm.Abort(1)  # somebody started MPI before us, so mpi4py would finalize now, and hang
            return
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(_FINALIZE_S)
        self.MPI.Finalize()
        signal.alarm(0)

    def _flush(self) -> bool:
        """Whether all that was sent has gone."""
        for carrier in list(self.active):
            carrier.abandon_all()

        def gone() -> bool:
            for carrier in list(self.active):
                carrier.progress()
            self._sweep()
            return not self.active and not self.orphans

        return _wait(gone, FLUSH_S)

    def _all_leave(self) -> bool:
        """Whether all ranks are here."""
        if self.size == 1:
            return True
        byte = self.MPI.BYTE
        said, heard = b"x", bytearray(1)
        if self.rank:
            sent = self.comm.Isend([said, byte], 0, FIRST_TAG)
            answer = self.comm.Irecv([heard, byte], 0, FIRST_TAG)
            return _wait(lambda: self.is_over(sent) and self.is_over(answer), LEAVE_S) and bool(heard[0])
        waits = [self.comm.Irecv([bytearray(1), byte], rank, FIRST_TAG) for rank in range(1, self.size)]

        def all_here() -> bool:
            while waits and self.is_over(waits[-1]):
                waits.pop()
            return not waits

        if not _wait(all_here, LEAVE_S):
            return False
        answers = [self.comm.Isend([said, byte], rank, FIRST_TAG) for rank in range(1, self.size)]
        return _wait(lambda: all(map(self.is_over, answers)), FLUSH_S)


def _wait(done: Callable[[], bool], limit_s: float) -> bool:
    end = time.monotonic() + limit_s
    back_off = BackOff(_MAX_SLEEP_S)
    while not done():
        if time.monotonic() > end:
            return False
        pause = back_off.pause_s()
        if pause:
            time.sleep(pause)
    return True


def enter_world(expected: int | None = None) -> MpiWorld:
    """MPI of this process, started if it wasn't.

    Raises UserError when the world has another size than `expected`; without it the number of tasks of the Slurm step
    is expected, in a het step that of all its groups, unless a process manager told the ranks their number (PMI_SIZE).
    With the wrong --mpi, srun starts as many worlds of one rank, silently. Raises UserError as well when mpi4py or an
    MPI library is missing, or this thread may not call MPI.
    """
    global _world
    with _lock:
        if _world is None:
            world = MpiWorld(_start_mpi())
            atexit.register(world.leave)
            _world = world
    if _world.MPI.Is_finalized():
        raise UserError("transport mpi: MPI has been finalized in this process and can't be started again")
    if expected is None and read("SLURM_STEP_ID"):
        expected = read("PMI_SIZE") or read("SLURM_NTASKS")
    if expected is not None and _world.size != expected:
        raise UserError(
            f"transport mpi: MPI world of {_world.size} ranks, expected {expected}: {_world.library} wasn't started as "
            "one world; MPICH needs srun --mpi=pmi2, Open MPI --mpi=pmix, and het groups one srun for all of them"
        )
    _world.check_thread()
    return _world


def _start_mpi() -> Any:
    try:
        return start_mpi(finalize=False)  # `leave` decides
    except (ImportError, RuntimeError) as error:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"transport mpi: mpi4py can't start MPI: {text}; "
            "install mpi4py and an MPI library (pip install mpi4py mpich)"
        ) from error
