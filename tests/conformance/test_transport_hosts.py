"""The transport contract between hosts: real links that are cut, restored, and deaf in one direction.

Hosts are network namespaces (tools/net_hosts.py). Part one: two endpoints of either face. Part two: the controller's
roster and real agents under their lease.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from checkpoints.publish import publish_bytes
from miles_hpc.control.auth import new_secret
from miles_hpc.core import exits
from miles_hpc.core.config import ControlConfig
from miles_hpc.core.paths import RunPaths
from miles_hpc.core.telemetry import read_events
from tools.detection.stage import Program, Stage, start_program
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
            assert answer["intact"], answer


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
        assert answer["intact"], answer
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


def test_tcp_ends_connections_to_a_host_that_is_out_of_reach_though_nobody_closes_them() -> None:
    """One side has more to send than sockets take, the other one is idle. Nobody has a deadline, nobody a heartbeat."""
    with pair("tcp", "asyncio") as opened:
        order = opened.dialer.order(do="notify", bytes=1 << 20, times=1000, deadline_s=600.0)
        time.sleep(0.2)
        opened.network.cut(opened.far)
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


# ------------------------------------------------------------------------------------------ roster and lease

#: Quicker than the defaults; what is short of them is only waiting time.
QUICK = ControlConfig(heartbeat_interval_s=0.5, lost_after_s=2.0, lease_s=5.0, connect_deadline_s=5.0)
PATIENT = ControlConfig(heartbeat_interval_s=0.5, lost_after_s=2.0, lease_s=60.0, connect_deadline_s=5.0)


def lost(controller: Program, name: str, after: int = 0) -> dict[str, Any]:
    return controller.wait_for("lost", WAIT_S, after=after, where=lambda line: line["peer"] == name)


def joined(controller: Program, name: str, after: int = 0, incarnation: int = 0) -> dict[str, Any]:
    def wanted(line: dict[str, Any]) -> bool:
        return line["peer"] == name and line["incarnation"] == incarnation

    return controller.wait_for("joined", WAIT_S, after=after, where=wanted)


def verdicts(stage: Stage, name: str, peer: str) -> list[str]:
    """The evidence of all verdicts of this kind about this peer, in their order."""
    events = read_events(stage.paths.events)
    return [e["evidence"] for e in events if e["kind"] == "verdict" and (e["name"], e["peer"]) == (name, peer)]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def exit_code(agent: Program) -> int:
    """Wait for an agent's end; its child must have ended as well."""
    try:
        code = agent.process.wait(WAIT_S)
    except subprocess.TimeoutExpired:
        pytest.fail(f"{agent.name} runs on; it told {agent.told[-5:]}")
    assert not alive(agent.wait_for("child", WAIT_S)["pid"]), "the agent's child has outlived it"
    return code


@pytest.mark.parametrize("kind", KINDS)
def test_a_host_that_is_cut_off_is_lost_with_evidence_and_joins_again(kind: str) -> None:
    """With the times of the product: lost by missed heartbeats, calls fail, children stay, the link comes back."""
    with Stage(kind, 2, ControlConfig(lease_s=60.0)) as stage:
        attempt = stage.new_attempt()
        controller = stage.start_controller(attempt)
        cut_off, other = (stage.start_agent(host, attempt) for host in stage.hosts)
        stage.wait_joined(controller, [cut_off.name, other.name])
        child = cut_off.wait_for("child", WAIT_S)["pid"]
        pending = controller.order(call=cut_off.name, deadline_s=WAIT_S)
        cut_off.wait_for("asked", WAIT_S)
        n_told = len(controller.told)
        at = time.monotonic()
        stage.network.cut(stage.hosts[0])
        verdict = lost(controller, cut_off.name)
        assert verdict["evidence"].startswith("no heartbeat for 4."), verdict
        assert verdict["at"] - at > 3.0, "declared lost before its heartbeats were due"
        answer = controller.answer(pending, WAIT_S)
        assert answer["error"] == "PeerLost" and "no heartbeat" in answer["text"], answer
        assert controller.ask(WAIT_S, call=cut_off.name, deadline_s=1.0)["error"] == "PeerLost"
        stage.network.restore(stage.hosts[0])
        joined(controller, cut_off.name, after=n_told)
        assert verdicts(stage, "rejoined", cut_off.name) == [f"was lost: {verdict['evidence']}"]
        assert alive(child) and cut_off.wait_for("child", WAIT_S)["pid"] == child
        time.sleep(2 * stage.control.lost_after_s)
        assert [line for line in controller.told if line["event"] == "lost"] == [verdict]


