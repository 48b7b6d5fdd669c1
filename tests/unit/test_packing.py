"""Packing: each trajectory once, no overlap, all bounds, equal counts, balanced ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_hpc.core.errors import UserError
from miles_hpc.core.types import PayloadRef
from miles_hpc.dataflow.packing import EMPTY_PLAN, TrainItem, plan_batch, train_items
from tests.unit.groups import summary


def item(number: int, n_tokens: int, advantage: float = 1.0, n_loss_tokens: int = 1) -> TrainItem:
    return TrainItem(
        payload=PayloadRef(path="p", n_bytes=1, crc32=1),
        group_id=number // 4,
        index=number % 4,
        n_tokens=n_tokens,
        n_loss_tokens=n_loss_tokens,
        advantage=advantage,
    )


# length, advantage, number of loss tokens
trajectories = st.tuples(st.integers(1, 64), st.sampled_from([-1.0, 0.0, 0.5]), st.sampled_from([1, 1, 1, 0]))


@given(
    lengths=st.integers(0, 40).flatmap(lambda n: st.lists(trajectories, min_size=n, max_size=n)),
    n_ranks=st.integers(1, 5),
    spare=st.integers(0, 30),
    rows=st.integers(1, 4),
    slack=st.integers(0, 63),
    skip=st.booleans(),
)
def test_plan(
    lengths: list[tuple[int, float, int]], n_ranks: int, spare: int, rows: int, slack: int, skip: bool
) -> None:
    row_tokens = 64 + spare
    limit = row_tokens * rows + slack
    items = [item(i, n, a, min(n, loss)) for i, (n, a, loss) in enumerate(lengths)]
    plan = plan_batch(items, n_ranks, row_tokens, limit, skip_zero_advantage=skip)

    assert len(plan.microbatches) == n_ranks
    assert len({len(own) for own in plan.microbatches}) == 1
    expected = [i for i in items if i.n_loss_tokens and not (skip and i.advantage == 0.0)]
    placed = [p for own in plan.microbatches for m in own for p in m.items]
    assert sorted((p.group_id, p.index, p.n_tokens, p.advantage) for p in placed) == sorted(
        (i.group_id, i.index, i.n_tokens, i.advantage) for i in expected
    )
    for microbatch in (m for own in plan.microbatches for m in own):
        assert microbatch.rows * microbatch.row_tokens <= limit
        assert microbatch.row_tokens <= row_tokens
        taken: set[tuple[int, int]] = set()
        for p in microbatch.items:
            cells = {(p.row, x) for x in range(p.offset, p.offset + p.n_tokens)}
            assert not taken & cells
            taken |= cells
        assert {r for r, _ in taken} == set(range(microbatch.rows))  # no row is empty
        assert max((x for _, x in taken), default=-1) + 1 == microbatch.row_tokens  # trimmed to the longest
        if not microbatch.items:
            assert microbatch == EMPTY_PLAN
    loads = [sum(p.n_tokens for m in own for p in m.items) for own in plan.microbatches]
    assert max(loads) - min(loads) <= row_tokens
    assert plan.total_loss_tokens == sum(i.n_loss_tokens for i in items)
    assert (plan.n_items, plan.skipped) == (len(expected), len(items) - len(expected))
    assert plan.n_tokens == sum(loads)
    assert plan.padded_tokens == sum(m.rows * m.row_tokens for own in plan.microbatches for m in own)
    # First-fit and best-fit leave at most one row half empty.
    used: dict[tuple[int, int, int], int] = {}
    for r, own in enumerate(plan.microbatches):
        for k, m in enumerate(own):
            for p in m.items:
                used[r, k, p.row] = used.get((r, k, p.row), 0) + p.n_tokens
    assert sum(2 * n <= row_tokens for n in used.values()) <= 1
    for r in range(n_ranks):  # longest first, so that trimming helps
        own_rows = [n for (rank, _, _), n in sorted(used.items()) if rank == r]
        assert own_rows == sorted(own_rows, reverse=True)


def test_best_fit_by_hand() -> None:
    plan = plan_batch([item(0, 6), item(1, 3), item(2, 5), item(3, 2), item(4, 4)], 1, 10, 20)
    rows = [[(p.row, p.offset, p.n_tokens) for p in m.items] for m in plan.microbatches[0]]
    assert rows == [[(0, 0, 6), (0, 6, 4), (1, 0, 5), (1, 5, 3), (1, 8, 2)]]
    assert plan.fill == 1.0
    trimmed = plan_batch([item(0, 60), item(1, 33), item(2, 31)], 1, 70, 70)
    assert [m.row_tokens for m in trimmed.microbatches[0]] == [64, 60]


def test_nothing_to_train_gives_every_rank_one_empty_microbatch() -> None:
    plan = plan_batch([item(0, 5, advantage=0.0, n_loss_tokens=3)], 2, 10, 10, skip_zero_advantage=True)
    assert plan.microbatches == ((EMPTY_PLAN,), (EMPTY_PLAN,))
    assert (plan.total_loss_tokens, plan.skipped, plan.fill) == (3, 1, 1.0)


def test_limits_are_named() -> None:
    with pytest.raises(UserError, match=r"group 1 trajectory 1: 11 tokens, but train\.row_tokens is 10"):
        plan_batch([item(5, 11)], 1, 10, 10)
    with pytest.raises(UserError, match=r"raise train\.max_tokens_per_microbatch"):
        plan_batch([], 1, 10, 9)


def test_items_of_a_group() -> None:
    group = summary(3, rewards=(0.0, 1.0))
    made = train_items(group, [-0.5, 0.5])
    assert [(i.group_id, i.index, i.n_tokens, i.advantage) for i in made] == [(3, 0, 10, -0.5), (3, 1, 10, 0.5)]
    with pytest.raises(ValueError, match="zip"):
        train_items(group, [1.0])
