"""A small batch, a small MoE model and worlds of ranks, for tests of training backends."""

from __future__ import annotations

import os
import pickle
import traceback
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from miles_hpc.core.config import GroupConfig, GroupsConfig, ModelConfig, RolloutConfig, RunConfig, TrainConfig
from miles_hpc.core.messages import TrainStep
from miles_hpc.core.types import (
    Array,
    GroupPurpose,
    MicrobatchPlan,
    PackedItem,
    PayloadRef,
    Prompt,
    RoutedExpertsRef,
    SampleStatus,
    Trajectory,
    TrajectoryGroup,
)

VOCAB, LAYERS, EXPERTS, TOP_K = 32, 2, 4, 2

MOE = {
    "model_type": "qwen3_moe",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "moe_intermediate_size": 16,
    "intermediate_size": 32,
    "num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "norm_topk_prob": True,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}


def run_config(*, model: dict[str, Any] | None = None, dtype: str = "float32", **train: Any) -> RunConfig:
    group = GroupConfig(nodes=1)
    return RunConfig(
        name="test",
        model=ModelConfig(config=model or MOE, dtype=dtype),  # type: ignore[arg-type]
        groups=GroupsConfig(trainer=group, rollout=group, sandbox=group),
        rollout=RolloutConfig(temperature=0.9),
        train=TrainConfig(max_tokens_per_microbatch=64, row_tokens=32, **train),
        seed=3,
    )


def write_payload(root: Path, group: TrajectoryGroup) -> PayloadRef:
    path = root / "journal" / f"group_{group.group_id}.msgpack"
    path.parent.mkdir(parents=True, exist_ok=True)
    data = msgspec.msgpack.encode(group)
    path.write_bytes(data)
    return PayloadRef(path=path.relative_to(root).as_posix(), n_bytes=len(data), crc32=zlib.crc32(data))


def make_trajectory(rng: np.random.Generator, group_id: int, index: int, n_tokens: int) -> Trajectory:
    mask = rng.integers(0, 2, n_tokens).astype(np.uint8)
    mask[0], mask[-1] = 0, 1
    log_probs = np.where(mask > 0, -rng.uniform(1.0, 5.0, n_tokens), 0.0).astype(np.float32)
    return Trajectory(
        group_id=group_id,
        index=index,
        tokens=Array.of(rng.integers(1, VOCAB, n_tokens).astype(np.int32)),
        loss_mask=Array.of(mask),
        log_probs=Array.of(log_probs),
        versions=(),
        reward=0.0,
        status=SampleStatus.COMPLETED,
        turns=1,
        routed_experts=RoutedExpertsRef(
            store="routing/test", key=f"{group_id}", start=64 * index, end=64 * index + n_tokens - 1
        ),
    )


def fake_routing(ref: RoutedExpertsRef) -> np.ndarray:
    """Ids that depend on the reference alone: distinct within a token."""
    rng = np.random.default_rng([int(ref.key), ref.start])
    scores = rng.random((ref.end - ref.start, LAYERS, EXPERTS))
    return scores.argsort(axis=-1)[..., :TOP_K].astype(np.uint8)


def make_items(
    root: Path, *, n_groups: int = 3, n_samples: int = 4, seed: int = 0, longest: int = 14
) -> list[PackedItem]:
    """Items without a place yet: one payload file per group."""
    rng = np.random.default_rng(seed)
    items = []
    for group_id in range(n_groups):
        group = TrajectoryGroup(
            group_id=group_id,
            attempt=0,
            purpose=GroupPurpose.TRAIN,
            prompt=Prompt(environment="test", messages=()),
            trajectories=tuple(
                make_trajectory(rng, group_id, i, int(rng.integers(4, longest + 1))) for i in range(n_samples)
            ),
        )
        ref = write_payload(root, group)
        for t in group.trajectories:
            items.append(
                PackedItem(
                    payload=ref,
                    group_id=group_id,
                    index=t.index,
                    n_tokens=t.tokens.shape[0],
                    n_loss_tokens=int(t.loss_mask.numpy().sum()),
                    row=0,
                    offset=0,
                    advantage=float(rng.normal()),
                    routed_experts=t.routed_experts,
                )
            )
    return items


def pack(items: list[PackedItem], *, row_tokens: int = 32) -> MicrobatchPlan:
    """Next-fit packing into one microbatch."""
    placed, row, offset = [], 0, 0
    for item in items:
        if offset + item.n_tokens > row_tokens:
            row, offset = row + 1, 0
        placed.append(msgspec.structs.replace(item, row=row, offset=offset))
        offset += item.n_tokens
    return MicrobatchPlan(rows=row + 1, row_tokens=row_tokens, items=tuple(placed))


def train_step(
    step: int, plans: list[list[MicrobatchPlan]], *, loss: str = "grpo", lr: float = 1e-2, replay: bool = True
) -> TrainStep:
    total = sum(i.n_loss_tokens for rank in plans for plan in rank for i in plan.items)
    return TrainStep(
        step=step,
        loss=loss,
        lr=lr,
        microbatches=tuple(tuple(rank) for rank in plans),
        total_loss_tokens=total,
        routing_replay=replay,
        deadline_s=60.0,
    )


Scenario = Callable[[int, int, Any, Path], Any]


def _rank_main(rank: int, size: int, folder: str, scenario: Scenario) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", size)
    try:
        outcome: Any = ("ok", scenario(rank, size, store, Path(folder)))
    except BaseException:  # torch has errors that aren't Exceptions
        outcome = ("error", traceback.format_exc())
    Path(f"{folder}/result_{rank}").write_bytes(pickle.dumps(outcome))
    os._exit(0)  # as the launcher does: no interpreter teardown under native threads


def run_world(size: int, folder: Path, scenario: Scenario) -> list[Any]:
    """Run `scenario(rank, size, store, folder)` on `size` new processes; returns what each returned."""
    import torch
    import torch.multiprocessing as mp

    if torch.cuda.is_available() and torch.cuda.device_count() < size:
        pytest.skip(f"{size} ranks over NCCL want as many devices; here are {torch.cuda.device_count()}")
    folder.mkdir(parents=True, exist_ok=True)
    mp.start_processes(_rank_main, (size, str(folder), scenario), nprocs=size, start_method="spawn")
    results = []
    for rank in range(size):
        kind, value = pickle.loads(Path(folder / f"result_{rank}").read_bytes())
        assert kind == "ok", f"rank {rank}:\n{value}"
        results.append(value)
    return results
