"""Events -> RunStory. See `story` for what the result means; here is how it is collected.

Events come in any order (files are read one after the other, and a live view reads them as they grow); the reducer
keeps what it needs of each and sorts when a story is asked for. Spans are kept as merged intervals, so that memory
grows with the number of separate busy times, not with the number of events.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from miles_hpc.cli.story import (
    FAULTS,
    ROLES,
    Allocation,
    Evaluation,
    IdleShare,
    Peer,
    RunStory,
    TrainedStep,
    Verdict,
    role_of,
)

__all__ = ["StoryReducer", "reduce_events"]

_BUSY_SPANS = frozenset({"train_step", "sync", "save", "generate", "sandbox", "eval", "sft_data"})
_OBSERVE_S = 1.0  # a share of less time than this says nothing
_COMPACT_AT = 2048  # intervals of one process that are kept before overlapping ones are merged


class _Place(NamedTuple):
    """Where an event comes from. Only the controller's terms follow the run's; an attempt is the same for everybody."""

    attempt: int | None
    term: int


@dataclass
class _Process:
    """What is kept of one process under one term."""

    first: float = math.inf
    last: float = -math.inf
    busy: list[tuple[float, float]] = field(default_factory=list)
    windows: dict[str, tuple[float, float]] = field(default_factory=dict)  # role -> (busy_s, window_s)


class StoryReducer:
    """Takes events in any order, one at a time; `story()` may be called at any moment."""

    def __init__(self) -> None:
        self._metrics: list[tuple[float, int, int, dict[str, float]]] = []  # t, term, step, values
        self._attempts: dict[int, int] = {}  # the controller's term -> attempt
        self._rewinds: list[tuple[float, int]] = []  # t, step
        self._starts: list[dict[str, Any]] = []
        self._ends: list[dict[str, Any]] = []
        self._evaluations: list[Evaluation] = []
        self._evaluation_values: dict[int, tuple[float, dict[str, float]]] = {}  # step -> newest t, metrics
        self._verdicts: list[tuple[float, _Place, str, str, dict[str, Any]]] = []
        self._phases: list[tuple[float, str, int]] = []  # t, phase, first step
        self._processes: dict[tuple[str, _Place], _Process] = {}
        self._first, self._last = math.inf, -math.inf
        self._run_start: dict[str, Any] = {}
        self._complete: dict[str, Any] = {}

    def add(self, event: Mapping[str, Any]) -> None:
        """Take one event in. What is malformed is left out; never raises for data."""
        t = _number(event.get("t"))
        if t is None or not math.isfinite(t):
            return
        term, process, name = (
            _integer(event.get("term")) or 0,
            str(event.get("process", "")),
            str(event.get("name", "")),
        )
        self._first, self._last = min(self._first, t), max(self._last, t)
        place = _Place(_integer(event.get("attempt")), term)
        record = self._processes.setdefault((process, place), _Process())
        record.first, record.last = min(record.first, t), max(record.last, t)
        match event.get("kind"):
            case "metric":
                self._add_metric(t, term, event)
                if place.attempt is not None:
                    self._attempts[term] = place.attempt
            case "span":
                self._add_span(record, name, event)
            case "verdict":
                self._verdicts.append((t, place, process, name, _fields(event)))
                to_step = _integer(event.get("to_step"))
                if name == "rollback" and to_step is not None:
                    self._rewinds.append((t, to_step))
            case "note":
                self._add_note(t, name, record, dict(event))

    def _add_metric(self, t: float, term: int, event: Mapping[str, Any]) -> None:
        step, values = _integer(event.get("step")), event.get("values")
        if step is None or not isinstance(values, dict):
            return
        numbers = _numbers(values)
        # What an evaluation tells comes when its step is long done, so it's no part of the step.
        evaluated = {name: value for name, value in numbers.items() if name.startswith("eval/")}
        if evaluated and t >= self._evaluation_values.get(step, (-math.inf,))[0]:
            self._evaluation_values[step] = (t, evaluated)
        if len(numbers) > len(evaluated) or not values:
            trained = {name: value for name, value in numbers.items() if name not in evaluated}
            self._metrics.append((t, term, step, trained))

    def _add_span(self, record: _Process, name: str, event: Mapping[str, Any]) -> None:
        start, end = _number(event.get("start")), _number(event.get("end"))
        if start is None or end is None or not (math.isfinite(start) and math.isfinite(end)) or end < start:
            return
        record.first, record.last = min(record.first, start), max(record.last, end)
        if name in _BUSY_SPANS:
            record.busy.append((start, end))
            if len(record.busy) >= _COMPACT_AT:
                merged = _merge(record.busy)
                if len(merged) < len(record.busy):
                    record.busy = merged

    def _add_note(self, t: float, name: str, record: _Process, event: dict[str, Any]) -> None:
        match name:
            case "utilisation":
                role = str(event.get("role", ""))
                busy, window = _number(event.get("busy_s")), _number(event.get("window_s"))
                if busy is not None and window is not None and busy >= 0 and 0 < window < math.inf:
                    total = record.windows.get(role, (0.0, 0.0))
                    record.windows[role] = (total[0] + min(busy, window), total[1] + window)
            case "phase":
                self._phases.append((t, str(event.get("phase", "")), _integer(event.get("first_step")) or 1))
            case "allocation_start":
                self._starts.append(event)
            case "allocation_end":
                self._ends.append(event)
            case "evaluation":
                mean = _number(event.get("mean"))
                if mean is not None:
                    step, n = _integer(event.get("step")) or 0, _integer(event.get("n")) or 0
                    by_label = _numbers(event.get("by_label"))
                    self._evaluations.append(
                        Evaluation(
                            t,
                            step,
                            str(event.get("when", "")),
                            n,
                            mean,
                            by_label,
                            n_samples=_integer(event.get("n_samples")) or 1,
                            pass_at={int(k): v for k, v in _numbers(event.get("pass_at")).items() if k.isdecimal()},
                            truncated_ratio=_number(event.get("truncated_ratio")),
                            version_share=_number(event.get("version_share")),
                            lag_steps=_integer(event.get("lag_steps")),
                            duration_s=_number(event.get("duration_s")),
                        )
                    )
            case "term":
                base = _integer(event.get("base_step"))
                if base is not None or event.get("base_step", 0) is None:
                    self._rewinds.append((t, base or 0))
            case "run_start":
                if t >= (_number(self._run_start.get("t")) or -math.inf):
                    self._run_start = event
            case "run_complete":
                if not self._complete or t >= _time_of(self._complete):
                    self._complete = event

    # -------------------------------------------------------------------------------------------- the result

    def story(self) -> RunStory:
        """The story so far; costs time in proportion to steps and verdicts."""
        allocations = self._allocations()
        start = self._run_start
        sft_steps = _integer(start.get("sft_steps"))
        steps, superseded = self._lineage(allocations, sft_steps)
        verdicts = [
            Verdict(t, _attempt(allocations, place, t), process, name, fields)
            for t, place, process, name, fields in self._verdicts
        ]
        verdicts.sort(key=lambda v: (v.t, v.name not in FAULTS, v.process, v.name, str(v.fields)))
        complete = self._complete
        if complete and allocations and allocations[-1].start > _time_of(complete):
            complete = {}  # it was taken up again, with more steps to do
        groups = _integer(complete.get("trained_groups"))
        if groups is None:
            totals = [_integer(s.values.get("data/trained_groups_total")) for s in steps]
            groups = next((n for n in reversed(totals) if n is not None), None)
        known = {"t", "term", "attempt", "process", "kind", "name", "n_steps", "sft_steps", "rollout_batch_size"}
        newest_phase = max(self._phases, default=(0.0, "", 0))[1]
        return RunStory(
            name=str(start.get("run", "") or start.get("run_name", "")),
            n_steps=_integer(start.get("n_steps")),
            sft_steps=sft_steps,
            rollout_batch_size=_integer(start.get("rollout_batch_size")),
            steps=steps,
            superseded=superseded,
            allocations=allocations,
            evaluations=self._lasting_evaluations(),
            verdicts=tuple(verdicts),
            idle=self._idle(allocations, steps + superseded),
            peers=self._peers(allocations, verdicts),
            phase=newest_phase or (steps[-1].phase if steps else ""),
            first_t=self._first if self._processes else None,
            last_t=self._last if self._processes else None,
            complete_t=_number(complete.get("t")),
            trained_groups=groups,
            extra={k: v for k, v in start.items() if k not in known},
        )

    def _allocations(self) -> tuple[Allocation, ...]:
        """One per attempt, ascending; a controller that was started anew in an allocation adds its term to it."""
        by_attempt: dict[int, list[dict[str, Any]]] = {}
        for event in sorted(self._starts, key=_time_of):
            attempt = _integer(event.get("attempt"))
            by_attempt.setdefault(len(by_attempt) + 1 if attempt is None else attempt, []).append(event)
        found = []
        for attempt, starts in sorted(by_attempt.items()):
            ends = [e for e in self._ends if _integer(e.get("attempt")) == attempt]
            end = max(ends, key=_time_of, default={})
            first, newest = starts[0], starts[-1]
            if end and _time_of(end) < _time_of(newest):
                end = {}  # it ended one controller; the allocation went on with the next one
            hosts = newest.get("hosts")
            terms = sorted({_integer(e.get("term")) or 0 for e in starts})
            found.append(
                Allocation(
                    attempt=attempt,
                    job_id=str(newest.get("job_id", "") or ""),
                    restart=_integer(newest.get("restart")) or 0,
                    terms=tuple(terms),
                    start=_time_of(first),
                    end=_time_of(end) if end else None,
                    last_seen=-math.inf,
                    outcome=str(end.get("outcome", "") or ""),
                    reason=str(end.get("reason", "") or ""),
                    time_limit_s=_number(newest.get("time_limit_s")),
                    hosts={str(r): _names(h) for r, h in hosts.items()} if isinstance(hosts, dict) else {},
                )
            )
        last_seen: dict[int, float] = {}
        for (_, place), record in self._processes.items():
            attempt = _attempt(found, place, record.last)
            last_seen[attempt] = max(last_seen.get(attempt, -math.inf), record.last)
        return tuple(replace(a, last_seen=max(a.start, last_seen.get(a.attempt, a.start))) for a in found)

    def _lineage(
        self, allocations: tuple[Allocation, ...], sft_steps: int | None
    ) -> tuple[tuple[TrainedStep, ...], tuple[TrainedStep, ...]]:
        """(steps that count, steps that were undone), both ascending."""
        phases = sorted((first, t, name) for t, name, first in self._phases)

        def phase_of(step: int) -> str:
            named = [name for first, _, name in phases if first <= step]
            return named[-1] if named else ("sft" if step <= (sft_steps or 0) else "rl")

        kept: dict[int, TrainedStep] = {}
        undone: list[TrainedStep] = []
        timeline: list[tuple[float, int, int, int, dict[str, float]]] = [(t, 0, 0, to, {}) for t, to in self._rewinds]
        timeline += [(t, 1, term, step, values) for t, term, step, values in self._metrics]
        timeline.sort(key=lambda e: (*e[:4], sorted(e[4].items(), key=str)))
        for t, is_metric, term, step, values in timeline:
            if not is_metric:
                undone += [kept.pop(s) for s in sorted(kept) if s > step]
                continue
            old = kept.get(step)
            if old is not None and old.term != term:
                undone.append(old)
                old = None
            merged = {**old.values, **values} if old is not None else values
            attempt = _attempt(allocations, _Place(self._attempts.get(term), term), t)
            kept[step] = TrainedStep(step, t, term, attempt, phase_of(step), merged)
        return (
            tuple(kept[s] for s in sorted(kept)),
            tuple(sorted(undone, key=lambda s: (s.step, s.t, s.term))),
        )

    def _lasting_evaluations(self) -> tuple[Evaluation, ...]:
        """Those of weights that weren't undone later; of one that was told again, the newest."""
        newest: dict[int, Evaluation] = {}
        for e in sorted(self._evaluations, key=lambda e: (e.t, e.step, e.when, e.mean)):
            if not any(e.t < t and e.step > step for t, step in self._rewinds):
                newest[e.step] = replace(e, values=self._evaluation_values.get(e.step, (0.0, {}))[1])
        return tuple(sorted(newest.values(), key=lambda e: (e.t, e.step)))

    def _idle(self, allocations: tuple[Allocation, ...], steps: tuple[TrainedStep, ...]) -> tuple[IdleShare, ...]:
        shares = []
        for attempt in [a.attempt for a in allocations] or [0]:
            records = [
                (process, record)
                for (process, place), record in self._processes.items()
                if _attempt(allocations, place, record.last) == attempt
            ]
            for role in ROLES:
                windows = [r.windows[role] for _, r in records if role in r.windows]
                spans = [r for p, r in records if role_of(p) == role and r.busy]
                waits = [s.values for s in steps if s.attempt == attempt and s.phase != "sft"]
                waits = [v for v in waits if "perf/wait_batch_time" in v and v.get("perf/step_time", 0) > 0]
                if windows:
                    busy, observed, evidence = sum(w[0] for w in windows), sum(w[1] for w in windows), "windows"
                elif spans:
                    busy = sum(b - a for r in spans for a, b in _merge(r.busy))
                    observed, evidence = sum(r.last - r.first for r in spans), "spans"
                elif role == "trainer" and waits:
                    observed, evidence = sum(v["perf/step_time"] for v in waits), "steps"
                    busy = observed - sum(v["perf/wait_batch_time"] for v in waits)
                else:
                    continue
                if observed >= _OBSERVE_S and math.isfinite(busy / observed):
                    shares.append(IdleShare(attempt, role, min(1.0, max(0.0, 1 - busy / observed)), observed, evidence))
        return tuple(shares)

    def _peers(self, allocations: tuple[Allocation, ...], verdicts: list[Verdict]) -> tuple[Peer, ...]:
        """Who is known of the newest allocation: by their own events, and by verdicts about them."""
        attempt = allocations[-1].attempt if allocations else 0
        seen: dict[str, float] = {}
        for (process, place), record in self._processes.items():
            if process and _attempt(allocations, place, record.last) == attempt:
                seen[process] = max(seen.get(process, -math.inf), record.last)
        lost: set[str] = set()
        for verdict in verdicts:
            if verdict.attempt != attempt or not verdict.peer:
                continue
            if verdict.name == "joined":
                seen[verdict.peer] = max(seen.get(verdict.peer, -math.inf), verdict.t)
                lost.discard(verdict.peer)
            elif verdict.name == "lost":
                seen.setdefault(verdict.peer, verdict.t)
                lost.add(verdict.peer)  # events of a node that was cut off don't make it alive: only joining does
        return tuple(Peer(p, role_of(p), p not in lost, t) for p, t in sorted(seen.items()))


