"""The group buffer: a state machine against random schedules, and the rules one by one."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from checkpoints.journal import BatchFormed, GroupDropped, GroupOwned, GroupSetAside, Record
from miles_hpc.core.errors import ProtocolError, UserError
from miles_hpc.core.types import GroupPurpose, SampleStatus, WeightVersion
from miles_hpc.dataflow.buffer import GroupBuffer, GroupState, owned_record, summary_of
from miles_hpc.dataflow.filters import ABORTED, STALE, ZERO_STD, reward_nonzero_std
from tests.exploring import examples
from tests.unit.groups import summary

TERM = 3


def buffer(batch_groups: int = 2, max_admitted: int = 8, max_staleness: int = 2, **options: object) -> GroupBuffer:
    return GroupBuffer(
        batch_groups=batch_groups,
        max_admitted=max_admitted,
        max_staleness=max_staleness,
        max_attempts=2,
        term=TERM,
        **options,  # type: ignore[arg-type]
    )


def own(b: GroupBuffer, group_id: int, step: int) -> tuple[Record, ...]:
    """Admit, start and own one group sampled by the weights after `step`."""
    b.admit(group_id)
    attempt = b.start(group_id, "h1")
    return b.own(summary(group_id, attempt, WeightVersion(TERM, step)))


class Life(RuleBasedStateMachine):
    """A controller's life with the buffer: hosts come and go, the trainer is taken back, announcements repeat."""

    @initialize(
        batch_groups=st.integers(1, 3),
        spare=st.integers(0, 5),
        cap=st.integers(0, 3),
        attempts=st.integers(1, 3),
        zero_std=st.booleans(),
    )
    def begin(self, batch_groups: int, spare: int, cap: int, attempts: int, zero_std: bool) -> None:
        self.cap = cap
        self.bound = batch_groups + spare
        self.buffer = GroupBuffer(
            batch_groups=batch_groups,
            max_admitted=self.bound,
            max_staleness=cap,
            max_attempts=attempts,
            term=TERM,
            filters=(reward_nonzero_std,) if zero_std else (),
        )
        self.rollout_step = 0  # weights that engines serve
        self.done_step = 0
        self.saved_step = 0
        self.next_id = 0
        self.sampled: dict[int, tuple[int, int]] = {}  # generating: id -> (attempt, step of its weights)
        self.announced: list[tuple[int, int, int]] = []
        self.batches: dict[int, tuple[int, ...]] = {}  # step -> ids, on the path that counts
        self.ended: dict[int, str] = {}
        self.committed: set[int] = set()

    def note(self, records: tuple[Record, ...]) -> None:
        for record in records:
            match record:
                case GroupDropped(group_id=i, reason=r) | GroupSetAside(group_id=i, reason=r):
                    assert i not in self.ended, "ended twice"
                    self.ended[i] = r
                case BatchFormed(step=s, group_ids=ids):
                    self.batches[s] = ids
                case GroupOwned():
                    pass
                case _:
                    raise AssertionError(record)

    @rule(n=st.integers(1, 4))
    def admit(self, n: int) -> None:
        for _ in range(min(n, self.buffer.grants(self.rollout_step))):
            self.buffer.admit(self.next_id)
            self.next_id += 1

    @rule(host=st.sampled_from(["h1", "h2"]), data=st.data())
    def start(self, host: str, data: st.DataObject) -> None:
        if waiting := self.buffer.waiting:
            group_id, attempt = data.draw(st.sampled_from(waiting))
            assert self.buffer.start(group_id, host) == attempt
            self.sampled[group_id] = (attempt, self.rollout_step)

    @rule(data=st.data(), reward=st.sampled_from([0.0, 1.0]), broken=st.integers(0, 9))
    def announce(self, data: st.DataObject, reward: float, broken: int) -> None:
        if ids := self.buffer.generating():
            group_id = data.draw(st.sampled_from(ids))
            attempt, step = self.sampled[group_id]
            status = SampleStatus.FAILED if broken == 0 else SampleStatus.COMPLETED
            group = summary(group_id, attempt, WeightVersion(TERM, step), (0.0, reward), status=status)
            self.note(self.buffer.own(group))
            self.announced.append((group_id, attempt, step))

    @precondition(lambda self: self.announced)
    @rule(data=st.data())
    def repeat(self, data: st.DataObject) -> None:
        group_id, attempt, step = data.draw(st.sampled_from(self.announced))
        assert self.buffer.own(summary(group_id, attempt, WeightVersion(TERM, step))) == ()

    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        if ids := self.buffer.generating():
            group_id = data.draw(st.sampled_from(ids))
            self.note(self.buffer.fail(group_id, self.sampled[group_id][0], "engine"))

    @rule(host=st.sampled_from(["h1", "h2"]))
    def lose_host(self, host: str) -> None:
        lost = self.buffer.lose_host(host)
        assert all(self.buffer.state(i) is GroupState.ADMITTED for i in lost)
        assert not self.buffer.generating(host)

    @rule()
    def form(self) -> None:
        batch, records = self.buffer.form_batch(WeightVersion(TERM, self.buffer.formed_step))
        self.note(records)
        if batch is not None:
            assert max(batch.staleness) <= self.cap, "used above the cap"
            assert min(batch.staleness) >= 0

    @precondition(lambda self: self.done_step < self.buffer.formed_step)
    @rule()
    def train(self) -> None:
        self.done_step += 1
        assert self.buffer.trained(self.done_step) == tuple(sorted(self.batches[self.done_step]))

    @rule()
    def sync(self) -> None:
        self.rollout_step = self.done_step

    @rule()
    def save(self) -> None:
        self.saved_step = self.done_step
        self.committed |= set(self.buffer.commit(self.saved_step))

    @rule()
    def trainer_lost(self) -> None:
        self.buffer.roll_back(self.saved_step)
        self.batches = {s: ids for s, ids in self.batches.items() if s <= self.saved_step}
        self.done_step = self.saved_step
        self.rollout_step = min(self.rollout_step, self.saved_step)

    @invariant()
    def every_group_is_in_exactly_one_place(self) -> None:
        here = {i for i in range(self.next_id) if self.buffer.state(i) is not None}
        assert not here & self.ended.keys()
        assert not here & self.committed
        assert not self.committed & self.ended.keys()
        assert here | self.ended.keys() | self.committed == set(range(self.next_id))

    @invariant()
    def no_group_is_in_two_batches(self) -> None:
        used = [i for ids in self.batches.values() for i in ids]
        assert len(used) == len(set(used))
        assert self.committed == {i for s, ids in self.batches.items() if s <= self.saved_step for i in ids}

    @invariant()
    def credits_are_kept(self) -> None:
        assert self.buffer.live == len(self.buffer.live_ids)
        assert self.buffer.credits == max(0, self.bound - self.buffer.live)
        assert set(self.buffer.pending_ids(self.saved_step)) == {
            i for i in range(self.next_id) if self.buffer.state(i) is not None
        }


