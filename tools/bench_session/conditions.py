"""Under what a run was measured."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from pathlib import Path
from typing import Any

from miles_hpc.core.version import __version__

__all__ = ["machine"]

_PACKAGES = ("tokenizers", "numpy", "msgspec", "aiohttp", "jinja2")


def machine() -> dict[str, Any]:
    """Hardware, kernel, versions, load."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    memory = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal"))
    return {
        "cpu": next((line.split(":", 1)[1].strip() for line in lines if "model name" in line), platform.processor()),
        "cores": len(os.sched_getaffinity(0)),
        "virtual_machine": any(line.startswith("flags") and " hypervisor" in line for line in lines),
        "memory_gib": round(int(memory.split()[1]) / (1 << 20), 1),
        "load_average_at_start": round(os.getloadavg()[0], 2),
        "nice": os.nice(0),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "miles_hpc": __version__,
        "versions": {name: importlib.metadata.version(name) for name in _PACKAGES},
        "command": " ".join(sys.argv[1:]),
    }
