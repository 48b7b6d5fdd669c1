"""Group ids: consecutive, resumed ones first, nothing twice, nothing skipped."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_hpc.core.errors import UserError
from miles_hpc.dataflow.source import PromptSource, SourceState, derive_seed


@given(st.integers(0, 50), st.sets(st.integers(0, 49)), st.sets(st.integers(0, 80)), st.lists(st.integers(0, 7)))
def test_each_id_is_handed_out_once(next_id: int, pending: set[int], taken: set[int], takes: list[int]) -> None:
    pending = {i for i in pending if i < next_id}
    taken = {i for i in taken if i >= next_id or i in pending}
    source = PromptSource.resumed(next_id, pending, taken)
    got = [i for n in takes for i in source.take(n)]
    assert len(got) == sum(takes) == len(set(got))
    assert not taken & set(got)
    rest = set(source.state.pending)
    trained = set(range(next_id)) - pending
    assert set(got) | rest | taken | trained == set(range(source.next_group_id))
    assert not (set(got) | rest) & trained


def test_the_cursor_continues_where_it_was() -> None:
    source = PromptSource(10, [7, 3])
    assert source.take(1) == (3,)
    state = source.state
    assert state == SourceState(next_group_id=10, pending=(7,))
    again = PromptSource(state.next_group_id, state.pending)
    assert source.take(3) == again.take(3) == (7, 10, 11)


def test_impossible_pending_ids_are_refused() -> None:
    for pending in ([10], [-1], [1, 1]):
        with pytest.raises(UserError, match="prompt source"):
            PromptSource(10, pending)


def test_seeds_depend_on_the_whole_path() -> None:
    seeds = [
        derive_seed(r, *p) for r in (0, 1) for p in (("prompt", 1), ("prompt", 11), ("group", 1), (1, 1), ("1", 1))
    ]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= s < 2**63 for s in seeds)
    assert derive_seed(0, "prompt", 1) == derive_seed(0, "prompt", 1)
    assert derive_seed(0, "a", "b") != derive_seed(0, "ab")
