"""Finding each other: addresses in the run directory, published after binding, never guessed.

    terms/000003/rendezvous/controller.json        made by the controller of term 3
    terms/000003/rendezvous/sandbox-<host>.json    made by each sandbox host when it has joined term 3

An agent belongs to one attempt. It adopts the newest term of its attempt; when a newer attempt exists, the job was
started elsewhere and the agent is fenced.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

from checkpoints.publish import publish_bytes
from miles_hpc.control.terms import newest_attempt, newest_term
from miles_hpc.core.deadline import Deadline
from miles_hpc.core.errors import FencedError
from miles_hpc.core.paths import RunPaths

__all__ = ["ServiceAddress", "find_controller", "list_services", "publish_service", "wait_for_controller"]

_POLL_S = 0.1


class ServiceAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where a process listens."""

    name: str
    address: str
    attempt: int
    term: int


def _file(paths: RunPaths, term: int, name: str) -> Path:
    return paths.rendezvous(term) / f"{name}.json"


def publish_service(paths: RunPaths, service: ServiceAddress) -> None:
    """Make an address known to everybody of the term. Call it after binding."""
    folder = paths.rendezvous(service.term)
    folder.mkdir(exist_ok=True)
    publish_bytes(_file(paths, service.term, service.name), msgspec.json.encode(service), durable=False)


def _read(path: Path) -> ServiceAddress | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=ServiceAddress)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def find_controller(paths: RunPaths, attempt: int) -> ServiceAddress | None:
    """The controller of the newest term, or None while it isn't there.

    Raises FencedError when a newer attempt has started: this process was left over.
    """
    if newest_attempt(paths) > attempt:
        raise FencedError(f"attempt {attempt} is over: attempt {newest_attempt(paths)} has started")
    term = newest_term(paths, attempt)
    if term == 0:
        return None
    return _read(_file(paths, term, "controller"))


async def wait_for_controller(paths: RunPaths, attempt: int, *, newer_than: int, deadline: Deadline) -> ServiceAddress:
    """Poll for a controller whose term is newer than `newer_than`. Raises DeadlineExpired, FencedError."""
    while True:
        found = find_controller(paths, attempt)
        if found is not None and found.term > newer_than:
            return found
        deadline.check()
        await asyncio.sleep(min(_POLL_S, deadline.remaining_s + 0.001))


def list_services(paths: RunPaths, term: int, prefix: str) -> list[ServiceAddress]:
    """All published services of a term whose name starts with `prefix`, sorted by name."""
    found = (_read(path) for path in sorted(paths.rendezvous(term).glob(f"{prefix}*.json")))
    return [service for service in found if service is not None]
