"""The trainer world as the controller calls it: load, train a step, stage weights, score.

Anything but the expected answer means that the world is lost (TrainerLost), and with it everything since the newest
checkpoint: there is no half-known state to repair. The supervisor is asked to start it again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from miles_hpc.controller.engines import Probe
from miles_hpc.controller.members import TRAINER_RANK0, Members
from miles_hpc.core.config import RunConfig
from miles_hpc.core.errors import DeadlineExpired, FencedError, MilesError, PeerLost, ProtocolError, RemoteError
from miles_hpc.core.messages import (
    LoadState,
    Message,
    RestartRole,
    ScoreTokens,
    StageWeights,
    StepDone,
    TrainerReady,
    TrainStep,
    WeightsStaged,
)
from miles_hpc.core.transport import Reply
from miles_hpc.core.types import ModelShape, WeightVersion
from miles_hpc.dataflow.packing import TrainItem, plan_batch

__all__ = ["StepOutcome", "TrainerLost", "TrainerWorld"]

M = TypeVar("M", bound=Message)

_PROBE_TOKENS = 64


class TrainerLost(MilesError):
    """The trainer's world is gone or unusable, and with it everything since the last checkpoint."""

    def __init__(self, text: str, incarnation: int) -> None:
        super().__init__(text)
        self.incarnation = incarnation
        self.unreadable: Path | None = None  # the checkpoint whose files aren't what its manifest says


@dataclass(frozen=True)
class StepOutcome:
    """What the trainer answered to a step."""

    done: StepDone
    skipped: int  # trajectories that were left out because their advantage is zero
    train_s: float

    @property
    def values(self) -> dict[str, float]:
        """Its part of the step's metrics."""
        return {
            "perf/train_time": self.train_s,
            **self.done.metrics,
            **{f"perf/{name}": seconds for name, seconds in self.done.phases_s.items()},
            "train/skipped_zero_advantage": self.skipped,
            "routing/replayed_positions": self.done.replayed_positions,
            "routing/recorded_positions": self.done.recorded_positions,
        }


class TrainerWorld:
    """Rank 0 of the trainer, which takes the commands of its world. Belongs to the controller's event loop."""

    def __init__(self, run: RunConfig, members: Members) -> None:
        self._run = run
        self._members = members
        self._incarnation = 0
        self._ready: TrainerReady | None = None

    @property
    def present(self) -> bool:
        """Whether it is connected."""
        return self._members.endpoint(TRAINER_RANK0) is not None

    @property
    def loaded(self) -> bool:
        """Whether it has state that could be saved."""
        return self._ready is not None

    @property
    def shape(self) -> ModelShape:
        """The model's. Call it after `load`."""
        assert self._ready is not None
        return self._ready.shape

    async def call(
        self, message: Message, reply: type[M] | None, *, deadline_s: float, payload: bytes = b""
    ) -> tuple[M, memoryview]:
        """Its answer, and the payload behind it; `reply` None takes any. Raises TrainerLost, FencedError."""
        endpoint = self._members.endpoint(TRAINER_RANK0)
        if endpoint is None:
            raise TrainerLost("the trainer's rank 0 is gone", self._incarnation)
        self._incarnation = endpoint.peer.incarnation
        try:
            answer: Reply = await endpoint.call(message, payload=[payload] if payload else (), deadline_s=deadline_s)
        except PeerLost as error:
            raise TrainerLost(str(error), endpoint.peer.incarnation) from error
        except (DeadlineExpired, RemoteError) as error:
            if isinstance(error, RemoteError) and error.kind == "FencedError":
                raise FencedError(error.text) from error
            restart = RestartRole(role="trainer", incarnation=endpoint.peer.incarnation, reason=str(error)[:500])
            self._members.tell_supervisor(restart)
            raise TrainerLost(str(error), endpoint.peer.incarnation) from error
        if reply is not None and not isinstance(answer.message, reply):
            raise ProtocolError(f"the trainer answered {type(answer.message).__name__} to {type(message).__name__}")
        return answer.message, answer.payload  # type: ignore[return-value]

    async def load(self, folder: str, step: int) -> TrainerReady:
        """Have it load the checkpoint in `folder`, relative to the run directory ("": afresh), which is of `step`."""
        deadline_s = self._run.control.start_deadline_s
        ready, _ = await self.call(
            LoadState(checkpoint=folder, deadline_s=deadline_s), TrainerReady, deadline_s=deadline_s
        )
        if ready.step != step:
            raise ProtocolError(f"the trainer loaded step {ready.step}; the manifest says {step}")
        self._ready = ready
        return ready

    async def train(self, step: int, loss: str, items: Sequence[TrainItem], lr: float) -> StepOutcome:
        """Train step `step` with these trajectories; `loss` is sft or grpo."""
        assert self._ready is not None
        train = self._run.train
        skip = loss == "grpo" and not train.entropy_coef and not (train.use_kl_loss and train.kl_loss_coef)
        packed = plan_batch(
            items,
            n_ranks=self._ready.world_size,
            row_tokens=train.row_tokens,
            max_tokens_per_microbatch=train.max_tokens_per_microbatch,
            skip_zero_advantage=skip,
        )
        message = TrainStep(
            step=step,
            loss=loss,
            lr=lr,
            microbatches=packed.microbatches,
            total_loss_tokens=packed.total_loss_tokens,
            routing_replay=loss == "grpo" and self._run.rollout.routing_replay and self.shape.n_experts > 0,
            deadline_s=self._run.control.step_deadline_s,
        )
        began = time.monotonic()
        done, _ = await self.call(message, StepDone, deadline_s=message.deadline_s)
        return StepOutcome(done, packed.skipped, time.monotonic() - began)

    async def stage(self, version: WeightVersion) -> tuple[WeightsStaged, Probe | None]:
        """Make the current weights fetchable as `version`, and score the probe batch with them."""
        deadline_s = self._run.control.sync_deadline_s
        message = StageWeights(version=version, deadline_s=deadline_s)
        staged, _ = await self.call(message, WeightsStaged, deadline_s=deadline_s)
        return staged, await self._score_probe()

    async def _score_probe(self) -> Probe | None:
        n = self._run.train.probe_sequences
        if n == 0:
            return None
        length = min(_PROBE_TOKENS, self._run.rollout.max_trajectory_tokens, self.shape.max_position_embeddings)
        tokens = np.random.default_rng((self._run.seed, 17)).integers(0, self.shape.vocab_size, (n, length), np.int32)
        _, payload = await self.call(
            ScoreTokens(n=n, length=length),
            None,
            deadline_s=self._run.control.call_deadline_s,
            payload=tokens.tobytes(),
        )
        return Probe(tokens, np.frombuffer(payload, np.float32).reshape(n, length - 1).copy())
