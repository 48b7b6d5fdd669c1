"""The losses against an independent float64 reference in numpy, written token by token."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_hpc.core.errors import IntegrityError
from miles_hpc.precision.audit import compare_log_probs
from tests.exploring import examples

torch = pytest.importorskip("torch")

from miles_hpc.trainer.loss import (  # noqa: E402
    LossSettings,
    TokenScores,
    grpo_loss,
    load_balancing_loss,
    sft_loss,
    token_scores,
)


def reference_scores(logits, targets, temperature):
    log_probs, entropies = [], []
    for row, target in zip(logits.astype(np.float64), targets, strict=True):
        z = [v / temperature for v in row]
        top = max(z)
        norm = top + math.log(sum(math.exp(v - top) for v in z))
        log_probs.append(z[target] - norm)
        entropies.append(-sum(math.exp(v - norm) * (v - norm) for v in z))
    return np.array(log_probs), np.array(entropies)


def reference_grpo(own, engine, advantages, entropies, s, total, reference=None, at=None):
    """`at` are the log-probs where the old policy and the TIS weight are taken (constants of the gradient)."""
    at = own if at is None else at
    loss, clipped = 0.0, 0
    for i in range(len(own)):
        old = at[i] if s.use_tis else engine[i]
        r = math.exp(min(max(own[i] - old, -20.0), 20.0))
        bounded = min(max(r, 1 - s.eps_clip), 1 + s.eps_clip_high)
        policy = -min(advantages[i] * r, advantages[i] * bounded)
        clipped += advantages[i] * bounded < advantages[i] * r
        if s.use_tis:
            policy *= min(math.exp(min(max(at[i] - engine[i], -20.0), 20.0)), s.tis_clip)
        loss += policy - s.entropy_coef * entropies[i]
        if reference is not None:
            d = min(max(reference[i] - own[i], -20.0), 20.0)
            loss += s.kl_loss_coef * min(math.exp(d) - d - 1, 10.0)
    return loss / total, clipped


CASES = [
    LossSettings(eps_clip=0.2, eps_clip_high=0.28),
    LossSettings(eps_clip=0.2, eps_clip_high=0.2, entropy_coef=0.01),
    LossSettings(eps_clip=0.1, eps_clip_high=0.4, kl_loss_coef=0.3),
    LossSettings(eps_clip=0.2, eps_clip_high=0.28, use_tis=True, tis_clip=1.5),
    LossSettings(eps_clip=0.2, eps_clip_high=0.28, use_tis=True, kl_loss_coef=0.1, entropy_coef=0.02),
]


def draw(seed, n=40):
    rng = np.random.default_rng(seed)
    own = -rng.uniform(0.05, 6, n)
    engine = own + rng.normal(0, 0.4, n)
    return own, engine, rng.normal(size=n), rng.uniform(0, 3, n), own + rng.normal(0, 0.5, n)


@pytest.mark.parametrize("s", CASES)
@pytest.mark.parametrize("seed", [0, 1])
def test_value_and_gradient_of_grpo(s, seed):
    own, engine, advantages, entropies, ref = draw(seed)
    reference = ref if s.kl_loss_coef else None
    x = torch.tensor(own, requires_grad=True)
    loss, sums = grpo_loss(
        TokenScores(x, torch.tensor(entropies)),
        torch.tensor(engine),
        torch.tensor(advantages),
        s,
        total_loss_tokens=64,
        reference_log_probs=None if reference is None else torch.tensor(reference),
    )
    loss.backward()
    expected, clipped = reference_grpo(own, engine, advantages, entropies, s, 64, reference)
    assert loss.item() == pytest.approx(expected, rel=1e-12, abs=1e-14)
    assert int(sums["pg_clipfrac"]) == clipped
    assert sums["loss"].item() / 64 == pytest.approx(expected, rel=1e-12, abs=1e-14)
    step = 1e-6
    for i in range(len(own)):
        up, down = own.copy(), own.copy()
        up[i] += step
        down[i] -= step
        high, _ = reference_grpo(up, engine, advantages, entropies, s, 64, reference, at=own)
        low, _ = reference_grpo(down, engine, advantages, entropies, s, 64, reference, at=own)
        assert x.grad[i].item() == pytest.approx((high - low) / (2 * step), rel=1e-5, abs=1e-8)


@given(
    st.lists(st.tuples(*[st.floats(-60, 0)] * 3, st.floats(-5, 5), st.floats(0, 4)), min_size=0, max_size=12),
    st.sampled_from(CASES),
    st.integers(1, 50),
)
@settings(max_examples=examples(150))
def test_grpo_values_also_at_extremes(rows, s, total):
    own, engine, ref, advantages, entropies = (
        (np.array(c, np.float64) for c in zip(*rows, strict=True)) if rows else (np.zeros(0),) * 5
    )
    reference = ref if s.kl_loss_coef else None
    loss, sums = grpo_loss(
        TokenScores(torch.tensor(own), torch.tensor(entropies)),
        torch.tensor(engine),
        torch.tensor(advantages),
        s,
        total_loss_tokens=total,
        reference_log_probs=None if reference is None else torch.tensor(reference),
    )
    expected, _ = reference_grpo(own, engine, advantages, entropies, s, total, reference)
    assert loss.item() == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert all(torch.isfinite(v).all() for v in sums.values())


def test_metric_sums():
    own, engine, advantages, entropies, _ = draw(5)
    s = LossSettings(eps_clip=0.2, eps_clip_high=0.28, use_tis=True, tis_clip=1.2)
    _, sums = grpo_loss(
        TokenScores(torch.tensor(own), torch.tensor(entropies)),
        torch.tensor(engine),
        torch.tensor(advantages),
        s,
        total_loss_tokens=1,
    )
    weights = np.exp(own - engine)
    assert sums["train_rollout_logprob_abs_diff"].item() == pytest.approx(np.abs(own - engine).sum())
    assert sums["train_rollout_kl"].item() == pytest.approx((weights - (own - engine) - 1).sum())
    assert sums["tis"].item() == pytest.approx(weights.sum())
    assert int(sums["tis_clipfrac"]) == (weights > 1.2).sum() > 0
    assert sums["ppo_kl"].item() == 0.0  # the old policy is the trainer's own
    assert sums["entropy_loss"].item() == pytest.approx(entropies.sum())


def test_on_policy_step_has_ratio_one():
    own = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    s = LossSettings(eps_clip=0.2, eps_clip_high=0.28)
    loss, sums = grpo_loss(TokenScores(own, torch.zeros(3)), own.detach(), advantages, s, total_loss_tokens=3)
    loss.backward()
    assert int(sums["pg_clipfrac"]) == 0 and sums["ppo_kl"].item() == 0.0
    np.testing.assert_allclose(own.grad.numpy(), -advantages.numpy() / 3)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.3])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-12), ("float32", 3e-6), ("bfloat16", 3e-6)])
def test_token_scores(temperature, dtype, tolerance):
    rng = np.random.default_rng(0)
    logits = torch.tensor(rng.normal(0, 3, (17, 23))).to(getattr(torch, dtype))
    targets = rng.integers(0, 23, 17)
    got = token_scores(logits, torch.tensor(targets), temperature=temperature)
    log_probs, entropies = reference_scores(logits.double().numpy(), targets, temperature)
    np.testing.assert_allclose(got.log_probs.double().numpy(), log_probs, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(got.entropy.double().numpy(), entropies, rtol=tolerance, atol=tolerance)
    assert got.log_probs.dtype == (torch.float64 if dtype == "float64" else torch.float32)


def test_entropy_has_a_gradient_only_when_asked():
    logits = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    targets = torch.zeros(4, dtype=torch.int64)
    assert not token_scores(logits, targets).entropy.requires_grad
    entropy = token_scores(logits, targets, entropy_gradient=True).entropy
    entropy.sum().backward()
    p = logits.detach().softmax(-1)
    expected = -p * (p.log() + entropy.detach()[:, None])  # d entropy / d logit
    torch.testing.assert_close(logits.grad, expected)


def test_sft_is_cross_entropy():
    rng = np.random.default_rng(1)
    logits = torch.tensor(rng.normal(size=(9, 5)))
    targets = torch.tensor(rng.integers(0, 5, 9))
    loss, sums = sft_loss(token_scores(logits, targets), total_loss_tokens=20)
    expected = torch.nn.functional.cross_entropy(logits, targets, reduction="sum") / 20
    assert loss.item() == pytest.approx(expected.item())
    assert sums["loss"].item() / 20 == pytest.approx(expected.item())


def test_load_balancing_matches_transformers_and_adds_up_over_ranks():
    modeling = pytest.importorskip("transformers.models.qwen3_moe.modeling_qwen3_moe")
    layers, n, experts, k = 3, 40, 6, 2
    logits = torch.tensor(np.random.default_rng(2).normal(size=(layers, n, experts)))
    expected = modeling.load_balancing_loss_func(tuple(logits), experts, k)
    probabilities = logits.softmax(-1)
    chosen = probabilities.topk(k, -1).indices
    counts = torch.bincount(chosen.flatten(), minlength=experts).double()
    whole = load_balancing_loss(counts, probabilities.sum((0, 1)), layers * n)
    parts = [load_balancing_loss(counts, p.sum((0, 1)), layers * n) for p in probabilities.split((13, 27), dim=1)]
    assert whole.item() == pytest.approx(expected.item(), rel=1e-6)
    assert sum(p.item() for p in parts) == pytest.approx(whole.item(), rel=1e-12)


def test_log_prob_audit():
    a = np.array([[-1.0, -2.0], [-3.0, -4.0]], np.float32)
    b = a + np.array([[0.0, 0.5], [-0.25, 100.0]], np.float32)
    got = compare_log_probs(a, b, np.array([[1, 1], [1, 0]]))
    assert (got.n, got.max_abs, got.mean_abs) == (3, 0.5, 0.25)
    d = np.array([0.0, -0.5, 0.25])
    assert got.kl_k3 == pytest.approx((np.exp(d) - d - 1).mean())
    assert compare_log_probs(a, a).mean_abs == 0.0 and compare_log_probs(a[:0], a[:0]).n == 0
    with pytest.raises(IntegrityError, match="not finite"):
        compare_log_probs(a, a * np.nan)
    with pytest.raises(IntegrityError, match="shapes"):
        compare_log_probs(a, a[:1])
