"""Trajectories that an agent function plays through a session server: the same record as the built-in sampler's."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from miles_hpc.core.errors import PeerLost, UserError
from miles_hpc.core.messages import AbortGroups, Ack, GroupDone, GroupFailed, Message
from miles_hpc.core.paths import RunPaths
from miles_hpc.core.transport import Reply
from miles_hpc.core.types import SampleStatus, Trajectory
from miles_hpc.dataflow.advantage import trajectory_advantages
from miles_hpc.rollout.engine import RolloutEngine
from miles_hpc.rollout.role import RolloutHost
from miles_hpc.rollout.sandbox import LocalSandboxes
from miles_hpc.rollout.sandbox_host import SandboxHost
from miles_hpc.rollout.session.book import SessionBook
from miles_hpc.rollout.session.gateway import EngineGateway
from miles_hpc.rollout.session.journal import SessionJournal
from miles_hpc.rollout.session.listening import bind
from miles_hpc.rollout.session.server import SessionServer
from miles_hpc.rollout.session.settings import SessionLimits, SessionSettings
from miles_hpc.rollout.session.tokenizer import ChatTokenizer, shape_of
from miles_hpc.rollout.spool import read_payload
from tests.fakes.rollout import group, model_folder, tiny_run
from tests.fakes.solver_engine import SolverEngine, solve

pytest.importorskip("openai")

WAIT_S = 60.0
TURNS: dict[str, Any] = {"custom_agent_function_path": "miles_hpc.recipes.agents:play_turns"}


@dataclasses.dataclass
class Stage:
    paths: RunPaths
    tokenizer: ChatTokenizer
    host: RolloutHost
    book: SessionBook
    gateway: EngineGateway
    reports: asyncio.Queue[Message]

    async def add(self, engine: RolloutEngine) -> None:
        await self.host.add_engine(engine)
        version = self.host.slots.version(engine.name)
        self.gateway.add_engine(engine.name, engine, version)

    async def played(self, number: int, **fields: Any) -> tuple[Message, list[Trajectory]]:
        """The host's report of a group, and its trajectories."""
        assert isinstance(await self.host.handle(group(number, **fields)), Ack)
        async with asyncio.timeout(WAIT_S):
            while not isinstance(report := await self.reports.get(), GroupDone | GroupFailed):
                pass
        if isinstance(report, GroupFailed):
            return report, []
        return report, list(read_payload(self.paths, report.summary.payload).trajectories)


Scene = Callable[[Stage], Awaitable[None]]


def play(folder: Path, scene: Scene, *, history: str = "linear", context_tokens: int = 256, **rollout: Any) -> None:
    async def main() -> None:
        paths = RunPaths(folder)
        tokenizer = model_folder(paths.model)
        sandboxes = SandboxHost()
        await sandboxes.start()
        reports: asyncio.Queue[Message] = asyncio.Queue()

        async def report(message: Message) -> Reply:
            reports.put_nowait(message)
            return Reply(message=Ack(), payload=memoryview(b""))

        run = tiny_run(**{"max_trajectory_tokens": 256, **TURNS, **rollout})
        host = RolloutHost(run, paths, "r0", LocalSandboxes(sandboxes), report, term=3)
        gateway = EngineGateway()
        journal, _ = SessionJournal.open(folder / "journal-of-sessions")
        book = SessionBook(tokenizer, gateway, journal, SessionLimits(context_tokens=context_tokens))
        server = SessionServer(book, defaults=SessionSettings(history=history), token="t")
        runner = web.AppRunner(server.application, access_log=None, handler_cancellation=True, shutdown_timeout=1)
        listening, url = bind("127.0.0.1:0")
        journal.start()
        await runner.setup()
        await web.SockSite(runner, listening).start()
        host.sessions.serve_at(url, "t")
        try:
            async with asyncio.timeout(2 * WAIT_S):
                await scene(Stage(paths, tokenizer, host, book, gateway, reports))
                while host.groups_in_flight or len(book):
                    await asyncio.sleep(0.01)
            assert host.slots.used == 0  # and no session is left open, whatever happened
        finally:
            await host.close()
            await runner.cleanup()
            await gateway.close()
            await journal.close()
            await sandboxes.close()

    asyncio.run(main())


