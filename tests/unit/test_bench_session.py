"""The benchmark of sessions runs and says what it promises to say; its models are what they claim. Never a time."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_hpc.core.errors import UserError
from tests.exploring import examples
from tools.bench_session import peer
from tools.bench_session.__main__ import main
from tools.bench_session.core import Arm
from tools.bench_session.played import measure_live
from tools.bench_session.policies import POLICIES
from tools.bench_session.processes import Child, cpu_s, own_cpu_s
from tools.bench_session.radix import PrefixCache
from tools.bench_session.replay import Load, replay
from tools.bench_session.report import Report
from tools.bench_session.trace import Piece, TracedSession, TracedTurn, generate, read, write

SUMMARY = {
    "turns_per_s",
    "turn_cost_ratio_64k_over_1k",
    "routing_ratio_ours_over_sglang_router",
    "prefix_hit_share_of_bound",
    "load_imbalance",
}


def test_the_contract(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--smallest", "--json", "--no-peer"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert set(result) == {"conditions", "arms", "summary"}
    summary = result["summary"]
    assert set(summary) > SUMMARY
    assert {k for k, v in summary.items() if v is None} == {
        "routing_ratio_ours_over_sglang_router",
        "routing_cpu_ratio_ours_over_sglang_router",
        "proxy_ratio_ours_over_sglang_router",
    }
    assert summary["left_out"] == {"sglang-router": "--no-peer"}
    assert all(value > 0 for value in summary.values() if isinstance(value, float))
    parts: dict[str, list[dict[str, Any]]] = {}
    for arm in result["arms"]:
        parts.setdefault(arm["part"], []).append(arm)
    assert set(parts) == {"core", "surface", "trace", "routed", "decision"}
    tokens = {arm["size"]: arm["history_tokens"] for arm in parts["core"]}
    assert tokens["1k"] < 1_300 and 64_000 <= tokens["64k"] < 64_300
    assert {arm["history"] for arm in parts["core"]} == {"linear", "tree"}
    assert [row["history_tokens"] > 64_000 for row in parts["surface"]] == [False, True]
    assert [row["policy"] for row in parts["trace"]] == list(POLICIES)
    assert [row["arm"] for row in parts["routed"]] == ["gateway", "proxy"]
    known = {"cpu", "cores", "python", "versions", "sizes", "repeats", "load_average_at_start", "load_average_at_end"}
    assert known <= set(result["conditions"])


def test_bad_calls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--smallest", "--trace", str(tmp_path / "none")]) == 2
    assert "bench_session: error: trace" in capsys.readouterr().err
    assert main(["--smallest", "--no-peer", "--folder", "x:nobody"]) == 2
    assert "chat family 'nobody'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--quick", "--smallest"])


# ------------------------------------------------------------------------------------------- the report


def report_of(routed: list[dict[str, Any]]) -> Report:
    arms = [
        Arm(operation, shape, size, 1, cpu_us=[cost, cost], wall_us=[cost, cost])
        for operation in ("append", "matched", "prompt", "parse")
        for shape, more in (("linear", 0.0), ("tree", 100.0))
        for size, cost in (("1k", 300.0 + more), ("64k", 400.0 + more))
    ]
    trace = [{"policy": "ours", "hit_share_of_bound": 0.99, "load_imbalance": 1.05, "momentary_imbalance": 1.1}]
    return Report({}, core=arms, trace=trace, decision_us=[3.0, 2.0], routed=routed)


def test_the_summary_takes_the_worse_history_and_pairs_repeats() -> None:
    routed = [
        {"arm": "gateway", "requests_per_s_all": [100.0, 10.0, 100.0], "cpu_us_all": [5.0, 5.0, 5.0]},
        {"arm": "router", "requests_per_s_all": [50.0, 5.0, 200.0], "cpu_us_all": [10.0, 10.0, 10.0]},
        {"arm": "proxy", "requests_per_s_all": [25.0, 5.0, 100.0], "cpu_us_all": [20.0, 20.0, 20.0]},
    ]
    summary = report_of(routed).summary()
    assert summary["turns_per_s"] == 2000.0
    assert summary["turn_cost_ratio_64k_over_1k"] == pytest.approx(400 / 300, abs=1e-3)
    assert summary["routing_ratio_ours_over_sglang_router"] == 2.0
    assert summary["routing_cpu_ratio_ours_over_sglang_router"] == 0.5
    assert summary["proxy_ratio_ours_over_sglang_router"] == 0.5
    assert (summary["decision_us"], summary["load_imbalance"]) == (2.0, 1.05)
    assert report_of([])._routing()["routing_ratio_ours_over_sglang_router"] is None


# ------------------------------------------------------------------------------------------- traces


def test_a_trace_follows_what_is_stated() -> None:
    trace = generate(2000, open_sessions=64, seed=3)
    assert trace == generate(2000, open_sessions=64, seed=3) != generate(2000, open_sessions=64, seed=4)
    groups: dict[str, list[TracedSession]] = {}
    for session in trace:
        groups.setdefault(session.key.rsplit("-", 1)[0], []).append(session)
    assert all(len({(s.starts_s, s.prompt) for s in group}) == 1 for group in groups.values())
    assert {len(group) for group in groups.values()} == {8}
    starts = [session.starts_s for session in trace]
    assert starts == sorted(starts)
    turns = sorted(len(session.turns) for session in trace)
    assert 12 <= turns[1000] <= 16 and turns[-1] <= 120
    new = sorted(turn.new_tokens for session in trace for turn in session.turns[1:])
    assert 165 <= new[len(new) // 2] <= 195
    assert len({session.prompt[0] for session in trace}) == 4
    waits = [second - first for first, second in zip(starts[::8], starts[8::8], strict=False)]
    mean = sum(waits) / len(waits)
    deviation = (sum((wait - mean) ** 2 for wait in waits) / len(waits)) ** 0.5
    assert 0.8 < deviation / mean < 1.2  # as of a Poisson process


def test_a_trace_comes_back_from_its_file(tmp_path: Path) -> None:
    trace = generate(20, open_sessions=8)
    write(tmp_path / "trace.jsonl", trace)
    assert read(tmp_path / "trace.jsonl") == trace


TURN = '{"new_tokens": 1, "output_tokens": 1, "wait_s": 0}'


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("", "no session in it"),
        ("{", "line 1"),
        ('{"key": "a", "starts_s": 0, "prompt": [["p", 3]], "turns": []}', "line 1: expected at least one turn"),
        (f'{{"key": "a", "starts_s": 0, "prompt": [["p", -3]], "turns": [{TURN}]}}', "no negative"),
        ('{"key": "a", "starts_s": 0, "prompt": [], "turns": [], "more": 1}', "unknown field"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, line: str, text: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(line)
    with pytest.raises(UserError, match=text) as caught:
        read(path)
    assert "\n" not in str(caught.value)


# ------------------------------------------------------------------------------------------- caches


def spelled(pieces: Sequence[Piece]) -> list[str]:
    """Tokens: those of two pieces differ in the first already."""
    return [f"{piece.name}{i}" for piece in pieces for i in range(piece.n_tokens)]


def longest_shared(tokens: list[str], kept: list[list[str]]) -> int:
    best = 0
    for other in kept:
        n = 0
        while n < min(len(tokens), len(other)) and tokens[n] == other[n]:
            n += 1
        best = max(best, n)
    return best


PATHS = st.lists(
    st.tuples(st.lists(st.sampled_from("abc"), min_size=1, max_size=4), st.sampled_from("xyz")), max_size=20
)
SIZE = {name: i + 1 for i, name in enumerate("abcxyz")}


@settings(max_examples=examples(60))
@given(PATHS)
def test_a_cache_finds_what_a_search_through_all_sequences_finds(requests: list[tuple[list[str], str]]) -> None:
    cache, kept = PrefixCache(), []
    for names, output in requests:
        prompt = [Piece(name, SIZE[name]) for name in names]
        lease = cache.begin(prompt)
        assert lease.cached_tokens == longest_shared(spelled(prompt), kept)
        cache.end(lease, Piece(output, SIZE[output]))
        kept.append(spelled([*prompt, Piece(output, SIZE[output])]))
    prefixes = {tuple(tokens[:n]) for tokens in kept for n in range(1, len(tokens) + 1)}
    assert cache.size_tokens == len(prefixes)


@settings(max_examples=examples(60))
@given(PATHS, st.integers(5, 30))
def test_a_full_cache_keeps_its_bound_and_never_finds_too_much(
    requests: list[tuple[list[str], str]], capacity: int
) -> None:
    cache, endless = PrefixCache(capacity), PrefixCache()
    for names, output in requests:
        prompt = [Piece(name, SIZE[name]) for name in names]
        here, there = cache.begin(prompt), endless.begin(prompt)
        assert here.cached_tokens <= there.cached_tokens
        running = sum(piece.n_tokens for piece in prompt)
        assert cache.size_tokens <= max(capacity, running)
        cache.end(here, Piece(output, SIZE[output]))
        endless.end(there, Piece(output, SIZE[output]))
        assert cache.size_tokens <= capacity


def test_what_was_used_longest_ago_goes_first_and_what_runs_stays() -> None:
    cache = PrefixCache(10)
    old, young = [Piece("old", 4)], [Piece("young", 4)]
    cache.end(cache.begin(old), Piece("", 0))
    cache.end(cache.begin(young), Piece("", 0))
    running = cache.begin(old)
    assert running.cached_tokens == 4
    other = cache.begin([Piece("other", 4)])
    assert cache.size_tokens == 8 and cache.evicted_tokens == 4
    cache.end(other, Piece("", 0))
    cache.end(running, Piece("", 0))
    assert cache.begin(old).cached_tokens == 4
    assert cache.begin(young).cached_tokens == 0


# ------------------------------------------------------------------------------------------- replay


def test_load_is_integrated_over_its_window() -> None:
    load = Load(2, start_s=10, end_s=20)
    load.tokens[:] = [100, 0]
    load.advance(12)  # 2 s of it count
    load.tokens[:] = [50, 150]
    load.advance(16)
    load.tokens[:] = [0, 0]
    load.advance(30)
    assert load.integral == [100 * 2 + 50 * 4, 150 * 4]
    assert load.imbalance == pytest.approx(600 * 2 / 1000)
    assert load.momentary == pytest.approx((100 * 2 * 2 + 150 * 2 * 4) / 1000)
    assert Load(2, start_s=0, end_s=1).imbalance == 1.0


def test_one_engine_that_forgets_nothing_reaches_the_bound() -> None:
    trace = generate(80, open_sessions=16)
    for name, policy in POLICIES.items():
        found = replay(trace, policy(1, 0, trace))
        assert found.hit_share_of_bound == found.load_imbalance == found.momentary_imbalance == 1.0, name
        assert found.requests == sum(len(session.turns) for session in trace)
        assert found.evicted_tokens == 0


def test_the_bound_is_what_contexts_repeat() -> None:
    turns = (TracedTurn(0, 5, 1.0), TracedTurn(7, 3, 1.0), TracedTurn(2, 1, 1.0))
    trace = tuple(TracedSession(key, start, (Piece("p", 10),), turns) for key, start in (("a", 0.0), ("b", 100.0)))
    found = replay(trace, POLICIES["ours"](1, 0, trace))
    assert found.bound_tokens == (0 + 15 + 25) + (10 + 15 + 25)
    assert found.prompt_tokens == 2 * (10 + 22 + 27)


def test_sticky_policies_keep_prefixes_and_ours_keeps_load_even() -> None:
    """Simulated, so these are no times: the same on every machine."""
    trace = generate(400, open_sessions=64, seed=1)
    found = {name: replay(trace, policy(4, 1, trace), capacity_tokens=200_000) for name, policy in POLICIES.items()}
    assert found["ours"].hit_share_of_bound >= 0.96
    assert found["ours"].load_imbalance <= 1.1
    assert found["ours"].momentary_imbalance < found["manual"].momentary_imbalance
    assert found["clairvoyant"].momentary_imbalance < found["ours"].momentary_imbalance
    for scattered in ("least_requests", "round_robin", "random"):
        assert found[scattered].hit_share_of_bound < 0.8


# ------------------------------------------------------------------------------------------- programs


def test_a_child_that_ends_at_its_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="ended at its start: nobody there"):
        Child([sys.executable, "-c", "import sys; sys.exit('nobody there')"], tmp_path / "log")


def test_a_childs_processor_time_is_counted_and_it_ends(tmp_path: Path) -> None:
    program = "import json, time; sum(range(10**6)); print(json.dumps({'a': 1}), flush=True); time.sleep(600)"
    child = Child([sys.executable, "-c", program], tmp_path / "log")
    assert child.told == {"a": 1} and child.alive
    assert cpu_s(child.pid) > 0 and own_cpu_s() > 0
    child.close()
    child.close()
    assert not child.alive


@pytest.mark.skipif(peer.find() is None, reason="python -m tools.bench_session.peer makes its environment")
def test_the_models_of_the_peer_choose_as_the_peer_does(tmp_path: Path) -> None:
    python = peer.find()
    assert python is not None
    rows = measure_live(python, tmp_path, engines=3, sessions=24, seed=1)
    found = {row["policy"]: (row["hit_share_of_bound"], row["load_imbalance"]) for row in rows}
    assert found["cache_aware, model"] == found["cache_aware, sglang-router"]
    assert found["manual, model"] == pytest.approx(found["manual, sglang-router"], abs=0.3)


def test_a_router_that_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert peer.find() is None
    with pytest.raises(RuntimeError, match=r"sglang-router ended at its start: .*sglang_router"):
        peer.Router(Path(sys.executable), ["http://127.0.0.1:1"], tmp_path)
