"""Started by a rollout host's agent: the session server of its node (miles_hpc/rollout/session/server.py).

Agent programs speak HTTP to it on a loopback port or a Unix socket; its own agent tells it the node's engines over the
run's transport. The addresses are published to --address-file, the token that opens sessions beside it. What sessions
recorded is in the run directory, so that a server of the same name goes on where one was killed. It ends on SIGTERM, on
a Shutdown message, when its parent dies, and when its agent is silent for longer than the lease.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from launchers.ending import end_soon, end_with_parent
from miles_hpc.core import exits
from miles_hpc.core.errors import IntegrityError, UserError

if TYPE_CHECKING:
    from miles_hpc.core.config import RunConfig
    from miles_hpc.core.paths import RunPaths

_PARENT_CHECK_S = 1.0
_AGENT_TELLS_S = 10.0  # the agent tells the engines every few seconds, also when nothing changed


def main() -> int:
    parser = argparse.ArgumentParser(prog="session_server", description=__doc__)
    parser.add_argument("--run-dir", required=True, type=Path)
    parser.add_argument("--attempt", required=True, type=int)
    parser.add_argument("--term", required=True, type=int)
    parser.add_argument("--name", required=True, help="unique within the run; the same after a restart")
    parser.add_argument("--host", default="", help="name of this host; default: the system's")
    parser.add_argument("--listen", default="127.0.0.1:0", help="loopback HOST:PORT, port 0 for any, or unix:PATH")
    parser.add_argument("--address-file", required=True, type=Path)
    parser.add_argument("--new-owner", action="store_true", help="close what an earlier owner left open")
    args = parser.parse_args()
    parent = os.getppid()
    end_with_parent(parent)

    from miles_hpc.core.load import load_run
    from miles_hpc.core.paths import RunPaths

    try:
        paths = RunPaths(args.run_dir.resolve())
        run = load_run(paths.resolved_toml)
        sys.path[:0] = run.python_path  # for matchers and parsers by dotted path
        return asyncio.run(_serve(args, run, paths, parent))
    except UserError as error:
        print(f"session server {args.name}: error: {error}", file=sys.stderr)
        return exits.USER_ERROR
    except IntegrityError as error:  # a journal that can't be read; the agent may move it away and start again
        print(f"session server {args.name}: {error}", file=sys.stderr)
        return exits.FAILED


async def _serve(args: argparse.Namespace, run: RunConfig, paths: RunPaths, parent: int) -> int:
    """Restore the sessions, listen, publish the addresses, and wait for one of the ends."""
    from miles_hpc.control.auth import load_secret
    from miles_hpc.control.opening import open_transport
    from miles_hpc.core.telemetry import EventLog
    from miles_hpc.core.transport import Credentials, Endpoint, PeerIdentity
    from miles_hpc.rollout.session.assembly import SessionService
    from miles_hpc.rollout.session.engine_links import EngineLinks
    from miles_hpc.rollout.session.listening import ServerAddress, bind, publish_address

    secret = load_secret(paths.secret)
    token = secrets.token_urlsafe(32)
    listening, http = bind(args.listen)
    events = EventLog(paths.events, f"{args.name}-sessions", attempt=args.attempt, term=args.term)
    service = SessionService(run, paths, args.name, token=token, events=events)

    def credentials(term: int) -> Credentials:
        identity = PeerIdentity(
            role="sessions",
            name=args.name,
            host=args.host or socket.gethostname(),
            pid=os.getpid(),
            attempt=args.attempt,
            term=term,
        )
        return Credentials(secret=secret, identity=identity, on_newer=lambda peer: links.stopped.set())

    async def connect(address: str, term: int, deadline_s: float) -> Endpoint:
        return await open_transport("tcp", credentials(term)).connect(address, deadline_s=deadline_s)

    links = EngineLinks(service.gateway, connect, service.status, term=args.term)
    listener = await open_transport("tcp", credentials(args.term)).listen(links.handle, any_term=True)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, links.stopped.set)
    await service.start(listening, new_owner=args.new_owner)
    address = ServerAddress(http=http, control=listener.address, instance_id=service.instance_id, pid=os.getpid())
    publish_address(args.address_file, address, token)
    lease_s = run.control.lease_s + _AGENT_TELLS_S
    quiet, served = 0, False  # looks without a message: a look that came late, because of a long computation, is one
    while not links.stopped.is_set() and os.getppid() == parent:
        try:
            await asyncio.wait_for(links.stopped.wait(), _PARENT_CHECK_S)
        except TimeoutError:
            pass
        served, quiet, links.heard = served or links.heard, 0 if links.heard else quiet + 1, False
        if served and quiet * _PARENT_CHECK_S > lease_s:
            print(f"session server {args.name}: no word of its agent for {quiet} checks", file=sys.stderr)
            break
    end_soon()
    await listener.close()
    await links.close()
    await service.close()
    if http.startswith("unix:"):
        Path(http.removeprefix("unix:")).unlink(missing_ok=True)
    events.close()
    return exits.DONE


if __name__ == "__main__":
    sys.exit(main())
