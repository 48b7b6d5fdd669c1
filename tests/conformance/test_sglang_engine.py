"""Real SGLang: its numbers against transformers in float64, and the hazards that were measured on it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from miles_hpc.core.deadline import Deadline
from miles_hpc.core.errors import IntegrityError, MilesError, PeerLost, UserError
from miles_hpc.core.types import FinishReason, WeightVersion
from miles_hpc.rollout.sglang import engine as sglang_engine
from miles_hpc.rollout.sglang import generating
from miles_hpc.rollout.sglang.checkpoint import checkpoint_tensors
from miles_hpc.rollout.sglang.client import EngineRefused
from miles_hpc.rollout.sglang.engine import SglangEngine
from tests.conformance.engines import (
    Source,
    generate,
    make_model,
    prompts,
    reference_experts,
    reference_log_probs,
    save_config,
    serving,
    spec_of,
    sync,
    until,
)
from tests.conformance.sglang_servers import STEP_S, forwards, options, shared_engine, start_server

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

#: Of log-probs in float32, 2 layers deep. SGLang and transformers order their sums differently.
TOLERANCE = 1e-4

Scenario = Callable[[SglangEngine, Source, Path], Awaitable[None]]


def play(scenario: Scenario, tmp_path: Path, *, kind: str = "moe", **changes) -> None:
    """On the session's server for this kind; the engine starts without weights."""

    async def run() -> None:
        folder = save_config(kind, tmp_path / "model")
        engine = await shared_engine(f"sglang-{kind}", spec_of(folder, options=options(**changes)))
        async with serving() as source:
            try:
                await engine.start()
                await scenario(engine, source, folder)
            finally:
                await engine.close()

    asyncio.run(run())


def close(found: np.ndarray, model, tokens: np.ndarray, n: int, temperature: float = 1.0) -> None:
    """Log-probs of the last n tokens are those of one full forward in float64."""
    np.testing.assert_allclose(found, reference_log_probs(model, tokens, n, temperature), atol=TOLERANCE)


async def under_way(engine: SglangEngine, *, max_new_tokens: int = 30, session: str = "held") -> asyncio.Task:
    """A request that has sampled some of its tokens."""
    before = forwards()
    task = asyncio.ensure_future(generate(engine, [1, 2, 3, 4], session=session, max_new_tokens=max_new_tokens))
    await until(lambda: forwards() > before + 4)
    return task


# ------------------------------------------------------------------------------------------------ numbers


@pytest.mark.parametrize("kind", ["moe", "qwen3", "llama"])
def test_log_probs_and_scores_are_those_of_a_full_forward(kind: str, tmp_path: Path) -> None:
    """float32 on both sides, reference in float64."""

    async def scenario(engine: SglangEngine, source: Source, folder: Path) -> None:
        model = make_model(folder, 1)
        await sync(engine, source, source.stage(1, model))
        for temperature in (0.0, 0.7, 1.0):
            for i, prompt in enumerate(prompts(3, seed=int(10 * temperature))):
                found = await generate(
                    engine, prompt, session=f"{temperature}-{i}", max_new_tokens=9, temperature=temperature
                )
                tokens = np.concatenate((prompt, found.output_ids))
                close(found.log_probs, model, tokens, 9, temperature)
        tokens = np.stack([p[:8] for p in prompts(3, seed=9, shortest=8)])
        scores = await engine.score(tokens, deadline_s=60)
        for row, score in zip(tokens, scores, strict=True):
            close(score, model, row, 7)

    play(scenario, tmp_path, kind=kind)


def test_routed_experts_are_the_routers_own_in_their_order(tmp_path: Path) -> None:
    async def scenario(engine: SglangEngine, source: Source, folder: Path) -> None:
        model = make_model(folder, 1)
        await sync(engine, source, source.stage(1, model))
        prompt = prompts(1, seed=4, shortest=12)[0]
        first = await generate(engine, prompt, session="s", max_new_tokens=7)
        tokens = np.concatenate((prompt, first.output_ids))
        expected = reference_experts(model, tokens)
        np.testing.assert_array_equal(first.routed_experts, expected[:-1])
        turn = np.concatenate((tokens, prompts(1, seed=5)[0])).astype(np.int32)
        second = await generate(engine, turn, session="s", start=len(tokens) - 1, max_new_tokens=3)
        assert second.cached_tokens >= len(tokens) - 1
        expected = reference_experts(model, np.concatenate((turn, second.output_ids)))
        np.testing.assert_array_equal(second.routed_experts, expected[len(tokens) - 1 : -1])

    play(scenario, tmp_path)


