"""Nodes as hosts of their own: network, hostname, pids, IPC, mounts. Root only.

    host ── bridge mbox<slot> (10.77.<slot>.1) ──┬── mbox<slot>v1 ═══ eth0  node 1 (10.77.<slot>.2)
            slurmctld, munged                    └── mbox<slot>v2 ═══ eth0  node 2 (10.77.<slot>.3)

A node is one `unshare` process; its namespaces have no name and live as long as it does. Ending it is a power cut: the
pid namespace takes every process along, the network namespace takes the cable. The bridge carries the root's path as
its alias, so that nobody removes another box's bridge.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from miles_hpc.core.deadline import Deadline
from miles_hpc.core.errors import UserError
from tools.slurm_box.plan import Node, Plan
from tools.slurm_box.processes import Process, find_binary, spawn, wait_until

__all__ = ["cable_up", "create_bridge", "free_slot", "remove_bridge", "require_root", "set_cable", "start_host"]

#: Slots name subnets 10.77.<slot>.0/24.
SLOTS = range(1, 255)

# bash is the node's pid 1: it waits for its cable, then reaps whatever loses its parent.
_INIT = """
read -r _ || exit 1
hostname "$1"
ip link set lo up && ip addr add "$2/24" dev eth0 && ip link set eth0 up || exit 1
mount --bind "$3/hosts" /etc/hosts && mount -t tmpfs -o mode=1777 tmpfs /dev/shm || exit 1
"$4" -D -N "$1" </dev/null &
daemon=$!
trap 'kill -TERM $daemon' TERM
while kill -0 $daemon 2>/dev/null; do wait $daemon; done
"""


def require_root(what: str) -> None:
    """Raises UserError for an ordinary user."""
    if os.geteuid() != 0:
        raise UserError(f"{what} needs root: network namespaces are created; run as root, or without --netns")


def _ip(*args: str, check: bool = True) -> str:
    result = subprocess.run([find_binary("ip"), *args], capture_output=True, text=True, timeout=20)
    if check and result.returncode:
        raise UserError(f"ip {' '.join(args)}: {result.stderr.strip() or result.returncode}; expected success as root")
    return result.stdout


def _links() -> dict[str, str]:
    """Interfaces of the host: name -> alias."""
    return {link["ifname"]: link.get("ifalias", "") for link in json.loads(_ip("-j", "link", "show") or "[]")}


def free_slot() -> int:
    """First slot whose bridge and subnet aren't in use on this host. Call under the host's lock."""
    links, routes = _links(), _ip("-4", "route", "show") + _ip("-4", "addr", "show")
    for slot in SLOTS:
        if f"mbox{slot}" not in links and f"10.77.{slot}." not in routes:
            return slot
    raise UserError(f"all {len(SLOTS)} subnets 10.77.0.0/16 are in use; expected a free one: end another box first")


def create_bridge(plan: Plan) -> None:
    """Make the bridge unless this box has it already; write the nodes' /etc/hosts."""
    (plan.root / "hosts").write_text(plan.hosts())
    alias = _links().get(plan.bridge)
    if alias is not None:
        if alias != str(plan.root):
            raise UserError(
                f"bridge {plan.bridge} belongs to {alias or 'another program'}; `down` and `up` pick a new one"
            )
        return
    # Packets for the subnet never leave by the default route, not even while the bridge is down.
    _ip("route", "replace", "blackhole", f"{plan.subnet}.0/24", "metric", "4000")
    _ip("link", "add", plan.bridge, "type", "bridge")
    _ip("link", "set", plan.bridge, "alias", str(plan.root))
    _ip("addr", "add", f"{plan.controller_address}/24", "dev", plan.bridge)
    _ip("link", "set", plan.bridge, "up")


def remove_bridge(plan: Plan) -> None:
    """Remove bridge and route if they are this box's."""
    if _links().get(plan.bridge) == str(plan.root):
        _ip("link", "del", plan.bridge, check=False)
        _ip("route", "del", "blackhole", f"{plan.subnet}.0/24", "metric", "4000", check=False)


def start_host(plan: Plan, node: Node, environ: Mapping[str, str], log: Path, record: Path, deadline: Deadline) -> None:
    """Power on: create the namespaces, plug in the cable, start slurmd in them."""
    if node.veth in _links():  # the namespace of a node that just ended is destroyed a moment later
        _ip("link", "del", node.veth, check=False)
    kinds = ["--net", "--uts", "--mount", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]
    init = [find_binary("bash"), "-c", _INIT, "node", node.name, node.address, str(plan.root), find_binary("slurmd")]
    ready, go = os.pipe()
    try:
        process = spawn([find_binary("unshare"), *kinds, *init], environ, log=log, record=record, stdin=ready)
        wait_until(lambda: _has_network(process) or not process.alive, deadline)
        if not process.alive:
            raise UserError(f"node {node.name}: unshare ended at once; expected namespaces (see {log})")
        _ip("link", "add", node.veth, "type", "veth", "peer", "name", "eth0", "netns", str(process.pid))
        _ip("link", "set", node.veth, "master", plan.bridge, "up")
        os.write(go, b"\n")
    finally:
        os.close(ready)
        os.close(go)


def _has_network(process: Process) -> bool:
    try:
        return Path(f"/proc/{process.pid}/ns/net").readlink() != Path("/proc/self/ns/net").readlink()
    except OSError:
        return False


def set_cable(node: Node, up: bool) -> None:
    """Plug the node's cable in, or pull it; processes run on either way."""
    _ip("link", "set", node.veth, "up" if up else "down")


def cable_up(nodes: Sequence[Node]) -> dict[str, bool]:
    """node -> whether its cable is there and plugged in."""
    flags = {link["ifname"]: link.get("flags", []) for link in json.loads(_ip("-j", "link", "show") or "[]")}
    return {node.name: "UP" in flags.get(node.veth, []) for node in nodes}
