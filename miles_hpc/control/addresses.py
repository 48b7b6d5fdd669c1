"""Which address a process binds and publishes: from the interface that was named, else from the routes of this host.

    interface named ("ib0", "ib0,ib1", "hsn*") ─▶ one address of each match, in the order of the list
    nothing named ─▶ of each interface that is up one address; first the one that packets to a known peer leave from,
                     then the one of the default route, then the others; loopback when there is nothing else

The host's name plays no part: Debian resolves it to 127.0.1.1, which nobody else can reach. Of an interface it is an
IPv4 address, else a global or unique-local IPv6 address. Link-local addresses are refused: a peer would have to know
which of its own interfaces leads to us.

Addresses come from the kernel by rtnetlink(7), the route to a peer by connect(2) on a datagram socket, which looks the
route up and sends nothing.
"""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TypeAlias

from miles_hpc.core import env
from miles_hpc.core.errors import UserError

__all__ = [
    "InterfaceAddress",
    "choose_addresses",
    "host_addresses",
    "interface_names",
    "local_address",
    "local_addresses",
    "source_address",
]

_IpInterface: TypeAlias = ipaddress.IPv4Interface | ipaddress.IPv6Interface

#: Addresses that no host has (RFC 5737, RFC 3849): the way to them is the default route.
_ELSEWHERE = ("203.0.113.1", "2001:db8::1")

# linux/netlink.h, linux/rtnetlink.h, linux/if_addr.h, linux/sockios.h, linux/if.h
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_RTM_NEWADDR, _RTM_GETADDR = 20, 22
_NLM_F_REQUEST_DUMP = 0x301
_IFA_ADDRESS, _IFA_LOCAL, _IFA_FLAGS = 1, 2, 8
_IFA_F_SECONDARY, _IFA_F_DADFAILED, _IFA_F_DEPRECATED, _IFA_F_TENTATIVE = 0x01, 0x08, 0x20, 0x40
_SIOCGIFFLAGS = 0x8913
_IFF_UP, _IFF_RUNNING = 0x1, 0x40
_HEADER = struct.Struct("=IHHII")  # nlmsghdr: length, type, flags, sequence, port
_ADDRESS = struct.Struct("=BBBBI")  # ifaddrmsg: family, prefix length, flags, scope, interface index
_ATTRIBUTE = struct.Struct("=HH")  # rtattr: length, type
_READ_S = 5.0


@dataclass(frozen=True, kw_only=True)
class InterfaceAddress:
    """One address of one interface."""

    interface: str
    address: _IpInterface
    up: bool = True  # the interface is up and has a carrier
    secondary: bool = False  # an alias (IPv4), or a temporary address (IPv6, RFC 8981)
    usable: bool = True  # not tentative, deprecated or found twice on the link

    @property
    def host(self) -> str:
        """The address alone, as `bind` takes it."""
        return str(self.address.ip)


def local_address(interface: str = "", *, towards: Sequence[str] | None = None) -> str:
    """The first of `local_addresses`."""
    return local_addresses(interface, towards=towards)[0]


def local_addresses(interface: str = "", *, towards: Sequence[str] | None = None) -> tuple[str, ...]:
    """The addresses to bind and to publish, the best one first; never empty.

    `interface` is what the run or the site says: names and patterns (fnmatch), separated by commas. Without it the
    routes decide; `towards` are numeric addresses of peers that are known already, by default of the host on which
    srun was started, as Slurm tells it. Raises UserError when nothing fits `interface`.
    """
    found = host_addresses()
    if interface:
        return choose_addresses(found, interface)
    if towards is None:
        towards = (env.read("SLURM_LAUNCH_NODE_IPADDR"),)
    return choose_addresses(found, preferred=[source_address(peer) for peer in (*towards, *_ELSEWHERE)])


def interface_names(interface: str = "", *, towards: Sequence[str] | None = None) -> tuple[str, ...]:
    """The interfaces that have the addresses of `local_addresses`, in that order, for libraries that ask for names."""
    holders = {found.host: found.interface for found in reversed(host_addresses())}
    return tuple(dict.fromkeys(holders.get(address, "lo") for address in local_addresses(interface, towards=towards)))


def choose_addresses(
    found: Sequence[InterfaceAddress], interface: str = "", *, preferred: Sequence[str] = ()
) -> tuple[str, ...]:
    """The rules of this module, without looking at the host. `preferred` addresses win over others of their interface.

    Raises UserError when `interface` is given and matches nothing that can be used.
    """
    if interface:
        return _choose_named(found, interface)
    chosen = [_best(of, preferred) for of in _by_interface(found).values()]
    remote = [one for one in chosen if one is not None and one.up and not one.address.is_loopback]
    if not remote:
        loopback = min((one for one in found if one.address.is_loopback), key=_family, default=None)
        return ("127.0.0.1" if loopback is None else loopback.host,)
    return tuple(one.host for one in sorted(remote, key=lambda one: _rank(one.host, preferred)))


