"""Runs on the real Slurm box that clusters interrupt, each in the way its scenario is called, and the audit after it.

    python -m tools.lifecycle_test [SCENARIO ...] [--layout hetjob,split] [--keep] [--json FILE]

| scenario | what happens | what must hold besides the audit |
|---|---|---|
| requeue, follow-up | the run needs five allocations of a minute | nobody's hand between them |
| rollout-power, trainer-power, batch-power | power cut of a node | goes on by itself |
| preempt | a job of a partition with priority takes the nodes | saved before the end, requeued, complete |
| cancel, scancel | miles-hpc cancel, or scancel of the job; a follow-up waits | nothing starts again; then resume |
| no-progress | every trainer start fails | the chain stops after two allocations and says why |
| full-disk | no space in the middle of a save | the older checkpoint stays valid; complete once there is space |
| notice | 20 notices, SIGTERM to steps or SIGUSR2 to the batch script | how long until the state is durable |
| bit-equal | deterministic mode, whole and in pieces with a killed rank | weights and optimizer bit-equal |
| spare | a trainer's and a rollout's node lose power, with --no-kill and spares | same allocation goes on |
| orphan | the batch host loses power under --no-kill, where Slurm lets the job go on | agents see to the next start |

The audit: as many groups as asked for are trained, none lost, none twice on the final lineage; and no process
of ours is left on the box. Exit code 0 when all hold.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checkpoints.manifest import list_checkpoints
from miles_hpc.core.errors import MilesError, UserError
from miles_hpc.core.telemetry import read_events
from tools.checkpoint_diff import diff, find_checkpoint
from tools.kill_test import VICTIMS, processes, rl_step
from tools.slurm_box import Box, BoxSpec

LAYOUTS = ("hetjob", "hetjob_span", "split", "split_span")

SETTINGS = {
    "sft.steps": "4",
    "sft.n_demonstrations": "32",
    "sft.batch_size": "16",
    "eval.n_episodes": "0",
    "rollout.n_steps": "60",
    "rollout.rollout_batch_size": "4",
    "rollout.n_samples_per_prompt": "4",
    "checkpoint.interval_steps": "5",
    "job.time": "00:05:00",
    "job.signal_s": "30",
}
#: Steps that take five allocations of a minute on two cores: an engine's decoding step is held up.
FIVE = {"rollout.n_steps": "75", "job.time": "00:01:00", "rollout.engine_step_interval_s": "0.08"}

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

FOLLOW_UP_SITE = 'name = "slurm_box_follow_up"\ninherits = "slurm_box"\nrequeue = false\n'


@dataclass
class Stage:
    """A box, a run directory on it, and what was seen."""

    box: Box
    run_dir: Path
    site: str
    layout: str
    settings: dict[str, str] = field(default_factory=dict)
    seen: dict[str, Any] = field(default_factory=dict)

    def cli(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """miles-hpc on the box. Raises MilesError when it fails."""
        command = [sys.executable, "-P", "-m", "miles_hpc.cli.main", *arguments]
        done = subprocess.run(command, env=self.box.env(), capture_output=True, text=True, timeout=120, check=False)
        if check and done.returncode:
            raise MilesError(f"{' '.join(arguments)}: {done.stdout}{done.stderr}")
        return done

    def submit(self, **settings: str) -> int:
        """Submit the demo with SETTINGS, the scenario's and these; returns the job's id."""
        values = {**SETTINGS, **self.settings, **settings, "job.layout": self.layout}
        sets = [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
        self.cli("submit", "demo", "--site", self.site, "--run-dir", str(self.run_dir), *sets)
        return int(json.loads((self.run_dir / "job.json").read_bytes())["job_id"])

    def notes(self, name: str) -> list[dict[str, Any]]:
        return [
            e for e in read_events(self.run_dir / "events") if e["kind"] in ("note", "verdict") and e["name"] == name
        ]

    def until(self, ready: Callable[[], object], what: str, seconds: float) -> None:
        """Wait for something. Raises MilesError with what the run said."""
        end = time.monotonic() + seconds
        while not ready():
            if time.monotonic() > end:
                raise MilesError(f"{what}: not within {seconds:.0f} s; {self.where()}")
            time.sleep(0.3)

    def where(self) -> str:
        told = [path.read_text(errors="replace")[-1500:] for path in sorted((self.run_dir / "attempts").glob("*.out"))]
        outcomes = [path.read_text() for path in sorted((self.run_dir / "attempts").glob("*/outcome.json"))]
        return f"step {rl_step(self.run_dir)}; outcomes {outcomes}; {self.box.run('squeue', '-a', '-h')}; {told}"

    def complete(self, seconds: float) -> None:
        self.until(lambda: self.notes("run_complete"), "the run's end", seconds)
        self.until(lambda: not self.box.run("squeue", "-h", "-a", "-o", "%i").split(), "an empty queue", 60)

    def outcomes(self) -> list[dict[str, Any]]:
        return [json.loads(p.read_bytes()) for p in sorted((self.run_dir / "attempts").glob("*/outcome.json"))]

    def audit(self) -> dict[str, Any]:
        """Counts of the final lineage. Raises MilesError when they aren't what was asked for."""
        done = subprocess.run(
            [sys.executable, "-P", "-m", "tools.audit_run", str(self.run_dir), "--json"],
            capture_output=True,
            text=True,
            check=False,
        )
        result: dict[str, Any] = json.loads(done.stdout) if done.stdout.strip() else {"error": done.stderr}
        sound = done.returncode == 0 and result["trained"] == result["asked"] and result["completed"]
        if not sound or result["lost"] or result["twice"]:
            raise MilesError(f"audit: {json.dumps(result)[:2000]}")
        return {key: result[key] for key in ("trained", "asked", "lost", "twice")}

    def leftovers(self) -> list[str]:
        """Command lines of processes of this run that still live."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if str(self.run_dir) in line and "launchers." in line:
                found.append(line)
        return found


# ---------------------------------------------------------------------------------------------- scenarios


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


def power(role: str) -> Callable[[Stage], None]:
    """Cut the power of a role's last node; `batch` is the first node of the job."""

    def scenario(stage: Stage) -> None:
        stage.submit()
        stage.until(lambda: rl_step(stage.run_dir) >= 8, "steps before the cut", 120)
        hosts = stage.notes("allocation_start")[0]["hosts"]
        node = hosts["trainer"][0] if role == "batch" else hosts[role][-1]
        began = time.time()
        stage.box.kill_node(node)
        stage.until(lambda: len(stage.notes("allocation_start")) >= 2, "the next allocation", 120)
        stage.seen["restarted_s"] = round(stage.notes("allocation_start")[1]["t"] - began, 1)
        stage.seen["cut"] = node
        stage.complete(240)
        again = stage.notes("allocation_start")[1]["hosts"]
        if any(node in some for some in again.values()):
            raise MilesError(f"{node} has no power and was given work: {again}")

    return scenario


