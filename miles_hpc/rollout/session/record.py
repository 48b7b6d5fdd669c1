"""The token record of one trajectory: what the engine saw and sampled, never what a re-tokenisation would give.

    tokens   [ rendered prompt | sampled turn 0 | suffix 0 | sampled turn 1 | suffix 1 | ... ]
    mask         0 0 0 0 0         1 1 1 1         0 0 0        1 1 1 1         0 0
    routing  row i = the experts that token i took as an input; the last sampled token has none yet

Only the prompt's first rendering and each suffix (what the template puts between the end of one assistant text
and the next opened turn) are tokenised. Sampled tokens are taken over as they are. A turn whose end-of-turn token
wasn't sampled (its length limit cut it) ends the record: a conversation that goes on after it never existed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from miles_hpc.core.errors import ProtocolError, UserError
from miles_hpc.core.types import (
    Array,
    ChatMessage,
    FinishReason,
    RoutedExpertsRef,
    SampleStatus,
    Trajectory,
    VersionSpan,
)
from miles_hpc.rollout.engine import Generation
from miles_hpc.rollout.session.tokenizer import MARK, ChatTokenizer
from miles_hpc.rollout.session.turn import check_generation

__all__ = ["SessionRecord"]


class SessionRecord:
    """Linear history of one trajectory. Not thread-safe; owned by the task that plays the trajectory.

    Call `append_generation` or `append_scripted` for an assistant turn, then `append_messages` for what the
    environment says, and so on; ProtocolError on any other order.
    """

    def __init__(self, tokenizer: ChatTokenizer, prompt: Sequence[ChatMessage]) -> None:
        self._tokenizer = tokenizer
        self.messages: list[ChatMessage] = list(prompt)
        ids = tokenizer.encode(tokenizer.render(self.messages, generate=True))
        self.prompt_tokens = len(ids)
        self.turns = 0
        self.closed = False
        self._tokens = ids
        self._mask = [0] * len(ids)
        self._log_probs = [0.0] * len(ids)
        self._versions: list[VersionSpan] = []
        self._rows: list[npt.NDArray[np.unsignedinteger]] = []
        self._n_rows = 0
        self._awaits_assistant = True
        self._stop_id: int | None = None  # the token that ended the last assistant turn

    # ------------------------------------------------------------------------------------------- state

    @property
    def n_tokens(self) -> int:
        return len(self._tokens)

    @property
    def n_sampled(self) -> int:
        return sum(self._mask)

    @property
    def n_rows(self) -> int:
        """Routed-expert rows held; the next generation's rows start here."""
        return self._n_rows

    @property
    def versions(self) -> tuple[VersionSpan, ...]:
        """Which weights sampled which tokens; covers exactly what an engine sampled."""
        return tuple(self._versions)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The tokens that end an assistant turn."""
        return self._tokenizer.stop_ids

    def input_ids(self) -> npt.NDArray[np.int32]:
        """All tokens so far, int32 [T]."""
        return np.asarray(self._tokens, dtype=np.int32)

    def text(self) -> str:
        """The record's tokens as text, special tokens spelled out."""
        return self._tokenizer.decode(self._tokens)

    # ------------------------------------------------------------------------------------------- growth

    def append_generation(self, generation: Generation) -> str:
        """Take over what the engine sampled; returns the assistant's text without its end-of-turn token.

        Raises ProtocolError when lengths, version spans or routing rows don't fit the record.
        """
        self._expect(True)
        ids, start = [int(i) for i in generation.output_ids], self.n_tokens
        check_generation(generation)
        if generation.routed_experts is not None and ids:
            expected = start + len(ids) - 1 - self._n_rows
            if len(generation.routed_experts) != expected:
                raise ProtocolError(
                    f"engine returned {len(generation.routed_experts)} routed-expert rows from row {self._n_rows} on; "
                    f"expected {expected} for {start} + {len(ids)} tokens"
                )
            self._rows.append(generation.routed_experts)
            self._n_rows += expected
        for span in generation.versions:
            self._add_span(span.version, start + span.start, start + span.end)
        self._tokens += ids
        self._mask += [1] * len(ids)
        self._log_probs += [float(p) for p in generation.log_probs]
        stopped = generation.finish_reason is FinishReason.STOP and bool(ids) and ids[-1] in self._tokenizer.stop_ids
        return self._end_turn(ids, ids[-1] if stopped else None)

    def append_scripted(self, text: str) -> str:
        """An assistant turn that a script wrote: tokenised with its end-of-turn token, mask 1, no version.

        Returns the text as its tokens decode (a character tokenizer drops characters outside its alphabet).
        """
        self._expect(True)
        stop = self._closing_stop_id()
        ids = [*self._tokenizer.encode(self._tokenizer.plain(text)), stop]
        self._tokens += ids
        self._mask += [1] * len(ids)
        self._log_probs += [0.0] * len(ids)
        return self._end_turn(ids, stop)

    def append_messages(self, messages: Sequence[ChatMessage]) -> int:
        """What the environment said, then an opened assistant turn; returns the number of tokens added.

        Special tokens spelled out in the contents are removed. ProtocolError when the last turn was cut.
        """
        suffix, kept = self._suffix(messages)
        self._expect(False)
        self._tokens += suffix
        self._mask += [0] * len(suffix)
        self._log_probs += [0.0] * len(suffix)
        self.messages += kept
        self._awaits_assistant = True
        return len(suffix)

    def suffix_length(self, messages: Sequence[ChatMessage]) -> int:
        """How many tokens `append_messages` would add."""
        return len(self._suffix(messages)[0])

    # ------------------------------------------------------------------------------------------- result

    def routed_experts(self) -> npt.NDArray[np.unsignedinteger] | None:
        """Rows [n, moe_layers, top_k] recorded so far, or None."""
        if not self._rows:
            return None
        return self._rows[0] if len(self._rows) == 1 else np.concatenate(self._rows)

    def trim(self) -> None:
        """Drop what follows the last sampled token: nothing learns from it, and it has no routing rows."""
        last = next((i for i in range(self.n_tokens - 1, -1, -1) if self._mask[i]), None)
        if last is None:
            return
        del self._tokens[last + 1 :], self._mask[last + 1 :], self._log_probs[last + 1 :]
        self.closed = True

    def to_trajectory(
        self,
        *,
        group_id: int,
        index: int,
        reward: float,
        status: SampleStatus,
        label: str = "",
        routed_experts: RoutedExpertsRef | None = None,
        metadata: dict[str, object] | None = None,
    ) -> Trajectory:
        """The finished record; T tokens, with T - 1 routed-expert rows behind `routed_experts`."""
        return Trajectory(
            group_id=group_id,
            index=index,
            tokens=Array.of(self.input_ids()),
            loss_mask=Array.of(np.asarray(self._mask, dtype=np.uint8)),
            log_probs=Array.of(np.asarray(self._log_probs, dtype=np.float32)),
            versions=tuple(self._versions),
            reward=reward,
            status=status,
            turns=self.turns,
            label=label,
            routed_experts=routed_experts,
            metadata=metadata or {},
        )

    # ------------------------------------------------------------------------------------------- details

    def _expect(self, assistant: bool) -> None:
        if self.closed:
            raise ProtocolError("the record is closed: its last turn was cut off or it was trimmed")
        if self._awaits_assistant is not assistant:
            raise ProtocolError(f"expected {'an assistant turn' if self._awaits_assistant else 'messages'} next")

    def _add_span(self, version: object, start: int, end: int) -> None:
        last = self._versions[-1] if self._versions else None
        if last is not None and last.version == version and last.end == start:
            self._versions[-1] = VersionSpan(version=last.version, start=last.start, end=end)
        else:
            self._versions.append(VersionSpan(version=version, start=start, end=end))  # type: ignore[arg-type]

    def _end_turn(self, ids: list[int], stop: int | None) -> str:
        text = self._tokenizer.decode(ids if stop is None else ids[:-1])
        self.messages.append(ChatMessage(role="assistant", content=text))
        self.turns += 1
        self._stop_id = stop
        self._awaits_assistant = False
        self.closed = stop is None
        return text

    def _closing_stop_id(self) -> int:
        closed = self._tokenizer.render([*self.messages, ChatMessage(role="assistant", content=MARK)], generate=False)
        ids = self._tokenizer.encode(closed.rpartition(MARK)[2])
        return ids[0] if ids and ids[0] in self._tokenizer.stop_ids else self._tokenizer.stop_ids[0]

    def _suffix(self, messages: Sequence[ChatMessage]) -> tuple[list[int], list[ChatMessage]]:
        if self.closed or self._stop_id is None:
            raise ProtocolError("nothing can follow: the last assistant turn didn't end with a stop token")
        kept = [ChatMessage(role=m.role, content=self._tokenizer.plain(m.content)) for m in messages]
        # The newest assistant text is replaced by a mark, so that a template that trims it can't shift the cut.
        marked = [*self.messages[:-1], ChatMessage(role="assistant", content=MARK), *kept]
        rest = self._tokenizer.render(marked, generate=True).partition(MARK)[2]
        stop = self._tokenizer.decode([self._stop_id])
        if not rest.startswith(stop):
            raise UserError(
                f"chat template of {self._tokenizer.folder}: an assistant turn ends with {rest[:12]!r}, "
                f"but the engine stopped at {stop!r}: set eos_token to the template's end-of-turn token"
            )
        return self._tokenizer.encode(rest[len(stop) :]), kept
