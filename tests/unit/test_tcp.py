"""What a TCP listener does with strangers, with changed bytes and with recorded ones."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import struct
from collections.abc import Awaitable, Callable

import pytest

from miles_hpc.control import greeting
from miles_hpc.control.asyncio_face import AsyncTransport
from miles_hpc.control.auth import new_secret
from miles_hpc.control.frames import Limits
from miles_hpc.control.opening import open_transport
from miles_hpc.control.tcp import parse_address
from miles_hpc.core.errors import MilesError, PeerLost, UserError
from miles_hpc.core.messages import EndSession, Heartbeat, Message
from miles_hpc.core.transport import Credentials, Endpoint, Listener, PeerIdentity

SECRET = new_secret()
WAIT_S = 60.0


def transport(name: str, limits: Limits | None = None) -> AsyncTransport:
    who = PeerIdentity(role="trainer", name=name, host="host", pid=os.getpid(), attempt=1, term=1)
    return open_transport("tcp", Credentials(SECRET, who), limits=limits)


def target(listener: Listener) -> tuple[str, int]:
    """Host and port of a listener."""
    return parse_address(listener.address)[1][:2]


async def echo(endpoint: Endpoint, message: Message, payload: memoryview) -> tuple[Message, list[memoryview]]:
    return message, [payload]


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(WAIT_S):
            await main()

    asyncio.run(bounded())


async def still_serves(listener: Listener) -> None:
    endpoint = await transport("friend").connect(listener.address, deadline_s=WAIT_S)
    assert (await endpoint.call(Heartbeat(), deadline_s=WAIT_S)).message == Heartbeat()
    await endpoint.close()


async def stranger(listener: Listener, data: bytes) -> bytes:
    """Send bytes without knowing the secret; returns all that comes back."""
    reader, writer = await asyncio.open_connection(*target(listener))
    try:
        writer.write(data)
        writer.write_eof()
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


def test_garbage_gets_at_most_the_challenge() -> None:
    rng = random.Random(5)
    opening = struct.pack("<H4sH32s", 38, b"MHo1", 1, bytes(32))

    async def main() -> None:
        listener = await transport("listener").listen(echo)
        for n in range(60):
            garbage = rng.randbytes(rng.randrange(200))
            answer = await stranger(listener, (opening if n % 2 else b"") + garbage)
            assert len(answer) in ((0, 40) if n % 2 else (0,))
        assert await stranger(listener, struct.pack("<H", 4097) + bytes(5000)) == b""
        await still_serves(listener)
        await listener.close()

    run(main)


def test_silent_connections_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(greeting, "HANDSHAKE_DEADLINE_S", 0.3)

    async def main() -> None:
        listener = await transport("listener").listen(echo)
        reader, writer = await asyncio.open_connection(*target(listener))
        assert await asyncio.wait_for(reader.read(), WAIT_S) == b""
        writer.close()
        await still_serves(listener)
        await listener.close()

    run(main)


def test_half_open_connections_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(greeting, "MAX_HALF_OPEN", 4)

    async def main() -> None:
        listener = await transport("listener").listen(echo)
        connections = []
        for _ in range(7):
            connections.append(await asyncio.open_connection(*target(listener)))
            await asyncio.sleep(0.02)
        for reader, _ in connections[:3]:
            assert await asyncio.wait_for(reader.read(), WAIT_S) == b""
        await still_serves(listener)
        for _, writer in connections:
            writer.close()
        await listener.close()

    run(main)


class Proxy:
    """Stands between dialer and listener, may change one byte of one direction, and records what the dialer sent."""

    def __init__(self, listener: Listener, *, towards_listener: bool = True, flip_at: int = -1) -> None:
        self.target = target(listener)
        self.flip_at = flip_at
        self.towards_listener = towards_listener
        self.recorded = bytearray()
        self.passed = {True: 0, False: 0}
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self) -> str:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(*self.target)
        self._tasks.append(asyncio.create_task(self._pump(reader, far_writer, True)))
        self._tasks.append(asyncio.create_task(self._pump(far_reader, writer, False)))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, to_listener: bool) -> None:
        try:
            while data := bytearray(await reader.read(65536)):
                if to_listener:
                    self.recorded += data
                position = self.flip_at - self.passed[to_listener]
                if to_listener == self.towards_listener and 0 <= position < len(data):
                    data[position] ^= 0x40
                self.passed[to_listener] += len(data)
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    async def close(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@pytest.mark.parametrize("towards_listener", [True, False])
@pytest.mark.parametrize("beyond", [0, 20, 39, 41, 60, 90_000, 150_000, 2_500_000])
def test_a_changed_byte_ends_the_endpoint(towards_listener: bool, beyond: int) -> None:
    seen: list[Message] = []

    async def handler(endpoint: Endpoint, message: Message, payload: memoryview) -> tuple[Message, list[memoryview]]:
        assert payload == bytes(len(payload))
        seen.append(message)
        return message, [payload]

    async def main() -> None:
        listener = await transport("listener").listen(handler)
        proxy = Proxy(listener, towards_listener=towards_listener)
        endpoint = await transport("dialer").connect(await proxy.open(), deadline_s=WAIT_S)
        await endpoint.call(EndSession(session_id="first"), deadline_s=WAIT_S)
        proxy.flip_at = proxy.passed[towards_listener] + beyond
        with pytest.raises(PeerLost):
            for size in (100_000, 100_000, 3 << 20, 10):
                reply = await endpoint.call(Heartbeat(), payload=[bytes(size)], deadline_s=WAIT_S)
                assert reply.payload == bytes(size)
        assert endpoint.closed.is_set()
        await proxy.close()
        await still_serves(listener)
        await listener.close()

    run(main)


@pytest.mark.parametrize("beyond", [0, 4, 5, 8, 9, 16, 26, 40, 60, 300])
def test_a_changed_byte_of_small_frames_ends_the_endpoint(beyond: int) -> None:
    """Where a changed length made the reader wait for more, the frames behind it don't verify."""
    seen: list[str] = []

    async def handler(endpoint: Endpoint, message: Message, payload: memoryview) -> None:
        assert isinstance(message, EndSession)
        seen.append(message.session_id)

    async def main() -> None:
        listener = await transport("listener").listen(handler)
        proxy = Proxy(listener)
        endpoint = await transport("dialer").connect(await proxy.open(), deadline_s=WAIT_S)
        await endpoint.call(EndSession(session_id="first"), deadline_s=WAIT_S)
        proxy.flip_at = proxy.passed[True] + beyond
        with pytest.raises(PeerLost):
            for n in range(5000):
                await endpoint.notify(EndSession(session_id=str(n)), payload=[bytes(20)])
                await asyncio.sleep(0)
        assert seen == ["first", *map(str, range(len(seen) - 1))]
        await proxy.close()
        await listener.close()

    run(main)


