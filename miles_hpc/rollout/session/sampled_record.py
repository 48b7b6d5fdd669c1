"""A session's sample as the record of a trajectory: what spooling and training take."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from miles_hpc.core.types import Array, RoutedExpertsRef, SampleStatus, Trajectory, VersionSpan, WeightVersion
from miles_hpc.rollout.session.payload import WireSample

__all__ = ["SampledRecord"]


class SampledRecord:
    """As `SessionRecord`, for a sample of T tokens that a session server gave; it ends with a sampled token."""

    def __init__(self, sample: WireSample) -> None:
        self._sample = sample
        self.versions = tuple(
            VersionSpan(version=WeightVersion(term, step), start=start, end=end)
            for term, step, start, end in sample.meta.versions
        )

    @property
    def n_tokens(self) -> int:
        return len(self._sample.tokens)

    @property
    def n_sampled(self) -> int:
        """Tokens with mask 1: a branch doesn't train what another one does."""
        return int(np.count_nonzero(self._sample.loss_mask))

    def routed_experts(self) -> npt.NDArray[np.unsignedinteger] | None:
        """Rows [T - 1, moe_layers, top_k], or None."""
        return self._sample.routed_experts

    def to_trajectory(
        self,
        *,
        group_id: int,
        index: int,
        reward: float,
        status: SampleStatus,
        label: str = "",
        routed_experts: RoutedExpertsRef | None = None,
        metadata: dict[str, object] | None = None,
    ) -> Trajectory:
        """As the trainer takes it."""
        return Trajectory(
            group_id=group_id,
            index=index,
            tokens=Array.of(self._sample.tokens),
            loss_mask=Array.of(self._sample.loss_mask),
            log_probs=Array.of(self._sample.log_probs),
            versions=self.versions,
            reward=reward,
            status=status,
            turns=len(self._sample.meta.turns),
            label=label,
            routed_experts=routed_experts,
            metadata=metadata or {},
        )
