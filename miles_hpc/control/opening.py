"""Choosing a transport by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from miles_hpc.control.frames import Limits
from miles_hpc.control.wire import Carrier, Loop
from miles_hpc.core.errors import UserError
from miles_hpc.core.transport import Credentials
from miles_hpc.core.version import PROTOCOL_VERSION

if TYPE_CHECKING:
    from miles_hpc.control.asyncio_face import AsyncTransport
    from miles_hpc.control.blocking_face import PlainTransport

__all__ = ["CARRIERS", "open_blocking_transport", "open_carrier", "open_transport"]

#: The carriers by the name that a site or run file gives.
CARRIERS = ("tcp", "tcp-only", "ucx", "mpi", "loopback")


def open_carrier(kind: str, *, max_sleep_s: float | None = None) -> Callable[[Loop], Carrier]:
    """What opens the carrier `kind` on a loop. Raises UserError for another name or a missing package.

    tcp-only is tcp without Unix sockets between processes of one host. `max_sleep_s` is for mpi, which is polled: the
    longest sleep between two looks; longer ones cost less when idle.
    """
    if kind in ("tcp", "tcp-only"):
        from miles_hpc.control.tcp import TcpCarrier

        return partial(TcpCarrier, same_host=kind == "tcp")
    if kind == "ucx":
        from miles_hpc.control.ucx import UcxCarrier
        from miles_hpc.control.ucx_api import find_ucx

        found = find_ucx()
        return lambda loop: UcxCarrier(loop, found)
    if kind == "loopback":
        from miles_hpc.control.loopback import LoopbackCarrier

        return LoopbackCarrier
    if kind == "mpi":
        from miles_hpc.control.mpi_carrier import MAX_SLEEP_S, MpiCarrier

        return partial(MpiCarrier, max_sleep_s=MAX_SLEEP_S if max_sleep_s is None else max_sleep_s)
    raise UserError(f"transport {kind!r}: expected {', '.join(CARRIERS)}")


def open_transport(
    kind: str,
    credentials: Credentials,
    *,
    limits: Limits | None = None,
    version: int = PROTOCOL_VERSION,
    max_sleep_s: float | None = None,
) -> AsyncTransport:
    """The transport `kind` for an asyncio loop; arguments and errors as open_carrier's."""
    from miles_hpc.control.asyncio_face import AsyncTransport

    return AsyncTransport(open_carrier(kind, max_sleep_s=max_sleep_s), credentials, limits=limits, version=version)


def open_blocking_transport(
    kind: str,
    credentials: Credentials,
    *,
    limits: Limits | None = None,
    version: int = PROTOCOL_VERSION,
    spin_s: float | None = None,
    max_sleep_s: float | None = None,
) -> PlainTransport:
    """The transport `kind` for a thread without a loop; arguments and errors as open_carrier's.

    `spin_s`: how long a wait looks again and again before it sleeps; 0 where many processes share few cores.
    """
    from miles_hpc.control.blocking_face import SPIN_S, PlainTransport

    spin = SPIN_S if spin_s is None else spin_s
    return PlainTransport(
        open_carrier(kind, max_sleep_s=max_sleep_s), credentials, limits=limits, version=version, spin_s=spin
    )
