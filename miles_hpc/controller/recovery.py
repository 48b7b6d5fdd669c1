"""Where a term starts: pure decisions from the newest manifest and the journals (ARCHITECTURE.md 3, items 10 and 11).

A group is done when the manifest says so (below next_group_id and not pending). What was owned but isn't done is either
taken over with its payload, or sampled again:

    owned, all its versions on the manifest's lineage  ->  taken over, while its staleness allows at use
    owned, sampled by a version of a dead lineage      ->  sampled again
    only handed out                                    ->  sampled again
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from checkpoints.journal import GroupOwned, JournalRead
from checkpoints.manifest import LineageSegment, Manifest
from miles_hpc.core.types import GroupSummary

__all__ = ["StartPlan", "on_lineage", "plan_start"]


@dataclass(frozen=True)
class StartPlan:
    """What a term continues from."""

    checkpoint: Path | None  # folder; None = afresh
    manifest: Manifest | None
    step: int
    next_group_id: int
    pending: tuple[int, ...]  # to be handed out again, in order
    reusable: tuple[GroupSummary, ...]  # owned already; their ids are not in `pending`
    evaluations: int


def on_lineage(version: tuple[int, int], lineage: tuple[LineageSegment, ...]) -> bool:
    """Whether a weight version (term, step) belongs to the history of the manifest with this lineage.

    A term stages the weights that it starts from under its own number, so its first version is first_step - 1.
    """
    term, step = version
    return any(s.term == term and s.first_step - 1 <= step <= s.last_step for s in lineage)


def plan_start(
    newest: tuple[Path, Manifest] | None, journals: Mapping[int, JournalRead], *, reuse: bool
) -> StartPlan:
    """Decide what the next term starts with. `reuse` is rollout.reuse_after_restart."""
    if newest is None:
        return StartPlan(None, None, 0, 0, (), (), 0)
    folder, manifest = newest
    counters = manifest.counters
    done_below, pending = counters.next_group_id, set(counters.pending)
    owned: dict[int, GroupOwned] = {}
    for term in sorted(journals):
        for record in journals[term].records():
            if isinstance(record, GroupOwned):
                owned[record.group_id] = record
    reusable: dict[int, GroupSummary] = {}
    for group_id, record in owned.items():
        if not reuse or (group_id < done_below and group_id not in pending) or not record.summary:
            continue
        versions = [v for v in (record.oldest, record.newest) if v is not None]
        if versions and all(on_lineage(v, manifest.lineage) for v in versions):
            reusable[group_id] = msgspec.msgpack.decode(record.summary, type=GroupSummary)
    next_group_id = max([done_below, *(g + 1 for g in reusable)])
    left = (pending | set(range(done_below, next_group_id))) - set(reusable)
    return StartPlan(
        checkpoint=folder,
        manifest=manifest,
        step=manifest.step,
        next_group_id=next_group_id,
        pending=tuple(sorted(left)),
        reusable=tuple(reusable[g] for g in sorted(reusable)),
        evaluations=counters.evaluations,
    )