def _choose_named(found: Sequence[InterfaceAddress], interface: str) -> tuple[str, ...]:
    patterns = [pattern.strip() for pattern in interface.split(",") if pattern.strip()]
    by_name = _by_interface(found)
    matched = list(dict.fromkeys(n for p in patterns for n in sorted(by_name, key=_natural) if fnmatchcase(n, p)))
    best = [_best(by_name[name], ()) for name in matched]
    usable = tuple(one.host for one in best if one is not None and one.up)
    if usable:
        return usable
    seen = [_why_not(name, by_name[name]) for name in matched]
    known = ", ".join(f"{n} {one.host}" for n, of in by_name.items() if (one := _best(of, ())) is not None and one.up)
    what = "; ".join(seen) or "no interface of this host with an address has such a name"
    raise UserError(
        f"interface {interface!r}: {what}; this host has {known or 'no address at all'}: "
        "name one of these in control.interface or in the site file"
    )


def _why_not(name: str, of: Sequence[InterfaceAddress]) -> str:
    if not of[0].up:
        return f"{name} is down or has no carrier"
    if all(one.address.is_link_local for one in of):
        return f"{name} has only the link-local address {of[0].host}, which other hosts can't use"
    return f"{name} has no address that is ready for use"


def _by_interface(found: Sequence[InterfaceAddress]) -> dict[str, list[InterfaceAddress]]:
    by_name: dict[str, list[InterfaceAddress]] = {}
    for one in found:
        by_name.setdefault(one.interface, []).append(one)
    return by_name


def _best(of: Sequence[InterfaceAddress], preferred: Sequence[str]) -> InterfaceAddress | None:
    """One address of an interface: preferred, else IPv4 before IPv6, first ones before aliases and temporary ones."""
    usable = [one for one in of if one.usable and not one.address.is_link_local]
    return min(
        usable,
        key=lambda one: (_rank(one.host, preferred), one.address.version, one.secondary),
        default=None,
    )


def _family(one: InterfaceAddress) -> int:
    return one.address.version


def _rank(host: str, preferred: Sequence[str]) -> int:
    return preferred.index(host) if host in preferred else len(preferred)


def _natural(name: str) -> tuple[str, int, str]:
    """hsn2 before hsn10."""
    stem = name.rstrip("0123456789")
    return stem, int(name[len(stem) :] or -1), name


# ------------------------------------------------------------------------------------------------ the kernel's answers


def source_address(peer: str) -> str:
    """The address that packets to the numeric address `peer` leave from; "" when there is no way to it."""
    if not peer:
        return ""
    try:
        family, kind, _, _, target = socket.getaddrinfo(
            peer, 9, type=socket.SOCK_DGRAM, flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
        )[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0]).partition("%")[0]
    except OSError:
        return ""


def host_addresses() -> list[InterfaceAddress]:
    """All addresses of this host, in the kernel's order of interfaces."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, 0) as kernel:
        kernel.settimeout(_READ_S)
        request = _ADDRESS.pack(socket.AF_UNSPEC, 0, 0, 0, 0)
        kernel.send(_HEADER.pack(_HEADER.size + len(request), _RTM_GETADDR, _NLM_F_REQUEST_DUMP, 1, 0) + request)
        entries: list[tuple[int, int, _IpInterface]] = []  # interface index, flags, address
        while not _take(kernel.recv(1 << 16), entries):
            pass
    found = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:  # any socket takes an interface's ioctl
        for index, flags, address in sorted(entries, key=lambda entry: entry[0]):
            try:
                name = socket.if_indextoname(index)
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFFLAGS, struct.pack("16sH14x", name.encode(), 0))
            except OSError:
                continue  # the interface went away meanwhile
            state = struct.unpack_from("=H", answer, 16)[0]
            found.append(
                InterfaceAddress(
                    interface=name,
                    address=address,
                    up=bool(state & _IFF_UP) and bool(state & _IFF_RUNNING),
                    secondary=bool(flags & _IFA_F_SECONDARY),
                    usable=not flags & (_IFA_F_DADFAILED | _IFA_F_TENTATIVE | _IFA_F_DEPRECATED),
                )
            )
    return found


def _take(datagram: bytes, entries: list[tuple[int, int, _IpInterface]]) -> bool:
    """Add what one datagram of the kernel's answer says; True when it was the last one."""
    offset = 0
    while offset + _HEADER.size <= len(datagram):
        length, kind, _, _, _ = _HEADER.unpack_from(datagram, offset)
        if kind == _NLMSG_DONE:
            return True
        if kind == _NLMSG_ERROR:
            raise OSError(-struct.unpack_from("=i", datagram, offset + _HEADER.size)[0], "rtnetlink refused")
        if kind == _RTM_NEWADDR:
            body = datagram[offset + _HEADER.size : offset + length]
            family, prefix, flags, _, index = _ADDRESS.unpack_from(body)
            attributes = dict(_attributes(body[_ADDRESS.size :]))
            # Of a point-to-point interface IFA_ADDRESS is the other end; IFA_LOCAL isn't there for IPv6 mostly.
            raw = attributes.get(_IFA_LOCAL, attributes.get(_IFA_ADDRESS))
            if raw is not None and family in (socket.AF_INET, socket.AF_INET6):
                if _IFA_FLAGS in attributes:
                    (flags,) = struct.unpack_from("=I", attributes[_IFA_FLAGS])
                entries.append((index, flags, ipaddress.ip_interface((raw, prefix))))
        offset += (length + 3) & ~3
    return False


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    offset = 0
    while offset + _ATTRIBUTE.size <= len(data):
        length, kind = _ATTRIBUTE.unpack_from(data, offset)
        if length < _ATTRIBUTE.size:
            return
        yield kind, data[offset + _ATTRIBUTE.size : offset + length]
        offset += (length + 3) & ~3