# ------------------------------------------------------------------------------------------------ updates


def test_rows_of_tokens_from_before_an_update_stay_those_of_the_old_weights(tmp_path: Path) -> None:
    """Under retract they change owner; in place they don't."""

    async def scenario(engine: SglangEngine, source: Source, folder: Path) -> None:
        old = make_model(folder, 1)
        await sync(engine, source, source.stage(1, old))
        v2 = source.stage(2, make_model(folder, 2))
        task = await under_way(engine)
        await sync(engine, source, v2)
        found = await task
        assert [span.version.step for span in found.versions] == [1, 2]
        before = found.versions[0].end
        tokens = np.concatenate(([1, 2, 3, 4], found.output_ids[:before])).astype(np.int32)
        np.testing.assert_array_equal(found.routed_experts[: len(tokens) - 1], reference_experts(old, tokens)[:-1])
        close(found.log_probs[:before], old, tokens, before, 0.0)

    play(scenario, tmp_path)


def test_a_session_keeps_its_prefix_over_an_update_and_a_new_one_does_not_find_it(tmp_path: Path) -> None:
    async def scenario(engine: SglangEngine, source: Source, folder: Path) -> None:
        await sync(engine, source, source.stage(1, make_model(folder, 1)))
        prompt = prompts(1, seed=3, shortest=20)[0]
        first = await generate(engine, prompt, session="old", max_new_tokens=4)
        new = make_model(folder, 2)
        await sync(engine, source, source.stage(2, new))
        turn = np.concatenate((prompt, first.output_ids, [5, 6])).astype(np.int32)
        assert (await generate(engine, turn, session="old", max_new_tokens=2)).cached_tokens >= len(prompt)
        fresh = await generate(engine, turn, session="new", max_new_tokens=4)
        assert fresh.cached_tokens == 0
        tokens = np.concatenate((turn, fresh.output_ids))
        close(fresh.log_probs, new, tokens, 4)
        scores = await engine.score(turn[None], deadline_s=60)
        close(scores[0], new, turn, len(turn) - 1)

    play(scenario, tmp_path)


def test_requests_that_an_update_ends_go_on_from_their_tokens(tmp_path: Path) -> None:
    async def scenario(engine: SglangEngine, source: Source, folder: Path) -> None:
        old, new = make_model(folder, 1), make_model(folder, 2)
        await sync(engine, source, source.stage(1, old))
        v2 = source.stage(2, new)
        task = await under_way(engine)
        await sync(engine, source, v2)
        found = await task
        assert found.finish_reason is FinishReason.LENGTH and len(found.output_ids) == 30
        assert [span.version.step for span in found.versions] == [1, 2]
        assert found.routed_experts is not None and len(found.routed_experts) == 4 + 30 - 1
        # Everything was flushed, so what came later is a full forward of the new weights.
        tokens = np.concatenate(([1, 2, 3, 4], found.output_ids)).astype(np.int32)
        n_new = 30 - found.versions[0].end
        close(found.log_probs[-n_new:], new, tokens, n_new, 0.0)

    play(scenario, tmp_path, pause="abort")


