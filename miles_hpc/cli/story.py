"""What happened in a run, reduced from its events: the one source of numbers for `watch` and `report`.

    events/*.jsonl -> StoryReducer.add(event) ... -> StoryReducer.story() -> RunStory (frozen)

The result is a function of the set of events, not of the order in which files are read. Anything may be missing or
malformed (a run that only began, a line cut by a kill): such an event is left out, nothing is guessed.

Lineage. A step can be trained twice when a run goes back to an older checkpoint. A verdict `rollback` and a note
`term` say from which step the run went on; what was trained beyond it before that moment is `superseded`.

Idle share of a role in one allocation, by the best evidence at hand:

    windows   notes `utilisation`: 1 - sum(busy_s) / sum(window_s)
    spans     1 - union(busy spans) / (last - first event), summed over the role's processes; `wait_batch` isn't busy
    steps     trainer only: sum(perf/wait_batch_time) / sum(perf/step_time)
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

__all__ = [
    "FAULTS",
    "ROLES",
    "Allocation",
    "Evaluation",
    "IdleShare",
    "Peer",
    "RunStory",
    "TrainedStep",
    "Verdict",
    "role_of",
]

#: Roles whose use of nodes is accounted, in the order of the job's components.
ROLES = ("trainer", "rollout", "sandbox")
#: Verdicts that tell of something that broke or was undone.
FAULTS = frozenset({"lost", "fenced", "rollback"})

_ROUTINE = frozenset({"engine_synced"})
_FAILED = frozenset({"failed", "error", "cancelled"})
_ROLE = re.compile("|".join((*ROLES, "controller", "supervisor")))


@dataclass(frozen=True)
class TrainedStep:
    """One optimizer step; `values` are the controller's metrics by name (perf/... in seconds)."""

    step: int
    t: float  # epoch s at which it was reported
    term: int
    attempt: int  # 0 = no allocation known
    phase: str  # sft | rl
    values: Mapping[str, float]


@dataclass(frozen=True)
class Allocation:
    """One Slurm start. `end` is None while it runs, and also when it was killed before it could say so."""

    attempt: int
    job_id: str
    restart: int
    terms: tuple[int, ...]
    start: float  # epoch s
    end: float | None
    last_seen: float  # epoch s of the last event of its terms
    outcome: str
    reason: str
    time_limit_s: float | None
    hosts: Mapping[str, tuple[str, ...]]  # by role

    @property
    def failed(self) -> bool:
        """Whether it says that it ended for good without finishing the run."""
        return self.outcome.lower() in _FAILED

    @property
    def closed(self) -> float:
        """Epoch second up to which it is known to have lived."""
        return max(self.start, self.last_seen if self.end is None else self.end)


@dataclass(frozen=True)
class Evaluation:
    """Mean reward over `n` held-out prompts, and what else was told of them."""

    t: float
    step: int
    when: str  # before | during | after | sft_only
    n: int
    mean: float
    by_label: Mapping[str, float]
    n_samples: int = 1  # episodes of each prompt
    pass_at: Mapping[int, float] = field(default_factory=dict)  # k -> pass@k
    truncated_ratio: float | None = None
    version_share: float | None = None  # of the tokens: those that the evaluated weights sampled
    lag_steps: int | None = None  # steps done until the result was there
    duration_s: float | None = None
    values: Mapping[str, float] = field(default_factory=dict)  # its metrics by name (eval/...)

    @property
    def title(self) -> str:
        """When it was, in words."""
        return f"at step {self.step}" if self.when == "during" else self.when.replace("_", " ")

    @property
    def size(self) -> str:
        """How many episodes it had, in words."""
        return f"{self.n} episodes" if self.n_samples == 1 else f"{self.n} prompts × {self.n_samples} episodes"


@dataclass(frozen=True)
class Verdict:
    """A decision of the run, with its fields as they were written."""

    t: float
    attempt: int
    process: str
    name: str
    fields: Mapping[str, Any]

    @property
    def peer(self) -> str:
        return str(self.fields.get("peer", ""))

    @property
    def text(self) -> str:
        """One line in words; every line break and control character becomes a space."""
        f = self.fields
        evidence = f": {f['evidence']}" if f.get("evidence") else ""
        who = self.peer or self.process
        match self.name:
            case "lost":
                words = f"lost {who}{evidence}"
            case "joined":
                words = f"joined: {who}{evidence}"
            case "fenced":
                words = f"fenced by a newer term: {who}{evidence}"
            case "rollback":
                words = f"went back to step {f.get('to_step', '?')}{evidence}"
            case "dropped":
                words = f"dropped group {f.get('group_id', '?')}: {f.get('reason', 'no reason given')}"
            case "evaluation_skipped":
                words = (
                    f"evaluation at step {f.get('step', '?')} skipped ({f.get('reason', 'no reason given')}){evidence}"
                )
            case "engine_synced":
                version = f.get("version", "")
                words = f"weights {version} verified on {who}" if version else f"weights verified on {who}"
            case _:
                rest = ", ".join(f"{k} {v}" for k, v in f.items())
                words = f"{self.name.replace('_', ' ')}{f': {rest}' if rest else ''}"
        return "".join(c if c.isprintable() else " " for c in words)


