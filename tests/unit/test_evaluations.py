"""Evaluations of a term: when, on what, beside training or not, and what becomes of those that fail or are cut."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from checkpoints.journal import Evaluated, EvaluationBegun, EvaluationSkipped, JournalWriter, TermStarted, read_journals
from miles_hpc.controller import evaluation
from miles_hpc.controller.dispatch import Dispatcher
from miles_hpc.controller.durable import DurableJournal
from miles_hpc.controller.engines import EngineFleet
from miles_hpc.controller.evaluation import Evaluations
from miles_hpc.controller.recovery import StartPlan
from miles_hpc.controller.schedule import evaluation_steps
from miles_hpc.core.config import RunConfig
from miles_hpc.core.errors import FencedError, ProtocolError
from miles_hpc.core.messages import GenerateGroup, GroupFailed
from miles_hpc.core.types import GroupPurpose, WeightVersion
from miles_hpc.dataflow.buffer import GroupBuffer
from miles_hpc.dataflow.source import PromptSource
from tests.fakes.rollout_hosts import FakeHost, FakeMembers, Told, finished, staged, until
from tests.unit.runs import make_run

TRAIN, EVAL = GroupPurpose.TRAIN, GroupPurpose.EVAL

SHARED = ("eval.n_episodes=4", "eval.interval=2", "rollout.n_steps=8", "rollout.n_samples_per_prompt=4")
SET_ASIDE = (*SHARED, "rollout.engines_per_host=2", "eval.engines_per_host=1")


def v(step: int) -> WeightVersion:
    return WeightVersion(1, step)


class Stage:
    """A controller's evaluations and dispatcher on fake hosts, without a trainer: a test says when a step is done."""

    def __init__(self, run: RunConfig, plan: StartPlan, journal: DurableJournal, hosts: tuple[FakeHost, ...]) -> None:
        self.hosts, self.told, self.step = hosts, Told(), plan.step
        self.fenced = False
        self.archived: list[tuple[WeightVersion, int]] = []
        self.refusal: OSError | None = None
        self.members: Any = FakeMembers(hosts)
        events: Any = self.told
        self.buffer = GroupBuffer(batch_groups=2, max_admitted=64, max_staleness=99, max_attempts=3)
        self.fleet = EngineFleet(self.members.endpoint, events, deadline_s=5.0, changed=lambda: None)
        self.dispatch = Dispatcher(run, self.fleet, self.members, self.buffer, PromptSource(), journal, events)
        self.evaluations = Evaluations(
            run,
            plan,
            term=1,
            fleet=self.fleet,
            dispatch=self.dispatch,
            members=self.members,
            journal=journal,
            events=events,
            step=lambda: self.step,
            archive=self._archive,
        )
        for host in hosts:
            self.fleet.update(host.name, host.status())

    def _archive(self, version: WeightVersion, groups: Any) -> int:
        if self.refusal is not None:
            raise self.refusal
        self.archived.append((version, len(groups)))
        return 1

    async def weights(self, step: int) -> None:
        """Step `step` is done and its weights are with the engines for training."""
        await self.evaluations.before_staging(step)
        self.step = step
        self.fleet.want(staged(1, step), None)
        await until(lambda: len(self.fleet.serving(v(step))) == self.fleet.count(), f"weights {step}")
        self.dispatch.wake()

    def groups(self, purpose: GroupPurpose = EVAL) -> list[tuple[FakeHost, GenerateGroup]]:
        """What hosts are at work on."""
        return [(host, g) for host in self.hosts for g in host.groups if g.purpose is purpose]

    async def finish(self, host: FakeHost, message: GenerateGroup, reward: float = 1.0) -> None:
        host.groups.remove(message)
        await self.dispatch.group_done(self.members.peer(host), finished(host, message, reward))

    async def fail(self, host: FakeHost, message: GenerateGroup) -> None:
        host.groups.remove(message)
        failure = GroupFailed(
            group_id=message.group_id, attempt=message.attempt, purpose=message.purpose, reason="no sandbox"
        )
        await self.dispatch.group_failed(self.members.peer(host), failure)

    async def finish_evaluations(self, reward: float = 1.0) -> None:
        """Play evaluation groups until none is under way any more."""
        while self.evaluations.under_way:
            for host, message in self.groups():
                await self.finish(host, message, reward)
            await asyncio.sleep(0.005)
        self.evaluations.check()

    def skipped(self) -> list[tuple[int, str]]:
        return [(f["step"], f["reason"]) for f in self.told.named("evaluation_skipped")]


