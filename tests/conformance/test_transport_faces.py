"""Both faces against each other, each side in a thread of its own: the wire is the same.

The server is of either face, the client of either face. What a server of one face does by a coroutine, the other does
by a wait within a handler.
"""

from __future__ import annotations

import asyncio
import threading
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from miles_hpc.control.exchange import STREAM_WINDOW
from miles_hpc.control.frames import Limits
from miles_hpc.core.errors import DeadlineExpired, PeerLost, RemoteError
from miles_hpc.core.messages import Ack, Heartbeat, Message, Shutdown
from miles_hpc.core.transport import BlockingEndpoint, BlockingTransport, Endpoint
from tests.conformance.transport_kinds import (
    CANCELLABLE,
    WAIT_S,
    AsyncServer,
    BlockingServer,
    echo,
    make,
    make_plain,
    numbered,
    plain_echo,
    run,
    server_of,
    until,
)

NARROW = Limits(window_messages=8, window_bytes=100_000)
FACES = pytest.mark.parametrize("face", ["asyncio", "blocking"])


@pytest.fixture
def kind(elastic_kind: str) -> str:
    return elastic_kind


class Gate:
    """A handler for either face that answers nothing but urgent messages before it's opened."""

    def __init__(self, face: str) -> None:
        self.seen: list[Message] = []
        self.cancelled = 0
        self.is_open = threading.Event()
        self.handler = self._wait if face == "asyncio" else self._wait_plainly
        self.server: Any = None

    async def _wait(self, endpoint: Endpoint, message: Message, payload: memoryview) -> Message:
        self.seen.append(message)
        try:
            while not self.is_open.is_set() and not message.urgent:
                await asyncio.sleep(0.005)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return message

    def _wait_plainly(self, endpoint: BlockingEndpoint, message: Message, payload: memoryview) -> Message:
        self.seen.append(message)
        while not self.is_open.is_set() and not message.urgent:
            self.server.transport.serve(self.is_open.is_set, deadline_s=0.005)
        return message


def gated(face: str, kind: str, **options: Any) -> tuple[Gate, AsyncServer | BlockingServer]:
    gate = Gate(face)
    gate.server = server_of(face, kind, gate.handler, **options)
    return gate, gate.server


def plain_until(transport: BlockingTransport, condition: Any) -> None:
    """Serve until something that happens in another thread is so."""
    end = time.monotonic() + WAIT_S
    while not transport.serve(condition, deadline_s=0.005):
        assert time.monotonic() < end


# ------------------------------------------------------------------------------------------------ a blocking client


@FACES
def test_calls_notifies_and_streams_of_a_blocking_client(kind: str, face: str) -> None:
    seen: list[Message] = []

    def handler(endpoint: Any, message: Message, payload: memoryview) -> Any:
        seen.append(message)
        if isinstance(message, Heartbeat):
            return ((numbered(n), [bytes(n * 1000)]) for n in range(3 * STREAM_WINDOW))
        if isinstance(message, Shutdown):
            raise LookupError(message.reason)
        return message, [payload]

    with server_of(face, kind, handler) as server, closing(make_plain(kind, "dialer")) as transport:
        endpoint = transport.connect(server.address, deadline_s=WAIT_S)
        assert endpoint.peer.name == "listener"
        for n, size in enumerate((0, 1, 16_300, 70_000, 5 << 20)):
            reply = endpoint.call(numbered(n), payload=[bytes(size)], deadline_s=WAIT_S)
            assert (reply.message, len(reply.payload)) == (numbered(n), size)
        pending = [endpoint.begin(numbered(n), payload=[bytes(n)], deadline_s=WAIT_S) for n in range(300)]
        for n in reversed(range(300)):
            assert len(pending[n].result().payload) == n
        with endpoint.stream(Heartbeat(), deadline_s=WAIT_S) as items:
            got = [(item.message, len(item.payload)) for item in items]
        assert got == [(numbered(n), n * 1000) for n in range(3 * STREAM_WINDOW)]
        with pytest.raises(RemoteError, match="LookupError: gone"):
            endpoint.call(Shutdown(reason="gone"), deadline_s=WAIT_S)
        seen.clear()
        for n in range(200):
            endpoint.notify(numbered(n), payload=[bytes(n % 3 * 40_000)], deadline_s=WAIT_S)
        endpoint.call(numbered(200), deadline_s=WAIT_S)
        assert seen == [numbered(n) for n in range(201)]


