"""Data that ships with the project: every TOML loads, every site renders to clean bash, no README points nowhere."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

import miles_hpc.recipes
from miles_hpc.cluster.job_plan import plan_job
from miles_hpc.cluster.render import render_job
from miles_hpc.cluster.site import data_folder, template_folders
from miles_hpc.cluster.site_facts import uncovered_facts
from miles_hpc.core.errors import UserError
from miles_hpc.core.load import load_run, load_site, validate
from miles_hpc.core.paths import RunPaths
from tests.unit.runs import make_gpu_run

REPOSITORY = Path(__file__).resolve().parents[2]
SITES = sorted(path.stem for path in data_folder("site_configs").glob("*.toml"))
RECIPES = sorted(Path(miles_hpc.recipes.__path__[0]).glob("*.toml"))
TEMPLATES = sorted(data_folder("sbatch").glob("*.j2"))
_SKIPPED = {".git", ".worktrees", "node_modules", "runs", ".demo", ".box", "dist", "build"}


def ours(pattern: str) -> list[Path]:
    """Files of the tree; environments (.venv, .venv-sglang, ...) hold other people's."""
    tops = [top for top in REPOSITORY.iterdir() if top.name not in _SKIPPED and not top.name.startswith(".venv")]
    found = [*REPOSITORY.glob(pattern), *(path for top in tops if top.is_dir() for path in top.rglob(pattern))]
    return sorted(p for p in found if not _SKIPPED & set(p.relative_to(REPOSITORY).parts[:-1]))


@pytest.mark.parametrize("path", ours("*.toml"), ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_every_toml_is_toml(path: Path) -> None:
    assert tomllib.loads(path.read_text())


@pytest.mark.parametrize("name", SITES)
def test_every_site_loads_and_says_where_its_facts_are_from(name: str) -> None:
    site = load_site(name, [data_folder("site_configs")])
    assert site.title
    assert site.sources
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", site.verified)
    assert uncovered_facts(site) == []
    if site.scheduler == "slurm":
        assert {role for partition in site.partitions for role in partition.roles} == {"trainer", "rollout", "sandbox"}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_loads_and_fits_its_site(path: Path) -> None:
    run = load_run(path)
    site = load_site(run.site or "slurm_box", [data_folder("site_configs")])
    try:
        validate(run, site)
    except UserError as error:
        # A recipe can't bring the user's model folder along.
        assert "model.path: no config.json" in str(error) or "model.tokenizer: no tokenizer.json" in str(error)


@pytest.mark.parametrize("name", SITES)
def test_every_site_renders_to_clean_bash(name: str, tmp_path: Path) -> None:
    site = load_site(name, [data_folder("site_configs")])
    if site.scheduler == "none":
        pytest.skip("no scheduler, no script")
    run = make_gpu_run(site, "python_path=['/home/a b/tasks']")
    validate(run, site)
    text = render_job(plan_job(run, site, RunPaths(Path("/runs/a b"))), template_folders())
    script = tmp_path / "job.sh"
    script.write_text(text)
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=60)
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck isn't installed")
    done = subprocess.run(["shellcheck", str(script)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_templates_stay_short_and_strict(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert len(lines) < 80
    assert "set -euo pipefail" in lines


@pytest.mark.parametrize("path", ours("*.md"), ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_no_dead_links(path: Path) -> None:
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target) or target.startswith("#"):
            continue
        assert (path.parent / target.partition("#")[0]).exists(), f"{path.name} points to {target}"
