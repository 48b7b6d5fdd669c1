"""The one place where MPI is started: importing mpi4py.MPI is MPI_Init."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from typing import Any

from miles_hpc.control.pmi_relay import short_values
from miles_hpc.core.env import read

__all__ = ["start_mpi"]


def start_mpi(*, finalize: bool | None = None) -> Any:
    """The module mpi4py.MPI, started with MPI_THREAD_MULTIPLE unless it is running already.

    `finalize`: mpi4py's rc.finalize, whether it calls MPI_Finalize at exit; None leaves that to mpi4py. A start under
    Slurm's PMI goes through a relay (pmi_relay.py says why). Raises ImportError or RuntimeError without mpi4py or MPI.
    """
    import mpi4py

    if "mpi4py.MPI" in sys.modules:
        from mpi4py import MPI

        return MPI
    mpi4py.rc.thread_level = "multiple"
    if finalize is not None:
        mpi4py.rc.finalize = finalize
    pmi_fd = read("PMI_FD")
    slurm = pmi_fd is not None and read("SLURM_STEP_ID") and _is_open(pmi_fd)
    with short_values(pmi_fd) if slurm else nullcontext():
        from mpi4py import MPI
    return MPI


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True
