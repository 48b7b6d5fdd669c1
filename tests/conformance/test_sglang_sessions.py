"""Sessions on real SGLang: a killed engine costs its sessions a moment, and no token."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from aiohttp import web

from miles_hpc.rollout.session.book import SessionBook
from miles_hpc.rollout.session.gateway import EngineGateway
from miles_hpc.rollout.session.journal import SessionJournal
from miles_hpc.rollout.session.listening import bind
from miles_hpc.rollout.session.payload import WireSample, read_samples
from miles_hpc.rollout.session.server import SessionServer
from miles_hpc.rollout.session.settings import SessionLimits, SessionSettings
from miles_hpc.rollout.sglang.engine import SglangEngine
from tests.conformance.engines import (
    config_of,
    make_model,
    reference_experts,
    reference_log_probs,
    serving,
    spec_of,
    sync,
)
from tests.conformance.sglang_servers import options, start_server
from tests.fakes.session import said
from tools.fuzz_session.templates import style_template

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

SESSIONS = 24
TURNS = 6
KILL_AFTER = 3 * SESSIONS  # turns of all sessions together
#: From the kill to the last answer to a request that was under way, or asked since: what the issue allows.
RESUMED_S = 10.0


def test_kill_9_of_an_engine_in_the_middle_of_live_sessions(tmp_path: Path) -> None:
    tokenizer, _ = style_template("chatml", tmp_path / "model")
    config = config_of("moe")
    config.vocab_size, config.max_position_embeddings = tokenizer.vocab_size, 512
    config.architectures = ["Qwen3MoeForCausalLM"]
    config.save_pretrained(tmp_path / "model")
    model = make_model(tmp_path / "model", 1)
    stops = list(range(0, tokenizer.vocab_size, 8))  # nothing goes on after a turn that a limit cut

    async def run() -> tuple[list[WireSample], float, EngineGateway]:
        specs = [
            spec_of(tmp_path / "model", name=f"e{i}", slots=SESSIONS, max_length=500, options=options()) for i in (0, 1)
        ]
        servers = [await start_server(spec, step_s=0.02) for spec in specs]
        engines = [SglangEngine(spec, server) for spec, server in zip(specs, servers, strict=True)]
        gateway = EngineGateway()
        journal, _ = SessionJournal.open(tmp_path / "journal")
        book = SessionBook(tokenizer, gateway, journal, SessionLimits(context_tokens=500))
        server = SessionServer(book, defaults=SessionSettings(), token="t")
        runner = web.AppRunner(server.application, access_log=None)
        listening, url = bind("127.0.0.1:0")
        killed = asyncio.Event()
        answered: list[float] = []

        async def live(number: int, http: aiohttp.ClientSession) -> list[WireSample]:
            async with http.post(f"{url}/sessions", headers={"x-api-key": "t"}) as response:
                opened = await response.json()
            session, headers = f"{url}/sessions/{opened['session_id']}", {"x-api-key": opened["token"]}
            talk: list[Any] = [said(f"session {number}")]
            for turn in range(TURNS):
                body = {"messages": talk, "max_tokens": 70, "stop_token_ids": stops, "seed": 100 * number + turn}
                async with http.post(f"{session}/v1/chat/completions", headers=headers, json=body) as response:
                    found = await response.json()
                    assert response.status == 200, found
                answered.append(time.monotonic())
                assert found["choices"][0]["finish_reason"] == "stop", found  # none is cut, whatever happened to it
                talk += [found["choices"][0]["message"], said("go on")]
                if len(answered) >= KILL_AFTER and not killed.is_set():
                    os.killpg(servers[0]._child.pid, signal.SIGKILL)  # type: ignore[union-attr]
                    killed.set()
            async with http.post(f"{session}/samples", headers=headers) as response:
                assert response.status == 200
                return read_samples(await response.read())[1]

        async with serving() as source, aiohttp.ClientSession() as http:
            try:
                version = source.stage(1, model)
                for engine in engines:
                    await engine.start()
                    await sync(engine, source, version)
                    gateway.add_engine(engine.name, engine, version)
                journal.start()
                await runner.setup()
                await web.SockSite(runner, listening).start()
                playing = [asyncio.create_task(live(number, http)) for number in range(SESSIONS)]
                together = asyncio.gather(*playing)  # done with the first that fails, or with the last
                await asyncio.wait({asyncio.create_task(killed.wait()), together}, return_when=asyncio.FIRST_COMPLETED)
                assert killed.is_set(), together.exception()
                at = time.monotonic()
                under_way = book.n_in_flight
                samples = [sample for own in await together for sample in own]
                assert under_way > SESSIONS / 4  # it was the middle
                return samples, max(answered) - at, gateway
            finally:
                await runner.cleanup()
                await gateway.close()
                await journal.close()
                for engine in engines:
                    await engine.close()
                for one in servers:
                    await one.end()

    samples, last_s, gateway = asyncio.run(asyncio.wait_for(run(), 400))
    assert gateway.engines == ("e1",)
    assert gateway.failovers > 0 and gateway.slowest_failover_s <= RESUMED_S
    print(
        f"{gateway.failovers} requests moved, the slowest answered {gateway.slowest_failover_s:.2f} s after the loss; "
    )
    print(f"all {SESSIONS} sessions through {last_s:.2f} s after the kill")
    assert len(samples) == SESSIONS
    for sample in samples:
        assert len(sample.meta.turns) == TURNS
        expected = reference_log_probs(model, sample.tokens, len(sample.tokens) - 1)
        sampled = sample.loss_mask[1:] == 1
        assert np.abs(sample.log_probs[1:] - expected)[sampled].max() < 1e-4
        rows, wanted = sample.routed_experts, reference_experts(model, sample.tokens)[:-1]
        assert rows is not None and (np.sort(rows, -1) == np.sort(wanted, -1)).all()
