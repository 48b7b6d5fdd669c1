"""Manifests: visible last and whole, fenced, found by lineage; retention never takes what is needed."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoints.journal import TermStarted
from checkpoints.manifest import (
    COMPLETE,
    CheckpointFolder,
    Counters,
    FileEntry,
    JournalPosition,
    LineageSegment,
    Manifest,
    ManifestError,
    extend_lineage,
    list_checkpoints,
    newest_complete,
    plan_retention,
    publish_manifest,
    read_manifest,
    remove_checkpoints,
    started_after,
)


def manifest(term: int, step: int, base: tuple[LineageSegment, ...] = ()) -> Manifest:
    return Manifest(
        run="demo",
        term=term,
        step=step,
        attempt=1,
        lineage=extend_lineage(base, term, step),
        counters=Counters(next_group_id=40, pending=(38, 39), sft_steps=2, evaluations=1),
        journal=JournalPosition(term=term, offset=123),
        files={"rank0.bin": FileEntry(n_bytes=4, crc32=1), "part/rank1.bin": FileEntry(n_bytes=0)},
    )


def fine() -> None:
    """A fence that lets everybody through."""


def prepared(root: Path, term: int, step: int) -> Path:
    folder = root / f"step_{step:06d}.t{term:06d}"
    (folder / "part").mkdir(parents=True)
    (folder / "rank0.bin").write_bytes(b"1234")
    (folder / "part" / "rank1.bin").touch()
    return folder


def published(root: Path, term: int, step: int) -> Path:
    folder = prepared(root, term, step)
    publish_manifest(folder, manifest(term, step), fine)
    return folder


def test_a_manifest_reads_back(tmp_path: Path) -> None:
    folder = published(tmp_path, 1, 3)
    read = read_manifest(folder)
    assert read.created > 0
    assert msgspec.structs.replace(read, created=0.0) == manifest(1, 3)
    assert newest_complete(tmp_path) == (folder, read)


def test_nothing_is_visible_when_the_fence_objects(tmp_path: Path) -> None:
    folder = prepared(tmp_path, 1, 3)

    def fenced() -> None:
        assert not (folder / COMPLETE).exists()
        assert len(list(folder.iterdir())) == 3  # all bytes are there already, under a temporary name
        raise RuntimeError("term 2 exists")

    with pytest.raises(RuntimeError, match="term 2"):
        publish_manifest(folder, manifest(1, 3), fenced)
    assert sorted(p.name for p in folder.iterdir()) == ["part", "rank0.bin"]
    assert newest_complete(tmp_path) is None


def test_a_folder_that_lacks_a_file_isn_t_published(tmp_path: Path) -> None:
    folder = prepared(tmp_path, 1, 3)
    (folder / "rank0.bin").write_bytes(b"123")
    with pytest.raises(ManifestError, match=r"rank0.bin: 3 bytes, expected 4"):
        publish_manifest(folder, manifest(1, 3), fine)
    (folder / "rank0.bin").unlink()
    with pytest.raises(ManifestError, match="missing"):
        publish_manifest(folder, manifest(1, 3), fine)
    assert not (folder / COMPLETE).exists()


def test_the_newest_is_the_highest_term_then_step_that_is_whole(tmp_path: Path) -> None:
    for term, step in ((1, 10), (1, 20), (2, 15)):
        published(tmp_path, term, step)
    prepared(tmp_path, 3, 16)  # never completed
    published(tmp_path, 2, 17).joinpath("rank0.bin").write_bytes(b"cut")
    published(tmp_path, 2, 18).joinpath(COMPLETE).write_bytes(b'{"run":')
    published(tmp_path, 2, 19).rename(tmp_path / "step_000099.t000002")
    (tmp_path / "notes").mkdir()
    found = newest_complete(tmp_path)
    assert found is not None
    assert (found[1].term, found[1].step) == (2, 15)
    problems = {c.path.name: c.problems for c in list_checkpoints(tmp_path) if not c.usable}
    assert set(problems) == {
        f"step_{s}" for s in ("000016.t000003", "000017.t000002", "000018.t000002", "000099.t000002")
    }
    assert problems["step_000016.t000003"] == ("incomplete",)
    assert "can't be read" in problems["step_000018.t000002"][0]
    assert "says step 19" in problems["step_000099.t000002"][0]
    assert newest_complete(tmp_path / "absent") is None


def test_files_outside_the_folder_don_t_count(tmp_path: Path) -> None:
    folder = prepared(tmp_path, 1, 3)
    (tmp_path / "x").touch()
    for name in ("../x", "/etc/hostname"):
        bad = msgspec.structs.replace(manifest(1, 3), files={name: FileEntry(n_bytes=0)})
        with pytest.raises(ManifestError, match="outside the folder"):
            publish_manifest(folder, bad, fine)


def test_lineage_is_checked() -> None:
    base = manifest(2, 7, manifest(1, 5).lineage)
    assert base.lineage == (
        LineageSegment(term=1, first_step=1, last_step=5),
        LineageSegment(term=2, first_step=6, last_step=7),
    )
    assert extend_lineage(base.lineage, 2, 9)[-1] == LineageSegment(term=2, first_step=6, last_step=9)
    assert extend_lineage(base.lineage, 4, 7)[-1] == LineageSegment(term=4, first_step=8, last_step=7)
    wrong = [
        msgspec.structs.replace(base, step=8),
        msgspec.structs.replace(base, lineage=base.lineage[1:]),
        msgspec.structs.replace(base, lineage=()),
        msgspec.structs.replace(base, journal=JournalPosition(term=1, offset=0)),
    ]
    for bad in wrong:
        with pytest.raises(ManifestError, match=r"manifest 2\.\d"):
            publish_manifest(Path("unused"), bad, fine)


def test_a_term_continues_from_an_older_one() -> None:
    assert started_after(None, term=1, attempt=1) == TermStarted(term=1, attempt=1)
    expected = TermStarted(term=4, attempt=2, base_term=2, base_step=7, base_offset=123)
    assert started_after(manifest(2, 7), term=4, attempt=2) == expected
    with pytest.raises(ManifestError, match="can't continue"):
        started_after(manifest(2, 7), term=2, attempt=2)


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 9), st.sampled_from(["good", "bad", "open"])), unique=True),
    st.integers(0, 4),
    st.integers(1, 5),
    st.data(),
)
def test_retention(kinds: list[tuple[int, int, str]], keep: int, term: int, data: st.DataObject) -> None:
    kinds = list({(t, s): (t, s, k) for t, s, k in kinds}.values())
    found = [
        CheckpointFolder(
            Path(f"{t}.{s}"), t, s, None if kind == "open" else manifest(t, s), () if kind == "good" else ("x",)
        )
        for t, s, kind in kinds
    ]
    in_use = data.draw(st.lists(st.sampled_from(found), max_size=2)) if found else []
    gone = plan_retention(found, keep=keep, current_term=term, in_use=[c.path for c in in_use])
    left = [c for c in found if c.path not in gone]
    good = sorted((c.term, c.step) for c in found if c.usable)
    newest = good[-max(1, keep) :]
    assert set(newest) <= {(c.term, c.step) for c in left if c.usable}
    assert {(c.term, c.step) for c in left if c.usable} <= set(newest) | {(c.term, c.step) for c in in_use}
    assert all(c in left for c in in_use)
    assert all(c in left for c in found if c.manifest is None and c.term >= term)  # somebody writes it
    assert all(c in in_use for c in left if c.manifest is None and c.term < term)
    assert len(gone) + len(left) == len(found)


def test_removal_takes_the_manifest_first(tmp_path: Path) -> None:
    one, two = published(tmp_path, 1, 1), published(tmp_path, 1, 2)
    remove_checkpoints(plan_retention(list_checkpoints(tmp_path), keep=1, current_term=1))
    assert not one.exists()
    assert two.exists()
