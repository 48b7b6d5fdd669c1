"""How messages say commands: every format, its inverse, and whatever a model may write instead."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_hpc.core.errors import UserError
from miles_hpc.rollout.environments.commands import FORMATS, Said, command_format
from tests.exploring import examples

CASES = [
    ("fenced", "```bash\nls -l\n```", Said("ls -l")),
    ("fenced", "I look first.\n```\nls\ncd x\n```\nThen more.", Said("ls\ncd x")),
    ("fenced", "```SH  \nls\n```", Said("ls")),
    ("fenced", "```bash\n\n```", Said("")),
    ("fenced", "```bash\nls\n```\nDONE", Said("ls", done=True)),
    ("fenced", "Finished.\n**DONE**\n", Said(done=True)),
    ("fenced", "```bash\necho x\nDONE\n```", Said("echo x\nDONE")),
    ("fenced", "<think>```bash\nrm x\n```</think>\n```bash\nls\n```", Said("ls")),
    ("fenced", "```python\nprint()\n```\n```bash\nls\n```", Said("ls")),
    ("fenced", "```bash\nls\n```\nDONE\nor not", Said("ls")),  # only the last line ends it
    ("qwen25", '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>', Said("ls")),
    ("hermes", 'So: <tool_call>{"name":"bash","arguments":{"command":"ls"}}</tool_call>\nDONE', Said("ls", True)),
    ("qwen25", "DONE", Said(done=True)),
    ("llama3_json", '{"name": "bash", "parameters": {"command": "ls"}}', Said("ls")),
    ("llama3_json", '<|python_tag|>{"name": "bash", "parameters": {"command": "ls"}}\nDONE', Said("ls", True)),
    ("mistral", '[TOOL_CALLS]bash[ARGS]{"command": "ls"}', Said("ls")),
    (
        "qwen3_coder",
        "<tool_call>\n<function=bash>\n<parameter=command>\nls\necho '</x>'\n</parameter>\n</function>\n</tool_call>",
        Said("ls\necho '</x>'"),
    ),
]

PROBLEMS = [
    ("fenced", "", "no command"),
    ("fenced", "ls -l", "no command"),
    ("fenced", "I am done.", "no command"),
    ("fenced", "```python\nprint()\n```", "no command"),
    ("fenced", "```bash\nls", "not closed"),
    ("fenced", "```bash\nls\nDONE", "not closed"),
    ("fenced", "```bash\nls\n```\n```bash\npwd\n```", "2 commands in one message"),
    ("fenced", "```bash\n\ud800\n```", "isn't text"),
    ("qwen25", "<tool_call>{'name': 1}</tool_call>", "no command"),
    ("qwen25", '<tool_call>{"name": "bash", "arguments": {"command": "ls"}}', "no command"),
    ("qwen25", '<tool_call>{"name": "python", "arguments": {}}</tool_call>', "no tool 'python'"),
    ("qwen25", '<tool_call>{"name": "bash", "arguments": {"cmd": "ls"}}</tool_call>', "needs one argument"),
    ("qwen25", '<tool_call>{"name": "bash", "arguments": {"command": ["ls"]}}</tool_call>', "needs one argument"),
    ("qwen25", "<tool_call>" + "[" * 100_000 + "</tool_call>", "no command"),
    ("llama3_json", '{"name": "bash", ', "no command"),
    ("llama3_json", "ls", "no command"),
    ("qwen3_coder", "<tool_call><function=bash></function></tool_call>", "needs one argument"),
    ("qwen3_coder", "<tool_call>ls</tool_call>", "no command"),
]


@pytest.mark.parametrize(("name", "text", "said"), CASES)
def test_what_is_read(name: str, text: str, said: Said) -> None:
    assert command_format(name).read(text) == said


@pytest.mark.parametrize(("name", "text", "problem"), PROBLEMS)
def test_what_is_told_back(name: str, text: str, problem: str) -> None:
    said = command_format(name).read(text)
    assert said.command is None and not said.done
    assert problem in said.problem and command_format(name).how in said.problem


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_the_prompts_example_is_a_command(name: str) -> None:
    form = FORMATS[name]
    assert form.read(form.how.partition("\n")[2]) == Said("ls -l")
    assert "\ud800" not in form.how


_LINES = st.lists(st.text("abc $'\"\\{}<>|&;é", max_size=12), min_size=1, max_size=4)


@settings(max_examples=examples(100))
@given(name=st.sampled_from(sorted(FORMATS)), lines=_LINES)
def test_every_command_can_be_said(name: str, lines: list[str]) -> None:
    command = "\n".join(line if line.strip() else "true" for line in lines)
    assert FORMATS[name].read(FORMATS[name].say(command)) == Said(command)


@settings(max_examples=examples(200))
@given(
    name=st.sampled_from(sorted(FORMATS)),
    parts=st.lists(
        st.sampled_from(
            ["```", "```bash\n", "\n", "ls", "DONE", "<tool_call>", "</tool_call>", "</think>", "{", '"', "}"]
        )
        | st.text(max_size=5)
    ),
)
def test_any_text_has_a_meaning(name: str, parts: list[str]) -> None:
    said = FORMATS[name].read("".join(parts))
    assert bool(said.problem) == (said.command is None and not said.done)


def test_unknown_formats() -> None:
    with pytest.raises(
        UserError, match="expected one of fenced, glm45, hermes, llama3_json, mistral, qwen25, qwen3_coder"
    ):
        command_format("xml")
