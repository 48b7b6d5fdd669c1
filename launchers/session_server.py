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
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from launchers.ending import end_soon, end_with_parent
from launchers.node_child import child_parser, identity_of, until_over
from miles_hpc.core import exits
from miles_hpc.core.errors import IntegrityError, UserError

if TYPE_CHECKING:
    from miles_hpc.core.config import RunConfig
    from miles_hpc.core.paths import RunPaths


def main() -> int:
    parser = child_parser("session_server", __doc__)  # its --name is the same after a restart
    parser.add_argument("--listen", default="127.0.0.1:0", help="loopback HOST:PORT, port 0 for any, or unix:PATH")
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
    except IntegrityError as error:  # a journal that can't be read, or another version's
        print(f"session server {args.name}: {error}", file=sys.stderr)
        return exits.UNREADABLE
    except OSError as error:
        print(f"session server {args.name}: {error}", file=sys.stderr)
        return exits.NO_STORAGE


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

    def fenced(peer: PeerIdentity) -> None:
        links.stopped.set()

    def credentials(term: int) -> Credentials:
        return Credentials(secret=secret, identity=identity_of(args, "sessions", term), on_newer=fenced)

    async def connect(address: str, term: int, deadline_s: float) -> Endpoint:
        return await open_transport("tcp", credentials(term)).connect(address, deadline_s=deadline_s)

    links = EngineLinks(service.gateway, connect, service.status, term=args.term)
    listener = await open_transport("tcp", credentials(args.term)).listen(links.handle, any_term=True)
    await service.start(listening, new_owner=args.new_owner)
    address = ServerAddress(http=http, control=listener.address, instance_id=service.instance_id, pid=os.getpid())
    publish_address(args.address_file, address, token)
    await until_over(links, name=f"session server {args.name}", lease_s=run.control.lease_s, parent=parent)
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
