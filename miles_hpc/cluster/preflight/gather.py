"""Asking N nodes at once: starts the steps, takes what each node tells, names those that don't answer.

steps (srun ...) ──stdout──▶ reader threads ──▶ NodeLine by node        until all answered or the deadline
                 ──stderr──▶ last lines, for the finding
nobody is waited for after the deadline: srun is ended, and a job of our own is cancelled
"""

from __future__ import annotations

import queue
import re
import shutil
import subprocess
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import IO, Any

from miles_hpc.cluster.nodelist import compress, expand
from miles_hpc.cluster.preflight.contract import Finding, fail, fine
from miles_hpc.cluster.preflight.node_line import NodeLine, Reassembly
from miles_hpc.cluster.preflight.runner import Result
from miles_hpc.cluster.preflight.step import NodeSteps
from miles_hpc.cluster.slurm import Slurm
from miles_hpc.core.errors import MilesError, UserError

__all__ = ["Gathered", "ask_nodes"]

_END_S = 5.0  # how long srun may take to end after SIGTERM, and after the last answer
_KEPT_LINES = 20
#: What srun says of itself, also when it is ended by us: no reason for anything.
_NOISE = re.compile(r"queued and waiting|allocated resources|Force Terminated|terminat|revoked|Cancelled|^\s*$")
_JOB = re.compile(r"srun: job (\d+) ")


@dataclass(frozen=True)
class Gathered:
    """What nodes told: results, and facts for comparisons, `facts[node][comparison]`."""

    results: list[Result] = field(default_factory=list)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)


def ask_nodes(steps: NodeSteps, *, timeout_s: float) -> Gathered:
    """Run the steps and gather. Blocks up to `timeout_s` seconds and a few more to end what was started.

    Nodes that don't answer are results, not errors. Raises UserError when srun isn't there.
    """
    if shutil.which(steps.commands[0][0], path=steps.environ.get("PATH", "")) is None:
        raise UserError("--on-nodes: no srun on PATH: run this on a login node of the cluster, or leave --on-nodes out")
    started = time.monotonic()
    lines: queue.SimpleQueue[tuple[float, str] | None] = queue.SimpleQueue()
    said: deque[str] = deque(maxlen=_KEPT_LINES)
    processes = [
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            errors="replace", env=dict(steps.environ),
        )
        for command in steps.commands
    ]  # fmt: skip
    complaints: list[threading.Thread] = []
    for process in processes:
        threading.Thread(target=_read_lines, args=(process.stdout, lines), daemon=True).start()
        complaints.append(threading.Thread(target=_keep_last, args=(process.stderr, said), daemon=True))
        complaints[-1].start()
    why = ""
    try:
        told = _collect(lines, len(processes), steps.nodes, started + timeout_s)
        if not told and steps.own_job and time.monotonic() >= started + timeout_s:
            why = _pending_reason(steps.environ, tuple(said))
    finally:
        expired = _end(processes, wait_s=_END_S if time.monotonic() < started + timeout_s else 0.0)
        for thread in complaints:
            thread.join(timeout=1.0)
        job = _job_id(tuple(said))
        if expired and steps.own_job and job:
            _cancel(steps.environ, int(job))
    elapsed_s = time.monotonic() - started
    when = f"within {elapsed_s:.0f} s" if expired else f"before srun ended, after {elapsed_s:.0f} s"
    return _gathered(steps, told, why or _complaint(tuple(said)), when, job)


def _job_id(said: tuple[str, ...]) -> str:
    """Of a job that had to wait, which srun tells; "" otherwise."""
    return next((found[1] for line in said if (found := _JOB.search(line))), "")


def _complaint(said: tuple[str, ...]) -> str:
    return next((text for text in reversed(said) if not _NOISE.search(text)), "")


def _pending_reason(environ: Mapping[str, str], said: tuple[str, ...]) -> str:
    """Why our job still waits, as Slurm tells it."""
    if not (job := _job_id(said)):
        return ""
    try:
        states = Slurm(environ=environ, timeout_s=_END_S).components(int(job))
    except MilesError:
        return ""
    return next((f"its job {job} is {one.state}, reason {one.reason}" for one in states if one.reason), "")


