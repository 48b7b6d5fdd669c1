"""Continuous batching over fixed slots: which request has which slot, and what the next forward takes.

    submit ─▶ waiting ──admit──▶ prefilling ─▶ decoding ─▶ finished      a slot per session, kept between its turns
                 ▲ first come      a chunk       one token
                 │ first served    per step      per step

Each `step` admits what fits, runs one forward over the tokens of all active rows and samples for the rows that have
no input left. A session keeps its slot after a request, so that its next turn prefills only what is new; when a
request finds no free slot, the session that was idle longest loses its own.

Synchronous and single-threaded: the engine's thread calls everything here, and time comes from the caller's clock.
"""

from __future__ import annotations

import math
import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from miles_hpc.core.errors import MilesError, ProtocolError
from miles_hpc.core.types import FinishReason, SamplingParams, VersionSpan, WeightVersion
from miles_hpc.rollout.engine import Generation
from miles_hpc.rollout.torch_cache import Chunk
from miles_hpc.rollout.torch_model import SlotModel
from miles_hpc.rollout.torch_sampling import sample, uniforms

__all__ = ["Decoder", "Request"]


@dataclass(slots=True, eq=False)
class Request:
    """One generation. `finish` is called once, from the engine's thread, with a Generation or an error.

    A seed's uniforms are indexed by the token's position in the sequence, so that turns with one seed differ.
    """

    request_id: str
    session_id: str
    input_ids: npt.NDArray[np.int32]
    sampling: SamplingParams
    routed_experts_start: int
    deadline: float  # on the decoder's clock
    finish: Callable[[Generation | MilesError], None]
    limit: int  # output tokens at most
    submitted: float = 0.0
    queue_s: float = 0.0
    session: _Session | None = None
    cached_tokens: int = 0
    draws: list[float] = field(default_factory=list)
    stop: frozenset[int] = frozenset()
    output: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    spans: list[tuple[WeightVersion, int]] = field(default_factory=list)  # version, first output token
    aborted: bool = False

    def __post_init__(self) -> None:
        self.stop = frozenset(self.sampling.stop_token_ids)
        if self.sampling.temperature > 0.0:
            seed = self.sampling.seed if self.sampling.seed is not None else random.getrandbits(64)
            self.draws = uniforms(seed, len(self.input_ids), self.limit).tolist()
        else:
            self.draws = [0.0] * self.limit


@dataclass(slots=True, eq=False)
class _Session:
    """What is kept for a session: its slot, and how many tokens of it are in the cache."""

    session_id: str
    slot: int
    length: int = 0
    last_used: float = 0.0
    request: Request | None = None
    ended: bool = False


