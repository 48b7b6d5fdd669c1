"""Learning rates, the order of the warm start's data, when to evaluate: pure functions of the step."""

from __future__ import annotations

import numpy as np

from miles_hpc.core.config import SftConfig, TrainConfig

__all__ = ["evaluation_steps", "rl_lr", "sft_batch", "sft_lr"]


def sft_lr(config: SftConfig, step: int) -> float:
    """Learning rate of warm-start step `step` (1-based): linear warmup, constant, then linear decay to lr_min_ratio."""
    warmup = min(1.0, step / max(1, config.lr_warmup_steps))
    start = config.lr_decay_from * config.steps
    if step <= start:
        return config.lr * warmup
    left = (config.steps - step + 1) / max(1.0, config.steps - start)
    return config.lr * min(warmup, max(config.lr_min_ratio, left))


def rl_lr(config: TrainConfig, step: int) -> float:
    """Learning rate of RL step `step` (1-based): linear warmup, then constant."""
    return config.lr * min(1.0, step / max(1, config.lr_warmup_steps))


def evaluation_steps(sft_steps: int, n_steps: int, interval: int) -> range:
    """Steps with an evaluation beside training: every `interval` RL steps, strictly between the ends of RL. 0: none."""
    return range(sft_steps + interval, sft_steps + n_steps, interval) if interval else range(0)


def sft_batch(n_items: int, batch_size: int, step: int, seed: int) -> list[int]:
    """Indices of warm-start step `step` (1-based): consecutive parts of seeded permutations, one per pass.

    Raises ValueError when there is nothing to draw from.
    """
    if n_items < 1:
        raise ValueError("no demonstrations to draw a batch from")
    first = (step - 1) * batch_size
    indices: list[int] = []
    for position in range(first, first + batch_size):
        epoch, offset = divmod(position, n_items)
        indices.append(int(np.random.default_rng((seed, epoch)).permutation(n_items)[offset]))
    return indices
