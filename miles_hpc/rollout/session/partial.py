"""A generation that engines give in parts: aborted by a weight update, or by an engine's end, and gone on with.

    prompt | part 1 (aborted, weights 4) | part 2 (weights 5)        one generation of two version spans
           ◀──────── the prompt of part 2 ──────▶

Pure. Tokens, log-probs and routed experts of a part stay as they were sampled; nothing is computed again.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from miles_hpc.core.types import FinishReason, SamplingParams, VersionSpan
from miles_hpc.rollout.engine import Generation

__all__ = ["Partial"]

_SEED_STEP = 0x9E3779B1  # an odd number far from small ones, so that nearby seeds don't meet


@dataclass(frozen=True, eq=False)
class Partial:
    """What to ask an engine next: `input_ids` [n], `sampling` with what is left, rows from `start` on."""

    input_ids: npt.NDArray[np.int32]
    sampling: SamplingParams
    start: int
    so_far: Generation | None = None

    @property
    def n_output(self) -> int:
        """Tokens sampled so far."""
        return 0 if self.so_far is None else len(self.so_far.output_ids)

    def after(self, part: Generation) -> Partial:
        """With an engine's answer. `input_ids` and `sampling` are only good for going on after an abort."""
        n = len(part.output_ids)
        whole = part if self.so_far is None else _joined(self.so_far, part)
        left = self.sampling.max_new_tokens - n
        if part.finish_reason is FinishReason.ABORT and left <= 0:
            whole = dataclasses.replace(whole, finish_reason=FinishReason.LENGTH)
        seed = self.sampling.seed
        return Partial(
            input_ids=np.concatenate((self.input_ids, part.output_ids)).astype(np.int32, copy=False),
            sampling=msgspec.structs.replace(
                self.sampling,
                max_new_tokens=max(left, 1),
                # The same seed would draw the first part's numbers again.
                seed=seed if seed is None or n == 0 else (seed + n * _SEED_STEP) & 0x7FFFFFFF,
            ),
            start=self.start if n == 0 else max(self.start, len(self.input_ids) + n - 1),
            so_far=whole,
        )


def _joined(one: Generation, two: Generation) -> Generation:
    n = len(one.output_ids)
    spans = list(one.versions)
    for span in two.versions:
        moved = VersionSpan(version=span.version, start=span.start + n, end=span.end + n)
        if spans and spans[-1].version == span.version:
            moved = VersionSpan(version=span.version, start=spans.pop().start, end=moved.end)
        spans.append(moved)
    rows = two.routed_experts if one.routed_experts is None or n == 0 else one.routed_experts
    if n and one.routed_experts is not None and two.routed_experts is not None and len(two.output_ids):
        rows = np.concatenate((one.routed_experts, two.routed_experts))
    return Generation(
        output_ids=np.concatenate((one.output_ids, two.output_ids)),
        log_probs=np.concatenate((one.log_probs, two.log_probs)),
        versions=tuple(spans),
        finish_reason=two.finish_reason,
        routed_experts=rows,
        cached_tokens=one.cached_tokens if n else two.cached_tokens,  # of the request's own prompt
        queue_s=one.queue_s + two.queue_s,
    )
