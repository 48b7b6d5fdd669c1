"""The shell task: prompts, answers, demonstrations; commands run in real sandboxes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_hpc.core.errors import UserError
from miles_hpc.core.messages import SandboxResult
from miles_hpc.core.types import Prompt
from miles_hpc.rollout.environments.shell import ShellEnvironment
from miles_hpc.rollout.sandbox import LocalSandboxes
from miles_hpc.rollout.sandbox_host import SandboxHost
from miles_hpc.rollout.session.tokenizer import ALPHABET

SHELL = ShellEnvironment()
NATURAL = ShellEnvironment({"style": "natural"})


class Untouched:
    """Sandboxes that must not be used."""

    async def create(self, sandbox_id: str, files: dict[str, str]) -> None:
        raise AssertionError("no sandbox was expected")

    async def execute(self, sandbox_id: str, command: str) -> SandboxResult:
        raise AssertionError("no command was expected")

    async def destroy(self, sandbox_id: str) -> None:
        raise AssertionError("no sandbox was expected")


def play(scene: Callable[[LocalSandboxes], Awaitable[None]]) -> None:
    async def main() -> None:
        host = SandboxHost()
        await host.start()
        try:
            async with asyncio.timeout(150):
                await scene(LocalSandboxes(host, timeout_s=30.0))
            assert host.status().live == 0
        finally:
            await host.close()

    asyncio.run(main())


# ------------------------------------------------------------------------------------------------ tasks


@given(seed=st.integers(0, 2**40), split=st.sampled_from(["train", "eval", "demo"]))
def test_tasks_keep_their_promises(seed: int, split: str) -> None:
    prompt = SHELL.prompt(seed, split=split)
    assert prompt == SHELL.prompt(seed, split=split)
    data = prompt.data
    files, kind, argument, answer = data["files"], data["kind"], data["argument"], data["answer"]
    numbers = [n for lines in files.values() for n in lines]
    assert set(files) <= set("abcdef") and 3 <= len(files) <= 4
    assert len(set(numbers)) == len(numbers) and all(len(n) == 2 for n in numbers)
    for lines in files.values():
        assert 3 <= len(lines) <= 9 and max(lines) not in (lines[0], lines[-1])
    file = argument if argument in files else next(f for f, lines in files.items() if argument in lines)
    expected = {"len": str(len(files[file])), "top": files[file][0], "end": files[file][-1], "max": max(files[file])}
    assert answer == (file if kind == "who" else expected[kind[-3:]])
    assert prompt.messages[0].content == f"{kind} {argument}" and prompt.label == kind
    assert len(data["plan"]) == (2 if len(kind) == 4 else 1)


def test_splits_share_no_task_and_kinds_are_balanced() -> None:
    tasks = {split: [SHELL.prompt(i, split=split) for i in range(400)] for split in ("train", "eval", "demo")}
    seen = {split: {repr(p.data) for p in prompts} for split, prompts in tasks.items()}
    assert len(seen["train"] | seen["eval"] | seen["demo"]) == sum(len(s) for s in seen.values())
    counts = Counter(p.label for p in tasks["train"])
    assert len(counts) == 8 and min(counts.values()) > 20


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"linez": 3}, "linez.*knows style"),
        ({"style": "poetic"}, "poetic"),
        ({"kinds": ["len", "tpo"]}, "tpo"),
        ({"kinds": []}, "at least one kind"),
        ({"lines_min": 2}, "lines_min"),
        ({"lines_min": 5, "lines_max": 4}, "lines_min"),
        ({"files_max": 7}, "files_max"),
        ({"lines_max": 40}, "over 90 numbers"),
        ({"max_turns": 1}, "max_turns"),
        ({"demo_p_wrong": 1.5}, "shares"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        ShellEnvironment(options)
    assert "\n" not in str(caught.value)


def test_unknown_split_is_refused() -> None:
    with pytest.raises(UserError, match="expected one of train, eval, demo"):
        SHELL.prompt(1, split="test")


# ------------------------------------------------------------------------------------------------ episodes


def of_kind(environment: ShellEnvironment, kind: str, split: str = "train") -> Prompt:
    return next(p for i in range(10_000) if (p := environment.prompt(i, split=split)).label == kind)


@pytest.mark.parametrize("kind", ["len", "top", "end", "max", "who", "wlen", "wtop", "wmax"])
def test_the_plan_answers_every_kind_for_real(kind: str) -> None:
    async def scene(sandboxes: LocalSandboxes) -> None:
        prompt = of_kind(SHELL, kind)
        episode = SHELL.start(prompt, sandboxes, episode_id="e", seed=0)
        output = ""
        for command in prompt.data["plan"]:
            turn = await episode.step(command)
            assert not turn.done and [m.role for m in turn.messages] == ["tool"]
            output = turn.messages[0].content
            assert set(output) <= set(ALPHABET) and output
        assert output == prompt.data["answer"]
        turn = await episode.step(f"ans {output}")
        assert turn.done and turn.reward == 1.0
        await episode.close()
        await episode.close()

    play(scene)


def test_wrong_late_and_missing_answers_are_worth_nothing() -> None:
    async def scene(sandboxes: LocalSandboxes) -> None:
        prompt = of_kind(SHELL, "top")
        for answer in ("ans ", f"ans  {prompt.data['answer']}", f"ans {prompt.data['answer']}0", "ans 5 5"):
            turn = await SHELL.start(prompt, Untouched(), episode_id="e", seed=0).step(answer)
            assert turn.done and turn.reward == 0.0
        episode = SHELL.start(prompt, sandboxes, episode_id="f", seed=0)
        for _ in range(3):
            assert not (await episode.step("ls")).done
        turn = await episode.step("ls")  # the fourth message is the last
        assert turn.done and turn.reward == 0.0
        await episode.close()

    play(scene)


def test_short_outputs_are_over_the_alphabet_and_errors_are_a_question_mark() -> None:
    async def scene(sandboxes: LocalSandboxes) -> None:
        environment = ShellEnvironment({"max_turns": 50})
        prompt = of_kind(environment, "max")
        file = next(iter(prompt.data["files"]))
        episode = environment.start(prompt, sandboxes, episode_id="e", seed=0)

        async def run(command: str) -> str:
            return (await episode.step(command)).messages[0].content

        assert await run("nosuch") == "?"
        assert await run("cat nosuch") == "?"
        assert await run("sort nosuch|tail -n1") == "?"
        assert await run(f"sort nosuch {file}|tail -n1") == "?"
        assert await run("(") == "?"
        assert await run("") == "?"
        assert await run("true") == "?"
        assert await run("printf 'ABC~x\\303\\244y\\n\\n'") == "xy"
        assert len(await run("seq 100")) == 32
        assert await run("echo 1; false") == "?"
        assert await run(f"wc -l <{file}") == str(len(prompt.data["files"][file]))
        await episode.close()

    play(scene)


def test_natural_style_explains_itself_and_forgives_form() -> None:
    async def scene(sandboxes: LocalSandboxes) -> None:
        prompt = of_kind(NATURAL, "who")
        text = prompt.messages[0].content
        assert "grep -l" in text and "ans X" in text and f"has the number {prompt.data['argument']}" in text
        answer = prompt.data["answer"]
        for form in (
            f"ans {answer}",
            f"```\nans {answer}\n```",
            f"`ans {answer}`.",
            f"Answer: {answer}",
            f"ans: '{answer}'",
        ):
            turn = await NATURAL.start(prompt, Untouched(), episode_id="e", seed=0).step(form)
            assert turn.done and turn.reward == 1.0, form
        episode = NATURAL.start(prompt, sandboxes, episode_id="f", seed=0)
        turn = await episode.step(f"```bash\n$ grep -l {prompt.data['argument']} *\n```")
        assert turn.messages[0].role == "user" and turn.messages[0].content == f"{answer}\n(3 messages left)"
        turn = await episode.step("cat nosuch")
        assert "No such file" in turn.messages[0].content
        turn = await episode.step("true")
        assert "no output, exit code 0" in turn.messages[0].content
        await episode.close()

    play(scene)


# ------------------------------------------------------------------------------------------------ demonstrations


async def demonstrate(environment: ShellEnvironment, seed: int, sandboxes: LocalSandboxes) -> tuple[list[str], float]:
    prompt = environment.prompt(seed, split="demo")
    episode = environment.start(prompt, sandboxes, episode_id=f"d{seed}", seed=seed)
    texts: list[str] = []
    while (text := episode.demonstrate()) is not None:
        texts.append(text)
        turn = await episode.step(text)
        if turn.done:
            await episode.close()
            return texts, turn.reward
    raise AssertionError("a demonstration ends with an answer")


def test_demonstrations_are_noisy_short_and_repeatable() -> None:
    async def scene(sandboxes: LocalSandboxes) -> None:
        played = [await demonstrate(SHELL, seed, sandboxes) for seed in range(120)]
        assert await demonstrate(SHELL, 5, sandboxes) == played[5]
        rewards = [reward for _, reward in played]
        assert 0.1 < sum(rewards) / len(rewards) < 0.7
        for texts, _ in played:
            assert 1 < len(texts) <= 4 and texts[-1].startswith("ans ") and len(texts[-1]) > 4
            assert all(len(t) <= 15 and set(t) <= set(ALPHABET) for t in texts)  # a turn has 16 tokens
        commands = Counter(t.split()[0] for texts, _ in played for t in texts[:-1])
        assert set(commands) == {"ls", "wc", "head", "tail", "sort", "grep"}

    play(scene)


def test_demonstrations_without_noise_are_right() -> None:
    async def scene(sandboxes: LocalSandboxes) -> None:
        careful = ShellEnvironment({"demo_p_wrong": 0.0})
        played = [await demonstrate(careful, seed, sandboxes) for seed in range(16)]
        assert [reward for _, reward in played] == [1.0] * 16

    play(scene)
