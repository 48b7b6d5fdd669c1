"""miles-hpc render: the batch script on stdout; writes nothing."""

from __future__ import annotations

import argparse

from miles_hpc.cli.inputs import read_inputs, render

__all__ = ["main"]


def main(args: argparse.Namespace) -> int:
    inputs = read_inputs(args)
    print(render(inputs.run, inputs.site, inputs.paths)[1], end="")
    return 0
