"""What commands are given: a run file or recipe, a site, a run directory."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

import msgspec

import miles_hpc.recipes
from checkpoints.journal import read_journals
from checkpoints.lineage import account
from checkpoints.manifest import newest_complete
from miles_hpc.cluster.job_plan import JobPlan, plan_job
from miles_hpc.cluster.side_check import check_binding
from miles_hpc.cluster.site import (
    role_environment,
    site_folders,
    site_name,
    source_root,
    template_folders,
    with_env_set,
)
from miles_hpc.core.config import RunConfig, SiteConfig
from miles_hpc.core.errors import UserError
from miles_hpc.core.load import load_run, load_site, validate, with_absolute_paths
from miles_hpc.core.paths import RunPaths
from miles_hpc.core.registry import names, resolve

__all__ = [
    "RunInputs",
    "check_environment",
    "check_model",
    "complete_at",
    "find_run_dir",
    "find_run_file",
    "launcher_environment",
    "materialise_model",
    "read_inputs",
    "render",
]


@dataclass(frozen=True)
class RunInputs:
    """A validated run on its site, and where it goes."""

    run: RunConfig
    site: SiteConfig
    paths: RunPaths
    source: str  # the run file's text


def find_run_file(text: str, wanted: str = "run file or recipe") -> Path:
    """A path to a run file, or the name of a recipe that ships with the project."""
    try:
        if Path(text).is_file():
            return Path(text)
    except OSError as error:  # a name that is too long
        raise UserError(f"{text[:100]}: {error.strerror}: expected a run file or a recipe") from error
    recipes = {path.stem: path for path in Path(miles_hpc.recipes.__path__[0]).glob("*.toml")}
    if text in recipes:
        return recipes[text]
    near = get_close_matches(text, recipes, 1)
    hint = f": did you mean '{near[0]}'?" if near else f"; recipes are {', '.join(sorted(recipes)) or 'none'}"
    raise UserError(f"{text}: no such {wanted}{hint}")


def read_inputs(args: argparse.Namespace, *, default_site: str = "") -> RunInputs:
    """Run file, overrides, site and run directory of a command, validated. Reads only."""
    file = find_run_file(args.run)
    run = _absolute_options(with_absolute_paths(load_run(file, args.set), Path.cwd()), Path.cwd())
    name = site_name(args.site, run) or default_site
    site = load_site(name, site_folders())
    run_dir = Path(args.run_dir or run.run_dir or f"runs/{run.name}").expanduser()
    paths = RunPaths(Path.cwd() / run_dir)
    run = msgspec.structs.replace(run, site=site.name, run_dir=str(paths.root))
    validate(run, site)
    return RunInputs(run=run, site=with_env_set(site, run.job.env_set), paths=paths, source=file.read_text())


def render(run: RunConfig, site: SiteConfig, paths: RunPaths) -> tuple[JobPlan, str]:
    """The plan and the text of the batch job. Raises UserError for a site without Slurm."""
    from miles_hpc.cluster.render import render_job

    if site.scheduler == "none":
        raise UserError(f"site '{site.name}' has no scheduler: choose another with --site, or use 'miles-hpc local'")
    plan = plan_job(run, site, paths)
    return plan, render_job(plan, template_folders())


def find_run_dir(text: str) -> RunPaths:
    """The run directory that a path, run file or recipe means. Raises UserError when there is none."""
    if Path(text).is_dir():
        paths = RunPaths(Path(text).absolute())
    else:
        run = load_run(find_run_file(text, "run directory, run file or recipe"))
        paths = RunPaths(Path.cwd() / Path(run.run_dir or f"runs/{run.name}").expanduser())
    if not paths.identity.is_file():
        raise UserError(f"{paths.root} is not a run directory: identity.json is missing; 'miles-hpc submit' makes one")
    return paths


def complete_at(run: RunConfig, paths: RunPaths) -> int | None:
    """The step at which the run in this directory is complete; None while something is left to do."""
    newest = newest_complete(paths.checkpoints)
    last = run.sft.steps + run.rollout.n_steps
    if newest is None or newest[1].step < last or not account(read_journals(paths.journal), newest[1]).completed:
        return None
    return newest[1].step


def check_model(run: RunConfig) -> None:
    """Make the model folder somewhere else first: what is wrong with it shows before the run directory is written."""
    from miles_hpc.rollout.session.tokenizer import write_model_folder

    with tempfile.TemporaryDirectory(prefix="miles-hpc-") as folder:
        write_model_folder(run, Path(folder) / "model")


def check_agent(run: RunConfig) -> None:
    """Look for the agent function without importing it: it may need what only the rollout nodes have."""
    path = run.rollout.custom_agent_function_path
    if not path:
        return
    module, _, name = path.rpartition(":" if ":" in path else ".")
    key = "rollout.custom_agent_function_path"
    if not check_binding(run.python_path, key, f"{module}:{name}"):
        print(f"warning: {key}: no module {module} here or in python_path: rollout nodes must have it", file=sys.stderr)


def check_environment(run: RunConfig) -> None:
    """Make the environment once, for its rules about options and data, and show its warnings (on stderr).

    Users' code (module:attribute) is left alone: it may need what only the roles have.
    """
    if ":" in run.environment.name:
        return
    environment = resolve("environment", run.environment.name)(run.environment.options)
    warnings = list(environment.warnings)
    if environment.max_turns > run.rollout.max_turns:
        warnings.append(
            f"an episode may take {environment.max_turns} turns, but rollout.max_turns = {run.rollout.max_turns} "
            "ends it before, without its reward"
        )
    if environment.episode_s > run.rollout.trajectory_deadline_s:
        warnings.append(
            f"an episode may take {environment.episode_s:g} s in its environment alone, but "
            f"rollout.trajectory_deadline_s = {run.rollout.trajectory_deadline_s:g} ends it before, without its reward"
        )
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)


def _absolute_options(run: RunConfig, base: Path) -> RunConfig:
    """Paths among a registered environment's options made absolute; `validate` tells of names that aren't known."""
    name, options = run.environment.name, dict(run.environment.options)
    if name not in names("environment"):
        return run
    for key in resolve("environment", name).path_options:
        if isinstance(options.get(key), str) and options[key]:
            options[key] = str(base / Path(options[key]).expanduser())
    return msgspec.structs.replace(run, environment=msgspec.structs.replace(run.environment, options=options))


def materialise_model(run: RunConfig, paths: RunPaths) -> None:
    """Write config, tokenizer and chat template into <run_dir>/model, as every role reads them."""
    from miles_hpc.rollout.session.tokenizer import write_model_folder

    write_model_folder(run, paths.model)


def launcher_environment(run: RunConfig, site: SiteConfig) -> dict[str, str]:
    """The environment of a launcher that a command becomes, as the batch script makes it for jobs."""
    root = source_root()
    import_path = [*([str(root)] if root is not None else []), *run.python_path]
    environment = {**os.environ, **role_environment(site, nodes=1), "PYTHONSAFEPATH": "1"}
    if import_path:
        environment["PYTHONPATH"] = ":".join(import_path)
    return environment
