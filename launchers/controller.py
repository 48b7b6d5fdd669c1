"""Started by the supervisor: owns the step, the journal and the weight version (ARCHITECTURE.md 2 and 3)."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from pathlib import Path

from miles_hpc.core import exits
from miles_hpc.core.errors import FencedError, MilesError, UserError


def main() -> int:
    parser = argparse.ArgumentParser(prog="controller", description=__doc__)
    parser.add_argument("--run-dir", required=True, type=Path)
    parser.add_argument("--attempt", required=True, type=int)
    parser.add_argument("--end-time", type=float, default=None, help="epoch second at which the allocation ends")
    args = parser.parse_args()

    from miles_hpc.control.auth import load_secret
    from miles_hpc.control.children import die_with_parent
    from miles_hpc.controller.role import ControllerRole
    from miles_hpc.core.load import load_prepared
    from miles_hpc.core.paths import RunPaths

    die_with_parent(os.getppid())
    try:
        paths = RunPaths(args.run_dir.resolve())
        run, site = load_prepared(paths.root)
        role = ControllerRole(run, site, paths, load_secret(paths.secret), attempt=args.attempt, end_time=args.end_time)
        return asyncio.run(role.run())
    except UserError as error:
        print(f"controller: error: {error}", file=sys.stderr)
        return exits.USER_ERROR
    except FencedError as error:
        print(f"controller: fenced: {error}", file=sys.stderr)
        return exits.FENCED
    except MilesError as error:
        print(f"controller: {type(error).__name__}: {error}", file=sys.stderr)
        return exits.FAILED


if __name__ == "__main__":
    sys.exit(main())
