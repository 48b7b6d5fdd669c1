"""Terminal tasks as folders on disk: the Harbor layout, and Terminal-Bench's older one.

    NAME/                          NAME/
      task.toml                      task.yaml         instruction, max_agent_timeout_sec, max_test_timeout_sec
      instruction.md
      environment/                   Dockerfile        and the files beside it
        Dockerfile, files
      tests/test.sh, files           run-tests.sh, tests/
      solution/solve.sh              solution.sh

| | Harbor | Terminal-Bench |
|---|---|---|
| seconds for the agent, 600 without | [agent] timeout_sec | max_agent_timeout_sec |
| seconds for the tests, 600 without | [verifier] timeout_sec | max_test_timeout_sec |
| tests lie in, and run as | /tests, `bash /tests/test.sh` | /tests, `bash /tests/run-tests.sh` |
| reward | /logs/verifier/reward.json or reward.txt | 1 for exit code 0, else 0 |

Sources: harborframework.com/docs/tasks and docs/task-difference (Harbor, schema up to 1.4), terminal-bench's
docs/tasks and its Task model. Keys that aren't known are ignored, as Harbor ignores them. No image is built: what a
Dockerfile or the settings ask for and a sandbox can't do is listed in `not_applied`. Resources (cpus, memory, storage)
aren't applied either: a sandbox has the limits of the run file's [sandbox]. Reads only.
"""

from __future__ import annotations

import math
import os
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

from miles_hpc.core.errors import UserError
from miles_hpc.rollout.environments.dockerfile import Copied, DockerPlan, plan_dockerfile
from miles_hpc.rollout.sandbox_files import SandboxFile
from miles_hpc.rollout.sandbox_root import LINKS, MAX_INODES

__all__ = ["WORKDIR", "TerminalTask", "load_task", "load_tasks", "read_files"]

#: The working folder of tasks that name none, or one that sandboxes don't have.
WORKDIR = "/app"

_ROOTS = tuple(f"/{name}" for name, target in LINKS.items() if target == "work")
_DEFAULT_S = 600.0  # Harbor's
_DEPTH = 6  # of task folders below the folder of tasks
_HIDDEN = ("Dockerfile", ".dockerignore", "docker-compose.yaml", "docker-compose.yml", "compose.yaml", "compose.yml")
_OLD_HIDDEN = ("task.yaml", "solution.sh", "solution.yaml", "run-tests.sh", "tests", "solution")
_MAX_FILES = MAX_INODES // 4
_MAX_TEXT_BYTES = 256 << 10  # of instruction and settings
_CANARY = re.compile(r"\s*(#|<!--).*canary", re.IGNORECASE)
_VARIABLE = re.compile(r"[A-Za-z_]\w*\Z")


@dataclass(frozen=True, slots=True)
class TerminalTask:
    """One task, checked. Files are (path on disk, place, mode); read them with `read_files`."""

    name: str  # its folder below the folder of tasks
    instruction: str
    category: str
    agent_timeout_s: float
    test_timeout_s: float
    workdir: str  # absolute, in the sandbox; below one of the links to its working folder
    env: dict[str, str]  # of every command
    test_env: dict[str, str]  # of the tests, besides
    files: tuple[tuple[Path, str, int], ...]  # places are relative to the sandbox's working folder
    tests: tuple[tuple[Path, str, int], ...]  # places are relative to /tests
    test_script: str  # below /tests
    has_reward_file: bool  # else the exit code tells
    solution: str  # a bash script that needs nothing beside it; "" = none
    not_applied: tuple[str, ...]


def load_tasks(root: Path, *, max_bytes: int, exclude: tuple[str, ...] = ()) -> list[TerminalTask]:
    """The task that `root` is, or all below it, by name. Raises UserError: not a folder, no task in it, a bad task.

    `max_bytes` bounds the files of a task's environment, and those of its tests. Tasks whose names match a pattern of
    `exclude` aren't read.
    """
    if not root.is_dir():
        raise UserError(f"terminal tasks: {root}: no such folder: expected one of task folders, each with a task.toml")
    if _settings_file(root) is not None:
        return [load_task(root, root.resolve().name, max_bytes=max_bytes)]
    found = {folder.relative_to(root).as_posix(): folder for folder in sorted(_task_folders(root, _DEPTH))}
    folders = {n: folder for n, folder in found.items() if not any(fnmatchcase(n, pattern) for pattern in exclude)}
    if not folders:
        seen = (
            f"all {len(found)} tasks are excluded"
            if found
            else f"no task.toml or task.yaml up to {_DEPTH} folders down"
        )
        raise UserError(f"terminal tasks: {root}: {seen}: expected a folder of task folders")
    return [load_task(folder, name, max_bytes=max_bytes) for name, folder in folders.items()]


