"""Weight updates: fetched beside generation, loaded and compared by every rank in a pause, and only then labelled.

    sync: fetch ─▶ staging ─▶ pause ─▶ load ─▶ load again, comparing ─▶ label ─▶ go on
                                  ╰──── anything else: no version, prefixes forgotten, requests fail

| who waits | for what | until |
|---|---|---|
| sync | the source's buckets, then the pause | `deadline_s`; not enough left for a pause: the old version stays |
| the pause | a control call | `CONTROL_S` |
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import pickle
import secrets
import time

from miles_hpc.core.deadline import Deadline
from miles_hpc.core.errors import DeadlineExpired, IntegrityError, MilesError, UserError
from miles_hpc.core.messages import WeightManifest, WeightsSynced
from miles_hpc.core.types import WeightVersion
from miles_hpc.rollout.sglang.api import NO_VERSION
from miles_hpc.rollout.sglang.checkpoint import StagedTensor, checkpoint_tensors
from miles_hpc.rollout.sglang.client import EngineRefused
from miles_hpc.rollout.sglang.generating import Generating
from miles_hpc.rollout.sglang.settings import LOADER
from miles_hpc.rollout.sglang.staging import Staging, Verdict
from miles_hpc.rollout.sglang.state import CONTROL_S, EngineState
from miles_hpc.weights.broadcast import fetch

__all__ = ["Updating"]

_POLL_S = 0.25
_PAUSE_MARGIN = 1.5
_FLUSH_TRIES = 20


class Updating:
    """The weights of one engine. One update at a time; a caller that left doesn't end the one under way."""

    def __init__(self, state: EngineState, generating: Generating, *, model_type: str, tied: bool) -> None:
        """`model_type` and `tied` are the model's, as config.json has them.

        Makes a folder and a memory file, which `close` removes.
        """
        self.staging = Staging()
        self._state = state
        self._generating = generating
        self._model_type = model_type
        self._tied = tied
        self.lock = asyncio.Lock()  # held by who has the server to itself
        self._tasks: set[asyncio.Task[WeightsSynced]] = set()
        self._longest_pause_s = 0.0

    async def sync(
        self, version: WeightVersion, source: str, plan_digest: bytes, *, deadline_s: float
    ) -> WeightsSynced:
        """See RolloutEngine. The digests are the source's: each rank has compared its live parameters with those bytes,
        element by element. Until the pause begins the old version is served, also when the fetch fails."""
        deadline = Deadline(deadline_s, f"engine {self._state.name}: sync of weights {version} from {source}")
        task = asyncio.ensure_future(self._sync(version, source, plan_digest, deadline))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            return await asyncio.wait_for(asyncio.shield(task), deadline.remaining_s)
        except TimeoutError:
            raise deadline.error() from None

    def close(self) -> None:
        """An update in its pause ends the server: nobody knows what it holds."""
        for task in self._tasks:
            task.cancel()
        self.staging.close()

    async def _sync(self, version: WeightVersion, source: str, plan_digest: bytes, deadline: Deadline) -> WeightsSynced:
        state = self._state
        async with self.lock:
            state.check_alive()
            deadline.check()
            tensors: list[StagedTensor] = []

            def lay_out(manifest: WeightManifest) -> None:
                tensors[:] = checkpoint_tensors(manifest.pieces, self._model_type, tied=self._tied)
                self.staging.lay_out(manifest.pieces)

            endpoint = await state.spec.connect(source, deadline.remaining_s)
            try:
                manifest = await fetch(
                    endpoint.call, version, plan_digest, self.staging.put, deadline=deadline, on_manifest=lay_out
                )
            finally:
                await endpoint.close("fetched")
            paused_s = await self._update(version, tensors, deadline)
        return WeightsSynced(
            engine=state.name,
            version=version,
            digests={p.name: p.digest for p in manifest.pieces},
            n_bytes=sum(p.n_bytes for p in manifest.pieces),
            paused_s=paused_s,
            total_s=deadline.elapsed_s,
        )

    async def _update(self, version: WeightVersion, tensors: list[StagedTensor], deadline: Deadline) -> float:
        """The pause. Whatever fails in it leaves weights that nobody knows, and the engine serves nothing."""
        state = self._state
        mode = state.options.pause if state.can.updates_in_place else "abort"
        if deadline.remaining_s < _PAUSE_MARGIN * self._longest_pause_s:
            # Better late than lost: cut off in the pause, it would leave weights that nobody knows.
            raise DeadlineExpired(
                f"{deadline.what}: {deadline.remaining_s:.1f} s are left after fetching, and the last pause took "
                f"{self._longest_pause_s:.1f} s: raise control.sync_deadline_s"
            )
        if "weights" in state.released:
            raise UserError(f"engine {state.name}: the memory of its weights is released: resume it before a sync")
        began = time.monotonic()
        state.may_start.clear()
        try:
            try:
                await state.client.pause(mode, min(CONTROL_S, deadline.remaining_s))
            except MilesError:
                with contextlib.suppress(MilesError):  # it may have paused all the same
                    await state.client.go_on(CONTROL_S)
                raise
            try:
                state.awaits_weights = False  # from here on they are these, or the engine is tainted
                await self.load(tensors, deadline)
                if mode == "abort":
                    await self._flush()
                await state.client.set_version(str(version), deadline.remaining_s)
                state.version = version
                await state.client.go_on(CONTROL_S)
            except Exception as error:
                raise await self._taint(error) from error
            except BaseException:  # cancelled, by `close`
                state.end_server("an update was given up in its pause")
                raise
        finally:
            state.heard = time.monotonic()
            state.open_again()
        self._longest_pause_s = time.monotonic() - began
        return self._longest_pause_s

    async def load(self, tensors: list[StagedTensor], deadline: Deadline) -> None:
        """Have every rank load and compare. Raises IntegrityError when one's parameters aren't what was sent."""
        state = self._state
        if state.can.update_session:
            await state.client.begin_update(deadline.remaining_s)
        await self.order(tensors, deadline, check=False)
        if state.options.check:
            verdicts = await self.order(tensors, deadline, check=True)
            unused = set.intersection(*(set(v.unused) for v in verdicts))
            if unused:
                raise IntegrityError(f"{len(unused)} tensors that no parameter takes: {', '.join(sorted(unused)[:5])}")
        if state.can.update_session:
            await state.client.end_update(deadline.remaining_s)

    async def order(self, tensors: list[StagedTensor], deadline: Deadline, *, check: bool) -> list[Verdict]:
        """One pass of every rank over the staged tensors. Raises IntegrityError with the first rank's complaint."""
        state, token = self._state, secrets.token_hex(8)
        payload = _pickled(await asyncio.to_thread(self.staging.order, tensors, token, check=check))
        ranks = state.options.tensor_parallel
        await state.client.update_from_tensors([payload] * ranks, LOADER, deadline.remaining_s)
        verdicts = self.staging.take_verdicts(token, ranks)
        for rank, verdict in enumerate(verdicts):
            if not verdict.ok:
                raise IntegrityError(f"rank {rank}: {verdict.error}")
        return verdicts

    async def _taint(self, error: Exception) -> IntegrityError:
        """Hold no version: fail what is under way, forget every prefix. A server that refuses even that is ended."""
        state = self._state
        state.version = None
        state.born.clear()
        why = str(error) if isinstance(error, MilesError) else f"{type(error).__name__}: {error}"
        failure = IntegrityError(f"engine {state.name} serves nothing until a sync succeeds: {why}")
        self._generating.fail(failure)
        try:
            await state.client.set_version(NO_VERSION, CONTROL_S)
            if state.can.update_session:
                try:
                    await state.client.end_update(CONTROL_S)
                except EngineRefused:
                    pass  # it was ended already
            await state.client.go_on(CONTROL_S)
            await self._flush()
        except MilesError as worse:
            state.end_server(f"it had to be ended: {worse}")
        return failure

    async def _flush(self) -> None:
        """Forget all prefixes; requests under way are aborted. Raises EngineRefused."""
        client = self._state.client
        for _ in range(_FLUSH_TRIES):
            await client.abort_all(CONTROL_S)
            if await client.flush_cache(CONTROL_S):
                return
            await asyncio.sleep(_POLL_S)
        raise EngineRefused(f"{self._state.name}: what older weights cached can't be flushed")


def _pickled(path: str) -> str:
    """[(name, tensor)] by value, as /update_weights_from_tensor takes it: base64 of a pickle, read by SGLang's own safe
    unpickler. Nothing is unpickled on this side."""
    import torch

    buffer = io.BytesIO()
    pickle.dump(
        [("miles_hpc.order", torch.frombuffer(bytearray(path.encode()), dtype=torch.uint8))], buffer, protocol=4
    )
    return base64.b64encode(buffer.getvalue()).decode()
