"""Lineage: random histories of terms, compared with snapshots that the simulation took of its own state."""

from __future__ import annotations

import copy
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoints.journal import (
    BatchFormed,
    GroupDropped,
    GroupOwned,
    GroupSetAside,
    JournalCorrupt,
    JournalRead,
    JournalWriter,
    RunCompleted,
    StepDone,
    read_journals,
)
from checkpoints.lineage import account, collectable_payloads, final_lineage, fork_steps, reusable_groups
from checkpoints.manifest import Counters, JournalPosition, LineageSegment, Manifest, extend_lineage, started_after
from tests.exploring import examples


@dataclass
class State:
    """What a controller knows at one moment; the truth that the journals have to lead back to."""

    step: int = 0
    next_id: int = 0
    trained: dict[int, list[int]] = field(default_factory=dict)  # id -> steps
    dropped: set[int] = field(default_factory=set)
    set_aside: set[int] = field(default_factory=set)
    open: set[int] = field(default_factory=set)
    lineage: tuple[LineageSegment, ...] = ()
    path: tuple[tuple[int, int], ...] = ()  # every (term, step) that led here


def owned(group_id: int) -> GroupOwned:
    return GroupOwned(
        group_id=group_id,
        attempt=0,
        path=f"spool/{group_id}",
        n_bytes=0,
        crc32=0,
        oldest=None,
        newest=None,
        rewards=(),
        n_tokens=0,
    )


class History:
    """A run over several terms with real journals, in which the trainer and the job die and zombies write on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.term = 0
        self.state = State()
        self.writers: dict[int, JournalWriter] = {}
        self.saved: dict[tuple[int, int], tuple[Manifest, State]] = {}
        self.seen: dict[int, State] = {}  # last state of every term, whatever became of it
        self.start_term(None)

    def start_term(self, base: tuple[Manifest, State] | None) -> None:
        self.term += 1
        started = started_after(base[0] if base else None, term=self.term, attempt=self.term)
        self.writers[self.term] = JournalWriter.create(self.folder, started)
        self.state = copy.deepcopy(base[1]) if base else State()
        self.base = copy.deepcopy(self.state)

    @property
    def journal(self) -> JournalWriter:
        return self.writers[self.term]

    def admit(self) -> None:
        self.state.open.add(self.state.next_id)
        self.state.next_id += 1

    def end(self, group_id: int, *, dropped: bool) -> None:
        self.state.open.discard(group_id)
        if dropped:
            self.state.dropped.add(group_id)
            self.journal.append(GroupDropped(group_id=group_id, reason="stale"))
        else:
            self.state.set_aside.add(group_id)
            self.journal.append(GroupSetAside(group_id=group_id, reason="failed"))

    def train(self, ids: list[int], *, done: bool = True) -> None:
        step = self.state.step + 1
        batch = BatchFormed(step=step, group_ids=tuple(ids), staleness=(1,) * len(ids))
        self.journal.append(*(owned(i) for i in ids), batch)
        if done:  # otherwise the trainer dies in it, and the batch was only formed
            self.state.step = step
            self.state.path += ((self.term, step),)
            self.state.open -= set(ids)
            for i in ids:
                self.state.trained.setdefault(i, []).append(step)
            self.journal.append(StepDone(step=step, version=(self.term, step)))
        self.seen[self.term] = copy.deepcopy(self.state)

    def save(self) -> None:
        s = self.state
        lineage = extend_lineage(self.base.lineage, self.term, s.step)
        manifest = Manifest(
            run="r",
            term=self.term,
            step=s.step,
            attempt=self.term,
            lineage=lineage,
            counters=Counters(next_group_id=s.next_id, pending=tuple(sorted(s.open))),
            journal=JournalPosition(term=self.term, offset=self.journal.offset),
            files={},
        )
        self.saved[self.term, s.step] = (manifest, copy.deepcopy(s) if s.lineage == lineage else self._with(lineage))

    def _with(self, lineage: tuple[LineageSegment, ...]) -> State:
        snapshot = copy.deepcopy(self.state)
        snapshot.lineage = lineage
        return snapshot

    def trainer_lost(self) -> None:
        """The trainer goes back to this term's last manifest, or to its base; what was dropped meanwhile stays so."""
        own = [step for term, step in self.saved if term == self.term]
        target = self.saved[self.term, max(own)][1] if own else self.base
        now = self.state
        undone = {i for i, steps in now.trained.items() if any(s > target.step for s in steps)}
        now.trained = {i: [s for s in steps if s <= target.step] for i, steps in now.trained.items()}
        now.trained = {i: steps for i, steps in now.trained.items() if steps}
        now.open |= undone - now.trained.keys()
        now.step, now.path = target.step, target.path

    def newest(self) -> tuple[Manifest, State] | None:
        return self.saved[max(self.saved)] if self.saved else None

    def close(self) -> None:
        for writer in self.writers.values():
            writer.close()


