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

`cluster.job_state` has a judge of its own, for what `status` says of a run: there the run's records are a witness that
contradicts Slurm's or stands in for it. A side job has no records before its results, which decide alone; so nothing
here weighs one witness against another. Words, ends and exit codes are those of `slurm_states` in both.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from miles_hpc.cluster.accounting import AccountingRecord, newest_start
from miles_hpc.cluster.slurm import ComponentState
from miles_hpc.cluster.slurm_states import JobState, exit_words, most_telling, slurm_state
from miles_hpc.core.deadline import Deadline
from miles_hpc.core.errors import DeadlineExpired, MilesError

__all__ = [
    "JobFailed",
    "JobHandle",
    "JobStatus",
    "Sighting",
    "Witness",
    "await_end",
    "judge",
    "look",
]

_FIRST_POLL_S = 0.2
_LAST_POLL_S = 3.0  # each poll is a request to slurmctld
#: A job that slurmctld has forgotten and nobody else knows: its result may still be on its way through a shared disk.
_FORGOTTEN_S = 30.0


#: What goes on in any component goes on in the job; of several states the first of these.
_GOES_ON = (
    JobState.RUNNING,
    JobState.SUSPENDED,
    JobState.STARTING,
    JobState.ENDING,
    JobState.REQUEUED,
    JobState.QUEUED,
    JobState.UNKNOWN,
)

#: Ends whose cause is always the same.
_ENDS = {
    JobState.BOOT_FAIL: "a node didn't boot",
    JobState.DEADLINE: "it could not end before its deadline",
    JobState.TIMEOUT: "the time limit was reached",
}


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
        return self.state.over

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

    def accounting(self, job_ids: Sequence[int]) -> list[AccountingRecord]: ...

    def cancel(self, job_id: int) -> None: ...


@dataclass(frozen=True)
class Sighting:
    """What Slurm's two witnesses said of one job at one moment."""

    components: tuple[ComponentState, ...] = ()  # by scontrol; () when it doesn't know the job
    recorded: tuple[AccountingRecord, ...] = ()  # by sacct, of the newest start; asked when scontrol had nothing
    complaint: str = ""  # why scontrol gave no answer; "" when it gave one


def look(slurm: Witness, job_id: int, name: str) -> Sighting:
    """Ask scontrol, and sacct when that has nothing. `name` begins the names of all the job's components."""
    complaint = ""
    try:
        components = tuple(one for one in slurm.components(job_id) if one.name.startswith(name))
    except MilesError as error:
        components, complaint = (), str(error)
    if components:
        return Sighting(components=components)
    try:
        records = [one for one in slurm.accounting([job_id]) if one.name.startswith(name)]
    except MilesError:  # one witness less
        records = []
    return Sighting(recorded=tuple(newest_start(records, job_id)), complaint=complaint)


def judge(sighting: Sighting) -> JobStatus:
    """The state that follows from a sighting; of accounting only ends count: it may miss one."""
    if sighting.components:
        return _combined([_Part.of_component(one) for one in sighting.components], "scontrol")
    if sighting.recorded:
        status = _combined([_Part.of_record(one) for one in sighting.recorded], "sacct")
        if status.ended:
            return status
    if sighting.complaint:
        return JobStatus(JobState.UNKNOWN, f"Slurm gives no answer: {sighting.complaint}")
    if sighting.recorded:
        return JobStatus(JobState.UNKNOWN, f"slurmctld has forgotten it, accounting still has it as {status.state}")
    return JobStatus(JobState.UNKNOWN, "slurmctld doesn't know it (any more), and no accounting does", forgotten=True)


@dataclass(frozen=True)
class _Part:
    """One component by one witness. `note` is what that says besides: why it waits, who cancelled it."""

    word: str  # Slurm's
    exit_code: str
    nodes: str
    note: str

    @classmethod
    def of_component(cls, one: ComponentState) -> _Part:
        state = slurm_state(one.state)
        # The reason of a job that was cancelled is why it waited before.
        return cls(one.state, one.exit_code, one.nodes, "" if state is JobState.CANCELLED else one.reason)

    @classmethod
    def of_record(cls, one: AccountingRecord) -> _Part:
        by = f"by user id {one.cancelled_by}" if one.cancelled_by else ""
        return cls(one.state, one.exit_code, one.hosts, by)


def _combined(parts: Sequence[_Part], witness: str) -> JobStatus:
    """One state for all components: that of one which goes on, else the end that tells most."""
    nodes = ",".join(part.nodes for part in parts if part.nodes)
    states = [slurm_state(part.word) for part in parts]
    for wanted in _GOES_ON:
        if wanted in states:
            return JobStatus(wanted, _open_words(parts[states.index(wanted)], wanted), witness, nodes)
    end = most_telling(states)
    return JobStatus(states[end], _end_words(parts[end], states[end]), witness, nodes)


def _open_words(part: _Part, state: JobState) -> str:
    if state in (JobState.QUEUED, JobState.REQUEUED):
        return part.note
    if state is JobState.ENDING:
        return "its processes are being ended"
    return f"Slurm says {part.word}, which this version doesn't know" if state is JobState.UNKNOWN else ""


def _end_words(part: _Part, state: JobState) -> str:
    if state is JobState.NODE_FAIL:
        return f"a node went down, of {part.nodes}" if part.nodes else "a node went down"
    if state is JobState.FAILED:
        return exit_words(part.exit_code) or part.note
    return _ENDS.get(state, part.note if state is JobState.CANCELLED else "")


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
