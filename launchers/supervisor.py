"""Started by the batch script: runs one allocation, then asks Slurm for the next one when the run isn't finished.

Whatever breaks in between, the question of the next allocation is settled and said: a signal that comes before there is
an event loop, a role that can't be placed, an error of our own.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from miles_hpc.cluster.chain import record_outcome
from miles_hpc.cluster.next_allocation import Chain
from miles_hpc.cluster.slurm import Slurm
from miles_hpc.cluster.submit import job_before
from miles_hpc.core import env, exits
from miles_hpc.core.errors import UserError
from miles_hpc.core.paths import RunPaths

if TYPE_CHECKING:
    from miles_hpc.controller.supervisor import Supervisor

_ENDS = (signal.SIGTERM, signal.SIGINT)
_SIGNALS = (*_ENDS, signal.SIGUSR1, signal.SIGUSR2)
#: For whoever reads the output of a job that Slurm calls FAILED, as it does with any code but 0.
_MEANINGS = {
    exits.DONE: "complete",
    exits.NEXT_ALLOCATION: "paused",
    exits.USER_ERROR: "bad input",
    exits.FENCED: "a newer start has the run",
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="supervisor", description=__doc__)
    parser.add_argument("--run-dir", required=True, type=Path)
    args = parser.parse_args()
    early: list[int] = []  # without a handler a signal ends this process, and the chain with it
    for number in _SIGNALS:
        signal.signal(number, lambda number, _: early.append(number))

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
        if (other := job_before(paths, slurm, job_id)) is not None:
            print(f"supervisor: not started: job {other} has this run, job {job_id} is one too many", flush=True)
            return exits.FENCED
        attempt = claim_attempt(paths)
        chain = Chain(run, site, paths, slurm, job_id, attempt)
        if why := chain.begin():
            record_outcome(paths, attempt, "stopped", why)
            print(f"supervisor: not started: {why}", flush=True)
            return exits.FAILED
    except (UserError, OSError) as error:
        print(f"supervisor: error: {error}", file=sys.stderr)
        return exits.USER_ERROR if isinstance(error, UserError) else exits.FAILED
    supervisor, reason = None, ""
    try:
        starter = SlurmStarter(run, site, paths, attempt, slurm=slurm, job_id=job_id, environ=os.environ)
        supervisor = Supervisor(starter, secret, end_time=chain.end_time(), job_id=job_id, look=chain.look)
        code = run_unless_ended(supervisor, early)
        reason = supervisor.reason
    except UserError as error:
        code, reason = exits.USER_ERROR, str(error)
        print(f"supervisor: error: {error}", file=sys.stderr)
    except Exception as error:
        code, reason = exits.FAILED, f"{type(error).__name__}: {error}"
        traceback.print_exc()
    for number in _SIGNALS:  # the rest takes seconds, unless Slurm is away; why the job ends is in its output
        signal.signal(number, signal.SIG_IGN)
    if newest_attempt(paths) > attempt:
        print("supervisor: the run was started elsewhere already: no next allocation from here", flush=True)
        return exits.FENCED
    if not paths.outcome(attempt).exists():
        record_outcome(paths, attempt, "failed", reason)
    chain.end(code, reason, terminated=supervisor is not None and supervisor.terminated)
    if supervisor is not None:
        chain.note_nodes({**supervisor.troubled_hosts, **supervisor.lost_nodes})
    chain.next()
    print(f"supervisor: exit code {code}: {_MEANINGS.get(code, 'failed')}, {chain.outlook()}", flush=True)
    return code


def run_unless_ended(supervisor: Supervisor, early: list[int]) -> int:
    """The allocation's exit code. Told to end already, it isn't begun; what a notice says, the clock does too."""
    if set(early) & set(_ENDS):
        supervisor.terminated, supervisor.reason = True, "ended from outside before it had started"
        return exits.FAILED
    return asyncio.run(supervisor.run())


if __name__ == "__main__":
    sys.exit(main())