@dataclass(frozen=True)
class IdleShare:
    """Share of a role's time in one allocation in which it did nothing, 0 to 1."""

    attempt: int
    role: str
    idle: float
    observed_s: float  # summed over processes
    evidence: str  # windows | spans | steps


@dataclass(frozen=True)
class Peer:
    """A process of the newest allocation."""

    name: str
    role: str
    alive: bool
    last_seen: float  # epoch s


@dataclass(frozen=True)
class RunStory:
    """Everything that watch and report show. Times are epoch seconds; empty means not recorded."""

    name: str
    n_steps: int | None  # RL steps asked for
    sft_steps: int | None
    rollout_batch_size: int | None
    steps: tuple[TrainedStep, ...]  # final lineage, ascending
    superseded: tuple[TrainedStep, ...]  # trained, then undone by going back
    allocations: tuple[Allocation, ...]
    evaluations: tuple[Evaluation, ...]  # of the final lineage, one of each step, in order of time
    verdicts: tuple[Verdict, ...]
    idle: tuple[IdleShare, ...]
    peers: tuple[Peer, ...]
    phase: str  # of the run now; "" = nothing trained yet
    first_t: float | None
    last_t: float | None
    complete_t: float | None
    trained_groups: int | None
    extra: Mapping[str, Any] = field(default_factory=dict)  # other fields of the note run_start

    @property
    def complete(self) -> bool:
        return self.complete_t is not None

    @property
    def total_steps(self) -> int | None:
        """SFT and RL steps asked for."""
        return None if self.n_steps is None else self.n_steps + (self.sft_steps or 0)

    @property
    def groups_asked(self) -> int | None:
        if self.n_steps is None or self.rollout_batch_size is None:
            return None
        return self.n_steps * self.rollout_batch_size

    @property
    def current_step(self) -> int:
        """Last step of the lineage that counts; 0 before the first one."""
        return self.steps[-1].step if self.steps else 0

    @property
    def wall_s(self) -> float:
        """From the first event to completion, or to the last event."""
        if self.first_t is None or self.last_t is None:
            return 0.0
        return (self.last_t if self.complete_t is None else self.complete_t) - self.first_t

    @property
    def faults(self) -> tuple[Verdict, ...]:
        return tuple(v for v in self.verdicts if v.name in FAULTS)

    def series(self, name: str, phase: str = "") -> tuple[list[int], list[float]]:
        """(steps, values) of one metric, where it was recorded; both empty when it never was."""
        if name.startswith("eval/"):
            evaluated = sorted(self.evaluations, key=lambda e: e.step)
            found = [(e.step, e.values[name]) for e in evaluated if name in e.values]
        else:
            found = [(s.step, s.values[name]) for s in self.steps if name in s.values and phase in ("", s.phase)]
        return [s for s, _ in found], [v for _, v in found]

    def evaluation(self, when: str) -> Evaluation | None:
        """The newest evaluation of this kind: one that was repeated after a restart counts."""
        return next((e for e in reversed(self.evaluations) if e.when == when), None)

    def told(self) -> list[tuple[float, str, str]]:
        """(t, name, text) worth telling: neighbouring verdicts of a kind in one line, routine ones left out."""
        shown = [v for v in self.verdicts if v.name not in _ROUTINE]
        groups = [list(same) for _, same in groupby(shown, key=lambda v: (v.name, v.attempt))]
        return [(g[0].t, g[0].name, _together(g)) for g in groups]

    def gaps(self) -> list[tuple[Allocation, Allocation]]:
        """Neighbouring allocations with time between them."""
        pairs = zip(self.allocations, self.allocations[1:], strict=False)
        return [(a, b) for a, b in pairs if b.start > a.closed]


def _together(verdicts: list[Verdict]) -> str:
    """Neighbouring verdicts of one kind in one line of words."""
    if len(verdicts) == 1:
        return verdicts[0].text
    if verdicts[0].name == "dropped":
        reasons = Counter(str(v.fields.get("reason", "no reason given")) for v in verdicts)
        return f"dropped {len(verdicts)} groups: " + ", ".join(f"{n} × {r}" for r, n in reasons.most_common(6))
    if verdicts[0].name == "joined":
        peers = [v.peer for v in verdicts]
        return f"{len(peers)} joined: " + ", ".join(peers[:12]) + (", ..." if len(peers) > 12 else "")
    texts = [v.text for v in verdicts]
    return "; ".join(texts[:4]) + (f"; and {len(texts) - 4} more" if len(texts) > 4 else "")


def role_of(process: str) -> str:
    """The role named first in a process's or peer's name ("rollout-3", "agent/rollout/1"); "" when none is."""
    match = _ROLE.search(process)
    return match.group() if match else ""
