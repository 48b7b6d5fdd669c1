"""Side jobs: evaluation, checks, exports and sweeps beside a run, through submitit, seen through a JobHandle.

    SideRequest ─plan_side_job─▶ SidePlan ─▶ side_jobs/0003/call.json ─▶ submitit ─▶ SideJob
                                                   ▲                        │
                                              result-0.json ◀── run_call ◀──┘   on a node of the site, or here

| evidence of a side job's state, first to last | says |
|---|---|
| result-<task>.json of all tasks | COMPLETED, or FAILED with what was raised |
| ended.json | an end that was seen before; Slurm forgets |
| scontrol, sacct (cluster.jobs) | Slurm's state; an end without result is kept in ended.json |
| the keeper's process | RUNNING, or FAILED when it is gone without a word |
| nobody | UNKNOWN |
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from miles_hpc.cluster.chain import bad_nodes
from miles_hpc.cluster.jobs import JobFailed, JobStatus, Witness, await_end, judge, look
from miles_hpc.cluster.side_check import check_call
from miles_hpc.cluster.side_folder import Call, Ended, SideFolder, TaskResult, create, side_folders
from miles_hpc.cluster.side_keeper import is_alive
from miles_hpc.cluster.side_plan import SidePlan, SideRequest, plan_side_job
from miles_hpc.cluster.slurm_states import JobState
from miles_hpc.cluster.submit import SubmittingScheduler
from miles_hpc.core.config import RunConfig, SiteConfig
from miles_hpc.core.deadline import Deadline
from miles_hpc.core.errors import DeadlineExpired, MilesError, UserError
from miles_hpc.core.paths import RunPaths

__all__ = ["SideJob", "SideScheduler", "list_side_jobs", "submit_side_job"]

#: A shared disk may show a file so much later than Slurm shows the end of the job that wrote it.
_RESULT_LAG_S = 10.0
_KEEPER_S = 60.0
#: What submitit raises in a function at the time limit (submitit.core.utils).
_TIME_LIMIT_KIND = "UncompletedJobError"
_TAIL_BYTES = 4096


class SideScheduler(SubmittingScheduler, Witness, Protocol):
    """The part of `Slurm` that side jobs need."""


class SideJob:
    """One side job, here or in another process: everything about it is in its folder. A JobHandle.

    `slurm` may be None where there is none: a job of Slurm's is UNKNOWN then, unless its folder tells its end.
    """

    def __init__(self, folder: SideFolder, slurm: Witness | None) -> None:
        """Raises UserError for a folder that isn't one, or that others can write to."""
        self.folder = folder
        self.call: Call = folder.call()
        self._slurm = slurm

    @property
    def id(self) -> str:
        submitted = self.folder.submitted()
        return "" if submitted is None else submitted.id

    @property
    def name(self) -> str:
        return self.call.name

    @property
    def submitted(self) -> float | None:
        return self.call.created or None

    @property
    def stdout_path(self) -> Path:
        """Of the first task; those of others have their number in the second place."""
        return self.folder.root / f"{self.id}_0_log.out"

    @property
    def stderr_path(self) -> Path:
        return self.folder.root / f"{self.id}_0_log.err"

    def status(self) -> JobStatus:
        """See JobHandle and the module's table. An end that is seen for the first time is kept in the folder."""
        results = self.results()
        status = _by_results(results)
        if status is not None:
            return status
        ended = self.folder.ended()
        if ended is not None:
            return JobStatus(ended.state, ended.reason, ended.witness, ended.nodes)
        status = self._local_status() if self.call.executor == "local" else self._slurm_status()
        if status.ended:
            status = _by_results(self.results()) or status  # it may have come in the meantime
        if status.ended and status.witness != "result":
            self.folder.write(
                Ended(
                    state=status.state,
                    reason=status.reason,
                    witness=status.witness,
                    nodes=status.nodes,
                    time=time.time(),
                )
            )
        return status

    def state(self) -> JobState:
        return self.status().state

    def done(self) -> bool:
        return self.status().ended

    def results(self) -> list[TaskResult | None]:
        """What each task has left behind so far; None for one that hasn't."""
        return [self.folder.result(task) for task in range(self.call.tasks)]

    def result(self, deadline_s: float) -> Any:
        """See JobHandle: what the function returned; of several tasks a list, in the order of their ranks."""
        status = await_end(self, deadline_s)
        if status.state is not JobState.COMPLETED:
            raise self._failure(status)
        values = [result.value for result in self.results() if result is not None]
        return values[0] if self.call.tasks == 1 else values

    def exception(self) -> JobFailed | None:
        status = self.status()
        return self._failure(status) if status.ended and status.state is not JobState.COMPLETED else None

    def cancel(self) -> None:
        """See JobHandle. The tasks end at once on SIGTERM. Raises UserError for a job of another host."""
        if self.status().ended:
            return
        submitted = self.folder.submitted()
        if submitted is None:
            raise UserError(f"side job {self.folder.number}: was never submitted: nothing to cancel")
        self.folder.ask_cancel(time.time())
        if self.call.executor == "slurm":
            if self._slurm is None:
                raise UserError(f"side job {self.folder.number}: Slurm's job {submitted.id}: there is no Slurm here")
            self._slurm.cancel(int(submitted.id))
        elif is_alive(submitted) is None:
            raise UserError(f"side job {self.folder.number}: runs on {submitted.host}: cancel it there")
        elif is_alive(submitted):
            os.kill(submitted.pid, signal.SIGTERM)

    # -- inside

    def _failure(self, status: JobStatus) -> JobFailed:
        where = f"; see {self.stderr_path}" if self.stderr_path.exists() else ""
        return JobFailed(f"side job {self.folder.number} ({self.name}) {status}{where}", status)

    def _slurm_status(self) -> JobStatus:
        submitted = self.folder.submitted()
        if submitted is None:
            return JobStatus(
                JobState.UNKNOWN, f"sbatch gave no answer; look for it with 'squeue --name={self.call.job_name}'"
            )
        if self._slurm is None:
            return JobStatus(JobState.UNKNOWN, "no Slurm on this machine")
        sighting = look(self._slurm, int(submitted.id), self.call.job_name)
        status = judge(sighting)
        if status.state not in (JobState.COMPLETED, JobState.FAILED):
            return status
        told = [*(one.end_time for one in sighting.components), *(one.end for one in sighting.recorded)]
        end = max((time or 0.0 for time in told), default=0.0)
        if time.time() - end < _RESULT_LAG_S and status.state is JobState.COMPLETED:
            return JobStatus(JobState.ENDING, "has ended, its result isn't here yet", status.witness, status.nodes)
        return self._without_result(status)

    def _without_result(self, status: JobStatus) -> JobStatus:
        missing = [str(task) for task, result in enumerate(self.results()) if result is None]
        said = status.reason or f"Slurm says {status.state}"
        reason = f"{said}, and there is no result of task {', '.join(missing)}" if missing else said
        line = _last_line(self.stderr_path)
        reason += f": {line}" if line else ""
        return JobStatus(JobState.FAILED, reason, status.witness, status.nodes)

    def _local_status(self) -> JobStatus:
        submitted = self.folder.submitted()
        alive = None if submitted is None else is_alive(submitted)
        if submitted is None:
            return JobStatus(JobState.UNKNOWN, f"its keeper hasn't begun; see {self.folder.keeper_log}")
        if alive is None:
            return JobStatus(JobState.UNKNOWN, f"runs on {submitted.host}: ask there")
        if alive:
            return JobStatus(JobState.RUNNING, "", "process", submitted.host)
        ended = self.folder.ended()  # it writes this and ends
        if ended is not None:
            return JobStatus(ended.state, ended.reason, ended.witness, ended.nodes)
        return JobStatus(JobState.FAILED, "its keeper was killed", "process", submitted.host)


