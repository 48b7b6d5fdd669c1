"""miles-hpc watch and report: look at a run directory, live or on paper."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from miles_hpc.cli.inputs import find_run_dir
from miles_hpc.core.paths import RunPaths

__all__ = ["follow", "main"]


def main(args: argparse.Namespace) -> int:
    paths = find_run_dir(args.run_dir)
    if args.command == "watch":
        return follow(paths, once=args.once)
    from miles_hpc.cli.report import write_report

    for path in write_report(paths.root):
        print(path)
    return 0


def follow(paths: RunPaths, *, once: bool = False) -> int:
    """The live view, until the run ends or its job does; returns watch's exit code."""
    from miles_hpc.cli.watch import watch

    return int(watch(paths.root, once=once, job_state=_job_state(paths)))


def _job_state(paths: RunPaths) -> Callable[[], str] | None:
    """Asks Slurm for the state of the run's newest job; None for a run without one."""
    from miles_hpc.cluster.slurm import Slurm
    from miles_hpc.cluster.submit import read_job

    if read_job(paths) is None:
        return None
    slurm = Slurm(timeout_s=10.0)

    def ask() -> str:
        job_id = read_job(paths)
        components = [] if job_id is None else slurm.components(job_id)
        if not components:
            return ""
        leader = components[0]
        return f"{leader.state} ({leader.reason})" if leader.reason else leader.state

    return ask
