"""The session server as its own process: started as an agent starts it, used over TCP and a Unix socket, killed."""

from __future__ import annotations

import asyncio
import random
import socket
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from miles_hpc.core.errors import MilesError, RemoteError, UserError
from miles_hpc.core.messages import SandboxStatus, Shutdown
from miles_hpc.rollout.session.listening import bind, read_address, read_token, token_file
from miles_hpc.rollout.session.payload import WireSample, read_samples
from tests.conformance.drift_engine import Drifting
from tests.fakes.scripted_engines import V1
from tests.fakes.session import said
from tests.fakes.session_node import SessionNode, node

Scenario = Callable[[SessionNode], Awaitable[None]]


def play(folder: Path, scenario: Scenario, more: str = "", *, seconds: float = 150) -> None:
    async def run() -> None:
        async with node(folder, more) as made:
            await scenario(made)

    asyncio.run(asyncio.wait_for(run(), seconds))


async def chat(http: aiohttp.ClientSession, url: str, headers: dict[str, str], messages: Any) -> dict[str, Any]:
    async with http.post(f"{url}/v1/chat/completions", headers=headers, json={"messages": messages}) as response:
        body = await response.json()
        assert response.status == 200, body
    message: dict[str, Any] = body["choices"][0]["message"]
    return message


async def samples_of(http: aiohttp.ClientSession, url: str, headers: dict[str, str]) -> list[WireSample]:
    async with http.post(f"{url}/samples", headers=headers) as response:
        data = await response.read()
        assert response.status == 200, data
    return read_samples(data)[1]


def check_drift(samples: list[WireSample], script: Drifting) -> int:
    """Every stretch of mask 1 is what the engine answers to exactly the tokens before it; returns how many."""
    n = 0
    for sample in samples:
        edges = np.flatnonzero(np.diff(np.concatenate(([0], sample.loss_mask, [0]))))
        for start, end in edges.reshape(-1, 2).tolist():
            assert script("", sample.tokens[:start]) == sample.tokens[start:end].tolist()
            n += 1
        rows = sample.routed_experts  # a scripted engine routes by the token, the layer and the choice
        assert rows is not None
        expected = sample.tokens[:-1, None, None] + np.arange(3)[None, :, None] + np.arange(2)
        assert (rows == expected % 8).all()
    return n


def test_serves_and_ends_on_sigterm(tmp_path: Path) -> None:
    async def scenario(node: SessionNode) -> None:
        await node.start_engine("e0")
        address = await node.start_server()
        assert address.http.startswith("http://127.0.0.1:")
        assert stat.S_IMODE(token_file(node.address_file).stat().st_mode) == 0o600
        command = Path(f"/proc/{address.pid}/cmdline").read_bytes().decode()
        assert read_token(node.address_file) not in command
        assert "libtorch" not in Path(f"/proc/{address.pid}/maps").read_text()
        agent = await node.connect()
        assert agent.peer.role == "sessions"
        status = await node.ready(agent, "e0")
        assert (status.sessions, status.in_flight, status.trouble) == (0, 0, "")
        with pytest.raises(RemoteError) as caught:
            await agent.call(SandboxStatus(), deadline_s=10)
        assert caught.value.kind == "ProtocolError"
        async with aiohttp.ClientSession() as http:
            path, headers = await node.open(http)
            talk: list[Any] = [said("hi")]
            for _ in range(3):
                talk += [await chat(http, node.url + path, headers, talk), said("go on")]
            (sample,) = await samples_of(http, node.url + path, headers)
        assert check_drift([sample], Drifting(node.tokenizer)) == 3
        status = await node.tell(agent)
        assert (status.sessions, status.moved, status.load_imbalance) == (1, 0, 1.0)
        assert status.prefix_hit_rate is not None and status.prefix_bound is not None
        # All but the last token of what was there before: an engine has to compute one to go on.
        assert 0.5 < status.prefix_hit_rate <= status.prefix_bound
        await agent.close()
        assert node.server is not None
        node.server.terminate()
        assert await asyncio.to_thread(node.server.wait, 30) == 0

    play(tmp_path, scenario)


def test_a_unix_socket_for_its_user_alone(tmp_path: Path) -> None:
    async def scenario(node: SessionNode) -> None:
        path = tmp_path / "s.sock"
        for _ in range(2):  # the second finds what the first, killed, left behind
            address = await node.start_server("--listen", f"unix:{path}")
            assert address.http == f"unix:{path}"
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path))) as http:
                async with http.get(f"{node.url}/health") as response:
                    assert (await response.json())["session_server_instance_id"] == address.instance_id
                await node.open(http)
            await node.kill_server()

    play(tmp_path, scenario)


