"""How a run looks while it goes: a live view for terminals, plain lines for logs and pipes.

Text that comes from events is printed as it is: never as markup, never with control characters.
"""

from __future__ import annotations

import math
import re
import time
from types import TracebackType
from typing import TYPE_CHECKING

from miles_hpc.cli.story import FAULTS, ROLES, RunStory, TrainedStep
from miles_hpc.cli.wording import duration, quantity
from miles_hpc.cluster.job_state import JobVerdict
from miles_hpc.cluster.slurm_states import JobState

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

__all__ = ["LiveView", "PlainLines", "View", "sparkline"]

_NUMBER = re.compile(r"\d+")
_BLOCKS = "▁▂▃▄▅▆▇█"
_STALE_S = 15.0  # a role that was silent for longer is shown as such
_REMIND_S = 30.0  # plain lines: say again that we wait
# What a step's line says, in this order, where it was recorded: metric, label.
_SHOWN = (
    ("rollout/raw_reward", "reward"),
    ("train/loss", "loss"),
    ("train/entropy", "entropy"),
    ("train/grad_norm", "grad norm"),
    ("rollout/staleness_mean", "staleness"),
    ("rollout/truncated_ratio", "truncated"),
    ("perf/step_time", "step s"),
    ("perf/wait_batch_time", "wait s"),
)


def sparkline(values: list[float], width: int) -> str:
    """`values` as block characters, means of equal parts when there are more than `width`; a blank where it's NaN."""
    if not values or width < 1:
        return ""
    n = min(width, len(values))
    cells = []
    for i in range(n):
        part = [v for v in values[i * len(values) // n : (i + 1) * len(values) // n] if math.isfinite(v)]
        cells.append(sum(part) / len(part) if part else math.nan)
    finite = [c for c in cells if math.isfinite(c)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((c - low) * scale)] if math.isfinite(c) else " " for c in cells)


class View:
    """Shows stories one after the other; entered before the first and left after the last."""

    def __enter__(self) -> View:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, trace: TracebackType | None) -> None:
        return None

    def show(self, story: RunStory, verdict: JobVerdict | None, *, final: bool) -> None:
        """Bring the view up to date; `final` when no other call follows."""
        raise NotImplementedError

    def end(self, words: str) -> None:
        """How it ended, for the last line."""
        raise NotImplementedError


# ------------------------------------------------------------------------------------------------ plain lines


class PlainLines(View):
    """One line per event of interest and at most one step line a second, without control characters."""

    def __init__(self, console: Console, name: str, *, once: bool = False) -> None:
        self._console, self._name, self._once = console, name, once
        self._evaluations = self._allocations = self._ended = 0
        self._told: set[tuple[float, str, str]] = set()  # verdicts of several files come out of order
        self._warned: set[str] = set()
        self._greeted = False
        self._step: TrainedStep | None = None
        self._step_at = self._reminded = -math.inf

    def show(self, story: RunStory, verdict: JobVerdict | None, *, final: bool) -> None:
        now = time.monotonic()
        if self._once:
            self._overview(story, verdict)
            return
        if not self._greeted:
            self._line(f"watching {story.name or self._name}")
            self._greeted = True
        for a in story.allocations[self._allocations :]:
            nodes = ", ".join(f"{len(h)} {r}" for r, h in a.hosts.items())
            self._line(f"allocation {a.attempt} starts" + (f" on {nodes} nodes" if nodes else ""))
        self._allocations = len(story.allocations)
        for e in story.evaluations[self._evaluations :]:
            self._line(f"evaluation {e.title}: reward {e.mean:.3f} over {e.size}")
        self._evaluations = len(story.evaluations)
        self._verdict_lines(story)
        step = story.steps[-1] if story.steps else None
        is_new = step is not None and (self._step is None or step.t > self._step.t)
        if step is not None and is_new and (final or now - self._step_at >= 1.0):
            self._line(_step_line(story, step))
            self._step, self._step_at = step, now
        ended = [a for a in story.allocations if a.end is not None]
        for a in ended[self._ended :]:
            self._line(f"allocation {a.attempt} ends: {a.outcome}" + (f": {a.reason}" if a.reason else ""))
        self._ended = len(ended)
        self._warnings(verdict)
        waiting = _waiting(story, verdict)
        if not waiting:
            self._reminded = -math.inf
        elif not final and now - self._reminded >= _REMIND_S:
            self._line(waiting)
            self._reminded = now

    def end(self, words: str) -> None:
        self._line(words)

    def _warnings(self, verdict: JobVerdict | None) -> None:
        """Each once, however long what it warns of has lasted by now."""
        for warning in () if verdict is None else verdict.warnings:
            if (kind := _NUMBER.sub("", warning)) not in self._warned:
                self._warned.add(kind)
                self._line(f"warning: {warning}")

    def _verdict_lines(self, story: RunStory) -> None:
        if len(story.verdicts) == len(self._told):
            return
        new = [v for v in story.verdicts if (v.t, v.process, v.text) not in self._told]
        self._told.update((v.t, v.process, v.text) for v in new)
        for v in [v for v in new if v.name in FAULTS][-5:]:
            self._line(v.text)
        joined = [v.peer for v in new if v.name == "joined"]
        if joined:
            self._line(f"joined: {', '.join(joined[:12])}" + (f" and {len(joined) - 12} more" if joined[12:] else ""))
        for v in [v for v in new if v.name == "evaluation_skipped"][-3:]:
            self._line(v.text)
        dropped = [v for v in new if v.name == "dropped"]
        if dropped:
            more = f"; and {len(dropped) - 1} more" if len(dropped) > 1 else ""
            self._line(dropped[-1].text + more)

    def _overview(self, story: RunStory, verdict: JobVerdict | None) -> None:
        total = f" of {story.total_steps}" if story.total_steps is not None else ""
        n = len(story.allocations)
        allocations = f"{n} allocation{'s' * (n != 1)}"
        self._line(f"{story.name or self._name}: step {story.current_step}{total}, {allocations}")
        if story.steps:
            self._line(_step_line(story, story.steps[-1]))
        for e in story.evaluations[-2:]:
            self._line(f"evaluation {e.title}: reward {e.mean:.3f} over {e.size}")
        for _, _, text in story.told()[-5:]:
            self._line(text)
        waiting = _waiting(story, verdict)
        running = "running" if verdict is None else f"job {_job_text(verdict)}"
        self._line("complete" if story.complete else (waiting or running))
        for warning in () if verdict is None else verdict.warnings:
            self._line(f"warning: {warning}")

    def _line(self, text: str) -> None:
        clean = "".join(c if c.isprintable() else " " for c in text)
        clean = clean if self._once else f"{time.strftime('%H:%M:%S')} {clean}"
        self._console.print(clean, markup=False, highlight=False, soft_wrap=True)


