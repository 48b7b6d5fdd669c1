"""Allocations that end: by their limit, by a notice, by somebody's hand, by the chain's own rules."""

from __future__ import annotations

import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Callable

from checkpoints.manifest import list_checkpoints
from miles_hpc.core.errors import MilesError
from tools.checkpoint_diff import diff, find_checkpoint
from tools.kill_test import VICTIMS, processes, rl_step
from tools.lifecycle_test.stage import FIVE, SETTINGS, Stage

#: Deterministic mode: what is trained depends on the seed alone. No deadline that a busy machine might miss.
DETERMINISTIC = {
    "rollout.max_weight_staleness": "0",
    "rollout.max_admitted_batches": "1.0",
    "rollout.engine_batch_invariant": "true",
    "rollout.sandbox_timeout_s": "60.0",
    "rollout.trajectory_deadline_s": "300.0",
    "rollout.n_steps": "30",
    # enough of a warm start for rewards that differ: without, RL has no gradient and everything is equal to everything
    "sft.steps": "60",
    "sft.n_demonstrations": "200",
    "sft.batch_size": "64",
    "rollout.n_samples_per_prompt": "8",
}


def five(stage: Stage) -> None:
    stage.submit(**FIVE)
    stage.complete(1500)  # a busy machine spends most of each minute on starting
    allocations = len(stage.outcomes())
    stage.seen["allocations"] = allocations
    jobs = {record.het_job_id or record.job_id for record in stage.box.history()}
    stage.seen["jobs"] = len(jobs)
    if allocations < 5:
        raise MilesError(f"{allocations} allocations: the run was too short for the test")
    if (len(jobs) == 1) != (stage.site == "slurm_box"):
        raise MilesError(f"{len(jobs)} jobs at a site with requeue {stage.site == 'slurm_box'}")


def preempt(stage: Stage) -> None:
    stage.submit()
    stage.reach(8)
    _take_all_nodes(stage)
    stage.complete(240)


def preempt_in(phase: str) -> Callable[[Stage], None]:
    """Preempted before there is an RL step."""

    def scenario(stage: Stage) -> None:
        if phase == "warm start":
            stage.submit(**{"sft.steps": "400", "rollout.n_steps": "10"})
            stage.until(lambda: [n for n in stage.notes("phase") if n["phase"] == "sft"], phase, 120)
        else:
            stage.submit(**{"eval.n_episodes": "256", "rollout.n_steps": "10", "rollout.engine_step_interval_s": "0.2"})
            stage.until(lambda: stage.last_step() >= int(SETTINGS["sft.steps"]), phase, 120)
        time.sleep(3)
        _take_all_nodes(stage)
        if rl_step(stage.run_dir):
            raise MilesError(f"step {rl_step(stage.run_dir)}: the preemption came too late for the test")
        stage.complete(400)

    return scenario


def _take_all_nodes(stage: Stage) -> None:
    """A short job of the partition with priority takes the nodes; what was saved counts up to the end."""
    count = len(stage.box.run("sinfo", "-N", "-h", "-p", "all", "-o", "%N").split())
    stage.box.run(
        "sbatch", "-p", "urgent", f"-N{count}", "--exclusive", "--time=1", "--output=/dev/null", "--wrap=sleep 5"
    )
    asked = time.time()
    stage.until(lambda: stage.outcomes(), "the end of the first allocation", 90)
    first = stage.outcomes()[0]
    if first["outcome"] != "continue":
        raise MilesError(f"preempted, and the outcome is {first}")
    (noticed,) = [n["t"] for n in stage.notes("notice")][:1]
    saved = max(n["t"] for n in stage.notes("checkpoint") if n["t"] <= first["time"])
    stage.seen |= {"notice_to_durable_s": round(saved - noticed, 2), "asked_to_notice_s": round(noticed - asked, 2)}


def cancel(stage: Stage, *, plainly: bool = False) -> None:
    job = stage.submit(**{"rollout.n_steps": "40"})
    stage.reach(4)
    if plainly:
        stage.box.run("scancel", str(job))
    else:
        stage.seen["said"] = stage.cli("cancel", str(stage.run_dir)).stdout.strip()
    stage.until(lambda: not stage.box.run("squeue", "-h", "-a", "-o", "%i").split(), "an empty queue", 90)
    time.sleep(8)  # a requeued job would be back by now
    queued = stage.box.run("squeue", "-h", "-a", "-o", "%i").split()
    if queued or len(stage.outcomes()) != 1:
        raise MilesError(f"after the cancel: queue {queued}, outcomes {stage.outcomes()}")
    stage.cli("resume", str(stage.run_dir))
    stage.complete(240)


