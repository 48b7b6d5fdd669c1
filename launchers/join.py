"""A rollout or sandbox host from outside the run's job: `miles-hpc join` becomes this program."""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from miles_hpc.core import env, exits
from miles_hpc.core.errors import MilesError, UserError

if TYPE_CHECKING:
    from miles_hpc.control.agent import AgentApp, AgentIdentity


def main() -> int:
    parser = argparse.ArgumentParser(prog="join", description=__doc__)
    parser.add_argument("--run-dir", required=True, type=Path)
    parser.add_argument("--role", required=True, choices=("rollout", "sandbox"))
    parser.add_argument("--host", default="", help="name of this host in the run; must be unique there")
    parser.add_argument("--wait", required=True, type=float, help="seconds")
    args = parser.parse_args()

    from launchers.agent import make_app, until_terminated
    from miles_hpc.control.auth import load_secret
    from miles_hpc.control.joining import Joining
    from miles_hpc.core.load import load_prepared
    from miles_hpc.core.paths import RunPaths

    try:
        paths = RunPaths(args.run_dir.resolve())
        run, site = load_prepared(paths.root)
        secret = load_secret(paths.secret)
        host = args.host or unique_host()

        def app(identity: AgentIdentity) -> AgentApp:
            return make_app(args.role, run, site, paths, identity, secret)

        joining = Joining(paths, run.control, secret, role=args.role, host=host, make_app=app, wait_s=args.wait)
        return asyncio.run(until_terminated(joining.run()))
    except UserError as error:
        print(f"join: error: {error}", file=sys.stderr)
        return exits.USER_ERROR
    except MilesError as error:
        print(f"join: {type(error).__name__}: {error}", file=sys.stderr)
        return exits.FAILED


def unique_host() -> str:
    """This host's name with what keeps it apart from the run's own hosts and from others that join: job and task."""
    job_id = env.read("SLURM_JOB_ID")
    if job_id is None:
        return f"{socket.gethostname()}-p{os.getpid()}"
    task = f".{env.read('SLURM_LOCALID')}" if env.read("SLURM_LOCALID") else ""
    return f"{env.read('SLURMD_NODENAME') or socket.gethostname()}-j{job_id}{task}"


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    sys.exit(main())
