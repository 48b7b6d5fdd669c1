"""One request of a session, from its messages to its answer.

    ChatRequest ─▶ prepare ─▶ gateway.generate ─▶ parse, commit ─▶ journal ─▶ Answer
                   locked      not locked           locked           written before anybody is told

| who waits | for what | how long |
|---|---|---|
| prepare, commit | the session's lock | while another prompt of it is rendered or recorded |
| generate | an engine | `request_s` from the request's arrival on, and for what it has then |
| the answer | the journal | `STORE_S`, then NotStored |

A request whose body grew by more than `THREAD_BYTES` since the session's last is rendered and tokenised in a thread:
templates run as Python and give way, tokenizers let go of the interpreter. Smaller ones are done at once. Reading a
body's JSON doesn't give way and isn't worth a thread; the bound on a body's size is the bound on that.
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import time
from concurrent.futures import Executor
from functools import partial
from typing import Any

import msgspec

from miles_hpc.core.deadline import Deadline
from miles_hpc.core.types import SamplingParams
from miles_hpc.dataflow.source import turn_seed
from miles_hpc.rollout.engine import Generation
from miles_hpc.rollout.session.book import OpenSession, SessionBook
from miles_hpc.rollout.session.chat import Answer, ChatRequest, TokenLogProb
from miles_hpc.rollout.session.core import Commit, Prepared
from miles_hpc.rollout.session.errors import BadGeneration, BadRequest, SessionFull, SessionGone, TooLarge
from miles_hpc.rollout.session.records import record_of
from miles_hpc.rollout.session.routed_rows import RecordedRows, first_row
from miles_hpc.rollout.session.tool_calls import assistant_message, parse_turn

__all__ = ["STORE_S", "THREAD_BYTES", "answer"]

#: An answer waits so long for storage.
STORE_S = 30.0

#: A request that brings more than this is rendered in a thread.
THREAD_BYTES = 32 << 10


async def answer(
    book: SessionBook,
    entry: OpenSession,
    request: ChatRequest,
    *,
    body_bytes: int,
    threads: Executor,
    routed_experts: bool,
) -> Answer:
    """What the client gets. Raises SessionError of every kind.

    The turn is recorded unless the session was closed or, with a linear history, went on elsewhere meanwhile; the
    answer's `session` tells. With `routed_experts` False they aren't asked for.
    """
    limits = book.limits
    deadline = Deadline(limits.request_s, f"session {entry.session_id}: a request")
    book.entered(entry)
    try:
        if len(request.messages) > limits.messages:
            raise TooLarge(
                f"{len(request.messages)} messages: this server takes at most {limits.messages} in a request"
            )
        if entry.n_tokens >= limits.session_tokens:
            entry.refused += 1
            raise TooLarge(f"the session has {entry.n_tokens} recorded tokens, the most that it may: open another one")
        try:
            prepared = await _prepare(entry, request, body_bytes, threads)
        except SessionFull:
            entry.refused += 1
            raise
        sampling = _sampling(entry, request, prepared.n_tokens, limits.context_tokens)
        generation = await _generate(book, entry, prepared, sampling, deadline, routed_experts)
        message, commit = await _commit(entry, prepared, generation)
        if commit.turn is not None:
            entry.n_tokens += len(commit.turn.new_ids) + len(commit.turn.output_ids)
            entry.largest_body = max(entry.largest_body, body_bytes)
            storing = Deadline(STORE_S, f"session {entry.session_id}: storing a turn")
            await book.journal.append(record_of(entry.session_id, commit.turn), deadline=storing)
            rows = commit.turn.routed_experts
            if isinstance(rows, RecordedRows):
                rows.stored(partial(book.journal.rows, entry.session_id, commit.turn.number))
        return _answer(book, request, prepared, generation, message, commit)
    finally:
        book.left(entry)


async def _prepare(entry: OpenSession, request: ChatRequest, body_bytes: int, threads: Executor) -> Prepared:
    async with entry.lock:
        if body_bytes - entry.largest_body <= THREAD_BYTES:
            return entry.session.prepare(request.messages, request.tools)
        rendering = asyncio.get_running_loop().run_in_executor(
            threads, entry.session.prepare, request.messages, request.tools
        )
        try:
            return await asyncio.shield(rendering)
        except asyncio.CancelledError:
            # The session is the thread's until it is done, and the lock stays held for so long.
            await asyncio.wait({rendering})
            if not rendering.cancelled():
                rendering.exception()
            raise


def _sampling(entry: OpenSession, request: ChatRequest, n_prompt: int, context_tokens: int) -> SamplingParams:
    room = context_tokens - n_prompt
    if room < 1:
        entry.refused += 1
        raise BadRequest(
            f"the prompt has {n_prompt} tokens: this server takes prompt and answer of at most {context_tokens} "
            "together: send less, or end the session",
            param="messages",
        )
    wish = request.sampling.over(entry.settings.sampling)
    if wish.seed is None and entry.settings.seed is not None:
        wish = msgspec.structs.replace(wish, seed=turn_seed(entry.settings.seed, entry.n_asked))
        entry.n_asked += 1
    return wish.params(room_tokens=room, stop_ids=entry.template.stop_ids)


async def _generate(
    book: SessionBook,
    entry: OpenSession,
    prepared: Prepared,
    sampling: SamplingParams,
    deadline: Deadline,
    routed_experts: bool,
) -> Generation:
    if entry.session.closed:  # while it was rendered
        raise SessionGone(f"session {entry.session_id} was closed meanwhile")
    n_prompt = prepared.n_tokens
    start = first_row(prepared.attachment.parent, prepared.drop) if routed_experts else n_prompt - 1
    generation = await book.gateway.generate(
        entry.session_id,
        prepared.input_ids(),
        sampling,
        new_tokens=len(prepared.new_ids),
        routed_experts_start=start,
        deadline_s=deadline.remaining_s,
    )
    n_output, rows = len(generation.output_ids), generation.routed_experts
    if n_output == 0:
        raise BadGeneration(f"session {entry.session_id}: the engine sampled nothing")
    if rows is not None and len(rows) != n_prompt + n_output - 1 - start:
        raise BadGeneration(
            f"session {entry.session_id}: the engine returned {len(rows)} rows of routed experts from {start} on: "
            f"expected {n_prompt + n_output - 1 - start} for {n_prompt} and {n_output} tokens"
        )
    return generation if routed_experts else dataclasses.replace(generation, routed_experts=None)


async def _commit(entry: OpenSession, prepared: Prepared, generation: Generation) -> tuple[dict[str, Any], Commit]:
    text = entry.template.text(generation.output_ids)
    parsed = parse_turn(entry.parser, text, prepared.tools)
    message = assistant_message(parsed, [f"call_{secrets.token_hex(12)}" for _ in parsed.calls])
    rows = generation.routed_experts
    recorded = None if rows is None else RecordedRows.of(rows)
    async with entry.lock:
        return message, entry.session.commit(prepared, generation, message, routed_experts=recorded)


def _answer(
    book: SessionBook,
    request: ChatRequest,
    prepared: Prepared,
    generation: Generation,
    message: dict[str, Any],
    commit: Commit,
) -> Answer:
    log_probs = None
    if request.log_probs:
        pairs = zip(generation.output_ids, generation.log_probs, strict=True)
        log_probs = tuple(TokenLogProb(book.tokenizer.decode([int(i)]), float(p)) for i, p in pairs)
    return Answer(
        answer_id=secrets.token_hex(12),
        created_s=int(time.time()),
        model=request.model,
        message=message,
        finish_reason=generation.finish_reason,
        prompt_tokens=prepared.n_tokens,
        completion_tokens=len(generation.output_ids),
        cached_tokens=min(generation.cached_tokens, prepared.n_tokens),
        log_probs=log_probs,
        session={
            "recorded": commit.turn is not None,
            "turn": None if commit.turn is None else commit.turn.number,
            "reason": commit.reason,
            "weight_versions": [[str(s.version), s.start, s.end] for s in generation.versions],
        },
    )
