"""Layouts: how the roles of a run share one batch job. Pure rules of run and site.

| layout | components | steps | a role's end |
|---|---|---|---|
| hetjob | one a role | one srun a role | that role starts again |
| hetjob_span | one a role | one srun over all | trainer: all start again; others: the host gets its own step |
| split | one for all roles | one srun a role | as hetjob |
| split_span | one for all roles | one srun over all | as hetjob_span |

One srun means one MPI world, one Slingshot VNI and (in a split job) one IMEX channel over all roles; a component a role
means nodes of different kinds.
"""

from __future__ import annotations

from collections.abc import Iterator

from miles_hpc.core.config import GroupConfig, RunConfig, SiteConfig, SitePartition
from miles_hpc.core.site import Layout

__all__ = [
    "ROLES",
    "asked_nodes",
    "is_split",
    "layout_complaints",
    "layout_of",
    "partition_of",
    "role_partition",
    "roles_in_use",
    "spans",
]

#: Roles with nodes of their own, in the order of components, hosts and MPI ranks: the trainer's come first.
ROLES = ("trainer", "rollout", "sandbox")


def layout_of(run: RunConfig, site: SiteConfig) -> Layout:
    """What the run's jobs look like here: its own choice, or the site's."""
    return run.job.layout or site.layout


def is_split(layout: Layout) -> bool:
    """Whether one component holds the nodes of all roles."""
    return layout in ("split", "split_span")


def spans(layout: Layout) -> bool:
    """Whether one srun starts all roles."""
    return layout in ("hetjob_span", "split_span")


def role_partition(run: RunConfig, site: SiteConfig, role: str) -> SitePartition | None:
    """The partition that a role's nodes are from. With one component for all: the one that all groups name, or the
    first that the site lists for every role in use. None when there is no such."""
    group: GroupConfig = getattr(run.groups, role)
    if not is_split(layout_of(run, site)):
        return partition_of(site, role, group)
    used = roles_in_use(run)
    named = {getattr(run.groups, name).partition for name in used} - {""}
    if named:
        return next((p for p in site.partitions if named == {p.name}), None)
    return next((p for p in site.partitions if set(used) <= set(p.roles)), None)


def roles_in_use(run: RunConfig) -> tuple[str, ...]:
    """Roles that have nodes, in the order of the job's components."""
    return tuple(role for role in ROLES if getattr(run.groups, role).nodes > 0)


def partition_of(site: SiteConfig, role: str, group: GroupConfig) -> SitePartition | None:
    """The partition that a group goes to: its own choice, or the first that the site lists for the role."""
    for partition in site.partitions:
        if partition.name == group.partition if group.partition else role in partition.roles:
            return partition
    return None


def layout_complaints(run: RunConfig, site: SiteConfig) -> Iterator[str]:
    """What of the run's layout doesn't fit the site or the groups."""
    layout = layout_of(run, site)
    if site.layouts and layout not in site.layouts:
        why = f" ({site.layouts_why})" if site.layouts_why else ""
        yield f"job.layout: site '{site.name}' takes {', '.join(site.layouts)}{why}, not '{layout}'"
    if is_split(layout) and site.scheduler != "none":
        yield from _one_component(run, site)
    yield from _spares(run, site)


def _one_component(run: RunConfig, site: SiteConfig) -> Iterator[str]:
    """All roles are on nodes of one kind, so what describes the nodes must be the same for all."""
    used = roles_in_use(run)
    for key in ("partition", "constraint", "mem"):
        stated = {role: getattr(getattr(run.groups, role), key) for role in used}
        if len(set(stated.values()) - {""}) > 1:
            told = ", ".join(f"{role} {value!r}" for role, value in stated.items())
            yield f"groups.*.{key}: {told}: layout '{layout_of(run, site)}' has one kind of node: state it once"
    partition = role_partition(run, site, used[0])
    if partition is None:
        names = ", ".join(p.name for p in site.partitions) or "none"
        yield (
            f"layout '{layout_of(run, site)}': site '{site.name}' lists no partition for all of {', '.join(used)}: its "
            f"partitions are {names}; set groups.trainer.partition"
        )
        return
    total = sum(asked_nodes(getattr(run.groups, role)) for role in used)
    for what, limit in (("has", partition.nodes), ("allows a job", partition.max_nodes)):
        if limit and total > limit:
            yield f"groups: {total} nodes in all, but partition '{partition.name}' of site '{site.name}' {what} {limit}"


def asked_nodes(group: GroupConfig) -> int:
    """Nodes that a group asks Slurm for."""
    return group.nodes + group.spare_nodes if group.nodes else 0


def _spares(run: RunConfig, site: SiteConfig) -> Iterator[str]:
    """A job with --no-kill outlives a node only while every component has two or more at each failure."""
    used = roles_in_use(run)
    spare = [role for role in used if getattr(run.groups, role).spare_nodes]
    if not spare or is_split(layout_of(run, site)):
        return
    for role in used:
        nodes = asked_nodes(getattr(run.groups, role))
        if nodes < 2:
            yield (
                f"groups.{spare[0]}.spare_nodes: a job outlives a node only when every component has two or more "
                f"nodes, and {role} has {nodes}: set groups.{role}.spare_nodes = 1, or job.layout to a split one"
            )