def _step_line(story: RunStory, step: TrainedStep) -> str:
    total = f"/{story.total_steps}" if story.total_steps is not None else ""
    parts = [f"{label} {quantity(step.values[name])}" for name, label in _SHOWN if name in step.values]
    return f"step {step.step}{total} {step.phase}" + (f": {', '.join(parts)}" if parts else "")


def _job_text(verdict: JobVerdict) -> str:
    return verdict.line if verdict.job_id is None else f"{verdict.job_id} {verdict.line}"


def _waiting(story: RunStory, verdict: JobVerdict | None) -> str:
    """Why nothing happens; "" when something does."""
    state = "" if verdict is None else f" (job {_job_text(verdict)})"
    queued = verdict is not None and verdict.state in (JobState.QUEUED, JobState.REQUEUED)
    if story.complete:
        return ""
    if verdict is not None and verdict.over:
        return f"nothing runs or is queued{state}"
    if not story.allocations and not story.steps:
        return f"waiting for the job to start{state}"
    last = story.allocations[-1] if story.allocations else None
    if (last is not None and last.end is not None) or queued:
        return f"waiting for the next allocation{state}"
    return ""


# ------------------------------------------------------------------------------------------------ terminal


class LiveView(View):
    """A view that is redrawn in place."""

    def __init__(self, console: Console, name: str) -> None:
        from rich.live import Live

        self._console, self._name = console, name
        self._words = ""
        self._live = Live(console=console, auto_refresh=False, vertical_overflow="crop")

    def __enter__(self) -> View:
        self._live.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, trace: TracebackType | None) -> None:
        self._live.__exit__(kind, e, trace)
        if self._words:
            self._console.print(_text(f" {self._words}", "bold"))

    def show(self, story: RunStory, verdict: JobVerdict | None, *, final: bool) -> None:
        self._live.update(_screen(story, self._name, verdict, self._console.width, time.time()), refresh=True)

    def end(self, words: str) -> None:
        self._words = words


def _screen(story: RunStory, name: str, verdict: JobVerdict | None, width: int, now: float) -> RenderableType:
    from rich.console import Group
    from rich.padding import Padding

    inner = max(20, min(width, 110) - 2)
    parts: list[RenderableType] = [_title(story, name, now)]
    waiting = _waiting(story, verdict)
    if waiting:
        parts.append(_lines(waiting[:1].upper() + waiting[1:], "yellow"))
    elif verdict is not None and not story.complete:
        parts.append(_lines(f"Job {_job_text(verdict)}", "dim"))
    if verdict is not None:
        parts += [_lines(warning, "bold red") for warning in verdict.warnings]
    if story.total_steps or story.steps:
        parts += [_progress(story, inner), *_reward(story, inner), *_metrics(story, inner)]
    if story.peers:
        parts.append(_roles(story, now))
    parts += _verdicts(story, inner)
    return Padding(Group(*parts), (0, 1))


def _text(text: str = "", style: str = "") -> Text:
    """One line that is cut where it doesn't fit; `style` is of this piece only, not of what is appended."""
    from rich.text import Text

    return Text(no_wrap=True, overflow="ellipsis").append("".join(c if c.isprintable() else " " for c in text), style)


def _lines(text: str, style: str) -> Text:
    """As many lines as it needs."""
    from rich.text import Text

    return Text("".join(c if c.isprintable() else " " for c in text), style, overflow="fold")


