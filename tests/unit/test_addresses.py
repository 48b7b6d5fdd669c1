"""Which address a process binds and publishes: the rules on tables, then in network namespaces made for them."""

from __future__ import annotations

import ipaddress
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from miles_hpc.control.addresses import (
    InterfaceAddress,
    choose_addresses,
    host_addresses,
    interface_names,
    local_address,
    local_addresses,
    source_address,
)
from miles_hpc.core.errors import UserError

ROOT = Path(__file__).parents[2]


def at(interface: str, address: str, **fields: bool) -> InterfaceAddress:
    return InterfaceAddress(interface=interface, address=ipaddress.ip_interface(address), **fields)


LO = [at("lo", "127.0.0.1/8"), at("lo", "::1/128")]
ETH = [at("eth0", "10.1.0.3/16"), at("eth0", "10.1.0.4/16", secondary=True), at("eth0", "fe80::3/64")]
IB = [at("ib0", "192.168.7.3/24"), at("ib0", "fd00:7::3/64")]
SLINGSHOT = [at(f"hsn{i}", f"10.150.0.{i + 1}/16") for i in (10, 2, 0)]
V6 = [at("eth1", "fe80::9/64"), at("eth1", "2001:db8:5::8/64", secondary=True), at("eth1", "2001:db8:5::9/64")]
HOST = [*LO, *ETH, *IB]


@pytest.mark.parametrize(
    ("found", "preferred", "expected"),
    [
        (LO, [], ["127.0.0.1"]),
        (LO[1:], [], ["::1"]),
        ([], [], ["127.0.0.1"]),
        (LO, ["127.0.0.1"], ["127.0.0.1"]),
        ([*LO, *ETH], [], ["10.1.0.3"]),
        (HOST, [], ["10.1.0.3", "192.168.7.3"]),
        (HOST, ["192.168.7.3"], ["192.168.7.3", "10.1.0.3"]),
        (HOST, ["", "10.1.0.3", ""], ["10.1.0.3", "192.168.7.3"]),
        (HOST, ["10.1.0.4"], ["10.1.0.4", "192.168.7.3"]),  # the route says that the alias is the one to leave by
        (HOST, ["fd00:7::3", "10.1.0.3"], ["fd00:7::3", "10.1.0.3"]),  # the peer has been reached by IPv6
        (HOST, ["127.0.0.1"], ["10.1.0.3", "192.168.7.3"]),  # the peer is on this host: others aren't
        (HOST, ["172.16.0.1"], ["10.1.0.3", "192.168.7.3"]),  # gone since the route was asked for
        ([*LO, *V6], [], ["2001:db8:5::9"]),
        ([*LO, at("eth0", "fe80::3/64")], [], ["127.0.0.1"]),
        ([*LO, at("docker0", "172.17.0.1/16", up=False), *IB], [], ["192.168.7.3"]),
        ([*LO, at("eth0", "fd00::1/64", usable=False)], [], ["127.0.0.1"]),
        ([*LO, at("eth0", "169.254.3.4/16"), *IB], [], ["192.168.7.3"]),  # IPv4's link-local addresses (RFC 3927)
    ],
)
def test_without_a_name_the_routes_decide(
    found: list[InterfaceAddress], preferred: list[str], expected: list[str]
) -> None:
    assert list(choose_addresses(found, preferred=preferred)) == expected


@pytest.mark.parametrize(
    ("interface", "expected"),
    [
        ("ib0", ["192.168.7.3"]),
        ("lo", ["127.0.0.1"]),
        ("ib0,eth0", ["192.168.7.3", "10.1.0.3"]),
        (" eth0 , ib0 ", ["10.1.0.3", "192.168.7.3"]),
        ("ib*,ib0,e?h0", ["192.168.7.3", "10.1.0.3"]),
        ("hsn*", ["10.150.0.1", "10.150.0.3", "10.150.0.11"]),
        ("nosuch0,ib0", ["192.168.7.3"]),
        ("eth1", ["2001:db8:5::9"]),
        ("*", ["10.1.0.3", "2001:db8:5::9", "10.150.0.1", "10.150.0.3", "10.150.0.11", "192.168.7.3", "127.0.0.1"]),
    ],
)
def test_a_name_or_pattern_decides(interface: str, expected: list[str]) -> None:
    assert list(choose_addresses([*HOST, *SLINGSHOT, *V6], interface, preferred=["10.150.0.3"])) == expected


@pytest.mark.parametrize(
    ("interface", "message"),
    [
        ("nosuch0", r"^interface 'nosuch0': no interface .* such a name; this host has lo 127.0.0.1, eth0 10.1.0.3"),
        ("eth9", r"eth9 has only the link-local address fe80::9, which other hosts can't use; this host has lo"),
        ("ib1", r"ib1 is down or has no carrier; this host has .*eth0 10.1.0.3: name one of these in control.interf"),
        ("eth8", r"eth8 has no address that is ready for use"),
        ("eth9,ib1", r"eth9 has only .*; ib1 is down"),
    ],
)
def test_a_name_that_gives_no_address_is_refused_in_one_line(interface: str, message: str) -> None:
    found = [
        *LO,
        *ETH,
        at("eth9", "fe80::9/64"),
        at("ib1", "10.3.0.1/16", up=False),
        at("eth8", "fd00::8/64", usable=False),
    ]
    with pytest.raises(UserError, match=message) as caught:
        choose_addresses(found, interface)
    assert "\n" not in str(caught.value)


# ------------------------------------------------------------------------------------- this machine


def test_loopback_is_found_and_the_default_can_be_bound() -> None:
    assert "127.0.0.1" in [one.host for one in host_addresses() if one.interface == "lo"]
    assert local_address("lo") == "127.0.0.1"
    assert interface_names("lo") == ("lo",)
    for address in local_addresses():
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family) as probe:
            probe.bind((address, 0))


