"""The run: stages in random order, repeat after repeat, until all are done or the time is used up.

    for each repeat:  shuffle(stages of each turn) ── stage = one arm with one number of peers:
                          session (kept; under MPI a fresh world) ── start peers ── check, place, time each cell ── stop

A stage that fails is left out from then on, with its reason; everything else goes on.
"""

from __future__ import annotations

import os
import random
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from miles_hpc.core.deadline import Deadline
from miles_hpc.core.errors import MilesError
from tools.bench_control.caller import Ask
from tools.bench_control.conditions import conditions
from tools.bench_control.plan import BOX_NODES, FIRST, ArmSpec, Cell, Settings
from tools.bench_control.session import ArmFailed, Session, descendants, environment, reap
from tools.bench_control.spread import ArmResult, Spread, combine
from tools.bench_control.summary import summarise
from tools.slurm_box import Box, BoxSpec
from tools.slurm_box.processes import end

__all__ = ["Report", "Stage", "measure", "stages_of"]

#: Called before each stage: how many are done, how many there are, what comes.
Progress = Callable[[int, int, str], None]
_CLOSING_S = 4.0  # what ending Ray and the box takes


@dataclass(frozen=True)
class Stage:
    spec: ArmSpec
    n_peers: int
    cells: tuple[Cell, ...]
    repeats: int

    @property
    def turn(self) -> int:
        """Lower turns come first in each repeat: FIRST, then everything else."""
        return FIRST.get(self.spec.name, 2) if self.n_peers == 1 or self.spec.startup else 2

    @property
    def name(self) -> str:
        return self.cells[0].name if self.spec.startup else f"{self.n_peers} peer{'s' * (self.n_peers > 1)}"


@dataclass
class Report:
    """What a run gives; `as_json` is the benchmark's contract."""

    conditions: dict[str, Any]
    arms: dict[str, ArmResult]
    summary: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return {"conditions": self.conditions, "arms": self.arms, "summary": self.summary}


def stages_of(specs: Sequence[ArmSpec], settings: Settings) -> tuple[list[Stage], dict[str, ArmResult]]:
    """What is to be done, and results that say already which stages are left out and why."""
    stages: list[Stage] = []
    arms = {spec.name: ArmResult(about=spec.about) for spec in specs}
    for spec in specs:
        if spec.startup:
            repeats = 1 if spec.cls == "Ray" else settings.startup_repeats
            stages += [Stage(spec, cell.peers, (cell,), repeats) for cell in settings.startup]
            continue
        for n_peers in sorted({cell.peers for cell in settings.cells}):
            cells = tuple(cell for cell in settings.cells if cell.peers == n_peers)
            first = n_peers == 1 and spec.name in FIRST
            stage = Stage(spec, n_peers, cells, settings.repeats if first else settings.repeats_of_others)
            if (spec.name, n_peers) in settings.skipped:
                arms[spec.name].errors[stage.name] = f"left out: {settings.skipped[spec.name, n_peers]}"
            else:
                stages.append(stage)
    return stages, arms


def measure(settings: Settings, specs: Sequence[ArmSpec], *, seed: int, progress: Progress) -> Report:
    """Run all of it. Ends every process that it started, whatever happens."""
    cores = sorted(os.sched_getaffinity(0))
    began = time.monotonic()
    stages, arms = stages_of(specs, settings)
    report = Report(conditions(settings, cores, seed), arms)
    root = Path(tempfile.mkdtemp(prefix="mhb-", dir="/tmp"))
    root.chmod(0o755)  # munged insists; what is secret below has a mode of its own
    runner = _Runner(settings, root, cores, arms)
    try:
        progress(0, len(stages), "Slurm box and Ray")
        runner.box_for(stages)
        runner.warm(stages)
        done, repeats = 0, max((stage.repeats for stage in stages), default=0)
        total = sum(stage.repeats for stage in stages)
        order: list[dict[str, float]] = []  # of each repeat: the stages in their order, and the seconds they took
        for repeat in range(repeats):
            todo = [stage for stage in stages if repeat < stage.repeats]
            random.Random(f"{seed}/{repeat}").shuffle(todo)
            todo.sort(key=lambda stage: stage.turn)  # stable: stages of the same turn stay shuffled
            order.append({})
            for stage in todo:
                progress(done, total, f"repeat {repeat + 1}: {stage.spec.name}, {stage.name}")
                stage_began = time.monotonic()
                runner.stage(stage, settings.budget_s - _CLOSING_S - (stage_began - began))
                order[-1][f"{stage.spec.name}, {stage.name}"] = round(time.monotonic() - stage_began, 2)
                done += 1
            again = [f"{stage.spec.name}, {stage.name}" for stage in todo if repeat + 1 < stage.repeats]
            expected_s = sum(order[-1][name] for name in again)
            if time.monotonic() - began + expected_s + _CLOSING_S > settings.budget_s:
                break
        progress(done, done, "ending")
    finally:
        runner.close()
        shutil.rmtree(root, ignore_errors=True)
    runner.results()
    report.conditions |= {
        "repeats_done": len(order),
        "order": order,
        "load_average_at_end": round(os.getloadavg()[0], 2),
        "seconds": round(time.monotonic() - began, 1),
    }
    report.summary = summarise(arms)
    return report


