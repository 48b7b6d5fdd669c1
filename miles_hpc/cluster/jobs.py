"""What a job looks like to its user, whatever runs it, and how its state follows from what witnesses say.

    JobHandle ── SideJob   a side job: submitit on Slurm, or submitit's local executor   (side_jobs)
              └─ RunJob    the run's own batch job, with all its het components          (run_job)

    scontrol show job ── knows it ─────────────────────────────▶ state
          │ has forgotten it, or slurmctld doesn't answer
          ▼
    sacct (where there is accounting) ── says that it ended ───▶ state
          │ knows nothing
          ▼
    UNKNOWN, until there is evidence

A job that isn't listed any more isn't a failed job: slurmctld forgets ended jobs after MinJobAge, and many clusters
have no accounting (slurm.conf(5)). Ids start again when a cluster loses its state, so a job is known by id and name.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from miles_hpc.cluster.slurm import ComponentState
from miles_hpc.core.deadline import Deadline
from miles_hpc.core.errors import DeadlineExpired, MilesError

__all__ = [
    "JobFailed",
    "JobHandle",
    "JobState",
    "JobStatus",
    "Sighting",
    "Witness",
    "await_end",
    "exit_words",
    "judge",
    "look",
    "slurm_state",
]

_FIRST_POLL_S = 0.2
_LAST_POLL_S = 3.0  # each poll is a request to slurmctld
#: A job that slurmctld has forgotten and nobody else knows: its result may still be on its way through a shared disk.
_FORGOTTEN_S = 30.0


class JobState(StrEnum):
    """Where a job stands. UNKNOWN isn't an end: evidence may still come."""

    UNKNOWN = "UNKNOWN"
    PENDING = "PENDING"
    RUNNING = "RUNNING"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    TIMEOUT = "TIMEOUT"
    NODE_FAIL = "NODE_FAIL"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    PREEMPTED = "PREEMPTED"


_OPEN = frozenset({JobState.UNKNOWN, JobState.PENDING, JobState.RUNNING})

#: Slurm's words for states (squeue(1), JOB STATE CODES; sacct(1)) that aren't those of JobState.
_SLURM_STATES = {
    "BOOT_FAIL": JobState.NODE_FAIL,
    "COMPLETING": JobState.RUNNING,
    "CONFIGURING": JobState.PENDING,
    "DEADLINE": JobState.TIMEOUT,
    "LAUNCH_FAILED": JobState.FAILED,
    "RECONFIG_FAIL": JobState.FAILED,
    "REQUEUED": JobState.PENDING,
    "REQUEUE_FED": JobState.PENDING,
    "REQUEUE_HOLD": JobState.PENDING,
    "RESIZING": JobState.RUNNING,
    "RESV_DEL_HOLD": JobState.PENDING,
    "REVOKED": JobState.CANCELLED,
    "SIGNALING": JobState.RUNNING,
    "SPECIAL_EXIT": JobState.PENDING,
    "STAGE_OUT": JobState.RUNNING,
    "STOPPED": JobState.RUNNING,
    "SUSPENDED": JobState.RUNNING,
}

#: Which end of a component tells most about the job: one that fails takes the others along as CANCELLED.
_TELLING = (
    JobState.NODE_FAIL,
    JobState.OUT_OF_MEMORY,
    JobState.TIMEOUT,
    JobState.PREEMPTED,
    JobState.FAILED,
    JobState.CANCELLED,
)


class JobFailed(MilesError):
    """A job ended without the result that it was to give. `status` says how."""

    def __init__(self, text: str, status: JobStatus) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True)
class JobStatus:
    """A job's state with the evidence for it."""

    state: JobState
    reason: str = ""  # in words; "" when there is nothing to say
    witness: str = ""  # who says so: result, scontrol, sacct, process; "" = nobody
    nodes: str = ""  # a host list; "" before the start
    forgotten: bool = False  # slurmctld answers and doesn't know the job, and nobody else does

    @property
    def ended(self) -> bool:
        return self.state not in _OPEN

    def __str__(self) -> str:
        return f"{self.state}: {self.reason}" if self.reason else str(self.state)


class JobHandle(Protocol):
    """One job, of whatever kind. Safe from one thread at a time; holds no connection.

    `status`, `state`, `done` and `exception` ask once and return: within the timeout of one Slurm command, twice that
    where scontrol and sacct both have to be asked.
    """

    @property
    def id(self) -> str:
        """Slurm's job id (of a het job: its leader's), or a name for a job without Slurm."""
        ...

    @property
    def name(self) -> str: ...

    @property
    def submitted(self) -> float | None:
        """Epoch seconds of its submission; None when that isn't known."""
        ...

    @property
    def stdout_path(self) -> Path: ...

    @property
    def stderr_path(self) -> Path:
        """The same as `stdout_path` where both go to one file."""
        ...

    def status(self) -> JobStatus:
        """State with its evidence. Never raises for a scheduler that doesn't answer: that is UNKNOWN."""
        ...

    def state(self) -> JobState:
        """`status().state`."""
        ...

    def done(self) -> bool:
        """Whether there is evidence that the job has ended."""
        ...

    def result(self, deadline_s: float) -> Any:
        """Wait up to `deadline_s` seconds for the end, then what the job returned.

        Raises JobFailed when it ended without, DeadlineExpired when it hasn't ended.
        """
        ...

    def exception(self) -> JobFailed | None:
        """Why an ended job has no result; None while it hasn't ended, and when it has one. Doesn't wait."""
        ...

    def cancel(self) -> None:
        """End the job, all components with it; nothing happens to one that has ended."""
        ...


