"""The buffer: every group between admission and training, bounded by admission credits.

                         fail, host lost (next attempt)
                       ┌───────────────────┐
    admit ──> ADMITTED ──start──> GENERATING ──own──> OWNED ──form_batch──> BATCHED ──trained──> TRAINED ──commit──>
                       │               │                │ ^                    │                    │
                       │               │                │ └────────────────────┴──── roll_back ─────┘
                       v               v                v
                     set aside       set aside        dropped(reason)

A group holds a credit from admission until it is trained, dropped or set aside. TRAINED isn't the end: a group
counts only when a manifest contains its step (`commit`); until then `roll_back` can bring it back.

Pacing. Of the groups that wait, `batch_groups` leave with each step. A group that is admitted behind `ahead`
others is used by the (ahead // batch_groups)-th batch from now; its tokens are no older than the oldest weights
that engines serve now. So `grants` admits a group only while

    next_use + ahead // batch_groups - rollout_step <= max_staleness

where next_use is the step of the weights that the next batch will meet: steps formed so far. Then only groups that
are overtaken by many others (stragglers) can become stale, and those are dropped by form_batch with the reason
`stale`. With max_staleness 0 this is the synchronous loop: one batch per weight version.

No I/O and no clock: a transition changes this object and returns the records to journal. Transitions that make no
sense raise ProtocolError; late and repeated announcements are no errors (they are sent at least once).
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from checkpoints.journal import BatchFormed, GroupDropped, GroupOwned, GroupSetAside, Record
from miles_hpc.core.errors import ProtocolError, UserError
from miles_hpc.core.types import GroupPurpose, GroupSummary, WeightVersion
from miles_hpc.dataflow.filters import STALE, GroupFilter, first_reason, has_loss_tokens, unusable

__all__ = ["Batch", "GroupBuffer", "GroupState", "owned_record", "summary_of"]


class GroupState(enum.StrEnum):
    """Where a group is."""

    ADMITTED = "admitted"  # waits for a host
    GENERATING = "generating"  # a host has it
    OWNED = "owned"  # its payload is ours, waits for a batch
    BATCHED = "batched"  # in a batch that isn't done
    TRAINED = "trained"  # its step is done, no manifest contains it yet


#: States in which a group holds an admission credit.
_LIVE = (GroupState.ADMITTED, GroupState.GENERATING, GroupState.OWNED, GroupState.BATCHED)


@dataclass(frozen=True)
class Batch:
    """The groups of one optimizer step, in training order; `staleness[i]` is that of `groups[i]` at use, in steps."""

    step: int
    groups: tuple[GroupSummary, ...]
    staleness: tuple[int, ...]

    @property
    def record(self) -> BatchFormed:
        return BatchFormed(step=self.step, group_ids=tuple(g.group_id for g in self.groups), staleness=self.staleness)


@dataclass
class _Group:
    state: GroupState
    attempt: int = 0
    failures: int = 0
    host: str = ""
    summary: GroupSummary | None = None
    step: int | None = None  # of its batch


def owned_record(summary: GroupSummary) -> GroupOwned:
    """The journal record of a group's ownership; keeps the whole announcement."""
    versions = [t.oldest_version for t in summary.trajectories if t.oldest_version is not None]
    ordered = sorted((v.term, v.step) for v in versions)
    oldest = summary.oldest_version
    return GroupOwned(
        group_id=summary.group_id,
        attempt=summary.attempt,
        path=summary.payload.path,
        n_bytes=summary.payload.n_bytes,
        crc32=summary.payload.crc32,
        oldest=(oldest.term, oldest.step) if oldest is not None else None,
        newest=ordered[-1] if ordered else None,
        rewards=tuple(t.reward for t in summary.rollouts),
        n_tokens=sum(t.n_tokens for t in summary.trajectories),
        host=summary.host,
        summary=msgspec.msgpack.encode(summary),
    )


def summary_of(record: GroupOwned) -> GroupSummary:
    """Inverse of `owned_record`, in a later term. Raises msgspec.MsgspecError when another program wrote it."""
    return msgspec.msgpack.decode(record.summary, type=GroupSummary)


