"""What a session's record gives to the trainer: one sample per path, every completion trained once.

    turns        root ── a ┬─ b          leaves b, c  (c is younger)
                           ╰─ c
    sample of b  [ prompt | ROOT | suffix | A | suffix | B ]      capitals: mask 1, with log-probs and versions
    sample of c  [ prompt | root | suffix | a | suffix | C ]      shared completions are context here

Truncation is by whole turns: a path is cut after the last turn that ends within `max_seq_len` tokens. A path on which
nothing is left to train gives no sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from miles_hpc.core.types import Array, FinishReason, RoutedExpertsRef, SampleStatus, Trajectory, VersionSpan
from miles_hpc.rollout.session.errors import NoSample
from miles_hpc.rollout.session.turn import Tokens, Turn, input_ids, path_of

__all__ = ["SessionSample", "assemble"]


@dataclass(frozen=True, kw_only=True, eq=False)
class SessionSample:
    """One path. T is its number of tokens; it ends with a sampled token."""

    tokens: Tokens  # int32 [T]
    loss_mask: npt.NDArray[np.uint8]  # [T], 1 on sampled tokens that this sample trains
    log_probs: npt.NDArray[np.float32]  # [T], the engine's where the mask is 1, 0.0 elsewhere
    versions: tuple[VersionSpan, ...]  # cover exactly the tokens with mask 1, in order
    status: SampleStatus
    path: tuple[Turn, ...]  # from the root to the last turn that is in it

    @property
    def routed_experts(self) -> tuple[object, ...]:
        """References of the path's turns, in order."""
        return tuple(turn.routed_experts for turn in self.path)

    def trajectory(
        self, *, group_id: int, index: int, reward: float, routed_experts: RoutedExpertsRef | None = None
    ) -> Trajectory:
        """As the trainer takes it."""
        return Trajectory(
            group_id=group_id,
            index=index,
            tokens=Array.of(self.tokens),
            loss_mask=Array.of(self.loss_mask),
            log_probs=Array.of(self.log_probs),
            versions=self.versions,
            reward=reward,
            status=self.status,
            turns=len(self.path),
            routed_experts=routed_experts,
        )


def assemble(leaves: Sequence[Turn], max_seq_len: int | None = None) -> list[SessionSample]:
    """Samples of the paths to `leaves`, in their order; a completion is trained in the first that has it.

    NoSample when `max_seq_len` isn't positive.
    """
    if max_seq_len is not None and max_seq_len <= 0:
        raise NoSample(f"max_seq_len {max_seq_len}: expected a positive number of tokens, or none for no bound")
    trained: set[int] = set()
    samples = []
    for leaf in leaves:
        path = path_of(leaf)
        # Path lengths grow with depth, but for tokens that a junction drops: cut at the first turn that is too long.
        fits = next((i for i, t in enumerate(path) if max_seq_len is not None and t.n_tokens > max_seq_len), len(path))
        if any(turn.number not in trained for turn in path[:fits]):
            samples.append(_sample(path[:fits], trained, cut=fits < len(path)))
            trained |= {turn.number for turn in path[:fits]}
    return samples


def _sample(path: list[Turn], trained: set[int], *, cut: bool) -> SessionSample:
    tokens = input_ids(path[-1])
    mask = np.zeros(len(tokens), dtype=np.uint8)
    log_probs = np.zeros(len(tokens), dtype=np.float32)
    versions: list[VersionSpan] = []
    for i, turn in enumerate(path):
        if turn.number in trained:
            continue
        # What the next turn's junction dropped isn't in the path.
        kept = len(turn.output_ids) - (path[i + 1].drop if i + 1 < len(path) else 0)
        start = turn.n_tokens - len(turn.output_ids)
        mask[start : start + kept] = 1
        log_probs[start : start + kept] = turn.log_probs[:kept]
        for span in turn.versions:
            _add_span(versions, span, start, min(span.end, kept))
    return SessionSample(
        tokens=tokens,
        loss_mask=mask,
        log_probs=log_probs,
        versions=tuple(versions),
        status=SampleStatus.TRUNCATED if cut else _status(path[-1].finish_reason),
        path=tuple(path),
    )


def _add_span(spans: list[VersionSpan], span: VersionSpan, offset: int, end: int) -> None:
    if end <= span.start:
        return
    start = offset + span.start
    if spans and spans[-1].version == span.version and spans[-1].end == start:
        start = spans.pop().start
    spans.append(VersionSpan(version=span.version, start=start, end=offset + end))


def _status(reason: FinishReason) -> SampleStatus:
    return {
        FinishReason.STOP: SampleStatus.COMPLETED,
        FinishReason.LENGTH: SampleStatus.TRUNCATED,
        FinishReason.ABORT: SampleStatus.ABORTED,
    }[reason]
