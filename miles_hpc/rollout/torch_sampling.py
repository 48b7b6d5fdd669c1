"""Drawing tokens so that a request's result doesn't depend on what else is in the batch.

Each request has its own stream of uniforms, a counter-based hash of (seed, position), and a token is the inverse of
the cumulative distribution at that uniform. No generator state is shared, so rows may come and go.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from miles_hpc.core.types import SamplingParams

__all__ = ["sample", "uniforms"]

_MASK = (1 << 64) - 1


def uniforms(seed: int, first: int, n: int) -> npt.NDArray[np.float64]:
    """Uniforms in [0, 1) for positions first..first+n-1 of the stream `seed`. [n]

    SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA 2014) over the position,
    from a start that is itself the mix of the seed. 40 bits are kept, so that u * total stays below total in float64.
    """
    start = np.uint64(int(_mix(np.array([seed & _MASK], np.uint64))[0]))
    with np.errstate(over="ignore"):
        state = start + np.arange(first + 1, first + n + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return (_mix(state) >> np.uint64(24)).astype(np.float64) / float(1 << 40)


def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    with np.errstate(over="ignore"):
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def sample(
    logits: torch.Tensor, params: Sequence[SamplingParams], draws: Sequence[float]
) -> tuple[list[int], list[float]]:
    """One token per row of `logits` [R, vocab]; returns ids and their log-probs in float32.

    The log-prob is that of the distribution which was drawn from: log_softmax(logits / temperature), renormalised
    over the nucleus when top_p < 1. At temperature 0 the token is the argmax and its log-prob that of temperature 1.
    `top_p` keeps the smallest set of most probable tokens whose mass reaches it. A row with NaN gives a NaN log-prob.
    """
    scores = logits.float()
    if any(p.temperature not in (0.0, 1.0) for p in params):
        temperature = torch.tensor([p.temperature or 1.0 for p in params], device=scores.device)
        scores = scores / temperature[:, None]
    log_probs = torch.log_softmax(scores, -1)
    if any(p.top_p < 1.0 and p.temperature > 0.0 for p in params):
        log_probs = _nucleus(log_probs, [p.top_p if p.temperature > 0.0 else 1.0 for p in params])
    greedy = [p.temperature == 0.0 for p in params]
    if all(greedy):
        ids = log_probs.argmax(-1, keepdim=True)
    else:
        mass = log_probs.exp().cumsum(-1, dtype=torch.float64)
        u = torch.tensor(draws, dtype=torch.float64, device=scores.device)[:, None]
        ids = torch.searchsorted(mass, u * mass[:, -1:], right=True).clamp_(max=logits.shape[-1] - 1)
        if any(greedy):
            ids = torch.where(torch.tensor(greedy, device=ids.device)[:, None], log_probs.argmax(-1, keepdim=True), ids)
    chosen = log_probs.gather(-1, ids)
    return ids[:, 0].tolist(), chosen[:, 0].tolist()


def _nucleus(log_probs: torch.Tensor, top_p: Sequence[float]) -> torch.Tensor:
    """Log-probs renormalised over each row's nucleus, -inf outside. [R, vocab]"""
    ordered, order = torch.sort(log_probs, dim=-1, descending=True, stable=True)
    probs = ordered.exp()
    limit = torch.tensor([p if p < 1.0 else torch.inf for p in top_p], device=log_probs.device)[:, None]
    dropped = probs.cumsum(-1) - probs >= limit
    dropped[:, 0] = False
    kept = ordered.masked_fill(dropped, -torch.inf)
    kept = kept - torch.logsumexp(kept, -1, keepdim=True)
    narrowed = torch.empty_like(kept).scatter_(-1, order, kept)
    return torch.where(torch.isinf(limit), log_probs, narrowed)
