"""What a site file doesn't know, and how its facts are summed up in a line. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from miles_hpc.core import toml
from miles_hpc.core.config import SiteConfig
from miles_hpc.core.site import SiteSource

__all__ = ["facts_toml", "layouts_text", "uncovered_facts", "unknown_facts"]

#: Keys whose absence says "nothing special here", not "nobody knows".
_ABSENT_IS_FINE = {
    "aliases", "directives", "env", "env_multi_node", "env_set", "env_sets", "env_single_node", "gpu_request",
    "host_variables", "inherits", "interface",
    "layouts_why", "modules", "notes", "proxy", "python", "qos", "slurm_version_min", "sources", "title", "verified",
    "sbatch.cpus_per_gpu_min", "sbatch.forbidden", "sbatch.gpu_bind", "sbatch.required",
    "topology.segment_nodes", "lifecycle.chaining_forbidden",
}  # fmt: skip
#: The same inside lists of tables.
_ABSENT_IS_FINE_IN: dict[str, set[str]] = {
    "partitions": {
        "constraint",
        "gres",
        "roles",
        "max_submitted",
        "preemptable",
        "gpus_per_node",
        "limits",
        "node_minutes",
    },
    "qos": {"max_submitted", "preemptable"},
    "file_systems": {"stripes", "quota_inodes"},
}
#: What a file says about itself: no facts of the cluster.
_NO_FACTS = {"name", "inherits", "title", "sources", "verified", "notes", "python", "scheduler", "aliases"}
_SLINGSHOT = {"fabric.vni_strategy", "fabric.slurm_network"}
_NVLINK_DOMAIN = {
    "topology.domain_gpus", "topology.domain_nodes", "topology.segment_directive", "topology.spare_nodes_per_rack",
    "topology.may_span", "imex.channel", "imex.per_segment_allowed", "imex.max_channels",
}  # fmt: skip
_PREEMPTION = {"lifecycle.preempt_grace_s", "lifecycle.preempt_signals", "lifecycle.preempt_user_signal"}
_GPUS = {"node.gpus", "node.gpu", "node.gpu_vendor", "node.gpu_nics"}
_PURGE = {"purge_basis", "touch_forbidden"}


def unknown_facts(site: SiteConfig) -> list[str]:
    """Dotted keys of facts that the merged site leaves open, in the order of the schema; none without a scheduler."""
    if site.scheduler == "none":
        return []
    found: list[str] = []
    for key in site.__struct_fields__:
        value = getattr(site, key)
        if key in _ABSENT_IS_FINE_IN:
            found += _unknown_items(key, value)
        elif isinstance(value, msgspec.Struct) and key not in _ABSENT_IS_FINE:
            found += [f"{key}.{name}" for name in value.__struct_fields__ if _absent(getattr(value, name))]
        elif _absent(value):
            found.append(key)
        elif key == "mpi" and key not in _covered(site):
            found.append(f"mpi ({value} is tried)")
    beside = _ABSENT_IS_FINE | _irrelevant(site)
    return [key for key in found if key not in beside]


def _irrelevant(site: SiteConfig) -> set[str]:
    """Facts that such a cluster hasn't got: VNIs without Slingshot, NICs of GPUs without GPUs."""
    with_gpus = any(partition.gpus_per_node for partition in site.partitions)
    with_domain = bool(site.topology.domain_gpus or site.topology.domain_nodes)
    preemptable = [*(partition.preemptable for partition in site.partitions), *(qos.preemptable for qos in site.qos)]
    preempts = not preemptable or any(answer is not False for answer in preemptable)
    return (
        (set() if with_gpus else _GPUS)
        | (set() if with_domain else _NVLINK_DOMAIN)
        | (set() if site.fabric.kind == "cxi" else _SLINGSHOT)
        | (set() if preempts else _PREEMPTION)
    )


def uncovered_facts(site: SiteConfig) -> list[str]:
    """Keys that the merged site states and no source covers."""
    covered = _covered(site)
    default = SiteConfig(name=site.name)
    stated = [key for key in site.__struct_fields__ if getattr(site, key) != getattr(default, key)]
    if not site.requeue:  # the careful choice, also where nobody knows
        stated.remove("requeue")
    return [key for key in stated if key not in covered | _NO_FACTS]


def facts_toml(site: SiteConfig) -> str:
    """The merged site as TOML with what is known only; a comment stands where nobody knows: "# userns: not known".

    Loads back equal to `site`, since what is left out is what is absent.
    """
    unknown = set(unknown_facts(site))
    lines = _table_lines(site, "", unknown)
    for key in site.__struct_fields__:
        value = getattr(site, key)
        if isinstance(value, msgspec.Struct):
            lines += _section(f"[{key}]", _table_lines(value, f"{key}.", unknown))
        elif _are_tables(value):
            for item in value:
                label = getattr(item, "name", None) or getattr(item, "path", "")
                lines += _section(f"[[{key}]]", _table_lines(item, f"{key}[{label}].", unknown))
    for key in site.__struct_fields__:
        if isinstance(value := getattr(site, key), dict) and value:
            lines += ["", *toml.dumps({key: value}).splitlines()]
    return "\n".join(lines) + "\n"


def _section(header: str, lines: list[str]) -> list[str]:
    return ["", header, *lines] if lines else []


def _table_lines(struct: msgspec.Struct, path: str, unknown: set[str]) -> list[str]:
    """What a table holds. The file's own tables come after it, under headers; those of an item stand in it."""
    lines = []
    for field in msgspec.structs.fields(struct):
        value = getattr(struct, field.name)
        below = isinstance(value, msgspec.Struct | dict) or _are_tables(value)
        if f"{path}{field.name}" in unknown:
            lines.append(f"# {field.name}: not known")
        elif (field.required or not _absent(value)) and (path or not below):
            lines.append(f"{field.name} = {toml.inline(value)}")
    return lines


def _are_tables(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, msgspec.Struct) for item in value)


def layouts_text(site: SiteConfig) -> str:
    """Layouts that may be used: "hetjob split", or the one that is used with a question mark when nobody says."""
    return " ".join(site.layouts) or f"{site.layout}?"


def _covered(site: SiteConfig) -> set[str]:
    return {key for source in site.sources if isinstance(source, SiteSource) for key in source.covers}


def _unknown_items(key: str, items: list[Any]) -> list[str]:
    """partitions[batch].max_time: items are told apart by their names; an empty list is unknown as a whole."""
    found = [] if items else [key]
    for item in items:
        label = getattr(item, "name", None) or item.path
        fine = _ABSENT_IS_FINE_IN[key] | (_PURGE if key == "file_systems" and not item.purge_days else set())
        names = [name for name in item.__struct_fields__ if name not in fine]
        found += [f"{key}[{label}].{name}" for name in names if _absent(getattr(item, name))]
    return found


def _absent(value: Any) -> bool:
    """False and 0.0 are answers; None, "", 0, empty and "unknown" are none."""
    return value is None or value == "unknown" or (not isinstance(value, bool) and value in ("", 0, [], {}))
