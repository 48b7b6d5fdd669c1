"""What a run really trained: the path from the newest manifest back to the start, through the terms' journals.

    term 1   1 ── 2 ── 3 ── 4 ── 5            steps 4 and 5 were never saved: they count for nothing
                       └ manifest (1, 3)
    term 2             4' ── 5' ── 6'         continues from (1, 3)
                             └ manifest (2, 5)

The final lineage of this picture is 1 2 3 4' 5'. Step 6' counts once a manifest contains it. Of a term on the
lineage these records count: BatchFormed of its steps on the path, and GroupDropped and GroupSetAside before the
position at which the next term (or the manifest) continues.

Everything here is pure: journals and manifest in, frozen data out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from checkpoints.journal import (
    BatchFormed,
    Evaluated,
    EvaluationBegun,
    EvaluationSkipped,
    GroupDropped,
    GroupOwned,
    GroupSetAside,
    JournalCorrupt,
    JournalRead,
    RunCompleted,
    StepDone,
)
from checkpoints.manifest import LineageSegment, Manifest

__all__ = [
    "Account",
    "Segment",
    "TermAccount",
    "account",
    "collectable_payloads",
    "evaluations",
    "final_lineage",
    "fork_steps",
    "reusable_groups",
]


@dataclass(frozen=True)
class Segment:
    """Steps [first_step, last_step] of `term`, and its journal up to `offset`, are on the lineage."""

    term: int
    first_step: int
    last_step: int
    offset: int


@dataclass(frozen=True)
class TermAccount:
    """One term in numbers; a term that isn't on the final lineage has no steps on it."""

    term: int
    attempt: int
    base: tuple[int, int]  # (term, step) that it continued from
    steps_done: int  # distinct steps under this term, wherever they led
    steps_on_lineage: int
    groups_owned: int
    groups_trained: int  # on the final lineage
    torn_bytes: int
    completed: bool


@dataclass(frozen=True)
class Account:
    """Where every group of the run is, on the final lineage.

    The groups in question are those that the manifest knows of: ids below its `next_group_id`, and its pending
    ones. `unsaved_steps` were done after the manifest, under its term: they count when a later manifest has them.
    """

    segments: tuple[Segment, ...]
    step: int
    trained: dict[int, int]  # group id -> step
    staleness: dict[int, int]  # trained group id -> staleness at use
    dropped: dict[int, str]
    set_aside: dict[int, str]
    pending: frozenset[int]
    lost: tuple[int, ...]  # in none of the four above
    twice: tuple[int, ...]  # in more than one batch of the lineage
    conflicts: tuple[int, ...]  # trained, yet dropped, set aside or still pending as well
    missing_steps: tuple[int, ...]  # RL steps of the lineage without a batch in the journal
    unsaved_steps: int
    completed: bool
    terms: tuple[TermAccount, ...]

    @property
    def sound(self) -> bool:
        """Nothing lost, nothing twice, nothing contradictory."""
        return not (self.lost or self.twice or self.conflicts or self.missing_steps)


def final_lineage(journals: Mapping[int, JournalRead], manifest: Manifest | None) -> tuple[Segment, ...]:
    """The segments that lead to `manifest`, oldest first; () without one.

    Raises JournalCorrupt when a journal on the path is missing or too short, or contradicts the manifest's own
    lineage.
    """
    if manifest is None:
        return ()
    segments: list[Segment] = []
    term, last_step, offset = manifest.term, manifest.step, manifest.journal.offset
    while True:
        read = journals.get(term)
        started = read.started if read is not None else None
        if read is None or started is None:
            raise JournalCorrupt(f"the journal of term {term} is missing, but {manifest.term}.{manifest.step} needs it")
        if read.n_bytes < offset:
            raise JournalCorrupt(f"the journal of term {term} has {read.n_bytes} good bytes, but {offset} were saved")
        segments.append(Segment(term, started.base_step + 1, last_step, offset))
        if started.base_term == 0:
            break
        if started.base_term >= term:
            raise JournalCorrupt(f"term {term} claims to continue from term {started.base_term}")
        term, last_step, offset = started.base_term, started.base_step, started.base_offset
    segments.reverse()
    own = tuple(LineageSegment(term=s.term, first_step=s.first_step, last_step=s.last_step) for s in segments)
    if own != manifest.lineage:
        raise JournalCorrupt(f"the journals lead to {own}, but the manifest says {manifest.lineage}")
    return tuple(segments)


def fork_steps(journals: Mapping[int, JournalRead], segments: tuple[Segment, ...]) -> dict[int, int]:
    """For every journaled term: the last step on the way to its weights that is on `segments` as well.

    For a term on the lineage that is its own last step there (for the newest one: the manifest's), for a dead one
    the step at which it, or the dead term that it continued from, left. Weights (t, s) and a lineage at step n lie
    (s - fork) + (n - fork) optimizer steps apart when s > fork, and n - s otherwise.
    """
    forks = {s.term: s.last_step for s in segments}
    for term in sorted(journals):
        started = journals[term].started
        if term not in forks and started is not None:
            forks[term] = min(started.base_step, forks.get(started.base_term, 0))
    return forks


