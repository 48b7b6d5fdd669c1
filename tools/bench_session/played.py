"""All policies over the same traces: medians, and how far traces differ."""

from __future__ import annotations

import statistics
from typing import Any

from tools.bench_session.policies import POLICIES
from tools.bench_session.replay import Replayed, replay
from tools.bench_session.trace import TracedSession, generate

__all__ = ["measure_trace"]


def measure_trace(
    traces: list[tuple[TracedSession, ...]] | None,
    *,
    engines: int,
    open_sessions: int,
    sessions: int,
    n_traces: int,
    cache_tokens: int,
    seed: int,
) -> list[dict[str, Any]]:
    """One row per policy, over `traces`, or over as many drawn ones as said."""
    if traces is None:
        traces = [generate(sessions, open_sessions=open_sessions, seed=seed + i) for i in range(n_traces)]
    rows = []
    for name, policy in POLICIES.items():
        found = [replay(trace, policy(engines, seed, trace), capacity_tokens=cache_tokens) for trace in traces]
        rows.append(_row(name, found, engines, cache_tokens))
    return rows


def _row(name: str, found: list[Replayed], engines: int, cache_tokens: int) -> dict[str, Any]:
    def median(values: list[float], digits: int = 4) -> float:
        return round(statistics.median(values), digits)

    imbalance = [one.load_imbalance for one in found]
    return {
        "policy": name,
        "engines": engines,
        "cache_tokens": cache_tokens,
        "traces": len(found),
        "requests": sum(one.requests for one in found),
        "mean_open_sessions": median([one.mean_open_sessions for one in found], 1),
        "bound": median([one.bound_tokens / one.prompt_tokens for one in found]),
        "hit_share_of_bound": median([one.hit_share_of_bound for one in found]),
        "load_imbalance": median(imbalance),
        "load_imbalance_all": [round(value, 4) for value in imbalance],
        "imbalance_spread": f"{min(imbalance):.3f} to {max(imbalance):.3f}",
        "momentary_imbalance": median([one.momentary_imbalance for one in found]),
        "evicted_mtokens": median([one.evicted_tokens / 1e6 for one in found], 1),
    }
