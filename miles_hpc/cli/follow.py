"""miles-hpc watch and report: look at a run directory, live or on paper."""

from __future__ import annotations

import argparse

from miles_hpc.cli.inputs import find_run_dir

__all__ = ["main"]


def main(args: argparse.Namespace) -> int:
    paths = find_run_dir(args.run_dir)
    if args.command == "watch":
        from miles_hpc.cli.watch import watch

        return int(watch(paths.root, once=args.once))
    from miles_hpc.cli.report import write_report

    for path in write_report(paths.root):
        print(path)
    return 0