def test_an_update_that_the_server_refuses_after_it_changed_weights_taints(tmp_path: Path) -> None:
    """Asked to flush with a request under way, it loads, labels, and answers 400."""

    async def scenario(engine: SglangEngine, source: Source, folder: Path) -> None:
        await sync(engine, source, source.stage(1, make_model(folder, 1)))
        v2 = source.stage(2, make_model(folder, 2))
        client = engine.state.client

        async def flushing(payloads: list[str], load_format: str | None, deadline_s: float) -> None:
            body = {"serialized_named_tensors": payloads, "load_format": load_format, "flush_cache": True}
            await client._control("/update_weights_from_tensor", body | {"weight_version": "9.9"}, deadline_s)

        client.update_from_tensors = flushing  # type: ignore[method-assign]
        task = await under_way(engine)
        with pytest.raises(IntegrityError, match="not flushed"):
            await sync(engine, source, v2)
        with pytest.raises(MilesError):
            await task
        assert (await engine.describe()).version is None
        assert await client.weight_version(30) == "none"
        del client.update_from_tensors  # type: ignore[method-assign]
        await sync(engine, source, source.stage(3, make_model(folder, 2)))
        assert (await generate(engine, [1, 2, 3], session="after")).versions[0].version.step == 3

    play(scenario, tmp_path)


def test_a_model_of_another_width_is_refused_and_serves_nothing(tmp_path: Path) -> None:
    async def scenario(engine: SglangEngine, source: Source, folder: Path) -> None:
        config = json.loads((save_config("moe", tmp_path / "other") / "config.json").read_text())
        config["vocab_size"] = 32
        (tmp_path / "other" / "config.json").write_text(json.dumps(config))
        with pytest.raises(IntegrityError, match="rank 0"):
            await sync(engine, source, source.stage(1, make_model(tmp_path / "other", 1)))
        assert (await engine.describe()).version is None
        await sync(engine, source, source.stage(2, make_model(folder, 1)))

    play(scenario, tmp_path)


def test_weights_from_a_process_group_and_from_disk(tmp_path: Path) -> None:
    """The other ways that SGLang has: what the engine then holds is compared with the same check."""

    async def scenario(engine: SglangEngine, source: Source, folder: Path) -> None:
        client = engine.state.client
        model = make_model(folder, 5)
        v1 = source.stage(1, model)
        manifest = source.manifests[v1]
        tensors = checkpoint_tensors(manifest.pieces, "qwen3", tied=False)
        parameters = dict(model.named_parameters())
        port = _free_port()
        group = await _both(
            lambda: _join(port),
            client.join_update_group(
                address="127.0.0.1", port=port, rank_offset=1, world_size=2, group="w", backend="gloo", deadline_s=60
            ),
        )
        await client.begin_update(30)
        await _both(
            lambda: [torch.distributed.broadcast(parameters[t.name].data, 0, group=group) for t in tensors],
            client.update_from_group([(t.name, t.dtype, t.shape) for t in tensors], "w", 60),
        )
        await client.end_update(30)
        await client.leave_update_group("w", 30)
        await _compare(engine, source, v1, tensors)

        other = make_model(folder, 6)
        save_file({n: p.data.contiguous() for n, p in other.named_parameters()}, folder / "model.safetensors")
        await client.update_from_disk(str(folder), 60)
        with pytest.raises(IntegrityError, match="parameters differ"):
            await _compare(engine, source, v1, tensors)
        v2 = source.stage(2, other)
        await _compare(engine, source, v2, tensors)
        with pytest.raises(EngineRefused):
            await client.update_from_disk(str(tmp_path / "nowhere"), 60)

    play(scenario, tmp_path, kind="qwen3")


async def _compare(engine: SglangEngine, source: Source, version: WeightVersion, tensors) -> None:
    """The live parameters with a staged version, without loading it."""
    manifest = source.manifests[version]
    engine.updating.staging.lay_out(manifest.pieces)
    engine.updating.staging.put(manifest.pieces, memoryview(b"".join(source.source._staged[version].views)))
    await engine.state.client.begin_update(30)
    try:
        await engine.updating.order(tensors, Deadline(60, "compare"), check=True)
    finally:
        await engine.state.client.end_update(30)


