"""Tables of a report about held-out episodes: by task kind before and after RL, and every evaluation of the run."""

from __future__ import annotations

import math
from typing import Any

from miles_hpc.cli.story import RunStory
from miles_hpc.cli.wording import duration

__all__ = ["evaluations_table", "kinds_table", "signed"]


def signed(value: float) -> str:
    """Two decimals, with a real minus."""
    return f"{value:.2f}".replace("-", "−")


def kinds_table(story: RunStory) -> dict[str, Any]:
    """What the template shows as "Held-out reward by task kind"."""
    found = {w: e for w in ("before", "sft_only", "after") if (e := story.evaluation(w)) is not None}
    labels = sorted({label for e in found.values() for label in e.by_label})
    bars = "before" in found and "after" in found
    rows = []
    for label in [*labels, None] if found else []:
        values = {w: e.mean if label is None else e.by_label.get(label) for w, e in found.items()}
        row: dict[str, Any] = {"label": label or "all", "total": label is None, "change": "", "bar": None}
        row["cells"] = ["" if v is None else signed(v) for v in values.values()]
        b, a = values.get("before"), values.get("after")
        if a is not None and b is not None:
            row["change"] = f"{a - b:+.2f}".replace("-", "−")
            if 0 <= a <= 1 and 0 <= b <= 1:
                row["bar"] = {"before": round(100 * b, 1), "after": round(100 * a, 1)}
        rows.append(row)
    sizes = "; ".join(f"{w.replace('_', ' ')}: {e.size} after step {e.step}" for w, e in found.items())
    return {
        "kinds": rows,
        "whens": [w.replace("_", " ") for w in found],
        "kinds_change": bars,
        "kinds_bars": any(row["bar"] for row in rows),
        "kinds_caption": f"Mean reward of held-out episodes ({sizes}).",
    }


def evaluations_table(story: RunStory) -> dict[str, Any]:
    """The table of all evaluations, where there are more than the two around RL or more to tell of them."""
    found = sorted(story.evaluations, key=lambda e: e.step)
    if all(e.when != "during" and e.n_samples == 1 for e in found):
        return {"evaluations": [], "evaluation_passes": [], "evaluation_sizes": ""}
    passes = sorted({k for e in found for k in e.pass_at})
    passes = passes if len(passes) <= 3 else [passes[0], *passes[-2:]]
    sizes = dict.fromkeys(e.size for e in found)

    def percent(share: float | None) -> str:
        return "" if share is None or not math.isfinite(share) else f"{100 * share:.0f} %"

    rows = [
        {
            "step": str(e.step),
            "when": e.when.replace("_", " "),
            "mean": signed(e.mean),
            "passes": ["" if k not in e.pass_at else signed(e.pass_at[k]) for k in passes],
            "truncated": percent(e.truncated_ratio),
            "share": percent(e.version_share),
            "lag": "" if e.lag_steps is None else str(e.lag_steps),
            "lasted": "" if e.duration_s is None else duration(e.duration_s),
        }
        for e in found
    ]
    return {
        "evaluations": rows,
        "evaluation_passes": [f"pass@{k}" for k in passes],
        "evaluation_sizes": " or ".join(sizes),
    }
