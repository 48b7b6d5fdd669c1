"""A client, a fake engine and notes beside one session: what the session answers must agree with the notes.

conversation ── sometimes bent ──▶ session.prepare ─▶ prompt ─▶ engine: any tokens at all ─▶ session.commit
     ▲               │                   │                            │
     │               ▼                   ▼                            ▼
     ╰──── notes.py: which turn it goes on from, or which status · what the engine saw and sampled
           oracle.py: which tokens the prompt must have
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, replace
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
from tools.fuzz_session.bending import as_sent, change, vary
from tools.fuzz_session.notes import Item, Note, Notes, Violation, same
from tools.fuzz_session.oracle import WORDS, Impossible, Oracle

__all__ = ["Played", "World"]

_TOOLS = [{"type": "function", "function": {"name": "run", "description": "runs", "parameters": {"type": "object"}}}]
_OTHER_TOOLS = [{"type": "function", "function": {"name": "ask", "description": "asks", "parameters": {}}}]
_MALFORMED: tuple[Any, ...] = (
    {"role": "critic", "content": "x"},
    {"content": "x"},
    {"role": "user", "content": 5},
    {"role": "user", "content": [{"type": "image_url"}]},
    "x",
)


@dataclass(frozen=True)
class Played:
    """A tokenizer and template to play with: ours, and what tells how it must behave."""

    template: HuggingFaceTemplate
    oracle: Oracle
    split_texts: list[list[int]]


class World:
    """One session of `kind` linear or tree, played with `rng`. `play` raises Violation."""

    def __init__(self, rng: Random, played: Played, kind: str, matcher: str) -> None:
        self.rng, self.template, self.oracle = rng, played.template, played.oracle
        self.split_texts = played.split_texts
        self.kind, self.matcher = kind, matcher
        rule = load_matcher(matcher)
        self.notes = Notes(kind, max_rollback=rng.choice((0, 1, 1, 2)), max_turns=rng.choice((5, 1024, 1024)))
        self.session = Session(
            self.template,
            LinearHistory(rule, max_rollback=self.notes.max_rollback)
            if kind == "linear"
            else TreeHistory(rule, max_turns=self.notes.max_turns),
        )
        self.tools: list[Any] = rng.choice(([], _TOOLS))
        self.keys = 0
        self.items: dict[str, Item] = {}  # by what they say
        self.split_anew = 0  # recorded turns whose tokens aren't the tokenizer's own
        self.refused: Counter[int] = Counter()

    def play(self, requests: int) -> None:
        """That many requests, then the samples are compared with the notes."""
        for _ in range(requests):
            self._request()
        self.notes.check_samples(self.session.samples(), None)
        longest = max((len(n.prompt) + len(n.output) for n in self.notes.list), default=2)
        for bound in (self.rng.randint(1, longest), longest - 1 or 1):
            self.notes.check_samples(self.session.samples(bound), bound)
        self._expect_no_samples(self.rng.choice((0, -1)))
        self.session.close()
        self._expect(404, [{"role": "user", "content": "x"}], self.tools)

    # ------------------------------------------------------------------------------------------- one request

    def _request(self) -> None:
        rng = self.rng
        base, items = self._conversation()
        tools = self.tools
        if rng.random() < 0.03:
            tools = rng.choice((_OTHER_TOOLS, [], _TOOLS))
        status, malformed = 0, None
        if rng.random() < 0.03:
            if base is None:
                return self._expect(400, [], tools)
            items, status = items[: len(base.items)], 400  # nothing for the assistant to answer
        elif rng.random() < 0.02:
            status, malformed = 400, rng.choice(_MALFORMED)
        parent, wrong = self.notes.place(items, tools)
        matched = 0 if parent is None else len(parent.items)
        status = wrong or status or self._unfit(items, parent)
        if not status:
            try:
                expected = self._expected(parent, items, tools)
            except Impossible:
                status = 400
        messages: list[Any] = [
            vary(rng, item.message, self.matcher) if i < matched else as_sent(item.message)
            for i, item in enumerate(items)
        ]
        if malformed is not None:
            messages.append(malformed)
            if wrong == 400 and parent is not None:
                return None  # with the malformed message there would be something new: of no interest
        if status:
            return self._expect(status, messages, tools)
        prepared = [self._prepare(parent, expected, messages, tools)]
        if rng.random() < 0.1:  # a second request from the same point while the first is generated
            prepared.append(self._prepare(parent, expected, messages, tools))
        _spoil(messages)  # the record must not hang on what a caller does with its objects
        rng.shuffle(prepared)
        committed = False
        for one in prepared:
            moved = committed and self.kind == "linear"
            committed |= self._generate(one, parent, items, tools, expected, moved=moved)
        return None

    def _conversation(self) -> tuple[Note | None, list[Item]]:
        """From which turn the client goes on, and what it sends: that turn's path, perhaps changed, and more."""
        rng, notes = self.rng, self.notes.list
        base: Note | None = None
        if notes and rng.random() < 0.95:
            base = notes[-(1 if rng.random() < 0.75 else rng.randint(1, len(notes)))]
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
            items.append(self._item(self._reply()))
        if items[-1].message["role"] == "assistant" or rng.random() < 0.2:
            items.append(self._item({"role": "user", "content": self._text()}))
        if self.oracle.takes_system and rng.random() < 0.03:
            items.append(self._item({"role": "system", "content": self._text()}))
        return base, items

    def _unfit(self, items: list[Item], parent: Note | None) -> int:
        """The status for roles that the family's templates can't take after an assistant turn."""
        if parent is None:
            return 0
        roles = {item.message["role"] for item in items[len(parent.items) :]}
        return 0 if roles <= set(self.oracle.family.appended) else 400

    def _expected(self, parent: Note | None, items: list[Item], tools: list[Any]) -> list[int]:
        talk = [item.plain for item in items]
        if parent is None:
            return self.oracle.first(talk, tools)
        return self.oracle.after(parent.seen, talk, len(parent.items), tools)

    def _prepare(self, parent: Note | None, expected: list[int], messages: list[Any], tools: list[Any]) -> Prepared:
        try:
            prepared = self.session.prepare(messages, list(tools))
        except SessionError as error:
            raise Violation(f"refused with {error.status}, expected to be taken: {error}") from error
        turn = prepared.attachment.parent
        same("attached turn", None if turn is None else turn.number, None if parent is None else parent.number)
        prompt = prepared.input_ids().tolist()
        if prompt != expected:
            at = next((i for i, (a, b) in enumerate(zip(prompt, expected, strict=False)) if a != b), -1)
            texts = [self.oracle.decode(ids[max(at - 8, 0) : at + 40]) for ids in (prompt, expected)]
            raise Violation(
                f"prompt of {len(prompt)} tokens, expected {len(expected)}; other at {at}: found {texts[0]!r}, "
                f"expected {texts[1]!r}"
            )
        same("length of the prompt", prepared.n_tokens, len(expected))
        return prepared

    # ------------------------------------------------------------------------------------------- the engine

    def _generate(
        self,
        prepared: Prepared,
        parent: Note | None,
        items: list[Item],
        tools: list[Any],
        prompt: list[int],
        *,
        moved: bool,
    ) -> bool:
        generation, message, experts = self._sample(), self._reply(), object()
        same("prompt at commit", prepared.input_ids().tolist(), prompt)
        # An engine's buffers are used again, a client edits what it got.
        handed = replace(generation, output_ids=generation.output_ids.copy(), log_probs=generation.log_probs.copy())
        answer = as_sent(message)
        commit = self.session.commit(prepared, handed, answer, routed_experts=experts)
        again = self.session.commit(prepared, handed, answer)
        handed.output_ids[:], handed.log_probs[:] = 0, 0
        _spoil([answer])
        output = generation.output_ids.tolist()
        if not output or moved or self.notes.full:
            if commit.turn is not None or not commit.reason:
                raise Violation(f"recorded turn {commit.turn}, expected a reason why not")
            return False
        if commit.turn is None or again.turn is not commit.turn:
            raise Violation(f"not recorded ({commit.reason}), or recorded twice")
        said = [*items, self._item(message)]
        self.notes.add(Note(commit.turn.number, parent, said, tools, prompt, output, generation, experts))
        body = output[:-1] if output[-1] in self.oracle.stops else output
        self.split_anew += not self.oracle.canonical(body)
        return True

    def _sample(self) -> Generation:
        """Any tokens: broken UTF-8, splits that no tokenizer makes. Ends in every way that an engine has."""
        rng = self.rng
        ids = self._any_tokens() if rng.random() < 0.5 else list(rng.choice(self.split_texts))
        reason = FinishReason.STOP
        kind = rng.random()
        if kind < 0.88 or not ids:
            ids.append(rng.choice(list(self.oracle.stops)))
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

    def _any_tokens(self) -> list[int]:
        return [self.rng.choice(self.oracle.ordinary) for _ in range(self.rng.randint(0, 12))]

    def _reply(self) -> dict[str, Any]:
        """What the client is told; nothing ties it to the tokens."""
        rng = self.rng
        message: dict[str, Any] = {"role": "assistant", "content": self._text()}
        if rng.random() < 0.3:
            message["reasoning_content"] = self._text() + "."
        if rng.random() < (0.4 if self.oracle.takes_tools else 0.05):
            names = [f"c{self.keys}-{i}" for i in range(rng.randint(1, 2))]
            arguments = {"path": self._text(), "n": rng.randint(0, 9), "x": rng.random(), "deep": {"b": [True, None]}}
            call = {"name": "run", "arguments": arguments}
            message["tool_calls"] = [{"id": name, "type": "function", "function": dict(call)} for name in names]
            # Only where something else tells two such messages apart.
            if self.matcher != "role_content_only" and rng.random() < 0.5:
                message["content"] = rng.choice(("", None))
        return message

    # ------------------------------------------------------------------------------------------- refusals

    def _expect(self, status: int, messages: list[Any], tools: list[Any]) -> None:
        try:
            self.session.prepare(messages, list(tools))
        except SessionError as error:
            same(f"status of '{error}'", error.status, status)
            if "\n" in str(error):
                raise Violation(f"a refusal of more than one line: {error}") from error
            self.refused[status] += 1
        else:
            raise Violation(f"taken, expected status {status}")

    def _expect_no_samples(self, bound: int) -> None:
        try:
            self.session.samples(bound)
        except SessionError as error:
            same(f"status of '{error}'", error.status, 422)
            self.refused[422] += 1
        else:
            raise Violation(f"samples of at most {bound} tokens, expected status 422")

    # ------------------------------------------------------------------------------------------- details

    def _item(self, message: dict[str, Any]) -> Item:
        """With a key of its own, unless it says what another one says: reasoning that was added may be pruned again."""
        said = json.dumps({k: v for k, v in message.items() if v not in (None, "", [])}, sort_keys=True)
        if said not in self.items:
            self.keys += 1
            self.items[said] = Item(self.keys, message, self.oracle.plain(message))
        return self.items[said]

    def _text(self) -> str:
        """No two are the same. Some spell what opens and closes turns."""
        self.keys += 1
        words = self.rng.choices(WORDS, k=self.rng.randint(0, 4))
        if self.rng.random() < 0.1:
            spelled = self.rng.choice(self.oracle.spelled)
            words.append(self.rng.choice((spelled, f"{spelled[:3]}{spelled}{spelled[3:]}")))
        return " ".join([*words, str(self.keys)])


def _spoil(messages: list[Any]) -> None:
    for message in messages:
        message["content"] = "edited afterwards"
        for call in message.get("tool_calls") or []:
            call["function"]["arguments"] = "edited afterwards"
