"""What a session server's journal says, and how turns become records and turns again.

    SessionOpened ── TurnRecorded* ── SessionClosed      one session; a turn names the turn that it goes on from

A record is self-contained MessagePack; arrays are raw little-endian bytes; what clients sent is JSON text, as it may
hold numbers that MessagePack can't. The order of a session's turns is their `number`, wherever the records stand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from miles_hpc.core.errors import IntegrityError
from miles_hpc.core.types import Array, FinishReason, VersionSpan, WeightVersion
from miles_hpc.rollout.session.history import History
from miles_hpc.rollout.session.routed_rows import RecordedRows
from miles_hpc.rollout.session.settings import SessionSettings
from miles_hpc.rollout.session.turn import Turn

__all__ = [
    "FORMAT",
    "Record",
    "SegmentStarted",
    "SessionClosed",
    "SessionOpened",
    "StoredSession",
    "TurnRecorded",
    "decode_record",
    "encode_record",
    "record_of",
    "replay",
    "without_rows",
]

#: Version of the records; a journal of another one isn't read.
FORMAT = 1


class Record(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="_"):
    """Base of every record; `session` is empty where it is about none."""

    session: str = ""


class SegmentStarted(Record, frozen=True, kw_only=True):
    """The first record of a segment."""

    format: int


class SessionOpened(Record, frozen=True, kw_only=True):
    """`token_digest` is SHA-256 of the session's token: the journal doesn't let its reader in."""

    token_digest: bytes
    settings: bytes  # JSON of SessionSettings
    opened_s: float  # epoch


class TurnRecorded(Record, frozen=True, kw_only=True):
    """A turn as session/turn.py has it."""

    number: int
    parent: int  # -1 for a root
    drop: int
    new_ids: bytes  # int32
    output_ids: bytes  # int32
    log_probs: bytes  # float32
    versions: tuple[tuple[int, int, int, int], ...]  # term, step, start, end
    finish_reason: FinishReason
    messages: bytes  # JSON
    tools: bytes = b""  # JSON; of a root
    routed_experts: Array | None = None  # [rows, moe_layers, top_k]


class SessionClosed(Record, frozen=True, kw_only=True):
    """Nothing of the session counts any more."""

    reason: str


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(
    SegmentStarted | SessionOpened | TurnRecorded | SessionClosed
)


def encode_record(record: Record) -> bytes:
    """The body of the record's frame."""
    return _encoder.encode(record)


def decode_record(body: bytes | memoryview) -> Any:
    """Inverse of encode_record. Raises IntegrityError."""
    try:
        return _decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise IntegrityError(f"session journal: a frame has a good CRC, but {error}") from error


@dataclass
class StoredSession:
    """One session's records, as a journal had them."""

    opened: SessionOpened | None = None
    turns: dict[int, TurnRecorded] = field(default_factory=dict)
    closed: bool = False

    def add(self, record: Record) -> None:
        """A record that stands there twice (it was being moved when the process ended) counts once."""
        if isinstance(record, SessionOpened):
            self.opened = record
        elif isinstance(record, TurnRecorded):
            self.turns.setdefault(record.number, record)
        elif isinstance(record, SessionClosed):
            self.closed = True

    @property
    def settings(self) -> SessionSettings:
        """Raises IntegrityError for settings that this version doesn't know."""
        if self.opened is None:
            raise IntegrityError("session journal: a session without its opening record")
        try:
            return msgspec.json.decode(self.opened.settings, type=SessionSettings)
        except msgspec.MsgspecError as error:
            raise IntegrityError(f"session journal: settings of {self.opened.session}: {error}") from error


def record_of(session: str, turn: Turn) -> TurnRecorded:
    """`turn.routed_experts` is None, an array of rows, or RecordedRows."""
    rows = turn.routed_experts
    if isinstance(rows, RecordedRows):
        rows = rows.array()
    return TurnRecorded(
        session=session,
        number=turn.number,
        parent=-1 if turn.parent is None else turn.parent.number,
        drop=turn.drop,
        new_ids=_bytes(turn.new_ids, "<i4"),
        output_ids=_bytes(turn.output_ids, "<i4"),
        log_probs=_bytes(turn.log_probs, "<f4"),
        versions=tuple((s.version.term, s.version.step, s.start, s.end) for s in turn.versions),
        finish_reason=turn.finish_reason,
        messages=msgspec.json.encode(turn.messages),
        tools=msgspec.json.encode(turn.tools) if turn.parent is None else b"",
        routed_experts=Array.of(rows) if isinstance(rows, np.ndarray) else None,
    )


def without_rows(record: TurnRecorded) -> TurnRecorded:
    """The record with its routed experts' type and shape alone."""
    rows = record.routed_experts
    if rows is None:
        return record
    return msgspec.structs.replace(record, routed_experts=msgspec.structs.replace(rows, data=b""))


def replay(
    turns: Mapping[int, TurnRecorded], history: History, load: Callable[[int], npt.NDArray[Any]] | None = None
) -> int:
    """Record these turns anew in an empty history, in their order; returns how many.

    `load` gives the routed experts of a turn by number, when the records come without. Stops at the first turn that is
    missing, since what follows may build on it. Raises IntegrityError for turns that don't go together.
    """
    made: dict[int, Turn] = {}
    for number in range(len(turns)):
        record = turns.get(number)
        if record is None or (record.parent >= 0 and record.parent not in made):
            break
        try:
            turn = _turn_of(record, made.get(record.parent), load)
            reason = history.append(history.after(turn.parent), turn)
        except Exception as error:
            raise IntegrityError(f"session journal: turn {number} of session {record.session}: {error}") from error
        if reason:
            raise IntegrityError(f"session journal: turn {number} of session {record.session}: {reason}")
        made[number] = turn
    return len(made)


def _turn_of(record: TurnRecorded, parent: Turn | None, load: Callable[[int], npt.NDArray[Any]] | None) -> Turn:
    rows = record.routed_experts
    routed: object = None
    if rows is not None:
        routed = rows.numpy() if load is None else RecordedRows(rows.shape[0], None, partial(load, record.number))
    return Turn(
        number=record.number,
        parent=parent,
        messages=msgspec.json.decode(record.messages),
        tools=msgspec.json.decode(record.tools) if parent is None else parent.tools,
        drop=record.drop,
        new_ids=np.frombuffer(record.new_ids, "<i4").astype(np.int32),
        output_ids=np.frombuffer(record.output_ids, "<i4").astype(np.int32),
        log_probs=np.frombuffer(record.log_probs, "<f4").astype(np.float32),
        versions=tuple(VersionSpan(version=WeightVersion(t, n), start=a, end=b) for t, n, a, b in record.versions),
        finish_reason=record.finish_reason,
        ended=record.finish_reason is FinishReason.STOP,
        routed_experts=routed,
    )


def _bytes(array: np.ndarray[Any, Any], dtype: str) -> bytes:
    return np.ascontiguousarray(array, dtype).tobytes()
