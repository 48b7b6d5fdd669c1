"""A site's variables through sbatch and srun of a real Slurm: every role's process has them byte by byte."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from miles_hpc.cli.main import main
from miles_hpc.cluster.placement import place, role_srun_args
from miles_hpc.cluster.slurm import Slurm
from miles_hpc.cluster.submit import read_job
from miles_hpc.core.load import resolved_toml
from miles_hpc.core.paths import RunPaths
from tests.slurm.conftest import until
from tests.unit.runs import make_run, make_site, write_run
from tests.unit.test_exports import NASTY
from tools.slurm_box import Box

pytestmark = pytest.mark.slurm

#: Stands where the supervisor would and starts steps as it does; each task leaves its whole environment.
STEPS = """
import os, subprocess, sys
from pathlib import Path
from miles_hpc.cluster.placement import place, role_environ, role_srun_args
from miles_hpc.core.load import load_prepared

root = Path(sys.argv[-1])
run, site = load_prepared(root)
(root / "logs").mkdir()
for role in ("trainer", "rollout", "sandbox"):
    srun = role_srun_args(run, site, role, name=role, placement=place(run, site, os.environ))
    environ = role_environ(os.environ, run, site, (role,))
    tell = 'env -0 > "$0/$SLURM_PROCID"'
    (root / "logs" / role).mkdir()
    subprocess.run([*srun, "bash", "-c", tell, str(root / "logs" / role)], env=environ, check=True, timeout=60)
"""


def variables(path: Path) -> dict[str, str]:
    pairs = (item.split(b"=", 1) for item in path.read_bytes().split(b"\0") if item)
    return {os.fsdecode(name): os.fsdecode(value) for name, value in pairs}


def test_nasty_values_reach_every_task(clean_box: Box, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "steps.py"
    program.write_text(STEPS)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/bash\nexec {sys.executable} -P {program} "$@"\n')
    python.chmod(0o755)
    site = msgspec.structs.replace(
        make_site(),
        name="nasty",
        env=NASTY,
        env_single_node={"WIDTH": "one, only"},
        env_multi_node={"WIDTH": "several"},
    )
    (tmp_path / "sites").mkdir()
    (tmp_path / "sites" / "nasty.toml").write_text(resolved_toml(site))
    write_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    for name, value in {**clean_box.env(), "MILES_HPC_SITES": str(tmp_path / "sites")}.items():
        monkeypatch.setenv(name, value)
    options = ["--site", "nasty", "--set", f"python.controller={python}", "--set", "job.time=00:05:00"]
    assert main(["submit", "run.toml", *options]) == 0

    paths, slurm = RunPaths(tmp_path / "runs" / "tiny"), Slurm(environ=clean_box.env(), timeout_s=60.0)
    job_id = read_job(paths)
    assert job_id is not None

    def ended() -> bool:
        return set(slurm.state(job_id)) == {"COMPLETED"}

    until(ended, f"job {job_id} to complete; its output is in {paths.attempts}", 90.0)
    for role, tasks in (("trainer", 2), ("rollout", 2), ("sandbox", 1)):
        files = sorted((paths.root / "logs" / role).iterdir())
        assert [file.name for file in files] == [str(task) for task in range(tasks)]
        for file in files:
            seen = variables(file)
            assert {name: seen.get(name) for name in NASTY} == NASTY
            assert seen["WIDTH"] == ("several" if tasks > 1 else "one, only")


def test_a_list_of_variables_would_be_cut_at_commas(clean_box: Box) -> None:
    """Why steps say --export=ALL and nothing else: in a list, a value ends at its first comma (SmartSim #104)."""

    def seen(option: str) -> dict[str, str]:
        command = ["srun", "--nodes=1", "--ntasks=1", "--quiet", option, "/usr/bin/env", "-0"]
        environ = {**clean_box.env(), "LIST": "mlx5_0,mlx5_1"}
        done = subprocess.run(command, env=environ, capture_output=True, timeout=60, check=True)
        return dict(item.split("=", 1) for item in done.stdout.decode().split("\0") if item)

    assert seen("--export=PATH,LIST=mlx5_0,mlx5_1")["LIST"] == "mlx5_0"
    assert seen("--export=ALL")["LIST"] == "mlx5_0,mlx5_1"
    environ = {f"SLURM_JOB_NODELIST_HET_GROUP_{i}": f"n{i}[1-2]" for i in range(3)} | {"SLURM_HET_SIZE": "3"}
    for role in ("trainer", "rollout", "sandbox"):
        placement = place(make_run(), make_site(), environ)
        arguments = role_srun_args(make_run(), make_site(), role, name="x", placement=placement)
        assert [argument for argument in arguments if argument.startswith("--export")] == ["--export=ALL"]
