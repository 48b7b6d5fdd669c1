"""Checks of the network below the libraries: ports, interfaces and adapters of all nodes, proxy variables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from miles_hpc.cluster.preflight.contract import Check, Comparison, Context, Finding, Machine, fail, fine, skip, warn
from miles_hpc.cluster.preflight.parse_net import chosen, interfaces, overlaps, parse_hcas, port_range, reserved_ports
from miles_hpc.cluster.preflight.wording import listed, nodes_by_value

__all__ = ["CHECKS", "COMPARISONS"]

_RANGE = "/proc/sys/net/ipv4/ip_local_port_range"
_RESERVED = "/proc/sys/net/ipv4/ip_local_reserved_ports"
_FIRST_USER_PORT = 1024
#: Fewer ports for outgoing connections than this run out on a node with many peers.
_FEW_PORTS = 4096
_PROXIES = ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")


# ------------------------------------------------------------------------------------------------ ports


def _ports(machine: Machine, context: Context) -> Iterator[Finding]:
    try:
        first, last = port_range(machine.read(_RANGE) or "")
    except ValueError:
        yield skip(f"{_RANGE} can't be read")
        return
    ports = context.site.service_ports if context.site is not None else None
    if last - first + 1 < _FEW_PORTS:
        yield warn(
            f"ephemeral ports are {first}-{last} only: listeners of the control layer take theirs from there",
            "ask the site for a wider net.ipv4.ip_local_port_range",
        )
    if ports is None or not ports.last:
        yield fine(f"listeners take ports that the kernel gives, {first}-{last}; the site file names no fixed ones")
        return
    low, high = max(ports.first, _FIRST_USER_PORT), ports.last
    shared = (max(low, first), min(high, last))
    kept = reserved_ports(machine.read(_RESERVED) or "")
    if shared[0] <= shared[1] and not any(a <= shared[0] and shared[1] <= b for a, b in kept):
        yield fail(
            f"service ports {low}-{high} share {shared[0]}-{shared[1]} with the kernel's ephemeral ports "
            f"{first}-{last}: any outgoing connection may sit on a fixed port",
            f"move service_ports in the site file below {first}" if first > low else "move service_ports elsewhere",
        )
        return
    complaints = {port: text for port in (low, high) if (text := machine.can_bind(port))}
    if complaints and context.compute:
        port, text = next(iter(complaints.items()))
        yield warn(f"port {port} of the site's service ports can't be bound: {text}", "look who listens: ss -ltnp")
        return
    yield fine(f"service ports {low}-{high} lie outside the ephemeral ports {first}-{last}")


# ------------------------------------------------------------------------------------------------ proxy


def _proxy(machine: Machine, context: Context) -> Iterator[Finding]:
    environ = context.role_environment
    set_here = [name for name in _PROXIES if environ.get(name)]
    if context.site is not None and context.site.proxy and not set_here:
        set_here = ["the site file's proxy"]
    if not set_here:
        yield fine("no proxy variable is set")
        return
    patterns = environ.get("no_proxy") or environ.get("NO_PROXY") or ""
    inside = ["localhost", "127.0.0.1", machine.host, *_addresses(machine)]
    through = [name for name in inside if not _exempt(name, patterns)]
    what = f"{set_here[0]} is set and no_proxy = '{patterns}'"
    if through:
        yield warn(
            f"{what} doesn't cover {listed(through)}: HTTP between hosts of the run would go through the proxy",
            "export no_proxy with localhost, 127.0.0.1, the nodes' domain or names and their addresses; "
            "Python's clients take no address ranges",
        )
    else:
        yield fine(f"{what} covers this host")


def _addresses(machine: Machine) -> list[str]:
    try:
        return [host for one in interfaces(machine.run("ip", "-j", "address").stdout) if one.up for host in one.hosts]
    except ValueError:
        return []


def _exempt(host: str, patterns: str) -> bool:
    """The rules of urllib: a whole name or a suffix of labels, "*" for all; ports are left out of account."""
    for part in patterns.split(","):
        pattern = part.strip().lower().lstrip(".")
        if pattern == "*" or (pattern and (host.lower() == pattern or host.lower().endswith(f".{pattern}"))):
            return True
        if "*" in pattern and fnmatchcase(host.lower(), pattern):
            return False  # many tools take patterns, Python's don't
    return False


# ------------------------------------------------------------------------------------------------ NICs


def _gather_nics(machine: Machine, context: Context) -> dict[str, Any] | None:
    try:
        found = interfaces(machine.run("ip", "-j", "address").stdout)
    except ValueError:
        found = []
    hcas = parse_hcas(machine.run("ibv_devinfo").stdout)
    names = machine.listing("/sys/class/infiniband")
    if not found and not hcas and not names:
        return None
    return {
        "interfaces": {one.name: list(one.networks) for one in found if one.up and one.networks},
        "addresses": {one.name: list(one.hosts) for one in found if one.up},
        "down": [one.name for one in found if not one.up],
        "overlaps": [list(pair) for pair in overlaps(found)],
        # ibv_devinfo isn't everywhere; without it the names of the adapters are known, not their ports' states.
        "hcas": [one.name for one in hcas if one.active] if hcas else names,
        "host": (machine.read("/proc/sys/kernel/random/boot_id") or "").strip(),
    }


def _compare_nics(values: Mapping[str, Any], context: Context) -> Iterator[Finding]:
    environ = context.role_environment
    sockets = environ.get("NCCL_SOCKET_IFNAME") or (context.site.fabric.bootstrap_interface if context.site else "")
    kinds = (
        ("interfaces", "interfaces", sockets, "NCCL_SOCKET_IFNAME"),
        ("hcas", "RDMA adapters", environ.get("NCCL_IB_HCA", ""), "NCCL_IB_HCA"),
    )
    for key, what, pattern, variable in kinds:
        sets = {node: frozenset(chosen(value[key], pattern)) for node, value in values.items()}
        yield from _differences(sets, what, variable, pattern)
    yield from _subnets(values, sockets, context)


def _differences(sets: Mapping[str, frozenset[str]], what: str, variable: str, pattern: str) -> Iterator[Finding]:
    """Nodes whose set isn't the most frequent one."""
    by_set = nodes_by_value(sets)
    usual = max(by_set, key=lambda names: len(by_set[names]))
    limited = f" of {variable}={pattern}" if pattern else ""
    if len(by_set) == 1:
        yield fine(f"{what}{limited} are the same on all nodes: {listed(sorted(usual))}")
        return
    for names, nodes in by_set.items():
        if names == usual:
            continue
        lack, more = sorted(usual - names), sorted(names - usual)
        parts = [f"lacks {listed(lack)}" if lack else "", f"has {listed(more)} besides" if more else ""]
        common = ",".join(sorted(usual & names)) or "nothing"
        do = f"exclude the node, or set {variable} to what all nodes have: {common}"
        yield fail(f"{what}{limited} differ: {listed(nodes)} {' and '.join(p for p in parts if p)}", do)


