"""The roster: losses with evidence, rejoining, and fencing by incarnation."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from miles_hpc.control.roster import Lost, Rejoined, Roster, Superseded
from miles_hpc.core.errors import FencedError
from miles_hpc.core.transport import PeerIdentity
from tests.exploring import examples


def identity(name: str, incarnation: int = 0, *, term: int = 1, role: str = "rollout", pid: int = 1) -> PeerIdentity:
    return PeerIdentity(
        role=role, name=name, host=f"host-{name}", pid=pid, attempt=1, term=term, incarnation=incarnation
    )


def test_silence_is_a_loss_with_its_length() -> None:
    roster = Roster(lost_after_s=5.0)
    assert roster.joined(identity("a"), 100.0) == []
    roster.heard("a", 103.0)
    assert roster.tick(107.9) == []
    (verdict,) = roster.tick(108.2)
    assert isinstance(verdict, Lost)
    assert (verdict.name, verdict.evidence, verdict.at) == ("a", "no heartbeat for 5.2 s", 108.2)
    assert roster.tick(200.0) == []
    assert roster.present() == []


def test_closed_endpoint_is_a_loss_at_once_and_told_once() -> None:
    roster = Roster(lost_after_s=5.0)
    roster.joined(identity("a"), 0.0)
    (verdict,) = roster.closed("a", "connection reset", 0.1)
    assert verdict.evidence == "endpoint closed: connection reset"
    assert roster.closed("a", "again", 0.2) == []
    assert roster.tick(50.0) == []
    assert roster.closed("nobody", "x", 0.2) == []


def test_a_lost_member_has_to_join_again() -> None:
    roster = Roster(lost_after_s=5.0)
    roster.joined(identity("a"), 0.0)
    roster.tick(6.0)
    roster.heard("a", 6.5)
    assert roster.present() == []
    (verdict,) = roster.joined(identity("a"), 7.0)
    assert isinstance(verdict, Rejoined)
    assert verdict.evidence == "was lost: no heartbeat for 6.0 s"
    assert roster.present() == [identity("a")]


def test_newer_incarnation_fences_the_older_one() -> None:
    roster = Roster(lost_after_s=5.0)
    roster.joined(identity("a", 1, pid=10), 0.0)
    (verdict,) = roster.joined(identity("a", 2, pid=20), 1.0)
    assert isinstance(verdict, Superseded)
    assert (verdict.identity.pid, verdict.by.pid) == (10, 20)
    with pytest.raises(FencedError, match=r"incarnation 1 of term 1 is older than incarnation 2 of term 1"):
        roster.joined(identity("a", 1, pid=10), 2.0)
    assert roster.closed("a", "the old socket", 2.0, incarnation=1) == []
    assert [p.pid for p in roster.present()] == [20]


def test_fencing_outlives_the_loss_of_the_newer_one() -> None:
    roster = Roster(lost_after_s=5.0)
    roster.joined(identity("a", 2), 0.0)
    roster.closed("a", "gone", 1.0)
    with pytest.raises(FencedError):
        roster.joined(identity("a", 1), 2.0)


def test_term_counts_before_incarnation() -> None:
    roster = Roster(lost_after_s=5.0)
    roster.joined(identity("a", 7, term=1), 0.0)
    roster.joined(identity("a", 0, term=2), 1.0)
    with pytest.raises(FencedError):
        roster.joined(identity("a", 8, term=1), 2.0)


def test_present_by_role() -> None:
    roster = Roster(lost_after_s=5.0)
    for name, role in (("b", "rollout"), ("a", "rollout"), ("c", "trainer")):
        roster.joined(identity(name, role=role), 0.0)
    assert [p.name for p in roster.present("rollout")] == ["a", "b"]
    assert [p.name for p in roster.present()] == ["a", "b", "c"]


names = st.sampled_from(["a", "b", "c"])


class RosterMachine(RuleBasedStateMachine):
    """Compares the roster with the plainest model: newest incarnation, last sign of life, lost or not."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.roster = Roster(lost_after_s=5.0)
        self.newest: dict[str, int] = {}
        self.alive: dict[str, float] = {}

    @rule(seconds=st.floats(0.0, 4.0))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(name=names, incarnation=st.integers(0, 4))
    def joins(self, name: str, incarnation: int) -> None:
        known = self.newest.get(name)
        if known is not None and incarnation < known:
            with pytest.raises(FencedError):
                self.roster.joined(identity(name, incarnation), self.now)
            return
        verdicts = self.roster.joined(identity(name, incarnation), self.now)
        if known is None:
            assert verdicts == []
        elif name in self.alive and incarnation > known:
            assert [type(v) for v in verdicts] == [Superseded]
        else:
            assert [type(v) for v in verdicts] == [Rejoined]
        self.newest[name] = incarnation
        self.alive[name] = self.now

    @rule(name=names)
    def is_heard(self, name: str) -> None:
        self.roster.heard(name, self.now)
        if name in self.alive:
            self.alive[name] = self.now

    @rule(name=names)
    def closes(self, name: str) -> None:
        verdicts = self.roster.closed(name, "x", self.now)
        assert [v.name for v in verdicts] == ([name] if name in self.alive else [])
        self.alive.pop(name, None)

    @rule()
    def ticks(self) -> None:
        silent = {name for name, last in self.alive.items() if self.now - last >= 5.0}
        verdicts = self.roster.tick(self.now)
        assert {v.name for v in verdicts} == silent
        assert all(isinstance(v, Lost) and v.evidence.startswith("no heartbeat for") for v in verdicts)
        for name in silent:
            del self.alive[name]

    @invariant()
    def agrees_with_the_model(self) -> None:
        assert [p.name for p in self.roster.present()] == sorted(self.alive)
        assert {n: m.identity.incarnation for n, m in self.roster.members.items()} == self.newest


TestRosterMachine = RosterMachine.TestCase
TestRosterMachine.settings = settings(max_examples=examples(60), stateful_step_count=40)
