"""miles-hpc cancel: end a run's job."""

from __future__ import annotations

import argparse

from miles_hpc.cli.inputs import find_run_dir
from miles_hpc.cluster.slurm import Slurm
from miles_hpc.cluster.submit import read_job
from miles_hpc.core.errors import UserError

__all__ = ["main"]


def main(args: argparse.Namespace) -> int:
    paths = find_run_dir(args.run_dir)
    job_id = read_job(paths)
    if job_id is None:
        raise UserError(f"{paths.root}: this run was never submitted: nothing to cancel")
    slurm = Slurm()
    active = [component for component in slurm.components(job_id) if component.active]
    if not active:
        print(f"job {job_id} has already ended")
        return 0
    slurm.cancel(job_id)
    print(f"cancelled job {job_id} ({active[0].state}); 'miles-hpc resume {paths.root}' continues the run")
    return 0
