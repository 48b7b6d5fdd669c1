"""miles-hpc resume: submit the next allocation of a run that ended, from what its directory holds."""

from __future__ import annotations

import argparse

from miles_hpc.cli.follow import follow
from miles_hpc.cli.inputs import complete_at, find_run_dir, render
from miles_hpc.cluster.preflight import check_job
from miles_hpc.cluster.site import with_env_set
from miles_hpc.cluster.slurm import Slurm
from miles_hpc.cluster.submit import check_idle, check_owner, prepare, submit_prepared
from miles_hpc.core.load import load_prepared, load_run, validate

__all__ = ["main"]


def main(args: argparse.Namespace) -> int:
    paths = find_run_dir(args.run_dir)
    _, site = load_prepared(paths.root)
    run = load_run(paths.resolved_toml, args.set)
    validate(run, site)
    site = with_env_set(site, run.job.env_set)
    check_owner(run, paths)
    if (step := complete_at(run, paths)) is not None:
        print(f"run '{run.name}' is complete at step {step}: nothing submitted; more: --set rollout.n_steps=N")
        return 0
    plan, text = render(run, site, paths)
    slurm = Slurm()
    check_job(plan, text, slurm, runtimes=site.container.runtimes)
    check_idle(paths, slurm)
    prepare(run, site, paths, source="", job_text=text)
    print(f"submitted job {submit_prepared(paths, slurm)}: continue run '{run.name}' in {paths.root}")
    return follow(paths) if args.watch else 0
