"""Rules of a site: what its file may say, and which sbatch options a run may state there. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from miles_hpc.core.config import GroupConfig, SiteConfig, SitePartition, SiteQos
from miles_hpc.core.errors import UserError
from miles_hpc.core.walltime import parse_time

__all__ = ["directive_complaints", "forbidden_options", "group_complaints", "option_name", "site_complaints"]

_OPTION = re.compile(r"--[a-z][a-z-]*\Z")
_DATE = re.compile(r"20\d\d-\d\d(-\d\d)?\Z")
_VERSION = re.compile(r"(\d+\.\d+(\.\d+)?)?\Z")
_GPU_REQUEST = re.compile(r"--gres[=\s]+gpu|--gpus([=\s]|-per-)|--ntasks-per-gpu|-G")
_ENV_TABLES = ("env", "env_single_node", "env_multi_node")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
#: bash(1), Shell Variables: setting one ends a script under `set -e`.
_READ_ONLY = frozenset({"BASHOPTS", "BASH_VERSINFO", "EUID", "PPID", "SHELLOPTS", "UID"})
_SHORT = {
    "-A": "--account",
    "-C": "--constraint",
    "-D": "--chdir",
    "-G": "--gpus",
    "-J": "--job-name",
    "-N": "--nodes",
    "-c": "--cpus-per-task",
    "-n": "--ntasks",
    "-o": "--output",
    "-p": "--partition",
    "-q": "--qos",
    "-t": "--time",
    "-w": "--nodelist",
    "-x": "--exclude",
}
#: What --network takes for an IMEX channel per segment (sbatch(1), switch/nvidia_imex).
_PER_SEGMENT = "unique-channel-per-segment"
#: Options that are the beginning of a longer option's name and are meant as they stand.
_WHOLE = ("--gpus", "--mem", "--nodes", "--ntasks", "--time", "--exclusive", "--reservation")


def site_complaints(site: SiteConfig) -> Iterator[str]:
    """What is wrong with a site file beyond types, each naming the field."""
    for i, pattern in enumerate(site.host_patterns):
        try:
            re.compile(pattern)
        except re.error as error:
            yield f"'host_patterns[{i}]' = \"{pattern}\": expected a regular expression: {error}"
    for i, source in enumerate(site.sources):
        if isinstance(source, str):
            continue
        if not _DATE.match(source.date):
            yield f"'sources[{i}].date' = \"{source.date}\": expected YYYY-MM-DD or YYYY-MM"
        for key in source.covers:
            if key not in SiteConfig.__struct_fields__:
                yield f"'sources[{i}].covers' names '{key}': expected keys of the site file"
    for key, options in (("forbidden", site.sbatch.forbidden), ("required", site.sbatch.required)):
        for option in options:
            if not _OPTION.match(option):
                yield f'\'sbatch.{key}\' has "{option}": expected a long option without a value, such as "--mem"'
    forbidden = forbidden_options(site)
    for option in site.sbatch.required:
        if option in forbidden:
            yield f"'sbatch.required' has \"{option}\", which is forbidden as well: take it out of one"
    for option in map(option_name, site.directives):
        if option in forbidden:
            yield f"'directives' states {option}, which 'sbatch' forbids"
    if site.gpu_request != "none" and f"--{site.gpu_request}" in forbidden:
        yield f"'gpu_request' = \"{site.gpu_request}\", but --{site.gpu_request} is forbidden by 'sbatch.forbidden'"
    if site.layouts and site.layout not in site.layouts:
        yield f"'layout' = \"{site.layout}\": expected one of 'layouts', {', '.join(site.layouts)}"
    tables: tuple[tuple[str, Sequence[SitePartition | SiteQos]], ...] = (
        ("partitions", site.partitions),
        ("qos", site.qos),
    )
    for kind, limits in tables:
        for i, limit in enumerate(limits):
            if limit.max_time and not _is_time(limit.max_time):
                yield f"'{kind}[{i}].max_time' = \"{limit.max_time}\": expected minutes, HH:MM:SS or D-HH:MM:SS"
            if [other.name for other in limits].count(limit.name) > 1:
                yield f"'{kind}' lists '{limit.name}' twice"
    for i, partition in enumerate(site.partitions):
        sizes = [limit.max_nodes for limit in partition.limits]
        if sizes != sorted(set(sizes)) or not all(sizes):
            yield f"'partitions[{i}].limits': sizes {sizes}: expected each larger than the one before, from 1 on"
        for k, size in enumerate(partition.limits):
            if not _is_time(size.max_time):
                where = f"'partitions[{i}].limits[{k}].max_time'"
                yield f'{where} = "{size.max_time}": expected minutes, HH:MM:SS or D-HH:MM:SS'
    sets = [env_set.name for env_set in site.env_sets]
    for name in sets:
        if sets.count(name) > 1 or not name:
            yield f"'env_sets' lists '{name}' {sets.count(name)} times: expected different names"
    if site.env_set not in (*sets, "") or (sets and not site.env_set):
        yield f"'env_set' = \"{site.env_set}\": expected one of 'env_sets', {', '.join(sets) or 'which is empty'}"
    yield from _topology_complaints(site)
    yield from _variable_complaints(site)
    if site.imex.channel == "segment" and _PER_SEGMENT not in site.fabric.slurm_network.split(","):
        yield f"'imex.channel' = \"segment\": needs {_PER_SEGMENT} in 'fabric.slurm_network'"
    for key in ("slurm_version_seen", "slurm_version_min"):
        if not _VERSION.match(getattr(site, key)):
            yield f"'{key}' = \"{getattr(site, key)}\": expected a version such as 23.11.7"
    if site.compute_internet == "proxy" and not site.proxy:
        yield "'compute_internet' = \"proxy\": 'proxy' is missing"


def _topology_complaints(site: SiteConfig) -> Iterator[str]:
    topology = site.topology
    if topology.segment_nodes and not topology.segment_directive:
        yield f"'topology.segment_nodes' = {topology.segment_nodes}: needs topology.segment_directive = true"
    if topology.domain_nodes:
        usable = topology.domain_nodes - topology.spare_nodes_per_rack
        if usable < 1:
            yield (
                f"'topology.spare_nodes_per_rack' = {topology.spare_nodes_per_rack}: expected fewer than the "
                f"{topology.domain_nodes} nodes of a domain"
            )
        elif topology.segment_nodes > usable:
            yield (
                f"'topology.segment_nodes' = {topology.segment_nodes}: a domain has {topology.domain_nodes} nodes, "
                f"{topology.spare_nodes_per_rack} of them spare: expected {usable} at most"
            )


def _variable_complaints(site: SiteConfig) -> Iterator[str]:
    """Names and values that a batch script can't export."""
    tables = {key: getattr(site, key) for key in _ENV_TABLES}
    for i, one in enumerate(site.env_sets):
        tables |= {f"env_sets[{i}].{key}": getattr(one, key) for key in _ENV_TABLES}
    for key, table in tables.items():
        for name, value in table.items():
            if not _VARIABLE.match(name):
                yield f"'{key}' has \"{name}\": expected a variable's name: letters, digits and '_', no digit first"
            if name in _READ_ONLY:
                yield f"'{key}' has \"{name}\", which bash doesn't let anybody set: take it out"
            if "\0" in value:
                yield f"'{key}.{name}' = {value!r}: expected no NUL character"


