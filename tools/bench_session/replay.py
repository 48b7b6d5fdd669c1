"""A trace played over engines in simulated time: what their caches hit, and how even their load is.

    session starts ─▶ request ─▶ policy chooses ─▶ cache of that engine ─▶ output is sampled ─▶ tool ─▶ next request

| figure | is |
|---|---|
| hit share of bound | prompt tokens found in the engines' caches / those that one cache finds that forgets nothing |
| load imbalance | the largest of the engines' mean loads over the mean of them; 1 is even |
| imbalance of the moment | the mean over time of (largest load / mean load), weighted with the load |

An engine's load is the context of all sessions that are open and were there last, running or waiting for a tool. The
first fifth of the time, while sessions fill the engines, doesn't count, nor what comes after the last session's start.
The bound knows the prompts that sessions share, so a policy that spreads a group over engines can't reach 1.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from tools.bench_session.policies import Policy
from tools.bench_session.radix import Lease, PrefixCache
from tools.bench_session.trace import DECODE_TOKENS_PER_S, Piece, TracedSession

__all__ = ["Load", "Replayed", "replay"]

_WARM_SHARE = 0.2


@dataclass(frozen=True)
class Replayed:
    """What one policy made of one trace."""

    requests: int
    prompt_tokens: int
    cached_tokens: int
    bound_tokens: int
    evicted_tokens: int
    load_imbalance: float
    momentary_imbalance: float
    mean_open_sessions: float

    @property
    def hit_share_of_bound(self) -> float:
        return self.cached_tokens / self.bound_tokens if self.bound_tokens else 1.0


@dataclass
class Load:
    """Tokens by engine, integrated over a window of time."""

    engines: int
    start_s: float
    end_s: float
    at_s: float = 0.0
    open_sessions: int = 0

    def __post_init__(self) -> None:
        self.tokens = [0] * self.engines
        self.integral = [0.0] * self.engines
        self.largest = self.sessions = 0.0

    def advance(self, now_s: float) -> None:
        """Nothing has changed until now."""
        begin, end = max(self.at_s, self.start_s), min(now_s, self.end_s)
        if end > begin:
            for i, tokens in enumerate(self.tokens):
                self.integral[i] += tokens * (end - begin)
            self.largest += max(self.tokens) * self.engines * (end - begin)
            self.sessions += self.open_sessions * (end - begin)
        self.at_s = now_s

    @property
    def imbalance(self) -> float:
        total = sum(self.integral)
        return max(self.integral) * self.engines / total if total else 1.0

    @property
    def momentary(self) -> float:
        total = sum(self.integral)
        return self.largest / total if total else 1.0


@dataclass
class _Open:
    session: TracedSession
    context: list[Piece]
    turn: int = 0
    engine: int = -1
    counted: int = 0  # tokens that are in the engine's load
    leases: tuple[Lease, Lease] | None = None
    new_tokens: int = 0
    tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = sum(piece.n_tokens for piece in self.context)


class _Player:
    def __init__(self, policy: Policy, capacity_tokens: int | None, window: tuple[float, float]) -> None:
        self.policy = policy
        self.caches = [PrefixCache(capacity_tokens) for _ in range(policy.engines)]
        self.endless = PrefixCache()
        self.load = Load(policy.engines, *window)
        self.requests = self.prompt_tokens = self.cached_tokens = self.bound_tokens = 0

    def start(self, one: _Open, now_s: float) -> float:
        """A request begins; returns when its output is sampled."""
        turn = one.session.turns[one.turn]
        if turn.new_tokens:
            self.grow(one, f"{one.session.key}:{one.turn}", turn.new_tokens)
        one.new_tokens = turn.new_tokens if one.turn else one.tokens
        engine = self.policy.choose(one.session.key, one.context, one.new_tokens, now_s)
        self.policy.started(engine)
        self.settle(one, engine)
        here, bound = self.caches[engine].begin(one.context), self.endless.begin(one.context)
        one.leases = here, bound
        self.requests += 1
        self.prompt_tokens += one.tokens
        self.cached_tokens += here.cached_tokens
        self.bound_tokens += bound.cached_tokens
        return now_s + turn.output_tokens / DECODE_TOKENS_PER_S

    def finish(self, one: _Open, now_s: float) -> float | None:
        """Its output is there; returns when the next request comes, None after the last."""
        turn = one.session.turns[one.turn]
        assert one.leases is not None
        here, bound = one.leases
        output = self.grow(one, f"{one.session.key}:{one.turn}>", turn.output_tokens)
        self.caches[one.engine].end(here, output)
        self.endless.end(bound, output)
        self.settle(one, one.engine)
        self.policy.finished(one.session.key, one.engine, one.tokens, here.cached_tokens, now_s)
        one.turn += 1
        if one.turn < len(one.session.turns):
            return now_s + turn.wait_s
        self.policy.ended(one.session.key)
        self.load.tokens[one.engine] -= one.counted
        self.load.open_sessions -= 1
        return None

    def grow(self, one: _Open, name: str, n_tokens: int) -> Piece:
        piece = Piece(name, n_tokens)
        one.context.append(piece)
        one.tokens += n_tokens
        return piece

    def settle(self, one: _Open, engine: int) -> None:
        if one.engine >= 0:
            self.load.tokens[one.engine] -= one.counted
        else:
            self.load.open_sessions += 1
        one.engine, one.counted = engine, one.tokens
        self.load.tokens[engine] += one.tokens


def replay(trace: tuple[TracedSession, ...], policy: Policy, *, capacity_tokens: int | None = None) -> Replayed:
    """Play `trace` over engines that each have a cache of that size. Ends with every session's end."""
    last = trace[-1].starts_s
    player = _Player(policy, capacity_tokens, (last * _WARM_SHARE, last))
    # (time, tie, whether the output is there, session)
    events: list[tuple[float, int, bool, _Open]] = []
    for tie, session in enumerate(trace):
        heapq.heappush(events, (session.starts_s, tie, False, _Open(session, list(session.prompt))))
    tie = len(trace)
    while events:
        now_s, _, sampled, one = heapq.heappop(events)
        player.load.advance(now_s)
        after = player.finish(one, now_s) if sampled else player.start(one, now_s)
        if after is not None:
            tie += 1
            heapq.heappush(events, (after, tie, not sampled, one))
    load = player.load
    return Replayed(
        requests=player.requests,
        prompt_tokens=player.prompt_tokens,
        cached_tokens=player.cached_tokens,
        bound_tokens=player.bound_tokens,
        evicted_tokens=sum(cache.evicted_tokens for cache in player.caches),
        load_imbalance=load.imbalance,
        momentary_imbalance=load.momentary,
        mean_open_sessions=load.sessions / max(load.end_s - load.start_s, 1e-9),
    )
