"""One recorded turn: what the client added, what the engine saw anew, what it sampled.

    root                         turn 1                          turn 2
    new_ids   | output_ids       new_ids        | output_ids     new_ids        | output_ids
    prompt      sampled      ◀── suffix           sampled    ◀── suffix           sampled
                                 drop: how many tokens of the parent's output the suffix replaces

A turn holds its own tokens and a link to the turn before it, so appending one costs its new tokens, however long the
history is, and branches share what they have in common. `input_ids` puts a path together when somebody needs it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from miles_hpc.core.errors import ProtocolError
from miles_hpc.core.types import FinishReason, VersionSpan
from miles_hpc.rollout.engine import Generation
from miles_hpc.rollout.session.matching import Message

__all__ = ["Tokens", "Tools", "Turn", "check_generation", "copy_json", "input_ids", "path_of"]

Tokens: TypeAlias = npt.NDArray[np.int32]

#: Tool descriptions in OpenAI's shape; a list, so that two of them compare.
Tools: TypeAlias = list[Message]


@dataclass(frozen=True, eq=False, slots=True)
class Turn:
    """A checkpoint of a history: one generated assistant turn. Immutable, arrays included; equal only to itself.

    `messages` are those that the client appended, then the assistant's; `versions` count from the turn's first
    output token and cover them all. `routed_experts` is a reference that nobody here looks into.
    """

    number: int  # order of recording within the session, from 0
    parent: Turn | None
    messages: list[Message]
    tools: Tools
    drop: int
    new_ids: Tokens  # int32 [n_new]
    output_ids: Tokens  # int32 [n_output], at least 1
    log_probs: npt.NDArray[np.float32]  # [n_output]
    versions: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    ended: bool  # whether a conversation can go on after it: not cut by a length limit or an abort
    routed_experts: object = None
    depth: int = field(init=False)  # turns up to this one
    n_messages: int = field(init=False)  # of the whole path
    n_tokens: int = field(init=False)  # of the whole path, output included

    def __post_init__(self) -> None:
        parent = self.parent
        before = (0, 0, 0) if parent is None else (parent.depth, parent.n_messages, parent.n_tokens)
        own_tokens = len(self.new_ids) + len(self.output_ids) - self.drop
        for name, value in (
            ("depth", before[0] + 1),
            ("n_messages", before[1] + len(self.messages)),
            ("n_tokens", before[2] + own_tokens),
        ):
            object.__setattr__(self, name, value)
        for array in (self.new_ids, self.output_ids, self.log_probs):
            array.flags.writeable = False


def _upwards(turn: Turn | None) -> Iterator[Turn]:
    while turn is not None:
        yield turn
        turn = turn.parent


def path_of(turn: Turn | None) -> list[Turn]:
    """From the root to `turn`; empty for None."""
    return list(_upwards(turn))[::-1]


def input_ids(turn: Turn | None, drop: int = 0, suffix: Tokens | None = None) -> Tokens:
    """All tokens of the path to `turn` without the last `drop`, then `suffix`: one new buffer, int32 [T].

    `drop` is at most the number of the turn's output tokens.
    """
    n_suffix = 0 if suffix is None else len(suffix)
    end = (0 if turn is None else turn.n_tokens - drop) + n_suffix
    buffer: Tokens = np.empty(end, dtype=np.int32)
    if suffix is not None:
        buffer[end - n_suffix :] = suffix
    end -= n_suffix
    for node in _upwards(turn):
        n_output = len(node.output_ids) - drop
        start = end - n_output
        buffer[start:end] = node.output_ids[:n_output]
        end = start - len(node.new_ids)
        buffer[end:start] = node.new_ids
        drop = node.drop
    return buffer


def check_generation(generation: Generation) -> None:
    """ProtocolError unless every output token has one log-prob and, in order, one weight version."""
    n = len(generation.output_ids)
    if n != len(generation.log_probs):
        raise ProtocolError(f"engine returned {n} tokens but {len(generation.log_probs)} log-probs")
    position = 0
    for span in generation.versions:
        if span.start != position or span.end <= span.start:
            raise ProtocolError(f"version spans {generation.versions} don't cover {n} tokens in order")
        position = span.end
    if position != n:
        raise ProtocolError(f"version spans end at token {position} of {n}")


def copy_json(value: Any) -> Any:
    """`value` with containers of its own, so that a caller who edits its messages doesn't edit the record."""
    if isinstance(value, dict):
        return {k: copy_json(v) for k, v in value.items()}
    return [copy_json(v) for v in value] if isinstance(value, list | tuple) else value
