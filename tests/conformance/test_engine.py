"""The RolloutEngine suite: what every engine promises, run on each kind, directly and over a transport.

`scripted` has no model; `moe`, `qwen3` and `llama` are the torch engine on three architectures; `remote` is the torch
engine behind EngineServer and RemoteEngine; `sglang-*` is real SGLang. What needs a model's numbers is in
test_torch_engine.py and test_sglang_engine.py.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import pickle
import time
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from miles_hpc.core.errors import MilesError, RemoteError
from miles_hpc.core.types import FinishReason, VersionSpan, WeightVersion
from miles_hpc.rollout.engine import RolloutEngine
from miles_hpc.rollout.engine_client import RemoteEngine
from miles_hpc.rollout.engine_server import EngineServer
from miles_hpc.rollout.scripted import Faults, ScriptedEngine
from miles_hpc.rollout.sglang.engine import SglangEngine
from miles_hpc.rollout.torch_engine import TorchEngine
from tests.conformance.engines import (
    MAX_LENGTH,
    VOCAB,
    Source,
    generate,
    make_model,
    prompts,
    running,
    save_config,
    serving,
    spec_of,
    sync,
    transport,
    until,
)
from tests.conformance.sglang_servers import STEP_S, forwards, shared_engine

SGLANG_KINDS = ("sglang-moe", "sglang-qwen3", "sglang-llama")
KINDS = (
    "scripted",
    "moe",
    "qwen3",
    "llama",
    "remote",
    *(pytest.param(kind, marks=pytest.mark.sglang) for kind in SGLANG_KINDS),
)
HELD_AFTER = 5


def script(session_id: str, input_ids: np.ndarray) -> list[int]:
    return [int(input_ids.sum() + 7 * i) % VOCAB for i in range(MAX_LENGTH)]


@dataclass
class Bench:
    """An engine of one kind, what is underneath it, and a weight source with version 1.1 staged."""

    kind: str
    engine: RolloutEngine
    inner: ScriptedEngine | TorchEngine | SglangEngine
    source: Source
    folder: Path
    v1: WeightVersion
    holding: bool = False
    forwards: int = 0

    @property
    def is_sglang(self) -> bool:
        return isinstance(self.inner, SglangEngine)

    async def first_sync(self) -> None:
        await sync(self.engine, self.source, self.v1)

    def stage(self, step: int) -> WeightVersion:
        return self.source.stage(step, make_model(self.folder, seed=step))

    def hold(self) -> None:
        """The next request stops after HELD_AFTER tokens until something is asked of the engine, or its deadline."""
        if isinstance(self.inner, ScriptedEngine):
            self.inner.faults.hold_after_tokens = HELD_AFTER
            return
        if isinstance(self.inner, SglangEngine):
            self.forwards = forwards()
            return  # its steps are slow
        inner, decoder, steps = self.inner, self.inner._decoder, 0
        forward = decoder.step

        def step() -> None:
            nonlocal steps
            steps += decoder.busy
            while steps == HELD_AFTER + 1 and not inner._inbox and decoder._active[0].deadline > time.monotonic():
                self.holding = True
                time.sleep(0.001)
            if steps != HELD_AFTER + 1 or not inner._inbox:  # what is asked comes before the next forward
                forward()

        decoder.step = step  # type: ignore[method-assign]

    async def held(self) -> None:
        """Wait until a request is held."""
        if isinstance(self.inner, ScriptedEngine):
            playing = self.inner._requests.values()
            await until(lambda: any(len(p.output) == HELD_AFTER for p in playing))
            self.inner.faults.hold_after_tokens = None
        elif isinstance(self.inner, SglangEngine):
            await until(lambda: forwards() > self.forwards + HELD_AFTER)
        else:
            await until(lambda: self.holding)

    def check_held(self, n: int, most: int) -> None:
        """`n` tokens came before what was asked of the engine; SGLang can't be held at a certain one."""
        assert 0 < n < most if self.is_sglang else n == HELD_AFTER

    def corrupt_next_load(self) -> None:
        """The next load puts one wrong byte into the live weights."""
        if isinstance(self.inner, ScriptedEngine):
            self.inner.faults.corrupt_next_sync = True
            return
        if isinstance(self.inner, SglangEngine):
            corrupt_next_sglang_load(self.inner)
            return
        inner, load = self.inner, self.inner._load_staged

        def wrong() -> None:
            load()
            next(iter(inner._model.parameters.values())).view(-1)[0] += 1.0
            inner._load_staged = load  # type: ignore[method-assign]

        inner._load_staged = wrong  # type: ignore[method-assign]


