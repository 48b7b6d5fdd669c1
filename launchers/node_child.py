"""What the programs that an agent starts on its node have in common: arguments, identity, and when they are over."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from miles_hpc.core.transport import PeerIdentity

__all__ = ["Served", "child_parser", "identity_of", "until_over"]

_CHECK_S = 1.0
_AGENT_SPEAKS_S = 10.0  # an agent speaks to its children every few seconds, also when nothing happens


def child_parser(prog: str, description: str | None) -> argparse.ArgumentParser:
    """A parser with the arguments that each of them takes."""
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument("--run-dir", required=True, type=Path)
    parser.add_argument("--attempt", required=True, type=int)
    parser.add_argument("--term", required=True, type=int)
    parser.add_argument("--name", required=True, help="unique within the run")
    parser.add_argument("--host", default="", help="name of this host; default: the system's")
    parser.add_argument("--address-file", required=True, type=Path, help="published when it serves")
    return parser


def identity_of(args: argparse.Namespace, role: str, term: int) -> PeerIdentity:
    """Who this process is to its peers of a term."""
    from miles_hpc.core.transport import PeerIdentity

    host = args.host or socket.gethostname()
    return PeerIdentity(role=role, name=args.name, host=host, pid=os.getpid(), attempt=args.attempt, term=term)


class Served(Protocol):
    """What serves the agent: `heard` becomes True with each message of it."""

    stopped: asyncio.Event
    heard: bool


async def until_over(served: Served, *, name: str, lease_s: float, parent: int) -> None:
    """Return when it was stopped, SIGTERM or SIGINT came, the parent died, or the agent was silent beyond its lease.

    The lease begins with the agent's first word. What is counted are looks without a message: a look that came late,
    because of a long computation, is one.
    """
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, served.stopped.set)
    quiet, spoken_to = 0, False
    while not served.stopped.is_set() and os.getppid() == parent:
        try:
            await asyncio.wait_for(served.stopped.wait(), _CHECK_S)
        except TimeoutError:
            pass
        spoken_to, quiet, served.heard = spoken_to or served.heard, 0 if served.heard else quiet + 1, False
        if spoken_to and quiet * _CHECK_S > lease_s + _AGENT_SPEAKS_S:
            print(f"{name}: no word of its agent for {quiet} checks, more than its lease", file=sys.stderr)
            return
