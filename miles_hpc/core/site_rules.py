"""Rules of a site: what its file may say, and which sbatch options a run may state there. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from miles_hpc.core.config import GroupConfig, RunConfig, SiteConfig, SitePartition, SiteQos

__all__ = ["directive_complaints", "forbidden_options", "group_complaints", "option_name", "site_complaints"]

_OPTION = re.compile(r"--[a-z][a-z-]*\Z")
_DATE = re.compile(r"20\d\d-\d\d(-\d\d)?\Z")
_TIME = re.compile(r"((\d+-\d+|\d+)(:\d\d?){0,2}|UNLIMITED)?\Z")
_VERSION = re.compile(r"(\d+\.\d+(\.\d+)?)?\Z")
_GPU_REQUEST = re.compile(r"--gres[=\s]+gpu|--gpus([=\s]|-per-)|--ntasks-per-gpu|-G")
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
            if not _TIME.match(limit.max_time):
                yield f"'{kind}[{i}].max_time' = \"{limit.max_time}\": expected minutes, HH:MM:SS or D-HH:MM:SS"
            if [other.name for other in limits].count(limit.name) > 1:
                yield f"'{kind}' lists '{limit.name}' twice"
    for key in ("slurm_version_seen", "slurm_version_min"):
        if not _VERSION.match(getattr(site, key)):
            yield f"'{key}' = \"{getattr(site, key)}\": expected a version such as 23.11.7"
    if site.topology.segment_nodes and not site.topology.segment_directive:
        yield f"'topology.segment_nodes' = {site.topology.segment_nodes}: needs topology.segment_directive = true"
    if site.compute_internet == "proxy" and not site.proxy:
        yield "'compute_internet' = \"proxy\": 'proxy' is missing"


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


def group_complaints(run: RunConfig, site: SiteConfig, group: GroupConfig, partition: SitePartition) -> Iterator[str]:
    """What a group asks for and the site refuses; each names the key below groups.<role>."""
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
    if partition.max_nodes and group.nodes > partition.max_nodes:
        yield f"nodes = {group.nodes}: partition '{partition.name}' of site '{site.name}' allows {partition.max_nodes}"
    segment = site.topology.segment_nodes
    if segment and group.nodes > segment and group.nodes % segment:
        yield f"nodes = {group.nodes}: expected a multiple of the site's topology.segment_nodes = {segment}"
    qos = next((qos for qos in site.qos if qos.name == run.job.qos), None)
    if qos is not None and qos.max_nodes and group.nodes > qos.max_nodes:
        yield f"nodes = {group.nodes}: QOS '{qos.name}' of site '{site.name}' allows {qos.max_nodes}"
    chained = next((place for place in (run.job.qos, partition.name) if place in site.lifecycle.chaining_forbidden), "")
    if chained and run.job.max_allocations > 1:
        yield f"site '{site.name}' forbids jobs that follow each other in '{chained}': set job.max_allocations = 1"
    split = (run.job.layout or site.layout) in ("split", "split_span")
    components = 1 if split else sum(getattr(run.groups, name).nodes > 0 for name in ("trainer", "rollout", "sandbox"))
    for kind, limit in (("partition", partition), ("QOS", qos)):
        if limit is not None and limit.max_running and components > limit.max_running:
            yield (
                f"{kind} '{limit.name}' of site '{site.name}' runs {limit.max_running} of a user's jobs at once, and "
                f"a het job of {components} components counts {components} times: choose another"
            )
