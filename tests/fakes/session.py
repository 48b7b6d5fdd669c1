"""What tests of the session core share: a template of one token per message, generations, short messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from miles_hpc.core.types import FinishReason, VersionSpan, WeightVersion
from miles_hpc.rollout.engine import Generation
from miles_hpc.rollout.session.core import Commit, Prepared, Session
from miles_hpc.rollout.session.matching import Message
from miles_hpc.rollout.session.template import Junction
from miles_hpc.rollout.session.turn import Tokens, Tools

__all__ = ["END", "OPEN", "OTHER_END", "OneTokenTemplate", "generation", "play", "said"]

END, OPEN, OTHER_END = 1, 2, 3
_FIRST = 10


def said(content: str, role: str = "user", **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


class OneTokenTemplate:
    """Every message is one token, END closes an assistant turn, OPEN opens the next; OTHER_END may be dropped."""

    max_trim_tokens = 1

    def __init__(self) -> None:
        self.ids: dict[str, int] = {}

    def first(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        return [*(self._id(m) for m in messages), OPEN]

    def suffix(self, before: Message, appended: Sequence[Message], tools: Tools) -> list[int]:
        return [END, *(self._id(m) for m in appended), OPEN]

    def junction(self, sampled: Tokens, suffix: list[int]) -> Junction:
        if sampled[-1] == END:
            return Junction(0, suffix[1:])
        return Junction(int(sampled[-1] == OTHER_END), suffix)

    def text(self, sampled: Tokens) -> str:
        return " ".join(map(str, sampled))

    def _id(self, message: Message) -> int:
        return self.ids.setdefault(str(message["content"]), _FIRST + len(self.ids))


def generation(ids: Sequence[int], reason: FinishReason = FinishReason.STOP, **changes: Any) -> Generation:
    """Tokens with log-probs -1, -2, ... under version 1.1."""
    versions = (VersionSpan(version=WeightVersion(1, 1), start=0, end=len(ids)),) if ids else ()
    values: dict[str, Any] = {
        "output_ids": np.asarray(ids, np.int32),
        "log_probs": -np.arange(1, len(ids) + 1, dtype=np.float32),
        "versions": versions,
        "finish_reason": reason,
        "routed_experts": None,
        "cached_tokens": 0,
    }
    return Generation(**(values | changes))


def play(
    session: Session,
    messages: Sequence[Message],
    answer: str,
    ids: Sequence[int] = (100, END),
    reason: FinishReason = FinishReason.STOP,
    *,
    tools: Tools | None = None,
) -> tuple[Prepared, Commit]:
    """One request and its generation."""
    prepared = session.prepare(messages, tools)
    return prepared, session.commit(prepared, generation(ids, reason), said(answer, "assistant"))