def same(one: Trajectory, other: Trajectory) -> None:
    for name in ("tokens", "loss_mask", "log_probs"):
        assert np.array_equal(getattr(one, name).numpy(), getattr(other, name).numpy()), name
    for name in ("versions", "reward", "status", "turns", "label", "index"):
        assert getattr(one, name) == getattr(other, name), name


def test_an_agent_plays_what_the_sampler_plays(tmp_path: Path) -> None:
    """Tokens, log-probs, versions, routed experts, reward: whether turn by turn or through OpenAI's client."""
    from miles_hpc.routing.store import RoutedExpertsStore

    seen: dict[str, list[Trajectory]] = {}
    rows: dict[str, list[Any]] = {}

    async def scene(s: Stage) -> None:
        await s.add(SolverEngine("e0", s.tokenizer, slots=3, shape=shape_of(s.paths.model)))
        report, seen[name] = await s.played(7, n_samples=5)
        assert isinstance(report, GroupDone)
        assert report.summary.generation_s > 0 and report.summary.environment_s > 0
        store = RoutedExpertsStore(s.paths.root)
        rows[name] = [store.read(t.routed_experts) for t in seen[name] if t.routed_experts is not None]

    for name, path in (("agent", TURNS["custom_agent_function_path"]), ("sampler", "")):
        play(tmp_path / name, scene, custom_agent_function_path=path)
    assert [t.reward for t in seen["agent"]] == [1.0] * 5
    assert len(rows["agent"]) == 5
    for one, other in zip(seen["agent"], seen["sampler"], strict=True):
        same(one, other)
    for one, other in zip(rows["agent"], rows["sampler"], strict=True):
        assert np.array_equal(one, other)


@pytest.mark.parametrize("max_turns", [1, 2, 3])
def test_turns_are_bounded_as_the_samplers_are(max_turns: int, tmp_path: Path) -> None:
    """By the run's own number, below what the environment allows."""
    seen: dict[str, list[Trajectory]] = {}

    async def scene(s: Stage) -> None:
        await s.add(SolverEngine("e0", s.tokenizer, say=lambda text: "ls"))
        _, seen[name] = await s.played(7, n_samples=1)

    for name, path in (("agent", TURNS["custom_agent_function_path"]), ("sampler", "")):
        play(tmp_path / name, scene, custom_agent_function_path=path, max_turns=max_turns)
    same(seen["agent"][0], seen["sampler"][0])
    assert (seen["agent"][0].status, seen["agent"][0].turns) == (SampleStatus.TRUNCATED, max_turns)


def test_a_sampled_run_of_the_torch_engine_is_the_same_either_way(tmp_path: Path) -> None:
    """Seeds reach the engine: what is drawn at temperature 1 is the same, also where turns and tokens run out."""
    pytest.importorskip("torch")
    from miles_hpc.rollout.torch_engine import TorchEngine
    from tests.conformance.engines import config_of, make_model, running, serving, spec_of, sync

    seen: dict[str, list[Trajectory]] = {}

    async def scene(s: Stage) -> None:
        config = config_of("moe")
        config.vocab_size, config.max_position_embeddings = s.tokenizer.vocab_size, 256
        config.save_pretrained(s.paths.model)
        model = make_model(s.paths.model, 1)
        async with (
            serving() as source,
            running(
                lambda: TorchEngine(spec_of(s.paths.model, max_length=256, options={"batch_invariant": True}))
            ) as engine,
        ):
            await sync(engine, source, source.stage(1, model))
            await s.add(engine)
            report, seen[name] = await s.played(3, n_samples=6)
            assert isinstance(report, GroupDone)
            s.host.remove_engine(engine.name)
            s.gateway.remove_engine(engine.name)

    for name, path in (("agent", TURNS["custom_agent_function_path"]), ("sampler", "")):
        play(tmp_path / name, scene, custom_agent_function_path=path, slots_per_engine=1)
    for one, other in zip(seen["agent"], seen["sampler"], strict=True):
        same(one, other)
    assert len({tuple(t.tokens.numpy().tolist()) for t in seen["agent"]}) > 1


