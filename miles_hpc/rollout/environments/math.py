r"""Questions with answers from a data file: one assistant message, graded by rule (rollout/reward).

    {"input": "What is 3 + 4?", "label": "7", "metadata": {"rm_type": "math", "source": "sums"}}

| key (option that renames it) | content |
|---|---|
| input (input_key) | the question as a text, or a list of messages {"role", "content"} that ends with the user's |
| label (label_key) | the right answer, a text or a number |
| metadata (metadata_key), may be absent | a table for the reward; its `rm_type` goes before the option's |
| solution_key, "" = none | a worked solution: such rows can be demonstrations for the warm start |

The file is JSON Lines in UTF-8; empty lines are skipped, other keys are ignored. Names of options and keys are those of
Miles (`--prompt-data`, `--input-key`, ...). Prompts are drawn with replacement. Which rows are held out follows from
their questions alone: a row that is added moves no other, and a question that occurs twice is on one side. A question
of `eval_prompt_data` is never trained.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from miles_hpc.core.errors import UserError
from miles_hpc.core.types import ChatMessage, Prompt
from miles_hpc.rollout.environments.base import Environment, Episode, Sandboxes, Turn
from miles_hpc.rollout.environments.options import SPLITS, deal, parse_options, pick
from miles_hpc.rollout.reward.rules import Reward, resolve_reward, rm_type_of

__all__ = ["MathEnvironment", "MathOptions", "Row", "read_rows"]

_ROLES = ("system", "user", "assistant", "tool")


class MathOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[environment.options]` of a run file."""

    prompt_data: str  # the file to train on
    eval_prompt_data: str = ""  # a file to evaluate on; "" = `eval_share` of prompt_data
    input_key: str = "input"
    label_key: str = "label"
    metadata_key: str = "metadata"
    solution_key: str = ""
    report_key: str = ""  # key of the metadata that reports group by; "" = by rm_type
    rm_type: str = ""  # of rows that name none; a name of the table in reward/rules.py or module:function
    system: str = ""  # put before prompts that have no system message
    eval_share: float = 0.05  # of the questions, held out when there is no eval_prompt_data
    demo_share: float = 0.0  # of the questions, kept for demonstrations; needs solution_key


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a data file. `place` is its file's name and line number."""

    place: str
    messages: tuple[ChatMessage, ...]
    label: str | int | float
    metadata: dict[str, Any]
    rm_type: str
    solution: str

    @property
    def question(self) -> bytes:
        """What makes two rows the same question."""
        return msgspec.msgpack.encode([(m.role, m.content) for m in self.messages])


class MathEnvironment(Environment):
    """See the module. Options are those of `MathOptions`; bad ones and bad data files raise UserError with the line."""

    name = "math"
    path_options: ClassVar[tuple[str, ...]] = ("prompt_data", "eval_prompt_data")
    max_turns = 1

    def __init__(self, options: dict[str, Any] | None = None) -> None:
        self.options = o = parse_options(options, MathOptions, self.name)
        if not (0 <= o.eval_share < 1 and 0 <= o.demo_share < 1 and o.eval_share + o.demo_share < 1):
            raise UserError("environment.options: eval_share and demo_share are shares that leave some for training")
        if o.demo_share and not o.solution_key:
            raise UserError("environment.options.demo_share: demonstrations need solution_key, the key of solutions")
        self._rewards: dict[str, Reward] = {}
        held_out = self._read(o.eval_prompt_data) if o.eval_prompt_data else []
        questions = {row.question for row in held_out}
        self._rows: dict[str, list[Row]] = {split: [] for split in SPLITS}
        for row in self._read(o.prompt_data):
            if row.question in questions:
                continue
            split = deal(
                row.question,
                eval_share=0.0 if held_out else o.eval_share,
                demo_share=o.demo_share,
            )
            if split != "demo" or row.solution:
                self._rows[split].append(row)
        if held_out:
            self._rows["eval"] = held_out
        if not self._rows["train"]:
            raise UserError(f"environment.options.prompt_data: {o.prompt_data}: no question is left for training")

    def prompt(self, seed: int, *, split: str) -> Prompt:
        row = pick(self._rows, split, seed, "raise eval_share or demo_share, or give eval_prompt_data")
        label = (
            str(row.metadata.get(self.options.report_key) or row.rm_type) if self.options.report_key else row.rm_type
        )
        data = {
            "row": row.place,
            "label": row.label,
            "metadata": row.metadata,
            "rm_type": row.rm_type,
            "solution": row.solution,
        }
        return Prompt(environment=self.name, messages=row.messages, data=data, label=label, seed=seed)

    def start(self, prompt: Prompt, sandboxes: Sandboxes, *, episode_id: str, seed: int) -> Episode:
        return _MathEpisode(prompt, self._reward(prompt.data["rm_type"]))

    def _reward(self, rm_type: str) -> Reward:
        if rm_type not in self._rewards:
            self._rewards[rm_type] = resolve_reward(rm_type)
        return self._rewards[rm_type]

    def _read(self, path: str) -> list[Row]:
        """The rows of a file, each tried on its reward: a bad label shows now and not in the middle of a run."""
        rows = read_rows(Path(path), self.options)
        for row in rows:
            try:
                reward = self._reward(row.rm_type)
                if ":" not in row.rm_type:  # a user's own function may be slow or have effects
                    reward("", row.label, row.metadata)
            except UserError as error:
                raise UserError(f"{row.place}: {error}") from error
        return rows


