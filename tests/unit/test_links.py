"""Links: dialed once, kept, bounded, closed when idle; on a clock that jumps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from miles_hpc.control.links import Links
from miles_hpc.control.opening import open_transport
from miles_hpc.core.errors import PeerLost
from miles_hpc.core.messages import Ack, Heartbeat, RelayTarget
from miles_hpc.core.transport import Endpoint
from tests.fakes.fleet import credentials
from tests.fakes.virtual_time import run_virtually

WAIT_S = 60.0


class Servers:
    """Listeners by name, with what they accepted."""

    def __init__(self) -> None:
        self.accepted: list[Endpoint] = []
        self.admit = asyncio.Event()
        self.admit.set()
        self.listeners: list[Any] = []

    async def add(self, name: str) -> RelayTarget:
        async def on_connect(endpoint: Endpoint) -> None:
            self.accepted.append(endpoint)
            await self.admit.wait()

        transport = open_transport("loopback", credentials(name))
        listener = await transport.listen(lambda endpoint, message, payload: Ack(), on_connect=on_connect)
        self.listeners.append(listener)
        return RelayTarget(name, (listener.address,))


@asynccontextmanager
async def scene(**options: Any) -> AsyncIterator[tuple[Servers, Links]]:
    servers = Servers()
    links = Links(open_transport("loopback", credentials("us")), **options)
    try:
        yield servers, links
    finally:
        await links.close()
        for listener in servers.listeners:
            await listener.close()


def run(main: Callable[[], Awaitable[None]]) -> None:
    run_virtually(main())  # type: ignore[arg-type]


async def ask(links: Links, target: RelayTarget, *, hold_s: float = 0.0) -> bool:
    """Whether the connection was made for this."""
    async with links.use(target, deadline_s=WAIT_S) as link:
        await link.endpoint.call(Heartbeat(), deadline_s=WAIT_S)
        await asyncio.sleep(hold_s)
        return link.fresh


def test_a_connection_is_dialed_once_and_kept_until_it_is_idle() -> None:
    async def main() -> None:
        async with scene(idle_s=10.0) as (servers, links):
            target = await servers.add("a")
            assert await asyncio.gather(*(ask(links, target) for _ in range(5))) == [True] * 5
            assert len(servers.accepted) == 1
            await asyncio.sleep(9.0)
            assert not await ask(links, target, hold_s=30.0)  # in use it isn't idle
            await asyncio.sleep(9.0)
            assert links.open_links == 1
            await asyncio.sleep(2.0)
            assert links.open_links == 0
            assert servers.accepted[0].closed.is_set()
            assert "idle" in servers.accepted[0].close_reason
            assert await ask(links, target)
            assert len(servers.accepted) == 2

    run(main)


def test_no_more_than_some_are_kept() -> None:
    async def main() -> None:
        async with scene(keep=3) as (servers, links):
            targets = [await servers.add(f"s{n}") for n in range(10)]
            held = [asyncio.create_task(ask(links, target, hold_s=5.0)) for target in targets[:5]]
            await asyncio.sleep(1.0)
            assert links.open_links == 5  # all in use
            await asyncio.gather(*held)
            assert links.open_links == 3
            for target in targets:
                await ask(links, target)
                assert links.open_links == 3
            await asyncio.sleep(0.1)
            assert sum(not endpoint.closed.is_set() for endpoint in servers.accepted) == 3
            assert [await ask(links, target) for target in targets[7:]] == [False] * 3  # the last ones were kept

    run(main)


def test_who_gives_up_while_dialing_leaves_it_to_the_others() -> None:
    async def main() -> None:
        async with scene() as (servers, links):
            servers.admit.clear()
            target = await servers.add("a")
            waiting = [asyncio.create_task(ask(links, target)) for _ in range(3)]
            await asyncio.sleep(0.1)
            waiting[0].cancel()
            with pytest.raises(PeerLost, match=r"a: not connected after 0\.5 s to loopback://"):
                async with links.use(target, deadline_s=0.5):
                    raise AssertionError
            servers.admit.set()
            assert await asyncio.gather(*waiting[1:]) == [True, True]
            assert waiting[0].cancelled()
            assert len(servers.accepted) == links.open_links == 1

    run(main)


def test_dialing_ends_by_itself() -> None:
    async def main() -> None:
        async with scene(connect_s=5.0) as (servers, links):
            servers.admit.clear()
            target = await servers.add("a")
            with pytest.raises(PeerLost, match=r"a: can't be reached: .*5\.0 s"):
                await ask(links, target)
            with pytest.raises(PeerLost, match="nobody listens"):
                await ask(links, RelayTarget("b", ("loopback://0",)))
            with pytest.raises(PeerLost, match="b: not connected, and it has published no address"):
                await ask(links, RelayTarget("b"))

    run(main)


def test_a_connection_that_ended_or_leads_elsewhere_is_made_anew() -> None:
    async def main() -> None:
        async with scene() as (servers, links):
            target = await servers.add("a")
            await ask(links, target)
            await servers.accepted[0].close("restarted")
            await asyncio.sleep(0.1)
            assert links.open_links == 0
            assert await ask(links, target)
            elsewhere = await servers.add("a")
            user = asyncio.create_task(ask(links, target, hold_s=5.0))
            await asyncio.sleep(1.0)
            assert await ask(links, elsewhere)
            assert not servers.accepted[1].closed.is_set()  # still in use
            assert await user is False
            await asyncio.sleep(0.1)
            assert servers.accepted[1].closed.is_set()
            assert not await ask(links, elsewhere)

    run(main)


def test_closing() -> None:
    async def main() -> None:
        async with scene() as (servers, links):
            target, slow = await servers.add("a"), await servers.add("b")
            await ask(links, target)
            using = asyncio.create_task(ask(links, target, hold_s=5.0))
            servers.admit.clear()
            dialing = asyncio.create_task(ask(links, slow))
            await asyncio.sleep(0.1)
            await links.close()
            await using
            for broken in (dialing, asyncio.create_task(ask(links, target))):
                with pytest.raises(PeerLost, match="links of this process were closed"):
                    await broken
            await asyncio.sleep(0.1)
            assert links.open_links == 0
            assert all(endpoint.closed.is_set() for endpoint in servers.accepted)

    run(main)
