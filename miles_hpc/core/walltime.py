"""Slurm's time texts, both ways: limits of partitions and jobs, the time that is left. Pure.

    10           10 minutes              4:00         4 minutes         1:00:00      1 hour
    1-12         1 day, 12 hours         1-12:30      and 30 minutes    1-12:30:15   and 15 seconds
    10:00:00     10 hours: who means ten minutes writes 10:00 or 10

sbatch(1), --time; tests/slurm asks a real Slurm for every form. Two that sbatch 22.05 takes and turns into millions of
days are refused here: other negative numbers than -1, and times beyond `MAX_S`.
"""

from __future__ import annotations

import math
import re

from miles_hpc.core.errors import UserError

__all__ = ["MAX_S", "format_time", "limit_s", "parse_time"]

#: The longest time that Slurm holds, in seconds: the last whole minute that it can round up to in 31 bits.
MAX_S = 60 * (2**31 // 60 - 1)

_DAYS = re.compile(r"([0-9]+)-(?:([0-9]+)(?::([0-9]+))?(?::([0-9]+))?)?\Z")  # "1-" is a day for Slurm
_CLOCK = re.compile(r"([0-9]+)(?::([0-9]+))?(?::([0-9]+))?\Z")


def parse_time(text: str) -> float:
    """Seconds of a Slurm time; math.inf for UNLIMITED, INFINITE and -1. Raises UserError for what isn't one."""
    if text.upper() in ("UNLIMITED", "INFINITE", "-1"):
        return math.inf
    if found := _DAYS.match(text):
        days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
        return _held(((days * 24 + hours) * 60 + minutes) * 60 + seconds, text)
    if found := _CLOCK.match(text):
        parts = [int(part) for part in found.groups() if part is not None]
        if len(parts) == 3:
            return _held((parts[0] * 60 + parts[1]) * 60 + parts[2], text)
        return _held(parts[0] * 60 + (parts[1] if len(parts) == 2 else 0), text)
    raise UserError(f"time '{text}': expected Slurm's [days-]hours:minutes:seconds, or minutes")


def _held(seconds: int, text: str) -> float:
    if seconds > MAX_S:
        raise UserError(f"time '{text}': expected {format_time(MAX_S)} at most, which is what Slurm can hold")
    return float(seconds)


def limit_s(text: str) -> float:
    """What Slurm makes of a job's --time, in seconds: whole minutes, rounded up; zero is no limit. Raises UserError."""
    return 60.0 * math.ceil(seconds / 60) if math.isfinite(seconds := parse_time(text) or math.inf) else math.inf


def format_time(seconds: float) -> str:
    """Slurm's text for a duration, [D-]HH:MM:SS, rounded up to whole seconds; UNLIMITED for math.inf."""
    if math.isinf(seconds):
        return "UNLIMITED"
    minutes, rest = divmod(math.ceil(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    clock = f"{hours:02d}:{minutes:02d}:{rest:02d}"
    return f"{days}-{clock}" if days else clock
