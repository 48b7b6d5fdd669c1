"""The audit of a run directory, end to end over real files: two terms, a lost step, a damaged payload."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import pytest

from checkpoints.journal import (
    BatchFormed,
    Evaluated,
    EvaluationSkipped,
    GroupDropped,
    GroupOwned,
    GroupSetAside,
    JournalWriter,
    RunCompleted,
    StepDone,
    TermStarted,
    journal_path,
)
from checkpoints.manifest import (
    Counters,
    JournalPosition,
    Manifest,
    extend_lineage,
    newest_complete,
    publish_manifest,
    started_after,
)
from checkpoints.verify import file_entry
from tools.audit_run import main


def own(run: Path, journal: JournalWriter, group_id: int) -> None:
    path = run / "journal" / "spool" / f"g{group_id}.t{journal.path.stem}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data := f"payload {group_id}".encode())
    journal.append(
        GroupOwned(
            group_id=group_id,
            attempt=0,
            path=path.relative_to(run).as_posix(),
            n_bytes=len(data),
            crc32=zlib.crc32(data),
            oldest=(1, 0),
            newest=(1, 0),
            rewards=(1.0,),
            n_tokens=3,
        )
    )


def step(run: Path, journal: JournalWriter, number: int, ids: tuple[int, ...], term: int) -> None:
    for group_id in ids:
        own(run, journal, group_id)
    journal.append(BatchFormed(step=number, group_ids=ids, staleness=(number - 1,) * len(ids)))
    journal.append(StepDone(step=number, version=(term, number)))


def save(run: Path, journal: JournalWriter, term: int, number: int, next_id: int, pending: tuple[int, ...]) -> None:
    base = newest_complete(run / "checkpoints")
    folder = run / "checkpoints" / f"step_{number:06d}.t{term:06d}"
    folder.mkdir(parents=True)
    (folder / "rank0.bin").write_bytes(b"state")
    manifest = Manifest(
        run="demo",
        term=term,
        step=number,
        attempt=term,
        lineage=extend_lineage(base[1].lineage if base else (), term, number),
        counters=Counters(next_group_id=next_id, pending=pending),
        journal=JournalPosition(term=term, offset=journal.offset),
        files={"rank0.bin": file_entry(folder / "rank0.bin", digest=True)},
    )
    publish_manifest(folder, manifest, lambda: None)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Asked for 3 steps of 2 groups; term 1 dies after step 2, of which only step 1 was saved."""
    (tmp_path / "resolved.toml").write_text("[rollout]\nn_steps = 3\nrollout_batch_size = 2\n")
    with JournalWriter.create(tmp_path / "journal", TermStarted(term=1, attempt=1)) as journal:
        step(tmp_path, journal, 1, (0, 1), 1)
        save(tmp_path, journal, 1, 1, 5, (2, 3, 4))
        step(tmp_path, journal, 2, (2, 3), 1)
    with journal_path(tmp_path / "journal", 1).open("ab") as file:
        file.write(b"torn")
    base = newest_complete(tmp_path / "checkpoints")
    assert base is not None
    with JournalWriter.create(tmp_path / "journal", started_after(base[1], term=2, attempt=2)) as journal:
        journal.append(GroupDropped(group_id=2, reason="stale"), GroupSetAside(group_id=5, reason="engine"))
        step(tmp_path, journal, 2, (3, 4), 2)
        step(tmp_path, journal, 3, (6, 7), 2)
        save(tmp_path, journal, 2, 3, 8, ())
        journal.append(EvaluationSkipped(step=2, reason="cut"))
        journal.append(RunCompleted(step=3), Evaluated(step=3, n=10, mean=0.5))
    return tmp_path


def report(run: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, dict[str, object]]:
    code = main([str(run), "--json", *options])
    return code, json.loads(capsys.readouterr().out)


def test_a_sound_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, seen = report(run, capsys, "--strict")
    assert code == 0
    assert (seen["sound"], seen["completed"], seen["step"]) == (True, True, 3)
    assert (seen["asked"], seen["trained"], seen["lost"], seen["twice"]) == (6, 6, [], [])
    assert (seen["dropped"], seen["set_aside"]) == ({"stale": 1}, {"engine": 1})
    assert seen["staleness"] == {"0": 2, "1": 2, "2": 2}
    assert [(t["steps_done"], t["steps_on_lineage"], t["torn_bytes"]) for t in seen["terms"]] == [(2, 1, 4), (2, 2, 0)]  # type: ignore[attr-defined]
    assert seen["payloads"] == {"present": 8, "collected": 0}
    assert seen["evaluations"] == [{"step": 3, "n": 10, "mean": 0.5}]
    assert seen["evaluations_skipped"] == [{"step": 2, "reason": "cut"}]
    assert main([str(run)]) == 0
    text = capsys.readouterr().out
    assert "trained 6/6, lost 0, twice 0" in text
    assert "WRONG" not in text


def test_the_first_term_alone_shows_what_is_unsaved(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "checkpoints" / "step_000003.t000002" / "COMPLETE").unlink()
    code, seen = report(run, capsys)
    assert code == 0
    assert (seen["trained"], seen["step"], seen["unsaved_steps"], seen["completed"]) == (2, 1, 2, False)
    assert seen["pending"] == 3


def test_lost_and_twice_fail_the_audit(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = newest_complete(run / "checkpoints")
    with JournalWriter.create(run / "journal", started_after(base[1] if base else None, term=3, attempt=3)) as journal:
        step(run, journal, 4, (7, 8), 3)
        save(run, journal, 3, 4, 10, ())
    code, seen = report(run, capsys)
    assert code == 1
    assert (seen["lost"], seen["twice"]) == ([9], [7])
    assert main([str(run)]) == 1
    text = capsys.readouterr().out
    assert "WRONG: lost: 9" in text
    assert "WRONG: trained twice: 7" in text


def test_damage_on_storage_is_listed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spool = sorted((run / "journal" / "spool").iterdir())
    spool[0].unlink()  # trained: may be collected
    spool[1].write_bytes(b"payload X")
    (run / "checkpoints" / "step_000001.t000001" / "rank0.bin").write_bytes(b"stale")
    (run / "checkpoints" / "step_000009.t000002").mkdir()  # never completed: no damage
    code, seen = report(run, capsys)
    assert code == 0
    assert seen["payloads"] == {"present": 6, "collected": 1}
    problems = seen["problems"]
    assert isinstance(problems, list)
    assert len(problems) == 2
    assert "payload journal/spool/" in problems[0]
    assert problems[1].startswith("step_000001.t000001: rank0.bin: CRC-32")
    assert report(run, capsys, "--strict")[0] == 1


def test_bad_input(tmp_path: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "absent")]) == 2
    assert "has no journal folder" in capsys.readouterr().err
    path = journal_path(run / "journal", 2)
    data = bytearray(path.read_bytes())
    data[30] ^= 1
    path.write_bytes(data)
    assert main([str(run)]) == 1
    assert "this is damage" in capsys.readouterr().err
