"""From a microbatch plan and payload files to the arrays of one forward.

    PackedItem -> payload file (CRC) -> Trajectory -> tokens [offset, offset + n) of its row
               -> routed experts (n - 1 rows) at the same positions

    row:       t0 t1 t2 | u0 u1 u2 u3 | .  .        segment 1, segment 2, padding (segment 0)
    position:   0  1  2 |  0  1  2  3 | 0  0

A token's log-prob comes from the position before it, so the first token of a trajectory can't carry loss, and what
is trained at position p belongs to token p + 1 of the same segment. `assemble` is numpy only; `to_device` makes the
tensors. Attention sees a row as several sequences through a block-diagonal causal mask.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from miles_hpc.core.errors import IntegrityError
from miles_hpc.core.types import (
    MicrobatchPlan,
    ModelShape,
    PackedItem,
    PayloadRef,
    RoutedExpertsRef,
    Trajectory,
    TrajectoryGroup,
)
from miles_hpc.trainer.replay import check_routed_experts

if TYPE_CHECKING:
    import torch

__all__ = ["DeviceBatch", "PackedArrays", "PayloadReader", "RoutedExpertsReader", "assemble", "empty", "to_device"]

#: Reads the rows of a reference: ids [rows, moe_layers, top_k].
RoutedExpertsReader = Callable[[RoutedExpertsRef], npt.NDArray[Any]]


class PayloadReader:
    """Reads payload files below `root` and keeps the decoded groups until `clear`, since rows share files."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._decoder = msgspec.msgpack.Decoder(TrajectoryGroup)
        self._groups: dict[str, tuple[int, dict[int, Trajectory], int]] = {}

    def trajectory(self, item: PackedItem) -> Trajectory:
        """The trajectory of `item`. Raises IntegrityError when the file isn't what was announced."""
        ref = item.payload
        if ref.path not in self._groups:
            group = self._read(ref)
            self._groups[ref.path] = (ref.crc32, {t.index: t for t in group.trajectories}, group.group_id)
        crc, trajectories, group_id = self._groups[ref.path]
        if crc != ref.crc32 or group_id != item.group_id or item.index not in trajectories:
            raise IntegrityError(
                f"payload {ref.path}: holds group {group_id} with trajectories {sorted(trajectories)} (CRC {crc:08x}), "
                f"expected trajectory {item.index} of group {item.group_id} (CRC {ref.crc32:08x})"
            )
        return trajectories[item.index]

    def clear(self) -> None:
        self._groups.clear()

    def _read(self, ref: PayloadRef) -> TrajectoryGroup:
        path = self._root / ref.path
        try:
            data = path.read_bytes()
        except OSError as error:
            raise IntegrityError(f"payload {ref.path}: can't be read: {error}") from error
        crc = zlib.crc32(data)
        if len(data) != ref.n_bytes or crc != ref.crc32:
            raise IntegrityError(
                f"payload {ref.path}: {len(data)} bytes with CRC {crc:08x}, "
                f"announced were {ref.n_bytes} bytes with CRC {ref.crc32:08x}"
            )
        try:
            return self._decoder.decode(data)
        except msgspec.MsgspecError as error:
            raise IntegrityError(f"payload {ref.path}: not a trajectory group: {error}") from error


@dataclass(frozen=True)
class PackedArrays:
    """One microbatch, token-aligned. R rows of L tokens; columns that no row uses are cut off."""

    tokens: npt.NDArray[np.int64]  # [R, L]
    position_ids: npt.NDArray[np.int64]  # [R, L], restart per trajectory
    segment_ids: npt.NDArray[np.int64]  # [R, L], 0 is padding
    loss_mask: npt.NDArray[np.bool_]  # [R, L]
    log_probs: npt.NDArray[np.float32]  # [R, L], the engine's
    advantages: npt.NDArray[np.float32]  # [R, L]
    routed_experts: npt.NDArray[np.int64] | None  # [R, L, moe_layers, top_k]
    recorded: npt.NDArray[np.bool_]  # [R, L], whether routed_experts has an entry

    @property
    def n_tokens(self) -> int:
        """Tokens that aren't padding."""
        return int((self.segment_ids > 0).sum())

    @property
    def n_loss_tokens(self) -> int:
        return int(self.loss_mask.sum())


