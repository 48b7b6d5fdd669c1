"""Where there is no scheduler: the process that holds a local side job and outlives the command that started it.

    miles-hpc side ──▶ keeper (a session of its own) ──▶ submitit's controller ──▶ tasks
                            │ submitted.json, then ended.json
                            └ SIGTERM: cancel

submitit's local jobs are known to the process that started them alone. The keeper is that process: it waits for the
end, says how it came, and ends what is left of its session.
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
import sys
import time
from pathlib import Path
from types import FrameType

from miles_hpc.cluster.side_folder import Call, Ended, SideFolder, Submitted
from miles_hpc.cluster.slurm_states import JobState

__all__ = ["boot_id", "is_alive", "main", "start_ticks"]

_POLL_S = 0.1
#: From SIGINT to the end, within which submitit's controller kills its tasks by itself.
_GRACE_S = 5.0
#: submitit's controller ends the tasks at the limit; beyond this it hangs.
_LATE_S = 30.0


def boot_id() -> str:
    """What tells one boot of this host from the next (random(4)); "" where the kernel doesn't say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def start_ticks(pid: int) -> int | None:
    """When the process began, in clock ticks since boot (proc(5), field 22); None when there is none, or a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in ("Z", "X") else int(fields[19])


def is_alive(submitted: Submitted) -> bool | None:
    """Whether the keeper that wrote `submitted` lives; None on another host, which can't tell."""
    if submitted.host != socket.gethostname():
        return None
    return submitted.boot == boot_id() and start_ticks(submitted.pid) == submitted.pid_start


def main(root: str) -> int:
    """Run the job of the folder `root` to its end."""
    from submitit import LocalExecutor

    from miles_hpc.cluster.side_call import CallAgain, run_call

    folder = SideFolder(Path(root))
    call = folder.call()
    asked: list[int] = []

    def terminated(number: int, frame: FrameType | None) -> None:
        asked.append(number)

    signal.signal(signal.SIGTERM, terminated)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the controller ends on it; a shell may have it ignored
    executor = LocalExecutor(folder.root, python=shlex.join([call.python, "-P"]))
    executor.update_parameters(
        timeout_min=call.time_limit_s / 60,
        tasks_per_node=call.tasks,
        gpus_per_node=call.gpus,
        signal_delay_s=call.signal_s,
    )
    began = time.monotonic()
    job = executor.submit(CallAgain() if call.start_again else run_call, str(folder.root))
    me = os.getpid()
    folder.write(
        Submitted(
            id=str(job.job_id),
            host=socket.gethostname(),
            boot=boot_id(),
            pid=me,
            pid_start=start_ticks(me) or 0,
            time=time.time(),
        )
    )
    limit = began + call.time_limit_s + _LATE_S
    while not job.done() and not asked and time.monotonic() < limit:
        time.sleep(_POLL_S)
    if not job.done():
        job.cancel()
        end = time.monotonic() + _GRACE_S
        while not job.done() and time.monotonic() < end:
            time.sleep(_POLL_S)
    folder.write(_ended(folder, call, cancelled=bool(asked), took_s=time.monotonic() - began))
    os.killpg(me, signal.SIGKILL)  # whatever is left, this process with it
    return 0


def _ended(folder: SideFolder, call: Call, *, cancelled: bool, took_s: float) -> Ended:
    """How it came: a task's own result counts for more (see SideJob.status)."""
    if cancelled:
        state, reason = JobState.CANCELLED, "on request"
    elif took_s >= call.time_limit_s:
        state, reason = JobState.TIMEOUT, "the time limit was reached"
    elif all((result := folder.result(task)) is not None and result.ok for task in range(call.tasks)):
        state, reason = JobState.COMPLETED, ""
    else:
        state, reason = JobState.FAILED, "a process ended without a result"
    return Ended(state=state, reason=reason, witness="process", time=time.time())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
