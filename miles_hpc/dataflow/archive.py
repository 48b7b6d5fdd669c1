"""The archive: trained groups of one weight version, or one evaluation, in one immutable HDF5 file, for analysis.

    archive/v000012.t000001.h5
      tokens      int32   [N]      all trajectories, one after the other
      loss_mask   uint8   [N]
      log_probs   float32 [N]      the engine's
      offsets     int64   [n + 1]  trajectory i is [offsets[i], offsets[i + 1])
      trajectories        [n]      compound: group_id attempt index rollout_id reward status turns label
                                   oldest_term oldest_step
      prompts     string  [n]      JSON of the prompt
      attributes: format, n_groups, n_tokens

Plain HDF5: h5py, HDFView, MATLAB or Julia read it without this project. A version that no engine sampled
(demonstrations) has oldest_term -1.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from checkpoints.publish import fsync_folder
from miles_hpc.core.errors import UserError
from miles_hpc.core.types import Trajectory, TrajectoryGroup, WeightVersion

__all__ = ["archive_name", "write_archive"]

FORMAT = 1
_CHUNK_TOKENS = 1 << 16


def archive_name(version: WeightVersion) -> str:
    """File name of a weight version's archive."""
    return f"v{version.step:06d}.t{version.term:06d}.h5"


def write_archive(path: Path, groups: Sequence[TrajectoryGroup]) -> int:
    """Publish `groups` as the archive `path`; returns its size in bytes.

    Written beside its place, synced, then linked to its name, which fails when that exists: archives never change.
    Raises FileExistsError, UserError without groups, OSError.
    """
    if not groups:
        raise UserError(f"archive {path.name}: no groups to write")
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        raise FileExistsError(f"archive {path} exists; archives never change")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        _write(temporary, groups)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        n_bytes = temporary.stat().st_size
        try:
            path.hardlink_to(temporary)
        except FileExistsError:
            raise
        except OSError:  # a file system without hard links; the check above has to do
            temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)
    fsync_folder(path.parent)
    return n_bytes


def _rollout(trajectory: Trajectory) -> int:
    return trajectory.index if trajectory.rollout_id is None else trajectory.rollout_id


def _oldest(trajectory: Trajectory) -> tuple[int, int]:
    if not trajectory.versions:
        return (-1, -1)
    oldest = min((span.version for span in trajectory.versions), key=lambda v: v.step)
    return (oldest.term, oldest.step)


def _write(path: Path, groups: Sequence[TrajectoryGroup]) -> None:
    import h5py  # heavy, and only this function needs it

    pairs = [(g, t) for g in groups for t in g.trajectories]
    offsets = np.cumsum([0, *(t.tokens.numpy().size for _, t in pairs)], dtype=np.int64)
    text = h5py.string_dtype()
    rows = np.empty(
        len(pairs),
        dtype=[
            ("group_id", "<i8"),
            ("attempt", "<i4"),
            ("index", "<i4"),
            ("rollout_id", "<i4"),
            ("reward", "<f8"),
            ("status", text),
            ("turns", "<i4"),
            ("label", text),
            ("oldest_term", "<i8"),
            ("oldest_step", "<i8"),
        ],
    )
    for i, (g, t) in enumerate(pairs):
        rows[i] = (g.group_id, g.attempt, t.index, _rollout(t), t.reward, str(t.status), t.turns, t.label, *_oldest(t))
    with h5py.File(path, "x", libver=("v110", "v110")) as file:
        columns: list[tuple[str, list[Any], str]] = [
            ("tokens", [t.tokens.numpy() for _, t in pairs], "<i4"),
            ("loss_mask", [t.loss_mask.numpy() for _, t in pairs], "u1"),
            ("log_probs", [t.log_probs.numpy() for _, t in pairs], "<f4"),
        ]
        for name, arrays, dtype in columns:
            data = np.concatenate(arrays).astype(dtype, copy=False)
            if len(data) != offsets[-1]:
                raise UserError(f"archive {path.name}: {name} has {len(data)} entries, expected {offsets[-1]}")
            chunks = (min(_CHUNK_TOKENS, len(data)),) if len(data) else None
            options = {"compression": "gzip", "compression_opts": 1, "shuffle": True, "fletcher32": True}
            file.create_dataset(name, data=data, chunks=chunks, **(options if chunks else {}))
        file.create_dataset("offsets", data=offsets)
        file.create_dataset("trajectories", data=rows)
        prompts = [msgspec.json.encode(g.prompt).decode() for g, _ in pairs]
        file.create_dataset("prompts", data=np.array(prompts, dtype=object), dtype=text)
        file.attrs.update(format=FORMAT, n_groups=len(groups), n_tokens=int(offsets[-1]))
