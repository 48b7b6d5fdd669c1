"""The sandbox client over real transports, with hosts that come and go."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from miles_hpc.control.opening import open_transport
from miles_hpc.core.errors import DeadlineExpired, PeerLost, RemoteError, UserError
from miles_hpc.core.messages import Message, SandboxExec
from miles_hpc.core.transport import Credentials, Endpoint, HandlerResult, Listener, PeerIdentity, Transport
from miles_hpc.rollout.sandbox import SandboxClient
from miles_hpc.rollout.sandbox_files import SandboxFile
from miles_hpc.rollout.sandbox_host import SandboxHost

FILES = {"a": "1\n"}


def transport(name: str) -> Transport:
    identity = PeerIdentity(role="sandbox", name=name, host="localhost", pid=1, attempt=1, term=1)
    return open_transport("tcp", Credentials(secret=b"s" * 32, identity=identity))


class Server:
    """A sandbox host behind a tcp listener."""

    def __init__(self) -> None:
        self.host = SandboxHost()
        self.listener: Listener | None = None
        self.die_on_exec = False

    async def start(self, client: SandboxClient, name: str) -> Endpoint:
        async def handler(endpoint: Endpoint, message: Message, payload: memoryview) -> HandlerResult:
            if self.die_on_exec and isinstance(message, SandboxExec):
                await self.stop()
            return await self.host.handle(message, payload)

        await self.host.start()
        self.listener = await transport(name).listen(handler)
        endpoint = await transport("client-" + name).connect(self.listener.address, deadline_s=30)
        client.add_host(name, endpoint)
        return endpoint

    async def stop(self) -> None:
        listener, self.listener = self.listener, None
        if listener is not None:
            await listener.close()


def play(scene: Callable[[SandboxClient, Server, Server], Awaitable[None]]) -> None:
    async def main() -> None:
        client = SandboxClient(timeout_s=20, max_output_bytes=100, host_deadline_s=20)
        servers = Server(), Server()
        try:
            async with asyncio.timeout(120):
                for i, server in enumerate(servers):
                    await server.start(client, f"h{i}")
                await scene(client, *servers)
        finally:
            for server in servers:
                await server.stop()
                await server.host.close()

    asyncio.run(main())


def test_sandboxes_are_spread_and_destroyed() -> None:
    async def scene(client: SandboxClient, one: Server, two: Server) -> None:
        for i in range(6):
            await client.create(f"s{i}", FILES)
        assert (one.host.status().live, two.host.status().live) == (3, 3)
        results = await asyncio.gather(*(client.execute(f"s{i}", "cat a; echo x >b; ls") for i in range(6)))
        assert {r.output for r in results} == {"1\na\nb\n"}
        for i in range(6):
            await client.destroy(f"s{i}")
        await client.destroy("s0")
        async with asyncio.timeout(30):
            while one.host.status().live or two.host.status().live:
                await asyncio.sleep(0.01)
        with pytest.raises(UserError, match="create it first"):
            await client.execute("s0", "ls")

    play(scene)


def test_files_go_in_and_come_out_and_limits_are_per_call() -> None:
    async def scene(client: SandboxClient, one: Server, two: Server) -> None:
        await client.create("s", FILES)
        files = {"x/y": SandboxFile(bytes(range(256)), 0o755), "large": SandboxFile(b"0123456789" * 60_000)}
        assert (await client.put("s", "d", files, replace=True)).exit_code == 0
        assert await client.get("s", "d/x/y", 1000) == bytes(range(256))
        assert await client.get("s", "d/large", 600_000) == files["large"].data
        assert await client.get("s", "d/nothing", 1000) is None
        with pytest.raises(RemoteError, match="expected a path inside the folder"):
            await client.put("s", "", {"../x": SandboxFile(b"")})
        assert (await client.execute("s", "seq 100")).truncated
        assert not (await client.execute("s", "seq 100", max_output_bytes=1000)).truncated
        assert (await client.execute("s", "sleep 20", timeout_s=0.3)).timed_out
        with pytest.raises(UserError, match="create it first"):
            await client.get("t", "a", 10)

    play(scene)


def test_a_host_lost_before_the_first_command_costs_nothing() -> None:
    async def scene(client: SandboxClient, one: Server, two: Server) -> None:
        for i in range(4):
            await client.create(f"s{i}", FILES)
        await one.stop()
        results = await asyncio.gather(*(client.execute(f"s{i}", "cat a") for i in range(4)))
        assert [r.output for r in results] == ["1\n"] * 4
        assert client.hosts == ("h1",)

    play(scene)


def test_a_host_lost_during_the_first_command_costs_nothing() -> None:
    async def scene(client: SandboxClient, one: Server, two: Server) -> None:
        one.die_on_exec = two.die_on_exec = True
        await client.create("s", FILES)
        running = asyncio.create_task(client.execute("s", "cat a"))
        async with asyncio.timeout(30):
            while len(client.hosts) == 2:
                await asyncio.sleep(0.01)
        third = Server()
        try:
            await third.start(client, "h2")
            assert (await running).output == "1\n"
        finally:
            await third.stop()
            await third.host.close()

    play(scene)


def test_a_host_that_came_back_empty_is_not_mistaken_for_the_old_one() -> None:
    async def scene(client: SandboxClient, one: Server, two: Server) -> None:
        await two.stop()
        client.remove_host("h1")
        await client.create("unused", FILES)
        await client.create("used", FILES)
        await client.execute("used", "ls")
        await one.stop()
        again = Server()
        try:
            await again.start(client, "h0")
            assert (await client.execute("unused", "cat a")).output == "1\n"
            with pytest.raises(PeerLost):
                await client.execute("used", "cat a")
            await client.destroy("used")
            assert again.host.status().live == 1
        finally:
            await again.stop()
            await again.host.close()

    play(scene)


def test_state_that_is_gone_with_its_host_fails() -> None:
    async def scene(client: SandboxClient, one: Server, two: Server) -> None:
        await client.create("s", FILES)
        await client.execute("s", "echo x >b")
        await one.stop()
        await two.stop()
        with pytest.raises(PeerLost):
            await client.execute("s", "cat b")

    play(scene)


def test_without_hosts_the_wait_has_an_end() -> None:
    async def main() -> None:
        client = SandboxClient(host_deadline_s=0.1)
        with pytest.raises(DeadlineExpired, match="waiting for a sandbox host"):
            await client.create("s", FILES)

    asyncio.run(main())