class LifeWithoutRollback(Life):
    """Without roll-backs the bound holds at every moment."""

    trainer_lost = None  # type: ignore[assignment]

    @invariant()
    def never_above_the_bound(self) -> None:
        assert self.buffer.live <= self.bound


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=examples(40), stateful_step_count=60)
TestLifeWithoutRollback = LifeWithoutRollback.TestCase
TestLifeWithoutRollback.settings = settings(max_examples=examples(40), stateful_step_count=60)


@pytest.mark.parametrize("cap", [0, 1, 2, 4])
def test_pacing_discards_nothing_while_groups_finish_in_order(cap: int) -> None:
    b = buffer(batch_groups=4, max_admitted=100, max_staleness=cap)
    next_id, used = 0, []
    for step in range(20):  # engines get every version; generation is as fast as pacing allows
        for _ in range(b.grants(step)):
            own(b, next_id, step)
            next_id += 1
        batch, records = b.form_batch(WeightVersion(TERM, step))
        assert batch is not None
        assert not [r for r in records if isinstance(r, GroupDropped)]
        used += batch.staleness
        b.trained(batch.step)
    assert max(used) == cap  # the cap is used to the full, and nothing was lost to it
    assert b.dropped == {}


def test_with_cap_zero_a_batch_waits_for_its_weights() -> None:
    b = buffer(batch_groups=2, max_admitted=8, max_staleness=0)
    assert b.grants(0) == 2
    b.admit(0)
    assert b.grants(0) == 1
    b.start(0, "h1")
    assert b.grants(0) == 1
    b.own(summary(0, 0, WeightVersion(TERM, 0)))
    own(b, 1, 0)
    assert b.grants(0) == 0
    batch, _ = b.form_batch(WeightVersion(TERM, 0))
    assert batch is not None
    assert b.grants(0) == 0  # the next batch will meet step 1, engines still serve step 0
    b.trained(1)
    assert b.grants(1) == 2


