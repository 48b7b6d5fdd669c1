"""Started by a host agent: one engine, served to that agent over a local transport.

The address is published to --address-file once the model is built. The engine ends on SIGTERM, on a Shutdown message,
when its parent dies and when its parent is silent for longer than the lease (a stopped agent would else keep the device
from its successor), whichever comes first; it has nothing to save.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from launchers.ending import end_soon, end_with_parent
from launchers.node_child import child_parser, identity_of, until_over
from miles_hpc.core import exits
from miles_hpc.core.errors import MilesError, UserError

if TYPE_CHECKING:
    from miles_hpc.core.config import RunConfig
    from miles_hpc.core.paths import RunPaths
    from miles_hpc.core.site import SiteConfig


def main() -> int:
    parser = child_parser("engine", __doc__)
    parser.add_argument("--device", default="cpu", help="cpu or cuda:0")
    parser.add_argument("--threads", default=1, type=int, help="CPU threads of tensor operations")
    args = parser.parse_args()
    parent = os.getppid()
    end_with_parent(parent)

    from miles_hpc.core.load import load_prepared
    from miles_hpc.core.paths import RunPaths

    try:
        paths = RunPaths(args.run_dir.resolve())
        run, site = load_prepared(paths.root)
        return asyncio.run(_serve(args, run, site, paths, parent))
    except MilesError as error:
        print(f"engine {args.name}: error: {error}", file=sys.stderr)
        return exits.USER_ERROR if isinstance(error, UserError) else exits.FAILED


async def _serve(args: argparse.Namespace, run: RunConfig, site: SiteConfig, paths: RunPaths, parent: int) -> int:
    """Build the engine, listen, publish the address, and wait for one of the ends."""
    from checkpoints.publish import publish_bytes
    from miles_hpc.control.auth import load_secret
    from miles_hpc.control.multihomed import connect_any, split_addresses
    from miles_hpc.control.opening import open_transport
    from miles_hpc.core.registry import resolve
    from miles_hpc.core.transport import Credentials, Endpoint, PeerIdentity
    from miles_hpc.rollout.engine import EngineSpec
    from miles_hpc.rollout.engine_options import engine_options
    from miles_hpc.rollout.engine_server import EngineServer

    secret = load_secret(paths.secret)

    def fenced(peer: PeerIdentity) -> None:
        server.stopped.set()

    def credentials(term: int) -> Credentials:
        return Credentials(secret=secret, identity=identity_of(args, "engine", term), on_newer=fenced)

    async def connect(address: str, deadline_s: float) -> Endpoint:
        transport = open_transport(run.control.transport, credentials(server.newest_term))
        return await connect_any(transport, split_addresses(address), deadline_s=deadline_s)

    engine = resolve("engine", run.rollout.engine)(
        EngineSpec(
            name=args.name,
            model_path=_model_path(run, paths),
            connect=connect,
            slots=run.rollout.slots_per_engine,
            max_length=run.rollout.max_trajectory_tokens,
            dtype=run.model.dtype,
            device=args.device,
            threads=args.threads,
            experts_implementation=run.model.experts_implementation,
            options=engine_options(run, site, log=paths.logs(args.attempt) / f"{args.address_file.stem}-server.log"),
        )
    )
    try:
        await engine.start()
    except BaseException:
        await engine.close()
        raise
    server = EngineServer(engine, term=args.term)
    listener = await server.listen(open_transport("tcp", credentials(args.term)))
    publish_bytes(args.address_file, listener.address.encode(), durable=False)
    await until_over(server, name=f"engine {args.name}", lease_s=run.control.lease_s, parent=parent)
    end_soon()
    await listener.close()
    await engine.close()
    return 0


def _model_path(run: RunConfig, paths: RunPaths) -> Path:
    """The run directory's copy of the model's description, else what the run file names."""
    if (paths.model / "config.json").is_file() or not run.model.path:
        return paths.model
    return Path(run.model.path)


if __name__ == "__main__":
    sys.exit(main())
