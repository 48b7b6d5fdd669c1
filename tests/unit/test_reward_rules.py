"""The rewards by name: tables of both outcomes for each rule, names, and what is refused."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_hpc.core.errors import UserError
from miles_hpc.core.registry import names
from miles_hpc.rollout.reward.rules import Graded, resolve_reward, rm_type_of
from miles_hpc.rollout.reward.words import exact_match, f1, normalized


def grade(rm_type: str, response: str, label: str | int | float, metadata: Mapping[str, Any] | None = None) -> float:
    return resolve_reward(rm_type)(response, label, metadata or {}).reward


MATHEMATICS = [
    ("math", r"so \boxed{\frac{1}{2}}", "0.5", 1),
    ("math", r"\boxed{1} no, \boxed{2}", "2", 1),
    ("math", r"\boxed{1} no, \boxed{2}", "1", 0),
    ("math", r"\boxed{12}", 12, 1),
    ("math", r"\boxed{0.25}", 0.25, 1),
    ("math", r"\boxed{5}", r"The answer is \boxed{5}.", 1),
    ("math", r"\boxed{5}", r"\boxed{5", 0),  # a label that is cut
    ("math", "the answer is 5", "5", 0),
    ("math", "", "5", 0),
    ("math", r"\boxed{}", "", 0),
    ("math", r"\boxed{5} \boxed{", "5", 0),
    ("deepscaler", r"<think>\boxed{4}</think> \boxed{5}", "5", 1),
    ("deepscaler", r"<think>\boxed{5}</think> \boxed{4}", "5", 0),
    ("deepscaler", r"<think>\boxed{5}</think> five", "5", 0),
    ("deepscaler", r"###Response: \boxed{5}", "5", 1),
    ("deepscaler", r"\boxed{5}", "5", 0),  # it never stopped thinking
    ("gemma_math", r"\boxed{5}", "5", 1),
    ("gemma_math", r"\boxed{4}<channel|>\boxed{5}", "5", 1),
    ("gemma_math", r"\boxed{5}<channel|>\boxed{4}", "5", 0),
    ("gemma_math", r"\boxed{5}<channel|>five", "5", 0),
    ("dapo", "work\nAnswer: 34", "34", 1),
    ("dapo", "work\n**Answer:** $34$", 34, 1),
    ("dapo", "Answer: 33\nAnswer: 34.", "34", 1),
    ("dapo", r"Answer: \boxed{34}", "34", 1),
    ("dapo", "Answer: 34\nAnswer: 33", "34", -1),
    ("dapo", "34", "34", -1),
    ("dapo", r"\boxed{34}", "34", -1),
    ("dapo", "Answer: 34" + " " * 300, "34", -1),  # too far from the end
    ("dapo", "", "34", -1),
]


@pytest.mark.parametrize(("rm_type", "response", "label", "expected"), MATHEMATICS)
def test_mathematics(rm_type: str, response: str, label: str | int | float, expected: float) -> None:
    graded = resolve_reward(rm_type)(response, label, {})
    assert graded.reward == expected
    assert graded.correct is (expected == 1)


PLANETS = {"choices": ["Mars", "the Moon", "Venus", "Earth"]}
CHOICES = [
    # said
    ("The answer is B.", "B", {}, 1),
    ("The answer is (b)", "B", {}, 1),
    ("Answer: **B**", "B", {}, 1),
    ("answer is: B", "B", {}, 0 + 1),
    ("The correct option is B because A is wrong", "B", {}, 1),
    ("Answer: A? No. Final answer: B", "B", {}, 1),
    ("Answer: A? No. Final answer: B", "A", {}, 0),
    ("The answer is not A. (C)", "C", {}, 1),
    ("The answer is a number", "A", {}, 0),
    ("The answer is A", "A", {}, 1),
    ("Option I like: none", "I", {}, 0),
    # boxed, marked, alone
    (r"\boxed{B}", "B", {}, 1),
    (r"The answer is A: \boxed{\text{(B)}}", "B", {}, 1),
    (r"\boxed{B. Venus}", "B", {}, 1),
    (r"\boxed{Banana}", "B", {}, 0),
    (r"\boxed{12} so B", "B", {}, 0),
    ("I think it's (C)", "C", {}, 1),
    ("**D**", "D", {}, 1),
    ("D", "D", {}, 1),
    ("A", "A", {}, 1),
    ("so B it must be", "B", {}, 1),
    ("A planet", "A", {}, 0),
    ("I say so", "I", {}, 0),
    ("don't know", "T", {"valid_letters": ["T"]}, 0),
    ("", "A", {}, 0),
    # reasoning doesn't count
    ("<think>The answer is A</think>The answer is B", "B", {}, 1),
    ("<think>The answer is B</think>It is C.", "B", {}, 0),
    # which one is right
    ("Answer: B", 1, {}, 1),
    ("Answer: A", 0, {}, 1),
    ("Answer: A", "0", {}, 1),
    ("Answer: C", "venus", PLANETS, 1),
    ("Answer: B", "Moon", PLANETS, 1),
    ("Answer: D", "ignored", {**PLANETS, "correct_letter": "d"}, 1),
    ("Answer: E", "D", PLANETS, 0),  # no valid letter
    (r"\boxed{Venus}", "C", PLANETS, 1),
    ("Moon", "B", PLANETS, 1),
    ("It could be Mars, the Moon, Venus or Earth", "C", PLANETS, 0),  # naming all is no answer
    ("Answer: Y", "Y", {"valid_letters": ["x", "y"]}, 1),
    ("Answer: B", "B", {"choices": {"A": "1", "B": "2"}}, 1),
]


@pytest.mark.parametrize(("response", "label", "metadata", "expected"), CHOICES)
def test_multiple_choice(response: str, label: str | int, metadata: dict[str, Any], expected: float) -> None:
    assert grade("gpqa", response, label, metadata) == expected


def test_a_label_that_names_no_choice_is_refused() -> None:
    for label, metadata in (("Pluto", PLANETS), ("K", {}), ("17", {}), ("", {}), ("E", PLANETS)):
        with pytest.raises(UserError, match=r"expected one of A, B.*correct_letter"):
            grade("gpqa", "Answer: A", label, metadata)


WORDS = [
    ("The Cat, sat!", "cat sat", 1.0, True),
    ("a cat", "the cat", 1.0, True),
    ("cat sat", "cat", 2 / 3, False),
    ("cat cat", "cat", 2 / 3, False),
    ("dog", "cat", 0.0, False),
    ("", "cat", 0.0, False),
    ("", "", 0.0, False),
    ("the", "a", 0.0, False),
    ("yes it is", "yes", 0.0, False),  # yes and no are right or wrong as a whole
    ("yes", "Yes.", 1.0, True),
    ("no", "yes", 0.0, False),
    ("x " * 200_000, "x", 0.0, False),
]


@pytest.mark.parametrize(("response", "label", "score", "same"), WORDS)
def test_words(response: str, label: str, score: float, same: bool) -> None:
    assert grade("f1", response, label) == pytest.approx(score)
    assert grade("exact_match", response, label) == float(same)


@given(st.text(max_size=60), st.text(max_size=60))
def test_f1_is_a_symmetric_share(a: str, b: str) -> None:
    assert 0 <= f1(a, b) <= 1
    assert f1(a, b) == f1(b, a)
    assert (f1(a, a) == 1) is bool(normalized(a)) is exact_match(a, a)


def test_the_boxed_prefix_reads_the_box_only() -> None:
    assert grade("f1", r"I say \boxed{the cat}", "cat") < 1
    assert grade("boxed_f1", r"I say \boxed{the cat}", "cat") == 1
    assert grade("boxed_f1", "the cat", "cat") == 0
    assert grade("boxed_gpqa", r"The answer is A. \boxed{B}", "B") == 1
    assert grade("boxed_exact_match", r"\boxed{no} \boxed{yes}", "yes") == 1


def test_random_rewards() -> None:
    fair = [grade("random", "r", "l") for _ in range(400)]
    assert {0.0, 1.0} == set(fair)
    fixed = [grade("deterministic_random", f"r{i}", "l") for i in range(400)]
    assert fixed == [grade("deterministic_random", f"r{i}", "l") for i in range(400)]
    assert 120 < sum(fixed) < 280
    assert fixed != [grade("deterministic_random", f"r{i}", "m") for i in range(400)]
    assert fixed[:8] == KNOWN  # the same in every process


KNOWN = [0, 0, 1, 1, 1, 1, 0, 1]


def test_all_names_of_miles_are_there_or_say_why_not() -> None:
    assert names("reward") == [
        "dapo", "deepscaler", "deterministic_random", "exact_match", "f1", "gemma_math", "gpqa", "math", "random",
    ]  # fmt: skip
    for name in names("reward"):
        assert isinstance(resolve_reward(name)("x", "1", {}), Graded)


@pytest.mark.parametrize(
    ("rm_type", "text"),
    [
        ("remote_rm", r"'remote_rm'.*service of your own.*module:function"),
        ("boxed_ifbench", r"own checkers.*expected one of dapo, "),
        ("mathh", "did you mean 'math'"),
        ("", "no reward named ''"),
        ("boxed_math", "reads the boxed answer already; use math"),
        ("boxed_dapo", "reads a line 'Answer: ...'; use dapo"),
        ("nowhere:f", "can't load nowhere:f"),
        ("math:pi", "expected a plain function"),
        ("asyncio:sleep", "expected a plain function"),
    ],
)
def test_names_that_are_refused(rm_type: str, text: str) -> None:
    with pytest.raises(UserError, match=text):
        resolve_reward(rm_type)


@pytest.mark.parametrize("label", [None, True, ["5"], {"a": 1}])
def test_labels_that_are_refused(label: Any) -> None:
    with pytest.raises(UserError, match=r"rm_type 'math': label .* expected a text or a number"):
        resolve_reward("math")(r"\boxed{5}", label, {})


def test_a_function_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_rewards.py").write_text(
        "from miles_hpc.rollout.reward.rules import Graded\n"
        "def length(response, label, metadata): return len(response) * metadata.get('scale', 1)\n"
        "def graded(response, label, metadata): return Graded(0.5, None, label)\n"
        "def wrong(response, label, metadata): return {'score': 1} if label == 'd' else float(label)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        assert grade("own_rewards:length", "four", "", {"scale": 3}) == 12
        assert grade("boxed_own_rewards:length", r"\boxed{four}", "") == 4
        assert resolve_reward("own_rewards:graded")("", 7, {}) == Graded(0.5, None, "7")
        for label in ("d", "nan", "inf"):
            with pytest.raises(UserError, match=r"'own_rewards:wrong'.*expected a finite number or a Graded"):
                grade("own_rewards:wrong", "", label)
    finally:
        sys.modules.pop("own_rewards", None)


def test_the_prompt_says_before_the_run() -> None:
    assert rm_type_of({"rm_type": " f1 "}, "math") == "f1"
    assert rm_type_of({}, "math") == "math"
    with pytest.raises(UserError, match="no rm_type for this prompt: expected one of dapo, "):
        rm_type_of({"rm_type": ""}, None)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("piece", ["9", r"\boxed{", "answer: ", "A ", "**", "(A", "answer is ", "\n", "</think>", "ı"])
def test_hostile_responses_end_soon(piece: str) -> None:
    response = piece * (3_000_000 // len(piece))
    for name in names("reward"):
        graded = resolve_reward(name)(response, "B", PLANETS)
        assert math.isfinite(graded.reward)
        assert graded.answer is None or len(graded.answer) < 300


@given(st.text(alphabet="AaBb .:*()\\{}boxedansweri\n", max_size=80), st.sampled_from("AB"))
def test_every_response_gets_a_finite_reward(response: str, label: str) -> None:
    for name in names("reward"):
        assert math.isfinite(resolve_reward(name)(response, label, PLANETS).reward)
