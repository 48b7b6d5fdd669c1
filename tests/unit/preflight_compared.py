"""What nodes gather for the doctor's comparisons, alike and not, with what each comparison must say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from miles_hpc.core.config import SiteConfig
from tests.unit.runs import make_site

__all__ = ["COMPARED", "Compared"]

PERLMUTTER, H100 = make_site("perlmutter"), make_site("generic_h100_ib")


@dataclass(frozen=True)
class Compared:
    """`comparison` of values by node gives, as its worst finding, `status` with `saw` in its text."""

    comparison: str
    status: str
    saw: str
    values: Mapping[str, Any]
    site: SiteConfig | None = field(default_factory=make_site)
    environ: Mapping[str, str] = field(default_factory=dict)


def nics(*names: str, hcas: tuple[str, ...] = (), host: str = "", number: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "interfaces": {name: [f"10.{i}.0.0/16"] for i, name in enumerate(names)},
        "addresses": {name: [f"10.{i}.0.{number}"] for i, name in enumerate(names)},
        "down": [],
        "overlaps": [],
        "hcas": list(hcas),
        "host": host or str(number),
        **more,
    }


def run_dir(kind: str, inode: int, fsid: int) -> dict[str, Any]:
    return {"real": "/scratch/run", "mount": "/scratch", "kind": kind, "inode": inode, "fsid": fsid}


IB4 = ("mlx5_0:1", "mlx5_1:1")
COMPARED = [
    Compared("nics", "ok", "the same on all nodes", {"n1": nics("ib0"), "n2": nics("ib0", number=2)}),
    Compared(
        "nics",
        "FAIL",
        "n3 lacks hsn1",
        {"n1": nics("hsn0", "hsn1"), "n2": nics("hsn0", "hsn1", number=2), "n3": nics("hsn0", number=3)},
    ),
    Compared("nics", "FAIL", "n2 has usb0 besides", {"n1": nics("ib0"), "n2": nics("ib0", "usb0", number=2)}),
    Compared(
        "nics",
        "ok",
        "NCCL_SOCKET_IFNAME=ib0 are the same",
        {"n1": nics("ib0"), "n2": nics("ib0", "usb0", number=2)},
        environ={"NCCL_SOCKET_IFNAME": "ib0"},
    ),
    Compared(
        "nics",
        "FAIL",
        "RDMA adapters differ: n2 lacks mlx5_1:1",
        {"n1": nics("ib0", hcas=IB4), "n2": nics("ib0", hcas=IB4[:1], number=2), "n3": nics("ib0", hcas=IB4, number=3)},
    ),
    Compared(
        "nics",
        "warn",
        "ib0 and ib1 are both in 10.0.0.0/8",
        {n: nics("ib0", number=i, overlaps=[["ib0", "ib1", "10.0.0.0/8"]]) for i, n in enumerate(("n1", "n2"))},
    ),
    Compared(
        "nics",
        "ok",
        "the same",  # Slingshot's NICs share a subnet by design
        {n: nics("hsn0", number=i, overlaps=[["hsn0", "hsn1", "10.0.0.0/8"]]) for i, n in enumerate(("n1", "n2"))},
        PERLMUTTER,
    ),
    Compared(
        "nics",
        "warn",
        "on different nodes",
        {"n1": nics("ib0"), "n2": nics("ib0", number=2, interfaces={"ib0": ["10.9.0.0/16"]})},
    ),
    Compared("nics", "FAIL", "both have 10.0.0.1", {"n1": nics("br0"), "n2": nics("br0", host="other")}),
    Compared("nics", "ok", "the same", {"n1": nics("eth0", host="one"), "n2": nics("eth0", host="one")}),
    Compared("gpu-driver", "ok", "580", {"n1": "580, H100", "n2": "580, H100"}, H100),
    Compared("gpu-driver", "warn", "570, H100 on n2", {"n1": "580, H100", "n2": "570, H100"}, H100),
    Compared("host-memory", "ok", "about 774 GB", {"n1": 774 * 10**9, "n2": 770 * 10**9, "n3": 776 * 10**9}),
    Compared("host-memory", "warn", "n2 has 500 GB", {"n1": 774 * 10**9, "n2": 500 * 10**9, "n3": 776 * 10**9}),
    Compared("clock", "ok", "agree", {"n1": -0.02, "n2": -0.03, "n3": -0.5}),
    Compared("clock", "warn", "n2 is 4.0 s ahead", {"n1": 0.0, "n2": 4.0, "n3": 0.0}),
    Compared("clock", "FAIL", "n2 is 400.0 s behind", {"n1": 0.0, "n2": -400.0, "n3": 0.0}),
    Compared("versions", "ok", "on all nodes", {n: {"miles-hpc": "1", "kernel": "6"} for n in ("n1", "n2")}),
    Compared(
        "versions",
        "FAIL",
        "0 on n2",
        {"n1": {"miles-hpc": "1", "kernel": "6"}, "n2": {"miles-hpc": "0", "kernel": "6"}},
    ),
    Compared(
        "versions",
        "warn",
        "kernel differs",
        {"n1": {"miles-hpc": "1", "kernel": "6"}, "n2": {"miles-hpc": "1", "kernel": "5"}},
    ),
    Compared("shared-run-dir", "ok", "one folder", {n: run_dir("nfs4", 5, i) for i, n in enumerate(("n1", "n2"))}),
    Compared("shared-run-dir", "FAIL", "isn't the same folder on n1 and n2", {
        "n1": run_dir("xfs", 2, 1), "n2": run_dir("xfs", 2, 2)}),
    Compared("shared-run-dir", "FAIL", "isn't the same", {"n1": run_dir("gpfs", 2, 1), "n2": run_dir("gpfs", 3, 1)}),
]  # fmt: skip
