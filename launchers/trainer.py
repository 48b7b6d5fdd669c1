"""Started by a trainer agent: one rank of the trainer world (miles_hpc/trainer/role.py).

The agent hands its PMI connection on, so that MPI finds the world here. The rank ends when the controller says so,
when the lease is over, when any rank fails, and when its parent dies.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys
import traceback
from pathlib import Path

from miles_hpc.core import exits
from miles_hpc.core.errors import MilesError, UserError

# mallopt(3), malloc.h
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4


def main() -> int:
    parser = argparse.ArgumentParser(prog="trainer", description=__doc__)
    parser.add_argument("--run-dir", required=True, type=Path)
    parser.add_argument("--attempt", required=True, type=int)
    parser.add_argument("--incarnation", required=True, type=int)
    parser.add_argument("--host", default="", help="name of this host; default: the system's")
    parser.add_argument("--world", default=0, type=int, help="tasks of a step over all roles; default: only ranks")
    args = parser.parse_args()

    from miles_hpc.control.auth import load_secret
    from miles_hpc.control.children import die_with_parent
    from miles_hpc.core.load import load_prepared
    from miles_hpc.core.paths import RunPaths

    die_with_parent(os.getppid())
    # Slurm's notice is for those who decide: they save, and that takes this process. SIGINT ends it (agent_app.py).
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        paths = RunPaths(args.run_dir.resolve())
        run, site = load_prepared(paths.root)
        secret = load_secret(paths.secret)
        os.environ.setdefault("OMP_NUM_THREADS", str(run.train.threads))
        sys.path[:0] = run.python_path

        from miles_hpc.control.mpi import open_spanning_world, open_world
        from miles_hpc.trainer.role import run_trainer

        if run.control.transport == "ucx":
            from miles_hpc.control.ucx_api import find_ucx

            find_ucx()  # before MPI, and in all ranks: it says why
        trainer = run.groups.trainer
        world = open_spanning_world(args.world, works=True) if args.world else None
        group = world.group if world is not None else open_world(trainer.nodes * trainer.ranks_per_node)
        assert group is not None
        keep_freed_memory()
        code = run_trainer(
            group, run, site, paths, secret, attempt=args.attempt, incarnation=args.incarnation, host=args.host
        )
        if world is not None:
            world.finish()
        elif code == exits.DONE:
            from mpi4py import MPI

            MPI.Finalize()  # otherwise the process manager takes this for a crash and ends the other ranks
        return code
    except UserError as error:
        print(f"trainer: error: {error}", file=sys.stderr)
        return exits.USER_ERROR
    except MilesError as error:
        print(f"trainer: {type(error).__name__}: {error}", file=sys.stderr)
        return exits.FAILED


def keep_freed_memory() -> None:
    """Let malloc reuse freed tensors instead of returning them to the kernel, which would clear their pages again.

    A training step allocates and frees the same megabytes over and over; glibc gives each of them back by munmap or
    trim, and every first touch after that is a page fault. Does nothing where there is no mallopt.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_M_MMAP_MAX, 0)
    mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
    mallopt(_M_TOP_PAD, 64 << 20)


if __name__ == "__main__":
    try:
        code = main()
    except BaseException:
        traceback.print_exc()
        code = exits.FAILED  # and not the interpreter's own end, in which MPI waits for the other ranks
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads of torch and MPI don't survive the interpreter's teardown in good order
