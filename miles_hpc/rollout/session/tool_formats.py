"""How models write tool calls: one parser per format, all of them over `tool_calls.Piece`.

| name | a call | sources: the models' public chat templates |
|---|---|---|
| `hermes`, `qwen25` | `<tool_call>{"name": .., "arguments": {..}}</tool_call>` | Hermes, Qwen |
| `qwen3_coder` | `<tool_call><function=f><parameter=p>v</parameter></function></tool_call>` | Qwen3-Coder |
| `llama3_json` | `<|python_tag|>{"name": .., "parameters": {..}}`, or the object alone; `;` between several | Llama 3 |
| `mistral` | `[TOOL_CALLS][{"name": .., "arguments": {..}}]`, `..f[ARGS]{..}`, `..f{..}` | Mistral |
| `glm45` | `<tool_call>f<arg_key>p</arg_key><arg_value>v</arg_value></tool_call>` | GLM 4.5 to 4.7 |
| `deepseek` | `<｜tool▁call▁begin｜>f<｜tool▁sep｜>{..}` and its end mark, V3's JSON fence | DeepSeek |
| `none` | none: all is content | |

Formats without types (`qwen3_coder`, `glm45`) take a parameter as text when the tool's schema says `string` or nothing,
else as JSON where it is such. A call is an object with a name that isn't empty; everything else stays text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from miles_hpc.rollout.session.tool_calls import Piece, ToolCall, split_reasoning
from miles_hpc.rollout.session.turn import Tools

__all__ = ["deepseek", "glm45", "hermes", "llama3_json", "mistral", "none", "qwen3_coder"]

# A mark that is never closed must not make the next one's search begin again at its own: these patterns stop there, so
# that a text of nothing but opening marks takes linear time.
_BLOCK = re.compile(r"<tool_call>((?:(?!<tool_call>).)*?)</tool_call>", re.DOTALL)
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>(.*?)</parameter>\s*", re.DOTALL)
_GLM_HEAD = re.compile(r"\s*([^\s<]+)\s*")
_GLM_ARGUMENT = re.compile(r"\s*<arg_key>([^<]*)</arg_key>\s*<arg_value>((?:(?!</?arg_).)*)</arg_value>\s*", re.DOTALL)
_DEEPSEEK_CALL = re.compile(
    r"<｜tool▁call▁begin｜>((?:(?!<｜tool▁(?:call▁begin|sep)｜>).)*)<｜tool▁sep｜>"
    r"((?:(?!<｜tool▁call▁begin｜>).)*?)<｜tool▁call▁end｜>",
    re.DOTALL,
)
_DEEPSEEK_FRAME = re.compile(r"<｜tool▁calls▁begin｜>|<｜tool▁calls▁end｜>")
_FENCE = re.compile(r"([^\n]*)\n```json\n(.*)\n```\s*", re.DOTALL)
_PYTHON_TAG = "<|python_tag|>"
_MISTRAL_MARK = "[TOOL_CALLS]"
_SPACE = re.compile(r"\s*")
_MISTRAL_NAMED = re.compile(r"([^\s\[\]{}]+)(?:\[CALL_ID\][^\[\]{}]*)?(?:\[ARGS\])?\s*(?=\{)")


def none(text: str, tools: Tools) -> list[Piece]:
    """All of it is content."""
    return [Piece(text)] if text else []


def hermes(text: str, tools: Tools) -> list[Piece]:
    """JSON in `<tool_call>` marks."""
    return _blocks(text, _BLOCK, lambda match: _json_call(match[1], "arguments"))


def qwen3_coder(text: str, tools: Tools) -> list[Piece]:
    """Function and parameter marks in `<tool_call>` marks."""

    def call(match: re.Match[str]) -> ToolCall | None:
        function = _FUNCTION.fullmatch(match[1])
        if function is None:
            return None
        fields = _all_of(_PARAMETER, function[2])
        if fields is None:
            return None
        # One line break on either side belongs to the marks.
        named = [(key.strip(), value.removeprefix("\n").removesuffix("\n")) for key, value in fields]
        return _typed_call(function[1].strip(), named, tools)

    return _blocks(text, _BLOCK, call)


def glm45(text: str, tools: Tools) -> list[Piece]:
    """A name and pairs of key and value marks in `<tool_call>` marks."""

    def call(match: re.Match[str]) -> ToolCall | None:
        head = _GLM_HEAD.match(match[1])
        fields = None if head is None else _all_of(_GLM_ARGUMENT, match[1][head.end() :])
        if head is None or fields is None:
            return None
        return _typed_call(head[1], [(key.strip(), value) for key, value in fields], tools)

    return _blocks(text, _BLOCK, call)


def deepseek(text: str, tools: Tools) -> list[Piece]:
    """Calls between DeepSeek's own marks, JSON with or without a fence."""

    def call(match: re.Match[str]) -> ToolCall | None:
        fenced = _FENCE.fullmatch(match[2])  # V3 has the call's type in front and the name behind
        name, arguments = (fenced[1], fenced[2]) if fenced is not None else (match[1], match[2])
        return _call(name.strip(), _whole_json(arguments))

    pieces = _blocks(text, _DEEPSEEK_CALL, call)
    if not any(piece.calls for piece in pieces):
        return pieces
    framed: list[Piece] = []
    for piece in pieces:
        framed += _without(piece, _DEEPSEEK_FRAME) if piece.kind == "text" else [piece]
    return framed


