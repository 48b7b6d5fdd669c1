"""What a rank does before it loads a checkpoint: its files are what the manifest promised."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from checkpoints.manifest import Counters, JournalPosition, Manifest, extend_lineage, publish_manifest
from checkpoints.verify import file_entry
from miles_hpc.core.errors import IntegrityError
from miles_hpc.core.messages import LoadState
from miles_hpc.core.paths import RunPaths
from miles_hpc.trainer.backend import TrainBackend
from miles_hpc.trainer.commands import Commands


class Loaded(Exception):
    """The back-end was asked to load."""


class LoadsNothing:
    """A back-end that only shows that it was asked."""

    def load(self, checkpoint: Path | None) -> int:
        raise Loaded(checkpoint)


def commands(root: Path, rank: int) -> Commands:
    return Commands(cast(TrainBackend, cast(Any, LoadsNothing())), RunPaths(root), world_size=2, rank=rank)


def test_each_rank_checks_its_share_before_anything_is_loaded(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints" / "step_000001.t000001"
    folder.mkdir(parents=True)
    names = ("a", "b", "c")
    for name in names:
        (folder / name).write_bytes(name.encode() * 100)
    manifest = Manifest(
        run="r",
        term=1,
        step=1,
        attempt=1,
        lineage=extend_lineage((), 1, 1),
        counters=Counters(next_group_id=0),
        journal=JournalPosition(term=1, offset=0),
        files={name: file_entry(folder / name, digest=True) for name in names},
    )
    publish_manifest(folder, manifest, lambda: None)
    message = LoadState(checkpoint=str(folder.relative_to(tmp_path)), deadline_s=1.0)

    def load(rank: int) -> None:
        commands(tmp_path, rank).execute(message, memoryview(b""))

    for rank in (0, 1):
        with pytest.raises(Loaded):
            load(rank)
    for broken, rank in (("a", 0), ("b", 1), ("c", 0)):
        good = (folder / broken).read_bytes()
        (folder / broken).write_bytes(bytes(len(good)))  # the right size, as after a crash of a storage server
        with pytest.raises(IntegrityError, match=f"{broken}: CRC-32"):
            load(rank)
        with pytest.raises(Loaded):
            load(1 - rank)
        (folder / broken).write_bytes(good)
