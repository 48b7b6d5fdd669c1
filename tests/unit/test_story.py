"""The reduction of events: lineage, allocations, idle shares, and that no event can break it."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_hpc.cli.story import RunStory, role_of
from miles_hpc.cli.story_reducer import StoryReducer, reduce_events
from miles_hpc.cli.wording import HostNames, duration, quantity
from tests.exploring import examples
from tests.fakes import make_events


@pytest.fixture(scope="module")
def story() -> RunStory:
    return reduce_events(make_events.events())


def event(t: float, kind: str, process: str = "controller", term: int = 1, **fields: Any) -> dict[str, Any]:
    return {"t": t, "term": term, "process": process, "kind": kind, **fields}


def metric(t: float, step: int, term: int = 1, **values: float) -> dict[str, Any]:
    return event(t, "metric", term=term, step=step, values=values)


def test_invented_run(story: RunStory) -> None:
    assert story.complete
    assert (story.current_step, story.total_steps) == (52, 52)
    assert [s.step for s in story.steps] == list(range(1, 53))
    assert (story.trained_groups, story.groups_asked) == (640, 640)
    assert [a.attempt for a in story.allocations] == [1, 2]
    assert [s.phase for s in story.steps].count("sft") == 12
    assert len(story.gaps()) == 1
    assert {v.name for v in story.faults} == {"lost", "rollback"}


def test_steps_that_were_undone_are_told_apart(story: RunStory) -> None:
    assert [(s.step, s.term) for s in story.superseded] == [(35, 1), (36, 1)]
    assert {s.term for s in story.steps if s.step >= 35} == {2}
    assert {s.term for s in story.steps if s.step < 35} == {1}


def test_evaluations_make_one_curve_over_what_lasted(story: RunStory) -> None:
    assert [(e.step, e.when) for e in story.evaluations] == [
        (12, "before"),
        (20, "during"),
        (28, "during"),
        (36, "during"),
        (44, "during"),
        (52, "after"),
    ]
    told = [e for e in make_events.events() if e.get("name") == "evaluation" and e["step"] == 36]
    assert len(told) == 2 and story.evaluations[3].t == told[1]["t"]  # the first one's weights were undone
    assert story.evaluations[3].title == "at step 36" and story.evaluations[3].size == "24 prompts × 4 episodes"
    assert sorted(story.evaluations[3].pass_at) == [1, 2, 4]
    assert not [name for s in story.steps for name in s.values if name.startswith("eval/")]
    steps, values = story.series("eval/shell")
    assert steps == [12, 20, 28, 36, 44, 52] and values == [e.mean for e in story.evaluations]


def test_an_evaluation_that_was_told_twice_counts_once_and_one_that_was_undone_not_at_all() -> None:
    def told(t: float, step: int, mean: float) -> dict[str, Any]:
        return event(t, "note", name="evaluation", step=step, when="during", n=2, mean=mean)

    events = [told(1, 4, 0.1), told(2, 6, 0.2), told(3, 4, 0.3)]
    assert [(e.step, e.mean) for e in reduce_events(events).evaluations] == [(6, 0.2), (4, 0.3)]
    undone = [*events, event(4, "verdict", name="rollback", to_step=5)]
    assert [(e.step, e.mean) for e in reduce_events(undone).evaluations] == [(4, 0.3)]


def test_order_of_events_does_not_matter(story: RunStory) -> None:
    shuffled = list(make_events.events())
    random.Random(3).shuffle(shuffled)
    again = reduce_events(shuffled)
    assert replace(again, idle=()) == replace(story, idle=())
    assert [s.idle for s in again.idle] == pytest.approx([s.idle for s in story.idle])  # sums of floats


def test_story_may_be_asked_for_between_events(story: RunStory) -> None:
    reducer = StoryReducer()
    seen = []
    for e in make_events.events():
        reducer.add(e)
        if e["kind"] in ("metric", "verdict"):
            seen.append(reducer.story().current_step)
    assert 34 in seen[seen.index(36) :]  # it went back
    assert reducer.story() == story


def test_rollback_inside_an_allocation_without_a_new_step_yet() -> None:
    found = reduce_events([metric(i, i) for i in (1, 2, 3, 4)] + [event(5, "verdict", name="rollback", to_step=2)])
    assert found.current_step == 2
    assert [s.step for s in found.superseded] == [3, 4]


def test_a_step_told_in_two_events_is_one_step() -> None:
    found = reduce_events([metric(1, 1, loss=2.0), metric(1.5, 1, sync=0.5)])
    assert len(found.steps) == 1 and found.steps[0].values == {"loss": 2.0, "sync": 0.5}


def test_run_taken_up_again_after_completion_is_not_complete() -> None:
    events = [
        event(0, "note", name="allocation_start", attempt=1),
        event(9, "note", name="run_complete", trained_groups=1, steps=1),
    ]
    assert reduce_events(events).complete
    assert not reduce_events([*events, event(20, "note", term=2, name="allocation_start", attempt=2)]).complete


def test_controller_started_anew_stays_in_its_allocation() -> None:
    start = {"name": "allocation_start", "attempt": 1, "hosts": {"trainer": ["a"]}}
    found = reduce_events(
        [
            event(0, "note", term=1, **start),
            metric(1, 1),
            event(2, "note", term=1, name="allocation_end", attempt=1, outcome="failed"),
            event(3, "note", term=2, **start),
            metric(4, 2, term=2),
        ]
    )
    assert len(found.allocations) == 1
    assert found.allocations[0].terms == (1, 2)
    assert found.allocations[0].end is None and not found.allocations[0].failed
    assert {s.attempt for s in found.steps} == {1}


def test_late_event_of_a_fenced_term_counts_for_its_own_allocation() -> None:
    found = reduce_events(
        [
            event(0, "note", term=1, name="allocation_start", attempt=1),
            event(10, "note", term=2, name="allocation_start", attempt=2),
            event(15, "span", "trainer-a-0", term=1, name="train_step", start=14, end=15),
        ]
    )
    assert found.allocations[0].last_seen == 15
    assert [p.name for p in found.peers] == ["controller"]


def test_idle_share_from_spans_is_the_union() -> None:
    spans = [(0, 4), (2, 6), (8, 10)]  # 8 of 10 s busy
    events = [event(b, "span", "rollout-a-0", name="generate", start=a, end=b) for a, b in spans]
    events.append(event(10, "span", "rollout-a-0", name="wait_batch", start=6, end=8))
    (share,) = reduce_events(events).idle
    assert (share.role, share.evidence) == ("rollout", "spans")
    assert share.idle == pytest.approx(0.2)


def test_idle_share_prefers_windows_and_falls_back_to_steps() -> None:
    busy = event(4, "span", "rollout-a-0", name="generate", start=0, end=4)
    window = event(4, "note", "rollout-a-0", name="utilisation", role="sandbox", busy_s=0.5, window_s=2)
    step = metric(5, 1, **{"perf/step_time": 4.0, "perf/wait_batch_time": 1.0})
    shares = {s.role: s for s in reduce_events([busy, window, step]).idle}
    assert shares["rollout"].evidence == "spans"
    assert shares["sandbox"].evidence == "windows" and shares["sandbox"].idle == pytest.approx(0.75)
    assert shares["trainer"].evidence == "steps" and shares["trainer"].idle == pytest.approx(0.25)


def test_many_spans_keep_their_union() -> None:
    events = [event(i + 1.0, "span", "trainer-a-0", name="train_step", start=i, end=i + 0.5) for i in range(5000)]
    (share,) = reduce_events(events).idle
    assert share.idle == pytest.approx(0.5, abs=1e-3)


def test_peers_of_the_newest_allocation(story: RunStory) -> None:
    assert all(p.alive for p in story.peers)
    first = reduce_events(e for e in make_events.events() if e["term"] == 1 and e.get("name") != "utilisation")
    lost_then_back = next(p for p in first.peers if p.name == "rollout-vm3-0")
    assert lost_then_back.alive
    gone = reduce_events(
        [
            event(1, "verdict", name="joined", peer="rollout-a-0"),
            event(2, "verdict", name="lost", peer="rollout-a-0"),
            event(3, "note", "rollout-a-0", name="utilisation"),  # cut off, and still writing
        ]
    )
    assert [p.alive for p in gone.peers if p.role == "rollout"] == [False]


def test_neighbouring_verdicts_are_told_together(story: RunStory) -> None:
    texts = [text for _, _, text in story.told()]
    assert any("dropped 3 groups: 3 × host lost" in t for t in texts)
    assert not any("weights" in t for t in texts)  # routine


def test_verdict_text_has_no_control_characters() -> None:
    found = reduce_events([event(1, "verdict", name="lost", peer="x\x1b[31m", evidence="a\nb\r\x07")])
    assert found.verdicts[0].text.isprintable()


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
_KEYS = ("step", "values", "name", "start", "end", "attempt", "hosts", "outcome", "peer", "to_step", "base_step")
_MORE = ("phase", "first_step", "role", "busy_s", "window_s", "mean", "n", "by_label", "when", "n_steps", "sft_steps")
_NAMES = ("allocation_start", "allocation_end", "evaluation", "run_start", "run_complete", "term", "phase", "rollback")
_EVENT = st.fixed_dictionaries(
    {
        "t": st.floats(0, 100) | _JSON,
        "term": st.integers(0, 4) | _JSON,
        "process": st.sampled_from(["controller", "trainer-a-0", "rollout-b-1"]) | _JSON,
        "kind": st.sampled_from(["metric", "span", "verdict", "note"]) | _JSON,
    },
    optional={
        **{k: st.integers(-2, 9) | _JSON for k in _KEYS + _MORE if k not in ("name", "values")},
        "name": st.sampled_from([*_NAMES, "utilisation", "lost", "train_step"]) | _JSON,
        "values": st.dictionaries(st.sampled_from(["perf/step_time", "perf/wait_batch_time", "x"]), _JSON, max_size=3),
    },
)


@settings(max_examples=examples(120))
@given(st.lists(_EVENT, max_size=12), st.randoms(use_true_random=False))
def test_nothing_that_is_json_breaks_it(events: list[dict[str, Any]], rng: random.Random) -> None:
    found = reduce_events(events)
    assert [s.step for s in found.steps] == sorted({s.step for s in found.steps})
    assert all(0 <= s.idle <= 1 and s.observed_s > 0 for s in found.idle)
    assert found.wall_s >= 0
    rng.shuffle(events)
    again = reduce_events(events)
    assert [s.step for s in again.steps] == [s.step for s in found.steps]
    for s in found.told():
        assert s[2].isprintable()


def test_role_of() -> None:
    assert [role_of(p) for p in ("rollout-trainer01-0", "trainer-n1-3", "x")] == ["rollout", "trainer", ""]


def test_hosts_and_addresses_are_hidden(story: RunStory) -> None:
    hide = HostNames(story).hide
    assert hide("lost rollout-vm3-0: silent, from vm3.cluster.example (10.0.0.3:40112)") == (
        "lost rollout node 2: silent, from rollout node 2 (an address)"
    )
    assert hide("vm31 and xvm3 are others; version 1.2.3") == "vm31 and xvm3 are others; version 1.2.3"


def test_hosts_of_several_roles_and_ranks() -> None:
    start = {"name": "allocation_start", "attempt": 1, "hosts": {"trainer": ["n1"], "rollout": ["n1", "n2"]}}
    lost = event(1, "verdict", name="lost", peer="trainer-n1-1")
    hide = HostNames(reduce_events([event(0, "note", **start), lost])).hide
    assert hide("trainer-n1-1 rollout-n2-0 n1") == "trainer on node 1 rank 1 rollout node 1 rank 0 node 1"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.84, "0.8 s"),
        (42.4, "42 s"),
        (59.7, "1 min 00 s"),
        (187, "3 min 07 s"),
        (7500, "2 h 05 min"),
        (97200, "1 d 03 h"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@given(st.floats(-1e300, 1e300) | st.just(math.nan) | st.just(math.inf))
def test_quantity_keeps_the_value(value: float) -> None:
    text = quantity(value)
    if math.isfinite(value):
        assert float(text) == pytest.approx(value, rel=0.005, abs=1e-300)
        assert len(text) <= 12
    else:
        assert text in ("not a number", "infinite")


def test_empty() -> None:
    found = reduce_events([])
    assert (found.current_step, found.wall_s, found.complete, found.first_t) == (0, 0.0, False, None)
