"""Routing store: what was written is read, by us and by zarr-python; damage and absence are named."""

from __future__ import annotations

import multiprocessing
import threading
from pathlib import Path

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from zarr.codecs import BytesCodec, Crc32cCodec, ZstdCodec

from miles_hpc.core.errors import IntegrityError, UserError
from miles_hpc.core.types import RoutedExpertsRef, WeightVersion
from miles_hpc.routing import codec, layout
from miles_hpc.routing.layout import ArrayLayout, array_key, experts_dtype, inodes, plan_collection, store_name
from miles_hpc.routing.store import RoutedExpertsStore, collect, write_group
from tests.exploring import examples

VERSION = WeightVersion(2, 12)


def group(run_dir: Path, arrays: list[np.ndarray], group_id: int = 7, **options: object) -> list[RoutedExpertsRef]:
    settings = {"group_id": group_id, "attempt": 0, "term": 3, "version": VERSION} | options
    return write_group(run_dir, arrays, **settings)  # type: ignore[arg-type]


def rows(n: int, seed: int = 0, layers: int = 3, top_k: int = 2) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (n, layers, top_k), dtype=np.uint8)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("routing")


counter = iter(range(10**9))


@settings(max_examples=examples(60))
@given(data=st.data(), dtype=st.sampled_from([np.uint8, np.uint16]))
def test_trajectories_read_back_and_zarr_agrees(scratch: Path, data: st.DataObject, dtype: type) -> None:
    layers, top_k = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    sizes = data.draw(st.lists(st.integers(0, 12), min_size=1, max_size=5))
    arrays = [data.draw(hnp.arrays(dtype, (n, layers, top_k))) for n in sizes]
    chunk_rows, shard_chunks = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 3))
    row_bytes = layers * top_k * np.dtype(dtype).itemsize
    with pytest.MonkeyPatch.context() as patch:  # small limits, so that small arrays have several chunks and shards
        patch.setattr(layout, "CHUNK_BYTES", chunk_rows * row_bytes)
        patch.setattr(layout, "SHARD_BYTES", chunk_rows * row_bytes * shard_chunks)
        refs = group(scratch, arrays, next(counter), durable=False)
    store = RoutedExpertsStore(scratch)
    for array, ref in zip(arrays, refs, strict=True):
        if sum(sizes) == 0:
            break
        np.testing.assert_array_equal(store.read(ref), array)
        start = data.draw(st.integers(0, len(array)))
        end = data.draw(st.integers(start, len(array)))
        part = store.read(ref, start, end)
        np.testing.assert_array_equal(part, array[start:end])
        assert part.dtype == dtype
    if sum(sizes):
        opened = zarr.open_array(scratch / refs[0].store / refs[0].key, mode="r")
        np.testing.assert_array_equal(opened[:], np.concatenate(arrays))
        assert opened.attrs["row_ends"] == np.cumsum(sizes).tolist()


def test_zarr_python_writes_what_we_read(tmp_path: Path) -> None:
    array = rows(50)
    plan = ArrayLayout(50, 3, 2, "uint8", 8, 3)
    written = zarr.create_array(
        tmp_path / "routing/v000012.t000002/k",
        shape=array.shape,
        dtype="uint8",
        chunks=(8, 3, 2),
        shards=(24, 3, 2),
        serializer=BytesCodec(endian=None),
        compressors=[ZstdCodec(level=1), Crc32cCodec()],
        chunk_key_encoding={"name": "default", "separator": "."},
    )
    written[:] = array
    (tmp_path / "routing/v000012.t000002/k/zarr.json").write_bytes(codec.encode_metadata(plan, {}))
    ref = RoutedExpertsRef(store="routing/v000012.t000002", key="k", start=0, end=50)
    np.testing.assert_array_equal(RoutedExpertsStore(tmp_path).read(ref), array)


def test_a_group_is_three_inodes(tmp_path: Path) -> None:
    [ref] = group(tmp_path, [rows(10)])
    assert ref == RoutedExpertsRef(store="routing/v000012.t000002", key="g000000007.a00.t000003", start=0, end=10)
    folder = tmp_path / ref.store / ref.key
    assert sorted(p.name for p in folder.iterdir()) == ["c.0.0.0", "zarr.json"]
    assert [p.name for p in folder.parent.iterdir()] == [ref.key]  # no temporary left
    assert sum(1 for _ in (tmp_path / "routing").rglob("*")) + 1 == inodes(groups_per_step=1, steps_kept=1)


def test_an_attempt_has_one_content(tmp_path: Path) -> None:
    first = group(tmp_path, [rows(4, seed=1)])
    assert group(tmp_path, [rows(4, seed=1)]) == first
    for other in ([rows(4, seed=2)], [rows(5, seed=1)], [rows(2, seed=1), rows(2, seed=1)]):
        with pytest.raises(IntegrityError, match="published before with other content"):
            group(tmp_path, other)
    np.testing.assert_array_equal(RoutedExpertsStore(tmp_path).read(first[0]), rows(4, seed=1))
    assert len(list((tmp_path / first[0].store).iterdir())) == 1  # no temporary left


def test_any_damaged_byte_is_noticed(tmp_path: Path) -> None:
    [ref] = group(tmp_path, [rows(6)])
    path = tmp_path / ref.store / ref.key / "c.0.0.0"
    good = path.read_bytes()
    for position in range(len(good)):
        bad = bytearray(good)
        bad[position] ^= 0x41
        path.write_bytes(bad)
        with pytest.raises(IntegrityError, match=r"routed experts|index wants"):
            RoutedExpertsStore(tmp_path).read(ref)
    for cut in range(0, len(good), 7):
        path.write_bytes(good[:cut])
        with pytest.raises(IntegrityError):
            RoutedExpertsStore(tmp_path).read(ref)
    path.write_bytes(good)
    np.testing.assert_array_equal(RoutedExpertsStore(tmp_path).read(ref), rows(6))