@FACES
def test_the_server_calls_a_blocking_client_within_its_call(kind: str, face: str) -> None:
    def plainly(endpoint: BlockingEndpoint, message: Message, payload: memoryview) -> Any:
        reply = endpoint.call(message, payload=[payload], deadline_s=WAIT_S)
        with endpoint.stream(Heartbeat(), deadline_s=WAIT_S) as items:
            assert [item.message for item in items] == [numbered(n) for n in range(20)]
        return reply.message, [reply.payload]

    async def asynchronously(endpoint: Endpoint, message: Message, payload: memoryview) -> Any:
        reply = await endpoint.call(message, payload=[payload], deadline_s=WAIT_S)
        async with endpoint.stream(Heartbeat(), deadline_s=WAIT_S) as items:
            assert [item.message async for item in items] == [numbered(n) for n in range(20)]
        return reply.message, [reply.payload]

    def client(endpoint: BlockingEndpoint, message: Message, payload: memoryview) -> Any:
        return map(numbered, range(20)) if isinstance(message, Heartbeat) else (message, [payload])

    handler = asynchronously if face == "asyncio" else plainly
    with server_of(face, kind, handler) as server, closing(make_plain(kind, "dialer")) as transport:
        endpoint = transport.connect(server.address, client, deadline_s=WAIT_S)
        pending = [endpoint.begin(numbered(n), payload=[bytes(n * 100)], deadline_s=WAIT_S) for n in range(100)]
        for n, one in enumerate(pending):
            reply = one.result()
            assert (reply.message, len(reply.payload)) == (numbered(n), n * 100)


@FACES
def test_a_blocking_client_gives_up_in_time(kind: str, face: str) -> None:
    gate, server = gated(face, kind)
    with server, closing(make_plain(kind, "dialer")) as transport:
        endpoint = transport.connect(server.address, deadline_s=WAIT_S)
        with pytest.raises(DeadlineExpired, match=r"listener: EndSession: nothing after \d\.\d s \(limit 0\.3 s\)"):
            endpoint.call(numbered(1), deadline_s=0.3)
        pending = endpoint.begin(CANCELLABLE, deadline_s=WAIT_S)
        plain_until(transport, lambda: len(gate.seen) == 2)
        pending.cancel()
        if face == "asyncio":
            plain_until(transport, lambda: gate.cancelled == 1)
        with pytest.raises(DeadlineExpired, match="cancelled"):
            pending.result()
        gate.is_open.set()
        assert endpoint.call(numbered(2), deadline_s=WAIT_S).message == numbered(2)
        assert gate.cancelled == (face == "asyncio")


@FACES
def test_a_full_window_holds_a_blocking_client_back(kind: str, face: str) -> None:
    gate, server = gated(face, kind, who={"limits": NARROW})
    with server, closing(make_plain(kind, "dialer")) as transport:
        endpoint = transport.connect(server.address, deadline_s=WAIT_S)
        pending = [endpoint.begin(numbered(n), deadline_s=WAIT_S) for n in range(8)]
        with pytest.raises(DeadlineExpired, match=r"listener: EndSession: nothing after \d\.\d s \(limit 0\.3 s\)"):
            endpoint.begin(numbered(100), deadline_s=0.3)
        with pytest.raises(DeadlineExpired, match=r"listener: EndSession: not taken after 0\.3 s"):
            endpoint.notify(numbered(101), payload=[bytes(50_000)], deadline_s=0.3)
        with pytest.raises(DeadlineExpired):
            with endpoint.stream(numbered(102), deadline_s=0.3) as items:
                next(items)
        assert endpoint.call(Heartbeat(), deadline_s=WAIT_S).message == Heartbeat()
        gate.is_open.set()
        assert [one.result().message for one in pending] == [numbered(n) for n in range(8)]
        assert endpoint.call(numbered(8), deadline_s=WAIT_S).message == numbered(8)
        assert [message for message in gate.seen if message != Heartbeat()] == [numbered(n) for n in range(9)]


