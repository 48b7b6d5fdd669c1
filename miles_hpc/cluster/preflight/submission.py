"""Before anything is written: would Slurm take the job, and does the site file agree with what Slurm says?"""

from __future__ import annotations

import re
from difflib import get_close_matches
from pathlib import Path
from typing import Protocol

from miles_hpc.cluster.job_plan import JobPlan
from miles_hpc.cluster.preflight.contract import Finding, fail, fine, skip
from miles_hpc.core.config import SiteConfig
from miles_hpc.core.errors import MilesError, UserError

__all__ = ["Scheduler", "check_job", "check_site"]


class Scheduler(Protocol):
    """The part of `Slurm` that looking needs; the fake of the tests has it too."""

    def require(self) -> None: ...

    def partitions(self) -> list[str]: ...

    def version(self) -> str: ...

    def test(self, script: str | Path) -> None: ...


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
        return [fine("no scheduler: runs start with 'miles-hpc local'")]
    return [*_roles(site), *_against_cluster(site, slurm)]


def _roles(site: SiteConfig) -> list[Finding]:
    stated = {role for partition in site.partitions for role in partition.roles}
    missing = [role for role in ("trainer", "rollout", "sandbox") if role not in stated]
    return [fail(f"no partition for role '{role}'", "list it in 'roles' of a partition") for role in missing]


def _against_cluster(site: SiteConfig, slurm: Scheduler) -> list[Finding]:
    try:
        slurm.require()
        version = slurm.version()
        live = slurm.partitions()
    except UserError as error:  # no Slurm here
        return [skip(f"partitions and version are not compared: {error}")]
    except MilesError as error:
        return [fail(str(error), "look whether slurmctld is up: scontrol ping")]
    findings = [fine(version)]
    if (have := _version(version)) and have < _version(site.slurm_version_min):
        asked = f"{version}: the site file asks for {site.slurm_version_min} or newer"
        findings.append(fail(asked, "look up 'slurm_version_min' in the site file, and what needs it"))
    for partition in site.partitions if site.sbatch.partition_stated else []:
        if partition.name in live:
            findings.append(fine(f"partition '{partition.name}' is there"))
            continue
        saw = f"partition '{partition.name}' is not among {', '.join(live) or 'none'}"
        findings.append(fail(saw, "correct 'partitions' in the site file"))
    return findings


def _version(text: str) -> tuple[int, ...]:
    """The first dotted number in "slurm-wlm 22.05.8"; () when there is none."""
    found = re.search(r"\d+(\.\d+)+", text)
    return tuple(int(part) for part in found[0].split(".")) if found else ()
