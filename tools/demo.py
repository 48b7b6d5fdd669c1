"""A whole RL run on a real Slurm cluster, from nothing to a report: what `make demo` starts.

    private Slurm box up (unless the machine has a cluster) ─▶ submit one het job ─▶ live view ─▶ the time limit cuts it
    ─▶ Slurm starts it again by itself ─▶ done ─▶ audit, report, and where everything lies

The first allocation is cut by its own time limit on purpose: `job.time` in the demo's recipe is shorter than the run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from miles_hpc.cluster.slurm import Slurm
from miles_hpc.cluster.submit import read_job
from miles_hpc.core import env
from miles_hpc.core.errors import MilesError, UserError
from miles_hpc.core.paths import RunPaths
from miles_hpc.core.telemetry import read_events

_BOX_NODES = "trainer:2,rollout:2,sandbox:1"


def main() -> int:
    parser = argparse.ArgumentParser(prog="demo", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--run-dir", type=Path, default=None, help="default: runs/demo-seed<SEED>, or -2, -3, ...")
    parser.add_argument("--recipe", default="demo", help="run file or recipe name")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--keep-box", action="store_true", help="leave the private cluster up at the end")
    args = parser.parse_args()
    try:
        return demo(args)
    except MilesError as error:
        print(f"demo: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1


def demo(args: argparse.Namespace) -> int:
    """Run it; returns the exit code."""
    started = time.monotonic()
    run_dir = args.run_dir or _free_folder(Path("runs"), f"{Path(args.recipe).stem}-seed{args.seed}")
    site = str(env.read("MILES_HPC_SITE"))
    if site and _has_slurm():
        print(f"demo: this machine has Slurm; site '{site}'")
        return _run(args, run_dir, site, dict(os.environ), started, history=None)
    from tools.slurm_box import Box, BoxSpec

    box = Box(f"/tmp/miles-demo-{os.getuid()}")
    seconds = box.up(BoxSpec.parse(_BOX_NODES))
    print(f"demo: private Slurm cluster up in {seconds:.1f} s ({_BOX_NODES}); SLURM_CONF={box.env()['SLURM_CONF']}")
    try:
        return _run(args, run_dir, "slurm_box", box.env(), started, history=box.history)
    finally:
        if not args.keep_box:
            box.down()


def _run(
    args: argparse.Namespace, run_dir: Path, site: str, environ: dict[str, str], started: float, history: Any
) -> int:
    cli = [sys.executable, "-P", "-m", "miles_hpc.cli.main"]
    command = [*cli, "submit", args.recipe, "--site", site, "--run-dir", str(run_dir), "--watch"]
    for setting in (f"seed={args.seed}", *args.set):
        command += ["--set", setting]
    try:
        code = subprocess.run(command, env=environ, check=False).returncode
    except KeyboardInterrupt:
        subprocess.run([*cli, "cancel", str(run_dir)], env=environ, check=False)
        return 130
    if not run_dir.exists():
        return code
    audit = subprocess.run(
        [sys.executable, "-P", "-m", "tools.audit_run", str(run_dir), "--json"],
        env=environ,
        check=False,
        stdout=subprocess.PIPE,
    )
    (run_dir / "audit.json").write_bytes(audit.stdout)
    subprocess.run([*cli, "report", str(run_dir)], env=environ, check=False)
    print(summary(run_dir, json.loads(audit.stdout or b"{}")))
    if history is not None:
        _wait_for_job(run_dir, environ)
        print(_allocations(run_dir, history()))
    took = time.monotonic() - started
    print(f"demo: {took / 60:.1f} minutes in all. Everything lies in {run_dir}: open {run_dir}/report.html")
    return code or audit.returncode


def summary(run_dir: Path, audit: dict[str, Any]) -> str:
    """What came out, in a few lines."""
    events = read_events(run_dir / "events")
    evaluations = {e["when"]: e for e in events if e["kind"] == "note" and e.get("name") == "evaluation"}
    lines = []
    if {"before", "after"} <= evaluations.keys():
        before, after = evaluations["before"], evaluations["after"]
        lines.append(
            f"demo: held-out reward over {after['n']} episodes: {before['mean']:.3f} before RL,"
            f" {after['mean']:.3f} after ({after['mean'] - before['mean']:+.3f})"
        )
        kinds = (f"{k} {before['by_label'].get(k, 0):.2f}->{v:.2f}" for k, v in after["by_label"].items())
        lines.append("demo: by kind: " + ", ".join(kinds))
    if "asked" in audit:
        lines.append(
            f"demo: audit: {audit['trained']} of {audit['asked']} groups trained, {len(audit['lost'])} lost,"
            f" {len(audit['twice'])} trained twice, {sum(audit['dropped'].values())} dropped with a reason"
        )
    return "\n".join(lines)


def _allocations(run_dir: Path, records: list[Any]) -> str:
    """The box's own job records of this run: one het job, its components, each start."""
    job_id = json.loads((run_dir / "job.json").read_bytes())["job_id"]
    mine = [r for r in records if r.het_job_id == job_id]
    lines = [f"demo: Slurm's records of het job {job_id} ({len({r.start for r in mine})} starts):"]
    lines += [
        f"demo:   component {r.het_offset} {r.name:<16} {r.state:<10} {r.start} to {r.end} on {','.join(r.nodes)}"
        for r in mine
    ]
    return "\n".join(lines)


def _wait_for_job(run_dir: Path, environ: dict[str, str], timeout_s: float = 60.0) -> None:
    """Until Slurm has ended the job: the run is complete a moment before its last processes are gone."""
    slurm = Slurm(environ=environ)
    job_id = read_job(RunPaths(run_dir.resolve()))
    end = time.monotonic() + timeout_s
    while job_id is not None and time.monotonic() < end and any(c.active for c in slurm.components(job_id)):
        time.sleep(0.5)


def _has_slurm() -> bool:
    if shutil.which("sinfo") is None:
        return False
    try:
        return subprocess.run(["sinfo", "-h"], capture_output=True, timeout=10, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def _free_folder(parent: Path, name: str) -> Path:
    number = 1
    while True:
        folder = parent / (name if number == 1 else f"{name}-{number}")
        if not folder.exists():
            return folder
        number += 1


if __name__ == "__main__":
    sys.exit(main())