@pytest.mark.parametrize("peer", ["", "no-such-host.invalid", "localhost", "999.1.1.1", "fe80::1"])
def test_no_way_to_what_is_no_numeric_address(peer: str) -> None:
    assert source_address(peer) == ""


def test_the_host_of_srun_is_asked_for_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def look(peer: str) -> str:
        asked.append(peer)
        return ""

    monkeypatch.setattr("miles_hpc.control.addresses.source_address", look)
    monkeypatch.setenv("SLURM_LAUNCH_NODE_IPADDR", "10.77.0.11")
    local_addresses()
    assert asked[0] == "10.77.0.11"
    asked.clear()
    local_addresses(towards=("10.77.0.12",))
    assert asked[0] == "10.77.0.12" and "10.77.0.11" not in asked


# ------------------------------------------------------------------------------------- namespaces

needs_namespaces = pytest.mark.skipif(os.getuid() != 0, reason="namespaces need root")

ANSWER = """
import json, socket, sys
from miles_hpc.control.addresses import interface_names, local_addresses
from miles_hpc.core.errors import UserError
answers = {}
for key, (interface, towards) in json.loads(sys.argv[1]).items():
    try:
        answers[key] = list(local_addresses(interface, towards=towards))
    except UserError as error:
        answers[key] = str(error)
answers["names"] = list(interface_names(towards=()))
answers["by_name"] = socket.gethostbyname(socket.gethostname())
print(json.dumps(answers))
"""


def ask_in_a_namespace(setup: str, questions: dict[str, tuple[str, list[str]]]) -> dict[str, list[str] | str]:
    """Run `setup` (ip commands) in a fresh network, mount and host-name namespace, then ask there."""
    script = f'set -e\nip link set lo up\nhostname trap\n{setup}\nexec {sys.executable} -c "$0" "$1"\n'
    done = subprocess.run(
        ["unshare", "--net", "--mount", "--uts", "bash", "-c", script, ANSWER, json.dumps(questions)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    answers: dict[str, list[str] | str] = json.loads(done.stdout)
    return answers


def veth(name: str, *commands: str) -> str:
    """An interface with a carrier: one end of a pair whose other end is up."""
    lines = [f"ip link add {name} type veth peer name p-{name}", f"ip link set p-{name} up"]
    lines += [f"sysctl -qw net.ipv6.conf.{name}.accept_dad=0", f"ip link set {name} up"]
    return "\n".join([*lines, *(f"ip {command}" for command in commands)])


#: Debian's way: the host's own name is 127.0.1.1.
DEBIAN_HOSTS = """printf "127.0.0.1 localhost\\n127.0.1.1 trap\\n" > /tmp/hosts.$$
mount --bind /tmp/hosts.$$ /etc/hosts
rm /tmp/hosts.$$"""


@pytest.mark.netns
@needs_namespaces
def test_two_interfaces_and_a_name_that_resolves_to_127_0_1_1() -> None:
    setup = "\n".join(
        [
            DEBIAN_HOSTS,
            veth("eth0", "addr add 10.9.1.1/24 dev eth0", "route add default via 10.9.1.254"),
            veth("ib0", "addr add 10.9.2.1/24 dev ib0", "route add 10.9.3.0/24 via 10.9.2.254"),
            veth("bare"),
            "ip link add idle type veth peer name p-idle; ip link set idle up; ip addr add 10.9.8.1/24 dev idle",
        ]
    )
    answers = ask_in_a_namespace(
        setup,
        {
            "default": ("", []),
            "attached": ("", ["10.9.2.7"]),
            "routed": ("", ["10.9.3.7"]),
            "elsewhere": ("", ["10.200.0.1"]),
            "own": ("", ["127.0.0.1"]),
            "named": ("ib0", ["10.9.1.7"]),
            "list": ("ib*,eth0", []),
            "bare": ("bare", []),
            "idle": ("idle", []),
            "none": ("hsn*", []),
        },
    )
    assert answers["by_name"] == "127.0.1.1"  # the trap is set
    assert answers["default"] == answers["elsewhere"] == answers["own"] == ["10.9.1.1", "10.9.2.1"]
    assert answers["attached"] == answers["routed"] == ["10.9.2.1", "10.9.1.1"]
    assert answers["named"] == ["10.9.2.1"]
    assert answers["list"] == ["10.9.2.1", "10.9.1.1"]
    assert answers["names"] == ["eth0", "ib0"]
    assert "bare has only the link-local address fe80::" in answers["bare"]
    assert "idle is down or has no carrier" in answers["idle"]
    assert "no interface of this host" in answers["none"] and "eth0 10.9.1.1, ib0 10.9.2.1" in answers["none"]


@pytest.mark.netns
@needs_namespaces
def test_a_host_with_ipv6_alone() -> None:
    setup = veth("eth0", "addr add fd00:9::1/64 dev eth0", "route add default via fd00:9::fe dev eth0")
    answers = ask_in_a_namespace(
        DEBIAN_HOSTS + "\n" + setup,
        {"default": ("", []), "peer": ("", ["fd00:9::7"]), "named": ("eth*", []), "v4": ("", ["10.9.1.1"])},
    )
    assert answers["default"] == answers["peer"] == answers["named"] == answers["v4"] == ["fd00:9::1"]


@pytest.mark.netns
@needs_namespaces
def test_a_machine_without_a_network() -> None:
    answers = ask_in_a_namespace(DEBIAN_HOSTS, {"default": ("", []), "peer": ("", ["10.9.1.1"])})
    assert answers["default"] == answers["peer"] == ["127.0.0.1"]
    assert answers["names"] == ["lo"]
