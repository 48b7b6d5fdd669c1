"""Which engine a session goes to. Pure: no I/O, no asyncio; time is what the caller says it is.

                 route                  route, finish                  end; evicted while idle
    unknown key ──────▶ busy on engine ◀─────────────▶ idle on engine ────────────────────────▶ forgotten
                          │                                │
                          └────── its engine is lost ──────┘   moved; the next route says: rebuild the prefix

A session stays with its engine, because that engine holds the keys and values of its prefix. A new one goes to the
engine with the least active tokens: the context lengths of all sessions that are open there, in flight or waiting for
a tool, since both take room in its cache. To these are added the tokens that the open sessions are still expected to
bring (`growth` times the mean final length of ended ones, for each): young sessions look light and become heavy, and
an engine that got many of them would get even more. Only engines with the current weights get new sessions.

| change | who moves |
|---|---|
| an engine joins | nobody; new sessions find it empty and go there |
| an engine falls behind the current weights | nobody; it gets no new sessions |
| an engine is lost | its sessions and no others, longest first, each to the engine with the least active tokens |
| an engine failed one request (`move`) | that request's session |

**Why not rendezvous hashing with bounded load** as the base. Its promise is that a router without a table finds the
same engine again. That holds for sessions that got their first choice only; a bound that is tight enough for an even
load (1.1 times the mean) sends a good part of them elsewhere, and these are lost with the table. The load that it
bounds is that of the moment of the choice, as here, so it balances no better, and within its bound it prefers the hash
to the emptier engine. The owner of a session has to keep its engine's name anyway, to send it there: a router that was
restarted is told by `restore`, for all sessions, not for most. Rendezvous order (Thaler, Ravishankar: A Name-Based
Mapping Scheme for Rendezvous, 1996) is what settles ties: it is stable over processes and spreads.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from miles_hpc.core.errors import MilesError, ProtocolError, UserError
from miles_hpc.core.types import WeightVersion
from miles_hpc.rollout.routing_stats import RoutingStats, load_imbalance

__all__ = ["Moved", "NoRoute", "Route", "RoutingStats", "SessionRouter", "load_imbalance", "rendezvous_order"]


class NoRoute(MilesError):
    """No engine can take the session now: wait until one joins, is updated, or a session ends."""


@dataclass(frozen=True, slots=True)
class Route:
    """Where one request goes. Hand it back to `SessionRouter.finish`.

    With `rebuild` the engine can't hold the session's prefix (it moved, or the router doesn't know it): the request
    must carry all tokens and will be slow. `serial` tells sessions that used one key after each other apart.
    """

    key: str
    engine: str
    prompt_tokens: int
    rebuild: bool
    serial: int


@dataclass(frozen=True, slots=True)
class Moved:
    """A session whose engine was lost: `target` is None while no other can take it, `source` is when one does later."""

    key: str
    source: str | None
    target: str | None


def rendezvous_order(key: str, engines: Iterable[str]) -> list[str]:
    """Engines by their 64-bit hash with the key, highest first: the same in every process, another one for every key.

    An engine that leaves or comes doesn't change the order of the others.
    """
    return sorted(engines, key=lambda name: (_score(key, name), name), reverse=True)


def _score(key: str, name: str) -> bytes:
    text = f"{len(key)}:{key}{name}".encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=8).digest()


@dataclass(slots=True)
class _Session:
    key: str
    serial: int
    engine: _Engine | None = None
    tokens: int = 0  # context length, as counted in the engine's load
    in_flight: int = 0
    idle_since_s: float = 0.0
    rebuild: bool = False


@dataclass(slots=True)
class _Engine:
    name: str
    version: WeightVersion
    active_tokens: int = 0
    sessions: dict[str, _Session] = field(default_factory=dict)


def _longest_first(session: _Session) -> tuple[int, str]:
    """Long sessions choose first, so that short ones fill the gaps."""
    return -session.tokens, session.key


class SessionRouter:
    """Sessions and their engines. Belongs to one thread; nothing blocks.

    At most `max_sessions` are known; a session without a request in flight is forgotten after `ttl_s`, or earlier, the
    one that idled longest first, when the table is full. `now_s` of all calls is one monotonic clock in seconds.
    """

    def __init__(
        self, current: WeightVersion, *, ttl_s: float = 4 * 3600.0, max_sessions: int = 100_000, growth: float = 0.5
    ) -> None:
        if not (ttl_s > 0 and max_sessions >= 1 and 0 <= growth < float("inf")):
            raise UserError(
                f"session router: ttl_s {ttl_s}, max_sessions {max_sessions}, growth {growth}: expected more than 0 "
                "seconds, at least 1 session, a growth of at least 0"
            )
        self._growth = growth
        self._mean_final_tokens: float | None = None
        self._current = current
        self._ttl_s = ttl_s
        self._max_sessions = max_sessions
        self._engines: dict[str, _Engine] = {}
        self._sessions: dict[str, _Session] = {}
        self._idle: OrderedDict[str, None] = OrderedDict()  # longest idle first
        self._waiting: dict[str, _Session] = {}  # no engine can take them
        self._serial = 0
        self._now_s = float("-inf")
        self._moved = self._evicted = 0
        self._prompt_tokens = self._new_tokens = 0
        self._reported_tokens = self._cached_tokens = 0

    # ------------------------------------------------------------------------------------------- engines

    def join(self, engine: str, version: WeightVersion) -> tuple[Moved, ...]:
        """Take an engine in. Sessions stay where they are; returned are those that had no engine and have this now.

        Raises UserError for a name that is in, and for weights older than the current ones.
        """
        if engine in self._engines:
            raise UserError(f"engine '{engine}' joins: it is in already; report its loss first, its cache is gone")
        if version < self._current:
            raise UserError(
                f"engine '{engine}' joins with weights {version}: expected {self._current}; update and verify it first"
            )
        self._engines[engine] = _Engine(engine, version)
        return self._place_waiting()

    def lose(self, engine: str) -> tuple[Moved, ...]:
        """Forget an engine and move its sessions; unknown names are fine. Other sessions stay where they are."""
        lost = self._engines.pop(engine, None)
        if lost is None:
            return ()
        sessions = sorted(lost.sessions.values(), key=_longest_first)
        self._moved += len(sessions)
        moved = []
        for session in sessions:
            session.engine, session.rebuild = None, True
            try:
                self._bind(session, self._least_active(session.key))
            except NoRoute:
                self._waiting[session.key] = session
            moved.append(Moved(session.key, engine, session.engine.name if session.engine is not None else None))
        return tuple(moved)

    def move(self, key: str, avoid: Collection[str]) -> Moved | None:
        """Send a session elsewhere: engines to `avoid` failed its request. Others stay where they are.

        None when the session isn't on one of these. Raises NoRoute, and changes nothing, when all others that could
        take it are to be avoided as well.
        """
        session = self._sessions.get(key)
        engine = session.engine if session is not None else None
        if session is None or engine is None or engine.name not in avoid:
            return None
        target = self._least_active(key, avoid)
        engine.active_tokens -= session.tokens
        del engine.sessions[key]
        session.rebuild = True
        self._bind(session, target)
        self._moved += 1
        return Moved(key, engine.name, target.name)

    def set_current(self, version: WeightVersion) -> None:
        """From now on new sessions go only to engines that hold these weights. Raises UserError for older ones."""
        if version < self._current:
            raise UserError(f"current weights {version}: expected {self._current} or later; versions only go up")
        self._current = version

    def set_version(self, engine: str, version: WeightVersion) -> tuple[Moved, ...]:
        """The engine was verified to hold these weights. Returns sessions without engine that it takes now."""
        entry = self._engines.get(engine)
        if entry is None:
            raise UserError(f"weights {version} of engine '{engine}': it isn't in; expected {self._names()}")
        entry.version = version
        return self._place_waiting()

    @property
    def current(self) -> WeightVersion:
        """The weights that new sessions need."""
        return self._current

    def engines(self) -> dict[str, int]:
        """Active tokens by engine."""
        return {name: entry.active_tokens for name, entry in self._engines.items()}

    @property
    def growth_tokens(self) -> float:
        """What an open session is still expected to add; 0 until a session has ended."""
        return self._growth * (self._mean_final_tokens or 0.0)

    # ------------------------------------------------------------------------------------------- sessions

    def route(self, key: str | None, *, prompt_tokens: int, new_tokens: int, now_s: float) -> Route:
        """The engine of the session's next request, which has `prompt_tokens`, of which `new_tokens` weren't in its
        context before. Every route is followed by one `finish`.

        Raises UserError without a key or with impossible counts, NoRoute when no engine can take the session or the
        table is full of busy ones.
        """
        if not key:
            raise UserError(
                f"request of {prompt_tokens} tokens: no routing key, seen {key!r}: expected the session's id "
                "(X-SMG-Routing-Key); without it no engine holds its prefix"
            )
        if not 0 <= new_tokens <= prompt_tokens:
            raise UserError(
                f"session '{key}': prompt_tokens {prompt_tokens}, new_tokens {new_tokens}: expected "
                "0 <= new_tokens <= prompt_tokens"
            )
        self._expire(now_s)
        session = self._sessions.get(key)
        engine = session.engine if session is not None and session.engine is not None else self._least_active(key)
        if session is None:
            session = self._open(key, engine, rebuild=new_tokens < prompt_tokens)
        elif session.engine is None:  # its engine was lost when no other could take it
            self._bind(session, engine)
        self._idle.pop(key, None)
        session.in_flight += 1
        self._charge(session, max(session.tokens, prompt_tokens))
        self._prompt_tokens += prompt_tokens
        self._new_tokens += new_tokens
        return Route(key, engine.name, prompt_tokens, session.rebuild, session.serial)

    def finish(self, route: Route, *, context_tokens: int, cached_tokens: int | None, now_s: float) -> None:
        """The request ended, well or not; the session's context is `context_tokens` long now.

        `cached_tokens` of the prompt came from the engine's cache, as it reported; None when it gave no answer: then a
        prefix that had to be rebuilt still has to be. Sessions that were ended since are fine; raises ProtocolError
        when more requests end than were routed.
        """
        self._now_s = max(self._now_s, now_s)
        session = self._sessions.get(route.key)
        mine = session is not None and session.serial == route.serial
        if session is not None and mine and session.in_flight == 0:
            raise ProtocolError(f"session '{route.key}': a request ended that isn't in flight; finish a route once")
        if cached_tokens is not None:
            self._reported_tokens += route.prompt_tokens
            self._cached_tokens += cached_tokens
        if session is None or not mine:
            return
        session.in_flight -= 1
        self._charge(session, context_tokens)
        if cached_tokens is not None and session.engine is not None and session.engine.name == route.engine:
            session.rebuild = False
        if session.in_flight == 0:
            session.idle_since_s = self._now_s
            self._idle[route.key] = None

    def restore(self, key: str, engine: str, *, context_tokens: int, now_s: float) -> bool:
        """Tell a router that was restarted about a session that its owner kept. False when it is known already.

        With an engine that isn't in, the session is placed anew at its next request and told to rebuild its prefix.
        """
        self._expire(now_s)
        if not key or key in self._sessions:
            return False
        entry = self._engines.get(engine)
        session = self._open(key, entry, rebuild=entry is None)
        self._charge(session, context_tokens)
        session.idle_since_s = self._now_s
        self._idle[key] = None
        return True

    def end(self, key: str) -> None:
        """Forget a session; unknown keys are fine."""
        if key in self._sessions:
            self._forget(key)

    def engine_of(self, key: str) -> str | None:
        """The session's engine; None for an unknown key, and while no engine could take it."""
        session = self._sessions.get(key)
        return session.engine.name if session is not None and session.engine is not None else None

    def stats(self) -> RoutingStats:
        """Counts and rates up to now."""
        hit = self._cached_tokens / self._reported_tokens if self._reported_tokens else None
        bound = 1 - self._new_tokens / self._prompt_tokens if self._prompt_tokens else None
        loads = self.engines().values()
        return RoutingStats(
            engines=len(self._engines),
            sessions=len(self._sessions),
            busy=len(self._sessions) - len(self._idle),
            active_tokens=sum(loads),
            load_imbalance=load_imbalance(loads),
            prefix_hit_rate=hit,
            prefix_bound=bound,
            hit_share_of_bound=hit / bound if hit is not None and bound else None,
            moved=self._moved,
            evicted=self._evicted,
        )

    # ------------------------------------------------------------------------------------------- inside

    def _names(self) -> str:
        return ", ".join(sorted(self._engines)) or "one that joined"

    def _least_active(self, key: str, avoid: Collection[str] = ()) -> _Engine:
        growth = self.growth_tokens
        least: list[_Engine] = []
        least_load = float("inf")
        for entry in self._engines.values():
            load = entry.active_tokens + growth * len(entry.sessions)
            if entry.version >= self._current and load <= least_load and entry.name not in avoid:
                least = [*least, entry] if load == least_load else [entry]
                least_load = load
        if not least:
            raise NoRoute(
                f"session '{key}': none of {len(self._engines)} engines holds weights {self._current}"
                f"{' and is left to try' if avoid else ''}; wait for an engine to be updated or to join"
            )
        return least[0] if len(least) == 1 else max(least, key=lambda e: (_score(key, e.name), e.name))

    def _place_waiting(self) -> tuple[Moved, ...]:
        """Sessions that lost their engine while no other could take them get one, if one can now."""
        moved = []
        for session in sorted(self._waiting.values(), key=_longest_first):
            try:
                engine = self._least_active(session.key)
            except NoRoute:
                break
            self._bind(session, engine)
            moved.append(Moved(session.key, None, engine.name))
        return tuple(moved)

    def _open(self, key: str, engine: _Engine | None, *, rebuild: bool) -> _Session:
        if len(self._sessions) >= self._max_sessions:
            if not self._idle:
                raise NoRoute(
                    f"session '{key}': all {self._max_sessions} known sessions have a request in flight; wait for one, "
                    "or raise max_sessions"
                )
            self._evict()
        self._serial += 1
        session = _Session(key, self._serial, rebuild=rebuild)
        self._sessions[key] = session
        if engine is not None:
            self._bind(session, engine)
        else:
            self._waiting[key] = session
        return session

    def _bind(self, session: _Session, engine: _Engine) -> None:
        self._waiting.pop(session.key, None)
        session.engine = engine
        engine.sessions[session.key] = session
        engine.active_tokens += session.tokens

    def _forget(self, key: str) -> None:
        session = self._sessions.pop(key)
        self._idle.pop(key, None)
        mean = self._mean_final_tokens
        self._mean_final_tokens = session.tokens if mean is None else mean + (session.tokens - mean) / 64
        self._waiting.pop(session.key, None)
        if session.engine is not None:
            session.engine.active_tokens -= session.tokens
            del session.engine.sessions[session.key]

    def _charge(self, session: _Session, tokens: int) -> None:
        if session.engine is not None:
            session.engine.active_tokens += tokens - session.tokens
        session.tokens = tokens

    def _expire(self, now_s: float) -> None:
        self._now_s = max(self._now_s, now_s)  # a clock that goes back must not disturb the order of idling
        while self._idle and self._sessions[next(iter(self._idle))].idle_since_s + self._ttl_s <= self._now_s:
            self._evict()

    def _evict(self) -> None:
        self._forget(next(iter(self._idle)))
        self._evicted += 1
