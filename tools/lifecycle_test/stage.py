"""A box, a run on it, and what a scenario asks of both."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from miles_hpc.core.errors import MilesError
from miles_hpc.core.site import Layout
from miles_hpc.core.telemetry import read_events
from tools.kill_test import rl_step
from tools.slurm_box import Box, BoxSpec

LAYOUTS = get_args(Layout)

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

    def last_step(self) -> int:
        """The newest step that was trained, warm start included."""
        return max((e["step"] for e in read_events(self.run_dir / "events") if e["kind"] == "metric"), default=0)

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

    def reach(self, step: int) -> None:
        """Wait for an RL step."""
        self.until(lambda: rl_step(self.run_dir) >= step, f"step {step}", 120)

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


@contextmanager
def stage_for(nodes: str, layout: str, *, follow_up: bool, keep: bool) -> Iterator[Stage]:
    """A box with these nodes, up, in a folder of its own."""
    root = Path(tempfile.mkdtemp(prefix="ml-", dir="/tmp"))
    root.chmod(0o755)
    box = Box(root / "box")
    site = "slurm_box"
    if follow_up:
        (root / "slurm_box_follow_up.toml").write_text(FOLLOW_UP_SITE)
        site = str(root / "slurm_box_follow_up.toml")
    try:
        box.up(BoxSpec.parse(nodes))
        yield Stage(box, root / "run", site, layout)
    finally:
        box.down()
        if not keep:
            shutil.rmtree(root, ignore_errors=True)
