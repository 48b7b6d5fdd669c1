"""miles-hpc doctor: what is installed, and whether cluster, nodes and run directory are fit for a run."""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from miles_hpc.cli.doctor_versions import version_rows
from miles_hpc.cli.doctor_view import Report, print_catalogue, print_json, print_table, print_verdict
from miles_hpc.cli.inputs import find_run_file
from miles_hpc.cluster.preflight.catalogue import select
from miles_hpc.cluster.preflight.contract import Check, Comparison, Context
from miles_hpc.cluster.preflight.gather import ask_nodes
from miles_hpc.cluster.preflight.machine import LocalMachine
from miles_hpc.cluster.preflight.runner import Result, compare_nodes, run_checks, worst
from miles_hpc.cluster.preflight.situation import make_context
from miles_hpc.cluster.preflight.step import JobRequest, NodeSteps, plan_steps
from miles_hpc.cluster.slurm import Slurm
from miles_hpc.core.errors import MilesError, UserError

__all__ = ["main"]


def main(args: argparse.Namespace) -> int:
    checks = select(args.only)
    if args.list:
        print_catalogue(checks)
        return 0
    if args.versions:
        print_table(Report(versions=version_rows()))
        return 0
    run = find_run_file(args.run).absolute() if args.run else None
    run_dir = (Path.cwd() / Path(args.run_dir).expanduser()) if args.run_dir else None
    context = make_context(site=args.site, run=run, overrides=args.set, run_dir=run_dir)
    steps = _steps(args, context, run, run_dir) if args.on_nodes is not None else None
    # Versions are of no use to whoever asks for single checks or for a line of a log.
    with ThreadPoolExecutor(1) as beside:
        versions = None if args.only or args.verdict else beside.submit(version_rows)
        results = _results(checks, context, steps, args.timeout)
        report = Report(versions=versions.result() if versions is not None else [], results=results, context=context)
    if args.verdict:
        print_verdict(report)
        return 0
    (print_json if args.json else print_table)(report)
    return 1 if worst(results) == "FAIL" else 0


def _steps(args: argparse.Namespace, context: Context, run: Path | None, run_dir: Path | None) -> NodeSteps:
    if not args.timeout > 0:
        raise UserError(f"--timeout {args.timeout}: expected seconds, more than 0")
    site = args.site
    # A prepared run directory has its site in it; what this host's name or a variable told must be told on.
    if not site and context.site is not None and (run is not None or context.run is None):
        site = context.site.name
    options = ["--site", str(Path(site).absolute()) if site.endswith(".toml") else site] if site else []
    options += ["--run", str(run)] if run is not None else []
    options += [word for override in args.set for word in ("--set", override)]
    options += ["--run-dir", str(context.run_dir)] if context.run_dir is not None else []
    options += [word for only in args.only for word in ("--only", only)]
    program = ["-m", "miles_hpc.cluster.preflight.on_node", *options]
    request = JobRequest(account=args.account, qos=args.qos, partition=args.partition)
    steps = plan_steps(context, args.on_nodes, program, request)
    _refuse_too_many(steps)
    return steps


def _refuse_too_many(steps: NodeSteps) -> None:
    """Slurm would let such a job wait in the queue for ever. Without its word the job is tried."""
    if not steps.partition:
        return
    try:
        has = Slurm(environ=steps.environ).node_count(steps.partition)
    except MilesError:
        return
    if 0 < has < steps.nodes:
        raise UserError(
            f"--on-nodes {steps.nodes}: partition '{steps.partition}' has only {has} nodes: ask for at most {has}"
        )


def _results(
    checks: list[Check | Comparison], context: Context, steps: NodeSteps | None, timeout_s: float
) -> list[Result]:
    """Of this machine and, with `steps`, of the nodes; what nodes told stands for what is for compute nodes only."""
    # Inside a job this machine is one of those that are asked.
    here = [c for c in checks if not (steps is not None and context.compute and isinstance(c, Check) and not c.once)]
    results = run_checks(here, LocalMachine(context.environ), context)
    if steps is None:
        return [*results, *compare_nodes(checks, {}, context)]
    gathered = ask_nodes(steps, timeout_s=timeout_s)
    told = {result.check for result in gathered.results}
    results = [result for result in results if not (result.finding.status == "skip" and result.check in told)]
    return [*results, *gathered.results, *compare_nodes(checks, gathered.facts, context)]
