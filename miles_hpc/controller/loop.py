"""One term of the run: from a start plan to the end of the run, of the allocation, or of the trainer.

    gather roles ─▶ LoadState ─▶ warm start ─▶ weights to engines ─▶ evaluate ─▶ ┌─ next batch ◀── buffer ◀── GroupDone
                                                                                 │  TrainStep
                                                                                 │  StageWeights ─▶ fleet (per engine)
                                                                                 └─ every N steps: evaluate, save
| task | waits for | ended by |
|---|---|---|
| main | batch, trainer's answers | steps done, AllocationEnds, TrainerLost |
| producer | credits, free slots | end of the term |
| one per evaluation (`evaluation`) | its groups | its result, its deadline |
| one per engine (fleet) | its sync | newer version, loss |
| handlers | journal, before they acknowledge | |

Only the controller writes the journal and publishes manifests; both ask the fence first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import msgspec

from checkpoints.journal import JournalWriter, RunCompleted
from miles_hpc.controller.cleaning import archive_evaluation
from miles_hpc.controller.dispatch import Dispatcher
from miles_hpc.controller.durable import NO_SPACE, DurableJournal
from miles_hpc.controller.ending import DRAIN_S, AllocationEnds, Clock, Fence, looking_after
from miles_hpc.controller.engines import EngineFleet
from miles_hpc.controller.evaluation import Evaluations
from miles_hpc.controller.members import Members
from miles_hpc.controller.recovery import StartPlan, fresh_groups
from miles_hpc.controller.saving import Checkpoints
from miles_hpc.controller.schedule import sft_batch
from miles_hpc.controller.trainer_calls import TrainerLost, TrainerWorld
from miles_hpc.controller.training import Training
from miles_hpc.core.config import RunConfig, SiteConfig
from miles_hpc.core.deadline import Deadline
from miles_hpc.core.errors import FencedError, ProtocolError, RemoteError
from miles_hpc.core.messages import (
    Ack,
    CheckpointWritten,
    ChildEvent,
    GroupDone,
    GroupFailed,
    HostStatus,
    Message,
    RestartHost,
    RestartRole,
)
from miles_hpc.core.paths import RunPaths
from miles_hpc.core.telemetry import EventLog
from miles_hpc.core.transport import Credentials, HandlerResult, PeerIdentity
from miles_hpc.dataflow.buffer import GroupBuffer
from miles_hpc.dataflow.packing import train_items
from miles_hpc.dataflow.source import PromptSource

__all__ = ["TermLoop"]


class TermLoop:
    """See the module's picture."""

    def __init__(
        self,
        run: RunConfig,
        site: SiteConfig,
        paths: RunPaths,
        credentials: Credentials,
        plan: StartPlan,
        journal: JournalWriter,
        events: EventLog,
        *,
        oldest_incarnation: dict[str, int],
        ending: asyncio.Event,
        warned: asyncio.Event,
        remaining_s: Callable[[], float | None],
    ) -> None:
        self._run = run
        self._paths = paths
        self._plan = plan
        self._events = events
        self._clock = Clock(ending, remaining_s)
        self._warned = warned
        self._term = credentials.identity.term
        self._attempt = credentials.identity.attempt
        self._fence = Fence(paths, self._term, self._attempt)
        self._last_step = run.sft.steps + run.rollout.n_steps
        self._journal = DurableJournal(
            journal,
            fence=self._fence.check,
            patient=self._clock.has_room_to_wait,
            patience_s=run.control.step_deadline_s,
            on_full=lambda error: events.verdict("storage_full", peer="journal", evidence=str(error)),
            on_room=lambda waited_s: events.note("storage_has_room", waited_s=round(waited_s, 1)),
            on_refused=self._on_refused,
        )
        self._members = Members(
            run,
            site,
            paths,
            msgspec.structs.replace(credentials, on_newer=self._on_newer),
            events,
            oldest_incarnation=oldest_incarnation,
            on_message=self._on_message,
            on_joined=self._on_joined,
            on_lost=self._on_lost,
            on_notice=self._on_notice,
        )
        self._trainer = TrainerWorld(run, self._members)
        self._fleet = EngineFleet(
            self._members.endpoint, events, deadline_s=run.control.sync_deadline_s, changed=self._members.touch
        )
        rollout = run.rollout
        self._buffer = GroupBuffer(
            batch_groups=rollout.rollout_batch_size,
            max_admitted=round(rollout.max_admitted_batches * rollout.rollout_batch_size),
            max_staleness=rollout.max_weight_staleness,
            max_attempts=rollout.max_group_attempts,
            formed_step=max(plan.step, run.sft.steps),  # the warm start forms no batches
            term=self._term,
            forks=plan.forks,
        )
        self._taken_over = fresh_groups(plan, paths, self._buffer)
        self._source = PromptSource.resumed(plan.next_group_id, plan.pending, [g.group_id for g in self._taken_over])
        self._dispatch = Dispatcher(run, self._fleet, self._members, self._buffer, self._source, self._journal, events)
        self._evaluations = Evaluations(
            run,
            plan,
            term=self._term,
            fleet=self._fleet,
            dispatch=self._dispatch,
            members=self._members,
            journal=self._journal,
            events=events,
            step=lambda: self._step,
            archive=partial(archive_evaluation, paths, fence=self._fence.check),
        )
        self._training = Training(
            run,
            term=self._term,
            step=plan.step,
            trained_groups=plan.trained_groups,
            trainer=self._trainer,
            buffer=self._buffer,
            fleet=self._fleet,
            dispatch=self._dispatch,
            evaluations=self._evaluations,
            journal=self._journal,
            events=events,
            look=self._check_allocation,
        )
        self._checkpoints = Checkpoints(
            run,
            paths,
            plan,
            self._journal,
            events,
            term=self._term,
            attempt=self._attempt,
            live_stores=self._buffer.routing_stores,
        )
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._closing = self._adopted = False

    @property
    def _step(self) -> int:
        """Optimizer steps that are done."""
        return self._training.step

    # ------------------------------------------------------------------------------------------ the term

    async def run(self) -> None:
        """Returns when the run is complete. Raises AllocationEnds, TrainerLost, FencedError, DeadlineExpired."""
        main = asyncio.create_task(self._main())
        fence = asyncio.create_task(self._fence.watch(self._fenced))
        over = False
        try:
            await asyncio.wait({main, self._broken}, return_when=asyncio.FIRST_COMPLETED)
            # What a refused record means was decided when it was refused, whoever waited for it.
            refused = self._broken.done() and main.done() and isinstance(main.exception(), OSError)
            (main if main.done() and not refused else self._broken).result()
            over = True
        except AllocationEnds:
            over = True
            raise
        finally:
            self._closing = True
            main.cancel()
            fence.cancel()
            self._dispatch.close()
            self._evaluations.close()
            self._fleet.close()
            await self._members.close("the run ended" if over else "the term ended", shut_down=over)

    def _on_newer(self, peer: PeerIdentity) -> None:
        """A process of a newer attempt or term looked for its own controller and found this one."""
        theirs = f"{peer.name} at {peer.host} belongs to attempt {peer.attempt}, term {peer.term}"
        self._fenced(FencedError(f"{theirs}: attempt {self._attempt}, term {self._term} is over"))

    def _fenced(self, error: FencedError) -> None:
        if not self._broken.done():
            self._events.verdict("fenced", peer="controller", evidence=str(error))
            self._broken.set_exception(error)

    async def _main(self) -> None:
        run = self._run
        await self._members.open()
        await self._gather()
        await self._load()
        if self._step < run.sft.steps:
            await self._warm_start()
        await self._training.publish()
        if when := self._evaluations.before():
            await looking_after(self._look, self._evaluations.alone(when))
            await self._save(wait=False)
        await self._take_over()
        self._events.note("phase", phase="rl", first_step=self._step + 1)
        self._dispatch.start_producer(batches_left=lambda: self._last_step - self._buffer.formed_step)
        await self._evaluations.resume()
        while self._step < self._last_step:
            await looking_after(self._look, self._evaluations.begin())
            await self._training.rl_step()
            await self._save_if_due(self._step % run.checkpoint.interval_steps == 0 or self._warned.is_set())
        self._dispatch.close()
        await looking_after(self._look, self._evaluations.settle())
        if when := self._evaluations.after():
            await looking_after(self._look, self._evaluations.alone(when))
        await self._save(wait=True)
        await self._journal.append(RunCompleted(step=self._step))
        self._events.note("run_complete", trained_groups=self._training.trained_groups, steps=self._step)

    async def _gather(self) -> None:
        """Wait for the trainer and for at least one engine; more may join later."""
        deadline = Deadline(self._run.control.start_deadline_s, "waiting for the trainer and a rollout host")

        def ready() -> bool:
            return self._trainer.present and self._fleet.count() > 0

        with self._events.span("gather"):
            await looking_after(self._look, self._members.wait(ready, deadline))

    async def _load(self) -> None:
        folder = "" if self._plan.checkpoint is None else self._paths.relative(self._plan.checkpoint)
        with self._events.span("load"):
            try:
                ready = await self._trainer.load(folder, self._plan.step)
            except TrainerLost as lost:
                if isinstance(lost.__cause__, RemoteError) and lost.__cause__.kind == "IntegrityError":
                    lost.unreadable = self._plan.checkpoint
                    self._events.verdict("checkpoint_unreadable", peer=folder, evidence=str(lost)[:500])
                raise
        self._events.note(
            "run_start",
            run=self._run.name,
            n_steps=self._run.rollout.n_steps,
            sft_steps=self._run.sft.steps,
            rollout_batch_size=self._run.rollout.rollout_batch_size,
            max_weight_staleness=self._run.rollout.max_weight_staleness,
            n_parameters=ready.n_parameters,
            world_size=ready.world_size,
            step=self._step,
        )

    # ------------------------------------------------------------------------------------------ warm start

    async def _warm_start(self) -> None:
        """SFT on demonstrations that hosts play in real sandboxes; the data is drawn by the step alone."""
        sft = self._run.sft
        self._events.note("phase", phase="sft", first_step=self._step + 1)
        with self._events.span("sft_data"):
            wanted = self._dispatch.demonstrations(sft.n_demonstrations)
            demos = await looking_after(self._look, self._dispatch.collect(wanted))
        while self._step < sft.steps:
            await self._check_allocation()
            chosen = [demos[i] for i in sft_batch(len(demos), sft.batch_size, self._step + 1, self._run.seed)]
            await self._training.sft_step([item for group in chosen for item in train_items(group, [1.0])])
            await self._save_if_due(self._warned.is_set())

    # ------------------------------------------------------------------------------------------ RL

    async def _take_over(self) -> None:
        """Groups that earlier terms own already: into the buffer instead of sampling them again."""
        for summary in self._taken_over:
            await self._journal.append(*self._buffer.adopt(summary))
        self._adopted = True
        if self._taken_over:
            self._events.note("took_over", groups=len(self._taken_over), of=len(self._plan.owned))

    # ------------------------------------------------------------------------------------------ saving, ending

    async def _save_if_due(self, due: bool) -> None:
        if due and self._step < self._last_step:
            self._warned.clear()
            await self._save(wait=False)

    async def _save(self, *, wait: bool) -> None:
        """Start a checkpoint of the current step; with `wait` return when its manifest is published."""
        deadline_s = self._run.control.call_deadline_s
        with self._events.span("save", step=self._step):
            await self._checkpoints.save(
                self._step,
                groups=self._groups_at_stake,
                evaluations=self._evaluations.count,
                send=lambda message: self._trainer.call(message, Ack, deadline_s=deadline_s),
                deadline_s=deadline_s,
                wait=wait,
            )

    def _groups_at_stake(self) -> tuple[int, tuple[int, ...]]:
        """The next group id, and the ids below it that no step up to the current one has trained or ended."""
        taken_over = [] if self._adopted else [g.group_id for g in self._taken_over]
        pending = {*self._buffer.pending_ids(self._step), *self._source.state.pending, *taken_over}
        return self._source.next_group_id, tuple(sorted(pending))

    async def _check_allocation(self) -> None:
        """Drain, save and raise AllocationEnds when one more step and a save don't fit, or when told to."""
        # Both vary, and a late save is none.
        step_s, save_s = 1.5 * self._training.step_s, 2.0 * self._checkpoints.longest_s
        if self._clock.has_room_for(step_s, save_s):
            return
        self._events.note("drain", remaining_s=self._clock.remaining_s(), step_s=step_s, save_s=save_s)
        if not self._trainer.loaded:  # the trainer isn't back yet: what counts is in the newest checkpoint already
            raise AllocationEnds(f"allocation {self._attempt} ends before its trainer was ready: step {self._step}")
        await self._dispatch.drain(DRAIN_S)
        await self._save(wait=True)
        raise AllocationEnds(f"allocation {self._attempt} ends: saved step {self._step} of {self._last_step}")

    async def _look(self) -> None:
        """`_check_allocation`, but while a loaded trainer is away: its loss has a verdict of its own."""
        if not self._trainer.loaded or self._trainer.present:
            await self._check_allocation()

    def _on_refused(self, error: OSError) -> None:
        """The journal has a gap: what memory says from here on isn't on record, so the term ends with what is."""
        if self._broken.done():
            return
        if error.errno in NO_SPACE and not self._clock.has_room_to_wait():
            kept = f"step {self._checkpoints.newest_step} is the newest saved"
            self._broken.set_exception(AllocationEnds(f"the allocation ends on a full file system, {kept}: {error}"))
        else:
            self._broken.set_exception(error)

    # ------------------------------------------------------------------------------------------ messages, losses

    async def _on_message(self, peer: PeerIdentity, message: Message) -> HandlerResult:
        if isinstance(message, HostStatus):
            self._fleet.update(peer.name, message.engines)
            self._members.touch()
            self._dispatch.wake()
        elif isinstance(message, GroupDone):
            await self._dispatch.group_done(peer, message.summary)
        elif isinstance(message, GroupFailed):
            await self._dispatch.group_failed(peer, message)
        elif isinstance(message, CheckpointWritten):
            published = await self._checkpoints.written(message)
            if published is not None:
                self._buffer.commit(published)
        elif isinstance(message, ChildEvent):
            self._events.verdict(
                "child_ended", peer=f"{peer.name}/{message.child}", evidence=f"exit code {message.exit_code}"
            )
        else:
            raise ProtocolError(f"the controller doesn't take {type(message).__name__} from {peer.name}")
        return Ack()

    def _on_joined(self, peer: PeerIdentity) -> None:
        """A rollout host that joins (again) has dropped whatever it was given before."""
        if peer.role == "rollout-agent":
            self._fleet.lose_host(peer.name)
            self._dispatch.lose_host(peer.name)

    def _on_notice(self, peer: PeerIdentity, notice: str) -> None:
        """Slurm tells steps of a preemption, and not the batch script: drain and save before the steps are killed."""
        if not self._clock.ending.is_set() and not self._closing:
            self._events.note("notice", peer=peer.name, evidence=notice)
            self._clock.ending.set()

    def _on_lost(self, peer: PeerIdentity, evidence: str) -> None:
        if self._closing or self._broken.done():
            return
        if peer.role.startswith("trainer"):
            # Where one srun starts all roles, the other ranks don't end with this one.
            self._members.tell_supervisor(
                RestartRole(role="trainer", incarnation=peer.incarnation, reason=f"{peer.name}: {evidence}")
            )
            self._events.verdict("rollback", to_step=self._checkpoints.newest_step, evidence=f"{peer.name}: {evidence}")
            self._broken.set_exception(TrainerLost(f"{peer.name}: {evidence}", peer.incarnation))
        elif peer.role == "rollout-agent":
            self._fleet.lose_host(peer.name)
            self._dispatch.lose_host(peer.name)
        if peer.role in ("rollout-agent", "sandbox-agent"):
            role = peer.role.removesuffix("-agent")
            self._members.tell_supervisor(
                RestartHost(role=role, host=peer.host, incarnation=peer.incarnation, reason=f"{peer.name}: {evidence}")
            )
