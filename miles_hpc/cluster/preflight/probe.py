"""Questions to file systems, asked in a child that may hang: standard library only, started by its path.

    python -I -S probe.py WHAT [ARGUMENT ...]        one line of JSON, or one line on stderr and exit code 1

`LocalMachine.probe` starts it with a deadline. It imports nothing of the project, so that any Python can run it.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# For the second process of `flock`: tries the lock that its parent holds.
_SECOND = """
import fcntl, sys
with open(sys.argv[1], "r+b") as file:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print("kept out")
    else:
        print("let in")
"""
_LOCK_S = 8


def nearest(path: str) -> Path:
    """`path`, or the closest folder above it that exists."""
    found = Path(path).absolute()
    while not found.exists() and found != found.parent:
        found = found.parent
    return found


def flock(folder: str) -> dict[str, Any]:
    """Whether flock(2) is taken at all, and whether it keeps a second process out. Leaves nothing behind."""
    with tempfile.NamedTemporaryFile(dir=nearest(folder), prefix=".miles-hpc-flock-") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return {"works": False, "saw": f"flock is refused: {error.strerror}"}
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _SECOND, file.name],
            capture_output=True,
            text=True,
            timeout=_LOCK_S,
            check=False,
        )
    said = done.stdout.strip() or (done.stderr.strip().splitlines() or ["no answer"])[-1]
    return {"works": said == "kept out", "saw": f"a second process is {said}"}


def mounts() -> list[tuple[str, str, str]]:
    """Mount points with their types and the file system's options, the latest last (proc_pid_mountinfo(5))."""
    found = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, dash, right = line.partition(" - ")
        if dash:
            point = re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), left.split()[4])
            found.append((point, right.split()[0], right.split()[-1]))
    return found


def place(*paths: str) -> list[dict[str, Any]]:
    """Where each path really lies: its nearest existing folder, mount point, type and room of the file system."""
    table = mounts()
    found = []
    for path in paths:
        real = os.path.realpath(nearest(path))
        above = [row for row in table if f"{real}/".startswith(row[0].rstrip("/") + "/")]
        # Of two mounts on one point the later one is seen.
        point, kind, options = (
            max(enumerate(above), key=lambda row: (len(row[1][0]), row[0]))[1] if above else ("/", "", "")
        )
        room = os.statvfs(real)
        status = os.stat(real)  # noqa: PTH116 - this is a string
        found.append(
            {
                "path": path,
                "real": real,
                "exists": Path(path).exists(),
                "mount": point,
                "kind": kind,
                "options": options,
                "free_bytes": room.f_bavail * room.f_frsize,
                "total_bytes": room.f_blocks * room.f_frsize,
                "free_inodes": room.f_favail,
                "total_inodes": room.f_files,
                "inode": status.st_ino,
                "fsid": room.f_fsid,
                "writable": os.access(real, os.W_OK),
            }
        )
    return found


def mode(path: str) -> dict[str, Any] | None:
    """Kind, permission bits and owner of a file; None when there is none."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return None
    own = status.st_uid == os.getuid()
    return {"regular": stat.S_ISREG(status.st_mode), "mode": stat.S_IMODE(status.st_mode), "own": own}


def file_time(folder: str) -> float:
    """Seconds by which a new file's date is ahead of this host's clock; on NFS the server's clock sets it."""
    with tempfile.NamedTemporaryFile(dir=nearest(folder), prefix=".miles-hpc-time-") as file:
        before = time.time()
        file.write(b"x")
        file.flush()
        os.fsync(file.fileno())
        os.utime(file.fileno())  # without a date: the server's, where there is one
        after = time.time()
        dated = os.fstat(file.fileno()).st_mtime
    # The kernel stamps files with the time of its last tick, up to 10 ms ago.
    return 0.0 if before - 0.01 <= dated <= after else dated - (before + after) / 2


def packages(*names: str) -> dict[str, str]:
    """Versions of the Python packages that are installed for this interpreter; absent ones are left out."""
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            pass
    return found


def package_files(name: str, pattern: str) -> list[str]:
    """Names of the files of an installed package that match a regular expression; [] when it isn't installed."""
    from importlib.metadata import PackageNotFoundError, files

    try:
        listed = files(name) or []
    except PackageNotFoundError:
        return []
    return sorted({path.name for path in listed if re.search(pattern, path.name)})


def libraries(pattern: str, *folders: str) -> list[str]:
    """Files in the folders whose names match a regular expression as a whole, in the order of the folders."""
    found = []
    for folder in folders:
        try:
            names = sorted(entry.name for entry in Path(folder).iterdir())
        except OSError:
            continue
        found += [str(Path(folder) / name) for name in names if re.fullmatch(pattern, name)]
    return found


def search_bytes(path: str, pattern: str) -> str:
    """The first group of a regular expression's first match in a binary file; "" when there is none."""
    found = re.search(pattern.encode(), Path(path).read_bytes())
    return found[1].decode(errors="replace") if found else ""


def lines(pattern: str, *paths: str) -> list[str]:
    """Lines of text files that match, at most 2,000; files that can't be read are left out."""
    wanted = re.compile(pattern)
    found: list[str] = []
    for path in paths:
        try:
            with open(path, errors="replace") as file:
                found += [line.rstrip("\n")[:500] for line in file if wanted.search(line)]
        except OSError:
            continue
    return found[:2000]


def newest_logs(run_dir: str) -> list[str]:
    """Log files of the run's newest attempt."""
    attempts = sorted(path for path in (Path(run_dir) / "attempts").glob("[0-9]*") if path.is_dir())
    return sorted(str(path) for path in (attempts[-1] / "logs").glob("*.log")) if attempts else []


def trained_steps(run_dir: str) -> int:
    """Steps of which the newest attempt's events have metrics: they ended on all ranks."""
    attempts = sorted(path.name for path in (Path(run_dir) / "attempts").glob("[0-9]*") if path.is_dir())
    steps = set()
    for path in sorted((Path(run_dir) / "events").glob("*.jsonl")) if attempts else []:
        for line in path.read_bytes().splitlines():
            if b'"metric"' not in line:
                continue
            try:
                event = json.loads(line)
            except ValueError:  # cut off by a kill
                continue
            values = event.get("values") or {}
            evaluated = bool(values) and all(name.startswith("eval/") for name in values)
            if event.get("kind") == "metric" and event.get("attempt") == int(attempts[-1]) and not evaluated:
                steps.add(event.get("step"))
    return len(steps)


def user_namespace() -> str:
    """ "" when this user can make a user namespace, otherwise the kernel's complaint. Only this process enters it."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    return "" if libc.unshare(0x10000000) == 0 else os.strerror(ctypes.get_errno())


PROBES: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        file_time,
        flock,
        libraries,
        lines,
        mode,
        newest_logs,
        package_files,
        packages,
        place,
        search_bytes,
        trained_steps,
        user_namespace,
    )
}


def main(argv: list[str]) -> int:
    try:
        print(json.dumps(PROBES[argv[0]](*argv[1:])))
    except (OSError, subprocess.TimeoutExpired) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
