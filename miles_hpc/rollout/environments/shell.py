"""A small task with real shell commands: find a number or a file name in a folder of number files.

    prompt   wtop 17                      the first line of the file that has the line 17
    turn 0   grep -l 17 *                 executed by bash in the episode's sandbox
    output   c
    turn 1   head -n1 c
    output   42
    turn 2   ans 42                       compared with the answer: reward 1 or 0, no shaping

| kind | asks for | commands of the plan |
|---|---|---|
| len, top, end, max | number of lines, first line, last line, largest number of a file | one |
| who | the file that has a number | one |
| wlen, wtop, wmax | the same of the file that has a number | two |

Files are named a to f and hold distinct two-digit numbers over the whole folder; the largest of a file is never its
first or last line, so `head` or `tail` isn't a lucky `max`. Style `short` has prompts and outputs over the alphabet of
the character tokenizer and hides error texts (a failed command answers `?`); style `natural` explains the task in
words and shows outputs as they are.
"""

from __future__ import annotations

import random
import re
import zlib
from typing import Any, Literal

import msgspec

from miles_hpc.core.errors import UserError
from miles_hpc.core.types import ChatMessage, Prompt
from miles_hpc.rollout.environments.base import Environment, Episode, Sandboxes, Turn
from miles_hpc.rollout.environments.options import SPLITS, parse_options
from miles_hpc.rollout.session.tokenizer import ALPHABET

__all__ = ["ShellEnvironment", "ShellOptions"]

_NAMES = "abcdef"
_KINDS = ("len", "top", "end", "max", "who", "wlen", "wtop", "wmax")

_INSTRUCTIONS = """\
You are in a folder of small text files with one number per line. Answer a question about them with shell commands.
Reply with exactly one shell command per message and nothing else; its output comes back to you. Useful commands:
ls                    the file names
wc -l < a             how many lines file a has
head -n1 a            the first line of file a
tail -n1 a            the last line of file a
sort -n a | tail -n1  the largest number in file a
grep -l 17 *          which file has the number 17
When you know the answer X, reply: ans X
You have {turns} messages in all.

Question: {question}"""

_QUESTIONS = {
    "len": "How many lines does file {0} have?",
    "top": "What is the first number in file {0}?",
    "end": "What is the last number in file {0}?",
    "max": "What is the largest number in file {0}?",
    "who": "Which file has the number {0}?",
    "wlen": "How many lines does the file that has the number {0} have?",
    "wtop": "What is the first number in the file that has the number {0}?",
    "wmax": "What is the largest number in the file that has the number {0}?",
}


class ShellOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[environment.options]` of a run file."""

    style: Literal["short", "natural"] = "short"
    kinds: tuple[str, ...] = _KINDS
    files_min: int = 3
    files_max: int = 4
    lines_min: int = 3
    lines_max: int = 9
    max_turns: int = 4  # assistant messages, the answer included
    output_chars: int = 32  # an output is cut after so many characters (short) or ten times as many (natural)
    demo_p_wrong: float = 0.75  # share of demonstrated steps that are a random command
    demo_careless: float = 0.6  # after a wrong command: share that answers at once from its output


class ShellEnvironment(Environment):
    """See the module. Options are those of `ShellOptions`; unknown or impossible ones raise UserError."""

    name = "shell"

    def __init__(self, options: dict[str, Any] | None = None) -> None:
        self.options = parse_options(options, ShellOptions, self.name)
        o = self.options
        self.max_turns = o.max_turns
        if unknown := set(o.kinds) - set(_KINDS):
            raise UserError(f"environment.options.kinds: {sorted(unknown)}: expected some of {', '.join(_KINDS)}")
        if not (1 <= o.files_min <= o.files_max <= len(_NAMES) and 3 <= o.lines_min <= o.lines_max):
            raise UserError(
                "environment.options: expected 1 <= files_min <= files_max <= 6, 3 <= lines_min <= lines_max"
            )
        if o.files_max * o.lines_max > 90:
            raise UserError(f"environment.options: {o.files_max} files of {o.lines_max} lines need over 90 numbers")
        if not o.kinds or o.max_turns < 2 or o.output_chars < 2:
            raise UserError("environment.options: expected at least one kind, max_turns >= 2 and output_chars >= 2")
        if not (0 <= o.demo_p_wrong <= 1 and 0 <= o.demo_careless <= 1):
            raise UserError("environment.options: demo_p_wrong and demo_careless are shares between 0 and 1")

    def prompt(self, seed: int, *, split: str) -> Prompt:
        """The task of this seed. Tasks are dealt to splits by their own checksum: no task is in two splits."""
        if split not in SPLITS:
            raise UserError(f"split {split!r}: expected one of {', '.join(SPLITS)}")
        rng = random.Random(f"shell:{seed}")
        while True:
            data = self._draw(rng)
            if zlib.crc32(repr(data).encode()) % len(SPLITS) == SPLITS.index(split):
                break
        kind, argument = data["kind"], data["argument"]
        if self.options.style == "short":
            text = f"{kind} {argument}"
        else:
            text = _INSTRUCTIONS.format(turns=self.options.max_turns, question=_QUESTIONS[kind].format(argument))
        message = ChatMessage(role="user", content=text)
        return Prompt(environment=self.name, messages=(message,), data=data, label=kind, seed=seed)

    def start(self, prompt: Prompt, sandboxes: Sandboxes, *, episode_id: str, seed: int) -> Episode:
        return _ShellEpisode(self.options, prompt, sandboxes, episode_id, seed)

    def _draw(self, rng: random.Random) -> dict[str, Any]:
        o = self.options
        names = sorted(rng.sample(_NAMES, rng.randint(o.files_min, o.files_max)))
        numbers = [str(n) for n in rng.sample(range(10, 100), len(names) * o.lines_max)]
        files: dict[str, list[str]] = {}
        for name in names:
            lines, numbers = numbers[: (n := rng.randint(o.lines_min, o.lines_max))], numbers[n:]
            place, middle = lines.index(max(lines)), rng.randint(1, n - 2)
            lines[place], lines[middle] = lines[middle], lines[place]
            files[name] = lines
        kind, file = rng.choice(o.kinds), rng.choice(names)
        number = rng.choice(files[file])
        of_file = {
            "len": (f"wc -l <{file}", str(len(files[file]))),
            "top": (f"head -n1 {file}", files[file][0]),
            "end": (f"tail -n1 {file}", files[file][-1]),
            "max": (f"sort {file}|tail -n1", max(files[file])),
        }
        find = f"grep -l {number} *"
        if kind == "who":
            argument, answer, plan = number, file, [find]
        elif kind.startswith("w"):
            command, answer = of_file[kind[1:]]
            argument, plan = number, [find, command]
        else:
            command, answer = of_file[kind]
            argument, plan = file, [command]
        return {"files": files, "kind": kind, "argument": argument, "answer": answer, "plan": plan}


class _ShellEpisode(Episode):
    def __init__(self, options: ShellOptions, prompt: Prompt, sandboxes: Sandboxes, episode_id: str, seed: int) -> None:
        self._options = options
        self._data = prompt.data
        self._sandboxes = sandboxes
        self._id = episode_id
        self._created = False
        self._turns = 0
        # The demonstration's state.
        self._rng = random.Random(f"shell-demo:{prompt.seed}:{seed}")
        self._followed = 0  # steps of the plan that were taken
        self._give_answer = False
        self._output = ""

    async def step(self, text: str) -> Turn:
        self._turns += 1
        command, answer = self._parse(text)
        if answer is not None:
            return Turn(done=True, reward=1.0 if answer == self._data["answer"] else 0.0)
        if self._turns >= self._options.max_turns:
            return Turn(done=True, reward=0.0)
        self._output = await self._execute(command)
        if self._options.style == "short":
            return Turn(messages=(ChatMessage(role="tool", content=self._output),))
        left = self._options.max_turns - self._turns
        content = f"{self._output}\n({left} messages left)"
        return Turn(messages=(ChatMessage(role="user", content=content),))

    async def close(self) -> None:
        if self._created:
            self._created = False
            await self._sandboxes.destroy(self._id)

    def demonstrate(self) -> str | None:
        """A noisy script: follow the plan, but often take a random command, and often believe its output."""
        o, plan = self._options, self._data["plan"]
        if self._turns >= o.max_turns:
            return None
        if self._give_answer or self._followed == len(plan) or self._turns == o.max_turns - 1:
            return "ans " + (self._output.split("\n")[0].split(" ")[0] or "?")
        if self._rng.random() < o.demo_p_wrong:
            self._give_answer = self._rng.random() < o.demo_careless
            return self._random_command()
        self._followed += 1
        return str(plan[self._followed - 1])

    # ------------------------------------------------------------------------------------------- details

    def _parse(self, text: str) -> tuple[str, str | None]:
        """(command, answer or None). The natural style forgives code fences, a leading '$' and punctuation."""
        if self._options.style == "short":
            return text, text[4:] if text.startswith("ans ") else None
        fenced = re.search(r"```(?:\w*\n)?(.*?)```", text, re.DOTALL)
        body = (fenced.group(1) if fenced else text).strip().strip("`").strip()
        body = re.sub(r"^\$\s*", "", body)
        if found := re.match(r"ans(?:wer)?\b[:\s]*(\S+)", body, re.IGNORECASE):
            return body, found.group(1).strip("`'\".,")
        return body, None

    async def _execute(self, command: str) -> str:
        if not self._created:
            files = {name: "".join(f"{n}\n" for n in lines) for name, lines in self._data["files"].items()}
            await self._sandboxes.create(self._id, files)
            self._created = True
        short = self._options.style == "short"
        # Error texts would fill the short style's outputs. A single command that failed is seen by its exit code; in
        # what may be a pipeline or a list, the first line silences the others.
        quiet = short and re.search(r"[|&;\n(]", command)
        result = await self._sandboxes.execute(self._id, f"exec 2>/dev/null\n{command}" if quiet else command)
        if not short:
            text = result.output.strip()[: 10 * self._options.output_chars]
            return text or f"(no output, exit code {result.exit_code})"
        if result.exit_code != 0:
            return "?"
        text = "".join(c for c in result.output.strip() if c in ALPHABET)[: self._options.output_chars]
        return text or "?"

    def _random_command(self) -> str:
        rng, argument, names = self._rng, self._data["argument"], list(self._data["files"])
        file = rng.choice(names)
        if argument in names and rng.random() < 0.7:
            file = argument
        number = argument if argument.isdigit() and rng.random() < 0.7 else str(rng.randint(10, 99))
        return rng.choice(
            [
                "ls",
                f"wc -l <{file}",
                f"head -n1 {file}",
                f"tail -n1 {file}",
                f"sort {file}|tail -n1",
                f"grep -l {number} *",
            ]
        )
