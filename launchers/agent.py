"""Started by srun on every node: the agent of one role (ARCHITECTURE.md 2)."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_hpc.core import env, exits
from miles_hpc.core.errors import DeadlineExpired, FencedError, UserError

if TYPE_CHECKING:
    from miles_hpc.control.agent import AgentApp, AgentIdentity
    from miles_hpc.core.config import RunConfig, SiteConfig
    from miles_hpc.core.paths import RunPaths


def main() -> int:
    parser = argparse.ArgumentParser(prog="agent", description=__doc__)
    parser.add_argument("--run-dir", required=True, type=Path)
    parser.add_argument("--role", required=True, choices=("trainer", "rollout", "sandbox"))
    parser.add_argument("--attempt", required=True, type=int)
    parser.add_argument("--incarnation", required=True, type=int)
    parser.add_argument("--host", default="", help="name of this host; default: Slurm's")
    parser.add_argument("--host-prefix", default="", help="without Slurm: the host is the prefix and the rank plus one")
    args = parser.parse_args()

    from miles_hpc.control.agent import Agent, AgentIdentity
    from miles_hpc.control.auth import load_secret
    from miles_hpc.core.load import load_prepared
    from miles_hpc.core.paths import RunPaths

    try:
        paths = RunPaths(args.run_dir.resolve())
        run, site = load_prepared(paths.root)
        take_job_vni(site)
        secret = load_secret(paths.secret)
        rank = env.read("PMI_RANK") if args.host_prefix else env.read("SLURM_PROCID")
        host = args.host or (f"{args.host_prefix}{rank + 1}" if args.host_prefix else env.read("SLURMD_NODENAME"))
        if not host:
            raise UserError("this host has no name: neither --host nor SLURMD_NODENAME is set")
        name = f"trainer-{host}-{rank}" if args.role == "trainer" else f"{args.role}-{host}"
        identity = AgentIdentity(
            role=f"{args.role}-agent",
            name=name,
            host=host,
            attempt=args.attempt,
            incarnation=args.incarnation,
            rank=rank,
        )
        app = make_app(args.role, run, site, paths, identity, secret)
    except UserError as error:
        print(f"agent: error: {error}", file=sys.stderr)
        return exits.USER_ERROR
    agent = Agent(identity, app, paths, run.control, secret)
    try:
        return asyncio.run(until_terminated(agent.run()))
    except FencedError as error:
        print(f"agent {name}: fenced: {error}", file=sys.stderr)
        return exits.FENCED
    except UserError as error:
        print(f"agent {name}: error: {error}", file=sys.stderr)
        return exits.USER_ERROR
    except DeadlineExpired as error:
        print(f"agent {name}: {error}", file=sys.stderr)
        return exits.FAILED


def take_job_vni(site: SiteConfig) -> None:
    """Where the site says so, leave only the job's virtual network to this process and its children."""
    if site.fabric.vni_strategy != "job_vni_last":
        return
    from miles_hpc.cluster.slingshot import job_vni

    found = job_vni(env.read("SLINGSHOT_VNIS"))
    if found.complaint:
        print(f"agent: warning: {found.complaint}", file=sys.stderr)
    if found.value:
        os.environ["SLINGSHOT_VNIS"] = found.value


def make_app(
    role: str, run: RunConfig, site: SiteConfig, paths: RunPaths, identity: AgentIdentity, secret: bytes
) -> AgentApp:
    """What an agent of this role does on its node."""
    if role == "trainer":
        from miles_hpc.trainer.agent_app import TrainerApp

        return TrainerApp(paths, identity, stopped_s=run.control.lost_after_s)
    from miles_hpc.rollout.agent_app import RolloutApp, SandboxApp

    if role == "rollout":
        return RolloutApp(run, paths, identity, secret)
    return SandboxApp(run, paths, identity, secret, run.control.interface or site.interface)


async def until_terminated(work: Coroutine[Any, Any, int]) -> int:
    """Run an agent; SIGTERM cancels it, so that its children end before it does."""
    task = asyncio.create_task(work)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    try:
        return await task
    except asyncio.CancelledError:
        return 128 + signal.SIGTERM


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    sys.exit(main())
