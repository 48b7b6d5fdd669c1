"""The same run on this machine without Slurm: `miles-hpc local` becomes this program."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from miles_hpc.core import exits
from miles_hpc.core.errors import UserError


def main() -> int:
    parser = argparse.ArgumentParser(prog="local", description=__doc__)
    parser.add_argument("--run-dir", required=True, type=Path)
    args = parser.parse_args()

    from miles_hpc.control.auth import load_secret
    from miles_hpc.control.terms import claim_attempt
    from miles_hpc.controller.steps import LocalStarter
    from miles_hpc.controller.supervisor import Supervisor
    from miles_hpc.core.load import load_prepared
    from miles_hpc.core.paths import RunPaths

    try:
        paths = RunPaths(args.run_dir.resolve())
        run, site = load_prepared(paths.root)
        secret = load_secret(paths.secret)
        starter = LocalStarter(run, site, paths, claim_attempt(paths))
        code = asyncio.run(Supervisor(starter, secret, end_time=None, job_id=None).run())
    except UserError as error:
        print(f"local: error: {error}", file=sys.stderr)
        return exits.USER_ERROR
    words = {
        exits.DONE: "the run is complete",
        exits.NEXT_ALLOCATION: "interrupted, state saved; the same command goes on from there",
        exits.FENCED: "another start of this run took over",
    }
    print(f"local: {words.get(code, 'the run failed')}: {paths.root}", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
