"""miles-hpc side: start a side job of a run, on the site's nodes or on this machine."""

from __future__ import annotations

import argparse
import json
import sys

from miles_hpc.cli.inputs import find_run_dir
from miles_hpc.cli.side_kinds import make_request, parse_arguments
from miles_hpc.cluster.jobs import JobFailed
from miles_hpc.cluster.side_jobs import SideJob, submit_side_job
from miles_hpc.cluster.slurm import Slurm
from miles_hpc.core.errors import UserError
from miles_hpc.core.load import load_prepared

__all__ = ["main", "show_result"]


def main(args: argparse.Namespace) -> int:
    if args.wait is not None and not args.wait >= 0.0:
        raise UserError(f"--wait {args.wait}: expected seconds, 0 or more")
    paths = find_run_dir(args.run_dir)
    run, site = load_prepared(paths.root)
    request = make_request(
        args.name,
        paths.root,
        parse_arguments(args.arg),
        nodes=args.nodes,
        gpus_per_node=args.gpus_per_node,
        cpus_per_task=args.cpus_per_task,
        time=args.time,
        roles=(args.role,) if args.role else None,
    )
    slurm = None
    if not args.local and site.scheduler == "slurm":
        slurm = Slurm()
        slurm.require()
    job = submit_side_job(run, site, paths, request, slurm=slurm, local=args.local)
    where = f"Slurm job {job.id}" if job.call.executor == "slurm" else "on this machine"
    print(f"side job {job.folder.number} ({job.name}): {where}, output in {job.stdout_path}", file=sys.stderr)
    if args.wait is None:
        return 0
    return show_result(job, args.wait)


def show_result(job: SideJob, deadline_s: float) -> int:
    """Wait, and print what the job returned as JSON; of several tasks what there is, also when one failed.

    Raises JobFailed and DeadlineExpired.
    """
    try:
        value = job.result(deadline_s)
    except JobFailed:
        partial = [result for result in job.results() if result is not None and result.ok]
        if partial and job.call.tasks > 1:
            print(json.dumps([result.value for result in partial], indent=2))
        raise
    print(json.dumps(value, indent=2))
    return 0
