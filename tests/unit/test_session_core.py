"""A session's record: prompts continue what was seen, commits happen once, samples train what was sampled."""

from __future__ import annotations

import gc
import tracemalloc
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from miles_hpc.core.types import FinishReason, SampleStatus, VersionSpan, WeightVersion
from miles_hpc.rollout.session.core import Session
from miles_hpc.rollout.session.errors import (
    BadGeneration,
    BadHistory,
    BrokenInvariant,
    NoSample,
    SessionError,
    SessionGone,
)
from miles_hpc.rollout.session.history import LinearHistory, TreeHistory
from miles_hpc.rollout.session.matching import load_matcher
from miles_hpc.rollout.session.template import Junction
from miles_hpc.rollout.session.turn import Tokens
from tests.fakes.session import END, OPEN, OTHER_END, OneTokenTemplate, generation, play, said
from tools.fuzz_session.templates import style_template

STRICT = load_matcher("strict")
U, A, T, B = said("u"), said("A", "assistant"), said("t"), said("B", "assistant")


def linear() -> Session:
    return Session(OneTokenTemplate(), LinearHistory(STRICT), session_id="s1")


def tree() -> Session:
    return Session(OneTokenTemplate(), TreeHistory(STRICT), session_id="s1")


def spans(*parts: tuple[int, int, int]) -> tuple[VersionSpan, ...]:
    return tuple(VersionSpan(version=WeightVersion(1, v), start=start, end=end) for v, start, end in parts)


# ------------------------------------------------------------------------------------------------ prompts and commits


def test_a_prompt_is_what_was_seen_and_sampled_and_the_suffix() -> None:
    session = linear()
    prepared, _ = play(session, [U], "A", [100, 101, END])
    assert prepared.input_ids().tolist() == [10, OPEN]
    prepared, _ = play(session, [U, A, T], "B", [102, END])
    assert prepared.input_ids().tolist() == [10, OPEN, 100, 101, END, 11, OPEN]
    assert prepared.new_ids.tolist() == [11, OPEN] and prepared.n_tokens == 7
    prepared = session.prepare([U, A, T, B, said("v")])
    assert prepared.input_ids().tolist() == [10, OPEN, 100, 101, END, 11, OPEN, 102, END, 12, OPEN]


def test_a_trimmed_token_is_in_no_later_prompt() -> None:
    session = linear()
    play(session, [U], "A", [100, OTHER_END])
    prepared, _ = play(session, [U, A, T], "B", [101, OTHER_END])
    assert prepared.input_ids().tolist() == [10, OPEN, 100, END, 11, OPEN]
    [sample] = session.samples()
    assert sample.tokens.tolist() == [10, OPEN, 100, END, 11, OPEN, 101, OTHER_END]
    assert sample.loss_mask.tolist() == [0, 0, 1, 0, 0, 0, 1, 1]
    assert sample.log_probs.tolist() == [0, 0, -1, 0, 0, 0, -1, -2]
    assert sample.versions == spans((1, 2, 3), (1, 6, 8))


def test_preparing_changes_nothing() -> None:
    session = linear()
    play(session, [U], "A")
    play(session, [U, A, T], "B")
    session.prepare([U, A, said("x")])  # would take a turn back
    assert [t.number for t in session.history.turns()] == [0, 1]
    assert session.prepare([U, A, T, B, said("v")]).attachment.parent is session.history.turns()[1]


def test_committing_twice_records_once() -> None:
    for session in (linear(), tree()):
        prepared, first = play(session, [U], "A")
        again = session.commit(prepared, generation([100, END]), said("other", "assistant"))
        assert again is first and len(session.history.turns()) == 1
        with pytest.raises(BadGeneration, match="committed before, with other tokens"):
            session.commit(prepared, generation([101, END]))


def test_replaced_turns_are_let_go() -> None:
    session = linear()
    _, first = play(session, [U], "A")
    gone = weakref.ref(first)
    del first, _
    play(session, [U], "B")
    gc.collect()
    assert gone() is None


