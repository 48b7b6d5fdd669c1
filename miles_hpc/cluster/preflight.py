"""Looking at the real cluster before anything is written: what the site file claims against what Slurm says."""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Protocol

from miles_hpc.cluster.job_plan import JobPlan
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
    looked: bool = True  # false: there was nothing to look at

    @property
    def mark(self) -> str:
        """ "ok", "FAIL" or "skip" in front of the text."""
        return ("ok" if self.ok else "FAIL") if self.looked else "skip"


def check_job(plan: JobPlan, text: str, slurm: Scheduler) -> None:
    """Raise UserError when Slurm is missing, lacks a partition of the plan, or would refuse the batch script."""
    slurm.require()
    live = slurm.partitions()
    for component in plan.components:
        if component.partition and component.partition not in live:
            near = get_close_matches(component.partition, live, 1)
            hint = f"did you mean '{near[0]}'?" if near else f"it has {', '.join(live) or 'none'}"
            raise UserError(f"{component.roles[0]}: this cluster has no partition '{component.partition}': {hint}")
    slurm.test(text)


def check_site(site: SiteConfig, slurm: Scheduler) -> list[Finding]:
    """What can be checked of a site file on this machine; never raises for a cluster that differs.

    Without Slurm the file alone is looked at; a Slurm that doesn't answer is a failure.
    """
    if site.scheduler == "none":
        return [Finding(True, "no scheduler: runs start with 'miles-hpc local'")]
    return [*_roles(site), *_against_cluster(site, slurm)]


def _roles(site: SiteConfig) -> list[Finding]:
    stated = {role for partition in site.partitions for role in partition.roles}
    missing = [role for role in ("trainer", "rollout", "sandbox") if role not in stated]
    return [Finding(False, f"no partition for role '{role}'") for role in missing]


def _against_cluster(site: SiteConfig, slurm: Scheduler) -> list[Finding]:
    try:
        slurm.require()
        version = slurm.version()
        live = slurm.partitions()
    except UserError as error:  # no Slurm here
        return [Finding(True, f"partitions and version are not compared: {error}", looked=False)]
    except MilesError as error:
        return [Finding(False, str(error))]
    findings = [Finding(True, version)]
    if (have := _version(version)) and have < _version(site.slurm_version_min):
        findings.append(Finding(False, f"{version}: the site file asks for {site.slurm_version_min} or newer"))
    for partition in site.partitions if site.sbatch.partition_stated else []:
        there = partition.name in live
        found = "is there" if there else f"is not among {', '.join(live) or 'none'}"
        findings.append(Finding(there, f"partition '{partition.name}' {found}"))
    return findings


def _version(text: str) -> tuple[int, ...]:
    """The first dotted number in "slurm-wlm 22.05.8"; () when there is none."""
    found = re.search(r"\d+(\.\d+)+", text)
    return tuple(int(part) for part in found[0].split(".")) if found else ()
