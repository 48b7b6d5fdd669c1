"""Processes of a box: start, recognise, end. Nothing is ever ended by its name.

A daemon is recorded as (pid, start time in clock ticks, boot id) in <root>/run/<name>.json: a recycled pid has another
start time, so it is never taken for ours. Processes that we didn't start ourselves are found by what ties them to the
box: slurmstepd by its unix socket below <root>/spool, tasks as descendants of those or by their environment.

    slurmd ── slurmstepd (one per step and node) ── tasks ── ...
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from miles_hpc.core.deadline import Deadline
from miles_hpc.core.errors import UserError

__all__ = [
    "Process",
    "end",
    "find_binary",
    "process_of",
    "read_record",
    "spawn",
    "step_daemons",
    "tasks",
    "wait_until",
]

_SBIN = ("/usr/sbin", "/sbin", "/usr/local/sbin")  # not on an ordinary user's PATH

PACKAGES = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "munged": "munge",
    "sinfo": "slurm-client",
    "ip": "iproute2",
    "unshare": "util-linux",
    "bash": "bash",
    "mariadbd": "mariadb-server",
    "mariadb-install-db": "mariadb-server",
    "mariadb": "mariadb-client",
    "slurmdbd": "slurmdbd slurm-wlm-mysql-plugin",
    "sacctmgr": "slurm-client",
}


@dataclass(frozen=True)
class Process:
    """One process, told apart from a later one with the same pid."""

    pid: int
    start_ticks: int
    boot_id: str

    @property
    def alive(self) -> bool:
        """False for a zombie too: pid 1 of a container may reap late."""
        stat = _stat(self.pid)
        return stat is not None and stat[0] not in "ZX" and self == process_of(self.pid)

    def kill(self, sig: int) -> None:
        """Send `sig` if the process is still the same one."""
        if self.alive:
            try:
                os.kill(self.pid, sig)
            except ProcessLookupError:
                pass


def find_binary(name: str) -> str:
    """Absolute path of a program. Raises UserError with the apt-get line when it isn't installed."""
    path = shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", os.defpath), *_SBIN]))
    if path is None:
        raise UserError(
            f"{name} isn't installed; run: apt-get install --no-install-recommends {PACKAGES.get(name, name)}"
        )
    return path


def _stat(pid: int) -> tuple[str, int, int] | None:
    """State, parent, and start time in clock ticks since boot (proc(5): fields 3, 4, 22); None for no process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError, IndexError):
        return None
    return fields[0], int(fields[1]), int(fields[19])


def process_of(pid: int) -> Process | None:
    """The process that has this pid now."""
    stat = _stat(pid)
    if stat is None:
        return None
    return Process(pid, stat[2], Path("/proc/sys/kernel/random/boot_id").read_text().strip())


def spawn(
    argv: Sequence[str], environ: Mapping[str, str], *, log: Path, record: Path, stdin: int | None = None
) -> Process:
    """Start a program in a session of its own and record it; `log` gets stdout and stderr of this start.

    posix_spawn rather than subprocess: the daemon outlives this interpreter, so no object should wait for it.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    actions: list[tuple[int, ...] | tuple[int, int, str, int, int]] = [(os.POSIX_SPAWN_OPEN, 1, str(log), flags, 0o644)]
    if stdin is None:
        actions.append((os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0))
    else:
        actions.append((os.POSIX_SPAWN_DUP2, stdin, 0))
    actions.append((os.POSIX_SPAWN_DUP2, 1, 2))
    pid = os.posix_spawn(argv[0], list(argv), dict(environ), file_actions=actions, setsid=True)
    process = process_of(pid)
    assert process is not None  # an unreaped child keeps its entry in /proc
    temporary = record.with_suffix(".tmp")
    temporary.write_text(json.dumps(asdict(process)))
    temporary.replace(record)
    return process


