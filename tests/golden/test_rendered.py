"""Rendered batch scripts, word by word. After a wanted change: MILES_GOLDEN=write python -m pytest tests/golden"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from miles_hpc.cluster.job_plan import plan_job
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
