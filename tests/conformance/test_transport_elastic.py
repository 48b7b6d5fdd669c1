"""The elastic part of the transport contract: who may join and who is refused; all pairs of faces."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from miles_hpc.control.auth import new_secret
from miles_hpc.core.errors import AuthenticationError, DeadlineExpired, FencedError, PeerLost, RemoteError, UserError
from miles_hpc.core.messages import Heartbeat, Message
from miles_hpc.core.transport import Endpoint, PeerIdentity
from miles_hpc.core.version import PROTOCOL_VERSION
from tests.conformance.transport_kinds import (
    WAIT_S,
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


def join(dialer: str, kind: str, address: str, name: str, deadline_s: float = WAIT_S, **who: Any) -> PeerIdentity:
    """Connect, call once, and leave again; returns who the listener is."""
    if dialer == "blocking":
        transport = make_plain(kind, name, **who)
        try:
            endpoint = transport.connect(address, deadline_s=deadline_s)
            assert endpoint.call(numbered(1), deadline_s=WAIT_S).message == numbered(1)
            return endpoint.peer
        finally:
            transport.close()
    found: list[PeerIdentity] = []

    async def main() -> None:
        endpoint = await make(kind, name, **who).connect(address, deadline_s=deadline_s)
        assert (await endpoint.call(numbered(1), deadline_s=WAIT_S)).message == numbered(1)
        found.append(endpoint.peer)
        await endpoint.close()

    run(main)
    return found[0]


# ------------------------------------------------------------------------------------------------ joining


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


def test_strangers_are_refused(kind: str, face: str, dialer: str) -> None:
    newer: list[PeerIdentity] = []
    who = {"attempt": 2, "term": 7, "on_newer": newer.append}
    with server_of(face, kind, who=who) as server:

        def refused(error: type[Exception], match: str, name: str, **who: Any) -> None:
            with pytest.raises(error, match=match):
                join(dialer, kind, server.address, name, **who)

        refused(AuthenticationError, "another secret", "stranger", secret=new_secret())
        refused(FencedError, r"attempt 1.*attempt 2", "old", attempt=1, term=7)
        refused(FencedError, r"term 1.*term 7", "old", attempt=2, term=1)
        assert not newer
        refused(PeerLost, r"attempt 3.*attempt 2", "newer", attempt=3, term=8)  # it's the listener that was left over
        refused(PeerLost, r"term 8.*term 7", "newer", attempt=2, term=8)
        assert [(peer.attempt, peer.term) for peer in newer] == [(3, 8), (2, 8)]
        version = f"version {PROTOCOL_VERSION} at the peer, 9 here"
        refused(AuthenticationError, version, "new", attempt=2, term=7, version=9)
        assert join(dialer, kind, server.address, "friend", attempt=2, term=7).name == "listener"


def test_any_term_accepts_other_terms_of_the_same_attempt(kind: str, face: str, dialer: str) -> None:
    with server_of(face, kind, any_term=True) as server:
        assert join(dialer, kind, server.address, "later", term=7).term == 1
        with pytest.raises(FencedError):
            join(dialer, kind, server.address, "old", attempt=0, term=9)
        with pytest.raises(PeerLost):
            join(dialer, kind, server.address, "newer", attempt=2)


def test_nobody_listens(kind: str, face: str, dialer: str) -> None:
    with server_of(face, kind) as server:
        join(dialer, kind, server.address, "early")
    with pytest.raises((PeerLost, DeadlineExpired)):
        join(dialer, kind, server.address, "late", deadline_s=3.0)


@pytest.mark.parametrize("turns", range(6))
def test_a_listener_that_is_closed_while_somebody_connects(kind: str, turns: int) -> None:
    """Whatever the handshake has come to: the dialer hears of it, and no endpoint of a closed listener is left."""
    accepted: list[Endpoint] = []

    async def on_connect(endpoint: Endpoint) -> None:
        accepted.append(endpoint)

    async def main() -> None:
        listener = await make(kind, "listener").listen(echo, on_connect=on_connect)
        dialer = make(kind, "dialer")
        dialing = asyncio.create_task(dialer.connect(listener.address, deadline_s=5.0))
        for _ in range(turns):
            await asyncio.sleep(0)
        await listener.close()
        try:
            endpoint = await dialing
        except (PeerLost, DeadlineExpired, AuthenticationError):
            pass
        else:
            await asyncio.wait_for(endpoint.closed.wait(), WAIT_S)
        await until(lambda: all(one.closed.is_set() for one in accepted))

    run(main)


def test_a_listener_that_does_not_answer_costs_a_deadline(kind: str, dialer: str) -> None:
    """Its thread is busy: the connection stands, the handshake doesn't begin."""
    at_work, go_on = threading.Event(), threading.Event()

    def work() -> None:
        at_work.set()
        go_on.wait(WAIT_S)

    with BlockingServer(kind) as server:
        busy = threading.Thread(target=server.do, args=(work,))
        busy.start()
        assert at_work.wait(WAIT_S)
        try:
            for _ in range(2):
                start = time.monotonic()
                with pytest.raises(DeadlineExpired, match=r"no connection after 0\.4 s"):
                    join(dialer, kind, server.address, "hasty", deadline_s=0.4)
                assert time.monotonic() - start < WAIT_S / 2
        finally:
            go_on.set()
            busy.join()
        assert join(dialer, kind, server.address, "patient").name == "listener"


def test_peers_come_and_go_while_others_stay(kind: str, face: str, dialer: str) -> None:
    events: list[tuple[str, str]] = []

    async def on_connect(endpoint: Any) -> None:
        events.append(("came", endpoint.peer.name))

    async def on_close(endpoint: Any) -> None:
        events.append(("went", endpoint.peer.name))

    hooks: dict[str, Any] = {"on_connect": on_connect, "on_close": on_close}
    if face == "blocking":
        hooks = {
            "on_connect": lambda endpoint: events.append(("came", endpoint.peer.name)),
            "on_close": lambda endpoint: events.append(("went", endpoint.peer.name)),
        }
    with server_of(face, kind, **hooks) as server:
        stays = make_plain(kind, "stays")
        endpoint = stays.connect(server.address, deadline_s=WAIT_S)
        for n in range(5):
            join(dialer, kind, server.address, f"guest {n}")
            assert endpoint.call(Heartbeat(), deadline_s=WAIT_S).message == Heartbeat()
        end = time.monotonic() + WAIT_S
        while len(events) < 11 and time.monotonic() < end:
            time.sleep(0.01)
        assert events.count(("came", "stays")) == 1
        assert ("went", "stays") not in events
        assert sorted(events)[:5] == [("came", f"guest {n}") for n in range(5)]
        assert sorted(events)[6:] == [("went", f"guest {n}") for n in range(5)]
        stays.close()
