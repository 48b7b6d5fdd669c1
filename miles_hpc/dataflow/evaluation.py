"""What an evaluation asks for, and what its numbers are: pure, and the same for a run and for a side job.

pass@k is the chance that one of k trajectories of a prompt solves it. From n trajectories of which c did, the estimate
without bias is 1 - C(n-c, k) / C(n, k), averaged over prompts (Chen et al. 2021, arXiv:2107.03374, equation 1).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import comb

from miles_hpc.core.config import RunConfig
from miles_hpc.core.messages import GenerateGroup
from miles_hpc.core.types import GroupPurpose, Prompt, SampleStatus, SamplingParams, WeightVersion
from miles_hpc.dataflow.source import derive_seed

__all__ = ["EvalScores", "Outcome", "evaluation_group", "pass_at_k", "pass_ks", "score"]


def evaluation_group(
    run: RunConfig,
    number: int,
    *,
    group_id: int | None = None,
    set_aside: bool = False,
    at_least: WeightVersion | None = None,
) -> GenerateGroup:
    """Held-out prompt `number` of the run: the same task and the same seeds in every evaluation.

    `group_id` (default: `number`) tells evaluations apart that are under way at once.
    """
    chosen = run.eval
    purpose = GroupPurpose.EVAL
    return GenerateGroup(
        group_id=number if group_id is None else group_id,
        attempt=0,
        purpose=purpose,
        prompt=Prompt(
            environment=run.environment.name, messages=(), seed=derive_seed(chosen.seed, str(purpose), number)
        ),
        n_samples=chosen.n_samples_per_eval_prompt,
        sampling=SamplingParams(
            max_new_tokens=chosen.max_tokens_per_turn or run.rollout.max_tokens_per_turn,
            temperature=chosen.temperature,
            top_p=chosen.top_p,
        ),
        seed=derive_seed(chosen.seed, str(purpose), "sampling", number),
        deadline_s=run.rollout.trajectory_deadline_s,
        set_aside=set_aside,
        at_least=at_least,
    )


# ---------------------------------------------------------------------------------------------- numbers


@dataclass(frozen=True)
class Outcome:
    """How one trajectory of a prompt ended."""

    reward: float
    status: SampleStatus
    label: str = ""


@dataclass(frozen=True)
class EvalScores:
    """An evaluation in numbers; those over no trajectory at all are 0."""

    n: int  # prompts
    n_samples: int  # trajectories of each prompt; of the prompt with the fewest
    mean: float  # reward, over all trajectories
    by_label: dict[str, float]  # mean reward of each label's trajectories
    pass_at: dict[int, float]  # k -> pass@k
    truncated_ratio: float
    failed_ratio: float  # an agent function's failures; those of engines and sandboxes are tried again instead


def pass_at_k(n: int, c: int, k: int) -> float:
    """The estimate for one prompt, c of whose n trajectories solved it. Raises ValueError unless c and k <= n."""
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@{k} from {c} of {n} trajectories: expected 0 <= c <= n and 1 <= k <= n")
    return 1.0 - comb(n - c, k) / comb(n, k)


def pass_ks(n_samples: int) -> tuple[int, ...]:
    """The k of pass@k that n_samples trajectories of a prompt allow: powers of two."""
    return tuple(1 << i for i in range(n_samples.bit_length()))


def score(prompts: Sequence[Sequence[Outcome]], *, success_reward: float) -> EvalScores:
    """Numbers of the trajectories of each prompt; one with `success_reward` or more has solved its prompt."""
    prompts = [outcomes for outcomes in prompts if outcomes]
    everything = [outcome for outcomes in prompts for outcome in outcomes]
    by_label: dict[str, list[float]] = defaultdict(list)
    for outcome in everything:
        by_label[outcome.label].append(outcome.reward)
    n_samples = min((len(outcomes) for outcomes in prompts), default=0)
    solved = [(len(outcomes), sum(o.reward >= success_reward for o in outcomes)) for outcomes in prompts]
    return EvalScores(
        n=len(prompts),
        n_samples=n_samples,
        mean=_mean([outcome.reward for outcome in everything]),
        by_label={label: _mean(rewards) for label, rewards in sorted(by_label.items())},
        pass_at={k: _mean([pass_at_k(n, c, k) for n, c in solved]) for k in pass_ks(n_samples)},
        truncated_ratio=_mean([float(outcome.status is SampleStatus.TRUNCATED) for outcome in everything]),
        failed_ratio=_mean([float(outcome.status is SampleStatus.FAILED) for outcome in everything]),
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
