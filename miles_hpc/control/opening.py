"""Choosing a transport by name."""

from __future__ import annotations

from miles_hpc.control.loopback import LoopbackTransport
from miles_hpc.control.tcp import TcpTransport
from miles_hpc.core.errors import UserError
from miles_hpc.core.transport import Credentials, Transport

__all__ = ["open_transport"]


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