def _join(port: int) -> torch.distributed.ProcessGroup:
    """Rank 0 of a group beside the default one, under the names that SGLang's rank uses."""
    c10d = torch.distributed.distributed_c10d
    store, _, _ = next(c10d.rendezvous(f"tcp://127.0.0.1:{port}", 0, 2, timeout=timedelta(seconds=60)))
    group, _ = c10d._new_process_group_helper(
        2, 0, [], c10d.Backend("gloo"), c10d.PrefixStore("w", store), group_name="w", timeout=timedelta(seconds=60)
    )
    c10d._world.pg_group_ranks[group] = {0: 0, 1: 1}
    return group


async def _both(ours: Callable[[], object], theirs: Awaitable[object]) -> object:
    """A collective: our part in a thread, theirs by HTTP."""
    mine, _ = await asyncio.gather(asyncio.to_thread(ours), theirs)
    return mine


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


# ------------------------------------------------------------------------------------------------ what goes wrong


def test_a_token_outside_the_vocabulary_never_reaches_the_server(tmp_path: Path) -> None:
    """Its scheduler would end with it."""

    async def scenario(engine: SglangEngine, source: Source, folder: Path) -> None:
        await sync(engine, source, source.stage(1, make_model(folder, 1)))
        for bad in ([1, 48], [-1, 2]):
            with pytest.raises(UserError, match="vocabulary is 0 to 47"):
                await generate(engine, bad)
            with pytest.raises(UserError, match="vocabulary is 0 to 47"):
                await engine.score(np.asarray([bad], np.int32), deadline_s=10)
        assert len((await generate(engine, [1, 47])).output_ids) == 12

    play(scenario, tmp_path)


def test_a_server_without_the_flag_returns_no_rows_and_is_refused(tmp_path: Path) -> None:
    async def run() -> None:
        folder = save_config("moe", tmp_path / "model")
        server = await start_server(spec_of(folder, options=options(routed_experts=False)), step_s=0.0)
        engine = SglangEngine(spec_of(folder, options=options()), server)
        try:
            with pytest.raises(UserError, match="returns no routed experts"):
                await engine.start()
        finally:
            await engine.close()
            await server.end()

    asyncio.run(run())


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    async def run() -> None:
        folder = save_config("qwen3", tmp_path / "model")
        engine = SglangEngine(spec_of(folder, options=options(args={"no-such-argument": 1})))
        try:
            with pytest.raises(UserError, match=r"before it served[^$]*unrecognized arguments: --no-such-argument"):
                await engine.start()
        finally:
            await engine.close()

    asyncio.run(run())


def test_two_ranks_load_and_compare_their_shares_and_a_killed_or_stopped_server_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One server of its own, as wide as two ranks, that doesn't survive the test."""
    monkeypatch.setattr(sglang_engine, "_HEALTH_S", 1.0)
    monkeypatch.setattr(sglang_engine, "_WATCH_EVERY_S", 0.5)
    monkeypatch.setattr(generating, "_ABORT_S", 3.0)

    async def run() -> None:
        folder = save_config("moe", tmp_path / "model")
        spec = spec_of(folder, options=options(tensor_parallel=2))
        for number in (signal.SIGKILL, signal.SIGSTOP):
            server = await start_server(spec)
            engine = SglangEngine(spec, server)
            try:
                await engine.start()
                async with serving() as source:
                    model = make_model(folder, 1)
                    await sync(engine, source, source.stage(1, model))
                    if number is signal.SIGKILL:
                        prompt = prompts(1)[0]
                        found = await generate(engine, prompt, max_new_tokens=9)
                        tokens = np.concatenate((prompt, found.output_ids))
                        close(found.log_probs, model, tokens, 9)
                        np.testing.assert_array_equal(found.routed_experts, reference_experts(model, tokens)[:-1])
                    task = await under_way(engine, max_new_tokens=80)
                    at = time.monotonic()
                    os.kill(_scheduler_of(server), number)
                    with pytest.raises(MilesError):
                        await asyncio.wait_for(task, 60)
                    async with asyncio.timeout(60):
                        while True:
                            try:
                                await engine.describe()
                            except PeerLost:
                                break
                            await asyncio.sleep(0.05)
                    assert time.monotonic() - at < 30
                    with pytest.raises(PeerLost):
                        await generate(engine, [1, 2, 3])
            finally:
                await engine.close()
                await server.end()
                assert server.exit_code is not None

    asyncio.run(run())