def test_a_recorded_conversation_cannot_be_replayed() -> None:
    seen: list[Message] = []

    async def handler(endpoint: Endpoint, message: Message, payload: memoryview) -> None:
        seen.append(message)

    async def main() -> None:
        listener = await transport("listener").listen(handler)
        proxy = Proxy(listener)
        endpoint = await transport("dialer").connect(await proxy.open(), deadline_s=WAIT_S)
        await endpoint.call(EndSession(session_id="once"), deadline_s=WAIT_S)
        await endpoint.close()
        await proxy.close()
        assert seen == [EndSession(session_id="once")]
        answer = await stranger(listener, bytes(proxy.recorded))
        assert len(answer) in (0, 40)  # the challenge at most
        assert len(seen) == 1
        await listener.close()

    run(main)


def test_more_than_the_kernel_takes_at_once_is_delivered() -> None:
    async def main() -> None:
        got: list[int] = []

        async def handler(endpoint: Endpoint, message: Message, payload: memoryview) -> None:
            got.append(len(payload))

        listener = await transport("listener").listen(handler)
        endpoint = await transport("dialer").connect(listener.address, deadline_s=WAIT_S)
        tasks = [asyncio.create_task(endpoint.notify(Heartbeat(), payload=[bytes(700_000)])) for _ in range(40)]
        await asyncio.gather(*tasks)
        await endpoint.call(Heartbeat(), deadline_s=WAIT_S)
        assert got == [700_000] * 40 + [0]
        await endpoint.close()
        await listener.close()

    run(main)


@pytest.mark.parametrize(
    "address",
    [
        "",
        "tcp://",
        "tcp://10.0.0.1",
        "tcp://10.0.0.1:x",
        "10.0.0.1:1",
        "ucx://10.0.0.1:1",
        "tcp://:5",
        "tcp://node7:4711",
        "tcp://10.0.0.1:65536",
        "tcp://10.0.0.1:-1",
        "tcp://[::1:5",
        "tcp://::1:5",
    ],
)
def test_bad_addresses_are_user_errors(address: str) -> None:
    with pytest.raises(UserError, match="expected tcp://address:port with a numeric"):
        parse_address(address)


def test_addresses() -> None:
    assert parse_address("tcp://10.0.0.7:4711") == (socket.AF_INET, ("10.0.0.7", 4711))
    family, address = parse_address("tcp://[::1]:5")
    assert family == socket.AF_INET6
    assert address[:2] == ("::1", 5)


@pytest.mark.skipif(not socket.has_ipv6, reason="this Python has no IPv6")
def test_ipv6() -> None:
    async def main() -> None:
        try:
            listener = await transport("listener").listen(echo, bind="::1")
        except UserError as error:
            pytest.skip(f"no IPv6 loopback here: {error}")
        assert listener.address.startswith("tcp://[::1]:")
        await still_serves(listener)
        await listener.close()

    run(main)


def test_an_address_of_another_host_cannot_be_bound() -> None:
    async def main() -> None:
        with pytest.raises(UserError, match=r"can't listen on '192\.0\.2\.1'"):
            await transport("listener").listen(echo, bind="192.0.2.1")

    run(main)


def test_a_frame_above_the_limit_fails_that_call_only() -> None:
    async def main() -> None:
        limits = Limits(payload_bytes=1000)
        listener = await transport("listener", limits).listen(echo)
        endpoint = await transport("dialer", limits).connect(listener.address, deadline_s=WAIT_S)
        with pytest.raises(MilesError, match="payload of 1001 bytes, limit 1000"):
            await endpoint.call(Heartbeat(), payload=[bytes(1001)], deadline_s=WAIT_S)
        await endpoint.call(Heartbeat(), payload=[bytes(1000)], deadline_s=WAIT_S)
        await endpoint.close()
        await listener.close()

    run(main)
