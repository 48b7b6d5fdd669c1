"""Archiving, and then removing what no restart can need any more.

    trained since the last time ─▶ archive/v<step>.t<term>.h5 ─▶ their payload files and routed experts go
    an evaluation that is over  ─▶ archive/eval.v<step>.t<term>.h5 ─▶ its payload files go

Runs in a thread; what was trained is archived after each save, behind the published manifest. What a restart from the
newest manifest would take over stays; a restart from an older one samples again what it can't find (`recovery`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import msgspec

from checkpoints.journal import GroupOwned, JournalRead, read_journals
from checkpoints.lineage import account, collectable_payloads
from checkpoints.manifest import Manifest
from miles_hpc.core.paths import RunPaths
from miles_hpc.core.types import GroupSummary, TrajectoryGroup, WeightVersion
from miles_hpc.dataflow.archive import archive_name, write_archive
from miles_hpc.routing.store import collect

__all__ = ["archive_evaluation", "clean_behind"]


def clean_behind(
    paths: RunPaths, manifest: Manifest, *, max_staleness: int, live_stores: Collection[str], fence: Callable[[], None]
) -> tuple[int, int]:
    """Archive and remove; returns how many payload files and routing stores went.

    `live_stores` are routing stores that groups not yet trained refer to. `fence` raises when a newer term exists; it
    is asked before anything is written and before anything is removed.
    """
    journals = read_journals(paths.journal)
    counted = account(journals, manifest)
    removable = collectable_payloads(journals, counted)
    present = {path for path in removable if (paths.root / path).exists()}
    fence()
    _archive(paths, journals, counted.trained, manifest, present)
    fence()
    for path in present:
        (paths.root / path).unlink(missing_ok=True)
    stores = collect(paths.root, manifest.step - max_staleness, live_stores)
    return len(present), len(stores)


def archive_evaluation(
    paths: RunPaths, version: WeightVersion, groups: Sequence[GroupSummary], *, fence: Callable[[], None]
) -> int:
    """Archive the groups of one evaluation of `version` and remove their payload files; returns the archive's bytes.

    Raises FileExistsError when there is one of this version, OSError, and what `fence` raises.
    """
    fence()
    files = [paths.root / group.payload.path for group in groups]
    n_bytes = write_archive(paths.archive / f"eval.{archive_name(version)}", [_read(file) for file in files])
    fence()
    for file in files:
        file.unlink(missing_ok=True)
    return n_bytes


def _archive(
    paths: RunPaths,
    journals: Mapping[int, JournalRead],
    trained: Mapping[int, int],
    manifest: Manifest,
    present: Collection[str],
) -> None:
    """One file per step on the lineage whose payloads are all still here and that has none yet."""
    owned = {r.group_id: r for t in sorted(journals) for r in journals[t].records() if isinstance(r, GroupOwned)}
    by_step: dict[int, list[GroupOwned]] = defaultdict(list)
    for group_id, step in trained.items():
        if group_id in owned:
            by_step[step].append(owned[group_id])
    for segment in manifest.lineage:
        for step in range(segment.first_step, segment.last_step + 1):
            records = sorted(by_step.get(step, ()), key=lambda r: r.group_id)
            path = paths.archive / archive_name(WeightVersion(segment.term, step))
            if not records or path.exists() or not all(r.path in present for r in records):
                continue
            write_archive(path, [_read(paths.root / r.path) for r in records])


def _read(path: Path) -> TrajectoryGroup:
    return msgspec.msgpack.decode(path.read_bytes(), type=TrajectoryGroup)