@FACES
@pytest.mark.parametrize("who", ["client", "server"])
def test_a_close_fails_what_a_blocking_client_waits_for(kind: str, face: str, who: str) -> None:
    gate, server = gated(face, kind)
    with server, closing(make_plain(kind, "dialer")) as transport:
        endpoint = transport.connect(server.address, deadline_s=WAIT_S)
        pending = [endpoint.begin(numbered(n), deadline_s=WAIT_S) for n in range(3)]
        plain_until(transport, lambda: len(gate.seen) >= 1)
        if who == "client":
            endpoint.close("enough")
        elif isinstance(server, AsyncServer):
            server.do(server.listener.close())
        else:
            gate.is_open.set()
            server.do(server.listener.close)
        for one in pending:
            try:
                assert one.result().message == numbered(pending.index(one))
                assert face == "blocking"  # its handlers were let go first
                assert who == "server"
            except PeerLost as error:
                assert ("enough" if who == "client" else "listener closed") in str(error)
        plain_until(transport, lambda: endpoint.closed)
        gate.is_open.set()
        with pytest.raises(PeerLost):
            endpoint.notify(Heartbeat(), deadline_s=WAIT_S)


@FACES
def test_a_blocking_client_stays_small_when_its_peer_reads_nothing(kind: str, face: str) -> None:
    stuck, go_on = threading.Event(), threading.Event()
    seen: list[int] = []

    def handler(endpoint: Any, message: Message, payload: memoryview) -> None:
        if isinstance(message, Heartbeat):
            stuck.set()
            go_on.wait(WAIT_S)
        elif payload:
            seen.append(payload[0])

    limits = Limits(window_messages=1000, window_bytes=4 << 20)
    with (
        server_of(face, kind, handler, who={"limits": limits}) as server,
        closing(make_plain(kind, "dialer")) as transport,
    ):
        endpoint = transport.connect(server.address, deadline_s=WAIT_S)
        endpoint.notify(Heartbeat(), deadline_s=WAIT_S)
        plain_until(transport, stuck.is_set)
        tracemalloc.start()
        sent = 0
        try:
            with pytest.raises(DeadlineExpired):
                for sent in range(200):
                    endpoint.notify(numbered(sent), payload=[bytes([sent]) * 100_000], deadline_s=0.3)
            used = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
            go_on.set()
        assert sent <= limits.window_bytes // 100_000 + 1
        assert used < 4 * limits.window_bytes
        assert endpoint.call(numbered(0), deadline_s=WAIT_S).message == Ack()
        assert seen[:sent] == list(range(sent))


@FACES
def test_leaving_a_stream_stops_the_server(kind: str, face: str) -> None:
    made: list[int] = []
    ended = threading.Event()

    def handler(endpoint: Any, message: Message, payload: memoryview) -> Iterator[Message]:
        def items() -> Iterator[Message]:
            try:
                while True:
                    made.append(len(made))
                    yield numbered(made[-1])
            finally:
                ended.set()

        return items()

    with server_of(face, kind, handler) as server, closing(make_plain(kind, "dialer")) as transport:
        endpoint = transport.connect(server.address, deadline_s=WAIT_S)
        with endpoint.stream(Heartbeat(), deadline_s=WAIT_S) as items:
            for read in range(1, 2 * STREAM_WINDOW):
                assert next(items).message == numbered(read - 1)
                assert len(made) - read <= STREAM_WINDOW
        plain_until(transport, ended.is_set)
        assert len(made) <= 3 * STREAM_WINDOW


# ------------------------------------------------------------------------------------------------ an asyncio client