class Decoder:
    """The scheduler of one engine. `version` is what its model holds; None means that nothing may be served."""

    def __init__(
        self, model: SlotModel, *, prefill_tokens: int = 256, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.model = model
        self.version: WeightVersion | None = None
        self._clock = clock
        self._prefill_tokens = prefill_tokens
        slots, length, shape = model.cache.slots, model.max_length, model.shape
        self._tokens = np.zeros((slots, length), np.int32)  # what each slot's cache holds
        self._rows = (
            np.zeros((slots, length, len(shape.moe_layers), shape.top_k), model.row_dtype) if shape.n_experts else None
        )
        self._free = list(range(slots - 1, -1, -1))
        self._sessions: dict[str, _Session] = {}
        self._waiting: deque[Request] = deque()
        self._active: list[Request] = []  # ordered by slot

    @property
    def busy(self) -> bool:
        return bool(self._active or self._waiting)

    # ------------------------------------------------------------------------------------------ requests

    def submit(self, request: Request) -> None:
        """Queue a request. It fails at once while no version is held or its session has another one under way."""
        if self.version is None:
            request.finish(ProtocolError("this engine holds no verified weights: sync it before generating"))
            return
        if any(r.session_id == request.session_id for r in (*self._active, *self._waiting)):
            request.finish(ProtocolError(f"session '{request.session_id}' has a request under way already"))
            return
        request.submitted = self._clock()
        self._waiting.append(request)

    def abort(self, request_id: str = "") -> None:
        """End one request, or all, with what they have; takes effect in the next step."""
        for request in (*self._active, *self._waiting):
            if request_id in ("", request.request_id):
                request.aborted = True

    def end_session(self, session_id: str) -> None:
        """Free the session's slot; a request of it that is under way is aborted first."""
        for request in (*self._active, *self._waiting):
            if request.session_id == session_id:
                request.aborted = True
        session = self._sessions.get(session_id)
        if session is not None:
            session.ended = True
            if session.request is None:
                self._release(session)

    def fail_all(self, error: MilesError) -> None:
        """Fail every request and forget every session: what the cache holds is no longer trusted."""
        requests = [*self._active, *self._waiting]
        self._active.clear()
        self._waiting.clear()
        self._sessions.clear()
        self._free = list(range(self.model.cache.slots - 1, -1, -1))
        for slot in self._free:
            self.model.cache.clear(slot)
        for request in requests:
            request.finish(error)

    # ------------------------------------------------------------------------------------------ stepping

    def step(self) -> None:
        """One forward over all active rows, after ending what was aborted or is late, and admitting what fits."""
        self._end_stopped()
        self._admit()
        if not self._active:
            return
        chunks, rows = self._next_chunks()
        counts = [c.n_tokens for c in chunks]
        tokens = np.empty(sum(counts), np.int64)
        sampled_at: list[int] = []
        sampling: list[Request] = []
        at = 0
        for chunk, request in zip(chunks, rows, strict=True):
            n_input = len(request.input_ids)
            end = chunk.start + chunk.n_tokens
            if chunk.start < n_input:
                part = request.input_ids[chunk.start : end]
                tokens[at : at + chunk.n_tokens] = part
                self._tokens[chunk.slot, chunk.start : end] = part
            else:
                tokens[at] = self._tokens[chunk.slot, chunk.start] = request.output[-1]
            at += chunk.n_tokens
            if end >= n_input:
                sampled_at.append(at - 1)
                sampling.append(request)
        logits, experts = self.model.forward(chunks, tokens, np.asarray(sampled_at, np.int64))
        if experts is not None:
            self._keep_rows(chunks, counts, experts)
        for chunk, request in zip(chunks, rows, strict=True):
            assert request.session is not None
            request.session.length = chunk.start + chunk.n_tokens
        if sampling:
            self._sample(logits, sampling)

    def _end_stopped(self) -> None:
        now = self._clock()
        for request in [r for r in (*self._active, *self._waiting) if r.aborted or now >= r.deadline]:
            self._finish(request, FinishReason.ABORT)

    def _admit(self) -> None:
        if not self._waiting:
            return
        kept: deque[Request] = deque()
        changed = False
        for request in self._waiting:
            session = self._sessions.get(request.session_id) or self._claim(request.session_id)
            if session is None:
                kept.append(request)
                continue
            self._bind(request, session)
            changed = True
        self._waiting = kept
        if changed:
            self._active.sort(key=lambda r: r.session.slot if r.session is not None else -1)

    def _claim(self, session_id: str) -> _Session | None:
        """A slot for a new session: a free one, else that of the session that was idle longest."""
        if not self._free:
            wanted = {r.session_id for r in self._waiting}
            idle = [s for s in self._sessions.values() if s.request is None]
            if not idle:
                return None
            # A session whose next turn is waiting goes last; it would only be prefilled anew.
            self._release(min(idle, key=lambda s: (s.session_id in wanted, s.last_used)))
        session = _Session(session_id, self._free.pop())
        self._sessions[session_id] = session
        return session

    def _bind(self, request: Request, session: _Session) -> None:
        """Start a request on its slot, keeping the cached tokens that it begins with; one is always forwarded."""
        common = min(session.length, len(request.input_ids) - 1)
        differs = np.flatnonzero(self._tokens[session.slot, :common] != request.input_ids[:common])
        session.length = request.cached_tokens = int(differs[0]) if len(differs) else common
        session.request, request.session = request, session
        request.queue_s = self._clock() - request.submitted
        self._active.append(request)

    def _next_chunks(self) -> tuple[list[Chunk], list[Request]]:
        """Rows with one token first, then chunks of those that prefill, within the step's budget."""
        single: list[tuple[Chunk, Request]] = []
        several: list[tuple[Chunk, Request]] = []
        budget = self.model.max_length * len(self._active) if self.model.batch_invariant else self._prefill_tokens
        for request in self._active:
            session = request.session
            assert session is not None
            missing = len(request.input_ids) + len(request.output) - session.length
            if missing > 1:
                missing = min(missing, budget)
                budget -= missing
                if missing == 0:
                    continue
            (single if missing == 1 else several).append((Chunk(session.slot, session.length, missing), request))
        if self.model.batch_invariant:  # the rows of one forward, or one whole chunk, depend on nothing else
            both = several[:1] or single
        else:
            both = single + several
        return [c for c, _ in both], [r for _, r in both]

    def _keep_rows(self, chunks: list[Chunk], counts: list[int], experts: npt.NDArray[np.unsignedinteger]) -> None:
        assert self._rows is not None
        slots = np.repeat([c.slot for c in chunks], counts)
        starts = np.repeat([c.start for c in chunks], counts)
        firsts = np.repeat(np.cumsum(counts) - counts, counts)
        self._rows[slots, starts + np.arange(len(slots)) - firsts] = experts

    def _sample(self, logits: torch.Tensor, requests: list[Request]) -> None:
        assert self.version is not None
        ids, log_probs = sample(logits, [r.sampling for r in requests], [r.draws[len(r.output)] for r in requests])
        for request, token, log_prob in zip(requests, ids, log_probs, strict=True):
            if not math.isfinite(log_prob):
                self._poisoned(request, log_prob)
                continue
            if not request.spans or request.spans[-1][0] != self.version:
                request.spans.append((self.version, len(request.output)))
            request.output.append(token)
            request.log_probs.append(log_prob)
            if token in request.stop:
                self._finish(request, FinishReason.STOP)
            elif len(request.output) >= request.limit:
                self._finish(request, FinishReason.LENGTH)

    # ------------------------------------------------------------------------------------------ endings

    def _finish(self, request: Request, reason: FinishReason) -> None:
        session = request.session
        rows: npt.NDArray[np.unsignedinteger] | None = None
        if session is None:
            self._waiting.remove(request)
            if self._rows is not None:
                rows = self._rows[0, :0]
        else:
            self._unbind(request, session)
            if self._rows is not None:
                rows = self._rows[session.slot, request.routed_experts_start : session.length].copy()
        ends = [first for _, first in request.spans[1:]] + [len(request.output)]
        request.finish(
            Generation(
                output_ids=np.asarray(request.output, np.int32),
                log_probs=np.asarray(request.log_probs, np.float32),
                versions=tuple(
                    VersionSpan(version=v, start=first, end=end)
                    for (v, first), end in zip(request.spans, ends, strict=bool(request.spans))
                ),
                finish_reason=reason,
                routed_experts=rows,
                cached_tokens=request.cached_tokens,
                queue_s=request.queue_s,
            )
        )

    def _poisoned(self, request: Request, log_prob: float) -> None:
        """The weights gave no distribution. The slot is wiped, as NaN in it would reach whoever comes next."""
        session = request.session
        assert session is not None
        self._unbind(request, session)
        session.length = 0
        self.model.cache.clear(session.slot)
        text = f"request '{request.request_id}': log-prob {log_prob} under weights {self.version}"
        request.finish(ProtocolError(f"{text}: the weights or their input aren't finite"))

    def _unbind(self, request: Request, session: _Session) -> None:
        self._active.remove(request)
        session.request = None
        session.last_used = self._clock()
        if session.ended:
            self._release(session)

    def _release(self, session: _Session) -> None:
        del self._sessions[session.session_id]
        self._free.append(session.slot)