# ------------------------------------------------------------------------------------------------ agents of these tests


async def two_answers(base_url: str, prompt: Any, request_kwargs: Any, metadata: Any, *, api_key: str) -> Any:
    """Asks on from the first turn twice, differently; each branch is sampled for itself."""
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:

        async def ask(messages: Any) -> str:
            answer = await client.chat.completions.create(model="m", messages=messages, **request_kwargs)
            return answer.choices[0].message.content or ""

        first = [*prompt, {"role": "assistant", "content": await ask(prompt)}]
        for more in ("a", "b"):
            await ask([*first, {"role": "tool", "content": more, "tool_call_id": "c"}])
    return {"reward": 0.25, "kept": "yes"}


async def raises(base_url: str, prompt: Any, request_kwargs: Any, metadata: Any) -> Any:
    raise RuntimeError("no such tool")


async def asks_nothing(base_url: str, prompt: Any, request_kwargs: Any, metadata: Any) -> Any:
    return {"reward": 1.0}


async def never_ends(
    base_url: str, prompt: Any, request_kwargs: Any, metadata: Any, *, api_key: str, episode: Any, endless: bool = False
) -> Any:
    """One turn each; then it asks on and on, or sleeps."""
    from openai import AsyncOpenAI

    messages = list(prompt)
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        while True:
            answer = await client.chat.completions.create(model="m", messages=messages, **request_kwargs)
            said = answer.choices[0].message.content
            messages += [{"role": "assistant", "content": said}, {"role": "tool", "content": "x", "tool_call_id": "c"}]
            if not endless:
                await asyncio.sleep(WAIT_S)


async def one_answer(base_url: str, prompt: Any, request_kwargs: Any, metadata: Any, *, api_key: str) -> Any:
    """Leaves the judging to the environment."""
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        await client.chat.completions.create(model="m", messages=prompt, **request_kwargs)


def named(function: Any) -> dict[str, Any]:
    return {"custom_agent_function_path": f"{__name__}:{function.__name__}"}


async def exits_within(base_url: str, prompt: Any, request_kwargs: Any, metadata: Any, *, api_key: str) -> Any:
    """One agent's tool calls sys.exit in a task of its own; the agent goes on all the same."""

    async def tool() -> None:
        raise SystemExit(3)

    with contextlib.suppress(SystemExit):
        await asyncio.gather(tool())
    return await one_answer(base_url, prompt, request_kwargs, metadata, api_key=api_key)


LATE: list[asyncio.Task[Any]] = []


async def steps_late(
    base_url: str, prompt: Any, request_kwargs: Any, metadata: Any, *, api_key: str, episode: Any
) -> Any:
    """Leaves a task behind that asks for a step when the episode is over."""

    async def later() -> None:
        await asyncio.sleep(0.5)
        await episode.step("ls")

    LATE.append(asyncio.get_running_loop().create_task(later()))
    await one_answer(base_url, prompt, request_kwargs, metadata, api_key=api_key)
    return {"reward": 0.5}


# ------------------------------------------------------------------------------------------------ what becomes of them


def test_lost_engines_are_not_the_agents_doing(tmp_path: Path) -> None:
    """Neither a truncated trajectory to train on nor a score of 0: the group is played again."""

    async def scene(s: Stage) -> None:
        for number, fields in enumerate(({"n_samples": 2}, {"n_samples": 1, "purpose": "eval"})):
            engine = SolverEngine(f"e{number}", s.tokenizer, say=lambda text: "ls")
            engine.die_after = 1
            await s.add(engine)
            report, _ = await s.played(2, deadline_s=2.0, **fields)
            assert isinstance(report, GroupFailed), report
            assert "engines failed or weren't there" in report.reason
            s.host.remove_engine(engine.name)

    play(tmp_path, scene, **named(never_ends) | {"agent_options": {"endless": True}})