@FACES
def test_calls_notifies_and_streams_of_an_asyncio_client(kind: str, face: str) -> None:
    seen: list[Message] = []

    def handler(endpoint: Any, message: Message, payload: memoryview) -> Any:
        seen.append(message)
        if isinstance(message, Heartbeat):
            return ((numbered(n), [bytes(n * 1000)]) for n in range(3 * STREAM_WINDOW))
        return message, [payload]

    async def main() -> None:
        endpoint = await make(kind, "dialer").connect(server.address, deadline_s=WAIT_S)

        async def call(n: int) -> None:
            reply = await endpoint.call(numbered(n), payload=[bytes(n * 997 % 60_000)], deadline_s=WAIT_S)
            assert (reply.message, len(reply.payload)) == (numbered(n), n * 997 % 60_000)

        await asyncio.gather(*(call(n) for n in range(200)))
        async with endpoint.stream(Heartbeat(), deadline_s=WAIT_S) as items:
            got = [(item.message, len(item.payload)) async for item in items]
        assert got == [(numbered(n), n * 1000) for n in range(3 * STREAM_WINDOW)]
        seen.clear()
        for n in range(200):
            await endpoint.notify(numbered(n), payload=[bytes(n % 3 * 40_000)])
        await endpoint.call(numbered(200), deadline_s=WAIT_S)
        assert seen == [numbered(n) for n in range(201)]
        await endpoint.close()

    with server_of(face, kind, handler) as server:
        run(main)


def test_an_asyncio_client_answers_a_blocking_server(kind: str) -> None:
    def server_handler(endpoint: BlockingEndpoint, message: Message, payload: memoryview) -> Any:
        return endpoint.call(message, payload=[payload], deadline_s=WAIT_S).message

    async def main() -> None:
        endpoint = await make(kind, "dialer").connect(server.address, echo, deadline_s=WAIT_S)
        calls = [endpoint.call(numbered(n), payload=[bytes(n)], deadline_s=WAIT_S) for n in range(200)]
        assert [reply.message for reply in await asyncio.gather(*calls)] == [numbered(n) for n in range(200)]
        accepted = server.do(lambda: server.listener.endpoints["dialer"])
        assert accepted.peer.name == "dialer"
        answered = asyncio.to_thread(server.do, lambda: accepted.call(Heartbeat(), deadline_s=WAIT_S).message)
        assert await answered == Heartbeat()
        await endpoint.close("over")
        await until(lambda: not server.do(lambda: dict(server.listener.endpoints)))

    with BlockingServer(kind, server_handler) as server:
        run(main)


@pytest.mark.parametrize("message", [CANCELLABLE, numbered(0)], ids=["cancellable", "not cancellable"])
def test_a_blocking_server_begins_nothing_that_was_given_up(kind: str, message: Message) -> None:
    """While its thread is busy, a call and its cancellation arrive."""
    busy, go_on = threading.Event(), threading.Event()
    seen: list[Message] = []

    def handler(endpoint: BlockingEndpoint, message: Message, payload: memoryview) -> None:
        seen.append(message)
        if isinstance(message, Shutdown):
            busy.set()
            go_on.wait(WAIT_S)

    async def main() -> None:
        endpoint = await make(kind, "dialer").connect(server.address, deadline_s=WAIT_S)
        blocks = asyncio.create_task(endpoint.call(Shutdown(reason=""), deadline_s=WAIT_S))
        await until(busy.is_set)
        with pytest.raises(DeadlineExpired):
            await endpoint.call(message, deadline_s=0.1)
        await asyncio.sleep(0.05)
        go_on.set()
        await blocks
        await endpoint.call(Heartbeat(), deadline_s=WAIT_S)
        assert seen == [Shutdown(reason=""), *([] if message.cancellable else [message]), Heartbeat()]
        await endpoint.close()

    with BlockingServer(kind, handler) as server:
        try:
            run(main)
        finally:
            go_on.set()


def test_one_blocking_client_of_several_servers(kind: str) -> None:
    with (
        BlockingServer(kind, plain_echo) as one,
        AsyncServer(kind, echo) as two,
        closing(make_plain(kind, "dialer")) as transport,
    ):
        endpoints = [transport.connect(s.address, deadline_s=WAIT_S) for s in (one, two, one, two)]
        pending = [e.begin(numbered(n), payload=[bytes(n)], deadline_s=WAIT_S) for n in range(100) for e in endpoints]
        assert [len(call.result().payload) for call in pending] == [n for n in range(100) for _ in endpoints]
        endpoints[0].close()
        assert endpoints[2].call(Heartbeat(), deadline_s=WAIT_S).message == Heartbeat()
