"""Processes that pass commands on, as objects of one event loop: for tests and benchmarks of the fan-out.

A `Peer` is what an agent has for it: a transport of its own, links, a RelayHandler and a listener. `fate` says how it
fails. `kill` closes all that it has open, as the end of a process does; what its handler does after that is nobody's
concern any more.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from miles_hpc.control.auth import new_secret
from miles_hpc.control.fanout import FanOut
from miles_hpc.control.links import Links
from miles_hpc.control.opening import open_transport
from miles_hpc.control.relay import CommandMemory, RelayHandler
from miles_hpc.core.errors import PeerLost
from miles_hpc.core.messages import Ack, ChildEvent, EndSession, Message, Relay, RelayTarget
from miles_hpc.core.transport import Buffer, Credentials, Endpoint, Handler, Listener, PeerIdentity, Transport

__all__ = ["FATES", "SECRET", "Fleet", "Peer", "credentials", "fleet"]

SECRET = new_secret()

#: Ways to fail. gone: dead before the command; mute: accepts messages and never answers; dies_before and dies_after:
#: ends when it gets the command, before or after it passed it on.
FATES = ("", "gone", "mute", "dies_before", "dies_after")


def credentials(name: str, *, secret: bytes = SECRET, attempt: int = 1, term: int = 1) -> Credentials:
    return Credentials(
        secret, PeerIdentity(role="rollout", name=name, host="host", pid=os.getpid(), attempt=attempt, term=term)
    )


class Peer:
    """One process. `ran` has every message that its own handler was given."""

    def __init__(self, name: str, transport: Transport, *, fate: str = "", **links: Any) -> None:
        assert fate in FATES
        self.name = name
        self.fate = fate
        self.ran: list[Message] = []
        self.cancelled = 0
        self.links = Links(transport, **links)
        self.relay = RelayHandler(self._handle, self.links, name=name, memory=CommandMemory(ids=64))
        self.receive: Handler = self._received
        self.behave: Callable[[Peer, Message, memoryview], Any] | None = None
        self.listener: Listener
        self._transport = transport
        self._killing: asyncio.Task[None] | None = None

    async def listen(self) -> None:
        self.listener = await self._transport.listen(lambda *received: self.receive(*received))

    @property
    def target(self) -> RelayTarget:
        return RelayTarget(self.name, (self.listener.address,))

    async def kill(self) -> None:
        await asyncio.gather(self.listener.close(), self.links.close())

    def _received(self, endpoint: Endpoint, message: Message, payload: memoryview) -> Any:
        if self.fate == "mute":
            return asyncio.Event().wait()
        if self.fate == "dies_before" and isinstance(message, Relay):
            return self._die()
        return self.relay(endpoint, message, payload)

    async def _handle(
        self, endpoint: Endpoint, message: Message, payload: memoryview
    ) -> tuple[Message, Sequence[Buffer]] | Message | None:
        self.ran.append(message)
        if self.fate == "dies_after":
            for _ in range(4):  # the branch's tasks were made before this one: let their messages leave
                await asyncio.sleep(0)
            await self._die()
        try:
            if self.behave is not None:
                return await self.behave(self, message, payload)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if isinstance(message, EndSession):
            return ChildEvent(child=self.name, exit_code=len(payload)), [payload, self.name.encode()]
        return Ack()

    async def _die(self) -> None:
        self._killing = asyncio.get_running_loop().create_task(self.kill())
        await asyncio.Event().wait()


class Fleet:
    """A root and its peers."""

    def __init__(self, peers: list[Peer], root: FanOut, links: Links) -> None:
        self.peers = peers
        self.root = root
        self.links = links

    @property
    def targets(self) -> list[RelayTarget]:
        return [peer.target for peer in self.peers]

    def check_links(self, limit: int) -> None:
        for peer in self.peers:
            assert peer.links.open_links <= limit, peer.name


@asynccontextmanager
async def fleet(
    n: int,
    *,
    kind: str = "loopback",
    fates: Sequence[str] = (),
    wrap: Callable[[Transport], Transport] = lambda transport: transport,
    links: dict[str, Any] | None = None,
    **options: Any,
) -> AsyncIterator[Fleet]:
    """`n` peers that listen, and a FanOut with `options` that sends as a tree unless told otherwise."""
    transports: list[Transport] = []

    def transport(name: str) -> Transport:
        transports.append(wrap(open_transport(kind, credentials(name))))
        return transports[-1]

    peers = []
    for number in range(n):
        name = f"peer{number:03}"
        fate = fates[number] if number < len(fates) else ""
        peers.append(Peer(name, transport(name), fate=fate, **(links or {})))
    root_links = Links(transport("root"), **(links or {}))
    root = FanOut(root_links, name="root", **{"direct_up_to": 0, **options})
    try:
        for peer in peers:
            await peer.listen()
            if peer.fate == "gone":
                await peer.kill()
        yield Fleet(peers, root, root_links)
    finally:
        await root_links.close()
        for peer in peers:
            try:
                await peer.kill()
            except PeerLost:
                pass
        await asyncio.sleep(0.05)  # goodbyes arrive
        for one in transports:
            one.close()
