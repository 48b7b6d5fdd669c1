"""Where data folders lie, from a source tree and from an installed package; which site is meant."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec

from miles_hpc.cluster.site import (
    data_folder,
    role_environment,
    role_python,
    site_folders,
    site_name,
    source_root,
    template_folders,
)
from tests.unit.runs import make_run, make_site

REPOSITORY = Path(__file__).resolve().parents[2]


def test_in_a_source_tree() -> None:
    assert source_root() == REPOSITORY
    assert data_folder("sbatch") == REPOSITORY / "sbatch"
    assert site_folders({"MILES_HPC_SITES": "/mine"})[0] == Path("/mine")
    assert site_folders({})[-1] == REPOSITORY / "site_configs"
    assert template_folders({"MILES_HPC_TEMPLATES": "/mine"}) == [Path("/mine"), REPOSITORY / "sbatch"]


def test_installed_from_a_wheel(tmp_path: Path) -> None:
    """The wheel's layout (pyproject.toml, force-include): data folders inside the package, no repository around it."""
    ignored = shutil.ignore_patterns("__pycache__")
    for package in ("miles_hpc", "checkpoints", "launchers"):
        shutil.copytree(REPOSITORY / package, tmp_path / "site-packages" / package, ignore=ignored)
    for folder in ("sbatch", "site_configs"):
        shutil.copytree(REPOSITORY / folder, tmp_path / "site-packages" / "miles_hpc" / "_data" / folder)
    shutil.copy(REPOSITORY / "tests" / "golden" / "run.toml", tmp_path / "run.toml")
    environ = {k: v for k, v in os.environ.items() if not k.startswith("MILES_HPC_")}
    environ |= {"PYTHONPATH": str(tmp_path / "site-packages"), "HOME": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}

    def command(*arguments: str) -> str:
        return subprocess.run(
            [sys.executable, "-P", "-m", "miles_hpc.cli.main", *arguments],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=environ,
            timeout=120,
            check=True,
        ).stdout

    assert "slurm_box" in command("sites", "list")
    text = command("render", "run.toml")
    assert text.startswith("#!/bin/bash\n#SBATCH --job-name=tiny-trainer\n")
    assert "PYTHONPATH" not in text  # installed: nothing to point to


def test_which_site_is_meant() -> None:
    run = make_run()
    assert site_name("", run, {}) == "slurm_box"
    assert site_name("", run, {"MILES_HPC_SITE": "mine"}) == "mine"
    assert site_name("given", run, {"MILES_HPC_SITE": "mine"}) == "given"


def test_interpreters_and_variables_of_roles() -> None:
    run, site = make_run("python.trainer=/run/python"), make_site()
    site = msgspec.structs.replace(
        site, python=msgspec.structs.replace(site.python, trainer="/site/t", rollout="/site/r")
    )
    assert role_python(run, site, "trainer") == "/run/python"
    assert role_python(run, site, "rollout") == "/site/r"
    assert role_python(run, site, "sandbox") == sys.executable
    site = msgspec.structs.replace(site, env={"A": "1", "B": "1"}, env_multi_node={"B": "2"})
    assert role_environment(site, nodes=1) == {"A": "1", "B": "1"}
    assert role_environment(site, nodes=2) == {"A": "1", "B": "2"}
