"""How long a loss stays unnoticed, measured on the kernel's own network: each fault N times, on each transport.

    python -m tools.bench_detection [--quick] [--json] [--repeats 50] [--kinds tcp,ucx] [--faults kill,stop,cut,lease]

| fault | what is done | measured until |
|---|---|---|
| kill | kill -9 of an agent | the controller's verdict "lost" |
| stop | SIGSTOP of an agent | likewise |
| cut | the cable of its host is pulled | likewise |
| mute, deaf | its packets to the controller vanish, or the controller's to it | likewise |
| lease | the cable is pulled; in rounds of their own the controller is stopped instead | its child has been ended |

The controller is `Members` (miles_hpc/controller/members.py) with the intervals of the product's defaults, agents are
the real ones (miles_hpc/control/agent.py), each on a network namespace of its own. Several agents are faulted in one
round, each at a random moment of its heartbeat. Times count from right before the fault. Needs root; what can't be
measured is reported with its reason.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import random
import re
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from miles_hpc.control.opening import open_carrier
from miles_hpc.core.config import ControlConfig
from miles_hpc.core.errors import MilesError, UserError
from tools.detection.stage import Program, Stage
from tools.net_hosts import Host

__all__ = ["FAULTS", "Arm", "Crew", "Fault", "measure"]

KINDS = ("tcp", "ucx")
_SETTLE_S = 1.5  # heartbeats flow again before the next round
_WAIT_S = 60.0


@dataclass(frozen=True)
class Fault:
    """`bound_s` gives what is promised. `until` is the line that ends the measurement: the controller's "lost" or the
    agent's "closed"."""

    name: str
    title: str
    bound_s: Callable[[ControlConfig], float]
    until: str = "lost"


def _five(control: ControlConfig) -> float:
    return 5.0


def _lease(control: ControlConfig) -> float:
    return control.lease_s + 1.0  # a second for ending the child, which is part of what is measured


FAULTS = {
    fault.name: fault
    for fault in (
        Fault("kill", "kill -9", lambda control: 1.0),
        Fault("stop", "SIGSTOP", _five),
        Fault("cut", "link cut", _five),
        Fault("mute", "not heard, but hears", _five),
        # Its last heartbeat arrives up to an interval after the fault; only the answer doesn't.
        Fault("deaf", "heard, but doesn't hear", lambda c: c.lost_after_s + c.heartbeat_interval_s),
        Fault("lease-cut", "lease: cut off", _lease, until="closed"),
        Fault("lease-stop", "lease: controller stopped", _lease, until="closed"),
    )
}
_GROUPS = {"lease": ("lease-cut", "lease-stop")}


