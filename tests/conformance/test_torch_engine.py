"""The torch engine's numbers against transformers' own full forward: log-probs, experts, sampling, scores."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from miles_hpc.core.errors import IntegrityError, MilesError, UserError
from miles_hpc.core.messages import WeightManifest
from miles_hpc.core.types import FinishReason, SamplingParams
from miles_hpc.rollout.torch_engine import TorchEngine
from miles_hpc.rollout.torch_model import SlotModel
from miles_hpc.rollout.torch_sampling import sample, uniforms
from tests.conformance.engines import (
    MAX_LENGTH,
    VOCAB,
    config_of,
    generate,
    make_model,
    prompts,
    reference_experts,
    reference_log_probs,
    running,
    save_config,
    serving,
    spec_of,
    sync,
)

KINDS = ("moe", "qwen3", "llama")


@pytest.fixture(params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return save_config(request.param, tmp_path / "model")


def whole(prompt: np.ndarray, output: np.ndarray) -> np.ndarray:
    return np.concatenate((prompt, output))


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_log_probs_are_those_of_a_full_forward(folder: Path, temperature: float) -> None:
    """Many ragged requests at once, long and short prompts, in two turns: prefill, decode and reuse are all in it."""

    async def scenario() -> None:
        async with serving() as source, running(lambda: TorchEngine(spec_of(folder))) as engine:
            model = make_model(folder, seed=1)
            await sync(engine, source, source.stage(1, model))

            async def episode(i: int, prompt: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
                tokens, errors = prompt, []
                for turn in range(2):
                    result = await generate(
                        engine, tokens, session=f"s{i}", max_new_tokens=5 + i, temperature=temperature, seed=i
                    )
                    tokens = whole(tokens, result.output_ids)
                    expected = reference_log_probs(model, tokens, len(result.output_ids), temperature)
                    errors.append(np.abs(result.log_probs - expected))
                    tokens = whole(tokens, prompts(1, seed=50 + i + turn)[0][:9])
                return tokens, np.concatenate(errors)

            done = await asyncio.gather(*(episode(i, p) for i, p in enumerate(prompts(7, seed=1))))
            errors = np.concatenate([e for _, e in done])
            assert len(errors) == sum(2 * (5 + i) for i in range(7))
            assert errors.mean() < 1e-5
            assert errors.max() < 2e-4

    asyncio.run(scenario())


def test_top_p_log_probs_are_renormalised_over_the_nucleus(folder: Path) -> None:
    async def scenario() -> None:
        async with serving() as source, running(lambda: TorchEngine(spec_of(folder))) as engine:
            model = make_model(folder, seed=1)
            await sync(engine, source, source.stage(1, model))
            prompt = prompts(1, seed=2)[0]
            result = await generate(engine, prompt, max_new_tokens=12, temperature=1.0, top_p=0.6, seed=4)
            ids = torch.from_numpy(whole(prompt, result.output_ids).astype(np.int64))[None]
            with torch.no_grad():
                probs = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].double().softmax(-1)
            for row, token, log_prob in zip(probs, result.output_ids, result.log_probs, strict=True):
                order = row.argsort(descending=True)
                kept = order[: int((row[order].cumsum(0) < 0.6).sum()) + 1]
                assert int(token) in kept.tolist()
                assert log_prob == pytest.approx(float((row[int(token)] / row[kept].sum()).log()), abs=1e-4)

    asyncio.run(scenario())


def test_seeded_results_do_not_depend_on_the_batch(folder: Path) -> None:
    async def scenario() -> None:
        async with serving() as source, running(lambda: TorchEngine(spec_of(folder, slots=8))) as engine:
            await sync(engine, source, source.stage(1, make_model(folder, seed=1)))
            batch = prompts(12, seed=3)

            async def one(i: int, tag: str) -> list[int]:
                result = await generate(
                    engine, batch[i], session=f"{tag}{i}", max_new_tokens=20, temperature=1.0, seed=1000 + i
                )
                return result.output_ids.tolist()

            alone = [await one(i, "a") for i in range(12)]
            together = await asyncio.gather(*(one(i, "b") for i in range(12)))
            backwards = await asyncio.gather(*(one(i, "c") for i in reversed(range(12))))
            assert alone == together == backwards[::-1]
            same_prompt = [
                (
                    await generate(engine, batch[0], session=f"d{s}", max_new_tokens=20, temperature=1.0, seed=s)
                ).output_ids
                for s in range(4)
            ]
            assert len({tuple(ids.tolist()) for ids in same_prompt}) == 4

    asyncio.run(scenario())


def test_routed_experts_are_the_routers_own_choice_in_their_order(tmp_path: Path) -> None:
    async def scenario() -> None:
        folder = save_config("moe", tmp_path / "model")
        async with serving() as source, running(lambda: TorchEngine(spec_of(folder))) as engine:
            model = make_model(folder, seed=1)
            await sync(engine, source, source.stage(1, model))
            batch = prompts(6, seed=4)
            results = await asyncio.gather(
                *(
                    generate(engine, p, session=f"s{i}", start=i % 3, temperature=1.0, seed=i)
                    for i, p in enumerate(batch)
                )
            )
            for i, (prompt, result) in enumerate(zip(batch, results, strict=True)):
                tokens = whole(prompt, result.output_ids)
                expected = reference_experts(model, tokens)[i % 3 : -1]
                assert result.routed_experts is not None
                assert result.routed_experts.tolist() == expected.tolist()

    asyncio.run(scenario())


def test_rows_of_an_earlier_turn_stay_as_first_computed_under_older_weights(tmp_path: Path) -> None:
    async def scenario() -> None:
        folder = save_config("moe", tmp_path / "model")
        async with serving() as source, running(lambda: TorchEngine(spec_of(folder))) as engine:
            old, new = make_model(folder, seed=1), make_model(folder, seed=2)
            await sync(engine, source, source.stage(1, old))
            prompt = prompts(1, seed=5)[0]
            first = await generate(engine, prompt, session="s", max_new_tokens=8)
            await sync(engine, source, source.stage(2, new))
            turn = np.concatenate((prompt, first.output_ids, prompts(1, seed=6)[0]))
            second = await generate(engine, turn, session="s", max_new_tokens=4)
            known = len(prompt) + 8 - 1
            assert second.cached_tokens == known
            assert second.routed_experts is not None and first.routed_experts is not None
            assert second.routed_experts[:known].tolist() == first.routed_experts.tolist()
            under_new = reference_experts(new, turn)[:known]
            assert (second.routed_experts[:known] != under_new).any()
            only_new = await generate(engine, turn, session="s2", start=known, max_new_tokens=4)
            assert only_new.routed_experts is not None
            assert len(only_new.routed_experts) == len(turn) + 4 - 1 - known

    asyncio.run(scenario())


def test_wide_expert_counts_use_two_bytes(tmp_path: Path) -> None:
    config = config_of("moe")
    config.num_experts = 300
    config.moe_intermediate_size = 8
    config.save_pretrained(tmp_path / "model")
    model = SlotModel(
        tmp_path / "model", dtype="float32", device="cpu", slots=1, max_length=32, experts_implementation="grouped_mm"
    )
    assert model.row_dtype == np.uint16


def test_score_is_the_full_forward_at_temperature_one(folder: Path) -> None:
    async def scenario() -> None:
        async with serving() as source, running(lambda: TorchEngine(spec_of(folder))) as engine:
            model = make_model(folder, seed=1)
            await sync(engine, source, source.stage(1, model))
            tokens = np.random.default_rng(0).integers(0, VOCAB, (3, 30)).astype(np.int32)
            under_way = asyncio.ensure_future(generate(engine, [1, 2, 3], max_new_tokens=40))
            scores = await engine.score(tokens, deadline_s=30)
            await under_way
            for row, score in zip(tokens, scores, strict=True):
                np.testing.assert_allclose(score, reference_log_probs(model, row, 29), atol=1e-4)

    asyncio.run(scenario())


def test_idle_sessions_lose_their_slots_oldest_first(folder: Path) -> None:
    async def scenario() -> None:
        async with serving() as source, running(lambda: TorchEngine(spec_of(folder, slots=3))) as engine:
            await sync(engine, source, source.stage(1, make_model(folder, seed=1)))
            batch = prompts(4, seed=6, shortest=8)
            first = [await generate(engine, batch[i], session=f"s{i}", max_new_tokens=4) for i in range(3)]
            await generate(engine, whole(batch[0], first[0].output_ids), session="s0", max_new_tokens=1)
            await generate(engine, batch[3], session="s3", max_new_tokens=4)  # takes the slot of s1
            kept = await generate(engine, whole(batch[0], first[0].output_ids), session="s0", max_new_tokens=4)
            assert kept.cached_tokens == len(batch[0]) + 4 - 1
            lost = await generate(engine, whole(batch[1], first[1].output_ids), session="s1", max_new_tokens=4)
            assert lost.cached_tokens == 0

    asyncio.run(scenario())


def test_long_prompts_are_prefilled_in_chunks_with_the_same_result(folder: Path) -> None:
    async def scenario() -> None:
        async with serving() as source:
            version, results = source.stage(1, make_model(folder, seed=1)), []
            for budget in (256, 7):
                spec = spec_of(folder, options={"prefill_tokens": budget})
                async with running(lambda spec=spec: TorchEngine(spec)) as engine:
                    await sync(engine, source, version)
                    batch = prompts(5, seed=7, shortest=20, longest=70)
                    results.append(
                        await asyncio.gather(*(generate(engine, p, session=f"s{i}") for i, p in enumerate(batch)))
                    )
            for one, other in zip(*results, strict=True):
                assert one.output_ids.tolist() == other.output_ids.tolist()
                np.testing.assert_allclose(one.log_probs, other.log_probs, atol=2e-5)

    asyncio.run(scenario())


def test_weights_that_are_not_finite_fail_a_request_and_leave_nothing_behind(folder: Path) -> None:
    async def scenario() -> None:
        async with serving() as source, running(lambda: TorchEngine(spec_of(folder, slots=1))) as engine:
            good, bad = make_model(folder, seed=1), make_model(folder, seed=1)
            v1 = source.stage(1, good)
            await sync(engine, source, v1)
            expected = await generate(engine, [1, 2, 3], session="a")
            with torch.no_grad():
                bad.model.layers[0].self_attn.v_proj.weight.fill_(torch.nan)
            await sync(engine, source, source.stage(2, bad))
            with pytest.raises(MilesError, match="finite"):
                await generate(engine, [4] * 40, session="b")
            await sync(engine, source, v1)
            again = await generate(engine, [1, 2, 3], session="c")
            assert again.output_ids.tolist() == expected.output_ids.tolist()

    asyncio.run(scenario())


def test_bfloat16_serves_and_verifies_its_live_weights(tmp_path: Path) -> None:
    async def scenario() -> None:
        folder = save_config("moe", tmp_path / "model")
        async with serving() as source, running(lambda: TorchEngine(spec_of(folder, dtype="bfloat16"))) as engine:
            with pytest.raises(IntegrityError, match="float32"):
                await sync(engine, source, source.stage(1, make_model(folder, seed=1)))
            version = source.stage(2, make_model(folder, seed=1).to(torch.bfloat16))
            done = await sync(engine, source, version)
            assert done.digests == {p.name: p.digest for p in source.manifests[version].pieces}
            result = await generate(engine, prompts(1)[0], temperature=1.0, seed=1)
            assert len(result.output_ids) == 12 and result.log_probs.dtype == np.float32

    asyncio.run(scenario())


def test_weights_of_another_model_are_refused_before_anything_is_fetched(tmp_path: Path) -> None:
    async def scenario() -> None:
        ours, theirs = save_config("llama", tmp_path / "a"), save_config("qwen3", tmp_path / "b")
        async with serving() as source, running(lambda: TorchEngine(spec_of(ours))) as engine:
            v1 = source.stage(1, make_model(ours, seed=1))
            await sync(engine, source, v1)
            with pytest.raises(IntegrityError, match="no such weight"):
                await sync(engine, source, source.stage(2, make_model(theirs, seed=1)))
            assert (await engine.describe()).version == v1

    asyncio.run(scenario())


def test_tied_weights_are_one_piece(tmp_path: Path) -> None:
    async def scenario() -> WeightManifest:
        folder = save_config("llama", tmp_path / "model")
        async with serving() as source:
            return source.manifests[source.stage(1, make_model(folder, seed=1))]

    names = [p.name for p in asyncio.run(scenario()).pieces]
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names


def test_step_that_fails_ends_its_requests_and_not_the_engine(folder: Path) -> None:
    async def scenario() -> None:
        async with serving() as source, running(lambda: TorchEngine(spec_of(folder))) as engine:
            await sync(engine, source, source.stage(1, make_model(folder, seed=1)))
            expected = await generate(engine, [1, 2, 3], session="a")
            forward = engine._model.forward

            def broken(*args: object) -> None:
                engine._model.forward = forward
                raise RuntimeError("device gone")

            engine._model.forward = broken
            with pytest.raises(MilesError, match="device gone"):
                await generate(engine, [1, 2, 3], session="b")
            again = await generate(engine, [1, 2, 3], session="c")
            assert again.output_ids.tolist() == expected.output_ids.tolist()

    asyncio.run(scenario())


def test_cancelled_request_frees_its_slot(folder: Path) -> None:
    async def scenario() -> None:
        async with serving() as source, running(lambda: TorchEngine(spec_of(folder, slots=1))) as engine:
            await sync(engine, source, source.stage(1, make_model(folder, seed=1)))
            one = asyncio.ensure_future(generate(engine, [1, 2, 3], session="a", max_new_tokens=MAX_LENGTH))
            await asyncio.sleep(0.02)
            one.cancel()
            other = await generate(engine, [1, 2, 3], session="b", max_new_tokens=4)
            assert other.finish_reason is FinishReason.LENGTH

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"model_type": "no_such_model"}, "no_such_model"),
        ({"sliding_window": 16, "use_sliding_window": True, "layer_types": ["sliding_attention"] * 2}, "sliding"),
        ({"auto_map": {"AutoConfig": "x.Y"}}, "auto_map"),
    ],
)
def test_models_that_cannot_be_run_are_refused_in_one_line(tmp_path: Path, change: dict, text: str) -> None:
    folder = save_config("qwen3", tmp_path / "model")
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(UserError, match=text) as caught:
        TorchEngine(spec_of(folder))
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match=r"config\.json"):
        TorchEngine(spec_of(tmp_path / "nowhere"))


# ---------------------------------------------------------------------------------------------- sampling


def test_draws_follow_the_distribution() -> None:
    """20000 draws from one row: chi-square of 15 degrees of freedom stays under its 99.99 % point."""
    logits = torch.linspace(-2, 1, 16)[torch.randperm(16, generator=torch.Generator().manual_seed(0))]
    n = 20_000
    params = SamplingParams(max_new_tokens=1, temperature=0.8)
    ids, _ = sample(logits.expand(n, -1), [params] * n, uniforms(5, 0, n).tolist())
    expected = torch.softmax(logits / 0.8, -1).double() * n
    counts = torch.bincount(torch.tensor(ids), minlength=16).double()
    assert float(((counts - expected) ** 2 / expected).sum()) < 44.3


def test_uniforms_are_a_stream_by_position() -> None:
    whole_stream = uniforms(9, 0, 1000)
    assert uniforms(9, 400, 50).tolist() == whole_stream[400:450].tolist()
    assert (whole_stream >= 0).all() and (whole_stream < 1).all()
    assert abs(whole_stream.mean() - 0.5) < 0.05
    assert abs(np.corrcoef(whole_stream[:-1], whole_stream[1:])[0, 1]) < 0.1
    assert not np.intersect1d(whole_stream, uniforms(10, 0, 1000)).size
    assert uniforms(-1, 0, 3).tolist() == uniforms(2**64 - 1, 0, 3).tolist()


def test_impossible_tokens_are_never_drawn() -> None:
    logits = torch.full((3, 6), -torch.inf)
    logits[:, 2] = 1.0
    params = [SamplingParams(max_new_tokens=1, temperature=t, top_p=p) for t, p in ((1.0, 1.0), (0.5, 0.3), (0.0, 1.0))]
    for u in (0.0, 0.5, 1.0 - 2**-40):
        ids, log_probs = sample(logits, params, [u] * 3)
        assert ids == [2, 2, 2] and log_probs == [0.0, 0.0, 0.0]


def test_mixed_rows_are_sampled_as_each_would_be_alone() -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(3))
    params = [
        SamplingParams(max_new_tokens=1, temperature=t, top_p=p)
        for t, p in ((1.0, 1.0), (0.0, 1.0), (0.6, 0.8), (1.3, 0.5))
    ]
    draws = [0.3, 0.9, 0.71, 0.12]
    ids, log_probs = sample(logits, params, draws)
    for i in range(4):
        one_id, one_log_prob = sample(logits[i : i + 1], params[i : i + 1], draws[i : i + 1])
        assert (one_id[0], one_log_prob[0]) == (ids[i], pytest.approx(log_probs[i], abs=1e-6))
