"""Started by the batch script: runs one allocation, then asks Slurm for the next one when the run isn't finished."""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import sys
import time
from pathlib import Path

from miles_hpc.cluster.slurm import Slurm
from miles_hpc.cluster.submit import submit_prepared
from miles_hpc.core import env, exits
from miles_hpc.core.errors import UserError
from miles_hpc.core.paths import RunPaths


def main() -> int:
    parser = argparse.ArgumentParser(prog="supervisor", description=__doc__)
    parser.add_argument("--run-dir", required=True, type=Path)
    args = parser.parse_args()

    from miles_hpc.control.auth import load_secret
    from miles_hpc.control.terms import claim_attempt, newest_attempt
    from miles_hpc.controller.steps import SlurmStarter
    from miles_hpc.controller.supervisor import Supervisor
    from miles_hpc.core.load import load_prepared

    try:
        paths = RunPaths(args.run_dir.resolve())
        run, site = load_prepared(paths.root)
        secret = load_secret(paths.secret)
        job_id = env.read("SLURM_JOB_ID")
        if job_id is None:
            raise UserError("SLURM_JOB_ID is not set: the supervisor runs inside a Slurm job; use 'miles-hpc local'")
        slurm = Slurm()
        attempt = claim_attempt(paths)
        if attempt > run.job.max_allocations:
            raise UserError(f"allocation {attempt} is more than job.max_allocations = {run.job.max_allocations}")
        starter = SlurmStarter(run, site, paths, attempt, slurm=slurm, job_id=job_id, environ=os.environ)
        remaining_s = slurm.remaining_s(job_id)
        end_time = None if math.isinf(remaining_s) else time.time() + remaining_s
        supervisor = Supervisor(starter, secret, end_time=end_time, job_id=job_id)
    except UserError as error:
        print(f"supervisor: error: {error}", file=sys.stderr)
        return exits.USER_ERROR
    code = asyncio.run(supervisor.run())
    if code == exits.NEXT_ALLOCATION and not supervisor.terminated:
        if newest_attempt(paths) > attempt:
            print("supervisor: the run was started elsewhere already: no next allocation from here", flush=True)
            return exits.FENCED
        if attempt >= run.job.max_allocations:
            last = f"allocation {attempt} was the last of job.max_allocations = {run.job.max_allocations}"
            print(f"supervisor: {last}: to go on, raise it and submit again", flush=True)
            return code
        _next_allocation(slurm, site.requeue, job_id, paths)
    return code


def _next_allocation(slurm: Slurm, requeue: bool, job_id: int, paths: RunPaths) -> None:
    """Requeue this job, or hand in its script again where the site doesn't let users requeue."""
    if requeue:
        slurm.requeue(job_id)  # Slurm ends this script now
    else:
        print(f"supervisor: next allocation is job {submit_prepared(paths, slurm)}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