@pytest.mark.parametrize("direction", ["to the controller", "from the controller"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_link_that_is_dead_in_one_direction_is_a_loss(kind: str, direction: str) -> None:
    with Stage(kind, 1, PATIENT) as stage:
        attempt = stage.new_attempt()
        controller = stage.start_controller(attempt)
        agent = stage.start_agent(stage.hosts[0], attempt)
        stage.wait_joined(controller, [agent.name])
        agent.wait_for("joined", WAIT_S)
        ends = [stage.hosts[0], stage.controller_host]
        deaf_to, deaf = ends if direction == "to the controller" else ends[::-1]
        n_told = len(controller.told)
        stage.network.blackhole(deaf_to, to=deaf)
        lost(controller, agent.name)
        agent.wait_for("left", WAIT_S)
        stage.network.clear_blackhole(deaf_to, to=deaf)
        joined(controller, agent.name, after=n_told)
        (evidence,) = verdicts(stage, "lost", agent.name)
        assert evidence.startswith(("no heartbeat for 2.", "endpoint closed: ")), evidence


@pytest.mark.parametrize("kind", KINDS)
def test_whoever_was_replaced_while_cut_off_is_refused_and_ends(kind: str) -> None:
    with Stage(kind, 1, PATIENT, spare_hosts=1) as stage:
        attempt = stage.new_attempt()
        controller = stage.start_controller(attempt)
        old = stage.start_agent(stage.hosts[0], attempt)
        stage.wait_joined(controller, [old.name])
        stage.network.cut(stage.hosts[0])
        lost(controller, old.name)
        new = stage.start_agent(stage.spare_hosts[0], attempt, name=old.name, incarnation=1)
        joined(controller, new.name, incarnation=1)
        n_told = len(controller.told)
        stage.network.restore(stage.hosts[0])
        assert exit_code(old) == exits.FENCED
        assert "incarnation 0 of term 1 is older than incarnation 1" in old.wait_for("fenced", WAIT_S)["text"]
        assert new.process.poll() is None
        time.sleep(2 * stage.control.lost_after_s)
        late = controller.told[n_told:]
        assert not [line for line in late if line.get("incarnation") == 0 or line["event"] == "lost"]
        (evidence,) = verdicts(stage, "refused", old.name)
        assert "is older than incarnation 1" in evidence


@pytest.mark.parametrize("kind", KINDS)
def test_a_newer_start_of_a_living_member_takes_its_place(kind: str) -> None:
    with Stage(kind, 1, PATIENT, spare_hosts=1) as stage:
        attempt = stage.new_attempt()
        controller = stage.start_controller(attempt)
        old = stage.start_agent(stage.hosts[0], attempt)
        stage.wait_joined(controller, [old.name])
        new = stage.start_agent(stage.spare_hosts[0], attempt, name=old.name, incarnation=1)
        joined(controller, new.name, incarnation=1)
        assert exit_code(old) == exits.FENCED
        assert new.process.poll() is None
        (evidence,) = verdicts(stage, "superseded", old.name)
        assert evidence.startswith("incarnation 1 joined from h3"), evidence


@pytest.mark.parametrize("fault", ["cut", "stopped controller"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_agent_without_a_controller_ends_with_its_lease(kind: str, fault: str) -> None:
    with Stage(kind, 1, QUICK) as stage:
        attempt = stage.new_attempt()
        controller = stage.start_controller(attempt)
        agent = stage.start_agent(stage.hosts[0], attempt)
        stage.wait_joined(controller, [agent.name])
        child = agent.wait_for("child", WAIT_S)["pid"]
        time.sleep(1.0)
        at = time.monotonic()
        if fault == "cut":
            stage.network.cut(stage.hosts[0])
        else:
            controller.process.send_signal(signal.SIGSTOP)
        time.sleep(2.0)
        assert alive(child), "ended before its lease was over"
        assert exit_code(agent) == exits.FAILED
        assert agent.wait_for("closed", WAIT_S)["at"] - at > QUICK.lease_s - QUICK.heartbeat_interval_s - 0.5
        assert "lease of rollout-h2" in agent.wait_for("expired", WAIT_S)["text"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_job_that_was_started_elsewhere_fences_the_one_that_was_cut_off(kind: str) -> None:
    with Stage(kind, 1, PATIENT, spare_hosts=1) as stage:
        first = stage.new_attempt()
        controller = stage.start_controller(first)
        agent = stage.start_agent(stage.hosts[0], first)
        stage.wait_joined(controller, [agent.name])
        stage.network.cut(stage.hosts[0])
        lost(controller, agent.name)
        controller.end()
        stage.start_controller(stage.new_attempt(), host=stage.spare_hosts[0])
        stage.network.restore(stage.hosts[0])
        assert exit_code(agent) == exits.FENCED
        assert "attempt 1 is over" in agent.wait_for("fenced", WAIT_S)["text"]
        assert len(verdicts(stage, "fenced", agent.name)) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_leftover_whose_file_system_shows_it_an_old_world_is_fenced_by_the_handshake(kind: str) -> None:
    """Its run directory is a copy from before the restart, but the address in it leads to the newer controller."""
    with Stage(kind, 1, PATIENT, spare_hosts=1) as stage:
        first = stage.new_attempt()
        controller = stage.start_controller(first)
        view = RunPaths(stage.paths.root / "old-view")
        shutil.copytree(stage.paths.root, view.root, ignore=shutil.ignore_patterns("old-view", "*.log"))
        agent = stage.start_agent(stage.hosts[0], first, paths=view)
        stage.wait_joined(controller, [agent.name])
        stage.network.cut(stage.hosts[0])
        lost(controller, agent.name)
        controller.end()
        second = stage.start_controller(stage.new_attempt(), host=stage.spare_hosts[0])
        newer = (stage.paths.rendezvous(2) / "controller.json").read_text()
        address = view.rendezvous(1) / "controller.json"
        publish_bytes(address, newer.replace('"attempt":2,"term":2', '"attempt":1,"term":1').encode())
        stage.network.restore(stage.hosts[0])
        assert exit_code(agent) == exits.FENCED
        assert "attempt 2" in agent.wait_for("fenced", WAIT_S)["text"]
        assert not any(line["event"] in ("joined", "message") for line in second.told)


@pytest.mark.parametrize("kind", KINDS)
def test_many_that_fall_silent_together_are_each_declared_lost(kind: str) -> None:
    n = 6
    with Stage(kind, n, PATIENT) as stage:
        attempt = stage.new_attempt()
        controller = stage.start_controller(attempt)
        agents = [stage.start_agent(host, attempt) for host in stage.hosts]
        stage.wait_joined(controller, [agent.name for agent in agents])
        n_told = len(controller.told)
        for agent in agents:
            agent.process.send_signal(signal.SIGSTOP)
        found = [lost(controller, agent.name, after=n_told) for agent in agents]
        assert all(verdict["evidence"].startswith("no heartbeat for 2.") for verdict in found), found
        for agent in agents:
            agent.process.send_signal(signal.SIGCONT)
        for agent in agents:
            joined(controller, agent.name, after=n_told)


@pytest.mark.parametrize("kind", KINDS)
def test_a_peer_that_only_its_first_connection_reaches_holds_up_nobody(kind: str) -> None:
    """It can prove who it is, but whatever else UCX opens between the two gets no answer."""
    with Stage(kind, 2, PATIENT) as stage:
        attempt = stage.new_attempt()
        controller = stage.start_controller(attempt)
        port = json.loads((stage.paths.rendezvous(1) / "controller.json").read_text())["addresses"][0].rpartition(":")[2]
        half, sound = stage.hosts
        for family, address in (("-4", stage.controller_host.address), ("-6", stage.controller_host.address6)):
            first = ["to", address, "ipproto", "tcp", "dport", port, "lookup", "main"]
            half.ip(family, "rule", "add", "pref", "100", *first)
            half.ip(family, "rule", "add", "pref", "101", "to", address, "blackhole")
        member = stage.start_agent(sound, attempt)
        stage.wait_joined(controller, [member.name])
        stage.start_agent(half, attempt)
        time.sleep(3 * stage.control.lost_after_s)
        assert [line["peer"] for line in controller.told if line["event"] == "lost" and line["peer"] == member.name] == []
        assert controller.ask(WAIT_S, call=member.name, deadline_s=1.0)["error"] == "DeadlineExpired"


def until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.05)


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_agent_takes_its_child_along_and_is_lost_by_its_socket(kind: str) -> None:
    with Stage(kind, 1, PATIENT) as stage:
        attempt = stage.new_attempt()
        controller = stage.start_controller(attempt)
        agent = stage.start_agent(stage.hosts[0], attempt)
        stage.wait_joined(controller, [agent.name])
        child = agent.wait_for("child", WAIT_S)["pid"]
        agent.process.kill()
        assert lost(controller, agent.name)["evidence"].startswith("endpoint closed: ")
        until(lambda: not alive(child), "the child of a killed agent lives on")
