"""Optimizer steps of a term: from groups that are owned to weights that engines follow.

buffer.form_batch ─▶ journal ─▶ TrainStep ─▶ StepDone in the journal ─▶ StageWeights ─▶ fleet ─▶ metrics
     ▲                                                                                   │
     └──────────── groups that hosts announce meanwhile, credits given back ◀────────────┘
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence

from checkpoints.journal import StepDone
from miles_hpc.controller.dispatch import Dispatcher
from miles_hpc.controller.durable import DurableJournal
from miles_hpc.controller.engines import EngineFleet
from miles_hpc.controller.evaluation import Evaluations
from miles_hpc.controller.measure import batch_metrics, sync_metrics
from miles_hpc.controller.schedule import rl_lr, sft_lr
from miles_hpc.controller.trainer_calls import StepOutcome, TrainerWorld
from miles_hpc.core.config import RunConfig
from miles_hpc.core.deadline import Deadline
from miles_hpc.core.telemetry import EventLog
from miles_hpc.core.types import WeightVersion
from miles_hpc.dataflow.advantage import trajectory_advantages
from miles_hpc.dataflow.buffer import Batch, GroupBuffer
from miles_hpc.dataflow.packing import TrainItem, train_items

__all__ = ["Training"]

_LOOK_S = 0.5


class Training:
    """Where the term stands, and how it gets one step further. Belongs to the controller's event loop."""

    def __init__(
        self,
        run: RunConfig,
        *,
        term: int,
        step: int,
        trained_groups: int,
        trainer: TrainerWorld,
        buffer: GroupBuffer,
        fleet: EngineFleet,
        dispatch: Dispatcher,
        evaluations: Evaluations,
        journal: DurableJournal,
        events: EventLog,
        look: Callable[[], Awaitable[None]],
    ) -> None:
        """`look` looks after the allocation while a batch is awaited, and raises when the term has to end."""
        self._run = run
        self._term = term
        self._trainer = trainer
        self._buffer = buffer
        self._fleet = fleet
        self._dispatch = dispatch
        self._evaluations = evaluations
        self._journal = journal
        self._events = events
        self._look = look
        self.step = step  # optimizer steps that are done
        self.step_s = 0.0  # what one takes, with long ones remembered for a while
        self.trained_groups = trained_groups

    @property
    def version(self) -> WeightVersion:
        """The trainer's weights."""
        return WeightVersion(self._term, self.step)

    async def publish(self) -> None:
        """Stage the current weights, score the probe batch with them, and let the fleet follow."""
        with self._events.span("stage", step=self.step):
            staged, probe = await self._trainer.stage(self.version)
        self._fleet.want(staged, probe)

    async def sft_step(self, items: Sequence[TrainItem]) -> None:
        """One step of the warm start. Raises what `TrainerWorld.train` raises."""
        started = time.monotonic()
        lr = sft_lr(self._run.sft, self.step + 1)
        outcome = await self._train("sft", items, lr)
        self._tell(outcome, {"train/lr": lr}, started)

    async def rl_step(self) -> None:
        """Wait for a batch, train it, publish the weights. Raises as `sft_step`; DeadlineExpired without a batch."""
        step, started = self.step + 1, time.monotonic()
        held_up_s = self._evaluations.take_waited_s()  # before this step could begin
        with self._events.span("wait_batch", step=step):
            batch = await self._next_batch()
        waited_s = time.monotonic() - started
        values = batch_metrics(batch) | sync_metrics(self._fleet.take_records())
        values |= {
            "perf/wait_batch_time": waited_s,
            "buffer/live": self._buffer.live,
            "data/dropped_total": sum(self._buffer.dropped.values()),
            "train/lr": rl_lr(self._run.train, step - self._run.sft.steps),
        }
        outcome = await self._train("grpo", self._items(batch), values["train/lr"])
        await self._journal.append(StepDone(step=step, version=(self._term, step)))
        self.trained_groups += len(self._buffer.trained(step))
        await self._evaluations.before_staging(step)
        began = time.monotonic()
        await self.publish()
        values["perf/stage_time"] = time.monotonic() - began
        values["perf/wait_eval_time"] = held_up_s + self._evaluations.take_waited_s()
        self._dispatch.wake()
        self._tell(outcome, values, started, held_up_s)

    async def _next_batch(self) -> Batch:
        """The oldest groups that fit under the staleness cap; waits for them."""
        deadline = Deadline(self._run.control.step_deadline_s, f"waiting for the batch of step {self.step + 1}")
        while True:
            await self._look()
            self._dispatch.check()
            self._evaluations.check()
            batch, records = self._buffer.form_batch(self.version)
            for record in records:
                reason = getattr(record, "reason", None)
                if reason is not None:
                    self._events.verdict("dropped", group_id=getattr(record, "group_id", None), reason=reason)
            await self._journal.append(*records)
            self._dispatch.wake()
            if batch is not None:
                return batch
            deadline.check()
            await self._dispatch.wait_owned(_LOOK_S)

    def _items(self, batch: Batch) -> list[TrainItem]:
        train = self._run.train
        items: list[TrainItem] = []
        for group in batch.groups:
            advantages = trajectory_advantages(
                group, train.advantage_estimator, std_normalization=train.grpo_std_normalization
            )
            items += train_items(group, advantages)
        return items

    async def _train(self, loss: str, items: Sequence[TrainItem], lr: float) -> StepOutcome:
        step = self.step + 1
        with self._events.span("train_step", step=step):
            outcome = await self._trainer.train(step, loss, items, lr)
        self.step = step
        return outcome

    def _tell(self, outcome: StepOutcome, values: dict[str, float], started: float, held_up_s: float = 0.0) -> None:
        step_s = time.monotonic() - started
        self.step_s = max(0.9 * self.step_s, step_s)
        values |= outcome.values
        values |= {"perf/step_time": held_up_s + step_s, "data/trained_groups_total": self.trained_groups}
        self._events.metric(self.step, {k: float(f"{v:.6g}") for k, v in values.items()})