def assemble(
    plan: MicrobatchPlan,
    payloads: PayloadReader,
    shape: ModelShape,
    read_routed_experts: RoutedExpertsReader | None = None,
) -> PackedArrays:
    """Read and place every item of `plan`. Without `read_routed_experts` nothing is replayed.

    Raises IntegrityError when a file, a count or an id disagrees with the plan or the model.
    """
    if not plan.items:
        return empty()
    size = (plan.rows, plan.row_tokens)
    tokens = np.zeros(size, np.int64)
    positions = np.zeros(size, np.int64)
    segments = np.zeros(size, np.int64)
    loss_mask = np.zeros(size, np.bool_)
    log_probs = np.zeros(size, np.float32)
    advantages = np.zeros(size, np.float32)
    recorded = np.zeros(size, np.bool_)
    routed: npt.NDArray[np.int64] | None = None
    if read_routed_experts is not None and shape.moe_layers:
        routed = np.zeros((*size, len(shape.moe_layers), shape.top_k), np.int64)
    for number, item in enumerate(plan.items, start=1):
        what = f"group {item.group_id} trajectory {item.index}"
        trajectory = payloads.trajectory(item)
        ids, mask, engine_log_probs = _checked(trajectory, item, shape, what)
        if not (0 <= item.row < plan.rows and 0 <= item.offset <= plan.row_tokens - item.n_tokens):
            raise IntegrityError(
                f"{what}: planned at row {item.row}, tokens {item.offset}..{item.offset + item.n_tokens}; "
                f"the microbatch has {plan.rows} rows of {plan.row_tokens}"
            )
        place = (item.row, slice(item.offset, item.offset + item.n_tokens))
        if segments[place].any():
            raise IntegrityError(f"{what}: planned over another trajectory in row {item.row}")
        tokens[place] = ids
        positions[place] = np.arange(item.n_tokens)
        segments[place] = number
        loss_mask[place] = mask
        log_probs[place] = engine_log_probs
        advantages[place] = item.advantage
        if routed is not None and read_routed_experts is not None and item.routed_experts is not None:
            rows = check_routed_experts(
                read_routed_experts(item.routed_experts), n_tokens=item.n_tokens, shape=shape, what=what
            )
            inputs = (item.row, slice(item.offset, item.offset + item.n_tokens - 1))
            routed[inputs] = rows
            recorded[inputs] = True
    used = int(np.flatnonzero(segments.any(axis=0))[-1]) + 1
    return PackedArrays(
        tokens=tokens[:, :used],
        position_ids=positions[:, :used],
        segment_ids=segments[:, :used],
        loss_mask=loss_mask[:, :used],
        log_probs=log_probs[:, :used],
        advantages=advantages[:, :used],
        routed_experts=None if routed is None else routed[:, :used],
        recorded=recorded[:, :used],
    )


def empty() -> PackedArrays:
    """A microbatch of padding: what a rank runs while others still have work, so that collectives match."""
    zeros = np.zeros((1, 1), np.int64)
    nothing = np.zeros((1, 1), np.bool_)
    floats = np.zeros((1, 1), np.float32)
    return PackedArrays(zeros, zeros, zeros, nothing, floats, floats, None, nothing)


@dataclass(frozen=True)
class DeviceBatch:
    """Tensors of one microbatch. N is the number of loss tokens; `select` says where each is predicted."""

    tokens: torch.Tensor  # int64 [R, L]
    position_ids: torch.Tensor  # int64 [R, L]
    attention_mask: torch.Tensor  # bool [R, 1, L, L], True where a query (row) may see a key (column)
    real: torch.Tensor  # bool [R * L], False for padding
    select: torch.Tensor  # int64 [N], flat position that predicts the loss token
    targets: torch.Tensor  # int64 [N]
    log_probs: torch.Tensor  # float32 [N], the engine's
    advantages: torch.Tensor  # float32 [N]
    routed_experts: torch.Tensor | None  # int64 [R * L, moe_layers, top_k]
    recorded: torch.Tensor  # bool [R * L]


def to_device(arrays: PackedArrays, device: torch.device) -> DeviceBatch:
    """Tensors on `device`, with the loss tokens gathered and the block-diagonal causal mask built."""
    import torch

    n_columns = arrays.tokens.shape[1]
    after = np.flatnonzero(arrays.loss_mask)  # flat positions of the loss tokens themselves

    def move(array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    segments = move(arrays.segment_ids)
    same = segments[:, :, None] == segments[:, None, :]  # [R, L, L]
    causal = torch.ones(n_columns, n_columns, dtype=torch.bool, device=device).tril()
    routed = arrays.routed_experts
    return DeviceBatch(
        tokens=move(arrays.tokens),
        position_ids=move(arrays.position_ids),
        attention_mask=(same & causal)[:, None],
        real=segments.flatten() > 0,
        select=move(after - 1),
        targets=move(arrays.tokens.reshape(-1)[after]),
        log_probs=move(arrays.log_probs.reshape(-1)[after]),
        advantages=move(arrays.advantages.reshape(-1)[after]),
        routed_experts=None if routed is None else move(routed.reshape(-1, *routed.shape[2:])),
        recorded=move(arrays.recorded.reshape(-1)),
    )


def _checked(
    trajectory: Trajectory, item: PackedItem, shape: ModelShape, what: str
) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_], npt.NDArray[Any]]:
    """Tokens, loss mask and log-probs [n_tokens] of a trajectory that agrees with its plan."""
    try:
        ids = trajectory.tokens.numpy()
        mask = trajectory.loss_mask.numpy().astype(np.bool_)
        log_probs = trajectory.log_probs.numpy()
    except (ValueError, TypeError) as error:
        raise IntegrityError(f"{what}: {error}") from error
    if not ids.shape == mask.shape == log_probs.shape == (item.n_tokens,):
        raise IntegrityError(
            f"{what}: tokens {ids.shape}, loss mask {mask.shape}, log-probs {log_probs.shape}; "
            f"the plan says {item.n_tokens} tokens"
        )
    if int(mask.sum()) != item.n_loss_tokens:
        raise IntegrityError(f"{what}: {int(mask.sum())} loss tokens, the plan says {item.n_loss_tokens}")
    if item.n_tokens and mask[0]:
        raise IntegrityError(f"{what}: the first token is marked for loss, but nothing precedes it")
    if item.n_tokens and (ids.min() < 0 or ids.max() >= shape.vocab_size):
        raise IntegrityError(
            f"{what}: token ids span {int(ids.min())}..{int(ids.max())}, the vocabulary has {shape.vocab_size}"
        )
    if not np.isfinite(log_probs).all():
        raise IntegrityError(f"{what}: a log-prob isn't finite")
    return ids, mask, log_probs
