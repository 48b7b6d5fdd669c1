"""Routed experts of a trajectory as the trainer needs them: checked before anything is forced on the model.

A wrong id wouldn't stop a forward by itself: an id out of range reads beyond the probabilities, a duplicate makes a
token count one expert twice, a shifted array replays the neighbour's routing. So every array is checked here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from miles_hpc.core.errors import IntegrityError
from miles_hpc.core.types import ModelShape

__all__ = ["check_routed_experts"]


def check_routed_experts(
    ids: npt.NDArray[Any], *, n_tokens: int, shape: ModelShape, what: str
) -> npt.NDArray[np.int64]:
    """`ids` as int64 [n_tokens - 1, moe_layers, top_k], after checks of type, shape, range and duplicates.

    Row i is the routing of token i as an input; the last token was never an input. `what` names the trajectory in
    the error. Raises IntegrityError.
    """
    if ids.dtype.kind not in "iu":
        raise IntegrityError(f"{what}: routed experts have dtype {ids.dtype}, expected an integer type")
    expected = (n_tokens - 1, len(shape.moe_layers), shape.top_k)
    if ids.shape != expected:
        raise IntegrityError(
            f"{what}: routed experts have shape {ids.shape}, expected {expected} (rows = tokens - 1, layers, top k)"
        )
    checked = ids.astype(np.int64)
    if checked.size == 0:
        return checked
    low, high = int(checked.min()), int(checked.max())
    if low < 0 or high >= shape.n_experts:
        raise IntegrityError(f"{what}: routed experts span {low}..{high}, expected 0..{shape.n_experts - 1}")
    ordered = np.sort(checked, axis=-1)
    twice = (ordered[..., 1:] == ordered[..., :-1]).any(axis=-1)
    if twice.any():
        row, layer = (int(i) for i in np.argwhere(twice)[0])
        raise IntegrityError(f"{what}: token {row}, MoE layer {layer} names an expert twice: {checked[row, layer]}")
    return checked
