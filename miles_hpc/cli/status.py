"""miles-hpc status: where a run stands, from its directory and from Slurm when there is one."""

from __future__ import annotations

import argparse
import json
import math
from typing import Any

from miles_hpc.cli.inputs import find_run_dir
from miles_hpc.cluster.lifecycle import format_time
from miles_hpc.cluster.slurm import Slurm
from miles_hpc.cluster.submit import read_job
from miles_hpc.core.errors import MilesError
from miles_hpc.core.load import load_prepared
from miles_hpc.core.paths import RunPaths
from miles_hpc.core.telemetry import read_events

__all__ = ["main"]


def main(args: argparse.Namespace) -> int:
    paths = find_run_dir(args.run_dir)
    run, site = load_prepared(paths.root)
    rows = [("run", run.name), ("directory", str(paths.root)), ("site", site.name)]
    rows += _job_rows(paths) + _attempt_rows(paths) + _event_rows(paths, run.rollout.n_steps)
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        print(f"{name:<{width}}  {text}".rstrip())
    return 0


def _job_rows(paths: RunPaths) -> list[tuple[str, str]]:
    job_id = read_job(paths)
    if job_id is None:
        return [("job", "not submitted")]
    try:
        slurm = Slurm()
        components = slurm.components(job_id)
        left = slurm.remaining_s(job_id) if any(c.state == "RUNNING" for c in components) else math.inf
    except MilesError as error:
        return [("job", f"{job_id}: state unknown: {error}")]
    if not components:
        return [("job", f"{job_id}: Slurm doesn't know it any more")]
    rows = [("job", f"{job_id}, restarted {components[0].restarts} times")]
    for component in components:
        where = component.nodes or component.reason
        rows.append((f"  {component.name}", f"{component.state} {where}"))
    if not math.isinf(left):
        rows.append(("time left", format_time(left)))
    return rows


def _attempt_rows(paths: RunPaths) -> list[tuple[str, str]]:
    attempts = sorted(path for path in paths.attempts.glob("[0-9]*") if path.is_dir())
    if not attempts:
        return [("attempts", "none yet")]
    rows = [("attempts", str(len(attempts)))]
    for attempt in attempts[-3:]:
        try:
            outcome: Any = json.loads((attempt / "outcome.json").read_bytes())
        except (OSError, ValueError):
            rows.append((f"  {attempt.name}", "no outcome recorded"))
            continue
        items = outcome.items() if isinstance(outcome, dict) else [("outcome", outcome)]
        rows.append((f"  {attempt.name}", ", ".join(f"{k} {v}" for k, v in items if not isinstance(v, dict | list))))
    return rows


def _event_rows(paths: RunPaths, n_steps: int) -> list[tuple[str, str]]:
    events = read_events(paths.events)
    steps = [event["step"] for event in events if event["kind"] == "metric" and isinstance(event.get("step"), int)]
    rows = [("step", f"{max(steps)} of {n_steps}" if steps else f"none of {n_steps} yet")]
    for event in [event for event in events if event["kind"] == "verdict"][-3:]:
        known = ("t", "term", "process", "kind", "name")
        detail = ", ".join(f"{key} {value}" for key, value in event.items() if key not in known)
        rows.append(("verdict", f"{event.get('name', '')}: {detail}"))
    return rows