@dataclass
class Arm:
    """All times of one fault on one transport, in seconds, with the evidence that the verdicts gave."""

    kind: str
    fault: Fault
    bound_s: float
    seconds: list[float] = field(default_factory=list)
    evidence: Counter[str] = field(default_factory=Counter)

    def summary(self) -> dict[str, Any]:
        ordered = sorted(self.seconds)
        return {
            "transport": self.kind,
            "fault": self.fault.name,
            "n": len(ordered),
            "median_s": round(statistics.median(ordered), 3),
            "p90_s": round(ordered[-(-9 * len(ordered) // 10) - 1], 3),
            "max_s": round(ordered[-1], 3),
            "bound_s": self.bound_s,
            "within": ordered[-1] <= self.bound_s,
            "evidence": dict(self.evidence),
            "seconds": [round(s, 4) for s in self.seconds],
        }


class Crew:
    """The controller and one agent per host; an agent that has ended is replaced by a newer incarnation."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._attempt = stage.new_attempt()
        self._starts = 0
        self.controller = stage.start_controller(self._attempt)
        self.agents: dict[Host, Program] = {}
        self.surprises = 0  # losses of members that nothing was done to
        self._gather(stage.hosts, 0)

    def _gather(self, hosts: Sequence[Host], since: int) -> None:
        """Until the controller tells, from its line `since` on, that an agent of each of the hosts has joined."""
        end = time.monotonic() + 2 * _WAIT_S
        missing = list(hosts)
        while missing:
            for host in missing:
                agent = self.agents.get(host)
                if agent is None or agent.process.poll() is not None:
                    self._starts += 1
                    self.agents[host] = self._stage.start_agent(host, self._attempt, incarnation=self._starts)
            here = {line["peer"] for line in self.controller.told[since:] if line["event"] == "joined"}
            missing = [host for host in missing if self.agents[host].name not in here]
            if missing and time.monotonic() > end:
                late = self.agents[missing[0]]
                raise MilesError(f"{late.name} didn't join: {late.log_tail() or late.told[-5:]}")
            time.sleep(0.05)

    def round(self, fault: Fault, n: int, rng: random.Random) -> list[tuple[float, str]]:
        """Inject the fault into `n` agents, wait until it is noticed, repair it. Returns (seconds, evidence) each."""
        time.sleep(_SETTLE_S)
        everybody = fault.name == "lease-stop"  # who can't be spared when it is the controller that is stopped
        hosts = self._stage.hosts if everybody else rng.sample(self._stage.hosts, n)
        agents = [self.agents[host] for host in hosts]
        since = len(self.controller.told)
        at = self._inject(fault, hosts, rng)
        if fault.until == "closed":
            found = [_end_of(agent) for agent in agents]
        else:
            found = [self._loss_of(agent, since) for agent in agents]
        repaired = len(self.controller.told)
        self._repair(fault, hosts)
        for agent in agents:  # after a lease nobody has waited for the controller's verdict yet
            self._loss_of(agent, since)
        lost = [line["peer"] for line in self.controller.told[since:] if line["event"] == "lost"]
        self.surprises += len(lost) - len(agents)
        self._gather(hosts, repaired)
        times = [(moment - at[host], evidence) for host, (moment, evidence) in zip(hosts, found, strict=True)]
        return times[:n]

    def _loss_of(self, agent: Program, since: int) -> tuple[float, str]:
        line = self.controller.wait_for("lost", _WAIT_S, after=since, where=lambda told: told["peer"] == agent.name)
        return line["at"], line["evidence"]

    def _inject(self, fault: Fault, hosts: Sequence[Host], rng: random.Random) -> dict[Host, float]:
        """Returns when each host was faulted."""
        if fault.name == "lease-stop":
            now = time.monotonic()
            self.controller.process.send_signal(signal.SIGSTOP)
            return dict.fromkeys(hosts, now)
        start = time.monotonic()
        interval_s = self._stage.control.heartbeat_interval_s
        at = {}
        for delay_s, host in sorted(((rng.uniform(0.0, interval_s), host) for host in hosts), key=lambda plan: plan[0]):
            time.sleep(max(0.0, start + delay_s - time.monotonic()))
            at[host] = time.monotonic()
            self._break(fault, host)
        return at

    def _break(self, fault: Fault, host: Host) -> None:
        network, process = self._stage.network, self.agents[host].process
        match fault.name:
            case "kill":
                process.send_signal(signal.SIGKILL)
            case "stop":
                process.send_signal(signal.SIGSTOP)
            case "cut" | "lease-cut":
                network.cut(host)
            case "mute":
                network.blackhole(host, to=self._stage.controller_host)
            case "deaf":
                network.blackhole(self._stage.controller_host, to=host)

    def _repair(self, fault: Fault, hosts: Sequence[Host]) -> None:
        if fault.name == "lease-stop":
            self.controller.process.send_signal(signal.SIGCONT)
            return
        network = self._stage.network
        for host in hosts:
            match fault.name:
                case "kill":
                    self.agents[host].process.wait(_WAIT_S)
                case "stop":
                    self.agents[host].process.send_signal(signal.SIGCONT)
                case "cut" | "lease-cut":
                    network.restore(host)
                case "mute":
                    network.clear_blackhole(host, to=self._stage.controller_host)
                case "deaf":
                    network.clear_blackhole(self._stage.controller_host, to=host)


def _end_of(agent: Program) -> tuple[float, str]:
    """When an agent had ended its child, and why it says that it did."""
    agent.process.wait(_WAIT_S)
    expired = agent.wait_for("expired", _WAIT_S)["text"].replace(agent.name, "AGENT")
    return agent.wait_for("closed", _WAIT_S)["at"], re.sub(r"\d+\.\d+ s", "N s", expired)


def measure(
    kind: str, faults: Sequence[Fault], repeats: int, at_once: int, control: ControlConfig, seed: int = 0
) -> tuple[list[Arm], int]:
    """All faults on one transport. Returns the arms, and how many members were declared lost without a fault."""
    rng = random.Random(seed)
    arms = []
    with Stage(kind, min(at_once, repeats), control) as stage:
        crew = Crew(stage)
        for fault in faults:
            arm = Arm(kind, fault, fault.bound_s(control))
            while len(arm.seconds) < repeats:
                n = min(at_once, repeats - len(arm.seconds))
                for seconds, evidence in crew.round(fault, n, rng):
                    arm.seconds.append(seconds)
                    arm.evidence[evidence] += 1
                done = f"{len(arm.seconds)} of {repeats}, longest {max(arm.seconds):.2f} s"
                print(f"bench_detection: {kind} {fault.name}: {done}", file=sys.stderr, flush=True)
            arms.append(arm)
        return arms, crew.surprises


def conditions(args: argparse.Namespace, control: ControlConfig) -> dict[str, Any]:
    """What the numbers depend on."""
    cpu = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), ":?")
    ucx = [d for d in ("ucxx-cu12", "ucxx-cu13", "libucx-cu12") if _version(d)]
    return {
        "machine": f"{os.cpu_count()} cores, {cpu.split(':', 1)[1].strip()}",
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "ucx": ", ".join(f"{d} {_version(d)}" for d in ucx) or "not installed",
        "hosts": "network namespaces of one machine, veth and a bridge; UCX over TCP",
        "repeats": args.repeats,
        "faulted_at_once": min(args.at_once, args.repeats),
        "heartbeat_interval_s": control.heartbeat_interval_s,
        "lost_after_s": control.lost_after_s,
        "lease_s": control.lease_s,
        "load_average_at_start": round(os.getloadavg()[0], 2),
    }


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def print_table(result: dict[str, Any]) -> None:
    """The arms as a table for people, with the conditions below it."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Seconds from a fault until it is noticed")
    for heading in ("transport", "fault", "n", "median", "p90", "max", "promised", "kept"):
        table.add_column(heading, justify="left" if heading in ("transport", "fault") else "right")
    for arm in result["arms"]:
        times = [f"{arm[key]:.3f}" for key in ("median_s", "p90_s", "max_s")]
        kept = "yes" if arm["within"] else "NO"
        row = [arm["transport"], FAULTS[arm["fault"]].title, str(arm["n"]), *times, f"{arm['bound_s']:.1f}", kept]
        table.add_row(*row)
    console = Console()
    console.print(table)
    for key, value in result["conditions"].items():
        console.print(f"{key.replace('_', ' ')}: {value}", highlight=False)
    for kind, reason in result["not_measured"].items():
        console.print(f"{kind}: not measured: {reason}", highlight=False)
    console.print(f"members declared lost without a fault: {result['summary']['lost_without_fault']}")


def _obstacle(kind: str) -> str:
    """Why a transport can't be measured here; empty when it can."""
    if os.geteuid() != 0:
        return "network namespaces are made by root only"
    try:
        open_carrier(kind)
    except UserError as error:
        return str(error)
    return ""


def _chosen(text: str, known: Sequence[str], what: str) -> list[str]:
    names = [name for part in text.split(",") if part for name in _GROUPS.get(part, (part,))]
    for name in names:
        if name not in known:
            raise UserError(f"{what} {name!r}: expected some of {', '.join((*known, *_GROUPS))}")
    return names


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench_detection", description=__doc__.split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="8 repeats of kill, stop and cut")
    parser.add_argument("--repeats", type=int, default=50, help="of each fault on each transport")
    parser.add_argument("--at-once", type=int, default=25, help="agents that are faulted in one round")
    parser.add_argument("--kinds", default="tcp,ucx", help="transports: some of tcp, ucx")
    parser.add_argument("--faults", default="kill,stop,cut,lease", help=f"some of {', '.join(FAULTS)}, lease")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    args = parser.parse_args()
    if args.quick:
        args.repeats, args.faults = 8, "kill,stop,cut"
    control = ControlConfig()
    try:
        if min(args.repeats, args.at_once) < 1:
            raise UserError("--repeats and --at-once: expected 1 or more")
        kinds = _chosen(args.kinds, KINDS, "transport")
        faults = [FAULTS[name] for name in _chosen(args.faults, tuple(FAULTS), "fault")]
        result: dict[str, Any] = {"conditions": conditions(args, control), "arms": [], "not_measured": {}}
        surprises = 0
        for kind in kinds:
            if reason := _obstacle(kind):
                result["not_measured"][kind] = reason
                continue
            arms, unfaulted = measure(kind, faults, args.repeats, args.at_once, control, args.seed)
            result["arms"] += [arm.summary() for arm in arms]
            surprises += unfaulted
    except UserError as error:
        print(f"bench_detection: error: {error}", file=sys.stderr)
        return 2
    result["conditions"]["load_average_at_end"] = round(os.getloadavg()[0], 2)
    result["summary"] = {
        "lost_without_fault": surprises,
        **{f"{a['fault']}_max_s_{a['transport']}": a["max_s"] for a in result["arms"]},
    }
    if args.json:
        print(json.dumps(result))
    else:
        print_table(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