class GroupBuffer:
    """See the module's picture. Not thread-safe; the controller's loop owns it.

    `formed_step` is the step of the last batch (steps done when it starts, SFT included). `term` and `forks` tell
    which weights are on this run's lineage: `forks[t]` is the last step that term t shares with it
    (`checkpoints.lineage.fork_steps`); the current term shares all of its own.
    """

    def __init__(
        self,
        *,
        batch_groups: int,
        max_admitted: int,
        max_staleness: int,
        max_attempts: int,
        formed_step: int = 0,
        term: int = 1,
        forks: Mapping[int, int] | None = None,
        filters: tuple[GroupFilter, ...] = (),
    ) -> None:
        if batch_groups < 1 or max_admitted < batch_groups:
            raise UserError(
                f"rollout.max_admitted_batches: room for {max_admitted} groups, but a batch takes {batch_groups};"
                " set rollout.max_admitted_batches to 1.0 or more"
            )
        if max_staleness < 0 or max_attempts < 1:
            raise UserError(
                f"rollout: max_weight_staleness={max_staleness}, max_group_attempts={max_attempts}:"
                " expected at least 0 and at least 1"
            )
        self.batch_groups = batch_groups
        self.max_admitted = max_admitted
        self.max_staleness = max_staleness
        self.max_attempts = max_attempts
        self._formed_step = formed_step
        self._term = term
        self._forks = dict(forks or {})
        self._filters = (has_loss_tokens, *filters)
        self._groups: dict[int, _Group] = {}
        self.dropped: Counter[str] = Counter()  # reason -> groups, for metrics
        self.set_aside: Counter[str] = Counter()

    # ------------------------------------------------------------------------------------------ looking

    @property
    def formed_step(self) -> int:
        """The step of the last batch that was formed: also the step of the weights that the next one meets."""
        return self._formed_step

    @property
    def live(self) -> int:
        """Groups that hold a credit."""
        return sum(g.state in _LIVE for g in self._groups.values())

    @property
    def credits(self) -> int:
        """Admission credits that are free."""
        return max(0, self.max_admitted - self.live)

    @property
    def live_ids(self) -> tuple[int, ...]:
        """Ids that hold a credit, in order."""
        return tuple(sorted(i for i, g in self._groups.items() if g.state in _LIVE))

    @property
    def waiting(self) -> tuple[tuple[int, int], ...]:
        """(group id, attempt) of groups that wait for a host, in order."""
        return tuple(sorted((i, g.attempt) for i, g in self._groups.items() if g.state is GroupState.ADMITTED))

    def counts(self) -> dict[GroupState, int]:
        """How many groups are in each state."""
        found = Counter(g.state for g in self._groups.values())
        return {state: found[state] for state in GroupState}

    def state(self, group_id: int) -> GroupState | None:
        """None: never admitted here, or ended."""
        group = self._groups.get(group_id)
        return group.state if group is not None else None

    def generating(self, host: str | None = None) -> tuple[int, ...]:
        """Ids that hosts (or this host) are at work on, in order."""
        return tuple(
            sorted(
                i
                for i, g in self._groups.items()
                if g.state is GroupState.GENERATING and (host is None or g.host == host)
            )
        )

    def pending_ids(self, step: int) -> tuple[int, ...]:
        """Ids that are known here and in no step up to `step`: what a manifest of `step` lists as pending."""
        return tuple(sorted(i for i, g in self._groups.items() if g.step is None or g.step > step))

    def staleness(self, group: GroupSummary, at_step: int) -> int:
        """Optimizer steps between the weights that sampled `group` and those after `at_step`, at most over its tokens.

        For weights of a dead lineage both ways to the common step count. 0 when no engine sampled.
        """
        return max(
            (self._distance(t.oldest_version, at_step) for t in group.trajectories if t.oldest_version is not None),
            default=0,
        )

    def _distance(self, version: WeightVersion, at_step: int) -> int:
        fork = version.step if version.term == self._term else self._forks.get(version.term, 0)
        shared = min(version.step, fork, at_step)
        return (version.step - shared) + (at_step - shared)

    def routing_stores(self) -> frozenset[str]:
        """Stores with routed experts of groups that are here, for whoever cleans up."""
        held = (g.summary for g in self._groups.values() if g.summary is not None)
        refs = (t.routed_experts for summary in held for t in summary.trajectories)
        return frozenset(r.store for r in refs if r is not None)

    # ------------------------------------------------------------------------------------------ admission

    def grants(self, rollout_step: int, *, batches_left: int | None = None) -> int:
        """How many groups may be admitted now, by credits and by the pacing rule above.

        `rollout_step` is the step of the oldest weights that an engine in use serves. With `batches_left` (batches
        still to be formed in this run) no more groups are admitted than those take.
        """
        ahead = sum(g.state in _LIVE and g.state is not GroupState.BATCHED for g in self._groups.values())
        lag = max(0, self._formed_step - rollout_step)
        batches = self.max_staleness - lag + 1
        room = min(self.credits, batches * self.batch_groups - ahead)
        if batches_left is not None:
            room = min(room, batches_left * self.batch_groups - ahead)
        return max(0, room)

    def admit(self, group_id: int) -> None:
        """Take a credit for this group. Raises ProtocolError without a free one, or for an id that is here."""
        if group_id in self._groups:
            raise ProtocolError(f"group {group_id} is {self._groups[group_id].state} already")
        if self.credits == 0:
            raise ProtocolError(f"group {group_id}: all {self.max_admitted} admission credits are taken")
        self._groups[group_id] = _Group(GroupState.ADMITTED)

    def adopt(self, summary: GroupSummary) -> tuple[Record, ...]:
        """Take over a group that an earlier term owned: admitted and owned in one go. Journal the records.

        Takes a credit like any other; the caller offers no more than `credits`, the freshest first.
        """
        self.admit(summary.group_id)
        group = self._groups[summary.group_id]
        group.state, group.attempt = GroupState.GENERATING, summary.attempt
        return self.own(summary)

    # ------------------------------------------------------------------------------------------ generation

    def start(self, group_id: int, host: str) -> int:
        """`host` generates this group from now on; returns the attempt's number."""
        group = self._get(group_id, GroupState.ADMITTED)
        group.state, group.host = GroupState.GENERATING, host
        return group.attempt

    def own(self, summary: GroupSummary) -> tuple[Record, ...]:
        """A host announced a finished group. Journal the records, then acknowledge.

        Empty when it is a repetition, or of an attempt that was given up: acknowledge and forget it. A group that a
        filter refuses is dropped; one with aborted trajectories counts as a failed attempt.
        """
        if summary.purpose is not GroupPurpose.TRAIN:
            raise ProtocolError(f"group {summary.group_id} is for {summary.purpose}, not for training")
        group = self._groups.get(summary.group_id)
        if group is None or group.state is not GroupState.GENERATING or group.attempt != summary.attempt:
            return ()
        if (reason := unusable(summary)) is not None:
            return self.fail(summary.group_id, summary.attempt, reason)
        if (reason := first_reason(summary, self._filters)) is not None:
            return (self._drop(summary.group_id, reason),)
        group.state, group.summary = GroupState.OWNED, summary
        return (owned_record(summary),)

    def fail(self, group_id: int, attempt: int, reason: str) -> tuple[Record, ...]:
        """A host gave this attempt up. The group waits again, or is set aside after `max_attempts` failures."""
        group = self._groups.get(group_id)
        if group is None or group.state is not GroupState.GENERATING or group.attempt != attempt:
            return ()
        group.failures += 1
        if group.failures >= self.max_attempts:
            del self._groups[group_id]
            self.set_aside[reason] += 1
            return (GroupSetAside(group_id=group_id, reason=reason),)
        self._retry(group)
        return ()

    def hand_back(self, group_id: int, attempt: int) -> None:
        """The host that this attempt was given to doesn't answer for it: it waits again, which is no failure of it.

        Does nothing when the attempt isn't under way any more.
        """
        group = self._groups.get(group_id)
        if group is not None and group.state is GroupState.GENERATING and group.attempt == attempt:
            self._retry(group)

    def lose_host(self, host: str) -> tuple[int, ...]:
        """What this host was at work on waits again; returns those ids. Not counted as the groups' failure."""
        lost = self.generating(host)
        for group_id in lost:
            self._retry(self._groups[group_id])
        return lost

    def drop(self, group_id: int, reason: str) -> tuple[Record, ...]:
        """Give a group up that isn't in a batch."""
        self._get(group_id, GroupState.ADMITTED, GroupState.GENERATING, GroupState.OWNED)
        return (self._drop(group_id, reason),)

    # ------------------------------------------------------------------------------------------ training

    def form_batch(self, train_version: WeightVersion) -> tuple[Batch | None, tuple[Record, ...]]:
        """The next batch, for step train_version.step + 1, or None when too few groups are owned.

        The groups that are nearest to the cap go first, then the lowest ids. Groups above the cap at this use are
        dropped. The records (drops, then the batch) must be journaled before the trainer gets the step.
        """
        if train_version.step != self._formed_step:
            raise ProtocolError(
                f"batch for step {train_version.step + 1}: expected step {self._formed_step + 1}, one after the last"
            )
        records: list[Record] = []
        usable: list[tuple[int, int, GroupSummary]] = []
        for group_id, group in sorted(self._groups.items()):
            if group.state is not GroupState.OWNED or group.summary is None:
                continue
            age = self.staleness(group.summary, train_version.step)
            if age > self.max_staleness:
                records.append(self._drop(group_id, STALE))
            else:
                usable.append((-age, group_id, group.summary))
        if len(usable) < self.batch_groups:
            return None, tuple(records)
        chosen = sorted(usable, key=lambda u: u[:2])[: self.batch_groups]
        batch = Batch(
            step=train_version.step + 1,
            groups=tuple(summary for _, _, summary in chosen),
            staleness=tuple(-age for age, _, _ in chosen),
        )
        for _, group_id, _ in chosen:
            group = self._groups[group_id]
            group.state, group.step = GroupState.BATCHED, batch.step
        self._formed_step = batch.step
        return batch, (*records, batch.record)

    def trained(self, step: int) -> tuple[int, ...]:
        """Step `step` is done: its groups give their credits back. Returns their ids."""
        done = tuple(sorted(i for i, g in self._groups.items() if g.state is GroupState.BATCHED and g.step == step))
        if not done:
            raise ProtocolError(f"step {step} is done, but no batch of it is under way")
        for group_id in done:
            self._groups[group_id].state = GroupState.TRAINED
        return done

    def commit(self, step: int) -> tuple[int, ...]:
        """A manifest of `step` is published: forget the groups trained up to it. Returns their ids."""
        done = tuple(
            sorted(
                i
                for i, g in self._groups.items()
                if g.state is GroupState.TRAINED and g.step is not None and g.step <= step
            )
        )
        for group_id in done:
            del self._groups[group_id]
        return done

    def roll_back(self, step: int) -> tuple[int, ...]:
        """The trainer is back at `step`: groups of later batches are owned again. Returns their ids.

        They take their credits again, so `credits` may stay 0 for a while. Where the weights of the undone steps
        stay in use under this term, pass a new term and forks by `relocate` first.
        """
        if step > self._formed_step:
            raise ProtocolError(f"can't go back to step {step}: only {self._formed_step} were formed")
        undone = tuple(sorted(i for i, g in self._groups.items() if g.step is not None and g.step > step))
        for group_id in undone:
            group = self._groups[group_id]
            group.state, group.step = GroupState.OWNED, None
        self._formed_step = step
        return undone

    def relocate(self, term: int, forks: Mapping[int, int]) -> None:
        """The run goes on under `term`; `forks` says what earlier terms share with its lineage."""
        self._term = term
        self._forks = dict(forks)

    # ------------------------------------------------------------------------------------------ inside

    def _get(self, group_id: int, *states: GroupState) -> _Group:
        group = self._groups.get(group_id)
        if group is None or group.state not in states:
            seen = group.state if group is not None else "unknown"
            raise ProtocolError(f"group {group_id} is {seen}; expected {' or '.join(states)}")
        return group

    def _retry(self, group: _Group) -> None:
        group.state, group.host, group.attempt = GroupState.ADMITTED, "", group.attempt + 1

    def _drop(self, group_id: int, reason: str) -> GroupDropped:
        del self._groups[group_id]
        self.dropped[reason] += 1
        return GroupDropped(group_id=group_id, reason=reason)
