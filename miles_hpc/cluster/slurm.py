"""A thin client of Slurm's commands. Every call has a timeout; every answer is parsed into frozen data.

Jobs are named by their leader's id. Components of a het job have ids of their own (leader + offset), and their steps
carry the component's id: Slurm takes requeue for leaders only, and cancels single steps by component id.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from miles_hpc.cluster.accounting import SACCT_FIELDS, AccountingRecord, parse_sacct
from miles_hpc.cluster.lifecycle import remaining_s
from miles_hpc.cluster.nodelist import compress
from miles_hpc.cluster.slurm_states import epoch_of, known_text, slurm_state
from miles_hpc.core.errors import DeadlineExpired, MilesError, UserError
from miles_hpc.core.walltime import parse_time

__all__ = [
    "ComponentState",
    "NoSlurm",
    "PartitionLimits",
    "Slurm",
    "SlurmError",
    "Step",
    "is_away",
    "parse_jobs",
    "parse_limits",
]

#: What sbatch and srun take from the environment: it must not leak from one allocation into a submission.
_KEPT = ("SLURM_CONF", "SLURM_JWT")
_FIELD = re.compile(r"(?:^| )([A-Z][A-Za-z/:_]*)=")


#: What Slurm's commands say when slurmctld is away, or too busy to answer (slurm_errno.c); not a word about the job.
#: The last one is `scontrol requeue`'s (seen with 22.05).
_AWAY = (
    "unable to contact slurm controller",
    "socket timed out",
    "connect failure",
    "connection failure",
    "unexpected message received",
)


class NoSlurm(UserError):
    """Slurm's commands aren't here, or know no cluster."""


class SlurmError(MilesError):
    """A Slurm command failed; the text is the command and its first line of complaint."""


def is_away(error: MilesError) -> bool:
    """Whether Slurm gave no answer, so that asking again later may help. The request may have arrived all the same."""
    return isinstance(error, DeadlineExpired) or any(words in str(error).lower() for words in _AWAY)


@dataclass(frozen=True)
class ComponentState:
    """One component of a job as `scontrol show job` tells it. Times are epoch seconds."""

    job_id: int
    offset: int  # 0 for the leader and for plain jobs
    name: str
    state: str  # RUNNING, PENDING, COMPLETED, ...
    reason: str
    nodes: str  # a host list; "" before the start
    restarts: int
    exit_code: str
    end_time: float | None  # None when unknown or unlimited
    start_time: float | None = None  # of a pending job: when Slurm expects it to start; None when unknown
    dependency: str = ""  # "afterany:12(unfulfilled)"

    @property
    def active(self) -> bool:
        """Whether it waits for nodes or holds some; a state that isn't known may."""
        return not slurm_state(self.state).over


@dataclass(frozen=True)
class Step:
    """A running step: `id` as scancel takes it (component's job id, a dot, the step's number)."""

    id: str
    name: str
    nodes: str


@dataclass(frozen=True)
class PartitionLimits:
    """The largest job that a partition takes."""

    max_time_s: float  # math.inf: none
    max_nodes: int | None  # None: as many as it has


