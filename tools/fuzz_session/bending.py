"""How clients bend the messages that they send back: in ways that a matcher must bear, and in ways that it must not."""

from __future__ import annotations

import copy
import json
from random import Random
from typing import Any

__all__ = ["as_sent", "change", "vary"]

_EMPTY: tuple[Any, ...] = (None, "", [])


def vary(rng: Random, message: dict[str, Any], matcher: str) -> dict[str, Any]:
    """`message` as sent, bent at random but still the same to `matcher`. Arguments are objects in `message`."""
    sent = as_sent(message)
    calls = sent.get("tool_calls") or []
    for i, call in enumerate(calls):
        if rng.random() < 0.3:
            call["index"] = i
    if rng.random() < 0.3:
        sent[rng.choice(("refusal", "audio", "name_of_client"))] = "extra"
    if sent["content"] in _EMPTY:
        sent["content"] = rng.choice(_EMPTY)
        if rng.random() < 0.3:
            del sent["content"]
    for key in ("reasoning_content", "tool_calls"):
        if not sent.get(key) and rng.random() < 0.3:
            sent[key] = rng.choice(_EMPTY)
    if matcher == "loose_tool_call":
        for call in calls:
            if rng.random() < 0.5:
                _rewrite(rng, call)
        if sent.get("reasoning_content") and rng.random() < 0.5:
            sent["reasoning_content"] = rng.choice(("", None, f"\n{sent['reasoning_content']} "))
    elif matcher == "role_content_only" and rng.random() < 0.3:
        sent["reasoning_content"], sent["tool_calls"] = "other", []
    return sent


def as_sent(message: dict[str, Any]) -> dict[str, Any]:
    """A copy with tool arguments as the text that OpenAI's shape has."""
    if not message.get("tool_calls"):
        return dict(message)
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def change(rng: Random, message: dict[str, Any], matcher: str) -> dict[str, Any]:
    """Another message, which `matcher` must tell from `message` and, if reasoning isn't pruned, from all others.
    Arguments stay objects.
    """
    mark = f"!{rng.random()}"
    other = copy.deepcopy(message)
    choices = ["content"]
    if matcher != "role_content_only":
        if other["role"] == "assistant":
            choices.append("reasoning")
        if other.get("tool_calls"):
            choices += ["arguments", "name"]
    kind = rng.choice(choices)
    if kind == "content":
        other["content"] = (other["content"] or "") + mark
    elif kind == "reasoning":
        thought = other.get("reasoning_content") or ""
        # Pruned reasoning is another message to the strict matcher only.
        other["reasoning_content"] = "" if thought and matcher == "strict" and rng.random() < 0.5 else thought + mark
    elif kind == "arguments":
        function = rng.choice(other["tool_calls"])["function"]
        function["arguments"] = {
            **function["arguments"],
            rng.choice(("n", "more")): rng.choice((10, "1", True)),
            "mark": mark,
        }
    else:
        rng.choice(other["tool_calls"])["function"]["name"] += mark
    return other


def _rewrite(rng: Random, call: dict[str, Any]) -> None:
    """The same arguments in other words, and empty fields."""
    arguments = json.loads(call["function"]["arguments"])
    shuffled = list(arguments.items())
    rng.shuffle(shuffled)
    arguments = {k: float(v) if type(v) is int and rng.random() < 0.5 else v for k, v in shuffled}
    kind = rng.random()
    if kind < 0.4:
        call["function"]["arguments"] = json.dumps(arguments, indent=rng.choice((None, 2)), separators=(",", ":"))
    elif kind < 0.7:
        call["function"]["arguments"] = arguments
    else:
        call["function"]["arguments"] = json.dumps(arguments, ensure_ascii=False)
    if rng.random() < 0.3:
        call[rng.choice(("custom", "note"))] = rng.choice(_EMPTY)
