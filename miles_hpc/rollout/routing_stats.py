"""What a session router tells of itself."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["RoutingStats", "load_imbalance"]


@dataclass(frozen=True, slots=True)
class RoutingStats:
    """What the router did so far; rates are None before there is something to divide by.

    `prefix_bound` is 1 - new tokens / prompt tokens: the hit rate of engines that forget nothing. It counts a
    session's own prefix only, so prompts that sessions share can lift `prefix_hit_rate` above it.
    """

    engines: int
    sessions: int
    busy: int
    active_tokens: int
    load_imbalance: float
    prefix_hit_rate: float | None
    prefix_bound: float | None
    hit_share_of_bound: float | None
    moved: int
    evicted: int


def load_imbalance(active_tokens: Iterable[int]) -> float:
    """Largest load over mean load; 1.0 is even, also when nothing is active."""
    loads = list(active_tokens)
    total = sum(loads)
    return max(loads) * len(loads) / total if total else 1.0
