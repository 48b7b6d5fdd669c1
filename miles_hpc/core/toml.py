"""Writing TOML 1.0 for our own configs. Reading is the standard library's tomllib.

What is written loads back equal: `tomllib.loads(dumps(x)) == x` for tables of str, int, float, bool, date and time
types, lists and tables. TOML has no null: None as a struct's field is left out, None anywhere else is refused.
"""

from __future__ import annotations

import datetime
import json
import re
from typing import Any

import msgspec

__all__ = ["dumps", "inline"]

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+\Z")


def dumps(config: msgspec.Struct | dict[str, Any]) -> str:
    """TOML text of a struct or table. Raises TypeError for values that TOML can't hold."""
    lines: list[str] = []
    _table(_plain(config), [], lines)
    return "\n".join(lines).lstrip("\n") + "\n"


def inline(value: Any) -> str:
    """A value as it stands behind "key = ". Raises TypeError for one that TOML can't hold."""
    return _value(_plain(value))


def _plain(value: Any) -> Any:
    """Structs to tables, recursively."""
    if isinstance(value, msgspec.Struct):
        fields = {name: getattr(value, name) for name in value.__struct_fields__}
        return {name: _plain(field) for name, field in fields.items() if field is not None}
    if isinstance(value, dict):
        return {key: _plain(field) for key, field in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _table(table: dict[str, Any], path: list[str], lines: list[str]) -> None:
    """Scalars first, because everything after a [header] belongs to that header."""
    below: list[tuple[str, Any]] = []
    for key, value in table.items():
        if isinstance(value, dict) or _is_array_of_tables(value):
            below.append((key, value))
        else:
            lines.append(f"{_key(key)} = {_value(value)}")
    for key, value in below:
        header = ".".join(_key(part) for part in [*path, key])
        for item in value if isinstance(value, list) else [value]:
            lines += ["", f"[[{header}]]" if isinstance(value, list) else f"[{header}]"]
            _table(item, [*path, key], lines)


def _is_array_of_tables(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)


def _key(key: str) -> str:
    if not isinstance(key, str):
        raise TypeError(f"TOML keys are strings, not {key!r}")
    return key if _BARE_KEY.match(key) else _string(key)


def _string(text: str) -> str:
    # JSON's escapes are TOML's, except that TOML wants DEL escaped as well.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, list):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(key)} = {_value(item)}" for key, item in value.items()) + "}"
    raise TypeError(f"TOML can't hold {value!r} of type {type(value).__name__}")
