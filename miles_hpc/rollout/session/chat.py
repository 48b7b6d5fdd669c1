"""What the two chat APIs have in common: what a request asks for, what a finished turn tells, how fields are read.

    OpenAI's JSON    ─▶ openai_api    ╮              ╭─▶ openai_api    ─▶ JSON or server-sent events
                                      ├─ ChatRequest ┄ Answer
    Anthropic's JSON ─▶ anthropic_api ╯              ╰─▶ anthropic_api ─▶ JSON or server-sent events

Pure. A field that changes what is sampled is honoured or refused with its name (BadRequest); only fields that are known
to change nothing are passed over. null is the same as leaving a field out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from miles_hpc.core.types import FinishReason, SamplingParams
from miles_hpc.rollout.session.errors import BadRequest
from miles_hpc.rollout.session.matching import Message
from miles_hpc.rollout.session.turn import Tools

__all__ = [
    "Answer",
    "ChatRequest",
    "SamplingWish",
    "TokenLogProb",
    "boolean",
    "check_fields",
    "number",
    "slices",
    "sse_event",
    "token_ids",
    "whole",
]

#: Characters of text in one streamed chunk.
_CHUNK = 256
_MOST_TOKENS = 2**31 - 1
_MOST_STOPS = 64


class SamplingWish(msgspec.Struct, frozen=True, kw_only=True):
    """What a request or a session says about sampling; None where it says nothing."""

    max_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()

    def over(self, defaults: SamplingWish) -> SamplingWish:
        """These wishes, and the defaults where there is none."""
        return SamplingWish(
            max_new_tokens=defaults.max_new_tokens if self.max_new_tokens is None else self.max_new_tokens,
            temperature=defaults.temperature if self.temperature is None else self.temperature,
            top_p=defaults.top_p if self.top_p is None else self.top_p,
            seed=defaults.seed if self.seed is None else self.seed,
            stop_token_ids=self.stop_token_ids or defaults.stop_token_ids,
        )

    def params(self, *, room_tokens: int, stop_ids: tuple[int, ...]) -> SamplingParams:
        """For an engine. `room_tokens`, at least 1, bounds the output; `stop_ids` are the model's own."""
        wanted = room_tokens if self.max_new_tokens is None else min(self.max_new_tokens, room_tokens)
        return SamplingParams(
            max_new_tokens=wanted,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            stop_token_ids=(*stop_ids, *(i for i in self.stop_token_ids if i not in stop_ids)),
            seed=self.seed,
        )


@dataclass(frozen=True, kw_only=True)
class ChatRequest:
    """One request in OpenAI's shape of messages and tools, whichever API it came through."""

    messages: list[Message]
    tools: Tools
    sampling: SamplingWish
    model: str = ""
    stream: bool = False
    include_usage: bool = False  # a last chunk with the counts
    log_probs: bool = False


@dataclass(frozen=True)
class TokenLogProb:
    """One sampled token. `text` may hold replacement characters where a token is a part of one character."""

    text: str
    log_prob: float


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A finished turn. `message` is the assistant's in OpenAI's shape; `session` tells what became of the record."""

    answer_id: str
    created_s: int
    model: str
    message: Message
    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    log_probs: tuple[TokenLogProb, ...] | None = None
    session: Mapping[str, Any] | None = None


# ------------------------------------------------------------------------------------------------ fields


def check_fields(
    body: Any, *, honoured: Collection[str], neutral: Mapping[str, Collection[Any]], ignored: Collection[str]
) -> dict[str, Any]:
    """The fields that say something. BadRequest for a field that this server can't honour, by name.

    `neutral` lists, for fields that can't be honoured, the values that ask for nothing.
    """
    if not isinstance(body, dict):
        raise BadRequest(f"request body: expected a JSON object, found {type(body).__name__}")
    given = {name: value for name, value in body.items() if value is not None and name not in ignored}
    for name, value in given.items():
        if name in honoured or any(_equal(value, nothing) for nothing in neutral.get(name, ())):
            continue
        if name in neutral:
            usual = "".join(f" or send {v!r}" for v in neutral[name])
            raise BadRequest(f"{name}={value!r:.60} can't be honoured: leave it out{usual}", param=name)
        raise BadRequest(f"field '{name}' isn't known here, so it can't be honoured: leave it out", param=name)
    return given


def _equal(a: Any, b: Any) -> bool:
    return bool(a == b) and isinstance(a, bool) is isinstance(b, bool)


def number(body: Mapping[str, Any], name: str, low: float, high: float) -> float | None:
    """A number from `low` to `high`, None when it isn't given. Raises BadRequest."""
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise BadRequest(f"{name}={value!r:.60}: expected a number from {low:g} to {high:g}", param=name)
    return float(value)


def whole(body: Mapping[str, Any], name: str, low: int, high: int = _MOST_TOKENS) -> int | None:
    """A whole number from `low` to `high`, None when it isn't given. Raises BadRequest."""
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise BadRequest(f"{name}={value!r:.60}: expected a whole number from {low} to {high}", param=name)
    return value


def boolean(body: Mapping[str, Any], name: str) -> bool:
    """True or False; False when it isn't given. Raises BadRequest."""
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise BadRequest(f"{name}={value!r:.60}: expected true or false", param=name)
    return bool(value)


def token_ids(body: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """A short list of token ids; empty when it isn't given. Raises BadRequest."""
    value = body.get(name) or []
    if (
        not isinstance(value, list)
        or len(value) > _MOST_STOPS
        or not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i <= _MOST_TOKENS for i in value)
    ):
        raise BadRequest(f"{name}={value!r:.60}: expected at most {_MOST_STOPS} token ids", param=name)
    return tuple(value)


# ------------------------------------------------------------------------------------------------ events


def sse_event(data: Any, name: str = "") -> bytes:
    """One server-sent event (HTML standard, 9.2) with JSON data, or the text `[DONE]`."""
    text = data.encode() if isinstance(data, str) else msgspec.json.encode(data)
    head = b"event: " + name.encode() + b"\n" if name else b""
    return head + b"data: " + text + b"\n\n"


def slices(text: str) -> Iterator[str]:
    """The text in chunks for streaming; nothing for an empty one."""
    for start in range(0, len(text), _CHUNK):
        yield text[start : start + _CHUNK]
