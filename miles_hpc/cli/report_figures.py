"""The pictures of a report: one function per panel that draws a RunStory into matplotlib axes.

A panel knows whether there is anything to draw (`ready`) and what is missing otherwise. Lines differ in style as well
as in colour where several cross.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from miles_hpc.cli.report_axes import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PURPLE,
    RED,
    SKY,
    STYLE,
    fault_marks,
    legend,
    marker_size,
    plain,
    range_of,
    smooth,
    step_axis,
)
from miles_hpc.cli.report_reward import draw_reward
from miles_hpc.cli.story import ROLES, RunStory
from miles_hpc.cli.wording import duration

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["PANELS", "Panel", "render_all", "render_panel"]


@dataclass(frozen=True)
class Panel:
    """One picture. `draw(axes, story, cap)`; `cap` is the run's staleness bound in steps, None when unknown."""

    key: str
    title: str
    ready: Callable[[RunStory], bool]
    draw: Callable[[Axes, RunStory, int | None], None]
    missing: str  # what to say when there is nothing to draw
    wide: bool = False


def render_panel(panel: Panel, story: RunStory, cap: int | None, *, width_in: float, height_in: float) -> bytes:
    """One panel as PNG bytes, without its title (the page has it as text)."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width_in, height_in), dpi=160, layout="constrained", facecolor="white")
        panel.draw(figure.add_subplot(), story, cap)
        return _png(figure)


def render_all(story: RunStory, cap: int | None, title: str, subtitle: str) -> bytes:
    """All panels that have data on one sheet, as PNG bytes."""
    import matplotlib
    from matplotlib.figure import Figure

    panels = [p for p in PANELS if p.ready(story)]
    wide, small = [p for p in panels if p.wide], [p for p in panels if not p.wide]
    rows = len(wide) + math.ceil(len(small) / 2)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(12, 1.1 + 3.5 * max(1, rows)), dpi=130, layout="constrained", facecolor="white")
        figure.get_layout_engine().set(h_pad=0.12, w_pad=0.12, hspace=0.03)  # type: ignore[union-attr, call-arg]
        name = title[:80].replace("$", r"\$")
        figure.suptitle(f"{name}\n", x=0.012, ha="left", fontsize=16, fontweight="bold", color=INK)
        figure.text(0.012, 1 - 0.62 / figure.get_figheight(), subtitle, fontsize=11, color=GREY, va="top")
        grid = figure.add_gridspec(max(1, rows), 2)
        for row, panel in enumerate(wide):
            axes = figure.add_subplot(grid[row, :])
            panel.draw(axes, story, cap)
            axes.set_title(panel.title, pad=18)
        for index, panel in enumerate(small):
            axes = figure.add_subplot(grid[len(wide) + index // 2, index % 2])
            panel.draw(axes, story, cap)
            axes.set_title(panel.title, pad=18)
        if not panels:
            axes = figure.add_subplot(grid[0, :])
            axes.set_axis_off()
            axes.text(0.5, 0.5, "Nothing was recorded yet.", ha="center", va="center", fontsize=14, color=GREY)
        return _png(figure)


def _png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def _has(*names: str) -> Callable[[RunStory], bool]:
    return lambda story: any(n in s.values for s in story.steps for n in names)


# ------------------------------------------------------------------------------------------------ panels


def _kinds(axes: Axes, story: RunStory, cap: int | None) -> None:
    prefix = "rollout/reward/"
    names = sorted({n for s in story.steps for n in s.values if n.startswith(prefix)})
    colours = (BLUE, ORANGE, GREEN, RED, PURPLE, SKY, INK, GREY)
    if len(names) > 8:
        words = f"8 of {len(names)} kinds; all are in the table of metrics"
        axes.text(0.01, 0.02, words, transform=axes.transAxes, fontsize=9, color=GREY)
    for index, name in enumerate(names[:8]):
        steps, values = story.series(name)
        line = ("-", "--", "-.", ":")[(index // 2) % 4]
        label = plain(name.removeprefix(prefix))
        axes.plot(steps, smooth(values), line, color=colours[index % 8], linewidth=1.8, label=label)
    if len(names) > 1 and all(0 <= v <= 1 for n in names for v in story.series(n)[1]):
        axes.set_ylim(0, 1.06)
    axes.set_ylabel("reward, smoothed")
    step_axis(axes, story, *range_of(story, tuple(names)))
    legend(axes)


def _sft(axes: Axes, story: RunStory, cap: int | None) -> None:
    steps, values = story.series("train/loss", "sft")
    axes.plot(steps, values, ".-", color=BLUE, linewidth=1.4, markersize=4)
    finite = [v for v in values if math.isfinite(v)]
    if finite and min(finite) >= 0:
        axes.set_ylim(0, max(finite) * 1.08 or 1)
    axes.set_ylabel("loss")
    step_axis(axes, story, *range_of(story, ("train/loss",), "sft"))


def _staleness(axes: Axes, story: RunStory, cap: int | None) -> None:
    names = ("rollout/staleness_max", "rollout/staleness_mean")
    styles: tuple[dict[str, Any], ...] = (
        {"linestyle": "none", "marker": "o", "color": ORANGE, "label": "largest"},
        {"linewidth": 1.8, "color": BLUE, "label": "mean"},
    )
    largest = 1.0
    for name, style in zip(names, styles, strict=True):
        steps, values = story.series(name)
        if steps:
            axes.plot(steps, values, **({"markersize": marker_size(len(steps)), **style}))
            largest = max(largest, *(v for v in values if math.isfinite(v)), 0)
    if cap is not None:
        axes.axhline(cap, color=INK, linestyle="--", linewidth=1.4, label=f"bound ({cap})")
        largest = max(largest, cap)
    axes.set_ylim(0, largest * 1.15)
    axes.set_ylabel("steps behind at use")
    step_axis(axes, story, *range_of(story, names))
    legend(axes)


_PARTS = (
    ("perf/train_time", "train", BLUE, ""),
    ("perf/sync_time", "sync weights", GREEN, ""),
    ("perf/stage_time", "stage data", SKY, ""),
    ("perf/save_time", "save", PURPLE, ""),
    ("perf/wait_batch_time", "wait for batch", ORANGE, "////"),
    ("perf/wait_eval_time", "wait for evaluation", RED, "...."),
)


def _step_time(axes: Axes, story: RunStory, cap: int | None) -> None:
    phase = "rl" if any(s.phase == "rl" and "perf/step_time" in s.values for s in story.steps) else ""
    steps = [s for s in story.steps if phase in ("", s.phase) and "perf/step_time" in s.values]
    size = math.ceil(len(steps) / 200)  # bars stay wide enough to be seen
    bins = [steps[i : i + size] for i in range(0, len(steps), size)]
    x = [sum(s.step for s in b) / len(b) for b in bins]

    def mean(b: list[Any], name: str) -> float:
        found = [v for s in b if math.isfinite(v := s.values.get(name, 0.0))]
        return max(0.0, sum(found) / len(found)) if found else 0.0

    bottom = [0.0] * len(bins)
    for name, label, colour, hatch in _PARTS:
        heights = [mean(b, name) for b in bins]
        if any(heights):
            style: dict[str, Any] = {"color": colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0}
            axes.bar(x, heights, width=size, bottom=bottom, label=label, **style)
            bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
    totals = [mean(b, "perf/step_time") for b in bins]
    rest = [max(0.0, total - part) for total, part in zip(totals, bottom, strict=True)]
    if sum(rest) > 0.01 * sum(totals):
        axes.bar(x, rest, width=size, bottom=bottom, label="other", color="#c3c9d1", linewidth=0)
    tops = sorted(max(t, b) for t, b in zip(totals, bottom, strict=True))
    usual = tops[int(0.95 * (len(tops) - 1))]
    if tops[-1] > 4 * usual > 0:  # one long step would flatten all others: cut it and say so
        axes.set_ylim(0, 2 * usual)
        cut = sum(t > 2 * usual for t in tops)
        words = f"{cut} cut, longest {duration(tops[-1])}"
        box = {"facecolor": "white", "edgecolor": "none", "pad": 2, "alpha": 0.85}
        axes.text(0.99, 0.82, words, transform=axes.transAxes, ha="right", fontsize=9, color=INK, bbox=box)
    axes.set_ylabel("seconds per step")
    step_axis(axes, story, steps[0].step, steps[-1].step)
    legend(axes)


def _idle(axes: Axes, story: RunStory, cap: int | None) -> None:
    attempts = sorted({s.attempt for s in story.idle})
    roles = [r for r in ROLES if any(s.role == r for s in story.idle)]
    colours = (BLUE, ORANGE, GREEN, PURPLE)
    if len(attempts) > 4:
        for role, colour, marker in zip(roles, colours, "os^", strict=False):
            own = [s for s in story.idle if s.role == role]
            axes.plot([s.attempt for s in own], [100 * s.idle for s in own], marker + "-", color=colour, label=role)
        axes.set_ylim(0, 105)
        axes.set_ylabel("idle, percent")
        axes.set_xlabel("allocation")
        legend(axes)
        return
    height = 0.8 / len(attempts)
    for order, attempt in enumerate(attempts):
        for place, role in enumerate(roles):
            share = next((s for s in story.idle if (s.attempt, s.role) == (attempt, role)), None)
            if share is None:
                continue
            y = place - 0.4 + height * (order + 0.5)
            label = f"allocation {attempt}" if attempt else "run"
            known = axes.get_legend_handles_labels()[1]
            name = "" if label in known else label
            axes.barh(y, 100 * share.idle, height * 0.9, color=colours[order], label=name)
            axes.text(100 * share.idle + 1.5, y, f"{100 * share.idle:.0f} %", va="center", fontsize=9.5, color=INK)
    axes.set_yticks(range(len(roles)), roles)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlim(0, 112)
    axes.set_xticks(range(0, 101, 20))
    axes.set_xlabel("idle share of the role's time, percent")
    legend(axes)


def _probe(axes: Axes, story: RunStory, cap: int | None) -> None:
    name = "sync/probe_logprob_abs_diff_mean"
    steps, values = story.series(name)
    positive = [v for v in values if 0 < v < math.inf]
    floor = min([*positive, 1e-5]) / 5
    some = [(s, v) for s, v in zip(steps, values, strict=True) if v > 0 and math.isfinite(v)]
    zeros = [s for s, v in zip(steps, values, strict=True) if v == 0]
    axes.set_yscale("log")
    style: dict[str, Any] = {"color": BLUE, "markersize": marker_size(len(steps))}
    if some:
        axes.plot(*zip(*some, strict=True), "o", label="mean |difference|", **style)
    if zeros:
        axes.plot(zeros, [floor] * len(zeros), "v", markerfacecolor="white", label="exactly 0", **style)
    axes.axhline(1e-5, color=RED, linestyle="--", linewidth=1.4, label="1e-5")
    axes.set_ylim(floor / 2, max([*positive, 1e-5]) * 4)
    axes.set_ylabel("log-prob difference")
    step_axis(axes, story, *range_of(story, (name,)))
    legend(axes)


def _replay_percent(story: RunStory) -> tuple[list[int], list[float]]:
    pairs = [
        (s.step, 100 * s.values["routing/replayed_positions"] / s.values["routing/recorded_positions"])
        for s in story.steps
        if "routing/replayed_positions" in s.values and s.values.get("routing/recorded_positions", 0) > 0
    ]
    return [s for s, _ in pairs], [v for _, v in pairs]


def _replay(axes: Axes, story: RunStory, cap: int | None) -> None:
    steps, values = _replay_percent(story)
    axes.plot(steps, values, ".-", color=GREEN, linewidth=1.4, markersize=4)
    lowest = min((v for v in values if math.isfinite(v)), default=100.0)
    axes.set_ylim(min(90.0, lowest - 4), 101.5)
    axes.set_ylabel("percent replayed")
    step_axis(axes, story, steps[0], steps[-1])
    legend(axes)


def _clock(axes: Axes, story: RunStory, cap: int | None) -> None:
    origin = story.first_t or 0.0
    whole = max(story.wall_s, 1.0)
    unit, name = (1.0, "seconds") if whole < 180 else ((60.0, "minutes") if whole < 3 * 3600 else (3600.0, "hours"))

    def x(t: float) -> float:
        return (t - origin) / unit

    top = axes.get_xaxis_transform()
    for a in story.allocations:
        axes.axvspan(x(a.start), x(a.closed), color="#e6f0f8", zorder=0, linewidth=0)
        if (a.closed - a.start) / whole > 0.04:
            label = f"allocation {a.attempt}" if (a.closed - a.start) / whole > 0.22 else f"{a.attempt}"
            middle = (x(a.start) + x(a.closed)) / 2
            axes.text(middle, 1.015, label, transform=top, ha="center", fontsize=9, color=GREY)
    for before, after in story.gaps():
        axes.axvspan(x(before.closed), x(after.start), facecolor="none", edgecolor="#b4bcc6", hatch="///", linewidth=0)
        wait = after.start - before.closed
        if wait / whole > 0.1:
            middle = (x(before.closed) + x(after.start)) / 2
            words = f"waited\n{duration(wait)}"
            box = {"facecolor": "white", "edgecolor": "none", "pad": 2}
            axes.text(middle, 0.5, words, transform=top, ha="center", va="center", fontsize=9, color=INK, bbox=box)
    for order, attempt in enumerate(sorted({s.attempt for s in story.steps})):
        own = [s for s in story.steps if s.attempt == attempt]
        label = "steps that count" if order == 0 else ""
        axes.plot(
            [x(s.t) for s in own], [s.step for s in own], ".-", color=BLUE, markersize=4, linewidth=1.6, label=label
        )
    if story.superseded:
        at = [x(s.t) for s in story.superseded], [s.step for s in story.superseded]
        axes.plot(*at, "s", color=ORANGE, markersize=5, label="undone later")
    if story.evaluations:
        at = [x(e.t) for e in story.evaluations], [e.step for e in story.evaluations]
        axes.plot(*at, "D", color=INK, markeredgecolor="white", markersize=7, label="evaluation", zorder=6)
    axes.set_xlim(0, x(origin + whole) * 1.01)
    if story.total_steps:
        axes.axhline(story.total_steps, color=GREY, linewidth=1, linestyle=":")
    axes.set_ylim(0, max(story.total_steps or 0, story.current_step, 1) * 1.08)
    axes.set_ylabel("optimizer step")
    axes.set_xlabel(f"{name} since the run's first event")
    fault_marks(axes, [(v, x(v.t)) for v in story.faults])
    legend(axes)


#: In the order of the page.
PANELS: tuple[Panel, ...] = (
    Panel(
        "reward",
        "Reward per step",
        lambda s: bool(s.series("rollout/raw_reward")[0] or s.evaluations),
        draw_reward,
        "reward (no RL step and no evaluation yet)",
        wide=True,
    ),
    Panel("clock", "Progress by the clock", lambda s: s.first_t is not None, _clock, "progress (no events)"),
    Panel(
        "kinds",
        "Reward by task kind",
        lambda s: any(n.startswith("rollout/reward/") for t in s.steps for n in t.values),
        _kinds,
        "reward by task kind",
    ),
    Panel(
        "staleness",
        "Staleness of what was trained",
        _has("rollout/staleness_mean", "rollout/staleness_max"),
        _staleness,
        "staleness",
    ),
    Panel("step_time", "Where a step's time goes", _has("perf/step_time"), _step_time, "step times"),
    Panel("idle", "Idle share of each role", lambda s: bool(s.idle), _idle, "idle shares"),
    Panel(
        "probe",
        "Engine against trainer after each weight sync",
        _has("sync/probe_logprob_abs_diff_mean"),
        _probe,
        "log-prob probe",
    ),
    Panel(
        "replay", "Routing replay", lambda s: bool(_replay_percent(s)[0]), _replay, "routing replay (none was recorded)"
    ),
    Panel("sft", "Warm start (SFT) loss", lambda s: bool(s.series("train/loss", "sft")[0]), _sft, "warm start"),
)
