"""What runs on the hosts: the controller's `Members` without a run around it, and the real `Agent` with a child.

    python -m tools.detection.programs controller RUN_DIR --attempt N
    python -m tools.detection.programs agent RUN_DIR --attempt N --name NAME --host HOST --incarnation N

Both read their ControlConfig from RUN_DIR/control.json and tell what happens as JSON lines on stdout, each with `event`
and `at` (CLOCK_MONOTONIC, which all processes of a machine share). Exit codes are those of launchers.agent.
The controller takes JSON lines on stdin: {"id": N, "call": NAME, "deadline_s": X} calls a member, whose app
never answers; how that ended is told as {"event": "answer", "id": N, "error", "text", "elapsed_s"}.
It ends when its stdin closes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from miles_hpc.control.agent import Agent, AgentApp, AgentIdentity
from miles_hpc.control.auth import load_secret
from miles_hpc.control.children import ChildProcess
from miles_hpc.control.terms import claim_term
from miles_hpc.controller.members import Members
from miles_hpc.core import exits
from miles_hpc.core.config import ControlConfig, GroupConfig, GroupsConfig, ModelConfig, RunConfig, SiteConfig
from miles_hpc.core.errors import DeadlineExpired, FencedError, MilesError, PeerLost
from miles_hpc.core.messages import Ack, HostStatus, Message
from miles_hpc.core.paths import RunPaths
from miles_hpc.core.telemetry import EventLog
from miles_hpc.core.transport import Credentials, Endpoint, HandlerResult, PeerIdentity

__all__ = ["control_file"]

_GIVEN_UP_S = 3600.0


def control_file(paths: RunPaths) -> Path:
    """Where both programs find their ControlConfig, as JSON."""
    return paths.root / "control.json"


#: stdout as it was at the start; what libraries print goes to stderr.
_out = 1


def _tell(event: str, **fields: Any) -> None:
    os.write(_out, (json.dumps({"event": event, "at": time.monotonic(), **fields}) + "\n").encode())


def _control(paths: RunPaths) -> ControlConfig:
    return msgspec.json.decode(control_file(paths).read_bytes(), type=ControlConfig)


# ------------------------------------------------------------------------------------------ controller


async def _controller(paths: RunPaths, attempt: int) -> int:
    term = claim_term(paths, attempt)
    one = GroupConfig(nodes=1)
    run = RunConfig(
        name="detection",
        model=ModelConfig(),
        groups=GroupsConfig(trainer=one, rollout=one, sandbox=one),
        control=_control(paths),
    )
    identity = PeerIdentity(
        role="controller", name="controller", host=socket.gethostname(), pid=os.getpid(), attempt=attempt, term=term
    )

    async def on_message(peer: PeerIdentity, message: Message) -> HandlerResult:
        _tell("message", peer=peer.name, incarnation=peer.incarnation, type=type(message).__name__)
        return Ack()

    members = Members(
        run,
        SiteConfig(name="hosts"),
        paths,
        Credentials(load_secret(paths.secret), identity),
        EventLog(paths.events, "controller", attempt=attempt, term=term),
        oldest_incarnation={},
        on_message=on_message,
        on_joined=lambda peer: _tell("joined", peer=peer.name, incarnation=peer.incarnation, host=peer.host),
        on_lost=lambda peer, evidence: _tell("lost", peer=peer.name, incarnation=peer.incarnation, evidence=evidence),
    )
    await members.open()
    _tell("open", term=term)
    lines = await _stdin_lines()
    calls: set[asyncio.Task[None]] = set()
    while line := await lines.readline():
        order = json.loads(line)
        call = asyncio.create_task(_call(members, order["id"], order["call"], order["deadline_s"]))
        calls.add(call)
        call.add_done_callback(calls.discard)
    await members.close("told to end", shut_down=False)
    return exits.DONE


async def _call(members: Members, number: int, name: str, deadline_s: float) -> None:
    """Call a member with a payload that no socket buffer takes."""
    endpoint = members.endpoint(name)
    began, error = time.monotonic(), None
    try:
        if endpoint is None:
            raise PeerLost(f"{name} isn't here")
        await endpoint.call(HostStatus(engines=(), ready=True), payload=[bytes(8 << 20)], deadline_s=deadline_s)
    except MilesError as caught:
        error = caught
    _tell(
        "answer",
        id=number,
        error=type(error).__name__ if error is not None else "",
        text=str(error),
        elapsed_s=time.monotonic() - began,
    )


async def _stdin_lines() -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return reader


# ------------------------------------------------------------------------------------------ agent


class _App(AgentApp):
    """Owns one child that would run for ever."""

    def __init__(self) -> None:
        self._child: ChildProcess | None = None

    async def start(self) -> None:
        self._child = ChildProcess("sleeper", ["sleep", "infinity"], log=None)
        _tell("child", pid=self._child.pid)

    async def joined(self, endpoint: Endpoint, term: int) -> None:
        _tell("joined", term=term)
        await endpoint.call(HostStatus(engines=(), ready=True), deadline_s=10.0)

    async def left(self) -> None:
        _tell("left")

    async def handle(self, message: Message, payload: memoryview) -> HandlerResult:
        _tell("asked", type=type(message).__name__, payload_bytes=payload.nbytes)
        await asyncio.sleep(_GIVEN_UP_S)
        return None

    async def close(self) -> None:
        if self._child is not None:
            await self._child.end(grace_s=3.0)
        _tell("closed")

    def children(self) -> tuple[str, ...]:
        return () if self._child is None else (self._child.name,)


def _agent(paths: RunPaths, identity: AgentIdentity) -> int:
    agent = Agent(identity, _App(), paths, _control(paths), load_secret(paths.secret))
    try:
        return asyncio.run(agent.run())
    except FencedError as error:
        _tell("fenced", text=str(error))
        return exits.FENCED
    except DeadlineExpired as error:
        _tell("expired", text=str(error))
        return exits.FAILED


def main() -> int:
    parser = argparse.ArgumentParser(prog="detection.programs", description=__doc__)
    parser.add_argument("program", choices=("controller", "agent"))
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--attempt", type=int, default=1)
    parser.add_argument("--name", default="")
    parser.add_argument("--host", default="")
    parser.add_argument("--incarnation", type=int, default=0)
    args = parser.parse_args()
    global _out
    _out = os.dup(1)
    os.dup2(2, 1)
    paths = RunPaths(args.run_dir)
    if args.program == "controller":
        return asyncio.run(_controller(paths, args.attempt))
    identity = AgentIdentity(
        role="rollout-agent", name=args.name, host=args.host, attempt=args.attempt, incarnation=args.incarnation
    )
    return _agent(paths, identity)


if __name__ == "__main__":
    sys.exit(main())
