"""miles-hpc jobs: the jobs of a run, its own, the next and those beside it; cancelling one of the latter."""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

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

__all__ = ["JobRow", "main", "table_lines"]

_SLURM_S = 15.0  # one answer; slurmctld that is away costs clients 8 s (measured with MessageTimeout=5)
_HEADER = ("side", "job", "name", "state", "age")
_NAME = _HEADER.index("name")
_LEAST_NAME = 8  # columns
_INDENT = "    "


def main(args: argparse.Namespace) -> int:
    paths = find_run_dir(args.run_dir)
    run, site = load_prepared(paths.root)
    slurm = Slurm(timeout_s=_SLURM_S) if site.scheduler == "slurm" else None
    if args.cancel is not None:
        return _cancel(paths, args.cancel, slurm)
    own = (("run", RunJob.open(paths, run.name, slurm)), ("next", RunJob.open_next(paths, run.name, slurm)))
    rows = [_row(kind, job) for kind, job in own if job is not None]
    rows += [_row("side", job) for job in list_side_jobs(paths, slurm)]
    if args.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return 0
    if not rows:
        print("no jobs")
        return 0
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for line in table_lines(rows, paths.root, width):
        print(line)
    return 0


@dataclass(frozen=True)
class JobRow:
    """One job as `jobs` tells it; these are the fields of --json."""

    kind: str  # run: its own job; next: the allocation that waits behind it; side: one beside it
    side: int | None  # number of a side job
    job: str
    name: str
    state: str
    reason: str
    witness: str
    nodes: str
    age_s: float | None  # since its submission
    stdout: str
    stderr: str

    @property
    def cells(self) -> tuple[str, ...]:
        age = "" if self.age_s is None else duration(self.age_s)
        return (self.kind if self.side is None else str(self.side), self.job, self.name, self.state, age)


def table_lines(rows: Sequence[JobRow], root: Path, width: int | None) -> list[str]:
    """A table of `width` columns, whole words and paths where it is None; reasons are below their jobs.

    Where a path has no room beside its job it goes below, in its shortest form: RUN_DIR stands for the
    run directory `root`. Ids, states and paths are never cut, so a line of a very narrow terminal may be longer.
    """
    plain = [_HEADER, *(row.cells for row in rows)]
    widths = [max(len(cells[i]) for cells in plain) for i in range(len(_HEADER))]
    if width is not None:
        beside_name = sum(widths) - widths[_NAME] + 2 * (len(widths) - 1)
        widths[_NAME] = min(widths[_NAME], max(_LEAST_NAME, width - beside_name))
        plain = [(*c[:_NAME], _shortened(c[_NAME], widths[_NAME]), *c[_NAME + 1 :]) for c in plain]
    padded = ["  ".join(f"{cell:<{n}}" for cell, n in zip(cells, widths, strict=True)) for cells in plain]
    room = math.inf if width is None else width
    beside = all(len(padded[0]) + 2 + len(row.stdout) <= room for row in rows)
    lines = [f"{padded[0]}  output" if beside else padded[0].rstrip()]
    for row, text in zip(rows, padded[1:], strict=True):
        lines.append(f"{text}  {row.stdout}" if beside else text.rstrip())
        if row.reason:
            lines += _wrapped(row.reason, width)
        if not beside:
            lines.append(_INDENT + _path_within(row.stdout, root, room - len(_INDENT)))
    return lines


def _shortened(text: str, room: int) -> str:
    """Its middle is left out: run names and the numbers behind them differ at either end."""
    if len(text) <= room:
        return text
    tail = (room - 1) // 2
    return f"{text[: room - 1 - tail]}…{text[-tail:]}"


def _wrapped(text: str, width: int | None) -> list[str]:
    if width is None:
        return [_INDENT + text]
    return textwrap.wrap(
        text, max(width, 20), initial_indent=_INDENT, subsequent_indent=_INDENT, break_on_hyphens=False
    )


def _path_within(path: str, root: Path, room: float) -> str:
    """As it is, else from the present folder, else from the run directory: the first that fits, or the last."""
    forms = [path]
    with suppress(OSError):  # the present folder may be gone
        forms.append(os.path.relpath(path))
    forms.append(f"RUN_DIR/{Path(path).relative_to(root)}")
    return next((form for form in forms if len(form) <= room), forms[-1])


def _row(kind: str, handle: JobHandle) -> JobRow:
    status = handle.status()
    return JobRow(
        kind=kind,
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