def _is_time(text: str) -> bool:
    try:
        parse_time(text)
    except UserError:
        return False
    return True


def option_name(directive: str) -> str:
    """The long name of an sbatch option as a user writes it: "-w n1", "-wn1", "--nodelist=n1" are --nodelist."""
    if directive.startswith("--"):
        return re.split(r"[=\s]", directive, maxsplit=1)[0]
    return _SHORT.get(directive[:2], directive[:2])


def forbidden_options(site: SiteConfig) -> frozenset[str]:
    """Long names of the options that must not be stated at the site."""
    rules = site.sbatch
    closed = {
        "--mem": rules.mem == "forbidden",
        "--exclude": rules.exclude_allowed is False,
        "--nodelist": rules.nodelist_allowed is False,
        "--export": rules.export_allowed is False,
    }
    return frozenset([*rules.forbidden, *(option for option, is_closed in closed.items() if is_closed)])


def directive_complaints(site: SiteConfig, stated: list[str], extra: list[str]) -> Iterator[str]:
    """What of a component's options breaks the site's rules: forbidden ones first, then required ones that lack.

    `extra` are those of them that come from job.extra_directives; a complaint says where to change something.
    """
    forbidden = forbidden_options(site)
    for directive in [*extra, *stated]:
        name = option_name(directive)
        # sbatch takes the beginning of a long option for the option.
        hit = [option for option in forbidden if option == name or (name not in _WHOLE and option.startswith(name))]
        if hit and name.startswith("--") and len(name) > 3:
            where = "job.extra_directives: " if directive in extra else ""
            yield f"{where}site '{site.name}' forbids {sorted(hit)[0]}: take '{directive}' out"
    for directive in [*extra, *stated]:
        if (
            site.imex.per_segment_allowed is False
            and option_name(directive) == "--network"
            and _PER_SEGMENT in directive
        ):
            yield f"site '{site.name}' gives no IMEX channel per segment: take {_PER_SEGMENT} out of '{directive}'"
    for directive in extra:
        # Slurm refuses some mixtures of --gres, --gpus-per-node and --gpus-per-task and takes others for more GPUs.
        if site.gpu_request != "none" and _GPU_REQUEST.match(directive):
            yield (
                f"job.extra_directives: site '{site.name}' asks for GPUs with --{site.gpu_request}: "
                f"set groups.<role>.gpus_per_node and take '{directive}' out"
            )
    names = {option_name(directive) for directive in stated}
    for option in site.sbatch.required:
        if option not in names:
            yield _missing(site, option)


