"""Rendered batch scripts and their summaries, word by word.

After a wanted change: MILES_GOLDEN=write python -m pytest tests/golden
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from miles_hpc.cluster.job_plan import plan_job
from miles_hpc.cluster.job_summary import summarise_job
from miles_hpc.cluster.render import render_job
from miles_hpc.cluster.site import data_folder, source_root
from miles_hpc.core.load import validate
from miles_hpc.core.paths import RunPaths
from tests.unit.runs import make_run, make_site

HERE = Path(__file__).parent
CASES = {
    "slurm_box": ("slurm_box", ["groups.trainer.ranks_per_node=2", "job.time=00:10:00"]),
    "h100": (
        "generic_h100_ib",
        [
            "groups.trainer.gpus_per_node=8",
            "groups.trainer.ranks_per_node=8",
            "groups.trainer.cpus_per_task=12",
            "groups.rollout.gpus_per_node=8",
            "groups.rollout.cpus_per_task=96",
            "groups.rollout.mem=0",
            "groups.sandbox.mem=16G",
            "job.account=proj",
            "job.extra_directives=['--exclusive']",
            "python_path=['/home/me/my tasks']",
        ],
    ),
    "gb300_without_sandbox": (
        "generic_gb300_nvl72",
        ["groups.trainer.gpus_per_node=4", "groups.trainer.ranks_per_node=4", "groups.sandbox.nodes=0"],
    ),
}


SUMMARIES = {
    **CASES,
    "vista_follow_up": (
        "vista",
        [
            "groups.trainer.gpus_per_node=1",
            "groups.trainer.nodes=32",
            "groups.rollout.gpus_per_node=1",
            "groups.rollout.nodes=32",
            "job.account=proj",
            "job.time=1-12:30",
            "job.max_allocations=5",
            "checkpoint.interval_steps=1",
        ],
    ),
    "perlmutter_single": (
        "perlmutter",
        [
            "groups.trainer.gpus_per_node=4",
            "groups.trainer.ranks_per_node=4",
            "groups.trainer.cpus_per_task=16",
            "groups.rollout.gpus_per_node=4",
            "groups.rollout.cpus_per_task=64",
            "job.account=proj_g",
            "job.qos=debug",
            "job.time=30",
            "job.max_allocations=1",
            "groups.sandbox.nodes=0",
        ],
    ),
    "gb300_split_with_a_spare": (
        "generic_gb300_nvl72",
        [
            "groups.trainer.gpus_per_node=4",
            "groups.trainer.ranks_per_node=4",
            "groups.trainer.spare_nodes=1",
            "groups.rollout.gpus_per_node=4",
            "groups.sandbox.nodes=0",
            "job.layout=split",
        ],
    ),
    "without_a_limit": ("slurm_box", ["job.time=UNLIMITED"]),
    "the_partitions_limit": ("slurm_box", ["job.time=''"]),
}


@pytest.mark.parametrize("case", CASES)
def test_job_text(case: str) -> None:
    name, overrides = CASES[case]
    run, site = make_run("python.controller=/env/bin/python", *overrides), make_site(name)
    validate(run, site)
    text = render_job(plan_job(run, site, RunPaths(Path("/runs/tiny"))), [data_folder("sbatch")])
    text = text.replace(str(source_root()), "/src")
    golden = HERE / f"{case}.sbatch"
    if os.environ.get("MILES_GOLDEN") == "write":
        golden.write_text(text)
    assert text == golden.read_text()


@pytest.mark.parametrize("case", SUMMARIES)
def test_summary(case: str) -> None:
    name, overrides = SUMMARIES[case]
    run, site, paths = make_run(*overrides), make_site(name), RunPaths(Path("/runs/tiny"))
    validate(run, site)
    text = "\n".join(summarise_job(run, site, plan_job(run, site, paths), paths, continues=False).lines()) + "\n"
    golden = HERE / f"{case}.summary"
    if os.environ.get("MILES_GOLDEN") == "write":
        golden.write_text(text)
    assert text == golden.read_text()
