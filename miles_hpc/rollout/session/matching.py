"""Is a message that the client sends back the one that was recorded at that place?

| matcher | compares | so these are the same |
|---|---|---|
| `strict` | role, content, reasoning_content, tool_calls | None, "" and [] and an absent key; a tool call's `index`; other keys of a message |
| `loose_tool_call` | the same, tool arguments as JSON | also: other key order and spacing, text or object, 1 and 1.0, no arguments and {}; empty fields of a call left out; reasoning trimmed or left out |
| `role_content_only` | role, content | messages with different tool calls or reasoning: dangerous, histories may collapse into one |
| `module:attribute` | whatever it likes | it is called with (recorded, sent) and must return exactly True or False |

A match never changes what is recorded: tokens are those that the engine saw and sampled.
"""  # noqa: E501

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any, Final, TypeAlias

from miles_hpc.core.registry import resolve
from miles_hpc.rollout.session.errors import MatcherFailed

__all__ = ["Matcher", "Message", "load_matcher", "loose_tool_call", "role_content_only", "strict"]

#: One message in OpenAI's shape, as JSON gives it.
Message: TypeAlias = Mapping[str, Any]

_RAW: Final = object()  # arguments that can't be compared as JSON


class Matcher:
    """A matching rule by name. Calling it with (recorded, sent) gives a bool; MatcherFailed when the rule is broken.

    `reflexive`: equal messages match for certain, so whole runs of them may be compared at once.
    """

    def __init__(self, name: str, rule: Callable[[Message, Message], bool]) -> None:
        self.name = name
        self.reflexive = rule in (strict, loose_tool_call, role_content_only)
        self._rule = rule

    def __call__(self, recorded: Message, sent: Any) -> bool:
        if not isinstance(sent, Mapping):
            return False
        try:
            answer = self._rule(recorded, sent)
        except Exception as error:
            raise MatcherFailed(
                f"message matcher '{self.name}' raised {type(error).__name__}: {error}; it must return True or False"
            ) from error
        if answer is not True and answer is not False:
            raise MatcherFailed(
                f"message matcher '{self.name}' returned {type(answer).__name__} {answer!r:.60}; "
                "expected exactly True or False"
            )
        return answer


def load_matcher(name: str) -> Matcher:
    """The matcher of that name or dotted path; UserError when there is none."""
    return Matcher(name, resolve("matcher", name))


# ------------------------------------------------------------------------------------------------ the rules


def strict(recorded: Message, sent: Message) -> bool:
    """Role, content, reasoning and tool calls are equal; see the module's table."""
    return (
        role_content_only(recorded, sent)
        and _same(recorded.get("reasoning_content"), sent.get("reasoning_content"))
        and _same(_without_index(recorded.get("tool_calls")), _without_index(sent.get("tool_calls")))
    )


def loose_tool_call(recorded: Message, sent: Message) -> bool:
    """As `strict`, for clients that write tool arguments anew, leave empty fields out or prune reasoning."""
    if not role_content_only(recorded, sent):
        return False
    was, now = recorded.get("reasoning_content"), sent.get("reasoning_content")
    # Only the client may leave reasoning out: what it adds to a turn without any was never sampled.
    if not _empty(now) and not _same(_trimmed(was), _trimmed(now)):
        return False
    ours, theirs = recorded.get("tool_calls") or [], sent.get("tool_calls") or []
    if not isinstance(ours, list) or not isinstance(theirs, list):
        return bool(ours == theirs)
    return len(ours) == len(theirs) and all(map(_same_call, ours, theirs))


def role_content_only(recorded: Message, sent: Message) -> bool:
    """Role and content are equal."""
    return recorded.get("role") == sent.get("role") and _same(recorded.get("content"), sent.get("content"))


# ------------------------------------------------------------------------------------------------ details


def _empty(value: Any) -> bool:
    return value is None or value == "" or value == []


def _same(a: Any, b: Any) -> bool:
    return bool(a == b) or (_empty(a) and _empty(b))


def _trimmed(value: Any) -> Any:
    return value.strip() if isinstance(value, str) else value


def _without_index(calls: Any) -> Any:
    if not isinstance(calls, list):
        return calls
    return [{k: v for k, v in c.items() if k != "index"} if isinstance(c, Mapping) else c for c in calls]


def _same_call(a: Any, b: Any) -> bool:
    if not isinstance(a, Mapping) or not isinstance(b, Mapping):
        return bool(a == b)
    return _filled(a, "index", "function") == _filled(b, "index", "function") and _same_function(
        a.get("function"), b.get("function")
    )


def _same_function(a: Any, b: Any) -> bool:
    if not isinstance(a, Mapping) or not isinstance(b, Mapping):
        return _same(a, b)
    if _filled(a, "arguments") != _filled(b, "arguments"):
        return False
    was, now = a.get("arguments"), b.get("arguments")
    left, right = _arguments(was), _arguments(now)
    if left is _RAW or right is _RAW:
        return _same(was, now)
    return bool(left == right)


def _filled(fields: Message, *apart: str) -> dict[str, Any]:
    """The fields that hold something, without those named."""
    return {k: v for k, v in fields.items() if k not in apart and not _empty(v)}


def _arguments(value: Any) -> Any:
    """Arguments in a form that compares exactly, or _RAW when they aren't a JSON object with distinct keys."""
    if _empty(value):
        return {}
    try:
        if isinstance(value, str):
            value = json.loads(
                value,
                parse_float=Decimal,
                parse_int=Decimal,  # int has a limit on digits
                parse_constant=_refuse,
                object_pairs_hook=_distinct,
            )
        return _exact(value) if isinstance(value, Mapping) else _RAW
    except (ValueError, ArithmeticError, RecursionError):
        return _RAW


def _refuse(constant: str) -> Any:
    raise ValueError(constant)


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a key stands there twice")
    return fields


def _exact(value: Any) -> Any:
    """Numbers as decimals; True and False kept apart from 1 and 0, which Python finds equal."""
    if isinstance(value, bool):
        return ("bool", value)
    if isinstance(value, int | float):
        value = Decimal(repr(value)) if isinstance(value, float) else Decimal(value)
    if isinstance(value, Decimal):
        if not value.is_finite():
            raise ValueError("not a finite number")
        return value
    if isinstance(value, Mapping):
        if not all(isinstance(k, str) for k in value):
            raise ValueError("a key that isn't text")
        return {k: _exact(v) for k, v in value.items()}
    return [_exact(v) for v in value] if isinstance(value, list) else value
