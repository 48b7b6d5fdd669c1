"""A session server in this process, over scripted engines, with everything that a client needs to talk to it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from aiohttp import web

from miles_hpc.rollout.scripted import Faults, ScriptedEngine
from miles_hpc.rollout.session.book import SessionBook
from miles_hpc.rollout.session.gateway import EngineGateway
from miles_hpc.rollout.session.journal import SessionJournal
from miles_hpc.rollout.session.listening import bind
from miles_hpc.rollout.session.payload import WireSample, read_samples
from miles_hpc.rollout.session.server import SessionServer
from miles_hpc.rollout.session.settings import SessionLimits, SessionSettings
from miles_hpc.rollout.session.tokenizer import ChatTokenizer
from tests.fakes.scripted_engines import V1, EngineWorld, engine_world, write_config
from tools.fuzz_session.templates import style_template

__all__ = ["Answers", "Scenario", "Served", "check_samples", "play", "serving", "until"]

TOKEN = "the-servers-own"


@dataclass
class Answers:
    """A script: what to say next, in order, then always `default`. Keeps all that engines saw and played."""

    tokenizer: ChatTokenizer
    default: str = "yes"
    texts: list[str] = field(default_factory=list)
    seen: list[tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)

    def __call__(self, session: str, input_ids: Any) -> Sequence[int]:
        text = self.texts.pop(0) if self.texts else self.default
        ids = [*self.tokenizer.encode(text), self.tokenizer.stop_ids[0]]
        self.seen.append((tuple(int(i) for i in input_ids), tuple(ids)))
        return ids


@dataclass
class Served:
    """`headers` of requests to the server itself; those of a session are made by `open`."""

    url: str
    http: aiohttp.ClientSession
    server: SessionServer
    book: SessionBook
    gateway: EngineGateway
    world: EngineWorld
    script: Answers
    engines: list[ScriptedEngine]

    async def open(self, **settings: Any) -> tuple[str, dict[str, str]]:
        """The new session's address and headers."""
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with self.http.post(f"{self.url}/sessions", headers=headers, json=settings) as response:
            body = await response.json()
            assert response.status == 200, body
        return f"{self.url}/sessions/{body['session_id']}", {"Authorization": f"Bearer {body['token']}"}

    async def post(self, url: str, headers: dict[str, str], body: Any) -> tuple[int, Any]:
        async with self.http.post(url, headers=headers, json=body) as response:
            return response.status, await response.json()

    async def chat(self, session: tuple[str, dict[str, str]], messages: Any, **fields: Any) -> dict[str, Any]:
        """The assistant's message."""
        url, headers = session
        status, body = await self.post(f"{url}/v1/chat/completions", headers, {"messages": messages, **fields})
        assert status == 200, body
        message: dict[str, Any] = body["choices"][0]["message"]
        return message

    async def samples(self, session: tuple[str, dict[str, str]], **body: Any) -> list[WireSample]:
        url, headers = session
        async with self.http.post(f"{url}/samples", headers=headers, json=body) as response:
            data = await response.read()
            assert response.status == 200, data
        return read_samples(data)[1]


def check_samples(samples: Sequence[WireSample], seen: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
    """Every stretch of mask 1 is what an engine played after exactly the tokens before it."""
    played = {(prompt, output) for prompt, output in seen}
    for sample in samples:
        tokens, mask = sample.tokens.tolist(), sample.loss_mask
        edges = np.flatnonzero(np.diff(np.concatenate(([0], mask, [0]))))
        assert len(edges) > 0
        for start, end in edges.reshape(-1, 2).tolist():
            prompt, output = tuple(tokens[:start]), tuple(tokens[start:end])
            assert any(prompt == p and output == o[: len(output)] for p, o in played)


@contextlib.asynccontextmanager
async def serving(
    folder: Path,
    *,
    style: str = "chatml",
    engines: int = 1,
    experts: int = 0,
    limits: SessionLimits | None = None,
    settings: SessionSettings | None = None,
    faults: Faults | None = None,
    **options: Any,
) -> AsyncIterator[Served]:
    """A server on a loopback port; `options` are those of scripted engines. The journal is below `folder`."""
    tokenizer, _ = style_template(style, folder / "model")
    write_config(folder / "model", vocab_size=tokenizer.vocab_size, experts=experts)
    script = Answers(tokenizer)
    gateway = EngineGateway()
    journal, stored = SessionJournal.open(folder / "journal")
    book = SessionBook(tokenizer, gateway, journal, limits or SessionLimits())
    server = SessionServer(book, defaults=settings or SessionSettings(tool_parser="hermes"), token=TOKEN)
    runner = web.AppRunner(server.application, access_log=None, handler_cancellation=True, shutdown_timeout=1)
    listening, url = bind("127.0.0.1:0")
    async with engine_world(folder / "model") as world:
        made = [await world.engine(f"e{i}", script, faults=faults, **options) for i in range(engines)]
        for engine in made:
            gateway.add_engine(engine.name, engine, V1)
        journal.start()
        assert book.restore(stored) == {}
        await runner.setup()
        await web.SockSite(runner, listening).start()
        async with aiohttp.ClientSession() as http:
            yield Served(url, http, server, book, gateway, world, script, made)
        await runner.cleanup()
        await gateway.close()
        await journal.close()


Scenario = Callable[[Served], Awaitable[None]]


def play(folder: Path, scenario: Scenario, **options: Any) -> None:
    """A scenario against a server of its own, within a minute and a half."""

    async def run() -> None:
        async with serving(folder, **options) as served:
            await scenario(served)

    asyncio.run(asyncio.wait_for(run(), 100))


async def until(condition: Callable[[], bool], seconds: float = 30) -> None:
    """Wait for something that has no event of its own."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)
