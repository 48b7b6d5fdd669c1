"""Which engine a session goes to: the rules, one by one."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_hpc.core.errors import ProtocolError, UserError
from miles_hpc.core.types import WeightVersion
from miles_hpc.rollout.routing import (
    Moved,
    NoRoute,
    Route,
    SessionRouter,
    load_imbalance,
    rendezvous_order,
)

V1, V2 = WeightVersion(1, 1), WeightVersion(1, 2)


def router_of(n: int, **bounds: float) -> SessionRouter:
    router = SessionRouter(V1, **bounds)  # type: ignore[arg-type]
    for i in range(n):
        router.join(f"e{i}", V1)
    return router


def ask(router: SessionRouter, key: str, prompt: int, new: int | None = None, *, now_s: float = 0.0) -> Route:
    return router.route(key, prompt_tokens=prompt, new_tokens=prompt if new is None else new, now_s=now_s)


def serve(router: SessionRouter, key: str, prompt: int, new: int | None = None, *, now_s: float = 0.0) -> Route:
    route = ask(router, key, prompt, new, now_s=now_s)
    router.finish(route, context_tokens=prompt, cached_tokens=0, now_s=now_s)
    return route


# ------------------------------------------------------------------------------------------- rules


def test_open_sessions_count_with_what_they_will_still_add() -> None:
    router = SessionRouter(V1, growth=0.5)
    router.join("many", V1)
    for key in "abc":
        serve(router, key, 10)
    router.join("one", V1)
    assert serve(router, "d", 40).engine == "one"
    router.restore("before", "many", context_tokens=200, now_s=0)
    router.end("before")
    assert router.growth_tokens == 100
    assert serve(router, "e", 1).engine == "one"  # 40 + 100 against 30 + 300
    plain = SessionRouter(V1, growth=0)
    plain.join("many", V1)
    for key in "abc":
        serve(plain, key, 10)
    plain.end("a")
    plain.join("one", V1)
    serve(plain, "d", 40)
    assert plain.growth_tokens == 0
    assert serve(plain, "e", 1).engine == "many"


def test_a_session_stays_and_new_ones_go_to_the_least_active_engine() -> None:
    router = router_of(2)
    first = ask(router, "long", 1000).engine
    assert ask(router, "a", 10).engine != first
    assert ask(router, "b", 10).engine != first
    assert ask(router, "long", 5000, 4000).engine == first
    assert router.engines()[first] == 5000


def test_idle_sessions_count_as_active_until_they_end() -> None:
    router = router_of(2)
    first = serve(router, "long", 1000).engine
    other = serve(router, "a", 10).engine
    assert other != first
    router.end("long")
    assert router.engines()[first] == 0
    assert serve(router, "b", 10).engine == first


@pytest.mark.parametrize("key", [None, ""])
def test_no_key_is_an_error(key: str | None) -> None:
    with pytest.raises(UserError, match=r"no routing key.*session's id"):
        router_of(2).route(key, prompt_tokens=7, new_tokens=7, now_s=0)


@pytest.mark.parametrize(("prompt", "new"), [(5, 6), (5, -1), (-1, -1)])
def test_impossible_counts_are_refused(prompt: int, new: int) -> None:
    with pytest.raises(UserError, match="0 <= new_tokens <= prompt_tokens"):
        router_of(1).route("k", prompt_tokens=prompt, new_tokens=new, now_s=0)


def test_ties_spread_and_are_the_same_everywhere() -> None:
    chosen = Counter(ask(router_of(8), f"s{i}", 1).engine for i in range(800))
    assert len(chosen) == 8
    assert min(chosen.values()) > 60
    # Known values: the order must not depend on the process or the Python version.
    assert rendezvous_order("session-1", ["e0", "e1", "e2", "e3"]) == KNOWN_ORDER
    assert ask(router_of(4), "session-1", 1).engine == KNOWN_ORDER[0]


KNOWN_ORDER = ["e3", "e1", "e2", "e0"]


@given(st.text(max_size=20), st.sets(st.text(max_size=5), min_size=2, max_size=8))
def test_rendezvous_order_of_the_others_stays(key: str, engines: set[str]) -> None:
    order = rendezvous_order(key, engines)
    gone = order[0]
    assert rendezvous_order(key, engines - {gone}) == [e for e in order if e != gone]


def test_only_engines_with_the_current_weights_get_new_sessions() -> None:
    router = router_of(2)
    held = ask(router, "old", 10).engine
    router.set_current(V2)
    with pytest.raises(NoRoute, match=r"'new': none of 2 engines holds weights 1\.2"):
        ask(router, "new", 1)
    assert ask(router, "old", 20, 10).engine == held  # a session that is there goes on
    router.set_version(held, V2)
    assert {ask(router, f"n{i}", 1000).engine for i in range(5)} == {held}
    with pytest.raises(UserError, match=r"joins with weights 1\.1: expected 1\.2"):
        router.join("late", V1)
    router.join("fresh", V2)
    assert ask(router, "n9", 1).engine == "fresh"


def test_bad_changes_are_refused() -> None:
    router = router_of(1)
    with pytest.raises(UserError, match="is in already"):
        router.join("e0", V1)
    with pytest.raises(UserError, match="isn't in; expected e0"):
        router.set_version("e7", V1)
    router.set_current(V2)
    with pytest.raises(UserError, match="only go up"):
        router.set_current(V1)
    for bounds in ({"ttl_s": 0}, {"max_sessions": 0}, {"ttl_s": float("nan")}, {"growth": -1}):
        with pytest.raises(UserError, match="session router"):
            SessionRouter(V1, **bounds)  # type: ignore[arg-type]


def test_a_lost_engine_moves_its_sessions_only_and_says_so() -> None:
    router = router_of(4)
    before = {f"s{i}": serve(router, f"s{i}", 100).engine for i in range(40)}
    assert Counter(before.values()) == {f"e{i}": 10 for i in range(4)}
    moved = router.lose("e2")
    assert {m.key for m in moved} == {k for k, e in before.items() if e == "e2"}
    assert len(moved) <= 40 / 4
    assert all(m.source == "e2" and m.target == router.engine_of(m.key) != "e2" for m in moved)
    assert max(Counter(m.target for m in moved).values()) == 4  # 10 over 3 engines
    for key, engine in before.items():
        route = ask(router, key, 110, 10)
        assert route.rebuild is (engine == "e2")
        assert engine == "e2" or route.engine == engine
    assert router.lose("e2") == ()


@given(st.integers(1, 8), st.integers(0, 60), st.integers(1, 500), st.data())
def test_a_change_of_engines_moves_one_share_at_most(n: int, sessions: int, tokens: int, data: st.DataObject) -> None:
    """Of sessions of one length; a lost engine's sessions can't stay, so unequal ones are a share of the tokens."""
    router = router_of(n)
    for i in range(sessions):
        serve(router, f"s{i}", tokens)
    assert router.join("new", V1) == ()
    moved = router.lose(f"e{data.draw(st.integers(0, n - 1))}")
    assert len(moved) <= math.ceil(sessions / n)
    assert router.stats().moved == len(moved)
    assert all(m.target is not None for m in moved)


def test_a_session_whose_request_failed_moves_alone() -> None:
    router = router_of(3)
    for key in "abcdef":
        serve(router, key, 10)
    here = router.engine_of("a")
    assert here is not None
    others = {key: router.engine_of(key) for key in "bcdef"}
    assert router.move("a", []) is None and router.move("nobody", [here]) is None
    moved = router.move("a", [here])
    assert moved is not None and (moved.key, moved.source) == ("a", here) and moved.target != here
    assert router.engine_of("a") == moved.target
    assert {key: router.engine_of(key) for key in "bcdef"} == others
    assert sum(router.engines().values()) == 60 and router.stats().moved == 1
    assert ask(router, "a", 10, 0).rebuild
    with pytest.raises(NoRoute, match="left to try"):
        router.move("a", ["e0", "e1", "e2"])
    assert router.engine_of("a") == moved.target


def test_long_sessions_of_a_lost_engine_choose_first() -> None:
    router = router_of(1)
    for key, tokens in (("short", 10), ("middle", 20), ("long", 100)):
        router.restore(key, "e0", context_tokens=tokens, now_s=0)
    router.join("e1", V1)
    router.join("e2", V1)
    moved = router.lose("e0")
    assert [m.key for m in moved] == ["long", "middle", "short"]
    assert sorted(router.engines().values()) == [30, 100]


def test_branches_of_one_session_are_in_flight_together() -> None:
    router = router_of(1, ttl_s=10)
    first, second = ask(router, "tree", 500, now_s=0), ask(router, "tree", 300, 100, now_s=0)
    assert router.engines() == {"e0": 500}  # the shorter branch shares the longer one's beginning
    router.finish(first, context_tokens=520, cached_tokens=0, now_s=1)
    assert router.stats().busy == 1
    serve(router, "other", 1, now_s=100)
    assert router.engine_of("tree") == "e0"
    router.finish(second, context_tokens=520, cached_tokens=0, now_s=101)
    assert router.stats().busy == 0
    serve(router, "other", 1, now_s=112)
    assert router.engine_of("tree") is None


def test_a_clock_that_goes_back_does_no_harm() -> None:
    router = router_of(1, ttl_s=10)
    serve(router, "a", 1, now_s=100)
    serve(router, "b", 1, now_s=5)  # idle since 100 as well, by the latest time that was seen
    serve(router, "a", 1, now_s=105)  # b has idled longest now
    serve(router, "c", 1, now_s=109)
    assert router.engine_of("b") == "e0"
    serve(router, "c", 1, now_s=110)
    assert router.engine_of("b") is None
    assert router.engine_of("a") == "e0"


def test_rebuild_is_said_until_an_engine_answered() -> None:
    router = router_of(2)
    first = serve(router, "s", 100)
    assert not first.rebuild
    pending = ask(router, "s", 110, 10)  # still on its way when the engine is lost
    router.lose(first.engine)
    router.finish(pending, context_tokens=100, cached_tokens=100, now_s=0)  # an answer of the lost engine
    again = ask(router, "s", 110, 10)
    assert again.rebuild
    router.finish(again, context_tokens=100, cached_tokens=None, now_s=0)  # no answer
    again = ask(router, "s", 110, 10)
    assert again.rebuild
    router.finish(again, context_tokens=110, cached_tokens=0, now_s=0)
    assert not ask(router, "s", 120, 10).rebuild


def test_sessions_wait_for_an_engine_when_the_last_is_lost() -> None:
    router = router_of(1)
    serve(router, "s", 100)
    assert router.lose("e0") == (Moved("s", "e0", None),)
    assert router.engine_of("s") is None
    with pytest.raises(NoRoute):
        ask(router, "s", 100, 1)
    router.set_current(V2)
    assert router.join("e1", V2) == (Moved("s", None, "e1"),)
    assert ask(router, "s", 100, 1) == Route("s", "e1", 100, True, 1)
    assert router.join("e2", V2) == ()


def test_a_join_moves_nobody_and_takes_the_new_sessions() -> None:
    router = router_of(2)
    before = {f"s{i}": serve(router, f"s{i}", 100).engine for i in range(20)}
    assert router.join("new", V1) == ()
    assert {k: router.engine_of(k) for k in before} == before
    assert {serve(router, f"n{i}", 100).engine for i in range(10)} == {"new"}


def test_idle_sessions_expire_and_busy_ones_never() -> None:
    router = router_of(1, ttl_s=10)
    serve(router, "idle", 5, now_s=0)
    busy = ask(router, "busy", 7, now_s=0)
    serve(router, "x", 1, now_s=9.9)
    assert router.engine_of("idle") == "e0"
    serve(router, "x", 1, now_s=10)
    assert router.engine_of("idle") is None
    assert router.engines() == {"e0": 8}
    serve(router, "y", 1, now_s=1000)
    assert router.engine_of("busy") == "e0"
    router.finish(busy, context_tokens=7, cached_tokens=0, now_s=1000)
    back = ask(router, "idle", 6, 1, now_s=1000)
    assert back.rebuild  # it says itself that it has a prefix, which nobody here knows


def test_a_full_table_forgets_the_longest_idle_session_or_refuses() -> None:
    router = router_of(1, max_sessions=3)
    for t, key in enumerate("abc"):
        serve(router, key, 1, now_s=t)
    serve(router, "a", 1, now_s=5)
    busy = ask(router, "d", 1, now_s=6)
    assert [router.engine_of(k) for k in "abcd"] == ["e0", None, "e0", "e0"]
    ask(router, "a", 1, now_s=7)
    ask(router, "c", 1, now_s=7)
    with pytest.raises(NoRoute, match="all 3 known sessions have a request in flight"):
        ask(router, "e", 1, now_s=8)
    router.finish(busy, context_tokens=1, cached_tokens=0, now_s=9)
    assert ask(router, "e", 1, now_s=9).engine == "e0"
    assert router.stats().evicted == 2


def test_a_request_ends_once_and_late_ends_of_old_sessions_are_fine() -> None:
    router = router_of(1)
    old = ask(router, "s", 50)
    router.end("s")
    new = ask(router, "s", 10)
    router.finish(old, context_tokens=50, cached_tokens=0, now_s=0)
    assert router.engines() == {"e0": 10}
    router.finish(new, context_tokens=12, cached_tokens=0, now_s=0)
    with pytest.raises(ProtocolError, match="isn't in flight"):
        router.finish(new, context_tokens=12, cached_tokens=0, now_s=0)
    router.end("s")
    router.end("s")


def test_a_restarted_router_is_told_all_sessions() -> None:
    router = router_of(3)
    before = {f"s{i}": serve(router, f"s{i}", 10 * i + 1).engine for i in range(30)}
    fresh = router_of(3)
    assert all(fresh.restore(k, e, context_tokens=10 * int(k[1:]) + 1, now_s=0) for k, e in before.items())
    assert fresh.engines() == router.engines()
    assert not fresh.restore("s1", "e0", context_tokens=1, now_s=0)
    assert all(ask(fresh, k, 1000, 1).engine == e for k, e in before.items())
    assert not ask(fresh, "s1", 1000, 1).rebuild
    assert fresh.restore("gone", "e9", context_tokens=10, now_s=0)
    assert ask(fresh, "gone", 20, 10).rebuild


def test_statistics_by_hand() -> None:
    router = router_of(2)
    assert router.stats().prefix_hit_rate is None
    assert router.stats().load_imbalance == 1.0
    first = ask(router, "s", 100)
    router.finish(first, context_tokens=110, cached_tokens=0, now_s=0)
    second = ask(router, "s", 150, 40)
    router.finish(second, context_tokens=160, cached_tokens=55, now_s=0)
    stats = router.stats()
    assert (stats.engines, stats.sessions, stats.busy, stats.active_tokens) == (2, 1, 0, 160)
    assert stats.load_imbalance == 2.0
    assert stats.prefix_bound == pytest.approx(110 / 250)
    assert stats.prefix_hit_rate == pytest.approx(55 / 250)
    assert stats.hit_share_of_bound == pytest.approx(0.5)


@pytest.mark.parametrize(("loads", "expected"), [([], 1), ([0, 0], 1), ([5, 5], 1), ([3, 1], 1.5), ([8, 0, 0, 0], 4)])
def test_load_imbalance(loads: list[int], expected: float) -> None:
    assert load_imbalance(loads) == expected
