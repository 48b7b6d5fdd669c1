"""What an assistant's text says: reasoning, content, tool calls. Nothing of the text gets lost on the way.

    text ── parser by name ──▶ pieces (their texts, joined, are the text) ──▶ ParsedTurn ──▶ the assistant's message

| piece | where it goes |
|---|---|
| text | content |
| reasoning | reasoning_content, without its marks |
| call | tool_calls: a name and arguments that are a JSON object |
| markup | nowhere: marks around calls and reasoning, and blank space between them |

A call that can't be read stays text: the client sees what the model wrote. Parsing decides what the client gets and
what its next request is compared with; the recorded tokens are the sampled ones, always. Formats: tool_formats.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from miles_hpc.core.registry import resolve
from miles_hpc.rollout.session.errors import ParserFailed
from miles_hpc.rollout.session.turn import Tools

__all__ = [
    "ParsedTurn",
    "Piece",
    "ToolCall",
    "ToolParser",
    "assistant_message",
    "load_tool_parser",
    "parse_turn",
    "split_reasoning",
]


@dataclass(frozen=True)
class ToolCall:
    """`arguments` is an object as JSON gives it."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Piece:
    """A stretch of the text and what it is. `calls` only for kind `call`; one stretch may hold several."""

    text: str
    kind: Literal["text", "reasoning", "call", "markup"] = "text"
    calls: tuple[ToolCall, ...] = ()


#: (text, the request's tools) -> pieces whose texts, joined, are the text. Called in the server's loop: must not wait.
ToolParser: TypeAlias = Callable[[str, Tools], Sequence[Piece]]


@dataclass(frozen=True)
class ParsedTurn:
    """One assistant turn as a client sees it."""

    content: str
    reasoning: str
    calls: tuple[ToolCall, ...]
    pieces: tuple[Piece, ...]


def load_tool_parser(name: str) -> ToolParser:
    """The parser of that name or dotted path; UserError when there is none."""
    parser: ToolParser = resolve("tool_parser", name)
    return parser


def parse_turn(parser: ToolParser, text: str, tools: Tools) -> ParsedTurn:
    """Raises ParserFailed when the parser raises, or gives pieces that aren't the text."""
    try:
        pieces = tuple(parser(text, tools))
        joined = "".join(piece.text for piece in pieces)
    except Exception as error:
        raise ParserFailed(f"tool parser raised {type(error).__name__}: {error}: mend it or name another") from error
    if joined != text:
        raise ParserFailed(
            f"tool parser gave back {len(joined)} of {len(text)} characters, or others: pieces must join to the text"
        )
    content = "".join(piece.text for piece in pieces if piece.kind == "text")
    calls = tuple(call for piece in pieces for call in piece.calls)
    if calls and not content.strip():
        content = ""  # the lines between calls
    return ParsedTurn(
        content=content,
        reasoning="".join(piece.text for piece in pieces if piece.kind == "reasoning"),
        calls=calls,
        pieces=pieces,
    )


def split_reasoning(text: str, opening: str = "<think>", closing: str = "</think>") -> tuple[list[Piece], str]:
    """Pieces of the reasoning in front, and the text after it.

    A turn may begin with the opening mark, or in the middle of reasoning when the template has opened it. Reasoning
    that was cut off goes to the end; without any mark there is none. Only blank space may stand before the opening.
    """
    before, opened, rest = text.partition(opening)
    if opened and before.strip():
        opened = ""  # a mark that the model speaks about
    start = len(before) + len(opened) if opened else 0
    end = text.find(closing, start)
    if end < 0 and not opened:
        return [], text
    body = text[start:] if end < 0 else text[start:end]
    rest = "" if end < 0 else text[end + len(closing) :]
    answer = rest.lstrip()
    inner = body.strip("\n")
    left = len(body) - len(body.lstrip("\n")) if inner else len(body)
    pieces = [
        Piece(text[:start] + body[:left], "markup"),
        Piece(inner, "reasoning"),
        Piece(body[left + len(inner) :] + ("" if end < 0 else closing) + rest[: len(rest) - len(answer)], "markup"),
    ]
    return [piece for piece in pieces if piece.text], answer


def assistant_message(parsed: ParsedTurn, call_ids: Sequence[str]) -> dict[str, Any]:
    """The turn in OpenAI's shape; `call_ids` has one id for each call.

    Arguments are written anew (one form for all formats), so that a client that parses them and writes them again with
    Python's defaults sends the recorded text back.
    """
    message: dict[str, Any] = {"role": "assistant", "content": parsed.content}
    if parsed.reasoning:
        message["reasoning_content"] = parsed.reasoning
    if parsed.calls:
        message["content"] = parsed.content or None
        message["tool_calls"] = [
            {
                "id": call_id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
            }
            for call, call_id in zip(parsed.calls, call_ids, strict=True)
        ]
    return message