def _missing(site: SiteConfig, option: str) -> str:
    key = {"--account": "job.account", "--qos": "job.qos", "--time": "job.time"}.get(option)
    if key is None:
        return f"site '{site.name}' wants {option} in every job: add it to job.extra_directives"
    known = f" ({', '.join(qos.name for qos in site.qos)})" if key == "job.qos" and site.qos else ""
    return f"{key}: site '{site.name}' wants {option} in every job: set it{known}"


def group_complaints(site: SiteConfig, group: GroupConfig) -> Iterator[str]:
    """What a group asks for in a form that the site refuses; each names the key below groups.<role>."""
    ranks = group.ranks_per_node
    cpus = group.cpus_per_task * ranks
    needed = site.sbatch.cpus_per_gpu_min * group.gpus_per_node
    if cpus < needed:
        yield (
            f"cpus_per_task = {group.cpus_per_task}: site '{site.name}' wants {site.sbatch.cpus_per_gpu_min} CPUs "
            f"a GPU: set it to {-(-needed // ranks)} or more"
        )
    if site.sbatch.mem == "forbidden" and group.mem:
        yield f"mem = \"{group.mem}\": site '{site.name}' takes no memory request: leave it out"
    if site.sbatch.mem == "zero" and group.mem not in ("", "0"):
        yield f"mem = \"{group.mem}\": site '{site.name}' gives whole nodes with --mem=0: leave it out"
    if site.gpu_request == "gpus-per-task" and group.gpus_per_node % ranks:
        yield (
            f"gpus_per_node = {group.gpus_per_node}: site '{site.name}' takes GPUs per task: "
            f"expected a multiple of ranks_per_node = {ranks}"
        )
    segment = site.topology.segment_nodes
    if segment and group.nodes > segment and group.nodes % segment:
        yield f"nodes = {group.nodes}: expected a multiple of the site's topology.segment_nodes = {segment}"
