"""Tool calls in every format; broken ones stay text; whatever the text is, nothing of it is lost."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_hpc.core.errors import UserError
from miles_hpc.core.registry import names
from miles_hpc.rollout.session.errors import ParserFailed
from miles_hpc.rollout.session.tool_calls import (
    Piece,
    ToolCall,
    assistant_message,
    load_tool_parser,
    parse_turn,
    split_reasoning,
)
from tests.exploring import examples

FORMATS = ("deepseek", "glm45", "hermes", "llama3_json", "mistral", "none", "qwen25", "qwen3_coder")
SCHEMA = {
    "run": {
        "command": {"type": "string"},
        "n": {"type": "integer"},
        "env": {"type": "object"},
        "x": {"type": "number"},
    },
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}
    for name, properties in SCHEMA.items()
]
LS = ToolCall("run", {"command": "ls"})
BEGIN, SEP, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"

# format, text, content, calls
GOOD: list[tuple[str, str, str, list[ToolCall]]] = [
    ("hermes", '<tool_call>\n{"name": "run", "arguments": {"command": "ls"}}\n</tool_call>', "", [LS]),
    ("hermes", 'I look.\n<tool_call>{"name":"run","arguments":{"command":"ls"}}</tool_call>', "I look.\n", [LS]),
    (
        "qwen25",
        '<tool_call>{"name": "run", "arguments": {"command": "ls"}}</tool_call>\n'
        '<tool_call>{"name": "f", "arguments": {}}</tool_call>',
        "",
        [LS, ToolCall("f", {})],
    ),
    (
        "hermes",
        'a <tool_call>{"name": 1}</tool_call> b <tool_call>{"name": "run", "arguments": {"command": "ls"}}</tool_call>',
        'a <tool_call>{"name": 1}</tool_call> b ',
        [LS],
    ),
    (
        "hermes",
        '<tool_call>\n{"na<tool_call>{"name": "run", "arguments": {"command": "ls"}}</tool_call>',
        '<tool_call>\n{"na',
        [LS],
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=run>\n<parameter=command>\nls\n</parameter>\n</function>\n</tool_call>",
        "",
        [LS],
    ),
    (
        "qwen3_coder",
        "do\n<tool_call>\n<function=run>\n<parameter=command>\na\n\nb\n</parameter>\n<parameter=n>\n3\n</parameter>\n"
        '<parameter=env>\n{"A": [1]}\n</parameter>\n<parameter=x>\nmany\n</parameter>\n</function>\n</tool_call>',
        "do\n",
        [ToolCall("run", {"command": "a\n\nb", "n": 3, "env": {"A": [1]}, "x": "many"})],
    ),
    (
        "qwen3_coder",
        "<tool_call><function=other><parameter=n>3</parameter></function></tool_call>",
        "",
        [ToolCall("other", {"n": "3"})],  # no schema: text
    ),
    ("qwen3_coder", "<tool_call><function=stop></function></tool_call>", "", [ToolCall("stop", {})]),
    ("llama3_json", '{"name": "run", "parameters": {"command": "ls"}}', "", [LS]),
    ("llama3_json", '<|python_tag|>{"name": "run", "parameters": {"command": "ls"}}', "", [LS]),
    (
        "llama3_json",
        'so <|python_tag|>{"name": "run", "arguments": {"command": "ls"}}; {"name": "f", "parameters": {}}\n',
        "so ",
        [LS, ToolCall("f", {})],
    ),
    ("mistral", '[TOOL_CALLS][{"name": "run", "arguments": {"command": "ls"}}]', "", [LS]),
    ("mistral", 'yes [TOOL_CALLS]run[ARGS]{"command": "ls"}[TOOL_CALLS]f{}', "yes ", [LS, ToolCall("f", {})]),
    ("mistral", '[TOOL_CALLS]run[CALL_ID]123456789[ARGS]{"command": "ls"}', "", [LS]),
    ("glm45", "<tool_call>run\n<arg_key>command</arg_key>\n<arg_value>ls</arg_value>\n</tool_call>", "", [LS]),
    (
        "glm45",
        "ok<tool_call>run<arg_key>n</arg_key><arg_value>3</arg_value><arg_key>command</arg_key>"
        "<arg_value>1</arg_value></tool_call>",
        "ok",
        [ToolCall("run", {"n": 3, "command": "1"})],
    ),
    ("glm45", "<tool_call>stop</tool_call>", "", [ToolCall("stop", {})]),
    (
        "deepseek",
        f'hm<｜tool▁calls▁begin｜>{BEGIN}run{SEP}{{"command": "ls"}}{END}<｜tool▁calls▁end｜>',
        "hm",
        [LS],
    ),
    (
        "deepseek",
        f'<｜tool▁calls▁begin｜>{BEGIN}function{SEP}run\n```json\n{{"command": "ls"}}\n```{END}\n'
        f"{BEGIN}function{SEP}f\n```json\n{{}}\n```{END}<｜tool▁calls▁end｜>",
        "",
        [LS, ToolCall("f", {})],
    ),
    ("none", '<tool_call>{"name": "run", "arguments": {}}</tool_call>', None, []),  # type: ignore[list-item]
]

# format, text that looks like a call and isn't one
BROKEN = [
    ("hermes", '<tool_call>{"name": "run", "arguments": {"command": "ls"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "run", "arguments": "ls"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "run", "arguments": {"x": NaN}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "run", "arguments": {"x": 1e999}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "run", "arguments": {"x": "\\ud800"}}</tool_call>'),
    ("hermes", "<tool_call>" + "[" * 100_000 + "</tool_call>"),
    ("hermes", '<tool_call>{"name": "run", "arguments": {}}'),
    ("qwen3_coder", "<tool_call><function=run><parameter=a>1</parameter>"),
    ("qwen3_coder", "<tool_call><function=run>text</function></tool_call>"),
    (
        "qwen3_coder",
        "<tool_call><function=f><parameter=a>1</parameter><parameter=a>2</parameter></function></tool_call>",
    ),
    ("llama3_json", '{"name": "run"}'),
    ("llama3_json", '{"name": "run", "parameters": {}} and more'),
    ("llama3_json", "[1]"),
    ("mistral", '[TOOL_CALLS][{"name": "run"}]'),
    ("mistral", "[TOOL_CALLS]run[ARGS]{"),
    ("glm45", "<tool_call></tool_call>"),
    ("glm45", "<tool_call>run<arg_key>n</arg_key></tool_call>"),
    ("deepseek", f"<｜tool▁calls▁begin｜>{BEGIN}run{SEP}ls{END}<｜tool▁calls▁end｜>"),
]


@pytest.mark.parametrize(("name", "text", "content", "calls"), GOOD)
def test_calls_are_found(name: str, text: str, content: str | None, calls: list[ToolCall]) -> None:
    parsed = parse_turn(load_tool_parser(name), text, TOOLS)
    assert (parsed.content, list(parsed.calls)) == (text if content is None else content, calls)
    assert "".join(piece.text for piece in parsed.pieces) == text


@pytest.mark.parametrize(("name", "text"), BROKEN)
def test_what_is_no_call_stays_text(name: str, text: str) -> None:
    parsed = parse_turn(load_tool_parser(name), text, TOOLS)
    assert parsed.calls == ()
    assert parsed.content == text


# text, reasoning, the rest
REASONING = [
    ("<think>\nwhy\n</think>\n\nso", "why", "so"),
    ("why</think>so", "why", "so"),  # the template opened it
    ("<think>cut", "cut", ""),
    ("<think>\n\n</think>\n\nso", "", "so"),
    (" \n<think>a</think>b</think>c", "a", "b</think>c"),
    ("plain", "", "plain"),
    ("say <think> and go on", "", "say <think> and go on"),
    ("", "", ""),
]


@pytest.mark.parametrize(("text", "reasoning", "rest"), REASONING)
def test_reasoning_stands_apart(text: str, reasoning: str, rest: str) -> None:
    pieces, answer = split_reasoning(text)
    assert "".join(piece.text for piece in pieces) + answer == text
    assert "".join(piece.text for piece in pieces if piece.kind == "reasoning") == reasoning
    assert answer == rest


def test_message_of_a_turn() -> None:
    text = '<think>w</think>go<tool_call>{"arguments":{"b":1.0,"a":"é"},"name":"f"}</tool_call>'
    parsed = parse_turn(load_tool_parser("hermes"), text, [])
    assert assistant_message(parsed, ["c1"]) == {
        "role": "assistant",
        "content": "go",
        "reasoning_content": "w",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"b": 1.0, "a": "é"}'}},
        ],
    }
    plain = assistant_message(parse_turn(load_tool_parser("none"), "", []), [])
    assert plain == {"role": "assistant", "content": ""}


MARKS = [
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    '{"name": "run", "arguments": {"command": "ls"}}',
    '{"name": "run", "parameters": {}}',
    "<function=run>",
    "</function>",
    "<parameter=n>",
    "</parameter>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "run",
    "[TOOL_CALLS]",
    "[ARGS]",
    "[THINK]",
    "[/THINK]",
    "<|python_tag|>",
    CALLS_BEGIN,
    CALLS_END,
    BEGIN,
    SEP,
    END,
    "\n```json\n",
    "\n```",
    ";",
    "{}",
    "\n",
    " ",
]


@settings(max_examples=examples(300))
@given(st.sampled_from(FORMATS), st.lists(st.one_of(st.sampled_from(MARKS), st.text(max_size=5)), max_size=20))
def test_nothing_is_lost(name: str, parts: list[str]) -> None:
    text = "".join(parts)
    parsed = parse_turn(load_tool_parser(name), text, TOOLS)
    assert "".join(piece.text for piece in parsed.pieces) == text
    shown = [piece for piece in parsed.pieces if piece.kind in ("text", "reasoning")]
    assert parsed.content in ("", "".join(piece.text for piece in shown if piece.kind == "text"))
    for piece in parsed.pieces:
        assert bool(piece.calls) == (piece.kind == "call")
        if piece.kind == "markup":  # nothing that a model wanted to say
            bare = piece.text
            for mark in ("<think>", "</think>", "[THINK]", "[/THINK]", CALLS_BEGIN, CALLS_END):
                bare = bare.replace(mark, "")
            assert not bare.strip()
    message = assistant_message(parsed, [str(i) for i in range(len(parsed.calls))])
    json.dumps(message, allow_nan=False).encode()


@settings(max_examples=examples(100))
@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
        st.recursive(
            st.none()
            | st.booleans()
            | st.integers()
            | st.floats(allow_nan=False, allow_infinity=False)
            | st.text("é<\n"),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab"), inner, max_size=3),
            max_leaves=6,
        ),
        max_size=3,
    )
)
def test_arguments_come_through(arguments: dict[str, Any]) -> None:
    written = json.dumps({"name": "f", "arguments": arguments})
    for name, text in [
        ("hermes", f"<tool_call>{written}</tool_call>"),
        ("mistral", f"[TOOL_CALLS][{written}]"),
        ("llama3_json", written),
        ("deepseek", f"{BEGIN}f{SEP}{json.dumps(arguments)}{END}"),
    ]:
        assert parse_turn(load_tool_parser(name), text, []).calls == (ToolCall("f", arguments),)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("mark", ["<tool_call>", BEGIN, BEGIN + SEP, "<think>", "[TOOL_CALLS]", "<arg_key>", "{"])
def test_marks_without_end_take_linear_time(name: str, mark: str) -> None:
    """A model that repeats itself must not keep the server from others: quadratic would take minutes here."""
    began = time.process_time()
    parse_turn(load_tool_parser(name), mark * 20_000, [])
    parse_turn(load_tool_parser(name), "<tool_call>run" + mark * 20_000 + "</tool_call>", [])
    assert time.process_time() - began < 20


def test_a_broken_parser_is_found() -> None:
    with pytest.raises(ParserFailed, match="gave back 1 of 2 characters"):
        parse_turn(lambda text, tools: [Piece("a")], "ab", [])
    with pytest.raises(ParserFailed, match="ZeroDivisionError"):
        parse_turn(lambda text, tools: [Piece(str(1 // 0))], "ab", [])


def test_parsers_have_names() -> None:
    assert set(FORMATS) <= set(names("tool_parser"))
    with pytest.raises(UserError, match="did you mean 'hermes'"):
        load_tool_parser("herms")
