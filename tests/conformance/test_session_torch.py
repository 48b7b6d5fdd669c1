"""The session server over the torch engine: samples hold the log-probs and experts of the model that sampled them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import numpy as np
import pytest
from aiohttp import web

pytest.importorskip("torch")

from miles_hpc.core.types import WeightVersion
from miles_hpc.rollout.session.book import SessionBook
from miles_hpc.rollout.session.gateway import EngineGateway
from miles_hpc.rollout.session.journal import SessionJournal
from miles_hpc.rollout.session.listening import bind
from miles_hpc.rollout.session.payload import read_samples
from miles_hpc.rollout.session.server import SessionServer
from miles_hpc.rollout.session.settings import SessionLimits, SessionSettings
from miles_hpc.rollout.torch_engine import TorchEngine
from tests.conformance.engines import (
    config_of,
    make_model,
    reference_experts,
    reference_log_probs,
    running,
    serving,
    spec_of,
    sync,
)
from tests.fakes.session import said
from tools.fuzz_session.templates import style_template


@pytest.mark.parametrize("kind", ["moe", "llama"])
def test_samples_are_what_the_model_computes(kind: str, tmp_path: Path) -> None:
    """Two sessions at once, one of them with branches; the weights change between its turns."""
    tokenizer, _ = style_template("chatml", tmp_path / "model")
    config = config_of(kind)
    config.vocab_size, config.max_position_embeddings = tokenizer.vocab_size, 512
    config.architectures = ["Qwen3MoeForCausalLM" if kind == "moe" else "LlamaForCausalLM"]
    config.save_pretrained(tmp_path / "model")
    models = [make_model(tmp_path / "model", seed) for seed in (1, 2)]

    async def run() -> bytes:
        gateway = EngineGateway()
        journal, _ = SessionJournal.open(tmp_path / "journal")
        book = SessionBook(tokenizer, gateway, journal, SessionLimits(context_tokens=500))
        defaults = SessionSettings(history="tree", matcher="loose_tool_call")
        server = SessionServer(book, defaults=defaults, token="t")
        runner = web.AppRunner(server.application, access_log=None)
        listening, url = bind("127.0.0.1:0")
        async with (
            serving() as source,
            running(lambda: TorchEngine(spec_of(tmp_path / "model", max_length=500))) as engine,
            aiohttp.ClientSession() as http,
        ):
            versions = [source.stage(i + 1, model) for i, model in enumerate(models)]
            await sync(engine, source, versions[0])
            gateway.add_engine(engine.name, engine, versions[0])
            journal.start()
            await runner.setup()
            await web.SockSite(runner, listening).start()
            try:
                async with http.post(f"{url}/sessions", headers={"x-api-key": "t"}) as response:
                    opened = await response.json()
                session, headers = f"{url}/sessions/{opened['session_id']}", {"x-api-key": opened["token"]}

                async def ask(messages: list[dict[str, object]], seed: int) -> dict[str, object]:
                    body: dict[str, object] = {"messages": messages, "max_tokens": 100, "seed": seed}
                    # Nothing goes on after a turn that a limit cut, so many tokens end one.
                    body["stop_token_ids"] = list(range(0, tokenizer.vocab_size, 8))
                    async with http.post(f"{session}/v1/chat/completions", headers=headers, json=body) as response:
                        answered = await response.json()
                        assert response.status == 200, answered
                    message: dict[str, object] = answered["choices"][0]["message"]
                    return message

                talk = [said("hi there")]
                talk += [await ask(talk, 1), said("go on")]
                await asyncio.gather(*(ask([*talk[:-1], said(f"branch {i}")], i) for i in range(3)))
                await sync(engine, source, versions[1])
                gateway.set_version(engine.name, versions[1])
                await ask(talk, 5)
                async with http.post(f"{session}/samples", headers=headers) as response:
                    assert response.status == 200
                    return await response.read()
            finally:
                await runner.cleanup()
                await gateway.close()
                await journal.close()

    meta, samples = read_samples(asyncio.run(asyncio.wait_for(run(), 150)))
    assert len(samples) == 4 and len(meta.samples) == 4
    seen = set()
    for sample in samples:
        assert (sample.routed_experts is None) == (kind == "llama")
        found = {WeightVersion(term, step) for term, step, _, _ in sample.meta.versions}
        seen |= found
        if found != {WeightVersion(1, 1)}:
            continue  # its prefix was computed under the older weights, as the engine's contract has it
        expected = reference_log_probs(models[0], sample.tokens, len(sample.tokens) - 1)
        sampled = sample.loss_mask[1:] == 1
        assert np.abs(sample.log_probs[1:] - expected)[sampled].max() < 1e-4
        if sample.routed_experts is not None:
            rows, wanted = sample.routed_experts, reference_experts(models[0], sample.tokens)[:-1]
            assert (np.sort(rows, -1) == np.sort(wanted, -1)).all()
    assert seen == {WeightVersion(1, 1), WeightVersion(1, 2)}
