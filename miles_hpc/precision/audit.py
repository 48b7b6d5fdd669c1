"""How far two sets of log-probs are apart: engine against trainer on the probe batch, or any other pair.

    d = a - b over the compared tokens
    kl_k3 = mean(exp(d) - d - 1): an estimate of KL(B || A) when the tokens were sampled from B (Schulman 2020)

A mean shows the size of a systematic difference, the maximum shows single tokens (a routing flip, a tokenisation
slip). Float32 cached decoding against a full forward gives a mean below 1e-5 and a maximum slightly above it.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from miles_hpc.core.errors import IntegrityError

__all__ = ["LogProbDifference", "compare_log_probs"]


class LogProbDifference(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics over `n` tokens; all zero when n is 0."""

    n: int
    mean_abs: float
    max_abs: float
    p99_abs: float
    mean: float
    kl_k3: float


def compare_log_probs(
    a: npt.NDArray[Any], b: npt.NDArray[Any], mask: npt.NDArray[Any] | None = None
) -> LogProbDifference:
    """Compare arrays of equal shape, where `mask` is true. Raises IntegrityError for shapes or NaN, infinity."""
    if a.shape != b.shape or (mask is not None and mask.shape != a.shape):
        raise IntegrityError(f"log-probs to compare have shapes {a.shape} and {b.shape}: they must be equal")
    wide_a, wide_b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    if mask is not None:
        chosen = np.asarray(mask, np.bool_)
        wide_a, wide_b = wide_a[chosen], wide_b[chosen]
    difference = (wide_a - wide_b).reshape(-1)
    if difference.size == 0:
        return LogProbDifference(n=0, mean_abs=0.0, max_abs=0.0, p99_abs=0.0, mean=0.0, kl_k3=0.0)
    if not np.isfinite(difference).all():
        raise IntegrityError(
            f"log-probs to compare: {int((~np.isfinite(difference)).sum())} of {difference.size} are not finite"
        )
    size = np.abs(difference)
    return LogProbDifference(
        n=int(difference.size),
        mean_abs=float(size.mean()),
        max_abs=float(size.max()),
        p99_abs=float(np.quantile(size, 0.99)),
        mean=float(difference.mean()),
        kl_k3=float((np.expm1(difference) - difference).mean()),
    )
