"""Terminal tasks played in real sandboxes: right and wrong work, and agents that go for the verdict instead."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from miles_hpc.cli.main import main
from miles_hpc.core.errors import UserError
from miles_hpc.core.types import Prompt
from miles_hpc.rollout.environments.base import Turn
from miles_hpc.rollout.environments.terminal import TerminalEnvironment, read_reward
from miles_hpc.rollout.sandbox import LocalSandboxes
from miles_hpc.rollout.sandbox_host import SandboxHost

EXAMPLES = Path(__file__).parents[1] / "data" / "terminal_tasks"
NAMES = ("mend-wordcount", "retune-config", "rotate-logs")
needs_python = pytest.mark.skipif(not Path("/usr/bin/python3").exists(), reason="no python3 in the sandbox's root")

TEST = """
[[ $(cat /app/answer 2>/dev/null) == 42 ]] && echo 1 >/logs/verifier/reward.txt || echo 0 >/logs/verifier/reward.txt
"""


def write_task(root: Path, name: str = "t", **files: str) -> Path:
    defaults = {
        "task.toml": "[verifier]\ntimeout_sec = 20\n",
        "instruction.md": "Write 42 into /app/answer.",
        "environment/given.txt": "given\n",
        "tests/test.sh": TEST,
        "solution/solve.sh": "echo 42 >/app/answer",
    }
    for place, text in {**defaults, **files}.items():
        path = root / name / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def prompt_of(environment: TerminalEnvironment, name: str) -> Prompt:
    return next(p for seed in range(99) if (p := environment.prompt(seed, split="train")).data["task"] == name)


Scene = Callable[[LocalSandboxes, SandboxHost], Awaitable[None]]


def play(scene: Scene) -> None:
    async def played_out() -> None:
        host = SandboxHost()
        await host.start()
        try:
            async with asyncio.timeout(150):
                await scene(LocalSandboxes(host), host)
            assert host.status().live == 0
        finally:
            await host.close()

    asyncio.run(played_out())


def played(root: Path, *commands: str, name: str = "t", **options: Any) -> tuple[float, list[str]]:
    """The reward and what the agent was shown, when it says these commands (or messages) and then DONE."""
    shown: list[str] = []
    rewards: list[float] = []

    async def scene(sandboxes: LocalSandboxes, host: SandboxHost) -> None:
        environment = TerminalEnvironment({"tasks": str(root), **options})
        episode = environment.start(prompt_of(environment, name), sandboxes, episode_id="e", seed=0)
        try:
            for text in [*(c if c.startswith("```") else f"```bash\n{c}\n```" for c in commands), "DONE"]:
                turn = await episode.step(text)
                shown.extend(message.content for message in turn.messages)
                if turn.done:
                    rewards.append(turn.reward)
                    return
        finally:
            await episode.close()
            await episode.close()

    play(scene)
    return rewards[0], shown


# ------------------------------------------------------------------------------------------------ the examples


@needs_python
@pytest.mark.parametrize("name", NAMES)
def test_the_solution_of_every_example_is_right_and_no_work_is_wrong(name: str) -> None:
    solution = (EXAMPLES / name / "solution" / "solve.sh").read_text()
    assert played(EXAMPLES, solution, name=name)[0] == 1.0
    assert played(EXAMPLES, name=name)[0] == 0.0


def test_half_done_work_has_half_the_reward() -> None:
    script = 'for f in "$1"/*.log; do mv "$f.1" "$f.2"; mv "$f" "$f.1"; : >"$f"; done'
    command = f"printf '#!/bin/bash\\n%s\\n' '{script}' >rotate.sh; chmod +x rotate.sh"
    assert played(EXAMPLES, command, name="rotate-logs")[0] == 0.5


# ------------------------------------------------------------------------------------------------ an episode


def test_what_the_agent_sees(tmp_path: Path) -> None:
    write_task(
        tmp_path,
        **{"environment/Dockerfile": "FROM scratch\nENV GREETING='good day'\nWORKDIR /app/sub\nCOPY given.txt .\n"},
    )
    reward, shown = played(
        tmp_path,
        "pwd; cat given.txt; echo $GREETING",
        "cd /; export X=1",
        'pwd; echo "x$X"; false',
        "seq 1000",
        "sleep 30",
        "true",
        "head -c 9000000 /dev/zero >/app/big",
        "yes",
        "echo 42 >/app/answer",
        command_timeout_s=2.0,
        output_bytes=50,
    )
    assert reward == 1.0
    assert shown[0] == "/app/sub\ngiven\ngood day\n[exit code 0]\n(19 messages left)"
    assert shown[2] == "/app/sub\nx\n[exit code 1]\n(17 messages left)"
    assert shown[3].startswith("1\n2\n") and "[exit code 0; only the first 50 bytes are shown]" in shown[3]
    assert "ended after 2 s" in shown[4] and "[no output; exit code 0]" in shown[5]
    assert "exit code 153" in shown[6] and "a file reached the largest size" in shown[6]
    assert "ended: endless output]" in shown[7]


def test_the_prompt_says_what_counts() -> None:
    environment = TerminalEnvironment({"tasks": str(EXAMPLES), "max_turns": 7, "format": "qwen25"})
    prompt = prompt_of(environment, "rotate-logs")
    text = prompt.messages[0].content
    for part in ("Write a bash script", "/app", "7 messages", "DONE", "<tool_call>", "30 seconds", "4000 bytes"):
        assert part in text
    assert prompt.label == "scripting" and prompt.data == {"task": "rotate-logs"}
    by_task = TerminalEnvironment({"tasks": str(EXAMPLES), "report_by": "task"})
    assert prompt_of(by_task, "rotate-logs").label == "rotate-logs"


def test_messages_without_a_command_cost_a_turn_and_say_what_is_missing(tmp_path: Path) -> None:
    async def scene(sandboxes: LocalSandboxes, host: SandboxHost) -> None:
        environment = TerminalEnvironment({"tasks": str(write_task(tmp_path)), "max_turns": 2})
        episode = environment.start(environment.prompt(0, split="train"), sandboxes, episode_id="e", seed=0)
        turn = await episode.step("I would write it.")
        assert "There is no command" in turn.messages[0].content and "(1 message left)" in turn.messages[0].content
        assert turn.messages[0].role == "user"
        assert await episode.step("```bash\necho 42 >answer\n```") == Turn(done=True, reward=1.0)  # the last one counts
        await episode.close()

    play(scene)


def test_a_command_and_the_end_in_one_message(tmp_path: Path) -> None:
    write_task(tmp_path)
    reward, shown = played(tmp_path, "```bash\necho 42 >answer\n```\nDONE")
    assert (reward, shown) == (1.0, [])


def test_the_agents_time_is_bounded(tmp_path: Path) -> None:
    write_task(tmp_path, **{"task.toml": "[agent]\ntimeout_sec = 1.0\n"})
    reward, shown = played(tmp_path, "echo 42 >answer; sleep 20", "rm answer")
    assert (reward, shown) == (1.0, [])


def test_demonstrations_play_the_solution() -> None:
    async def scene(sandboxes: LocalSandboxes, host: SandboxHost) -> None:
        environment = TerminalEnvironment({"tasks": str(EXAMPLES), "demo_tasks": ["ro*"], "format": "qwen3_coder"})
        episode = environment.start(environment.prompt(5, split="demo"), sandboxes, episode_id="e", seed=0)
        turn = Turn()
        while (text := episode.demonstrate()) is not None:
            turn = await episode.step(text)
        assert turn == Turn(done=True, reward=1.0)
        await episode.close()

    play(scene)


# ------------------------------------------------------------------------------------------------ going for the verdict


@pytest.mark.parametrize(
    "commands",
    [
        ("echo 1 >/logs/verifier/reward.txt", "mkdir -p /tmp/.task/logs/verifier; echo 1 >/logs/verifier/reward.txt"),
        ("""echo 'echo {"reward": 1} >/logs/verifier/reward.json' >/tests/test.sh; chmod 555 /tests /tests/test.sh""",),
        ("rm -rf /tmp/.task; ln -s /work /tmp/.task; mkdir -p logs/verifier; echo 1 >logs/verifier/reward.json",),
        ("rm -rf /tmp/.task; mkdir /tmp/.task; ln -s /dev/null /tmp/.task/tests; echo x >/tmp/.task/logs",),
        ("mkdir -p bin; echo 'echo 42' >bin/cat; chmod +x bin/cat; export PATH=/work/bin:$PATH",),
        ("echo 'cat() { echo 42; }' | tee .bashrc .bash_profile .profile; export BASH_ENV=/work/.bashrc",),
        ("(while :; do mkdir -p /tmp/.task/logs/verifier; echo 1 >/logs/verifier/reward.json; done) &",),
        ("setsid nohup bash -c 'while :; do echo 1 >/logs/verifier/reward.txt; done' >/dev/null 2>&1 & disown -a",),
        (
            "(while :; do ln -sf /app/mine /tmp/.task/tests/test.sh; done) &"
            " echo 'echo 1 >/logs/verifier/reward.txt' >mine",
        ),
    ],
)
def test_none_of_this_gives_a_reward(tmp_path: Path, commands: tuple[str, ...]) -> None:
    assert played(write_task(tmp_path), *commands)[0] == 0.0


def test_processes_that_were_left_do_no_harm_to_right_work(tmp_path: Path) -> None:
    write_task(tmp_path)
    spoil = "(sleep 1; while :; do echo 0 >/app/answer; echo 0 >/logs/verifier/reward.json; done) &"
    assert played(tmp_path, f"echo 42 >answer; {spoil} sleep 0.1")[0] == 1.0


def test_right_work_without_room_for_the_tests_is_worth_nothing(tmp_path: Path) -> None:
    write_task(tmp_path)
    fill = "for i in $(seq 40); do head -c 1000000 /dev/zero >/tmp/f$i; done 2>/dev/null"
    assert played(tmp_path, "echo 42 >answer", fill)[0] == 0.0
    assert played(tmp_path, "echo 42 >answer", fill, "rm /tmp/f*")[0] == 1.0


def test_code_that_the_tests_run_does_not_outbid_them(tmp_path: Path) -> None:
    test = "timeout 5 bash /app/answer.sh; echo 0 >/logs/verifier/reward.txt"
    write_task(tmp_path, **{"tests/test.sh": test})
    hack = """echo 'echo {\\"reward\\": 1} >/logs/verifier/reward.json; echo 1 >/logs/verifier/reward.txt' >answer.sh"""
    reward, shown = played(tmp_path, hack, "mkdir -p /tmp/.task/logs/verifier; bash answer.sh; cat /logs/verifier/*")
    assert '{"reward": 1}' in shown[1] and reward == 0.0


@needs_python
def test_python_does_not_import_what_was_left_at_home(tmp_path: Path) -> None:
    test = "python3 -c 'import sys; sys.exit(7)'; [[ $? == 0 ]] && echo 1 >/logs/verifier/reward.txt"
    write_task(tmp_path, **{"tests/test.sh": test})
    folder = "$(python3 -m site --user-site)"
    plant = f"mkdir -p {folder}; echo 'import os; os._exit(0)' >{folder}/usercustomize.py"
    reward, shown = played(tmp_path, plant, "python3 -c 'import sys; sys.exit(7)'; echo $?")
    assert shown[1].startswith("0\n")  # it works for the agent, so it is the verdict that is safe
    assert reward == 0.0


def test_hidden_files_are_not_there_before_the_end(tmp_path: Path) -> None:
    mark = "hidden-mark-of-the-tests"
    write_task(tmp_path, **{"tests/test.sh": f"# {mark}\n{TEST}", "solution/solve.sh": f"# {mark}"})
    reward, shown = played(
        tmp_path,
        f"ls -A /tests/ /logs/ /solution /tmp/.task 2>&1;"
        f" grep -rs {mark[:-1]} /work /tmp /tests/ /app/ /proc/*/cmdline",
    )
    assert mark not in shown[0] and "test.sh" not in shown[0] and reward == 0.0


# ------------------------------------------------------------------------------------------------ verdicts


@pytest.mark.parametrize(
    ("test", "reward"),
    [
        ("echo 0.25 >/logs/verifier/reward.txt; exit 3", 0.25),  # the file counts, not the exit code
        ("echo '{\"reward\": 0.5}' >/logs/verifier/reward.json; echo 1 >/logs/verifier/reward.txt", 0.5),
        ("echo '{\"reward\": 1}' >/logs/verifier/reward.json; echo 0.5 >/logs/verifier/reward.txt", 0.5),
        ("echo broken >/logs/verifier/reward.json; echo 1 >/logs/verifier/reward.txt", 1.0),
        ("true", 0.0),
        ("echo 1 >/logs/verifier/reward.txt; sleep 60", 0.0),  # too long
        ("echo 1 >/logs/verifier/reward.txt; kill -9 $$", 0.0),
        ("ln -s /etc/passwd /logs/verifier/reward.txt", 0.0),
        ("mkfifo /logs/verifier/reward.txt", 0.0),
        ("echo 1 >/logs/verifier/reward.txt; head -c 99999 /dev/zero >>/logs/verifier/reward.txt", 0.0),
        ("(sleep 0.3; echo 0 >/logs/verifier/reward.txt) & echo 1 >/logs/verifier/reward.txt", 1.0),
        ('[[ $TEST_DIR == /tests && $KEY == "v w" && $PWD == /app ]] && echo 1 >/logs/verifier/reward.txt', 1.0),
    ],
)
def test_how_a_verdict_is_read(tmp_path: Path, test: str, reward: float) -> None:
    write_task(tmp_path, **{"tests/test.sh": test, "task.toml": "[verifier]\ntimeout_sec = 2\nenv = { KEY = 'v w' }\n"})
    assert played(tmp_path)[0] == reward


@pytest.mark.parametrize(("code", "reward"), [(0, 1.0), (1, 0.0)])
def test_the_older_layout_is_judged_by_the_exit_code(tmp_path: Path, code: int, reward: float) -> None:
    folder = tmp_path / "old"
    (folder / "tests").mkdir(parents=True)
    (folder / "task.yaml").write_text("instruction: Do it.\n")
    (folder / "tests" / "want").write_text("given")
    (folder / "run-tests.sh").write_text(f"[[ $(cat $TEST_DIR/want) == given ]] && exit {code}; exit 9")
    assert played(tmp_path, name="old")[0] == reward


@pytest.mark.parametrize(
    ("name", "data", "reward"),
    [
        ("reward.txt", b"1", 1.0),
        ("reward.txt", b" 0.75\n", 0.75),
        ("reward.txt", b"-1", -1.0),
        ("reward.txt", b"nan", None),
        ("reward.txt", b"1e999", None),
        ("reward.txt", b"", None),
        ("reward.txt", b"\xff", None),
        ("reward.txt", b"1 2", None),
        ("reward.json", b"0.5", 0.5),
        ("reward.json", b'{"reward": 0.5, "style": 1}', 0.5),
        ("reward.json", b'{"score": 1}', 1.0),
        ("reward.json", b'{"a": 1, "b": 1}', None),
        ("reward.json", b'{"reward": true}', None),
        ("reward.json", b'{"reward": "1"}', None),
        ("reward.json", b'{"reward": NaN}', None),
        ("reward.json", b"{}", None),
        ("reward.json", b"[1]", None),
        ("reward.json", b"{", None),
        ("reward.json", b"[" * 60_000, None),
        ("reward.json", b"1" + b"0" * 5000, None),
    ],
)
def test_reward_files(name: str, data: bytes, reward: float | None) -> None:
    assert read_reward(name, data) == reward


def test_a_sandbox_that_begins_anew_ends_the_episode(tmp_path: Path) -> None:
    async def scene(sandboxes: LocalSandboxes, host: SandboxHost) -> None:
        environment = TerminalEnvironment({"tasks": str(write_task(tmp_path))})
        episode = environment.start(environment.prompt(0, split="train"), sandboxes, episode_id="e", seed=0)
        await episode.step("```bash\necho 42 >answer\n```")
        assert host.runner.link is not None
        host.runner.link.stop(host._sandboxes["e"].name)
        async with asyncio.timeout(30):
            while not (turn := await episode.step("```bash\ntrue\n```")).done:
                await asyncio.sleep(0.02)
        assert turn.reward == 0.0
        await episode.close()

    play(scene)


# ------------------------------------------------------------------------------------------------ options


def test_splits_by_pattern_and_bad_options(tmp_path: Path) -> None:
    environment = TerminalEnvironment({"tasks": str(EXAMPLES), "eval_tasks": ["re*"], "demo_tasks": ["rotate-logs"]})
    seen = {s: {environment.prompt(i, split=s).data["task"] for i in range(20)} for s in ("train", "eval", "demo")}
    assert seen == {"train": {"mend-wordcount"}, "eval": {"retune-config"}, "demo": {"rotate-logs"}}
    write_task(tmp_path, **{"solution/more": "x"})
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "missing required field `tasks`"),
        ({"tasks": str(EXAMPLES), "task": 1}, "the terminal environment knows tasks"),
        ({"tasks": "/nowhere"}, "no such folder"),
        ({"tasks": str(EXAMPLES), "eval_tasks": ["x*"]}, "no task is called 'x*'"),
        ({"tasks": str(EXAMPLES), "eval_tasks": ["m*"], "demo_tasks": ["*t"]}, "is in eval_tasks and in demo_tasks"),
        ({"tasks": str(tmp_path), "demo_tasks": ["t"]}, "'t' has no solution of a single script"),
        ({"tasks": str(EXAMPLES), "format": "xml"}, "expected one of fenced"),
        ({"tasks": str(EXAMPLES), "max_turns": 0}, "at least 1"),
        ({"tasks": str(EXAMPLES), "test_timeout_s": 0}, "test_timeout_s = 0.0: expected seconds"),
        ({"tasks": str(EXAMPLES), "task_files_mb": 0}, "task_files_mb of at least 1"),
        ({"tasks": str(EXAMPLES), "strict": True}, "'mend-wordcount': not applied: FROM python:3.12-slim"),
    ]
    for options, complaint in cases:
        with pytest.raises(UserError) as caught:
            TerminalEnvironment(options)
        assert complaint in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(UserError, match="no task is in split eval: name some in eval_tasks"):
        TerminalEnvironment({"tasks": str(EXAMPLES)}).prompt(0, split="eval")


def test_what_is_not_applied_is_one_warning_per_task() -> None:
    assert TerminalEnvironment({"tasks": str(EXAMPLES)}).warnings == (
        "terminal task 'mend-wordcount': not applied: FROM python:3.12-slim (line 1)",
        "terminal task 'retune-config': not applied: FROM debian:12-slim (line 1)",
    )


def submit(*settings: str) -> int:
    """A dry run of the recipe with these settings; the model's folder is described instead of there."""
    given = ['model={tokenizer="characters", config={model_type="qwen3"}}', *settings]
    return main(["submit", "terminal", "--site", "slurm_box", "--dry-run", *(p for s in given for p in ("--set", s))])


