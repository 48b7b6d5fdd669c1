"""Where a request goes on: linear and tree, and which status refuses it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_hpc.core.types import FinishReason
from miles_hpc.rollout.session.core import Session
from miles_hpc.rollout.session.errors import BadHistory, CannotExtend, MatcherFailed, SessionError
from miles_hpc.rollout.session.history import LinearHistory, TreeHistory
from miles_hpc.rollout.session.matching import Matcher, load_matcher
from tests.fakes.session import END, OneTokenTemplate, generation, play, said

STRICT = load_matcher("strict")
TOOLS = [{"type": "function", "function": {"name": "run"}}]


def linear(max_rollback: int = 1) -> Session:
    return Session(OneTokenTemplate(), LinearHistory(STRICT, max_rollback=max_rollback))


def tree(max_turns: int = 1024) -> Session:
    return Session(OneTokenTemplate(), TreeHistory(STRICT, max_turns=max_turns))


def talk(text: str) -> list[dict[str, str]]:
    """Words as messages: those that start with a capital are the assistant's."""
    return [said(word, "assistant" if word[0].isupper() else "user") for word in text.split()]


def three_turns(session: Session) -> Session:
    for messages, answer in (("u", "A"), ("u A t", "B"), ("u A t B v", "C")):
        _, commit = play(session, talk(messages), answer)
        assert commit.turn is not None
    return session


# after u A t B v C: max_rollback, request, number of the turn it goes on from (-1: none) or status
LINEAR = [
    (1, "u A t B v C w", 2),
    (0, "u A t B v C w", 2),
    (1, "u A t B v C w x", 2),
    (1, "u A t B x", 1),  # another message in place of v
    (1, "u A t B v", 1),  # v again
    (1, "u A t B v X w", 1),  # an assistant message that wasn't sampled is prompt text
    (0, "u A t B v", 400),
    (1, "u A x", 400),
    (2, "u A x", 0),
    (2, "u", 400),
    (3, "u", -1),
    (3, "x", -1),
    (1, "x", 400),
    (1, "u A t B v C", 400),  # nothing new
    (1, "u A t B", 400),
    (3, "u A t", 0),
]


@pytest.mark.parametrize(("max_rollback", "request_text", "expected"), LINEAR)
def test_linear(max_rollback: int, request_text: str, expected: int) -> None:
    session = three_turns(linear(max_rollback))
    if expected == 400:
        with pytest.raises(BadHistory) as caught:
            session.prepare(talk(request_text))
        assert caught.value.status == 400 and "\n" not in str(caught.value)
        assert [t.number for t in session.history.turns()] == [0, 1, 2]
        return
    prepared, commit = play(session, talk(request_text), "D")
    parent = prepared.attachment.parent
    assert (-1 if parent is None else parent.number) == expected
    assert commit.turn is not None and commit.turn.number == 3
    assert [t.number for t in session.history.turns()] == [*range(expected + 1), 3]
    assert [t.number for t in session.history.leaves()] == [3]


# after u A t B v C
TREE = [
    ("u A t B v C w", 2),
    ("u A t B x", 1),
    ("u A t B v", 1),
    ("u A x", 0),
    ("u", -1),
    ("x", -1),
    ("u X t", -1),
    ("u A t X v", 0),
    ("u A t B v C", 400),
]


@pytest.mark.parametrize(("request_text", "expected"), TREE)
def test_tree(request_text: str, expected: int) -> None:
    session = three_turns(tree())
    if expected == 400:
        with pytest.raises(BadHistory, match="append at least one"):
            session.prepare(talk(request_text))
        return
    prepared, _ = play(session, talk(request_text), "D")
    parent = prepared.attachment.parent
    assert (-1 if parent is None else parent.number) == expected
    assert [t.number for t in session.history.turns()] == [0, 1, 2, 3]
    assert [t.number for t in session.history.leaves()] == ([3] if expected == 2 else [2, 3])


def test_ties_go_to_the_newest() -> None:
    session = tree()
    for _ in range(3):
        play(session, talk("u"), "A")
    assert session.prepare(talk("u A t")).attachment.parent is session.history.turns()[2]


def test_the_deepest_wins_over_the_newest() -> None:
    session = three_turns(tree())
    play(session, talk("u A t"), "B")  # number 3, a sibling of 1 with the same messages
    assert session.prepare(talk("u A t B v C w")).attachment.parent is session.history.turns()[2]
    assert session.prepare(talk("u A t B w")).attachment.parent is session.history.turns()[3]