def play(
    folder: Path,
    scene: Callable[[Stage], Awaitable[None]],
    *hosts: FakeHost,
    settings: tuple[str, ...] = SHARED,
    plan: StartPlan | None = None,
) -> list[Any]:
    """The scene; returns what the journal has of evaluations afterwards."""

    async def main() -> None:
        with JournalWriter.create(folder, TermStarted(term=1, attempt=1)) as writer:

            def fence() -> None:
                if stage.fenced:
                    raise FencedError("a newer term")

            journal = DurableJournal(writer, fence=fence)
            stage = Stage(make_run(*settings), plan or StartPlan(), journal, hosts or (FakeHost("h"),))
            try:
                async with asyncio.timeout(60):
                    await scene(stage)
            finally:
                stage.evaluations.close()
                stage.dispatch.close()
                stage.fleet.close()
                await asyncio.sleep(0)

    asyncio.run(main())
    kinds = (Evaluated, EvaluationBegun, EvaluationSkipped)
    return [r for r in read_journals(folder)[1].records() if isinstance(r, kinds)]


@pytest.mark.parametrize(
    ("sft", "n_steps", "interval", "expected"),
    [
        (0, 6, 2, [2, 4]),
        (0, 7, 2, [2, 4, 6]),
        (3, 6, 2, [5, 7]),
        (3, 6, 6, []),
        (3, 0, 1, []),
        (0, 6, 0, []),
        (0, 3, 1, [1, 2]),
    ],
)
def test_steps_with_an_evaluation_beside_training(sft: int, n_steps: int, interval: int, expected: list[int]) -> None:
    assert list(evaluation_steps(sft, n_steps, interval)) == expected


@pytest.mark.parametrize(
    ("settings", "step", "known", "before", "after"),
    [
        (("eval.n_episodes=0",), 0, (), "", ""),
        (("eval.n_episodes=4", "rollout.n_steps=8"), 0, (), "before", "after"),
        (("eval.n_episodes=4", "rollout.n_steps=8"), 0, (0,), "", ""),
        (("eval.n_episodes=4", "rollout.n_steps=8"), 8, (0,), "", "after"),
        (("eval.n_episodes=4", "rollout.n_steps=8"), 8, (0, 4, 8), "", ""),
        (("eval.n_episodes=4", "rollout.n_steps=8", "eval.skip_eval_before_train=true"), 0, (), "", "after"),
        (("eval.n_episodes=4", "rollout.n_steps=0", "sft.steps=3"), 3, (), "sft_only", ""),
        (("eval.n_episodes=4", "rollout.n_steps=8", "sft.steps=3"), 5, (), "", "after"),
    ],
)
def test_evaluations_around_rl_are_due_once(
    tmp_path: Path, settings: tuple[str, ...], step: int, known: tuple[int, ...], before: str, after: str
) -> None:
    async def scene(s: Stage) -> None:
        assert (s.evaluations.before(), s.evaluations.after()) == (before, after)
        assert s.evaluations.count == len(known)

    play(tmp_path, scene, settings=settings, plan=StartPlan(step=step, evaluated=frozenset(known)))


def test_alone_every_engine_holds_the_version_before_the_first_episode(tmp_path: Path) -> None:
    slow, fast = FakeHost("slow"), FakeHost("fast")
    slow.syncs = lambda engine, version: False

    async def scene(s: Stage) -> None:
        s.fleet.want(staged(1, 0), None)
        task = asyncio.create_task(s.evaluations.alone("before"))
        await until(lambda: s.fleet.serving() == ["fast-e0"], "the fast one")
        await asyncio.sleep(0.05)
        assert s.groups() == []
        slow.syncs = lambda engine, version: True
        await until(lambda: len(s.groups()) == 4, "all groups")
        assert {host.name for host, _ in s.groups()} == {"slow", "fast"}
        for number, (host, message) in enumerate(s.groups()):
            await s.finish(host, message, reward=float(number % 2))
        await task
        (told,) = s.told.named("evaluation")
        assert (told["when"], told["step"], told["n"], told["mean"]) == ("before", 0, 4, 0.5)
        assert (told["version"], told["version_share"], told["lag_steps"]) == ("1.0", 1.0, 0)
        ((step, metrics),) = s.told.metrics
        assert step == 0
        assert metrics.keys() == {
            "eval/shell",
            "eval/shell/a",
            "eval/shell-pass@1",
            "eval/shell-truncated_ratio",
            "eval/shell-failed_ratio",
            "eval/lag_steps",
            "eval/duration_seconds",
            "eval/version_share",
        }
        assert s.archived == [(v(0), 4)] and s.evaluations.count == 1 and s.evaluations.before() == ""

    (record,) = play(tmp_path, scene, slow, fast)
    assert (record.step, record.when, record.n, record.mean, record.version) == (0, "before", 4, 0.5, (1, 0))


