"""Deterministic mode: with `batch_invariant` a request's log-probs have the same bits alone and in any company."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from miles_hpc.rollout.torch_engine import TorchEngine
from tests.conformance.engines import generate, make_model, prompts, running, save_config, serving, spec_of, sync

N = 20


@pytest.mark.parametrize("kind", ["moe", "qwen3", "llama"])
def test_same_bits_alone_and_in_company(kind: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        folder = save_config(kind, tmp_path / "model")
        spec = spec_of(folder, slots=2 * N, options={"batch_invariant": True})
        async with serving() as source, running(lambda: TorchEngine(spec)) as engine:
            await sync(engine, source, source.stage(1, make_model(folder, seed=1)))
            batch = prompts(N, seed=3)

            async def episode(i: int, tag: str) -> bytes:
                """Two turns; the bits of all that came back."""
                tokens, bits = batch[i], []
                for turn in range(2):
                    result = await generate(
                        engine,
                        tokens,
                        session=f"{tag}{i}",
                        max_new_tokens=4 + i % 7,
                        temperature=1.0,
                        seed=100 * i + turn,
                    )
                    bits += [result.output_ids.tobytes(), result.log_probs.tobytes()]
                    bits.append(b"" if result.routed_experts is None else result.routed_experts.tobytes())
                    tokens = np.concatenate((tokens, result.output_ids, batch[(i + 1) % N][:5]))
                await engine.end_session(f"{tag}{i}")
                return b"".join(bits)

            alone = [await episode(i, "a") for i in range(0, N, 4)]
            together = await asyncio.gather(*(episode(i, "b") for i in range(N)))
            backwards = (await asyncio.gather(*(episode(i, "c") for i in reversed(range(N)))))[::-1]
            assert alone == together[::4]
            assert together == backwards

    asyncio.run(scenario())