def test_grants_end_with_the_run() -> None:
    b = buffer(batch_groups=2, max_admitted=8, max_staleness=4)
    assert b.grants(0) == 8
    assert b.grants(0, batches_left=1) == 2
    own(b, 0, 0)
    assert b.grants(0, batches_left=1) == 1
    assert b.grants(0, batches_left=0) == 0


def test_a_straggler_above_the_cap_is_dropped_with_a_reason() -> None:
    b = buffer(batch_groups=1, max_admitted=8, max_staleness=1)
    b.admit(0)
    b.start(0, "h1")  # sampled by step 0, announced late
    for step in range(2):
        own(b, step + 1, step)
        batch, _ = b.form_batch(WeightVersion(TERM, step))
        assert batch is not None
        b.trained(batch.step)
    b.own(summary(0, 0, WeightVersion(TERM, 0)))
    assert b.form_batch(WeightVersion(TERM, 2)) == (None, (GroupDropped(group_id=0, reason=STALE),))
    assert b.dropped == {STALE: 1}


def test_the_most_urgent_groups_go_first() -> None:
    b = buffer(batch_groups=2, max_staleness=2, formed_step=5)
    for group_id, step in ((0, 5), (1, 4), (2, 3), (3, 5)):
        own(b, group_id, step)
    batch, records = b.form_batch(WeightVersion(TERM, 5))
    assert batch is not None
    assert [g.group_id for g in batch.groups] == [2, 1]
    assert batch.staleness == (2, 1)
    assert records == (BatchFormed(step=6, group_ids=(2, 1), staleness=(2, 1)),)


def test_a_mixed_group_is_as_old_as_its_oldest_token() -> None:
    b = buffer(formed_step=5)
    young, old = summary(0, 0, WeightVersion(TERM, 5)), summary(0, 0, WeightVersion(TERM, 3))
    mixed = msgspec.structs.replace(young, trajectories=young.trajectories + old.trajectories)
    assert b.staleness(mixed, 5) == 2
    assert b.staleness(summary(0), 5) == 0  # no engine sampled


def test_weights_of_a_dead_lineage_count_both_ways() -> None:
    # Term 1 did 10 steps, but this run continues from its step 6; term 2 left at step 6 and did 3 steps.
    b = buffer(formed_step=8, forks={1: 6, 2: 6})
    assert b.staleness(summary(0, 0, WeightVersion(1, 5)), 8) == 3
    assert b.staleness(summary(0, 0, WeightVersion(1, 9)), 8) == (9 - 6) + (8 - 6)
    assert b.staleness(summary(0, 0, WeightVersion(2, 7)), 8) == (7 - 6) + (8 - 6)
    assert b.staleness(summary(0, 0, WeightVersion(TERM, 7)), 8) == 1


