"""miles-hpc cancel: end a run's job and the one that would follow it."""

from __future__ import annotations

import argparse

from miles_hpc.cli.inputs import find_run_dir
from miles_hpc.cluster.chain import is_cancelled, set_cancelled
from miles_hpc.cluster.slurm import Slurm
from miles_hpc.cluster.submit import drop_follow_up, read_follow_up, read_job
from miles_hpc.core.errors import MilesError, UserError

__all__ = ["main"]


def main(args: argparse.Namespace) -> int:
    paths = find_run_dir(args.run_dir)
    job_id = read_job(paths)
    if job_id is None:
        raise UserError(f"{paths.root}: this run was never submitted: nothing to cancel")
    slurm = Slurm()
    earlier = is_cancelled(paths)
    set_cancelled(paths, True)  # before anything is asked or ends: what ends might ask for the next allocation
    try:
        follower = read_follow_up(paths)
        jobs = [job for job in (job_id, follower) if job is not None]
        states = {job: [c.state for c in slurm.components(job) if c.active] for job in jobs}
        if not any(states.values()):
            set_cancelled(paths, earlier)
            print(f"job {job_id} has already ended")
            return 0
        drop_follow_up(paths, slurm)
        for job in jobs:
            if states[job] and job != follower:
                slurm.cancel(job)
    except MilesError as error:
        raise MilesError(
            f"{error}: no further allocation will start, but jobs may be running: cancel again when Slurm answers"
        ) from error
    told = ", ".join(f"job {job} ({states[job][0]})" for job in jobs if states[job])
    print(f"cancelled {told}; 'miles-hpc resume {paths.root}' continues the run")
    return 0
