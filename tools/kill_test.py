"""The kill test: a run on the real Slurm box, with `kill -9` at chosen steps, that must come out whole.

    python -m tools.kill_test [--faults engine,agent,rank,controller,srun] [--layout split_span] [--seed 0]
                              [--set KEY=VALUE] [--allocations 2] [--keep]

Each fault is injected once, when the run has reached its step; the time limit cuts the run as well (at least two
allocations, or the test fails). Afterwards the audit must find: the number of trained groups that was asked for, none
lost, none trained twice on the final lineage.
Processes are found by their command line, which names the run directory, and are killed by pid.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from miles_hpc.core.layouts import spans
from miles_hpc.core.site import Layout
from miles_hpc.core.telemetry import read_events
from tools.slurm_box import Box, BoxSpec

#: Smaller than the demo: what is tested is the lineage, not the learning.
SETTINGS = (
    "sft.steps=10",
    "sft.n_demonstrations=64",
    "eval.n_episodes=0",
    "rollout.n_steps=160",
    "rollout.rollout_batch_size=8",
    "rollout.n_samples_per_prompt=4",
    "checkpoint.interval_steps=5",
    "job.time=00:02:00",
    "control.lease_s=10.0",
)


@dataclass(frozen=True)
class Victim:
    """A kind of process: words that its command line must contain."""

    name: str
    words: tuple[str, ...]


VICTIMS = {
    v.name: v
    for v in (
        Victim("engine", ("launchers.engine",)),
        Victim("sessions", ("launchers.session_server",)),
        Victim("sglang", ("sglang.launch_server",)),
        Victim("agent", ("launchers.agent", "--role rollout", "!srun")),
        Victim("member", ("launchers.mpi_member", "--child")),
        Victim("all-srun", ("srun", "launchers.agent", "--span")),
        Victim("rank", ("launchers.trainer",)),
        Victim("controller", ("launchers.controller",)),
        Victim("supervisor", ("launchers.supervisor",)),
        Victim("srun", ("srun", "launchers.agent", "--role rollout")),
        Victim("trainer-srun", ("srun", "launchers.agent", "--role trainer")),
        Victim("sandbox-agent", ("launchers.agent", "--role sandbox", "!srun")),
    )
}


_EVERYWHERE = ("engine", "agent", "rank", "controller", "supervisor", "sandbox-agent")


def default_faults(layout: Layout) -> list[str]:
    """One kill of each kind of process that a run of this layout has."""
    return [*_EVERYWHERE, *(("all-srun", "member") if spans(layout) else ("srun", "trainer-srun"))]


def processes(victim: Victim, run_dir: Path) -> list[int]:
    """Pids of living processes of this kind and run, lowest first."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            state = (folder / "stat").read_text().rsplit(")", 1)[1].split()[0]
        except (OSError, IndexError):
            continue
        if str(run_dir) not in line or state in "ZX":
            continue
        program = line.split(" ", 1)[0]
        is_srun = program.endswith("srun")
        wants = [w for w in victim.words if not w.startswith("!") and w != "srun"]
        if ("srun" in victim.words) == is_srun and all(w in line for w in wants):
            found.append(int(folder.name))
    return sorted(found)


def rl_step(run_dir: Path) -> int:
    """The highest RL step that any term has done so far."""
    steps = [
        e["step"]
        for e in read_events(run_dir / "events")
        if e["kind"] == "metric" and "rollout/raw_reward" in e["values"]
    ]
    return max(steps, default=0)


def inject(
    run_dir: Path, plan: list[tuple[int, str]], alive: Callable[[], bool], say: Callable[[str], None]
) -> Iterator[str]:
    """Kill each fault's process when the run has reached its step; yields the names as they are done."""
    for step, name in plan:
        while rl_step(run_dir) < step:
            if not alive():
                return
            time.sleep(0.3)
        pids = processes(VICTIMS[name], run_dir)
        end = time.monotonic() + 60
        while not pids and alive() and time.monotonic() < end:
            time.sleep(0.2)
            pids = processes(VICTIMS[name], run_dir)
        if not pids:
            say(f"no process to kill for '{name}'")
            continue
        os.kill(pids[0], signal.SIGKILL)
        say(f"step {rl_step(run_dir)}: kill -9 {name} (pid {pids[0]})")
        yield name


