"""The elastic part of the transport contract: what the loss of a peer does; all pairs of faces."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from miles_hpc.core.errors import DeadlineExpired, PeerLost
from miles_hpc.core.messages import Heartbeat, Message
from miles_hpc.core.transport import BlockingEndpoint, Endpoint
from tests.conformance.transport_kinds import (
    SECRET,
    WAIT_S,
    AsyncServer,
    BlockingServer,
    echo,
    make,
    make_plain,
    numbered,
    run,
    server_of,
    until,
)

pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")


@pytest.fixture
def kind(elastic_kind: str) -> str:
    return elastic_kind


_WHO = """
import os, sys, time
from miles_hpc.core.messages import Heartbeat
from miles_hpc.core.transport import Credentials, PeerIdentity
me = PeerIdentity(role="rollout", name="victim", host="host", pid=os.getpid(), attempt=1, term=1)
kind, address = sys.argv[1:]
credentials = Credentials(bytes.fromhex(sys.stdin.readline()), me)
"""

#: Processes that join, call once, and then never answer.
CHILDREN = {
    "asyncio": _WHO
    + """
import asyncio
from miles_hpc.control.opening import open_transport

async def main():
    async def handler(endpoint, message, payload):
        await asyncio.sleep(600)
    endpoint = await open_transport(kind, credentials).connect(address, handler, deadline_s=60)
    await endpoint.call(Heartbeat(), deadline_s=60)
    await asyncio.sleep(600)

asyncio.run(main())
""",
    "blocking": _WHO
    + """
from miles_hpc.control.opening import open_blocking_transport

transport = open_blocking_transport(kind, credentials)
endpoint = transport.connect(address, lambda *_: transport.serve(lambda: False, deadline_s=600), deadline_s=60)
endpoint.call(Heartbeat(), deadline_s=60)
transport.serve(lambda: False, deadline_s=600)
""",
}


LAST_WORDS = (
    _WHO
    + """
from miles_hpc.control.opening import open_blocking_transport

def handler(endpoint, message, payload):
    if message == Heartbeat():
        endpoint.close("these are my last words")
        if kind == "ucx":
            transport.close()  # UCX sends in this process, not in the kernel
        os._exit(0)

transport = open_blocking_transport(kind, credentials)
transport.connect(address, handler, deadline_s=60)
transport.serve(lambda: False, deadline_s=600)
"""
)


@contextmanager
def child(program: str, kind: str, address: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process of the given program, which joins the listener at `address`."""
    if kind == "loopback":
        pytest.skip("loopback stays within one process")
    process = subprocess.Popen([sys.executable, "-c", program, kind, address], stdin=subprocess.PIPE)
    try:
        assert process.stdin is not None
        process.stdin.write(SECRET.hex().encode() + b"\n")
        process.stdin.close()
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_killed_peer_is_noticed(kind: str, dialer: str) -> None:
    async def main() -> None:
        joined: asyncio.Queue[Endpoint] = asyncio.Queue()

        async def handler(endpoint: Endpoint, message: Message, payload: memoryview) -> None:
            joined.put_nowait(endpoint)

        listener = await make(kind, "listener").listen(handler)
        with child(CHILDREN[dialer], kind, listener.address) as victim:
            endpoint = await asyncio.wait_for(joined.get(), WAIT_S)
            call = asyncio.create_task(endpoint.call(Heartbeat(), deadline_s=WAIT_S))
            await asyncio.sleep(0.2)
            start = time.monotonic()
            os.kill(victim.pid, signal.SIGKILL)
            with pytest.raises(PeerLost, match=r"victim.*endpoint closed"):
                await call
            assert endpoint.closed.is_set()
            assert time.monotonic() - start < WAIT_S / 2  # at once, not by the deadline: the kernel tells
            await listener.close()

    run(main)


def test_a_blocking_listener_notices_a_killed_peer(kind: str, dialer: str) -> None:
    ended: list[str] = []
    transport = make_plain(kind, "listener")
    listener = transport.listen(lambda *_: None, on_close=lambda endpoint: ended.append(endpoint.close_reason))
    try:
        with child(CHILDREN[dialer], kind, listener.address) as victim:
            assert transport.serve(lambda: "victim" in listener.endpoints, deadline_s=WAIT_S)
            endpoint = listener.endpoints["victim"]
            pending = [endpoint.begin(numbered(n), deadline_s=WAIT_S) for n in range(3)]
            assert not transport.serve(lambda: pending[0].done, deadline_s=0.2)
            start = time.monotonic()
            os.kill(victim.pid, signal.SIGKILL)
            with pytest.raises(PeerLost, match=r"victim.*endpoint closed"):
                pending[0].result()
            assert time.monotonic() - start < WAIT_S / 2
            assert all(one.done for one in pending)
            assert transport.serve(lambda: bool(ended), deadline_s=WAIT_S)
            assert "endpoint closed" in ended[0]
            assert listener.endpoints == {}
            with pytest.raises(PeerLost, match="endpoint closed"):
                endpoint.notify(Heartbeat(), deadline_s=WAIT_S)
    finally:
        transport.close()


