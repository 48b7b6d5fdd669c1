"""The checks on one node, as a task of srun: what was found on stdout (`node_line`), exit code 0 whatever it was.

    srun ... python -P -m miles_hpc.cluster.preflight.on_node --site S [--run RUN.toml] [--run-dir D] [--only NAMES]

The verdict is in what it prints: a task that fails would end the step on other nodes and count as a failed job.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from miles_hpc.cluster.preflight.catalogue import select
from miles_hpc.cluster.preflight.contract import Check
from miles_hpc.cluster.preflight.machine import LocalMachine
from miles_hpc.cluster.preflight.node_line import NodeLine, NodeResult, framed
from miles_hpc.cluster.preflight.runner import gather_facts, run_checks
from miles_hpc.cluster.preflight.situation import make_context
from miles_hpc.core.errors import MilesError

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="on_node", allow_abbrev=False)
    parser.add_argument("--site", default="")
    parser.add_argument("--run", type=Path, default=None)
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--run-dir", type=Path, default=None)
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--deadline", type=float, default=60.0, metavar="SECONDS")
    parser.add_argument("--json", action="store_true", help="one line of JSON, for people")
    args = parser.parse_args(argv)
    machine = LocalMachine()
    job = machine.environ.get("SLURM_JOB_ID", "")
    try:
        context = make_context(
            site=args.site, run=args.run, overrides=args.set, run_dir=args.run_dir, compute=True
        )  # fmt: skip
        checks = [check for check in select(args.only) if not (isinstance(check, Check) and check.once)]
    except (MilesError, OSError) as error:
        line = NodeLine(node=machine.host, job=job, now=machine.now(), error=" ".join(str(error).split()))
    else:
        facts = gather_facts(checks, machine, context, deadline_s=args.deadline / 2)
        results = run_checks(checks, machine, context, deadline_s=args.deadline / 2)
        told = tuple(
            NodeResult(check=r.check, status=r.finding.status, saw=r.finding.saw, do=r.finding.do) for r in results
        )
        line = NodeLine(node=machine.host, job=job, now=machine.now(), results=told, facts=facts)
    lines = [msgspec.json.encode(line).decode()] if args.json else framed(line)
    sys.stdout.write("".join(f"{text}\n" for text in lines))
    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    code = main()
    # Without joining anything: a thread may hang in what was found to hang.
    os._exit(code)
