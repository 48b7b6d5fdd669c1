"""The rollout host end to end: real sandboxes, a rule-playing engine, payload files, reports."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from miles_hpc.core.errors import PeerLost, ProtocolError, RemoteError
from miles_hpc.core.messages import (
    AbortGroups,
    Ack,
    GroupDone,
    GroupFailed,
    HostStatus,
    Message,
    Scores,
    ScoreTokens,
    Shutdown,
    SyncWeights,
    WeightsSynced,
)
from miles_hpc.core.paths import RunPaths
from miles_hpc.core.transport import Reply
from miles_hpc.core.types import GroupPurpose, SampleStatus, WeightVersion
from miles_hpc.rollout import role
from miles_hpc.rollout.role import RolloutHost
from miles_hpc.rollout.sandbox import LocalSandboxes
from miles_hpc.rollout.sandbox_host import SandboxHost
from miles_hpc.rollout.session.tokenizer import ChatTokenizer, shape_of
from miles_hpc.rollout.spool import read_payload, spool_group
from tests.fakes.rollout import group, model_folder, tiny_run
from tests.fakes.solver_engine import SolverEngine

WAIT_S = 60.0


class Controller:
    """Takes the host's reports."""

    def __init__(self) -> None:
        self.received: list[Message] = []
        self.refusals: list[Exception] = []
        self.arrived = asyncio.Condition()

    async def report(self, message: Message) -> Reply:
        if self.refusals and isinstance(message, GroupDone | GroupFailed):
            raise self.refusals.pop(0)
        async with self.arrived:
            self.received.append(message)
            self.arrived.notify_all()
        return Reply(message=Ack(), payload=memoryview(b""))

    async def wait(self, kind: type[Message], n: int = 1) -> list[Any]:
        async with asyncio.timeout(WAIT_S):
            async with self.arrived:
                await self.arrived.wait_for(lambda: len(self.of(kind)) >= n)
        return self.of(kind)

    def of(self, kind: type[Message]) -> list[Any]:
        return [m for m in self.received if isinstance(m, kind)]


class Stage:
    def __init__(self, paths: RunPaths, host: RolloutHost, controller: Controller, tokenizer: ChatTokenizer) -> None:
        self.paths, self.host, self.controller, self.tokenizer = paths, host, controller, tokenizer


def play(tmp_path: Path, scene: Callable[[Stage], Awaitable[None]], **rollout: Any) -> None:
    async def main() -> None:
        paths = RunPaths(tmp_path)
        tokenizer = model_folder(paths.model)
        sandbox_host = SandboxHost()
        await sandbox_host.start()
        controller = Controller()
        host = RolloutHost(tiny_run(**rollout), paths, "r0", LocalSandboxes(sandbox_host), controller.report, term=3)
        try:
            async with asyncio.timeout(2 * WAIT_S):
                await scene(Stage(paths, host, controller, tokenizer))
        finally:
            await host.close()
            await sandbox_host.close()

    asyncio.run(main())


def test_group_is_played_and_spooled(tmp_path: Path) -> None:
    async def scene(s: Stage) -> None:
        engine = SolverEngine("e0", s.tokenizer, slots=2)
        await s.host.add_engine(engine)
        assert isinstance(await s.host.handle(group(7, n_samples=5)), Ack)
        (done,) = await s.controller.wait(GroupDone)
        summary = done.summary
        assert engine.most_running == 2  # never more than its slots
        assert (summary.group_id, summary.attempt, summary.host, len(summary.trajectories)) == (7, 0, "r0", 5)
        assert [t.reward for t in summary.trajectories] == [1.0] * 5
        assert summary.oldest_version == WeightVersion(1, 0)
        assert summary.payload.path.startswith("journal/spool/000003/r0/train-7-0")
        payload = read_payload(s.paths, summary.payload)
        for trajectory, short in zip(payload.trajectories, summary.trajectories, strict=True):
            tokens, mask = trajectory.tokens.numpy(), trajectory.loss_mask.numpy()
            assert short.n_tokens == len(tokens) == len(mask) and short.n_loss_tokens == mask.sum()
            text = s.tokenizer.decode(tokens)
            assert text.startswith(f"<bos><ask>{payload.prompt.messages[0].content}<act>") and text.endswith("<end>")
            assert np.all((trajectory.log_probs.numpy() == -0.5) == (mask == 1))
            assert sum(v.end - v.start for v in trajectory.versions) == mask.sum()
        assert len(engine.ended) == 5
        while s.host.groups_in_flight:
            await asyncio.sleep(0.01)
        assert s.host.slots.used == 0

    play(tmp_path, scene)


