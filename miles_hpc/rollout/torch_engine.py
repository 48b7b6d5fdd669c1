"""The embedded engine: a Hugging Face model with continuous batching, in the process that asks for it.

    event loop                              engine thread
    generate ──submit──▶ inbox ──────────▶ ┌ run the inbox
    sync ──fetch──▶ staging ──apply──▶     │ decoder.step(): one forward, one token per decoding row
    score ──▶                              └ hand results back       (call_soon_threadsafe)

| waits | for | until |
|---|---|---|
| generate | its request to finish | the request's deadline, at which the decoder answers with what it has |
| sync | the source's buckets, then the pause | `deadline_s` |
| score | its turn between two forwards | `deadline_s` |
| engine thread | work | forever, and ends on close |

The model, its cache and its weights are touched by the engine thread only. A sync fetches into staging memory while
generation goes on; only the copy into the live parameters and the check of their digests happen in the pause.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from miles_hpc.core.deadline import Deadline
from miles_hpc.core.errors import IntegrityError, PeerLost, ProtocolError, UserError
from miles_hpc.core.messages import EngineDescription, WeightManifest, WeightsSynced
from miles_hpc.core.types import SamplingParams, WeightVersion
from miles_hpc.rollout.engine import EngineSpec, Generation, RolloutEngine, check_ids, check_request
from miles_hpc.rollout.torch_decoder import Decoder, Request
from miles_hpc.rollout.torch_model import SlotModel
from miles_hpc.weights.broadcast import fetch

__all__ = ["TorchEngine"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: The engine thread answers late requests between two forwards; longer than this past the deadline, it hangs.
_GRACE_S = 30.0


class TorchEngine(RolloutEngine):
    """See the module and RolloutEngine.

    `options`: prefill_tokens, per forward (default 256); batch_invariant (default false): results are the same, bit
    for bit, whatever else is in the batch, as long as no session loses its slot between its turns. Slower;
    step_interval_s (default 0): shortest time from one decoding step to the next. Where a forward's cost hardly grows
    with its rows and cores are few, waiting lets more requests share one.
    """

    def __init__(self, spec: EngineSpec) -> None:
        """Build the model and start the thread; nothing is served before the first sync.

        Raises UserError for a model that can't be run (see SlotModel).
        """
        self.name = spec.name
        self._spec = spec
        torch.set_num_threads(spec.threads)
        self._model = SlotModel(
            spec.model_path,
            dtype=spec.dtype,
            device=spec.device,
            slots=spec.slots,
            max_length=spec.max_length,
            experts_implementation=spec.experts_implementation,
            batch_invariant=bool(spec.options.get("batch_invariant", False)),
        )
        self._decoder = Decoder(self._model, prefill_tokens=int(spec.options.get("prefill_tokens", 256)))
        self._step_interval_s = float(spec.options.get("step_interval_s", 0.0))
        self._sync_lock = asyncio.Lock()
        self._syncs: set[asyncio.Task[WeightsSynced]] = set()
        self._wake = threading.Condition()
        self._inbox: list[Callable[[], None]] = []
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=f"engine-{spec.name}", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------------------------ contract

    async def describe(self) -> EngineDescription:
        """See RolloutEngine. Raises PeerLost when the engine thread has ended."""
        self._check_alive()
        return EngineDescription(
            shape=self._model.shape,
            slots=self._spec.slots,
            version=self._decoder.version,
            device=self._spec.device,
            dtype=self._spec.dtype,
        )

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
        """See RolloutEngine. Output ends with LENGTH at max_new_tokens, or where the slot is full.

        A request that was aborted before all of its input was read answers with the rows that exist so far. Raises
        UserError for a request that can't be served, ProtocolError while no weights are held.
        """
        check_request(
            input_ids,
            sampling,
            routed_experts_start,
            max_length=self._model.max_length,
            vocab_size=self._model.shape.vocab_size,
        )
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Generation] = loop.create_future()
        request = Request(
            request_id=request_id,
            session_id=session_id,
            input_ids=np.array(input_ids, np.int32),
            sampling=sampling,
            routed_experts_start=routed_experts_start,
            deadline=time.monotonic() + deadline_s,
            finish=lambda result: self._resolve(loop, future, result),
            limit=min(sampling.max_new_tokens, self._model.max_length - len(input_ids)),
        )
        self._post(lambda: self._decoder.submit(request))
        try:
            return await self._within(future, Deadline(deadline_s + _GRACE_S, f"engine {self.name}: {request_id}"))
        finally:
            if future.cancelled() or not future.done():
                request.aborted = True  # nobody waits for it any more; the engine thread looks before each step

    async def score(self, tokens: npt.NDArray[np.int32], *, deadline_s: float) -> npt.NDArray[np.float32]:
        if tokens.ndim != 2 or tokens.shape[1] < 2:
            raise UserError(f"score: tokens of shape {tokens.shape}: expected [n, length] with length at least 2")
        check_ids(tokens, self._model.shape.vocab_size)

        def work() -> npt.NDArray[np.float32]:
            if self._decoder.version is None:
                raise ProtocolError("this engine holds no verified weights: sync it before scoring")
            return self._model.score(tokens)

        deadline = Deadline(deadline_s, f"engine {self.name}: score")
        return await self._within(self._in_thread(work), deadline)

    async def end_session(self, session_id: str) -> None:
        self._post(lambda: self._decoder.end_session(session_id))

    async def abort(self, request_id: str = "") -> None:
        self._post(lambda: self._decoder.abort(request_id))

    async def sync(
        self, version: WeightVersion, source: str, plan_digest: bytes, *, deadline_s: float
    ) -> WeightsSynced:
        """See RolloutEngine. Until the pause begins the old version is served, also when the fetch fails.

        Syncs come one after the other, and one that is under way runs to its end or its deadline even when its caller
        is cancelled: staging memory has a single owner.
        """
        deadline = Deadline(deadline_s, f"engine {self.name}: sync of weights {version} from {source}")
        task = asyncio.ensure_future(self._sync(version, source, plan_digest, deadline))
        self._syncs.add(task)
        task.add_done_callback(self._syncs.discard)
        return await self._within(asyncio.shield(task), deadline)

    async def _sync(self, version: WeightVersion, source: str, plan_digest: bytes, deadline: Deadline) -> WeightsSynced:
        async with self._sync_lock:
            deadline.check()
            endpoint = await self._spec.connect(source, deadline.remaining_s)
            try:
                manifest = await fetch(
                    endpoint.call,
                    version,
                    plan_digest,
                    self._model.stage,
                    deadline=deadline,
                    on_manifest=self._model.check_manifest,
                )
            finally:
                await endpoint.close("fetched")
            digests, paused_s = await self._in_thread(lambda: self._apply(manifest, deadline))
        return WeightsSynced(
            engine=self.name,
            version=version,
            digests=digests,
            n_bytes=sum(p.n_bytes for p in manifest.pieces),
            paused_s=paused_s,
            total_s=deadline.elapsed_s,
        )

    async def close(self) -> None:
        with self._wake:
            self._closing = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join, _GRACE_S)

    # ------------------------------------------------------------------------------------------ loop side

    def _check_alive(self) -> None:
        if self._closing or not self._thread.is_alive():
            raise PeerLost(f"engine {self.name} is closed")

    def _post(self, work: Callable[[], None]) -> None:
        with self._wake:
            self._check_alive()
            self._inbox.append(work)
            self._wake.notify()

    def _in_thread(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Run `work` in the engine thread between two forwards. Giving up on the future doesn't undo it."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def run() -> None:
            try:
                result: Any = work()
            except Exception as error:
                result = error
            self._resolve(loop, future, result)

        self._post(run)
        return future

    @staticmethod
    async def _within(future: asyncio.Future[T], deadline: Deadline) -> T:
        try:
            return await asyncio.wait_for(future, deadline.remaining_s)
        except TimeoutError:
            raise deadline.error() from None

    @staticmethod
    def _resolve(loop: asyncio.AbstractEventLoop, future: asyncio.Future[Any], result: Any) -> None:
        """Settle `future` from the engine thread; a loop that has ended no longer waits for it."""

        def settle() -> None:
            if future.done():
                return
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)

        try:
            loop.call_soon_threadsafe(settle)
        except RuntimeError:
            pass

    # ------------------------------------------------------------------------------------------ engine thread

    def _run(self) -> None:
        torch.set_num_threads(self._spec.threads)
        with torch.inference_mode():
            self._serve()

    def _serve(self) -> None:
        next_step = 0.0
        while True:
            pause_s = next_step - time.monotonic()
            if pause_s > 0:
                time.sleep(pause_s)
            with self._wake:
                self._wake.wait_for(lambda: self._inbox or self._closing or self._decoder.busy)
                inbox, self._inbox = self._inbox, []
                closing = self._closing
            try:
                for work in inbox:
                    work()
                if closing:
                    self._decoder.fail_all(PeerLost(f"engine {self.name} is closed"))
                    return
                next_step = time.monotonic() + self._step_interval_s
                self._decoder.step()
            except Exception as error:
                # The cache may be half written: nothing that is under way can go on, later requests can.
                logger.exception("engine %s: a step failed", self.name)
                self._decoder.fail_all(ProtocolError(f"engine {self.name}: a step failed: {error}"))

    def _apply(self, manifest: WeightManifest, deadline: Deadline) -> tuple[dict[str, bytes], float]:
        """The pause: copy staging into the live parameters, then serve them only if their digests are right."""
        deadline.check()
        start = time.monotonic()
        try:
            self._load_staged()
            digests = self._model.digests()
            for piece in manifest.pieces:
                if digests[piece.name] != piece.digest:
                    raise IntegrityError(
                        f"weight '{piece.name}' of {manifest.version} has digest {digests[piece.name].hex()} after "
                        f"loading, expected {piece.digest.hex()}"
                    )
        except Exception as error:
            self._decoder.version = None
            failure = IntegrityError(f"engine {self.name} serves nothing until a sync succeeds: {error}")
            self._decoder.fail_all(failure)
            raise failure from error
        self._decoder.version = manifest.version
        return digests, time.monotonic() - start

    def _load_staged(self) -> None:
        self._model.load_staged()
