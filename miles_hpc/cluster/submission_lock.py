"""One submission of a run at a time: of two `resume` at the same moment the second one is refused.

A file made with O_EXCL, which works on every file system (flock doesn't: Lustre without `-o flock`). Whoever was killed
leaves it behind: it counts no longer when its process is gone from this host, or after `_STALE_S`.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from miles_hpc.core.errors import UserError

__all__ = ["sole_submission"]

#: Longer than all that Slurm's client waits for between the first question and sbatch's answer.
_STALE_S = 300.0


@contextmanager
def sole_submission(lock: Path) -> Iterator[None]:
    """Hold `lock` for the block. Raises UserError while another process does."""
    _take(lock)
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)


def _take(lock: Path) -> None:
    mine = {"host": socket.gethostname(), "pid": os.getpid(), "time": time.time()}
    for _ in range(2):
        try:
            fd = os.open(lock, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            holder = _holder(lock)
            if not _is_stale(holder, mine):
                break
            lock.unlink(missing_ok=True)
            continue
        with os.fdopen(fd, "w") as file:
            json.dump(mine, file)
        return
    since = f"process {holder.get('pid', '?')} on {holder.get('host', '?')}"
    raise UserError(
        f"{lock.parent}: another submission of this run is at work ({since}): look with 'miles-hpc status' when it is "
        f"done; if it was killed, remove {lock}"
    )


def _holder(lock: Path) -> dict[str, Any]:
    """What the lock's owner wrote; empty while it writes, with the file's own time then."""
    try:
        found = json.loads(lock.read_bytes())
        if isinstance(found, dict):
            return found
    except (OSError, ValueError):
        pass
    try:
        return {"time": lock.stat().st_mtime}
    except OSError:
        return {}


def _is_stale(holder: dict[str, Any], mine: dict[str, Any]) -> bool:
    """Whether its owner is gone. Hosts' clocks may differ by seconds, which `_STALE_S` covers."""
    if not holder or mine["time"] - float(holder.get("time", 0.0)) > _STALE_S:
        return True
    if holder.get("host") != mine["host"] or not isinstance(holder.get("pid"), int):
        return False
    return not Path(f"/proc/{holder['pid']}").exists()
