"""Journal: what was appended is read; a torn end is cut; damage before the end is refused."""

import errno
import os
import threading
import zlib
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoints.frames import frame_of
from checkpoints.journal import (
    BatchFormed,
    CheckpointPublished,
    Evaluated,
    EvaluationBegun,
    EvaluationSkipped,
    GroupDropped,
    GroupOwned,
    GroupSetAside,
    JournalCorrupt,
    JournalWriter,
    Record,
    RunCompleted,
    StepDone,
    TermStarted,
    encode_frame,
    journal_path,
    read_journal,
    read_journals,
)

ids = st.integers(0, 2**40)
text = st.text(max_size=20)
versions = st.none() | st.tuples(st.integers(1, 9), st.integers(0, 999))
records = st.one_of(
    st.builds(GroupDropped, group_id=ids, reason=text),
    st.builds(GroupSetAside, group_id=ids, reason=text),
    st.builds(
        GroupOwned,
        group_id=ids,
        attempt=st.integers(0, 5),
        path=text,
        n_bytes=ids,
        crc32=st.integers(0, 2**32 - 1),
        oldest=versions,
        newest=versions,
        rewards=st.lists(st.floats(-1, 1), max_size=4).map(tuple),
        n_tokens=ids,
        host=text,
        summary=st.binary(max_size=40),
    ),
    st.lists(st.tuples(ids, st.integers(0, 3)), max_size=4).map(
        lambda pairs: BatchFormed(step=1, group_ids=tuple(p[0] for p in pairs), staleness=tuple(p[1] for p in pairs))
    ),
    st.builds(StepDone, step=ids, version=st.tuples(st.integers(1, 9), st.integers(0, 99))),
    st.builds(CheckpointPublished, step=ids, folder=text),
    st.builds(
        Evaluated,
        step=ids,
        n=ids,
        mean=st.floats(0, 1),
        by_label=st.dictionaries(text, st.floats(0, 1)),
        when=text,
        n_samples=st.integers(1, 99),
        pass_at=st.dictionaries(st.integers(1, 64), st.floats(0, 1), max_size=3),
        version=versions,
        oldest=versions,
        newest=versions,
        version_share=st.none() | st.floats(0, 1),
    ),
    st.builds(EvaluationBegun, step=ids),
    st.builds(EvaluationSkipped, step=ids, reason=text),
    st.builds(RunCompleted, step=ids),
)
appends = st.lists(st.lists(records, min_size=1, max_size=3), max_size=5)
STARTED = TermStarted(term=1, attempt=1)


def written(folder: Path, batches: list[list[Record]]) -> tuple[Path, list[int]]:
    """A journal of term 1 with these appends, and the offsets behind each frame."""
    path = journal_path(folder, 1)
    path.unlink(missing_ok=True)
    with JournalWriter.create(folder, STARTED) as writer:
        offsets = [writer.offset]
        for batch in batches:
            offsets.append(writer.append(*batch))
    return path, offsets


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("journal")


@given(batches=appends)
def test_reads_what_was_appended(folder: Path, batches: list[list[Record]]) -> None:
    path, offsets = written(folder, batches)
    read = read_journal(path)
    assert list(read.records()) == [STARTED, *(r for batch in batches for r in batch)]
    assert read.started == STARTED
    assert (read.n_bytes, read.torn_bytes) == (offsets[-1], 0)
    assert [e.end for e in read.entries] == [offsets[0]] + [
        offsets[i + 1] for i, batch in enumerate(batches) for _ in batch
    ]


@given(batches=appends, data=st.data())
def test_a_cut_file_reads_up_to_its_last_whole_append(
    folder: Path, batches: list[list[Record]], data: st.DataObject
) -> None:
    path, offsets = written(folder, batches)
    cut = data.draw(st.integers(0, offsets[-1]))
    os.truncate(path, cut)
    read = read_journal(path)
    whole = [o for o in offsets if o <= cut]
    expected = [[STARTED], *batches][: len(whole)]
    assert list(read.records()) == [r for batch in expected for r in batch]
    assert read.torn_bytes == cut - (whole[-1] if whole else 0)


@given(batches=appends.filter(bool), data=st.data())
def test_damage_is_never_read_as_data(folder: Path, batches: list[list[Record]], data: st.DataObject) -> None:
    path, offsets = written(folder, batches)
    content = bytearray(path.read_bytes())
    position = data.draw(st.integers(0, len(content) - 1))
    content[position] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    hit = next(i for i, o in enumerate(offsets) if position < o)  # the frame that was damaged
    if hit < len(offsets) - 1:
        with pytest.raises(JournalCorrupt, match="damage"):
            read_journal(path)
    else:
        read = read_journal(path)
        assert read.n_bytes == offsets[hit - 1]
        assert read.torn_bytes == len(content) - offsets[hit - 1]