def _title(story: RunStory, name: str, now: float) -> Text:
    title = _text(story.name or name, "bold")
    if story.complete:
        title.append("  complete", "bold green")
    elif story.phase and story.allocations and story.allocations[-1].end is None:
        title.append(f"  {'warm start' if story.phase == 'sft' else story.phase.upper()}", "bold cyan")
    last = story.allocations[-1] if story.allocations else None
    if last is not None:
        n = len(story.allocations)
        over = f"  {n} allocation{'s' * (n != 1)}"
        title.append(over if story.complete else f"  allocation {last.attempt}", "default")
        if last.end is None and not story.complete:
            if last.time_limit_s is not None:
                left = max(0.0, last.start + last.time_limit_s - now)
                title.append(
                    f", {duration(round(left))} left", "yellow" if left < 0.1 * last.time_limit_s else "default"
                )
        elif last.end is not None and not story.complete:
            title.append(f" ended ({last.outcome})", "default")
    if story.first_t is not None:
        wall = story.wall_s if story.complete else now - story.first_t
        words = "in all" if story.complete else "since start"
        title.append(f"  {duration(max(0.0, wall))} {words}", "dim")
    return title


def _progress(story: RunStory, width: int) -> Text:
    total = story.total_steps or story.current_step
    sft = min(story.sft_steps or 0, total)
    label = f" step {story.current_step}" + (f" of {story.total_steps}" if story.total_steps else "")
    cells = max(10, width - len(label))
    share = min(1.0, story.current_step / total) if total else 0.0
    done, warm = round(cells * share), round(cells * sft / total) if total else 0
    bar = _text()
    for low, high, style in ((0, warm, "magenta"), (warm, cells, "green" if story.complete else "cyan")):
        full = min(max(done, low), high)
        bar.append("━" * (full - low), style).append("─" * (high - full), "bright_black")
    return bar.append(label, "bold")


def _reward(story: RunStory, width: int) -> list[RenderableType]:
    _, values = story.series("rollout/raw_reward")
    lines: list[RenderableType] = []
    if values:
        newest = values[-5:]
        now = sum(newest) / len(newest)
        line = _text("reward ", "bold")
        tail = f" {now:.3f} (last {len(newest)}; {min(values):.2f} to {max(values):.2f})"
        line.append(sparkline(values, width - len(line.plain) - len(tail)), "cyan").append(tail)
        lines.append(line)
    if story.evaluations:
        line = _text("held out ", "bold")
        told = [e for w in ("before", "sft_only", "during", "after") if (e := story.evaluation(w)) is not None]
        line.append("   ".join(f"{e.title} {e.mean:.3f} (n={e.n})" for e in told))
        lines.append(line)
    return lines


def _metrics(story: RunStory, width: int) -> list[RenderableType]:
    from rich.columns import Columns
    from rich.text import Text

    if not story.steps:
        return []
    last = story.steps[-1]
    cells = [
        Text.assemble((f"{label} ", "dim"), f"{quantity(last.values[name])}")
        for name, label in _SHOWN
        if name in last.values and name != "rollout/raw_reward"
    ]
    if story.trained_groups is not None:
        asked = f" of {story.groups_asked}" if story.groups_asked is not None else ""
        cells.append(Text.assemble(("groups ", "dim"), f"{story.trained_groups}{asked}"))
    if "data/dropped_total" in last.values:
        cells.append(Text.assemble(("dropped ", "dim"), quantity(last.values["data/dropped_total"])))
    return [Columns(cells, padding=(0, 3))] if cells else []


def _roles(story: RunStory, now: float) -> RenderableType:
    from rich.padding import Padding
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 3, 0, 0))
    for heading in ("role", "nodes", "alive", "lost", "idle", "last heard"):
        table.add_column(heading, justify="left" if heading == "role" else "right")
    last = story.allocations[-1] if story.allocations else None
    for role in ("controller", "supervisor", *ROLES):
        peers = [p for p in story.peers if p.role == role]
        if not peers:
            continue
        nodes = len(last.hosts.get(role, ())) if last is not None else 0
        alive, gone = sum(p.alive for p in peers), sum(not p.alive for p in peers)
        idle = next(
            (s for s in reversed(story.idle) if s.role == role and s.attempt == (last.attempt if last else 0)), None
        )
        silent = max(0.0, now - max(p.last_seen for p in peers))
        over = story.complete or (last is not None and last.end is not None)
        table.add_row(
            role,
            str(nodes) if nodes else "",
            "" if over else _text(str(alive), "green" if alive else "red"),
            _text(str(gone), "bold red") if gone else "",
            f"{100 * idle.idle:.0f} %" if idle is not None else "",
            _text(f"{duration(silent)} ago", "yellow" if silent > _STALE_S and not over else "dim"),
        )
    return Padding(table, (1, 0))


def _verdicts(story: RunStory, width: int) -> list[RenderableType]:
    lines: list[RenderableType] = []
    for t, name, text in story.told()[-5:]:
        line = _text(time.strftime("%H:%M:%S ", time.localtime(t)), "dim")
        line.append(_text(text).plain, "bold red" if name in FAULTS else "default")
        lines.append(line)
    return lines
