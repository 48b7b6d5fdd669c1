"""How large and how long a run may be at a site: limits of partitions, QOS and jobs' sizes. Pure.

To Slurm each component of a het job is a job (heterogeneous_jobs.html, "Limitations"). So what counts jobs counts
components, and a limit by size holds for each component; a split layout is one job. Limits on nodes are meant for what
a user has at once: the nodes of all components in a partition are added up, as Slurm 26.05 does as well.

    time    QOS with a limit of its own, else the partition; and the partition's limits by size
    nodes   partition: its components together; QOS: all components together
    jobs    partition: its components, QOS: all components, that run or wait at once
    chain   places where no job may follow another; how often a job is requeued
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from miles_hpc.core.config import RunConfig, SiteConfig, SitePartition, SiteQos
from miles_hpc.core.layouts import asked_nodes, is_split, layout_of
from miles_hpc.core.walltime import format_time, limit_s

__all__ = ["limit_complaints"]


def limit_complaints(run: RunConfig, site: SiteConfig, partitions: Mapping[str, SitePartition]) -> Iterator[str]:
    """What of a run is over a limit, a line each. `partitions` has the partition of each role that has nodes."""
    qos = next((qos for qos in site.qos if qos.name == run.job.qos), None)
    yield from _chain(run, site, partitions)
    yield from _nodes(run, site, partitions, qos)
    yield from _times(run, site, partitions, qos)
    yield from _jobs(run, site, partitions, qos)


def _nodes(
    run: RunConfig, site: SiteConfig, partitions: Mapping[str, SitePartition], qos: SiteQos | None
) -> Iterator[str]:
    for partition in _different(partitions):
        roles = [role for role, its in partitions.items() if its.name == partition.name]
        yield from _over(run, roles, partition.max_nodes, f"partition '{partition.name}' of site '{site.name}'")
    if qos is not None:
        yield from _over(run, list(partitions), qos.max_nodes, f"QOS '{qos.name}' of site '{site.name}'")


def _over(run: RunConfig, roles: list[str], allowed: int, where: str) -> Iterator[str]:
    nodes = {role: asked_nodes(getattr(run.groups, role)) for role in roles}
    if not allowed:
        return
    for role, count in nodes.items():
        if count > allowed:
            yield f"groups.{role}: nodes = {count}: {where} allows {allowed}"
    if sum(nodes.values()) > allowed:
        parts = " + ".join(f"{role} {count}" for role, count in nodes.items())
        yield f"groups: {sum(nodes.values())} nodes ({parts}): {where} allows {allowed}"


def _times(
    run: RunConfig, site: SiteConfig, partitions: Mapping[str, SitePartition], qos: SiteQos | None
) -> Iterator[str]:
    if not run.job.time:
        return  # the partition's default
    asked = limit_s(run.job.time)
    stated = f'job.time = "{run.job.time}"'
    way_out = "ask for less, a run goes on in its next allocation"
    for partition in _different(partitions):
        place: SitePartition | SiteQos = qos if qos is not None and qos.max_time else partition
        kind = "QOS" if place is qos else "partition"
        if place.max_time and asked > limit_s(place.max_time):
            yield f"{stated}: {kind} '{place.name}' of site '{site.name}' allows {place.max_time}: {way_out}"
    for what, partition, nodes in _asked(run, site, partitions):
        limit = next((limit for limit in partition.limits if nodes <= limit.max_nodes), None)
        if limit is not None and asked > limit_s(limit.max_time):
            yield (
                f"{stated}: partition '{partition.name}' of site '{site.name}' allows {limit.max_time} up to "
                f"{limit.max_nodes} nodes, and {what} has {nodes}: {way_out}"
            )
    for partition in _different(partitions):
        roles = [role for role, its in partitions.items() if its.name == partition.name]
        nodes = sum(asked_nodes(getattr(run.groups, role)) for role in roles)
        if partition.node_minutes and nodes * asked / 60 > partition.node_minutes:
            most = format_time(60 * (partition.node_minutes // nodes))
            yield (
                f"{stated}: partition '{partition.name}' of site '{site.name}' allows {partition.node_minutes} "
                f"node-minutes, which is {most} for {nodes} nodes: {way_out}"
            )


def _chain(run: RunConfig, site: SiteConfig, partitions: Mapping[str, SitePartition]) -> Iterator[str]:
    names = [*([run.job.qos] if run.job.qos else []), *(partition.name for partition in _different(partitions))]
    chained = next((name for name in names if name in site.lifecycle.chaining_forbidden), "")
    if chained and run.job.max_allocations > 1:
        yield f"site '{site.name}' forbids jobs that follow each other in '{chained}': set job.max_allocations = 1"
    requeues = site.lifecycle.max_requeues
    if site.requeue and requeues and run.job.max_allocations > requeues + 1:
        yield (
            f"job.max_allocations = {run.job.max_allocations}: site '{site.name}' requeues a job {requeues} times: "
            f"set it to {requeues + 1} or less"
        )


def _jobs(
    run: RunConfig, site: SiteConfig, partitions: Mapping[str, SitePartition], qos: SiteQos | None
) -> Iterator[str]:
    placed = [partition.name for _, partition, _ in _asked(run, site, partitions)]
    counts = [("partition", partition, placed.count(partition.name)) for partition in _different(partitions)]
    for kind, limit, components in [*counts, ("QOS", qos, len(placed))]:
        if limit is None:
            continue
        for verb, most in (("runs", limit.max_running), ("takes", limit.max_submitted)):
            if most and components > most:
                yield (
                    f"{kind} '{limit.name}' of site '{site.name}' {verb} {most} of a user's jobs at once, and "
                    f"a het job counts once for each of its {components} components there: choose another"
                )


def _asked(
    run: RunConfig, site: SiteConfig, partitions: Mapping[str, SitePartition]
) -> list[tuple[str, SitePartition, int]]:
    """What Slurm takes for a job each: whose it is, its partition, its nodes."""
    nodes = {role: asked_nodes(getattr(run.groups, role)) for role in partitions}
    if is_split(layout_of(run, site)) and partitions:
        return [("the job", next(iter(partitions.values())), sum(nodes.values()))]
    return [(f"groups.{role}", partition, nodes[role]) for role, partition in partitions.items()]


def _different(partitions: Mapping[str, SitePartition]) -> list[SitePartition]:
    return list({partition.name: partition for partition in partitions.values()}.values())
