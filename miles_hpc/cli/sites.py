"""miles-hpc sites: list, show, check."""

from __future__ import annotations

import argparse

from miles_hpc.cluster.preflight import check_site
from miles_hpc.cluster.site import site_folders
from miles_hpc.cluster.slurm import Slurm
from miles_hpc.core import env
from miles_hpc.core.load import load_site, resolved_toml, site_names

__all__ = ["main"]


def main(args: argparse.Namespace) -> int:
    folders = site_folders()
    if args.action == "list":
        names = site_names(folders)
        for name in sorted(names):
            site = load_site(name, folders)
            print(f"{name:<{max(map(len, names))}}  verified {site.verified or 'never':<10}  {site.title}")
        return 0
    site = load_site(args.site or str(env.read("MILES_HPC_SITE")), folders)
    if args.action == "show":
        print(resolved_toml(site), end="")
        return 0
    findings = check_site(site, Slurm())
    for finding in findings:
        print(f"{'ok  ' if finding.ok else 'FAIL'}  {finding.text}")
    return 0 if all(finding.ok for finding in findings) else 1
