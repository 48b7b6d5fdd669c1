"""How an assistant message says which command to run: the formats, by name, each with its inverse.

    text ─▶ reasoning cut off ─▶ a last line DONE taken off ─▶ commands found ─▶ Said(command, done) or a problem

`fenced` is a block of three backticks, which models without tools write. The others are calls of a tool `bash` with
one argument `command`, as the session's parsers of the same name read them (session/tool_formats.py).
A message holds one command, or the line DONE that ends the episode, or both, then the command runs first. Everything
else is told back to the model as a problem and never raises.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from miles_hpc.core.errors import UserError
from miles_hpc.rollout.session.tool_calls import ToolCall, load_tool_parser, parse_turn
from miles_hpc.rollout.session.turn import Tools

__all__ = ["DONE", "FORMATS", "CommandFormat", "Said", "command_format"]

#: The line that ends an episode.
DONE = "DONE"

_TOOL = "bash"
_TOOLS: Tools = [
    {
        "type": "function",
        "function": {
            "name": _TOOL,
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
        },
    }
]
_SHELLS = ("", "bash", "sh", "shell", "console", "terminal")
_FENCE = re.compile(r"^```([^\n`]*)\n(.*?)^```[ \t]*$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Said:
    """What a message means: a command, the end, both, or what is wrong with it."""

    command: str | None = None
    done: bool = False
    problem: str = ""


@dataclass(frozen=True, slots=True)
class CommandFormat:
    """One format. `find` gives a message's commands; ValueError says what is wrong. `say` is its inverse."""

    name: str
    role: str  # of the message that carries the output: user or tool
    find: Callable[[str], list[str]]
    say: Callable[[str], str]

    @property
    def how(self) -> str:
        """For the prompt."""
        return f"To run a command, reply with exactly one of this form:\n{self.say('ls -l')}"

    def read(self, text: str) -> Said:
        """The meaning of an assistant message; any text has one."""
        body = text[text.rfind("</think>") + len("</think>") :] if "</think>" in text else text
        *before, last = body.rstrip().splitlines() or [""]
        done = last.strip(" \t*`.") == DONE
        if done:
            body = "\n".join(before)
        try:
            commands = self.find(body)
            if len(commands) > 1:
                raise ValueError(f"{len(commands)} commands in one message; send one at a time")
            for command in commands:
                command.encode()  # a text may hold half a surrogate pair
        except ValueError as error:
            reason = "it isn't text" if isinstance(error, UnicodeError) else str(error)
            return Said(problem=f"That can't be run: {reason}. {self.how}")
        if commands:
            return Said(command=commands[0], done=done)
        return Said(done=True) if done else Said(problem=f"There is no command in that. {self.how}")


def command_format(name: str) -> CommandFormat:
    """The format of this name. Raises UserError."""
    if name not in FORMATS:
        raise UserError(f"environment.options.format = {name!r}: expected one of {', '.join(sorted(FORMATS))}")
    return FORMATS[name]


# ------------------------------------------------------------------------------------------------ finding commands


def _fenced(text: str) -> list[str]:
    blocks = [m for m in _FENCE.finditer(text) if m.group(1).strip().lower() in _SHELLS]
    if not blocks and re.search(r"^```", _FENCE.sub("\n", text), re.MULTILINE):
        raise ValueError("the block is not closed by a line of three backticks")
    return [block.group(2).removesuffix("\n") for block in blocks]


def _called(parser: str) -> Callable[[str], list[str]]:
    return lambda text: [_command_of(call) for call in parse_turn(load_tool_parser(parser), text, _TOOLS).calls]


def _command_of(call: ToolCall) -> str:
    if call.name != _TOOL:
        raise ValueError(f"there is no tool {call.name[:40]!r}, only {_TOOL}")
    command = call.arguments.get("command")
    if not isinstance(command, str):
        raise ValueError(f'{_TOOL} needs one argument, the text "command"')
    return command


# ------------------------------------------------------------------------------------------------ saying them


def _json(arguments: str) -> Callable[[str], str]:
    return lambda command: json.dumps({"name": _TOOL, arguments: {"command": command}}, ensure_ascii=False)


_CALLS: dict[str, Callable[[str], str]] = {
    "glm45": lambda c: f"<tool_call>{_TOOL}\n<arg_key>command</arg_key>\n<arg_value>{c}</arg_value>\n</tool_call>",
    "hermes": lambda c: f"<tool_call>\n{_json('arguments')(c)}\n</tool_call>",
    "llama3_json": lambda c: _json("parameters")(c),
    "mistral": lambda c: f"[TOOL_CALLS][{_json('arguments')(c)}]",
    "qwen25": lambda c: f"<tool_call>\n{_json('arguments')(c)}\n</tool_call>",
    "qwen3_coder": lambda c: (
        f"<tool_call>\n<function={_TOOL}>\n<parameter=command>\n{c}\n</parameter>\n</function>\n</tool_call>"
    ),
}

#: All formats by name.
FORMATS = {
    "fenced": CommandFormat("fenced", "user", _fenced, lambda command: f"```bash\n{command}\n```"),
    **{name: CommandFormat(name, "tool", _called(name), say) for name, say in _CALLS.items()},
}
