"""miles-hpc jobs: the jobs of a run, its own and those beside it, and cancelling one of the latter."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass

from miles_hpc.cli.inputs import find_run_dir
from miles_hpc.cli.wording import duration
from miles_hpc.cluster.jobs import JobHandle
from miles_hpc.cluster.run_job import RunJob
from miles_hpc.cluster.side_folder import SideFolder
from miles_hpc.cluster.side_jobs import SideJob, list_side_jobs
from miles_hpc.cluster.slurm import Slurm
from miles_hpc.core.errors import UserError
from miles_hpc.core.load import load_prepared
from miles_hpc.core.paths import RunPaths

__all__ = ["main"]

_SLURM_S = 15.0  # one answer; slurmctld that is away costs clients 8 s (measured with MessageTimeout=5)


def main(args: argparse.Namespace) -> int:
    paths = find_run_dir(args.run_dir)
    run, site = load_prepared(paths.root)
    slurm = Slurm(timeout_s=_SLURM_S) if site.scheduler == "slurm" else None
    if args.cancel is not None:
        return _cancel(paths, args.cancel, slurm)
    own = RunJob.open(paths, run.name, slurm)
    handles: list[JobHandle] = [*([own] if own is not None else []), *list_side_jobs(paths, slurm)]
    rows = [_row(handle) for handle in handles]
    if args.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return 0
    if not rows:
        print("no jobs")
        return 0
    table = [("side", "job", "name", "state", "age", "output"), *(row.cells for row in rows)]
    widths = [max(len(cells[i]) for cells in table) for i in range(len(table[0]))]
    for cells, reason in zip(table, ("", *(row.reason for row in rows)), strict=True):
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip())
        if reason:
            print(f"    {reason}")
    return 0


@dataclass(frozen=True)
class _Row:
    side: int | None  # number of a side job; None for the run's own job
    job: str
    name: str
    state: str
    reason: str
    witness: str
    nodes: str
    age_s: float | None
    stdout: str
    stderr: str

    @property
    def cells(self) -> tuple[str, ...]:
        side = "" if self.side is None else str(self.side)
        age = "" if self.age_s is None else duration(self.age_s)
        return (side, self.job, self.name, self.state, age, self.stdout)


def _row(handle: JobHandle) -> _Row:
    status = handle.status()
    return _Row(
        side=handle.folder.number if isinstance(handle, SideJob) else None,
        job=handle.id,
        name=handle.name,
        state=str(status.state),
        reason=status.reason,
        witness=status.witness,
        nodes=status.nodes,
        age_s=None if handle.submitted is None else max(0.0, time.time() - handle.submitted),
        stdout=str(handle.stdout_path),
        stderr=str(handle.stderr_path),
    )


def _cancel(paths: RunPaths, number: int, slurm: Slurm | None) -> int:
    root = paths.side_jobs / f"{number:04d}"
    if not root.is_dir():
        raise UserError(f"no side job {number} in {paths.root}: 'miles-hpc jobs {paths.root}' lists them")
    job = SideJob(SideFolder(root), slurm)
    before = job.status()
    if before.ended:
        print(f"side job {number} ({job.name}) has already ended: {before}")
        return 0
    job.cancel()
    print(f"cancelled side job {number} ({job.name}), which was {before.state}")
    return 0
