"""Numbers of a step and of an evaluation, under Miles' names where it has them: pure functions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from miles_hpc.controller.engines import SyncRecord
from miles_hpc.core.types import GroupSummary, SampleStatus
from miles_hpc.dataflow.buffer import Batch

__all__ = ["batch_metrics", "eval_summary", "sync_metrics"]


def eval_summary(groups: Sequence[GroupSummary]) -> tuple[float, dict[str, float]]:
    """Mean reward over all rollouts, and by label. 0 and {} without any."""
    by_label: dict[str, list[float]] = defaultdict(list)
    for group in groups:
        for trajectory in group.rollouts:
            by_label[trajectory.label].append(trajectory.reward)
    rewards = [r for values in by_label.values() for r in values]
    mean = float(np.mean(rewards)) if rewards else 0.0
    return mean, {label: float(np.mean(values)) for label, values in sorted(by_label.items())}


def batch_metrics(batch: Batch) -> dict[str, float]:
    """What the sampled batch tells: reward, staleness, lengths."""
    trajectories = [t for group in batch.groups for t in group.trajectories]
    rollouts = [t for group in batch.groups for t in group.rollouts]
    mean, by_label = eval_summary(batch.groups)
    same = [len({t.reward for t in group.trajectories}) == 1 for group in batch.groups]
    metrics = {
        "rollout/raw_reward": mean,
        "rollout/staleness_mean": float(np.mean(batch.staleness)),
        "rollout/staleness_max": float(max(batch.staleness)),
        "rollout/response_length": float(np.mean([t.n_loss_tokens for t in trajectories])),
        "rollout/total_lengths": float(np.mean([t.n_tokens for t in trajectories])),
        "rollout/trajectories_per_rollout": len(trajectories) / len(rollouts),
        "rollout/turns": float(np.mean([t.turns for t in trajectories])),
        "rollout/truncated_ratio": float(np.mean([t.status is SampleStatus.TRUNCATED for t in rollouts])),
        "rollout/zero_std_ratio": float(np.mean(same)),
        "rollout/generation_s": float(sum(g.generation_s for g in batch.groups)),
        "rollout/environment_s": float(sum(g.environment_s for g in batch.groups)),
        "rollout/group_duration_s": float(np.mean([g.duration_s for g in batch.groups])),
    }
    return metrics | {f"rollout/reward/{label}": value for label, value in by_label.items()}


def sync_metrics(records: Sequence[SyncRecord]) -> dict[str, float]:
    """What the syncs since the last step tell."""
    if not records:
        return {}
    metrics = {
        "perf/sync_time": float(np.mean([r.total_s for r in records])),
        "perf/sync_pause_time": float(np.mean([r.paused_s for r in records])),
        "sync/engines": float(len({r.engine for r in records})),
    }
    probes = [r.probe_abs_diff_mean for r in records if r.probe_abs_diff_mean is not None]
    if probes:
        metrics["sync/probe_logprob_abs_diff_mean"] = float(max(probes))
    return metrics
