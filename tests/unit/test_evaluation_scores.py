"""Evaluations in numbers: pass@k against counting all choices, scores by table, and what a run asks for."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_hpc.core.types import GroupPurpose, SampleStatus, WeightVersion
from miles_hpc.dataflow.evaluation import Outcome, evaluation_group, pass_at_k, pass_ks, score
from tests.exploring import examples
from tests.unit.runs import make_run

DONE, CUT = SampleStatus.COMPLETED, SampleStatus.TRUNCATED


@pytest.mark.parametrize("n", range(1, 9))
def test_pass_at_k_is_the_share_of_choices_with_a_solution(n: int) -> None:
    for c in range(n + 1):
        for k in range(1, n + 1):
            choices = list(combinations([True] * c + [False] * (n - c), k))
            expected = Fraction(sum(any(choice) for choice in choices), len(choices))
            assert pass_at_k(n, c, k) == pytest.approx(float(expected), abs=1e-12)


@settings(max_examples=examples(200))
@given(data=st.data(), n=st.integers(1, 4000))
def test_pass_at_k_stays_a_chance_and_grows_with_k_and_c(data: st.DataObject, n: int) -> None:
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    value = pass_at_k(n, c, k)
    assert 0.0 <= value <= 1.0
    assert value <= pass_at_k(n, min(n, c + 1), k) + 1e-12
    assert value <= pass_at_k(n, c, min(n, k + 1)) + 1e-12


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 1, 5), (4, 1, 0), (0, 0, 1)])
def test_pass_at_k_of_impossible_numbers_is_an_error(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match=f"pass@{k} from {c} of {n}"):
        pass_at_k(n, c, k)


@pytest.mark.parametrize(
    ("n", "expected"), [(0, ()), (1, (1,)), (2, (1, 2)), (3, (1, 2)), (4, (1, 2, 4)), (15, (1, 2, 4, 8))]
)
def test_the_k_are_powers_of_two(n: int, expected: tuple[int, ...]) -> None:
    assert pass_ks(n) == expected


def test_scores_of_prompts() -> None:
    prompts = [
        [Outcome(1.0, DONE, "a"), Outcome(0.0, DONE, "a")],
        [Outcome(0.0, CUT, "b"), Outcome(0.5, DONE, "b")],
        [Outcome(1.0, DONE, "a"), Outcome(1.0, DONE, "a")],
    ]
    scores = score(prompts, success_reward=1.0)
    assert (scores.n, scores.n_samples) == (3, 2)
    assert scores.mean == pytest.approx(3.5 / 6)
    assert scores.by_label == {"a": 0.75, "b": 0.25}
    assert scores.pass_at == {1: pytest.approx(0.5), 2: pytest.approx(2 / 3)}
    assert scores.truncated_ratio == pytest.approx(1 / 6)
    assert scores.failed_ratio == 0.0
    assert score(prompts, success_reward=0.5).pass_at[2] == 1.0
    broken = [[Outcome(0.0, SampleStatus.FAILED), Outcome(1.0, DONE)]]
    assert score(broken, success_reward=1.0).failed_ratio == 0.5


def test_a_prompt_that_has_fewer_trajectories_bounds_k() -> None:
    scores = score([[Outcome(1.0, DONE)] * 4, [Outcome(0.0, DONE)] * 2], success_reward=1.0)
    assert (scores.n_samples, sorted(scores.pass_at)) == (2, [1, 2])


@pytest.mark.parametrize("prompts", [[], [[]]])
def test_nothing_scores_zero(prompts: list[list[Outcome]]) -> None:
    scores = score(prompts, success_reward=1.0)
    assert (scores.n, scores.mean, scores.by_label, scores.pass_at, scores.truncated_ratio) == (0, 0.0, {}, {}, 0.0)


def test_every_evaluation_asks_for_the_same_tasks_and_seeds() -> None:
    run = make_run("eval.n_episodes=4", "eval.n_samples_per_eval_prompt=3", "eval.temperature=0.5", "eval.top_p=0.9")
    first = evaluation_group(run, 2)
    later = evaluation_group(run, 2, group_id=42, set_aside=True, at_least=WeightVersion(1, 10))
    assert (first.group_id, later.group_id) == (2, 42)
    assert (first.prompt, first.seed, first.sampling) == (later.prompt, later.seed, later.sampling)
    assert first.purpose is GroupPurpose.EVAL and first.n_samples == 3
    assert (first.sampling.temperature, first.sampling.top_p) == (0.5, 0.9)
    assert evaluation_group(run, 3).prompt.seed != first.prompt.seed
    assert (later.set_aside, later.at_least) == (True, WeightVersion(1, 10))


@pytest.mark.parametrize(("own", "expected"), [(0, 16), (5, 5)])
def test_an_evaluation_may_have_turns_of_another_length(own: int, expected: int) -> None:
    run = make_run(f"eval.max_tokens_per_turn={own}", "rollout.max_tokens_per_turn=16")
    assert evaluation_group(run, 0).sampling.max_new_tokens == expected
