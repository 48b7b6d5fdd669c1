"""What side jobs of the tests do. Copied into a folder of the run's python_path: on nodes it is a user's module."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any


def tell(x: int = 1) -> dict[str, Any]:
    print("told", x, flush=True)
    environ = os.environ
    return {
        "x": x,
        "node": environ.get("SLURMD_NODENAME", ""),
        "conf": "SLURM_CONF" in environ,
        "gpus": environ.get("CUDA_VISIBLE_DEVICES"),
    }


def fail() -> None:
    raise ValueError("no good")


def wait_for(mark: str, seconds: float = 120.0) -> str:
    """Leave word of having begun, then wait for `mark`.go; ends by itself after `seconds`."""
    with Path(f"{mark}.begun").open("a") as file:
        file.write(f"{os.getpid()} {os.environ.get('SLURMD_NODENAME', '')}\n")
    end = time.monotonic() + seconds
    while not Path(f"{mark}.go").exists():
        if time.monotonic() > end:
            raise TimeoutError(mark)
        time.sleep(0.05)
    return "went"


def die(number: int = signal.SIGKILL) -> None:
    os.kill(os.getpid(), number)


def stubborn(seconds: float) -> None:
    """Goes on whatever submitit's handler raises."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            time.sleep(0.2)
        except Exception as error:
            print("ignored", type(error).__name__, flush=True)


def odd() -> object:
    return object()