def reduce_events(events: Iterable[Mapping[str, Any]]) -> RunStory:
    """The story of these events, in whatever order they come."""
    reducer = StoryReducer()
    for event in events:
        reducer.add(event)
    return reducer.story()


def _attempt(allocations: Iterable[Allocation], place: _Place, t: float) -> int:
    """The allocation an event belongs to: the one it names, else by its term, then by time. 0 = none known."""
    if place.attempt is not None:
        return place.attempt
    term = place.term
    claimed = [(a.attempt, max(x for x in a.terms if x <= term), a.start) for a in allocations if a.terms[0] <= term]
    if not claimed:
        return min((a.attempt for a in allocations), default=0)
    newest = max(c[1] for c in claimed)
    same = [c for c in claimed if c[1] == newest]
    started = [c for c in same if c[2] <= t] or same[:1]
    return started[-1][0]


def _merge(intervals: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The union of closed intervals as disjoint ones, ascending."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _numbers(values: Any) -> dict[str, float]:
    return {str(k): n for k, v in values.items() if (n := _number(v)) is not None} if isinstance(values, dict) else {}


def _fields(event: Mapping[str, Any]) -> dict[str, Any]:
    return {str(k): v for k, v in event.items() if k not in ("t", "term", "attempt", "process", "kind", "name")}


def _names(hosts: Any) -> tuple[str, ...]:
    return tuple(str(h) for h in hosts) if isinstance(hosts, list) else ()


def _time_of(event: Mapping[str, Any]) -> float:
    return float(event["t"])


def _number(value: Any) -> float | None:
    """`value` as a float (NaN included: a loss that isn't a number is worth seeing), or None when it isn't one."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return None if isinstance(value, int) and abs(value) >= 1 << 1000 else float(value)


def _integer(value: Any) -> int | None:
    number = _number(value)
    return int(number) if number is not None and abs(number) < 2**53 else None
