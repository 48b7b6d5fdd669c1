"""Samples over HTTP: routed experts of a path, and a safetensors file that is read as it was written."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load, save

from miles_hpc.core.errors import IntegrityError
from miles_hpc.core.types import FinishReason, SampleStatus
from miles_hpc.rollout.session.core import Session
from miles_hpc.rollout.session.errors import NoSample
from miles_hpc.rollout.session.history import TreeHistory
from miles_hpc.rollout.session.matching import load_matcher
from miles_hpc.rollout.session.payload import SamplesMeta, read_samples, write_samples
from miles_hpc.rollout.session.routed_rows import first_row, routed_rows
from tests.fakes.session import END, OTHER_END, OneTokenTemplate, generation, said


def rows_of(tokens: np.ndarray) -> np.ndarray:
    """[n, 2, 2]: what a scripted engine would route, a function of the token alone."""
    return (tokens[:, None, None] + np.arange(2)[None, :, None] + np.arange(2)).astype(np.uint16)


def play_routed(
    session: Session, talk: list[dict[str, Any]], ids: list[int], *, rows: bool = True, **more: Any
) -> None:
    prepared = session.prepare(talk)
    whole = np.concatenate((prepared.input_ids(), np.asarray(ids, np.int32)))
    start = first_row(prepared.attachment.parent, prepared.drop)
    routed = rows_of(whole[start:-1]) if rows else None
    session.commit(prepared, generation(ids, routed_experts=routed, **more), said(f"a{ids[0]}", "assistant"))


def session_of_two_branches() -> Session:
    """The second turn of one branch drops a token of the first."""
    session = Session(OneTokenTemplate(), TreeHistory(load_matcher("strict")))
    talk = [said("u1")]
    play_routed(session, talk, [100, 101, OTHER_END])
    talk += [said("a100", "assistant"), said("u2")]
    play_routed(session, talk, [200, END])
    play_routed(session, [*talk, said("a200", "assistant"), said("u3")], [300], reason=FinishReason.LENGTH)
    play_routed(session, [talk[0], said("other")], [400, END])
    return session


def test_rows_of_a_path_are_those_of_its_tokens() -> None:
    samples = session_of_two_branches().samples()
    assert len(samples) == 2
    for sample in samples:
        rows = routed_rows(sample.path)
        assert rows is not None and rows.tolist() == rows_of(sample.tokens[:-1]).tolist()
    assert routed_rows([]) is None


def test_rows_that_do_not_fit_are_found() -> None:
    session = Session(OneTokenTemplate(), TreeHistory(load_matcher("strict")))
    play_routed(session, [said("u1")], [100, END], rows=False)
    (sample,) = session.samples()
    assert routed_rows(sample.path) is None
    play_routed(session, [said("u1"), said("a100", "assistant"), said("u2")], [200, END])
    with pytest.raises(NoSample, match="turn 0 has no routed experts"):
        routed_rows(session.samples()[0].path)
    other = Session(OneTokenTemplate(), TreeHistory(load_matcher("strict")))
    prepared = other.prepare([said("u1")])
    other.commit(prepared, generation([5, END], routed_experts=rows_of(np.arange(2))))
    with pytest.raises(NoSample, match="turn 0 has 2 rows of routed experts: expected 3"):
        routed_rows(other.samples()[0].path)


def test_samples_are_read_as_they_were_written() -> None:
    samples = session_of_two_branches().samples()
    meta, found = read_samples(write_samples("s", samples, {"task": "é", "n": 10**30}))
    assert (meta.session_id, meta.metadata, len(found)) == ("s", {"task": "é", "n": 10**30}, 2)
    for sample, wire in zip(samples, found, strict=True):
        for name in ("tokens", "loss_mask", "log_probs"):
            ours, theirs = getattr(sample, name), getattr(wire, name)
            assert ours.dtype == theirs.dtype and ours.tobytes() == theirs.tobytes()
        assert wire.routed_experts is not None
        assert wire.routed_experts.tobytes() == rows_of(sample.tokens[:-1]).tobytes()
        spans = [(s.version.term, s.version.step, s.start, s.end) for s in sample.versions]
        assert list(wire.meta.versions) == spans
        assert [turn.number for turn in wire.meta.turns] == [turn.number for turn in sample.path]
    assert found[0].meta.status is SampleStatus.TRUNCATED and found[0].meta.turns[1].drop == 1
    empty, none = read_samples(write_samples("s", [], {}))
    assert empty.samples == () and none == []


def bent(data: bytes, **changes: Any) -> bytes:
    """The same file with tensors changed; None takes one away."""
    header = msgspec.json.decode(data[8 : 8 + int.from_bytes(data[:8], "little")])
    tensors = {**load(data), **{name.replace("_at_", "."): value for name, value in changes.items()}}
    return save({k: v for k, v in tensors.items() if v is not None}, header["__metadata__"])


def test_other_files_are_refused() -> None:
    good = write_samples("s", session_of_two_branches().samples(), {})
    n = len(load(good)["0.tokens"])
    for changes, text in [
        ({"0_at_tokens": None}, "0.tokens: found nothing"),
        ({"0_at_tokens": np.zeros(n, np.int64)}, "0.tokens: found int64"),
        ({"0_at_loss_mask": np.zeros(n - 1, np.uint8)}, "expected uint8 of length"),
        ({"1_at_routed_experts": None}, "1.routed_experts: found nothing"),
        ({"2_at_tokens": np.zeros(3, np.int32)}, "belong to no sample: 2.tokens"),
    ]:
        with pytest.raises(IntegrityError, match=text):
            read_samples(bent(good, **changes))
    for data in (b"", good[:-1], good[:20], save({"a": np.zeros(1)}), save({}, {"_samples_meta": "{}"})):
        with pytest.raises(IntegrityError):
            read_samples(data)
    newer = msgspec.json.encode(SamplesMeta(format=2, session_id="s", samples=())).decode()
    with pytest.raises(IntegrityError, match="format 2, expected 1"):
        read_samples(save({}, {"_samples_meta": newer}))
