"""miles-hpc status: where a run stands, from its directory and from Slurm when there is one."""

from __future__ import annotations

import argparse
import json
import math
import time
from typing import Any

from miles_hpc.cli.inputs import find_run_dir
from miles_hpc.cli.story_reducer import reduce_events
from miles_hpc.cli.watch import EventTail
from miles_hpc.cluster.lifecycle import format_time
from miles_hpc.cluster.slurm import Slurm
from miles_hpc.cluster.submit import read_job
from miles_hpc.core.config import RunConfig
from miles_hpc.core.errors import MilesError
from miles_hpc.core.load import load_prepared
from miles_hpc.core.paths import RunPaths

__all__ = ["main"]

#: Verdicts of a run that goes well.
_ROUTINE = ("engine_synced", "joined", "dropped")


def main(args: argparse.Namespace) -> int:
    paths = find_run_dir(args.run_dir)
    run, site = load_prepared(paths.root)
    rows = [("run", run.name), ("directory", str(paths.root)), ("site", site.name)]
    rows += _job_rows(paths) + _attempt_rows(paths) + _event_rows(paths, run)
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


def _event_rows(paths: RunPaths, run: RunConfig) -> list[tuple[str, str]]:
    story = reduce_events(EventTail(paths.events).read())
    total = run.sft.steps + run.rollout.n_steps
    if not story.steps:
        rows = [("step", f"none of {total} yet")]
    else:
        last = story.steps[-1]
        reward = last.values.get("rollout/raw_reward")
        rows = [("step", f"{last.step} of {total}" + (f", batch reward {reward:.3f}" if reward is not None else ""))]
    for evaluation in story.evaluations:
        what = f"{evaluation.mean:.3f} {evaluation.when} RL, over {evaluation.n} episodes"
        rows.append(("held-out", what))
    if story.trained_groups is not None and story.groups_asked is not None:
        rows.append(("trained", f"{story.trained_groups} of {story.groups_asked} groups"))
    told = [v for v in story.verdicts if v.name not in _ROUTINE]
    for verdict in told[-3:]:
        evidence = verdict.fields.get("evidence") or verdict.fields.get("reason") or ""
        when = time.strftime("%H:%M:%S", time.localtime(verdict.t))
        rows.append(("event", f"{when} {verdict.name} {verdict.peer} {evidence}".rstrip()[:140]))
    return rows
