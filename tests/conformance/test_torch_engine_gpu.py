"""The torch engine on a CUDA device, against the reference on the CPU."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch

from miles_hpc.rollout.torch_engine import TorchEngine
from tests.conformance.engines import (
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

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("kind", ["moe", "qwen3", "llama"])
@pytest.mark.parametrize(("dtype", "mean"), [("float32", 1e-5), ("bfloat16", 0.2)])
def test_log_probs_and_digests_on_the_device(kind: str, dtype: str, mean: float, tmp_path: Path) -> None:
    async def scenario() -> None:
        folder = save_config(kind, tmp_path / "model")
        spec = spec_of(folder, device="cuda:0", dtype=dtype)
        async with serving() as source, running(lambda: TorchEngine(spec)) as engine:
            model = make_model(folder, seed=1).to(getattr(torch, dtype))
            version = source.stage(1, model)
            done = await sync(engine, source, version)
            assert done.digests == {p.name: p.digest for p in source.manifests[version].pieces}
            batch = prompts(9, seed=1)
            results = await asyncio.gather(
                *(generate(engine, p, session=f"s{i}", temperature=1.0, seed=i) for i, p in enumerate(batch))
            )
            errors = []
            for prompt, result in zip(batch, results, strict=True):
                tokens = np.concatenate((prompt, result.output_ids))
                errors.append(np.abs(result.log_probs - reference_log_probs(model, tokens, len(result.output_ids))))
                if kind == "moe" and dtype == "float32":
                    assert result.routed_experts is not None
                    assert result.routed_experts.tolist() == reference_experts(model, tokens)[:-1].tolist()
            assert np.concatenate(errors).mean() < mean
            scores = await engine.score(np.stack([p[:3] for p in batch]), deadline_s=60)
            assert scores.shape == (9, 2)

    asyncio.run(scenario())
