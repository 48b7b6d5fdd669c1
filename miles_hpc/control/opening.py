"""Choosing a transport by name, and the address that a role binds."""

from __future__ import annotations

import fcntl
import socket
import struct

from miles_hpc.control.loopback import LoopbackTransport
from miles_hpc.control.tcp import TcpTransport
from miles_hpc.core.errors import UserError
from miles_hpc.core.transport import Credentials, Transport

__all__ = ["local_address", "open_transport"]

_SIOCGIFADDR = 0x8915  # linux/sockios.h


def open_transport(kind: str, credentials: Credentials) -> Transport:
    """The transport `kind`: tcp, ucx or loopback. Raises UserError for another name or a missing package."""
    if kind == "tcp":
        return TcpTransport(credentials)
    if kind == "loopback":
        return LoopbackTransport(credentials)
    if kind == "ucx":
        from miles_hpc.control.ucx import UcxTransport  # imports ucxx, which not every environment has

        return UcxTransport(credentials)
    raise UserError(f"transport {kind!r}: expected tcp, ucx or loopback")


def local_address(interface: str = "") -> str:
    """The IPv4 address of a network interface, or of this host's name when `interface` is empty.

    Falls back to 127.0.0.1 when the name doesn't resolve. Raises UserError for an interface that this host lacks.
    """
    if not interface:
        try:
            return socket.gethostbyname(socket.gethostname())
        except OSError:
            return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError as error:
            known = ", ".join(name for _, name in socket.if_nameindex())
            raise UserError(
                f"interface {interface!r}: {error.strerror}; expected one with an IPv4 address, this host has {known}"
            ) from error
    return socket.inet_ntoa(answer[20:24])
