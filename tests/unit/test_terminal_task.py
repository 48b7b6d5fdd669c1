"""Task folders of both layouts: what is loaded, what is refused, what is listed as not applied."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from miles_hpc.core.errors import UserError
from miles_hpc.rollout.environments.terminal_task import TerminalTask, load_task, load_tasks, read_files

EXAMPLES = Path(__file__).parents[1] / "data" / "terminal_tasks"

MAX = 8 << 20
HARBOR = {
    "task.toml": "[agent]\ntimeout_sec = 90\n[verifier]\ntimeout_sec = 30.5\n[metadata]\ncategory = 'files'\n",
    "instruction.md": "Write x.\n",
    "environment/data.txt": "data",
    "tests/test.sh": "echo 1 >/logs/verifier/reward.txt",
    "solution/solve.sh": "touch x",
}
OLD = {
    "task.yaml": "instruction: |-\n  Write y.\ncategory: old\nmax_agent_timeout_sec: 40\nmax_test_timeout_sec: 20\n",
    "Dockerfile": "FROM scratch\nWORKDIR /app\nCOPY task-deps/in.txt ./\n",
    "docker-compose.yaml": "services:\n  client:\n    image: x\n",
    "task-deps/in.txt": "in",
    "run-tests.sh": "exit 0",
    "tests/test_outputs.py": "pass",
    "solution.sh": "touch y",
}


def write(folder: Path, files: Mapping[str, str | None]) -> Path:
    for name, text in files.items():
        if text is not None:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    return folder


def made(tmp_path: Path, layout: Mapping[str, str | None], **changes: str | None) -> TerminalTask:
    return load_task(write(tmp_path / "t", {**layout, **changes}), "t", max_bytes=MAX)


def places(files: tuple[tuple[Path, str, int], ...]) -> list[str]:
    return [place for _, place, _ in files]


# ------------------------------------------------------------------------------------------------ what is loaded


def test_the_harbor_layout(tmp_path: Path) -> None:
    task = made(tmp_path, HARBOR)
    assert (task.instruction, task.category, task.solution) == ("Write x.", "files", "touch x")
    assert (task.agent_timeout_s, task.test_timeout_s) == (90.0, 30.5)
    assert places(task.files) == ["data.txt"] and places(task.tests) == ["test.sh"]
    assert (task.workdir, task.test_script, task.has_reward_file, task.not_applied) == ("/app", "test.sh", True, ())
    assert read_files(task.files)["data.txt"].data == b"data"


def test_the_terminal_bench_layout(tmp_path: Path) -> None:
    task = made(tmp_path, OLD)
    assert (task.instruction, task.category, task.solution) == ("Write y.", "old", "touch y")
    assert (task.agent_timeout_s, task.test_timeout_s) == (40.0, 20.0)
    assert places(task.files) == ["in.txt"] and places(task.tests) == ["test_outputs.py", "run-tests.sh"]
    assert (task.test_script, task.has_reward_file, task.not_applied) == ("run-tests.sh", False, ())


def test_nothing_hidden_is_copied_even_when_the_dockerfile_says_so(tmp_path: Path) -> None:
    task = made(tmp_path, OLD, **{"Dockerfile": "FROM scratch\nCOPY . .\n", "solution.yaml": "x"})
    assert places(task.files) == ["task-deps/in.txt"]
    assert made(tmp_path, HARBOR, **{"environment/Dockerfile": "FROM scratch\n"}).files == ()


def test_modes_variables_and_the_working_folder(tmp_path: Path) -> None:
    dockerfile = (
        "FROM scratch\nENV A=1 B=2\nWORKDIR /workspace/sub\nCOPY data.txt run.sh ./\nCOPY --chmod=700 data.txt /app/\n"
    )
    settings = '[environment]\nenv = { B = "3", KEY = "${SECRET}" }\n[verifier]\nenv = { C = "4" }\n'
    folder = write(
        tmp_path / "t",
        {**HARBOR, "environment/Dockerfile": dockerfile, "task.toml": settings, "environment/run.sh": ""},
    )
    (folder / "environment" / "run.sh").chmod(0o755)
    task = load_task(folder, "t", max_bytes=MAX)
    assert task.workdir == "/workspace/sub" and task.env == {"A": "1", "B": "3"} and task.test_env == {"C": "4"}
    assert [(p, m) for _, p, m in task.files] == [("sub/data.txt", 0o644), ("sub/run.sh", 0o755), ("data.txt", 0o700)]
    assert task.not_applied == ("environment.env.KEY",)


def test_a_working_folder_elsewhere_becomes_app(tmp_path: Path) -> None:
    dockerfile = "FROM scratch\nWORKDIR /root/project\nCOPY data.txt .\nCOPY data.txt /etc/x\n"
    task = made(tmp_path, HARBOR, **{"environment/Dockerfile": dockerfile})
    assert task.workdir == "/app" and places(task.files) == ["data.txt"]
    assert task.not_applied == ("WORKDIR /root/project: the working folder is /app instead", "COPY data.txt to /etc/x")


def test_a_solution_with_files_beside_it_is_no_demonstration(tmp_path: Path) -> None:
    assert made(tmp_path, HARBOR, **{"solution/patch.diff": "x"}).solution == ""
    assert made(tmp_path / "2", HARBOR, **{"solution/solve.sh": None}).solution == ""


def test_lines_that_mark_benchmark_data_are_no_instruction(tmp_path: Path) -> None:
    text = "<!-- x canary GUID 1 -->\n\n# canary\n# Title\nDo it.\n"
    assert made(tmp_path, HARBOR, **{"instruction.md": text}).instruction == "# Title\nDo it."


@pytest.mark.parametrize(
    ("settings", "listed"),
    [
        ("[environment]\ndocker_image = 'x/y:1'", "environment.docker_image = x/y:1"),
        ("[environment]\ngpus = 1", "environment.gpus"),
        ("[environment]\nallow_internet = true", "network access"),
        ("[environment]\nnetwork_mode = 'public'", "network access"),
        ("[[environment.mcp_servers]]\nname = 'x'", "environment.mcp_servers"),
        ("[verifier]\nenvironment_mode = 'separate'", "verifier.environment: the tests run in the agent's sandbox"),
        ("[[verifier.collect]]\ncommand = 'x'", "verifier.collect"),
        ("[agent]\nuser = 'me'", "agent.user"),
        ("[verifier]\nenv = { KEY = '${KEY}' }", "verifier.env.KEY"),
    ],
)
def test_settings_that_a_sandbox_can_not_do_are_listed(tmp_path: Path, settings: str, listed: str) -> None:
    assert made(tmp_path, HARBOR, **{"task.toml": settings}).not_applied == (listed,)


def test_settings_without_effect_are_not_listed(tmp_path: Path) -> None:
    settings = """
    schema_version = "1.4"
    artifacts = ["x"]
    [task]
    name = "a/b"
    [agent]
    user = "root"
    network_mode = "no-network"
    [verifier]
    environment_mode = "shared"
    [environment]
    cpus = 4
    memory_mb = 8192
    storage = "10G"
    gpus = 0
    allow_internet = false
    os = "linux"
    [whatever]
    key = 1
    """
    assert made(tmp_path, HARBOR, **{"task.toml": settings}).not_applied == ()


def test_services_of_a_compose_file_are_listed(tmp_path: Path) -> None:
    compose = "services:\n  client: {}\n  db: {}\n"
    assert made(tmp_path, OLD, **{"docker-compose.yaml": compose}).not_applied == (
        "docker-compose.yaml: services client, db",
    )


# ------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("layout", "changes", "complaint"),
    [
        (HARBOR, {"task.toml": "a = "}, "task.toml: Invalid value"),
        (HARBOR, {"task.toml": "agent = 5"}, "'agent' = 5: expected a table"),
        (HARBOR, {"task.toml": "[agent]\ntimeout_sec = 0"}, "agent.timeout_sec = 0: expected seconds"),
        (HARBOR, {"task.toml": "[agent]\ntimeout_sec = inf"}, "agent.timeout_sec = inf"),
        (HARBOR, {"task.toml": "[verifier]\ntimeout_sec = 'long'"}, "verifier.timeout_sec = 'long'"),
        (HARBOR, {"task.toml": "[verifier]\ntimeout_sec = true"}, "verifier.timeout_sec = True"),
        (HARBOR, {"task.toml": "[[steps]]\nname = 'a'"}, "tasks of several steps can't be played"),
        (HARBOR, {"task.toml": "[environment]\nos = 'windows'"}, "expected linux"),
        (HARBOR, {"task.toml": "[environment]\nworkdir = 'app'"}, "expected an absolute path"),
        (HARBOR, {"task.toml": "[verifier]\nenv = { A = 1 }"}, "expected a table of texts"),
        (HARBOR, {"task.toml": "[verifier.env]\n'A;rm' = ''"}, "expected a variable's name"),
        (HARBOR, {"instruction.md": None}, "instruction.md is missing"),
        (HARBOR, {"instruction.md": " \n"}, "the instruction is empty"),
        (HARBOR, {"instruction.md": "x" * 300_000}, "expected at most 262144"),
        (HARBOR, {"tests/test.sh": None}, "tests/test.sh is missing"),
        (HARBOR, {"environment/Dockerfile": "COPY x ."}, "Dockerfile line 1: COPY x: no such file"),
        (HARBOR, {"environment/big": "x" * (9 << 20)}, "environment: 2 files"),
        (HARBOR, {"tests/big": "x" * (9 << 20)}, "tests: 2 files"),
        (OLD, {"task.yaml": "a: ["}, "task.yaml: not YAML"),
        (OLD, {"task.yaml": "- a"}, "expected keys and values"),
        (OLD, {"task.yaml": "difficulty: easy"}, "no 'instruction'"),
        (OLD, {"task.yaml": "instruction: x\nmax_test_timeout_sec: -1"}, "max_test_timeout_sec = -1"),
        (OLD, {"task.yaml": "instruction: !!python/object/apply:os.getcwd []"}, "not YAML"),
        (OLD, {"run-tests.sh": None}, "run-tests.sh is missing"),
    ],
)
def test_bad_tasks_are_one_clear_line(
    tmp_path: Path, layout: dict[str, str], changes: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(UserError) as caught:
        made(tmp_path, layout, **changes)
    text = str(caught.value)
    assert text.startswith("terminal task 't': ") and complaint in text and "\n" not in text


def test_links_and_unreadable_texts_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "t", HARBOR)
    (folder / "environment" / "link").symlink_to("/etc/passwd")
    with pytest.raises(UserError, match="environment/link: expected plain files"):
        load_task(folder, "t", max_bytes=MAX)
    (folder / "environment" / "link").unlink()
    os.mkfifo(folder / "tests" / "pipe")
    with pytest.raises(UserError, match="tests/pipe: expected plain files"):
        load_task(folder, "t", max_bytes=MAX)
    (folder / "tests" / "pipe").unlink()
    (folder / "instruction.md").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="can't be read"):
        load_task(folder, "t", max_bytes=MAX)


def test_folders_of_tasks(tmp_path: Path) -> None:
    write(tmp_path / "b" / "two", OLD)
    write(tmp_path / "one", HARBOR)
    write(tmp_path / ".hidden", HARBOR)
    write(tmp_path / "notes", {"README.md": "x"})
    assert [task.name for task in load_tasks(tmp_path, max_bytes=MAX)] == ["b/two", "one"]
    assert [task.name for task in load_tasks(tmp_path / "one", max_bytes=MAX)] == ["one"]
    with pytest.raises(UserError, match="no such folder"):
        load_tasks(tmp_path / "nowhere", max_bytes=MAX)
    write(tmp_path / "bad", {"task.toml": "a ="})
    assert [task.name for task in load_tasks(tmp_path, exclude=("bad", "b/*"), max_bytes=MAX)] == ["one"]
    with pytest.raises(UserError, match="all 3 tasks are excluded"):
        load_tasks(tmp_path, exclude=("*",), max_bytes=MAX)
    with pytest.raises(UserError, match=r"no task\.toml or task\.yaml up to"):
        load_tasks(tmp_path / "notes", max_bytes=MAX)


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    task = made(tmp_path, HARBOR)
    task.files[0][0].unlink()
    with pytest.raises(UserError, match=r"data\.txt: No such file"):
        read_files(task.files)


def test_the_examples_load() -> None:
    tasks = {task.name: task for task in load_tasks(EXAMPLES, max_bytes=MAX)}
    assert sorted(tasks) == ["mend-wordcount", "retune-config", "rotate-logs"]
    assert all(task.solution and task.category for task in tasks.values())
    assert tasks["retune-config"].env == {"SERVICE_CONF": "/app/conf.d"}
    assert [task.not_applied for task in tasks.values()] == [
        ("FROM python:3.12-slim (line 1)",),
        ("FROM debian:12-slim (line 1)",),
        (),
    ]