def test_engines_come_and_go_as_the_agent_lists_them(tmp_path: Path) -> None:
    async def scenario(node: SessionNode) -> None:
        await node.start_engine("e0")
        await node.start_server()
        agent = await node.connect()
        await node.ready(agent, "e0")
        await node.start_engine("e1")
        await node.ready(agent, "e0", "e1")
        assert (await node.tell(agent, node.listed(None))).engines == ()  # none holds weights: none is used
        await node.ready(agent, "e0", "e1")
        async with aiohttp.ClientSession() as http:
            sessions = [await node.open(http) for _ in range(6)]
            talks = [[said("hi"), await chat(http, node.url + p, h, [said("hi")]), said("on")] for p, h in sessions]
            process, address = node.engines["e0"]
            process.kill()  # still listed: its sessions go on at once, and it is looked for
            for (path, headers), talk in zip(sessions, talks, strict=True):
                await chat(http, node.url + path, headers, talk)
                assert check_drift(await samples_of(http, node.url + path, headers), Drifting(node.tokenizer)) == 2
        assert (await node.ready(agent, "e1")).moved > 0
        await node.start_engine("e0")  # again, at another address
        assert node.engines["e0"][1] != address
        await node.ready(agent, "e0", "e1")
        del node.engines["e1"]
        await node.ready(agent, "e0")
        await agent.call(Shutdown(reason="test"), deadline_s=10)
        assert node.server is not None and await asyncio.to_thread(node.server.wait, 30) == 0

    play(tmp_path, scenario)


def test_a_newer_term_takes_over_and_older_ones_are_fenced(tmp_path: Path) -> None:
    async def scenario(node: SessionNode) -> None:
        await node.start_engine("e0")
        await node.start_server()
        old = await node.connect(term=1)
        await node.ready(old, "e0")
        async with aiohttp.ClientSession() as http:
            path, headers = await node.open(http)
            message = await chat(http, node.url + path, headers, [said("hi")])
            new = await node.connect(term=2)
            remote = await node.transport(term=2).connect(node.engines["e0"][1], deadline_s=10)  # it follows as well
            await node.ready(new, "e0")
            with pytest.raises(RemoteError) as caught:
                await node.tell(old)
            assert caught.value.kind == "FencedError"
            await chat(http, node.url + path, headers, [said("hi"), message, said("go on")])
            await remote.close()

    play(tmp_path, scenario)


def test_ends_when_its_agent_is_silent_for_longer_than_the_lease(tmp_path: Path) -> None:
    async def scenario(node: SessionNode) -> None:
        await node.start_server()
        agent = await node.connect()
        await node.tell(agent)
        assert node.server is not None and node.server.stderr is not None
        assert await asyncio.to_thread(node.server.wait, 60) == 0
        assert b"no word of its agent" in node.server.stderr.read()

    play(tmp_path, scenario, "[control]\nheartbeat_interval_s = 0.5\nlease_s = 1.0\n")


BAD = [
    (["--listen", "0.0.0.0:0"], "", "expected a loopback address"),
    (["--listen", "127.0.0.1:x"], "", "expected a loopback address"),
    (["--listen", "unix:/nowhere/s"], "", "No such file"),
    ([], '[sessions]\nmatcher = "stric"\n', "did you mean 'strict'"),
    ([], '[sessions]\ntool_parser = "x:y"\n', "x:y"),
    ([], '[sessions]\nchat_family = "glm47"\n', "isn't one token"),
]


@pytest.mark.parametrize(("options", "more", "text"), BAD)
def test_a_bad_start_is_one_line_and_exit_code_two(tmp_path: Path, options: list[str], more: str, text: str) -> None:
    made = SessionNode(tmp_path, more)
    process = made.start("session_server", "--name", "s", "--address-file", str(made.address_file), *options)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert errors.decode().count("\n") == 1 and text in errors.decode()
    assert not made.address_file.exists()


def test_addresses(tmp_path: Path) -> None:
    taken, address = bind("127.0.0.1:0")
    with taken, pytest.raises(UserError, match="Address already in use"):
        bind(address.removeprefix("http://"))
    with pytest.raises(UserError, match="choose a shorter path"):
        bind(f"unix:{tmp_path}/{'x' * 200}")
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="something else than a socket"):
        bind(f"unix:{tmp_path}/file")
    used, _ = bind(f"unix:{tmp_path}/s")
    with used, pytest.raises(UserError, match="another server listens there"):
        bind(f"unix:{tmp_path}/s")
    again, _ = bind(f"unix:{tmp_path}/s")
    again.close()
    if socket.has_ipv6:
        six, address = bind("[::1]:0")
        six.close()
        assert address.startswith("http://[::1]:")
    with pytest.raises(UserError, match="is the server started"):
        read_address(tmp_path / "none")
    with pytest.raises(UserError, match="session server's token"):
        read_token(tmp_path / "none")


def test_a_stranger_is_not_let_in(tmp_path: Path) -> None:
    async def scenario(node: SessionNode) -> None:
        await node.start_server()
        node.secret = bytes(32)
        with pytest.raises(MilesError):
            await node.connect()

    play(tmp_path, scenario)