@pytest.mark.parametrize("make", [linear, tree])
@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.ABORT])
def test_a_cut_turn_is_not_extended(make: object, reason: FinishReason) -> None:
    session: Session = make()  # type: ignore[operator]
    play(session, talk("u"), "A", [100], reason)
    with pytest.raises(CannotExtend, match="turn 0 was cut") as caught:
        session.prepare(talk("u A t"))
    assert caught.value.status == 409
    with pytest.raises(CannotExtend):
        session.prepare_after(session.history.turns()[0], talk("t"))
    _, commit = play(session, talk("u"), "B")  # its request again
    assert commit.turn is not None and commit.turn.parent is None


def test_tools_belong_to_the_prompt() -> None:
    session = linear()
    play(session, talk("u"), "A", tools=TOOLS)
    assert session.prepare(talk("u A t"), [dict(TOOLS[0])]).attachment.parent is not None
    with pytest.raises(BadHistory, match="0 tools that differ from the 1 recorded"):
        session.prepare(talk("u A t"))
    forest = tree()
    play(forest, talk("u"), "A", tools=TOOLS)
    assert forest.prepare(talk("u A t"), []).attachment.parent is None


def test_a_tree_is_bounded() -> None:
    session = tree(max_turns=3)
    waiting = session.prepare(talk("x"))
    three_turns(session)
    for request in ("u A t B v C w", "y"):
        with pytest.raises(BadHistory, match="3 turns, the most"):
            session.prepare(talk(request))
    with pytest.raises(BadHistory, match="3 turns, the most"):
        session.prepare_after(session.history.turns()[2], talk("w"))
    late = session.commit(waiting, generation([100, END]))
    assert late.turn is None and "3 turns" in late.reason


def test_a_turn_of_another_history_is_refused() -> None:
    one, other = three_turns(linear(3)), three_turns(tree())
    for session, stranger in ((one, other), (other, one)):
        with pytest.raises(BadHistory, match="another session's"):
            session.prepare_after(stranger.history.turns()[1], talk("w"))
    gone = one.history.turns()[2]
    play(one, talk("u A t B x"), "D")
    with pytest.raises(BadHistory, match="was replaced"):
        one.prepare_after(gone, talk("w"))
    with pytest.raises(BadHistory, match="takes 2 turns back"):
        session = three_turns(linear(1))
        session.prepare_after(session.history.turns()[0], talk("w"))


@pytest.mark.parametrize("make", [linear, tree])
@pytest.mark.parametrize("bad", [[], "u", None, {"role": "user"}])
def test_messages_that_are_none(make: object, bad: object) -> None:
    with pytest.raises(BadHistory, match="expected a list of at least one"):
        make().prepare(bad)  # type: ignore[operator]


def test_a_broken_matcher_records_nothing() -> None:
    for history in (LinearHistory(Matcher("odd", lambda a, b: None)), TreeHistory(Matcher("odd", lambda a, b: None))):  # type: ignore[arg-type,return-value]
        session = Session(OneTokenTemplate(), history)
        play(session, talk("u"), "A")
        with pytest.raises(MatcherFailed):
            session.prepare(talk("u A t"))
        assert len(session.history.turns()) == 1


def test_bounds_are_checked() -> None:
    with pytest.raises(ValueError, match="max_rollback -1"):
        LinearHistory(STRICT, max_rollback=-1)
    with pytest.raises(ValueError, match="max_turns 0"):
        TreeHistory(STRICT, max_turns=0)


@given(st.lists(st.tuples(st.integers(0, 30), st.sampled_from("pqr"), st.sampled_from("AB")), min_size=1, max_size=25))
def test_a_tree_finds_what_a_search_through_all_paths_finds(steps: list[tuple[int, str, str]]) -> None:
    session = tree()
    paths: dict[int, list[str]] = {}
    for back, word, answer in steps:
        base = list(paths.values())[back % len(paths)] if paths and back else []
        sent = [*base, word]
        best = max(
            (n for n, path in paths.items() if path == sent[: len(path)]),
            key=lambda n: (len(paths[n]), n),
            default=None,
        )
        prepared, commit = play(session, talk(" ".join(sent)), answer)
        parent = prepared.attachment.parent
        assert (None if parent is None else parent.number) == best
        assert commit.turn is not None
        paths[commit.turn.number] = [*sent, answer]


def test_statuses() -> None:
    assert {c.__name__: c.status for c in SessionError.__subclasses__()} == {
        "BadRequest": 400,
        "BadHistory": 400,
        "Unauthorized": 401,
        "SessionGone": 404,
        "CannotExtend": 409,
        "TooLarge": 413,
        "NoSample": 422,
        "TooMany": 429,
        "BrokenInvariant": 500,
        "MatcherFailed": 500,
        "ParserFailed": 500,
        "BadGeneration": 502,
        "EngineFailure": 502,
        "NoEngine": 503,
        "NotStored": 503,
        "OutOfTime": 504,
    }