def test_submit_shows_warnings_and_refuses_bad_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(EXAMPLES.parents[2])
    assert submit("environment.options.max_turns=9", "rollout.trajectory_deadline_s=140") == 0
    warnings = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert len(warnings) == 4 and "'mend-wordcount': not applied: FROM python:3.12-slim (line 1)" in warnings[0]
    assert warnings[2] == (
        "warning: an episode may take 9 turns, but rollout.max_turns = 4 ends it before, without its reward"
    )
    assert "an episode may take 150 s in its environment alone" in warnings[3]  # 120 for the agent, 30 for the tests
    assert submit("environment.options.strict=true") == 2
    monkeypatch.chdir(write_task(tmp_path, **{"task.toml": "agent = 1"}))
    assert submit('environment.options={tasks="."}') == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2 and "terminal task 't': task.toml: 'agent' = 1: expected a table" in errors[1]


def test_without_isolation_nothing_is_played(tmp_path: Path) -> None:
    async def main() -> None:
        host = SandboxHost(isolation="none")
        await host.start()
        try:
            environment = TerminalEnvironment({"tasks": str(write_task(tmp_path))})
            prompt = environment.prompt(0, split="train")
            episode = environment.start(prompt, LocalSandboxes(host), episode_id="e", seed=0)
            with pytest.raises(UserError, match="isolation none"):
                await episode.step("DONE")
            await episode.close()
            assert not Path("/app").is_symlink() and not Path("/tmp/.task").exists()
        finally:
            await host.close()

    asyncio.run(main())


def test_a_task_file_that_is_gone_fails_the_group(tmp_path: Path) -> None:
    async def scene(sandboxes: LocalSandboxes, host: SandboxHost) -> None:
        environment = TerminalEnvironment({"tasks": str(write_task(tmp_path))})
        shutil.rmtree(tmp_path / "t" / "environment")
        episode = environment.start(environment.prompt(0, split="train"), sandboxes, episode_id="e", seed=0)
        with pytest.raises(UserError, match=r"given\.txt: No such file"):
            await episode.step("DONE")
        await episode.close()

    play(scene)
