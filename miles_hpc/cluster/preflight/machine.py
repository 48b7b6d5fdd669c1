"""This machine, for the checks: commands and probes in children that may hang."""

from __future__ import annotations

import json
import math
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from miles_hpc.cluster.preflight import probe as probe_program
from miles_hpc.cluster.preflight.contract import COMMAND_S, Output, Probe
from miles_hpc.core import env

__all__ = ["LocalMachine"]

_LIMITS = {"nofile": resource.RLIMIT_NOFILE, "memlock": resource.RLIMIT_MEMLOCK}
_REAP_S = 0.5
#: Where `ip` and others are that an ordinary user's PATH may lack.
_ALSO = "/usr/sbin:/sbin"


class LocalMachine:
    """The `Machine` that is this one. `environ` is what commands get and checks see; default: this process's."""

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        self.environ: Mapping[str, str] = dict(os.environ if environ is None else environ)

    @property
    def host(self) -> str:
        return str(env.read("SLURMD_NODENAME", self.environ)) or socket.gethostname().partition(".")[0]

    def run(self, *argv: str, timeout_s: float = COMMAND_S) -> Output:
        shown = " ".join(argv[:4])
        program = shutil.which(argv[0], path=f"{self.environ.get('PATH', '')}:{_ALSO}")
        if program is None:
            return Output(code=127, problem=f"'{argv[0]}' is not on PATH", missing=True)
        try:
            process = subprocess.Popen(
                [program, *argv[1:]],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                env=dict(self.environ),
                start_new_session=True,
            )
        except OSError as error:
            return Output(code=126, problem=f"{shown}: can't be started: {error.strerror}")
        try:
            stdout, stderr = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            _give_up(process)
            return Output(code=-signal.SIGKILL, problem=f"{shown}: no answer within {timeout_s:.0f} s", timed_out=True)
        complaint = [line.strip() for line in (stderr + stdout).splitlines() if line.strip()]
        problem = ""
        if process.returncode:
            problem = f"{shown}: {complaint[0] if complaint else f'exit code {process.returncode}'}"
        return Output(stdout=stdout, stderr=stderr, code=process.returncode, problem=problem)

    def probe(self, what: str, *arguments: str, timeout_s: float = COMMAND_S, python: str = "") -> Probe:
        program = str(Path(probe_program.__file__))
        # With site-packages only where packages are asked for: they take most of the start.
        options = ["-I"] if what in ("packages", "package_files") else ["-I", "-S"]
        done = self.run(python or sys.executable, *options, program, what, *arguments, timeout_s=timeout_s)
        if done.timed_out:
            subject = arguments[0] if arguments else ""
            return Probe(problem=f"{subject}: no answer within {timeout_s:.0f} s".lstrip(": "), timed_out=True)
        if done.problem:
            complaint = done.stderr.strip().splitlines()
            return Probe(problem=complaint[-1] if complaint else done.problem)
        try:
            return Probe(value=json.loads(done.stdout))
        except ValueError:
            return Probe(problem=f"{what}: expected one line of JSON, seen {done.stdout[:80]!r}")

    def read(self, path: str) -> str | None:
        try:
            return Path(path).read_text(errors="replace")
        except OSError:
            return None

    def listing(self, path: str) -> list[str]:
        try:
            return sorted(entry.name for entry in Path(path).iterdir())
        except OSError:
            return []

    def limit(self, name: Literal["nofile", "memlock"]) -> tuple[float, float]:
        soft, hard = resource.getrlimit(_LIMITS[name])
        return tuple(math.inf if value == resource.RLIM_INFINITY else float(value) for value in (soft, hard))  # type: ignore[return-value]

    def can_bind(self, port: int) -> str:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind(("0.0.0.0", port))
                listener.listen(1)
            except OSError as error:
                return error.strerror or str(error)
        return ""

    def now(self) -> float:
        return time.time()


def _give_up(process: subprocess.Popen[str]) -> None:
    """Kill a child and what it started. One in uninterruptible sleep stays: waiting for it would hang us as well."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    try:
        process.wait(timeout=_REAP_S)
    except subprocess.TimeoutExpired:
        pass
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()
