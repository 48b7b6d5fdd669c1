"""A run directory, a network, a controller on its first host and one agent on each of the others.

The stage starts programs, collects what they tell, and takes all of it down again. Times are CLOCK_MONOTONIC seconds.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from checkpoints.publish import publish_bytes
from miles_hpc.control.auth import new_secret
from miles_hpc.control.terms import claim_attempt
from miles_hpc.core.config import ControlConfig
from miles_hpc.core.deadline import Deadline
from miles_hpc.core.errors import MilesError
from miles_hpc.core.paths import RunPaths
from tools.detection.programs import control_file
from tools.net_hosts import UCX_ENV, Host, Network

__all__ = ["Program", "Stage", "start_program"]

_START_S = 120.0


class Program:
    """A started program that tells JSON lines; a thread collects them in `told`."""

    def __init__(self, name: str, process: subprocess.Popen[str], log: Path) -> None:
        self.name = name
        self.process = process
        self.log = log
        self.told: list[dict[str, Any]] = []
        self._n_orders = 0
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed:
                self.told.append(json.loads(line))
                self._changed.notify_all()

    def wait_for(
        self, event: str, deadline_s: float, *, after: int = 0, where: Callable[[dict[str, Any]], bool] | None = None
    ) -> dict[str, Any]:
        """The first told line of this kind from index `after` on.

        Raises MilesError with what it told instead when that doesn't come in time, or when the program has ended.
        """
        deadline = Deadline(deadline_s, f"{self.name} telling {event!r}")
        with self._changed:
            while True:
                for line in self.told[after:]:
                    if line["event"] == event and (where is None or where(line)):
                        return line
                if deadline.expired or not self._reader.is_alive():
                    told = f"exit code {self.process.poll()}; it told {self.told[-20:]}; log: {self.log_tail()}"
                    raise MilesError(f"{deadline.error()}; {told}")
                self._changed.wait(min(0.5, deadline.remaining_s))

    def end(self) -> None:
        """Kill it and wait until all that it told was read."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join(timeout=10.0)

    def order(self, **order: Any) -> int:
        """Give the program a line on its stdin; returns the `id` that was added to it."""
        assert self.process.stdin is not None
        self._n_orders += 1
        self.process.stdin.write(json.dumps({**order, "id": self._n_orders}) + "\n")
        self.process.stdin.flush()
        return self._n_orders

    def answer(self, order: int, deadline_s: float) -> dict[str, Any]:
        """Wait for the line that answers an order."""
        return self.wait_for("answer", deadline_s, where=lambda line: line["id"] == order)

    def ask(self, wait_s: float, **order: Any) -> dict[str, Any]:
        """Give an order and wait for its answer."""
        return self.answer(self.order(**order), wait_s)

    def log_tail(self) -> str:
        return self.log.read_text(errors="replace")[-2000:]


def start_program(name: str, host: Host, module: str, args: list[str], log: Path) -> Program:
    """Start a Python module of this project on a host; its stderr goes to `log`."""
    with open(log, "wb") as errors:
        process = host.popen(
            [sys.executable, "-P", "-m", module, *args],
            environ={**UCX_ENV, "PYTHONPATH": str(Path(__file__).parents[2])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    return Program(name, process, log)


class Stage:
    """See the module. Programs must be started from the thread that lives longest: they are killed when it ends."""

    def __init__(self, kind: str, n_agents: int, control: ControlConfig, *, spare_hosts: int = 0) -> None:
        self.control = msgspec.structs.replace(control, transport=kind, interface="eth0")
        self._n_hosts = 1 + n_agents + spare_hosts
        self._n_agents = n_agents
        self._undo = ExitStack()

    def __enter__(self) -> Stage:
        try:
            folder = Path(self._undo.enter_context(tempfile.TemporaryDirectory(prefix="detection-")))
            self.paths = RunPaths(folder)
            publish_bytes(self.paths.secret, new_secret(), mode=0o600)
            control_file(self.paths).write_bytes(msgspec.json.encode(self.control))
            self.network = self._undo.enter_context(Network(self._n_hosts))
            self.controller_host, *rest = self.network.hosts
            self.hosts, self.spare_hosts = rest[: self._n_agents], rest[self._n_agents :]
            self._n_started = 0
        except BaseException:
            self._undo.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._undo.close()

    # ------------------------------------------------------------------------------------------ programs

    def new_attempt(self) -> int:
        """Number the next start of the run; older ones are fenced by it."""
        return claim_attempt(self.paths)

    def start_controller(self, attempt: int, *, host: Host | None = None, wait: bool = True) -> Program:
        """The next term's controller; with `wait` returns when its address is published."""
        program = self._start("controller", host or self.controller_host, ["controller"], attempt)
        if wait:
            program.wait_for("open", _START_S)
        return program

    def start_agent(
        self, host: Host, attempt: int, *, name: str = "", incarnation: int = 0, paths: RunPaths | None = None
    ) -> Program:
        """The agent of a host, named after it; `paths` when it sees another run directory."""
        name = name or f"rollout-{host.name}"
        args = ["agent", "--name", name, "--host", host.name, "--incarnation", str(incarnation)]
        return self._start(name, host, args, attempt, paths)

    def _start(self, name: str, host: Host, args: list[str], attempt: int, paths: RunPaths | None = None) -> Program:
        self._n_started += 1
        program, *options = args
        program_args = [program, str((paths or self.paths).root), "--attempt", str(attempt), *options]
        log = self.paths.root / f"{self._n_started}-{name}.log"
        started = start_program(name, host, "tools.detection.programs", program_args, log)
        self._undo.callback(started.end)
        return started

    def wait_joined(self, controller: Program, names: list[str], *, after: int = 0) -> None:
        """Until the controller has told of every name (from line `after` on) that it joined."""
        for name in names:
            controller.wait_for("joined", _START_S, after=after, where=lambda line, name=name: line["peer"] == name)  # type: ignore[misc]
