"""The controller's roster and real agents between hosts: losses with evidence, rejoining, fencing, leases.

Hosts are network namespaces (tools/net_hosts.py); `Members` and `Agent` are the product's own, without a run around
them (tools/detection).
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkpoints.publish import publish_bytes
from miles_hpc.core import exits
from miles_hpc.core.config import ControlConfig
from miles_hpc.core.paths import RunPaths
from miles_hpc.core.telemetry import read_events
from tools.detection.stage import Program, Stage

WAIT_S = 60.0  # a bound against hanging, not an expectation
HAS_UCX = importlib.util.find_spec("ucxx") is not None

KINDS = [
    "tcp",
    pytest.param("ucx", marks=pytest.mark.skipif(not HAS_UCX, reason="ucxx isn't installed: pip install ucxx-cu12")),
]

pytestmark = [
    pytest.mark.netns,
    pytest.mark.slow,
    pytest.mark.skipif(os.getuid() != 0, reason="network namespaces need root"),
]

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


def until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.05)


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
        address_file = stage.paths.rendezvous(1) / "controller.json"
        port = json.loads(address_file.read_text())["addresses"][0].rpartition(":")[2]
        half, sound = stage.hosts
        for family, address in (("-4", stage.controller_host.address), ("-6", stage.controller_host.address6)):
            first = ["to", address, "ipproto", "tcp", "dport", port, "lookup", "main"]
            half.ip(family, "rule", "add", "pref", "100", *first)
            half.ip(family, "rule", "add", "pref", "101", "to", address, "blackhole")
        member = stage.start_agent(sound, attempt)
        stage.wait_joined(controller, [member.name])
        stage.start_agent(half, attempt)
        time.sleep(3 * stage.control.lost_after_s)
        assert member.name not in [line["peer"] for line in controller.told if line["event"] == "lost"]
        assert controller.ask(WAIT_S, call=member.name, deadline_s=1.0)["error"] == "DeadlineExpired"


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


@pytest.mark.parametrize("kind", KINDS)
def test_hosts_that_have_ipv6_only(kind: str) -> None:
    with Stage(kind, 1, PATIENT) as stage:
        for host in (stage.controller_host, *stage.hosts):
            host.ip("addr", "del", f"{host.address}/24", "dev", "eth0")
        attempt = stage.new_attempt()
        controller = stage.start_controller(attempt)
        agent = stage.start_agent(stage.hosts[0], attempt)
        stage.wait_joined(controller, [agent.name])
        agent.wait_for("joined", WAIT_S)
        n_told = len(controller.told)
        stage.network.cut(stage.hosts[0])
        assert lost(controller, agent.name)["evidence"].startswith("no heartbeat for 2.")
        stage.network.restore(stage.hosts[0])
        joined(controller, agent.name, after=n_told)
