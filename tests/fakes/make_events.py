"""TEST FIXTURE: an invented run's events folder. Nothing in it was measured; no number of it may be quoted.

The invented run: 12 SFT and 40 RL steps on 1 trainer, 2 rollout and 1 sandbox node; in allocation 1 a rollout node is
lost; the allocation ends at its time limit two steps past the last checkpoint; after a wait allocation 2 goes back to
that checkpoint and finishes. Every 8 RL steps there is an evaluation beside training; that of step 36 is undone with
its step, and done again.

    python -m tests.fakes.make_events RUN_DIR              all of it at once
    python -m tests.fakes.make_events RUN_DIR --live 30    written as if it happened now, within 30 s (to try `watch`)
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

KINDS = ("len", "top", "end", "max", "who", "wlen")
SFT_STEPS, RL_STEPS, BATCH = 12, 40, 16
EVAL_INTERVAL = 8  # RL steps
SAVED_AT, CUT_AT = 34, 36  # steps: the checkpoint that allocation 2 starts from, the last step of allocation 1
VERSIONS = {"miles_hpc": "0.0.0", "python": "0.0"}
START = 1_700_000_000.0

RESOLVED_TOML = """\
name = "invented"
site = "example"
seed = 0

[model]
dtype = "float32"
[model.config]
model_type = "qwen3_moe"
num_hidden_layers = 3
hidden_size = 128
num_experts = 8

[environment]
name = "shell"

[rollout]
n_steps = 40
rollout_batch_size = 16
n_samples_per_prompt = 8
engine = "torch"
max_weight_staleness = 2

[train]
backend = "fsdp"
advantage_estimator = "grpo"
lr = 3e-4

