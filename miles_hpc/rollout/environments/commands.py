"""How an assistant message says which command to run: the formats, by name, each with its inverse.

| format | a command looks like | as |
|---|---|---|
| fenced | ```` ```bash ````, lines, ```` ``` ```` | most models without tools write it |
| qwen25 | `<tool_call>{"name": "bash", "arguments": {"command": "ls"}}</tool_call>` | Qwen2.5, Qwen3, Hermes |
| qwen3_coder | `<tool_call><function=bash><parameter=command>ls</parameter></function></tool_call>` | Qwen3-Coder |
| llama3 | `{"name": "bash", "parameters": {"command": "ls"}}` | Llama 3.1 and later, JSON tool calls |

The names are those of SGLang's `--tool-call-parser`, and so are the shapes (the models' chat templates define them);
`fenced` is ours. A line `DONE` outside of the command ends the episode after it. Reasoning up to `</think>` is left
out. A message holds one command; everything else is told back to the model as a problem and never raises.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from miles_hpc.core.errors import UserError

__all__ = ["DONE", "FORMATS", "CommandFormat", "Said", "command_format"]

#: The line that ends an episode.
DONE = "DONE"

_TOOL = "bash"
_SHELLS = ("", "bash", "sh", "shell", "console", "terminal")


@dataclass(frozen=True, slots=True)
class Said:
    """What a message means: a command, the end, both, or what is wrong with it."""

    command: str | None = None
    done: bool = False
    problem: str = ""


@dataclass(frozen=True, slots=True)
class CommandFormat:
    """One format. `find` gives the commands of a message and what is left of it; ValueError says what is wrong."""

    name: str
    how: str  # for the prompt
    role: str  # of the message that carries the output: user or tool
    find: Callable[[str], tuple[list[str], str]]
    say: Callable[[str], str]  # a message with this command

    def read(self, text: str) -> Said:
        """The meaning of an assistant message; any text has one."""
        body = text[text.rfind("</think>") + len("</think>") :] if "</think>" in text else text
        try:
            commands, rest = self.find(body)
            if len(commands) > 1:
                raise ValueError(f"{len(commands)} commands in one message; send one at a time")
            for command in commands:
                command.encode()  # JSON can spell half a surrogate pair
        except ValueError as error:
            reason = "it isn't text" if isinstance(error, UnicodeError) else str(error)
            return Said(problem=f"That can't be run: {reason}. {self.how}")
        done = any(line.strip(" \t\r*`.") == DONE for line in rest.splitlines())
        if commands:
            return Said(command=commands[0], done=done)
        return Said(done=True) if done else Said(problem=f"There is no command in that. {self.how}")


def command_format(name: str) -> CommandFormat:
    """The format of this name. Raises UserError."""
    if name not in FORMATS:
        raise UserError(f"environment.options.format = {name!r}: expected one of {', '.join(sorted(FORMATS))}")
    return FORMATS[name]


# ------------------------------------------------------------------------------------------------ finding commands

_FENCE = re.compile(r"^```([^\n`]*)\n(.*?)^```[ \t]*$", re.DOTALL | re.MULTILINE)
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_FUNCTION = re.compile(r"\s*<function=([^>\n]{1,100})>(.*)</function>\s*\Z", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]{1,100})>\n?(.*?)\n?</parameter>", re.DOTALL)


def _fenced(text: str) -> tuple[list[str], str]:
    commands = [m.group(2).removesuffix("\n") for m in _FENCE.finditer(text) if m.group(1).strip().lower() in _SHELLS]
    rest = _FENCE.sub("\n", text)
    if not commands and re.search(r"^```", rest, re.MULTILINE):
        raise ValueError("the block is not closed by a line of three backticks")
    return commands, rest


def _called(text: str, read: Callable[[str], str]) -> tuple[list[str], str]:
    rest = _CALL.sub("\n", text)
    if "<tool_call>" in rest:
        raise ValueError("<tool_call> is not closed")
    return [read(found) for found in _CALL.findall(text)], rest


def _json_command(text: str, arguments: str) -> str:
    """The command of a call in JSON, whose arguments may also be JSON in a text."""
    try:
        call = json.loads(text)
        given = call[arguments]
        table = json.loads(given) if isinstance(given, str) else given
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f'the call is not JSON with "name" and "{arguments}"') from error
    return _command_of(call.get("name"), table)


def _xml_command(text: str) -> str:
    call = _FUNCTION.match(text)
    if call is None:
        raise ValueError("the call is not <function=...>...</function>")
    return _command_of(call.group(1).strip(), dict(_PARAMETER.findall(call.group(2))))


def _command_of(name: Any, table: Any) -> str:
    if name != _TOOL:
        raise ValueError(f"there is no tool {str(name)[:40]!r}, only {_TOOL}")
    if not isinstance(table, dict) or not isinstance(table.get("command"), str):
        raise ValueError(f'{_TOOL} needs one argument, the text "command"')
    return str(table["command"])


def _llama3(text: str) -> tuple[list[str], str]:
    body = text.strip().removeprefix("<|python_tag|>").strip()
    if not body.startswith("{"):
        return [], text
    try:
        call, end = json.JSONDecoder().raw_decode(body)
    except (ValueError, RecursionError) as error:
        raise ValueError("the call is not JSON") from error
    return [_json_command(json.dumps(call), "parameters")], body[end:]


# ------------------------------------------------------------------------------------------------ the formats


def _call(arguments: str) -> Callable[[str], str]:
    return lambda command: json.dumps({"name": _TOOL, arguments: {"command": command}})


def _format(
    name: str, example: str, find: Callable[[str], tuple[list[str], str]], say: Callable[[str], str]
) -> CommandFormat:
    how = f"To run a command, reply with exactly one of this form:\n{example}"
    return CommandFormat(name=name, how=how, role="user" if name == "fenced" else "tool", find=find, say=say)


#: All formats by name.
FORMATS = {
    made.name: made
    for made in (
        _format("fenced", "```bash\nls -l\n```", _fenced, lambda command: f"```bash\n{command}\n```"),
        _format(
            "qwen25",
            f"<tool_call>\n{_call('arguments')('ls -l')}\n</tool_call>",
            lambda text: _called(text, lambda call: _json_command(call, "arguments")),
            lambda command: f"<tool_call>\n{_call('arguments')(command)}\n</tool_call>",
        ),
        _format(
            "qwen3_coder",
            f"<tool_call>\n<function={_TOOL}>\n<parameter=command>\nls -l\n</parameter>\n</function>\n</tool_call>",
            lambda text: _called(text, _xml_command),
            lambda command: (
                f"<tool_call>\n<function={_TOOL}>\n<parameter=command>\n{command}\n</parameter>\n"
                "</function>\n</tool_call>"
            ),
        ),
        _format("llama3", _call("parameters")("ls -l"), _llama3, _call("parameters")),
    )
}
