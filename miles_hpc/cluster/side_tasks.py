"""What side jobs do that needs no heavy package: checks of checkpoints, programs on every node.

A side job's function takes the run directory and JSON, returns JSON, and raises what went wrong.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from checkpoints.manifest import CheckpointFolder, list_checkpoints
from checkpoints.verify import verify_checkpoint
from miles_hpc.core.errors import DeadlineExpired, IntegrityError, MilesError, UserError
from miles_hpc.core.paths import RunPaths

__all__ = ["check_checkpoint", "find_checkpoint", "run_program"]


def find_checkpoint(checkpoints: Path, step: int | None = None) -> CheckpointFolder:
    """The checkpoint that a run would continue from, or that of `step` (of several terms: the newest).

    Raises UserError when there is none, and when the one of `step` isn't complete.
    """
    found = list_checkpoints(checkpoints)
    if step is None:
        usable = [checkpoint for checkpoint in found if checkpoint.usable]
        if not usable:
            raise UserError(f"{checkpoints}: no complete checkpoint ({len(found)} folders)")
        return usable[-1]
    chosen = [checkpoint for checkpoint in found if checkpoint.step == step]
    if not chosen:
        steps = ", ".join(str(checkpoint.step) for checkpoint in found) or "none"
        raise UserError(f"{checkpoints}: no checkpoint of step {step}: there are {steps}")
    if chosen[-1].manifest is None:
        raise UserError(f"{chosen[-1].path}: {'; '.join(chosen[-1].problems)}")
    return chosen[-1]


def check_checkpoint(run_dir: str, step: int | None = None) -> dict[str, Any]:
    """Read every file of a checkpoint and compare size and CRC-32 with its manifest.

    Returns the folder's name, step, term, files, bytes, seconds, and the files that no CRC was recorded for. Raises
    IntegrityError that names all that differs, UserError when there is no such checkpoint.
    """
    began = time.monotonic()
    checkpoint = find_checkpoint(RunPaths(Path(run_dir)).checkpoints, step)
    manifest = checkpoint.manifest
    assert manifest is not None  # find_checkpoint raises otherwise
    problems = verify_checkpoint(checkpoint.path, manifest)
    if problems:
        raise IntegrityError(f"checkpoint {checkpoint.path}: {'; '.join(problems)}")
    return {
        "checkpoint": checkpoint.path.name,
        "step": checkpoint.step,
        "term": checkpoint.term,
        "files": len(manifest.files),
        "n_bytes": sum(entry.n_bytes for entry in manifest.files.values()),
        "without_crc": [name for name, entry in manifest.files.items() if entry.crc32 is None],
        "seconds": round(time.monotonic() - began, 3),
    }


def run_program(module: str, arguments: list[str], timeout_s: float = 600.0) -> dict[str, Any]:
    """Run `python -m module` on this node: its exit code, and its output as JSON where it is JSON.

    A program that reports findings by exit code 1 has done its work. Raises MilesError for any other code, with the
    last line of its complaint, and DeadlineExpired after `timeout_s` seconds.
    """
    command = [sys.executable, "-P", "-m", module, *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, check=False, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired as error:
        raise DeadlineExpired(f"{module} on {socket.gethostname()}: not done after {timeout_s:.0f} s") from error
    if done.returncode not in (0, 1) or (done.returncode == 1 and not done.stdout.strip()):
        line = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise MilesError(f"{module} on {socket.gethostname()}: exit code {done.returncode}: {line}")
    try:
        output: Any = json.loads(done.stdout)
    except ValueError:
        output = done.stdout
    return {"host": socket.gethostname(), "exit_code": done.returncode, "output": output}
