"""What a rollout agent does with its session server: started, told, watched, started again where it was."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from checkpoints.frames import frame_of
from miles_hpc.control.agent import AgentIdentity
from miles_hpc.core import exits
from miles_hpc.core.deadline import Deadline
from miles_hpc.core.load import load_prepared
from miles_hpc.core.messages import SessionEngine
from miles_hpc.core.telemetry import EventLog, read_events
from miles_hpc.rollout.session.client import SessionClient, SessionHandle, SessionServerFailed
from miles_hpc.rollout.session_keeper import SessionKeeper
from tests.conformance.drift_engine import Drifting
from tests.fakes.scripted_engines import V1
from tests.fakes.session import said
from tests.fakes.session_node import SessionNode, node

WAIT_S = 60.0


class Kept:
    """A keeper at work, with one engine, as RolloutApp has it."""

    def __init__(self, made: SessionNode, incarnation: int) -> None:
        run, _ = load_prepared(made.paths.root)
        self.node = made
        self.term = 1
        self.ends: list[int] = []
        self.client = SessionClient()
        identity = AgentIdentity(
            role="rollout-agent", name="rollout-n", host="n", attempt=1, incarnation=incarnation, rank=0
        )
        made.paths.logs(1).mkdir(parents=True, exist_ok=True)
        made.paths.events.mkdir(exist_ok=True)
        self.events = EventLog(made.paths.events, "rollout-n", attempt=1)
        self.keeper = SessionKeeper(
            run,
            made.paths,
            identity,
            made.secret,
            self.client,
            engines=self.engines,
            term=lambda: self.term,
            ended=self.ended,
            events=self.events,
        )

    def engines(self) -> tuple[SessionEngine, ...]:
        return tuple(SessionEngine(name=n, address=a, version=V1) for n, (_, a) in self.node.engines.items())

    async def ended(self, name: str, code: int, log_tail: str) -> None:
        assert name == "n-sessions"
        self.ends.append(code)

    async def open(self) -> SessionHandle:
        return await self.client.open({"metadata": {"a": 1}}, Deadline(WAIT_S, "opening"))

    async def until(self, true: Callable[[], Any]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not true():
                await asyncio.sleep(0.02)

    @property
    def pid(self) -> int:
        assert self.keeper.child is not None
        return self.keeper.child.pid

    def verdicts(self) -> list[str]:
        return [e["name"] for e in read_events(self.node.paths.events) if e["kind"] == "verdict"]


@contextlib.asynccontextmanager
async def kept(folder: Path, more: str = "", *, incarnation: int = 1) -> AsyncIterator[Kept]:
    async with node(folder, more) as made:
        await made.start_engine("e0")
        one = Kept(made, incarnation)
        keeping = asyncio.create_task(one.keeper.keep())
        try:
            async with asyncio.timeout(3 * WAIT_S):
                yield one
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
            await one.keeper.close()
            await one.client.close()
            one.events.close()
    assert one.keeper.child is not None and one.keeper.child.exit_code is not None


class Talk:
    """A conversation that asks until it is answered, as clients' own retries do."""

    def __init__(self, http: aiohttp.ClientSession, session: SessionHandle) -> None:
        self.http, self.session = http, session
        self.messages: list[Any] = [said("hi")]

    async def turn(self) -> None:
        headers = {"Authorization": f"Bearer {self.session.token}"}
        url = f"{self.session.base_url}/chat/completions"
        async with asyncio.timeout(WAIT_S):
            while True:
                with contextlib.suppress(aiohttp.ClientError):
                    async with self.http.post(url, headers=headers, json={"messages": self.messages}) as answer:
                        body = await answer.json()
                        if answer.status == 200:
                            break
                        assert answer.status == 503, body
                await asyncio.sleep(0.05)
        self.messages += [body["choices"][0]["message"], said("go on")]


