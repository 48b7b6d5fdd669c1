"""A generation in parts is the generation that one part would have been."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_hpc.core.types import FinishReason, SamplingParams, VersionSpan, WeightVersion
from miles_hpc.rollout.engine import Generation
from miles_hpc.rollout.session.partial import Partial
from miles_hpc.rollout.session.turn import check_generation
from tests.exploring import examples


def part_of(partial: Partial, n: int, step: int, *, experts: bool, last: bool) -> Generation:
    """An engine's answer: token t at position t, routed experts by position."""
    start = len(partial.input_ids)
    ids = np.arange(start, start + n, dtype=np.int32)
    rows = np.arange(partial.start, start + n - 1 if n else partial.start, dtype=np.uint8)[:, None, None]
    return Generation(
        output_ids=ids,
        log_probs=-ids.astype(np.float32),
        versions=(VersionSpan(version=WeightVersion(1, step), start=0, end=n),) if n else (),
        finish_reason=FinishReason.STOP if last else FinishReason.ABORT,
        routed_experts=rows if experts else None,
        cached_tokens=start - 1,
    )


@settings(max_examples=examples(200))
@given(
    st.integers(1, 9),
    st.integers(0, 8),
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2)), min_size=1, max_size=5),
    st.booleans(),
)
def test_parts_join(n_prompt: int, start: int, parts: list[tuple[int, int]], experts: bool) -> None:
    start = min(start, n_prompt - 1)
    sampling = SamplingParams(max_new_tokens=100, seed=7)
    partial = Partial(np.arange(n_prompt, dtype=np.int32), sampling, start)
    steps: list[int] = []
    seeds = [7]
    for i, (n, step) in enumerate(parts):
        partial = partial.after(part_of(partial, n, step, experts=experts, last=i + 1 == len(parts)))
        steps += [step] * n
        if n:
            assert partial.sampling.seed not in seeds
            seeds.append(partial.sampling.seed or 0)
    whole, total = partial.so_far, sum(n for n, _ in parts)
    assert whole is not None and partial.n_output == total
    assert partial.input_ids.tolist() == list(range(n_prompt + total)) and partial.input_ids.dtype == np.int32
    assert partial.sampling.max_new_tokens == 100 - total
    check_generation(whole)
    assert whole.output_ids.tolist() == list(range(n_prompt, n_prompt + total))
    assert whole.log_probs.tolist() == [-i for i in range(n_prompt, n_prompt + total)]
    assert [s.version.step for s in whole.versions for _ in range(s.end - s.start)] == steps
    assert all(a.version != b.version for a, b in zip(whole.versions, whole.versions[1:], strict=False))
    assert whole.finish_reason is FinishReason.STOP
    if experts and total:
        assert whole.routed_experts is not None
        assert whole.routed_experts[:, 0, 0].tolist() == list(range(start, n_prompt + total - 1))


def test_an_abort_at_the_limit_is_the_limit() -> None:
    partial = Partial(np.arange(3, dtype=np.int32), SamplingParams(max_new_tokens=2), 0)
    partial = partial.after(part_of(partial, 2, 1, experts=False, last=False))
    assert partial.so_far is not None and partial.so_far.finish_reason is FinishReason.LENGTH
    assert partial.sampling.seed is None