def ray_authentication(root: Path) -> dict[str, str]:
    """Ray's token authentication with a token of this run: by default it would make one in the user's home.

    https://docs.ray.io/en/latest/ray-security/token-auth.html
    """
    path = root / "ray-token"
    if not path.exists():
        path.touch(mode=0o600)
        path.write_text(secrets.token_hex(32))
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(path)}


class _Runner:
    """Sessions by arm, the box, and what was measured so far."""

    def __init__(self, settings: Settings, root: Path, cores: list[int], arms: dict[str, ArmResult]) -> None:
        self._settings = settings
        self._root = root
        self._cores = cores
        self._arms = arms
        self._sessions: dict[str, Session] = {}
        self._spreads: dict[tuple[str, str], tuple[Cell, list[Spread]]] = {}
        self._box: Box | None = None
        self._n_sessions = 0
        self._strangers = descendants(os.getpid())

    def box_for(self, stages: Sequence[Stage]) -> None:
        """Bring the Slurm box up if a stage needs it; what goes wrong is the reason why start-up wasn't measured."""
        wanting = [stage for stage in stages if stage.spec.startup]
        if not wanting:
            return
        cpus = -(-max(stage.n_peers for stage in wanting) // BOX_NODES)
        self._box = Box(self._root / "box")
        try:
            self._box.up(BoxSpec.parse(f"worker:{BOX_NODES}", cpus=cpus, cluster="bench", node_timeout_s=60))
        except MilesError as error:
            for stage in wanting:
                self._arms[stage.spec.name].errors[stage.name] = f"no Slurm box: {error}"

    def warm(self, stages: Sequence[Stage]) -> None:
        """Start Ray, which takes longest, while there is time for sure."""
        stage = next((stage for stage in stages if stage.spec.name == "ray"), None)
        if stage is None:
            return
        try:
            session = self._session(stage)
            session.start(stage.n_peers, 30.0 if self._settings.quick else 120.0)
            session.ask(Ask(do="stop"), 10.0)
        except ArmFailed as error:
            self._arms["ray"].errors |= {one.name: str(error) for one in stages if one.spec.name == "ray"}
            self._end("ray")

    def stage(self, stage: Stage, remaining_s: float) -> None:
        """One stage of one repeat, unless the run's time is used up."""
        result = self._arms[stage.spec.name]
        if stage.name in result.errors:
            return
        if remaining_s <= 0:
            if not any((stage.spec.name, cell.name) in self._spreads for cell in stage.cells):
                result.errors[stage.name] = f"left out: the run's {self._settings.budget_s:.0f} s are used up"
            return
        over = Deadline(max(3.0, remaining_s) if self._settings.quick else 600.0, "stage")
        patience_s = (20.0 if stage.turn < 2 else 10.0) if self._settings.quick else 120.0

        def left(wanted_s: float) -> float:
            return max(1.0, min(wanted_s, over.remaining_s))

        try:
            session = self._session(stage)
            told = session.start(stage.n_peers, left(patience_s))
            result.chosen |= told.chosen
            for cell in stage.cells:
                told = session.ask(Ask(do="measure", cell=cell), left(2 * cell.limit_s + patience_s))
                assert told.spread is not None
                self._spreads.setdefault((stage.spec.name, cell.name), (cell, []))[1].append(told.spread)
            session.ask(Ask(do="stop"), left(patience_s))
            result.chosen |= session.lanes()
            if stage.spec.mpi:
                self._end(stage.spec.name)
        except ArmFailed as error:
            result.errors[stage.name] = str(error)
            self._end(stage.spec.name)

    def _session(self, stage: Stage) -> Session:
        found = self._sessions.get(stage.spec.name)
        if found is None:
            extra = dict(self._box.env()) if stage.spec.startup and self._box is not None else {}
            extra |= ray_authentication(self._root)
            self._n_sessions += 1
            folder = self._root / str(self._n_sessions)  # short: unix sockets lie below it
            found = Session(stage.spec, folder, self._cores, stage.n_peers, environment(extra))
            self._sessions[stage.spec.name] = found
        return found

    def _end(self, name: str) -> None:
        session = self._sessions.pop(name, None)
        if session is not None:
            session.close()

    def results(self) -> None:
        """Put what was measured into the arms."""
        for (name, cell_name), (cell, spreads) in self._spreads.items():
            self._arms[name].cells[cell_name] = combine(cell, spreads)

    def close(self) -> None:
        """End the sessions, the box, and whatever they may have left behind."""
        try:
            for name in list(self._sessions):
                self._end(name)
        finally:
            try:
                if self._box is not None:
                    self._box.down()
            finally:
                end(descendants(os.getpid()) - self._strangers, grace_s=2.0)
                reap()
