"""The transport contract between hosts: real links that are cut, restored, and deaf in one direction.

Hosts are network namespaces (tools/net_hosts.py); each has one endpoint of either face. What the roster and agents make
of such faults is in test_roster_hosts.py.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from checkpoints.publish import publish_bytes
from miles_hpc.control.auth import new_secret
from tools.detection.stage import Program, start_program
from tools.net_hosts import Host, Network

WAIT_S = 60.0  # a bound against hanging, not an expectation
MIB8 = 8 << 20
HAS_UCX = importlib.util.find_spec("ucxx") is not None

KINDS = [
    "tcp",
    pytest.param("ucx", marks=pytest.mark.skipif(not HAS_UCX, reason="ucxx isn't installed: pip install ucxx-cu12")),
]
FACES = ["asyncio", "blocking"]

pytestmark = [
    pytest.mark.netns,
    pytest.mark.slow,
    pytest.mark.skipif(os.getuid() != 0, reason="network namespaces need root"),
]


# ------------------------------------------------------------------------------------------ two endpoints


@dataclass(frozen=True)
class Pair:
    """A dialer on one host and a listener on another, connected."""

    network: Network
    dialer: Program
    listener: Program
    address: str

    @property
    def near(self) -> Host:
        return self.network.hosts[0]

    @property
    def far(self) -> Host:
        return self.network.hosts[1]

    def connect(self, deadline_s: float = WAIT_S) -> dict[str, Any]:
        return self.dialer.ask(2 * WAIT_S, do="connect", address=self.address, deadline_s=deadline_s)


@contextmanager
def pair(kind: str, face: str, *, ipv6: bool = False) -> Iterator[Pair]:
    with ExitStack() as undo:
        folder = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="far-")))
        network = undo.enter_context(Network(2))
        publish_bytes(folder / "secret", new_secret(), mode=0o600)

        def start(name: str, host: Host) -> Program:
            args = [kind, face, name, str(folder / "secret")]
            program = start_program(name, host, "tests.fakes.far_peer", args, folder / f"{name}.log")
            undo.callback(program.end)
            return program

        dialer, listener = start("dialer", network.hosts[0]), start("listener", network.hosts[1])
        far = network.hosts[1]
        answer = listener.ask(WAIT_S, do="listen", bind=far.address6 if ipv6 else far.address)
        assert not answer["error"], answer
        opened = Pair(network, dialer, listener, answer["address"])
        connected = opened.connect()
        assert not connected["error"], connected
        listener.wait_for("accepted", WAIT_S)
        yield opened


def call(program: Program, n_bytes: int, deadline_s: float = WAIT_S) -> dict[str, Any]:
    return program.ask(2 * WAIT_S, do="call", bytes=n_bytes, deadline_s=deadline_s)


def assert_works(opened: Pair) -> None:
    for program in (opened.dialer, opened.listener):
        for n_bytes in (0, 100, MIB8):
            answer = call(program, n_bytes)
            assert answer.get("intact"), answer


@pytest.mark.parametrize("ipv6", [False, True], ids=["ipv4", "ipv6"])
@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("kind", KINDS)
def test_calls_and_payloads_between_hosts(kind: str, face: str, ipv6: bool) -> None:
    with pair(kind, face, ipv6=ipv6) as opened:
        assert ("[2001:2::2]" in opened.address) == ipv6
        assert_works(opened)


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_short_cut_is_survived_by_what_is_on_its_way(kind: str, face: str) -> None:
    with pair(kind, face) as opened:
        opened.network.cut(opened.far)
        order = opened.dialer.order(do="call", bytes=MIB8, deadline_s=WAIT_S)
        time.sleep(1.5)
        opened.network.restore(opened.far)
        answer = opened.dialer.answer(order, 2 * WAIT_S)
        assert answer.get("intact"), answer
        assert_works(opened)


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fault", ["cut", "no way there", "no way back"])
def test_a_dead_link_makes_nobody_wait_for_longer_than_asked(kind: str, face: str, fault: str) -> None:
    with pair(kind, face) as opened:
        network, near, far = opened.network, opened.near, opened.far
        if fault == "cut":
            network.cut(far)
        elif fault == "no way there":
            network.blackhole(near, to=far)
        else:
            network.blackhole(far, to=near)
        for n_bytes in (0, MIB8):
            answer = call(opened.dialer, n_bytes, deadline_s=1.0)
            assert answer["error"] == "DeadlineExpired", answer
        notified = opened.dialer.ask(2 * WAIT_S, do="notify", bytes=1 << 20, times=1000, deadline_s=2.0)
        assert notified["held_back"], "a gigabyte for a peer that is out of reach was taken into memory"
        for program in (opened.dialer, opened.listener):
            closed = program.ask(WAIT_S, do="close")
            assert not closed["error"], closed
        deadline = time.monotonic() + WAIT_S
        kept = 1 if kind == "ucx" else 0  # the path between two workers stays when connections end
        while (left := opened.dialer.ask(WAIT_S, do="sockets")["open"]) > kept:
            assert time.monotonic() < deadline, f"{left} sockets after the endpoint was closed"
            time.sleep(0.2)
        again = opened.connect(deadline_s=2.0)
        assert again["error"] in ("DeadlineExpired", "PeerLost"), again
        if fault == "cut":
            network.restore(far)
        elif fault == "no way there":
            network.clear_blackhole(near, to=far)
        else:
            network.clear_blackhole(far, to=near)
        n_told = len(opened.listener.told)
        again = opened.connect()
        assert not again["error"], again
        opened.listener.wait_for("accepted", WAIT_S, after=n_told)
        assert_works(opened)


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("kind", KINDS)
def test_pending_calls_end_with_the_endpoint(kind: str, face: str) -> None:
    """What a roster does when heartbeats stay away: it closes, and nobody goes on waiting."""
    with pair(kind, face) as opened:
        order = opened.dialer.order(do="hang", deadline_s=10 * WAIT_S)
        time.sleep(0.3)
        opened.network.cut(opened.far)
        closed = opened.dialer.ask(WAIT_S, do="close")
        assert not closed["error"], closed
        answer = opened.dialer.answer(order, WAIT_S)
        assert answer["error"] == "PeerLost", answer


@pytest.mark.parametrize("last_word", ["nothing", "a frame that is never acknowledged"])
def test_tcp_ends_connections_to_a_host_that_is_out_of_reach_though_nobody_closes_them(last_word: str) -> None:
    """The dialer has more to send than sockets take, the listener nothing, or a few bytes that its socket took after
    the cut: for those the kernel alone would try for a quarter of an hour, and doesn't probe meanwhile. Nobody has a
    deadline, nobody a heartbeat."""
    with pair("tcp", "asyncio") as opened:
        order = opened.dialer.order(do="notify", bytes=1 << 20, times=1000, deadline_s=600.0)
        time.sleep(0.2)
        opened.network.cut(opened.far)
        if last_word != "nothing":
            sent = opened.listener.ask(WAIT_S, do="notify", bytes=0, deadline_s=WAIT_S)
            assert sent["sent"] == 1, sent
        answer = opened.dialer.answer(order, 2 * WAIT_S)
        assert answer["error"] == "PeerLost", answer
        assert "acknowledged nothing for 2" in answer["text"], answer
        assert "endpoint closed" in opened.listener.wait_for("closed", 2 * WAIT_S)["text"]


def test_tcp_keeps_the_connection_to_a_living_host_whose_process_does_not_read() -> None:
    with pair("tcp", "asyncio") as opened:
        opened.listener.process.send_signal(signal.SIGSTOP)
        notified = opened.dialer.ask(2 * WAIT_S, do="notify", bytes=1 << 20, times=1000, deadline_s=45.0)
        assert notified["held_back"], notified
        opened.listener.process.send_signal(signal.SIGCONT)
        assert_works(opened)
        assert not [line for line in opened.dialer.told if line["event"] == "closed"]