def read_record(path: Path) -> Process | None:
    """The recorded process if it is alive, else None; a child of this interpreter that has ended is reaped."""
    try:
        process = Process(**json.loads(path.read_text()))
    except (FileNotFoundError, ValueError, TypeError):
        return None
    if process.alive:
        return process
    _reap(process.pid)
    return None


def _reap(pid: int) -> None:
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        pass  # started by another interpreter


def wait_until(condition: Callable[[], bool], deadline: Deadline, poll_s: float = 0.02) -> None:
    """Poll until `condition` holds. Raises DeadlineExpired."""
    while not condition():
        deadline.check()
        time.sleep(min(poll_s, deadline.remaining_s))


def end(processes: Iterable[Process], grace_s: float, sig: int = signal.SIGTERM) -> None:
    """Ask with `sig`, and kill what is left after `grace_s`. Returns when all are gone."""
    pending = list(processes)
    for process in pending:
        process.kill(sig)
    deadline = Deadline(grace_s, "daemons to end")
    while any(p.alive for p in pending) and not deadline.expired:
        time.sleep(0.02)
    for process in pending:
        process.kill(signal.SIGKILL)
    killed = Deadline(10.0, f"killed processes {[p.pid for p in pending]} to end")
    wait_until(lambda: not any(p.alive for p in pending), killed)
    for process in pending:
        _reap(process.pid)


# -- what the box's slurmd started ------------------------------------------------------------------------------------


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def step_daemons(root: Path, node: str | None = None) -> dict[int, str]:
    """pid -> node of this box's slurmstepd (of one node if given).

    Each listens on <root>/spool/<node>/<node>_<job>.<step>; it overwrites its environment with its title, so that
    can't be asked. Nodes in a network of their own don't appear in this table; they end with their namespace.
    """
    prefix = f"{root}/spool/"
    inodes: dict[str, str] = {}
    for line in Path("/proc/net/unix").read_text().splitlines():
        fields = line.split(maxsplit=7)
        if len(fields) == 8 and fields[7].startswith(prefix):
            inodes[fields[6]] = fields[7][len(prefix) :].split("/")[0]
    found: dict[int, str] = {}
    if not inodes:
        return found
    for pid in _pids():
        try:
            if Path(f"/proc/{pid}/comm").read_text().strip() != "slurmstepd":
                continue
            for fd in Path(f"/proc/{pid}/fd").iterdir():
                try:
                    target = str(fd.readlink())
                except FileNotFoundError:
                    continue  # this one was closed meanwhile; the others tell as well
                name = inodes.get(target[8:-1]) if target.startswith("socket:[") else None
                if name is not None and node in (None, name):
                    found[pid] = name
        except OSError:
            continue  # ended meanwhile, or another user's
    return found


def tasks(root: Path, node: str | None = None, below: Iterable[int] = ()) -> set[int]:
    """Pids of what jobs of this box run (on one node if given); never the caller or one of its ancestors.

    Known as descendants of `below`, or by what slurmd puts into the environment of a task: an allocation's shell on the
    submit host has SLURM_CONF and SLURM_JOB_ID as well, but no SLURMD_NODENAME.
    """
    want = {f"SLURM_CONF={root}/slurm.conf".encode()} | ({f"SLURMD_NODENAME={node}".encode()} if node else set())
    parents: dict[int, int] = {}
    found: set[int] = set()
    for pid in _pids():
        stat = _stat(pid)
        if stat is None or stat[0] in "ZX":
            continue
        parents[pid] = stat[1]
        try:
            environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue  # ended meanwhile, or another user's
        if want.issubset(environ) and any(variable.startswith(b"SLURMD_NODENAME=") for variable in environ):
            found.add(pid)
    family, grown = set(below), True
    while grown:
        children = {pid for pid, parent in parents.items() if parent in family} - family
        family |= children
        grown = bool(children)
    ancestors, pid = set(), os.getpid()
    while pid in parents and pid not in ancestors:
        ancestors.add(pid)
        pid = parents[pid]
    return (found | family) - set(below) - ancestors
