"""The session server's journal: what was written comes back, torn or not, moved or not, and what is over goes away."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoints.frames import frame_of
from miles_hpc.core.deadline import Deadline
from miles_hpc.core.errors import IntegrityError, UserError
from miles_hpc.rollout.session import journal as journal_module
from miles_hpc.rollout.session import segments
from miles_hpc.rollout.session.core import Session
from miles_hpc.rollout.session.errors import NotStored
from miles_hpc.rollout.session.journal import SessionJournal
from miles_hpc.rollout.session.records import (
    Record,
    SegmentStarted,
    SessionClosed,
    StoredSession,
    TurnRecorded,
    encode_record,
    record_of,
    replay,
    without_rows,
)
from miles_hpc.rollout.session.routed_rows import RecordedRows
from miles_hpc.rollout.session.segments import SegmentStore
from miles_hpc.rollout.session.settings import SessionSettings
from tests.exploring import examples
from tests.fakes.session_records import a_session, facts, opened, tree


def written(store: SegmentStore, session: Session, name: str) -> None:
    store.write([opened(name), *(record_of(name, turn) for turn in session.history.turns())])


# ------------------------------------------------------------------------------------------------ segments


def reread(folder: Path) -> dict[str, StoredSession]:
    store = SegmentStore(folder)
    store.close()
    return store.sessions


def facts_of(store: SegmentStore, name: str) -> list[Any]:
    """Of a session as a restarted server has it, its routed experts read from the files."""
    history = tree()
    stored = store.sessions[name]
    assert replay(stored.turns, history, lambda number: store.rows(name, number).numpy()) == len(stored.turns)
    return facts(history)


def test_sessions_come_back(tmp_path: Path) -> None:
    folder = tmp_path / "sessions" / "server"
    store = SegmentStore(folder)
    written(store, a_session("tree"), "s")
    store.write([opened("t", history="tree", metadata={"n": 10**30})])
    store.write([opened("gone")])
    store.write([SessionClosed(session="gone", reason="deleted")])
    store.close()
    store.close()
    store = SegmentStore(folder)
    found = store.sessions
    assert set(found) == {"s", "t"} and len(found["s"].turns) == 4
    assert facts_of(store, "s") == facts(a_session("tree"))
    store.close()
    assert found["t"].settings == SessionSettings(history="tree", metadata={"n": 10**30})
    assert folder.stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o077 == 0 for path in folder.iterdir())


@settings(max_examples=examples(60))
@given(data=st.data())
def test_any_cut_of_the_tail_gives_a_prefix(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("cut")
    store = SegmentStore(folder)
    names = data.draw(st.lists(st.sampled_from("ab"), min_size=1, max_size=4))
    sessions = {name: a_session("tree") for name in names}
    records: list[Record] = [opened(name) for name in sessions]
    for number in range(4):
        records += [record_of(name, session.history.turns()[number]) for name, session in sessions.items()]
    ends = []
    for record in records:
        store.write([record])
        ends.append(store.size)
    store.close()
    (path,) = folder.glob("*.segment")
    whole = path.read_bytes()
    cut = data.draw(st.integers(0, len(whole)))
    tail = data.draw(st.binary(max_size=20))  # what a torn write may leave behind
    path.write_bytes(whole[:cut] + tail)
    kept = [record for record, end in zip(records, ends, strict=True) if end <= cut]
    store = SegmentStore(folder)
    assert store.torn_bytes <= len(whole) + 20
    expected: dict[str, StoredSession] = {}
    for record in kept:
        kept_record = without_rows(record) if isinstance(record, TurnRecorded) else record
        expected.setdefault(record.session, StoredSession()).add(kept_record)
    assert store.sessions == expected
    for name, stored in store.sessions.items():
        assert facts_of(store, name) == facts(sessions[name])[: len(stored.turns)]
    late = [opened("late")]
    store.write(late)  # and it goes on behind the cut
    store.close()
    assert set(reread(folder)) == {*expected, "late"}
    shutil.rmtree(folder)


@settings(max_examples=examples(60))
@given(
    actions=st.lists(st.tuples(st.sampled_from(["open", "turn", "close", "restart"]), st.integers(0, 30)), max_size=60),
    segment_bytes=st.integers(150, 1500),
)
def test_what_is_over_goes_away_and_nothing_else(
    actions: list[tuple[str, int]], segment_bytes: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("reclaim")
    store = SegmentStore(folder, segment_bytes=segment_bytes)
    turns = a_session("tree").history.turns()
    live: dict[str, int] = {}
    longest = n = 0
    for action, pick in actions:
        record: Record
        chosen = sorted(live)[pick % len(live)] if live else ""
        if action == "open":
            n += 1
            live[f"s{n}"] = 0
            record = opened(f"s{n}", metadata={"x": "y" * (pick * 10)})
        elif action == "turn" and live and live[chosen] < 4:
            record = record_of(chosen, turns[live[chosen]])
            live[chosen] += 1
        elif action == "close" and live:
            record = SessionClosed(session=chosen, reason="deleted")
            del live[chosen]
        elif action == "restart":
            store.close()
            store = SegmentStore(folder, segment_bytes=segment_bytes)
            assert {name: len(s.turns) for name, s in store.sessions.items()} == live
            continue
        else:
            continue
        longest = max(longest, len(encode_record(record)) + 8)
        store.write([record])
        store.reclaim()
        assert store.counting == sum(sum(segment.open_bytes.values()) for segment in store._segments.values())
        on_disk = sum(path.stat().st_size for path in folder.glob("*.segment"))
        assert on_disk == store.size <= 2 * store.counting + 2 * max(segment_bytes, longest) + 200
    store.close()
    assert {name: len(s.turns) for name, s in reread(folder).items()} == live
    shutil.rmtree(folder)


def test_a_process_that_ends_while_it_moves_records_loses_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = SegmentStore(tmp_path, segment_bytes=1000)
    written(store, a_session("tree"), "kept")
    for i in range(3):
        written(store, a_session("tree"), f"s{i}")
    monkeypatch.setattr(SegmentStore, "_delete", lambda self, segment: None)
    for i in range(3):
        store.write([SessionClosed(session=f"s{i}", reason="deleted")])
    segment = min(store._sealed(), key=lambda s: s.number)
    store._empty(segment)  # moved, and not deleted
    store.close()
    monkeypatch.undo()
    store = SegmentStore(tmp_path)
    assert set(store.sessions) == {"kept"} and facts_of(store, "kept") == facts(a_session("tree"))
    store.close()


def test_routed_experts_are_read_where_they_stand(tmp_path: Path) -> None:
    store = SegmentStore(tmp_path, segment_bytes=1000)
    written(store, a_session("tree"), "kept")
    turn = a_session("tree").history.turns()[1]
    rows = RecordedRows.of(np.asarray(turn.routed_experts))
    assert rows.in_memory and len(rows) == 4
    rows.stored(lambda: store.rows("kept", 1).numpy())
    assert not rows.in_memory and (rows.array() == turn.routed_experts).all()
    for i in range(6):
        written(store, a_session("tree"), f"s{i}")
        store.write([SessionClosed(session=f"s{i}", reason="deleted")])
        store.reclaim()
    assert not (tmp_path / "00000001.segment").exists()  # moved meanwhile
    assert (rows.array() == turn.routed_experts).all()
    with pytest.raises(IntegrityError, match="no routed experts of turn 0"):
        store.rows("kept", 0)
    with pytest.raises(IntegrityError, match="no routed experts of turn 1 of session s0"):
        store.rows("s0", 1)
    frame = store._rows["kept"][1]
    path = store._segments[frame.segment].path
    data = bytearray(path.read_bytes())
    data[frame.start + frame.n_bytes - 1] ^= 1
    path.write_bytes(data)
    with pytest.raises(IntegrityError, match="isn't turn 1 of session kept any more"):
        rows.array()
    store.write([SessionClosed(session="kept", reason="deleted")])
    with pytest.raises(IntegrityError, match="no routed experts of turn 1 of session kept"):
        rows.array()
    store.close()


def test_a_folder_belongs_to_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "_LOCK_WAIT_S", 0.1)
    store = SegmentStore(tmp_path)
    with pytest.raises(UserError, match="another process has held it"):
        SegmentStore(tmp_path)
    store.close()
    SegmentStore(tmp_path).close()


def test_another_format_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "00000001.segment").write_bytes(frame_of(encode_record(SegmentStarted(format=99))))
    with pytest.raises(IntegrityError, match="format 99, expected 1"):
        SegmentStore(tmp_path)


class FullDisk:
    """os.write that takes a part and then refuses."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full = False
        self._write = os.write
        monkeypatch.setattr(segments.os, "write", self)

    def __call__(self, fd: int, data: Any) -> int:
        if not self.full:
            return self._write(fd, data)
        if len(data) > 5:
            return self._write(fd, data[:5])
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_write_that_storage_refuses_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FullDisk(monkeypatch)
    store = SegmentStore(tmp_path)
    store.write([opened("a")])
    disk.full = True
    with pytest.raises(OSError, match="No space"):
        store.write([opened("b")])
    disk.full = False
    store.write([opened("c")])
    store.close()
    assert set(reread(tmp_path)) == {"a", "c"}