@pytest.mark.parametrize(("number", "kind"), [(errno.ENOSPC, GroupDone), (errno.EIO, GroupFailed)])
def test_a_group_waits_for_space_and_fails_with_broken_storage(
    number: int, kind: type[Message], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals = [number, number]

    def spool(*args: Any, **named: Any) -> Any:
        if refusals:
            raise OSError(refusals.pop(), "refused")
        return spool_group(*args, **named)

    monkeypatch.setattr(role, "spool_group", spool)

    async def scene(s: Stage) -> None:
        await s.host.add_engine(SolverEngine("e0", s.tokenizer, slots=2))
        await s.host.handle(group(7, n_samples=2))
        await s.controller.wait(kind)
        assert len(s.controller.of(GroupDone)) + len(s.controller.of(GroupFailed)) == 1

    play(tmp_path, scene)


def test_demonstrations_need_no_engine(tmp_path: Path) -> None:
    async def scene(s: Stage) -> None:
        for i in range(40):
            await s.host.handle(group(i, n_samples=1, purpose="demo"))
        done = await s.controller.wait(GroupDone, 40)
        trajectories = [t for d in done for t in d.summary.trajectories]
        assert all(t.oldest_version is None and t.status is SampleStatus.COMPLETED for t in trajectories)
        share = sum(t.reward for t in trajectories) / 40
        assert 0.1 < share < 0.8  # noisy on purpose: neither hopeless nor perfect
        first = read_payload(s.paths, done[0].summary.payload).trajectories[0]
        assert first.versions == () and first.loss_mask.numpy().sum() > 0

    play(tmp_path, scene)


def test_a_lost_engine_costs_one_local_retry(tmp_path: Path) -> None:
    async def scene(s: Stage) -> None:
        dying, good = SolverEngine("e0", s.tokenizer), SolverEngine("e1", s.tokenizer)
        dying.die_after = 1
        await s.host.add_engine(dying)
        await s.host.add_engine(good)
        await s.host.handle(group(1))
        (done,) = await s.controller.wait(GroupDone)
        assert [t.reward for t in done.summary.trajectories] == [1.0] * 4
        alive = {e.name: e.alive for e in s.host.status().engines}
        assert alive == {"e0": False, "e1": True}
        last = (await s.controller.wait(HostStatus, 3))[-1]
        assert {e.name: e.alive for e in last.engines} == alive

    play(tmp_path, scene)


def test_a_group_that_no_engine_can_play_fails(tmp_path: Path) -> None:
    async def scene(s: Stage) -> None:
        for name in ("e0", "e1"):
            engine = SolverEngine(name, s.tokenizer)
            engine.die_after = 0
            await s.host.add_engine(engine)
        await s.host.handle(group(1, attempt=2))
        (failed,) = await s.controller.wait(GroupFailed)
        assert (failed.group_id, failed.attempt) == (1, 2) and "died" in failed.reason
        assert s.controller.of(GroupDone) == [] and s.host.slots.used == 0

    play(tmp_path, scene)


def test_reports_are_sent_until_acknowledged(tmp_path: Path) -> None:
    async def scene(s: Stage) -> None:
        await s.host.add_engine(SolverEngine("e0", s.tokenizer))
        s.controller.refusals = [PeerLost("gone"), RemoteError("busy", kind="OSError")]
        await s.host.handle(group(1, n_samples=1))
        await s.controller.wait(GroupDone)
        assert s.controller.refusals == [] and len(s.controller.of(GroupDone)) == 1

    play(tmp_path, scene)


def test_abort_and_reset_drop_what_is_in_flight(tmp_path: Path) -> None:
    async def scene(s: Stage) -> None:
        engine = SolverEngine("e0", s.tokenizer)
        engine.hang = True
        await s.host.add_engine(engine)
        await s.host.handle(group(1))
        await s.host.handle(group(1))  # the same message again changes nothing
        await s.host.handle(group(2))
        while engine.running < 4:
            await asyncio.sleep(0.01)
        assert s.host.groups_in_flight == 2
        await s.host.handle(AbortGroups(group_ids=(1, 99), reason="test"))
        assert s.host.groups_in_flight == 1
        await s.host.reset(4)
        assert s.host.groups_in_flight == 0 and s.host.slots.used == 0 and s.host.term == 4
        assert s.controller.of(GroupDone) == [] and s.controller.of(GroupFailed) == []
        engine.hang = False
        await s.host.handle(group(3, n_samples=1))
        (done,) = await s.controller.wait(GroupDone)
        assert done.summary.payload.path.startswith("journal/spool/000004/")

    play(tmp_path, scene)


def test_engines_without_a_version_get_nothing_until_they_are_synced(tmp_path: Path) -> None:
    async def scene(s: Stage) -> None:
        engine = SolverEngine("e0", s.tokenizer, version=None)
        await s.host.add_engine(engine)
        await s.host.handle(group(1, n_samples=2))
        await asyncio.sleep(0.2)
        assert engine.calls == 0
        wanted = WeightVersion(3, 5)
        sync = SyncWeights(engine="e0", version=wanted, source="nowhere", plan_digest=b"", deadline_s=5)
        with pytest.raises(PeerLost):
            await s.host.handle(sync)
        reply = await s.host.handle(
            SyncWeights(engine="e0", version=wanted, source="here", plan_digest=b"", deadline_s=5)
        )
        assert isinstance(reply, WeightsSynced)
        (done,) = await s.controller.wait(GroupDone)
        assert done.summary.oldest_version == wanted
        assert s.host.status().engines[0].version == wanted

    play(tmp_path, scene)


def test_scores_come_back_as_bytes(tmp_path: Path) -> None:
    async def scene(s: Stage) -> None:
        await s.host.add_engine(SolverEngine("e0", s.tokenizer))
        tokens = np.arange(6, dtype="<i4").reshape(2, 3)
        reply = await s.host.handle(ScoreTokens(n=2, length=3, engine="e0"), memoryview(tokens.tobytes()))
        assert isinstance(reply, tuple)
        message, buffers = reply
        assert message == Scores(version=WeightVersion(1, 0), n=2, length=3)
        assert np.array_equal(np.frombuffer(buffers[0], "<f4").reshape(2, 2), -tokens[:, 1:])
        with pytest.raises(ProtocolError, match="3 x 3"):
            await s.host.handle(ScoreTokens(n=3, length=3), tokens.tobytes())
        with pytest.raises(ProtocolError, match="Shutdown"):
            await s.host.handle(Shutdown(reason="x"))

    play(tmp_path, scene)


def test_a_hanging_engine_truncates_at_the_deadline(tmp_path: Path) -> None:
    async def scene(s: Stage) -> None:
        engine = SolverEngine("e0", s.tokenizer)
        engine.hang = True
        await s.host.add_engine(engine)
        await s.host.handle(group(1, n_samples=2, deadline_s=0.3))
        (done,) = await s.controller.wait(GroupDone)
        assert {t.status for t in done.summary.trajectories} == {SampleStatus.TRUNCATED}
        assert {t.n_loss_tokens for t in done.summary.trajectories} == {0}

    play(tmp_path, scene)


def test_routed_experts_have_one_row_fewer_than_tokens(tmp_path: Path) -> None:
    pytest.importorskip("miles_hpc.routing.store")
    from miles_hpc.routing.store import RoutedExpertsStore

    async def scene(s: Stage) -> None:
        engine = SolverEngine("e0", s.tokenizer, shape=shape_of(s.paths.model))
        await s.host.add_engine(engine)
        await s.host.handle(group(5, n_samples=3))
        (done,) = await s.controller.wait(GroupDone)
        store = RoutedExpertsStore(s.paths.root)
        for trajectory in read_payload(s.paths, done.summary.payload).trajectories:
            assert trajectory.routed_experts is not None
            rows = store.read(trajectory.routed_experts)
            tokens = trajectory.tokens.numpy()
            assert np.array_equal(rows, engine.rows(tokens[:-1]))

    play(tmp_path, scene)


def test_engines_set_aside_play_evaluations_only_and_both_at_once(tmp_path: Path) -> None:
    async def scene(s: Stage) -> None:
        shared, aside = SolverEngine("e0", s.tokenizer), SolverEngine("e1", s.tokenizer, version=WeightVersion(1, 3))
        await s.host.add_engine(shared)
        await s.host.add_engine(aside, set_aside=True)
        assert [e.set_aside for e in s.host.status().engines] == [False, True]
        # the same id and attempt, for two purposes: neither its sandboxes nor its sessions may meet the other's
        await s.host.handle(group(7, n_samples=4))
        await s.host.handle(group(7, n_samples=4, purpose="eval", set_aside=True, at_least=WeightVersion(1, 3)))
        done = {d.summary.purpose: d.summary for d in await s.controller.wait(GroupDone, 2)}
        assert all(t.reward == 1.0 for summary in done.values() for t in summary.trajectories)
        sampled = {purpose: {v for t in one.trajectories for v, _ in t.sampled} for purpose, one in done.items()}
        assert sampled == {GroupPurpose.TRAIN: {WeightVersion(1, 0)}, GroupPurpose.EVAL: {WeightVersion(1, 3)}}
        for t in done[GroupPurpose.EVAL].trajectories:
            assert sum(n for _, n in t.sampled) == t.n_loss_tokens > 0
        assert set(shared.ended).isdisjoint(aside.ended)

    play(tmp_path, scene)


def test_a_group_waits_for_an_engine_that_is_new_enough(tmp_path: Path) -> None:
    async def scene(s: Stage) -> None:
        engine = SolverEngine("e0", s.tokenizer, version=WeightVersion(1, 4))
        await s.host.add_engine(engine)
        await s.host.handle(group(1, n_samples=2, purpose="eval", at_least=WeightVersion(1, 5)))
        await s.host.handle(group(2, n_samples=2))  # comes later, and needn't wait
        (first,) = await s.controller.wait(GroupDone)
        assert first.summary.purpose is GroupPurpose.TRAIN
        sync = SyncWeights(engine="e0", version=WeightVersion(1, 5), source="here", plan_digest=b"", deadline_s=5)
        await s.host.handle(sync)
        second = (await s.controller.wait(GroupDone, 2))[1]
        assert second.summary.oldest_version == WeightVersion(1, 5)

    play(tmp_path, scene)


def test_abort_takes_groups_of_its_purpose_only(tmp_path: Path) -> None:
    async def scene(s: Stage) -> None:
        engine = SolverEngine("e0", s.tokenizer)
        engine.hang = True
        await s.host.add_engine(engine)
        await s.host.handle(group(1))
        await s.host.handle(group(1, purpose="eval"))
        await s.host.handle(AbortGroups(group_ids=(1,), reason="test", purpose=GroupPurpose.EVAL))
        assert s.host.groups_in_flight == 1
        await s.host.handle(AbortGroups(group_ids=(1,), reason="test"))
        assert s.host.groups_in_flight == 0

    play(tmp_path, scene)
