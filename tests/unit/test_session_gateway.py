"""From a session's prompt to a generation: which engine; what if it fails, hangs, or nobody waits any more."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from miles_hpc.core.errors import ProtocolError, RemoteError, UserError
from miles_hpc.core.types import FinishReason, SamplingParams, WeightVersion
from miles_hpc.rollout.engine import Generation
from miles_hpc.rollout.scripted import Faults, ScriptedEngine
from miles_hpc.rollout.session import gateway as gateway_module
from miles_hpc.rollout.session.errors import BadRequest, EngineFailure, NoEngine, OutOfTime, SessionGone
from miles_hpc.rollout.session.gateway import EngineGateway
from tests.fakes.scripted_engines import V1, EngineWorld, engine_world, write_config

V2 = WeightVersion(1, 2)
Scenario = Callable[[EngineWorld, EngineGateway], Awaitable[None]]


def play(folder: Path, scenario: Scenario, *, experts: int = 0, **bounds: Any) -> None:
    async def run() -> None:
        gateway = EngineGateway(**bounds)
        async with engine_world(write_config(folder, positions=200, experts=experts)) as world:
            await scenario(world, gateway)
            await gateway.close()

    asyncio.run(asyncio.wait_for(run(), 60))


def numbers(session: str, input_ids: Any) -> list[int]:
    return [int(input_ids[-1]) + 1 + i for i in range(3)]


async def ask(gateway: EngineGateway, key: str = "s", prompt: int = 5, *, deadline_s: float = 20) -> Generation:
    return await gateway.generate(
        key,
        np.arange(prompt, dtype=np.int32),
        SamplingParams(max_new_tokens=9),
        new_tokens=prompt,
        routed_experts_start=0,
        deadline_s=deadline_s,
    )


def calls(*engines: ScriptedEngine) -> list[int]:
    return [engine.calls for engine in engines]


def test_a_session_stays_with_its_engine(tmp_path: Path) -> None:
    async def scenario(world: EngineWorld, gateway: EngineGateway) -> None:
        one, two = [await world.engine(name, numbers) for name in ("one", "two")]
        gateway.add_engine("one", one, V1)
        generation = await ask(gateway)
        assert generation.output_ids.tolist() == [5, 6, 7] and generation.versions[0].version == V1
        gateway.add_engine("two", two, V1)
        for _ in range(3):
            await ask(gateway)
        assert calls(one, two) == [4, 0]
        await ask(gateway, "other")
        assert calls(one, two) == [4, 1]
        assert (gateway.engines, gateway.stats().sessions, gateway.current) == (("one", "two"), 2, V1)

    play(tmp_path, scenario)


def test_no_key_is_an_error(tmp_path: Path) -> None:
    async def scenario(world: EngineWorld, gateway: EngineGateway) -> None:
        gateway.add_engine("one", await world.engine("one", numbers), V1)
        with pytest.raises(UserError, match="no routing key"):
            await ask(gateway, "")

    play(tmp_path, scenario)


def test_a_lost_engine_is_left_and_its_session_goes_on_elsewhere(tmp_path: Path) -> None:
    async def scenario(world: EngineWorld, gateway: EngineGateway) -> None:
        one, two = [await world.engine(name, numbers) for name in ("one", "two")]
        gateway.add_engine("one", one, V1)
        await ask(gateway)
        gateway.add_engine("two", two, V1)
        await one.close()  # raises PeerLost from now on
        assert (await ask(gateway)).output_ids.tolist() == [5, 6, 7]
        assert calls(one, two) == [1, 1]
        assert gateway.engines == ("two",) and not gateway.has("one") and gateway.stats().moved == 1
        assert gateway.failovers == 1 and 0 < gateway.slowest_failover_s < 60
        await ask(gateway)
        assert calls(one, two) == [1, 2]

    play(tmp_path, scenario)


class Failing(ScriptedEngine):
    """Fails as a remote engine does whose handler raised."""

    error: Exception = RemoteError("broke", kind="RuntimeError", peer="x")

    async def generate(self, *args: Any, **more: Any) -> Generation:
        self.calls += 1
        raise self.error


def test_what_an_engines_process_lost_is_a_lost_engine(tmp_path: Path) -> None:
    async def scenario(world: EngineWorld, gateway: EngineGateway) -> None:
        one, two = [await world.engine(name, numbers) for name in ("one", "two")]
        one.__class__ = Failing
        one.error = RemoteError("SGLang ended with -9", kind="PeerLost", peer="x")  # type: ignore[attr-defined]
        gateway.add_engine("one", one, V1)
        asking = asyncio.create_task(ask(gateway))
        while gateway.has("one"):
            await asyncio.sleep(0.01)
        gateway.add_engine("two", two, V1)
        assert (await asking).output_ids.tolist() == [5, 6, 7]
        assert gateway.engines == ("two",) and gateway.failovers == 1

    play(tmp_path, scenario)


@pytest.mark.parametrize("error", [Failing.error, ProtocolError("holds no weights")])
def test_an_engine_that_failed_one_request_stays(tmp_path: Path, error: Exception) -> None:
    async def scenario(world: EngineWorld, gateway: EngineGateway) -> None:
        one, two = [await world.engine(name, numbers) for name in ("one", "two")]
        one.__class__ = Failing
        one.error = error  # type: ignore[attr-defined]
        gateway.add_engine("one", one, V1)
        gateway.add_engine("two", two, V1)
        for i in range(4):
            await ask(gateway, f"s{i}")
        assert one.calls >= 1 and two.calls == 4
        assert len(gateway.engines) == 2

    play(tmp_path, scenario)


def test_tries_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_module, "_LOOK_S", 0.01)

    async def scenario(world: EngineWorld, gateway: EngineGateway) -> None:
        engines = [await world.engine(name, numbers) for name in ("one", "two")]
        for engine in engines:
            engine.__class__ = Failing
            gateway.add_engine(engine.name, engine, V1)
        with pytest.raises(EngineFailure, match=r"3 engines failed the request: .*RuntimeError: broke"):
            await ask(gateway)
        assert sorted(calls(*engines)) == [1, 2]

    play(tmp_path, scenario, max_tries=3)
    with pytest.raises(UserError, match="max_tries 0"):
        EngineGateway(max_tries=0)


def test_a_request_that_no_engine_would_take_is_the_clients_fault(tmp_path: Path) -> None:
    async def scenario(world: EngineWorld, gateway: EngineGateway) -> None:
        one, two = [await world.engine(name, numbers) for name in ("one", "two")]
        gateway.add_engine("one", one, V1)
        gateway.add_engine("two", two, V1)
        with pytest.raises(BadRequest, match="this engine takes 1 to 199"):
            await ask(gateway, prompt=500)
        assert len(gateway.engines) == 2 and sum(calls(one, two)) == 0

    play(tmp_path, scenario)


def test_without_engine_a_request_waits_and_then_says_so(tmp_path: Path) -> None:
    async def scenario(world: EngineWorld, gateway: EngineGateway) -> None:
        with pytest.raises(NoEngine, match="none of 0 engines holds weights"):
            await ask(gateway, deadline_s=0.05)
        waiting = [asyncio.create_task(ask(gateway, f"s{i}")) for i in range(3)]
        await asyncio.sleep(0.05)
        engine = await world.engine("one", numbers)
        gateway.add_engine("one", engine, None)
        await asyncio.sleep(0.05)
        assert not any(task.done() for task in waiting) and gateway.engines == () and gateway.has("one")
        gateway.set_version("one", V1)
        for task in waiting:
            assert len((await task).output_ids) == 3

    play(tmp_path, scenario)


def test_only_engines_with_the_newest_weights_get_new_sessions(tmp_path: Path) -> None:
    async def scenario(world: EngineWorld, gateway: EngineGateway) -> None:
        one, two = [await world.engine(name, numbers) for name in ("one", "two")]
        gateway.add_engine("one", one, V1)
        gateway.add_engine("two", two, V1)
        for i in range(8):
            await ask(gateway, f"old{i}")
        await world.sync(two, V2)
        gateway.set_version("two", V2)
        before = one.calls
        for i in range(8):
            await ask(gateway, f"new{i}")
        assert one.calls == before and gateway.current == V2
        for i in range(8):
            await ask(gateway, f"old{i}")
        assert one.calls > before
        gateway.set_version("one", None)  # tainted: nothing is sent there
        before = one.calls
        for i in range(8):
            await ask(gateway, f"old{i}")
        assert one.calls == before
        gateway.add_engine("late", await world.engine("late", numbers), V1)  # behind: stays out until it is updated
        gateway.remove_engine("two")
        with pytest.raises(NoEngine):
            await ask(gateway, "x", deadline_s=0.05)
        gateway.set_version("late", V2)
        await ask(gateway, "x")
        with pytest.raises(UserError, match="it isn't in"):
            gateway.set_version("two", V2)

    play(tmp_path, scenario)


def test_at_the_deadline_an_engine_gives_what_it_has(tmp_path: Path) -> None:
    async def scenario(world: EngineWorld, gateway: EngineGateway) -> None:
        engine = await world.engine("one", numbers, faults=Faults(hold_after_tokens=2))
        gateway.add_engine("one", engine, V1)
        generation = await ask(gateway, deadline_s=0.2)
        assert generation.output_ids.tolist() == [5, 6]
        assert generation.finish_reason is FinishReason.ABORT

    play(tmp_path, scenario)


async def held(engine: ScriptedEngine, n_tokens: int) -> None:
    """Until its request holds after so many tokens."""
    while not any(len(playing.output) == n_tokens for playing in engine._requests.values()):
        await asyncio.sleep(0.002)
    await asyncio.sleep(0.02)  # it looks whether to hold before the next token
    engine.faults.hold_after_tokens = None


def test_what_an_engine_aborts_goes_on_from_what_was_sampled(tmp_path: Path) -> None:
    """As a weight update does it: the parts have versions and routed experts of their own."""

    async def scenario(world: EngineWorld, gateway: EngineGateway) -> None:
        engine = await world.engine("one", numbers, faults=Faults(hold_after_tokens=2))
        gateway.add_engine("one", engine, V1)
        asking = asyncio.create_task(ask(gateway))
        await held(engine, 2)
        engine.faults.hold_after_tokens = 0  # the second part waits for the update
        await engine.abort()
        await held(engine, 0)
        await world.sync(engine, V2)
        generation = await asking
        assert generation.output_ids.tolist() == [5, 6, 7, 8, 9] and engine.calls == 2
        assert generation.finish_reason is FinishReason.STOP
        assert [(s.version, s.start, s.end) for s in generation.versions] == [(V1, 0, 2), (V2, 2, 5)]
        assert generation.routed_experts is not None
        seen = np.concatenate((np.arange(5), generation.output_ids))[:-1]
        assert generation.routed_experts.tolist() == engine._experts(seen).tolist()

    play(tmp_path, scenario, experts=8)


def test_an_engine_that_is_lost_with_a_part_of_the_answer(tmp_path: Path) -> None:
    async def scenario(world: EngineWorld, gateway: EngineGateway) -> None:
        one, two = [await world.engine(name, numbers, faults=Faults()) for name in ("one", "two")]
        one.faults.hold_after_tokens = 2
        gateway.add_engine("one", one, V1)
        asking = asyncio.create_task(ask(gateway))
        await held(one, 2)
        gateway.add_engine("two", two, V1)
        await one.close()  # aborts, then is gone
        generation = await asking
        assert generation.output_ids.tolist() == [5, 6, 7, 8, 9] and calls(one, two) == [1, 1]
        two.faults.hold_after_tokens = 2
        asking = asyncio.create_task(ask(gateway, deadline_s=1))
        await held(two, 2)
        await two.close()  # and nobody is left
        generation = await asking
        assert generation.output_ids.tolist() == [5, 6] and generation.finish_reason is FinishReason.ABORT
        assert gateway.failovers == 1  # the second wasn't answered by another

    play(tmp_path, scenario)


def test_a_session_that_ends_is_not_gone_on_with(tmp_path: Path) -> None:
    async def scenario(world: EngineWorld, gateway: EngineGateway) -> None:
        engine = await world.engine("one", numbers, faults=Faults(hold_after_tokens=2))
        gateway.add_engine("one", engine, V1)
        asking = asyncio.create_task(ask(gateway))
        await held(engine, 2)
        gateway.end("s")
        generation = await asking
        assert generation.output_ids.tolist() == [5, 6] and engine.calls == 1
        engine.faults.hold_after_tokens = 0
        asking = asyncio.create_task(ask(gateway))
        await held(engine, 0)
        gateway.end("s")
        with pytest.raises(SessionGone):
            await asking
        assert gateway.stats().sessions == 0 and not gateway._lanes

    play(tmp_path, scenario)


def test_an_engine_that_hangs_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_module, "ABORT_GRACE_S", 0.05)

    async def scenario(world: EngineWorld, gateway: EngineGateway) -> None:
        engine = await world.engine("one", numbers, faults=Faults(hang_after_calls=0))
        gateway.add_engine("one", engine, V1)
        with pytest.raises(OutOfTime, match="doesn't answer its abort either"):
            await ask(gateway, deadline_s=0.1)
        gateway.add_engine("two", await world.engine("two", numbers), V1)
        with pytest.raises(OutOfTime):
            await ask(gateway, deadline_s=0.1)
        assert len((await ask(gateway)).output_ids) == 3  # elsewhere

    play(tmp_path, scenario)


def test_a_request_that_nobody_waits_for_is_aborted(tmp_path: Path) -> None:
    async def scenario(world: EngineWorld, gateway: EngineGateway) -> None:
        engine = await world.engine("one", numbers, faults=Faults(hold_after_tokens=1), slots=1)
        gateway.add_engine("one", engine, V1)
        asking = asyncio.create_task(ask(gateway, deadline_s=500))
        while not engine._requests:
            await asyncio.sleep(0.005)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await gateway.close()
        assert asking.cancelled() and not engine._requests
        engine.faults.hold_after_tokens = None
        assert len((await ask(gateway)).output_ids) == 3  # the slot is free

    play(tmp_path, scenario)


def test_a_client_that_asks_again_at_once_stays_with_its_engine(tmp_path: Path) -> None:
    """The request that it gave up is still ending there."""

    async def scenario(world: EngineWorld, gateway: EngineGateway) -> None:
        sessions: list[str] = []

        def script(session: str, input_ids: Any) -> list[int]:
            sessions.append(session)
            return numbers(session, input_ids)

        one, two = [await world.engine(name, script, token_delay_s=0.05) for name in ("one", "two")]
        gateway.add_engine("one", one, V1)
        asking = asyncio.create_task(ask(gateway))
        while not sessions:
            await asyncio.sleep(0.001)
        gateway.add_engine("two", two, V1)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await ask(gateway)
        assert sessions == ["s", "s~1"] and calls(one, two) == [2, 0]
        await gateway.close()
        await ask(gateway)
        assert sessions[-1] == "s"

    play(tmp_path, scenario)


def test_requests_of_one_session_overlap(tmp_path: Path) -> None:
    async def scenario(world: EngineWorld, gateway: EngineGateway) -> None:
        sessions: list[str] = []

        def script(session: str, input_ids: Any) -> list[int]:
            sessions.append(session)
            return numbers(session, input_ids)

        engine = await world.engine("one", script, token_delay_s=0.01)
        gateway.add_engine("one", engine, V1)
        await asyncio.gather(*(ask(gateway) for _ in range(3)))
        assert sorted(sessions) == ["s", "s~1", "s~2"]
        await ask(gateway)
        assert sessions[-1] == "s"
        assert set(engine._sessions) == {"s", "s~1", "s~2"}
        gateway.end("s")
        gateway.end("s")
        await gateway.close()
        assert not engine._sessions and gateway.stats().sessions == 0

    play(tmp_path, scenario)


def test_a_restored_session_is_placed_at_its_next_request(tmp_path: Path) -> None:
    async def scenario(world: EngineWorld, gateway: EngineGateway) -> None:
        gateway.restore("s", context_tokens=100)
        gateway.add_engine("one", await world.engine("one", numbers), V1)
        assert gateway.stats().active_tokens in (0, 100)
        assert len((await ask(gateway)).output_ids) == 3

    play(tmp_path, scenario)
