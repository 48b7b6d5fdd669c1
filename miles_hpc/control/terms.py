"""Terms: who may publish. Each start of a controller claims the next term; a newer claim fences older ones.

    attempts/0001/               numbered by the supervisor of each Slurm start, by mkdir
    attempts/0001/joined/        incarnations of processes from outside that start's job, by mkdir
    terms/000001/ claim.json     attempt, host, pid, time
    terms/000002/ ...            exists  =>  whatever runs under term 1 stops at its next check

A claim is a folder with claim.json in it, renamed to its number: rename(2) onto a folder that isn't empty fails, so two
starts can't both win and no claim is ever without its author. Attempts come first: a process of an older attempt is
fenced by the newer attempt alone, and a claim that it still managed to make afterwards fences nobody of the newer one.
"""

from __future__ import annotations

import errno
import os
import socket
import tempfile
import time
from pathlib import Path

import msgspec

from checkpoints.publish import fsync_folder, publish_bytes
from miles_hpc.core.errors import FencedError
from miles_hpc.core.paths import RunPaths

__all__ = [
    "Claim",
    "check_attempt",
    "check_newest",
    "claim_attempt",
    "claim_incarnation",
    "claim_term",
    "newest_attempt",
    "newest_term",
    "read_claim",
]


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """Who claimed a term."""

    term: int
    attempt: int
    host: str
    pid: int
    time: float


def _newest_number(folder: Path) -> int:
    """The highest number among the sub-folders' names, 0 when there is none."""
    try:
        return max((int(entry.name) for entry in os.scandir(folder) if entry.name.isdigit()), default=0)
    except FileNotFoundError:
        return 0


def newest_term(paths: RunPaths, attempt: int | None = None) -> int:
    """The newest claimed term, 0 before the first; with `attempt` the newest that this attempt claimed."""
    newest = _newest_number(paths.terms)
    while attempt is not None and newest > 0:
        claim = read_claim(paths, newest)
        if claim is not None and claim.attempt == attempt:
            break
        newest -= 1
    return newest


def claim_term(paths: RunPaths, attempt: int) -> int:
    """Claim and return the next term. Raises FencedError when a newer attempt exists.

    Ends: each rename that fails means that somebody else made progress.
    """
    paths.terms.mkdir(parents=True, exist_ok=True)
    while True:
        check_attempt(paths, attempt)
        term = newest_term(paths) + 1
        claim = Claim(term=term, attempt=attempt, host=socket.gethostname(), pid=os.getpid(), time=time.time())
        with tempfile.TemporaryDirectory(dir=paths.terms, prefix=".claim-", ignore_cleanup_errors=True) as temporary:
            publish_bytes(Path(temporary) / "claim.json", msgspec.json.encode(claim))
            Path(temporary).chmod(0o755)
            try:
                Path(temporary).rename(paths.term(term))
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                continue
        fsync_folder(paths.terms)
        paths.rendezvous(term).mkdir(exist_ok=True)
        return term


def read_claim(paths: RunPaths, term: int) -> Claim | None:
    """The claim of a term; None while its file isn't there yet."""
    try:
        return msgspec.json.decode((paths.term(term) / "claim.json").read_bytes(), type=Claim)
    except FileNotFoundError:
        return None


def check_newest(paths: RunPaths, term: int, attempt: int) -> None:
    """Raise FencedError when a newer attempt exists, or a newer term than `term` that isn't an older attempt's.

    Called right before anything is published.
    """
    check_attempt(paths, attempt)
    for newer in range(newest_term(paths), term, -1):
        claim = read_claim(paths, newer)
        if claim is None or claim.attempt >= attempt:
            raise FencedError(f"term {term} is over: term {newer} was claimed; this process publishes nothing more")


def check_attempt(paths: RunPaths, attempt: int) -> None:
    """Raise FencedError when a newer attempt has started."""
    newest = newest_attempt(paths)
    if newest > attempt:
        raise FencedError(f"attempt {attempt} is over: attempt {newest} has started")


def claim_attempt(paths: RunPaths) -> int:
    """Number and make the folder of this Slurm start: attempts/0001, 0002, ..."""
    paths.attempts.mkdir(parents=True, exist_ok=True)
    while True:
        attempt = _newest_number(paths.attempts) + 1
        try:
            paths.attempt(attempt).mkdir()
        except FileExistsError:
            continue
        paths.logs(attempt).mkdir()
        return attempt


def claim_incarnation(paths: RunPaths, attempt: int, name: str) -> int:
    """Number this start of a process `name` that no supervisor counts: attempts/0001/joined/<name>/0001, 0002, ..."""
    folder = paths.joined(attempt) / name
    folder.mkdir(parents=True, exist_ok=True)
    while True:
        incarnation = _newest_number(folder) + 1
        try:
            (folder / f"{incarnation:04d}").mkdir()
        except FileExistsError:
            continue
        return incarnation


def newest_attempt(paths: RunPaths) -> int:
    """The newest attempt's number, 0 before the first."""
    return _newest_number(paths.attempts)
