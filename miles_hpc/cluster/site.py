"""Where the data folders lie, which site a command means, and what a role gets from its site."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from miles_hpc.core import env
from miles_hpc.core.config import RunConfig, SiteConfig, SiteEnvSet

__all__ = [
    "data_folder",
    "job_environment",
    "matching_sites",
    "role_environment",
    "role_python",
    "site_folders",
    "site_name",
    "source_root",
    "template_folders",
    "width_variables",
    "with_env_set",
]

#: A proxy is for the world outside, not for what a node asks of itself. Sites add their own networks in `env`.
_NO_PROXY = "localhost,127.0.0.1,::1"
_PACKAGE = Path(__file__).resolve().parents[1]


def source_root() -> Path | None:
    """The repository when the package runs from a source tree; None when it is installed."""
    root = _PACKAGE.parent
    return root if (root / "pyproject.toml").is_file() and (root / "site_configs").is_dir() else None


def data_folder(kind: str) -> Path:
    """The project's own folder of `kind`, sbatch or site_configs: in the source tree, or inside the wheel."""
    root = source_root()
    return root / kind if root is not None else _PACKAGE / "_data" / kind


def site_folders(environ: Mapping[str, str] | None = None) -> list[Path]:
    """Folders with site files, in the order of search: MILES_HPC_SITES, the user's own, the project's."""
    own = env.read("MILES_HPC_SITES", environ)
    folders = [Path(own).expanduser()] if own else []
    return [*folders, Path("~/.config/miles_hpc/sites").expanduser(), data_folder("site_configs")]


def template_folders(environ: Mapping[str, str] | None = None) -> list[Path]:
    """Folders with job templates, in the order of search."""
    own = env.read("MILES_HPC_TEMPLATES", environ)
    return [*([Path(own).expanduser()] if own else []), data_folder("sbatch")]


def site_name(option: str, run: RunConfig, environ: Mapping[str, str] | None = None) -> str:
    """The site that is meant: the command's option, else MILES_HPC_SITE, else the run file's; "" when none says."""
    return option or str(env.read("MILES_HPC_SITE", environ)) or run.site


def matching_sites(
    sites: Iterable[SiteConfig], host: str, cluster: str, environ: Mapping[str, str] | None = None
) -> list[tuple[str, str]]:
    """Names of the sites that this may be, each with its evidence.

    `host` is this host's name, with or without domain; `cluster` is Slurm's ClusterName, "" when it isn't known;
    `environ` is where variables of sites are looked for.
    """
    variables = environ or {}
    found = []
    short = host.partition(".")[0]
    for site in sites:
        pattern = next((one for one in site.host_patterns if re.fullmatch(one, short)), None)
        told = next(((k, v) for k, v in site.host_variables.items() if variables.get(k) == v), None)
        if told is not None:
            found.append((site.name, f"{told[0]} is '{told[1]}'"))
        elif pattern is not None:
            found.append((site.name, f"host {short} matches '{pattern}'"))
        elif cluster and cluster in (site.name, *site.aliases):
            found.append((site.name, f"Slurm's cluster is called '{cluster}'"))
    return found


def role_python(run: RunConfig, site: SiteConfig, role: str) -> str:
    """The interpreter of a role: the run file's, else the site's, else this one. `sglang` falls back to rollout's."""
    chosen = getattr(run.python, role) or getattr(site.python, role)
    if not chosen and role == "sglang":
        return role_python(run, site, "rollout")
    return str(chosen or sys.executable)


def with_env_set(site: SiteConfig, name: str) -> SiteConfig:
    """The site with another of its `env_sets` in force; "" keeps the site's own choice. `name` has been validated."""
    return msgspec.structs.replace(site, env_set=name) if name else site


def role_environment(site: SiteConfig, *, nodes: int) -> dict[str, str]:
    """Variables that the site wants for a role which spans `nodes` nodes, those of the set in force last."""
    several = nodes > 1
    chosen = _env_set(site)
    return {
        **site.env,
        **(site.env_multi_node if several else site.env_single_node),
        **chosen.env,
        **(chosen.env_multi_node if several else chosen.env_single_node),
    }


def width_variables(site: SiteConfig) -> frozenset[str]:
    """Names of the variables that differ between a role on one node and one that spans nodes."""
    chosen = _env_set(site)
    tables = (site.env_single_node, site.env_multi_node, chosen.env_single_node, chosen.env_multi_node)
    return frozenset(name for table in tables for name in table)


def _env_set(site: SiteConfig) -> SiteEnvSet:
    return next((one for one in site.env_sets if one.name == site.env_set), SiteEnvSet(name=""))


def job_environment(run: RunConfig, site: SiteConfig, *, nodes: int) -> dict[str, str]:
    """Variables for a job's processes: where our packages are, output at once, the site's for so many nodes, its proxy.

    PYTHONSAFEPATH: a run folder named like one of our packages must not shadow it, in children either.
    """
    root = source_root()
    import_path = [*([str(root)] if root is not None else []), *run.python_path]
    variables = {"PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1", **role_environment(site, nodes=nodes)}
    if import_path:
        variables["PYTHONPATH"] = ":".join(import_path)
    if site.proxy:
        variables |= {name: site.proxy for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")}
        variables |= {name: _NO_PROXY for name in ("no_proxy", "NO_PROXY") if name not in variables}
    return variables
