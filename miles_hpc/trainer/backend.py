"""The training contract: what a backend does for one rank of the trainer world.

Every rank of the world calls every method in the same order (lock-step); arguments are equal on all ranks unless
said otherwise. A backend owns the model, the optimizer and its own process groups. Nothing here talks to other roles.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from miles_hpc.core.messages import TrainStep
from miles_hpc.core.types import ModelShape

__all__ = ["HostTensor", "SaveHandle", "StepResult", "TrainBackend"]


@dataclass(frozen=True)
class HostTensor:
    """A full, unsharded tensor in host memory, as engines want it (Hugging Face name and layout)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview  # C-contiguous bytes


@dataclass(frozen=True)
class StepResult:
    """Of one optimizer step, equal on all ranks."""

    metrics: dict[str, float]
    phases_s: dict[str, float] = field(default_factory=dict)
    replayed_positions: int = 0
    recorded_positions: int = 0


class SaveHandle(ABC):
    """An asynchronous save under way on this rank."""

    @abstractmethod
    def done(self) -> bool:
        """Whether this rank's part is on storage; never blocks."""

    @abstractmethod
    def result(self) -> dict[str, int]:
        """Names and sizes of the files that this rank wrote. Blocks; raises what the save raised."""

    def crc32(self) -> dict[str, int]:
        """CRC-32 of the same files once `done`; without one a file is only checked by its size before it is read."""
        return {}


class TrainBackend(ABC):
    """One rank's training implementation."""

    shape: ModelShape
    n_parameters: int

    @abstractmethod
    def load(self, checkpoint: Path | None) -> int:
        """Initialise from the run file, then from a checkpoint when there is one. Returns the steps done."""

    @abstractmethod
    def train_step(self, message: TrainStep) -> StepResult:
        """One optimizer step over `message.microbatches[rank]`."""

    @abstractmethod
    def score(self, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        """Log-probs of tokens[:, 1:]: [n, length] -> [n, length - 1], float32, temperature 1. Equal on all ranks."""

    @abstractmethod
    def export_weights(self) -> Iterable[HostTensor]:
        """Full tensors in a fixed order, gathered one at a time. Rank 0 gets data; other ranks get empty data."""

    @abstractmethod
    def save(self, folder: Path) -> SaveHandle:
        """Copy the state and write it in the background: weights, optimizer, RNG of each rank, step counter."""

    @abstractmethod
    def close(self) -> None:
        """Finish saves and leave the process groups."""