def test_absence_and_bad_references_are_named(tmp_path: Path) -> None:
    [ref] = group(tmp_path, [rows(6)])
    store = RoutedExpertsStore(tmp_path)
    gone = RoutedExpertsRef(store=ref.store, key="g000000099.a00.t000003", start=0, end=6)
    with pytest.raises(IntegrityError, match=r"g000000099.*missing.*never published, or collected"):
        store.read(gone)
    with pytest.raises(IntegrityError, match="ends at row 7, the array at 6"):
        store.read(RoutedExpertsRef(store=ref.store, key=ref.key, start=0, end=7))
    for start, end in ((0, 7), (-1, 3), (4, 3)):
        with pytest.raises(IndexError, match="trajectory of 6"):
            store.read(ref, start, end)
    outside = RoutedExpertsRef(store="routing/../../x", key=ref.key, start=0, end=6)
    with pytest.raises(IntegrityError, match="leads out"):
        store.read(outside)
    metadata = tmp_path / ref.store / ref.key / "zarr.json"
    metadata.write_bytes(metadata.read_bytes().replace(b'"zstd"', b'"gzip"'))
    with pytest.raises(IntegrityError, match="not of a routed-experts array"):
        RoutedExpertsStore(tmp_path).read(ref)


def test_arrays_that_don_t_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="of one type"):
        group(tmp_path, [rows(3), rows(3, layers=2)])
    with pytest.raises(UserError, match="expected uint8 or uint16"):
        group(tmp_path, [rows(3).astype(np.int32)])
    assert not list(tmp_path.rglob("zarr.json"))
    assert group(tmp_path, []) == []


def test_threads_share_a_store(tmp_path: Path) -> None:
    arrays = [[rows(20, seed=10 * g + i) for i in range(4)] for g in range(6)]
    refs: list[list[RoutedExpertsRef]] = [[] for _ in arrays]

    def write(number: int) -> None:
        refs[number] = group(tmp_path, arrays[number], number)

    writers = [threading.Thread(target=write, args=(g,)) for g in range(6)]
    for thread in writers:
        thread.start()
    for thread in writers:
        thread.join()
    store, wrong = RoutedExpertsStore(tmp_path, remember=2), []

    def read() -> None:
        for expected, found in zip(arrays, refs, strict=True):
            for array, ref in zip(expected, found, strict=True):
                if not np.array_equal(store.read(ref), array):
                    wrong.append(ref)

    readers = [threading.Thread(target=read) for _ in range(4)]
    for thread in readers:
        thread.start()
    for thread in readers:
        thread.join()
    assert not wrong


def _read_in_child(store: RoutedExpertsStore, ref: RoutedExpertsRef, queue: multiprocessing.SimpleQueue) -> None:
    queue.put(store.read(ref).tolist())


def test_a_fork_reads_on(tmp_path: Path) -> None:
    [ref] = group(tmp_path, [rows(9)])
    store = RoutedExpertsStore(tmp_path)
    store.read(ref)
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=_read_in_child, args=(store, ref, queue))
    child.start()
    child.join(30)
    assert child.exitcode == 0
    assert queue.get() == rows(9).tolist()


def test_collection_goes_by_step_and_spares_what_is_referenced(tmp_path: Path) -> None:
    refs = {
        (term, step): group(tmp_path, [rows(3)], 10 * term + step, version=WeightVersion(term, step))[0]
        for term, step in ((1, 3), (1, 5), (2, 4), (2, 6))
    }
    (tmp_path / "routing" / "notes").mkdir()
    gone = collect(tmp_path, before_step=6, keep=[refs[1, 5].store])
    assert gone == (store_name(WeightVersion(1, 3)), store_name(WeightVersion(2, 4)))
    left = sorted(p.name for p in (tmp_path / "routing").iterdir())
    assert left == ["notes", "v000005.t000001", "v000006.t000002"]
    assert collect(tmp_path, before_step=6, keep=[refs[1, 5].store]) == ()
    assert collect(tmp_path / "absent", before_step=6) == ()


def test_layout_plans() -> None:
    big = ArrayLayout.plan(8 * 32_768, 75, 8, np.uint8)
    assert big.chunk_rows * 75 * 8 <= layout.CHUNK_BYTES < (big.chunk_rows + 1) * 75 * 8
    assert ArrayLayout.plan(560, 3, 2, np.uint8) == ArrayLayout(560, 3, 2, "uint8", 560, 1)
    several = ArrayLayout.plan(4_000_000, 75, 8, np.uint8)
    assert (several.n_shards, several.n_bytes) == (3, 2_400_000_000)
    assert several.shard_rows * 600 <= layout.SHARD_BYTES
    with pytest.raises(UserError, match="at least one id"):
        ArrayLayout.plan(0, 3, 2, np.uint8)


def test_types_and_names() -> None:
    assert experts_dtype(8) == experts_dtype(256) == np.uint8
    assert experts_dtype(257) == np.uint16
    with pytest.raises(UserError, match="70000 experts"):
        experts_dtype(70_000)
    assert layout.store_version(store_name(VERSION)) == VERSION
    assert layout.store_version("v12") is None
    assert array_key(12, 3, 4) == "g000000012.a03.t000004"
    assert plan_collection(["v000002.t000001", "v000001.t000009", "x"], 2) == ("v000001.t000009",)
