"""The OpenAI surface: a real session server over HTTP on loopback, engines that answer at once.

| figure | is |
|---|---|
| server_cpu_us | processor time of the server's process per turn: HTTP, JSON, matching, template, tokens, journal |
| turns_per_core_s | its inverse: what one core of a server does |
| turns_per_s | turns over wall time, clients on the same machine |
| parse_share | decoding the request's JSON, timed alone on the same bodies, over server_cpu_us |

Clients send the whole history with every turn, as OpenAI's do: at 64k tokens that is a body of some 200 kB. Sessions
are built turn by turn over HTTP, so that their record has as many turns as a real one; each timed turn is one more.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from tools.bench_session.processes import Child, cpu_s

__all__ = ["measure_surface"]

_NEW_TEXT = "the tool said that a file is a call, then it ends\n" * 7  # about 150 tokens with the built-in tokenizer
_DEADLINE_S = 120.0
_SHORT_TOKENS = 16_000


class _Client:
    """One session and its owner, who is also its agent."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self._http, self._url = http, url
        self._headers: dict[str, str] = {}
        self.messages: list[Any] = []
        self.prompt_tokens = 0
        self.body = b""

    async def open(self, token: str) -> None:
        headers = {"Authorization": f"Bearer {token}"}
        async with self._http.post(f"{self._url}/sessions", headers=headers, json={"history": "tree"}) as answer:
            opened = msgspec.json.decode(await answer.read())
            if answer.status != 200:
                raise RuntimeError(f"opening a session: status {answer.status}: {opened}")
        self._url += f"/sessions/{opened['session_id']}/v1/chat/completions"
        self._headers = {"Authorization": f"Bearer {opened['token']}", "Content-Type": "application/json"}

    async def turn(self, number: int) -> None:
        role = "tool" if self.messages else "user"
        self.messages.append({"role": role, "tool_call_id": "c", "content": f"{number} {_NEW_TEXT}"})
        self.body = msgspec.json.encode({"messages": self.messages})
        async with self._http.post(self._url, headers=self._headers, data=self.body) as answer:
            data = await answer.read()
        if answer.status != 200:
            raise RuntimeError(f"turn {number}: status {answer.status}: {data[:300]!r}")
        made = msgspec.json.decode(data)
        self.messages.append(made["choices"][0]["message"])
        self.prompt_tokens = made["usage"]["prompt_tokens"]


def measure_surface(
    folder: Path, sizes: dict[str, int], *, clients: int, turns: int, repeats: int
) -> list[dict[str, Any]]:
    """One row per size. `folder` holds a model folder `model`. Raises RuntimeError when the server refuses a turn."""
    command = [sys.executable, "-m", "tools.bench_session.server", str(folder / "model")]
    child = Child(command, folder / "server.log")
    try:
        measuring = _measure(child, sizes, clients=clients, turns=turns, repeats=repeats)
        return asyncio.run(asyncio.wait_for(measuring, _DEADLINE_S * (1 + repeats)))
    finally:
        child.close()


async def _measure(
    child: Child, sizes: dict[str, int], *, clients: int, turns: int, repeats: int
) -> list[dict[str, Any]]:
    rows = []
    async with aiohttp.ClientSession() as http:
        for size, tokens in sizes.items():
            made: list[_Client] = []
            samples = []
            for _ in range(repeats):
                if not made or tokens < _SHORT_TOKENS:  # short ones would be long after some repeats
                    made = await _sessions(http, child, clients, tokens)
                samples.append(await _repeat(child.pid, made, turns))
            rows.append(_row(size, made, turns, samples))
    return rows


async def _sessions(http: aiohttp.ClientSession, child: Child, n: int, tokens: int) -> list[_Client]:
    """Opened, with at least so many tokens of history."""
    made = [_Client(http, child.told["url"]) for _ in range(n)]
    for client in made:
        await client.open(child.told["token"])
    await asyncio.gather(*(_grow(client, tokens) for client in made))
    return made


async def _grow(client: _Client, tokens: int) -> None:
    number = 0
    while client.prompt_tokens < tokens:
        await client.turn(number)
        number += 1


async def _repeat(pid: int, clients: list[_Client], turns: int) -> tuple[float, float, float]:
    """(processor time of the server, wall time, time to decode one body) per turn, in seconds."""

    async def play(client: _Client) -> None:
        for i in range(turns):
            await client.turn(i)

    cpu_began, began = cpu_s(pid), time.perf_counter()
    await asyncio.gather(*map(play, clients))
    wall, cpu = time.perf_counter() - began, cpu_s(pid) - cpu_began
    parse = []
    for client in clients:
        began_ns = time.thread_time_ns()
        msgspec.json.decode(client.body)
        parse.append((time.thread_time_ns() - began_ns) / 1e9)
    n = turns * len(clients)
    return cpu / n, wall / n, statistics.median(parse)


def _row(size: str, clients: list[_Client], turns: int, samples: list[tuple[float, float, float]]) -> dict[str, Any]:
    cpu, wall, parse = ([sample[i] for sample in samples] for i in range(3))
    return {
        "size": size,
        "history_tokens": clients[0].prompt_tokens,
        "body_bytes": len(clients[0].body),
        "clients": len(clients),
        "turns": turns * len(clients) * len(samples),
        "server_cpu_us": round(statistics.median(cpu) * 1e6, 1),
        "server_cpu_us_all": [round(value * 1e6, 1) for value in cpu],
        "turns_per_core_s": round(1 / statistics.median(cpu), 1),
        "turns_per_s": round(1 / statistics.median(wall), 1),
        "parse_us": round(statistics.median(parse) * 1e6, 1),
        "parse_share": round(statistics.median(parse) / statistics.median(cpu), 4),
    }
