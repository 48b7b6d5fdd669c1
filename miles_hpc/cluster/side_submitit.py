"""submitit's Slurm executor with this project's Slurm client underneath. Imports submitit: import it in functions.

submitit 1.5 starts sbatch without a time limit and with the caller's SLURM_* variables, which one allocation then
leaks into the next job; and it asks sacct for states, which fails where there is no accounting. Here the client
submits, and states are `cluster.jobs`' business: nothing of submitit's watcher is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from submitit.slurm.slurm import SlurmExecutor, SlurmJob

from checkpoints.publish import publish_bytes
from miles_hpc.cluster.submit import SubmittingScheduler

__all__ = ["SiteExecutor"]


class SiteExecutor(SlurmExecutor):  # type: ignore[misc] # submitit isn't followed by the type checker
    """Submits through `slurm`; what that raises (UserError for a refused script) passes through `submit`.

    `python` is a shell command, to which submitit appends its own module and the folder. `exclude` are nodes that the
    job is not to get.
    """

    def __init__(self, folder: Path, slurm: SubmittingScheduler, *, python: str, exclude: Sequence[str] = ()) -> None:
        self._slurm = slurm
        self._exclude = exclude
        super().__init__(folder, python=python)

    @classmethod
    def affinity(cls) -> int:
        """submitit's test for Slurm, which is whether srun is on PATH here: only the job needs srun."""
        return 2

    def _submit_command(self, command: str) -> Any:
        text = self._make_submission_file_text(command, "")
        job_id = self._slurm.submit(text, exclude=self._exclude)
        job = SlurmJob(folder=self.folder, job_id=str(job_id), tasks=list(range(self._num_tasks())))
        publish_bytes(job.paths.submission_file, text.encode(), mode=0o600)
        return job
