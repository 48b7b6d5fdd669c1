"""Losses over the loss tokens of one microbatch, as sums divided by the batch's global token count.

Notation for a token t: l = trainer's log-prob, o = old log-prob (denominator of the ratio), e = engine's log-prob,
f = reference's log-prob, A = advantage, T = number of loss tokens of the whole step over all ranks.

    ratio     r = exp(clamp(l - o, -20, 20))
    policy    max(-A r, -A clamp(r, 1 - eps_clip, 1 + eps_clip_high)) * w
              PPO's clipped surrogate (Schulman et al. 2017, arXiv:1707.06347, eq. 7), asymmetric bounds as in DAPO
              (arXiv:2503.14476, eq. 8), token mean instead of a mean over sequences (ibid., eq. 12)
    weight    w = 1, or with use_tis  w = min(exp(clamp(o - e, -20, 20)), tis_clip), without gradient: truncated
              importance sampling between the trainer's and the engine's policy
    KL        k3 = exp(f - l) - (f - l) - 1 (Schulman 2020, "Approximating KL divergence"), f - l clamped to +-20 and
              k3 to +-10 as Miles' low_var_kl does
    entropy   H of the token's distribution; its coefficient is subtracted
    loss      sum(policy + kl_coef k3 - entropy_coef H) / T

The old log-prob o: without use_tis it is the engine's (Miles' --use-rollout-logprobs), so the ratio covers staleness
and engine mismatch at once. With use_tis it is the trainer's own at the start of the step; as a batch is used for
one optimizer step, that is l without gradient, and w carries the whole correction. The two exclude each other,
otherwise the mismatch would be counted twice.

Distributions are those of logits / temperature, because the engine samples from and reports those.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["LossSettings", "TokenScores", "grpo_loss", "load_balancing_loss", "sft_loss", "token_scores"]

_LOG_RATIO_LIMIT = 20.0
_KL_LIMIT = 10.0


@dataclass(frozen=True, kw_only=True)
class LossSettings:
    """Options of the RL loss; names are those of the run file."""

    eps_clip: float
    eps_clip_high: float
    kl_loss_coef: float = 0.0
    entropy_coef: float = 0.0
    use_tis: bool = False
    tis_clip: float = 2.0


@dataclass(frozen=True)
class TokenScores:
    """Per loss token, float32 [N]. `entropy` has a gradient only when it was asked for."""

    log_probs: torch.Tensor
    entropy: torch.Tensor


def token_scores(
    logits: torch.Tensor, targets: torch.Tensor, *, temperature: float = 1.0, entropy_gradient: bool = False
) -> TokenScores:
    """Log-probs of `targets` [N] and entropies under softmax(logits [N, V] / temperature), in float32 or wider."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    if temperature != 1.0:
        wide = wide / temperature
    normal = wide.log_softmax(-1)  # [N, V]
    log_probs = normal.gather(-1, targets[:, None]).squeeze(-1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        source = normal if entropy_gradient else normal.detach()
        entropy = -(source.exp() * source).sum(-1)
    return TokenScores(log_probs, entropy)


def grpo_loss(
    scores: TokenScores,
    engine_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    settings: LossSettings,
    *,
    total_loss_tokens: int,
    reference_log_probs: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The RL loss (module docstring) and the sums over its tokens behind each metric; all inputs [N].

    The sum of the returned losses over microbatches and ranks is the step's loss. Metrics are sums without
    gradient, to be divided by `total_loss_tokens`; names are Miles'.
    """
    own = scores.log_probs
    engine = engine_log_probs.to(own.dtype)
    old = own.detach() if settings.use_tis else engine
    log_ratio = own - old
    ratio = log_ratio.clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT).exp()
    free = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - settings.eps_clip, 1.0 + settings.eps_clip_high)
    policy = torch.maximum(free, clipped)
    mismatch = own.detach() - engine
    sums = {
        "pg_clipfrac": (clipped > free).sum(),
        "ppo_kl": -log_ratio.detach().sum(),
        "entropy_loss": scores.entropy.detach().sum(),
        "train_rollout_logprob_abs_diff": mismatch.abs().sum(),
        "train_rollout_kl": _k3(mismatch).sum(),
    }
    if settings.use_tis:
        weight = mismatch.clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT).exp()
        truncated = weight.clamp(max=settings.tis_clip)
        policy = policy * truncated
        sums["tis"] = weight.sum()
        sums["tis_clipfrac"] = (weight > settings.tis_clip).sum()
    sums["pg_loss"] = policy.detach().sum()
    total = policy.sum()
    if reference_log_probs is not None:
        kl = _k3(reference_log_probs - own)
        sums["kl_loss"] = kl.detach().sum()
        total = total + settings.kl_loss_coef * kl.sum()
    if settings.entropy_coef != 0.0:
        total = total - settings.entropy_coef * scores.entropy.sum()
    loss = total / total_loss_tokens
    sums["loss"] = total.detach()
    return loss, sums


def sft_loss(scores: TokenScores, *, total_loss_tokens: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Cross entropy: -sum(l) / T, with metric sums as in `grpo_loss`."""
    total = -scores.log_probs.sum()
    return total / total_loss_tokens, {"loss": total.detach(), "entropy_loss": scores.entropy.detach().sum()}


def load_balancing_loss(
    counts: torch.Tensor, probability_sums: torch.Tensor, n_rows: torch.Tensor | int
) -> torch.Tensor:
    """E * sum_e (share of assignments to e) * (mean probability of e): Switch Transformer, arXiv:2101.03961, eq. 4-6.

    `counts` [E] are assignments (top k per row, no gradient), `probability_sums` [E] sums of router probabilities
    and `n_rows` the number of rows, all summed over MoE layers as transformers' load_balancing_loss_func does.
    Counts and rows over the whole batch with probabilities of one rank give that rank's part of the global loss
    ("global batch" balance, arXiv:2501.11873): parts add up.
    """
    return counts.numel() * ((counts / n_rows) * (probability_sums / n_rows)).sum()


def _k3(log_ratio: torch.Tensor) -> torch.Tensor:
    d = log_ratio.clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT)
    return (d.exp() - d - 1.0).clamp(max=_KL_LIMIT)
