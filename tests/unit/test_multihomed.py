"""Services with several addresses: on one host with the fake of a transport, then between two namespaces."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from miles_hpc.control import multihomed
from miles_hpc.control.auth import new_secret
from miles_hpc.control.multihomed import (
    connect_any,
    dialing_order,
    host_of,
    join_addresses,
    listen_on,
    split_addresses,
)
from miles_hpc.control.opening import open_transport
from miles_hpc.core.errors import AuthenticationError, DeadlineExpired, FencedError, MilesError, PeerLost, UserError
from miles_hpc.core.messages import Ack, Heartbeat, Message
from miles_hpc.core.transport import Credentials, Endpoint, HandlerResult, PeerIdentity, Transport

ROOT = Path(__file__).parents[2]
SECRET = bytes(range(32))


def make(name: str, *, secret: bytes = SECRET, attempt: int = 1, term: int = 1) -> Transport:
    who = PeerIdentity(role="trainer", name=name, host="h", pid=1, attempt=attempt, term=term)
    return open_transport("tcp", Credentials(secret, who))


async def answer(endpoint: Endpoint, message: Message, payload: memoryview) -> HandlerResult:
    return Ack()


# ------------------------------------------------------------------------------------- the order


@pytest.mark.parametrize(
    ("addresses", "own", "expected"),
    [
        (["tcp://10.1.0.1:5"], ["10.1.0.2/16"], ["tcp://10.1.0.1:5"]),
        (["tcp://10.1.0.1:5", "tcp://10.2.0.1:6"], ["10.3.0.2/16"], ["tcp://10.1.0.1:5", "tcp://10.2.0.1:6"]),
        (["tcp://10.1.0.1:5", "tcp://10.2.0.1:6"], ["10.2.0.2/16"], ["tcp://10.2.0.1:6", "tcp://10.1.0.1:5"]),
        (["tcp://10.1.0.1:5", "ucx://[fd00::1]:6"], ["fd00::9/64"], ["ucx://[fd00::1]:6", "tcp://10.1.0.1:5"]),
        (["loopback://1", "tcp://10.1.0.1:5"], ["10.1.0.2/16"], ["tcp://10.1.0.1:5", "loopback://1"]),
        (["tcp://a:1", "tcp://a:1", "tcp://b:1"], [], ["tcp://a:1", "tcp://b:1"]),
    ],
)
def test_networks_of_our_own_come_first(addresses: list[str], own: list[str], expected: list[str]) -> None:
    assert dialing_order(addresses, own) == expected
    assert sorted(split_addresses(join_addresses(expected))) == sorted(expected)


def test_host_of_an_address() -> None:
    assert [host_of(a) for a in ("tcp://10.1.0.1:5", "ucx://[fd00::1]:6")] == ["10.1.0.1", "fd00::1"]


# ------------------------------------------------------------------------------------- dialing


class Scripted:
    """A transport whose addresses do what a table says; `dialed` has each address with its limit.

    Stands in for silent hosts, of which this machine has none without namespaces.
    """

    def __init__(self, table: Mapping[str, Any]) -> None:
        self.table = table
        self.dialed: list[tuple[str, float]] = []

    async def connect(self, address: str, handler: object = None, *, deadline_s: float) -> Any:
        self.dialed.append((address, deadline_s))
        result = self.table[address]
        if isinstance(result, float):  # silent for so long, then answering
            await asyncio.sleep(min(result, deadline_s))
            if result > deadline_s:
                raise DeadlineExpired(address)
            return Named("controller")
        if isinstance(result, MilesError):
            raise result
        return Named(result)


class Named:
    def __init__(self, name: str) -> None:
        self.peer = PeerIdentity(role="x", name=name, host="h", pid=1, attempt=1, term=1)
        self.closed_with = ""

    async def close(self, reason: str = "") -> None:
        self.closed_with = reason


def dial(table: Mapping[str, Any], *, deadline_s: float = 30.0) -> tuple[Any, list[tuple[str, float]]]:
    transport = Scripted(table)

    async def main() -> Any:
        try:
            return await connect_any(transport, list(table), deadline_s=deadline_s, name="controller")  # type: ignore[arg-type]
        except MilesError as error:
            return error

    return asyncio.run(main()), transport.dialed


def test_the_first_that_proves_itself_is_taken() -> None:
    got, dialed = dial({"a": PeerLost("closed"), "b": AuthenticationError("another run"), "c": "controller", "d": "x"})
    assert got.peer.name == "controller"
    assert [address for address, _ in dialed] == ["a", "b", "c"]


def test_another_process_of_the_run_is_not_who_was_looked_for() -> None:
    got, _ = dial({"a": "sandbox-n1", "b": "controller"})
    assert got.peer.name == "controller"
    alone, _ = dial({"a": "sandbox-n1"})
    assert type(alone) is PeerLost and "is sandbox-n1, not controller" in str(alone)


def test_refusals_are_told_at_once_and_a_strangers_tells_most() -> None:
    began = time.monotonic()
    got, dialed = dial({"a": PeerLost("a: closed"), "b": PeerLost("b: closed")})
    assert type(got) is PeerLost and str(got) == "a: closed; b: closed"
    assert len(dialed) == 2
    got, _ = dial({"a": PeerLost("a: closed"), "b": AuthenticationError("b: another secret")})
    assert type(got) is AuthenticationError and str(got) == "b: another secret"
    got, _ = dial({})
    assert type(got) is PeerLost and "without an address" in str(got)
    assert time.monotonic() - began < 20.0


def test_a_fenced_dialer_stops_looking() -> None:
    got, dialed = dial({"a": FencedError("term 2 is here"), "b": "controller"})
    assert type(got) is FencedError
    assert len(dialed) == 1


def test_silent_addresses_are_passed_over_and_get_longer_in_the_next_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multihomed, "FIRST_TRY_S", 0.05)
    got, dialed = dial({"silent": 1e9, "slow": 0.15, "gone": PeerLost("closed")})
    assert got.peer.name == "controller"
    tries = [address for address, _ in dialed]
    assert tries == ["silent", "slow", "gone", "silent", "slow", "silent", "slow"]  # gone isn't asked twice
    assert [limit for _, limit in dialed] == [0.05] * 3 + [0.1] * 2 + [0.2] * 2


def test_the_deadline_holds_for_all_addresses_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multihomed, "FIRST_TRY_S", 0.05)
    got, dialed = dial({"a": 1e9, "b": 1e9}, deadline_s=0.3)
    assert type(got) is DeadlineExpired
    assert "controller at a,b: nothing after 0." in str(got)
    assert sum(limit for _, limit in dialed) <= 0.3
    got, dialed = dial({"a": 1e9}, deadline_s=0.3)  # a single address gets all of it
    assert type(got) is DeadlineExpired and len(dialed) == 1 and 0.29 < dialed[0][1] <= 0.3


def test_one_service_on_several_addresses() -> None:
    async def main() -> None:
        met: list[str] = []

        async def on_connect(endpoint: Endpoint) -> None:
            met.append(endpoint.peer.name)

        binds = ("127.0.0.1", "203.0.113.77", "127.0.0.2")  # the second isn't ours
        service = await listen_on(make("controller"), answer, binds, on_connect=on_connect)
        assert [host_of(a) for a in service.addresses] == ["127.0.0.1", "127.0.0.2"]
        dead = "tcp://127.0.0.3:1"
        stranger = await listen_on(make("controller", secret=new_secret()), answer, ("127.0.0.4",))
        for addresses in ((dead, *service.addresses), (*stranger.addresses, service.addresses[1])):
            endpoint = await connect_any(make("dialer"), addresses, deadline_s=30.0, name="controller")
            assert (await endpoint.call(Heartbeat(), deadline_s=30.0)).message == Ack()
            await endpoint.close()
        assert met == ["dialer", "dialer"]
        await stranger.close()
        await service.close()
        with pytest.raises(PeerLost):
            await connect_any(make("dialer"), service.addresses, deadline_s=30.0)
        with pytest.raises(UserError, match=r"203\.0\.113\.77"):
            await listen_on(make("controller"), answer, binds[1:2])

    asyncio.run(main())


# ------------------------------------------------------------------------------------- two hosts, two networks

SERVER = """
import asyncio, json, sys
from miles_hpc.control.addresses import local_addresses
from miles_hpc.control.multihomed import listen_on
from tests.unit.test_multihomed import answer, make
async def main():
    service = await listen_on(make("controller"), answer, local_addresses())
    print(json.dumps(service.addresses), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await service.close()
asyncio.run(main())
"""

CLIENT = """
import asyncio, json, sys, time
from miles_hpc.control.multihomed import connect_any
from miles_hpc.core.messages import Heartbeat
from tests.unit.test_multihomed import make
async def main():
    began = time.monotonic()
    endpoint = await connect_any(make("dialer"), json.loads(sys.argv[1]), deadline_s=60.0, name="controller")
    await endpoint.call(Heartbeat(), deadline_s=30.0)
    await endpoint.close()
    print(time.monotonic() - began)
asyncio.run(main())
"""


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=30)


@pytest.fixture
def two_hosts() -> Iterator[tuple[str, str]]:
    """Two namespaces with two networks between them: 10.91.0.0/24 (mgt) and 10.92.0.0/24 (ib0)."""
    a, b = f"mh{os.getpid()}a", f"mh{os.getpid()}b"
    try:
        for name in (a, b):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        for net, interface in ((91, "mgt"), (92, "ib0")):
            ip("-n", a, "link", "add", interface, "type", "veth", "peer", "name", interface, "netns", b)
            for number, name in ((1, a), (2, b)):
                ip("-n", name, "addr", "add", f"10.{net}.0.{number}/24", "dev", interface)
                ip("-n", name, "link", "set", interface, "up")
        yield a, b
    finally:
        for name in (a, b):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=30, check=False)


def inside(namespace: str, script: str, *arguments: str) -> subprocess.Popen[str]:
    command = ["ip", "netns", "exec", namespace, sys.executable, "-c", script, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@pytest.mark.netns
@pytest.mark.skipif(os.getuid() != 0, reason="namespaces need root")
def test_a_host_whose_first_network_is_cut_is_reached_over_the_second(two_hosts: tuple[str, str]) -> None:
    a, b = two_hosts
    server = inside(a, SERVER)
    assert server.stdout is not None
    try:
        addresses = json.loads(server.stdout.readline())
        assert sorted(host_of(x) for x in addresses) == ["10.91.0.1", "10.92.0.1"]

        def connect() -> None:
            done, problems = inside(b, CLIENT, json.dumps(addresses)).communicate(timeout=90)
            assert float(done) < 60.0, problems

        connect()
        for cut, net in (("mgt", 91), ("ib0", 92)):
            ip("-n", a, "link", "set", cut, "down")  # refused at once: the dialer's end has lost its carrier, too
            connect()
            ip("-n", a, "link", "set", cut, "up")
            ip("-n", a, "route", "add", "blackhole", f"10.{net}.0.2/32")  # silence: answers don't get out
            connect()
            ip("-n", a, "route", "del", "blackhole", f"10.{net}.0.2/32")
    finally:
        server.communicate("", timeout=30)