# ------------------------------------------------------------------------------------------------ the loop's side


def test_nobody_goes_on_before_the_record_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "RETRY_S", 0.02)
    disk = FullDisk(monkeypatch)

    async def run() -> None:
        journal, sessions = SessionJournal.open(tmp_path, fsync=True)
        assert sessions == {}
        journal.start()
        await journal.append(opened("a"), deadline=Deadline(10, "x"))
        assert "a" in (next(tmp_path.glob("*.segment"))).read_bytes().decode("latin-1")
        disk.full = True
        with pytest.raises(NotStored, match=r"hasn.t taken the record after .*No space left"):
            await journal.append(opened("b"), deadline=Deadline(0.2, "x"))
        waiting = asyncio.create_task(journal.append(opened("c"), deadline=Deadline(30, "x")))
        await asyncio.sleep(0.1)
        assert not waiting.done() and "No space" in journal.trouble
        disk.full = False
        await waiting
        assert journal.trouble == ""
        many = [journal.put(opened(f"m{i}")) for i in range(50)]
        await journal.close()
        await journal.close()
        assert all(future.done() for future in many)
        with pytest.raises(NotStored, match="is ending"):
            await journal.append(opened("late"), deadline=Deadline(1, "x"))

    asyncio.run(run())
    assert set(reread(tmp_path)) == {"a", "b", "c", *(f"m{i}" for i in range(50))}


def test_storage_that_never_takes_it_does_not_keep_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "RETRY_S", 0.02)
    disk = FullDisk(monkeypatch)

    async def run() -> None:
        journal, _ = SessionJournal.open(tmp_path)
        journal.start()
        disk.full = True
        future = journal.put(opened("a"))
        await journal.close(deadline_s=0.2)
        with pytest.raises(NotStored, match="ended before storage took"):
            await future

    asyncio.run(run())
    disk.full = False
    assert reread(tmp_path) == {}
