"""Who takes the next group, and whose turn it is."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_hpc.controller.loads import Loads, Turns
from miles_hpc.core.types import GroupPurpose
from tests.exploring import examples

TRAIN, EVAL = GroupPurpose.TRAIN, GroupPurpose.EVAL


@pytest.mark.parametrize(
    ("loads", "slots", "n", "expected"),
    [
        ({"a": 0, "b": 0}, {"a": 4, "b": 4}, 2, "a"),
        ({"a": 2, "b": 0}, {"a": 4, "b": 4}, 2, "b"),
        ({"a": 3, "b": 6}, {"a": 4, "b": 16}, 2, "b"),  # the larger share of free slots
        ({"a": 4, "b": 4}, {"a": 4, "b": 4}, 1, "a"),  # one beyond its slots: ready when one gets free
        ({"a": 4, "b": 4}, {"a": 4, "b": 4}, 2, None),
        ({"a": 0}, {"a": 4}, 100, "a"),  # nothing to do: takes a group of any size
        ({"a": 0}, {"a": 0}, 1, None),  # no engine serves
        ({}, {}, 1, None),
    ],
)
def test_the_host_with_the_largest_share_of_free_slots_takes_it(
    loads: dict[str, int], slots: dict[str, int], n: int, expected: str | None
) -> None:
    held = Loads()
    for number, (host, load) in enumerate(loads.items()):
        if load:
            held.give((TRAIN, number), host, load)
    assert held.choose(slots.items(), n) == expected


def test_pools_of_a_host_are_apart() -> None:
    held = Loads()
    held.give((EVAL, 1), "a", 4, set_aside=True)
    assert (held.load("a"), held.load("a", set_aside=True)) == (0, 4)
    assert held.choose([("a", 4)], 4, set_aside=True) is None
    assert held.choose([("a", 4)], 4) == "a"


def test_what_comes_back_from_elsewhere_changes_nothing() -> None:
    held = Loads()
    held.give((TRAIN, 1), "a", 4)
    held.give((EVAL, 1), "a", 2)  # the same number, for something else
    held.take_back((TRAIN, 1), "b")
    assert held.load("a") == 6
    held.take_back((TRAIN, 1), "a")
    held.take_back((TRAIN, 1), "a")
    assert held.load("a") == 2
    assert held.held([(TRAIN, 1), (EVAL, 1), (EVAL, 7)]) == [("a", EVAL, (1,))]
    held.lose("a")
    held.take_back((EVAL, 1), "a")
    assert held.load("a") == 0 and held.held([(EVAL, 1)]) == []


@settings(max_examples=examples(100))
@given(
    share=st.floats(0.05, 0.95),
    train_n=st.integers(1, 16),
    eval_n=st.integers(1, 16),
)
def test_turns_give_evaluations_their_share_whatever_the_sizes(share: float, train_n: int, eval_n: int) -> None:
    turns = Turns(share)
    given = {False: 0, True: 0}
    while sum(given.values()) < 4000:
        evaluation = turns.evaluations
        n = eval_n if evaluation else train_n
        turns.gave(n, evaluation=evaluation)
        given[evaluation] += n
    assert given[True] / sum(given.values()) == pytest.approx(share, abs=0.02)


def test_evaluations_go_first_and_with_a_share_of_one_always() -> None:
    assert Turns(0.1).evaluations
    turns = Turns(1.0)
    turns.gave(1000, evaluation=True)
    assert turns.evaluations
    turns.gave(1, evaluation=False)
    assert turns.evaluations
