"""Giving work to rollout hosts and taking it back: training groups through the buffer, other episodes beside it.

    source ─▶ buffer.admit ─▶ start(host) ─▶ GenerateGroup ─▶ … ─▶ GroupDone ─▶ buffer.own ─▶ journal ─▶ Ack

`loads` says which host has room, and whose turn it is while evaluations wait beside training. Demonstrations and
evaluations have ids of their own and their groups are not journaled: they change nothing that is trained twice or lost.

| task | waits for | ended by |
|---|---|---|
| producer | credits, room, its turn | `close` |
| one per `collect` | room, its turn, its groups | all of them, one that failed too often, cancellation |
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec

from checkpoints.journal import GroupDropped, GroupSetAside
from miles_hpc.controller.durable import DurableJournal
from miles_hpc.controller.engines import EngineFleet
from miles_hpc.controller.loads import Key, Loads, Turns
from miles_hpc.controller.members import Members
from miles_hpc.core.config import RunConfig
from miles_hpc.core.errors import MilesError, ProtocolError
from miles_hpc.core.messages import AbortGroups, GenerateGroup, GroupFailed
from miles_hpc.core.telemetry import EventLog
from miles_hpc.core.transport import PeerIdentity
from miles_hpc.core.types import GroupPurpose, GroupSummary, Prompt, SamplingParams, WeightVersion
from miles_hpc.dataflow.buffer import GroupBuffer
from miles_hpc.dataflow.source import PromptSource, derive_seed

__all__ = ["Dispatcher"]

_SIDE_ATTEMPTS = 5
_CALL_S = 10.0
_POLL_S = 0.2


@dataclass
class _Side:
    """A group that isn't trained: a demonstration, or a prompt of an evaluation."""

    message: GenerateGroup
    beside_training: bool
    attempt: int = 0
    host: str = ""  # "" while it waits
    summary: GroupSummary | None = None
    failure: str = ""

    @property
    def key(self) -> Key:
        return self.message.purpose, self.message.group_id

    @property
    def waits(self) -> bool:
        return self.summary is None and not self.host


