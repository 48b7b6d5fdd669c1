"""What `ip`, ibv_devinfo, ucx_info and the kernel tell of the network, as data. Pure."""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = [
    "Hca",
    "Interface",
    "chosen",
    "interfaces",
    "overlaps",
    "parse_hcas",
    "port_range",
    "reserved_ports",
    "ucx_transports",
]

#: Interfaces that lead nowhere else: bridges of containers, tunnels, shapers.
_LOCAL = re.compile(r"(lo|docker|veth|br-|virbr|cni|flannel|cali|ifb|dummy|tun|tap|podman|lxc|vxlan|kube)")


@dataclass(frozen=True)
class Interface:
    """One interface with an address: name, whether it is up, networks as "10.0.0.0/16"."""

    name: str
    up: bool
    hosts: tuple[str, ...]
    networks: tuple[str, ...]


@dataclass(frozen=True)
class Hca:
    """One port of an RDMA adapter."""

    name: str  # "mlx5_0:1"
    active: bool
    link: str  # InfiniBand | Ethernet


def interfaces(text: str) -> list[Interface]:
    """`ip -j address`: interfaces that other hosts may reach, by name. Raises ValueError when it isn't JSON.

    Some versions of iproute2 print empty objects between the others.
    """
    found = []
    for entry in json.loads(text or "[]"):
        name = str(entry.get("ifname", "")).partition("@")[0]
        if not name or _LOCAL.match(name):
            continue
        addresses = [
            ipaddress.ip_interface(f"{info['local']}/{info['prefixlen']}")
            for info in entry.get("addr_info", [])
            if info.get("scope") != "link" and "local" in info
        ]
        # A point-to-point or InfiniBand link may tell UNKNOWN and be up: the flags decide.
        up = {"UP", "LOWER_UP"} <= set(entry.get("flags", []))
        found.append(
            Interface(
                name=name,
                up=up,
                hosts=tuple(str(address.ip) for address in addresses),
                networks=tuple(str(address.network) for address in addresses),
            )
        )
    return sorted(found, key=lambda one: one.name)


def chosen(names: Iterable[str], pattern: str) -> list[str]:
    """Names that NCCL_SOCKET_IFNAME or NCCL_IB_HCA lets through.

    NCCL's rules: a list of prefixes; "=" in front makes them whole names, "^" exclusions, "^=" both; "" takes all.
    Of an HCA "mlx5_0:1" a prefix without port takes every port.
    """
    text = pattern.strip()
    exclude, text = text.startswith("^"), text.removeprefix("^")
    exact, text = text.startswith("="), text.lstrip("=")
    wanted = [part.strip() for part in text.split(",") if part.strip()]
    if not wanted:
        return list(names)

    def hit(name: str) -> bool:
        whole = {name, name.partition(":")[0]}
        return any(part in whole if exact else name.startswith(part) for part in wanted)

    return [name for name in names if hit(name) != exclude]


def overlaps(found: Iterable[Interface]) -> list[tuple[str, str, str]]:
    """Pairs of interfaces of one node whose networks overlap, with the wider network."""
    flat = [(one.name, ipaddress.ip_network(network)) for one in found if one.up for network in one.networks]
    pairs = []
    for i, (name, network) in enumerate(flat):
        for other, beside in flat[i + 1 :]:
            if name != other and network.version == beside.version and network.overlaps(beside):
                pairs.append((name, other, str(min(network, beside, key=lambda one: one.prefixlen))))
    return pairs


def parse_hcas(text: str) -> list[Hca]:
    """`ibv_devinfo`: every port of every adapter, by name."""
    found: list[Hca] = []
    device, port, state = "", "", ""
    for line in text.splitlines():
        key, _, value = (part.strip() for part in line.partition(":"))
        if key == "hca_id":
            device = value
        elif key == "port":
            port, state = value, ""
        elif key == "state":
            state = value
        elif key == "link_layer" and device:
            found.append(Hca(name=f"{device}:{port}", active=state.startswith("PORT_ACTIVE"), link=value))
    return sorted(found, key=lambda one: one.name)


def port_range(text: str) -> tuple[int, int]:
    """/proc/sys/net/ipv4/ip_local_port_range: first and last ephemeral port. Raises ValueError."""
    first, last = (int(part) for part in text.split())
    return first, last


def reserved_ports(text: str) -> list[tuple[int, int]]:
    """/proc/sys/net/ipv4/ip_local_reserved_ports: ranges that the kernel never gives out, "8080,9148-9200"."""
    found = []
    for part in text.replace("\n", "").split(","):
        first, dash, last = part.strip().partition("-")
        if first:
            found.append((int(first), int(last if dash else first)))
    return found


def ucx_transports(text: str) -> dict[str, list[str]]:
    """`ucx_info -d`: devices by transport, "rc_mlx5" -> ["mlx5_0:1"]."""
    found: dict[str, list[str]] = {}
    transport = ""
    for line in text.splitlines():
        key, _, value = (part.strip() for part in line.lstrip("# ").partition(":"))
        if key == "Transport":
            transport = value
        elif key == "Device" and transport:
            found.setdefault(transport, []).append(value)
    return found