def load_task(folder: Path, name: str, *, max_bytes: int) -> TerminalTask:
    """One task folder. Raises UserError that names the task and the file."""
    try:
        settings = _settings_file(folder)
        if settings is None:
            raise UserError("no task.toml or task.yaml: expected a task folder of Harbor or Terminal-Bench")
        is_harbor = settings.name == "task.toml"
        task = _harbor(folder, name) if is_harbor else _terminal_bench(folder, name, settings)
        _check_sizes("environment", task.files, max_bytes)
        _check_sizes("tests", task.tests, max_bytes)
        return task
    except UserError as error:
        raise UserError(f"terminal task '{name}': {error}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"terminal task '{name}': can't be read: {error}") from error


def read_files(files: tuple[tuple[Path, str, int], ...]) -> dict[str, SandboxFile]:
    """Contents by place. Raises UserError when a file is gone since the task was loaded."""
    try:
        return {place: SandboxFile(path.read_bytes(), mode) for path, place, mode in files}
    except OSError as error:
        raise UserError(
            f"terminal task: {error.filename}: {error.strerror}: it was there when the run began"
        ) from error


# ------------------------------------------------------------------------------------------------ the two layouts


def _harbor(folder: Path, name: str) -> TerminalTask:
    try:
        data = tomllib.loads(_text(folder / "task.toml"))
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"task.toml: {error}") from error
    if data.get("steps"):
        raise UserError("task.toml: 'steps': tasks of several steps can't be played: expected one instruction")
    agent, verifier, environment = (_table(data, key) for key in ("agent", "verifier", "environment"))
    if environment.get("os", "linux") != "linux":
        raise UserError(f"task.toml: environment.os = {environment['os']!r}: expected linux")
    not_applied = _unmet(data, environment, verifier)
    context = folder / "environment"
    plan = _environment(context, _tree(context), not_applied)
    tests = _placed(folder / "tests", _tree(folder / "tests"))
    if not any(place == "test.sh" for _, place, _ in tests):
        raise UserError("tests/test.sh is missing: expected the script that writes /logs/verifier/reward.txt")
    solution = [place for _, place, _ in _placed(folder / "solution", _tree(folder / "solution"))]
    env = _env(environment, "environment", not_applied)
    return _task(
        name,
        plan,
        context,
        instruction=_text(folder / "instruction.md"),
        category=str(_table(data, "metadata").get("category", "")),
        agent_timeout_s=_seconds(agent, "timeout_sec", "agent."),
        test_timeout_s=_seconds(verifier, "timeout_sec", "verifier."),
        workdir=environment.get("workdir"),
        env=env,
        test_env=_env(verifier, "verifier", not_applied),
        tests=tests,
        test_script="test.sh",
        has_reward_file=True,
        solution=_text(folder / "solution" / "solve.sh") if solution == ["solve.sh"] else "",
        not_applied=not_applied,
    )


