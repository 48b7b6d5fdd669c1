"""miles-hpc join: lend this machine to a run as one more host; becomes launchers.join."""

from __future__ import annotations

import argparse
import os
import sys

from miles_hpc.cli.inputs import find_run_dir, launcher_environment
from miles_hpc.cluster.site import role_python
from miles_hpc.control.auth import load_secret
from miles_hpc.core.errors import UserError
from miles_hpc.core.load import load_prepared

__all__ = ["main"]


def main(args: argparse.Namespace) -> int:
    if not args.wait >= 0.0:
        raise UserError(f"--wait {args.wait}: expected seconds, 0 or more")
    if "/" in args.host or args.host.startswith("."):
        raise UserError(f"--host {args.host!r}: expected a name that can be a file's, without '/'")
    paths = find_run_dir(args.run_dir)
    run, site = load_prepared(paths.root)
    load_secret(paths.secret)  # whoever may not read it learns so at once
    if getattr(run.groups, args.role).nodes == 0 and args.role == "sandbox":
        raise UserError(f"run '{run.name}' has no sandbox hosts: its rollout hosts don't look for any")
    sys.stdout.flush()
    command = [role_python(run, site, args.role), "-P", "-m", "launchers.join", "--run-dir", str(paths.root)]
    command += ["--role", args.role, "--wait", str(args.wait), "--host", args.host]
    # A program of the layer above is started, not imported.
    os.execve(command[0], command, launcher_environment(run, site))
