"""miles-hpc local: prepare the run directory, then become launchers.local, which starts every role here."""

from __future__ import annotations

import argparse
import os
import sys

from miles_hpc.cli.inputs import (
    check_agent,
    check_environment,
    check_model,
    launcher_environment,
    materialise_model,
    read_inputs,
)
from miles_hpc.cluster.submit import check_owner, prepare
from miles_hpc.core.errors import UserError

__all__ = ["main"]


def main(args: argparse.Namespace) -> int:
    args.site = args.site or "laptop"
    inputs = read_inputs(args)
    if inputs.site.scheduler != "none":
        raise UserError(f"site '{inputs.site.name}' has a scheduler: use 'miles-hpc submit', or leave --site out")
    check_owner(inputs.run, inputs.paths)
    check_environment(inputs.run)
    check_agent(inputs.run)
    check_model(inputs.run)
    prepare(inputs.run, inputs.site, inputs.paths, source=inputs.source, materialise=materialise_model)
    sys.stdout.flush()
    # A program of the layer above is started, not imported.
    command = [sys.executable, "-P", "-m", "launchers.local", "--run-dir", str(inputs.paths.root)]
    os.execve(command[0], command, launcher_environment(inputs.run, inputs.site))
