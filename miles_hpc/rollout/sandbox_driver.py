"""One sandbox: its limits, the program of its PID 1, and what the host keeps of it."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass

from miles_hpc.core.config import SandboxConfig

__all__ = ["Sandbox", "SandboxLimits", "driver", "exec_request", "files_request"]


@dataclass(frozen=True)
class SandboxLimits:
    """Bounds of one sandbox; the first five hold for each of its processes (setrlimit(2))."""

    cpu_s: int = 10  # then SIGXCPU, and a second later the kill
    memory_bytes: int = 512 << 20  # address space
    file_bytes: int = 8 << 20  # one file
    open_files: int = 128
    processes: int = 48  # of the sandbox together
    folder_bytes: int = 16 << 20  # /work and /tmp, each
    command_bytes: int = 64 << 10
    discard_bytes: int = 1 << 20  # output beyond the caller's limit that is read and dropped before the kill
    files_bytes: int = 8 << 20  # all files of a create, or of a put, together

    @classmethod
    def of(cls, config: SandboxConfig) -> SandboxLimits:
        """Those of a run file."""
        folder_bytes = config.folder_mb << 20
        return cls(
            cpu_s=config.cpu_s,
            memory_bytes=config.memory_mb << 20,
            file_bytes=config.file_mb << 20,
            processes=config.processes,
            folder_bytes=folder_bytes,
            files_bytes=folder_bytes // 2,
        )


# PID 1 of a sandbox. It reads from descriptor 3: name, length and content of each file, an empty name, then length and
# text of each command; names and lengths end with NUL. (`read -N` takes a block at once, `read -d` a byte at a time.)
# Commands get descriptor 4 as output. The redirections are an `exec` of their own: those of a compound command keep
# copies of what they replace, at 10 and above, within the command's reach. `trap : INT` keeps an interrupt from ending
# PID 1; subshells reset it. A command of plain words that is a program (`hash` knows no builtins) is executed in place
# of the subshell, which saves a fork. One that names /dev/stderr or the like runs in a fresh bash, because an
# undumpable process can't open its own /proc/self/fd. Where soft and hard limit of CPU time are one, the kernel kills
# without SIGXCPU, and nobody could tell why.
DRIVER = r"""
ulimit -c 0 -n {open_files} -f {file_kib} -v {memory_kib} {processes} || exit 9
ulimit -S -t {cpu_s} && ulimit -H -t {cpu_kill_s} || exit 9
trap : INT
failed=0
while IFS= read -r -d '' -u 3 name && [[ $name ]]; do
  IFS= read -r -d '' -u 3 length
  IFS= read -r -N "$length" -u 3 text
  [[ $name != */* ]] || mkdir -p "./${{name%/*}}"
  printf %s "$text" >"./$name" || failed=1
done
echo "$failed" >&3
unset name text failed
while IFS= read -r -d '' -u 3 length && IFS= read -r -N "$length" -u 3 command; do
  (
    exec </dev/null >&4 2>&1 3<&- 4>&-
    case $command in
      (*/dev/std*|*/dev/fd*|*/proc/*) exec bash -c "$command" ;;
      (*[!A-Za-z0-9_./\ \<*=-]*) ;;
      (*)
        word=${{command%% *}}
        if hash "$word" 2>/dev/null && [[ ${{BASH_CMDS[$word]}} ]]; then eval "exec $command"; exit; fi ;;
    esac
    eval "$command"
  )
  echo $? >&3
done
"""


def driver(limits: SandboxLimits, *, count_processes: bool) -> str:
    """The bash program that is a sandbox's PID 1."""
    return DRIVER.format(
        open_files=limits.open_files,
        file_kib=limits.file_bytes >> 10,
        memory_kib=limits.memory_bytes >> 10,
        cpu_s=limits.cpu_s,
        cpu_kill_s=limits.cpu_s + 1,
        processes=f"-u {limits.processes}" if count_processes else "",
    )


def files_request(files: Mapping[str, str]) -> bytes:
    """The first thing that the driver reads."""
    encoded = ((name.encode(), text.encode()) for name, text in files.items())
    return b"".join(b"%s\0%d\0%s" % (name, len(text), text) for name, text in encoded) + b"\0"


def exec_request(command: bytes) -> bytes:
    """What the driver reads for each command."""
    return b"%d\0%s" % (len(command), command)


class Sandbox:
    """One sandbox's descriptors and what its bash has said. Belongs to the event loop."""

    def __init__(self, sandbox_id: str, files: Mapping[str, str]) -> None:
        self.id = sandbox_id
        self.files = dict(files)
        self.lock = asyncio.Lock()
        self.control: socket.socket | None = None
        self.output = -1
        self.name = ""  # the launcher's name of the current incarnation
        self.lines = bytearray()
        self.status: asyncio.Future[int] | None = None  # what its bash is to say next; None when nothing is awaited
        self.cleared: asyncio.Future[None] | None = None  # the launcher kills what runs in it until this is done
        self.rest: asyncio.Task[None] | None = None  # large files on their way in
        self.kept = bytearray()
        self.n_output = 0
        self.limit = 0
        self.overflow = False
        self.destroyed = False
        self.anew = False  # it was started again, and nobody has been told
        self.used = time.monotonic()
