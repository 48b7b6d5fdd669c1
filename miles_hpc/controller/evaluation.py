"""Evaluations of a term: before and after RL while training stands still, and every few steps beside it.

    step done ─▶ begin ─▶ EvaluationBegun ─▶ groups beside training groups ─▶ Evaluated ─▶ note, metrics
                   │                                   │
                   └ too many under way: wait, or skip └ failed, too late, weights gone ─▶ EvaluationSkipped

**Which weights.** The evaluation of step s is one of the version (term, s), and its result says so.

| engines | tokens are sampled by |
|---|---|
| standing still: before and after RL | s alone |
| set aside (eval.engines_per_host) | s alone: these engines get no other version until the next evaluation begins |
| shared with training | s or newer: the result has the newest version and the share of tokens that s sampled |

| task | waits for | ended by |
|---|---|---|
| main, in `begin` | room among eval.max_in_flight (backpressure) | an evaluation's end: each has eval.deadline_s |
| main, in `before_staging` | engines set aside that fetch what staging would remove | control.sync_deadline_s |
| one per evaluation beside training | its groups | result, failure, eval.deadline_s |

**After a cut.** What was begun and has no outcome on record is done again when the term starts from that very step;
otherwise its weights are gone, and it is skipped with the reason `cut`. What is told to people
follows the record: there is no note of a result that a later term doesn't know of.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from checkpoints.journal import Evaluated, EvaluationBegun, EvaluationSkipped
from miles_hpc.controller.dispatch import Dispatcher
from miles_hpc.controller.durable import DurableJournal
from miles_hpc.controller.engines import EngineFleet
from miles_hpc.controller.eval_result import result_of
from miles_hpc.controller.members import Members
from miles_hpc.controller.recovery import StartPlan
from miles_hpc.controller.schedule import evaluation_steps
from miles_hpc.core.config import RunConfig
from miles_hpc.core.deadline import Deadline
from miles_hpc.core.errors import DeadlineExpired, FencedError, MilesError
from miles_hpc.core.messages import GenerateGroup
from miles_hpc.core.telemetry import EventLog
from miles_hpc.core.types import GroupSummary, WeightVersion
from miles_hpc.dataflow.evaluation import evaluation_group
from miles_hpc.weights.broadcast import KEPT_VERSIONS

__all__ = ["Evaluations"]

_LOOK_S = 0.5


class _GivenUp(MilesError):
    """An evaluation that won't come to its end; `reason` is a word for statistics."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class Evaluations:
    """See the module's picture. Belongs to the controller's event loop."""

    def __init__(
        self,
        run: RunConfig,
        plan: StartPlan,
        *,
        term: int,
        fleet: EngineFleet,
        dispatch: Dispatcher,
        members: Members,
        journal: DurableJournal,
        events: EventLog,
        step: Callable[[], int],
        archive: Callable[[WeightVersion, Sequence[GroupSummary]], int],
    ) -> None:
        """`step` tells how many optimizer steps are done now.

        `archive` keeps the trajectories of an evaluation and returns the bytes that they take. It runs in a thread; a
        failure (OSError, ValueError, MilesError but for FencedError) costs these trajectories and nothing else.
        """
        self._run = run
        self._term = term
        self._fleet = fleet
        self._dispatch = dispatch
        self._members = members
        self._journal = journal
        self._events = events
        self._step = step
        self._archive = archive
        self._set_aside = run.eval.engines_per_host > 0
        self._evaluated = set(plan.evaluated)
        self._outcome_known = set(plan.evaluated | plan.skipped)
        self._cut = set(plan.cut)
        self._under_way: dict[int, asyncio.Task[None]] = {}
        self._broken: BaseException | None = None
        self._waited_s = 0.0

    @property
    def count(self) -> int:
        """Evaluations of the run with a result."""
        return len(self._evaluated)

    @property
    def under_way(self) -> tuple[int, ...]:
        """Steps whose evaluations beside training aren't over."""
        return tuple(self._under_way)

    def take_waited_s(self) -> float:
        """How long training has waited for evaluations since the last call."""
        taken, self._waited_s = self._waited_s, 0.0
        return taken

    def check(self) -> None:
        """Raise what ended an evaluation that should have ended by itself: a fence, storage, a defect."""
        if self._broken is not None:
            raise self._broken

    def close(self) -> None:
        """End those under way; what they have is lost, and that they were begun is on record."""
        for task in self._under_way.values():
            task.cancel()

    # ------------------------------------------------------------------------------------------ standing still

    def before(self) -> str:
        """What the evaluation at the start of RL is called; "" when none is due."""
        run, step = self._run, self._step()
        due = run.eval.n_episodes and step == run.sft.steps and step not in self._outcome_known
        if not due or (run.rollout.n_steps and run.eval.skip_eval_before_train):
            return ""
        return "before" if run.rollout.n_steps else "sft_only"

    def after(self) -> str:
        """What the evaluation at the end of RL is called; "" when none is due."""
        run = self._run
        due = run.eval.n_episodes and run.rollout.n_steps and self._step() not in self._outcome_known
        return "after" if due else ""

    async def alone(self, when: str) -> None:
        """Evaluate the current weights on engines that hold exactly these, with nobody else on them.

        Raises DeadlineExpired when engines don't get them, and ProtocolError for a group that failed too often.
        """
        step = self._step()
        version = WeightVersion(self._term, step)
        deadline = Deadline(self._run.control.sync_deadline_s, f"waiting for an engine that holds {version}")
        if self._set_aside:
            self._fleet.pin()
        began = time.monotonic()

        def synced() -> bool:
            holding = self._fleet.serving(version, set_aside=self._set_aside)
            return len(holding) == self._fleet.count(set_aside=self._set_aside) > 0

        with self._events.span("eval", step=step):
            await self._members.wait(synced, deadline)
            groups = await self._dispatch.collect(self._groups(version))
        await self._tell(groups, version, when, began)

    # ------------------------------------------------------------------------------------------ beside training

    async def resume(self) -> None:
        """Settle what an earlier term began: see "After a cut"."""
        again = self._step() if self._due() else None
        for step in sorted(self._cut - {again}):
            await self._skip(step, "cut", "the run was cut meanwhile, and goes on from other weights")

    async def begin(self) -> None:
        """Start the evaluation of the current weights if one is due now; with backpressure wait for room first."""
        self.check()
        if not self._due():
            return
        step, chosen = self._step(), self._run.eval
        if len(self._under_way) >= chosen.max_in_flight:
            if chosen.overflow_policy == "skip":
                under_way = ", ".join(map(str, self._under_way))
                await self._skip(step, "overflow", f"evaluations of steps {under_way} are still under way")
                return
            with self._waiting(step):
                while len(self._under_way) >= chosen.max_in_flight:
                    await asyncio.wait(self._under_way.values(), return_when=asyncio.FIRST_COMPLETED)
                    self.check()
        await self._journal.append(EvaluationBegun(step=step))
        version = self._fleet.pin() if self._set_aside else WeightVersion(self._term, step)
        task = asyncio.create_task(self._beside(version), name=f"evaluation of {version}")
        self._under_way[step] = task
        task.add_done_callback(lambda ended: self._ended(step, ended))

    async def before_staging(self, step: int) -> None:
        """Call it before weights `step` are staged: the trainer then lets go of what engines may still be fetching."""
        if not self._set_aside or not any(step - evaluated >= KEPT_VERSIONS for evaluated in self._under_way):
            return

        def settled() -> bool:
            lost = self._fleet.count(set_aside=True) == 0
            return self._fleet.pin_held or lost or not self._under_way

        if settled():
            return
        deadline = Deadline(self._run.control.sync_deadline_s, "waiting for engines that are set aside to be synced")
        with self._waiting(step):
            try:
                await self._members.wait(settled, deadline)
            except DeadlineExpired as error:  # the evaluation ends with `weights_gone`; training goes on
                self._events.verdict("eval_not_synced", evidence=str(error))

    async def settle(self) -> None:
        """Wait for those under way; each has its deadline."""
        while self._under_way:
            await asyncio.wait(self._under_way.values())
        self.check()

    @contextmanager
    def _waiting(self, step: int) -> Iterator[None]:
        began = time.monotonic()
        try:
            with self._events.span("wait_eval", step=step):
                yield
        finally:
            self._waited_s += time.monotonic() - began

    def _due(self) -> bool:
        run, step = self._run, self._step()
        if not run.eval.n_episodes or step in self._outcome_known or step in self._under_way:
            return False
        return step in evaluation_steps(run.sft.steps, run.rollout.n_steps, run.eval.interval)

    async def _beside(self, version: WeightVersion) -> None:
        began = time.monotonic()
        wanted = self._groups(version)
        try:
            with self._events.span("eval", step=version.step):
                groups = await self._supervised(wanted, version)
        except FencedError:
            raise
        except MilesError as error:
            reason = error.reason if isinstance(error, _GivenUp) else "failed"
            await self._dispatch.abandon([(m.purpose, m.group_id) for m in wanted], f"evaluation skipped: {reason}")
            await self._skip(version.step, reason, str(error))
            return
        await self._tell(groups, version, "during", began)

    async def _supervised(self, wanted: Sequence[GenerateGroup], version: WeightVersion) -> list[GroupSummary]:
        """Collect them, while there are time and engines. Raises MilesError."""
        deadline = Deadline(self._run.eval.deadline_s, f"the evaluation of {version}")
        task = asyncio.create_task(self._dispatch.collect(wanted, beside_training=True))
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=min(_LOOK_S, deadline.remaining_s))
                if task.done():
                    break
                if deadline.expired:
                    raise _GivenUp("deadline", str(deadline.error()))
                if self._set_aside and not self._fleet.pin_lasts:
                    raise _GivenUp("weights_gone", f"no engine that is set aside holds {version}, or can still get it")
            return task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def _ended(self, step: int, task: asyncio.Task[None]) -> None:
        del self._under_way[step]
        self._members.touch()
        if not task.cancelled() and task.exception() is not None:
            self._broken = task.exception()

    # ------------------------------------------------------------------------------------------ what is told

    def _groups(self, version: WeightVersion) -> list[GenerateGroup]:
        n = self._run.eval.n_episodes
        return [
            evaluation_group(
                self._run,
                number,
                group_id=version.step * n + number,  # of its own: two evaluations may be under way
                set_aside=self._set_aside,
                at_least=version,
            )
            for number in range(n)
        ]

    async def _tell(self, groups: Sequence[GroupSummary], version: WeightVersion, when: str, began: float) -> None:
        result = result_of(
            groups,
            run=self._run,
            step=version.step,
            when=when,
            version=version,
            lag_steps=self._step() - version.step,
            duration_s=time.monotonic() - began,
        )

        def tell() -> None:
            self._evaluated.add(result.step)
            self._events.note("evaluation", **result.facts)
            self._events.metric(result.step, result.metrics)

        await self._record(result.record, tell)
        try:
            n_bytes = await asyncio.to_thread(self._archive, version, groups)
        except FencedError:
            raise
        except (OSError, ValueError, MilesError) as error:  # refused, gone, or not what was announced
            self._events.verdict("eval_not_archived", step=version.step, evidence=f"{type(error).__name__}: {error}")
        else:
            self._events.note("eval_archived", step=version.step, n_bytes=n_bytes)

    async def _skip(self, step: int, reason: str, evidence: str) -> None:
        def tell() -> None:
            self._events.verdict("evaluation_skipped", step=step, reason=reason, evidence=evidence[:500])
            self._events.metric(step, {f"eval/skipped_{reason}": 1.0})

        await self._record(EvaluationSkipped(step=step, reason=reason), tell)

    async def _record(self, outcome: Evaluated | EvaluationSkipped, tell: Callable[[], None]) -> None:
        """Journal an outcome and then tell it, also when this task is cancelled meanwhile: both happen or neither."""
        written = asyncio.ensure_future(self._journal.append(outcome))

        def done(finished: asyncio.Future[None]) -> None:
            if not finished.cancelled() and finished.exception() is None:
                self._outcome_known.add(outcome.step)
                tell()

        written.add_done_callback(done)
        await asyncio.shield(written)
