"""Routing alone: what a decision costs, and requests through our routing beside the same through sglang-router.

    gateway    client ─ EngineGateway, its SessionRouter in process ──────────────────▶ one of N backends
    router     client ─ EngineGateway with one engine ─▶ sglang-router, policy manual ─▶ one of N backends
    proxy      client ─ EngineGateway with one engine ─▶ our router as a proxy ────────▶ one of N backends

Clients, engine adapter, requests and backends are the same in all; only who routes differs. `gateway` is how this project
routes: the session server holds the router, so there is no hop. `router` is how the peer is used behind a session server,
with the same routing key. `proxy` is like for like in kind, an HTTP proxy in Python beside one in Rust; nobody uses it.

| figure | is |
|---|---|
| requests_per_s | requests over wall time, everything on this machine |
| client_cpu_us | processor time of the client with its gateway, per request |
| hop_cpu_us | processor time of the router or proxy in between, per request; 0 for gateway |
| decision_us | `route` and `finish` of one request in process, with as many sessions known as stated |
"""  # noqa: E501

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import numpy as np

from miles_hpc.core.types import SamplingParams
from miles_hpc.rollout.routing import SessionRouter
from miles_hpc.rollout.session.gateway import EngineGateway
from tools.bench_session.backend import OUTPUT_TOKENS, STOP_ID
from tools.bench_session.engines import V1, HttpEngine
from tools.bench_session.peer import Router
from tools.bench_session.processes import Child, cpu_s, own_cpu_s

__all__ = ["decision_us", "measure_routed"]

_SAMPLING = SamplingParams(max_new_tokens=OUTPUT_TOKENS, stop_token_ids=(STOP_ID,))
_DEADLINE_S = 30.0


def decision_us(*, sessions: int, engines: int, requests: int, repeats: int, seed: int) -> list[float]:
    """Processor time of `route` and `finish`, per request, in microseconds; one value per repeat."""
    found = []
    for repeat in range(repeats):
        router, rng = SessionRouter(V1), Random(f"{seed}-{repeat}")
        for i in range(engines):
            router.join(f"e{i}", V1)
        keys = [f"s{i}" for i in range(sessions)]
        for key in keys:
            route = router.route(key, prompt_tokens=1000, new_tokens=1000, now_s=0.0)
            router.finish(route, context_tokens=1200, cached_tokens=0, now_s=0.0)
        asked = rng.choices(keys, k=requests)
        began = time.thread_time_ns()
        for key in asked:
            route = router.route(key, prompt_tokens=1500, new_tokens=300, now_s=1.0)
            router.finish(route, context_tokens=1700, cached_tokens=1200, now_s=1.0)
        found.append((time.thread_time_ns() - began) / 1e3 / requests)
    return found


def measure_routed(
    folder: Path,
    python: Path | None,
    *,
    backends: int,
    clients: int,
    requests: int,
    prompt_tokens: int,
    repeats: int,
    seed: int,
) -> list[dict[str, Any]]:
    """One row per arm; without `python`, the peer's, its arm is left out. Logs go to `folder`."""
    children: list[Any] = []
    try:
        served = Child([sys.executable, "-m", "tools.bench_session.backend", str(backends)], folder / "backends.log")
        children.append(served)
        urls: list[str] = served.told["urls"]
        proxy = Child([sys.executable, "-m", "tools.bench_session.proxy", *urls], folder / "proxy.log")
        children.append(proxy)
        arms: dict[str, tuple[list[str], int | None]] = {"gateway": (urls, None)}
        arms["proxy"] = ([proxy.told["url"]], proxy.pid)
        if python is not None:
            router = Router(python, urls, folder)
            children.append(router)
            arms["router"] = ([router.url], router.pid)
        samples: dict[str, list[tuple[float, float, float]]] = {name: [] for name in arms}
        rng = Random(seed)
        for repeat in range(repeats + 1):  # the first fills connections and caches, and doesn't count
            for name in rng.sample(list(arms), len(arms)):
                through, hop = arms[name]
                play = _play(through, hop, clients=clients, requests=requests, prompt_tokens=prompt_tokens)
                sample = asyncio.run(asyncio.wait_for(play, _DEADLINE_S * 4))
                if repeat:
                    samples[name].append(sample)
        return [
            _row(name, found, clients=clients, requests=requests, prompt_tokens=prompt_tokens, backends=backends)
            for name, found in samples.items()
        ]
    finally:
        for child in reversed(children):
            child.close()


async def _play(
    urls: list[str], hop: int | None, *, clients: int, requests: int, prompt_tokens: int
) -> tuple[float, float, float]:
    """(wall time, processor time of this process, of the hop) per request, in seconds."""
    gateway = EngineGateway()
    prompt = np.arange(100, 100 + prompt_tokens, dtype=np.int32)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        for i, url in enumerate(urls):
            gateway.add_engine(f"e{i}", HttpEngine(f"e{i}", url, http), V1)

        async def one(key: str) -> None:
            for _ in range(requests):
                await gateway.generate(
                    key,
                    prompt,
                    _SAMPLING,
                    new_tokens=OUTPUT_TOKENS,
                    routed_experts_start=prompt_tokens - 1,
                    deadline_s=_DEADLINE_S,
                )

        own, far, began = own_cpu_s(), 0.0 if hop is None else cpu_s(hop), time.perf_counter()
        await asyncio.gather(*(one(f"session{i}") for i in range(clients)))
        n = clients * requests
        wall, own = time.perf_counter() - began, own_cpu_s() - own
        far = 0.0 if hop is None else cpu_s(hop) - far
        await gateway.close()
    return wall / n, own / n, far / n


def _row(name: str, samples: list[tuple[float, float, float]], **sizes: int) -> dict[str, Any]:
    wall, client, hop = ([sample[i] for sample in samples] for i in range(3))
    rates = [1 / value for value in wall]
    return {
        "arm": name,
        **sizes,
        "requests_per_s": round(statistics.median(rates), 1),
        "requests_per_s_all": [round(rate, 1) for rate in rates],
        "cpu_us_all": [round((a + b) * 1e6, 1) for a, b in zip(client, hop, strict=True)],
        "client_cpu_us": round(statistics.median(client) * 1e6, 1),
        "hop_cpu_us": round(statistics.median(hop) * 1e6, 1),
    }
