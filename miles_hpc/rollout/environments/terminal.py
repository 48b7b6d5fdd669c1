"""Terminal tasks from a folder on disk (terminal_task.py): an agent works in a sandbox, hidden tests give the reward.

    prompt        the task's instruction, how to run a command, what limits there are
    turn 0 ...    one command per message (commands.py), run in the sandbox; its output comes back, bounded
    end           a line DONE, the last message, or the agent's time is used up
    verdict       everything that still runs is killed, /tests and /logs are made anew from the task's own files,
                  the test script runs within its own time limit, and its reward is read

| hidden from the agent | how |
|---|---|
| tests | not in the sandbox before the agent has ended |
| solution, settings | never in it |

| the agent ... | reward |
|---|---|
| leaves files in /tests or /logs, or links in their place | they are gone before the tests run |
| leaves processes | they are killed before the tests run, and once more before the reward is read |
| makes the tests exceed their time, or ends the test script | 0 |
| makes the sandbox start anew (see SandboxHost), or leaves no room for the tests | 0 |

Not defended, as in the convention itself: a test that executes the agent's code gives it the tests' own rights, and a
process that such code starts may write the reward file last. A test should judge by what it reads, where it can, and
end what it has started. Of two reward files the lower one counts.

The agent's time counts its commands; what the model takes is bounded by rollout.trajectory_deadline_s, which has to
cover commands, model and tests together. rollout.max_turns must be at least `max_turns`: it ends a trajectory without
a verdict. What a command and a test may use is [sandbox] of the run file, whatever a task asks for. Sandboxes must be
isolated: without isolation there is no /app.
"""

from __future__ import annotations

import asyncio
import json
import math
import shlex
import signal
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, ClassVar, Literal

import msgspec

from miles_hpc.core.errors import DeadlineExpired, UserError
from miles_hpc.core.messages import SandboxResult
from miles_hpc.core.types import ChatMessage, Prompt, SandboxLimit
from miles_hpc.rollout.environments.base import Environment, Episode, Sandboxes, Turn
from miles_hpc.rollout.environments.commands import DONE, CommandFormat, command_format
from miles_hpc.rollout.environments.options import SPLITS, parse_options, pick
from miles_hpc.rollout.environments.terminal_task import TerminalTask, load_tasks, read_files
from miles_hpc.rollout.sandbox_files import TASK_FOLDER, SandboxFile

__all__ = ["TerminalEnvironment", "TerminalOptions", "read_reward"]

_PROMPT = """\
{instruction}

You work in a sandbox without network, in the folder {workdir}. {how}
Each command runs in a new shell in that folder: files stay, variables and cd do not. A command may take {timeout:g} \
seconds; you are shown up to {output} bytes of what it prints. You have {turns} messages in all. When you have \
finished, reply with a line that says only {done}."""

# What the agent is told of a bound that its command met; of the time it is told how much it had.
_LIMITS = {
    SandboxLimit.OUTPUT: "ended: endless output",
    SandboxLimit.CPU: "a process used up its CPU time",
    SandboxLimit.FILE: "a file reached the largest size",
    SandboxLimit.FOLDER: "the disk is full",
    SandboxLimit.PROCESSES: "as many processes as may be",
}

_REWARD_BYTES = 64 << 10
_TEST_OUTPUT_BYTES = 64 << 10


class TerminalOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[environment.options]` of a run file. Patterns are those of a shell, for names below the folder of tasks."""

    tasks: str  # a folder of task folders, or one task folder
    exclude_tasks: tuple[str, ...] = ()  # patterns of tasks that are left out, unread
    eval_tasks: tuple[str, ...] = ()  # patterns of tasks held out for evaluation
    demo_tasks: tuple[str, ...] = ()  # patterns of tasks whose solution is played for the warm start
    format: str = "fenced"  # how the model calls: a name of the table in commands.py
    max_turns: int = 20  # messages of the agent
    command_timeout_s: float = 30.0  # one command
    output_bytes: int = 4000  # of one command that the model is shown
    test_timeout_s: float = 600.0  # the tests, when the task allows them more
    task_files_mb: int = 8  # of a task's environment, and of its tests; [sandbox] folder_mb must be twice that
    report_by: Literal["category", "task"] = "category"  # what reports group by; tasks without category: their name
    strict: bool = False  # refuse tasks that ask for what a sandbox can't do, instead of a warning


class TerminalEnvironment(Environment):
    """See the module. Options are those of `TerminalOptions`; bad ones and bad tasks raise UserError."""

    name = "terminal"
    path_options: ClassVar[tuple[str, ...]] = ("tasks",)

    def __init__(self, options: dict[str, Any] | None = None) -> None:
        self.options = o = parse_options(options, TerminalOptions, self.name)
        self._format = command_format(o.format)
        if o.max_turns < 1 or o.output_bytes < 1 or o.task_files_mb < 1:
            raise UserError("environment.options: expected max_turns, output_bytes and task_files_mb of at least 1")
        for key in ("command_timeout_s", "test_timeout_s"):
            if not 0 < getattr(o, key) < math.inf:
                raise UserError(f"environment.options.{key} = {getattr(o, key)}: expected seconds, more than 0")
        self.max_turns = o.max_turns
        self._tasks = {
            task.name: task
            for task in load_tasks(Path(o.tasks), exclude=o.exclude_tasks, max_bytes=o.task_files_mb << 20)
        }
        self.episode_s = max(t.agent_timeout_s + min(t.test_timeout_s, o.test_timeout_s) for t in self._tasks.values())
        self._splits = self._deal()
        self.warnings = tuple(
            f"terminal task '{task.name}': not applied: {', '.join(task.not_applied)}"
            for task in self._tasks.values()
            if task.not_applied
        )
        if o.strict and self.warnings:
            raise UserError(
                f"environment.options.strict: {self.warnings[0]}; leave such tasks out, or set strict = false"
            )

    def prompt(self, seed: int, *, split: str) -> Prompt:
        o = self.options
        task = pick(self._splits, split, seed, f"name some in {split}_tasks")
        text = _PROMPT.format(
            instruction=task.instruction,
            workdir=task.workdir,
            how=self._format.how,
            timeout=o.command_timeout_s,
            output=o.output_bytes,
            turns=o.max_turns,
            done=DONE,
        )
        label = task.category if o.report_by == "category" and task.category else task.name
        message = ChatMessage(role="user", content=text)
        return Prompt(environment=self.name, messages=(message,), data={"task": task.name}, label=label, seed=seed)

    def start(self, prompt: Prompt, sandboxes: Sandboxes, *, episode_id: str, seed: int) -> Episode:
        task = self._tasks.get(prompt.data["task"])
        if task is None:
            raise UserError(f"no terminal task '{prompt.data['task']}' in {self.options.tasks}: it was there before")
        return _TerminalEpisode(self.options, self._format, task, sandboxes, episode_id)

    def _deal(self) -> dict[str, list[TerminalTask]]:
        o = self.options
        splits: dict[str, list[TerminalTask]] = {split: [] for split in SPLITS}
        patterns = [(pattern, "eval") for pattern in o.eval_tasks] + [(pattern, "demo") for pattern in o.demo_tasks]
        for task in self._tasks.values():
            where = {split for pattern, split in patterns if fnmatchcase(task.name, pattern)}
            if len(where) > 1:
                raise UserError(f"environment.options: task '{task.name}' is in eval_tasks and in demo_tasks")
            if where == {"demo"} and not task.solution:
                raise UserError(f"environment.options.demo_tasks: '{task.name}' has no solution of a single script")
            splits[where.pop() if where else "train"].append(task)
        for pattern, split in patterns:
            if not any(fnmatchcase(name, pattern) for name in self._tasks):
                raise UserError(f"environment.options.{split}_tasks: no task is called {pattern!r}")
        return splits


class _TerminalEpisode(Episode):
    def __init__(
        self, options: TerminalOptions, form: CommandFormat, task: TerminalTask, sandboxes: Sandboxes, episode_id: str
    ) -> None:
        self._options = options
        self._format = form
        self._task = task
        self._sandboxes = sandboxes
        self._id = episode_id
        self._created = False
        self._turns = 0
        self._left_s = task.agent_timeout_s

    async def step(self, text: str) -> Turn:
        self._turns += 1
        if not self._created:
            await self._set_up()
        said = self._format.read(text)
        reply = said.problem
        if said.command is not None:
            timeout_s = min(self._options.command_timeout_s, self._left_s)
            result = await self._run(said.command, {}, timeout_s, self._options.output_bytes)
            self._left_s -= result.duration_s
            if result.anew:
                return Turn(done=True, reward=0.0)
            reply = self._shown(result, timeout_s)
        left = self._options.max_turns - self._turns
        if said.done or left <= 0 or self._left_s <= 0:
            return Turn(done=True, reward=await self._verdict())
        content = f"{reply}\n({left} message{'s' if left > 1 else ''} left)"
        return Turn(messages=(ChatMessage(role=self._format.role, content=content),))

    async def close(self) -> None:
        if self._created:
            self._created = False
            await self._sandboxes.destroy(self._id)

    def demonstrate(self) -> str | None:
        """The task's own solution in one command, then the end."""
        if not self._task.solution or self._turns > 1 or self._options.max_turns < 2:
            return None
        return self._format.say(self._task.solution.rstrip()) if self._turns == 0 else DONE

    # ------------------------------------------------------------------------------------------- details

    async def _set_up(self) -> None:
        task = self._task
        files = await asyncio.to_thread(read_files, task.files)
        self._created = True  # before it is: whoever cancels this must be able to destroy it
        await self._sandboxes.create(self._id, {})
        # First, because it is refused where there is no isolation, and with it all that follows.
        logs = {"logs/agent/.keep": SandboxFile(b"")}
        results = [
            await self._sandboxes.put(self._id, TASK_FOLDER, logs, replace=True),
            await self._sandboxes.put(self._id, "", files),
            await self._sandboxes.execute(self._id, f"mkdir -p -- {shlex.quote(task.workdir)}", timeout_s=30.0),
        ]
        if any(result.exit_code != 0 for result in results):
            said = " ".join("".join(result.output for result in results).split())[:200]
            raise UserError(f"terminal task '{task.name}': its files don't go into a sandbox: {said or 'no room'}")

    async def _run(self, command: str, env: Mapping[str, str], timeout_s: float, max_bytes: int) -> SandboxResult:
        exports = "".join(f"export {key}={shlex.quote(value)}\n" for key, value in {**self._task.env, **env}.items())
        command = f"cd -- {shlex.quote(self._task.workdir)} || exit\n{exports}{command}"
        return await self._sandboxes.execute(self._id, command, timeout_s=timeout_s, max_output_bytes=max_bytes)

    def _shown(self, result: SandboxResult, timeout_s: float) -> str:
        notes = [f"exit code {result.exit_code}"]
        if result.timed_out:
            notes = [f"ended after {timeout_s:.0f} s"]
        if result.truncated:
            notes.append(f"only the first {self._options.output_bytes} bytes are shown")
        if result.limit in _LIMITS:
            notes.append(_LIMITS[result.limit])
        output = result.output.rstrip("\n")
        return f"{output}\n[{'; '.join(notes)}]" if output else f"[no output; {'; '.join(notes)}]"

    async def _verdict(self) -> float:
        """Run the tests as the task has them and read what they say."""
        task = self._task
        files = await asyncio.to_thread(read_files, task.tests)
        hidden = {f"tests/{place}": file for place, file in files.items()}
        hidden["logs/verifier/.keep"] = SandboxFile(b"")
        put = await self._sandboxes.put(self._id, TASK_FOLDER, hidden, replace=True)
        if put.timed_out:  # nothing of the agent runs any more, so it isn't the agent's doing
            raise DeadlineExpired(
                f"terminal task '{task.name}': its tests were not written after {put.duration_s:.0f} s"
            )
        if put.exit_code != 0 or put.anew:
            return 0.0
        # Python would import what an agent has put below its home.
        env = {"TEST_DIR": "/tests", "PYTHONNOUSERSITE": "1", **task.test_env}
        script = shlex.quote(f"/tests/{task.test_script}")
        timeout_s = min(self._options.test_timeout_s, task.test_timeout_s)
        result = await self._run(f"exec bash {script}", env, timeout_s, _TEST_OUTPUT_BYTES)
        if result.timed_out or result.anew or 128 < result.exit_code <= 128 + signal.NSIG:
            return 0.0
        if not task.has_reward_file:
            return 1.0 if result.exit_code == 0 else 0.0
        rewards = []
        for name in ("reward.json", "reward.txt"):
            data = await self._sandboxes.get(self._id, f"/logs/verifier/{name}", _REWARD_BYTES)
            reward = None if data is None else read_reward(name, data)
            if reward is not None:
                rewards.append(reward)
        return min(rewards, default=0.0)  # one of them may be the doing of the agent's code, which the tests have run


def read_reward(name: str, data: bytes) -> float | None:
    """The reward in a verifier's file; None for what isn't a finite number.

    `reward.txt` holds a number; `reward.json` is {"reward": number}, or a table of one number under another name.
    """
    try:
        value: Any = data.decode()
        if name.endswith(".json"):
            value = json.loads(value)
            if isinstance(value, dict):
                value = value["reward"] if "reward" in value or len(value) != 1 else next(iter(value.values()))
            if isinstance(value, bool | str):
                return None
        reward = float(value)
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
        return None
    return reward if math.isfinite(reward) else None
