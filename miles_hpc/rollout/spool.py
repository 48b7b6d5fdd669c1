"""Spooling: a finished group becomes a payload file and a summary.

    routed experts ─▶ routing store (one array per group)       first, so that the payload's references are good
    trajectories   ─▶ journal/spool/<term>/<host>/<purpose>-<id>-<attempt>.msgpack   by rename
    GroupSummary   ─▶ the controller, which journals ownership before it acknowledges

Payload files aren't synced: after a crash of the node a group that isn't owned is sampled again, and one whose bytes
don't match the announced CRC is refused by whoever reads it.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import msgspec

from checkpoints.publish import publish_bytes
from miles_hpc.core.errors import IntegrityError
from miles_hpc.core.messages import GenerateGroup
from miles_hpc.core.paths import RunPaths
from miles_hpc.core.types import (
    GroupPurpose,
    GroupSummary,
    PayloadRef,
    RoutedExpertsRef,
    Trajectory,
    TrajectoryGroup,
    TrajectorySummary,
    WeightVersion,
)
from miles_hpc.rollout.sampler import Played

__all__ = ["read_payload", "spool_group"]

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(TrajectoryGroup)


def spool_group(
    job: GenerateGroup, played: Sequence[Played], *, paths: RunPaths, term: int, host: str, duration_s: float
) -> GroupSummary:
    """Write the group's routed experts and payload; blocks for the writes (run it in a thread). Raises OSError."""
    references = _store_routed_experts(job, played, paths, term)
    trajectories = tuple(
        msgspec.structs.replace(
            p.record.to_trajectory(
                group_id=job.group_id,
                index=p.index,
                reward=p.reward,
                status=p.status,
                label=job.prompt.label,
                routed_experts=reference,
                metadata=p.metadata,
            ),
            rollout_id=p.rollout_id,
        )
        for p, reference in zip(played, references, strict=True)
    )
    group = TrajectoryGroup(
        group_id=job.group_id,
        attempt=job.attempt,
        purpose=job.purpose,
        prompt=job.prompt,
        trajectories=trajectories,
    )
    data = _encoder.encode(group)
    folder = paths.spool(term, host)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{job.purpose.value}-{job.group_id}-{job.attempt}.msgpack"
    publish_bytes(path, data, durable=False)
    return GroupSummary(
        group_id=job.group_id,
        attempt=job.attempt,
        purpose=job.purpose,
        payload=PayloadRef(path=paths.relative(path), n_bytes=len(data), crc32=zlib.crc32(data)),
        trajectories=tuple(_summary(t, p.record.n_sampled) for t, p in zip(trajectories, played, strict=True)),
        duration_s=duration_s,
        generation_s=sum(p.generation_s for p in played),
        environment_s=sum(p.environment_s for p in played),
        host=host,
    )


def read_payload(paths: RunPaths, ref: PayloadRef) -> TrajectoryGroup:
    """The group behind a reference. Raises IntegrityError when size, CRC or content don't fit, OSError."""
    data = (paths.root / ref.path).read_bytes()
    if len(data) != ref.n_bytes or zlib.crc32(data) != ref.crc32:
        raise IntegrityError(
            f"{ref.path}: {len(data)} bytes with CRC {zlib.crc32(data):08x}; announced were {ref.n_bytes} bytes "
            f"with CRC {ref.crc32:08x}"
        )
    try:
        return _decoder.decode(data)
    except msgspec.DecodeError as error:
        raise IntegrityError(f"{ref.path}: not a trajectory group: {error}") from error


def _summary(trajectory: Trajectory, n_sampled: int) -> TrajectorySummary:
    versions = [span.version for span in trajectory.versions]
    return TrajectorySummary(
        index=trajectory.index,
        n_tokens=trajectory.tokens.shape[0],
        n_loss_tokens=n_sampled,
        reward=trajectory.reward,
        status=trajectory.status,
        turns=trajectory.turns,
        oldest_version=min(versions, key=_age) if versions else None,
        label=trajectory.label,
        routed_experts=trajectory.routed_experts,
        rollout_id=trajectory.rollout_id,
        sampled=_sampled(trajectory),
    )


def _sampled(trajectory: Trajectory) -> tuple[tuple[WeightVersion, int], ...]:
    """Sampled tokens by version, oldest first."""
    counts: dict[WeightVersion, int] = {}
    for span in trajectory.versions:
        counts[span.version] = counts.get(span.version, 0) + span.end - span.start
    return tuple(sorted(counts.items()))


def _age(version: WeightVersion) -> int:
    return version.step


def _store_routed_experts(
    job: GenerateGroup, played: Sequence[Played], paths: RunPaths, term: int
) -> Sequence[RoutedExpertsRef | None]:
    """One reference per trajectory: None for dense models, demonstrations and trajectories without a token."""
    if job.purpose is not GroupPurpose.TRAIN:
        return [None] * len(played)  # nothing replays them, and their ids are not the training groups'
    arrays = [p.record.routed_experts() for p in played]
    held = [a for a in arrays if a is not None]
    if not held:
        return [None] * len(played)
    for p, rows in zip(played, arrays, strict=True):
        if rows is not None and len(rows) != p.record.n_tokens - 1:
            raise IntegrityError(
                f"group {job.group_id}, trajectory {p.index}: {len(rows)} routed-expert rows for "
                f"{p.record.n_tokens} tokens, expected one row fewer"
            )
    from miles_hpc.routing.store import write_group  # brings zarr, which dense runs don't need

    versions = [span.version for p in played for span in p.record.versions]
    references = iter(
        write_group(
            paths.root,
            held,
            group_id=job.group_id,
            attempt=job.attempt,
            term=term,
            version=min(versions, key=_age),
            durable=False,
        )
    )
    return [None if a is None else next(references) for a in arrays]
