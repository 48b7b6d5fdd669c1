"""Events: one JSON-lines file per process below events/, appended line by line, read by watch and report.

Kinds, told apart by `kind`:

    metric   {"step": 7, "values": {"rollout/raw_reward": 0.4, "perf/step_time": 1.2, ...}}     a step that was trained
    metric   {"step": 6, "values": {"eval/shell": 0.5, "eval/lag_steps": 1, ...}}       an evaluation, when it is over
    span     {"name": "generate", "start": <epoch s>, "end": <epoch s>, "step": 7}
    verdict  {"name": "lost", "peer": "...", "evidence": "..."}        what the run decided, and why
    note     {"name": "allocation", ...}                               start, end, evaluation, resume

Every line carries `t` (epoch seconds), `attempt`, `term`, `process`. Readers skip a line that a kill cut off.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["EventLog", "read_events"]


class EventLog:
    """Appends events of one process. Not thread-safe beyond single writes, which are one write() call each."""

    def __init__(self, folder: Path, process: str, *, attempt: int, term: int = 0) -> None:
        """`term` 0: the process follows the terms of its attempt and sets `term` as it adopts one."""
        folder.mkdir(parents=True, exist_ok=True)
        self.process = process
        self.attempt = attempt
        self.term = term
        self._lost = 0  # events, since the newest that was stored
        self._torn = False  # whether the file ends within a line
        name = f"{process}.a{attempt:04d}.t{term:06d}.jsonl"
        self._fd = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def emit(self, kind: str, **fields: Any) -> None:
        """Append one event; values must be JSON.

        Storage that refuses it (no space, over quota) ends nothing: the event is lost, and a note `events_lost` tells
        how many were, once there is space.
        """
        if not self._append(kind, fields):
            self._lost += 1
        elif self._lost and self._append("note", {"name": "events_lost", "count": self._lost}):
            self._lost = 0

    def _append(self, kind: str, fields: dict[str, Any]) -> bool:
        place = {"attempt": self.attempt, "term": self.term, "process": self.process}
        line = {"t": round(time.time(), 4), **place, "kind": kind, **fields}
        data = (json.dumps(line, separators=(",", ":")) + "\n").encode()
        if self._torn:
            data = b"\n" + data  # so that only the line that was cut off doesn't parse
        try:
            written = os.write(self._fd, data)
        except OSError:
            return False
        self._torn = written < len(data)
        return not self._torn

    def metric(self, step: int, values: dict[str, float]) -> None:
        self.emit("metric", step=step, values=values)

    def verdict(self, name: str, **fields: Any) -> None:
        self.emit("verdict", name=name, **fields)

    def note(self, name: str, **fields: Any) -> None:
        self.emit("note", name=name, **fields)

    @contextmanager
    def span(self, name: str, **fields: Any) -> Iterator[None]:
        start = time.time()
        try:
            yield
        finally:
            self.emit("span", name=name, start=round(start, 4), end=round(time.time(), 4), **fields)

    def close(self) -> None:
        os.close(self._fd)


def read_events(folder: Path) -> list[dict[str, Any]]:
    """All events of a run, ordered by time. Lines that don't parse (cut off by a kill) are left out."""
    events: list[dict[str, Any]] = []
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_bytes().splitlines():
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if isinstance(event, dict) and "kind" in event and isinstance(event.get("t"), int | float):
                events.append(event)
    events.sort(key=lambda e: float(e["t"]))
    return events
