"""Statistics: percentiles of one repeat, and medians over repeats."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec

from tools.bench_control.plan import Cell

__all__ = ["ArmResult", "Measured", "Spread", "combine", "percentile", "spread"]


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Durations of the operations of one repeat, in seconds."""

    n: int
    p10: float
    p50: float
    p90: float
    p99: float
    max: float
    total: float


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One cell over all repeats. Seconds per operation; rates count calls, and payload bytes in both directions."""

    peers: int
    window: int
    placement: str
    argument_bytes: int
    result_bytes: int
    repeats: int
    operations: tuple[int, ...]  # timed, per repeat
    p10_s: float  # p10 to p99: medians of the repeats' percentiles
    p50_s: float
    p90_s: float
    p99_s: float
    max_s: float  # the slowest operation of all repeats
    p50_s_of_repeats: tuple[float, ...]
    calls_per_s: float  # median of the repeats; all calls over all time
    calls_per_s_of_repeats: tuple[float, ...]
    gb_per_s: float | None  # 1e9 bytes; None without payload

    @property
    def payload_bytes(self) -> int:
        return self.argument_bytes + self.result_bytes


class ArmResult(msgspec.Struct, kw_only=True):
    """What an arm gave. `errors` says for each stage that failed or was left out why."""

    about: str
    chosen: dict[str, str] = msgspec.field(default_factory=dict)  # what it ran on: library, transports, devices
    cells: dict[str, Measured] = msgspec.field(default_factory=dict)
    errors: dict[str, str] = msgspec.field(default_factory=dict)


def percentile(ordered: Sequence[float], fraction: float) -> float:
    """Linear interpolation between the two nearest ranks of an ascending, non-empty sequence (numpy's default)."""
    position = (len(ordered) - 1) * fraction
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def spread(samples: Sequence[float]) -> Spread:
    """Of at least one duration. Raises ValueError for none."""
    if not samples:
        raise ValueError("no samples")
    ordered = sorted(samples)
    return Spread(
        n=len(ordered),
        p10=percentile(ordered, 0.1),
        p50=percentile(ordered, 0.5),
        p90=percentile(ordered, 0.9),
        p99=percentile(ordered, 0.99),
        max=ordered[-1],
        total=sum(ordered),
    )


def combine(cell: Cell, spreads: Sequence[Spread]) -> Measured:
    """Repeats of one cell, in order. Raises ValueError for none."""
    if not spreads:
        raise ValueError("no repeats")
    rates = [cell.calls * one.n / one.total for one in spreads]
    payload = cell.argument_bytes + cell.result_bytes
    return Measured(
        peers=cell.peers,
        window=cell.window,
        placement=cell.placement,
        argument_bytes=cell.argument_bytes,
        result_bytes=cell.result_bytes,
        repeats=len(spreads),
        operations=tuple(one.n for one in spreads),
        p10_s=statistics.median(one.p10 for one in spreads),
        p50_s=statistics.median(one.p50 for one in spreads),
        p90_s=statistics.median(one.p90 for one in spreads),
        p99_s=statistics.median(one.p99 for one in spreads),
        max_s=max(one.max for one in spreads),
        p50_s_of_repeats=tuple(one.p50 for one in spreads),
        calls_per_s=statistics.median(rates),
        calls_per_s_of_repeats=tuple(rates),
        gb_per_s=statistics.median(rates) * payload / 1e9 if payload else None,
    )
