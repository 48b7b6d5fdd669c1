"""What the fuzzer writes down beside a session, and what it expects from that. It never asks a matcher or a history.

Messages have keys: those that must match have the same, and only a change that the matcher must not tolerate gives a
new one. So the place where a request goes on follows from comparing lists of numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from miles_hpc.core.types import FinishReason, SampleStatus, WeightVersion
from miles_hpc.rollout.engine import Generation
from miles_hpc.rollout.session.samples import SessionSample

__all__ = ["Item", "Note", "Notes", "Violation", "same"]


class Violation(AssertionError):
    """The session and the notes disagree."""


def same(what: str, found: object, expected: object) -> None:
    """Raises Violation unless the two are equal."""
    if found != expected:
        raise Violation(f"{what}: found {found!r:.300}, expected {expected!r:.300}")


@dataclass
class Item:
    """A message of the conversation. Arguments are objects in `message`; `plain` is what templates must be given."""

    key: int
    message: dict[str, Any]
    plain: dict[str, Any]


@dataclass(eq=False)
class Note:
    """What the engine saw and sampled in one recorded turn."""

    number: int
    parent: Note | None
    items: list[Item]  # of the whole path, the assistant's last
    tools: list[Any]
    prompt: list[int]
    output: list[int]
    generation: Generation
    routed_experts: object
    children: list[Note] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.keys = [item.key for item in self.items]
        self.depth: int = 1 if self.parent is None else self.parent.depth + 1

    @property
    def seen(self) -> list[int]:
        """Prompt and output: what the next prompt goes on from."""
        return [*self.prompt, *self.output]

    @property
    def cut(self) -> bool:
        return self.generation.finish_reason is not FinishReason.STOP


class Notes:
    """The turns of one session; `list` has those of a tree, or the path of a linear history."""

    def __init__(self, kind: str, max_rollback: int, max_turns: int) -> None:
        self.kind, self.max_rollback, self.max_turns = kind, max_rollback, max_turns
        self.list: list[Note] = []
        self.turns = self.branches = self.rollbacks = 0  # recorded so far

    @property
    def full(self) -> bool:
        return self.kind == "tree" and len(self.list) >= self.max_turns

    def place(self, items: list[Item], tools: list[Any]) -> tuple[Note | None, int]:
        """The turn that these messages go on from, or the status that refuses them, 0 for none."""
        keys = [i.key for i in items]
        if self.full or (self.kind == "linear" and self.list and self.list[0].tools != tools):
            return None, 400
        fitting = [n for n in self.list if n.keys == keys[: len(n.keys)] and n.tools == tools]
        parent = max(fitting, key=lambda n: (len(n.items), n.number), default=None)
        back = len(self.list) - (0 if parent is None else parent.depth)
        if self.kind == "linear" and back > self.max_rollback:
            return None, 400
        if parent is not None and len(parent.items) == len(items):
            return parent, 400
        return parent, 409 if parent is not None and parent.cut else 0

    def add(self, note: Note) -> None:
        """A turn was recorded."""
        siblings = [n for n in self.list if n.parent is None] if note.parent is None else note.parent.children
        if self.kind == "linear":
            kept = 0 if note.parent is None else note.parent.depth
            self.rollbacks += kept < len(self.list)
            del self.list[kept:]
        else:
            self.branches += bool(siblings)
            if note.parent is not None:
                note.parent.children.append(note)
        self.list.append(note)
        self.turns += 1

    # ------------------------------------------------------------------------------------------- samples

    def check_samples(self, samples: Iterable[SessionSample], max_seq_len: int | None) -> None:
        """Samples token by token; every completion that fits is trained exactly once. Raises Violation."""
        by_number = {note.number: note for note in self.list}
        trained: set[int] = set()
        for sample in samples:
            path = [by_number[turn.number] for turn in sample.path]
            same("a sample's path", path, _path(path[-1]))
            self._check_sample(sample, path, trained)
            if max_seq_len is not None and len(sample.tokens) > max_seq_len:
                raise Violation(f"a sample of {len(sample.tokens)} tokens: expected at most {max_seq_len}")
        fits = {n.number for n in self.list if all(_fits(above, max_seq_len) for above in _path(n))}
        same("trained turns", trained, fits)

    def _check_sample(self, sample: SessionSample, path: list[Note], trained: set[int]) -> None:
        seen = path[-1].seen
        same("tokens", sample.tokens.tolist(), seen)
        mask, log_probs = [0] * len(seen), [0.0] * len(seen)
        versions: list[WeightVersion | None] = [None] * len(seen)
        for note, after in zip(path, [*path[1:], None], strict=True):
            if note.number in trained:
                continue
            trained.add(note.number)
            given = note.generation
            for span in given.versions:
                for i in range(span.start, span.end):
                    at = len(note.prompt) + i
                    # What a junction dropped isn't there any more: another token stands at its place.
                    if after is None or after.prompt[at : at + 1] == [note.output[i]]:
                        mask[at], log_probs[at], versions[at] = 1, float(given.log_probs[i]), span.version
        same("mask", sample.loss_mask.tolist(), mask)
        same("log-probs", sample.log_probs.tolist(), log_probs)
        named: list[WeightVersion | None] = [None] * len(seen)
        for span in sample.versions:
            named[span.start : span.end] = [span.version] * (span.end - span.start)
        same("versions", named, versions)
        same("routed experts", list(sample.routed_experts), [note.routed_experts for note in path])
        same("status", sample.status, self._status(path[-1]))

    def _status(self, last: Note) -> SampleStatus:
        if last.children if self.kind == "tree" else last is not self.list[-1]:
            return SampleStatus.TRUNCATED  # a turn that went on from it was too long
        return {
            FinishReason.STOP: SampleStatus.COMPLETED,
            FinishReason.LENGTH: SampleStatus.TRUNCATED,
            FinishReason.ABORT: SampleStatus.ABORTED,
        }[last.generation.finish_reason]


def _path(note: Note | None) -> list[Note]:
    path = []
    while note is not None:
        path.append(note)
        note = note.parent
    return path[::-1]


def _fits(note: Note, max_seq_len: int | None) -> bool:
    return max_seq_len is None or len(note.prompt) + len(note.output) <= max_seq_len
