"""miles-hpc watch and report: look at a run directory, live or on paper."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

from miles_hpc.cli.inputs import find_run_dir
from miles_hpc.core.paths import RunPaths

if TYPE_CHECKING:
    from miles_hpc.cli.story import RunStory
    from miles_hpc.cluster.job_state import JobVerdict

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


def _job_state(paths: RunPaths) -> Callable[[RunStory], JobVerdict | None] | None:
    """Asks where the run's job stands, as `status` does; None for a run without one."""
    from miles_hpc.cli.standing import Witnesses
    from miles_hpc.cluster.slurm import Slurm
    from miles_hpc.cluster.submit import read_follow_up, read_jobs
    from miles_hpc.core.load import load_prepared

    if not read_jobs(paths):
        return None
    run, _ = load_prepared(paths.root)
    witnesses = Witnesses(run, paths, Slurm(timeout_s=10.0))

    def ask(story: RunStory) -> JobVerdict:
        follow_up = read_follow_up(paths)
        return witnesses.ask(read_jobs(paths), story, follow_up=follow_up, always_accounting=False).verdict

    return ask
