"""A client, a fake engine and their own notes beside one session: what the session answers must agree with the notes.

    conversation ── sometimes bent ──▶ session.prepare ─▶ prompt ─▶ engine: any tokens at all ─▶ session.commit
         ▲               │                   │                            │
         │               ▼                   ▼                            ▼
         ╰──────── notes: which turn it goes on from, or which status · what the engine saw and sampled

The notes know by construction which messages are the same: every message has a key of its own, and only a change that
the matcher must not tolerate gives it a new one. They never ask a matcher or a history.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from typing import Any

import numpy as np

from miles_hpc.core.types import FinishReason, VersionSpan, WeightVersion
from miles_hpc.rollout.engine import Generation
from miles_hpc.rollout.session.core import Prepared, Session
from miles_hpc.rollout.session.errors import SessionError
from miles_hpc.rollout.session.history import LinearHistory, TreeHistory
from miles_hpc.rollout.session.matching import load_matcher
from miles_hpc.rollout.session.template import HuggingFaceTemplate
from miles_hpc.rollout.session.tokenizer import ChatTokenizer
from tools.fuzz_session.bending import change, vary

__all__ = ["Violation", "World"]

_TOOLS = [{"type": "function", "function": {"name": "run", "description": "runs", "parameters": {"type": "object"}}}]
_SAID = "said 0"


class Violation(AssertionError):
    """The session and the notes disagree."""


@dataclass
class Item:
    """A message of the conversation; `key` is the same for messages that must match. Arguments are objects here."""

    key: int
    message: dict[str, Any]


@dataclass
class Note:
    """What the engine saw and sampled in one recorded turn."""

    number: int
    parent: Note | None
    items: list[Item]  # of the whole path, the assistant's last
    prompt: list[int]
    generation: Generation
    children: list[Note] = field(default_factory=list)

    @property
    def depth(self) -> int:
        return 1 if self.parent is None else self.parent.depth + 1


class World:
    """One session of `kind` linear or tree, played with `rng`. `play` raises Violation."""

    def __init__(
        self, rng: Random, tokenizer: ChatTokenizer, template: HuggingFaceTemplate, kind: str, matcher: str
    ) -> None:
        self.rng, self.tokenizer, self.template, self.kind, self.matcher = rng, tokenizer, template, kind, matcher
        rule = load_matcher(matcher)
        self.max_rollback = rng.choice((0, 1, 1, 2))
        self.max_turns = rng.choice((5, 1024, 1024))
        self.session = Session(
            template,
            LinearHistory(rule, max_rollback=self.max_rollback)
            if kind == "linear"
            else TreeHistory(rule, max_turns=self.max_turns),
        )
        self.tools = rng.choice(([], _TOOLS))
        self.notes: list[Note] = []  # tree: all; linear: the path
        self.keys = 0
        self.turns = 0  # recorded
        self.refused: dict[int, int] = {}
        special = {tokenizer.encode(text)[0] for text in tokenizer.special_tokens}
        self.lossy = tokenizer.decode(tokenizer.encode("日")) != "日"  # drops what it has no token for
        self.ordinary = [i for i in range(tokenizer.vocab_size) if i not in special]

    def play(self, requests: int) -> None:
        """That many requests, then the samples are compared with the notes."""
        for _ in range(requests):
            self._request()
        self._check_samples(None)
        longest = max((len(n.prompt) + len(n.generation.output_ids) for n in self.notes), default=2)
        self._check_samples(self.rng.randint(1, longest))
        self.session.close()
        self._expect(404, [{"role": "user", "content": "x"}])

    # ------------------------------------------------------------------------------------------- one request

    def _request(self) -> None:
        base, items = self._conversation()
        rng = self.rng
        status = 0
        if rng.random() < 0.03:
            if base is None:
                return self._expect(400, [])
            items, status = items[: len(base.items)], 400  # nothing for the assistant to answer
        elif rng.random() < 0.02:
            items = [*items, Item(-1, {"role": "critic", "content": "x"})]
            status = 400
        parent, wrong = self._place(items)
        status = wrong or status
        matched = 0 if parent is None else len(parent.items)
        messages = [vary(rng, i.message, self.matcher) for i in items[:matched]] + [
            _as_sent(i.message) for i in items[matched:]
        ]
        if status:
            return self._expect(status, messages)
        prepared = [self._prepare(parent, items, messages)]
        if rng.random() < 0.1:  # a second request from the same point while the first is generated
            prepared.append(self._prepare(parent, items, messages))
        rng.shuffle(prepared)
        committed = False
        for one in prepared:
            committed |= self._generate(one, parent, items, moved=committed and self.kind == "linear")

    def _conversation(self) -> tuple[Note | None, list[Item]]:
        """From which turn the client goes on, and what it sends: that turn's path, perhaps changed, and more."""
        rng = self.rng
        base: Note | None = None
        if self.notes and rng.random() < 0.95:
            back = 1 if rng.random() < 0.75 else rng.randint(1, len(self.notes))
            base = self.notes[-back]
        if base is None:
            start = [self._item({"role": "user", "content": self._text()})]
            if rng.random() < 0.5:
                start.insert(0, self._item({"role": "system", "content": self._text()}))
            return None, start
        items = list(base.items)
        if rng.random() < 0.06:
            at = rng.randrange(len(items))
            items[at] = self._item(change(rng, items[at].message, self.matcher))
        calls = items[-1].message.get("tool_calls")
        if calls and rng.random() < 0.9:
            for call in calls:
                items.append(self._item({"role": "tool", "tool_call_id": call["id"], "content": self._text()}))
        elif rng.random() < 0.05:  # the client puts words into the assistant's mouth
            items.append(self._item({"role": "user", "content": self._text()}))
            items.append(self._item({"role": "assistant", "content": self._text()}))
        if items[-1].message["role"] == "assistant" or rng.random() < 0.2:
            items.append(self._item({"role": "user", "content": self._text()}))
        return base, items

    def _place(self, items: list[Item]) -> tuple[Note | None, int]:
        """The turn that these messages go on from, or the status that refuses them; by the keys alone."""
        keys = [i.key for i in items]
        if self.kind == "tree" and len(self.notes) >= self.max_turns:
            return None, 400
        fitting = [n for n in self.notes if [i.key for i in n.items] == keys[: len(n.items)]]
        parent = max(fitting, key=lambda n: (len(n.items), n.number), default=None)
        back = len(self.notes) - (0 if parent is None else parent.depth)
        if self.kind == "linear" and back > self.max_rollback:
            return None, 400
        if parent is not None and len(parent.items) == len(items):
            return parent, 400
        if parent is not None and parent.generation.finish_reason is not FinishReason.STOP:
            return parent, 409
        return parent, 0

    def _prepare(self, parent: Note | None, items: list[Item], messages: list[dict[str, Any]]) -> Prepared:
        try:
            prepared = self.session.prepare(messages, list(self.tools))
        except SessionError as error:
            raise Violation(f"refused with {error.status}, expected to be taken: {error}") from error
        turn = prepared.attachment.parent
        expected = None if parent is None else parent.number
        _same("attached turn", None if turn is None else turn.number, expected)
        prompt = prepared.input_ids().tolist()
        _same("length of the prompt", len(prompt), prepared.n_tokens)
        if parent is None:
            _same("first prompt", self.tokenizer.decode(prompt), self._render(items, True))
        else:
            self._check_suffix(parent, items, prompt)
        return prepared

    def _check_suffix(self, parent: Note, items: list[Item], prompt: list[int]) -> None:
        """The prompt begins with what was seen and sampled, and goes on as the template would, rendering it all."""
        seen = [*parent.prompt, *parent.generation.output_ids.tolist()]
        keep = len(seen)
        if prompt[:keep] != seen:
            keep -= self.template.max_trim_tokens
        _same("recorded tokens in the prompt", prompt[:keep], seen[:keep])
        # What was said last is replaced by a word of no meaning: only what stands behind it is compared.
        said = items[len(parent.items) - 1].message | {"content": _SAID}
        talk = [*items[: len(parent.items) - 1], Item(-1, said)]
        shorter = self._render(talk, False).rpartition(_SAID)[2]
        whole = self._render([*talk, *items[len(parent.items) :]], True).rpartition(_SAID)[2]
        if not whole.startswith(shorter):
            raise Violation(f"the fuzzer's template isn't append-only: {shorter!r}, {whole!r}")
        added, text = whole[len(shorter) :], self.tokenizer.decode(prompt[keep:])
        # In front of it may stand what closes the assistant's turn; what opened the next was perhaps sampled.
        opened = self.tokenizer.decode(seen[keep - 1 : keep])
        front = text[: len(text) - len(added)] if text.endswith(added) else None
        if front is None and added == opened + text:
            front = ""
        wrong_end = False
        if front is not None and self.template.max_trim_tokens == 0:  # the template closes turns: once, not twice
            closed = seen[keep - 1] in self.tokenizer.stop_ids
            wrong_end = closed is any(i in self.tokenizer.stop_ids for i in self.tokenizer.encode(front))
        if front is None or wrong_end or not shorter.endswith(front):
            raise Violation(f"suffix {text!r}: expected {added!r} behind the end of {shorter[-20:]!r}")

    # ------------------------------------------------------------------------------------------- the engine

    def _generate(self, prepared: Prepared, parent: Note | None, items: list[Item], *, moved: bool) -> bool:
        generation, message = self._sample(), self._reply()
        prompt = prepared.input_ids().tolist()
        commit = self.session.commit(prepared, generation, _as_sent(message))
        again = self.session.commit(prepared, generation, _as_sent(message))
        if len(generation.output_ids) == 0 or moved or (self.kind == "tree" and len(self.notes) >= self.max_turns):
            if commit.turn is not None or not commit.reason:
                raise Violation(f"recorded turn {commit.turn}, expected a reason why not")
            return False
        if commit.turn is None or again.turn is not commit.turn:
            raise Violation(f"not recorded ({commit.reason}), or recorded twice")
        note = Note(commit.turn.number, parent, [*items, self._item(message)], prompt, generation)
        if self.kind == "linear":
            del self.notes[0 if parent is None else parent.depth :]
        elif parent is not None:
            parent.children.append(note)
        self.notes.append(note)
        self.turns += 1
        return True

    def _sample(self) -> Generation:
        """Any tokens: broken UTF-8, splits that no tokenizer makes. Ends in every way that an engine has."""
        rng = self.rng
        ids = [rng.choice(self.ordinary) for _ in range(rng.randint(0, 12))]
        reason = FinishReason.STOP
        kind = rng.random()
        if kind < 0.88 or not ids:
            ids.append(rng.choice(self.tokenizer.stop_ids))
        elif kind > 0.96:
            reason = rng.choice((FinishReason.LENGTH, FinishReason.ABORT))
            ids = ids if rng.random() < 0.9 else []
        cuts = sorted({0, len(ids), *(rng.randint(0, len(ids)) for _ in range(rng.randint(0, 2)))})
        return Generation(
            output_ids=np.asarray(ids, np.int32),
            log_probs=np.asarray([-rng.random() - 1e-6 for _ in ids], np.float32),
            versions=tuple(
                VersionSpan(version=WeightVersion(1, i), start=start, end=end)
                for i, (start, end) in enumerate(pairwise(cuts))
            ),
            finish_reason=reason,
            routed_experts=None,
            cached_tokens=0,
        )

    def _reply(self) -> dict[str, Any]:
        """What the client is told; nothing ties it to the tokens."""
        rng = self.rng
        message: dict[str, Any] = {"role": "assistant", "content": self._text()}
        if rng.random() < 0.3:
            message["reasoning_content"] = self._text() + "."
        if rng.random() < 0.4:
            names = [f"c{self.keys}-{i}" for i in range(rng.randint(1, 2))]
            arguments = {"path": self._text(), "n": rng.randint(0, 9), "x": rng.random(), "deep": {"b": [True, None]}}
            call = {"name": "run", "arguments": arguments}
            message["tool_calls"] = [{"id": name, "type": "function", "function": dict(call)} for name in names]
        return message

    # ------------------------------------------------------------------------------------------- checks

    def _expect(self, status: int, messages: list[dict[str, Any]]) -> None:
        try:
            self.session.prepare(messages, list(self.tools))
        except SessionError as error:
            _same(f"status of '{error}'", error.status, status)
            self.refused[status] = self.refused.get(status, 0) + 1
        else:
            raise Violation(f"taken, expected status {status}")

    def _check_samples(self, max_seq_len: int | None) -> None:
        """Samples against the notes, token by token; every completion that fits is trained exactly once."""
        trained: set[int] = set()
        for sample in self.session.samples(max_seq_len):
            path = [self._note(turn.number) for turn in sample.path]
            last = path[-1]
            seen = [*last.prompt, *last.generation.output_ids.tolist()]
            _same("tokens", sample.tokens.tolist(), seen)
            if max_seq_len is not None and len(seen) > max_seq_len:
                raise Violation(f"a sample of {len(seen)} tokens: expected at most {max_seq_len}")
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
                        if after is None or after.prompt[: at + 1][at:] == [int(given.output_ids[i])]:
                            mask[at], log_probs[at], versions[at] = 1, float(given.log_probs[i]), span.version
            _same("mask", sample.loss_mask.tolist(), mask)
            _same("log-probs", sample.log_probs.tolist(), log_probs)
            named: list[WeightVersion | None] = [None] * len(seen)
            for span in sample.versions:
                named[span.start : span.end] = [span.version] * (span.end - span.start)
            _same("versions", named, versions)
        fits = {
            note.number
            for note in self.notes
            if max_seq_len is None or len(note.prompt) + len(note.generation.output_ids) <= max_seq_len
        }
        _same("trained turns", trained, fits)

    def _note(self, number: int) -> Note:
        return next(note for note in self.notes if note.number == number)

    # ------------------------------------------------------------------------------------------- details

    def _item(self, message: dict[str, Any]) -> Item:
        self.keys += 1
        return Item(self.keys, message)

    def _text(self) -> str:
        """No two are the same."""
        self.keys += 1
        words = ("then", "the tool", "user", '{"a": 1}', "\n\n", "  ", "a file", "naïve", "日本", "😀")
        return " ".join([*self.rng.choices(words, k=self.rng.randint(0, 4)), str(self.keys)])

    def _render(self, items: list[Item], generate: bool) -> str:
        text = self.tokenizer.render_rows([i.message for i in items], generate=generate, tools=self.tools)
        return self.tokenizer.decode(self.tokenizer.encode(text)) if self.lossy else text


def _as_sent(message: dict[str, Any]) -> dict[str, Any]:
    """Tool arguments as the text that OpenAI's shape has."""
    if not message.get("tool_calls"):
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _same(what: str, found: object, expected: object) -> None:
    if found != expected:
        raise Violation(f"{what}: found {found!r:.300}, expected {expected!r:.300}")