def test_the_linear_point_moves_and_siblings_do_not_mind() -> None:
    for session, recorded in ((linear(), 1), (tree(), 2)):
        one, two = session.prepare([U]), session.prepare([U])
        assert session.commit(two, generation([100, END])).turn is not None
        late = session.commit(one, generation([101, END]))
        assert len(session.history.turns()) == recorded
        assert (late.turn is None) is (recorded == 1)
        if late.turn is None:
            assert late.reason == "another turn was recorded meanwhile"
            assert session.commit(one, generation([101, END])) is late


def test_a_closed_session_records_nothing() -> None:
    session = linear()
    waiting = session.prepare([U])
    session.close()
    late = session.commit(waiting, generation([100, END]))
    assert late.turn is None and late.reason == "the session is closed"
    with pytest.raises(SessionGone, match="session s1 is closed") as caught:
        session.prepare([U])
    assert caught.value.status == 404
    assert session.samples() == []


def test_what_was_recorded_before_the_end_can_still_be_had() -> None:
    session = linear()
    prepared, first = play(session, [U], "A")
    session.close()
    assert session.commit(prepared, generation([100, END])) is first
    assert len(session.samples()) == 1


def nested(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


def test_deep_nesting_is_the_clients_fault(tmp_path: Path) -> None:
    _, template = style_template("chatml", tmp_path)
    session = Session(template, TreeHistory(STRICT))
    with pytest.raises(BadHistory, match="nested too deeply"):
        session.prepare([said("u", name=nested(5000))])
    with pytest.raises(BadHistory, match="nested too deeply"):
        session.prepare([U], [{"function": nested(5000)}])
    session.commit(session.prepare([U]), generation([4, 5]), A | {"tool_calls": nested(3)})
    for sent in (A | {"tool_calls": nested(5000)}, A | {"content": nested(5000)}):
        with pytest.raises(SessionError):
            session.prepare([U, sent, T])
    assert len(session.history.turns()) == 1


def test_another_sessions_prompt_is_refused() -> None:
    one, other = linear(), linear()
    prepared = one.prepare([U])
    other.prepare([U])
    with pytest.raises(BrokenInvariant, match="another session's"):
        other.commit(prepared, generation([100, END]))
    assert other.history.turns() == []


def test_nothing_sampled_is_nothing_recorded() -> None:
    session = linear()
    commit = session.commit(session.prepare([U]), generation([], FinishReason.ABORT))
    assert commit.turn is None and commit.reason == "nothing was sampled"
    assert session.history.turns() == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"log_probs": np.zeros(1, np.float32)}, "2 tokens but 1 log-probs"),
        ({"versions": ()}, "end at token 0 of 2"),
        ({"versions": spans((1, 1, 2))}, "in order"),
        ({"versions": spans((1, 0, 1), (2, 1, 3))}, "end at token 3 of 2"),
    ],
)
def test_contradictory_generations(changes: dict[str, Any], message: str) -> None:
    session = linear()
    prepared = session.prepare([U])
    with pytest.raises(BadGeneration, match=message) as caught:
        session.commit(prepared, generation([100, END], **changes))
    assert caught.value.status == 502
    assert session.commit(prepared, generation([100, END])).turn is not None  # a good answer is still taken


def test_messages_of_the_caller_are_copied() -> None:
    session = linear()
    user, answer = said("u"), said("A", "assistant", tool_calls=[{"function": {"name": "run", "arguments": "{}"}}])
    tools: list[Any] = [{"function": {"name": "run"}}]
    session.commit(session.prepare([user], tools), generation([100, END]), answer)
    user["content"] = "changed"
    answer["tool_calls"][0]["function"]["name"] = "changed"
    tools[0]["function"]["name"] = "changed"
    [turn] = session.history.turns()
    assert turn.messages[0] == U and turn.messages[1]["tool_calls"][0]["function"]["name"] == "run"
    assert turn.tools == [{"function": {"name": "run"}}]