[groups.trainer]
nodes = 1
[groups.rollout]
nodes = 2
[groups.sandbox]
nodes = 1
"""


def events(seed: int = 0) -> Iterator[dict[str, Any]]:
    """All events of the invented run, ordered by time."""
    rng = random.Random(seed)
    found: list[dict[str, Any]] = []
    clock = START

    def emit(process: str, term: int, kind: str, t: float | None = None, **fields: Any) -> None:
        found.append({"t": clock if t is None else t, "term": term, "process": process, "kind": kind, **fields})

    def note(term: int, name: str, **fields: Any) -> None:
        emit("controller", term, "note", name=name, **fields)

    def verdict(term: int, name: str, **fields: Any) -> None:
        emit("controller", term, "verdict", name=name, **fields)

    def allocation(attempt: int) -> None:
        hosts = {"trainer": ["vm1"], "rollout": ["vm2", "vm3"], "sandbox": ["vm4"]}
        note(
            attempt,
            "allocation_start",
            attempt=attempt,
            job_id="41",
            restart=attempt - 1,
            hosts=hosts,
            time_limit_s=90.0,
        )
        for peer in ("trainer-vm1-0", "rollout-vm2-0", "rollout-vm3-0", "sandbox-vm4-0"):
            verdict(attempt, "joined", peer=peer)

    def evaluation(term: int, when: str, step: int, mean: float) -> None:
        labels = {k: min(1.0, max(0.0, mean + 0.12 * math.sin(1.7 * i))) for i, k in enumerate(KINDS)}
        mean = sum(labels.values()) / len(labels)
        beside = when == "during"
        note(
            term,
            "evaluation",
            step=step,
            when=when,
            n=24,
            n_samples=4,
            mean=mean,
            by_label=labels,
            pass_at={str(k): 1 - (1 - mean) ** k for k in (1, 2, 4)},
            truncated_ratio=0.05,
            version=f"{term}.{step}",
            version_share=0.7 if beside else 1.0,
            lag_steps=2 if beside else 0,
            duration_s=3.5,
        )
        emit("controller", term, "metric", step=step, values={"eval/shell": mean, "eval/lag_steps": 2.0 * beside})

    def evaluation_beside(term: int, step: int) -> None:
        if (step - SFT_STEPS) % EVAL_INTERVAL == 0 and step < SFT_STEPS + RL_STEPS:
            evaluation(term, "during", step, 0.21 + 0.61 * (1 - math.exp(-(step - SFT_STEPS) / 14)))

    def windows(term: int, start: float, end: float, busy: dict[str, float]) -> None:
        t = start
        while t < end:
            for process, share in busy.items():
                role = process.split("-")[0]
                used = min(2.0, max(0.0, rng.gauss(2.0 * share, 0.15)))
                emit(process, term, "note", t + 2, name="utilisation", role=role, busy_s=used, window_s=2.0)
            t += 2

    def step(term: int, number: int, rl_step: int, replay: bool = True) -> None:
        nonlocal clock
        start = clock
        if rl_step <= 0:
            train, wait = 0.3 + 0.05 * rng.random(), 0.05
            values = {
                "train/loss": 2.6 * math.exp(-number / 4) + 0.25 + 0.03 * rng.random(),
                "train/grad_norm": 1.0 + rng.random(),
                "perf/step_time": train + wait,
                "perf/train_time": train,
                "perf/wait_batch_time": wait,
            }
        else:
            train, wait, sync = rng.gauss(0.55, 0.04), abs(rng.gauss(0.2, 0.12)), rng.gauss(0.16, 0.02)
            save = 0.4 if number == SAVED_AT else 0.0
            reward = 0.22 + 0.62 * (1 - math.exp(-rl_step / 14)) + rng.gauss(0, 0.035)
            recorded = rng.randrange(23_000, 26_000)
            staleness = abs(rng.gauss(0.7, 0.2))
            values = {
                "train/loss": rng.gauss(0.0, 0.02),
                "train/grad_norm": abs(rng.gauss(0.6, 0.15)),
                "train/pg_clipfrac": abs(rng.gauss(0.01, 0.004)),
                "train/ppo_kl": abs(rng.gauss(0.002, 0.001)),
                "train/entropy": 0.9 * math.exp(-rl_step / 40),
                "train/train_rollout_logprob_abs_diff": abs(rng.gauss(0.004, 0.001)),
                "rollout/raw_reward": reward,
                "rollout/staleness_mean": staleness,
                "rollout/staleness_max": float(min(2, math.ceil(staleness + rng.random() * 0.6))),
                "rollout/response_length": rng.gauss(31, 2),
                "rollout/truncated_ratio": abs(rng.gauss(0.02, 0.01)),
                "rollout/zero_std_ratio": min(1, abs(0.15 + 0.01 * rl_step + rng.gauss(0, 0.05))),
                "perf/step_time": train + wait + sync + save + 0.07,
                "perf/train_time": train,
                "perf/wait_batch_time": wait,
                "perf/sync_time": sync,
                "perf/stage_time": 0.05,
                "perf/save_time": save,
                "routing/recorded_positions": recorded,
                "routing/replayed_positions": recorded if replay else recorded - 40,
                "sync/probe_logprob_abs_diff_mean": 10 ** rng.gauss(-6.3, 0.15),
                "sync/engines": 2,
                "buffer/live": rng.randrange(10, 30),
                "buffer/owned": rng.randrange(0, 16),
                "data/dropped_total": rl_step // 9,
                "data/trained_groups_total": rl_step * BATCH,
            }
            for i, kind in enumerate(KINDS):
                values[f"rollout/reward/{kind}"] = min(1.0, max(0.0, reward + 0.1 * math.sin(1.7 * i)))
        clock += values["perf/step_time"]
        emit("trainer-vm1-0", term, "span", name="train_step", start=clock - train, end=clock, step=number)
        emit("controller", term, "span", name="wait_batch", start=start, end=start + wait, step=number)
        emit("controller", term, "metric", step=number, values=values)

    # Allocation 1: warm start, 24 RL steps, one rollout node lost.
    note(
        1,
        "run_start",
        run="invented",
        n_steps=RL_STEPS,
        sft_steps=SFT_STEPS,
        rollout_batch_size=BATCH,
        versions=VERSIONS,
    )
    note(1, "term", base_term=None, base_step=0)
    allocation(1)
    clock += 3
    note(1, "phase", phase="sft", first_step=1)
    for number in range(1, SFT_STEPS + 1):
        step(1, number, 0)
    evaluation(1, "before", SFT_STEPS, 0.21)
    note(1, "phase", phase="rl", first_step=SFT_STEPS + 1)
    rl_start = clock
    for number in range(SFT_STEPS + 1, CUT_AT + 1):
        step(1, number, number - SFT_STEPS)
        evaluation_beside(1, number)
        if number == 24:
            verdict(1, "lost", peer="rollout-vm3-0", evidence="no heartbeat for 5.0 s from vm3 (10.0.0.3:40112)")
            for group in (201, 204, 207):
                verdict(1, "dropped", group_id=group, reason="host lost")
            clock += 4
        if number == 27:
            verdict(1, "joined", peer="rollout-vm3-0")
        if number == 31:
            verdict(1, "dropped", group_id=260, reason="stale: 3 steps behind")
            verdict(1, "evaluation_skipped", step=31, reason="overflow", evidence="one of step 28 is under way")
        verdict(1, "engine_synced", peer="rollout-vm2-0", version=f"1.{number}")
    shares = {"rollout-vm2-0": 0.86, "rollout-vm3-0": 0.71, "sandbox-vm4-0": 0.35, "trainer-vm1-0": 0.72}
    windows(1, rl_start, clock, shares)
    note(1, "allocation_end", attempt=1, outcome="continue", reason="time limit in 8 s; a step takes 1.1 s")

    # A wait in the queue, then allocation 2 from the checkpoint.
    clock += 21
    note(2, "term", base_term=1, base_step=SAVED_AT)
    allocation(2)
    clock += 4
    verdict(2, "rollback", to_step=SAVED_AT, evidence="newest complete checkpoint")
    resumed = clock
    for number in range(SAVED_AT + 1, SFT_STEPS + RL_STEPS + 1):
        step(2, number, number - SFT_STEPS)
        evaluation_beside(2, number)
    windows(2, resumed, clock, {**shares, "rollout-vm3-0": 0.84})
    evaluation(2, "after", SFT_STEPS + RL_STEPS, 0.82)
    clock += 1
    note(2, "run_complete", trained_groups=RL_STEPS * BATCH, steps=SFT_STEPS + RL_STEPS)
    note(2, "allocation_end", attempt=2, outcome="complete", reason="all steps trained")
    found.sort(key=lambda e: e["t"])
    yield from found


def write(run_dir: Path, seed: int = 0, *, until: int | None = None) -> Path:
    """Write the first `until` events (all by default) below `run_dir`/events, and resolved.toml; returns `run_dir`."""
    (run_dir / "events").mkdir(parents=True, exist_ok=True)
    (run_dir / "resolved.toml").write_text(RESOLVED_TOML)
    for index, event in enumerate(events(seed)):
        if until is None or index < until:
            append(run_dir / "events", event)
    return run_dir


def append(folder: Path, event: dict[str, Any]) -> None:
    """One line into the file that EventLog would use."""
    with open(folder / f"{event['process']}.t{event['term']:06d}.jsonl", "a") as file:
        file.write(json.dumps(event, separators=(",", ":")) + "\n")


def play(run_dir: Path, duration_s: float, seed: int = 0) -> None:
    """Write the events with the present time, compressed into `duration_s` seconds."""
    (run_dir / "events").mkdir(parents=True, exist_ok=True)
    (run_dir / "resolved.toml").write_text(RESOLVED_TOML)
    all_events = list(events(seed))
    begin, scale = time.time(), duration_s / (all_events[-1]["t"] - START)
    for event in all_events:
        moved = {k: begin + (event[k] - START) * scale for k in ("t", "start", "end") if k in event}
        time.sleep(max(0.0, moved["t"] - time.time()))
        append(run_dir / "events", {**event, **moved})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--live", type=float, default=0.0, metavar="SECONDS")
    arguments = parser.parse_args()
    if arguments.live:
        play(arguments.run_dir, arguments.live)
    else:
        write(arguments.run_dir)
