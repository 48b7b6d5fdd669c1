"""How long an allocation still lasts and whether one more step fits. Pure; the clock is an argument."""

from __future__ import annotations

import math
import re

from miles_hpc.core.errors import UserError

__all__ = ["cause_of_end", "format_time", "parse_time", "remaining_s", "should_continue"]

_DAYS = re.compile(r"(\d+)-(\d+)(?::(\d+))?(?::(\d+))?\Z")
#: What slurmstepd writes into a batch script's output right before it sends SIGTERM (slurmstepd/mgr.c, req.c).
_END = re.compile(r"\*\*\* JOB \d+ ON \S+ CANCELLED AT \S+(?: DUE TO ([A-Z ]+))?[^\n]*\*\*\*")
_CLOCK = re.compile(r"(\d+)(?::(\d+))?(?::(\d+))?\Z")


def parse_time(text: str) -> float:
    """Seconds of a Slurm time limit; math.inf for UNLIMITED, INFINITE and -1. Raises UserError.

    The forms of sbatch(1) --time: minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes,
    days-hours:minutes:seconds. A bare number is minutes.
    """
    text = text.strip()
    if text.upper() in ("UNLIMITED", "INFINITE", "-1"):
        return math.inf
    if found := _DAYS.match(text):
        days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
        return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
    if found := _CLOCK.match(text):
        parts = [int(part) for part in found.groups() if part is not None]
        if len(parts) == 3:
            return float((parts[0] * 60 + parts[1]) * 60 + parts[2])
        return float(parts[0] * 60 + (parts[1] if len(parts) == 2 else 0))
    raise UserError(f"time '{text}': expected Slurm's [days-]hours:minutes:seconds, or minutes")


def format_time(seconds: float) -> str:
    """Slurm's text for a duration, [D-]HH:MM:SS, rounded up to whole seconds; UNLIMITED for math.inf."""
    if math.isinf(seconds):
        return "UNLIMITED"
    minutes, rest = divmod(math.ceil(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    clock = f"{hours:02d}:{minutes:02d}:{rest:02d}"
    return f"{days}-{clock}" if days else clock


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
