"""Which virtual network of Slingshot a process takes, where several steps of a job must reach one another.

Each srun step gets a VNI of its own; steps talk only through the job's, which the site file asks for by
fabric.slurm_network = "job_vni". Slurm lists both in SLINGSHOT_VNIS, the step's first, and libfabric's CXI provider
takes the first one: two roles would meet with VNI_NOT_FOUND (Slurm's source, switch/hpe_slingshot; ORNL's DDStore
documentation).
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Vni", "job_vni"]


class Vni(NamedTuple):
    """What SLINGSHOT_VNIS should be, and what is odd about it; "" for neither."""

    value: str
    complaint: str


def job_vni(listed: str) -> Vni:
    """The job's VNI out of SLINGSHOT_VNIS, comma-separated, the step's first; `listed` is "" when it isn't set."""
    vnis = [part.strip() for part in listed.split(",") if part.strip()]
    if not vnis:
        return Vni("", "SLINGSHOT_VNIS isn't set: not started by srun, or a step on one node without single_node_vni")
    if not all(vni.isdecimal() for vni in vnis):
        return Vni("", f"SLINGSHOT_VNIS='{listed}': expected numbers, separated by commas")
    if len(vnis) == 1:
        complaint = (
            f"SLINGSHOT_VNIS={listed} has the step's VNI only: other steps of the job can't be reached over CXI; "
        )
        return Vni(vnis[0], complaint + "the job needs --network=job_vni, and the site must permit it")
    return Vni(vnis[-1], "")
