"""One task's place in an MPI world that spans all roles, for tasks that don't train (core/layouts.py).

MPI's start, its split into communicators and its end are collective: without these processes the trainer's ranks would
wait for the other tasks of their step. In between this process sleeps. It ends with the world, with its parent (an
agent), and when a newer start fences it.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path

from miles_hpc.core import exits
from miles_hpc.core.errors import FencedError, UserError

_LOOK_S = 0.2
_FENCE_S = 5.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="mpi_member", description=__doc__)
    parser.add_argument("--run-dir", required=True, type=Path)
    parser.add_argument("--attempt", required=True, type=int)
    parser.add_argument("--child", action="store_true", help="end when the parent does")
    args = parser.parse_args()

    from miles_hpc.control.children import die_with_parent
    from miles_hpc.control.terms import check_attempt
    from miles_hpc.core import env
    from miles_hpc.core.paths import RunPaths

    if args.child:
        die_with_parent(os.getppid())
    # A notice of Slurm's is for those who can save something; SIGINT ends this one (launchers/agent.py).
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    paths = RunPaths(args.run_dir.resolve())
    try:
        from miles_hpc.control.mpi import open_spanning_world

        world = open_spanning_world(env.read("SLURM_NTASKS"), works=False)
        next_fence = time.monotonic()
        while not world.is_over():
            if time.monotonic() >= next_fence:
                check_attempt(paths, args.attempt)
                next_fence = time.monotonic() + _FENCE_S
            time.sleep(_LOOK_S)
        world.finish()
        return exits.DONE
    except UserError as error:
        print(f"mpi_member: error: {error}", file=sys.stderr)
        return exits.USER_ERROR
    except FencedError as error:
        print(f"mpi_member: fenced: {error}", file=sys.stderr)
        return exits.FENCED


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # the interpreter's teardown would wait in MPI for the other ranks