def preempt(stage: Stage) -> None:
    stage.submit()
    stage.until(lambda: rl_step(stage.run_dir) >= 8, "steps before the preemption", 120)
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
    stage.complete(240)


def cancel(stage: Stage, *, plainly: bool = False) -> None:
    job = stage.submit(**{"rollout.n_steps": "40"})
    stage.until(lambda: rl_step(stage.run_dir) >= 4, "steps before the cancel", 120)
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


def full_disk(stage: Stage) -> None:
    """The run directory is a file system of its own, which something else fills up."""
    stage.run_dir.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=96m", "tmpfs", str(stage.run_dir)], check=True)
    filler = stage.run_dir / "sessions" / "filler"
    try:
        stage.submit(**{"rollout.n_steps": "60"})
        stage.until(lambda: rl_step(stage.run_dir) >= 8, "steps before the file system is full", 120)
        filler.parent.mkdir(exist_ok=True)
        with filler.open("wb") as file:
            try:
                while True:
                    file.write(bytes(1 << 20))
                    file.flush()
            except OSError:
                pass
        stage.seen["full_at_step"] = rl_step(stage.run_dir)
        time.sleep(20)
        listing = subprocess.run(
            [sys.executable, "-P", "-m", "tools.audit_run", str(stage.run_dir), "--json", "--strict"],
            capture_output=True,
            text=True,
            check=False,
        )
        while_full = json.loads(listing.stdout)
        if while_full["twice"] or while_full["lost"]:
            raise MilesError(f"while full: {listing.stdout[:1500]}")
        filler.unlink()
        stage.until(
            lambda: stage.notes("run_complete") or not stage.box.run("squeue", "-h", "-a", "-o", "%i").split(),
            "the run's end",
            240,
        )
        if not stage.notes("run_complete"):
            stage.seen["stopped"] = stage.outcomes()[-1]["reason"]
            stage.cli("resume", str(stage.run_dir))
        stage.complete(240)
        stage.seen["audit"] = stage.audit()
    finally:
        stage.box.run("scancel", "--user", str(os.getuid()))
        deadline = time.monotonic() + 60
        while stage.leftovers() and time.monotonic() < deadline:
            time.sleep(0.5)
        subprocess.run(["umount", "--lazy", str(stage.run_dir)], check=True)


def spare(stage: Stage) -> None:
    stage.submit(**{"groups.trainer.spare_nodes": "1", "groups.rollout.spare_nodes": "1", "groups.sandbox.nodes": "2"})
    stage.until(lambda: rl_step(stage.run_dir) >= 8, "steps before the cut", 120)
    hosts = stage.notes("allocation_start")[0]["hosts"]
    for role in ("rollout", "trainer"):
        node, step = hosts[role][-1], rl_step(stage.run_dir)
        began = time.time()
        stage.box.kill_node(node)
        stage.until(lambda n=node: [v for v in stage.notes("node_failed") if v["peer"] == n], f"{node} given up", 60)
        stage.until(lambda s=step: rl_step(stage.run_dir) >= s + 4, "steps after the cut", 120)
        stage.seen[f"{role}_replaced_s"] = round(stage.notes("node_failed")[-1]["t"] - began, 1)
    stage.complete(240)
    if len(stage.outcomes()) != 1:
        raise MilesError(f"{len(stage.outcomes())} allocations: spares should have kept the first")


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