def _terminal_bench(folder: Path, name: str, settings: Path) -> TerminalTask:
    data = _yaml(settings)
    instruction = data.get("instruction")
    if not isinstance(instruction, str):
        raise UserError(f"{settings.name}: no 'instruction': expected a text")
    not_applied: list[str] = []
    for compose in (folder / "docker-compose.yaml", folder / "docker-compose.yml"):
        services = _yaml(compose).get("services") if compose.is_file() else None
        if isinstance(services, dict) and len(services) > 1:
            not_applied.append(f"{compose.name}: services {', '.join(sorted(map(str, services)))}")
    context = [n for n in _tree(folder) if PurePosixPath(n).parts[0] not in _OLD_HIDDEN]
    plan = _environment(folder, context, not_applied)
    tests = _placed(folder / "tests", _tree(folder / "tests"))
    script = folder / "run-tests.sh"
    if not script.is_file():
        raise UserError("run-tests.sh is missing: expected the script whose exit code is 0 when the task is solved")
    solution = folder / "solution.sh"
    return _task(
        name,
        plan,
        folder,
        instruction=instruction,
        category=str(data.get("category", "")),
        agent_timeout_s=_seconds(data, "max_agent_timeout_sec"),
        test_timeout_s=_seconds(data, "max_test_timeout_sec"),
        workdir=None,
        env={},
        test_env={},
        tests=(*(test for test in tests if test[1] != script.name), (script, script.name, 0o755)),
        test_script=script.name,
        has_reward_file=False,
        solution=_text(solution) if solution.is_file() else "",
        not_applied=not_applied,
    )


def _task(
    name: str, plan: DockerPlan, context: Path, *, instruction: str, workdir: Any, env: dict[str, str], **rest: Any
) -> TerminalTask:
    """What both layouts have in common: the working folder and what lies where."""
    not_applied: list[str] = rest.pop("not_applied")
    instruction = _without_canary(instruction)
    if not instruction:
        raise UserError("the instruction is empty: expected what the agent is to do")
    if workdir is not None and (not isinstance(workdir, str) or not workdir.startswith("/")):
        raise UserError(f"task.toml: environment.workdir = {workdir!r}: expected an absolute path")
    declared = workdir or plan.workdir or WORKDIR
    folder = declared
    if _below_root(declared) is None:
        folder = WORKDIR
        not_applied.append(f"WORKDIR {declared}: the working folder is {WORKDIR} instead")
    files = []
    for copied in plan.copies:
        place = _below_root(copied.target)
        if place is None and copied.target.startswith(f"{declared}/"):
            place = copied.target[len(declared) + 1 :]
        if not place:
            not_applied.append(f"COPY {copied.source} to {copied.target}")
            continue
        path = context / copied.source
        files.append((path, place, copied.mode if copied.mode is not None else _mode(path)))
    return TerminalTask(
        name=name,
        instruction=instruction,
        workdir=folder,
        env={**plan.env, **env},
        files=tuple({place: (path, place, mode) for path, place, mode in files}.values()),
        not_applied=tuple(not_applied),
        **rest,
    )


def _environment(context: Path, names: list[str], not_applied: list[str]) -> DockerPlan:
    """What the folder brings: what the Dockerfile copies; without one, everything, into the working folder."""
    inside = [name for name in names if name not in _HIDDEN]
    if "Dockerfile" not in names:
        return DockerPlan(copies=[Copied(name, f"{WORKDIR}/{name}") for name in inside])
    plan = plan_dockerfile(_text(context / "Dockerfile"), inside, default_workdir=WORKDIR)
    if ".dockerignore" in names:
        not_applied.append(".dockerignore")
    not_applied += plan.not_applied
    return plan


def _unmet(data: dict[str, Any], environment: dict[str, Any], verifier: dict[str, Any]) -> list[str]:
    """Settings of task.toml that a sandbox can't do."""
    unmet = []
    if environment.get("docker_image"):
        unmet.append(f"environment.docker_image = {environment['docker_image']}")
    for key in ("gpus", "tpus", "mcp_servers", "healthcheck", "skills_dir"):
        if environment.get(key):
            unmet.append(f"environment.{key}")
    if environment.get("allow_internet") is True or environment.get("network_mode") not in (None, "none", "no-network"):
        unmet.append("network access")
    if verifier.get("environment_mode", "shared") != "shared" or verifier.get("environment"):
        unmet.append("verifier.environment: the tests run in the agent's sandbox")
    if verifier.get("collect"):
        unmet.append("verifier.collect")
    for section in ("agent", "verifier"):
        if _table(data, section).get("user") not in (None, "root"):
            unmet.append(f"{section}.user")
    return unmet


# ------------------------------------------------------------------------------------------------ values


def _table(data: dict[str, Any], key: str) -> dict[str, Any]:
    value = data.get(key, {})
    if not isinstance(value, dict):
        raise UserError(f"task.toml: '{key}' = {value!r:.40}: expected a table")
    return value


