"""Making data visible: written beside its place, synced, then renamed. The one module that knows how to publish.

A reader sees either nothing (or the old content) or all of it. The steps are those of any crash-safe writer:
write to a temporary name in the same folder, fsync the file, rename, fsync the folder (rename(2), fsync(2)).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

__all__ = ["fsync_folder", "publish_bytes", "publish_folder"]


def fsync_folder(folder: Path) -> None:
    """Make renames inside `folder` durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def publish_bytes(
    path: Path,
    data: bytes | bytearray | memoryview,
    *,
    mode: int = 0o644,
    durable: bool = True,
    before_rename: Callable[[], None] | None = None,
) -> None:
    """Write `data` as `path`, atomically; an existing file is replaced.

    Without `durable` nothing is synced: for what is worthless after a crash anyway (addresses, live status).
    `before_rename` is called when all bytes are on storage and nothing is visible yet: the place of a fence check.
    Raises OSError and what `before_rename` raises; the temporary file is removed then.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        if before_rename is not None:
            before_rename()
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        fsync_folder(path.parent)


def publish_folder(temporary: Path, final: Path) -> None:
    """Rename a finished folder to its place. Raises FileExistsError when `final` exists and isn't empty."""
    fsync_folder(temporary)
    temporary.rename(final)
    fsync_folder(final.parent)
