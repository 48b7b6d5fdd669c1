"""The files of a session server's journal: segments of framed records, deleted when nothing in them counts.

    00000001.segment   SegmentStarted, records ...    sealed: full, or of an earlier process
    00000002.segment                                  sealed
    00000003.segment                                  active: appended to, by one process
    lock                                              held by that process (flock(2))

| what | counts until |
|---|---|
| records of an open session | it is closed |
| a SessionClosed | no other segment holds records of that session |
| anything else | never |

A sealed segment in which nothing counts is deleted. While what doesn't count, in sealed segments, is more than what
counts and one segment, the oldest one is emptied: what counts is appended to the active one first. So the folder holds
at most twice what counts plus two segments (and what a record is longer than a segment), and going once through all
segments frees at least as many bytes as it moves.

A new process never appends to an old segment; it reads each up to its first bad frame, since only a torn end can follow
there. Blocking; all but `rows` is for one thread.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checkpoints.frames import body_at, frame_of, good_frames
from checkpoints.publish import fsync_folder
from miles_hpc.core.errors import IntegrityError, UserError
from miles_hpc.core.types import Array
from miles_hpc.rollout.session.records import (
    FORMAT,
    Record,
    SegmentStarted,
    SessionClosed,
    StoredSession,
    TurnRecorded,
    decode_record,
    encode_record,
    without_rows,
)

__all__ = ["SegmentStore"]

_LOCK_WAIT_S = 10.0
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@dataclass
class _Segment:
    number: int
    path: Path
    size: int = 0
    open_bytes: dict[str, int] = field(default_factory=dict)  # of open sessions
    counting: int = 0  # the sum of these
    closed: set[str] = field(default_factory=set)  # sessions whose end is recorded here

    @property
    def dead(self) -> int:
        return self.size - self.counting


@dataclass(frozen=True)
class _Frame:
    """Where a frame stands."""

    segment: int
    start: int
    n_bytes: int


class SegmentStore:
    """The segments below one folder. `torn_bytes` were cut off their ends when they were read."""

    def __init__(self, folder: Path, *, segment_bytes: int = 64 << 20, fsync: bool = False) -> None:
        """Read what is there and begin a segment. `fsync`: what `write` wrote survives the node's end as well.

        Raises UserError when another process holds the folder, IntegrityError for a record that can't be read or that
        another version wrote, OSError.
        """
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._fsync = fsync
        self._lock = _lock(folder / "lock")
        self._segments: dict[int, _Segment] = {}
        self._places: dict[str, set[int]] = {}  # segments that hold records of a session, open or closed
        self._rows: dict[str, dict[int, _Frame]] = {}  # of open sessions: turns with routed experts, by number
        self._deleting = threading.Lock()
        self._fd = -1
        self.torn_bytes = 0
        try:
            self.sessions = self._read()
            self._begin()
            self.reclaim()
        except BaseException:
            self.close()
            raise

    @property
    def size(self) -> int:
        """Bytes of all segments."""
        return sum(segment.size for segment in self._segments.values())

    @property
    def counting(self) -> int:
        """Bytes of the open sessions' records."""
        return sum(segment.counting for segment in self._segments.values())

    def write(self, records: Sequence[Record]) -> None:
        """Append these records. Raises OSError: then none of them is there."""
        frames = [(record, frame_of(encode_record(record))) for record in records]
        if self._active.size + sum(len(frame) for _, frame in frames) > self._segment_bytes:
            self._begin()
        start = self._active.size
        self._append(b"".join(frame for _, frame in frames))
        for record, frame in frames:
            self._count(record, _Frame(self._active.number, start, len(frame)))
            start += len(frame)

    def rows(self, session: str, number: int) -> Array:
        """Routed experts of an open session's turn, read from its segment. For any thread.

        Raises IntegrityError when they aren't there or are damaged, OSError.
        """
        with self._deleting:  # a record that is moved is where it was, or already where it goes
            frame = self._rows.get(session, {}).get(number)
            if frame is None:
                raise IntegrityError(f"session journal: no routed experts of turn {number} of session {session}")
            path = self._segments[frame.segment].path
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            body = body_at(memoryview(os.pread(fd, frame.n_bytes, frame.start)), 0)
        finally:
            os.close(fd)
        record = None if body is None else decode_record(body)
        if not isinstance(record, TurnRecorded) or record.routed_experts is None:
            raise IntegrityError(
                f"{path}: the frame at {frame.start} isn't turn {number} of session {session} any more"
            )
        return record.routed_experts

    def reclaim(self) -> None:
        """Delete what doesn't count, within the module's bound. Raises OSError: then it is tried again later."""
        for segment in self._sealed():
            if not segment.open_bytes and not self._ends_needed(segment):
                self._delete(segment)
        while sealed := self._sealed():
            dead = sum(segment.dead for segment in sealed)
            if dead <= self.counting + self._segment_bytes:
                break
            self._empty(min(sealed, key=lambda s: s.number))

    def close(self) -> None:
        """Idempotent."""
        for fd in (self._fd, self._lock):
            if fd >= 0:
                os.close(fd)
        self._fd = self._lock = -1

    # ------------------------------------------------------------------------------------------- reading

    def _read(self) -> dict[str, StoredSession]:
        """The open sessions of all segments."""
        sessions: dict[str, StoredSession] = {}
        for path in sorted(self._folder.glob("*.segment")):
            segment = _Segment(int(path.stem), path, size=path.stat().st_size)
            self._segments[segment.number] = segment
            for record, frame in self._records(segment):
                if record.session:
                    kept = without_rows(record) if isinstance(record, TurnRecorded) else record
                    sessions.setdefault(record.session, StoredSession()).add(kept)
                    self._count(record, frame)
        for name, session in sessions.items():
            if session.closed:
                self._forget(name)
        return {name: session for name, session in sessions.items() if not session.closed}

    def _records(self, segment: _Segment) -> Iterator[tuple[Any, _Frame]]:
        """The records of the good frames, and where they stand."""
        data = memoryview(segment.path.read_bytes())
        start = 0
        for end, body in good_frames(data):
            record = decode_record(body)
            if isinstance(record, SegmentStarted) and record.format != FORMAT:
                raise IntegrityError(
                    f"{segment.path}: format {record.format}, expected {FORMAT}: another version wrote it; "
                    "move the folder away to begin without its sessions"
                )
            yield record, _Frame(segment.number, start, end - start)
            start = end
        self.torn_bytes += len(data) - start

    # ------------------------------------------------------------------------------------------- writing

    def _begin(self) -> None:
        """Begin a segment of a number that was never used."""
        number = max(self._segments, default=0) + 1
        path = self._folder / f"{number:08d}.segment"
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = fd
        self._segments[number] = self._active = _Segment(number, path)
        self._append(frame_of(encode_record(SegmentStarted(format=FORMAT))))
        if self._fsync:
            fsync_folder(self._folder)

    def _append(self, data: bytes) -> None:
        try:
            left = memoryview(data)
            while left:  # a full file system takes a part, and says why with the next write
                left = left[os.write(self._fd, left) :]
            if self._fsync:
                os.fsync(self._fd)
        except OSError:
            try:
                os.ftruncate(self._fd, self._active.size)
            except OSError:
                self._active.size = self._segment_bytes  # nobody writes behind a bad frame: the next goes elsewhere
            raise
        self._active.size += len(data)

    # ------------------------------------------------------------------------------------------- what counts

    def _sealed(self) -> list[_Segment]:
        return [segment for segment in self._segments.values() if segment is not self._active]

    def _count(self, record: Record, frame: _Frame) -> None:
        if not record.session:
            return
        segment = self._segments[frame.segment]
        self._places.setdefault(record.session, set()).add(segment.number)
        if isinstance(record, SessionClosed):
            segment.closed.add(record.session)
            self._forget(record.session)
        else:
            segment.open_bytes[record.session] = segment.open_bytes.get(record.session, 0) + frame.n_bytes
            segment.counting += frame.n_bytes
            if isinstance(record, TurnRecorded) and record.routed_experts is not None:
                self._rows.setdefault(record.session, {})[record.number] = frame

    def _forget(self, session: str) -> None:
        self._rows.pop(session, None)
        for number in self._places.get(session, ()):
            segment = self._segments[number]
            segment.counting -= segment.open_bytes.pop(session, 0)

    def _ends_needed(self, segment: _Segment) -> set[str]:
        """Sessions whose end is recorded here while another segment still holds records of them."""
        return {session for session in segment.closed if self._places[session] != {segment.number}}

    def _empty(self, segment: _Segment) -> None:
        """Append what counts of a sealed segment to the active one, then delete it."""
        ends = self._ends_needed(segment)
        kept = [
            record
            for record, _ in self._records(segment)
            if (record.session in ends if isinstance(record, SessionClosed) else record.session in segment.open_bytes)
        ]
        if kept:
            self.write(kept)
        self._delete(segment)

    def _delete(self, segment: _Segment) -> None:
        with self._deleting:
            segment.path.unlink(missing_ok=True)
            del self._segments[segment.number]
        for session in [name for name, numbers in self._places.items() if segment.number in numbers]:
            numbers = self._places[session]
            numbers.discard(segment.number)
            if not numbers:
                del self._places[session]


def _lock(path: Path) -> int:
    """Hold the folder, as long as this process lives. File systems without locks are taken on trust."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    limit = time.monotonic() + _LOCK_WAIT_S  # the process before this one may be ending
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fd
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return fd
            if time.monotonic() > limit:
                os.close(fd)
                raise UserError(
                    f"session journal {path.parent}: another process has held it for {_LOCK_WAIT_S:.0f} s: "
                    "end that one, or give this server another name"
                ) from error
        time.sleep(0.05)