actions = st.lists(
    st.sampled_from(
        ["admit", "admit", "admit", "train", "train", "form", "drop", "aside", "save", "lost", "new term", "zombie"]
    ),
    max_size=60,
)


def play(history: History, names: list[str], data: st.DataObject) -> None:
    for name in names:
        state = history.state
        some = sorted(state.open)
        match name:
            case "admit":
                history.admit()
            case "train" | "form" if some:
                ids = data.draw(st.lists(st.sampled_from(some), min_size=1, max_size=3, unique=True))
                history.train(ids, done=name == "train")
            case "drop" | "aside" if some:
                history.end(data.draw(st.sampled_from(some)), dropped=name == "drop")
            case "save":
                history.save()
            case "lost":
                history.trainer_lost()
            case "new term":
                bases = [None, *sorted(history.saved)]
                base = data.draw(st.sampled_from(bases[-3:]))  # the newest may have been unreadable
                history.start_term(history.saved[base] if base else None)
            case "zombie" if history.term > 1:
                old = history.writers[data.draw(st.integers(1, history.term - 1))]
                old.append(BatchFormed(step=99, group_ids=(0,), staleness=(0,)), GroupDropped(group_id=0, reason="z"))


@settings(max_examples=examples(150))
@given(names=actions, data=st.data())
def test_journals_lead_back_to_the_saved_state(names: list[str], data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        history = History(Path(folder))
        play(history, names, data)
        history.close()
        journals = read_journals(Path(folder))
    newest = history.newest()
    counted = account(journals, newest[0] if newest else None)
    if newest is None:
        assert (counted.trained, counted.lost, counted.step, counted.sound) == ({}, (), 0, True)
        return
    manifest, truth = newest
    assert {i: [s] for i, s in counted.trained.items()} == truth.trained
    assert counted.dropped.keys() == truth.dropped
    assert counted.set_aside.keys() == truth.set_aside
    assert counted.pending == truth.open
    assert counted.sound
    assert counted.step == truth.step
    assert sum(t.steps_on_lineage for t in counted.terms) == truth.step
    assert sum(t.groups_trained for t in counted.terms) == len(truth.trained)
    assert [(s.term, n) for s in counted.segments for n in range(s.first_step, s.last_step + 1)] == list(truth.path)
    again = reusable_groups(journals, counted)
    assert not again.keys() & (truth.trained.keys() | truth.dropped | truth.set_aside)
    assert not set(collectable_payloads(journals, counted)) & {f"spool/{i}" for i in again}

    forks = fork_steps(journals, counted.segments)
    on_path = set(truth.path)
    for term, state in history.seen.items():  # the common beginning, found step by step
        shared = [step for where, step in state.path if (where, step) in on_path]
        assert min(forks[term], state.step) == max(shared, default=0)
    assert manifest.lineage == truth.lineage


@settings(max_examples=examples(80))
@given(names=actions, data=st.data(), fault=st.sampled_from(["lose", "twice", "still pending", "dropped too"]))
def test_faults_are_found(names: list[str], data: st.DataObject, fault: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        history = History(Path(folder))
        play(history, names, data)
        history.admit()
        history.admit()
        victim = history.state.next_id - 1
        history.train([victim - 1, victim])
        match fault:
            case "lose":
                history.admit()
                victim += 1
                history.state.open.discard(victim)
            case "twice":
                history.train([victim])
            case "still pending":
                history.state.open.add(victim)
            case "dropped too":
                history.end(victim, dropped=True)
        history.save()
        history.close()
        counted = account(read_journals(Path(folder)), history.saved[history.term, history.state.step][0])
    assert not counted.sound
    assert counted.lost == ((victim,) if fault == "lose" else ())
    assert counted.twice == ((victim,) if fault == "twice" else ())
    assert counted.conflicts == ((victim,) if fault in ("still pending", "dropped too") else ())


def small_run(folder: Path) -> tuple[History, Manifest, dict[int, JournalRead]]:
    """Term 1: steps 1 to 3, saved at 2. Term 2: steps 3 and 4, saved at 4, completed."""
    history = History(folder)
    for step in (1, 2, 3):
        history.admit()
        history.train([step - 1])
        if step == 2:
            history.save()
    history.start_term(history.newest())
    for step in (3, 4):
        history.admit()
        history.train([step - 1])
    history.save()
    history.journal.append(RunCompleted(step=4))
    history.close()
    return history, history.saved[2, 4][0], read_journals(folder)


def test_a_small_run_by_hand(tmp_path: Path) -> None:
    _, manifest, journals = small_run(tmp_path)
    counted = account(journals, manifest)
    assert counted.trained == {0: 1, 1: 2, 2: 3, 3: 4}
    assert counted.completed
    assert counted.unsaved_steps == 0
    assert [(t.term, t.base, t.steps_done, t.steps_on_lineage, t.groups_owned) for t in counted.terms] == [
        (1, (0, 0), 3, 2, 3),
        (2, (1, 2), 2, 2, 2),
    ]
    assert fork_steps(journals, counted.segments) == {1: 2, 2: 4}
    assert reusable_groups(journals, counted) == {}


def test_steps_behind_the_manifest_are_counted_apart(tmp_path: Path) -> None:
    history, _, journals = small_run(tmp_path)
    counted = account(journals, history.saved[1, 2][0])  # as if term 2 had not saved
    assert counted.trained == {0: 1, 1: 2}
    assert counted.unsaved_steps == 2
    assert not counted.completed
    assert sorted(reusable_groups(journals, counted)) == [2, 3]
    assert sorted(collectable_payloads(journals, counted)) == ["spool/0", "spool/1"]
    assert account(journals, None).unsaved_steps == 3  # term 1 is the newest that starts afresh


def test_an_rl_step_without_a_batch_is_reported(tmp_path: Path) -> None:
    history = History(tmp_path)
    history.state.step = 2  # two SFT steps, which have no batches
    history.admit()
    history.train([0])
    history.save()
    history.close()
    manifest = history.saved[1, 3][0]
    journals = read_journals(tmp_path)
    assert account(journals, manifest).missing_steps == (1, 2)
    counters = Counters(next_group_id=1, sft_steps=2)
    sft = Manifest(**{**{f: getattr(manifest, f) for f in manifest.__struct_fields__}, "counters": counters})
    assert account(journals, sft).sound


def test_journals_that_contradict_the_manifest_are_refused(tmp_path: Path) -> None:
    _, manifest, journals = small_run(tmp_path)
    with pytest.raises(JournalCorrupt, match="journal of term 1 is missing"):
        final_lineage({2: journals[2]}, manifest)
    short = JournalRead(2, journals[2].entries[:1], journals[2].entries[0].end, 0)
    with pytest.raises(JournalCorrupt, match="good bytes"):
        final_lineage({1: journals[1], 2: short}, manifest)
    fields = {f: getattr(manifest, f) for f in manifest.__struct_fields__}
    other = Manifest(**fields | {"lineage": (LineageSegment(term=2, first_step=1, last_step=4),)})
    with pytest.raises(JournalCorrupt, match="the manifest says"):
        final_lineage(journals, other)


def test_a_dead_term_on_a_dead_term_left_where_the_first_one_did(tmp_path: Path) -> None:
    history = History(tmp_path)
    for save in (True, False, True):  # term 1: saved at 1; term 2 from there: saved at 3; term 3 from there
        for _ in range(2 if history.term > 1 else 1):
            history.admit()
            history.train([history.state.next_id - 1])
        if history.term < 3:
            history.save()
            history.start_term(history.newest())
        assert save or history.term == 3
    history.start_term(history.saved[1, 1])  # term 4 goes back to the first manifest
    history.save()
    history.close()
    journals = read_journals(tmp_path)
    segments = final_lineage(journals, history.saved[4, 1][0])
    assert fork_steps(journals, segments) == {1: 1, 2: 1, 3: 1, 4: 1}


def test_a_batch_of_an_earlier_step_changes_nothing(tmp_path: Path) -> None:
    history = History(tmp_path)
    history.admit()
    history.admit()
    history.train([0])
    history.save()
    history.start_term(history.newest())
    history.journal.append(BatchFormed(step=1, group_ids=(1,), staleness=(0,)))
    history.save()
    history.close()
    assert account(read_journals(tmp_path), history.saved[2, 1][0]).trained == {0: 1}
