"""Where a term starts: pure decisions from the newest manifest and the journals (ARCHITECTURE.md 3, items 10 and 11).

A group is done when the manifest's lineage trained, dropped or set it aside. What was owned but isn't done may be taken
over with its payload instead of being sampled again; the buffer's staleness rule (which counts both ways to the common
step for weights of a dead lineage) says whether it is still fresh enough. All else that was handed out is handed out
again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from checkpoints.journal import Evaluated, EvaluationBegun, EvaluationSkipped, JournalRead, Record
from checkpoints.lineage import account, evaluations, fork_steps, reusable_groups
from checkpoints.manifest import CheckpointFolder, Manifest
from miles_hpc.core.errors import UserError
from miles_hpc.core.paths import RunPaths
from miles_hpc.core.types import GroupSummary
from miles_hpc.dataflow.buffer import GroupBuffer, summary_of

__all__ = ["StartPlan", "choose_checkpoint", "fresh_groups", "payload_present", "plan_start"]


@dataclass(frozen=True)
class StartPlan:
    """What a term continues from."""

    checkpoint: Path | None = None  # folder; None = afresh
    manifest: Manifest | None = None
    step: int = 0
    next_group_id: int = 0
    pending: tuple[int, ...] = ()  # handed out once and not done; `owned` ones are among them or beyond next_group_id
    owned: tuple[GroupSummary, ...] = ()  # candidates to be taken over
    forks: dict[int, int] = field(default_factory=dict)  # term -> last step that it shares with the lineage
    trained_groups: int = 0
    evaluated: frozenset[int] = frozenset()  # steps of the lineage with a result on record
    skipped: frozenset[int] = frozenset()  # steps whose evaluation was skipped, on record
    cut: frozenset[int] = frozenset()  # steps whose evaluation was begun beside training and has no outcome


def choose_checkpoint(
    found: Sequence[CheckpointFolder], unreadable: Collection[Path] = ()
) -> tuple[Path, Manifest] | None:
    """The newest checkpoint of `found` (in order) that is whole and not among `unreadable`; None for a run without any.

    Raises UserError when there were some and none is left: a run must not begin anew by itself.
    """
    published = [c for c in found if c.manifest is not None or c.problems != ("incomplete",)]
    for checkpoint in reversed(published):
        if checkpoint.manifest is not None and checkpoint.usable and checkpoint.path not in unreadable:
            return checkpoint.path, checkpoint.manifest
    if published:
        newest = published[-1]
        problem = newest.problems[0] if newest.problems else "its files aren't what was saved"
        raise UserError(
            f"none of {len(published)} checkpoints can be read; the newest is {newest.path} ({problem}): put a copy of "
            "its files back, or remove the checkpoints folder and the journal to begin anew"
        )
    return None


def plan_start(newest: tuple[Path, Manifest] | None, journals: Mapping[int, JournalRead], *, reuse: bool) -> StartPlan:
    """Decide what the next term starts with. `reuse` is rollout.reuse_after_restart.

    Raises JournalCorrupt when the journals don't lead to the manifest.
    """
    if newest is None:
        return _with_evaluations(StartPlan(), journals, fork_steps(journals, ()))
    folder, manifest = newest
    counted = account(journals, manifest)
    forks = fork_steps(journals, counted.segments)
    owned = reusable_groups(journals, counted) if reuse else {}
    plan = StartPlan(
        checkpoint=folder,
        manifest=manifest,
        step=manifest.step,
        next_group_id=manifest.counters.next_group_id,
        pending=tuple(sorted(counted.pending)),
        owned=tuple(summary_of(owned[g]) for g in sorted(owned) if owned[g].summary),
        forks=forks,
        trained_groups=len(counted.trained),
    )
    return _with_evaluations(plan, journals, forks)


def _with_evaluations(plan: StartPlan, journals: Mapping[int, JournalRead], forks: Mapping[int, int]) -> StartPlan:
    recorded = evaluations(journals, forks)

    def steps(kind: type[Record]) -> frozenset[int]:
        return frozenset(step for step, record in recorded.items() if isinstance(record, kind))

    return replace(plan, evaluated=steps(Evaluated), skipped=steps(EvaluationSkipped), cut=steps(EvaluationBegun))


def fresh_groups(plan: StartPlan, paths: RunPaths, buffer: GroupBuffer) -> tuple[GroupSummary, ...]:
    """The owned groups that the term takes over: fresh enough, with their payload, as many as there are credits."""
    fresh = [
        g for g in plan.owned if buffer.staleness(g, plan.step) <= buffer.max_staleness and payload_present(paths, g)
    ]
    return tuple(fresh[: buffer.max_admitted])


def payload_present(paths: RunPaths, group: GroupSummary) -> bool:
    """Whether a group's payload and routed experts are still on storage: a newer manifest may have let them go."""
    payload = paths.root / group.payload.path
    if not payload.is_file() or payload.stat().st_size != group.payload.n_bytes:
        return False
    stores = {t.routed_experts.store for t in group.trajectories if t.routed_experts is not None}
    return all((paths.root / store).is_dir() for store in stores)
