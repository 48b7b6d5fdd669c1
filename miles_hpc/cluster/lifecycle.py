"""How long an allocation still lasts and whether one more step fits. Pure; the clock is an argument."""

from __future__ import annotations

import math
import re

from miles_hpc.core.walltime import format_time, parse_time

__all__ = ["cause_of_end", "format_time", "parse_time", "remaining_s", "should_continue"]

#: What slurmstepd writes into a batch script's output right before it sends SIGTERM (slurmstepd/mgr.c, req.c).
_END = re.compile(r"\*\*\* JOB \d+ ON \S+ CANCELLED AT \S+(?: DUE TO ([A-Z ]+))?[^\n]*\*\*\*")


def remaining_s(end_time: float | None, now: float) -> float:
    """Seconds until `end_time` (epoch seconds), never below zero; math.inf when there is no end."""
    return math.inf if end_time is None else max(0.0, end_time - now)


def should_continue(remaining_s: float, step_time_s: float, save_time_s: float, margin_s: float) -> bool:
    """Whether one more step and the save after it end at least `margin_s` before the allocation does.

    Pass the longest recent step and save, not the mean: a step that doesn't fit is lost.
    """
    return remaining_s >= step_time_s + save_time_s + margin_s


def cause_of_end(output: str) -> str | None:
    """Why a batch script got SIGTERM, by its output: TIME LIMIT, NODE FAILURE, PREEMPTION, JOB REQUEUE; "" = cancelled.

    None when the output doesn't say. Slurm itself lists such a job as COMPLETING until the script has ended.
    """
    found = list(_END.finditer(output))
    return (found[-1][1] or "").strip() if found else None
