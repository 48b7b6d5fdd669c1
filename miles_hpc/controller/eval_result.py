"""What an evaluation found, in the three forms in which it is told: journal record, note, metrics by Miles' names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from checkpoints.journal import Evaluated
from miles_hpc.core.config import RunConfig
from miles_hpc.core.types import GroupSummary, WeightVersion
from miles_hpc.dataflow.evaluation import EvalScores, Outcome, score

__all__ = ["EvalResult", "eval_name", "result_of"]


@dataclass(frozen=True)
class EvalResult:
    """One evaluation. `oldest`, `newest` and `version_share` are of sampled tokens; None when there was none."""

    name: str  # of the held-out set: <name> in eval/<name>
    step: int
    when: str  # before | during | after | sft_only
    version: WeightVersion  # the one that was to be evaluated
    scores: EvalScores
    oldest: WeightVersion | None
    newest: WeightVersion | None
    version_share: float | None
    lag_steps: int  # optimizer steps done after `step` until the result was there
    duration_s: float

    @property
    def record(self) -> Evaluated:
        scores = self.scores
        return Evaluated(
            step=self.step,
            n=scores.n,
            mean=scores.mean,
            by_label=scores.by_label,
            when=self.when,
            n_samples=scores.n_samples,
            pass_at=scores.pass_at,
            truncated_ratio=scores.truncated_ratio,
            failed_ratio=scores.failed_ratio,
            version=_pair(self.version),
            oldest=_pair(self.oldest),
            newest=_pair(self.newest),
            version_share=self.version_share,
            lag_steps=self.lag_steps,
            duration_s=self.duration_s,
        )

    @property
    def facts(self) -> dict[str, Any]:
        """The fields of the note `evaluation`."""
        scores = self.scores
        return {
            "step": self.step,
            "when": self.when,
            "set": self.name,
            "n": scores.n,
            "n_samples": scores.n_samples,
            "mean": scores.mean,
            "by_label": scores.by_label,
            "pass_at": {str(k): value for k, value in scores.pass_at.items()},
            "truncated_ratio": scores.truncated_ratio,
            "failed_ratio": scores.failed_ratio,
            "version": str(self.version),
            "oldest": None if self.oldest is None else str(self.oldest),
            "newest": None if self.newest is None else str(self.newest),
            "version_share": self.version_share,
            "lag_steps": self.lag_steps,
            "duration_s": round(self.duration_s, 3),
        }

    @property
    def metrics(self) -> dict[str, float]:
        prefix, scores = f"eval/{self.name}", self.scores
        values = {
            prefix: scores.mean,
            f"{prefix}-truncated_ratio": scores.truncated_ratio,
            f"{prefix}-failed_ratio": scores.failed_ratio,
            "eval/lag_steps": float(self.lag_steps),
            "eval/duration_seconds": round(self.duration_s, 3),
        }
        if self.version_share is not None:
            values["eval/version_share"] = self.version_share
        values |= {f"{prefix}-pass@{k}": value for k, value in scores.pass_at.items()}
        return values | {f"{prefix}/{label}": value for label, value in scores.by_label.items()}


def eval_name(run: RunConfig) -> str:
    """What the run's held-out set is called: its environment's registered name, or the attribute of a dotted path."""
    return run.environment.name.rpartition(":")[2]


def result_of(
    groups: Sequence[GroupSummary],
    *,
    run: RunConfig,
    step: int,
    when: str,
    version: WeightVersion,
    lag_steps: int,
    duration_s: float,
) -> EvalResult:
    """The numbers of these groups, one of each held-out prompt."""
    sampled: Counter[WeightVersion] = Counter()
    for group in groups:
        for trajectory in group.trajectories:
            for one, n_tokens in trajectory.sampled:
                sampled[one] += n_tokens
    total = sampled.total()
    return EvalResult(
        name=eval_name(run),
        step=step,
        when=when,
        version=version,
        scores=score(
            [[Outcome(t.reward, t.status, t.label) for t in group.rollouts] for group in groups],
            success_reward=run.eval.success_reward,
        ),
        oldest=min(sampled, default=None),
        newest=max(sampled, default=None),
        version_share=sampled[version] / total if total else None,
        lag_steps=lag_steps,
        duration_s=duration_s,
    )


def _pair(version: WeightVersion | None) -> tuple[int, int] | None:
    return None if version is None else (version.term, version.step)