def test_arrays_are_the_records_own() -> None:
    session = linear()
    given = generation([100, END])
    _, commit = session.prepare([U]), session.commit(session.prepare([U]), given)
    assert commit.turn is not None
    given.output_ids[0] = 7
    assert commit.turn.output_ids.tolist() == [100, END]
    with pytest.raises(ValueError, match="read-only"):
        commit.turn.output_ids[0] = 7


def test_without_a_message_the_text_is_recorded(tmp_path: Path) -> None:
    tokenizer, template = style_template("chatml", tmp_path)
    session = Session(template, LinearHistory(STRICT))
    ids = [*(tokenizer.encode(c)[0] for c in "done"), tokenizer.stop_ids[0]]  # not as the tokenizer would split it
    commit = session.commit(session.prepare([U]), generation(ids))
    assert commit.turn is not None and commit.turn.messages[-1] == {"role": "assistant", "content": "done"}
    prepared = session.prepare([U, {"role": "assistant", "content": "done"}, T])
    assert prepared.input_ids().tolist()[-len(ids) - len(prepared.new_ids) : -len(prepared.new_ids)] == ids


@pytest.mark.parametrize(("drop", "message"), [(2, "would drop 2 .* at most 1"), (-1, "drop -1")])
def test_a_template_that_drops_too_much_is_stopped(drop: int, message: str) -> None:
    class Dropping(OneTokenTemplate):
        def junction(self, sampled: Tokens, suffix: list[int]) -> Junction:
            return Junction(drop, suffix)

    session = Session(Dropping(), LinearHistory(STRICT))
    play(session, [U], "A", [100, 101, END])
    with pytest.raises(BrokenInvariant, match=message) as caught:
        session.prepare([U, A, T])
    assert caught.value.status == 500


def test_a_template_that_adds_nothing_is_stopped() -> None:
    class Silent(OneTokenTemplate):
        def junction(self, sampled: Tokens, suffix: list[int]) -> Junction:
            return Junction(0, [])

    session = Session(Silent(), LinearHistory(STRICT))
    play(session, [U], "A")
    with pytest.raises(BrokenInvariant, match="give no tokens"):
        session.prepare([U, A, T])


# ------------------------------------------------------------------------------------------------ samples


def forked() -> Session:
    """root (u A), then siblings t B and x C after it, and y D after t B."""
    session = tree()
    play(session, [U], "A", [100, END])
    play(session, [U, A, T], "B", [101, END])
    play(session, [U, A, said("x")], "C", [102, 103, END])
    play(session, [U, A, T, B, said("y")], "D", [104, END])
    return session


def tokens_and_masks(session: Session, *arguments: Any, **options: Any) -> list[tuple[list[int], list[int]]]:
    return [(s.tokens.tolist(), s.loss_mask.tolist()) for s in session.samples(*arguments, **options)]


SHARED = [10, OPEN, 100, END]


def test_a_shared_completion_is_trained_once() -> None:
    session = forked()
    assert tokens_and_masks(session) == [
        ([*SHARED, 12, OPEN, 102, 103, END], [0, 0, 1, 1, 0, 0, 1, 1, 1]),  # recorded first: it trains the root
        ([*SHARED, 11, OPEN, 101, END, 13, OPEN, 104, END], [0, 0, 0, 0, 0, 0, 1, 1, 0, 0, 1, 1]),
    ]
    c, d = session.samples()
    assert c.log_probs.tolist() == [0, 0, -1, -2, 0, 0, -1, -2, -3]
    assert d.log_probs.tolist() == [0, 0, 0, 0, 0, 0, -1, -2, 0, 0, -1, -2]
    assert d.versions == spans((1, 6, 8), (1, 10, 12))
    assert [turn.number for turn in d.path] == [0, 1, 3]