class _MathEpisode(Episode):
    def __init__(self, prompt: Prompt, reward: Reward) -> None:
        self._data = prompt.data
        self._reward = reward
        self._said = False

    async def step(self, text: str) -> Turn:
        self._said = True
        return Turn(done=True, reward=self._reward(text, self._data["label"], self._data["metadata"]).reward)

    async def close(self) -> None:
        pass

    def demonstrate(self) -> str | None:
        return None if self._said else self._data["solution"] or None


# ------------------------------------------------------------------------------------------------ data files


def read_rows(path: Path, options: MathOptions) -> list[Row]:
    """All rows of a JSON Lines file, in order. Raises UserError that names the file, the line and what is wrong."""
    rows = []
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    rows.append(_row(line, f"{path.name}:{number}", options))
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"environment.options: {path}: {reason}: expected a JSON Lines file of questions") from error
    if not rows:
        raise UserError(f"environment.options: {path}: no questions in it: expected one JSON object per line")
    return rows


def _row(line: bytes, place: str, options: MathOptions) -> Row:
    try:
        data = msgspec.json.decode(line)
    except msgspec.DecodeError as error:
        raise UserError(f"{place}: not JSON: {error}: expected one JSON object per line") from error
    if not isinstance(data, dict):
        raise UserError(f"{place}: {_kind(data)}: expected a JSON object with {options.input_key}, {options.label_key}")
    for key, option in ((options.input_key, "input_key"), (options.label_key, "label_key")):
        if key not in data:
            raise UserError(
                f"{place}: no key '{key}', it has {', '.join(sorted(data)) or 'none'}: "
                f"set environment.options.{option} to the right one"
            )
    label = data[options.label_key]
    if isinstance(label, bool) or not isinstance(label, str | int | float):
        raise UserError(f"{place}: {options.label_key}: {_kind(label)}: expected a text or a number")
    metadata = data.get(options.metadata_key)
    if metadata is None:
        metadata = {}
    if not isinstance(metadata, dict):
        raise UserError(f"{place}: {options.metadata_key}: {_kind(metadata)}: expected an object")
    solution = data.get(options.solution_key, "") if options.solution_key else ""
    if not isinstance(solution, str):
        raise UserError(f"{place}: {options.solution_key}: {_kind(solution)}: expected a text")
    try:
        msgspec.msgpack.encode((label, metadata))
    except OverflowError as error:
        raise UserError(f"{place}: a number is beyond 64 bits: write it as a text") from error
    try:
        rm_type = rm_type_of(metadata, options.rm_type)
    except UserError as error:
        raise UserError(f"{place}: {error} as environment.options.rm_type") from error
    return Row(
        place=place,
        messages=_messages(data[options.input_key], f"{place}: {options.input_key}", options.system),
        label=label,
        metadata=metadata,
        rm_type=rm_type,
        solution=solution,
    )


def _messages(value: Any, where: str, system: str) -> tuple[ChatMessage, ...]:
    expected = 'expected a text, or a list of {"role": ..., "content": ...} that ends with the user\'s message'
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise UserError(f"{where}: {_kind(value)}: {expected}")
    messages = []
    for number, item in enumerate(value):
        role, content = (item.get("role"), item.get("content")) if isinstance(item, dict) else (None, None)
        if role not in _ROLES or not isinstance(content, str):
            raise UserError(f"{where}: message {number}: {expected}; roles are {', '.join(_ROLES)}")
        messages.append(ChatMessage(role=role, content=content))
    if messages[-1].role != "user" or not messages[-1].content.strip():
        raise UserError(f"{where}: the last message: {expected}")
    if system and messages[0].role != "system":
        messages.insert(0, ChatMessage(role="system", content=system))
    return tuple(messages)


def _kind(value: Any) -> str:
    """What a JSON value is, in words."""
    if value is None:
        return "null"
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false"}
    return names.get(type(value), "a number")