def _scheduler_of(server) -> int:
    """The process of the server's first rank."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            is_ours = os.getpgid(int(entry.name)) == os.getpgid(server._child.pid)
            if is_ours and b"sglang::scheduler" in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except (OSError, ProcessLookupError):
            continue
    return min(found)


def test_a_deadline_that_falls_into_an_update(tmp_path: Path) -> None:
    """What is at the server answers after the pause; what isn't there yet answers in time."""

    async def scenario(engine: SglangEngine, source: Source, folder: Path) -> None:
        await sync(engine, source, source.stage(1, make_model(folder, 1)))
        v2 = source.stage(2, make_model(folder, 2))
        load, let_go = engine.updating.load, asyncio.Event()

        async def held_up(*what) -> None:
            await let_go.wait()
            await load(*what)

        engine.updating.load = held_up  # type: ignore[method-assign]
        before = forwards()
        early = asyncio.ensure_future(
            generate(engine, [1, 2, 3], session="early", max_new_tokens=40, deadline_s=40 * STEP_S)
        )
        await until(lambda: forwards() >= before + 3)
        syncing = asyncio.ensure_future(sync(engine, source, v2))
        await until(lambda: not engine.state.may_start.is_set())
        late = await asyncio.wait_for(generate(engine, [1, 2, 3], session="late", deadline_s=0.2), 10)
        assert late.finish_reason is FinishReason.ABORT and len(late.output_ids) == 0
        await asyncio.sleep(40 * STEP_S)
        assert not early.done()  # nothing answers in the pause
        let_go.set()
        await syncing
        found = await early
        assert found.finish_reason is FinishReason.ABORT and 0 < len(found.output_ids) < 40
        assert len((await generate(engine, [1, 2, 3], session="b")).output_ids) == 12

    play(scenario, tmp_path)


def test_memory_is_given_back_and_requests_go_on_after_it(tmp_path: Path) -> None:
    """On a CPU the server gives nothing back; what the engine promises around it is the same."""

    async def scenario(engine: SglangEngine, source: Source, folder: Path) -> None:
        with pytest.raises(UserError, match=r"memory tags \['cache'\]: expected some of kv_cache, weights"):
            await engine.release_memory(["cache"], deadline_s=30)
        models = [make_model(folder, seed) for seed in (1, 2)]
        await sync(engine, source, source.stage(1, models[0]))
        v2 = source.stage(2, models[1])
        task = await under_way(engine, max_new_tokens=20)
        await engine.release_memory(["kv_cache"], deadline_s=30)
        await engine.release_memory(["kv_cache", "weights"], deadline_s=30)
        assert (await engine.describe()).version is None
        late = await asyncio.wait_for(generate(engine, [1, 2, 3], session="late", deadline_s=0.3), 10)
        assert late.finish_reason is FinishReason.ABORT and len(late.output_ids) == 0 and not task.done()
        with pytest.raises(UserError, match="resume it before a sync"):
            await sync(engine, source, v2)
        await engine.resume_memory(["weights"], deadline_s=30)
        await sync(engine, source, v2)
        await asyncio.sleep(0.3)
        assert not task.done()  # without a cache nothing is sampled
        await engine.resume_memory(["kv_cache"], deadline_s=30)
        found = await task
        assert [span.version.step for span in found.versions] == [1, 2] and len(found.output_ids) == 20
        tokens = np.asarray(prompts(1)[0].tolist())
        after = await generate(engine, tokens, session="after", max_new_tokens=9)
        close(after.log_probs, models[1], np.concatenate((tokens, after.output_ids)), 9)

    play(scenario, tmp_path, memory_saver=True)


def test_memory_stays_where_the_run_did_not_ask_for_it(tmp_path: Path) -> None:
    async def scenario(engine: SglangEngine, source: Source, folder: Path) -> None:
        for call in (engine.release_memory, engine.resume_memory):
            with pytest.raises(UserError, match="enable_memory_saver = true"):
                await call(["weights"], deadline_s=5)

    play(scenario, tmp_path)
