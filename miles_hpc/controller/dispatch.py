"""Giving work to rollout hosts and taking it back: training groups through the buffer, other episodes beside it.

    source ─▶ buffer.admit ─▶ start(host) ─▶ GenerateGroup ─▶ … ─▶ GroupDone ─▶ buffer.own ─▶ journal ─▶ Ack

A host gets a group when its engines have free generation slots for it, counting a small reserve so that a slot is
refilled the moment a trajectory ends. Demonstrations and evaluations have ids of their own and are not journaled: they
change nothing that is trained twice or lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from checkpoints.journal import GroupDropped, GroupSetAside
from miles_hpc.controller.durable import DurableJournal
from miles_hpc.controller.engines import EngineFleet
from miles_hpc.controller.members import Members
from miles_hpc.core.config import RunConfig
from miles_hpc.core.errors import MilesError, ProtocolError
from miles_hpc.core.messages import AbortGroups, GenerateGroup, GroupFailed
from miles_hpc.core.telemetry import EventLog
from miles_hpc.core.transport import PeerIdentity
from miles_hpc.core.types import GroupPurpose, GroupSummary, Prompt, SamplingParams
from miles_hpc.dataflow.buffer import GroupBuffer
from miles_hpc.dataflow.source import PromptSource, derive_seed

__all__ = ["Dispatcher"]

#: More trajectories than slots that a host may have, as a share of its slots: what is ready when a slot gets free.
_RESERVE = 0.25
_SIDE_ATTEMPTS = 5
_CALL_S = 10.0
_POLL_S = 0.2


@dataclass
class _Side:
    """A demonstration or an evaluation episode."""

    purpose: GroupPurpose
    number: int
    attempt: int = 0
    host: str = ""  # "" while it waits
    summary: GroupSummary | None = None
    failure: str = ""


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
        self._side: dict[tuple[GroupPurpose, int], _Side] = {}
        self._load: dict[str, int] = {}  # host -> trajectories given and not back
        self._trajectories: dict[tuple[GroupPurpose, int], tuple[str, int]] = {}  # given group -> host, how many
        self._wake = asyncio.Event()
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
        self._wake.set()

    async def wait_owned(self, timeout_s: float) -> None:
        """Return when a group became owned, or after `timeout_s`."""
        try:
            await asyncio.wait_for(self._owned.wait(), timeout_s)
        except TimeoutError:
            pass
        self._owned.clear()

    async def drain(self, timeout_s: float) -> None:
        """Hand out nothing more, and take what comes in within `timeout_s`; the rest is sampled again later."""
        self.close()
        end = asyncio.get_running_loop().time() + timeout_s
        while self._buffer.generating() and asyncio.get_running_loop().time() < end:
            await self.wait_owned(0.1)

    async def _produce(self, batches_left: Callable[[], int]) -> None:
        while True:
            self._wake.clear()
            oldest = self._fleet.oldest_step()
            if oldest is not None:
                for group_id in self._source.take(self._buffer.grants(oldest, batches_left=batches_left())):
                    self._buffer.admit(group_id)
            for group_id, _ in self._buffer.waiting:
                host = self._free_host(self._run.rollout.n_samples_per_prompt)
                if host is None:
                    break
                attempt = self._buffer.start(group_id, host)
                message = self._message(GroupPurpose.TRAIN, group_id, attempt)
                if not await self._give(host, message):
                    self._buffer.hand_back(group_id, attempt)
            try:
                await asyncio.wait_for(self._wake.wait(), _POLL_S)
            except TimeoutError:
                pass

    async def group_done(self, peer: PeerIdentity, summary: GroupSummary) -> None:
        """Own a finished group; returns (and thereby acknowledges) after the journal has it."""
        self._returned(summary.purpose, summary.group_id, peer.name)
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
        self._wake.set()

    async def group_failed(self, peer: PeerIdentity, message: GroupFailed) -> None:
        """A host gave a group up."""
        purpose = message.purpose
        self._returned(purpose, message.group_id, peer.name)
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
        self._wake.set()

    def lose_host(self, host: str) -> None:
        """What the host was at work on waits again."""
        self._load.pop(host, None)
        self._trajectories = {k: v for k, v in self._trajectories.items() if v[0] != host}
        self._buffer.lose_host(host)
        for side in self._side.values():
            if side.host == host and side.summary is None:
                self._retry(side, f"{host} lost")
        self._wake.set()

    # ------------------------------------------------------------------------------------------ other episodes

    async def collect(self, purpose: GroupPurpose, n: int) -> list[GroupSummary]:
        """n single-trajectory groups of this purpose, in order of their number."""
        wanted = [_Side(purpose, i) for i in range(n)]
        self._side = {(purpose, s.number): s for s in wanted}
        while any(s.summary is None for s in wanted):
            self._wake.clear()
            for side in wanted:
                if side.summary is not None or side.host:
                    continue
                if side.attempt >= _SIDE_ATTEMPTS:
                    raise ProtocolError(f"{purpose} episode {side.number} failed {side.attempt} times: {side.failure}")
                host = self._free_host(1, needs_engine=purpose is not GroupPurpose.DEMO)
                if host is None:
                    break
                side.host = host
                if not await self._give(host, self._message(purpose, side.number, side.attempt)):
                    side.host = ""
            try:
                await asyncio.wait_for(self._wake.wait(), _POLL_S)
            except TimeoutError:
                pass
        self._side = {}
        return [s.summary for s in wanted if s.summary is not None]

    def _retry(self, side: _Side, reason: str) -> None:
        side.attempt += 1
        side.host = ""
        side.failure = reason

    # ------------------------------------------------------------------------------------------ hosts

    def _free_host(self, n_trajectories: int, *, needs_engine: bool = True) -> str | None:
        """The host with the largest share of free slots that has room for so many trajectories."""
        best: tuple[float, str] | None = None
        for peer in self._members.with_role("rollout-agent"):
            slots = self._fleet.slots(peer.name, serving=needs_engine)
            room = slots * (1.0 + _RESERVE)
            load = self._load.get(peer.name, 0)
            if slots == 0 or (load and load + n_trajectories > room):
                continue
            if best is None or load / slots < best[0]:
                best = (load / slots, peer.name)
        return None if best is None else best[1]

    async def _give(self, host: str, message: GenerateGroup) -> bool:
        """Send it; False when the host is gone. The loss itself is declared elsewhere."""
        endpoint = self._members.endpoint(host)
        if endpoint is None:
            return False
        key = (message.purpose, message.group_id)
        self._load[host] = self._load.get(host, 0) + message.n_samples
        self._trajectories[key] = (host, message.n_samples)
        try:
            await endpoint.call(message, deadline_s=_CALL_S)
        except MilesError as error:
            self._returned(message.purpose, message.group_id, host)
            self._events.verdict("refused", peer=host, group_id=message.group_id, evidence=str(error))
            return False
        return True

    def _returned(self, purpose: GroupPurpose, group_id: int, host: str) -> None:
        given = self._trajectories.get((purpose, group_id))
        if given is not None and given[0] == host:
            del self._trajectories[(purpose, group_id)]
            self._load[host] = max(0, self._load.get(host, 0) - given[1])

    def _message(self, purpose: GroupPurpose, number: int, attempt: int) -> GenerateGroup:
        """What a host needs to make the group: the prompt follows from the seed there."""
        run, rollout = self._run, self._run.rollout
        evaluating = purpose is GroupPurpose.EVAL
        base = run.eval.seed if evaluating else run.seed
        prompt_seed = derive_seed(base, str(purpose), number)
        sampling = SamplingParams(
            max_new_tokens=rollout.max_tokens_per_turn,
            temperature=run.eval.temperature if evaluating else rollout.temperature,
            top_p=1.0 if evaluating else rollout.top_p,
        )
        return GenerateGroup(
            group_id=number,
            attempt=attempt,
            purpose=purpose,
            prompt=Prompt(environment=run.environment.name, messages=(), seed=prompt_seed),
            n_samples=rollout.n_samples_per_prompt if purpose is GroupPurpose.TRAIN else 1,
            sampling=sampling,
            seed=derive_seed(base, str(purpose), "sampling", number),
            deadline_s=rollout.trajectory_deadline_s,
        )

    async def abort(self, host: str, group_ids: tuple[int, ...], reason: str) -> None:
        """Tell a host to forget groups."""
        endpoint = self._members.endpoint(host)
        if endpoint is not None:
            await endpoint.call(AbortGroups(group_ids=group_ids, reason=reason), deadline_s=_CALL_S)
