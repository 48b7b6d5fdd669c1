"""`miles-hpc watch`: follow a run while it goes, in a terminal or in a log.

    events/*.jsonl --EventTail--> StoryReducer --> RunStory --> live view (terminal) | plain lines (anything else)
    job_state(story) -> JobVerdict ---------------^ asked every few seconds, when given

Watching never changes a run. It ends when the run is complete (0), when it ended without completing (1), or by its own
time limit (124, as timeout(1) has it); an interrupt ends only the watching (130).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_hpc.cli.story import RunStory
from miles_hpc.cli.story_reducer import StoryReducer
from miles_hpc.cli.watch_view import LiveView, PlainLines
from miles_hpc.cluster.job_state import JobVerdict
from miles_hpc.cluster.slurm_states import JobState
from miles_hpc.core.errors import UserError
from miles_hpc.core.paths import RunPaths

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["EXIT_FAILED", "EXIT_INTERRUPTED", "EXIT_TIMEOUT", "EventTail", "JobWatch", "watch"]

EXIT_FAILED = 1
EXIT_TIMEOUT = 124
EXIT_INTERRUPTED = 130

#: States in which a later allocation, or the present one, may still finish the run.
_ALIVE = (JobState.QUEUED, JobState.REQUEUED, JobState.STARTING, JobState.RUNNING, JobState.SUSPENDED)
_ASK_EVERY_S = 2.0  # each question may be a call of scontrol
_ASK_SHARE = 0.2  # at most this part of the time: without an answer a question takes seconds, and the view stands still


class EventTail:
    """Reads what was appended to the files of a folder since the last call. Files may appear at any time.

    A line without its end stays unread until it is complete; a line that doesn't parse is skipped.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets: dict[Path, int] = {}

    def read(self) -> Iterator[dict[str, Any]]:
        """New events, file by file; nothing when the folder doesn't exist yet."""
        for path in sorted(self._folder.glob("*.jsonl")):
            offset = self._offsets.get(path, 0)
            try:
                with open(path, "rb") as file:
                    if file.seek(0, 2) < offset:
                        offset = 0  # another file under this name: read it from the start
                    file.seek(offset)
                    data = file.read()
            except OSError:
                continue  # vanished, or not readable at this moment
            complete = data.rfind(b"\n") + 1
            self._offsets[path] = offset + complete
            for line in data[:complete].splitlines():
                try:
                    event = json.loads(line)
                except ValueError:
                    continue
                if isinstance(event, dict):
                    yield event


@dataclass
class JobWatch:
    """Where the job stands: asked at most every `_ASK_EVERY_S`; an error counts as not known."""

    ask: Callable[[RunStory], JobVerdict | None] | None
    grace_s: float
    verdict: JobVerdict | None = None
    _next: float = 0.0
    _ended_since: float | None = None

    def refresh(self, story: RunStory, now: float) -> None:
        if self.ask is None or now < self._next:
            return
        try:
            self.verdict = self.ask(story)
        except Exception:  # the scheduler may be away for a while: the events still tell
            self.verdict = None
        answered = time.monotonic()
        self._next = answered + max(_ASK_EVERY_S, (answered - now) / _ASK_SHARE)
        over = self.verdict is not None and self.verdict.over
        self._ended_since = (self._ended_since or now) if over else None

    @property
    def alive(self) -> bool:
        """Whether the job is known to be able to go on."""
        return self.verdict is not None and self.verdict.state in _ALIVE

    def ended(self, now: float) -> bool:
        """Whether it has been over for the grace time: a requeued job passes through such states as well."""
        return self._ended_since is not None and now - self._ended_since >= self.grace_s


def watch(
    run_dir: Path,
    *,
    once: bool = False,
    poll_s: float = 0.5,
    until_complete: bool = True,
    timeout_s: float | None = None,
    job_state: Callable[[RunStory], JobVerdict | None] | None = None,
    grace_s: float = 10.0,
    console: Console | None = None,
) -> int:
    """Show the run until it is over; returns 0 complete, 1 ended otherwise, 124 after `timeout_s`, 130 interrupted.

    `once` shows the present state and returns (1 only when the run has failed). Without `until_complete` the end of the
    current allocation is the end. `job_state` returns the verdict on the run's job, None for a run without one; an
    ended job counts only after `grace_s`, because a requeue passes through such states.
    On a console that isn't a terminal it writes plain lines. Raises UserError when `run_dir` isn't a folder.
    """
    from rich.console import Console

    if not run_dir.is_dir():
        raise UserError(f"nothing to watch: {run_dir} is not a folder; expected the folder of a submitted run")
    console = console or Console(highlight=False)
    tail, reducer = EventTail(RunPaths(run_dir).events), StoryReducer()
    job = JobWatch(job_state, 0.0 if once else grace_s)
    name = run_dir.resolve().name
    view = LiveView(console, name) if console.is_terminal and not once else PlainLines(console, name, once=once)
    begin = time.monotonic()
    failed_since: float | None = None
    story = reducer.story()
    try:
        with view:
            while True:
                now = time.monotonic()
                new = 0
                for event in tail.read():
                    reducer.add(event)
                    new += 1
                if new:
                    story = reducer.story()
                job.refresh(story, now)
                last = story.allocations[-1] if story.allocations else None
                failed = last is not None and last.failed and not job.alive
                failed_since = (failed_since or now) if failed else None
                code = _verdict(story, until_complete, job.ended(now), failed_since, now, grace_s)
                if once:
                    view.show(story, job.verdict, final=True)
                    return EXIT_FAILED if not story.complete and (failed or job.ended(now)) else 0
                if code is None and timeout_s is not None and now - begin >= timeout_s:
                    code = EXIT_TIMEOUT
                view.show(story, job.verdict, final=code is not None)
                if code is not None:
                    view.end(_last_words(story, code, job.verdict, now - begin))
                    return code
                time.sleep(poll_s if timeout_s is None else min(poll_s, max(0.0, begin + timeout_s - now)))
    except KeyboardInterrupt:
        console.print("Stopped watching; the run isn't touched by that.", markup=False)
        return EXIT_INTERRUPTED


def _verdict(
    story: RunStory, until_complete: bool, job_ended: bool, failed_since: float | None, now: float, grace_s: float
) -> int | None:
    """The exit code, or None while there is something to wait for."""
    if story.complete:
        return 0
    if job_ended or (failed_since is not None and now - failed_since >= grace_s):
        return EXIT_FAILED
    if not until_complete and story.allocations and story.allocations[-1].end is not None:
        return EXIT_FAILED if story.allocations[-1].failed else 0
    return None


def _last_words(story: RunStory, code: int, verdict: JobVerdict | None, waited_s: float) -> str:
    last = story.allocations[-1] if story.allocations else None
    if code == EXIT_TIMEOUT:
        return f"stopped watching after {waited_s:.0f} s; the run goes on"
    if code == EXIT_FAILED:
        why = f"{last.outcome}: {last.reason}" if last is not None else ""
        why = verdict.line if verdict is not None and verdict.over else why
        return f"ended without completing at step {story.current_step} ({why or 'no reason recorded'})"
    if story.complete:
        groups = f", {story.trained_groups} groups trained" if story.trained_groups is not None else ""
        return f"complete: step {story.current_step}{groups}"
    return f"the allocation ended at step {story.current_step}"
