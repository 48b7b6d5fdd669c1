"""What a log of NCCL (NCCL_DEBUG=INFO) proves about the network that was used. Pure.

"Connected all rings" and "Init COMPLETE" are no proof of a transfer: connections are made lazily, and a provider that
can't move data has printed both. A transfer shows in what ran afterwards: a result line of nccl-tests, or a finished
training step over several ranks, which the caller knows of.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["NCCL_LINES", "NcclLog", "parse_nccl_log"]

#: Lines worth reading, for whoever filters a large log first.
NCCL_LINES = r"NCCL (INFO|WARN)|VNI_NOT_FOUND|busbw|^\s*\d+\s+\d+\s+(float|half|bfloat16|double|int8|uint8)"

_PROVIDER = re.compile(r"NET/OFI Selected [Pp]rovider is ([\w;]+)")
_PLUGIN = re.compile(r"NET/OFI Initializing aws-ofi-nccl (?:GitHub-dev|v?([\w.+-]+))")
_NETWORK = re.compile(r"NCCL INFO (?:\S+ )?(?:Using network|Assigned NET plugin) ([A-Za-z][\w ]*?)(?: to comm)?\s*$")
_MISSING = re.compile(r"[Nn]etwork (.+?) not found")
_NO_PLUGIN = re.compile(r"NET/Plugin\s*:? ?(?:No plugin found|Could not find)")
# size count type redop root time algbw busbw
_RESULT = re.compile(
    r"^\s*\d+\s+\d+\s+(?:float|half|bfloat16|double|u?int8)\w*\s+\S+\s+-?\d+(?:\s+[\d.]+){2}\s+([\d.]+)"
)


@dataclass(frozen=True)
class NcclLog:
    """What was found. Empty strings: the log says nothing of it."""

    seen: bool = False  # any line of NCCL at all
    provider: str = ""  # libfabric's: cxi, efa, tcp, ...
    plugin_version: str = ""
    network: str = ""  # AWS Libfabric, Libfabric, IB, Socket, ...
    missing_network: str = ""  # the name that NCCL_NET asked for and nobody has (older NCCL tells it)
    no_network: bool = False  # what NCCL_NET asked for isn't there (NCCL 2.28 doesn't tell the name)
    no_plugin: bool = False
    rings: bool = False
    bus_gb_s: float | None = None  # highest rate of nccl-tests: data did move
    vni_not_found: bool = False


def parse_nccl_log(lines: Iterable[str]) -> NcclLog:
    """Facts of all lines together; of a fact that lines tell differently, the last one."""
    facts: dict[str, object] = {}
    rates: list[float] = []
    for line in lines:
        facts["seen"] = facts.get("seen", False) or "NCCL INFO" in line or "NCCL WARN" in line
        for key, pattern in (("provider", _PROVIDER), ("network", _NETWORK), ("missing_network", _MISSING)):
            if ("NCCL" in line) and (found := pattern.search(line)):
                facts[key] = found[1].strip()
        if found := _PLUGIN.search(line):
            facts["plugin_version"] = found[1] or ""
        facts["no_network"] = facts.get("no_network", False) or "Failed to initialize any NET plugin" in line
        facts["no_plugin"] = facts.get("no_plugin", False) or bool(_NO_PLUGIN.search(line))
        facts["rings"] = facts.get("rings", False) or "Connected all rings" in line
        facts["vni_not_found"] = facts.get("vni_not_found", False) or "VNI_NOT_FOUND" in line
        if (found := _RESULT.match(line)) and float(found[1]) > 0:
            rates.append(float(found[1]))
    return NcclLog(bus_gb_s=max(rates, default=None), **facts)  # type: ignore[arg-type]
