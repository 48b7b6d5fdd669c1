"""`miles-hpc report`: one HTML page and one picture of a run, from its events. Works on a run that only began.

    events/, resolved.toml, audit.json -> RunStory -> figures (PNG) + tables -> report.html, report.png

The page needs nothing but itself (styles inline, pictures as data URIs). It names no host and no address: nodes are
numbered by role, so that a report can be handed on.
"""

from __future__ import annotations

import base64
import json
import math
import statistics
import time
import tomllib
from pathlib import Path
from typing import Any

from checkpoints.publish import publish_bytes
from miles_hpc.cli.report_evaluations import evaluations_table, kinds_table, signed
from miles_hpc.cli.story import FAULTS, Allocation, RunStory
from miles_hpc.cli.story_reducer import reduce_events
from miles_hpc.cli.watch import EventTail
from miles_hpc.cli.wording import HostNames, duration, quantity
from miles_hpc.core.errors import UserError
from miles_hpc.core.paths import RunPaths
from miles_hpc.core.version import __version__

__all__ = ["write_report"]

_CAPTIONS = {
    "reward": "Mean reward of the trajectories trained in each step, and of held-out episodes.",
    "clock": "Steps against time. White hatching: no allocation. A drop means that it went on from a checkpoint.",
    "kinds": "Mean reward of trained trajectories, per kind, smoothed.",
    "staleness": "How many steps older than the trainer's weights the oldest token of a group was.",
    "step_time": "As the controller measured it, RL steps.",
    "idle": "Lower is better.",
    "probe": "Mean absolute log-prob difference on a fixed set of sequences; log scale.",
    "replay": "Recorded routing positions that the trainer replayed.",
    "sft": "Loss on demonstrations before RL.",
}

_TIMELINE_ROWS = 200

#: Values that say nothing when they are 0.
_NONE_IF_0 = frozenset(
    {
        "groups.trainer.gpus_per_node",
        "groups.rollout.gpus_per_node",
        "eval.n_episodes",
        "eval.interval",
        "eval.engines_per_host",
    }
)

# (label, path in resolved.toml); an absent or empty value leaves the line out
_CONDITIONS = (
    ("site", "site"),
    ("task", "environment.name"),
    ("task options", "environment.options"),
    ("model", "model.path"),
    ("model type", "model.config.model_type"),
    ("number format", "model.dtype"),
    ("trainer nodes", "groups.trainer.nodes"),
    ("trainer ranks per node", "groups.trainer.ranks_per_node"),
    ("trainer GPUs per node", "groups.trainer.gpus_per_node"),
    ("rollout nodes", "groups.rollout.nodes"),
    ("rollout GPUs per node", "groups.rollout.gpus_per_node"),
    ("engines per rollout node", "rollout.engines_per_host"),
    ("sandbox nodes", "groups.sandbox.nodes"),
    ("engine", "rollout.engine"),
    ("training backend", "train.backend"),
    ("control transport", "control.transport"),
    ("SFT steps", "sft.steps"),
    ("RL steps", "rollout.n_steps"),
    ("groups per step", "rollout.rollout_batch_size"),
    ("trajectories per group", "rollout.n_samples_per_prompt"),
    ("staleness bound, steps", "rollout.max_weight_staleness"),
    ("held-out prompts", "eval.n_episodes"),
    ("steps between evaluations", "eval.interval"),
    ("engines per node for evaluations only", "eval.engines_per_host"),
    ("routing replay", "rollout.routing_replay"),
    ("advantage estimator", "train.advantage_estimator"),
    ("learning rate", "train.lr"),
    ("seed", "seed"),
    ("time limit of an allocation", "job.time"),
)


