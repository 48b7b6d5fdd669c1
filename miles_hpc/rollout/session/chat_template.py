"""A model folder's chat template, compiled in a sandbox: the environment that transformers gives it."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from miles_hpc.core.errors import UserError

__all__ = ["RENDERING_ERRORS", "load_template"]

#: What rendering raises when a template refuses messages, or was written for others.
RENDERING_ERRORS = (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, RecursionError)

_DICT_NAMES = frozenset(dir(dict))


class _Sandbox(ImmutableSandboxedEnvironment):
    """The sandbox decides about every attribute, which takes a good part of a rendering's time. Entries of plain dicts
    that share no name with a method are never attributes: they are looked up at once. For all else its verdict, which
    depends on type and name alone, is asked once.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._verdicts: dict[tuple[type, str], bool] = {}

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        verdict = self._verdicts.get((type(obj), attr))
        if verdict is None:
            verdict = self._verdicts[type(obj), attr] = super().is_safe_attribute(obj, attr, value)
        return verdict

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is dict and attribute not in _DICT_NAMES:
            try:
                return obj[attribute]
            except KeyError:
                return self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)


def load_template(folder: Path, settings: dict[str, Any]) -> jinja2.Template:
    """The template of `chat_template.jinja`, else of `settings`, which are those of tokenizer_config.json.

    It has the functions that transformers gives to templates (utils/chat_template_utils.py). Raises UserError.
    """
    source = _source(folder, settings)
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    environment.filters["tojson"] = tojson
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise UserError(f"chat template of {folder}: line {error.lineno}: {error.message}") from error


def _source(folder: Path, settings: dict[str, Any]) -> str:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text()
    source = settings.get("chat_template")
    if isinstance(source, list):  # several named templates
        source = next((t["template"] for t in source if t.get("name") == "default"), None)
    if not isinstance(source, str):
        raise UserError(f"{folder}: no chat template: expected chat_template.jinja or the key in tokenizer_config.json")
    return source