def test_beside_training_steps_go_on_and_the_result_says_what_sampled(tmp_path: Path) -> None:
    async def scene(s: Stage) -> None:
        await s.weights(2)
        await s.evaluations.begin()
        await until(lambda: len(s.groups()) == 4, "all groups")
        assert {m.at_least for _, m in s.groups()} == {v(2)}
        for host, message in s.groups()[:3]:
            await s.finish(host, message)
        await s.weights(3)
        assert s.evaluations.under_way == (2,)
        await s.finish_evaluations()
        (told,) = s.told.named("evaluation")
        assert (told["when"], told["step"], told["version"], told["lag_steps"]) == ("during", 2, "1.2", 1)
        assert (told["oldest"], told["newest"], told["version_share"]) == ("1.2", "1.3", 0.75)
        await s.evaluations.begin()  # nothing is due after step 3
        assert s.evaluations.under_way == ()

    begun, done = play(tmp_path, scene)
    assert begun == EvaluationBegun(step=2)
    assert (done.step, done.oldest, done.newest, done.version_share) == (2, (1, 2), (1, 3), 0.75)


def test_beside_training_no_token_is_older_than_what_is_evaluated(tmp_path: Path) -> None:
    slow, fast = FakeHost("slow"), FakeHost("fast")

    async def scene(s: Stage) -> None:
        await s.weights(1)
        slow.syncs = lambda engine, version: version.step < 2
        s.step = 2
        s.fleet.want(staged(1, 2), None)
        await s.evaluations.begin()
        await until(lambda: len(s.groups()) == 4, "all groups")
        assert {host.name for host, _ in s.groups()} == {"fast"}
        await s.finish_evaluations()

    play(tmp_path, scene, slow, fast)


def test_engines_set_aside_sample_with_the_evaluated_version_alone(tmp_path: Path) -> None:
    host = FakeHost("h", 2, n_set_aside=1)

    async def scene(s: Stage) -> None:
        await s.weights(2)
        await s.evaluations.begin()
        await until(lambda: len(s.groups()) == 4, "all groups")
        assert all(m.set_aside for _, m in s.groups())
        for step in (3, 4, 5):
            await s.weights(step)
        await s.finish_evaluations()
        (told,) = s.told.named("evaluation")
        assert (told["version"], told["oldest"], told["newest"], told["version_share"]) == ("1.2", "1.2", "1.2", 1.0)
        assert told["lag_steps"] == 3
        assert {step for engine, step in host.fetches if engine == "h-e1"} == {v(2)}

    play(tmp_path, scene, host, settings=SET_ASIDE)


def test_weights_that_engines_set_aside_still_fetch_are_not_taken_away(tmp_path: Path) -> None:
    host = FakeHost("h", 2, n_set_aside=1)
    host.syncs = lambda engine, version: engine == "h-e0"

    async def scene(s: Stage) -> None:
        await s.weights(2)
        await s.evaluations.begin()
        await s.weights(3)  # the trainer keeps 2 beside it
        task = asyncio.create_task(s.weights(4))
        await asyncio.sleep(0.1)
        assert s.step == 3 and not task.done()
        host.syncs = lambda engine, version: True
        await task
        await s.finish_evaluations()
        assert s.told.named("evaluation")[0]["version"] == "1.2"

    play(tmp_path, scene, host, settings=SET_ASIDE)


