"""A trace of agent sessions: what each turn adds to its context, and when. Made from stated distributions, or read.

No public trace of multi-turn agents with token counts is at hand, so `generate` draws one. What it follows is how agents
are rolled out: groups of sessions of one task start together and share its prompt; tasks of one kind share a system
prompt; contexts only grow, by a tool's answer and by what is sampled; most sessions are short, some are long.

| drawn | from | default |
|---|---|---|
| starts of groups | a Poisson process | as many sessions open on average as asked for |
| kind of task | Zipf's law over 4 system prompts | 600 to 3000 tokens each |
| a task's own prompt | log-normal | median 400 tokens, sigma 0.7 |
| turns of a session | log-normal, 1 to 120 | median 14, sigma 0.7 |
| a tool's answer | log-normal | median 180 tokens, sigma 1.1 |
| what is sampled in a turn | log-normal | median 120 tokens, sigma 0.8 |
| time of a tool | log-normal | median 1.5 s, sigma 1.0 |

A trace file has one JSON object per session; `read` takes one from anywhere, so that recorded sessions can be replayed.
"""  # noqa: E501

from __future__ import annotations

import math
from pathlib import Path
from random import Random

import msgspec

from checkpoints.publish import publish_bytes
from miles_hpc.core.errors import UserError

__all__ = ["DECODE_TOKENS_PER_S", "Piece", "TracedSession", "TracedTurn", "generate", "read", "write"]

#: How fast an engine decodes one session; prefill isn't modelled in time.
DECODE_TOKENS_PER_S = 60.0
_SYSTEM_PROMPTS = (600, 1100, 1900, 3000)


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """A stretch of tokens. Pieces of one name are the same tokens; those of different names differ in the first."""

    name: str
    n_tokens: int


class TracedTurn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a turn adds: tokens of the prompt that weren't in the context, tokens sampled, and the wait after it."""

    new_tokens: int
    output_tokens: int
    wait_s: float


class TracedSession(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One session. `prompt`: what its first prompt begins with, shared with others by name."""

    key: str
    starts_s: float
    prompt: tuple[Piece, ...]
    turns: tuple[TracedTurn, ...]

    @property
    def duration_s(self) -> float:
        return sum(turn.output_tokens / DECODE_TOKENS_PER_S + turn.wait_s for turn in self.turns)

    @property
    def final_tokens(self) -> int:
        grown = sum(turn.new_tokens + turn.output_tokens for turn in self.turns)
        return grown + sum(piece.n_tokens for piece in self.prompt)


def generate(sessions: int, *, open_sessions: int, group: int = 8, seed: int = 0) -> tuple[TracedSession, ...]:
    """`sessions` sessions in groups, about `open_sessions` of them open at a time, in order of their start."""
    rng = Random(f"trace {seed}")
    drawn = [_session(rng, i, group, seed) for i in range(sessions)]
    mean_s = sum(session.duration_s for session in drawn) / sessions
    starts, at = [], 0.0
    for _ in range(math.ceil(sessions / group)):
        starts.append(at)
        at += rng.expovariate(open_sessions / (mean_s * group))
    tasks = {i: (_task(rng, i, seed)) for i in range(len(starts))}
    return tuple(
        msgspec.structs.replace(session, starts_s=starts[i // group], prompt=tasks[i // group])
        for i, session in enumerate(drawn)
    )


def _session(rng: Random, i: int, group: int, seed: int) -> TracedSession:
    turns = min(max(round(rng.lognormvariate(math.log(14), 0.7)), 1), 120)
    return TracedSession(
        key=f"trace{seed}-g{i // group}-{i % group}",
        starts_s=0.0,
        prompt=(),
        turns=tuple(
            TracedTurn(
                new_tokens=0 if turn == 0 else _tokens(rng, 180, 1.1),
                output_tokens=_tokens(rng, 120, 0.8),
                wait_s=round(rng.lognormvariate(math.log(1.5), 1.0), 3),
            )
            for turn in range(turns)
        ),
    )


def _task(rng: Random, i: int, seed: int) -> tuple[Piece, ...]:
    weights = [1 / rank for rank in range(1, len(_SYSTEM_PROMPTS) + 1)]
    kind = rng.choices(range(len(_SYSTEM_PROMPTS)), weights)[0]
    return Piece(f"system{kind}", _SYSTEM_PROMPTS[kind]), Piece(f"trace{seed}-task{i}", _tokens(rng, 400, 0.7))


def _tokens(rng: Random, median: float, sigma: float) -> int:
    return min(max(round(rng.lognormvariate(math.log(median), sigma)), 1), 20_000)


def write(path: Path, trace: tuple[TracedSession, ...]) -> None:
    """One JSON object per session and line; appears at once."""
    publish_bytes(path, b"".join(msgspec.json.encode(session) + b"\n" for session in trace), durable=False)


def read(path: Path) -> tuple[TracedSession, ...]:
    """Raises UserError, which names the line, for anything else than `write` writes, and for no session at all."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UserError(f"trace {path}: {error.strerror}") from error
    found = []
    for number, line in enumerate(lines, 1):
        try:
            session = msgspec.json.decode(line, type=TracedSession)
        except msgspec.DecodeError as error:
            raise UserError(f"trace {path}, line {number}: {error}: expected a session of bench_session's") from error
        counts = [n for t in session.turns for n in (t.new_tokens, t.output_tokens)] + [
            piece.n_tokens for piece in session.prompt
        ]
        if not session.turns or min(counts) < 0 or min(t.wait_s for t in session.turns) < 0:
            raise UserError(f"trace {path}, line {number}: expected at least one turn, and no negative numbers")
        found.append(session)
    if not found:
        raise UserError(f"trace {path}: no session in it")
    return tuple(sorted(found, key=lambda session: session.starts_s))
