"""What the panels of a report share: colours, axes in steps with allocations and faults, legends, smoothing.

Colours are those of Okabe and Ito (2008), told apart by readers with colour-vision deficiency.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from miles_hpc.cli.story import RunStory, Verdict

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "BAND",
    "BLUE",
    "GREEN",
    "GREY",
    "INK",
    "ORANGE",
    "PURPLE",
    "RED",
    "SKY",
    "STYLE",
    "fault_marks",
    "legend",
    "marker_size",
    "plain",
    "range_of",
    "smooth",
    "step_at",
    "step_axis",
    "width_of",
]

BLUE, SKY, GREEN, ORANGE, RED, PURPLE = (
    "#0072B2",
    "#56B4E9",
    "#009E73",
    "#E69F00",
    "#D55E00",
    "#CC79A7",
)
INK, GREY, BAND = "#222222", "#6b7280", "#eef2f6"

_FAULT_WORDS = {"lost": "lost", "rollback": "went back", "fenced": "fenced"}

STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#9aa3ad",
    "axes.labelcolor": INK,
    "axes.titlesize": 11.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e3e7ec",
    "grid.linewidth": 0.8,
    "xtick.color": "#4b5563",
    "ytick.color": "#4b5563",
    "xtick.labelsize": 9.5,
    "ytick.labelsize": 9.5,
    "legend.fontsize": 9.5,
    "legend.frameon": False,
}


def smooth(values: list[float]) -> list[float]:
    """Centred mean over a tenth of the series (3 to 51 values, odd), over fewer at its ends; NaN is left out."""
    half = min(25, max(1, len(values) // 20))
    means = []
    for i in range(len(values)):
        window = [v for v in values[max(0, i - half) : i + half + 1] if math.isfinite(v)]
        means.append(sum(window) / len(window) if window else math.nan)
    return means


def marker_size(n: int) -> float:
    """Smaller for many points."""
    return 4.0 if n <= 150 else 2.2


def plain(text: str) -> str:
    """Text from a run as matplotlib shows it literally: no formula, no hidden entry, at most 16 characters."""
    short = text if len(text) <= 16 else text[:15] + "…"
    return short.replace("$", r"\$").lstrip("_") or "unnamed"


def width_of(axes: Axes) -> float:
    """Width in inches of the part of the figure that these axes and their labels may use."""
    spec = axes.get_subplotspec()
    share = 1.0 if spec is None else len(spec.colspan) / spec.get_gridspec().ncols
    return share * axes.figure.get_figwidth()  # type: ignore[union-attr]


def legend(axes: Axes) -> None:
    """Below the axes, so that it covers no data, in as many columns as fit; faults come last."""
    found = sorted(
        zip(*axes.get_legend_handles_labels(), strict=True), key=lambda pair: pair[1] in _FAULT_WORDS.values()
    )
    if not found:
        return
    handles, labels = zip(*found, strict=True)
    entry_in = 0.43 + 0.075 * max(len(label) for label in labels)  # line, gaps, and 9.5-point text
    columns = max(1, int((width_of(axes) - 0.7) / entry_in))
    rows = -(-len(labels) // columns)
    axes.legend(
        handles,
        labels,
        loc="upper left",
        bbox_to_anchor=(-0.01, -0.2),
        ncols=-(-len(labels) // rows),
        columnspacing=1.1,
        handlelength=1.5,
        handletextpad=0.6,
    )


def step_axis(axes: Axes, story: RunStory, first: int, last: int) -> None:
    """x axis in steps, a shaded band for every second allocation, a mark for every fault."""
    from matplotlib.ticker import MaxNLocator

    axes.set_xlim(first - 0.5, max(last, first + 1) + 0.5)
    axes.set_xlabel("optimizer step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    spans: dict[int, tuple[int, int]] = {}
    for s in story.steps:
        low, high = spans.get(s.attempt, (s.step, s.step))
        spans[s.attempt] = (min(low, s.step), max(high, s.step))
    if len(spans) > 1:
        width = max(last, first + 1) - first + 1
        for order, (attempt, (low, high)) in enumerate(sorted(spans.items())):
            low, high = max(low, first), min(high, last)
            if high < low:
                continue
            if order % 2:
                axes.axvspan(low - 0.5, high + 0.5, color=BAND, zorder=0, linewidth=0)
            share = (high - low + 1) / width
            text = f"allocation {attempt}" if share > 0.24 else (f"{attempt}" if share > 0.04 else "")
            where = ((low + high) / 2, 1.015)
            axes.text(*where, text, transform=axes.get_xaxis_transform(), ha="center", fontsize=9, color=GREY)
    marks = [(v, step_at(story, v.t) + 0.5) for v in story.faults]
    fault_marks(axes, [(v, x) for v, x in marks if first <= x <= last])


def fault_marks(axes: Axes, faults: list[tuple[Verdict, float]]) -> None:
    """A dotted line with a marker on top for every (fault, x)."""
    for name, marker, colour in (("lost", "v", RED), ("rollback", "<", PURPLE), ("fenced", "x", INK)):
        at = [x for v, x in faults if v.name == name]
        if not at:
            continue
        top = axes.get_xaxis_transform()
        for x in at if len(faults) <= 8 else ():  # many lines would hide the data
            axes.axvline(x, color=colour, linewidth=1, linestyle=(0, (2, 2)), alpha=0.7, zorder=1)
        style: dict[str, Any] = {"marker": marker, "linestyle": "none", "markersize": 7, "color": colour}
        axes.plot(at, [0.97] * len(at), transform=top, label=_FAULT_WORDS[name], zorder=5, **style)


def step_at(story: RunStory, t: float) -> int:
    """The step last finished at `t`, in the lineage of that moment."""
    done = [s for s in story.steps + story.superseded if s.t <= t]
    return max(done, key=lambda s: s.t).step if done else 0


def range_of(story: RunStory, names: tuple[str, ...], phase: str = "") -> tuple[int, int]:
    """First and last step at which any of these metrics was recorded."""
    steps = [s.step for s in story.steps if phase in ("", s.phase) and any(n in s.values for n in names)]
    return (steps[0], steps[-1]) if steps else (1, 1)