def no_progress(stage: Stage) -> None:
    broken = stage.run_dir.parent / "broken-python"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    stage.submit(**{"python.trainer": str(broken), "control.max_role_restarts": "1000", "job.time": "00:01:00"})
    stage.until(lambda: any(o["outcome"] == "stopped" for o in stage.outcomes()), "the chain's end", 400)
    stage.until(lambda: not stage.box.run("squeue", "-h", "-a", "-o", "%i").split(), "an empty queue", 90)
    stage.seen["allocations"] = len(stage.outcomes())
    stage.seen["why"] = stage.outcomes()[-1]["reason"]
    if "no progress" not in stage.seen["why"] or stage.seen["allocations"] != 2:
        raise MilesError(f"stopped with {stage.seen}")
    stage.seen["status"] = stage.cli("status", str(stage.run_dir)).stdout
    stage.cli("resume", str(stage.run_dir), "--set", f"python.trainer={sys.executable}", "--set", "job.time=00:05:00")
    stage.complete(240)


def notice(stage: Stage) -> None:
    """20 notices, one an allocation, at times that have nothing to do with steps: SIGTERM to the steps, as a preemption
    sends it, or SIGUSR2 to the batch script, as before the limit."""
    job = stage.submit(**{"rollout.n_steps": "2000", "job.time": "00:30:00"})
    took: dict[str, list[float]] = {"TERM": [], "USR2": []}
    rng = random.Random(7)
    for n in range(20):
        attempt, kind = len(stage.notes("allocation_start")), ("TERM", "USR2")[n % 2]
        began = rl_step(stage.run_dir)
        stage.until(lambda b=began: rl_step(stage.run_dir) >= b + 3, "steps of this allocation", 180)
        time.sleep(2.0 * rng.random())
        told = time.time()
        stage.box.run("scancel", f"--signal={kind}", *(["--batch"] if kind == "USR2" else []), str(job))
        stage.until(lambda t=told: any(c["t"] > t for c in stage.notes("checkpoint")), f"a save after {kind}", 60)
        took[kind].append(round(min(c["t"] for c in stage.notes("checkpoint") if c["t"] > told) - told, 2))
        if kind == "TERM":
            stage.until(lambda a=attempt: len(stage.notes("allocation_start")) > a, "the next allocation", 120)
    every = sorted(took["TERM"] + took["USR2"])
    stage.seen |= {"notice_to_durable_s": took, "median": statistics.median(every), "max": every[-1]}
    stage.cli("cancel", str(stage.run_dir))
    stage.until(lambda: not stage.box.run("squeue", "-h", "-a", "-o", "%i").split(), "an empty queue", 90)
    stage.cli("resume", str(stage.run_dir), "--set", f"rollout.n_steps={rl_step(stage.run_dir) + 4}")
    stage.complete(240)


def bit_equal(stage: Stage) -> None:
    """The same run twice: whole, and in pieces of a minute with a killed trainer rank in between."""
    stage.submit(**DETERMINISTIC, **{"job.time": "00:15:00"})
    stage.complete(600)
    whole = stage.run_dir.rename(stage.run_dir.with_name("whole"))
    stage.submit(**DETERMINISTIC, **{"job.time": "00:01:00"})
    stage.until(lambda: rl_step(stage.run_dir) >= 3, "steps before the kill", 240)
    os.kill(processes(VICTIMS["rank"], stage.run_dir)[0], signal.SIGKILL)
    stage.complete(900)
    kept = [one.path for one in sorted(list_checkpoints(whole / "checkpoints"), key=lambda one: one.step)]
    if diff(kept[0], kept[-1]).largest == 0.0:
        raise MilesError("RL changed no weight: nothing was tested")
    found = diff(find_checkpoint(whole), find_checkpoint(stage.run_dir))
    stage.seen |= {
        "allocations": len(stage.outcomes()),
        "terms": len(list((stage.run_dir / "terms").glob("[0-9]*"))),
        "tensors": found.tensors,
        "elements": found.elements,
        "different": len(found.different) + len(found.missing),
        "largest": found.largest,
    }
    if not found.equal or stage.seen["allocations"] < 2:
        raise MilesError(f"not the same: {stage.seen}: {found.different[:5]}")