@pytest.mark.parametrize("purpose", ["train", "eval"])
def test_a_failed_environment_is_not_the_agents_doing(
    purpose: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(s: Stage) -> None:
        async def gone(*args: Any, **named: Any) -> None:
            raise PeerLost("sandbox host is gone")

        monkeypatch.setattr(LocalSandboxes, "create", gone)
        await s.add(SolverEngine("e0", s.tokenizer, say=lambda text: "ls"))
        report, _ = await s.played(2, n_samples=1, purpose=purpose)
        assert isinstance(report, GroupFailed) and "sandbox host is gone" in report.reason

    play(tmp_path, scene)


def test_a_tool_that_exits_takes_no_agent_with_it(tmp_path: Path) -> None:
    async def scene(s: Stage) -> None:
        await s.add(SolverEngine("e0", s.tokenizer, say=lambda text: "ans 1"))
        report, trajectories = await s.played(2, n_samples=4)
        assert isinstance(report, GroupDone), report
        assert {t.status for t in trajectories} == {SampleStatus.COMPLETED}

    play(tmp_path, scene, **named(exits_within))


def test_a_late_step_makes_no_sandbox(tmp_path: Path) -> None:
    async def scene(s: Stage) -> None:
        await s.add(SolverEngine("e0", s.tokenizer))
        report, _ = await s.played(2, n_samples=1)
        assert isinstance(report, GroupDone)
        async with asyncio.timeout(WAIT_S):
            while not LATE[-1].done():
                await asyncio.sleep(0.01)
        assert isinstance(LATE[-1].exception(), UserError)

    play(tmp_path, scene, **named(steps_late))


def test_branches_are_trajectories_of_one_rollout(tmp_path: Path) -> None:
    async def scene(s: Stage) -> None:
        await s.add(SolverEngine("e0", s.tokenizer, slots=3, say=lambda text: f"say {len(text)}"))
        report, trajectories = await s.played(2, n_samples=3)
        assert isinstance(report, GroupDone)
        assert [t.index for t in trajectories] == [0, 3, 1, 4, 2, 5]
        assert [t.rollout_id for t in trajectories] == [0, 0, 1, 1, 2, 2]
        assert {t.reward for t in trajectories} == {0.25}
        assert [t.metadata for t in trajectories[:2]] == [{"kept": "yes"}, {}]
        first, second = trajectories[:2]
        assert first.turns == second.turns == 2
        # The shared first turn is trained once: in the older branch. The younger one has it as context.
        shared = int(np.flatnonzero(second.loss_mask.numpy())[0])
        assert np.array_equal(first.tokens.numpy()[: shared - 2], second.tokens.numpy()[: shared - 2])
        assert first.loss_mask.numpy()[: shared - 2].sum() > 0
        summary = report.summary
        assert [t.rollout for t in summary.rollouts] == [0, 1, 2]
        assert [t.index for t in summary.rollouts] == [0, 1, 2]
        rewards = {0: 1.0, 1: 0.0, 2: 0.5}
        judged = dataclass_with(summary, rewards)
        advantages = trajectory_advantages(judged, std_normalization=False)
        assert advantages == [0.5, 0.5, -0.5, -0.5, 0.0, 0.0]

    def dataclass_with(summary: Any, rewards: dict[int, float]) -> Any:
        import msgspec

        changed = tuple(msgspec.structs.replace(t, reward=rewards[t.rollout]) for t in summary.trajectories)
        return msgspec.structs.replace(summary, trajectories=changed)

    play(tmp_path, scene, history="tree", **named(two_answers))


@pytest.mark.parametrize(
    ("function", "why"), [(raises, "RuntimeError: no such tool"), (asks_nothing, "without a request")]
)
def test_a_failed_agent_fails_its_group_and_counts_in_an_evaluation(function: Any, why: str, tmp_path: Path) -> None:
    async def scene(s: Stage) -> None:
        await s.add(SolverEngine("e0", s.tokenizer))
        report, _ = await s.played(2, n_samples=2)
        assert isinstance(report, GroupFailed) and why in report.reason
        report, (trajectory,) = await s.played(3, n_samples=1, purpose="eval")
        assert isinstance(report, GroupDone)
        assert (trajectory.status, trajectory.reward, trajectory.turns) == (SampleStatus.FAILED, 0.0, 0)
        assert why in trajectory.metadata["error"]

    play(tmp_path, scene, **named(function))


def test_the_deadline_keeps_what_was_sampled(tmp_path: Path) -> None:
    async def scene(s: Stage) -> None:
        await s.add(SolverEngine("e0", s.tokenizer))
        report, (trajectory,) = await s.played(2, n_samples=1, deadline_s=3.0)
        assert isinstance(report, GroupDone)
        assert (trajectory.status, trajectory.reward, trajectory.turns) == (SampleStatus.TRUNCATED, 0.0, 1)
        assert trajectory.loss_mask.numpy().sum() > 0

    play(tmp_path, scene, **named(never_ends))


def test_an_agent_that_meets_the_limit_of_tokens_is_truncated(tmp_path: Path) -> None:
    async def scene(s: Stage) -> None:
        await s.add(SolverEngine("e0", s.tokenizer, say=lambda text: "wc -l a"))
        report, (trajectory,) = await s.played(2, n_samples=1)
        assert isinstance(report, GroupDone)
        assert (trajectory.status, trajectory.reward) == (SampleStatus.TRUNCATED, 0.0)
        assert trajectory.turns > 3 and len(trajectory.tokens.numpy()) <= 100

    function = named(never_ends) | {"agent_options": {"endless": True}}
    play(tmp_path, scene, context_tokens=100, **function)


@pytest.mark.parametrize(
    ("says", "status", "reward"),
    [
        ("right", SampleStatus.COMPLETED, 1.0),
        ("ans wrong", SampleStatus.COMPLETED, 0.0),
        ("ls", SampleStatus.TRUNCATED, 0.0),  # a command isn't an answer
        ("ans 1234567890123", SampleStatus.TRUNCATED, 0.0),  # the length limit cuts it
    ],
)
def test_without_a_reward_the_environment_judges_the_last_response(
    says: str, status: SampleStatus, reward: float, tmp_path: Path
) -> None:
    async def scene(s: Stage) -> None:
        answer = group(2).prompt.data["answer"]
        await s.add(SolverEngine("e0", s.tokenizer, say=lambda text: f"ans {answer}" if says == "right" else says))
        report, (trajectory,) = await s.played(2, n_samples=1)
        assert isinstance(report, GroupDone)
        assert (trajectory.status, trajectory.reward) == (status, reward)

    play(tmp_path, scene, **named(one_answer))


def test_a_dropped_group_ends_its_agents(tmp_path: Path) -> None:
    async def scene(s: Stage) -> None:
        await s.add(SolverEngine("e0", s.tokenizer))
        await s.host.handle(group(2, n_samples=4))
        async with asyncio.timeout(WAIT_S):
            while len(s.book) < 4:
                await asyncio.sleep(0.01)
            await s.host.handle(AbortGroups(group_ids=(2,), reason="test"))
            while len(s.book):
                await asyncio.sleep(0.01)
        assert s.host._player is not None and s.host._player.runner.left_behind == 0

    play(tmp_path, scene, **named(never_ends))


def test_demonstrations_are_the_environments_own(tmp_path: Path) -> None:
    async def scene(s: Stage) -> None:
        report, (trajectory,) = await s.played(2, n_samples=1, purpose="demo")
        assert isinstance(report, GroupDone) and trajectory.versions == ()

    play(tmp_path, scene, **named(raises))


def test_a_session_server_that_comes_late_is_waited_for(tmp_path: Path) -> None:
    async def scene(s: Stage) -> None:
        await s.add(SolverEngine("e0", s.tokenizer, say=solve))
        url, token = s.host.sessions._url, s.host.sessions._token
        s.host.sessions.serve_at("", "")
        await s.host.handle(group(2, n_samples=2))
        await asyncio.sleep(0.3)
        assert len(s.book) == 0
        s.host.sessions.serve_at(url, token)
        async with asyncio.timeout(WAIT_S):
            while not isinstance(report := await s.reports.get(), GroupDone):
                pass
        assert [t.reward for t in report.summary.trajectories] == [1.0, 1.0]

    play(tmp_path, scene)
