"""The controller's journal: append-only, one file per term, a CRC over every frame.

    journal/t000003.journal   = frame*            the first record of a file is its TermStarted
    frame                     = length u32 LE | crc32 u32 LE | body      crc32 over length and body
    body                      = MessagePack array of tagged records

A frame holds the records of one `append`, so they become readable together or not at all. A frame is written by
one write() and synced before `append` returns; only the last one can be torn by a crash. A reader cuts it off and
says how many bytes that were. A bad frame with a good one behind it can't come from a crash: JournalCorrupt.

A term's file is created with O_EXCL, so no process ever appends to another term's file. What a fenced process
still appends to its own file lies behind the offset at which the next term continued (`TermStarted.base_offset`),
and counts for nothing (`checkpoints.lineage`).

A journal position, an "offset", is the number of bytes of good frames before it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from checkpoints.frames import HEADER_BYTES, body_at, frame_of
from checkpoints.publish import fsync_folder

__all__ = [
    "BatchFormed",
    "CheckpointPublished",
    "Entry",
    "Evaluated",
    "EvaluationBegun",
    "EvaluationSkipped",
    "GroupDropped",
    "GroupOwned",
    "GroupSetAside",
    "JournalCorrupt",
    "JournalRead",
    "JournalWriter",
    "Record",
    "RunCompleted",
    "StepDone",
    "TermStarted",
    "journal_path",
    "read_journal",
    "read_journals",
]


class JournalCorrupt(ValueError):
    """A journal is damaged before its end. The text names file, offset and what was found there."""


# ---------------------------------------------------------------------------------------------- records


class Record(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="_"):
    """Base of every record. Versions are plain (term, step) pairs: this layer knows no other vocabulary."""


class TermStarted(Record, frozen=True, kw_only=True):
    """The first record of a term: the manifest that it continues from, all 0 when it starts afresh.

    `base_offset` is that manifest's position in the journal of `base_term`; records behind it aren't on this
    term's lineage.
    """

    term: int
    attempt: int
    base_term: int = 0
    base_step: int = 0
    base_offset: int = 0


class GroupOwned(Record, frozen=True, kw_only=True):
    """A finished group is the controller's from here on; its host may forget it.

    `summary` is the host's announcement as it came in (MessagePack), so that a later term can take the group over
    without opening its payload. `oldest` and `newest` are None when no engine sampled.
    """

    group_id: int
    attempt: int
    path: str  # payload, relative to the run directory
    n_bytes: int
    crc32: int
    oldest: tuple[int, int] | None
    newest: tuple[int, int] | None
    rewards: tuple[float, ...]
    n_tokens: int
    host: str = ""
    summary: bytes = b""


class GroupDropped(Record, frozen=True, kw_only=True):
    """The group won't be trained; `reason` is one of a few words that statistics count by."""

    group_id: int
    reason: str


class GroupSetAside(Record, frozen=True, kw_only=True):
    """The group's prompt failed as often as it may; `reason` is the last failure."""

    group_id: int
    reason: str


class BatchFormed(Record, frozen=True, kw_only=True):
    """Step `step` trains exactly these groups; `staleness[i]` is that of `group_ids[i]` at use, in steps.

    A second one for the same step in one term replaces the first (the trainer was taken back in between).
    """

    step: int
    group_ids: tuple[int, ...]
    staleness: tuple[int, ...]


class StepDone(Record, frozen=True, kw_only=True):
    """Optimizer step `step` is done; `version` (term, step) names the weights after it."""

    step: int
    version: tuple[int, int]


class CheckpointPublished(Record, frozen=True, kw_only=True):
    """The manifest of `step` lies in `folder` (relative to the run directory)."""

    step: int
    folder: str


class Evaluated(Record, frozen=True, kw_only=True):
    """`n` held-out prompts under the weights after `step`: mean reward, over all trajectories and by label.

    `version` (term, step) names those weights. Where engines are shared with training, tokens may be from newer ones:
    `oldest` and `newest` are those of any token, `version_share` is the share of tokens that `version` sampled.
    """

    step: int
    n: int
    mean: float
    by_label: dict[str, float] = {}
    when: str = ""  # before | during | after | sft_only; "" in journals that don't say it
    n_samples: int = 1  # trajectories of each prompt
    pass_at: dict[int, float] = {}  # k -> pass@k
    truncated_ratio: float = 0.0
    failed_ratio: float = 0.0
    version: tuple[int, int] | None = None
    oldest: tuple[int, int] | None = None
    newest: tuple[int, int] | None = None
    version_share: float | None = None
    lag_steps: int = 0  # steps done after `step` until the result was there
    duration_s: float = 0.0


class EvaluationBegun(Record, frozen=True, kw_only=True):
    """An evaluation of the weights after `step` begins beside training; its outcome follows, unless the run is cut."""

    step: int


class EvaluationSkipped(Record, frozen=True, kw_only=True):
    """The evaluation that was due after `step` won't be done; `reason` is one of a few words."""

    step: int
    reason: str