def kill_test(
    box: Box, run_dir: Path, faults: list[str], *, seed: int, settings: tuple[str, ...] = SETTINGS
) -> dict[str, object]:
    """Run, inject, audit. Returns the audit with `faults` (injected) and `exit` (of the submit command) added."""
    values = dict(s.split("=", 1) for s in settings)
    sft, n_steps = int(values["sft.steps"]), int(values["rollout.n_steps"])
    first, last = sft + 3, sft + int(0.8 * n_steps)
    spread = max(1, (last - first) // max(1, len(faults)))
    plan = [(first + i * spread, name) for i, name in enumerate(faults)]
    command = [sys.executable, "-P", "-m", "miles_hpc.cli.main", "submit", "demo", "--site", "slurm_box"]
    command += ["--run-dir", str(run_dir), "--watch", "--set", f"seed={seed}"]
    for setting in settings:
        command += ["--set", setting]
    began = time.monotonic()
    with open(run_dir.with_suffix(".watch.log"), "wb") as log:
        watch = subprocess.Popen(command, env=box.env(), stdout=log, stderr=subprocess.STDOUT)
        try:
            done = list(
                inject(
                    run_dir, plan, lambda: watch.poll() is None, lambda text: print(f"kill_test: {text}", flush=True)
                )
            )
            code = watch.wait(timeout=900)
        finally:
            if watch.poll() is None:
                watch.kill()
                watch.wait()
    audit = subprocess.run(
        [sys.executable, "-P", "-m", "tools.audit_run", str(run_dir), "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    result: dict[str, object] = json.loads(audit.stdout) if audit.stdout.strip() else {"error": audit.stderr}
    return result | {
        "faults": done,
        "exit": code,
        "audit_exit": audit.returncode,
        "seconds": round(time.monotonic() - began, 1),
        "allocations": len(list((run_dir / "attempts").glob("[0-9]*"))),
        "terms": len(list((run_dir / "terms").glob("[0-9]*"))),
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="kill_test", description=__doc__)
    parser.add_argument("--faults", help="default: each kind of process that the layout has, once")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layout", default="hetjob", choices=get_args(Layout), help="job.layout of the run")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of the run file, after ours")
    parser.add_argument("--allocations", type=int, default=2, help="so many at least, or the time limit wasn't met")
    parser.add_argument("--keep", action="store_true", help="keep the run directory")
    args = parser.parse_args()
    faults = default_faults(args.layout) if args.faults is None else [f for f in args.faults.split(",") if f]
    unknown = [f for f in faults if f not in VICTIMS]
    if unknown:
        print(f"kill_test: error: unknown fault {unknown[0]!r}: expected some of {', '.join(VICTIMS)}", file=sys.stderr)
        return 2
    root = Path(tempfile.mkdtemp(prefix="mk-", dir="/tmp"))
    root.chmod(0o755)
    box = Box(root / "box")
    try:
        box.up(BoxSpec.parse("trainer:2,rollout:2,sandbox:1"))
        result = kill_test(
            box, root / "run", faults, seed=args.seed, settings=(*SETTINGS, f"job.layout={args.layout}", *args.set)
        )
    finally:
        box.down()
        if not args.keep:
            shutil.rmtree(root, ignore_errors=True)
    print(json.dumps(result, indent=1))
    ok = (
        result.get("exit") == 0
        and result.get("audit_exit") == 0
        and len(result.get("faults", [])) == len(faults)
        and result["allocations"] >= args.allocations
    )  # type: ignore[arg-type]
    print(f"kill_test: {'passed' if ok else 'FAILED'}" + (f"; kept in {root}" if args.keep else ""))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
