"""When a chain of allocations goes on, and what it says when it doesn't."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from checkpoints.manifest import Counters, JournalPosition, Manifest, extend_lineage, publish_manifest
from miles_hpc.cluster.chain import (
    AttemptStart,
    BadNode,
    Progress,
    bad_nodes,
    decide,
    idle_attempts,
    is_cancelled,
    progress_of,
    read_starts,
    record_bad_nodes,
    record_start,
    set_cancelled,
)
from miles_hpc.core.config import JobConfig
from miles_hpc.core.errors import UserError
from miles_hpc.core.paths import RunPaths


def starts(*steps: int) -> list[AttemptStart]:
    """Attempts 1, 2, ... that started at these steps."""
    return [
        AttemptStart(attempt=n, job_id=7, restart=n, time=float(n), progress=Progress(step))
        for n, step in enumerate(steps, 1)
    ]


@pytest.mark.parametrize(
    ("began", "now", "first", "idle"),
    [
        ([], -1, 1, 0),
        ([-1], 5, 1, 0),
        ([-1], -1, 1, 1),
        ([-1, -1], -1, 1, 2),
        ([-1, 5], 5, 1, 1),
        ([-1, 5, 5], 5, 1, 2),
        ([-1, 5, 5], 6, 1, 0),  # the newest made progress, whatever those before it did
        ([-1, -1, 5], 5, 1, 1),
        ([5, 5, 5], 5, 3, 1),  # attempts of earlier submissions don't count
        ([5, 5, 5], 5, 4, 0),
    ],
)
def test_attempts_in_a_row_without_progress(began: list[int], now: int, first: int, idle: int) -> None:
    assert idle_attempts(starts(*began), Progress(now), first=first) == idle


def test_supervisors_of_one_allocation_count_once() -> None:
    one = [msgspec.structs.replace(start, restart=0) for start in starts(5, 5, 5)]
    assert idle_attempts(one, Progress(5)) == 1
    assert idle_attempts([*one, msgspec.structs.replace(starts(5, 5, 5, 5)[3], restart=1)], Progress(5)) == 2


def test_an_evaluation_is_progress_too() -> None:
    assert Progress(4, 1) > Progress(4, 0) > Progress(3, 9)
    assert idle_attempts(starts(4), Progress(4, 1)) == 0


def test_reasons_to_stop() -> None:
    job = JobConfig(max_allocations=4)
    on = decide(job, starts(-1, 5), Progress(9), attempt=2, first=1, cancelled=False)
    assert (on.go, on.why) == (True, "")
    idle = decide(job, starts(-1, 5, 5), Progress(5), attempt=3, first=1, cancelled=False)
    assert not idle.go
    assert idle.why.startswith("2 allocations in a row made no progress: the run stands at step 5: look at the logs")
    assert "up to 3, mend the cause" in idle.why
    none = decide(job, starts(-1, -1), Progress(), attempt=2, first=1, cancelled=False)
    assert "before its first checkpoint" in none.why
    last = decide(job, starts(1, 2, 3, 4), Progress(5), attempt=4, first=1, cancelled=False)
    assert last.why == "allocation 4 was the last of job.max_allocations = 4: to go on, raise it and resume"
    cancelled = decide(job, starts(1), Progress(5), attempt=1, first=1, cancelled=True)
    assert cancelled.why == "the run was cancelled: 'miles-hpc resume' goes on"


def test_records_of_starts(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    for start in starts(-1, 3):
        paths.attempt(start.attempt).mkdir(parents=True)
        record_start(paths, start)
    paths.attempt(3).mkdir()
    paths.attempt_start(3).write_bytes(b"{")  # torn by a full file system: left out
    assert read_starts(paths) == starts(-1, 3)


def test_progress_is_what_a_restart_finds(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    assert progress_of(paths) == Progress()
    folder = paths.checkpoint(1, 8)
    folder.mkdir(parents=True)
    (folder / "half").write_bytes(b"x")
    assert progress_of(paths) == Progress()  # no manifest: nothing a restart would take
    manifest = Manifest(
        run="r",
        term=1,
        step=8,
        attempt=1,
        lineage=extend_lineage((), 1, 8),
        counters=Counters(next_group_id=0, pending=(), phase="rl", sft_steps=0, evaluations=1),
        journal=JournalPosition(term=1, offset=0),
        files={},
    )
    publish_manifest(folder, manifest, lambda: None)
    assert progress_of(paths) == Progress(8, 1)


def test_cancelling_is_left_in_the_run_directory(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    assert not is_cancelled(paths)
    set_cancelled(paths, True)
    set_cancelled(paths, True)
    assert is_cancelled(paths)
    set_cancelled(paths, False)
    set_cancelled(paths, False)
    assert not is_cancelled(paths)


def test_bad_nodes_keep_their_first_reason(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    assert bad_nodes(paths) == []
    one = BadNode(node="n1", reason="ECC", attempt=1, time=1.0)
    record_bad_nodes(paths, [one])
    record_bad_nodes(paths, [BadNode(node="n1", reason="again", attempt=2, time=2.0)])
    record_bad_nodes(paths, [BadNode(node="n2", reason="down", attempt=2, time=2.0)])
    assert [(b.node, b.reason) for b in bad_nodes(paths)] == [("n1", "ECC"), ("n2", "down")]
    paths.bad_nodes.write_text("[")
    with pytest.raises(UserError, match=r"bad_nodes.json: .*: mend or remove it"):
        bad_nodes(paths)
