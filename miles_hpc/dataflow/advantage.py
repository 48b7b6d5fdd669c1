"""Advantages from rewards, one number per trajectory, in float64.

What is compared are rollouts: an agent's session that branched gives several trajectories, which share the reward and
the advantage of their rollout, and count once in the group's mean.

GRPO (arXiv:2402.03300) as Miles v0.1 has it: reward minus the group's mean, divided by the group's standard
deviation plus 1e-6. The deviation is the sample one (n - 1 in the denominator), which is what torch.std computes.
Groups of one, and groups whose rewards are all equal, keep zero: there is nothing to compare.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

from miles_hpc.core.errors import UserError
from miles_hpc.core.types import GroupSummary

__all__ = ["STD_EPSILON", "group_advantages", "trajectory_advantages"]

STD_EPSILON = 1e-6


def trajectory_advantages(
    group: GroupSummary, estimator: Literal["grpo", "reinforce"] = "grpo", *, std_normalization: bool = True
) -> list[float]:
    """One advantage per trajectory of the group, in their order. Raises UserError as `group_advantages` does."""
    rollouts = group.rollouts
    values = group_advantages([t.reward for t in rollouts], estimator, std_normalization=std_normalization)
    by_rollout = {t.rollout: float(value) for t, value in zip(rollouts, values, strict=True)}
    return [by_rollout[t.rollout] for t in group.trajectories]


def group_advantages(
    rewards: npt.ArrayLike, estimator: Literal["grpo", "reinforce"] = "grpo", *, std_normalization: bool = True
) -> npt.NDArray[np.float64]:
    """Rewards [n] of one group -> advantages [n].

    `reinforce` is the reward itself, without a baseline. `std_normalization` False leaves the division out
    (Dr. GRPO, arXiv:2503.20783). Raises UserError for a reward that isn't finite.
    """
    values: npt.NDArray[np.float64] = np.asarray(rewards, dtype=np.float64)
    if values.ndim != 1 or not np.isfinite(values).all():
        raise UserError(
            f"advantages: rewards {values.tolist()}: expected a list of finite numbers; check the reward function"
        )
    if estimator == "reinforce":
        return values.copy()
    if estimator != "grpo":
        raise UserError(f"advantage_estimator '{estimator}': expected grpo or reinforce")
    if values.size < 2 or values.min() == values.max():
        return np.zeros_like(values)
    scale = float(values.std(ddof=1)) + STD_EPSILON if std_normalization else 1.0
    advantages: npt.NDArray[np.float64] = (values - values.mean()) / scale
    return advantages
