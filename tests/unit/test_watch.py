"""Watching: incremental reading, exit codes, plain lines without control characters, the live view."""

from __future__ import annotations

import io
import itertools
import json
import re
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from miles_hpc.cli.story import RunStory
from miles_hpc.cli.watch import EXIT_FAILED, EXIT_TIMEOUT, EventTail, watch
from miles_hpc.cli.watch_view import sparkline
from miles_hpc.cluster.job_state import JobVerdict
from miles_hpc.cluster.slurm_states import JobState
from miles_hpc.core.errors import UserError
from tests.exploring import examples
from tests.fakes import make_events

WAITS = JobVerdict(5, JobState.QUEUED, "Resources: it waits for nodes")


def plain() -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=False, width=100, highlight=False), out


def note(run_dir: Path, t: float, name: str, term: int = 1, **fields: object) -> None:
    (run_dir / "events").mkdir(exist_ok=True)
    event = {"t": t, "term": term, "process": "controller", "kind": "note", "name": name, **fields}
    make_events.append(run_dir / "events", event)


def test_tail_reads_each_line_once_and_waits_for_its_end(tmp_path: Path) -> None:
    tail = EventTail(tmp_path / "events")
    assert list(tail.read()) == []  # no folder yet
    (tmp_path / "events").mkdir()
    path = tmp_path / "events" / "controller.t000001.jsonl"
    path.write_bytes(b'{"t": 1, "kind": "note"}\n{"t": 2, "ki')
    assert [e["t"] for e in tail.read()] == [1]
    assert list(tail.read()) == []
    with open(path, "ab") as file:
        file.write(b'nd": "note"}\nnot json\n[1]\n{"t": 3, "kind": "note"}\n')
    assert [e["t"] for e in tail.read()] == [2, 3]
    (tmp_path / "events" / "rollout-a-0.t000001.jsonl").write_bytes(b'{"t": 4, "kind": "note"}\n')
    assert [e["t"] for e in tail.read()] == [4]
    path.write_bytes(b'{"t": 5, "kind": "note"}\n')  # shorter: another file
    assert [e["t"] for e in tail.read()] == [5]


@settings(max_examples=examples(50))
@given(st.lists(st.integers(0, 400), max_size=20), st.integers(1, 30))
def test_tail_gives_all_lines_however_they_arrive(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int], n: int
) -> None:
    folder = tmp_path_factory.mktemp("events")
    data = b"".join(json.dumps({"t": i, "kind": "note", "x": "é" * (i % 3)}).encode() + b"\n" for i in range(n))
    places = sorted({0, len(data), *(min(c, len(data)) for c in cuts)})
    tail, found = EventTail(folder), []
    for low, high in itertools.pairwise(places):
        with open(folder / "a.jsonl", "ab") as file:
            file.write(data[low:high])
        found += [e["t"] for e in tail.read()]
    assert found == list(range(n))


def test_complete_run_in_plain_lines(tmp_path: Path) -> None:
    make_events.write(tmp_path)
    console, out = plain()
    assert watch(tmp_path, poll_s=0.01, timeout_s=60, console=console) == 0
    text = out.getvalue()
    assert "complete: step 52, 640 groups trained" in text
    assert "lost rollout-vm3-0: no heartbeat" in text
    assert "went back to step 34" in text
    assert "evaluation before: reward 0.23" in text and "over 24 prompts × 4 episodes" in text
    assert text.count("evaluation at step 44: reward 0.7") == 1
    assert "evaluation at step 31 skipped (overflow): one of step 28 is under way" in text
    assert all(c.isprintable() or c == "\n" for c in text)


