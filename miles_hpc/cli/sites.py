"""miles-hpc sites: list, show, check, detect."""

from __future__ import annotations

import argparse
import os
import socket
import sys

from miles_hpc.cluster.preflight import check_site
from miles_hpc.cluster.site import matching_sites, site_folders
from miles_hpc.cluster.site_facts import facts_toml, layouts_text, unknown_facts
from miles_hpc.cluster.slurm import Slurm
from miles_hpc.core import env, exits
from miles_hpc.core.config import SiteConfig
from miles_hpc.core.errors import UserError
from miles_hpc.core.load import load_site, site_names

__all__ = ["main"]


def main(args: argparse.Namespace) -> int:
    folders = site_folders()
    if args.action == "list":
        sites, broken = _readable()
        rows = [_row(site) for site in sites]
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        for row in rows:
            print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
        return exits.USER_ERROR if broken else 0
    if args.action == "detect":
        return _detect()
    site = load_site(args.site or str(env.read("MILES_HPC_SITE")), folders)
    unknown = unknown_facts(site)
    if args.action == "show":
        print(facts_toml(site), end="")
        print("\n# Not known:" if unknown else "\n# Nothing is left open.")
        for key in unknown:
            print(f"#   {key}")
        return 0
    print(f"ok    {site.name}: the file is valid")
    findings = check_site(site, Slurm())
    for finding in findings:
        print(f"{finding.mark:<4}  {finding.text}")
    for key in unknown:
        print(f"open  {key}: not known")
    return 0 if all(finding.ok for finding in findings) else 1


def _readable() -> tuple[list[SiteConfig], bool]:
    """All sites, and whether one was left out: a user's broken file is told of, and the others are shown."""
    folders, sites, broken = site_folders(), [], False
    for name in sorted(site_names(folders)):
        try:
            sites.append(load_site(name, folders))
        except UserError as error:
            print(f"miles-hpc: left out: {error}", file=sys.stderr)
            broken = True
    return sites, broken


def _detect() -> int:
    sites, _ = _readable()
    host = socket.gethostname()
    found = matching_sites(sites, host, str(env.read("SLURM_CLUSTER_NAME")), os.environ)
    for name, evidence in found:
        print(f"{name}  {evidence}")
    if len(found) == 1:
        return 0
    what = "several sites match" if found else f"no site file matches host {host}"
    print(f"{what}: choose one by MILES_HPC_SITE or --site; `miles-hpc sites list` has them", file=sys.stderr)
    return 1


def _row(site: SiteConfig) -> tuple[str, ...]:
    per_node = max([site.node.gpus, *(partition.gpus_per_node for partition in site.partitions)])
    gpus = f"{per_node} x {site.node.gpu or 'GPU'}" if per_node else "no GPUs"
    layouts = layouts_text(site) if site.scheduler != "none" else "-"
    scheduler = site.scheduler if site.scheduler != "none" else "-"
    return (site.name, scheduler, gpus, layouts, f"facts of {site.verified or 'no date'}", site.title)
