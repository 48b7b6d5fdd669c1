"""What every environment promises, tried on those that ship with the project. A new one is added to ENVIRONMENTS."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from miles_hpc.core.registry import resolve
from miles_hpc.core.types import Prompt
from miles_hpc.rollout.environments.base import Environment, Episode, Turn
from miles_hpc.rollout.environments.commands import command_format
from miles_hpc.rollout.environments.terminal import TerminalEnvironment
from miles_hpc.rollout.sandbox import LocalSandboxes
from miles_hpc.rollout.sandbox_host import SandboxHost

DATA = Path(__file__).parents[1] / "data"
QUESTIONS = {
    "prompt_data": str(DATA / "questions.jsonl"),
    "rm_type": "math",
    "solution_key": "solution",
    "eval_share": 0.3,
    "demo_share": 0.3,
}
TASKS = {
    "tasks": str(DATA / "terminal_tasks"),
    "eval_tasks": ["retune-*"],
    "demo_tasks": ["rotate-*"],
    "max_turns": 6,
}
ENVIRONMENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "math": ("math", QUESTIONS),
    "shell-natural": ("shell", {"style": "natural"}),
    "shell-short": ("shell", {}),
    "terminal": ("terminal", TASKS),
    "terminal-tools": ("terminal", {**TASKS, "format": "qwen25"}),
}
SPLITS = ("train", "eval", "demo")


@pytest.fixture(params=sorted(ENVIRONMENTS))
def environment(request: pytest.FixtureRequest) -> Environment:
    name, options = ENVIRONMENTS[request.param]
    made = resolve("environment", name)(options)
    assert isinstance(made, Environment)
    return made


def said(environment: Environment, command: str) -> str:
    """A message that runs this command, where the environment runs commands."""
    if isinstance(environment, TerminalEnvironment):
        return command_format(environment.options.format).say(command)
    return command


def play(scene: Callable[[LocalSandboxes, SandboxHost], Awaitable[None]]) -> None:
    async def main() -> None:
        host = SandboxHost()
        await host.start()
        try:
            async with asyncio.timeout(150):
                await scene(LocalSandboxes(host, timeout_s=30.0), host)
        finally:
            await host.close()

    asyncio.run(main())


def test_prompts_are_pure_named_and_serialisable(environment: Environment) -> None:
    again = type(environment)(getattr(environment, "options", None) and msgspec.to_builtins(environment.options))
    for split in SPLITS:
        for seed in range(20):
            prompt = environment.prompt(seed, split=split)
            assert prompt == environment.prompt(seed, split=split) == again.prompt(seed, split=split)
            assert prompt.environment == environment.name and prompt.seed == seed and prompt.label
            assert prompt.messages and prompt.messages[-1].role in ("user", "tool")
            assert msgspec.msgpack.decode(msgspec.msgpack.encode(prompt), type=Prompt) == prompt


def test_splits_share_no_task(environment: Environment) -> None:
    seen = [{repr(environment.prompt(seed, split=split).data) for seed in range(100)} for split in SPLITS]
    assert not (seen[0] & seen[1] or seen[0] & seen[2] or seen[1] & seen[2])


def test_start_does_not_block_and_close_frees_everything(environment: Environment) -> None:
    async def scene(sandboxes: LocalSandboxes, host: SandboxHost) -> None:
        for steps in range(3):
            prompt = environment.prompt(steps, split="train")
            episode = environment.start(prompt, sandboxes, episode_id=f"e{steps}", seed=1)
            assert isinstance(episode, Episode) and host.status().live == 0
            for _ in range(steps):
                await episode.step(said(environment, "ls"))
            await episode.close()
            await episode.close()
            assert host.status().live == 0

    play(scene)


@pytest.mark.parametrize(
    "text",
    ["", " ", "\n\n", "ans", "ans ", "\x00", "é\udce9", "x" * 5000, "exit 1", "kill -9 $$", "```bash\nkill -9 -1\n```"],
)
def test_any_text_is_answered(environment: Environment, text: str) -> None:
    async def scene(sandboxes: LocalSandboxes, host: SandboxHost) -> None:
        episode = environment.start(environment.prompt(1, split="train"), sandboxes, episode_id="e", seed=1)
        try:
            turn = await episode.step(text)
            assert isinstance(turn, Turn)
            assert turn.done or turn.messages
            assert all(m.content for m in turn.messages)
        finally:
            await episode.close()

    play(scene)


def test_episodes_end(environment: Environment) -> None:
    async def scene(sandboxes: LocalSandboxes, host: SandboxHost) -> None:
        episode = environment.start(environment.prompt(1, split="train"), sandboxes, episode_id="e", seed=1)
        try:
            for _ in range(100):
                if (await episode.step(said(environment, "ls"))).done:
                    return
            raise AssertionError("an episode has a last turn")
        finally:
            await episode.close()

    play(scene)


def test_episodes_of_one_prompt_do_not_meet(environment: Environment) -> None:
    async def scene(sandboxes: LocalSandboxes, host: SandboxHost) -> None:
        prompt = environment.prompt(1, split="train")
        one = environment.start(prompt, sandboxes, episode_id="one", seed=1)
        two = environment.start(prompt, sandboxes, episode_id="two", seed=2)
        if (await one.step(said(environment, "touch mine"))).done:
            return  # one turn, and nothing that could meet
        assert "mine" not in (await two.step(said(environment, "ls"))).messages[0].content
        assert "mine" in (await one.step(said(environment, "ls"))).messages[0].content
        await one.close()
        await two.close()

    play(scene)


def test_demonstrations_end_with_a_reward(environment: Environment) -> None:
    async def scene(sandboxes: LocalSandboxes, host: SandboxHost) -> None:
        episode = environment.start(environment.prompt(1, split="demo"), sandboxes, episode_id="e", seed=1)
        turn = Turn()
        for _ in range(100):
            text = episode.demonstrate()
            if text is None:
                break
            turn = await episode.step(text)
            if turn.done:
                break
        assert turn.done and 0.0 <= turn.reward <= 1.0
        await episode.close()

    play(scene)
