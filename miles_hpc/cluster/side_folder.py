"""The folder of one side job: what was asked, where it runs, what came of it. All of it is readable JSON.

    side_jobs/0003/                   0700, owned by whoever submitted
      call.json                       the function by name, its arguments, what was asked of the site
      submitted.json                  where it runs: Slurm's job id, or the process on this machine
      result-<task>.json              what a task returned or raised, written by the task
      ended.json                      an end that a witness told of, kept because Slurm forgets
      cancel.json                     somebody asked for its end through `cancel`
      <id>_submission.sh, <id>_submitted.pkl, <id>_<task>_log.out|err, <id>_<task>_result.pkl       submitit's

What is trusted: submitit runs what it unpickles from `<id>_submitted.pkl`, so whoever can write here can run code as
the user. The folder is made 0700, and one that somebody else owns or can write to is refused, before anything in it is
read and by the job itself. The pickle holds this project's own function and the folder's path; the call itself is in
call.json. Results are read from JSON alone: nobody unpickles submitit's result files.
"""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from checkpoints.publish import publish_bytes
from miles_hpc.cluster.slurm_states import JobState
from miles_hpc.core.errors import IntegrityError, UserError

__all__ = ["Call", "Ended", "SideFolder", "Submitted", "TaskResult", "check_private", "create", "side_folders"]


class _Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the files."""


class Call(_Record, frozen=True, kw_only=True):
    """What was asked for. `function(**arguments)` is called once in every task. Times: epoch seconds, seconds."""

    name: str
    job_name: str
    function: str  # "module:attribute"
    arguments: dict[str, Any] = {}
    tasks: int = 1
    gpus: int = 0  # of a local job: so many of this machine's are visible to every task
    executor: Literal["slurm", "local"] = "slurm"
    python: str = ""  # interpreter of the tasks
    role: str = ""  # whose partition and interpreter it has
    time_limit_s: float
    signal_s: int  # USR2 comes so long before the limit
    start_again: bool = False  # at its time limit, as submitit does with what can be checkpointed
    created: float = 0.0


class Submitted(_Record, frozen=True, kw_only=True):
    """Where it runs. With Slurm only `id` counts; without, the keeper's process is named so that no other is meant."""

    id: str  # Slurm's job id; of a local job, the id that submitit puts into file names
    host: str = ""
    boot: str = ""  # the host's boot id: process ids start again after it
    pid: int = 0
    pid_start: int = 0  # clock ticks between boot and start, field 22 of /proc/PID/stat (proc(5))
    time: float


class TaskResult(_Record, frozen=True, kw_only=True):
    """What one task left behind: `value`, or `error` and `kind` of what it raised."""

    task: int
    ok: bool
    value: Any = None
    kind: str = ""  # the exception's class
    error: str = ""
    trace: str = ""
    host: str
    started: float
    ended: float


class Ended(_Record, frozen=True, kw_only=True):
    """An end that was seen, with its witness."""

    state: JobState
    reason: str
    witness: str
    nodes: str = ""
    time: float


_RecordT = TypeVar("_RecordT", bound=_Record)


class SideFolder:
    """One side job's folder. Every read checks first that the folder is private: see the module."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def number(self) -> int:
        return int(self.root.name)

    @property
    def keeper_log(self) -> Path:
        """What a local job's keeper prints."""
        return self.root / "keeper.log"

    def result_path(self, task: int) -> Path:
        return self.root / f"result-{task}.json"

    # -- reading

    def call(self) -> Call:
        """Raises UserError when there is none: the submission broke off, or it is another folder."""
        found = self._read("call.json", Call)
        if found is None:
            raise UserError(f"{self.root}: no side job: call.json is missing")
        return found

    def submitted(self) -> Submitted | None:
        return self._read("submitted.json", Submitted)

    def ended(self) -> Ended | None:
        return self._read("ended.json", Ended)

    def result(self, task: int) -> TaskResult | None:
        return self._read(f"result-{task}.json", TaskResult)

    def cancelled(self) -> bool:
        return (self.root / "cancel.json").exists()

    # -- writing

    def write(self, record: Call | Submitted | Ended | TaskResult) -> None:
        """Publish a record under its name. Raises TypeError for a value that JSON doesn't have."""
        if isinstance(record, TaskResult):
            path = self.result_path(record.task)
        else:
            path = self.root / f"{type(record).__name__.lower()}.json"
        data = msgspec.json.format(msgspec.json.encode(record), indent=1)
        publish_bytes(path, data + b"\n", mode=0o600)

    def ask_cancel(self, now: float) -> None:
        """Leave word that the job is to end at once: its tasks look for it when they get SIGTERM."""
        publish_bytes(self.root / "cancel.json", msgspec.json.encode({"time": now}) + b"\n", mode=0o600)

    def remove(self) -> None:
        """Take back a folder whose job was never submitted."""
        shutil.rmtree(self.root)

    def _read(self, name: str, kind: type[_RecordT]) -> _RecordT | None:
        check_private(self.root)
        path = self.root / name
        try:
            return msgspec.json.decode(path.read_bytes(), type=kind)
        except FileNotFoundError:
            return None
        except msgspec.MsgspecError as error:
            raise IntegrityError(f"{path}: {error}") from error


def check_private(folder: Path) -> None:
    """Raise UserError unless `folder` is a folder of this user's that nobody else can write to."""
    try:
        found = folder.lstat()
    except FileNotFoundError:
        raise UserError(f"{folder}: no such folder") from None
    if not stat.S_ISDIR(found.st_mode):
        raise UserError(f"{folder}: expected a folder, and no link to one")
    if found.st_uid != os.geteuid():
        raise UserError(f"{folder}: belongs to user id {found.st_uid}, expected {os.geteuid()}: it isn't read")
    if found.st_mode & 0o022:
        raise UserError(
            f"{folder}: mode {stat.S_IMODE(found.st_mode):04o}, others can write to it and so run code as you: "
            f"look at what is in it, then chmod 700 {folder}"
        )


def create(parent: Path) -> SideFolder:
    """The next numbered folder below `parent` (made, too), mode 0700. Of two at the same moment each gets its own."""
    parent.mkdir(mode=0o700, exist_ok=True)
    check_private(parent)
    number = max((folder.number for folder in side_folders(parent)), default=0)
    while True:
        number += 1
        root = parent / f"{number:04d}"
        try:
            root.mkdir(mode=0o700)
        except FileExistsError:
            continue
        return SideFolder(root)


def side_folders(parent: Path) -> list[SideFolder]:
    """All side jobs' folders by number; none when there is no such parent."""
    if not parent.exists():
        return []
    check_private(parent)
    return [SideFolder(path) for path in sorted(parent.iterdir(), key=_number) if _number(path) and path.is_dir()]


def _number(path: Path) -> int:
    return int(path.name) if path.name.isascii() and path.name.isdigit() else 0
