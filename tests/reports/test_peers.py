"""What users of comparable systems ran into, as situations of this project's controller, buffer and supervisor."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from checkpoints.journal import GroupSetAside, JournalWriter, StepDone, TermStarted, read_journals
from checkpoints.manifest import (
    Counters,
    JournalPosition,
    Manifest,
    extend_lineage,
    list_checkpoints,
    publish_manifest,
)
from miles_hpc.control.terms import claim_attempt, claim_incarnation, claim_term
from miles_hpc.controller.recovery import choose_checkpoint, plan_start
from miles_hpc.core import exits
from miles_hpc.core.errors import UserError
from miles_hpc.core.load import validate
from miles_hpc.core.messages import RestartHost
from miles_hpc.core.paths import RunPaths
from miles_hpc.core.types import WeightVersion
from miles_hpc.dataflow.buffer import GroupState
from miles_hpc.dataflow.source import PromptSource
from tests.unit.runs import make_run, make_site
from tests.unit.test_buffer import TERM, buffer, own
from tests.unit.test_supervisor_steps import WAIT_S, Starter, opened, tell


@pytest.mark.parametrize("role", ["trainer", "rollout"])
def test_a_role_that_does_not_come_up_ends_the_allocation_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    """The others don't hold the nodes until the time limit."""
    monkeypatch.setattr("miles_hpc.controller.supervisor._RESTART_PAUSE_S", 0.01)
    monkeypatch.setattr("miles_hpc.controller.supervisor._LONGEST_PAUSE_S", 0.02)

    async def main() -> None:
        starter = Starter(tmp_path)
        supervisor = opened(starter)
        allowed = starter.run.control.max_role_restarts
        for n in range(allowed + 1):
            step = [step for step in starter.steps if role in step.hosts][-1]
            step.process.finish(1)  # type: ignore[attr-defined]
            if n < allowed:
                await starter.until(len(starter.started) + 1)
        assert supervisor._failed is not None
        code, why = await asyncio.wait_for(supervisor._failed, WAIT_S)
        assert code == exits.FAILED
        assert why.startswith(f"role {role} was started {allowed + 1} times: step step-") and "ended with 1" in why

    asyncio.run(main())


def test_a_host_that_is_lost_is_asked_for_once(tmp_path: Path) -> None:
    """Two words about one loss, from the step's end and from the silence, start one agent."""

    async def main() -> None:
        starter = Starter(tmp_path)
        supervisor = opened(starter)
        lost = RestartHost(role="rollout", host="r1", incarnation=1, reason="silent")
        await tell(supervisor, lost)
        await tell(supervisor, lost)
        assert starter.started[3:] == [{"rollout": ("r1",)}]

    asyncio.run(main())


def manifest(step: int, term: int = 1, offset: int = 0, **counters: object) -> Manifest:
    return Manifest(
        run="r",
        term=term,
        step=step,
        attempt=1,
        lineage=extend_lineage((), term, step),
        counters=Counters(**{"next_group_id": 0, **counters}),  # type: ignore[arg-type]
        journal=JournalPosition(term=term, offset=offset),
        files={},
    )


def test_a_checkpoint_that_is_still_being_written_is_nobodys_start(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    whole, half = paths.checkpoint(1, 4), paths.checkpoint(1, 8)
    for folder in (whole, half):
        folder.mkdir(parents=True)
        (folder / "rank0").write_bytes(b"weights")
    publish_manifest(whole, manifest(4), lambda: None)
    found = choose_checkpoint(list_checkpoints(paths.checkpoints))
    assert found is not None and (found[0], found[1].step) == (whole, 4)
    publish_manifest(half, manifest(8), lambda: None)
    found = choose_checkpoint(list_checkpoints(paths.checkpoints))
    assert found is not None and found[1].step == 8


def test_one_group_that_never_ends_holds_up_no_batch() -> None:
    b = buffer(batch_groups=2, max_admitted=4, max_staleness=2)
    b.admit(0)
    b.start(0, "h1")  # a member of it hangs
    trained = []
    for step in range(12):
        for group_id in (1 + 2 * step, 2 + 2 * step):
            own(b, group_id, step)
        batch, _ = b.form_batch(WeightVersion(TERM, step))
        assert batch is not None
        trained += [group.group_id for group in batch.groups]
        b.trained(batch.step)
        b.commit(batch.step)
    assert sorted(trained) == list(range(1, 25))
    assert b.state(0) is GroupState.GENERATING and b.live == 1


def test_a_group_that_was_set_aside_is_not_drawn_again_after_a_restart(tmp_path: Path) -> None:
    """Nor is one that was on its way forgotten."""
    paths = RunPaths(tmp_path)
    b, source = buffer(batch_groups=2), PromptSource()
    with JournalWriter.create(paths.journal, TermStarted(term=TERM, attempt=1)) as journal:
        for group_id in source.take(4):
            if group_id < 2:
                journal.append(*own(b, group_id, 0))
            else:
                b.admit(group_id)
        for attempt in range(2):  # one member of it is stuck each time
            assert b.start(2, "h1") == attempt
            records = b.fail(2, attempt, "stuck")
        assert records == (GroupSetAside(group_id=2, reason="stuck"),)
        batch, formed = b.form_batch(WeightVersion(TERM, 0))
        assert batch is not None
        journal.append(*records, *formed, StepDone(step=1, version=(TERM, 1)))
        b.trained(1)
        pending = b.pending_ids(1)
        saved = manifest(1, TERM, journal.offset, next_group_id=source.next_group_id, pending=pending)
    plan = plan_start((paths.checkpoint(TERM, 1), saved), read_journals(paths.journal), reuse=True)
    assert plan.pending == (3,)
    assert PromptSource.resumed(plan.next_group_id, plan.pending).take(3) == (3, 4, 5)


def test_depth_and_staleness_are_two_settings() -> None:
    """A pipeline of eight batches under a cap of one step admits what can be used in time, and no more."""
    deep, shallow = (buffer(batch_groups=4, max_admitted=n, max_staleness=1) for n in (32, 4))
    assert (deep.grants(0), shallow.grants(0)) == (8, 4)
    assert buffer(batch_groups=4, max_admitted=32, max_staleness=7).grants(0) == 32


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        (["rollout.max_trajectory_tokens=300", "train.row_tokens=256"], "the longest trajectory must fit into one row"),
        (["train.max_tokens_per_microbatch=200"], "a microbatch holds at least one row"),
    ],
)
def test_the_longest_trajectory_is_reckoned_with_before_the_run(settings: list[str], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        validate(make_run(*settings), make_site())


def test_folders_carry_attempt_term_and_incarnation(tmp_path: Path) -> None:
    """Whatever starts again, and however often, writes where nobody has written."""
    paths = RunPaths(tmp_path)
    attempts = [claim_attempt(paths) for _ in range(2)]
    terms = [claim_term(paths, attempts[-1]) for _ in range(2)]
    incarnations = [claim_incarnation(paths, attempts[-1], "rollout-h") for _ in range(2)]
    places = [paths.attempt(a) for a in attempts] + [paths.term(t) for t in terms]
    places += [paths.checkpoint(t, 8) for t in terms]
    assert len(set(places)) == 6 and len(set(incarnations)) == 2
