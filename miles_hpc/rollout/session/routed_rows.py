"""Routed experts of a path: each turn keeps the rows that its generation added.

tokens of a path   p0 .. pk | s0 .. sm | suffix | t0 .. tn        row i is the routing of token i as an input
rows of turn 0     [0 ................ m)                         the last sampled token wasn't an input yet,
rows of turn 1                       [m ................. n)      so the next turn's rows begin with it
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from miles_hpc.rollout.session.errors import NoSample
from miles_hpc.rollout.session.turn import Turn

__all__ = ["RecordedRows", "first_row", "routed_rows"]


class RecordedRows:
    """One turn's rows, [n_rows, moe_layers, top_k]: in memory, or read when they are asked for.

    `stored` may be called in another thread than `array`.
    """

    def __init__(self, n_rows: int, rows: npt.NDArray[Any] | None, load: Callable[[], npt.NDArray[Any]] | None) -> None:
        self._n_rows = n_rows
        self._rows = rows
        self._load = load

    @classmethod
    def of(cls, rows: npt.NDArray[Any]) -> RecordedRows:
        """Rows that are nowhere else yet."""
        return cls(len(rows), rows, None)

    def __len__(self) -> int:
        return self._n_rows

    @property
    def in_memory(self) -> bool:
        return self._rows is not None

    def stored(self, load: Callable[[], npt.NDArray[Any]]) -> None:
        """Let go of the memory: `load` gives them from now on."""
        self._load = load  # first: `array` looks for the rows first
        self._rows = None

    def array(self) -> npt.NDArray[Any]:
        """The rows. May block for a file; raises what `load` raises."""
        rows = self._rows
        if rows is not None:
            return rows
        assert self._load is not None  # rows that are in no file are in memory
        return self._load()


def first_row(parent: Turn | None, drop: int = 0) -> int:
    """Of a turn after `parent` that drops `drop` of its tokens: the first row that isn't recorded yet."""
    return 0 if parent is None else parent.n_tokens - max(1, drop)


def routed_rows(path: Sequence[Turn]) -> npt.NDArray[Any] | None:
    """Rows of the whole path, [T - 1, moe_layers, top_k]; None when no turn has any (a dense model).

    Raises NoSample when a turn has none, or another number of rows than its tokens need. May block for files.
    """
    parts: list[npt.NDArray[Any]] = []
    for i, turn in enumerate(path):
        recorded, start = turn.routed_experts, first_row(turn.parent, turn.drop)
        rows = recorded.array() if isinstance(recorded, RecordedRows) else recorded
        if rows is None and not parts:
            if any(other.routed_experts is not None for other in path):
                raise NoSample(f"turn {turn.number} has no routed experts, but others of its path have: sample it anew")
            return None
        needed = turn.n_tokens - 1 - start
        if not isinstance(rows, np.ndarray) or len(rows) != needed:
            seen = len(rows) if isinstance(rows, np.ndarray) else 0
            raise NoSample(f"turn {turn.number} has {seen} rows of routed experts: expected {needed}")
        end = needed if i + 1 == len(path) else first_row(turn, path[i + 1].drop) - start
        parts.append(rows[:end])
    return np.concatenate(parts) if parts else None
