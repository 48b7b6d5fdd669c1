"""Which finished groups aren't worth training, each with a reason that statistics count by.

A filter looks at a group's summary and returns None to keep it, or one of the reasons below. Filters are pure.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from miles_hpc.core.types import GroupSummary, SampleStatus

__all__ = [
    "ABORTED",
    "EMPTY",
    "STALE",
    "ZERO_STD",
    "GroupFilter",
    "first_reason",
    "has_loss_tokens",
    "reward_nonzero_std",
    "unusable",
]

STALE = "stale"  # older at use than max_weight_staleness
ZERO_STD = "zero_std"  # all rewards equal: every GRPO advantage is zero
EMPTY = "empty"  # no sampled token
ABORTED = "aborted"  # a trajectory was ended from outside or failed: not dropped but sampled again

GroupFilter: TypeAlias = Callable[[GroupSummary], str | None]


def unusable(group: GroupSummary) -> str | None:
    """ABORTED when a trajectory has no result (Miles: check_no_aborted); such a group is tried again."""
    bad = (SampleStatus.ABORTED, SampleStatus.FAILED)
    return ABORTED if any(t.status in bad for t in group.trajectories) else None


def has_loss_tokens(group: GroupSummary) -> str | None:
    """EMPTY when no trajectory has a token to train on."""
    return None if any(t.n_loss_tokens > 0 for t in group.trajectories) else EMPTY


def reward_nonzero_std(group: GroupSummary) -> str | None:
    """ZERO_STD when all rewards are equal (Miles: check_reward_nonzero_std, DAPO's dynamic sampling).

    Optional: it makes batches of live groups only, at the price of sampling groups that nobody trains.
    """
    rewards = [t.reward for t in group.rollouts]
    return ZERO_STD if not rewards or min(rewards) == max(rewards) else None


def first_reason(group: GroupSummary, filters: tuple[GroupFilter, ...]) -> str | None:
    """The first filter's reason to drop the group, or None."""
    return next((reason for f in filters if (reason := f(group)) is not None), None)
