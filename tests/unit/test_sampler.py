"""Playing trajectories: bounds, seeds, failures, slots."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from miles_hpc.core.errors import DeadlineExpired, UserError
from miles_hpc.core.messages import GenerateGroup, SandboxResult
from miles_hpc.core.types import ChatMessage, GroupPurpose, Prompt, SampleStatus, SamplingParams, WeightVersion
from miles_hpc.rollout.environments.base import Environment, Episode, Sandboxes, Turn
from miles_hpc.rollout.sampler import Bounds, EngineFailed, Played, run_group, run_trajectory
from miles_hpc.rollout.session.tokenizer import ChatTokenizer
from miles_hpc.rollout.slots import EngineSlots
from tests.fakes.rollout import group, model_folder
from tests.fakes.solver_engine import SolverEngine
from tests.unit.runs import make_run

WIDE = Bounds(max_turns=8, max_tokens=250)


class Echo(Environment):
    """Answers with `reply`; a turn that begins with 'done' ends the episode with reward 1."""

    name = "echo"

    def __init__(self, reply: str = "ok", *, slow_s: float = 0.0, fail: Exception | None = None) -> None:
        self.reply, self.slow_s, self.fail = reply, slow_s, fail
        self.open: set[str] = set()
        self.seeds: dict[str, int] = {}

    def prompt(self, seed: int, *, split: str) -> Prompt:
        return Prompt(environment="echo", messages=(ChatMessage(role="user", content="say done"),), label="echo")

    def start(self, prompt: Prompt, sandboxes: Sandboxes, *, episode_id: str, seed: int) -> Episode:
        self.open.add(episode_id)
        self.seeds[episode_id] = seed
        return _EchoEpisode(self, episode_id)


class _EchoEpisode(Episode):
    def __init__(self, environment: Echo, episode_id: str) -> None:
        self.environment, self.id = environment, episode_id

    async def step(self, text: str) -> Turn:
        await asyncio.sleep(self.environment.slow_s)
        if self.environment.fail is not None:
            raise self.environment.fail
        if text.startswith("done"):
            return Turn(done=True, reward=1.0)
        return Turn(messages=(ChatMessage(role="tool", content=self.environment.reply),))

    async def close(self) -> None:
        self.environment.open.discard(self.id)


class NoSandboxes:
    async def create(self, sandbox_id: str, files: dict[str, str]) -> None:
        raise AssertionError

    async def execute(self, sandbox_id: str, command: str) -> SandboxResult:
        raise AssertionError

    async def destroy(self, sandbox_id: str) -> None:
        raise AssertionError


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return model_folder(tmp_path_factory.mktemp("model"))


def run(main: Callable[[], Awaitable[Any]]) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(60):
            return await main()

    return asyncio.run(bounded())


def job(environment: Environment, **changes: Any) -> GenerateGroup:
    return group(1, prompt=environment.prompt(0, split="train"), **changes)


def play(
    tokenizer: ChatTokenizer,
    say: Callable[[str], str],
    *,
    environment: Echo | None = None,
    bounds: Bounds = WIDE,
    engine: SolverEngine | None = None,
    **changes: Any,
) -> tuple[Played, SolverEngine, Echo]:
    environment = environment or Echo()
    engine = engine or SolverEngine("e", tokenizer, say=say)

    async def main() -> Played:
        return await run_trajectory(
            job(environment, **changes), 0, tokenizer, environment, NoSandboxes(), bounds, engine
        )

    try:
        return run(main), engine, environment
    finally:
        assert environment.open == set()  # closed on every path
        assert engine.ended == ["train-1-0-0"]


def test_ends_when_the_environment_says_done(tokenizer: ChatTokenizer) -> None:
    played, engine, _ = play(tokenizer, lambda text: "done" if "<obs>ok" in text else "hm")
    assert (played.reward, played.status, played.record.turns, engine.calls) == (1.0, SampleStatus.COMPLETED, 2, 2)
    assert played.record.text() == "<bos><ask>say done<act>hm<end><obs>ok<act>done<end>"
    assert played.generation_s >= 0 and played.environment_s >= 0


def test_turn_limit(tokenizer: ChatTokenizer) -> None:
    played, engine, _ = play(tokenizer, lambda _: "hm", bounds=Bounds(max_turns=3, max_tokens=250))
    assert (played.reward, played.status, played.record.turns) == (0.0, SampleStatus.TRUNCATED, 3)
    assert played.record.text().endswith("<act>hm<end>") and engine.calls == 3


@pytest.mark.parametrize("limit", range(12, 40))
def test_token_limit_is_never_exceeded(tokenizer: ChatTokenizer, limit: int) -> None:
    played, _, _ = play(tokenizer, lambda _: "hm", bounds=Bounds(max_turns=99, max_tokens=limit))
    assert played.status is SampleStatus.TRUNCATED and played.reward == 0.0
    assert played.record.n_tokens <= limit
    assert played.record.n_sampled > 0 and played.record.text().endswith(("<end>", "h", "m"))


def test_a_turn_cut_by_its_length_ends_the_trajectory(tokenizer: ChatTokenizer) -> None:
    played, engine, _ = play(tokenizer, lambda _: "done" + "x" * 50, sampling=SamplingParams(max_new_tokens=10))
    assert (played.status, played.reward, played.record.n_sampled) == (SampleStatus.TRUNCATED, 0.0, 10)
    assert engine.calls == 1


def test_no_room_for_the_prompt(tokenizer: ChatTokenizer) -> None:
    environment = Echo()
    engine = SolverEngine("e", tokenizer)
    with pytest.raises(UserError, match="max_trajectory_tokens=5"):
        run(
            lambda: run_trajectory(
                job(environment), 0, tokenizer, environment, NoSandboxes(), Bounds(max_turns=2, max_tokens=5), engine
            )
        )


def test_deadline_in_the_environment_truncates(tokenizer: ChatTokenizer) -> None:
    played, _, _ = play(tokenizer, lambda _: "hm", environment=Echo(slow_s=30), deadline_s=0.3)
    assert (played.status, played.record.turns) == (SampleStatus.TRUNCATED, 1)


def test_deadline_in_the_engine_truncates(tokenizer: ChatTokenizer) -> None:
    engine = SolverEngine("e", tokenizer)
    engine.hang = True
    played, _, _ = play(tokenizer, lambda _: "", engine=engine, deadline_s=0.3)
    assert (played.status, played.record.n_sampled) == (SampleStatus.TRUNCATED, 0)
    assert engine.aborted.is_set()


def test_an_abort_from_outside_fails_the_attempt(tokenizer: ChatTokenizer) -> None:
    engine = SolverEngine("e", tokenizer)
    engine.hang = True
    engine.aborted.set()
    with pytest.raises(EngineFailed, match="aborted train-1-0-0 after 0 tokens"):
        play(tokenizer, lambda _: "", engine=engine)


def test_engine_loss_is_told_apart_from_environment_failure(tokenizer: ChatTokenizer) -> None:
    engine = SolverEngine("e", tokenizer)
    engine.die_after = 0
    with pytest.raises(EngineFailed, match="engine e: PeerLost"):
        play(tokenizer, lambda _: "", engine=engine)
    with pytest.raises(UserError, match="broken"):
        play(tokenizer, lambda _: "hm", environment=Echo(fail=UserError("broken")))


def test_seeds_follow_from_group_and_index_alone(tokenizer: ChatTokenizer) -> None:
    def seeds(**changes: Any) -> tuple[dict[str, int | None], dict[str, int]]:
        environment = Echo()
        engine = SolverEngine("e", tokenizer, say=lambda text: "done" if "<obs>" in text else "hm", slots=8)
        slots = EngineSlots()
        slots.add(engine, slots=8, shape=None, version=WeightVersion(1, 0))

        async def main() -> None:
            await run_group(
                job(environment, **changes),
                tokenizer=tokenizer,
                environment=environment,
                sandboxes=NoSandboxes(),
                bounds=WIDE,
                lease=lambda: slots.lease(30),
            )

        run(main)
        return engine.seeds, environment.seeds

    first, second = seeds(n_samples=3), seeds(n_samples=4)
    assert all(second[k][name] == value for k in (0, 1) for name, value in first[k].items())
    drawn = list(second[0].values())
    assert len(drawn) == 8 == len(set(drawn))  # 4 trajectories of 2 turns
    assert all(s is not None and 0 <= s < 2**31 for s in drawn)
    assert set(seeds(n_samples=3, seed=77)[0].values()).isdisjoint(drawn)


def test_the_first_failure_ends_the_group(tokenizer: ChatTokenizer) -> None:
    environment = Echo()
    engine = SolverEngine("e", tokenizer, say=lambda _: "hm", slots=8)
    engine.die_after = 5
    slots = EngineSlots()
    slots.add(engine, slots=8, shape=None, version=WeightVersion(1, 0))

    async def main() -> None:
        with pytest.raises(EngineFailed):
            await run_group(
                job(environment, n_samples=4),
                tokenizer=tokenizer,
                environment=environment,
                sandboxes=NoSandboxes(),
                bounds=Bounds(max_turns=100, max_tokens=250),
                lease=lambda: slots.lease(30),
            )
        assert slots.used == 0 and environment.open == set()
        assert len(asyncio.all_tasks()) == 1

    run(main)


# ------------------------------------------------------------------------------------------------ slots


def test_slots_go_to_the_emptiest_engine_that_has_weights(tokenizer: ChatTokenizer) -> None:
    async def main() -> None:
        slots = EngineSlots()
        for name, n, version in (("a", 4, WeightVersion(1, 0)), ("b", 2, WeightVersion(1, 0)), ("c", 9, None)):
            slots.add(SolverEngine(name, tokenizer), slots=n, shape=None, version=version)
        names = []
        async with slots.lease(5) as one, slots.lease(5) as two, slots.lease(5) as three, slots.lease(5) as four:
            names = [e.name for e in (one, two, three, four)]
            assert names == ["a", "b", "a", "a"] or names == ["a", "b", "a", "b"]
            assert slots.used == 4
        assert slots.used == 0
        slots.set_alive("a", False)
        async with slots.lease(5) as engine:
            assert engine.name == "b"
        slots.set_version("b", None)
        with pytest.raises(DeadlineExpired, match="generation slot"):
            async with slots.lease(0.05):
                pass
        waiting = asyncio.create_task(_name(slots))
        await asyncio.sleep(0.01)
        slots.set_version("c", WeightVersion(1, 1))
        assert await waiting == "c"

    run(main)


async def _name(slots: EngineSlots) -> str:
    async with slots.lease(20) as engine:
        return engine.name


def test_slots_are_not_lost_when_waiters_are_cancelled(tokenizer: ChatTokenizer) -> None:
    async def main() -> None:
        slots = EngineSlots()
        slots.add(SolverEngine("a", tokenizer), slots=1, shape=None, version=WeightVersion(1, 0))
        rng = np.random.default_rng(0)
        for _ in range(50):
            tasks = [asyncio.create_task(_name(slots)) for _ in range(4)]
            for _ in range(int(rng.integers(0, 4))):
                await asyncio.sleep(0)
            tasks[int(rng.integers(0, 4))].cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            assert slots.used == 0
        assert await _name(slots) == "a"

    run(main)


def test_an_evaluation_may_have_another_number_of_turns() -> None:
    run = make_run("rollout.max_turns=4", "eval.max_turns=9", "rollout.max_trajectory_tokens=100")
    assert Bounds.of(run, GroupPurpose.TRAIN) == Bounds(max_turns=4, max_tokens=100)
    assert Bounds.of(run, GroupPurpose.EVAL) == Bounds(max_turns=9, max_tokens=100)
    assert Bounds.of(make_run("rollout.max_turns=4"), GroupPurpose.EVAL).max_turns == 4