# ------------------------------------------------------------------------------------------------ killed


def test_an_agent_program_does_not_notice_a_restart_at_the_same_address(tmp_path: Path) -> None:
    """Its client tries again by itself; the port is the same, and so are the session and its token."""
    openai = pytest.importorskip("openai")

    async def scenario(node: SessionNode) -> None:
        await node.start_engine("e0")
        first = await node.start_server()
        agent = await node.connect()
        await node.ready(agent, "e0")
        async with aiohttp.ClientSession() as http:
            path, headers = await node.open(http, history="tree")
        key = headers["Authorization"].removeprefix("Bearer ")
        talk: list[Any] = [said("hi")]
        async with openai.AsyncOpenAI(base_url=f"{node.url}{path}/v1", api_key=key, max_retries=30) as client:
            for turn in range(4):
                asking = asyncio.create_task(client.chat.completions.create(model="m", messages=talk))
                if turn == 2:
                    while (await node.tell(agent)).in_flight == 0 and not asking.done():
                        await asyncio.sleep(0)
                    await node.kill_server()
                    second = await node.start_server("--listen", first.http.removeprefix("http://"))
                    assert second.http == first.http and second.instance_id != first.instance_id
                    agent = await node.connect()
                    await node.ready(agent, "e0")
                talk += [(await asking).choices[0].message.model_dump(exclude_none=True), said(f"go on {turn}")]
        async with aiohttp.ClientSession() as http:
            samples = await samples_of(http, node.url + path, headers)
        assert check_drift(samples, Drifting(node.tokenizer)) >= 4
        assert max(len(sample.meta.turns) for sample in samples) == 4

    play(tmp_path, scenario)


class Client:
    """One agent program: plays its turns, and asks again when the server is gone."""

    def __init__(self, number: int, node: SessionNode, http: aiohttp.ClientSession) -> None:
        self.number, self.node, self.http = number, node, http
        self.rng = random.Random(number)
        self.path, self.headers = "", {}
        self.done = 0

    async def play(self, turns: int) -> None:
        history = "tree" if self.number % 2 else "linear"
        self.path, self.headers = await self.node.open(self.http, history=history, metadata={"n": self.number})
        talk: list[Any] = [said("be brief", "system"), said(f"task {self.number}")]
        for turn in range(turns):
            message = await self._ask(talk)
            talk += [message, said(f"result {self.rng.random()} of turn {turn}")]
            self.done += 1
            await asyncio.sleep(self.rng.random() * 0.1)

    async def _ask(self, talk: list[Any]) -> dict[str, Any]:
        while True:
            try:
                return await chat(self.http, self.node.url + self.path, self.headers, talk)
            except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, UserError):
                await asyncio.sleep(0.1)  # killed, or not yet there again


@pytest.mark.slow
def test_kill_9_in_the_middle_of_200_live_sessions(tmp_path: Path) -> None:
    """After each restart every session goes on with its id and token, and every sample is what the engine saw."""
    n_sessions, turns, kills = 200, 5, 2

    async def scenario(node: SessionNode) -> None:
        await node.start_engine("e0")
        await node.start_server()
        agent = await node.connect()
        await node.ready(agent, "e0")
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            clients = [Client(i, node, http) for i in range(n_sessions)]
            playing = asyncio.gather(*(client.play(turns) for client in clients))
            for kill in range(1, kills + 1):
                while sum(client.done for client in clients) < n_sessions * turns * kill / (kills + 1):
                    assert not playing.done()
                    await asyncio.sleep(0.005)
                while (status := await node.tell(agent)).in_flight == 0:  # all may be between two turns
                    assert not playing.done()
                assert status.sessions == n_sessions
                await node.kill_server()
                await agent.close()
                await node.start_server()
                agent = await node.connect()
                assert (await node.ready(agent, "e0")).sessions == n_sessions
            await playing
            script, stretches = Drifting(node.tokenizer), 0
            for client in clients:
                samples = await samples_of(http, node.url + client.path, client.headers)
                stretches += check_drift(samples, script)
                assert max(len(sample.meta.turns) for sample in samples) == turns
                assert client.number % 2 or len(samples) == 1
                assert {v[:2] for sample in samples for v in sample.meta.versions} == {(V1.term, V1.step)}
                async with http.delete(node.url + client.path, headers=client.headers) as response:
                    assert response.status == 204
            assert stretches >= n_sessions * turns
        status = await node.tell(agent)
        assert (status.sessions, status.in_flight, status.trouble) == (0, 0, "")
        await agent.close()

    # Small segments, so that they rotate and are emptied while it is killed.
    play(tmp_path, scenario, "[sessions]\njournal_segment_bytes = 200_000\n")
    left = sum(path.stat().st_size for path in tmp_path.glob("sessions/node-s/*.segment"))
    assert left <= 2 * 200_000 + 100_000