def _read_lines(stream: IO[str] | None, lines: queue.SimpleQueue[tuple[float, str] | None]) -> None:
    for line in stream or ():
        lines.put((time.time(), line))
    lines.put(None)


def _keep_last(stream: IO[str] | None, said: deque[str]) -> None:
    for line in stream or ():
        if line.strip():
            said.append(line.strip())


def _collect(
    lines: queue.SimpleQueue[tuple[float, str] | None], n_steps: int, n_nodes: int, end: float
) -> dict[str, tuple[float, NodeLine]]:
    """Lines by node with the time of arrival, until all nodes answered, all steps ended, or `end` (monotonic)."""
    told: dict[str, tuple[float, NodeLine]] = {}
    pieces = Reassembly()
    while n_steps and len(told) < n_nodes:
        try:
            item = lines.get(timeout=max(0.0, end - time.monotonic()))
        except queue.Empty:
            break
        if item is None:
            n_steps -= 1
        elif (line := pieces.add(item[1])) is not None:
            told[line.node] = (item[0], line)
    return told


def _end(processes: list[subprocess.Popen[str]], *, wait_s: float) -> bool:
    """Let the steps end; returns whether one had to be ended."""
    end = time.monotonic() + wait_s
    forced = False
    for process in processes:
        try:
            process.wait(timeout=max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            forced = True
            process.terminate()
    for process in processes:
        try:
            process.wait(timeout=_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    return forced


def _cancel(environ: Mapping[str, str], job: int) -> None:
    """srun revokes its allocation when it ends in order; this is for when it didn't."""
    try:
        Slurm(environ=environ, timeout_s=_END_S).cancel(job)
    except MilesError:  # it is gone already, or ends by its time limit of a few minutes
        pass


def _gathered(
    steps: NodeSteps, told: Mapping[str, tuple[float, NodeLine]], complaint: str, when: str, job: str
) -> Gathered:
    results: list[Result] = []
    facts: dict[str, dict[str, Any]] = {}
    for node, (arrived, line) in sorted(told.items()):
        if line.error:
            results.append(
                Result("nodes", fail(f"the checks couldn't begin: {line.error}", "correct that first"), node)
            )
            continue
        for one in line.results:
            results.append(Result(one.check, Finding(one.status, one.saw, one.do), node))
        facts[node] = {name: value for name, value in line.facts.items()}
        if facts[node].get("clock") is not None:
            facts[node]["clock"] = line.now - arrived
    hosts = steps.hosts or _hosts_of(steps, told, job)
    silent = [host for host in hosts if host not in told]
    missing = steps.nodes - len(told)
    if missing <= 0:
        return Gathered(
            [Result("nodes", fine(f"{len(told)} nodes answered: {compress(sorted(told))}")), *results], facts
        )
    why = f" ({complaint})" if complaint else ""
    if silent:
        saw = f"no answer {when} from {compress(sorted(silent))}{why}"
        failed = [fail(saw, f"scontrol show node {silent[0]}; exclude it with --exclude in job.extra_directives")]
    else:
        saw = f"{missing} of {steps.nodes} nodes didn't answer {when}{why}"
        failed = [fail(saw, "sinfo -R says which nodes are out; ask for fewer, or give a longer --timeout")]
    return Gathered([*(Result("nodes", one) for one in failed), *results], facts)


def _hosts_of(steps: NodeSteps, told: Mapping[str, tuple[float, NodeLine]], job: str) -> tuple[str, ...]:
    """Names of a job's nodes from Slurm, once it is known which job it was."""
    number = job or next((line.job for _, line in told.values() if line.job), "")
    if not number.isdecimal() or len(told) >= steps.nodes:
        return ()
    try:
        components = Slurm(environ=steps.environ, timeout_s=_END_S).components(int(number))
        return tuple(host for component in components for host in expand(component.nodes) if component.nodes)
    except MilesError:
        return ()
