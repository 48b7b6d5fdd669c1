"""The elastic part of the transport contract: who may join, and what the loss of a peer does."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time

import pytest

from miles_hpc.control.auth import new_secret
from miles_hpc.core.errors import AuthenticationError, DeadlineExpired, FencedError, PeerLost, RemoteError, UserError
from miles_hpc.core.messages import Heartbeat, Message
from miles_hpc.core.transport import Endpoint
from miles_hpc.core.version import PROTOCOL_VERSION
from tests.conformance.transport_kinds import SECRET, WAIT_S, echo, make, run


@pytest.fixture
def kind(elastic_kind: str) -> str:
    return elastic_kind


@pytest.mark.parametrize("error", [FencedError("incarnation 2 exists"), UserError("no room")])
def test_on_connect_refuses(kind: str, error: Exception) -> None:
    handled: list[Message] = []
    closed: list[Endpoint] = []

    async def handler(endpoint: Endpoint, message: Message, payload: memoryview) -> None:
        handled.append(message)

    async def on_connect(endpoint: Endpoint) -> None:
        await asyncio.sleep(0.05)
        raise error

    async def on_close(endpoint: Endpoint) -> None:
        closed.append(endpoint)

    async def main() -> None:
        listener = await make(kind, "listener").listen(handler, on_connect=on_connect, on_close=on_close)
        expected = FencedError if isinstance(error, FencedError) else RemoteError
        with pytest.raises(expected, match=str(error)):
            await make(kind, "dialer").connect(listener.address, deadline_s=WAIT_S)
        await listener.close()
        assert not handled
        assert not closed

    run(main)


def test_strangers_are_refused(kind: str) -> None:
    async def main() -> None:
        listener = await make(kind, "listener", attempt=2, term=7).listen(echo)
        with pytest.raises(AuthenticationError):
            await make(kind, "stranger", secret=new_secret()).connect(listener.address, deadline_s=WAIT_S)
        with pytest.raises(FencedError, match=r"attempt 1.*attempt 2"):
            await make(kind, "old", attempt=1, term=7).connect(listener.address, deadline_s=WAIT_S)
        with pytest.raises(FencedError, match=r"term 1.*term 7"):
            await make(kind, "old", attempt=2, term=1).connect(listener.address, deadline_s=WAIT_S)
        with pytest.raises(PeerLost, match=r"attempt 3.*attempt 2"):  # it is the listener that was left over
            await make(kind, "newer", attempt=3, term=8).connect(listener.address, deadline_s=WAIT_S)
        with pytest.raises(PeerLost, match=r"term 8.*term 7"):
            await make(kind, "newer", attempt=2, term=8).connect(listener.address, deadline_s=WAIT_S)
        with pytest.raises(AuthenticationError, match=f"version {PROTOCOL_VERSION} at the peer, 9 here"):
            await make(kind, "new", version=9).connect(listener.address, deadline_s=WAIT_S)
        friend = await make(kind, "friend", attempt=2, term=7).connect(listener.address, deadline_s=WAIT_S)
        assert (await friend.call(Heartbeat(), deadline_s=WAIT_S)).message == Heartbeat()
        await friend.close()
        await listener.close()

    run(main)


def test_any_term_accepts_other_terms_of_the_same_attempt(kind: str) -> None:
    async def main() -> None:
        listener = await make(kind, "listener").listen(echo, any_term=True)
        endpoint = await make(kind, "later", term=7).connect(listener.address, deadline_s=WAIT_S)
        assert endpoint.peer.term == 1
        await endpoint.call(Heartbeat(), deadline_s=WAIT_S)
        await endpoint.close()
        with pytest.raises(FencedError):
            await make(kind, "old", attempt=0, term=9).connect(listener.address, deadline_s=WAIT_S)
        with pytest.raises(PeerLost):
            await make(kind, "newer", attempt=2).connect(listener.address, deadline_s=WAIT_S)
        await listener.close()

    run(main)


def test_nobody_listens(kind: str) -> None:
    async def main() -> None:
        listener = await make(kind, "listener").listen(echo)
        await listener.close()
        with pytest.raises((PeerLost, DeadlineExpired)):
            await make(kind, "dialer").connect(listener.address, deadline_s=3.0)

    run(main)


CHILD = """
import asyncio, os, sys
from miles_hpc.control.opening import open_transport
from miles_hpc.core.messages import Heartbeat
from miles_hpc.core.transport import Credentials, PeerIdentity

async def main():
    me = PeerIdentity(role="rollout", name="victim", host="host", pid=os.getpid(), attempt=1, term=1)
    transport = open_transport(sys.argv[1], Credentials(bytes.fromhex(sys.stdin.readline()), me))
    async def handler(endpoint, message, payload):
        await asyncio.sleep(600)
    endpoint = await transport.connect(sys.argv[2], handler, deadline_s=60)
    await endpoint.call(Heartbeat(), deadline_s=60)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_killed_peer_is_noticed(kind: str) -> None:
    if kind == "loopback":
        pytest.skip("loopback stays within one process")

    async def main() -> None:
        joined: asyncio.Queue[Endpoint] = asyncio.Queue()

        async def handler(endpoint: Endpoint, message: Message, payload: memoryview) -> None:
            joined.put_nowait(endpoint)

        listener = await make(kind, "listener").listen(handler)
        child = subprocess.Popen([sys.executable, "-c", CHILD, kind, listener.address], stdin=subprocess.PIPE)
        try:
            assert child.stdin is not None
            child.stdin.write(SECRET.hex().encode() + b"\n")
            child.stdin.close()
            endpoint = await asyncio.wait_for(joined.get(), WAIT_S)
            call = asyncio.create_task(endpoint.call(Heartbeat(), deadline_s=WAIT_S))
            await asyncio.sleep(0.2)
            start = time.monotonic()
            os.kill(child.pid, signal.SIGKILL)
            with pytest.raises(PeerLost, match=r"victim.*endpoint closed"):
                await call
            assert endpoint.closed.is_set()
            assert time.monotonic() - start < 2.0  # the promise of this transport, kept by the kernel
        finally:
            child.kill()
            child.wait()
            await listener.close()

    run(main)
