"""The controller's pure parts: schedules, numbers of a step, and what a term starts from."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoints.journal import (
    BatchFormed,
    Evaluated,
    EvaluationBegun,
    EvaluationSkipped,
    GroupDropped,
    GroupOwned,
    JournalWriter,
    Record,
    StepDone,
    TermStarted,
    read_journals,
)
from checkpoints.manifest import (
    Counters,
    FileEntry,
    JournalPosition,
    Manifest,
    extend_lineage,
    list_checkpoints,
    newest_complete,
    publish_manifest,
    started_after,
)
from miles_hpc.control.terms import check_newest, claim_attempt, claim_term
from miles_hpc.controller import durable
from miles_hpc.controller.dispatch import Dispatcher
from miles_hpc.controller.durable import DurableJournal
from miles_hpc.controller.measure import eval_summary
from miles_hpc.controller.recovery import choose_checkpoint, plan_start
from miles_hpc.controller.schedule import rl_lr, sft_batch, sft_lr
from miles_hpc.core.config import SftConfig, TrainConfig
from miles_hpc.core.errors import FencedError, UserError
from miles_hpc.core.paths import RunPaths
from miles_hpc.core.types import (
    GroupPurpose,
    GroupSummary,
    PayloadRef,
    SampleStatus,
    TrajectorySummary,
    WeightVersion,
)
from miles_hpc.dataflow.buffer import GroupBuffer, owned_record


def _summary(group_id: int, version: WeightVersion, rewards: tuple[float, ...] = (0.0, 1.0)) -> GroupSummary:
    return GroupSummary(
        group_id=group_id,
        attempt=0,
        purpose=GroupPurpose.TRAIN,
        payload=PayloadRef(path=f"journal/spool/{group_id}", n_bytes=1, crc32=0),
        trajectories=tuple(
            TrajectorySummary(
                index=i,
                n_tokens=10,
                n_loss_tokens=4,
                reward=reward,
                status=SampleStatus.COMPLETED,
                turns=1,
                oldest_version=version,
                label="ab"[i % 2],
            )
            for i, reward in enumerate(rewards)
        ),
        duration_s=1.0,
        generation_s=1.0,
        environment_s=0.0,
    )


def test_learning_rates() -> None:
    sft = SftConfig(steps=100, lr=1.0, lr_warmup_steps=10, lr_decay_from=0.6, lr_min_ratio=0.1)
    assert sft_lr(sft, 1) == pytest.approx(0.1)
    assert sft_lr(sft, 10) == sft_lr(sft, 60) == 1.0
    assert sft_lr(sft, 81) == pytest.approx(0.5)
    assert sft_lr(sft, 100) == pytest.approx(0.1)
    train = TrainConfig(lr=2.0, lr_warmup_steps=4)
    assert [rl_lr(train, s) for s in (1, 2, 4, 9)] == [0.5, 1.0, 2.0, 2.0]


@given(n=st.integers(1, 40), batch=st.integers(1, 30), seed=st.integers(0, 9), steps=st.integers(1, 12))
def test_sft_batches_pass_over_all_data_before_any_repeats(n: int, batch: int, seed: int, steps: int) -> None:
    drawn = [i for step in range(1, steps + 1) for i in sft_batch(n, batch, step, seed)]
    assert len(drawn) == steps * batch
    for start in range(0, len(drawn), n):
        part = drawn[start : start + n]
        assert len(set(part)) == len(part) and set(part) <= set(range(n))
    assert sft_batch(n, batch, steps, seed) == drawn[-batch:]  # a resumed run draws the same


def test_sft_without_data_is_an_error() -> None:
    with pytest.raises(ValueError, match="no demonstrations"):
        sft_batch(0, 4, 1, 0)


def test_eval_summary_by_label() -> None:
    version = WeightVersion(1, 0)
    mean, by_label = eval_summary([_summary(0, version), _summary(1, version, (1.0, 1.0))])
    assert mean == 0.75 and by_label == {"a": 0.5, "b": 1.0}
    assert eval_summary([]) == (0.0, {})


def test_a_fresh_run_starts_at_nothing(tmp_path: Path) -> None:
    plan = plan_start(newest_complete(tmp_path / "checkpoints"), read_journals(tmp_path / "journal"), reuse=True)
    assert (plan.step, plan.next_group_id, plan.pending, plan.owned) == (0, 0, (), ())


def _run_to_step_2(root: Path) -> Manifest:
    """Term 1: groups 0 to 5 handed out; 0 and 1 trained at step 1, 2 dropped, 3 trained with 4 at step 2; 5 pending."""
    version = WeightVersion(1, 0)
    with JournalWriter.create(root / "journal", TermStarted(term=1, attempt=1)) as journal:
        journal.append(*(owned_record(_summary(g, version)) for g in (0, 1, 3, 4)))
        journal.append(BatchFormed(step=1, group_ids=(0, 1), staleness=(0, 0)), StepDone(step=1, version=(1, 1)))
        journal.append(GroupDropped(group_id=2, reason="stale"))
        journal.append(BatchFormed(step=2, group_ids=(3, 4), staleness=(1, 1)), StepDone(step=2, version=(1, 2)))
        manifest = Manifest(
            run="r",
            term=1,
            step=2,
            attempt=1,
            lineage=extend_lineage((), 1, 2),
            counters=Counters(next_group_id=6, pending=(5,)),
            journal=JournalPosition(term=1, offset=journal.offset),
            files={},
        )
        folder = root / "checkpoints" / "step_000002.t000001"
        folder.mkdir(parents=True)
        publish_manifest(folder, manifest, lambda: None)
        # after the manifest: one more step that no manifest contains, and groups of a version that never counts
        journal.append(owned_record(_summary(5, WeightVersion(1, 2))), owned_record(_summary(6, WeightVersion(1, 3))))
        journal.append(BatchFormed(step=3, group_ids=(5, 6), staleness=(0, 0)), StepDone(step=3, version=(1, 3)))
    return manifest


def test_a_restart_takes_over_what_was_owned_and_not_trained(tmp_path: Path) -> None:
    manifest = _run_to_step_2(tmp_path)
    plan = plan_start(newest_complete(tmp_path / "checkpoints"), read_journals(tmp_path / "journal"), reuse=True)
    assert plan.step == 2 and plan.trained_groups == 4
    assert plan.next_group_id == 6 and plan.pending == (5,)
    assert [g.group_id for g in plan.owned] == [5, 6]
    assert plan.forks == {1: 2}
    started = started_after(manifest, term=2, attempt=2)
    assert (started.base_term, started.base_step) == (1, 2)


def test_without_reuse_everything_is_sampled_again(tmp_path: Path) -> None:
    _run_to_step_2(tmp_path)
    plan = plan_start(newest_complete(tmp_path / "checkpoints"), read_journals(tmp_path / "journal"), reuse=False)
    assert plan.owned == () and plan.pending == (5,)


def test_evaluations_on_record_count_where_their_weights_do(tmp_path: Path) -> None:
    """Term 1 has a manifest of step 4 and goes on to 6; term 2 continues from 4 and is cut before it saves."""
    with JournalWriter.create(tmp_path / "journal", TermStarted(term=1, attempt=1)) as journal:
        journal.append(Evaluated(step=0, n=2, mean=0.1), EvaluationBegun(step=2), EvaluationBegun(step=3))
        journal.append(EvaluationSkipped(step=3, reason="failed"))
        manifest = Manifest(
            run="r",
            term=1,
            step=4,
            attempt=1,
            lineage=extend_lineage((), 1, 4),
            counters=Counters(next_group_id=0, sft_steps=4, evaluations=1),
            journal=JournalPosition(term=1, offset=journal.offset),
            files={},
        )
        folder = tmp_path / "checkpoints" / "step_000004.t000001"
        folder.mkdir(parents=True)
        publish_manifest(folder, manifest, lambda: None)
        # told after the manifest: the evaluation of step 2 stands, those of steps that no manifest has don't
        journal.append(Evaluated(step=2, n=2, mean=0.2), Evaluated(step=5, n=2, mean=0.9), EvaluationBegun(step=6))
        journal.append(EvaluationBegun(step=4))

    def plan() -> tuple[set[int], set[int], set[int]]:
        found = plan_start(newest_complete(tmp_path / "checkpoints"), read_journals(tmp_path / "journal"), reuse=True)
        return set(found.evaluated), set(found.skipped), set(found.cut)

    assert plan() == ({0, 2}, {3}, {4})
    started = TermStarted(term=2, attempt=2, base_term=1, base_step=4, base_offset=manifest.journal.offset)
    with JournalWriter.create(tmp_path / "journal", started) as journal:
        journal.append(EvaluationBegun(step=4))
        assert plan() == ({0, 2}, {3}, {4})
        journal.append(Evaluated(step=4, n=2, mean=0.3), Evaluated(step=5, n=2, mean=0.9))
        assert plan() == ({0, 2, 4}, {3}, set())


def test_without_a_manifest_only_what_the_initial_weights_scored_counts(tmp_path: Path) -> None:
    with JournalWriter.create(tmp_path, TermStarted(term=1, attempt=1)) as journal:
        journal.append(Evaluated(step=0, n=2, mean=0.1), Evaluated(step=3, n=2, mean=0.1), EvaluationBegun(step=2))
    plan = plan_start(None, read_journals(tmp_path), reuse=True)
    assert (plan.evaluated, plan.skipped, plan.cut) == ({0}, set(), set())


def test_concurrent_appends_are_durable_and_in_order(tmp_path: Path) -> None:
    async def scenario() -> None:
        with JournalWriter.create(tmp_path, TermStarted(term=1, attempt=1)) as writer:
            journal = DurableJournal(writer, fence=lambda: None)
            await asyncio.gather(*(journal.append(GroupDropped(group_id=i, reason="x")) for i in range(50)))
            await journal.flush()
            assert journal.idle
            await journal.append()

    asyncio.run(scenario())
    records = list(read_journals(tmp_path)[1].records())[1:]
    assert [r.group_id for r in records] == list(range(50))


def test_a_fenced_controller_records_and_acknowledges_nothing_more(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    attempt = claim_attempt(paths)
    term = claim_term(paths, attempt)

    async def scenario() -> None:
        with JournalWriter.create(paths.journal, TermStarted(term=term, attempt=attempt)) as writer:
            journal = DurableJournal(writer, fence=lambda: check_newest(paths, term, attempt))
            await journal.append(GroupDropped(group_id=1, reason="x"))
            claim_attempt(paths)  # the job was started elsewhere
            late = [journal.append(GroupDropped(group_id=i, reason="late")) for i in (2, 3)]
            results = await asyncio.gather(*late, return_exceptions=True)
            assert [type(result) for result in results] == [FencedError, FencedError]
            await journal.flush()

    asyncio.run(scenario())
    assert [r.group_id for r in read_journals(paths.journal)[term].records() if isinstance(r, GroupDropped)] == [1]


class FullStorage:
    """A journal whose file system has no room for the first n appends."""

    def __init__(self, writer: JournalWriter, n_refused: int, number: int = errno.ENOSPC) -> None:
        self._writer, self._left, self._number = writer, n_refused, number

    @property
    def offset(self) -> int:
        return self._writer.offset

    def append(self, *records: Record) -> int:
        if self._left:
            self._left -= 1
            raise OSError(self._number, os.strerror(self._number))
        return self._writer.append(*records)


def _on_full_storage(tmp_path: Path, n_refused: int, number: int = errno.ENOSPC, *, patient: bool = True) -> list[str]:
    """What happened, in order, to three groups handed in one after the other while storage is full."""
    told: list[str] = []

    async def hand_in(journal: DurableJournal, group_id: int) -> None:
        try:
            await journal.append(GroupDropped(group_id=group_id, reason="x"))
            told.append(f"durable {group_id}")
        except OSError as error:
            told.append(f"refused {group_id}: {error.strerror}")

    async def scenario() -> None:
        with JournalWriter.create(tmp_path, TermStarted(term=1, attempt=1)) as writer:
            journal = DurableJournal(
                FullStorage(writer, n_refused, number),  # type: ignore[arg-type]
                fence=lambda: None,
                patient=lambda: patient,
                patience_s=60.0,
                on_full=lambda error: told.append(f"full: {error.strerror}"),
                on_room=lambda _: told.append("room"),
                on_refused=lambda _: told.append("refused"),
            )
            await asyncio.gather(*(hand_in(journal, i) for i in range(2)))
            await hand_in(journal, 2)

    with mock.patch.object(durable, "_LOOK_AGAIN_S", 0.001):
        asyncio.run(scenario())
    return told


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_records_wait_for_room_and_keep_their_order(tmp_path: Path, number: int) -> None:
    told = _on_full_storage(tmp_path, 3, number)
    assert told == [f"full: {os.strerror(number)}", "room", "durable 0", "durable 1", "durable 2"]
    assert [r.group_id for r in read_journals(tmp_path)[1].records() if isinstance(r, GroupDropped)] == [0, 1, 2]


def test_a_group_told_again_is_acknowledged_when_its_record_is_durable(tmp_path: Path) -> None:
    version = WeightVersion(1, 0)
    buffer = GroupBuffer(batch_groups=1, max_admitted=1, max_staleness=1, max_attempts=1)
    buffer.admit(7)
    buffer.start(7, "node-1")
    durable_when_acknowledged: list[int] = []

    async def scenario() -> None:
        with JournalWriter.create(tmp_path, TermStarted(term=1, attempt=1)) as writer:
            storage = FullStorage(writer, 3)
            journal = DurableJournal(storage, fence=lambda: None, patient=lambda: True, patience_s=60.0)  # type: ignore[arg-type]
            dispatch = Dispatcher(*(mock.MagicMock() for _ in range(3)), buffer, mock.MagicMock(), journal, mock.Mock())

            async def announce(delay_s: float) -> None:
                await asyncio.sleep(delay_s)
                await dispatch.group_done(mock.Mock(), _summary(7, version))
                durable_when_acknowledged.append(
                    sum(isinstance(r, GroupOwned) for r in read_journals(tmp_path)[1].records())
                )

            await asyncio.gather(announce(0.0), announce(0.01))

    with mock.patch.object(durable, "_LOOK_AGAIN_S", 0.02):
        asyncio.run(scenario())
    assert durable_when_acknowledged == [1, 1]


@pytest.mark.parametrize(("number", "patient"), [(errno.ENOSPC, False), (errno.EIO, True)])
def test_nothing_is_recorded_behind_what_was_refused(tmp_path: Path, number: int, patient: bool) -> None:
    told = _on_full_storage(tmp_path, 1, number, patient=patient)
    seen = os.strerror(number)
    full = [f"full: {seen}"] if number == errno.ENOSPC else []
    assert told == [*full, "refused", *(f"refused {i}: {seen}" for i in range(3))]
    assert not [r for r in read_journals(tmp_path)[1].records() if isinstance(r, GroupDropped)]


def _checkpoint(root: Path, step: int) -> Path:
    folder = root / f"step_{step:06d}.t000001"
    folder.mkdir(parents=True)
    (folder / "state").write_bytes(b"x" * step)
    manifest = Manifest(
        run="r",
        term=1,
        step=step,
        attempt=1,
        lineage=extend_lineage((), 1, step),
        counters=Counters(next_group_id=0),
        journal=JournalPosition(term=1, offset=0),
        files={"state": FileEntry(n_bytes=step)},
    )
    publish_manifest(folder, manifest, lambda: None)
    return folder


def test_the_newest_readable_checkpoint_is_chosen_and_none_left_is_no_new_run(tmp_path: Path) -> None:
    assert choose_checkpoint(list_checkpoints(tmp_path)) is None
    (tmp_path / "step_000099.t000001").mkdir()  # a save that was cut: no manifest, no promise
    assert choose_checkpoint(list_checkpoints(tmp_path)) is None
    first, second, third = (_checkpoint(tmp_path, step) for step in (1, 2, 3))

    def chosen(*unreadable: Path) -> Path:
        found = choose_checkpoint(list_checkpoints(tmp_path), unreadable)
        assert found is not None
        return found[0]

    assert chosen() == third and chosen(third) == second and chosen(third, second) == first
    (third / "state").write_bytes(b"")
    assert chosen() == second
    with pytest.raises(UserError, match=r"none of 3 checkpoints can be read; the newest is .*0 bytes, expected 3"):
        chosen(first, second)
    (third / "COMPLETE").write_bytes(b"")
    assert chosen() == second
    with pytest.raises(UserError, match="none of 3 checkpoints"):
        chosen(first, second)
