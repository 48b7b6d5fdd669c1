"""A session: which tokens the engine gets for a list of messages, and what becomes of what it samples.

    client ── messages, tools ──▶ prepare ──▶ Prepared ── input_ids() ──▶ engine
                                                  │                          │
    trainer ◀── samples ── record ◀── commit(prepared, generation, message) ◀╯

Pure: no HTTP, no engine, no waiting. Nothing is held between `prepare` and `commit`, so generations may overlap, be
given up, or be reported twice. One thread at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from miles_hpc.core.errors import ProtocolError
from miles_hpc.core.types import FinishReason
from miles_hpc.rollout.engine import Generation
from miles_hpc.rollout.session.errors import BadGeneration, BadHistory, BrokenInvariant, SessionGone
from miles_hpc.rollout.session.history import Attachment, History, TreeHistory
from miles_hpc.rollout.session.matching import Message
from miles_hpc.rollout.session.samples import SessionSample, assemble
from miles_hpc.rollout.session.template import SessionTemplate
from miles_hpc.rollout.session.turn import Tokens, Tools, Turn, check_generation, copy_json, input_ids

__all__ = ["Commit", "Prepared", "Session"]


@dataclass(frozen=True, eq=False)
class Prepared:
    """A prompt and where its turn will attach."""

    number: int  # of the request within the session
    attachment: Attachment
    appended: list[Message]  # what the request adds to the attached path
    tools: Tools
    drop: int  # of the attached turn's output tokens
    new_ids: Tokens  # int32 [n_new]: all that was tokenised for this prompt
    session: Session = field(repr=False)

    @property
    def n_tokens(self) -> int:
        """Length of the prompt."""
        parent = self.attachment.parent
        return (0 if parent is None else parent.n_tokens - self.drop) + len(self.new_ids)

    def input_ids(self) -> Tokens:
        """The whole prompt in one new buffer, int32 [n_tokens]."""
        return input_ids(self.attachment.parent, self.drop, self.new_ids)


@dataclass(frozen=True)
class Commit:
    """What `commit` did: the recorded turn, or None and the reason. The client gets its answer either way."""

    turn: Turn | None
    reason: str = ""


class Session:
    """The record of one session's conversations. What it raises carries an HTTP status (see session/errors.py).

    Messages and tools are copied; arrays of a generation are, too. `session_id` is for texts only.
    """

    def __init__(self, template: SessionTemplate, history: History, *, session_id: str = "") -> None:
        self.session_id = session_id
        self.closed = False
        self.history = history
        self._template = template
        self._next_request = 0
        # As long as somebody holds the prompt: a replaced turn isn't kept for answers that nobody can ask for.
        self._commits: WeakKeyDictionary[Prepared, Commit] = WeakKeyDictionary()

    # ------------------------------------------------------------------------------------------- a turn

    def prepare(self, messages: Sequence[Message], tools: Tools | None = None) -> Prepared:
        """The prompt for `messages`, the whole conversation as the client has it. Changes nothing that is recorded.

        Raises SessionGone, BadHistory, CannotExtend, MatcherFailed or BrokenInvariant.
        """
        self._check_open()
        if not isinstance(messages, list | tuple) or not messages:
            raise BadHistory(f"messages: expected a list of at least one, found {type(messages).__name__}")
        if tools is not None and not isinstance(tools, list | tuple):
            raise BadHistory(f"tools: expected a list, found {type(tools).__name__}")
        messages, tools = list(messages), list(tools or ())
        try:
            attachment = self.history.attach(messages, tools)
            return self._prepare(attachment, messages[attachment.n_matched :], tools)
        except RecursionError as error:  # JSON decoders allow more levels than Python functions that go through them
            raise BadHistory("messages or tools are nested too deeply: send flatter ones") from error

    def prepare_after(self, turn: Turn, appended: Sequence[Message]) -> Prepared:
        """As `prepare` for a caller that knows which turn it goes on from: costs what is appended, nothing else."""
        self._check_open()
        return self._prepare(self.history.after(turn), list(appended), turn.tools)

    def commit(
        self,
        prepared: Prepared,
        generation: Generation,
        message: Message | None = None,
        *,
        routed_experts: object = None,
    ) -> Commit:
        """Record what an engine made of `prepared`; `message` is the assistant's as the client gets it.

        Without `message`, it is the sampled text. A repeated call gives the first call's answer. Nothing is recorded,
        and the reason is told, when the session is closed, nothing was sampled, or the linear history moved on.
        Raises BadGeneration when the generation contradicts itself or an earlier one for the same `prepared`.
        """
        if prepared.session is not self:
            raise BrokenInvariant(f"request {prepared.number} is another session's: commit it there")
        before = self._commits.get(prepared)
        if before is not None:
            if before.turn is not None and not np.array_equal(before.turn.output_ids, generation.output_ids):
                raise BadGeneration(f"request {prepared.number} was committed before, with other tokens")
            return before
        if self.closed:
            return Commit(None, "the session is closed")
        try:
            check_generation(generation)
        except ProtocolError as error:
            raise BadGeneration(str(error)) from error
        if len(generation.output_ids) == 0:
            return Commit(None, "nothing was sampled")
        commit = self._record(prepared, generation, message, routed_experts)
        self._commits[prepared] = commit
        return commit

    def close(self) -> None:
        """Record nothing more; `samples` still works."""
        self.closed = True

    # ------------------------------------------------------------------------------------------- result

    def samples(self, max_seq_len: int | None = None, *, drop_retries: bool = False) -> list[SessionSample]:
        """What to train: one sample per path that nothing goes on from, in order of recording.

        `drop_retries` leaves out a path's end that has a younger sibling (Miles' default). Raises NoSample.
        """
        leaves = self.history.leaves()
        if drop_retries and isinstance(self.history, TreeHistory):
            tree = self.history
            leaves = [leaf for leaf in leaves if tree.siblings(leaf)[-1] is leaf]
        return assemble(leaves, max_seq_len)

    # ------------------------------------------------------------------------------------------- details

    def _check_open(self) -> None:
        if self.closed:
            raise SessionGone(f"session {self.session_id or '(no name)'} is closed: open another one")

    def _prepare(self, attachment: Attachment, appended: list[Message], tools: Tools) -> Prepared:
        parent, drop = attachment.parent, 0
        if parent is None:
            ids = self._template.first(appended, tools)
        else:
            tools = parent.tools
            suffix = self._template.suffix(parent.messages[-1], appended, tools)
            drop, ids = self._template.junction(parent.output_ids, suffix)
            most = min(self._template.max_trim_tokens, len(parent.output_ids))
            if not 0 <= drop <= most:
                raise BrokenInvariant(
                    f"the prompt after turn {parent.number} would drop {drop} of its sampled tokens: "
                    f"at most {most} may be; check the chat family's trims"
                )
        if not ids:
            raise BrokenInvariant("the new messages give no tokens: check the chat template")
        self._next_request += 1
        own: list[Any] = copy_json(appended)
        own_tools: Tools = tools if parent is not None else copy_json(tools)
        return Prepared(self._next_request - 1, attachment, own, own_tools, drop, np.asarray(ids, dtype=np.int32), self)

    def _record(
        self, prepared: Prepared, generation: Generation, message: Message | None, routed_experts: object
    ) -> Commit:
        output_ids = np.array(generation.output_ids, dtype=np.int32)
        if message is None:
            message = {"role": "assistant", "content": self._template.text(output_ids)}
        turn = Turn(
            number=self.history.next_number,
            parent=prepared.attachment.parent,
            messages=[*prepared.appended, copy_json(message)],
            tools=prepared.tools,
            drop=prepared.drop,
            new_ids=prepared.new_ids,
            output_ids=output_ids,
            log_probs=np.array(generation.log_probs, dtype=np.float32),
            versions=generation.versions,
            finish_reason=generation.finish_reason,
            ended=generation.finish_reason is FinishReason.STOP,
            routed_experts=routed_experts if routed_experts is not None else generation.routed_experts,
        )
        reason = self.history.append(prepared.attachment, turn)
        return Commit(None, reason) if reason else Commit(turn)
