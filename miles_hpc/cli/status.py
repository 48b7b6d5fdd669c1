"""miles-hpc status: where a run stands, by Slurm, by its accounting and by the run's own records."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from miles_hpc.cli.inputs import find_run_dir
from miles_hpc.cli.standing import Attempt, Standing, Witnesses
from miles_hpc.cli.story import RunStory
from miles_hpc.cli.story_reducer import reduce_events
from miles_hpc.cli.watch import EventTail
from miles_hpc.cli.wording import duration
from miles_hpc.cluster.job_state import JobVerdict
from miles_hpc.cluster.lifecycle import format_time
from miles_hpc.cluster.slurm import Slurm
from miles_hpc.cluster.slurm_states import JobState
from miles_hpc.cluster.submit import read_follow_up, read_jobs
from miles_hpc.core.config import RunConfig, SiteConfig
from miles_hpc.core.load import load_prepared
from miles_hpc.core.paths import RunPaths

__all__ = ["main"]

#: Verdicts of a run that goes well.
_ROUTINE = ("engine_synced", "joined", "dropped")
#: States in which the newest attempt hasn't ended, whoever says so.
_ALIVE = (JobState.STARTING, JobState.RUNNING, JobState.SUSPENDED)
_OUTCOMES = {"continue": "state saved", "stopped": "no next one", "": "no outcome recorded"}
#: Of each question to Slurm. With slurmctld gone, scontrol 22.05.8 gave up by itself after 8 s.
_TIMEOUT_S = 10.0


def main(args: argparse.Namespace) -> int:
    paths = find_run_dir(args.run_dir)
    run, site = load_prepared(paths.root)
    story = reduce_events(EventTail(paths.events).read())
    witnesses = Witnesses(run, paths, Slurm(timeout_s=_TIMEOUT_S))
    standing = witnesses.ask(read_jobs(paths), story, follow_up=read_follow_up(paths))
    if args.json:
        print(json.dumps(_facts(run, site, paths, story, standing), indent=2))
        return 0
    rows = [("run", run.name), ("directory", str(paths.root)), ("site", site.name)]
    rows += [*_job_rows(standing), *_attempt_rows(run, standing), *_event_rows(story, run)]
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        print(f"{name:<{width}}  {text}".rstrip())
    return 0


def _job_rows(standing: Standing) -> list[tuple[str, str]]:
    rows = [("job", _job_text(standing.verdict))]
    for component in standing.components:
        where = component.nodes or component.reason
        rows.append((f"  {component.name}", f"{component.state} {where}"))
    rows += [("  warning", warning) for warning in standing.verdict.warnings]
    if standing.components and standing.components[0].restarts:
        rows.append(("  restarts", str(standing.components[0].restarts)))
    if standing.follow_up is not None:
        rows.append(("follow-up", _job_text(standing.follow_up)))
        rows += [("  warning", warning) for warning in standing.follow_up.warnings]
    if standing.time_left_s is not None:
        rows.append(("time left", format_time(standing.time_left_s)))
    return rows


def _job_text(verdict: JobVerdict) -> str:
    return verdict.line if verdict.job_id is None else f"{verdict.job_id} {verdict.line}"


def _attempt_rows(run: RunConfig, standing: Standing) -> list[tuple[str, str]]:
    attempts = standing.attempts
    if not attempts:
        return [("attempts", f"none yet, of {run.job.max_allocations} at most")]
    # An attempt without a job is an allocation of its own; a supervisor started again in its job is none.
    used = len({(a.job_id, a.restart) if a.job_id is not None else a.number for a in attempts})
    used_up = used >= run.job.max_allocations and standing.verdict.state == JobState.PAUSED
    more = ": 'miles-hpc resume' needs --set job.max_allocations=N" if used_up else ""
    count = f"{used}" if used == len(attempts) else f"{len(attempts)}, in allocations: {used}"
    rows = [("attempts", f"{count} of {run.job.max_allocations} at most{more}")]
    lives = standing.verdict.state in _ALIVE and not standing.verdict.warnings
    for attempt in attempts[-3:]:
        going_on = lives and attempt is attempts[-1] and not attempt.outcome
        rows.append((f"  {attempt.number:04d}", _attempt_text(attempt, going_on=going_on)))
    if standing.node_hours is not None:
        rows.append(("node-hours", f"{standing.node_hours.hours:.3g} by {standing.node_hours.source}"))
    return rows


def _attempt_text(attempt: Attempt, *, going_on: bool) -> str:
    parts = ["goes on" if going_on else _OUTCOMES.get(attempt.outcome, attempt.outcome)]
    if attempt.reason:
        parts.append(attempt.reason)
    if attempt.start is not None and (end := attempt.end or attempt.last_seen) is not None:
        nodes = f" on {attempt.nodes} node{'s' * (attempt.nodes != 1)}" if attempt.nodes else ""
        parts.append(f"{duration(max(0.0, end - attempt.start))}{nodes}")
    if attempt.steps:
        first, last = attempt.steps[0], attempt.steps[-1]
        parts.append(f"steps {first} to {last}" if first != last else f"step {first}")
    return ", ".join(parts)


def _event_rows(story: RunStory, run: RunConfig) -> list[tuple[str, str]]:
    total = run.sft.steps + run.rollout.n_steps
    if not story.steps:
        rows = [("step", f"none of {total} yet")]
    else:
        last = story.steps[-1]
        reward = last.values.get("rollout/raw_reward")
        rows = [("step", f"{last.step} of {total}" + (f", batch reward {reward:.3f}" if reward is not None else ""))]
    for evaluation in story.evaluations[:1] + story.evaluations[1:][-3:]:
        title = evaluation.title if evaluation.when == "during" else f"{evaluation.when} RL"
        rows.append(("held-out", f"{evaluation.mean:.3f} {title}, over {evaluation.size}"))
    if story.trained_groups is not None and story.groups_asked is not None:
        rows.append(("trained", f"{story.trained_groups} of {story.groups_asked} groups"))
    told = [v for v in story.verdicts if v.name not in _ROUTINE]
    for verdict in told[-3:]:
        evidence = verdict.fields.get("evidence") or verdict.fields.get("reason") or ""
        when = time.strftime("%H:%M:%S", time.localtime(verdict.t))
        rows.append(("event", f"{when} {verdict.name} {verdict.peer} {evidence}".rstrip()[:140]))
    return rows


def _facts(run: RunConfig, site: SiteConfig, paths: RunPaths, story: RunStory, standing: Standing) -> dict[str, Any]:
    """The same for programs: times in epoch seconds, lengths in seconds, null for what nobody says."""
    spent = standing.node_hours
    return {
        "run": run.name,
        "directory": str(paths.root),
        "site": site.name,
        "job": {
            **_verdict_facts(standing.verdict),
            "components": [
                {"name": c.name, "job_id": c.job_id, "state": c.state, "reason": c.reason, "nodes": c.nodes}
                for c in standing.components
            ],
        },
        "follow_up": None if standing.follow_up is None else _verdict_facts(standing.follow_up),
        "time_left_s": standing.time_left_s,
        "attempts": [
            {
                "attempt": a.number,
                "job_id": a.job_id,
                "start": a.start,
                "end": a.end,
                "nodes": a.nodes or None,
                "outcome": a.outcome or None,
                "reason": a.reason or None,
                "steps": len(a.steps),
            }
            for a in standing.attempts
        ],
        "max_allocations": run.job.max_allocations,
        "node_hours": None if spent is None else {"hours": spent.hours, "source": spent.source},
        "step": story.current_step,
        "steps": run.sft.steps + run.rollout.n_steps,
        "trained_groups": story.trained_groups,
        "evaluations": [
            {
                "when": e.when,
                "step": e.step,
                "mean": e.mean,
                "n": e.n,
                "n_samples": e.n_samples,
                "pass_at": {str(k): value for k, value in e.pass_at.items()},
            }
            for e in story.evaluations
        ],
    }


def _verdict_facts(verdict: JobVerdict) -> dict[str, Any]:
    return {
        "job_id": verdict.job_id,
        "state": str(verdict.state),
        "over": verdict.over,
        "evidence": verdict.evidence,
        "warnings": list(verdict.warnings),
    }
