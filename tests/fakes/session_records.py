"""A session with everything that a journal has to keep, and all that is recorded of one, comparable."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from miles_hpc.core.types import FinishReason
from miles_hpc.rollout.session.core import Session
from miles_hpc.rollout.session.history import LinearHistory, TreeHistory
from miles_hpc.rollout.session.matching import load_matcher
from miles_hpc.rollout.session.records import SessionOpened
from miles_hpc.rollout.session.routed_rows import RecordedRows
from miles_hpc.rollout.session.settings import SessionSettings
from tests.fakes.session import OneTokenTemplate, generation, play, said

__all__ = ["a_session", "facts", "linear", "opened", "tree"]


def opened(session: str, **changes: Any) -> SessionOpened:
    chosen = msgspec.json.encode(SessionSettings(**changes))
    return SessionOpened(session=session, token_digest=b"d" * 32, settings=chosen, opened_s=1.5)


def linear() -> LinearHistory:
    return LinearHistory(load_matcher("strict"))


def tree() -> TreeHistory:
    return TreeHistory(load_matcher("strict"))


def a_session(kind: str) -> Session:
    """Turns with a rollback or branches, a cut turn, tools, routed experts and a number that MessagePack can't hold."""
    session = Session(OneTokenTemplate(), linear() if kind == "linear" else tree())
    tools = [{"type": "function", "function": {"name": "f", "x": 10**30}}]
    talk = [said("u1")]
    play(session, talk, "a1", tools=tools)
    talk += [said("a1", "assistant"), said("u2")]
    rows = np.arange(24, dtype=np.uint16).reshape(4, 3, 2)
    prepared = session.prepare(talk, tools)
    session.commit(prepared, generation([100, 101, 3], routed_experts=rows), said("a2", "assistant"))
    play(session, [*talk, said("a2", "assistant"), said("u3é")], "a3", [100, 2], tools=tools)
    play(session, [*talk, said("a2", "assistant"), said("u4")], "a4", [7], FinishReason.LENGTH, tools=tools)
    return session


def rows_of(turn: Any) -> Any:
    rows = turn.routed_experts.array() if isinstance(turn.routed_experts, RecordedRows) else turn.routed_experts
    return None if rows is None else (rows.dtype, rows.tolist())


def facts(session_or_history: Any) -> list[Any]:
    """All that is recorded, comparable."""
    history = getattr(session_or_history, "history", session_or_history)
    return [
        (
            turn.number,
            -1 if turn.parent is None else turn.parent.number,
            turn.messages,
            turn.tools,
            turn.drop,
            turn.new_ids.tolist(),
            turn.output_ids.tolist(),
            turn.log_probs.tolist(),
            turn.versions,
            turn.finish_reason,
            turn.ended,
            rows_of(turn),
            turn.n_tokens,
        )
        for turn in history.turns()
    ]