class Slurm:
    """Slurm as one user sees it from this machine. Methods block up to `timeout_s` and raise DeadlineExpired then.

    `environ` is where SLURM_CONF and PATH come from; the rest of SLURM_* and SBATCH_* is kept from the commands.
    """

    def __init__(self, *, environ: Mapping[str, str] | None = None, timeout_s: float = 30.0) -> None:
        source = os.environ if environ is None else environ
        self._environ = {k: v for k, v in source.items() if k in _KEPT or not k.startswith(("SLURM_", "SBATCH_"))}
        self.timeout_s = timeout_s

    def require(self) -> None:
        """Raise UserError when this machine has no Slurm."""
        for command in ("sbatch", "scontrol", "squeue", "scancel"):
            self._locate(command)

    def submit(self, script: str | Path, *, dependency: str = "", exclude: Sequence[str] = ()) -> int:
        """Hand a batch script (its text, or the path of a file) to sbatch; returns the leader's job id.

        Both options hold for all components of a het job (heterogeneous_jobs.html lists what carries over).

        Raises UserError with sbatch's own words when it refuses the script, SlurmError when slurmctld is away.
        """
        options = [f"--dependency={dependency}"] if dependency else []
        if exclude:  # sbatch refuses a name that the cluster doesn't have (any more)
            known = set(self._run("sinfo", "--noheader", "--Node", "--format=%N").split())
            exclude = [name for name in exclude if name in known]
        options += [f"--exclude={compress(exclude)}"] if exclude else []
        answer = self._sbatch(script, "--parsable", *options)
        found = re.match(r"(\d+)", answer)  # "123" or "123;cluster"
        if found is None:
            raise SlurmError(f"sbatch --parsable: expected a job id, seen {answer.strip()!r}")
        return int(found[1])

    def test(self, script: str | Path) -> None:
        """Raise UserError when sbatch would refuse the script; submits nothing."""
        self._sbatch(script, "--test-only")

    def components(self, job_id: int) -> list[ComponentState]:
        """All components by offset; empty when Slurm doesn't know the job (any more)."""
        try:
            answer = self._run("scontrol", "-o", "show", "job", str(job_id))
        except SlurmError as error:
            if "Invalid job id" in str(error):
                return []
            raise
        return parse_jobs(answer)

    def state(self, job_id: int) -> list[str]:
        """The state of each component; empty when Slurm doesn't know the job (any more)."""
        return [component.state for component in self.components(job_id)]

    def accounting(self, job_ids: Sequence[int]) -> list[AccountingRecord]:
        """sacct's records of these jobs: a record for each start of each component, the newest last.

        Raises SlurmError where there is no accounting, or slurmdbd doesn't answer. Records lag by some seconds.
        """
        ids = ",".join(str(job_id) for job_id in job_ids)
        options = ("--noheader", "--parsable2", "--allocations", "--duplicates", f"--format={','.join(SACCT_FIELDS)}")
        return parse_sacct(self._run("sacct", *options, f"--jobs={ids}"))

    def steps(self, job_id: int) -> list[Step]:
        """Steps that srun started and that run now, over all components."""
        # squeue --steps takes a leader's id for its own component only.
        ids = ",".join(str(component.job_id) for component in self.components(job_id) if component.active)
        if not ids:
            return []
        try:
            answer = self._run("squeue", "--steps", "--noheader", f"--jobs={ids}", "--format=%i|%N|%j")
        except SlurmError as error:
            if "Invalid job id" in str(error):
                return []
            raise
        rows = [line.split("|", 2) for line in answer.splitlines() if line.count("|") >= 2]
        return [Step(id=i, name=name, nodes=nodes) for i, nodes, name in rows if i.rpartition(".")[2].isdigit()]

    def cancel(self, job_id: int, *, signal: str = "") -> None:
        """End a job, all components with it; with `signal` only signal its batch script.

        A job that Slurm doesn't know (any more) has ended: nothing is done then.
        """
        options = [f"--signal={signal}", "--batch"] if signal else []
        try:
            self._run("scancel", *options, str(job_id))
        except SlurmError as error:
            if "Invalid job id" not in str(error):
                raise

    def cancel_step(self, job_id: int, name: str, *, signal: str = "") -> list[str]:
        """End (or signal) every running step called `name`; returns their ids, empty when there is none.

        A step may end between the two questions, which scancel calls an invalid job id or a completed step.
        """
        ids = [step.id for step in self.steps(job_id) if step.name == name]
        for step_id in ids:
            try:
                self._run("scancel", *([f"--signal={signal}"] if signal else []), step_id)
            except SlurmError as error:
                if not re.search(r"invalid job id|already complet", str(error), re.IGNORECASE):
                    raise
        return ids

    def requeue(self, leader: int) -> None:
        """Put a job back into the queue under the same id; all components restart together."""
        self._run("scontrol", "requeue", str(leader))

    def release_now(self, leader: int) -> None:
        """Let a requeued job start without its waiting time, where the site lets users do that."""
        self._run("scontrol", "update", f"jobid={leader}", "starttime=now")

    def end_time(self, job_id: int) -> float | None:
        """Epoch second at which the allocation ends (its earliest component); None when it has no end."""
        running = [component for component in self.components(job_id) if component.state == "RUNNING"]
        return min((c.end_time for c in running if c.end_time is not None), default=None)

    def remaining_s(self, job_id: int) -> float:
        """Seconds until the allocation ends; math.inf when it has no end."""
        return remaining_s(self.end_time(job_id), time.time())

    def failed_nodes(self, names: Sequence[str]) -> dict[str, str]:
        """Those of these nodes that Slurm has given up, with its reason: down, failing, or not responding."""
        answer = self._run("sinfo", "--noheader", "--Node", f"--nodes={compress(names)}", "--format=%N|%T|%E")
        failed = {}
        for line in answer.splitlines():
            name, state, reason = (*line.split("|", 2), "", "")[:3]
            if state.rstrip("*~#!%$@^-") in ("down", "fail", "failing", "error") or state.endswith("*"):
                failed[name] = f"{state}: {reason}" if reason not in ("", "none") else state
        return failed

    def partitions(self) -> list[str]:
        """Names of the partitions that this user sees."""
        return list(dict.fromkeys(self._run("sinfo", "--noheader", "--format=%R").split()))

    def partition_limits(self) -> dict[str, PartitionLimits]:
        """What a job may ask for in each partition that this user sees, by its name."""
        return parse_limits(self._run("sinfo", "--noheader", "--format=%R|%l|%s"))

    def node_count(self, partition: str) -> int:
        """How many nodes a partition has, whatever their states; 0 when this user sees none of that name."""
        counts = self._run("sinfo", "--noheader", f"--partition={partition}", "--format=%D").split()
        return sum(int(count) for count in counts if count.isdecimal())

    def version(self) -> str:
        """Slurm's version as sbatch tells it: "slurm-wlm 22.05.8"."""
        return self._run("sbatch", "--version").strip()

    def _sbatch(self, script: str | Path, *options: str) -> str:
        text = script.read_text() if isinstance(script, Path) else script
        try:
            return self._run("sbatch", *options, stdin=text)
        except SlurmError as error:
            if is_away(error):
                raise
            raise UserError(f"Slurm refused the job: {error}") from error

    def _locate(self, command: str) -> str:
        path = shutil.which(command, path=self._environ.get("PATH", ""))
        if path is None:
            raise NoSlurm(
                f"no Slurm on this machine: '{command}' is not on PATH: run this on a login node of the cluster, "
                "or use 'miles-hpc local'"
            )
        return path

    def _run(self, command: str, *arguments: str, stdin: str = "") -> str:
        program = self._locate(command)
        shown = " ".join((command, *arguments))
        try:
            done = subprocess.run(
                [program, *arguments],
                input=stdin,
                capture_output=True,
                text=True,
                env=self._environ,
                timeout=self.timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise DeadlineExpired(f"{shown}: no answer after {self.timeout_s:.0f} s; is slurmctld up?") from error
        if done.returncode != 0:
            complaint = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
            text = complaint[0] if complaint else f"exit code {done.returncode}"
            if "configuration source" in done.stderr:
                raise NoSlurm(f"no Slurm on this machine: {shown}: {text}: set SLURM_CONF, or use 'miles-hpc local'")
            raise SlurmError(f"{shown}: {text}")
        return done.stdout


def parse_limits(text: str) -> dict[str, PartitionLimits]:
    """`sinfo --format=%R|%l|%s`: a line per partition and state of nodes, "gpu|1-00:00:00|1-infinite"."""
    limits = {}
    for line in text.splitlines():
        name, time_limit, size = (*line.split("|"), "", "")[:3]
        most = size.rpartition("-")[2]
        try:
            seconds = parse_time(time_limit)
        except UserError:  # "n/a"
            seconds = math.inf
        limits[name] = PartitionLimits(max_time_s=seconds, max_nodes=int(most) if most.isdecimal() else None)
    return limits


def parse_jobs(text: str) -> list[ComponentState]:
    """`scontrol -o show job`: one line per component, KEY=value pairs whose values may hold spaces."""
    jobs = []
    for line in text.splitlines():
        marks = list(_FIELD.finditer(line))
        ends = [*(mark.start() for mark in marks[1:]), len(line)]
        fields: dict[str, str] = {}
        for mark, end in zip(marks, ends, strict=False):  # without any KEY= there is one end too many
            fields.setdefault(mark[1], line[mark.end() : end].strip())
        if "JobId" not in fields:
            continue
        jobs.append(
            ComponentState(
                job_id=int(fields["JobId"]),
                offset=int(fields.get("HetJobOffset", 0)),
                name=fields.get("JobName", ""),
                state=fields.get("JobState", "UNKNOWN"),
                reason=known_text(fields.get("Reason", "")),
                nodes=known_text(fields.get("NodeList", "")),
                restarts=int(fields.get("Restarts", 0)),
                exit_code=fields.get("ExitCode", ""),
                end_time=epoch_of(fields.get("EndTime", "")),
                start_time=epoch_of(fields.get("StartTime", "")),
                dependency=known_text(fields.get("Dependency", "")),
            )
        )
    return sorted(jobs, key=lambda job: job.offset)
