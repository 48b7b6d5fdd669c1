"""Looking at the real cluster before anything is written: what the site file claims against what Slurm says."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Protocol

from miles_hpc.cluster.hetjob import HetJobPlan
from miles_hpc.core.config import SiteConfig
from miles_hpc.core.errors import MilesError, UserError

__all__ = ["Finding", "Scheduler", "check_job", "check_site"]


class Scheduler(Protocol):
    """The part of `Slurm` that looking needs; the fake of the tests has it too."""

    def require(self) -> None: ...

    def partitions(self) -> list[str]: ...

    def version(self) -> str: ...

    def test(self, script: str | Path) -> None: ...


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    ok: bool
    text: str


def check_job(plan: HetJobPlan, text: str, slurm: Scheduler) -> None:
    """Raise UserError when Slurm is missing, lacks a partition of the plan, or would refuse the batch script."""
    slurm.require()
    live = slurm.partitions()
    for component in plan.components:
        if component.partition not in live:
            near = get_close_matches(component.partition, live, 1)
            hint = f"did you mean '{near[0]}'?" if near else f"it has {', '.join(live) or 'none'}"
            raise UserError(f"{component.role}: this cluster has no partition '{component.partition}': {hint}")
    slurm.test(text)


def check_site(site: SiteConfig, slurm: Scheduler) -> list[Finding]:
    """What can be checked of a site file on this machine; never raises for a cluster that differs."""
    if site.scheduler == "none":
        return [Finding(True, "no scheduler: runs start with 'miles-hpc local'")]
    try:
        slurm.require()
        findings = [Finding(True, slurm.version())]
        live = slurm.partitions()
    except MilesError as error:
        return [Finding(False, str(error))]
    for partition in site.partitions:
        there = partition.name in live
        found = "is there" if there else f"is not among {', '.join(live) or 'none'}"
        findings.append(Finding(there, f"partition '{partition.name}' {found}"))
    for role in ("trainer", "rollout", "sandbox"):
        if not any(role in partition.roles for partition in site.partitions):
            findings.append(Finding(False, f"no partition for role '{role}'"))
    return findings
