"""Files into a sandbox and one out of it, by commands that run inside.

    put   files ─▶ put_commands ─▶ rm, mkdir, base64 -d >file, chmod     exit code: everything was written, or not
    get   path  ─▶ get_command  ─▶ head -c of a plain file               its bytes are the command's output

The commands have the sandbox's own rights: wherever a path leads, over links too, it stays inside. The host kills what
earlier commands have left running before it runs them (`SandboxHost.execute_alone`), so nothing can swap a path or
write into an answer meanwhile. Contents travel as base64, since bash holds no NUL bytes, in commands of bounded length.
"""

from __future__ import annotations

import base64
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from miles_hpc.core.errors import ProtocolError, UserError
from miles_hpc.core.messages import SandboxFileEntry, SandboxPut
from miles_hpc.rollout.sandbox_driver import SandboxLimits
from miles_hpc.rollout.sandbox_root import MAX_INODES, TASK_FOLDER

__all__ = [
    "NO_FILE",
    "TASK_FOLDER",
    "SandboxFile",
    "check_contents",
    "check_files",
    "get_command",
    "put_commands",
    "put_message",
    "put_request",
]

#: The exit code of `get_command` for what isn't a plain file.
NO_FILE = 66

_PIECE_BYTES = 24 << 10  # of a file in one command: 32 KiB of base64
_NAMES_CHARS = 16 << 10  # of names in one command


@dataclass(frozen=True, slots=True)
class SandboxFile:
    """A file to put: its bytes, and its mode (0o644, 0o755, ...), which the sandbox's user gets as it is."""

    data: bytes
    mode: int = 0o644


def check_contents(files: Mapping[str, str], limits: SandboxLimits) -> None:
    """What `SandboxHost.create` takes: text files below the working folder. Raises UserError."""
    total = 0
    for name, text in files.items():
        _check_name(name)
        if "\0" in text:
            raise UserError(f"sandbox file {name!r}: contents with NUL bytes can't be written")
        total += len(text)
    if total > limits.files_bytes:
        raise UserError(f"sandbox files of {total} characters: the limit is {limits.files_bytes}")


def check_files(folder: str, files: Mapping[str, SandboxFile], limits: SandboxLimits, *, isolated: bool) -> None:
    """Raises UserError for names that leave the folder, and for more or larger files than a sandbox holds."""
    _check_path(folder or ".", isolated=isolated)
    for name, file in files.items():
        _check_name(name)
        if len(file.data) > limits.file_bytes:
            raise UserError(f"sandbox file {name!r} of {len(file.data)} bytes: the limit is {limits.file_bytes}")
        if not 0 <= file.mode <= 0o777:
            raise UserError(f"sandbox file {name!r}: mode {file.mode:o}: expected 0 to 777")
    total = sum(len(file.data) for file in files.values())
    if total > limits.files_bytes or len(files) > MAX_INODES:
        raise UserError(
            f"{len(files)} sandbox files of {total} bytes: the limit is {MAX_INODES} of {limits.files_bytes} bytes"
        )


def put_commands(folder: str, files: Mapping[str, SandboxFile], *, replace: bool) -> Iterator[str]:
    """Commands that write `files` below `folder` ("" = the working folder); each ends with 0 when it did its part.

    With `replace` the folder is made anew, whatever it was: a folder with contents, a link, a file.
    """
    target = shlex.quote(folder or ".")
    if replace and folder:
        yield f"set -e; rm -rf -- {target}; mkdir -p -- {target}"
    elif replace:
        yield "set -e; find . -mindepth 1 -delete"
    else:
        yield f"set -e; mkdir -p -- {target}"
    enter = f"set -eo pipefail; umask 022; cd -- {target}; "
    folders = {str(PurePosixPath(name).parent): None for name in files}
    for some in _together([name for name in folders if name != "."]):
        yield f"{enter}mkdir -p -- {some}"
    if not replace:
        for some in _together(list(files)):
            yield f"{enter}rm -f -- {some}"  # a link in the file's place would be followed
    for name, file in files.items():
        place = shlex.quote(f"./{name}")
        for start in range(0, len(file.data) or 1, _PIECE_BYTES):
            piece = base64.b64encode(file.data[start : start + _PIECE_BYTES]).decode()
            yield f"{enter}printf %s '{piece}' | base64 -d {'>>' if start else '>'}{place}"
    by_mode: dict[int, list[str]] = {}
    for name, file in files.items():
        if file.mode != 0o644:
            by_mode.setdefault(file.mode, []).append(name)
    for mode, names in by_mode.items():
        for some in _together(names):
            yield f"{enter}chmod {mode:o} -- {some}"


def get_command(path: str, max_bytes: int, *, isolated: bool) -> str:
    """A command whose output is at most `max_bytes` + 1 bytes of the plain file. Raises UserError for a bad path."""
    _check_path(path, isolated=isolated)
    place = shlex.quote(path if path.startswith("/") else f"./{path}")
    return f"[[ -f {place} && ! -L {place} ]] || exit {NO_FILE}; exec head -c {max_bytes + 1} -- {place}"


def put_message(sandbox_id: str, folder: str, files: Mapping[str, SandboxFile], *, replace: bool) -> SandboxPut:
    """The message for these files; its payload is their contents in the same order."""
    entries = tuple(SandboxFileEntry(path=name, n_bytes=len(file.data), mode=file.mode) for name, file in files.items())
    return SandboxPut(sandbox_id=sandbox_id, folder=folder, files=entries, replace=replace)


def put_request(message: SandboxPut, payload: memoryview | bytes) -> dict[str, SandboxFile]:
    """Inverse of `put_message`. Raises ProtocolError when payload and entries disagree."""
    files: dict[str, SandboxFile] = {}
    at = 0
    for entry in message.files:
        end = at + entry.n_bytes
        if entry.n_bytes < 0 or end > len(payload) or entry.path in files:
            raise ProtocolError(f"SandboxPut: file {entry.path!r} of {entry.n_bytes} bytes doesn't fit its payload")
        files[entry.path] = SandboxFile(bytes(payload[at:end]), entry.mode)
        at = end
    if at != len(payload):
        raise ProtocolError(f"SandboxPut: files of {at} bytes with a payload of {len(payload)}")
    return files


def _together(names: Sequence[str]) -> Iterator[str]:
    """Quoted names, as many at a time as a command should hold."""
    some: list[str] = []
    length = 0
    for name in names:
        quoted = shlex.quote(f"./{name}")
        if some and length + len(quoted) > _NAMES_CHARS:
            yield " ".join(some)
            some, length = [], 0
        some.append(quoted)
        length += len(quoted) + 1
    if some:
        yield " ".join(some)


def _check_name(name: str) -> None:
    path = PurePosixPath(name)
    inside = name and not path.is_absolute() and ".." not in path.parts and path.parts
    if not inside or "\0" in name or "\n" in name or name.endswith("/") or len(name.encode()) > 1024:
        raise UserError(f"sandbox file {name[:200]!r}: expected a path inside the folder")


def _check_path(path: str, *, isolated: bool) -> None:
    pure = PurePosixPath(path)
    if not path or ".." in pure.parts or "\0" in path or "\n" in path or len(path.encode()) > 1024:
        raise UserError(f"sandbox path {path[:200]!r}: expected a path without '..'")
    if pure.is_absolute() and not isolated:
        raise UserError(f"sandbox path {path!r}: with isolation none, expected a path inside the working folder")
