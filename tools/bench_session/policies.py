"""Who decides where a request goes: ours, models of what other routers do, and one that knows the future.

| policy | a request goes to | like |
|---|---|---|
| `ours` | its session's engine; a new session to the one with the least active and expected tokens | `SessionRouter` |
| `manual` | its session's engine; a new session to the one with the fewest requests in flight | sglang-router `manual`, `min_load` |
| `cache_aware` | the engine that saw the longest part of its prompt, above a threshold, else the one that saw least; while requests in flight are uneven, the one with the fewest | sglang-router `cache_aware` |
| `least_requests` | the engine with the fewest requests in flight | Miles' router |
| `round_robin` | the next one | |
| `random` | any | |
| `clairvoyant` | its session's engine; a new session to the one with the least active tokens over the session's own time, all sessions' lengths known beforehand | nobody: what staying with an engine allows |

The models of sglang-router 0.3.2 follow its documented options and defaults: cache threshold 0.3, uneven from 64
requests and a factor of 1.5 on. live.py is the real one, and played.py puts it beside its models.
"""  # noqa: E501

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from random import Random

from miles_hpc.core.types import WeightVersion
from miles_hpc.rollout.routing import Route, SessionRouter
from tools.bench_session.trace import Piece, TracedSession

__all__ = ["POLICIES", "Policy"]

_V1 = WeightVersion(1, 1)


class Policy(ABC):
    """Told of every request's start and end, and of every session's end. Engines are numbers from 0."""

    def __init__(self, engines: int, seed: int, trace: tuple[TracedSession, ...]) -> None:
        self.engines = engines
        self.rng = Random(f"policy {seed}")
        self.in_flight = [0] * engines

    @abstractmethod
    def choose(self, key: str, prompt: Sequence[Piece], new_tokens: int, now_s: float) -> int:
        """The engine for a request of session `key`, whose last `new_tokens` weren't in its context before."""

    def started(self, engine: int) -> None:
        self.in_flight[engine] += 1

    def finished(self, key: str, engine: int, context_tokens: int, cached_tokens: int, now_s: float) -> None:
        self.in_flight[engine] -= 1

    def ended(self, key: str) -> None:  # noqa: B027 - most have nothing to forget
        """The session is over."""

    def fewest(self) -> int:
        return min(range(self.engines), key=lambda e: (self.in_flight[e], e))


class Ours(Policy):
    def __init__(self, engines: int, seed: int, trace: tuple[TracedSession, ...]) -> None:
        super().__init__(engines, seed, trace)
        self._router = SessionRouter(_V1)
        for i in range(engines):
            self._router.join(f"e{i}", _V1)
        self._routes: dict[str, Route] = {}

    def choose(self, key: str, prompt: Sequence[Piece], new_tokens: int, now_s: float) -> int:
        total = sum(piece.n_tokens for piece in prompt)
        route = self._router.route(key, prompt_tokens=total, new_tokens=new_tokens, now_s=now_s)
        self._routes[key] = route
        return int(route.engine[1:])

    def finished(self, key: str, engine: int, context_tokens: int, cached_tokens: int, now_s: float) -> None:
        super().finished(key, engine, context_tokens, cached_tokens, now_s)
        route = self._routes.pop(key)
        self._router.finish(route, context_tokens=context_tokens, cached_tokens=cached_tokens, now_s=now_s)

    def ended(self, key: str) -> None:
        self._router.end(key)


class Manual(Policy):
    def __init__(self, engines: int, seed: int, trace: tuple[TracedSession, ...]) -> None:
        super().__init__(engines, seed, trace)
        self._homes: dict[str, int] = {}

    def choose(self, key: str, prompt: Sequence[Piece], new_tokens: int, now_s: float) -> int:
        return self._homes.setdefault(key, self.fewest())


class CacheAware(Policy):
    def __init__(self, engines: int, seed: int, trace: tuple[TracedSession, ...]) -> None:
        super().__init__(engines, seed, trace)
        self._threshold, self._uneven, self._factor = 0.3, 64, 1.5
        self._seen: list[set[tuple[str, ...]]] = [set() for _ in range(engines)]
        self._sizes = [0] * engines

    def choose(self, key: str, prompt: Sequence[Piece], new_tokens: int, now_s: float) -> int:
        most, least = max(self.in_flight), min(self.in_flight)
        if most - least > self._uneven and most > self._factor * least:
            chosen = self.fewest()
        else:
            matched = [self._matched(e, prompt) for e in range(self.engines)]
            best = max(range(self.engines), key=lambda e: matched[e])
            total = sum(piece.n_tokens for piece in prompt)
            if matched[best] > self._threshold * total:
                chosen = best
            else:
                chosen = min(range(self.engines), key=lambda e: (self._sizes[e], e))
        names: tuple[str, ...] = ()
        for piece in prompt:
            names = (names[-1] if names else "", piece.name)
            if names not in self._seen[chosen]:
                self._seen[chosen].add(names)
                self._sizes[chosen] += piece.n_tokens
        return chosen

    def _matched(self, engine: int, prompt: Sequence[Piece]) -> int:
        seen, before, matched = self._seen[engine], "", 0
        for piece in prompt:
            if (before, piece.name) not in seen:
                break
            matched += piece.n_tokens
            before = piece.name
        return matched


class LeastRequests(Policy):
    def choose(self, key: str, prompt: Sequence[Piece], new_tokens: int, now_s: float) -> int:
        return self.fewest()


class RoundRobin(Policy):
    def __init__(self, engines: int, seed: int, trace: tuple[TracedSession, ...]) -> None:
        super().__init__(engines, seed, trace)
        self._next = -1

    def choose(self, key: str, prompt: Sequence[Piece], new_tokens: int, now_s: float) -> int:
        self._next = (self._next + 1) % self.engines
        return self._next


class Anywhere(Policy):
    def choose(self, key: str, prompt: Sequence[Piece], new_tokens: int, now_s: float) -> int:
        return self.rng.randrange(self.engines)


class Clairvoyant(Policy):
    def __init__(self, engines: int, seed: int, trace: tuple[TracedSession, ...]) -> None:
        super().__init__(engines, seed, trace)
        self._trace = {session.key: session for session in trace}
        self._homes: dict[str, int] = {}
        self._open: list[dict[str, TracedSession]] = [{} for _ in range(engines)]

    def choose(self, key: str, prompt: Sequence[Piece], new_tokens: int, now_s: float) -> int:
        if key not in self._homes:
            until_s = now_s + self._trace[key].duration_s
            loads = [sum(_token_s(one, now_s, until_s) for one in there.values()) for there in self._open]
            self._homes[key] = min(range(self.engines), key=lambda e: (loads[e], e))
            self._open[self._homes[key]][key] = self._trace[key]
        return self._homes[key]

    def ended(self, key: str) -> None:
        del self._open[self._homes[key]][key]


def _token_s(session: TracedSession, start_s: float, end_s: float) -> float:
    """The session's context between two times, integrated, as though it grew evenly. Both lie after its start."""
    end_s = min(end_s, session.starts_s + session.duration_s)
    if end_s <= start_s:
        return 0.0
    first = sum(piece.n_tokens for piece in session.prompt)
    grown = (session.final_tokens - first) / session.duration_s
    middle = (start_s + end_s) / 2 - session.starts_s
    return (first + grown * middle) * (end_s - start_s)


POLICIES: dict[str, type[Policy]] = {
    "ours": Ours,
    "manual": Manual,
    "cache_aware": CacheAware,
    "least_requests": LeastRequests,
    "round_robin": RoundRobin,
    "random": Anywhere,
    "clairvoyant": Clairvoyant,
}