class Dispatcher:
    """One term's hand-outs. Belongs to the controller's event loop."""

    def __init__(
        self,
        run: RunConfig,
        fleet: EngineFleet,
        members: Members,
        buffer: GroupBuffer,
        source: PromptSource,
        journal: DurableJournal,
        events: EventLog,
    ) -> None:
        self._run = run
        self._fleet = fleet
        self._members = members
        self._buffer = buffer
        self._source = source
        self._journal = journal
        self._events = events
        self._side: dict[Key, _Side] = {}
        self._loads = Loads()
        self._turns = Turns(run.eval.slot_share)
        self._wakes: set[asyncio.Event] = set()  # one of each task that hands out
        self._owned = asyncio.Event()
        self._producer: asyncio.Task[None] | None = None

    # ------------------------------------------------------------------------------------------ training groups

    def start_producer(self, batches_left: Callable[[], int]) -> None:
        """From now on keep the buffer's credits in use. `batches_left` are the batches still to be formed."""
        self._producer = asyncio.create_task(self._produce(batches_left))

    def close(self) -> None:
        """Hand out nothing more."""
        if self._producer is not None:
            self._producer.cancel()
            self._producer = None

    def check(self) -> None:
        """Raise what ended the producer, if anything did."""
        if self._producer is not None and self._producer.done():
            self._producer.result()

    def wake(self) -> None:
        """Something changed: credits, engines, versions."""
        for event in self._wakes:
            event.set()

    async def wait_owned(self, timeout_s: float) -> None:
        """Return when a group became owned, or after `timeout_s`."""
        await _wait(self._owned, timeout_s)
        self._owned.clear()

    async def drain(self, timeout_s: float) -> None:
        """Hand out nothing more, and take what comes in within `timeout_s`; the rest is sampled again later."""
        self.close()
        end = asyncio.get_running_loop().time() + timeout_s
        while self._buffer.generating() and asyncio.get_running_loop().time() < end:
            await self.wait_owned(0.1)

    async def _produce(self, batches_left: Callable[[], int]) -> None:
        with self._awake() as changed:
            while True:
                changed.clear()
                oldest = self._fleet.oldest_step()
                if oldest is not None:
                    for group_id in self._source.take(self._buffer.grants(oldest, batches_left=batches_left())):
                        self._buffer.admit(group_id)
                for group_id, _ in self._buffer.waiting:
                    evaluations_wait = self._evaluations_wait()
                    host = self._free_host(self._run.rollout.n_samples_per_prompt)
                    if host is None or (evaluations_wait and self._turns.evaluations):
                        break
                    attempt = self._buffer.start(group_id, host)
                    message = self._message(GroupPurpose.TRAIN, group_id, attempt)
                    if not await self._give(host, message):
                        self._buffer.hand_back(group_id, attempt)
                    elif evaluations_wait:
                        self._turns.gave(message.n_samples, evaluation=False)
                        self.wake()
                await _wait(changed, _POLL_S)

    async def group_done(self, peer: PeerIdentity, summary: GroupSummary) -> None:
        """Own a finished group; returns (and thereby acknowledges) after the journal has it."""
        self._loads.take_back((summary.purpose, summary.group_id), peer.name)
        if summary.purpose is not GroupPurpose.TRAIN:
            side = self._side.get((summary.purpose, summary.group_id))
            if side is not None and side.summary is None:
                side.summary = summary
        else:
            records = self._buffer.own(summary)
            for record in records:
                if isinstance(record, GroupDropped | GroupSetAside):
                    self._events.verdict("dropped", group_id=record.group_id, reason=record.reason)
            if records:
                await self._journal.append(*records)
            else:  # told again, it may be, while its record still waits for room
                await self._journal.flush()
            self._owned.set()
        self.wake()

    async def group_failed(self, peer: PeerIdentity, message: GroupFailed) -> None:
        """A host gave a group up."""
        purpose = message.purpose
        self._loads.take_back((purpose, message.group_id), peer.name)
        self._events.verdict("group_failed", peer=peer.name, group_id=message.group_id, evidence=message.reason)
        if purpose is GroupPurpose.TRAIN:
            records = self._buffer.fail(message.group_id, message.attempt, message.reason)
            if records:
                self._events.verdict("set_aside", group_id=message.group_id, reason=message.reason)
            await self._journal.append(*records)
        else:
            side = self._side.get((purpose, message.group_id))
            if side is not None and side.attempt == message.attempt and side.summary is None:
                self._retry(side, message.reason)
        self.wake()

    def lose_host(self, host: str) -> None:
        """What the host was at work on waits again."""
        self._loads.lose(host)
        self._buffer.lose_host(host)
        for side in self._side.values():
            if side.host == host and side.summary is None:
                self._retry(side, f"{host} lost")
        self.wake()

    # ------------------------------------------------------------------------------------------ other episodes

    async def collect(self, messages: Sequence[GenerateGroup], *, beside_training: bool = False) -> list[GroupSummary]:
        """Have these groups made, none of them for training; returns them in the same order.

        `beside_training` they take turns with training groups, unless they are for engines that are set aside. Raises
        ProtocolError for a group that failed too often. What hosts still have when this ends early plays on: see
        `abandon`.
        """
        wanted = [_Side(message, beside_training and not message.set_aside) for message in messages]
        self._side |= {side.key: side for side in wanted}
        try:
            with self._awake() as changed:
                while any(side.summary is None for side in wanted):
                    changed.clear()
                    await self._hand_out(wanted)
                    await _wait(changed, _POLL_S)
        finally:
            for side in wanted:
                self._side.pop(side.key, None)
        return [side.summary for side in wanted if side.summary is not None]

    async def _hand_out(self, wanted: Sequence[_Side]) -> None:
        for side in wanted:
            if not side.waits:
                continue
            message = side.message
            if side.attempt >= _SIDE_ATTEMPTS:
                what = f"{message.purpose} group {message.group_id}"
                raise ProtocolError(f"{what} failed {side.attempt} times: {side.failure}")
            training_waits = side.beside_training and self._training_waits()
            host = self._free_host(
                message.n_samples,
                needs_engine=message.purpose is not GroupPurpose.DEMO,
                set_aside=message.set_aside,
                at_least=message.at_least,
            )
            if host is None or (training_waits and not self._turns.evaluations):
                return
            side.host = host
            if not await self._give(host, msgspec.structs.replace(message, attempt=side.attempt)):
                side.host = ""
            elif training_waits:
                self._turns.gave(message.n_samples, evaluation=True)
                self.wake()

    def demonstrations(self, n: int) -> list[GenerateGroup]:
        """The first n demonstrations of the warm start, for `collect`."""
        return [self._message(GroupPurpose.DEMO, number, 0) for number in range(n)]

    async def abandon(self, groups: Collection[Key], reason: str) -> None:
        """Tell hosts to forget groups that nobody waits for any more. One that isn't reached plays them to the end."""
        for host, purpose, ids in self._loads.held(groups):
            endpoint = self._members.endpoint(host)
            if endpoint is None:
                continue
            try:
                await endpoint.call(AbortGroups(group_ids=ids, reason=reason, purpose=purpose), deadline_s=_CALL_S)
            except MilesError as error:
                self._events.verdict("refused", peer=host, evidence=str(error))
                continue
            for group_id in ids:
                self._loads.take_back((purpose, group_id), host)
        self.wake()

    def _evaluations_wait(self) -> bool:
        """Whether an evaluation beside training has groups to give, and somebody who could ever take them now."""
        waiting = [side.message for side in self._side.values() if side.beside_training and side.waits]
        oldest = {message.at_least for message in waiting}
        return any(self._fleet.slots(host, at_least=version) for version in oldest for host in self._hosts())

    def _training_waits(self) -> bool:
        return self._producer is not None and not self._producer.done() and bool(self._buffer.waiting)

    def _retry(self, side: _Side, reason: str) -> None:
        side.attempt += 1
        side.host = ""
        side.failure = reason

    # ------------------------------------------------------------------------------------------ hosts

    def _hosts(self) -> list[str]:
        return [peer.name for peer in self._members.with_role("rollout-agent")]

    def _free_host(
        self,
        n_trajectories: int,
        *,
        needs_engine: bool = True,
        set_aside: bool = False,
        at_least: WeightVersion | None = None,
    ) -> str | None:
        """The host that takes so many trajectories next, on engines of this pool that hold `at_least` or newer."""
        places = [
            (host, self._fleet.slots(host, serving=needs_engine, set_aside=set_aside, at_least=at_least))
            for host in self._hosts()
        ]
        return self._loads.choose(places, n_trajectories, set_aside=set_aside)

    async def _give(self, host: str, message: GenerateGroup) -> bool:
        """Send it; False when the host is gone. The loss itself is declared elsewhere."""
        endpoint = self._members.endpoint(host)
        if endpoint is None:
            return False
        key = (message.purpose, message.group_id)
        self._loads.give(key, host, message.n_samples, set_aside=message.set_aside)
        try:
            await endpoint.call(message, deadline_s=_CALL_S)
        except MilesError as error:
            self._loads.take_back(key, host)
            self._events.verdict("refused", peer=host, group_id=message.group_id, evidence=str(error))
            return False
        return True

    @contextmanager
    def _awake(self) -> Iterator[asyncio.Event]:
        """An event that `wake` sets, for a task that hands out."""
        event = asyncio.Event()
        self._wakes.add(event)
        try:
            yield event
        finally:
            self._wakes.discard(event)

    def _message(self, purpose: GroupPurpose, number: int, attempt: int) -> GenerateGroup:
        """A group for training or a demonstration: a host makes the prompt from its seed."""
        run, rollout = self._run, self._run.rollout
        return GenerateGroup(
            group_id=number,
            attempt=attempt,
            purpose=purpose,
            prompt=Prompt(
                environment=run.environment.name, messages=(), seed=derive_seed(run.seed, str(purpose), number)
            ),
            n_samples=rollout.n_samples_per_prompt if purpose is GroupPurpose.TRAIN else 1,
            sampling=SamplingParams(
                max_new_tokens=rollout.max_tokens_per_turn, temperature=rollout.temperature, top_p=rollout.top_p
            ),
            seed=derive_seed(run.seed, str(purpose), "sampling", number),
            deadline_s=rollout.trajectory_deadline_s,
        )


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    """Until it is set, or so long."""
    try:
        await asyncio.wait_for(event.wait(), timeout_s)
    except TimeoutError:
        pass
