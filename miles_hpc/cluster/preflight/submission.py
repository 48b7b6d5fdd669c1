"""Before anything is written: would Slurm take the job, and does the site file agree with what Slurm says?"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Protocol

from miles_hpc.cluster.job_plan import JobPlan
from miles_hpc.cluster.preflight.contract import Finding, fail, fine, skip
from miles_hpc.cluster.slurm import PartitionLimits
from miles_hpc.cluster.slurm_options import option_complaints, version_of
from miles_hpc.core.config import SiteConfig, SitePartition
from miles_hpc.core.errors import MilesError, UserError
from miles_hpc.core.site_rules import option_name
from miles_hpc.core.walltime import format_time, limit_s, parse_time

__all__ = ["Scheduler", "check_job", "check_site"]


class Scheduler(Protocol):
    """The part of `Slurm` that looking needs; the fake of the tests has it too."""

    def require(self) -> None: ...

    def partitions(self) -> list[str]: ...

    def partition_limits(self) -> dict[str, PartitionLimits]: ...

    def version(self) -> str: ...

    def test(self, script: str | Path) -> None: ...


def check_job(plan: JobPlan, text: str, slurm: Scheduler, *, runtimes: Sequence[str] = ()) -> None:
    """Raise UserError when Slurm is missing, lacks a partition of the plan, or would refuse the batch script.

    `runtimes` are the site's container runtimes, which bring options of their own.
    """
    slurm.require()
    version = slurm.version()
    for complaint in option_complaints(_directives(text), version_of(version), runtimes=runtimes, version_text=version):
        raise UserError(f"batch script: {complaint}")
    live = slurm.partitions()
    for component in plan.components:
        if component.partition and component.partition not in live:
            near = get_close_matches(component.partition, live, 1)
            hint = f"did you mean '{near[0]}'?" if near else f"it has {', '.join(live) or 'none'}"
            raise UserError(f"{component.roles[0]}: this cluster has no partition '{component.partition}': {hint}")
    for complaint in _over_live_limits(plan, slurm.partition_limits()):
        raise UserError(complaint)
    slurm.test(text)


def _over_live_limits(plan: JobPlan, limits: Mapping[str, PartitionLimits]) -> Iterator[str]:
    """What sbatch takes and Slurm then keeps pending for ever (PartitionTimeLimit); --test-only doesn't tell of it.

    A QOS may lengthen a partition's time, so nothing is said of the time of a component that states one.
    """
    for component in plan.components:
        limit = limits.get(component.partition)
        if limit is None or not component.time or any(option_name(o) == "--qos" for o in component.directives):
            continue
        if limit_s(component.time) > limit.max_time_s:
            yield (
                f"{component.roles[0]}: --time={component.time}: partition '{component.partition}' of this cluster "
                f"allows {format_time(limit.max_time_s)}, the job would wait for ever: set job.time"
            )


def _directives(script: str) -> list[str]:
    """What sbatch reads of a script: #SBATCH lines in front of the first command. A user's template has its own."""
    head = itertools.takewhile(lambda line: not line.strip() or line.startswith("#"), script.split("\n"))
    return [line.removeprefix("#SBATCH").strip() for line in head if re.match(r"#SBATCH\s", line)]


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
        limits = slurm.partition_limits()
    except UserError as error:  # no Slurm here
        return [skip(f"partitions and version are not compared: {error}")]
    except MilesError as error:
        return [fail(str(error), "look whether slurmctld is up: scontrol ping")]
    findings = [fine(version)]
    runtimes = site.container.runtimes
    for complaint in option_complaints(_stated(site), version_of(version), runtimes=runtimes, version_text=version):
        findings.append(fail(f"the site file states an option: {complaint}", "take it out of the site file"))
    have = version_of(version)
    if have and have < version_of(site.slurm_version_min):
        asked = f"{version}: the site file asks for {site.slurm_version_min} or newer"
        findings.append(fail(asked, "look up 'slurm_version_min' in the site file, and what needs it"))
    for partition in site.partitions if site.sbatch.partition_stated else []:
        if partition.name in live:
            findings.append(fine(f"partition '{partition.name}' is there"))
            if partition.name in limits:
                findings += _outdated(partition, limits[partition.name])
            continue
        saw = f"partition '{partition.name}' is not among {', '.join(live) or 'none'}"
        findings.append(fail(saw, "correct 'partitions' in the site file"))
    return findings


def _outdated(partition: SitePartition, live: PartitionLimits) -> Iterator[Finding]:
    """Limits change: where the file allows more than Slurm, jobs that it lets pass would wait for ever."""
    where = f"partition '{partition.name}'"
    if partition.max_time and parse_time(partition.max_time) > live.max_time_s:
        shown = format_time(live.max_time_s)
        yield fail(
            f"{where}: the site file allows {partition.max_time}, Slurm {shown}", "bring the site file up to date"
        )
    if live.max_nodes is not None and partition.max_nodes > live.max_nodes:
        saw = f"{where}: the site file allows {partition.max_nodes} nodes, Slurm {live.max_nodes}"
        yield fail(saw, "bring the site file up to date")


def _stated(site: SiteConfig) -> list[str]:
    """Options whose presence the site file alone decides, as they stand in every script for it."""
    fabric, topology = site.fabric, site.topology
    return [
        *([f"--network={fabric.slurm_network}"] if fabric.slurm_network else []),
        *([f"--segment={topology.segment_nodes}"] if topology.segment_directive and topology.segment_nodes else []),
        *site.directives,
    ]
