"""Group summaries for tests of the data flow."""

from __future__ import annotations

from collections.abc import Sequence

from miles_hpc.core.types import (
    GroupPurpose,
    GroupSummary,
    PayloadRef,
    SampleStatus,
    TrajectorySummary,
    WeightVersion,
)

__all__ = ["summary"]


def summary(
    group_id: int,
    attempt: int = 0,
    version: WeightVersion | None = None,
    rewards: Sequence[float] = (0.0, 1.0),
    *,
    n_tokens: int = 10,
    status: SampleStatus = SampleStatus.COMPLETED,
    purpose: GroupPurpose = GroupPurpose.TRAIN,
) -> GroupSummary:
    """A finished group with one trajectory per reward, all sampled by `version`."""
    return GroupSummary(
        group_id=group_id,
        attempt=attempt,
        purpose=purpose,
        payload=PayloadRef(path=f"journal/spool/{group_id}", n_bytes=100, crc32=group_id),
        trajectories=tuple(
            TrajectorySummary(
                index=i,
                n_tokens=n_tokens,
                n_loss_tokens=n_tokens // 2,
                reward=reward,
                status=status,
                turns=1,
                oldest_version=version,
            )
            for i, reward in enumerate(rewards)
        ),
        duration_s=1.0,
        generation_s=1.0,
        environment_s=0.0,
        host="h1",
    )
