"""SGLang behind the engine contract.

    launcher's process (no model)                       SGLang's environment
    SglangEngine ── child, keys in a 0600 file ───────▶ server ── scheduler of each rank
      generate  ── POST /generate, input_ids ─────────▶
      sync: fetch ─▶ staging ─▶ pause ─▶ load, check ─▶ label ─▶ go on
      watch     ── its exit, /health ─────────────────▶

| waits | for | until |
|---|---|---|
| start | the server to compute | `start_deadline_s` |
| generate | its answer | the request's deadline; then it is aborted and answers with what it has |
| sync | the source's buckets, then the update in the pause | `deadline_s` |
| watch | an answer of /health, unless requests or an update show that it lives | `_HEALTH_S`, three times |

A version is a label "term.step" at this edge only. It is set after every rank has found its live parameters equal to
what was fetched; until then the label is "none", and tokens sampled under that are refused.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import importlib
import io
import itertools
import json
import pickle
import secrets
import time
from collections.abc import Coroutine, Iterable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from miles_hpc.core.deadline import Deadline
from miles_hpc.core.errors import DeadlineExpired, IntegrityError, MilesError, PeerLost, ProtocolError, UserError
from miles_hpc.core.messages import EngineDescription, WeightManifest, WeightsSynced
from miles_hpc.core.types import FinishReason, SamplingParams, WeightVersion
from miles_hpc.rollout.engine import EngineSpec, Generation, RolloutEngine, check_ids, check_request
from miles_hpc.rollout.session.tokenizer import shape_of
from miles_hpc.rollout.sglang.api import (
    NO_VERSION,
    Layers,
    generate_request,
    parse_generation,
    parse_scores,
    score_request,
)
from miles_hpc.rollout.sglang.capabilities import Capabilities, probe
from miles_hpc.rollout.sglang.checkpoint import StagedTensor, checkpoint_tensors
from miles_hpc.rollout.sglang.client import EngineRefused
from miles_hpc.rollout.sglang.parts import Parts, Request
from miles_hpc.rollout.sglang.server import SglangServer
from miles_hpc.rollout.sglang.settings import LOADER, SglangOptions
from miles_hpc.rollout.sglang.staging import Staging, Verdict
from miles_hpc.weights.broadcast import fetch

__all__ = ["SglangEngine"]

T = TypeVar("T")

_EXIT_POLL_S = 0.5
_POLL_S = 0.25
_CONTROL_S = 60.0  # one control call that moves no weights
_ABORT_AGAIN_S = 0.5  # an abort that came before its request had arrived there did nothing
_ABORT_S = 20.0
_LAST_RESORT_S = 3600.0
_PAUSE_MARGIN = 1.5
_MOST_FRUITLESS = 20  # parts without a token, one after the other
_WATCH_EVERY_S = 5.0
_HEALTH_S = 20.0
_HEALTH_FAILURES = 3
_FLUSH_TRIES = 20
_MOST_SESSIONS = 100_000


class SglangEngine(RolloutEngine):
    """See the module. `options` of the spec: SglangOptions."""

    def __init__(self, spec: EngineSpec, server: SglangServer | None = None) -> None:
        """Raises UserError for options or a model that can't be served. `server`: one that serves already and stays."""
        self.name = spec.name
        self._spec = spec
        self._options = SglangOptions.of(spec.options)
        self._shape = shape_of(spec.model_path)
        config = json.loads((spec.model_path / "config.json").read_text())
        config = config.get("text_config", config)
        self._model_type = str(config.get("model_type", ""))
        self._tied = bool(config.get("tie_word_embeddings", False))
        self._ends = _end_tokens(spec.model_path)
        wanted = self._shape.n_experts > 0 and self._options.routed_experts
        self._layers = Layers(int(config["num_hidden_layers"]), self._shape) if wanted else None
        self._max_length = min(
            spec.max_length or self._shape.max_position_embeddings, self._shape.max_position_embeddings
        )
        self._owns_server = server is None
        self._server = server or SglangServer(spec, self._options, self._shape)
        self._version: WeightVersion | None = None
        self._requests: dict[str, Request] = {}
        self._sync_lock = asyncio.Lock()
        self._syncs: set[asyncio.Task[WeightsSynced]] = set()
        self._may_start = asyncio.Event()  # cleared while an update needs the server to itself
        self._may_start.set()
        self._born: dict[str, WeightVersion] = {}  # session -> version of its first request
        self._lost: str = ""  # why the server is gone
        self._heard = 0.0
        self._scores = 0
        self._longest_pause_s = 0.0
        self._endings: set[asyncio.Task[None]] = set()

    # ------------------------------------------------------------------------------------------ the server

    async def start(self) -> None:
        """Start the server and find out what it can. Raises UserError when it can't serve this, DeadlineExpired."""
        deadline = Deadline(self._options.start_deadline_s, f"engine {self.name}: finding out what SGLang can")
        self._staging = Staging()
        if self._owns_server:
            await self._server.start()
        self._client = self._server.connect()
        self._can: Capabilities = await probe(self._client, self._layers, self._max_length, deadline)
        await asyncio.to_thread(importlib.import_module, "torch")  # takes seconds, and the first pause shouldn't
        self._watcher = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        """Notice a server that ended or hangs; it is killed then, and `describe` tells the agent."""
        failures, looked = 0, time.monotonic()
        while self._server.exit_code is None:
            await asyncio.sleep(_EXIT_POLL_S)
            if not self._may_start.is_set():  # an update has a deadline of its own
                failures, looked = 0, time.monotonic()
            elif time.monotonic() - max(looked, self._heard) >= _WATCH_EVERY_S:
                try:
                    failures = 0 if await self._client.healthy(_HEALTH_S) else failures + 1
                except (PeerLost, DeadlineExpired):
                    failures += 1
                looked = time.monotonic()
                if failures >= _HEALTH_FAILURES and self._may_start.is_set():
                    self._lost = f"no answer to {failures} health checks of {_HEALTH_S:.0f} s"
                    self._server.kill()
        if not self._lost:
            self._lost = f"SGLang ended with {self._server.exit_code}: {self._server.last_words()}"

    def _check_alive(self) -> None:
        if self._lost or self._server.exit_code is not None:
            raise PeerLost(f"engine {self.name}: {self._lost or 'SGLang ended'}")

    def _check_serving(self) -> WeightVersion:
        self._check_alive()
        if self._version is None:
            raise ProtocolError(f"engine {self.name} holds no verified weights: sync it first")
        return self._version

    async def describe(self) -> EngineDescription:
        """See RolloutEngine. Raises PeerLost when the server has ended or hangs."""
        self._check_alive()
        return EngineDescription(
            shape=self._shape,
            slots=self._spec.slots,
            version=self._version,
            device=self._spec.device,
            dtype=self._spec.dtype,
        )

    async def close(self) -> None:
        for task in self._syncs:
            task.cancel()
        if hasattr(self, "_watcher"):
            self._watcher.cancel()
        if hasattr(self, "_staging"):  # first: who is asked to end may not get far
            self._staging.close()
        if self._owns_server:
            self._server.kill()  # it has nothing to save
        for task in self._endings:
            task.cancel()
        if hasattr(self, "_client"):
            await self._client.close()
        if self._owns_server:
            await self._server.end()

    # ------------------------------------------------------------------------------------------ generation

    async def generate(
        self,
        request_id: str,
        session_id: str,
        input_ids: npt.NDArray[np.int32],
        sampling: SamplingParams,
        *,
        routed_experts_start: int,
        deadline_s: float,
    ) -> Generation:
        """See RolloutEngine. SGLang also stops at the model's own end tokens. Raises DeadlineExpired when the server
        doesn't answer an abort either."""
        check_request(
            input_ids,
            sampling,
            routed_experts_start,
            max_length=self._max_length,
            vocab_size=self._shape.vocab_size,
        )
        self._check_alive()
        if self._may_start.is_set():
            self._check_serving()
        if any(r.session_id == session_id for r in self._requests.values()):
            raise ProtocolError(f"session {session_id}: a request is under way already")
        request = Request(request_id, session_id)
        key = secrets.token_hex(8)
        self._requests[key] = request
        task = asyncio.ensure_future(
            self._in_parts(request, key, input_ids, sampling, routed_experts_start, deadline_s)
        )
        request.task = task
        try:
            done, _ = await asyncio.wait({task}, timeout=deadline_s)
            if not done:
                await self._end(request, task)
            return task.result()
        finally:
            if not task.done():  # the caller left
                self._start_ending(request)
            self._requests.pop(key, None)

    async def _in_parts(
        self,
        request: Request,
        key: str,
        input_ids: npt.NDArray[np.int32],
        sampling: SamplingParams,
        start: int,
        deadline_s: float,
    ) -> Generation:
        """Ask, and ask on where an update ended what was under way."""
        # `generate` looks after the request's own deadline; an update may hold the answer back for longer.
        deadline = Deadline(deadline_s + _LAST_RESORT_S, f"engine {self.name}: {request.request_id}")
        limit = min(sampling.max_new_tokens, self._max_length - len(input_ids))
        parts = Parts()
        rows = None if self._layers is None else self._layers.decode("", 0)
        fruitless = 0
        for number in itertools.count():
            await self._may_start.wait()
            version = self._check_serving()
            if request.aborted:
                return parts.whole(FinishReason.ABORT, no_rows=rows)
            ids = np.concatenate((input_ids, *parts.output_ids)) if number else input_ids
            request.rid = f"{key}.{number}"
            body = generate_request(
                request.rid,
                ids,
                sampling,
                max_new_tokens=limit - parts.n_output,
                routed_experts_start=None if self._layers is None else start + parts.n_rows,
                namespace=self._namespace(request.session_id, version),
            )
            data = await self._ask(request, body, deadline)
            part = await asyncio.to_thread(  # megabytes of JSON and base64, where there are routed experts
                parse_generation,
                data,
                n_input=len(ids),
                max_new_tokens=limit - parts.n_output,
                stop_token_ids=(*sampling.stop_token_ids, *self._ends),
                layers=self._layers,
                routed_experts_start=start + parts.n_rows,
                spans=self._can.spans,
            )
            if request.failure is not None:
                raise request.failure
            parts.add(part)
            interrupted = part.finish_reason is FinishReason.ABORT and not request.aborted
            if interrupted and parts.n_output < limit:
                fruitless = 0 if len(part.output_ids) else fruitless + 1
                if fruitless > _MOST_FRUITLESS:
                    raise EngineRefused(
                        f"{self.name}: {request.request_id} was aborted {fruitless} times by the server"
                    )
                await asyncio.sleep(_POLL_S if fruitless > 1 else 0)
                continue
            reason = FinishReason.LENGTH if interrupted else part.finish_reason
            return parts.whole(reason, no_rows=rows)
        raise AssertionError("unreachable")

    async def _ask(self, request: Request, body: dict[str, object], deadline: Deadline) -> bytes:
        try:
            data = await self._client.generate(body, deadline)
        except PeerLost as error:
            raise PeerLost(f"{error}; {self._lost}" if self._lost else str(error)) from error
        self._heard = time.monotonic()
        if request.failure is not None:
            raise request.failure
        return data

    async def _end(self, request: Request, task: asyncio.Future[Generation]) -> None:
        """Abort until it answers; an abort that overtook its request did nothing. During an update nothing answers."""
        request.aborted = True
        deadline = Deadline(_ABORT_S, f"engine {self.name}: {request.request_id} was aborted and didn't answer")
        while not task.done():
            if not self._may_start.is_set():
                await asyncio.wait({task}, timeout=_POLL_S)
                deadline = Deadline(_ABORT_S, deadline.what)
                continue
            if deadline.expired:
                task.cancel()
                raise deadline.error()
            if request.rid:
                with contextlib.suppress(EngineRefused):
                    await self._client.abort(request.rid, deadline.remaining_s)
            await asyncio.wait({task}, timeout=_ABORT_AGAIN_S)

    async def abort(self, request_id: str = "") -> None:
        self._check_alive()
        for request in list(self._requests.values()):
            if request_id in ("", request.request_id):
                self._start_ending(request)

    def _start_ending(self, request: Request) -> None:
        """End it without waiting for that here; who waits for the request hears of it."""
        request.aborted = True
        if request.task is not None and not request.task.done():
            ending = asyncio.ensure_future(self._end(request, request.task))
            self._endings.add(ending)
            ending.add_done_callback(self._ended)

    def _ended(self, ending: asyncio.Task[None]) -> None:
        self._endings.discard(ending)
        if not ending.cancelled():
            ending.exception()  # the request was cancelled then, and its waiter told

    def _namespace(self, session_id: str, version: WeightVersion) -> str:
        """Of the version that a session began with. It keeps its prefix over updates; a session that begins later must
        not find what older weights left there, which for a prompt that all share would be for ever."""
        if session_id not in self._born and len(self._born) >= _MOST_SESSIONS:
            del self._born[next(iter(self._born))]  # the oldest computes its prefix anew
        return str(self._born.setdefault(session_id, version))

    async def end_session(self, session_id: str) -> None:
        """Its prefix may be another session's as well: it goes when its room is needed."""
        self._born.pop(session_id, None)

    async def score(self, tokens: npt.NDArray[np.int32], *, deadline_s: float) -> npt.NDArray[np.float32]:
        if tokens.ndim != 2 or tokens.shape[1] < 2:
            raise UserError(f"score: tokens of shape {tokens.shape}: expected [n, length] with length at least 2")
        check_ids(tokens, self._shape.vocab_size)
        self._check_serving()
        deadline = Deadline(deadline_s, f"engine {self.name}: score")
        self._scores += 1

        room = asyncio.Semaphore(self._spec.slots)

        async def one(row: int) -> npt.NDArray[np.float32]:
            async with room:
                for number in itertools.count():  # again where an update ended it
                    deadline.check()
                    await asyncio.wait_for(self._may_start.wait(), deadline.remaining_s)
                    self._check_serving()
                    body = score_request(f"score.{self._scores}.{row}.{number}", tokens[row])
                    data = await self._client.generate(body, deadline)
                    scores = parse_scores(data, tokens[row], self._shape.vocab_size)
                    if scores is not None:
                        return scores
                    await asyncio.sleep(_POLL_S)
            raise AssertionError("unreachable")

        try:
            return np.stack(await _all(one(i) for i in range(len(tokens))))
        except TimeoutError:
            raise deadline.error() from None

    # ------------------------------------------------------------------------------------------ weights

    async def sync(
        self, version: WeightVersion, source: str, plan_digest: bytes, *, deadline_s: float
    ) -> WeightsSynced:
        """See RolloutEngine. The digests are the source's: each rank has compared its live parameters with those bytes,
        element by element. Until the pause begins the old version is served, also when the fetch fails."""
        deadline = Deadline(deadline_s, f"engine {self.name}: sync of weights {version} from {source}")
        task = asyncio.ensure_future(self._sync(version, source, plan_digest, deadline))
        self._syncs.add(task)
        task.add_done_callback(self._syncs.discard)
        try:
            return await asyncio.wait_for(asyncio.shield(task), deadline.remaining_s)
        except TimeoutError:
            raise deadline.error() from None

    async def _sync(self, version: WeightVersion, source: str, plan_digest: bytes, deadline: Deadline) -> WeightsSynced:
        async with self._sync_lock:
            self._check_alive()
            deadline.check()
            tensors: list[StagedTensor] = []

            def lay_out(manifest: WeightManifest) -> None:
                tensors[:] = checkpoint_tensors(manifest.pieces, self._model_type, tied=self._tied)
                self._staging.lay_out(manifest.pieces)

            endpoint = await self._spec.connect(source, deadline.remaining_s)
            try:
                manifest = await fetch(
                    endpoint.call, version, plan_digest, self._staging.put, deadline=deadline, on_manifest=lay_out
                )
            finally:
                await endpoint.close("fetched")
            paused_s = await self._update(version, tensors, deadline)
        return WeightsSynced(
            engine=self.name,
            version=version,
            digests={p.name: p.digest for p in manifest.pieces},
            n_bytes=sum(p.n_bytes for p in manifest.pieces),
            paused_s=paused_s,
            total_s=deadline.elapsed_s,
        )

    async def _update(self, version: WeightVersion, tensors: list[StagedTensor], deadline: Deadline) -> float:
        """The pause. Whatever fails in it leaves weights that nobody knows, and the engine serves nothing."""
        mode = self._options.pause if self._can.updates_in_place else "abort"
        if deadline.remaining_s < _PAUSE_MARGIN * self._longest_pause_s:
            # Better late than lost: cut off in the pause, it would leave weights that nobody knows.
            raise DeadlineExpired(
                f"{deadline.what}: {deadline.remaining_s:.1f} s are left after fetching, and the last pause took "
                f"{self._longest_pause_s:.1f} s: raise control.call_deadline_s"
            )
        began = time.monotonic()
        self._may_start.clear()
        try:
            try:
                await self._client.pause(mode, min(_CONTROL_S, deadline.remaining_s))
            except MilesError:
                with contextlib.suppress(MilesError):  # it may have paused all the same
                    await self._client.go_on(_CONTROL_S)
                raise
            try:
                await self._load(tensors, deadline)
                if mode == "abort":
                    await self._flush()
                await self._client.set_version(str(version), deadline.remaining_s)
                self._version = version
                await self._client.go_on(_CONTROL_S)
            except Exception as error:
                raise await self._taint(error) from error
            except BaseException:  # cancelled, by `close`
                self._end_server("an update was given up in its pause")
                raise
        finally:
            self._heard = time.monotonic()
            self._may_start.set()
        self._longest_pause_s = time.monotonic() - began
        return self._longest_pause_s

    def _end_server(self, why: str) -> None:
        self._version = None
        self._lost = why
        self._server.kill()

    async def _load(self, tensors: list[StagedTensor], deadline: Deadline) -> None:
        """Have every rank load and compare. Raises IntegrityError when one's parameters aren't what was sent."""
        if self._can.update_session:
            await self._client.begin_update(deadline.remaining_s)
        await self._order(tensors, deadline, check=False)
        if self._options.check:
            verdicts = await self._order(tensors, deadline, check=True)
            unused = set.intersection(*(set(v.unused) for v in verdicts))
            if unused:
                raise IntegrityError(f"{len(unused)} tensors that no parameter takes: {', '.join(sorted(unused)[:5])}")
        if self._can.update_session:
            await self._client.end_update(deadline.remaining_s)

    async def _order(self, tensors: list[StagedTensor], deadline: Deadline, *, check: bool) -> list[Verdict]:
        token = secrets.token_hex(8)
        payload = _pickled(await asyncio.to_thread(self._staging.order, tensors, token, check=check))
        ranks = self._options.tensor_parallel
        await self._client.update_from_tensors([payload] * ranks, LOADER, deadline.remaining_s)
        verdicts = self._staging.take_verdicts(token, ranks)
        for rank, verdict in enumerate(verdicts):
            if not verdict.ok:
                raise IntegrityError(f"rank {rank}: {verdict.error}")
        return verdicts

    async def _taint(self, error: Exception) -> IntegrityError:
        """Hold no version: fail what is under way, forget every prefix. A server that refuses even that is ended."""
        self._version = None
        self._born.clear()
        why = str(error) if isinstance(error, MilesError) else f"{type(error).__name__}: {error}"
        failure = IntegrityError(f"engine {self.name} serves nothing until a sync succeeds: {why}")
        for request in self._requests.values():
            request.failure = failure
            request.aborted = True
        try:
            await self._client.set_version(NO_VERSION, _CONTROL_S)
            if self._can.update_session:
                try:
                    await self._client.end_update(_CONTROL_S)
                except EngineRefused:
                    pass  # it was ended already
            await self._client.go_on(_CONTROL_S)
            await self._flush()
        except MilesError as worse:
            self._end_server(f"it had to be ended: {worse}")
        return failure

    async def _flush(self) -> None:
        """Forget all prefixes; requests under way are aborted. Raises EngineRefused."""
        for _ in range(_FLUSH_TRIES):
            await self._client.abort_all(_CONTROL_S)
            if await self._client.flush_cache(_CONTROL_S):
                return
            await asyncio.sleep(_POLL_S)
        raise EngineRefused(f"{self.name}: what older weights cached can't be flushed")


async def _all(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Their results; the first failure cancels the others."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


def _end_tokens(folder: Path) -> tuple[int, ...]:
    """The model's own end tokens, from all the places where SGLang looks."""
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        path = folder / name
        table = json.loads(path.read_text()) if path.is_file() else {}
        for value in (table.get("eos_token_id"), table.get("text_config", {}).get("eos_token_id")):
            found |= set(value if isinstance(value, list) else [] if value is None else [value])
    return tuple(sorted(found))


def _pickled(path: str) -> str:
    """[(name, tensor)] by value, as /update_weights_from_tensor takes it: base64 of a pickle, read by SGLang's own safe
    unpickler. Nothing is unpickled on this side."""
    import torch

    buffer = io.BytesIO()
    pickle.dump(
        [("miles_hpc.order", torch.frombuffer(bytearray(path.encode()), dtype=torch.uint8))], buffer, protocol=4
    )
    return base64.b64encode(buffer.getvalue()).decode()