def llama3_json(text: str, tools: Tools) -> list[Piece]:
    """One JSON object, or several with semicolons, as the whole turn or after `<|python_tag|>`."""
    before, mark, rest = text.partition(_PYTHON_TAG)
    if not mark:
        before, rest = "", text
    calls: list[ToolCall] = []
    for value in _objects(rest, ";") or ():
        call = _named(value, "parameters") or _named(value, "arguments")
        if call is None:
            break
        calls.append(call)
    else:
        if calls:
            return _filled(Piece(before), Piece(mark + rest, "call", tuple(calls)))
    return none(text, tools)


def mistral(text: str, tools: Tools) -> list[Piece]:
    """Everything from `[TOOL_CALLS]` on: a list of calls, or a name with its arguments behind each mark."""
    thoughts, answer = split_reasoning(text, "[THINK]", "[/THINK]")
    before, *parts = answer.split(_MISTRAL_MARK)
    pieces = [*thoughts, Piece(before)]
    for part in parts:
        calls = _mistral_calls(part)
        kept = part.rstrip() if calls else part
        pieces.append(Piece(_MISTRAL_MARK + kept, "call" if calls else "text", calls))
        pieces.append(Piece(part[len(kept) :], "markup"))
    return _filled(*pieces)


# ------------------------------------------------------------------------------------------------ details


def _blocks(text: str, pattern: re.Pattern[str], read: Callable[[re.Match[str]], ToolCall | None]) -> list[Piece]:
    """Reasoning in front, then text and the calls that `read` finds in the pattern's matches."""
    pieces, answer = split_reasoning(text)
    position = 0
    for match in pattern.finditer(answer):
        call = read(match)
        if call is None:
            continue
        pieces.append(Piece(answer[position : match.start()]))
        pieces.append(Piece(match[0], "call", (call,)))
        position = match.end()
    return _filled(*pieces, Piece(answer[position:]))


def _filled(*pieces: Piece) -> list[Piece]:
    return [piece for piece in pieces if piece.text]


def _without(piece: Piece, marks: re.Pattern[str]) -> list[Piece]:
    """The text piece with its marks apart."""
    pieces, position = [], 0
    for match in marks.finditer(piece.text):
        pieces += [Piece(piece.text[position : match.start()]), Piece(match[0], "markup")]
        position = match.end()
    return _filled(*pieces, Piece(piece.text[position:]))


def _all_of(pattern: re.Pattern[str], text: str) -> list[tuple[str, str]] | None:
    """Groups 1 and 2 of matches that cover all of `text`; None when something else stands there."""
    found, position = [], 0
    while position < len(text):
        match = pattern.match(text, position)
        if match is None:
            return found if not text[position:].strip() else None
        found.append((match[1], match[2]))
        position = match.end()
    return found


def _whole_json(text: str) -> Any:
    """The value, or None for what isn't one JSON value with distinct meaning in every reader."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None


def _refuse(constant: str) -> Any:
    raise ValueError(constant)  # NaN and Infinity are Python's, not JSON's


_DECODER = json.JSONDecoder(parse_constant=_refuse)


def _objects(text: str, separator: str) -> list[Any] | None:
    """JSON values with `separator` between them; None when the text is something else."""
    values: list[Any] = []
    position = _after_space(text, 0)
    while True:
        try:
            value, position = _DECODER.raw_decode(text, position)
        except (ValueError, RecursionError):
            return None
        values.append(value)
        position = _after_space(text, position)
        if position == len(text):
            return values
        if not text.startswith(separator, position):
            return None
        position = _after_space(text, position + len(separator))


def _after_space(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    return position if match is None else match.end()


def _call(name: Any, arguments: Any) -> ToolCall | None:
    """Also None for what JSON in UTF-8 can't write (huge numbers, half characters): nobody could send it back."""
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    try:
        json.dumps([name, arguments], allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return ToolCall(name, arguments)


def _named(value: Any, key: str) -> ToolCall | None:
    return _call(value.get("name"), value.get(key)) if isinstance(value, Mapping) else None


def _json_call(text: str, key: str) -> ToolCall | None:
    return _named(_whole_json(text), key)


def _mistral_calls(text: str) -> tuple[ToolCall, ...]:
    value = _whole_json(text)
    if isinstance(value, list) and value:
        calls = [_named(item, "arguments") for item in value]
        return tuple(call for call in calls if call is not None) if all(calls) else ()
    head = _MISTRAL_NAMED.match(text.lstrip())
    call = None if head is None else _call(head[1], _whole_json(text.lstrip()[head.end() :]))
    return () if call is None else (call,)


def _typed_call(name: str, fields: list[tuple[str, str]], tools: Tools) -> ToolCall | None:
    """Text becomes what the tool's schema says. A key that stands there twice can't be kept: no call."""
    types = _types(name, tools)
    arguments = {key: _typed(value, types.get(key)) for key, value in fields}
    return _call(name, arguments) if len(arguments) == len(fields) else None


def _types(name: str, tools: Tools) -> Mapping[str, Any]:
    for tool in tools:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if isinstance(function, Mapping) and function.get("name") == name:
            parameters = function.get("parameters")
            properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
            if isinstance(properties, Mapping):
                return {k: v.get("type") for k, v in properties.items() if isinstance(v, Mapping)}
    return {}


def _typed(text: str, kind: Any) -> Any:
    if kind is None or kind == "string":
        return text
    value = _whole_json(text)
    if value is None and text.strip() != "null":
        return text
    return text if isinstance(kind, list) and "string" in kind and not isinstance(value, dict | list) else value