def _seconds(data: dict[str, Any], key: str, where: str = "") -> float:
    value = data.get(key, _DEFAULT_S)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise UserError(f"{where}{key} = {value!r:.40}: expected seconds, more than 0")
    return float(value)


def _env(section: dict[str, Any], where: str, not_applied: list[str]) -> dict[str, str]:
    """`env` of a section. `${NAME}` stands for a variable of whoever starts the agents, which tasks don't get here."""
    env = section.get("env", {})
    if not isinstance(env, dict) or not all(isinstance(value, str) for value in env.values()):
        raise UserError(f"task.toml: {where}.env = {env!r:.40}: expected a table of texts")
    for key in env:
        if not _VARIABLE.match(key):
            raise UserError(f"task.toml: {where}.env: {key!r:.40}: expected a variable's name")
    not_applied += [f"{where}.env.{key}" for key, value in env.items() if "${" in value]
    return {key: value for key, value in env.items() if "${" not in value}


def _without_canary(text: str) -> str:
    """The instruction without leading lines that mark benchmark data ("... canary GUID ...")."""
    lines = text.strip().splitlines()
    while lines and (not lines[0].strip() or _CANARY.match(lines[0])):
        lines.pop(0)
    return "\n".join(lines).strip()


def _text(path: Path) -> str:
    if not path.is_file():
        raise UserError(f"{path.name} is missing")
    if path.stat().st_size > _MAX_TEXT_BYTES:
        raise UserError(f"{path.name} has {path.stat().st_size} bytes: expected at most {_MAX_TEXT_BYTES}")
    return path.read_text()


def _yaml(path: Path) -> dict[str, Any]:
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError as error:
        raise UserError(f"{path.name}: needs PyYAML: pip install 'miles-hpc[tasks]'") from error
    try:
        data = yaml.safe_load(_text(path))
    except yaml.YAMLError as error:
        raise UserError(f"{path.name}: not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(data, dict):
        raise UserError(f"{path.name}: expected keys and values")
    return data


# ------------------------------------------------------------------------------------------------ files


def _settings_file(folder: Path) -> Path | None:
    return next((folder / name for name in ("task.toml", "task.yaml") if (folder / name).is_file()), None)


def _task_folders(root: Path, depth: int) -> Iterator[Path]:
    for path in sorted(root.iterdir()):
        if path.name.startswith(".") or not path.is_dir() or path.is_symlink():
            continue
        if _settings_file(path) is not None:
            yield path
        elif depth > 1:
            yield from _task_folders(path, depth - 1)


def _tree(folder: Path) -> list[str]:
    """Relative paths of the files below a folder, sorted; none when it isn't there. Links are refused."""
    found: list[str] = []
    for parent, folders, names in os.walk(folder):
        for name in (*folders, *names):
            path = Path(parent, name)
            relative = path.relative_to(folder).as_posix()
            if path.is_symlink() or not (path.is_dir() or path.is_file()):
                raise UserError(f"{folder.name}/{relative}: expected plain files and folders, no links: copy the file")
            if "\n" in relative:
                raise UserError(f"{folder.name}/{relative!r}: expected a name without line breaks")
        found += [Path(parent, name).relative_to(folder).as_posix() for name in names]
    return sorted(found)


def _placed(folder: Path, names: list[str]) -> tuple[tuple[Path, str, int], ...]:
    return tuple((folder / name, name, _mode(folder / name)) for name in names)


def _mode(path: Path) -> int:
    return 0o755 if path.stat().st_mode & 0o100 else 0o644


def _below_root(path: str) -> str | None:
    """The path relative to the sandbox's working folder; None when it isn't in it."""
    for root in _ROOTS:
        if path == root or path.startswith(f"{root}/"):
            return path[len(root) + 1 :]
    return None


def _check_sizes(what: str, files: tuple[tuple[Path, str, int], ...], max_bytes: int) -> None:
    """A sandbox that takes less says so when the files are put."""
    n_bytes = sum(path.stat().st_size for path, _, _ in files)
    if len(files) > _MAX_FILES or n_bytes > max_bytes:
        raise UserError(
            f"{what}: {len(files)} files of {n_bytes} bytes: expected at most {_MAX_FILES} of {max_bytes} together"
        )