def test_training_does_not_wait_for_engines_that_are_lost(tmp_path: Path) -> None:
    host = FakeHost("h", 2, n_set_aside=1)

    async def scene(s: Stage) -> None:
        host.syncs = lambda engine, version: engine == "h-e0"
        await s.weights(2)
        await s.evaluations.begin()
        del host.versions["h-e1"]
        s.fleet.update("h", host.status())
        async with asyncio.timeout(3):
            await s.weights(3)
            await s.weights(4)
        await s.evaluations.settle()
        assert s.skipped() == [(2, "weights_gone")]

    play(tmp_path, scene, host, settings=SET_ASIDE)


def test_an_evaluation_whose_weights_are_gone_is_skipped(tmp_path: Path) -> None:
    host = FakeHost("h", 2, n_set_aside=1)

    async def scene(s: Stage) -> None:
        await s.weights(2)
        await s.evaluations.begin()
        await until(lambda: len(s.groups()) == 4, "all groups")
        await s.weights(3)
        await s.weights(4)
        host.versions["h-e1"] = None  # it was started again
        s.fleet.update("h", host.status())
        await s.evaluations.settle()
        assert s.skipped() == [(2, "weights_gone")]
        await s.evaluations.begin()
        await s.finish_evaluations()
        assert [e["version"] for e in s.told.named("evaluation")] == ["1.4"]

    assert [type(r) for r in play(tmp_path, scene, host, settings=SET_ASIDE)] == [
        EvaluationBegun,
        EvaluationSkipped,
        EvaluationBegun,
        Evaluated,
    ]


def test_backpressure_makes_training_wait(tmp_path: Path) -> None:
    async def scene(s: Stage) -> None:
        await s.weights(2)
        await s.evaluations.begin()
        await until(lambda: len(s.groups()) == 4, "all groups")
        await s.weights(4)
        task = asyncio.create_task(s.evaluations.begin())
        await asyncio.sleep(0.05)
        assert not task.done() and s.evaluations.under_way == (2,)
        for host, message in s.groups():
            await s.finish(host, message)
        await task
        assert s.evaluations.under_way == (4,)
        await s.finish_evaluations()
        assert [e["step"] for e in s.told.named("evaluation")] == [2, 4] and s.skipped() == []

    play(tmp_path, scene)


def test_too_many_are_skipped_by_policy_and_two_have_groups_of_their_own(tmp_path: Path) -> None:
    async def scene(s: Stage) -> None:
        for step in (2, 4, 6):
            await s.weights(step)
            await s.evaluations.begin()
        assert s.evaluations.under_way == (2, 4) and s.skipped() == [(6, "overflow")]
        assert (6, {"eval/skipped_overflow": 1.0}) in s.told.metrics
        await until(lambda: len(s.groups()) == 8, "all groups")
        assert len({m.group_id for _, m in s.groups()}) == 8
        assert len({m.prompt.seed for _, m in s.groups()}) == 4
        await s.finish_evaluations()
        await s.evaluations.begin()  # step 6 is settled
        assert s.evaluations.under_way == ()

    settings = (*SHARED, "eval.max_in_flight=2", "eval.overflow_policy=skip")
    records = play(tmp_path, scene, FakeHost("h", slots=16), settings=settings)
    assert sorted(r.step for r in records if isinstance(r, Evaluated)) == [2, 4]
    assert [r for r in records if isinstance(r, EvaluationSkipped)] == [EvaluationSkipped(step=6, reason="overflow")]


def test_a_group_that_fails_for_good_skips_the_evaluation_and_frees_its_hosts(tmp_path: Path) -> None:
    host = FakeHost("h")

    async def scene(s: Stage) -> None:
        await s.weights(2)
        await s.evaluations.begin()
        await until(lambda: len(s.groups()) == 4, "all groups")
        bad = s.groups()[1][1].group_id
        while s.evaluations.under_way:
            for at, message in s.groups():
                if message.group_id == bad:
                    await s.fail(at, message)
            await asyncio.sleep(0.005)
        s.evaluations.check()
        assert s.skipped() == [(2, "failed")]
        assert "failed 5 times: no sandbox" in s.told.named("evaluation_skipped")[0]["evidence"]
        (aborted,) = host.aborted
        assert aborted.purpose is EVAL and len(aborted.group_ids) == 3 and host.groups == []
        await s.weights(4)
        await s.evaluations.begin()
        await until(lambda: len(s.groups()) == 4, "all groups, on the slots that got free")
        await s.finish_evaluations()

    records = play(tmp_path, scene, host)
    assert [r.step for r in records if isinstance(r, Evaluated)] == [4]