def submit_side_job(
    run: RunConfig,
    site: SiteConfig,
    paths: RunPaths,
    request: SideRequest,
    *,
    slurm: SideScheduler | None,
    local: bool = False,
) -> SideJob:
    """Start a side job of a prepared run: on the site's nodes, or on this machine (`local`, sites without scheduler).

    Raises UserError for bad input (`side_check` says which of it is seen before the node does) and for what sbatch
    refuses, with nothing left behind; DeadlineExpired when sbatch doesn't answer: the folder stays then, since the
    job may have been taken.
    """
    local = local or site.scheduler == "none"
    plan_side_job(run, site, paths, request, number=0, local=local)  # complains before anything is written
    check_call(run.python_path, f"side job '{request.name}'", request.function, request.arguments)
    if not local and slurm is None:
        raise UserError(f"site '{site.name}' has a scheduler: expected a Slurm client, or --local")
    folder = create(paths.side_jobs)
    plan = plan_side_job(run, site, paths, request, number=folder.number, local=local)
    try:
        try:
            folder.write(_call(plan, request, local=local))
        except TypeError as error:
            raise UserError(f"side job '{request.name}': its arguments aren't JSON: {error}") from error
        if local or slurm is None:
            _start_keeper(folder, plan)
        else:
            exclude = [] if site.sbatch.exclude_allowed is False else [one.node for one in bad_nodes(paths)]
            _submit(folder, plan, request, slurm, exclude)
    except DeadlineExpired:
        raise
    except MilesError:
        folder.remove()
        raise
    return SideJob(folder, slurm)


