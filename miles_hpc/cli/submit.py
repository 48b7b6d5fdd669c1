"""miles-hpc submit: check, write the run directory, submit."""

from __future__ import annotations

import argparse

from miles_hpc.cli.follow import follow
from miles_hpc.cli.inputs import check_environment, check_model, complete_at, materialise_model, read_inputs, render
from miles_hpc.cluster.preflight import check_job
from miles_hpc.cluster.slurm import Slurm
from miles_hpc.cluster.submit import check_idle, check_owner, prepare, submit_prepared

__all__ = ["main"]


def main(args: argparse.Namespace) -> int:
    inputs = read_inputs(args)
    plan, text = render(inputs.run, inputs.site, inputs.paths)
    continues = check_owner(inputs.run, inputs.paths)
    if continues and (step := complete_at(inputs.run, inputs.paths)) is not None:
        print(f"run '{inputs.run.name}' is complete at step {step}: nothing submitted; more: --set rollout.n_steps=N")
        return 0
    check_environment(inputs.run)
    check_model(inputs.run)
    slurm = Slurm()
    check_job(plan, text, slurm, runtimes=inputs.site.container.runtimes)
    check_idle(inputs.paths, slurm)
    what = f"{'continue' if continues else 'start'} run '{inputs.run.name}' in {inputs.paths.root}"
    if args.dry_run:
        print(f"would {what}; nothing written, nothing submitted")
        return 0
    prepare(inputs.run, inputs.site, inputs.paths, source=inputs.source, job_text=text, materialise=materialise_model)
    job_id = submit_prepared(inputs.paths, slurm)
    print(f"submitted job {job_id}: {what}")
    return follow(inputs.paths) if args.watch else 0
