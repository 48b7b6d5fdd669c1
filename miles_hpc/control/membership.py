"""Finding each other: addresses in the run directory, published after binding, never guessed.

    terms/000003/rendezvous/controller.json        made by the controller of term 3
    terms/000003/rendezvous/sandbox-<host>.json    made by each sandbox host when it has joined term 3

An agent belongs to one attempt. It adopts the newest term of its attempt; when a newer attempt exists, the job was
started elsewhere and the agent is fenced. Both sides may start in any order and with any skew up to the deadline of
whoever waits:

| what a looker finds | what it does |
|---|---|
| no claim, no file, half a file | looks again |
| a file of an older term or of another attempt | ignores it |
| a file whose listener died | is refused or hears nothing, and looks again |
| a newer attempt | is fenced |
"""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path

import msgspec

from checkpoints.publish import publish_bytes
from miles_hpc.control.multihomed import host_of
from miles_hpc.control.terms import check_attempt, newest_term
from miles_hpc.core.deadline import Deadline
from miles_hpc.core.errors import FencedError
from miles_hpc.core.paths import RunPaths

__all__ = [
    "ServiceAddress",
    "find_controller",
    "list_services",
    "overtaken",
    "publish_service",
    "towards_controller",
    "wait_for_controller",
]

_POLL_S = 0.1


class ServiceAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where a process listens: all its addresses, the best one first (`multihomed`)."""

    name: str
    addresses: tuple[str, ...]
    attempt: int
    term: int


def _file(paths: RunPaths, term: int, name: str) -> Path:
    return paths.rendezvous(term) / f"{name}.json"


def publish_service(paths: RunPaths, service: ServiceAddress) -> None:
    """Make an address known to everybody of the term. Call it after binding."""
    folder = paths.rendezvous(service.term)
    folder.mkdir(exist_ok=True)
    publish_bytes(_file(paths, service.term, service.name), msgspec.json.encode(service), durable=False)


def _read(path: Path, term: int) -> ServiceAddress | None:
    """What was published, or None for what isn't there, isn't whole, or was copied from another term."""
    try:
        service = msgspec.json.decode(path.read_bytes(), type=ServiceAddress)
    except msgspec.DecodeError:
        return None
    except OSError as error:  # ESTALE: replaced on another host while a network file system had it open here
        if error.errno in (errno.ENOENT, errno.ESTALE):
            return None
        raise
    return service if service.term == term and service.addresses else None


def find_controller(paths: RunPaths, attempt: int) -> ServiceAddress | None:
    """The controller of the newest term, or None while it isn't there.

    Raises FencedError when a newer attempt has started: this process was left over.
    """
    check_attempt(paths, attempt)
    term = newest_term(paths, attempt)
    if term == 0:
        return None
    found = _read(_file(paths, term, "controller"), term)
    return found if found is not None and found.attempt == attempt else None


def towards_controller(paths: RunPaths, attempt: int) -> tuple[str, ...] | None:
    """Numeric addresses of the controller's host, for `local_addresses`; None while it hasn't published any."""
    try:
        found = find_controller(paths, attempt)
    except FencedError:
        return None  # whoever looks for a controller next hears of it
    return None if found is None else tuple(host_of(address) for address in found.addresses)


async def wait_for_controller(paths: RunPaths, attempt: int, *, newer_than: int, deadline: Deadline) -> ServiceAddress:
    """Poll for a controller whose term is newer than `newer_than`. Raises DeadlineExpired, FencedError."""
    while True:
        found = find_controller(paths, attempt)
        if found is not None and found.term > newer_than:
            return found
        deadline.check()
        await asyncio.sleep(min(_POLL_S, deadline.remaining_s + 0.001))


def overtaken(paths: RunPaths, attempt: int, term: int) -> bool:
    """Whether this attempt has claimed a newer term: a process that adopts terms isn't fenced by one, it follows.

    Raises FencedError when a newer attempt has started.
    """
    check_attempt(paths, attempt)
    return newest_term(paths, attempt) > term


def list_services(paths: RunPaths, term: int, prefix: str) -> list[ServiceAddress]:
    """All published services of a term whose name starts with `prefix`, sorted by name."""
    found = (_read(path, term) for path in sorted(paths.rendezvous(term).glob(f"{prefix}*.json")))
    return [service for service in found if service is not None]
