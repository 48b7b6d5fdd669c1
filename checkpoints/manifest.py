"""The manifest of a checkpoint folder: the file COMPLETE, written last. Without it a folder is no checkpoint.

    checkpoints/step_000100.t000003/
      (files of the trainer's ranks)
      COMPLETE          JSON: what state this is, where it came from, which files belong to it

Lineage is explicit: `lineage` lists, oldest first, which steps of which term led here. Which manifest is the
newest follows from (term, step): a term continues from the newest manifest that it finds, so a later term's is
never behind an earlier term's in lineage, whatever the step numbers say.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from checkpoints.journal import TermStarted
from checkpoints.publish import fsync_folder, publish_bytes

__all__ = [
    "COMPLETE",
    "CheckpointFolder",
    "Counters",
    "FileEntry",
    "JournalPosition",
    "LineageSegment",
    "Manifest",
    "ManifestError",
    "extend_lineage",
    "list_checkpoints",
    "newest_complete",
    "plan_retention",
    "publish_manifest",
    "read_manifest",
    "remove_checkpoints",
    "size_problems",
    "started_after",
]

COMPLETE = "COMPLETE"
FORMAT = 1
_FOLDER = re.compile(r"step_(\d{6,})\.t(\d{6,})")


class ManifestError(ValueError):
    """A checkpoint folder isn't what its manifest says, or the manifest itself can't be read."""


class Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base: frozen, unknown fields refused."""


class LineageSegment(Part, frozen=True, kw_only=True):
    """Steps [first_step, last_step] were done under `term`; first_step > last_step when it did none."""

    term: int
    first_step: int
    last_step: int


class Counters(Part, frozen=True, kw_only=True):
    """Where the run stands.

    Every group id below `next_group_id` is either trained, dropped or set aside at `Manifest.journal`, or listed in
    `pending` (handed out, perhaps sampled, perhaps even in a later batch, but in no step up to this one).
    """

    next_group_id: int
    pending: tuple[int, ...] = ()
    phase: str = "rl"  # sft | rl
    sft_steps: int = 0  # optimizer steps of the warm start, contained in Manifest.step
    evaluations: int = 0


class JournalPosition(Part, frozen=True, kw_only=True):
    """Bytes of `term`'s journal that lead up to this state; includes the BatchFormed of its last step."""

    term: int
    offset: int


class FileEntry(Part, frozen=True, kw_only=True):
    """Size, and CRC-32 where it was cheap to get."""

    n_bytes: int
    crc32: int | None = None


class Manifest(Part, frozen=True, kw_only=True):
    """The content of COMPLETE. `files` are named relative to the folder."""

    run: str
    term: int
    step: int
    attempt: int
    lineage: tuple[LineageSegment, ...]
    counters: Counters
    journal: JournalPosition
    files: dict[str, FileEntry]
    created: float = 0.0  # epoch seconds
    format: int = FORMAT


@dataclass(frozen=True)
class CheckpointFolder:
    """A checkpoint folder as found: `manifest` is None when incomplete or unreadable; `problems` say why not usable."""

    path: Path
    term: int
    step: int
    manifest: Manifest | None
    problems: tuple[str, ...]

    @property
    def usable(self) -> bool:
        return self.manifest is not None and not self.problems


# ---------------------------------------------------------------------------------------------- lineage


def extend_lineage(base: tuple[LineageSegment, ...], term: int, step: int) -> tuple[LineageSegment, ...]:
    """The lineage of a state of `term` at `step` that continues `base` (the base manifest's; () when fresh)."""
    if base and base[-1].term == term:
        return (*base[:-1], LineageSegment(term=term, first_step=base[-1].first_step, last_step=step))
    first = base[-1].last_step + 1 if base else 1
    return (*base, LineageSegment(term=term, first_step=first, last_step=step))


def started_after(manifest: Manifest | None, *, term: int, attempt: int) -> TermStarted:
    """The first record of `term` when it continues from `manifest`, or starts afresh."""
    if manifest is None:
        return TermStarted(term=term, attempt=attempt)
    if manifest.term >= term:
        raise ManifestError(f"term {term} can't continue from a manifest of term {manifest.term}")
    return TermStarted(
        term=term,
        attempt=attempt,
        base_term=manifest.term,
        base_step=manifest.step,
        base_offset=manifest.journal.offset,
    )


def _check(manifest: Manifest) -> None:
    last = manifest.lineage[-1] if manifest.lineage else None
    if last is None or (last.term, last.last_step) != (manifest.term, manifest.step):
        raise ManifestError(f"manifest {manifest.term}.{manifest.step}: its lineage ends elsewhere: {last}")
    expected = 1
    for segment in manifest.lineage:
        if segment.first_step != expected or segment.last_step < segment.first_step - 1:
            raise ManifestError(f"manifest {manifest.term}.{manifest.step}: lineage has a gap at {segment}")
        expected = segment.last_step + 1
    if any(a.term >= b.term for a, b in zip(manifest.lineage, manifest.lineage[1:], strict=False)):
        raise ManifestError(f"manifest {manifest.term}.{manifest.step}: terms of its lineage don't rise")
    if manifest.journal.term != manifest.term:
        raise ManifestError(
            f"manifest {manifest.term}.{manifest.step}: journal position of term {manifest.journal.term}"
        )