def test_a_torn_end_of_zeros_is_cut(tmp_path: Path) -> None:
    path, offsets = written(tmp_path, [[RunCompleted(step=1)]])
    with path.open("ab") as file:
        file.write(bytes(4096))
    assert read_journal(path).torn_bytes == 4096
    assert read_journal(path).n_bytes == offsets[-1]


def test_a_term_has_one_writer(tmp_path: Path) -> None:
    with JournalWriter.create(tmp_path, STARTED), pytest.raises(FileExistsError):
        JournalWriter.create(tmp_path, STARTED)


def test_a_good_frame_that_means_nothing_is_refused(tmp_path: Path) -> None:
    path, _ = written(tmp_path, [])
    body = b"\x91\x81\xa1_\xa7Unknown"
    length = len(body).to_bytes(4, "little")
    with path.open("ab") as file:
        file.write(length + zlib.crc32(length + body).to_bytes(4, "little") + body)
    with pytest.raises(JournalCorrupt, match="good CRC"):
        read_journal(path)


def test_the_first_record_names_its_term(tmp_path: Path) -> None:
    path = journal_path(tmp_path, 2)
    path.write_bytes(encode_frame((STARTED,)))
    with pytest.raises(JournalCorrupt, match="begin with TermStarted of term 2"):
        read_journal(path)


def test_a_failed_append_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = JournalWriter.create(tmp_path, STARTED)
    good = writer.append(StepDone(step=1, version=(1, 1)))
    real_write = os.write

    def seven_bytes_left(fd: int, data: memoryview) -> int:
        if fd == writer._fd and os.fstat(fd).st_size > good:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real_write(fd, data[:7])

    monkeypatch.setattr(os, "write", seven_bytes_left)
    with pytest.raises(OSError) as refusal:
        writer.append(StepDone(step=2, version=(1, 2)))
    assert refusal.value.errno == errno.ENOSPC
    monkeypatch.undo()
    assert writer.offset == good == writer.path.stat().st_size
    writer.append(StepDone(step=3, version=(1, 3)))
    writer.close()
    assert [r.step for r in read_journal(writer.path).records() if isinstance(r, StepDone)] == [1, 3]


def test_close_waits_for_an_append_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = JournalWriter.create(tmp_path, STARTED)
    under_way, go_on = threading.Event(), threading.Event()
    real_fsync = os.fsync

    def slow_fsync(fd: int) -> None:
        under_way.set()
        assert go_on.wait(30)
        real_fsync(fd)

    monkeypatch.setattr(os, "fsync", slow_fsync)
    appending = threading.Thread(target=writer.append, args=(StepDone(step=1, version=(1, 1)),))
    appending.start()
    assert under_way.wait(30)
    closing = threading.Thread(target=writer.close)
    closing.start()
    closing.join(0.1)
    assert closing.is_alive()
    go_on.set()
    for thread in (appending, closing):
        thread.join(30)
        assert not thread.is_alive()
    with pytest.raises(OSError, match="it is closed"):
        writer.append(StepDone(step=2, version=(1, 2)))
    assert list(read_journal(writer.path).records()) == [STARTED, StepDone(step=1, version=(1, 1))]


def test_terms_are_read_in_order(tmp_path: Path) -> None:
    for term in (2, 1, 10):
        JournalWriter.create(tmp_path, TermStarted(term=term, attempt=term)).close()
    journal_path(tmp_path, 11).touch()  # claimed, then killed at once
    read = read_journals(tmp_path)
    assert list(read) == [1, 2, 10, 11]
    assert read[11].started is None


def test_records_of_evaluations_from_before_they_said_more_can_be_read(tmp_path: Path) -> None:
    """As journals of older runs have them: step, n, mean and by_label alone."""
    old = {"_": "Evaluated", "step": 120, "n": 512, "mean": 0.25, "by_label": {"len": 0.5}}
    path, _ = written(tmp_path, [])
    with open(path, "ab") as file:
        file.write(frame_of(msgspec.msgpack.encode([old])))
    record = list(read_journal(path).records())[-1]
    assert record == Evaluated(step=120, n=512, mean=0.25, by_label={"len": 0.5})
    assert (record.when, record.version, record.n_samples, record.pass_at) == ("", None, 1, {})
