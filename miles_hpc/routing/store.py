"""The routing store: routed experts of a trajectory group, written once, read by row range.

| who | where | how often |
|---|---|---|
| a rollout host writes a group when it is finished | `write_group`, in a worker thread | once per group |
| trainer ranks read their trajectories | `RoutedExpertsStore.read` | once per trajectory and rank |
| the controller collects behind the manifest | `collect` | once per checkpoint |

A group becomes visible by one rename of its folder; what a reader finds is whole. Every Zarr chunk and index has a
CRC-32C that is checked on reading. Functions are safe in threads and after a fork: no global state, no own threads.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from checkpoints.publish import fsync_folder, publish_folder
from miles_hpc.core.errors import IntegrityError, UserError
from miles_hpc.core.types import RoutedExpertsRef, WeightVersion
from miles_hpc.routing import codec
from miles_hpc.routing.layout import ArrayLayout, array_key, plan_collection, store_name

__all__ = ["RoutedExpertsStore", "collect", "write_group"]


def write_group(
    run_dir: Path,
    arrays: Sequence[npt.NDArray[np.unsignedinteger]],
    *,
    group_id: int,
    attempt: int,
    term: int,
    version: WeightVersion,
    durable: bool = True,
) -> list[RoutedExpertsRef]:
    """Publish a group's routed experts below run_dir/routing; returns one reference per trajectory, in order.

    `arrays[i]` is [rows_i, moe_layers, top_k], uint8 or uint16, equal in all but rows; rows_i may be 0. `version` is
    the oldest that sampled any token of the group. Blocks for the write and (with `durable`) four fsyncs. Writing
    the same content twice is fine and writes nothing.

    Raises UserError for arrays that don't fit together, IntegrityError when this attempt was published under this
    term with other content, OSError.
    """
    store = run_dir / "routing" / store_name(version)
    key = array_key(group_id, attempt, term)
    ends = np.cumsum([len(a) for a in arrays]).tolist()
    references = [
        RoutedExpertsRef(store=f"routing/{store.name}", key=key, start=end - len(a), end=end)
        for a, end in zip(arrays, ends, strict=True)
    ]
    if not arrays or ends[-1] == 0:
        return references
    if any(a.ndim != 3 or a.dtype != arrays[0].dtype or a.shape[1:] != arrays[0].shape[1:] for a in arrays):
        seen = ", ".join(f"{a.dtype}{list(a.shape)}" for a in arrays)
        raise UserError(f"group {group_id}: routed experts {seen}: expected [rows, layers, top_k] of one type")
    rows = np.concatenate(arrays) if len(arrays) > 1 else arrays[0]
    layout = ArrayLayout.plan(rows.shape[0], rows.shape[1], rows.shape[2], rows.dtype)

    final = store / key
    temporary = store / f".{key}.{os.getpid()}.{threading.get_ident()}.tmp"
    store.mkdir(parents=True, exist_ok=True)
    temporary.mkdir()
    try:
        attributes = {"row_ends": ends, "weight_version": str(version)}
        _write(temporary / "zarr.json", codec.encode_metadata(layout, attributes), durable)
        for number in range(layout.n_shards):
            part = rows[number * layout.shard_rows : (number + 1) * layout.shard_rows]
            _write(temporary / f"c.{number}.0.0", codec.encode_shard(layout, part), durable)
        if durable:
            publish_folder(temporary, final)
        else:
            temporary.rename(final)
    except OSError:
        if not final.exists():
            raise
        if not _equal(temporary, final):  # references to one would read rows of the other
            raise IntegrityError(f"routed experts {store.name}/{key}: published before with other content") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # gone already when it was published
    return references


def _equal(one: Path, other: Path) -> bool:
    names = {path.name for path in one.iterdir()}
    return names == {path.name for path in other.iterdir()} and all(
        (one / name).read_bytes() == (other / name).read_bytes() for name in names
    )


def _write(path: Path, data: bytes, durable: bool) -> None:
    with path.open("xb") as file:
        file.write(data)
        if durable:
            file.flush()
            os.fsync(file.fileno())


@dataclass(frozen=True)
class _Open:
    """What is remembered of one array: layout and Zarr shard indexes."""

    path: Path
    layout: ArrayLayout
    index: tuple[npt.NDArray[np.uint64], ...]  # per Zarr shard [shard_chunks, 2]


class RoutedExpertsStore:
    """Reads routed experts of one run. Safe to use from several threads; holds no file open between calls.

    The layouts of the last `remember` arrays are kept, since a rank reads several trajectories of one group.
    """

    def __init__(self, run_dir: Path, *, remember: int = 256) -> None:
        self._run_dir = run_dir
        self._remember = remember
        self._known: OrderedDict[tuple[str, str], _Open] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, ref: RoutedExpertsRef, start: int = 0, end: int | None = None) -> npt.NDArray[np.unsignedinteger]:
        """Rows [start, end) of the trajectory (default: all) as [rows, moe_layers, top_k], read-only or own memory.

        Only the Zarr chunks that hold those rows are read. Raises IntegrityError when the array is missing, shorter
        than the reference says, or damaged; IndexError for rows outside the trajectory.
        """
        n_rows = ref.end - ref.start
        end = n_rows if end is None else end
        if not (0 <= ref.start <= ref.end and 0 <= start <= end <= n_rows):
            raise IndexError(f"routed experts {ref.key}: rows [{start}, {end}) of a trajectory of {n_rows}")
        what = f"routed experts {ref.store}/{ref.key}"
        array = self._open(ref, what)
        layout = array.layout
        if ref.end > layout.rows:
            raise IntegrityError(f"{what}: the reference ends at row {ref.end}, the array at {layout.rows}")
        first, last = ref.start + start, ref.start + end
        if first == last:
            return np.zeros((0, *layout.row_shape), dtype=layout.dtype)
        numbers = range(first // layout.chunk_rows, -(-last // layout.chunk_rows))
        chunks = self._chunks(array, numbers, what)
        base = numbers.start * layout.chunk_rows
        whole = chunks[0] if len(chunks) == 1 else np.concatenate(chunks)
        return whole[first - base : last - base]

    def _open(self, ref: RoutedExpertsRef, what: str) -> _Open:
        name = (ref.store, ref.key)
        with self._lock:
            known = self._known.get(name)
            if known is not None:
                self._known.move_to_end(name)
                return known
        if ".." in ref.store.split("/") or ref.store.startswith("/") or "/" in ref.key:
            raise IntegrityError(f"{what}: the reference leads out of the run directory")
        path = self._run_dir / ref.store / ref.key
        try:
            layout, _ = codec.parse_metadata((path / "zarr.json").read_bytes())
            index = tuple(_read_index(path / f"c.{n}.0.0", layout, what) for n in range(layout.n_shards))
        except FileNotFoundError as error:
            raise IntegrityError(
                f"{what}: missing ({error.filename}): never published, or collected behind a newer manifest"
            ) from error
        opened = _Open(path, layout, index)
        with self._lock:
            self._known[name] = opened
            while len(self._known) > self._remember:
                self._known.popitem(last=False)
        return opened

    def _chunks(self, array: _Open, numbers: range, what: str) -> list[npt.NDArray[np.unsignedinteger]]:
        layout = array.layout
        chunks = []
        for number in numbers:
            shard, place = divmod(number, layout.shard_chunks)
            offset, n_bytes = (int(v) for v in array.index[shard][place])
            try:
                data = _read_range(array.path / f"c.{shard}.0.0", offset, n_bytes)
            except FileNotFoundError as error:
                raise IntegrityError(f"{what}: {error.filename} went away while it was read") from error
            chunks.append(codec.decode_chunk(layout, data, f"{what}, Zarr chunk {number}"))
        return chunks


def _read_range(path: Path, offset: int, n_bytes: int) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        if offset + n_bytes > size:
            raise IntegrityError(f"{path}: {size} bytes; its index wants [{offset}, {offset + n_bytes})")
        return os.pread(fd, n_bytes, offset)
    finally:
        os.close(fd)


def _read_index(path: Path, layout: ArrayLayout, what: str) -> npt.NDArray[np.uint64]:
    n_bytes = codec.index_bytes(layout)
    size = path.stat().st_size
    if size < n_bytes:
        raise IntegrityError(f"{what}: {path.name} has {size} bytes, its index alone needs {n_bytes}")
    return codec.decode_index(layout, _read_range(path, size - n_bytes, n_bytes), f"{what}, index of {path.name}")


def collect(run_dir: Path, before_step: int, keep: Iterable[str] = ()) -> tuple[str, ...]:
    """Remove stores of weight versions below `before_step` (see layout.plan_collection); returns their names.

    `keep`: store folders that references of pending groups name, with or without the leading "routing/".
    Each is renamed out of sight first, so that no reader finds half of one.
    """
    root = run_dir / "routing"
    if not root.is_dir():
        return ()
    for leftover in root.glob(".collected.*"):
        shutil.rmtree(leftover, ignore_errors=True)
    names = [path.name for path in root.iterdir()]
    plan = plan_collection(names, before_step, {name.removeprefix("routing/") for name in keep})
    for name in plan:
        hidden = root / f".collected.{name}"
        (root / name).rename(hidden)
        fsync_folder(root)
        shutil.rmtree(hidden)
    return plan