# ---------------------------------------------------------------------------------------------- publishing


def publish_manifest(folder: Path, manifest: Manifest, still_newest: Callable[[], None]) -> None:
    """Make `folder` a checkpoint: check its files, sync, ask the fence, rename COMPLETE to its place.

    `still_newest` raises when a newer term exists; nothing becomes visible then. Raises ManifestError when a file
    is missing or has another size, or when the lineage doesn't fit.
    """
    _check(manifest)
    problems = size_problems(folder, manifest)
    if problems:
        raise ManifestError(f"checkpoint {folder}: not published: {problems[0]}")
    if manifest.created == 0.0:
        manifest = msgspec.structs.replace(manifest, created=time.time())
    fsync_folder(folder)
    fsync_folder(folder.parent)
    text = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
    publish_bytes(folder / COMPLETE, text, before_rename=still_newest)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint folder. Raises FileNotFoundError when there is none, ManifestError when it's bad."""
    data = (folder / COMPLETE).read_bytes()
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except msgspec.MsgspecError as error:
        raise ManifestError(f"checkpoint {folder}: COMPLETE can't be read: {error}") from error
    if manifest.format != FORMAT:
        raise ManifestError(f"checkpoint {folder}: format {manifest.format}; this program reads {FORMAT}")
    _check(manifest)
    return manifest


def size_problems(folder: Path, manifest: Manifest) -> tuple[str, ...]:
    """What is wrong with the files of a checkpoint, by size alone; empty when nothing is."""
    problems: list[str] = []
    for name, entry in manifest.files.items():
        if name.startswith("/") or ".." in name.split("/"):
            problems.append(f"{name}: a file outside the folder")
            continue
        try:
            n_bytes = (folder / name).stat().st_size
        except FileNotFoundError:
            problems.append(f"{name}: missing, expected {entry.n_bytes} bytes")
            continue
        if n_bytes != entry.n_bytes:
            problems.append(f"{name}: {n_bytes} bytes, expected {entry.n_bytes}")
    return tuple(problems)


# ---------------------------------------------------------------------------------------------- finding


def list_checkpoints(checkpoints: Path) -> tuple[CheckpointFolder, ...]:
    """Every checkpoint folder with what is wrong with it, ordered by (term, step). An absent parent has none."""
    found: list[CheckpointFolder] = []
    for path in checkpoints.iterdir() if checkpoints.is_dir() else ():
        match = _FOLDER.fullmatch(path.name)
        if match is None or not path.is_dir():
            continue
        step, term = int(match[1]), int(match[2])
        try:
            manifest = read_manifest(path)
        except FileNotFoundError:
            found.append(CheckpointFolder(path, term, step, None, ("incomplete",)))
            continue
        except ManifestError as error:
            found.append(CheckpointFolder(path, term, step, None, (str(error),)))
            continue
        problems = size_problems(path, manifest)
        if (manifest.term, manifest.step) != (term, step):
            problems += (f"COMPLETE says step {manifest.step} of term {manifest.term}",)
        found.append(CheckpointFolder(path, term, step, manifest, problems))
    return tuple(sorted(found, key=lambda c: (c.term, c.step)))


def newest_complete(checkpoints: Path) -> tuple[Path, Manifest] | None:
    """The checkpoint to continue from: highest (term, step) among those whose files all have their size."""
    for checkpoint in reversed(list_checkpoints(checkpoints)):
        if checkpoint.manifest is not None and checkpoint.usable:
            return checkpoint.path, checkpoint.manifest
    return None


# ---------------------------------------------------------------------------------------------- retention


def plan_retention(
    found: Iterable[CheckpointFolder], *, keep: int, current_term: int, in_use: Collection[Path] = ()
) -> tuple[Path, ...]:
    """Folders that may go, oldest first; pure.

    Stay: the newest `keep` usable ones (at least one), everything in `in_use` (being read, or a run's fixed
    reference), and unfinished folders of the current term or later, which somebody is still writing.
    """
    ordered = sorted(found, key=lambda c: (c.term, c.step))
    usable = [c for c in ordered if c.usable]
    kept = {c.path for c in usable[-max(1, keep) :]} | set(in_use)
    return tuple(c.path for c in ordered if c.path not in kept and (c.manifest is not None or c.term < current_term))


def remove_checkpoints(plan: Iterable[Path]) -> None:
    """Remove these folders, each one's COMPLETE first, so that a half-removed folder is no checkpoint."""
    for path in plan:
        (path / COMPLETE).unlink(missing_ok=True)
        fsync_folder(path)
        shutil.rmtree(path)
