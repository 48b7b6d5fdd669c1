"""Chat templates run in a sandbox, also where what it decides is looked up or remembered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from miles_hpc.core.errors import UserError
from miles_hpc.rollout.session.chat_template import RENDERING_ERRORS, load_template


class Stranger:
    """Not a plain dict: its attributes are the sandbox's business."""

    open = "shown"
    _hidden = "hidden"


def rendered(source: str, **given: Any) -> str:
    template = load_template(Path("model"), {"chat_template": source})
    values = {"message": {"role": "user", "content": "hi"}, "messages": [{"role": "user"}], "stranger": Stranger()}
    first = template.render(**{**values, **given})
    assert template.render(**{**values, **given}) == first  # verdicts are remembered
    return first


ESCAPES = [
    "{{ message.__class__ }}",
    "{{ message['__class__'].__mro__ }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ message.__init__.__globals__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ message.update(role='system') }}",
    "{{ message.pop('role') }}",
    "{{ messages.append(1) }}",
    "{{ '{0.__class__}'.format(message) }}",
    "{{ message|attr('__class__') }}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_nothing_escapes(source: str) -> None:
    template = load_template(Path("model"), {"chat_template": source})
    given = {"message": {"role": "user"}, "messages": [{"role": "user"}]}
    for _ in range(2):
        try:
            text = template.render(**given)
        except RENDERING_ERRORS:
            continue
        assert text == "", text
    assert given == {"message": {"role": "user"}, "messages": [{"role": "user"}]}


LOOKED_UP = [
    ("{{ message.role }} {{ message['content'] }}", "user hi"),
    ("{{ message.nothing is defined }} {{ message.nothing }}|", "False |"),
    ("{{ message.items()|list }}", "[('role', 'user'), ('content', 'hi')]"),
    ("{{ message.get('role') }}", "user"),
    ("{% for m in messages %}{{ loop.index0 }}{{ m.role }}{{ loop.last }}{% endfor %}", "0userTrue"),
    ("{% set at = namespace(n=1) %}{% set at.n = at.n + 1 %}{{ at.n }}", "2"),
    ("{{ stranger.open }} {{ stranger._hidden }}|", "shown |"),
    ("{{ message.content.upper() }}", "HI"),
    ("{{ {'keys': 1}['keys'] }}", "1"),
    ("{{ message | tojson }}", '{"role": "user", "content": "hi"}'),
]


@pytest.mark.parametrize(("source", "text"), LOOKED_UP)
def test_values_are_looked_up_as_in_any_sandbox(source: str, text: str) -> None:
    assert rendered(source) == text


def test_an_entry_that_is_named_as_a_method_is_shadowed_by_it() -> None:
    """As in jinja2: attributes come first where a dot is written, entries where brackets are."""
    assert rendered("{{ message['items'] }}", message={"items": "mine"}) == "mine"
    assert "built-in method items" in rendered("{{ message.items }}", message={"items": "mine"})


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({}, "no chat template"),
        ({"chat_template": "{% for"}, "line 1"),
        ({"chat_template": [{"name": "tool_use", "template": "x"}]}, "no chat template"),
    ],
)
def test_templates_that_are_refused(tmp_path: Path, settings: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError, match=text) as caught:
        load_template(tmp_path, settings)
    assert "\n" not in str(caught.value)
