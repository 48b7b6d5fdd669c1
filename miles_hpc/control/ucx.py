"""The carrier over UCX: RDMA, shared memory or TCP, whatever UCX finds.

    UcxCarrier ── listens and dials as tcp does ──▶ ucx_line   handshake, addresses, sign of life
               └─ one UcxWorker per loop ─────────▶ ucx_wire   frames as tag messages, payloads received in place
                                                    ucx_api    what is used of UCX: ucxx, or ucx-py

Addresses look like ucx://10.1.2.3:4567, ucx://[fd00::1]:4567 for IPv6: those of the line. Which devices the frames take
is UCX's choice, within UCX_TLS and UCX_NET_DEVICES.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from pathlib import Path

from miles_hpc.control.tcp import TcpCarrier
from miles_hpc.control.ucx_api import UcxApi, devices, find_ucx, lanes, library_file
from miles_hpc.control.ucx_wire import UcxWire
from miles_hpc.control.ucx_worker import UcxWorker
from miles_hpc.control.wire import Loop, Wire
from miles_hpc.core.deadline import Deadline

__all__ = ["UcxCarrier", "look"]

_INFINIBAND = Path("/sys/class/infiniband")
_facts: dict[str, str] | None = None  # of this process


class UcxCarrier(TcpCarrier):
    """One UCX worker on one loop."""

    scheme = "ucx"

    def __init__(self, loop: Loop, open_api: Callable[[], UcxApi]) -> None:
        super().__init__(loop, same_host=False)
        self._worker = UcxWorker(loop, open_api)

    def _wire(self, sock: socket.socket, remote: str) -> Wire:
        return UcxWire(self._worker, sock, remote)

    def chosen(self) -> dict[str, str]:
        """`devices` may be used; `in_use` are, by the paths to other workers that are open."""
        global _facts
        if _facts is None:  # opening a worker takes milliseconds: once per process will do
            _facts = _find_facts(self._worker.api)
        return {"transport": "ucx", **_facts, "in_use": " ".join(self._worker.in_use())}

    def close(self) -> None:
        self._worker.close()


def look() -> str:
    """One line on what UCX would use here, found out by a message between two workers of this process; for `doctor`.

    Raises UserError without a UCX package, DeadlineExpired when UCX doesn't deliver.
    """
    open_api = find_ucx()
    one, other = open_api(), open_api()
    try:
        arrived: list[str] = []
        there, back = one.connect(other.address, arrived.append), other.connect(one.address, arrived.append)
        inbox = other.inbox(1, lambda _: None)
        inbox.listen(lambda _: arrived.append("message"))
        inbox.attach(back)
        there.send(1, b"anybody here?", lambda: None)
        deadline = Deadline(10.0, "a message between two UCX workers")
        while not arrived:
            deadline.check()
            one.progress()
            other.progress()
        facts, used = _find_facts(one), lanes(there.handle())
        there.close()
        back.close()
    finally:
        other.close()
        one.close()
    return (
        f"{facts['ucx']} ({facts['package']}) in {facts['library']}; TLS={facts['TLS']}, "
        f"NET_DEVICES={facts['NET_DEVICES']}: {facts['devices']}; within this host: {' '.join(used) or 'unknown'}"
    )


def _find_facts(api: UcxApi) -> dict[str, str]:
    settings, found = api.settings(), devices(api.context_info())
    _warn_of_the_wrong_library(found)
    return {
        "ucx": api.version(),
        "library": library_file(),
        "package": api.package,
        "TLS": settings.get("TLS", ""),
        "NET_DEVICES": settings.get("NET_DEVICES", ""),
        "devices": " ".join(found),
    }


def _warn_of_the_wrong_library(found: list[str]) -> None:
    """A UCX without RDMA on a machine that has it is slow, and nobody would notice."""
    try:
        adapters = sorted(entry.name for entry in _INFINIBAND.iterdir())
    except OSError:
        return
    if adapters and not any(adapter in device for adapter in adapters for device in found):
        logging.getLogger(__name__).warning(
            "UCX (%s) uses none of the RDMA adapters %s: UCX from PyPI has no verbs. To prefer the site's own UCX, "
            "load it and set RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY=true",
            library_file(),
            ", ".join(adapters),
        )
