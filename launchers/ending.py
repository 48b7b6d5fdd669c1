"""How a process that an agent started comes to its end, whatever becomes of the agent."""

from __future__ import annotations

import ctypes
import os
import signal
import threading

__all__ = ["end_soon", "end_with_parent"]

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LAST_RESORT_S = 10.0


def end_with_parent(parent: int) -> None:
    """Ask the kernel for SIGTERM when the parent dies (prctl(2)), and notice a death that came before."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)


def end_soon() -> None:
    """What hangs (a device, storage) must not keep the process: end hard if closing takes too long."""
    timer = threading.Timer(_LAST_RESORT_S, os._exit, (1,))
    timer.daemon = True
    timer.start()
