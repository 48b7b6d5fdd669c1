"""Archives: plain h5py reads what was given; published whole; never changed."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import h5py
import msgspec
import numpy as np
import pytest

from miles_hpc.controller.cleaning import archive_evaluation
from miles_hpc.core.errors import FencedError, UserError
from miles_hpc.core.paths import RunPaths
from miles_hpc.core.types import (
    Array,
    ChatMessage,
    GroupPurpose,
    GroupSummary,
    PayloadRef,
    Prompt,
    SampleStatus,
    Trajectory,
    TrajectoryGroup,
    VersionSpan,
    WeightVersion,
)
from miles_hpc.dataflow.archive import archive_name, write_archive
from tests.unit.groups import summary


def trajectory(group_id: int, index: int, n: int, version: WeightVersion | None) -> Trajectory:
    rng = np.random.default_rng(100 * group_id + index)
    return Trajectory(
        group_id=group_id,
        index=index,
        tokens=Array.of(rng.integers(0, 64, n, dtype=np.int32)),
        loss_mask=Array.of(rng.integers(0, 2, n, dtype=np.uint8)),
        log_probs=Array.of(rng.normal(size=n).astype(np.float32)),
        versions=(
            VersionSpan(version=WeightVersion(version.term, version.step + 1), start=1, end=2),
            VersionSpan(version=version, start=2, end=n),
        )
        if version is not None
        else (),
        reward=index / 2,
        status=SampleStatus.TRUNCATED if index else SampleStatus.COMPLETED,
        turns=index + 1,
        label="wlen é",
    )


def group(group_id: int, version: WeightVersion | None, sizes: tuple[int, ...] = (5, 8)) -> TrajectoryGroup:
    return TrajectoryGroup(
        group_id=group_id,
        attempt=1,
        purpose=GroupPurpose.TRAIN,
        prompt=Prompt(environment="shell", messages=(ChatMessage(role="user", content="? ü"),), seed=group_id),
        trajectories=tuple(trajectory(group_id, i, n, version) for i, n in enumerate(sizes)),
    )


def test_what_is_written_is_read(tmp_path: Path) -> None:
    groups = [group(3, WeightVersion(2, 12)), group(4, None, (0, 7))]
    path = tmp_path / "archive" / archive_name(WeightVersion(2, 12))
    n_bytes = write_archive(path, groups)
    assert path.name == "v000012.t000002.h5"
    assert path.stat().st_size == n_bytes
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    members = [t for g in groups for t in g.trajectories]
    with h5py.File(path) as file:
        assert dict(file.attrs) == {"format": 1, "n_groups": 2, "n_tokens": 20}
        offsets = file["offsets"][:]
        for i, t in enumerate(members):
            part = slice(offsets[i], offsets[i + 1])
            for name in ("tokens", "loss_mask", "log_probs"):
                np.testing.assert_array_equal(file[name][part], getattr(t, name).numpy())
        rows = file["trajectories"][:]
        assert rows["group_id"].tolist() == [3, 3, 4, 4]
        assert rows["reward"].tolist() == [0.0, 0.5, 0.0, 0.5]
        assert rows["oldest_step"].tolist() == [12, 12, -1, -1]
        assert [s.decode() for s in rows["status"]] == ["completed", "truncated"] * 2
        assert rows["label"][0].decode() == "wlen é"
        assert json.loads(file["prompts"][2])["seed"] == 4


def test_an_archive_never_changes(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    write_archive(path, [group(1, None)])
    before = path.read_bytes()
    with pytest.raises(FileExistsError):
        write_archive(path, [group(2, None)])
    assert path.read_bytes() == before


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    good = trajectory(1, 0, 5, None)
    fields = {f: getattr(good, f) for f in good.__struct_fields__}
    bad = Trajectory(**fields | {"log_probs": Array.of(np.zeros(4, dtype=np.float32))})
    broken = group(1, None)
    broken = TrajectoryGroup(group_id=1, attempt=0, purpose=broken.purpose, prompt=broken.prompt, trajectories=(bad,))
    with pytest.raises(UserError, match="log_probs has 4 entries, expected 5"):
        write_archive(tmp_path / "a.h5", [broken])
    with pytest.raises(UserError, match="no groups"):
        write_archive(tmp_path / "a.h5", [])
    assert list(tmp_path.iterdir()) == []


def spooled(paths: RunPaths, number: int) -> GroupSummary:
    """An evaluation's group on storage, as a host announces it."""
    made = group(number, WeightVersion(2, 12))
    data = msgspec.msgpack.encode(made)
    path = paths.spool(2, "host") / f"eval-{number}-0.msgpack"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    announced = summary(number, purpose=GroupPurpose.EVAL)
    return msgspec.structs.replace(
        announced, payload=PayloadRef(path=paths.relative(path), n_bytes=len(data), crc32=zlib.crc32(data))
    )


def test_an_evaluation_is_one_file_and_its_payloads_go(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    groups = [spooled(paths, number) for number in (7, 8)]
    other = spooled(paths, 99)
    asked: list[str] = []
    n_bytes = archive_evaluation(paths, WeightVersion(2, 12), groups, fence=lambda: asked.append("fence"))
    path = paths.archive / "eval.v000012.t000002.h5"
    assert path.stat().st_size == n_bytes and len(asked) == 2
    with h5py.File(path) as file:
        assert sorted(set(file["trajectories"]["group_id"])) == [7, 8]
    assert not any((paths.root / g.payload.path).exists() for g in groups)
    assert (paths.root / other.payload.path).exists()


def test_a_fenced_controller_archives_and_removes_nothing(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    groups = [spooled(paths, 7)]

    def fence() -> None:
        raise FencedError("a newer term")

    with pytest.raises(FencedError):
        archive_evaluation(paths, WeightVersion(2, 12), groups, fence=fence)
    assert not paths.archive.exists() and (paths.root / groups[0].payload.path).exists()


def test_a_payload_that_is_gone_leaves_the_others(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    groups = [spooled(paths, 7), spooled(paths, 8)]
    (paths.root / groups[1].payload.path).unlink()
    with pytest.raises(FileNotFoundError):
        archive_evaluation(paths, WeightVersion(2, 12), groups, fence=lambda: None)
    assert (paths.root / groups[0].payload.path).exists()
