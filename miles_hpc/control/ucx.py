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
from miles_hpc.control.ucx_api import UcxApi, devices, library_file
from miles_hpc.control.ucx_wire import UcxWire, UcxWorker
from miles_hpc.control.wire import Loop, Wire

__all__ = ["UcxCarrier"]

_INFINIBAND = Path("/sys/class/infiniband")


class UcxCarrier(TcpCarrier):
    """One UCX worker on one loop."""

    scheme = "ucx"

    def __init__(self, loop: Loop, open_api: Callable[[], UcxApi]) -> None:
        super().__init__(loop)
        self._worker = UcxWorker(loop, open_api)
        self._warn_of_the_wrong_library()

    def _wire(self, sock: socket.socket, remote: str) -> Wire:
        return UcxWire(self._worker, sock, remote)

    def chosen(self) -> dict[str, str]:
        """`devices` may be used, `in_use` are: by all paths so far."""
        api = self._worker.api
        settings = api.settings()
        return {
            "transport": "ucx",
            "ucx": api.version(),
            "library": library_file(),
            "package": api.package,
            "TLS": settings.get("TLS", ""),
            "NET_DEVICES": settings.get("NET_DEVICES", ""),
            "devices": " ".join(devices(api.context_info())),
            "in_use": " ".join(self._worker.in_use()),
        }

    def close(self) -> None:
        self._worker.close()

    def _warn_of_the_wrong_library(self) -> None:
        """A UCX without RDMA on a machine that has it is slow, and nobody would notice."""
        try:
            adapters = sorted(entry.name for entry in _INFINIBAND.iterdir())
        except OSError:
            return
        found = devices(self._worker.api.context_info())
        if adapters and not any(adapter in device for adapter in adapters for device in found):
            logging.getLogger(__name__).warning(
                "UCX (%s) uses none of the RDMA adapters %s: UCX from PyPI has no verbs. "
                "To prefer the site's own UCX, load it and set RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY=true",
                library_file(),
                ", ".join(adapters),
            )
