"""From the trajectories of a step to what each data-parallel rank takes: rows, microbatches, ranks.

    trajectories ──best fit decreasing──> rows of at most row_tokens
    rows         ──longest first, to the rank with the fewest tokens──> ranks
    rows of a rank, longest first ──> microbatches of at most max_tokens_per_microbatch

A row holds whole trajectories side by side; which tokens see each other is the trainer's business (positions restart
at each item's offset). `row_tokens` of a microbatch is its longest row, so padding is never computed in vain. Every
rank gets the same number of microbatches, since ranks run in lock-step; what is missing is filled with empty plans
(no rows). Pure and deterministic: same items in the same order, same plan.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from miles_hpc.core.errors import UserError
from miles_hpc.core.types import GroupSummary, MicrobatchPlan, PackedItem, PayloadRef, RoutedExpertsRef

__all__ = ["StepPlan", "TrainItem", "plan_batch", "train_items"]

EMPTY_PLAN = MicrobatchPlan(rows=0, row_tokens=0, items=())


@dataclass(frozen=True)
class TrainItem:
    """One trajectory of a step with its advantage; lengths in tokens."""

    payload: PayloadRef
    group_id: int
    index: int
    n_tokens: int
    n_loss_tokens: int
    advantage: float
    routed_experts: RoutedExpertsRef | None = None


@dataclass(frozen=True)
class StepPlan:
    """`microbatches[r]` is for data-parallel rank r; as long for each.

    `total_loss_tokens` counts skipped trajectories too: they are part of the mean, with a gradient of zero.
    """

    microbatches: tuple[tuple[MicrobatchPlan, ...], ...]
    total_loss_tokens: int
    n_items: int
    n_tokens: int  # of packed items
    padded_tokens: int  # rows * row_tokens, summed: what forwards compute
    skipped: int

    @property
    def fill(self) -> float:
        """Share of the computed positions that are tokens; 1 when nothing is computed."""
        return self.n_tokens / self.padded_tokens if self.padded_tokens else 1.0


def train_items(group: GroupSummary, advantages: Iterable[float]) -> tuple[TrainItem, ...]:
    """The items of one group; `advantages` in the order of its trajectories, as many as there are."""
    return tuple(
        TrainItem(
            payload=group.payload,
            group_id=group.group_id,
            index=t.index,
            n_tokens=t.n_tokens,
            n_loss_tokens=t.n_loss_tokens,
            advantage=float(advantage),
            routed_experts=t.routed_experts,
        )
        for t, advantage in zip(group.trajectories, advantages, strict=True)
    )


def plan_batch(
    items: Sequence[TrainItem],
    n_ranks: int,
    row_tokens: int,
    max_tokens_per_microbatch: int,
    *,
    skip_zero_advantage: bool = False,
) -> StepPlan:
    """Pack a step's trajectories for `n_ranks` data-parallel ranks.

    `skip_zero_advantage` leaves trajectories out that can't contribute to a pure policy-gradient loss; with a KL,
    entropy or load-balancing term they do contribute and must stay. Trajectories without a
    loss token stay out always. Raises UserError for a packed trajectory longer than a row, or a row larger than a
    microbatch.
    """
    if n_ranks < 1 or row_tokens < 1 or max_tokens_per_microbatch < row_tokens:
        raise UserError(
            f"train.max_tokens_per_microbatch={max_tokens_per_microbatch}, train.row_tokens={row_tokens},"
            f" {n_ranks} ranks: a microbatch must hold at least one row; raise train.max_tokens_per_microbatch"
        )
    packed = [item for item in items if item.n_loss_tokens > 0 and not (skip_zero_advantage and item.advantage == 0.0)]
    for item in packed:
        if item.n_tokens > row_tokens:
            raise UserError(
                f"group {item.group_id} trajectory {item.index}: {item.n_tokens} tokens, but train.row_tokens is"
                f" {row_tokens}; raise it to rollout.max_trajectory_tokens or more"
            )
    rows = _best_fit_decreasing(packed, row_tokens)
    ranks = _spread(rows, n_ranks)
    rows_each = max_tokens_per_microbatch // row_tokens
    n_microbatches = max(1, *(-(-len(own) // rows_each) for own in ranks))
    microbatches = tuple(
        tuple(_microbatch(own[i * rows_each : (i + 1) * rows_each]) for i in range(n_microbatches)) for own in ranks
    )
    return StepPlan(
        microbatches=microbatches,
        total_loss_tokens=sum(item.n_loss_tokens for item in items),
        n_items=len(packed),
        n_tokens=sum(item.n_tokens for item in packed),
        padded_tokens=sum(m.rows * m.row_tokens for own in microbatches for m in own),
        skipped=len(items) - len(packed),
    )


@dataclass
class _Row:
    items: list[TrainItem]
    used: int


def _best_fit_decreasing(items: Sequence[TrainItem], row_tokens: int) -> list[_Row]:
    """Longest first, each into the fullest row that has room (ties: the earlier row)."""
    order = sorted(range(len(items)), key=lambda i: (-items[i].n_tokens, i))
    rows: list[_Row] = []
    room: list[tuple[int, int]] = []  # (free tokens, row), sorted
    for i in order:
        item = items[i]
        place = bisect_left(room, (item.n_tokens, -1))
        if place == len(room):
            rows.append(_Row([item], item.n_tokens))
            insort(room, (row_tokens - item.n_tokens, len(rows) - 1))
            continue
        free, number = room.pop(place)
        rows[number].items.append(item)
        rows[number].used += item.n_tokens
        insort(room, (free - item.n_tokens, number))
    return rows


def _spread(rows: list[_Row], n_ranks: int) -> list[list[_Row]]:
    """Longest row first to the rank with the fewest tokens: loads differ by one row at most (Graham's LPT rule)."""
    ranks: list[list[_Row]] = [[] for _ in range(n_ranks)]
    load = [0] * n_ranks
    for row in sorted(rows, key=lambda r: -r.used):
        rank = min(range(n_ranks), key=lambda r: (load[r], len(ranks[r]), r))
        ranks[rank].append(row)
        load[rank] += row.used
    return ranks


def _microbatch(rows: list[_Row]) -> MicrobatchPlan:
    if not rows:
        return EMPTY_PLAN
    items: list[PackedItem] = []
    for number, row in enumerate(rows):
        offset = 0
        for item in row.items:
            items.append(
                PackedItem(
                    payload=item.payload,
                    group_id=item.group_id,
                    index=item.index,
                    n_tokens=item.n_tokens,
                    n_loss_tokens=item.n_loss_tokens,
                    row=number,
                    offset=offset,
                    advantage=item.advantage,
                    routed_experts=item.routed_experts,
                )
            )
            offset += item.n_tokens
    return MicrobatchPlan(rows=len(rows), row_tokens=max(row.used for row in rows), items=tuple(items))
