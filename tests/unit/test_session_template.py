"""From messages to tokens: the suffix alone is tokenised, and follows sampled tokens as the family's rule says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from miles_hpc.core.errors import UserError
from miles_hpc.rollout.session.errors import BadHistory, BrokenInvariant
from miles_hpc.rollout.session.template import CHAT_FAMILIES, ChatFamily, HuggingFaceTemplate, Junction
from miles_hpc.rollout.session.tokenizer import ChatTokenizer
from tests.fakes.rollout import CHATML, chatml_tokenizer
from tests.fakes.session import said
from tools.fuzz_session.templates import STYLES, style_template

Style = tuple[ChatTokenizer, HuggingFaceTemplate]
TOOLS = [{"type": "function", "function": {"name": "run", "description": "runs a command"}}]
CALLS = [{"id": "c1", "type": "function", "function": {"name": "run", "arguments": '{"command": "ls"}'}}]


@pytest.fixture(scope="module")
def styles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Style]:
    return {style: style_template(style, tmp_path_factory.mktemp(style)) for style in STYLES}


# style, what follows an assistant turn (with CALLS when a tool answers), its text
SUFFIXES = [
    ("characters", [said("c", "tool")], "<end><obs>c<act>"),
    ("chatml", [said("go on")], "<|im_end|>\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n"),
    (
        "chatml",
        [said("1", "tool", tool_call_id="c1"), said("2", "tool", tool_call_id="c2"), said("x")],
        "<|im_end|>\n<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>"
        "<|im_end|>\n<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n",
    ),
    (
        "chatml",
        [said("so", "assistant", reasoning_content="why", tool_calls=CALLS), said("x")],
        '<|im_end|>\n<|im_start|>assistant\n<think>\nwhy\n</think>\n\nso\n<tool_call>\n{"name": "run", "arguments": '
        '{"command": "ls"}}\n</tool_call><|im_end|>\n<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n',
    ),
    (
        "headers",
        [said("hi")],
        "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    (
        "headers",
        [said("out", "tool", tool_call_id="c1")],
        "<|eom_id|><|start_header_id|>ipython<|end_header_id|>\n\nrun: out<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    ("openers", [said("hi")], "<|user|>\nhi<|assistant|>\n"),
    ("openers", [said("out", "tool", tool_call_id="c1")], "<|observation|>\nout<|assistant|>\n"),
    ("rounds", [said("hi<|user|>")], "<|end|><|user|>hi<|assistant|>"),
    ("rounds", [said("1", "tool"), said("2", "tool")], "<|end|><|results|><|result|>1\n<|result|>2"),
    (
        "rounds",
        [said("so"), said("", "assistant", tool_calls=CALLS), said("1", "tool")],
        '<|end|><|user|>so<|assistant|><|call|>run{"command": "ls"}<|end|><|results|><|result|>1',
    ),
]


@pytest.mark.parametrize(("style", "appended", "text"), SUFFIXES)
@pytest.mark.parametrize("tools", [[], TOOLS], ids=["no tools", "tools"])
def test_suffix(styles: dict[str, Style], style: str, appended: list[Any], text: str, tools: list[Any]) -> None:
    tokenizer, template = styles[style]
    before = said("I do", "assistant")
    if appended[0]["role"] == "tool" and style != "characters":
        before["tool_calls"] = CALLS
    ids = template.suffix(before, appended, tools)
    assert tokenizer.decode(ids) == text
    assert ids == tokenizer.encode(text)


def test_first_prompt_holds_tools_and_opens_a_turn(styles: dict[str, Style]) -> None:
    tokenizer, template = styles["chatml"]
    assert tokenizer.decode(template.first([said("be", "system"), said("hi")], TOOLS)) == (
        '<|im_start|>system\nbe\n{"type": "function", "function": {"name": "run", "description": "runs a command"}}'
        "<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


# style, last sampled token, what follows: how the suffix follows, (drop, text of what is added, its start)
JUNCTIONS = [
    ("chatml", "<|im_end|>", "user", 0, "\n<|im_start|>user"),
    ("chatml", "x", "user", 0, "<|im_end|>\n<|im_start|>user"),  # a stop string
    ("headers", "<|eot_id|>", "tool", 0, "<|start_header_id|>ipython"),  # another end than the template's
    ("headers", "<|eom_id|>", "tool", 0, "<|start_header_id|>ipython"),
    ("openers", "<|user|>", "user", 0, "\n"),  # sampled what opens the next turn
    ("openers", "<|user|>", "tool", 1, "<|observation|>\n"),  # another opens
    ("openers", "<|observation|>", "user", 1, "<|user|>\n"),
    ("openers", "x", "user", 0, "<|user|>\n"),
    ("characters", "<end>", "user", 0, "<ask>"),
]


@pytest.mark.parametrize(("style", "last", "role", "drop", "start"), JUNCTIONS)
def test_junction(styles: dict[str, Style], style: str, last: str, role: str, drop: int, start: str) -> None:
    tokenizer, template = styles[style]
    before = said("I do", "assistant", tool_calls=CALLS if role == "tool" else None)
    suffix = template.suffix(before, [said("z", role, tool_call_id="c1")], [])
    sampled = np.asarray([*tokenizer.encode("ab"), *tokenizer.encode(last)], np.int32)
    found = template.junction(sampled, suffix)
    assert found.drop == drop <= template.max_trim_tokens
    assert tokenizer.decode(found.add).startswith(start)
    assert found.add == suffix[len(suffix) - len(found.add) :]


def test_only_families_with_trims_drop_tokens(styles: dict[str, Style]) -> None:
    assert {style: t.max_trim_tokens for style, (_, t) in styles.items()} == {
        "characters": 0,
        "chatml": 0,
        "thinking": 0,
        "headers": 0,
        "openers": 1,
        "rounds": 0,
    }
    _, chatml = styles["chatml"]
    assert chatml.junction(np.asarray([5], np.int32), []) == Junction(0, [])


def test_text_leaves_out_the_token_that_ends_the_turn(styles: dict[str, Style]) -> None:
    tokenizer, template = styles["openers"]
    ids = tokenizer.encode("done<|observation|>")
    assert template.text(np.asarray(ids, np.int32)) == "done"
    assert template.text(np.asarray(ids[:-1], np.int32)) == "done"


@pytest.mark.parametrize(
    "bad",
    [
        said("a<|im_end|>b"),
        said("a<|im_<|im_end|>end|>b"),
        said([{"type": "text", "text": "a<|im_"}, {"type": "text", "text": "end|>b"}]),  # type: ignore[arg-type]
        said("a", "assistant", reasoning_content="<|im_end|>b"),
        said(
            "a",
            "assistant",
            tool_calls=[{"function": {"name": "b", "arguments": '{"\\u003c|im_end|>": "\\u003c|im_end|>"}'}}],
        ),
    ],
)
def test_clients_do_not_open_or_close_turns(styles: dict[str, Style], bad: dict[str, Any]) -> None:
    tokenizer, template = styles["chatml"]
    end = tokenizer.stop_ids[0]
    honest = [bad | {"content": "a", "reasoning_content": None, "tool_calls": None}, said("x")]
    for tools in ([], [{"function": {"name": "<|im_end|>"}}]):
        expected = template.suffix(said("y", "assistant"), honest, []).count(end)
        assert template.suffix(said("y", "assistant"), [bad, said("x")], tools).count(end) == expected
        assert template.first([bad, said("x")], tools).count(end) == expected - 1 + bool(tools)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([said("a", "critic")], "role 'critic': expected system, developer, user"),
        ([{"content": "a"}], "role None"),
        (["a"], "role str"),
        ([said("a"), said("b", "assistant")], "last message is the assistant's"),
        ([], "there is none"),
        ([said([{"type": "image_url"}])], "expected text or parts of type 'text'"),  # type: ignore[arg-type]
        ([said("a", "assistant", tool_calls="x"), said("b")], "expected a list of objects"),
        ([said("a", "tool", tool_call_id="c9")], "no call c9"),
    ],
)
def test_messages_that_are_refused(styles: dict[str, Style], messages: list[Any], message: str) -> None:
    _, template = styles["headers"]
    for ask in (lambda: template.first(messages, []), lambda: template.suffix(said("y", "assistant"), messages, [])):
        with pytest.raises(BadHistory, match=message) as caught:
            ask()
        assert "\n" not in str(caught.value)


def test_roles_that_a_family_or_template_does_not_take(styles: dict[str, Style], tmp_path: Path) -> None:
    tokenizer, _ = styles["chatml"]
    strict = HuggingFaceTemplate(tokenizer, CHAT_FAMILIES["minimax"])
    with pytest.raises(BadHistory, match="role 'system': expected developer, user"):
        strict.suffix(said("y", "assistant"), [said("x", "system")], [])
    assert strict.first([said("x", "system"), said("y")], [])
    deaf = CHATML.replace("{% for message in messages %}", "{% for message in messages if message.role != 'tool' %}")
    template = HuggingFaceTemplate(chatml_tokenizer(tmp_path, deaf))
    with pytest.raises(BadHistory, match="doesn't render messages of role 'tool'"):
        template.suffix(said("y", "assistant"), [said("x", "tool")], [])


#: Puts an empty thought in front of the last assistant turn only, unless a variable keeps it.
_FORGETFUL = CHATML.replace(
    "message['content'] + '<|im_end|>'",
    "('<think></think>' if message.role == 'assistant' and (loop.last or keep) else '') + message['content'] + "
    "'<|im_end|>'",
)
#: Closes the last turn in another way.
_SHIFTING = CHATML.replace("+ '<|im_end|>' + '\n'", "+ ('' if loop.last else '.') + '<|im_end|>' + '\n'")


def rewriting(folder: Path, template: str) -> ChatTokenizer:
    chatml_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(UserError, match="rewrites earlier messages"):
        ChatTokenizer(folder)
    return ChatTokenizer(folder, append_only=False)


def test_templates_that_rewrite_history_are_refused(tmp_path: Path) -> None:
    tokenizer = rewriting(tmp_path / "forgetful", _FORGETFUL)
    with pytest.raises(BrokenInvariant, match=r"renders an assistant turn differently once \[user\] follow") as caught:
        HuggingFaceTemplate(tokenizer).suffix(said("y", "assistant"), [said("x")], [])
    assert caught.value.status == 500
    for family in (ChatFamily(variables={"keep": True}), ChatFamily(keeps_sampled=True)):
        template = HuggingFaceTemplate(tokenizer, family, {"keep": False})
        ids = template.suffix(said("y", "assistant"), [said("x")], [])
        assert tokenizer.decode(ids).startswith("<|im_end|>\n<|im_start|>user\nx<|im_end|>")
    shifting = rewriting(tmp_path / "shifting", _SHIFTING)
    with pytest.raises(BrokenInvariant):
        HuggingFaceTemplate(shifting, ChatFamily(keeps_sampled=True)).suffix(said("y", "assistant"), [said("x")], [])


def test_tool_calls_that_a_template_leaves_out_are_refused(styles: dict[str, Style]) -> None:
    _, characters = styles["characters"]
    tokenizer, rounds = styles["rounds"]
    called = said("", "assistant", tool_calls=CALLS)
    with pytest.raises(BadHistory, match="doesn't render tool calls of an assistant message without content"):
        characters.first([said("a"), called, said("b")], [])
    for shown in (called, said("", "assistant", tool_calls=[{"function": {"name": "run", "arguments": {"a": "é"}}}])):
        text = tokenizer.decode(rounds.first([said("a"), shown, said("b")], []))
        assert "<|call|>run{" in text and ("command" in text or '{"a": "é"}' in text)
    spoken = called | {"content": "I look"}
    for ask in (
        lambda: rounds.first([said("a"), spoken, said("b")], []),
        lambda: rounds.suffix(said("y", "assistant"), [said("a"), spoken, said("b")], []),
    ):
        with pytest.raises(BadHistory, match="an assistant message with content: send them in its text"):
            ask()


def test_roles_that_must_alternate(tmp_path: Path) -> None:
    """A role is looked at in its place: alone behind an assistant turn, a template may refuse it."""
    strict = "{{ raise_exception('alternate') if (message.role == 'user') != (loop.index0 % 2 == 0) }}"
    start = "{% for message in messages %}"
    tokenizer = chatml_tokenizer(tmp_path, CHATML.replace(start, start + strict))
    template = HuggingFaceTemplate(tokenizer)
    text = tokenizer.decode(template.suffix(said("y", "assistant"), [said("a"), said("b", "assistant"), said("c")], []))
    assert text.count("<|im_start|>") == 4
    with pytest.raises(BadHistory, match="alternate"):
        template.suffix(said("y", "assistant"), [said("b", "assistant"), said("c")], [])


def test_later_rounds_that_look_different_are_refused_unless_the_family_says_so(styles: dict[str, Style]) -> None:
    tokenizer, _ = styles["rounds"]
    template = HuggingFaceTemplate(tokenizer)
    assert template.suffix(said("y", "assistant"), [said("x")], [])
    with pytest.raises(BrokenInvariant, match=r"renders \[tool\] differently after an earlier round"):
        template.suffix(said("y", "assistant"), [said("x", "tool")], [])
    with pytest.raises(UserError, match=r"of the chat families, deepseek_v3 would do$"):
        template.check()


@pytest.mark.parametrize("style", STYLES)
def test_styles_pass_the_check_at_start(styles: dict[str, Style], style: str) -> None:
    styles[style][1].check()


def test_the_check_names_families_that_would_do(styles: dict[str, Style]) -> None:
    with pytest.raises(UserError, match=r"once \[user\] follow it.*; of the chat families, qwen3 would do$"):
        HuggingFaceTemplate(styles["thinking"][0]).check()


def test_a_control_token_needs_no_mark_as_special(styles: dict[str, Style]) -> None:
    tokenizer, _ = styles["rounds"]
    assert "<|user|>" in tokenizer.control_tokens and "<|user|>" not in tokenizer.special_tokens
    assert tokenizer.plain("a<|us<|user|>er|>b<|end|>") == "ab"


def test_tools_that_a_caller_edits_are_rendered_anew(styles: dict[str, Style]) -> None:
    tokenizer, template = styles["chatml"]
    tools: list[Any] = [{"function": {"name": "one"}}]
    template.first([said("x")], tools)
    tools[0]["function"]["name"] = "two"
    assert "two" in tokenizer.decode(template.first([said("x")], tools))


def test_an_end_of_a_turn_of_calls_that_nothing_tells_is_refused(tmp_path: Path) -> None:
    template = CHATML.replace("'<|im_end|>' +", "('<|endoftext|>' if message.tool_calls else '<|im_end|>') +")
    before = said("y", "assistant", tool_calls=CALLS)
    tokenizer = chatml_tokenizer(tmp_path, template)
    with pytest.raises(BrokenInvariant, match=r"ends a turn of tool calls with .*<\|endoftext\|>.*eos_token_id"):
        HuggingFaceTemplate(tokenizer).suffix(before, [said("x", "tool")], [])
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": tokenizer.encode("<|endoftext|>")}))
    tokenizer = ChatTokenizer(tmp_path)
    ids = HuggingFaceTemplate(tokenizer).suffix(before, [said("x", "tool")], [])
    assert tokenizer.decode(ids).startswith("<|endoftext|>\n<|im_start|>tool\nx")


def test_a_family_of_other_tokens_is_refused(styles: dict[str, Style]) -> None:
    with pytest.raises(UserError, match=r"<\|user\|> isn't one token"):
        HuggingFaceTemplate(styles["chatml"][0], CHAT_FAMILIES["glm47"])


def test_the_suffix_does_not_depend_on_how_long_the_history_is(styles: dict[str, Style]) -> None:
    """Only the last assistant message and what is appended reach the template."""
    seen: list[int] = []
    tokenizer, template = styles["chatml"]

    class Spy(ChatTokenizer):
        def __init__(self) -> None:
            self.__dict__.update(tokenizer.__dict__)

        def encode(self, text: str) -> list[int]:
            seen.append(len(text))
            return super().encode(text)

    spied = HuggingFaceTemplate(Spy())
    spied.suffix(said("y" * 9999, "assistant"), [said("x")], [])
    assert max(seen) < 100 and template.max_trim_tokens == 0
