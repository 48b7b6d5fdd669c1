"""How routed experts lie in the run directory: names, types and shapes. Pure.

    routing/v000012.t000001/                      one store per weight version: the oldest one of the group
      g000000123.a00.t000001/                     one Zarr v3 array per trajectory group: id, attempt, writer's term
        zarr.json
        c.0.0.0                                   its Zarr shard: all rows of all trajectories, one after the other
        c.1.0.0 ...                               only above SHARD_BYTES

The array is [rows, moe_layers, top_k]. Trajectories are told apart by row ranges (RoutedExpertsRef). Stores are
named by weight version so that garbage collection removes whole folders: once the lineage's oldest usable weights
are newer, nothing in a store can be trained any more.

Inodes: a group takes 3 (folder, metadata, one Zarr shard). A step of 64 groups takes 192, and what stays on disk
is bounded by the steps that collection keeps: `inodes`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from miles_hpc.core.errors import UserError
from miles_hpc.core.types import WeightVersion

__all__ = ["ArrayLayout", "array_key", "experts_dtype", "inodes", "plan_collection", "store_name", "store_version"]

#: Uncompressed size that one Zarr chunk aims at: a few ranks reading their token ranges don't decode much in vain.
CHUNK_BYTES = 256 * 1024
#: Uncompressed size above which a group is split into several Zarr shards.
SHARD_BYTES = 1 << 30

_STORE = re.compile(r"v(\d{6,})\.t(\d{6,})")


def store_name(version: WeightVersion) -> str:
    """The folder of groups whose oldest token was sampled by `version`."""
    return f"v{version.step:06d}.t{version.term:06d}"


def store_version(name: str) -> WeightVersion | None:
    """Inverse of `store_name`; None for anything else."""
    match = _STORE.fullmatch(name)
    return WeightVersion(int(match[2]), int(match[1])) if match is not None else None


def array_key(group_id: int, attempt: int, term: int) -> str:
    """The array of one attempt at a group; the writer's term keeps a cut-off host's array apart from ours."""
    return f"g{group_id:09d}.a{attempt:02d}.t{term:06d}"


def experts_dtype(n_experts: int) -> np.dtype[np.unsignedinteger]:
    """The smallest type for ids below `n_experts`: uint8 up to 256 experts, uint16 above."""
    if not 1 <= n_experts <= 1 << 16:
        raise UserError(f"routed experts: {n_experts} experts; expected 1 to {1 << 16}")
    return np.dtype(np.uint8 if n_experts <= 1 << 8 else np.uint16)


@dataclass(frozen=True)
class ArrayLayout:
    """Shapes of one array: Zarr chunks of `chunk_rows` full rows, `shard_chunks` of them in each Zarr shard."""

    rows: int
    layers: int
    top_k: int
    dtype: str  # uint8 | uint16
    chunk_rows: int
    shard_chunks: int

    @classmethod
    def plan(cls, rows: int, layers: int, top_k: int, dtype: npt.DTypeLike) -> ArrayLayout:
        """The layout for these rows. A small group becomes one Zarr chunk."""
        kind = np.dtype(dtype)
        if kind.name not in ("uint8", "uint16"):
            raise UserError(f"routed experts: type {kind.name}; expected uint8 or uint16")
        row_bytes = layers * top_k * kind.itemsize
        if rows < 1 or row_bytes < 1:
            raise UserError(f"routed experts: shape [{rows}, {layers}, {top_k}]; expected at least one id")
        chunk_rows = min(rows, max(1, CHUNK_BYTES // row_bytes))
        n_chunks = -(-rows // chunk_rows)
        shard_chunks = min(n_chunks, max(1, SHARD_BYTES // (chunk_rows * row_bytes)))
        return cls(rows, layers, top_k, kind.name, chunk_rows, shard_chunks)

    @property
    def row_shape(self) -> tuple[int, int]:
        return (self.layers, self.top_k)

    @property
    def n_chunks(self) -> int:
        return -(-self.rows // self.chunk_rows)

    @property
    def n_shards(self) -> int:
        return -(-self.n_chunks // self.shard_chunks)

    @property
    def shard_rows(self) -> int:
        return self.chunk_rows * self.shard_chunks

    @property
    def n_bytes(self) -> int:
        """Uncompressed."""
        return self.rows * self.layers * self.top_k * np.dtype(self.dtype).itemsize


def inodes(groups_per_step: int, steps_kept: int, shards_per_group: int = 1) -> int:
    """Files and folders of the routing store when `steps_kept` steps are on disk."""
    return 1 + steps_kept * (1 + groups_per_step * (2 + shards_per_group))


def plan_collection(names: Iterable[str], before_step: int, keep: Collection[str] = ()) -> tuple[str, ...]:
    """Which store folders may go: those of versions with step < `before_step`, whatever their term, oldest first.

    `before_step` is the newest manifest's step less max_weight_staleness: a restart from that manifest can't use
    anything older. `keep` names stores that pending groups still refer to. Other names are left alone.
    """
    found = [(v.step, v.term, name) for name in names if (v := store_version(name)) is not None]
    return tuple(name for step, _, name in sorted(found) if step < before_step and name not in keep)