def test_a_killed_server_goes_on_where_it_was(tmp_path: Path) -> None:
    async def main() -> None:
        async with kept(tmp_path) as k, aiohttp.ClientSession() as http:
            talk = Talk(http, await k.open())
            await talk.turn()
            for n in range(2):
                os.kill(k.pid, signal.SIGKILL)
                await talk.turn()  # at the same address, with the same token
                assert len(k.ends) == n + 1
            assert k.ends == [-9, -9]
            samples = await k.client.samples(talk.session, Deadline(WAIT_S, "samples"))
            script = Drifting(k.node.tokenizer)
            for sample in samples:
                end = len(sample.tokens)
                start = end - sample.meta.turns[-1].n_output
                assert script("", sample.tokens[:start]) == sample.tokens[start:end].tolist()
            assert sum(len(sample.meta.turns) for sample in samples) >= 3
            state = await k.client.state(talk.session, Deadline(WAIT_S, "state"))
            assert state.n_turns >= 3 and not (state.cut or state.refused or state.starved)
            k.client.delete(talk.session)
            with pytest.raises(SessionServerFailed, match="404"):
                async with asyncio.timeout(WAIT_S):
                    while True:
                        await k.client.state(talk.session, Deadline(WAIT_S, "state"))
            await k.until(lambda: k.keeper.status is not None and k.keeper.status.engines == ("e0",))

    asyncio.run(main())


def test_what_an_earlier_agent_left_open_is_closed(tmp_path: Path) -> None:
    async def main() -> None:
        async with kept(tmp_path) as k, aiohttp.ClientSession() as http:
            left = await k.open()
            await Talk(http, left).turn()
        (tmp_path / "e0.0.address").unlink()  # of the engine that ended with it
        async with kept(tmp_path, incarnation=2) as k, aiohttp.ClientSession() as http:
            session = await k.open()
            await Talk(http, session).turn()
            old = SessionHandle(session.server, left.session_id, left.token)
            with pytest.raises(SessionServerFailed, match="404"):
                await k.client.state(old, Deadline(WAIT_S, "state"))
            assert k.keeper.status is not None and k.keeper.status.sessions <= 1

    asyncio.run(main())


def test_a_stopped_server_is_replaced(tmp_path: Path) -> None:
    async def main() -> None:
        async with kept(tmp_path, "[control]\nlost_after_s = 1.0\n") as k, aiohttp.ClientSession() as http:
            talk = Talk(http, await k.open())
            await talk.turn()
            os.kill(k.pid, signal.SIGSTOP)
            await k.until(lambda: k.ends)
            await talk.turn()
            assert k.ends == [-9]

    asyncio.run(main())


def test_a_new_term_is_told(tmp_path: Path) -> None:
    async def main() -> None:
        async with kept(tmp_path) as k, aiohttp.ClientSession() as http:
            talk = Talk(http, await k.open())
            await talk.turn()
            k.term = 2
            k.keeper.changed()
            k.keeper.status = None
            await k.until(lambda: k.keeper.status is not None and k.keeper.status.engines == ("e0",))
            await talk.turn()
            assert k.ends == []

    asyncio.run(main())


def test_a_journal_that_cannot_be_read_is_set_aside(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as made:
            journal = made.paths.session_journal("n-sessions")
        journal.mkdir(parents=True, mode=0o700)
        # A whole frame that this version doesn't understand; a torn one would only be cut off.
        (journal / "00000001.segment").write_bytes(frame_of(b"written by nobody"))
        async with kept(tmp_path) as k, aiohttp.ClientSession() as http:
            talk = Talk(http, await k.open())
            await talk.turn()
            assert k.ends == [exits.UNREADABLE]
            assert "session_journal_set_aside" in k.verdicts()
            assert len(list(journal.parent.glob("n-sessions.unreadable-*"))) == 1

    asyncio.run(main())


def test_a_port_that_somebody_took_costs_another_one(tmp_path: Path) -> None:
    async def main() -> None:
        async with kept(tmp_path) as k, aiohttp.ClientSession() as http:
            session = await k.open()
            port = int(session.server.rpartition(":")[2])
            os.kill(k.pid, signal.SIGSTOP)
            os.kill(k.pid, signal.SIGKILL)
            with socket.socket() as taken:
                taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                async with asyncio.timeout(WAIT_S):
                    while True:
                        with contextlib.suppress(OSError):
                            taken.bind(("127.0.0.1", port))
                            taken.listen(1)
                            break
                        await asyncio.sleep(0)
                await k.until(lambda: exits.USER_ERROR in k.ends)
                another = await k.open()
                assert another.server != session.server
                # Its owner finds a session wherever the server is; its agent's address is lost.
                assert (await k.client.state(session, Deadline(WAIT_S, "state"))).n_turns == 0
                await Talk(http, another).turn()

    asyncio.run(main())