class Witness(Protocol):
    """The part of `Slurm` that handles need."""

    def components(self, job_id: int) -> list[ComponentState]: ...

    def recorded(self, job_id: int) -> list[ComponentState]: ...

    def cancel(self, job_id: int) -> None: ...


@dataclass(frozen=True)
class Sighting:
    """What Slurm's two witnesses said of one job at one moment."""

    components: tuple[ComponentState, ...] = ()  # by scontrol; () when it doesn't know the job
    recorded: tuple[ComponentState, ...] = ()  # by sacct, asked when scontrol had nothing; () when it knows nothing
    complaint: str = ""  # why scontrol gave no answer; "" when it gave one


def look(slurm: Witness, job_id: int, name: str) -> Sighting:
    """Ask scontrol, and sacct when that has nothing. `name` begins the names of all the job's components."""
    complaint = ""
    try:
        components = _named(slurm.components(job_id), name)
    except MilesError as error:
        components, complaint = (), str(error)
    if components:
        return Sighting(components=components)
    try:
        recorded = _named(slurm.recorded(job_id), name)
    except MilesError:  # one witness less
        recorded = ()
    return Sighting(recorded=recorded, complaint=complaint)


def _named(components: Sequence[ComponentState], name: str) -> tuple[ComponentState, ...]:
    return tuple(component for component in components if component.name.startswith(name))


def judge(sighting: Sighting) -> JobStatus:
    """The state that follows from a sighting; of accounting only ends count: it may miss one."""
    if sighting.components:
        return _combined(sighting.components, "scontrol")
    if sighting.recorded:
        status = _combined(sighting.recorded, "sacct")
        if status.ended:
            return status
    if sighting.complaint:
        return JobStatus(JobState.UNKNOWN, f"Slurm gives no answer: {sighting.complaint}")
    if sighting.recorded:
        return JobStatus(JobState.UNKNOWN, f"slurmctld has forgotten it, accounting still has it as {status.state}")
    return JobStatus(JobState.UNKNOWN, "slurmctld doesn't know it (any more), and no accounting does", forgotten=True)


def _combined(components: Sequence[ComponentState], witness: str) -> JobStatus:
    """One state for all components: that of one which goes on, else the end that tells most."""
    nodes = ",".join(component.nodes for component in components if component.nodes)
    states = [slurm_state(component.state) for component in components]
    for wanted in (JobState.RUNNING, JobState.PENDING, JobState.UNKNOWN):
        if wanted in states:
            component = components[states.index(wanted)]
            reason = component.reason if wanted is JobState.PENDING else ""
            if component.state == "COMPLETING":
                reason = "its processes are being ended"
            return JobStatus(wanted, reason, witness, nodes)
    for wanted in _TELLING:
        if wanted in states:
            return JobStatus(wanted, _end_words(components[states.index(wanted)], wanted), witness, nodes)
    return JobStatus(JobState.COMPLETED, "", witness, nodes)


def slurm_state(word: str) -> JobState:
    """JobState for a word of Slurm's, also "CANCELLED by 1000" and "CANCELLED+"; UNKNOWN for one that it isn't."""
    name = (word.split() or [""])[0].rstrip("+").upper()
    return _SLURM_STATES.get(name) or JobState.__members__.get(name, JobState.UNKNOWN)


def _end_words(component: ComponentState, state: JobState) -> str:
    if state is JobState.FAILED:
        return exit_words(component.exit_code) or component.reason
    if state is JobState.TIMEOUT:
        return "the time limit was reached"
    if state is JobState.NODE_FAIL:
        return f"a node went down, of {component.nodes}" if component.nodes else "a node went down"
    found = re.search(r"\bby (\d+)", component.state)  # sacct: "CANCELLED by 1000"
    return f"by user id {found[1]}" if found else ""


def exit_words(code: str) -> str:
    """Slurm's "exit code:signal" in words; "" for success and for what isn't one.

    A shell says 128 + n for a child that signal n ended, and srun does the same.
    """
    found = re.match(r"(\d+):(\d+)", code)
    if found is None:
        return ""
    status, number = int(found[1]), int(found[2])
    if number:
        return f"ended by {_signal_name(number)}"
    if 128 < status < 128 + signal.NSIG:
        return f"exit code {status}: a process was ended by {_signal_name(status - 128)}"
    return f"exit code {status}" if status else ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def await_end(
    handle: JobHandle,
    deadline_s: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> JobStatus:
    """Poll until the job has ended; a job that everybody has forgotten for 30 s is given up as it is, UNKNOWN.

    Polls every 0.2 s at first and every 3 s later. Raises DeadlineExpired after `deadline_s` seconds and the poll
    that was under way, with the last status in its text. `clock` and `sleep` are replaced in tests.
    """
    deadline = Deadline(deadline_s, f"job {handle.id} ({handle.name}) to end", clock=clock)
    pause = _FIRST_POLL_S
    forgotten_since: float | None = None
    while True:
        status = handle.status()
        if status.ended:
            return status
        if not status.forgotten:
            forgotten_since = None
        elif forgotten_since is None:
            forgotten_since = clock()
        elif clock() - forgotten_since >= _FORGOTTEN_S:
            return status
        if deadline.expired:
            raise DeadlineExpired(f"{deadline.error()}; last seen {status}")
        sleep(min(pause, deadline.remaining_s))
        pause = min(_LAST_POLL_S, pause * 1.3)
