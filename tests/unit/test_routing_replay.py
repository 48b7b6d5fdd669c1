"""Routing replay on real transformers routers: what reaches the experts, gradients, counts, recomputation."""

from __future__ import annotations

import numpy as np
import pytest

from miles_hpc.core.errors import IntegrityError, UserError
from tests.conformance.training_task import EXPERTS, LAYERS, MOE, TOP_K, VOCAB

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from miles_hpc.routing.replay import RouterTap, find_routers  # noqa: E402

QWEN = MOE
QWEN_RAW = {**MOE, "norm_topk_prob": False}
MIXTRAL = {
    "model_type": "mixtral",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 16,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}


def make(fields):
    fields = dict(fields)
    config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").double()
    model.set_experts_implementation("eager")
    taken = {}
    for number, layer in enumerate(model.model.layers):
        layer.mlp.experts.register_forward_pre_hook(
            lambda module, args, number=number: taken.__setitem__(number, (args[1], args[2]))
        )
    return model, RouterTap(find_routers(model.model.layers)), taken


def record(n, seed=0):
    scores = np.random.default_rng(seed).random((n, LAYERS, EXPERTS))
    return torch.tensor(scores.argsort(-1)[..., :TOP_K])


IDS = torch.arange(1, 25).reshape(2, 12)


@pytest.mark.parametrize("fields", [QWEN, QWEN_RAW, MIXTRAL], ids=["qwen3_moe", "unnormalised", "mixtral"])
def test_recorded_experts_reach_the_experts_with_own_probabilities(fields):
    model, tap, taken = make(fields)
    assert (tap.layers, tap.n_experts, tap.top_k) == ((0, 1), EXPERTS, TOP_K)
    model(input_ids=IDS, use_cache=False)
    own = {layer: ids.clone() for layer, (ids, _) in taken.items()}
    ids, recorded = record(24), torch.arange(24) % 3 != 0
    with tap.replay(ids, recorded) as replayed, tap.collect_logits() as logits:
        model(input_ids=IDS, use_cache=False)
        assert replayed() == int(recorded.sum()) * LAYERS
    for layer, (chosen, weights) in taken.items():
        assert torch.equal(chosen[recorded], ids[:, layer][recorded])
        if layer == 0:  # nothing upstream of the first router has changed
            assert torch.equal(chosen[~recorded], own[0][~recorded])
        expected = logits[layer].softmax(-1).gather(-1, chosen)
        if fields is not QWEN_RAW:
            expected = expected / expected.sum(-1, keepdim=True)
        torch.testing.assert_close(weights, expected.to(weights), rtol=1e-5, atol=1e-6)
    model(input_ids=IDS, use_cache=False)
    assert all(torch.equal(taken[layer][0], own[layer]) for layer in own)  # nothing is left behind


def test_replay_of_the_own_choice_changes_nothing_and_routers_learn():
    model, tap, taken = make(QWEN)
    free = model(input_ids=IDS, use_cache=False).logits
    ids = torch.stack([taken[layer][0] for layer in range(LAYERS)], dim=1)
    with tap.replay(ids, torch.ones(24, dtype=torch.bool)):
        forced = model(input_ids=IDS, use_cache=False).logits
        torch.testing.assert_close(forced, free, rtol=0, atol=1e-6)  # the model rounds scores in float32
        forced.square().sum().backward()
    for router in find_routers(model.model.layers).values():
        assert router.weight.grad.abs().sum() > 0


def test_recomputation_sees_the_same_record_and_counts_once():
    model, tap, _ = make(QWEN)
    ids, recorded = record(24), torch.ones(24, dtype=torch.bool)

    def gradients(checkpointing):
        model.zero_grad()
        model.train()
        if checkpointing:
            model.activation_checkpointing_enable()
        with tap.replay(ids, recorded) as replayed:
            model(input_ids=IDS, use_cache=False).logits.square().mean().backward()
            count = replayed()
        return count, [p.grad.clone() for p in model.parameters()]

    plain, again = gradients(False), gradients(True)
    assert plain[0] == again[0] == 24 * LAYERS
    for a, b in zip(plain[1], again[1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_a_record_of_another_length_is_refused():
    model, tap, _ = make(QWEN)
    with pytest.raises(IntegrityError, match="spans 23 tokens, the forward 24"):
        with tap.replay(record(23), torch.ones(23, dtype=torch.bool)):
            model(input_ids=IDS, use_cache=False)
    model(input_ids=IDS, use_cache=False)


def test_routers_that_cannot_be_replayed_are_named():
    class Sigmoid(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.top_k = 2
            self.weight = torch.nn.Parameter(torch.randn(4, 8))

        def forward(self, hidden):
            logits = hidden @ self.weight.T
            scores, ids = logits.sigmoid().topk(2)
            return logits, scores, ids

    layer = torch.nn.Sequential(Sigmoid())
    with pytest.raises(UserError, match="layer 3's router Sigmoid"):
        RouterTap({3: find_routers([layer])[0]})
    assert RouterTap({3: layer[0]}, replay=False).n_experts == 4
    assert find_routers([torch.nn.Linear(2, 2)]) == {}
