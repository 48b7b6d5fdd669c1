"""Advantages against the formula written out, and their invariants."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_hpc.core.errors import UserError
from miles_hpc.dataflow.advantage import group_advantages

rewards = st.lists(st.floats(-100, 100), min_size=1, max_size=16)


def test_grpo_by_hand() -> None:
    # mean 0.25, sample variance (3 * 0.25^2 + 0.75^2) / 3 = 0.25, so the deviation is 0.5
    got = group_advantages([0.0, 0.0, 1.0, 0.0])
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, np.array([-0.25, -0.25, 0.75, -0.25]) / (0.5 + 1e-6), rtol=1e-12)
    np.testing.assert_array_equal(group_advantages([0.0, 1.0], std_normalization=False), [-0.5, 0.5])


@given(rewards)
def test_grpo_is_the_formula(values: list[float]) -> None:
    got = group_advantages(values)
    n, mean = len(values), math.fsum(values) / len(values)
    if n < 2 or min(values) == max(values):
        assert not got.any()
        return
    std = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1))
    np.testing.assert_allclose(got, [(v - mean) / (std + 1e-6) for v in values], rtol=1e-6, atol=1e-6)


@given(rewards)
def test_reinforce_is_the_reward(values: list[float]) -> None:
    assert group_advantages(values, "reinforce").tolist() == values


def test_bad_rewards_are_refused() -> None:
    for bad in ([float("nan")], [1.0, float("inf")], [[1.0]]):
        with pytest.raises(UserError, match="finite numbers"):
            group_advantages(bad)
    with pytest.raises(UserError, match="advantage_estimator 'ppo'"):
        group_advantages([1.0], "ppo")  # type: ignore[arg-type]