def test_around_rl_a_group_that_fails_for_good_is_an_error(tmp_path: Path) -> None:
    async def scene(s: Stage) -> None:
        await s.weights(0)
        task = asyncio.create_task(s.evaluations.alone("before"))
        with pytest.raises(ProtocolError, match="eval group 0 failed 5 times: no sandbox"):
            while not task.done():
                for host, message in s.groups():
                    await s.fail(host, message)
                await asyncio.sleep(0.005)
            await task

    assert play(tmp_path, scene) == []


def test_an_evaluation_beside_training_has_a_deadline(tmp_path: Path) -> None:
    host = FakeHost("h")

    async def scene(s: Stage) -> None:
        await s.weights(2)
        await s.evaluations.begin()
        await s.evaluations.settle()
        assert s.skipped() == [(2, "deadline")]
        assert host.groups == []

    play(tmp_path, scene, host, settings=(*SHARED, "eval.deadline_s=0.2"))


def test_a_lost_host_costs_its_groups_another_try(tmp_path: Path) -> None:
    one, other = FakeHost("one"), FakeHost("other")

    async def scene(s: Stage) -> None:
        await s.weights(2)
        await s.evaluations.begin()
        await until(lambda: len(s.groups()) == 4, "all groups")
        lost = len(one.groups)
        assert lost
        one.lost, one.groups = True, []
        s.fleet.lose_host("one")
        s.dispatch.lose_host("one")
        await until(lambda: len(other.groups) == 4, "all on the other host")
        assert sum(m.attempt == 1 for _, m in s.groups()) == lost
        await s.finish_evaluations()
        assert s.told.named("evaluation")[0]["n"] == 4

    play(tmp_path, scene, one, other)


def test_a_cut_evaluation_is_done_again_from_the_same_step_and_skipped_from_another(tmp_path: Path) -> None:
    async def again(s: Stage) -> None:
        await s.weights(4)
        await s.evaluations.resume()
        await s.evaluations.begin()
        await s.finish_evaluations()
        assert [e["step"] for e in s.told.named("evaluation")] == [4]
        assert s.skipped() == [(2, "cut")]

    records = play(tmp_path / "a", again, plan=StartPlan(step=4, cut=frozenset({2, 4})))
    assert [(type(r), r.step) for r in records] == [(EvaluationSkipped, 2), (EvaluationBegun, 4), (Evaluated, 4)]

    async def known(s: Stage) -> None:
        await s.weights(4)
        await s.evaluations.resume()
        await s.evaluations.begin()
        assert s.evaluations.under_way == () and s.told.named("evaluation") == []

    for plan in (StartPlan(step=4, evaluated=frozenset({2, 4})), StartPlan(step=4, skipped=frozenset({4}))):
        assert play(tmp_path / repr(plan.evaluated), known, plan=plan) == []


def test_a_fence_ends_more_than_the_evaluation(tmp_path: Path) -> None:
    async def scene(s: Stage) -> None:
        await s.weights(2)
        await s.evaluations.begin()
        await until(lambda: len(s.groups()) == 4, "all groups")
        s.fenced = True
        with pytest.raises(FencedError):
            await s.finish_evaluations()
        with pytest.raises(FencedError):
            await s.evaluations.begin()

    assert play(tmp_path, scene) == [EvaluationBegun(step=2)]


def test_trajectories_that_cannot_be_archived_cost_nothing_else(tmp_path: Path) -> None:
    async def scene(s: Stage) -> None:
        s.refusal = OSError("no space")
        await s.weights(2)
        await s.evaluations.begin()
        await s.finish_evaluations()
        assert len(s.told.named("eval_not_archived")) == 1 and s.evaluations.count == 1

    play(tmp_path, scene)


# ------------------------------------------------------------------------------------------------ sharing engines