def corrupt_next_sglang_load(engine: SglangEngine) -> None:
    """Between loading and comparing, somebody else writes to one live parameter."""
    client, update = engine.state.client, engine.state.client.update_from_tensors

    async def wrong(payloads: list[str], load_format: str | None, deadline_s: float) -> None:
        client.update_from_tensors = update  # type: ignore[method-assign]
        await update(payloads, load_format, deadline_s)
        foreign = pickle.dumps([("model.norm.weight", torch.full((engine_width(engine),), 3.0))], protocol=4)
        await update([base64.b64encode(foreign).decode()], None, deadline_s)

    client.update_from_tensors = wrong  # type: ignore[method-assign]


def engine_width(engine: SglangEngine) -> int:
    config = json.loads((engine.state.spec.model_path / "config.json").read_text())
    return config["hidden_size"]


@contextlib.asynccontextmanager
async def bench(kind: str, tmp_path: Path, **changes) -> AsyncIterator[Bench]:
    model = kind.removeprefix("sglang-")
    folder = save_config({"scripted": "moe", "remote": "moe"}.get(model, model), tmp_path / "model")
    spec = spec_of(folder, **changes)
    if kind in SGLANG_KINDS:
        async with serving() as source:
            inner = await shared_engine(kind, spec)
            try:
                await inner.start()
                yield Bench(kind, inner, inner, source, folder, source.stage(1, make_model(folder, seed=1)))
            finally:
                await inner.close()
        return
    make = (
        (lambda: ScriptedEngine(spec, script=script, faults=Faults()))
        if kind == "scripted"
        else (lambda: TorchEngine(spec))
    )
    async with serving() as source, running(make) as inner:
        v1 = source.stage(1, make_model(folder, seed=1))
        if kind != "remote":
            yield Bench(kind, inner, inner, source, folder, v1)
            return
        listener = await EngineServer(inner, term=1).listen(transport())
        remote = RemoteEngine(await transport("rollout").connect(listener.address, deadline_s=10))
        try:
            yield Bench(kind, remote, inner, source, folder, v1)
        finally:
            await remote.close()
            await listener.close()