def account(journals: Mapping[int, JournalRead], manifest: Manifest | None) -> Account:
    """Count every group of the run. Raises JournalCorrupt as `final_lineage` does."""
    segments = final_lineage(journals, manifest)
    batches: dict[int, BatchFormed] = {}
    dropped: dict[int, str] = {}
    set_aside: dict[int, str] = {}
    for segment in segments:
        own: dict[int, BatchFormed] = {}
        for entry in journals[segment.term].entries:
            if entry.end > segment.offset:
                break
            match entry.record:
                case BatchFormed() as batch if segment.first_step <= batch.step <= segment.last_step:
                    own[batch.step] = batch  # the last one for a step is the one that was trained
                case GroupDropped(group_id=group_id, reason=reason):
                    dropped[group_id] = reason
                case GroupSetAside(group_id=group_id, reason=reason):
                    set_aside[group_id] = reason
        batches.update(own)

    trained: dict[int, int] = {}
    staleness: dict[int, int] = {}
    twice: set[int] = set()
    for step in sorted(batches):
        for group_id, age in zip(batches[step].group_ids, batches[step].staleness, strict=True):
            if group_id in trained:
                twice.add(group_id)
            trained.setdefault(group_id, step)
            staleness.setdefault(group_id, age)

    pending = frozenset(manifest.counters.pending) if manifest is not None else frozenset()
    known = range(manifest.counters.next_group_id if manifest is not None else 0)
    ended = dropped.keys() | set_aside.keys()
    sft_steps = manifest.counters.sft_steps if manifest is not None else 0
    last_step = manifest.step if manifest is not None else 0
    return Account(
        segments=segments,
        step=last_step,
        trained=trained,
        staleness=staleness,
        dropped=dropped,
        set_aside=set_aside,
        pending=pending,
        lost=tuple(i for i in known if i not in trained and i not in ended and i not in pending),
        twice=tuple(sorted(twice)),
        conflicts=tuple(sorted((trained.keys() & (ended | pending)) | (ended & pending))),
        missing_steps=tuple(s for s in range(sft_steps + 1, last_step + 1) if s not in batches),
        unsaved_steps=_unsaved_steps(journals, manifest),
        completed=_completed(journals, manifest),
        terms=tuple(_term_account(read, segments, trained) for _, read in sorted(journals.items())),
    )


def reusable_groups(journals: Mapping[int, JournalRead], counted: Account) -> dict[int, GroupOwned]:
    """Owned groups, of any term, that are still to be trained: what a new term may take over instead of sampling.

    The newest ownership of a group wins. Groups that were trained, dropped or set aside on the lineage are left
    out; whether a payload still exists and is fresh enough is for the caller to check.
    """
    ended = counted.trained.keys() | counted.dropped.keys() | counted.set_aside.keys()
    found: dict[int, GroupOwned] = {}
    for term in sorted(journals):
        for record in journals[term].records():
            if isinstance(record, GroupOwned) and record.group_id not in ended:
                found[record.group_id] = record
    return found


def evaluations(
    journals: Mapping[int, JournalRead], forks: Mapping[int, int]
) -> dict[int, Evaluated | EvaluationSkipped | EvaluationBegun]:
    """What is on record for evaluations of the lineage, by step: the result, else its being skipped, else its begin.

    `forks` is what `fork_steps` says. A record counts when its step's weights are on the lineage, also when it was
    written after the manifest: it changed nothing that a restart undoes.
    """
    kinds = (EvaluationBegun, EvaluationSkipped, Evaluated)
    found: dict[int, Evaluated | EvaluationSkipped | EvaluationBegun] = {}
    for term in sorted(journals):
        for record in journals[term].records():
            if isinstance(record, kinds) and record.step <= forks.get(term, 0):
                before = found.get(record.step)
                if before is None or kinds.index(type(record)) >= kinds.index(type(before)):
                    found[record.step] = record
    return dict(sorted(found.items()))


def collectable_payloads(journals: Mapping[int, JournalRead], counted: Account) -> tuple[str, ...]:
    """Payload paths, relative to the run directory, that no restart from this manifest needs; in no order.

    Those of groups that ended on the lineage, and of ownerships that a newer one of the same group replaced.
    """
    needed = {record.path for record in reusable_groups(journals, counted).values()}
    owned = {r.path for read in journals.values() for r in read.records() if isinstance(r, GroupOwned)}
    return tuple(owned - needed)


def _unsaved_steps(journals: Mapping[int, JournalRead], manifest: Manifest | None) -> int:
    """Steps done behind the manifest by the newest term that continues it, or by its own; without one: from step 1."""
    base = (manifest.term, manifest.step) if manifest is not None else (0, 0)
    for term in sorted(journals, reverse=True):
        started = journals[term].started
        if started is not None and (term == base[0] or (started.base_term, started.base_step) == base):
            return len({r.step for r in journals[term].records() if isinstance(r, StepDone) and r.step > base[1]})
    return 0


def _completed(journals: Mapping[int, JournalRead], manifest: Manifest | None) -> bool:
    if manifest is None or manifest.term not in journals:
        return False
    records = journals[manifest.term].records()
    return any(isinstance(r, RunCompleted) and r.step == manifest.step for r in records)


def _term_account(read: JournalRead, segments: tuple[Segment, ...], trained: Mapping[int, int]) -> TermAccount:
    segment = next((s for s in segments if s.term == read.term), None)
    steps = range(segment.first_step, segment.last_step + 1) if segment is not None else range(0)
    started = read.started
    return TermAccount(
        term=read.term,
        attempt=started.attempt if started is not None else 0,
        base=(started.base_term, started.base_step) if started is not None else (0, 0),
        steps_done=len({r.step for r in read.records() if isinstance(r, StepDone)}),
        steps_on_lineage=len(steps),
        groups_owned=len({r.group_id for r in read.records() if isinstance(r, GroupOwned)}),
        groups_trained=sum(step in steps for step in trained.values()),
        torn_bytes=read.torn_bytes,
        completed=any(isinstance(r, RunCompleted) for r in read.records()),
    )
