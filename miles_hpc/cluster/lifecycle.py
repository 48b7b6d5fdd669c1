"""How long an allocation still lasts and whether one more step fits. Pure; the clock is an argument."""

from __future__ import annotations

import math

from miles_hpc.core.walltime import format_time, parse_time

__all__ = ["format_time", "parse_time", "remaining_s", "should_continue"]


def remaining_s(end_time: float | None, now: float) -> float:
    """Seconds until `end_time` (epoch seconds), never below zero; math.inf when there is no end."""
    return math.inf if end_time is None else max(0.0, end_time - now)


def should_continue(remaining_s: float, step_time_s: float, save_time_s: float, margin_s: float) -> bool:
    """Whether one more step and the save after it end at least `margin_s` before the allocation does.

    Pass the longest recent step and save, not the mean: a step that doesn't fit is lost.
    """
    return remaining_s >= step_time_s + save_time_s + margin_s