def test_the_last_words_of_a_process_are_heard(kind: str, face: str) -> None:
    """It closes and ends at once, while we are sending: a broken pipe isn't all that can be said about it."""
    reasons: list[str] = []

    async def on_close(endpoint: Endpoint) -> None:
        reasons.append(endpoint.close_reason)

    def plain_on_close(endpoint: BlockingEndpoint) -> None:
        reasons.append(endpoint.close_reason)

    async def main() -> None:
        joined: asyncio.Queue[Endpoint] = asyncio.Queue()
        listener = await make(kind, "listener").listen(echo, on_connect=joined.put, on_close=on_close)
        with child(LAST_WORDS, kind, listener.address):
            endpoint = await asyncio.wait_for(joined.get(), WAIT_S)
            with pytest.raises(PeerLost, match="these are my last words"):
                for n in range(1_000_000):
                    await endpoint.notify(Heartbeat() if n == 20 else numbered(n), payload=[bytes(5000)])
                    await asyncio.sleep(0)
            await until(lambda: bool(reasons))
            await listener.close()

    if face == "asyncio":
        run(main)
    else:
        transport = make_plain(kind, "listener")
        listener = transport.listen(lambda *_: None, on_close=plain_on_close)
        with child(LAST_WORDS, kind, listener.address):
            assert transport.serve(lambda: bool(listener.endpoints), deadline_s=WAIT_S)
            endpoint = listener.endpoints["victim"]
            with pytest.raises(PeerLost, match="these are my last words"):
                for n in range(1_000_000):
                    message = Heartbeat() if n == 20 else numbered(n)
                    endpoint.notify(message, payload=[bytes(5000)], deadline_s=WAIT_S)
                    if n % 10 == 0:
                        transport.serve(lambda: False, deadline_s=0.0)
            assert transport.serve(lambda: bool(reasons), deadline_s=WAIT_S)
        transport.close()
    assert reasons == ["closed by the peer: these are my last words"]


def test_a_stopped_peer_is_not_lost_and_goes_on(kind: str, dialer: str) -> None:
    """SIGSTOP says nothing to a transport: calls expire, and are answered again later. The roster has heartbeats."""

    async def main() -> None:
        joined: asyncio.Queue[Endpoint] = asyncio.Queue()

        async def handler(endpoint: Endpoint, message: Message, payload: memoryview) -> None:
            joined.put_nowait(endpoint)

        listener = await make(kind, "listener").listen(handler)
        with child(CHILDREN[dialer], kind, listener.address) as victim:
            endpoint = await asyncio.wait_for(joined.get(), WAIT_S)
            os.kill(victim.pid, signal.SIGSTOP)
            try:
                for _ in range(3):
                    with pytest.raises(DeadlineExpired):
                        await endpoint.call(Heartbeat(), deadline_s=0.2)
                assert not endpoint.closed.is_set()
            finally:
                os.kill(victim.pid, signal.SIGCONT)
            await asyncio.sleep(0.2)
            assert not endpoint.closed.is_set()
            os.kill(victim.pid, signal.SIGKILL)
            await asyncio.wait_for(endpoint.closed.wait(), WAIT_S)
            await listener.close()

    run(main)


def test_the_end_of_a_loop_is_the_loss_of_its_endpoints() -> None:
    """Within one process there is no kernel that would close sockets."""
    kind = "loopback"

    async def ends_at_once(address: str) -> None:
        await make(kind, "careless").connect(address, deadline_s=WAIT_S)

    async def main() -> None:
        accepted: list[Endpoint] = []

        async def on_connect(endpoint: Endpoint) -> None:
            accepted.append(endpoint)

        listener = await make(kind, "listener").listen(echo, on_connect=on_connect)
        await asyncio.to_thread(asyncio.run, ends_at_once(listener.address))
        await until(lambda: bool(accepted))
        with pytest.raises(PeerLost, match="the peer's loop has ended"):
            await accepted[0].call(Heartbeat(), deadline_s=WAIT_S)
        await listener.close()

        async def listens_and_ends() -> str:
            return (await make(kind, "careless").listen(echo)).address

        address = await asyncio.to_thread(asyncio.run, listens_and_ends())
        with pytest.raises(PeerLost, match="nobody listens there"):
            await make(kind, "late").connect(address, deadline_s=WAIT_S)

    run(main)


def test_servers_end_with_clients_connected(kind: str, face: str) -> None:
    """Both ends of a run may stop in any order."""
    server: AsyncServer | BlockingServer = server_of(face, kind)
    transport = make_plain(kind, "dialer")
    with server:
        endpoint = transport.connect(server.address, deadline_s=WAIT_S)
        assert endpoint.call(numbered(1), deadline_s=WAIT_S).message == numbered(1)
    assert transport.serve(lambda: endpoint.closed, deadline_s=WAIT_S)
    assert endpoint.close_reason == "closed by the peer: listener closed"
    with pytest.raises((PeerLost, DeadlineExpired)):
        transport.connect(server.address, deadline_s=2.0)
    transport.close()