def test_only_what_a_manifest_contains_is_forgotten() -> None:
    b = buffer(batch_groups=1)
    for group_id in range(3):
        own(b, group_id, 0)
    for step in (1, 2):
        b.form_batch(WeightVersion(TERM, step - 1))
        b.trained(step)
    assert b.live_ids == (2,)
    assert b.commit(1) == (0,)
    assert b.pending_ids(1) == (1, 2)
    assert b.roll_back(1) == (1,)
    own(b, 3, 0)
    b.drop(3, "test")
    assert b.pending_ids(9) == (1, 2)  # in no batch any more
    assert b.form_batch(WeightVersion(TERM, 1))[0] is not None
    assert b.counts()[GroupState.BATCHED] == 1


def test_failures_set_aside_but_a_lost_host_doesn_t() -> None:
    b = buffer()
    b.admit(7)
    for attempt in range(5):
        assert b.start(7, "h1") == attempt
        assert b.lose_host("h1") == (7,)
    assert b.start(7, "h1") == 5
    b.hand_back(7, 4)
    assert b.generating() == (7,)
    b.hand_back(7, 5)
    assert b.waiting == ((7, 6),)
    assert b.fail(7, 5, "late news") == ()  # nobody is at work on it
    assert b.start(7, "h2") == 6
    assert b.own(summary(7, 5, WeightVersion(TERM, 0))) == ()  # of a host that was given up
    assert b.state(7) is GroupState.GENERATING
    assert b.fail(7, 6, "environment") == ()
    assert b.start(7, "h2") == 7
    assert b.fail(7, 6, "environment") == ()  # of the attempt before
    assert b.fail(7, 7, "environment") == (GroupSetAside(group_id=7, reason="environment"),)
    assert b.live == 0
    assert b.set_aside == {"environment": 1}


def test_aborted_trajectories_are_sampled_again() -> None:
    b = buffer()
    b.admit(1)
    for attempt, expected in ((0, ()), (1, (GroupSetAside(group_id=1, reason=ABORTED),))):
        b.start(1, "h1")
        assert b.own(summary(1, attempt, WeightVersion(TERM, 0), status=SampleStatus.ABORTED)) == expected


def test_filters_drop_with_their_reason() -> None:
    b = buffer(filters=(reward_nonzero_std,))
    b.admit(1)
    b.start(1, "h1")
    assert b.own(summary(1, 0, WeightVersion(TERM, 0), (1.0, 1.0))) == (GroupDropped(group_id=1, reason=ZERO_STD),)
    assert b.state(1) is None


def test_a_later_term_takes_groups_over() -> None:
    record = owned_record(summary(4, 1, WeightVersion(1, 2)))
    assert (record.oldest, record.newest, record.n_tokens) == ((1, 2), (1, 2), 20)
    b = buffer(batch_groups=1, formed_step=2, forks={1: 2})
    assert b.adopt(summary_of(record)) == (record,)
    batch, _ = b.form_batch(WeightVersion(TERM, 2))
    assert batch is not None
    assert batch.groups == (summary_of(record),)


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(UserError, match="max_admitted_batches"):
        buffer(batch_groups=4, max_admitted=3)
    b = buffer(batch_groups=1, max_admitted=1)
    b.admit(1)
    with pytest.raises(ProtocolError, match="admission credits"):
        b.admit(2)
    with pytest.raises(ProtocolError, match="admitted already"):
        b.admit(1)
    b.start(1, "h1")
    with pytest.raises(ProtocolError, match="expected admitted"):
        b.start(1, "h2")
    with pytest.raises(ProtocolError, match="not for training"):
        b.own(summary(1, purpose=GroupPurpose.EVAL))
    with pytest.raises(ProtocolError, match="expected step 1"):
        b.form_batch(WeightVersion(TERM, 4))
    with pytest.raises(ProtocolError, match="no batch of it"):
        b.trained(1)
    with pytest.raises(ProtocolError, match="can't go back"):
        b.roll_back(1)
