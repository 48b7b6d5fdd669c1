"""All policies over the same traces: medians, and how far traces differ. The real sglang-router over a smaller one."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from tools.bench_session.live import LiveRouter
from tools.bench_session.policies import POLICIES
from tools.bench_session.replay import Replayed, replay
from tools.bench_session.trace import TracedSession, generate

__all__ = ["measure_live", "measure_trace"]

_LIVE = ("manual", "cache_aware")


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


def measure_live(python: Path, folder: Path, *, engines: int, sessions: int, seed: int) -> list[dict[str, Any]]:
    """One row per policy over one small trace: ours, the real sglang-router's, and the models of those.

    `python` is the peer's. Raises what `LiveRouter` raises.
    """
    trace = generate(sessions, open_sessions=max(sessions // 5, 8), seed=seed)
    cache_tokens = 25_000 * max(sessions // 40, 1)
    rows = []
    for name in ("ours", *_LIVE):
        found = replay(trace, POLICIES[name](engines, seed, trace), capacity_tokens=cache_tokens)
        rows.append(_row(name if name == "ours" else f"{name}, model", [found], engines, cache_tokens))
        if name == "ours":
            continue
        live = LiveRouter(engines, seed, trace, python=python, folder=folder, policy=name)
        try:
            found = replay(trace, live, capacity_tokens=cache_tokens)
        finally:
            live.close()
        rows.append(_row(f"{name}, sglang-router", [found], engines, cache_tokens))
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