def test_truncation_is_by_whole_turns_and_drops_paths_without_anything_to_train() -> None:
    session = forked()
    # 9 tokens: the younger path ends after B; 8: the older ends after the root, which it trains; 3: nothing fits.
    assert [(len(t), sum(m)) for t, m in tokens_and_masks(session, 9)] == [(9, 5), (8, 2)]
    assert [(len(t), sum(m)) for t, m in tokens_and_masks(session, 8)] == [(4, 2), (8, 2)]
    assert [(len(t), sum(m)) for t, m in tokens_and_masks(session, 4)] == [(4, 2)]
    assert tokens_and_masks(session, 3) == []
    assert [s.status for s in session.samples(9)] == [SampleStatus.COMPLETED, SampleStatus.TRUNCATED]
    with pytest.raises(NoSample, match="max_seq_len 0") as caught:
        session.samples(0)
    assert caught.value.status == 422


def test_retries_may_be_left_out() -> None:
    session = tree()
    for answer, token in (("A", 100), ("B", 101), ("C", 102)):
        play(session, [U], answer, [token, END])
    assert [t[-2] for t, _ in tokens_and_masks(session)] == [100, 101, 102]
    assert [t[-2] for t, _ in tokens_and_masks(session, drop_retries=True)] == [102]


def test_versions_are_by_token_and_join_only_where_tokens_do() -> None:
    session = linear()
    first = generation([100, 101, END], versions=spans((1, 0, 1), (2, 1, 3)))
    session.commit(session.prepare([U]), first, A)
    session.commit(session.prepare([U, A, T]), generation([102, END], versions=spans((2, 0, 2))), B)
    [sample] = session.samples()
    assert sample.versions == spans((1, 2, 3), (2, 3, 5), (2, 7, 9))


@pytest.mark.parametrize(
    ("reason", "status"),
    [
        (FinishReason.STOP, SampleStatus.COMPLETED),
        (FinishReason.LENGTH, SampleStatus.TRUNCATED),
        (FinishReason.ABORT, SampleStatus.ABORTED),
    ],
)
def test_status_and_trajectory(reason: FinishReason, status: SampleStatus) -> None:
    session = linear()
    session.commit(session.prepare([U]), generation([100, 101], reason), A, routed_experts="rows 0 to 3")
    [sample] = session.samples()
    assert sample.status is status and sample.routed_experts == ("rows 0 to 3",)
    trajectory = sample.trajectory(group_id=3, index=1, reward=0.5)
    assert trajectory.tokens.numpy().tolist() == [10, OPEN, 100, 101] and trajectory.tokens.dtype == "int32"
    assert trajectory.loss_mask.numpy().tolist() == [0, 0, 1, 1] and trajectory.loss_mask.dtype == "uint8"
    assert trajectory.log_probs.numpy().tolist() == [0, 0, -1, -2] and trajectory.log_probs.dtype == "float32"
    assert (trajectory.group_id, trajectory.index, trajectory.reward, trajectory.turns) == (3, 1, 0.5, 1)


# ------------------------------------------------------------------------------------------------ cost


def grown(turns: int, tokens: int) -> Session:
    session = tree()
    session.history.max_turns = turns + 1000  # type: ignore[attr-defined]
    ids = [*range(200, 200 + tokens - 1), END]
    turn = session.commit(session.prepare([U]), generation(ids), A).turn
    for _ in range(turns - 1):
        assert turn is not None
        turn = session.commit(session.prepare_after(turn, [T]), generation(ids), A).turn
    return session


def peak_bytes(session: Session, ids: Sequence[int]) -> int:
    turn = session.history.turns()[-1]
    answer = generation(ids)
    tracemalloc.start()
    try:
        for _ in range(20):
            assert turn is not None
            turn = session.commit(session.prepare_after(turn, [T]), answer, A).turn
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_turn_costs_its_own_tokens_whatever_the_history() -> None:
    ids = [*range(50), END]
    short, long = grown(10, 100), grown(660, 100)
    assert long.history.turns()[-1].n_tokens > 64_000
    peak_bytes(short, ids)
    assert peak_bytes(long, ids) < 2 * peak_bytes(short, ids) < 400_000
    # A copy of the long history alone would be 256 kB a turn.