def list_side_jobs(paths: RunPaths, slurm: Witness | None) -> list[SideJob]:
    """All side jobs of a run, oldest first; folders whose submission broke off before call.json are left out."""
    return [SideJob(f, slurm) for f in side_folders(paths.side_jobs) if (f.root / "call.json").exists()]


def _call(plan: SidePlan, request: SideRequest, *, local: bool) -> Call:
    return Call(
        name=request.name,
        job_name=plan.job_name,
        function=request.function,
        arguments=dict(request.arguments),
        tasks=plan.tasks,
        gpus=request.gpus_per_node,
        executor="local" if local else "slurm",
        python=plan.python,
        role=plan.role,
        time_limit_s=plan.time_limit_s,
        signal_s=plan.signal_s,
        start_again=request.start_again,
        created=time.time(),
    )


def _submit(
    folder: SideFolder, plan: SidePlan, request: SideRequest, slurm: SideScheduler, exclude: Sequence[str]
) -> None:
    from miles_hpc.cluster.side_call import CallAgain, run_call
    from miles_hpc.cluster.side_folder import Submitted
    from miles_hpc.cluster.side_submitit import SiteExecutor

    executor = SiteExecutor(folder.root, slurm, python=shlex.join([plan.python, "-P"]), exclude=exclude)
    executor.update_parameters(**plan.parameters)
    job = executor.submit(CallAgain() if request.start_again else run_call, str(folder.root))
    folder.write(Submitted(id=str(job.job_id), time=time.time()))


def _start_keeper(folder: SideFolder, plan: SidePlan) -> None:
    """Start the keeper in a session of its own and wait until it has submitted the job."""
    with folder.keeper_log.open("ab") as log:
        keeper = subprocess.Popen(
            [sys.executable, "-P", "-m", "miles_hpc.cluster.side_keeper", str(folder.root)],
            env={**os.environ, **plan.environment},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    deadline = Deadline(_KEEPER_S, f"side job {folder.root} to start")
    while folder.submitted() is None:
        if keeper.poll() is not None:
            raise MilesError(f"side job '{folder.call().name}': not started: {_last_line(folder.keeper_log)}")
        if deadline.expired:
            os.killpg(keeper.pid, signal.SIGKILL)
            keeper.wait()
            raise deadline.error()
        time.sleep(0.05)


def _by_results(results: Sequence[TaskResult | None]) -> JobStatus | None:
    """The end that the tasks themselves tell of; None while one of them hasn't."""
    done = [result for result in results if result is not None]
    if len(done) < len(results):
        return None
    nodes = ",".join(dict.fromkeys(result.host for result in done))
    failed = next((result for result in done if not result.ok), None)
    if failed is None:
        return JobStatus(JobState.COMPLETED, "", "result", nodes)
    if failed.kind == _TIME_LIMIT_KIND:
        return JobStatus(JobState.TIMEOUT, failed.error, "result", nodes)
    where = f"task {failed.task}: " if len(results) > 1 else ""
    return JobStatus(JobState.FAILED, f"{where}{failed.kind}: {failed.error}", "result", nodes)


def _last_line(path: Path) -> str:
    """The last line that says something, of at most 4 KiB; "" when there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").split("\n")
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
