"""A session server's connections to its node's engines, as its agent lists them.

    agent ── SessionEngines (all of them, again and again) ──▶ EngineLinks
                 name, address ─▶ a keeper each: connect ─▶ gateway.add_engine ─▶ until it closes ─▶ connect again
                 version       ─▶ gateway.set_version
                 not listed    ─▶ gateway.remove_engine, closed

An engine refuses peers of terms older than the newest that it saw. So when the agent comes under a newer term, all
connections are made anew under that one; who comes under an older term is fenced.

| who waits | for what | how long |
|---|---|---|
| a keeper | an engine that can't be reached | `RETRY_S`, then tries again, as long as it is listed |
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from miles_hpc.core.errors import FencedError, MilesError, ProtocolError
from miles_hpc.core.messages import Message, SessionEngine, SessionEngines, SessionServerStatus, Shutdown
from miles_hpc.core.transport import Endpoint
from miles_hpc.core.types import WeightVersion
from miles_hpc.rollout.engine_client import RemoteEngine
from miles_hpc.rollout.session.gateway import EngineGateway

__all__ = ["CONNECT_S", "RETRY_S", "Connect", "EngineLinks"]

RETRY_S = 1.0
CONNECT_S = 10.0

#: (address, term, deadline in seconds) -> an endpoint to the engine there, under that term.
Connect = Callable[[str, int, float], Awaitable[Endpoint]]


@dataclass
class _Link:
    address: str
    version: WeightVersion | None
    keeper: asyncio.Task[None]
    endpoint: Endpoint | None = None


class EngineLinks:
    """`handle` is a Transport handler. `stopped` is set by Shutdown; `heard` when the agent said anything."""

    def __init__(
        self, gateway: EngineGateway, connect: Connect, status: Callable[[], SessionServerStatus], *, term: int
    ) -> None:
        self.newest_term = term
        self.stopped = asyncio.Event()
        self.heard = False
        self._gateway = gateway
        self._connect = connect
        self._status = status
        self._links: dict[str, _Link] = {}
        self._turn = asyncio.Lock()

    async def handle(self, endpoint: Endpoint, message: Message, payload: memoryview) -> Message | None:
        """Raises FencedError for a peer of an older term, ProtocolError for other messages."""
        async with self._turn:  # a list that comes while another one is followed waits for that
            await self._follow(endpoint.peer.term, endpoint.peer.name)
            self.heard = True
            if isinstance(message, SessionEngines):
                await self.apply(message.engines)
                return self._status()
        if isinstance(message, Shutdown):
            self.stopped.set()
            return None
        raise ProtocolError(f"a session server doesn't answer {type(message).__name__}")

    async def apply(self, engines: tuple[SessionEngine, ...]) -> None:
        """Use exactly these. Idempotent; connecting goes on in the background."""
        listed = {engine.name: engine for engine in engines}
        if len(listed) != len(engines):
            raise ProtocolError("SessionEngines lists a name twice")
        for name, link in list(self._links.items()):
            if name not in listed or listed[name].address != link.address:
                await self._let_go(name)
        for name, engine in listed.items():
            if name not in self._links:
                keeper = asyncio.create_task(self._keep(name))
                self._links[name] = _Link(engine.address, engine.version, keeper)
                continue
            self._links[name].version = engine.version
            if self._gateway.has(name):
                self._gateway.set_version(name, engine.version)

    async def close(self) -> None:
        """Let go of all engines."""
        for name in list(self._links):
            await self._let_go(name)

    # ------------------------------------------------------------------------------------------- inside

    async def _follow(self, term: int, name: str) -> None:
        if term < self.newest_term:
            raise FencedError(
                f"this session server belongs to term {self.newest_term}; {name} is of term {term} and must end itself"
            )
        if term > self.newest_term:
            self.newest_term = term
            await self.close()

    async def _keep(self, name: str) -> None:
        """Stay connected to one engine."""
        while True:
            link = self._links[name]
            try:
                endpoint = await self._connect(link.address, self.newest_term, CONNECT_S)
            except (MilesError, OSError):
                await asyncio.sleep(RETRY_S)
                continue
            link.endpoint = endpoint
            self._gateway.add_engine(name, RemoteEngine(endpoint, name=name), link.version)
            # A gateway that lost the engine in the middle of a request has let go of it; the connection is no good.
            while not endpoint.closed.is_set() and self._gateway.has(name):
                try:
                    await asyncio.wait_for(endpoint.closed.wait(), RETRY_S)
                except TimeoutError:
                    pass
            self._gateway.remove_engine(name)
            await endpoint.close("lost")

    async def _let_go(self, name: str) -> None:
        link = self._links.pop(name)
        link.keeper.cancel()
        await asyncio.gather(link.keeper, return_exceptions=True)
        self._gateway.remove_engine(name)
        if link.endpoint is not None:
            await link.endpoint.close("not listed any more")
