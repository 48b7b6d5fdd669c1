"""From names and files to a `Context`; the same on the login node and on the nodes that it asks."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from miles_hpc.cluster.preflight.contract import Context
from miles_hpc.cluster.site import matching_sites, site_folders, site_name
from miles_hpc.core import env
from miles_hpc.core.config import RunConfig, SiteConfig
from miles_hpc.core.errors import UserError
from miles_hpc.core.load import load_prepared, load_run, load_site, site_names, validate, with_absolute_paths
from miles_hpc.core.paths import RunPaths

__all__ = ["make_context"]


def make_context(
    *,
    site: str = "",
    run: Path | None = None,
    overrides: Sequence[str] = (),
    run_dir: Path | None = None,
    compute: bool | None = None,
    environ: Mapping[str, str] | None = None,
) -> Context:
    """What the checks are about. Reads only. Raises UserError for files that don't load or don't fit each other.

    Without `run`, a prepared run directory brings its own run and site. The site is `site`, else MILES_HPC_SITE, the
    run's, or the one that matches this host; None when nothing says. `compute` None: as Slurm's variables tell.
    """
    environ = dict(os.environ if environ is None else environ)
    config, chosen = _read(site, run, overrides, run_dir, environ)
    if run_dir is None and config is not None:
        run_dir = Path.cwd() / (config.run_dir or f"runs/{config.name}")
    if compute is None:
        compute = "SLURM_JOB_ID" in environ or (chosen is not None and chosen.scheduler == "none")
    return Context(site=chosen, run=config, run_dir=run_dir, compute=compute, environ=environ)


def _read(
    site: str, run: Path | None, overrides: Sequence[str], run_dir: Path | None, environ: Mapping[str, str]
) -> tuple[RunConfig | None, SiteConfig | None]:
    if run is not None:
        config = with_absolute_paths(load_run(run, overrides), Path.cwd())
        chosen = load_site(site_name(site, config, environ), site_folders(environ))
        validate(config, chosen)
        return config, chosen
    if overrides:
        raise UserError("--set: changes a run file, and none is given: add --run RUN.toml")
    if run_dir is not None and RunPaths(run_dir).resolved_toml.is_file():
        config, prepared = load_prepared(run_dir)
        return config, load_site(site, site_folders(environ)) if site else prepared
    name = site or str(env.read("MILES_HPC_SITE", environ)) or _detected(environ)
    return None, load_site(name, site_folders(environ)) if name else None


def _detected(environ: Mapping[str, str]) -> str:
    """The one site that this host may be; "" when none or several match."""
    folders = site_folders(environ)
    sites = [load_site(name, folders) for name in sorted(site_names(folders))]
    found = matching_sites(sites, socket.gethostname(), str(env.read("SLURM_CLUSTER_NAME", environ)))
    return found[0][0] if len(found) == 1 else ""
