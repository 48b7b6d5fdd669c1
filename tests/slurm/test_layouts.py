"""What processes of each layout see on the real box: their own resources, and nothing of the batch script's."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.conftest import until
from tools.slurm_box import Box

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

TELL = """
import json, os, sys
from pathlib import Path
from miles_hpc.core.load import load_prepared
from miles_hpc.cluster.placement import place, role_of_node
run, site = load_prepared(Path(sys.argv[1]))
role = role_of_node(place(run, site, os.environ), os.environ)
world = 0
if "--mpi" in sys.argv:
    from miles_hpc.control.mpi import open_spanning_world
    spanning = open_spanning_world(int(os.environ["SLURM_NTASKS"]), works=role == "trainer")
    world = spanning.group.size if spanning.group is not None else 0
    rank = spanning.group.rank if spanning.group is not None else -1
    if spanning.group is not None:
        assert rank == int(os.environ["SLURM_PROCID"]), (rank, os.environ["SLURM_PROCID"])
    assert spanning.finish(30.0)
names = ("SLURM_CPUS_PER_TASK", "SLURM_MEM_PER_NODE", "SLURM_CPUS_ON_NODE", "SLURM_HOSTFILE", "SRUN_CPUS_PER_TASK",
         "SLURM_TRES_PER_TASK", "SBATCH_GRES")
seen = {name: os.environ[name] for name in names if name in os.environ}
told = {"role": role, "procid": int(os.environ["SLURM_PROCID"]), "ntasks": int(os.environ["SLURM_NTASKS"]),
        "world": world, "env": seen, "odd": os.environ["ODD_VALUE"]}
print("TOLD " + json.dumps(told), flush=True)
"""

BATCH = """
import os, subprocess, sys
from pathlib import Path
from miles_hpc.cluster.placement import place, role_environ, role_srun_args, span_srun_args
from miles_hpc.core.layouts import is_split, roles_in_use, spans
from miles_hpc.core.load import load_prepared
root = Path(sys.argv[1])
run, site = load_prepared(root)
placement = place(run, site, os.environ)
# What users' shells and sites leave behind (facts on public reports): steps must not take it.
os.environ |= {"SLURM_HOSTFILE": "/nowhere", "SRUN_CPUS_PER_TASK": "7", "SLURM_TRES_PER_TASK": "cpu:7"}
os.environ["SBATCH_GRES"] = "gpu:9"
os.environ["ODD_VALUE"] = "a b,c=$HOME'\\"%"
tell = [sys.executable, "-P", str(root / "tell.py"), str(root)]
used = roles_in_use(run)
if spans(placement.layout):
    programs = {role: [*tell, "--mpi"] for role in ([""] if is_split(placement.layout) else used)}
    commands = [(used, span_srun_args(run, site, programs, name="all", placement=placement))]
else:
    commands = [((role,), [*role_srun_args(run, site, role, name=role, placement=placement), *tell]) for role in used]
for roles, command in commands:
    done = subprocess.run(command, env=role_environ(os.environ, run, site, roles), timeout=90)
    print("CODE", done.returncode, flush=True)
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    root = Path(tempfile.mkdtemp(prefix="my-", dir="/tmp"))
    root.chmod(0o755)
    yield root
    shutil.rmtree(root, ignore_errors=True)


@pytest.mark.parametrize("layout", ["hetjob", "hetjob_span", "split", "split_span"])
def test_each_process_has_its_own_inputs(clean_box: Box, folder: Path, layout: str) -> None:
    from miles_hpc.cluster.job_plan import plan_job
    from miles_hpc.cluster.render import render_job
    from miles_hpc.cluster.site import template_folders
    from miles_hpc.cluster.submit import prepare
    from miles_hpc.core.paths import RunPaths
    from tests.unit.runs import make_run, make_site

    settings = ["groups.trainer.ranks_per_node=2", "groups.trainer.cpus_per_task=2", "groups.rollout.cpus_per_task=3"]
    run, site, paths = make_run(f"job.layout={layout}", *settings), make_site(), RunPaths(folder / "run")
    text = render_job(plan_job(run, site, paths), template_folders())
    prepare(run, site, paths, source="x", job_text=text)
    (paths.root / "tell.py").write_text(TELL)
    (paths.root / "batch.py").write_text(BATCH)
    script = text[: text.index("# Slurm signals this shell only")]
    script += f"exec {sys.executable} -P {paths.root}/batch.py {paths.root}\n"
    job = (
        subprocess.run(
            ["sbatch", "--parsable"], input=script, env=clean_box.env(), capture_output=True, text=True, check=True
        )
        .stdout.split(";")[0]
        .strip()
    )
    output = paths.attempts / f"slurm-{job}.out"
    steps = 1 if layout.endswith("span") else 3

    def ended() -> bool:
        return output.exists() and output.read_text().count("CODE ") == steps

    until(ended, f"the steps to end: {output.read_text() if output.exists() else ''}", 90.0)
    lines = output.read_text().splitlines()
    assert [line for line in lines if line.startswith("CODE")] == ["CODE 0"] * steps, lines
    told = sorted((json.loads(line[5:]) for line in lines if line.startswith("TOLD ")), key=lambda one: one["procid"])
    by_role = {role: [one for one in told if one["role"] == role] for role in ("trainer", "rollout", "sandbox")}
    beside = 2 if layout == "split_span" else 1  # tasks that srun starts on every node
    assert [len(by_role[role]) for role in by_role] == [4, 2 * beside, beside]
    if layout.endswith("span"):
        assert {one["world"] for one in by_role["trainer"]} == {4}
        assert {one["ntasks"] for one in told} == {len(told)}
        assert [one["procid"] for one in by_role["trainer"]] == [0, 1, 2, 3]
    for one in told:
        assert one["odd"] == "a b,c=$HOME'\"%"
        assert not {"SLURM_HOSTFILE", "SLURM_TRES_PER_TASK", "SBATCH_GRES"} & set(one["env"]), one
        assert one["env"].get("SRUN_CPUS_PER_TASK") != "7", one
    if not layout.endswith("span"):
        cpus = {role: {one["env"]["SLURM_CPUS_PER_TASK"] for one in by_role[role]} for role in by_role}
        assert cpus == {"trainer": {"2"}, "rollout": {"3"}, "sandbox": {"1"}}