def test_plain_lines_while_it_goes_are_few(tmp_path: Path) -> None:
    """At most one step line a second, however fast steps come."""
    writer = threading.Thread(target=make_events.play, args=(tmp_path, 3.0))
    console, out = plain()
    begin = time.monotonic()
    writer.start()
    code = watch(tmp_path, poll_s=0.02, timeout_s=120, console=console)
    took = time.monotonic() - begin
    writer.join(timeout=60)
    assert code == 0
    steps = [line for line in out.getvalue().splitlines() if re.search(r" step \d+/52 ", line)]
    assert 1 <= len(steps) <= took + 2
    assert re.search(r" step 52/52 rl: reward 0\.\d+", steps[-1])


def test_pending_job_is_waited_for_politely(tmp_path: Path) -> None:
    console, out = plain()
    code = watch(tmp_path, poll_s=0.02, timeout_s=0.5, job_state=lambda _: WAITS, console=console)
    assert code == EXIT_TIMEOUT
    assert out.getvalue().count("waiting for the job to start (job 5 QUEUED: Resources: it waits for nodes)") == 1
    assert "the run goes on" in out.getvalue()


@pytest.mark.parametrize("state", ["FAILED", "CANCELLED", "NODE_FAIL", "PAUSED", "ENDED"])
def test_job_that_ended_without_completing_the_run(tmp_path: Path, state: str) -> None:
    console, out = plain()
    over = JobVerdict(5, JobState(state), "who says so")
    code = watch(tmp_path, poll_s=0.02, timeout_s=60, job_state=lambda _: over, grace_s=0.1, console=console)
    assert code == EXIT_FAILED
    assert f"ended without completing at step 0 ({state}: who says so)" in out.getvalue()


def test_a_job_that_nobody_knows_of_may_still_run(tmp_path: Path) -> None:
    console, out = plain()
    unknown = JobVerdict(5, JobState.UNKNOWN, "Slurm doesn't know the job")
    code = watch(tmp_path, poll_s=0.02, timeout_s=0.5, job_state=lambda _: unknown, grace_s=0.1, console=console)
    assert code == EXIT_TIMEOUT
    assert "job 5 UNKNOWN: Slurm doesn't know the job" in out.getvalue()


def test_warnings_are_told_once(tmp_path: Path) -> None:
    note(tmp_path, 1.0, "allocation_start", attempt=1)
    lengths = itertools.count(3)

    def state(story: RunStory) -> JobVerdict:
        return JobVerdict(5, JobState.RUNNING, "Slurm says RUNNING", (f"nothing was written for {next(lengths)} min",))

    console, out = plain()
    assert watch(tmp_path, poll_s=0.02, timeout_s=5.0, job_state=state, console=console) == EXIT_TIMEOUT
    assert next(lengths) > 4
    assert out.getvalue().count("warning: nothing was written for 3 min") == 1
    assert out.getvalue().count("warning:") == 1


def test_requeue_passes_through_an_ended_state(tmp_path: Path) -> None:
    make_events.write(tmp_path, until=40)
    states = iter([JobState.NODE_FAIL, JobState.REQUEUED])

    def state(story: RunStory) -> JobVerdict:
        found = next(states, JobState.RUNNING)
        if found == JobState.RUNNING:
            note(tmp_path, 1.8e9, "run_complete", term=2, trained_groups=3, steps=4)
        return JobVerdict(5, found, "")

    console, _ = plain()
    assert watch(tmp_path, poll_s=0.05, timeout_s=60, job_state=state, grace_s=20, console=console) == 0


def test_scheduler_that_is_away_is_no_failure(tmp_path: Path) -> None:
    make_events.write(tmp_path)

    def state(story: RunStory) -> JobVerdict:
        raise OSError("slurm_load_jobs error: Unable to contact slurm controller")

    console, _ = plain()
    assert watch(tmp_path, poll_s=0.01, timeout_s=60, job_state=state, console=console) == 0


def test_allocation_that_failed(tmp_path: Path) -> None:
    note(tmp_path, 1.0, "allocation_start", attempt=1)
    note(tmp_path, 2.0, "allocation_end", attempt=1, outcome="failed", reason="no trainer came up")
    console, out = plain()
    assert watch(tmp_path, poll_s=0.02, grace_s=0.1, timeout_s=60, console=console) == EXIT_FAILED
    assert "failed: no trainer came up" in out.getvalue()