async def fails(what: Awaitable[object], kind: str) -> str:
    """Await and expect an error of this kind, direct or from the other side; returns its text."""
    with pytest.raises(MilesError) as caught:
        await what
    error = caught.value
    assert (error.kind if isinstance(error, RemoteError) else type(error).__name__) == kind, error
    return str(error)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def test_refuses_everything_before_its_first_sync(kind: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(kind, tmp_path) as b:
            assert (await b.engine.describe()).version is None
            assert "no verified weights" in await fails(generate(b.engine, [1, 2, 3]), "ProtocolError")
            tokens = np.ones((1, 4), np.int32)
            assert "no verified weights" in await fails(b.engine.score(tokens, deadline_s=30), "ProtocolError")

    asyncio.run(scenario())


def test_describes_its_model_and_what_it_holds(kind: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(kind, tmp_path) as b:
            done = await sync(b.engine, b.source, b.v1)
            manifest = b.source.manifests[b.v1]
            assert done.version == b.v1
            assert done.digests == {p.name: p.digest for p in manifest.pieces}
            assert done.n_bytes == sum(p.n_bytes for p in manifest.pieces)
            assert 0.0 <= done.paused_s <= done.total_s
            seen = await b.engine.describe()
            assert (seen.version, seen.slots, seen.shape.vocab_size) == (b.v1, 4, VOCAB)
            if kind in ("scripted", "moe", "remote", "sglang-moe"):
                assert (seen.shape.moe_layers, seen.shape.n_experts, seen.shape.top_k) == ((0, 1), 8, 2)
            else:
                assert (seen.shape.moe_layers, seen.shape.n_experts, seen.shape.top_k) == ((), 0, 0)

    asyncio.run(scenario())


def test_returns_tokens_log_probs_and_one_span(kind: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(kind, tmp_path) as b:
            await b.first_sync()
            for prompt in prompts(3):
                result = await generate(b.engine, prompt, max_new_tokens=9)
                assert result.output_ids.dtype == np.int32 and len(result.output_ids) == 9
                assert result.log_probs.dtype == np.float32 and result.log_probs.shape == (9,)
                assert (result.log_probs <= 0).all()
                assert result.finish_reason is FinishReason.LENGTH
                assert result.versions == (VersionSpan(version=b.v1, start=0, end=9),)
                assert result.cached_tokens == 0

    asyncio.run(scenario())


def test_stop_token_ends_and_is_included(kind: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(kind, tmp_path) as b:
            await b.first_sync()
            prompt = prompts(1, seed=3)[0]
            free = await generate(b.engine, prompt, max_new_tokens=10)
            stop = int(free.output_ids[6])
            first = int(np.flatnonzero(free.output_ids == stop)[0])
            stopped = await generate(b.engine, prompt.copy(), max_new_tokens=10, stop_token_ids=(stop,))
            assert stopped.finish_reason is FinishReason.STOP
            assert stopped.output_ids.tolist() == free.output_ids[: first + 1].tolist()

    asyncio.run(scenario())


def test_more_requests_than_slots_all_finish_with_the_results_they_have_alone(kind: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(kind, tmp_path) as b:
            await b.first_sync()
            batch = prompts(11, seed=5)
            alone = [await generate(b.engine, p, session=f"a{i}") for i, p in enumerate(batch)]
            together = await asyncio.gather(*(generate(b.engine, p, session=f"b{i}") for i, p in enumerate(batch)))
            for one, other in zip(alone, together, strict=True):
                assert one.output_ids.tolist() == other.output_ids.tolist()

    asyncio.run(scenario())


def test_next_turn_reuses_what_is_cached_and_ends_as_without(kind: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(kind, tmp_path) as b:
            await b.first_sync()
            prompt = prompts(1, seed=7)[0]
            first = await generate(b.engine, prompt, session="kept", max_new_tokens=6)
            turn = np.concatenate((prompt, first.output_ids, prompts(1, seed=8)[0])).astype(np.int32)
            second = await generate(b.engine, turn, session="kept", max_new_tokens=6)
            assert second.cached_tokens == len(prompt) + 6 - 1
            fresh = await generate(b.engine, turn, session="fresh", max_new_tokens=6)
            assert fresh.cached_tokens == (len(turn) - 1 if b.is_sglang else 0)  # which shares prefixes
            assert second.output_ids.tolist() == fresh.output_ids.tolist()
            np.testing.assert_allclose(second.log_probs, fresh.log_probs, atol=2e-5)
            await b.engine.end_session("kept")
            again = await generate(b.engine, turn, session="kept", max_new_tokens=6)
            assert again.cached_tokens == (len(turn) - 1 if b.is_sglang else 0)
            assert again.output_ids.tolist() == fresh.output_ids.tolist()

    asyncio.run(scenario())


def test_turn_that_departs_from_the_cache_reuses_only_the_common_part(kind: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(kind, tmp_path) as b:
            await b.first_sync()
            prompt = prompts(1, seed=9, shortest=20)[0]
            await generate(b.engine, prompt, session="kept", max_new_tokens=6)
            other = prompt.copy()
            other[13] = (other[13] + 1) % VOCAB
            second = await generate(b.engine, other, session="kept", max_new_tokens=6)
            fresh = await generate(b.engine, other, session="fresh", max_new_tokens=6)
            assert second.cached_tokens == 13
            assert second.output_ids.tolist() == fresh.output_ids.tolist()
            repeated = await generate(b.engine, other, session="kept", max_new_tokens=6)
            assert repeated.cached_tokens == len(other) - 1  # one token is always an input
            assert repeated.output_ids.tolist() == fresh.output_ids.tolist()

    asyncio.run(scenario())


def test_routed_rows_start_where_asked_and_end_before_the_last_token(kind: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(kind, tmp_path) as b:
            await b.first_sync()
            for i, (start, n) in enumerate([(0, 9), (4, 9), (15, 1), (7, 2)]):
                prompt = prompts(1, seed=i, shortest=15)[0]
                result = await generate(b.engine, prompt, start=start, max_new_tokens=n)
                if kind.removeprefix("sglang-") in ("qwen3", "llama"):
                    assert result.routed_experts is None
                    continue
                assert result.routed_experts is not None and result.routed_experts.dtype == np.uint8
                assert result.routed_experts.shape == (len(prompt) + n - 1 - start, 2, 2)
                assert result.routed_experts.max() < 8

    asyncio.run(scenario())


def test_update_in_the_middle_gives_two_spans(kind: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(kind, tmp_path) as b:
            await b.first_sync()
            v2 = b.stage(2)
            b.hold()
            running_one = asyncio.ensure_future(generate(b.engine, [1, 2, 3, 4], max_new_tokens=20))
            await b.held()
            await sync(b.engine, b.source, v2)
            result = await running_one
            assert [s.version for s in result.versions] == [b.v1, v2]
            assert result.versions[0].start == 0 and result.versions[-1].end == 20
            assert result.versions[0].end == result.versions[1].start
            b.check_held(result.versions[0].end, 20)
            assert (await b.engine.describe()).version == v2

    asyncio.run(scenario())


@pytest.mark.parametrize("target", ["r-x", ""])
def test_abort_answers_with_what_there_is(kind: str, target: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(kind, tmp_path) as b:
            await b.first_sync()
            whole = await generate(b.engine, [1, 2, 3, 4], session="y", max_new_tokens=30)
            b.hold()
            one = asyncio.ensure_future(generate(b.engine, [1, 2, 3, 4], session="x", max_new_tokens=30))
            await b.held()
            await b.engine.abort(target)
            result = await one
            n = len(result.output_ids)
            assert result.finish_reason is FinishReason.ABORT
            b.check_held(n, 30)
            assert result.output_ids.tolist() == whole.output_ids[:n].tolist()
            assert sum(s.end - s.start for s in result.versions) == n == len(result.log_probs)

    asyncio.run(scenario())


def test_deadline_ends_a_request_with_what_there_is(kind: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(kind, tmp_path) as b:
            await b.first_sync()
            b.hold()
            deadline_s = 15 * STEP_S if b.is_sglang else 2.0
            result = await generate(b.engine, [1, 2, 3, 4], max_new_tokens=30, deadline_s=deadline_s)
            assert result.finish_reason is FinishReason.ABORT
            b.check_held(len(result.output_ids), 30)

    asyncio.run(scenario())


def test_too_long_request_is_refused_and_a_full_slot_ends_one(kind: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(kind, tmp_path) as b:
            await b.first_sync()
            text = await fails(generate(b.engine, [1] * MAX_LENGTH), "UserError")
            assert str(MAX_LENGTH) in text
            result = await generate(b.engine, [1] * (MAX_LENGTH - 5), max_new_tokens=50)
            assert (len(result.output_ids), result.finish_reason) == (5, FinishReason.LENGTH)

    asyncio.run(scenario())


def test_session_takes_one_request_at_a_time(kind: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(kind, tmp_path) as b:
            await b.first_sync()
            b.hold()
            one = asyncio.ensure_future(generate(b.engine, [1, 2, 3], session="x", request="r1", max_new_tokens=30))
            await b.held()
            text = await fails(generate(b.engine, [1, 2, 3], session="x", request="r2"), "ProtocolError")
            assert "under way" in text
            await b.engine.abort()
            assert (await one).finish_reason is FinishReason.ABORT

    asyncio.run(scenario())


def test_damage_in_flight_is_fetched_once_more(kind: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(kind, tmp_path) as b:
            b.source.corrupt_replies = 1
            await b.first_sync()
            assert (await b.engine.describe()).version == b.v1
            assert b.source.corrupt_replies == 0

    asyncio.run(scenario())


def test_failed_fetch_leaves_the_old_version_serving(kind: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(kind, tmp_path) as b:
            await b.first_sync()
            v2 = b.stage(2)
            before = await generate(b.engine, [5, 6, 7], session="a")
            b.source.corrupt_replies = 2
            await fails(sync(b.engine, b.source, v2), "IntegrityError")
            wrong = b.engine.sync(v2, b.source.address, b"\0" * 16, deadline_s=30)
            assert "plan digest" in await fails(wrong, "IntegrityError")
            digest = b.source.manifests[v2].plan_digest
            with pytest.raises(MilesError):
                await b.engine.sync(v2, "loopback://0", digest, deadline_s=1.0)
            with pytest.raises(MilesError):
                await b.engine.sync(WeightVersion(1, 77), b.source.address, digest, deadline_s=30)
            assert (await b.engine.describe()).version == b.v1
            after = await generate(b.engine, [5, 6, 7], session="b")
            assert before.output_ids.tolist() == after.output_ids.tolist()
            assert after.versions[0].version == b.v1

    asyncio.run(scenario())


def test_wrong_live_weights_taint_until_a_sync_succeeds(kind: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(kind, tmp_path) as b:
            await b.first_sync()
            expected = await generate(b.engine, [5, 6, 7], session="a")
            v2 = b.stage(2)
            b.hold()
            under_way = asyncio.ensure_future(generate(b.engine, [1, 2, 3, 4], max_new_tokens=30))
            await b.held()
            b.corrupt_next_load()
            await fails(sync(b.engine, b.source, v2), "IntegrityError")
            with pytest.raises(MilesError):
                await under_way
            assert (await b.engine.describe()).version is None
            await fails(generate(b.engine, [5, 6, 7]), "ProtocolError")
            v3 = b.source.stage(3, make_model(b.folder, seed=1))
            await sync(b.engine, b.source, v3)
            again = await generate(b.engine, [5, 6, 7], session="a")
            assert (again.cached_tokens if kind != "scripted" else 0) == 0
            assert again.output_ids.tolist() == expected.output_ids.tolist()
            assert again.versions[0].version == v3

    asyncio.run(scenario())


def test_score_gives_one_value_per_following_token(kind: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(kind, tmp_path) as b:
            await b.first_sync()
            tokens = np.random.default_rng(0).integers(0, VOCAB, (3, 17)).astype(np.int32)
            scores = await b.engine.score(tokens, deadline_s=30)
            assert scores.shape == (3, 16) and scores.dtype == np.float32 and (scores <= 0).all()

    asyncio.run(scenario())