def _subnets(values: Mapping[str, Any], pattern: str, context: Context) -> Iterator[Finding]:
    slingshot = context.site is not None and context.site.fabric.kind == "cxi"
    for node, value in values.items():
        # Slingshot's NICs are in one subnet by design.
        pairs = [pair for pair in value["overlaps"] if len(chosen(pair[:2], pattern)) == 2]
        if pairs and not slingshot:
            one, other, network = pairs[0]
            yield warn(
                f"{node}: {one} and {other} are both in {network}: answers may come back on the wrong one",
                "set NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME and control.interface to one interface by its whole name",
            )
            break
    names = sorted({name for value in values.values() for name in chosen(value["interfaces"], pattern)})
    for name in names:
        nets = {node: tuple(value["interfaces"].get(name, ())) for node, value in values.items()}
        if len({net for net in nets.values() if net}) > 1:
            yield warn(
                f"{name} is in {listed(sorted({n for net in nets.values() for n in net}))} on different nodes: "
                "reached by a router, or not at all",
                "name an interface that is in one network on all nodes",
            )
            break
    yield from _twice(values, pattern)


def _twice(values: Mapping[str, Any], pattern: str) -> Iterator[Finding]:
    holders: dict[str, tuple[str, str]] = {}
    for node, value in values.items():
        for name in chosen(value["addresses"], pattern):
            for address in value["addresses"][name]:
                other, boot = holders.setdefault(address, (node, value["host"]))
                if boot != value["host"]:
                    yield fail(
                        f"{other} and {node} both have {address} on {name}: each would answer for the other",
                        "leave this interface out: it isn't the cluster's network",
                    )
                    return


CHECKS = (
    Check(
        name="ports",
        why="a fixed port inside the ephemeral range is taken by somebody's outgoing connection sooner or later",
        source="NeMo-RL ray.sub: GB200 nodes with ephemeral ports 9000-65000; catalyst#716, mlperf-common#9",
        look=_ports,
    ),
    Check(
        name="proxy",
        why="with a proxy variable set, requests between the run's own hosts fail with 503 after hours or days",
        source="slime#1391, slime#1562",
        look=_proxy,
    ),
)
COMPARISONS = (
    Comparison(
        name="nics",
        why="different adapters or overlapping subnets make collectives hang at their first use",
        source="NVIDIA/nccl#286, #302, #634, #1277, #1581, #2428; nccl-tests#219",
        gather=_gather_nics,
        compare=_compare_nics,
        needs=("compute",),
    ),
)
