"""Started by srun on every node: the agent of one role (ARCHITECTURE.md 2).

In a step over all roles (core/layouts.py) MPI's world spans all tasks: an agent that doesn't train has a child that
takes its place there, and with `--role auto` the task's node says which role it has; tasks beside an agent, which srun
starts because it takes one number for all nodes, only take their places.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from miles_hpc.core import env, exits
from miles_hpc.core.errors import DeadlineExpired, FencedError, UserError

if TYPE_CHECKING:
    from miles_hpc.control.agent import AgentApp, AgentIdentity
    from miles_hpc.core.config import RunConfig, SiteConfig
    from miles_hpc.core.paths import RunPaths

_MEMBER_END_S = 6.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="agent", description=__doc__)
    parser.add_argument("--run-dir", required=True, type=Path)
    parser.add_argument("--role", required=True, choices=("trainer", "rollout", "sandbox", "auto"))
    parser.add_argument("--attempt", required=True, type=int)
    parser.add_argument("--incarnation", required=True, type=int)
    parser.add_argument("--host", default="", help="name of this host; default: Slurm's")
    parser.add_argument("--span", action="store_true", help="the step is over all roles")
    parser.add_argument(
        "--notice", default=0.0, type=float, metavar="SECONDS", help="go on for so long after SIGTERM: the run is saved"
    )
    parser.add_argument("--host-prefix", default="", help="without Slurm: the host is the prefix and the rank plus one")
    args = parser.parse_args()

    from miles_hpc.cluster.placement import task_environ
    from miles_hpc.control.agent import Agent, AgentIdentity
    from miles_hpc.control.auth import load_secret
    from miles_hpc.core.load import load_prepared
    from miles_hpc.core.paths import RunPaths

    try:
        paths = RunPaths(args.run_dir.resolve())
        run, site = load_prepared(paths.root)
        if args.role == "auto":
            become_role(run, site, args)
        if args.span:
            os.environ.update(task_environ(run, args.role))
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
        app = make_app(args.role, run, site, paths, identity, secret, span=args.span)
    except UserError as error:
        print(f"agent: error: {error}", file=sys.stderr)
        return exits.USER_ERROR
    agent = Agent(identity, app, paths, run.control, secret)
    try:
        with mpi_member(args) if args.span and args.role != "trainer" else nullcontext():
            return asyncio.run(until_terminated(agent.run(), agent.notice, args.notice))
    except FencedError as error:
        print(f"agent {name}: fenced: {error}", file=sys.stderr)
        return exits.FENCED
    except UserError as error:
        print(f"agent {name}: error: {error}", file=sys.stderr)
        return exits.USER_ERROR
    except DeadlineExpired as error:
        print(f"agent {name}: {error}", file=sys.stderr, flush=True)
        release_job(run, site, paths, args.attempt)
        return exits.FAILED


def release_job(run: RunConfig, site: SiteConfig, paths: RunPaths, attempt: int) -> None:
    """In a job that outlives its batch host: ask for the next allocation when that is what took the controller."""
    from miles_hpc.cluster.orphans import batch_host, release_orphaned_job
    from miles_hpc.cluster.slurm import Slurm
    from miles_hpc.control.terms import newest_attempt
    from miles_hpc.core.layouts import roles_in_use

    job_id, host = env.read("SLURM_JOB_ID"), batch_host(os.environ)
    outlives = any(getattr(run.groups, role).spare_nodes for role in roles_in_use(run))
    if job_id is None or not outlives or host == env.read("SLURMD_NODENAME"):
        return
    done = release_orphaned_job(
        Slurm(),
        job_id,
        host,
        requeue=site.requeue,
        over=lambda: newest_attempt(paths) > attempt,
        wait_s=run.control.start_deadline_s,
    )
    print(f"agent: {done or 'the job is left alone'}", file=sys.stderr, flush=True)


def become_role(run: RunConfig, site: SiteConfig, args: argparse.Namespace) -> NoReturn:
    """Replace this process by the agent of its node's role, in that role's Python; beside an agent by a member."""
    from miles_hpc.cluster.placement import place, role_of_node
    from miles_hpc.cluster.site import role_python

    role = role_of_node(place(run, site, os.environ), os.environ)
    if role != "trainer" and env.read("SLURM_LOCALID"):
        command = [role_python(run, site, role), *member_command(args)]
    else:
        command = [role_python(run, site, role), "-P", "-m", "launchers.agent", "--run-dir", str(args.run_dir)]
        command += ["--role", role, "--attempt", str(args.attempt), "--incarnation", str(args.incarnation)]
        command += ["--span", "--notice", str(args.notice)]
    os.execv(command[0], command)


def member_command(args: argparse.Namespace) -> list[str]:
    """What comes after the interpreter."""
    return ["-P", "-m", "launchers.mpi_member", "--run-dir", str(args.run_dir), "--attempt", str(args.attempt)]


@contextmanager
def mpi_member(args: argparse.Namespace) -> Iterator[None]:
    """A child that takes this task's place in MPI's world; it gets a moment to end with the others."""
    command = [sys.executable, *member_command(args), "--child"]
    member = subprocess.Popen(command, stdin=subprocess.DEVNULL, close_fds=False)
    try:
        yield
        member.wait(timeout=_MEMBER_END_S)
    except subprocess.TimeoutExpired:
        pass
    finally:
        member.kill()
        member.wait()


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
    role: str,
    run: RunConfig,
    site: SiteConfig,
    paths: RunPaths,
    identity: AgentIdentity,
    secret: bytes,
    *,
    span: bool = False,
) -> AgentApp:
    """What an agent of this role does on its node."""
    if role == "trainer":
        from miles_hpc.trainer.agent_app import TrainerApp

        world = env.read("SLURM_NTASKS") if span else 0
        return TrainerApp(paths, identity, stopped_s=run.control.lost_after_s, world=world)
    from miles_hpc.rollout.agent_app import RolloutApp, SandboxApp

    if role == "rollout":
        return RolloutApp(run, paths, identity, secret)
    return SandboxApp(run, paths, identity, secret, run.control.interface or site.interface)


async def until_terminated(
    work: Coroutine[Any, Any, int], notice: Callable[[str], bool] = lambda text: False, notice_s: float = 0.0
) -> int:
    """Run an agent. SIGINT cancels it, so that its children end before it does.

    SIGTERM does so too, but with `notice_s` the controller is told first: a preemption signals the steps only, and the
    run is saved in the time until Slurm kills them. A second SIGTERM, or nobody to tell, ends it at once.
    """
    task = asyncio.create_task(work)
    loop = asyncio.get_running_loop()
    noticed = False

    def terminated() -> None:
        nonlocal noticed
        if not noticed and notice_s and notice("SIGTERM"):
            noticed = True
            loop.call_later(notice_s, task.cancel)
        else:
            task.cancel()

    loop.add_signal_handler(signal.SIGTERM, terminated)
    loop.add_signal_handler(signal.SIGINT, task.cancel)
    try:
        return await task
    except asyncio.CancelledError:
        return 128 + signal.SIGTERM


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    sys.exit(main())