async def _run_both(s: Stage, n_done: int, *, slots: int) -> tuple[int, int]:
    """Keep both busy until `n_done` trajectories came back while both waited; (training's, evaluations') of them."""
    done = {TRAIN: 0, EVAL: 0}
    while sum(done.values()) < n_done:
        await asyncio.sleep(0.002)
        for host in s.hosts:
            assert sum(g.n_samples for g in host.groups) <= slots * 1.25
        for host, message in [*s.groups(TRAIN), *s.groups(EVAL)]:
            done[message.purpose] += message.n_samples
            await s.finish(host, message)
    return done[TRAIN], done[EVAL]


@pytest.mark.parametrize("share", [0.25, 0.5])
def test_on_shared_engines_both_get_their_share(tmp_path: Path, share: float) -> None:
    async def scene(s: Stage) -> None:
        await s.weights(2)
        s.dispatch.start_producer(lambda: 1000)
        await s.evaluations.begin()
        trained, evaluated = await _run_both(s, 200, slots=8)
        assert evaluated / (trained + evaluated) == pytest.approx(share, abs=0.08)
        s.dispatch.close()
        await s.finish_evaluations()  # with nobody else waiting, the rest goes through at once

    settings = (*SHARED, "eval.n_episodes=200", f"eval.slot_share={share}")
    play(tmp_path, scene, FakeHost("h", slots=8), settings=settings)


def test_training_does_not_wait_for_an_evaluation_that_no_host_can_play_yet(tmp_path: Path) -> None:
    host = FakeHost("h")

    async def scene(s: Stage) -> None:
        await s.weights(1)
        s.step = 2
        host.syncs = lambda engine, version: False
        s.fleet.want(staged(1, 2), None)
        await s.evaluations.begin()
        await asyncio.sleep(0.05)  # it waits by now
        s.dispatch.start_producer(lambda: 1000)
        await until(lambda: s.groups(TRAIN), "a training group")
        assert s.groups(EVAL) == []
        host.syncs = lambda engine, version: True
        while not s.groups(EVAL):
            for at, message in s.groups(TRAIN):
                await s.finish(at, message)
            await asyncio.sleep(0.005)
        s.dispatch.close()
        await s.finish_evaluations()

    play(tmp_path, scene, host)


def test_engines_set_aside_take_nothing_from_training(tmp_path: Path) -> None:
    async def scene(s: Stage) -> None:
        await s.weights(2)
        s.dispatch.start_producer(lambda: 1000)
        await until(lambda: len(s.groups(TRAIN)) == 2, "training on its own engine")
        await s.evaluations.begin()
        await until(lambda: len(s.groups(EVAL)) == 4, "the evaluation on the other")
        assert len(s.groups(TRAIN)) == 2
        assert not any(m.set_aside for _, m in s.groups(TRAIN))
        s.dispatch.close()
        await s.finish_evaluations()

    play(tmp_path, scene, FakeHost("h", 2, slots=8, n_set_aside=1), settings=SET_ASIDE)


def test_the_readme_has_every_reason_for_a_skip() -> None:
    readme = (Path(evaluation.__file__).parent / "README.md").read_text()
    for reason in ("overflow", "failed", "deadline", "weights_gone", "cut"):
        assert f"`{reason}`" in readme


def test_groups_of_an_evaluation_are_summed_over_prompts(tmp_path: Path) -> None:
    async def scene(s: Stage) -> None:
        await s.weights(2)
        await s.evaluations.begin()
        solved = 0
        while s.evaluations.under_way:
            for host, message in s.groups():
                host.groups.remove(message)
                summary = finished(host, message, reward=0.0)
                if solved == 0:  # one of eight trajectories of one prompt
                    first, *rest = summary.trajectories
                    first = msgspec.structs.replace(first, reward=1.0)
                    summary = msgspec.structs.replace(summary, trajectories=(first, *rest))
                    solved = 1
                await s.dispatch.group_done(s.members.peer(host), summary)
            await asyncio.sleep(0.005)
        (told,) = s.told.named("evaluation")
        assert told["mean"] == pytest.approx(1 / 32)
        assert told["pass_at"] == {
            "1": pytest.approx(1 / 32),
            "2": pytest.approx(2 / 32),
            "4": pytest.approx(4 / 32),
            "8": pytest.approx(8 / 32),
        }

    play(tmp_path, scene, FakeHost("h", slots=32), settings=(*SHARED, "eval.n_samples_per_eval_prompt=8"))