def write_report(run_dir: Path) -> tuple[Path, Path]:
    """Write report.html and report.png into `run_dir`, each replaced atomically; returns their paths.

    Raises UserError when `run_dir` isn't a folder, OSError when it can't be written.
    """
    from miles_hpc.cli.report_figures import PANELS, render_all, render_panel

    if not run_dir.is_dir():
        raise UserError(f"no report: {run_dir} is not a folder; expected the folder of a run (give --run-dir)")
    paths = RunPaths(run_dir)
    story = reduce_events(EventTail(paths.events).read())
    config = _read_toml(paths.resolved_toml)
    hosts = HostNames(story)
    cap = _at(config, "rollout.max_weight_staleness")
    cap = cap if isinstance(cap, int) and not isinstance(cap, bool) else None
    name = str(story.name or _at(config, "name") or run_dir.resolve().name)

    wide, figures, missing = [], [], []
    for panel in PANELS:
        if not panel.ready(story):
            missing.append(panel.missing)
            continue
        figure = {"title": panel.title, "caption": _CAPTIONS[panel.key], "narrow": ""}
        figure["alt"] = f"Chart: {panel.title}. {_CAPTIONS[panel.key]} The numbers are in the tables."
        small = _data_uri(render_panel(panel, story, cap, width_in=5.0, height_in=3.4))
        if panel.wide:
            figure["image"] = _data_uri(render_panel(panel, story, cap, width_in=10.4, height_in=4.0))
            figure["narrow"] = small
            wide.append(figure)
        else:
            figure["image"] = small
            figures.append(figure)
    if not story.sft_steps and "warm start" in missing:
        missing.remove("warm start")
    for when in ("before", "after"):
        if story.evaluation(when) is None:
            missing.append(f"evaluation {when} RL")
    if not config:
        missing.append("resolved.toml (conditions)")

    summary = _summary(story)
    context = {
        "name": name,
        "complete": story.complete,
        "state": _state(story),
        "summary": summary,
        "cards": _cards(story, _audit(run_dir / "audit.json")),
        "missing": missing,
        "wide": wide,
        "figures": figures,
        **kinds_table(story),
        **evaluations_table(story),
        "allocations": _allocations(story, hosts),
        "timeline": _timeline(story, hosts),
        "conditions": _conditions(config, story, hosts),
        "metrics": _metrics(story),
        "idle_evidence": _idle_evidence(story),
        "footer": f"Written by miles_hpc {__version__} on {time.strftime('%Y-%m-%d %H:%M', time.gmtime())} UTC.",
    }
    sheet = render_all(story, cap, name, summary)
    publish_bytes(paths.report_png, sheet)
    publish_bytes(paths.report_html, _render(context).encode())
    return paths.report_html, paths.report_png


def _render(context: dict[str, Any]) -> str:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    text = Path(__file__).with_name("report_template.html.j2").read_text(encoding="utf-8")
    return environment.from_string(text).render(context)


