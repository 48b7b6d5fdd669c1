"""Terms: who may publish. Each start of a controller claims the next term by mkdir; a newer claim fences older ones.

    terms/000001/ claim.json   attempt, host, pid, time
    terms/000002/ ...          exists  =>  whatever runs under term 1 stops at its next check

mkdir is atomic on the file systems that clusters share (POSIX; NFS since version 3), so two starts can't both win. The
folder is the claim; claim.json only says who made it.
"""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import msgspec

from checkpoints.publish import publish_bytes
from miles_hpc.core.errors import FencedError
from miles_hpc.core.paths import RunPaths

__all__ = ["Claim", "check_newest", "claim_attempt", "claim_term", "newest_term", "read_claim"]


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


def newest_term(paths: RunPaths) -> int:
    """The newest claimed term, 0 before the first."""
    return _newest_number(paths.terms)


def claim_term(paths: RunPaths, attempt: int) -> int:
    """Claim and return the next term. Ends: each failed mkdir means that somebody else made progress."""
    paths.terms.mkdir(parents=True, exist_ok=True)
    while True:
        term = newest_term(paths) + 1
        try:
            paths.term(term).mkdir()
        except FileExistsError:
            continue
        claim = Claim(term=term, attempt=attempt, host=socket.gethostname(), pid=os.getpid(), time=time.time())
        publish_bytes(paths.term(term) / "claim.json", msgspec.json.encode(claim))
        paths.rendezvous(term).mkdir(exist_ok=True)
        return term


def read_claim(paths: RunPaths, term: int) -> Claim | None:
    """The claim of a term; None while its file isn't there yet."""
    try:
        return msgspec.json.decode((paths.term(term) / "claim.json").read_bytes(), type=Claim)
    except FileNotFoundError:
        return None


def check_newest(paths: RunPaths, term: int) -> None:
    """Raise FencedError when a newer term than `term` was claimed. Called right before anything is published."""
    newest = newest_term(paths)
    if newest > term:
        raise FencedError(f"term {term} is over: term {newest} was claimed; this process publishes nothing more")


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


def newest_attempt(paths: RunPaths) -> int:
    """The newest attempt's number, 0 before the first."""
    return _newest_number(paths.attempts)