def test_end_of_the_allocation_is_enough_when_asked(tmp_path: Path) -> None:
    note(tmp_path, 1.0, "allocation_start", attempt=1)
    note(tmp_path, 2.0, "allocation_end", attempt=1, outcome="continue", reason="time limit")
    console, _ = plain()
    assert watch(tmp_path, poll_s=0.02, until_complete=False, timeout_s=60, console=console) == 0


def test_once(tmp_path: Path) -> None:
    console, out = plain()
    assert watch(tmp_path, once=True, job_state=lambda _: WAITS, console=console) == 0
    assert "waiting for the job to start (job 5 QUEUED: Resources: it waits for nodes)" in out.getvalue()
    console, out = plain()
    assert watch(make_events.write(tmp_path), once=True, console=console) == 0
    assert "invented: step 52 of 52, 2 allocations" in out.getvalue()
    assert out.getvalue().rstrip().endswith("complete")


def test_live_view_shows_what_matters(tmp_path: Path) -> None:
    make_events.write(tmp_path)
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100, height=40, color_system="truecolor")
    assert watch(tmp_path, poll_s=0.01, timeout_s=60, console=console) == 0
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
    for words in ("invented", "step 52 of 52", "▁", "held out before 0.232", "groups 640 of 640", "rollout", "lost"):
        assert words in text, words


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("until", [0, 1, 9, 80])
def test_live_view_of_any_state_fits(tmp_path: Path, width: int, until: int) -> None:
    make_events.write(tmp_path, until=until)
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=width, height=40, color_system=None)
    verdict = JobVerdict(5, JobState.RUNNING, "Slurm says RUNNING " * 9, ("the run has written nothing " * 9,))
    code = watch(tmp_path, poll_s=0.01, timeout_s=0.0, job_state=lambda _: verdict, console=console)
    assert code == EXIT_TIMEOUT
    assert out.getvalue().count("written") >= 9 and out.getvalue().count("RUNNING") >= 10
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue()).splitlines()
    assert max(len(line) for line in lines) <= width


def test_markup_and_escapes_from_events_are_inert(tmp_path: Path) -> None:
    (tmp_path / "events").mkdir()
    evil = "[bold]x[/bold]\x1b]0;title\x07\n[/"
    event = {"t": 1.0, "term": 1, "process": "controller", "kind": "verdict", "name": "lost", "peer": evil}
    make_events.append(tmp_path / "events", event)
    for terminal in (True, False):
        out = io.StringIO()
        console = Console(file=out, force_terminal=terminal, width=100, color_system=None)
        assert watch(tmp_path, poll_s=0.01, timeout_s=0.0, console=console) == EXIT_TIMEOUT
        assert "[bold]x[/bold]" in out.getvalue()
        assert "\x1b]0" not in out.getvalue() and "\x07" not in out.getvalue()


def test_interrupt_ends_only_the_watching(tmp_path: Path) -> None:
    def state(story: RunStory) -> JobVerdict:
        raise KeyboardInterrupt

    console, out = plain()
    assert watch(tmp_path, job_state=state, timeout_s=60, console=console) == 130
    assert "the run isn't touched" in out.getvalue()


def test_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a folder"):
        watch(tmp_path / "none")


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True, width=32), max_size=300), st.integers(0, 80))
def test_sparkline_fits(values: list[float], width: int) -> None:
    line = sparkline(values, width)
    assert len(line) == min(width, len(values))
    assert set(line) <= set(" ▁▂▃▄▅▆▇█")


def test_sparkline_rises() -> None:
    assert sparkline([0, 1, 2, 3], 4) == "▁▃▆█"
    assert sparkline([5, 5], 9) == "▁▁"
