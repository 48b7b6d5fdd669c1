"""The picture of what was learnt: reward of trained and of held-out episodes over the steps."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from miles_hpc.cli.report_axes import BLUE, INK, PURPLE, SKY, legend, smooth, step_axis, width_of
from miles_hpc.cli.story import RunStory

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_reward"]


def draw_reward(axes: Axes, story: RunStory, cap: int | None) -> None:
    """Batch means as a line, evaluations as points; those beside training make a curve of their own."""
    steps, values = story.series("rollout/raw_reward")
    evaluations = story.evaluations
    passes = [e for e in evaluations if len(e.pass_at) > 1]
    around = [*steps, *(e.step for e in evaluations)]
    first, last = min(around), max(around)
    if steps:
        style: dict[str, Any] = {"marker": "." if len(steps) <= 150 else "", "markersize": 4, "linewidth": 0.8}
        axes.plot(steps, values, color=SKY, label="batch mean", **style)
        axes.plot(steps, smooth(values), color=BLUE, linewidth=2.4, label="smoothed")
    held_out = [*(e.mean for e in evaluations), *(max(e.pass_at.values()) for e in passes)]
    everything = [v for v in [*values, *held_out] if math.isfinite(v)]
    if everything and min(everything) >= 0 and max(everything) <= 1:
        axes.set_ylim(0, 1.06)
    if evaluations:
        few = len(evaluations) <= 40
        style = {"marker": "D", "markersize": 8 if few else 4, "markeredgewidth": 1 if few else 0, "zorder": 6}
        line: dict[str, Any] = {
            "linestyle": ":" if any(e.when == "during" for e in evaluations) else "none",
            "linewidth": 1.2,
        }
        ordered = sorted(evaluations, key=lambda e: e.step)
        at = [e.step for e in ordered], [e.mean for e in ordered]
        axes.plot(*at, color=INK, markeredgecolor="white", label="evaluation", **line, **style)
    if passes:
        k = max(passes[-1].pass_at)
        reached = sorted((e.step, e.pass_at[k]) for e in passes if k in e.pass_at)
        axes.plot(*zip(*reached, strict=True), "^--", color=PURPLE, linewidth=1.2, markersize=6, label=f"pass@{k}")
    for e in [e for w in ("before", "sft_only", "after") if (e := story.evaluation(w)) is not None]:
        right = e.step > (first + last) / 2
        axes.annotate(
            f"{e.title}\n{e.mean:.2f}",
            (e.step, e.mean),
            xytext=(9 if right else -9, 0),
            textcoords="offset points",
            ha="left" if right else "right",
            va="center",
            fontweight="bold",
            color=INK,
        )
    axes.set_ylabel("reward")
    step_axis(axes, story, first, last)
    if evaluations:
        margin = (last - first + 1) * 0.75 / (width_of(axes) - 1.8)  # room for labels
        axes.set_xlim(first - margin, last + margin)
    legend(axes)