class RunCompleted(Record, frozen=True, kw_only=True):
    """The run reached its last step, `step`, and its manifest is published."""

    step: int


AnyRecord = (
    TermStarted
    | GroupOwned
    | GroupDropped
    | GroupSetAside
    | BatchFormed
    | StepDone
    | CheckpointPublished
    | Evaluated
    | EvaluationBegun
    | EvaluationSkipped
    | RunCompleted
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[tuple[Any, ...]] = msgspec.msgpack.Decoder(tuple[AnyRecord, ...])


# ---------------------------------------------------------------------------------------------- writing


def journal_path(folder: Path, term: int) -> Path:
    """The file of `term` below the journal folder."""
    return folder / f"t{term:06d}.journal"


def encode_frame(records: tuple[Record, ...]) -> bytes:
    """One frame of these records."""
    return frame_of(_encoder.encode(records))


class JournalWriter:
    """Appends to the journal of one term. Every append blocks for one write and one fsync.

    Calls may come from several threads: they take turns, and `close` waits for an append under way, so that no frame
    can end up in a file that got the same descriptor afterwards.
    """

    def __init__(self, fd: int, path: Path, offset: int) -> None:
        self._fd = fd
        self._path = path
        self._offset = offset
        self._broken = False
        self._turn = threading.Lock()

    @classmethod
    def create(cls, folder: Path, started: TermStarted) -> JournalWriter:
        """Create the file of `started.term` and write its first record.

        Raises FileExistsError when the term has a journal already: it belongs to somebody else.
        """
        folder.mkdir(parents=True, exist_ok=True)
        path = journal_path(folder, started.term)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o644)
        writer = cls(fd, path, 0)
        try:
            writer.append(started)
            fsync_folder(folder)
        except BaseException:
            writer.close()
            raise
        return writer

    @property
    def offset(self) -> int:
        """The position after the last append: what a manifest stores."""
        return self._offset

    @property
    def path(self) -> Path:
        return self._path

    def append(self, *records: Record) -> int:
        """Write these records in one frame and sync it; returns the new offset. Without records: does nothing.

        Raises OSError when storage refuses, or after `close`. A half-written frame is cut off again, and when even
        that fails, every later append is refused: nobody may write behind a damaged frame.
        """
        if not records:
            return self._offset
        frame = encode_frame(records)
        with self._turn:
            if self._fd < 0 or self._broken:
                why = "it is closed" if self._fd < 0 else "an earlier append failed and could not be taken back"
                raise OSError(f"journal {self._path}: {why}")
            try:
                left = memoryview(frame)
                while left:  # a full file system takes a part, and says why with the next write
                    left = left[os.write(self._fd, left) :]
                os.fsync(self._fd)
            except OSError:
                self._broken = True
                os.ftruncate(self._fd, self._offset)
                os.fsync(self._fd)
                self._broken = False
                raise
            self._offset += len(frame)
            return self._offset

    def close(self) -> None:
        """Idempotent."""
        with self._turn:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


# ---------------------------------------------------------------------------------------------- reading


@dataclass(frozen=True)
class Entry:
    """A record and the offset behind its frame: `end <= position` means that the position includes it."""

    record: Any
    end: int


@dataclass(frozen=True)
class JournalRead:
    """The content of one journal file. `torn_bytes` were cut off its end."""

    term: int
    entries: tuple[Entry, ...]
    n_bytes: int
    torn_bytes: int

    @property
    def started(self) -> TermStarted | None:
        """The term's first record; None when the process died before it was written."""
        return self.entries[0].record if self.entries else None

    def records(self) -> Iterator[Any]:
        return (entry.record for entry in self.entries)


def read_journal(path: Path) -> JournalRead:
    """Read one term's journal; a torn end is cut off. Raises JournalCorrupt and OSError."""
    term = int(path.stem.removeprefix("t"))
    data = memoryview(path.read_bytes())
    entries: list[Entry] = []
    offset = 0
    while (body := body_at(data, offset)) is not None:
        end = offset + HEADER_BYTES + len(body)
        try:
            records = _decoder.decode(body)
        except msgspec.MsgspecError as error:
            raise JournalCorrupt(f"journal {path}: the frame at {offset} has a good CRC, but {error}") from error
        entries.extend(Entry(record, end) for record in records)
        offset = end
    for later in range(offset + 1, len(data)):
        if body_at(data, later) is not None:
            raise JournalCorrupt(
                f"journal {path}: bad frame at {offset}, yet a good one at {later}: this is damage, not a torn end;"
                " restore the file or continue in a new run directory"
            )
    if entries:
        first = entries[0].record
        if not isinstance(first, TermStarted) or first.term != term:
            raise JournalCorrupt(f"journal {path}: expected to begin with TermStarted of term {term}, found {first}")
    return JournalRead(term, tuple(entries), offset, len(data) - offset)


def read_journals(folder: Path) -> dict[int, JournalRead]:
    """The journals of all terms below `folder`, by term, in order. Raises JournalCorrupt and OSError."""
    reads = (read_journal(path) for path in sorted(folder.glob("t*.journal")))
    return {read.term: read for read in reads}
