"""Checks of what lies on storage against what was promised for it: sizes always, CRC-32 where one was recorded.

Nothing here repairs or removes anything; a problem is one line that names the file, what was seen and what was
expected.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from pathlib import Path

from checkpoints.journal import GroupOwned
from checkpoints.manifest import FileEntry, Manifest, size_problems

__all__ = ["crc32_of_file", "file_entry", "verify_checkpoint", "verify_payload", "verify_payloads"]

_BLOCK_BYTES = 1 << 20


def crc32_of_file(path: Path) -> int:
    """CRC-32 (zlib's) of a file, read block by block. Raises OSError."""
    crc = 0
    with path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK_BYTES):
            crc = zlib.crc32(block, crc)
    return crc


def file_entry(path: Path, *, digest: bool = False) -> FileEntry:
    """The manifest entry of a finished file; with `digest` the whole file is read. Raises OSError."""
    return FileEntry(n_bytes=path.stat().st_size, crc32=crc32_of_file(path) if digest else None)


def verify_checkpoint(folder: Path, manifest: Manifest) -> tuple[str, ...]:
    """Problems of a checkpoint's files; reads those that have a CRC. Empty when there are none."""
    problems = list(size_problems(folder, manifest))
    if problems:
        return tuple(problems)
    for name, entry in manifest.files.items():
        if entry.crc32 is None:
            continue
        seen = crc32_of_file(folder / name)
        if seen != entry.crc32:
            problems.append(f"{name}: CRC-32 {seen:08x}, expected {entry.crc32:08x}")
    return tuple(problems)


def verify_payload(run_dir: Path, record: GroupOwned) -> str | None:
    """What is wrong with an owned group's payload; None when nothing is."""
    path = run_dir / record.path
    what = f"group {record.group_id} attempt {record.attempt}: payload {record.path}"
    try:
        n_bytes = path.stat().st_size
        if n_bytes != record.n_bytes:
            return f"{what}: {n_bytes} bytes, expected {record.n_bytes}"
        seen = crc32_of_file(path)
    except FileNotFoundError:
        return f"{what}: missing"
    except OSError as error:
        return f"{what}: {error}"
    return None if seen == record.crc32 else f"{what}: CRC-32 {seen:08x}, expected {record.crc32:08x}"


def verify_payloads(run_dir: Path, records: Iterable[GroupOwned]) -> tuple[str, ...]:
    """Problems of these payloads, in order."""
    return tuple(problem for record in records if (problem := verify_payload(run_dir, record)) is not None)
