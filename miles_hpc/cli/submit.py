"""miles-hpc submit: check, write the run directory, submit.

A dry run writes the exact batch script on stdout and what it means on stderr, so that stdout can become a file.
"""

from __future__ import annotations

import argparse
import json
import sys

from miles_hpc.cli.follow import follow
from miles_hpc.cli.inputs import (
    check_agent,
    check_environment,
    check_model,
    complete_at,
    materialise_model,
    read_inputs,
    render,
)
from miles_hpc.cluster.job_summary import JobSummary, summarise_job
from miles_hpc.cluster.preflight import check_job
from miles_hpc.cluster.slurm import NoSlurm, Slurm
from miles_hpc.cluster.submit import check_idle, check_owner, prepare, submit_prepared
from miles_hpc.core.errors import UserError

__all__ = ["main"]


def main(args: argparse.Namespace) -> int:
    if args.json and not args.dry_run:
        raise UserError("--json: shows what a dry run shows: add --dry-run")
    inputs = read_inputs(args)
    plan, text = render(inputs.run, inputs.site, inputs.paths)
    continues = check_owner(inputs.run, inputs.paths)
    if continues and (step := complete_at(inputs.run, inputs.paths)) is not None:
        complete = f"run '{inputs.run.name}' is complete at step {step}: nothing submitted"
        print(f"{complete}; more: --set rollout.n_steps=N", file=sys.stderr if args.dry_run else sys.stdout)
        return 0
    check_environment(inputs.run)
    check_agent(inputs.run)
    check_model(inputs.run)
    slurm = Slurm()
    unchecked = ""
    try:
        check_job(plan, text, slurm, runtimes=inputs.site.container.runtimes)
        check_idle(inputs.paths, slurm)
    except NoSlurm as error:
        if not args.dry_run:
            raise
        unchecked = str(error)
    if args.dry_run:
        if unchecked:
            print(f"not shown to Slurm, whose word counts: {unchecked}", file=sys.stderr)
        _show(summarise_job(inputs.run, inputs.site, plan, inputs.paths, continues=continues), text, as_json=args.json)
        return 0
    what = f"{'continue' if continues else 'start'} run '{inputs.run.name}' in {inputs.paths.root}"
    prepare(inputs.run, inputs.site, inputs.paths, source=inputs.source, job_text=text, materialise=materialise_model)
    job_id = submit_prepared(inputs.paths, slurm)
    print(f"submitted job {job_id}: {what}")
    return follow(inputs.paths) if args.watch else 0


def _show(summary: JobSummary, script: str, *, as_json: bool) -> None:
    """The script as it would be submitted, and the summary beside it."""
    if as_json:
        print(json.dumps({**summary.facts(), "script": script}, indent=2))
        return
    for line in summary.lines():
        print(line, file=sys.stderr)
    print("dry run: nothing written, nothing submitted", file=sys.stderr, flush=True)
    print(script, end="")