def orphan(stage: Stage) -> None:
    stage.submit(**{"groups.trainer.spare_nodes": "1", "groups.sandbox.nodes": "2"})
    stage.until(lambda: rl_step(stage.run_dir) >= 8, "steps before the cut", 120)
    began = time.time()
    stage.box.kill_node(stage.notes("allocation_start")[0]["hosts"]["trainer"][0])
    stage.until(lambda: len(stage.notes("allocation_start")) >= 2, "the next allocation", 180)
    stage.seen["restarted_s"] = round(stage.notes("allocation_start")[1]["t"] - began, 1)
    stage.complete(240)


SCENARIOS: dict[str, Callable[[Stage], None]] = {
    "requeue": five,
    "follow-up": five,
    "rollout-power": power("rollout"),
    "trainer-power": power("trainer"),
    "batch-power": power("batch"),
    "preempt": preempt,
    "cancel": cancel,
    "scancel": functools.partial(cancel, plainly=True),
    "no-progress": no_progress,
    "full-disk": full_disk,
    "spare": spare,
    "orphan": orphan,
    "notice": notice,
    "bit-equal": bit_equal,
}
#: Nodes for each: one more than the run takes where one is lost.
NODES = {
    "rollout-power": "trainer:2,rollout:3,sandbox:1",
    "trainer-power": "trainer:3,rollout:2,sandbox:1",
    "batch-power": "trainer:3,rollout:2,sandbox:1",
    "spare": "trainer:3,rollout:3,sandbox:2",
    "orphan": "trainer:4,rollout:2,sandbox:2",
}


@contextmanager
def stage_for(name: str, layout: str, *, keep: bool, netns: bool = False) -> Iterator[Stage]:
    """A box of the scenario's size, up, in a folder of its own."""
    root = Path(tempfile.mkdtemp(prefix="ml-", dir="/tmp"))
    root.chmod(0o755)
    box = Box(root / "box")
    site = "slurm_box"
    if name in ("follow-up", "cancel", "scancel"):
        (root / "slurm_box_follow_up.toml").write_text(FOLLOW_UP_SITE)
        site = str(root / "slurm_box_follow_up.toml")
    try:
        box.up(BoxSpec.parse(NODES.get(name, "trainer:2,rollout:2,sandbox:1"), netns=netns))
        yield Stage(box, root / "run", site, layout)
    finally:
        box.down()
        if not keep:
            shutil.rmtree(root, ignore_errors=True)


def play(name: str, layout: str, *, keep: bool = False) -> dict[str, Any]:
    """One scenario; returns what was seen. Raises MilesError when something doesn't hold."""
    began = time.monotonic()
    with stage_for(name, layout, keep=keep) as stage:
        SCENARIOS[name](stage)
        stage.seen.setdefault("audit", None)
        stage.seen["audit"] = stage.seen["audit"] or stage.audit()
        deadline = time.monotonic() + 10
        while (left := stage.leftovers()) and time.monotonic() < deadline:
            time.sleep(0.3)
        if left:
            raise MilesError(f"left behind: {left}")
    return {"scenario": name, "layout": layout, "seconds": round(time.monotonic() - began, 1), **stage.seen}


def main() -> int:
    parser = argparse.ArgumentParser(prog="lifecycle_test", description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help=f"default: all of {', '.join(SCENARIOS)}")
    parser.add_argument("--layout", default="hetjob", help=f"some of {','.join(LAYOUTS)}; default: hetjob")
    parser.add_argument("--keep", action="store_true", help="keep the folders")
    parser.add_argument("--json", type=Path, help="append one line a scenario to this file")
    args = parser.parse_args()
    layouts = args.layout.split(",")
    names = args.scenarios or list(SCENARIOS)
    for given, known in ((names, SCENARIOS), (layouts, LAYOUTS)):
        if unknown := [one for one in given if one not in known]:
            print(
                f"lifecycle_test: error: unknown {unknown[0]!r}: expected some of {', '.join(known)}", file=sys.stderr
            )
            return 2
    failed = 0
    for layout in layouts:
        for name in names:
            try:
                result = play(name, layout, keep=args.keep)
            except (MilesError, UserError, subprocess.SubprocessError) as error:
                failed += 1
                result = {"scenario": name, "layout": layout, "FAILED": str(error)}
            line = json.dumps(result)
            print(line, flush=True)
            if args.json:
                with args.json.open("a") as file:
                    file.write(line + "\n")
    print(f"lifecycle_test: {'passed' if not failed else f'{failed} FAILED'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
