"""Started by the batch script: runs one allocation, then asks Slurm for the next one when the run isn't finished."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from pathlib import Path

from miles_hpc.cluster.chain import record_outcome
from miles_hpc.cluster.next_allocation import Chain
from miles_hpc.cluster.slurm import Slurm
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
        chain = Chain(run, site, paths, slurm, job_id, attempt)
        if why := chain.begin():
            record_outcome(paths, attempt, "stopped", why)
            print(f"supervisor: not started: {why}", flush=True)
            return exits.FAILED
        starter = SlurmStarter(run, site, paths, attempt, slurm=slurm, job_id=job_id, environ=os.environ)
        supervisor = Supervisor(starter, secret, end_time=chain.end_time(), job_id=job_id)
    except UserError as error:
        print(f"supervisor: error: {error}", file=sys.stderr)
        return exits.USER_ERROR
    code = asyncio.run(supervisor.run())
    if newest_attempt(paths) > attempt:
        print("supervisor: the run was started elsewhere already: no next allocation from here", flush=True)
        return exits.FENCED
    chain.end(code, supervisor.reason, terminated=supervisor.terminated)
    chain.note_nodes({**supervisor.troubled_hosts, **supervisor.lost_nodes})
    chain.next()
    return code


if __name__ == "__main__":
    sys.exit(main())
