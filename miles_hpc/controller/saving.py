"""Checkpoints of the run: the trainer writes its files, the controller adds its part and publishes the manifest last.

    begin(step) ─▶ trainer copies its state (Ack), goes on ─▶ CheckpointWritten ─▶ fence ─▶ COMPLETE ─▶ retention

What the manifest says about groups is captured in `begin`, together with the journal position that it belongs to.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass

import msgspec

from checkpoints.journal import CheckpointPublished
from checkpoints.manifest import (
    Counters,
    FileEntry,
    JournalPosition,
    Manifest,
    extend_lineage,
    list_checkpoints,
    plan_retention,
    publish_manifest,
    read_manifest,
    remove_checkpoints,
)
from miles_hpc.control.terms import check_newest
from miles_hpc.controller.cleaning import clean_behind
from miles_hpc.controller.durable import DurableJournal
from miles_hpc.controller.recovery import StartPlan
from miles_hpc.core.config import RunConfig
from miles_hpc.core.deadline import Deadline
from miles_hpc.core.errors import DeadlineExpired, IntegrityError
from miles_hpc.core.messages import CheckpointWritten, SaveCheckpoint
from miles_hpc.core.paths import RunPaths
from miles_hpc.core.telemetry import EventLog

__all__ = ["Checkpoints"]


@dataclass
class _Draft:
    manifest: Manifest
    began: float
    done: asyncio.Future[None]


class Checkpoints:
    """Saves of one term, one at a time."""

    def __init__(
        self,
        run: RunConfig,
        paths: RunPaths,
        plan: StartPlan,
        journal: DurableJournal,
        events: EventLog,
        *,
        term: int,
        attempt: int,
        live_stores: Callable[[], Collection[str]],
    ) -> None:
        """`live_stores` names the routing stores that groups which aren't trained yet refer to."""
        self._run = run
        self._paths = paths
        self._journal = journal
        self._events = events
        self._term = term
        self._attempt = attempt
        self._live_stores = live_stores
        self._base = () if plan.manifest is None else plan.manifest.lineage
        self._in_use = () if plan.checkpoint is None else (plan.checkpoint,)
        self._draft: _Draft | None = None
        self.newest_step = plan.step if plan.manifest is not None else -1
        self.newest_evaluations = 0 if plan.manifest is None else plan.manifest.counters.evaluations
        self.longest_s = 1.0

    async def save(
        self,
        step: int,
        *,
        groups: Callable[[], tuple[int, tuple[int, ...]]],
        evaluations: int,
        send: Callable[[SaveCheckpoint], Awaitable[object]],
        deadline_s: float,
        wait: bool,
    ) -> None:
        """Start a checkpoint of `step` after the one before it; with `wait` return when its manifest is published.

        `groups` tells the next group id and the pending ones, `send` has the trainer write. When the newest checkpoint
        is of this step already, only the number of evaluations in it is brought up to date. Raises what the save before
        raised, DeadlineExpired, and what `send` raises.
        """
        await self.settle(Deadline(deadline_s, "waiting for the save before this one"))
        if self.newest_step == step:
            if self.newest_evaluations != evaluations:
                await self.amend(evaluations)
            return
        while not self._journal.idle:  # what the manifest says of groups belongs to one journal position
            await self._journal.flush()
        next_group_id, pending = groups()
        message = self.begin(
            step, next_group_id=next_group_id, pending=pending, evaluations=evaluations, deadline_s=deadline_s
        )
        await send(message)
        if wait:
            await self.settle(Deadline(deadline_s, f"waiting for checkpoint {message.folder}"))

    def begin(
        self, step: int, *, next_group_id: int, pending: tuple[int, ...], evaluations: int, deadline_s: float
    ) -> SaveCheckpoint:
        """Capture what the manifest of `step` will say, and make its folder. Call it while the journal is idle."""
        folder = self._paths.checkpoint(self._term, step)
        folder.mkdir(parents=True, exist_ok=True)
        sft_steps = min(step, self._run.sft.steps)
        manifest = Manifest(
            run=self._run.name,
            term=self._term,
            step=step,
            attempt=self._attempt,
            lineage=extend_lineage(self._base, self._term, step),
            counters=Counters(
                next_group_id=next_group_id,
                pending=pending,
                phase="sft" if step < self._run.sft.steps else "rl",
                sft_steps=sft_steps,
                evaluations=evaluations,
            ),
            journal=JournalPosition(term=self._term, offset=self._journal.offset),
            files={},
        )
        self._draft = _Draft(manifest, time.monotonic(), asyncio.get_running_loop().create_future())
        return SaveCheckpoint(step=step, folder=self._paths.relative(folder), deadline_s=deadline_s)

    async def written(self, message: CheckpointWritten) -> int | None:
        """The trainer's files are there: publish. Returns the step, or None for a save that nobody waits for."""
        draft = self._draft
        if draft is None or draft.manifest.step != message.step:
            return None
        try:
            if message.error:
                raise IntegrityError(
                    f"checkpoint of step {message.step}: the trainer could not write it: {message.error}"
                )
            manifest = _with_files(draft.manifest, message)
            await asyncio.to_thread(
                publish_manifest,
                self._paths.root / message.folder,
                manifest,
                self._check,
            )
            await self._journal.append(CheckpointPublished(step=message.step, folder=message.folder))
        except Exception as error:
            self._draft = None
            if not draft.done.done():
                draft.done.set_exception(error)
                draft.done.exception()  # a waiter sees it; without one it is told here only
            self._events.verdict("save_failed", peer="trainer", evidence=f"{type(error).__name__}: {error}")
            raise
        took_s = time.monotonic() - draft.began
        self.longest_s = max(self.longest_s, took_s)
        self.newest_step = message.step
        self.newest_evaluations = manifest.counters.evaluations
        n_bytes = sum(message.files.values())
        self._events.note("checkpoint", step=message.step, n_bytes=n_bytes, duration_s=round(took_s, 3))
        self._draft = None
        draft.done.set_result(None)
        await asyncio.to_thread(self._clean, manifest, self._live_stores())
        return message.step

    async def settle(self, deadline: Deadline) -> None:
        """Wait for the save under way, if any. Raises what it raised, and DeadlineExpired."""
        draft = self._draft
        if draft is None:
            return
        try:
            await asyncio.wait_for(asyncio.shield(draft.done), deadline.remaining_s)
        except TimeoutError as error:
            raise DeadlineExpired(str(deadline.error())) from error

    async def amend(self, evaluations: int) -> None:
        """Publish the newest manifest of this term again, with one more evaluation counted in it."""
        folder = self._paths.checkpoint(self._term, self.newest_step)
        if not folder.exists():  # the checkpoint that this term started from belongs to an older term
            return
        manifest = read_manifest(folder)
        counters = msgspec.structs.replace(manifest.counters, evaluations=evaluations)
        manifest = msgspec.structs.replace(manifest, counters=counters)
        await asyncio.to_thread(publish_manifest, folder, manifest, self._check)
        self.newest_evaluations = evaluations

    def _check(self) -> None:
        check_newest(self._paths, self._term, self._attempt)

    def _clean(self, manifest: Manifest, live_stores: Collection[str]) -> None:
        """Remove what no restart can need any more. The checkpoint that this term started from stays meanwhile."""
        payloads, stores = clean_behind(
            self._paths,
            manifest,
            max_staleness=self._run.rollout.max_weight_staleness,
            live_stores=live_stores,
            fence=self._check,
        )
        self._events.note("cleaned", step=manifest.step, payloads=payloads, routing_stores=stores)
        found = list_checkpoints(self._paths.checkpoints)
        plan = plan_retention(found, keep=self._run.checkpoint.keep, current_term=self._term, in_use=self._in_use)
        self._check()
        remove_checkpoints(plan)


def _with_files(manifest: Manifest, written: CheckpointWritten) -> Manifest:
    files = {name: FileEntry(n_bytes=size, crc32=written.crc32.get(name)) for name, size in written.files.items()}
    return msgspec.structs.replace(manifest, files=files)
