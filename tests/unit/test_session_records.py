"""Frames and records of the session server's journal: turns come back as they were."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from checkpoints.frames import body_at, frame_of, good_frames
from miles_hpc.core.errors import IntegrityError
from miles_hpc.rollout.session.core import Session
from miles_hpc.rollout.session.history import LinearHistory
from miles_hpc.rollout.session.matching import load_matcher
from miles_hpc.rollout.session.records import (
    StoredSession,
    decode_record,
    encode_record,
    record_of,
    replay,
)
from tests.fakes.session import END, OneTokenTemplate, generation, said
from tests.fakes.session_records import a_session, facts, linear, opened, tree


def test_frames() -> None:
    data = frame_of(b"a") + frame_of(b"bc")
    assert [(end, bytes(body)) for end, body in good_frames(memoryview(data))] == [(9, b"a"), (19, b"bc")]
    for position in range(len(data)):
        bent = bytearray(data)
        bent[position] ^= 1
        assert len(list(good_frames(memoryview(bent)))) == (0 if position < 9 else 1)
    assert body_at(memoryview(bytes(8)), 0) is None  # a hole that a file system left


@pytest.mark.parametrize("kind", ["linear", "tree"])
def test_turns_come_back_as_they_were(kind: str) -> None:
    session = a_session(kind)
    all_turns = session.history.turns()
    if kind == "linear":  # what was replaced is in the journal as well
        assert [turn.number for turn in all_turns] == [0, 1, 3]
        all_turns = a_session("tree").history.turns()
    records = {turn.number: decode_record(encode_record(record_of("s", turn))) for turn in all_turns}
    history = linear() if kind == "linear" else tree()
    assert replay(records, history) == 4
    assert facts(history) == facts(session)
    assert history.next_number == session.history.next_number
    with pytest.raises(ValueError, match="read-only"):
        history.turns()[0].output_ids[0] = 5


def test_turns_behind_a_missing_one_are_left_out() -> None:
    turns = a_session("tree").history.turns()
    records = {turn.number: record_of("s", turn) for turn in turns if turn.number != 2}
    history = tree()
    assert replay(records, history) == 2
    assert facts(history) == facts(a_session("tree"))[:2]
    twice = {0: record_of("s", turns[0]), 1: msgspec.structs.replace(record_of("s", turns[0]), number=1)}
    with pytest.raises(IntegrityError, match="turn 1 of session s"):
        replay(twice, LinearHistory(load_matcher("strict"), max_rollback=0))


def test_what_is_no_record_is_refused() -> None:
    with pytest.raises(IntegrityError, match="good CRC"):
        decode_record(b"\x80")
    with pytest.raises(IntegrityError, match="without its opening record"):
        StoredSession().settings  # noqa: B018
    strange = msgspec.structs.replace(opened("s"), settings=b'{"colour": 1}')
    with pytest.raises(IntegrityError, match="settings of s"):
        StoredSession(opened=strange).settings  # noqa: B018


def test_the_sampled_tokens_are_what_comes_back() -> None:
    """One token for END and a float that float32 can't hold exactly: bytes, not numbers, are kept."""
    session = Session(OneTokenTemplate(), linear())
    prepared = session.prepare([said("u")])
    log_probs = np.asarray([-0.1, -1e-30], np.float32)
    session.commit(prepared, generation([5, END], log_probs=log_probs), said("a", "assistant"))
    record = decode_record(encode_record(record_of("s", session.history.turns()[0])))
    history = linear()
    replay({0: record}, history)
    assert history.turns()[0].log_probs.tobytes() == log_probs.tobytes()