def _data_uri(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode()


# ------------------------------------------------------------------------------------------------ inputs


def _read_toml(path: Path) -> dict[str, Any]:
    """The file's table; empty when it is absent or can't be parsed (a report is written all the same)."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _at(table: dict[str, Any], path: str) -> Any:
    """The value at a dotted path, None when any part of it is absent."""
    value: Any = table
    for key in path.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _audit(path: Path) -> dict[str, int]:
    """Groups lost and trained twice, from audit.json: numbers or lists of group ids; empty when there is none."""
    try:
        audit = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    found = {}
    for label, keys in (("lost", ("lost", "n_lost")), ("twice", ("trained_twice", "twice", "n_trained_twice"))):
        value = next((audit[k] for k in keys if k in audit), None) if isinstance(audit, dict) else None
        if isinstance(value, (list, dict)):
            found[label] = len(value)
        elif isinstance(value, int):
            found[label] = int(value)
    return found


# ------------------------------------------------------------------------------------------------ parts of the page


def _state(story: RunStory) -> dict[str, str]:
    if story.complete:
        return {"kind": "complete", "word": "complete"}
    last = story.allocations[-1] if story.allocations else None
    if last is not None and last.failed:
        return {"kind": "failed", "word": f"ended: {last.outcome}"}
    return {"kind": "unfinished", "word": "unfinished" if story.first_t is not None else "not started"}


def _summary(story: RunStory) -> str:
    if story.first_t is None:
        return "No events were written yet."
    started = time.strftime("%Y-%m-%d %H:%M", time.gmtime(story.first_t))
    nodes = f" on {_nodes(story.allocations[-1])} nodes" if story.allocations and story.allocations[-1].hosts else ""
    over = f" over {_count(len(story.allocations), 'allocation')}" if story.allocations else ""
    return f"Started {started} UTC{nodes}; {duration(story.wall_s)}{over}."


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def _cards(story: RunStory, audit: dict[str, int]) -> list[dict[str, str]]:
    cards = []
    before, after = story.evaluation("before") or story.evaluation("sft_only"), story.evaluation("after")
    if before is not None or after is not None:
        value = " → ".join("?" if e is None else signed(e.mean) for e in (before, after))
        n = sorted({e.n * e.n_samples for e in (before, after) if e is not None})
        detail = f"mean of {' and '.join(map(str, n))} held-out episodes, before → after RL"
        cards.append({"label": "Reward", "value": value, "detail": detail})
    else:
        _, values = story.series("rollout/raw_reward")
        ends = (values[:5], values[-5:]) if values else ()
        shown = " → ".join(signed(statistics.fmean(part)) for part in ends) or "none yet"
        detail = "first → last five steps of training; not evaluated" if values else "no RL step was finished"
        cards.append({"label": "Reward", "value": shown, "detail": detail})
    total = story.total_steps
    steps = f"{story.current_step}" + (f" of {total}" if total is not None else "")
    sft = f"{story.sft_steps} SFT + {story.n_steps} RL" if story.sft_steps and story.n_steps else ""
    cards.append({"label": "Steps", "value": steps, "detail": sft})
    if story.trained_groups is not None:
        asked = story.groups_asked
        value = f"{story.trained_groups}" + (f" of {asked}" if asked is not None else "")
        cards.append({"label": "Groups trained", "value": value, "detail": "of those asked for" if asked else ""})
    if audit:
        lost, twice = (str(audit[k]) if k in audit else "?" for k in ("lost", "twice"))
        cards.append({"label": "Lost / trained twice", "value": f"{lost} / {twice}", "detail": "groups, by audit"})
    waited = sum(b.start - a.closed for a, b in story.gaps())
    detail = _count(len(story.allocations), "allocation") if story.allocations else ""
    detail += f", {duration(waited)} between them" if waited > 0 else ""
    cards.append({"label": "Wall time", "value": duration(story.wall_s), "detail": detail})
    redone = len({s.step for s in story.superseded})
    if story.faults or redone:
        losses = sum(v.name == "lost" for v in story.verdicts)
        detail = f"{_count(redone, 'step')} undone" if redone else "no step undone"
        cards.append({"label": "Processes lost", "value": str(losses), "detail": detail})
    return cards


def _nodes(allocation: Allocation) -> str:
    """`1 trainer, 2 rollout, 1 sandbox`: counts of nodes, without names."""
    return ", ".join(f"{len(hosts)} {role}" for role, hosts in allocation.hosts.items() if hosts)


def _allocations(story: RunStory, hosts: HostNames) -> list[dict[str, str]]:
    rows = []
    for before, a in zip((None, *story.allocations), story.allocations, strict=False):
        own = [s.step for s in story.steps if s.attempt == a.attempt]
        undone = sum(s.attempt == a.attempt for s in story.superseded)
        last = a is story.allocations[-1]
        end = f"{a.outcome}: {a.reason}" if a.reason else a.outcome
        rows.append(
            {
                "attempt": str(a.attempt),
                "nodes": _nodes(a),
                "waited": "" if before is None else duration(max(0.0, a.start - before.closed)),
                "lasted": duration(a.closed - a.start),
                "limit": "" if a.time_limit_s is None else duration(a.time_limit_s),
                "steps": (f"{own[0]} to {own[-1]}" if own else "none") + (f", {undone} undone" if undone else ""),
                "end": hosts.hide(end) or ("no end recorded" if last else "no end recorded; the next one took over"),
            }
        )
    return rows


def _timeline(story: RunStory, hosts: HostNames) -> list[dict[str, Any]]:
    rows: list[tuple[float, bool, str]] = []
    for a in story.allocations:
        rows.append((a.start, False, f"Allocation {a.attempt} starts" + (f": {_nodes(a)} nodes" if a.hosts else "")))
        if a.end is not None:
            rows.append((a.end, a.failed, f"Allocation {a.attempt} ends: {a.outcome}{': ' * bool(a.reason)}{a.reason}"))
    for e in story.evaluations:
        rows.append((e.t, False, f"Evaluation {e.title}: {e.mean:.2f} over {e.size}"))
    if story.complete_t is not None:
        rows.append((story.complete_t, False, "Run complete"))
    rows += [(t, name in FAULTS, text) for t, name, text in story.told()]
    if len(rows) > _TIMELINE_ROWS:
        rows = [row for row in rows if not row[2].startswith(("dropped", "joined"))] or rows
    rows.sort(key=lambda row: row[0])
    left_out = max(0, len(rows) - _TIMELINE_ROWS)
    rows = rows[:_TIMELINE_ROWS]
    done = sorted((s.t, s.step) for s in story.steps + story.superseded)
    result: list[dict[str, Any]] = []
    index = 0
    for t, fault, text in rows:
        while index < len(done) and done[index][0] <= t:
            index += 1
        text = hosts.hide(text[:1].upper() + text[1:])
        text = text if len(text) <= 300 else text[:299] + "…"
        step = str(done[index - 1][1]) if index else ""
        since = duration(max(0.0, t - (story.first_t or t)))
        result.append({"time": since, "step": step, "fault": fault, "text": text})
    if left_out:
        result.append({"time": "", "step": "", "fault": False, "text": f"and {left_out} more, in the event files"})
    return result


def _conditions(config: dict[str, Any], story: RunStory, hosts: HostNames) -> list[tuple[str, str]]:
    rows = []
    for label, path in _CONDITIONS:
        value = _at(config, path)
        if value is None or value == "" or value == {} or (path in _NONE_IF_0 and value == 0):
            continue
        if isinstance(value, bool):
            text = "on" if value else "off"
        elif isinstance(value, dict):
            text = ", ".join(f"{k} {v}" for k, v in value.items())
        else:
            text = Path(str(value)).name if path == "model.path" else str(value)
        rows.append((label, hosts.hide(text)))
    sizes = ("num_hidden_layers", "hidden_size", "num_experts", "num_experts_per_tok", "vocab_size")
    shape = [f"{k} {v}" for k in sizes if (v := _at(config, f"model.config.{k}")) is not None]
    if shape:
        rows.append(("model shape", ", ".join(shape)))
    versions = story.extra.get("versions")
    if isinstance(versions, dict) and versions:
        rows.append(("versions", hosts.hide(", ".join(f"{k} {v}" for k, v in versions.items()))))
    return rows


def _metrics(story: RunStory) -> list[tuple[str, ...]]:
    rows = []
    trained = {n for s in story.steps for n in s.values}
    for name in sorted(trained | {n for e in story.evaluations for n in e.values}):
        values = [v for v in story.series(name)[1] if math.isfinite(v)]
        if values:
            numbers = (
                statistics.fmean(values[:5]),
                statistics.fmean(values[-5:]),
                statistics.median(values),
                min(values),
                max(values),
            )
            rows.append((name, str(len(values)), *(quantity(v) for v in numbers)))
    return rows


def _idle_evidence(story: RunStory) -> str:
    words = {"windows": "windows of use", "spans": "spans", "steps": "step metrics"}
    roles: dict[str, set[str]] = {}
    for share in story.idle:
        roles.setdefault(share.role, set()).add(words[share.evidence])
    parts = [f"{role} from {' and '.join(sorted(kinds))}" for role, kinds in roles.items()]
    return f"Here: {', '.join(parts)}." if parts else ""
