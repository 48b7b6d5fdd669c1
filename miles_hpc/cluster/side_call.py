"""Inside a side job: read call.json, call the function, write what came of it. Started by submitit in every task.

The module and its functions are named in submitit's pickles: they keep their names.
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
import time
import traceback
from pathlib import Path
from types import FrameType
from typing import Any

from miles_hpc.cluster.side_folder import Call, SideFolder, TaskResult
from miles_hpc.core.errors import MilesError, UserError

__all__ = ["CallAgain", "call_function", "run_call"]


def run_call(folder: str) -> None:
    """The call of one side job in this task. What it raises is written down and raised again, so that Slurm sees it.

    SIGTERM: submitit lets it pass, because on a preemption USR2 comes next and puts the job back into the queue.
    When the job was cancelled through its handle the task ends at once, instead of being killed after KillWait
    (slurm.conf(5), 30 s by default).
    """
    from submitit import JobEnvironment

    job = SideFolder(Path(folder))
    call = job.call()
    passing = signal.getsignal(signal.SIGTERM)

    def terminated(number: int, frame: FrameType | None) -> None:
        if job.cancelled():
            os._exit(128 + number)
        if callable(passing):
            passing(number, frame)

    signal.signal(signal.SIGTERM, terminated)
    task = int(JobEnvironment().global_rank)
    job.result_path(task).unlink(missing_ok=True)  # of an earlier start, before a requeue
    started = time.time()

    def result(**fields: Any) -> TaskResult:
        return TaskResult(task=task, host=socket.gethostname(), started=started, ended=time.time(), **fields)

    try:
        value = call_function(call)
        try:
            job.write(result(ok=True, value=value))
        except TypeError as error:
            raise MilesError(f"{call.function}: returned what JSON doesn't have: {error}") from error
    except Exception as error:
        kind, text = type(error).__name__, " ".join(str(error).split())
        job.write(result(ok=False, kind=kind, error=text, trace=traceback.format_exc()))
        raise


def call_function(call: Call) -> Any:
    """Import the function and call it. Raises UserError when there is none, and what it raises."""
    module, _, attribute = call.function.partition(":")
    try:
        function = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UserError(f"side job '{call.name}': can't load {call.function} in {call.python}: {error}") from error
    return function(**call.arguments)


class CallAgain:
    """`run_call` that submitit puts back into the queue at its time limit, to start from the beginning."""

    def __call__(self, folder: str) -> None:
        run_call(folder)

    def checkpoint(self, folder: str) -> Any:
        """What submitit submits again (its DelayedSubmission)."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, folder)
