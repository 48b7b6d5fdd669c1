"""A caller process as the run sees it: started, asked with deadlines, ended with everything that it started."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from miles_hpc.core.errors import MilesError, UserError
from tools.bench_control.caller import Ask, Told
from tools.bench_control.plan import ArmSpec
from tools.slurm_box.processes import Process, end, process_of

__all__ = ["REPOSITORY", "ArmFailed", "Session", "adopt_orphans", "descendants", "environment", "reap"]

REPOSITORY = Path(__file__).resolve().parents[2]
_PR_SET_CHILD_SUBREAPER = 36


class ArmFailed(MilesError):
    """An arm can't go on; the text is the reason that is reported."""


class Session:
    """One caller process. Not reusable after `close`."""

    def __init__(self, spec: ArmSpec, folder: Path, cores: list[int], n_peers: int, environ: dict[str, str]) -> None:
        """Start it; `folder` is the session's own. Raises ArmFailed when it doesn't come up within 30 s."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._log = folder / "log"
        self._stages = 0
        address = str(folder / "s")
        command = [sys.executable, "-P", "-m", "tools.bench_control.caller", spec.name]
        command += ["--socket", address, "--folder", str(folder), "--cores", ",".join(map(str, cores))]
        command += ["--parent", str(os.getpid())]
        if spec.mpi:
            command = [*_mpiexec(n_peers + 1), *command]
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(address)
            listener.listen(1)
            listener.settimeout(0.2)
            with open(self._log, "ab") as log:
                self._process = subprocess.Popen(
                    command,
                    cwd=folder,
                    env=environ,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            self._family: set[Process] = set()
            self._channel = self._accept(listener)
        self._answers = self._channel.makefile("rb")

    @property
    def pid(self) -> int:
        """Of the caller, or of the mpiexec that started it."""
        return self._process.pid

    def _accept(self, listener: socket.socket) -> socket.socket:
        for _ in range(150):
            try:
                return listener.accept()[0]
            except TimeoutError:
                if self._process.poll() is not None:
                    break
        reason = f"its process didn't come up: {self._last_line()}"
        self._end_all()
        raise ArmFailed(reason)

    def ask(self, ask: Ask, deadline_s: float) -> Told:
        """Raises ArmFailed with the arm's reason, or when nothing comes in time."""
        self._channel.settimeout(deadline_s)
        try:
            self._channel.sendall(msgspec.json.encode(ask) + b"\n")
            line = self._answers.readline()
        except TimeoutError:
            raise ArmFailed(f"{ask.do}: no answer within {deadline_s:.0f} s") from None
        except OSError as error:
            raise ArmFailed(f"{ask.do}: its process ended: {error}; {self._last_line()}") from None
        if not line:
            raise ArmFailed(f"{ask.do}: its process ended: {self._last_line()}")
        told = msgspec.json.decode(line, type=Told)
        if told.error:
            raise ArmFailed(told.error)
        return told

    def start(self, n_peers: int, deadline_s: float) -> Told:
        """Start peers in a fresh folder."""
        self._stages += 1
        stage = self._folder / f"stage{self._stages}"  # an MPI arm publishes addresses as numbers beside it
        stage.mkdir()
        return self.ask(Ask(do="start", n_peers=n_peers, folder=str(stage)), deadline_s)

    def lanes(self) -> dict[str, str]:
        """Which transports and devices UCX took, from its own log: "... cfg#3 tag(tcp/lo tcp/eth0)"."""
        found = dict.fromkeys(re.findall(r"cfg#\d+ (\S.*)", self._log.read_text(errors="replace")))
        return {"UCX lanes": "; ".join(found)} if found else {}

    def close(self, deadline_s: float = 10.0) -> None:
        """Ask it to end, then end by pid what is left of it and of its descendants."""
        self._family = descendants(self._process.pid)
        try:
            self._channel.settimeout(deadline_s)
            self._channel.sendall(msgspec.json.encode(Ask(do="end")) + b"\n")
            self._process.wait(deadline_s)
        except (OSError, subprocess.TimeoutExpired):
            pass  # what is left is ended below
        self._end_all()
        self._answers.close()
        self._channel.close()

    def _end_all(self) -> None:
        self._family |= descendants(self._process.pid)
        root = process_of(self._process.pid)
        end([*self._family, *([root] if root is not None else [])], grace_s=2.0)
        self._process.wait(5.0)

    def _last_line(self) -> str:
        lines = [line.strip() for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1][-300:] if lines else "it said nothing"


def environment(extra: Mapping[str, str]) -> dict[str, str]:
    """For callers: this repository on the path, one numpy thread, quiet libraries, root allowed to run MPI."""
    environ = dict(os.environ)
    environ.update(
        PYTHONPATH=str(REPOSITORY),
        PYTHONUNBUFFERED="1",
        OPENBLAS_NUM_THREADS="1",
        OMP_NUM_THREADS="1",
        UCX_WARN_UNUSED_ENV_VARS="n",
        UCX_LOG_LEVEL="info",  # one line per endpoint with what it uses; nothing per message
        HYDRA_LAUNCHER="fork",
        OMPI_ALLOW_RUN_AS_ROOT="1",
        OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
        PRTE_MCA_rmaps_default_mapping_policy=":oversubscribe",
        PRTE_MCA_hwloc_default_binding_policy="none",
        RAY_USAGE_STATS_ENABLED="0",
        RAY_DEDUP_LOGS="0",
        RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0",
    )
    environ.update(extra)
    return environ


def _mpiexec(ranks: int) -> list[str]:
    beside = Path(sys.executable).with_name("mpiexec")
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None:
        raise ArmFailed("no mpiexec beside this Python or on PATH; install it: pip install -e '.[mpich]'")
    return [found, "-n", str(ranks)]


def adopt_orphans() -> None:
    """Become the parent of orphaned descendants (prctl(2), PR_SET_CHILD_SUBREAPER), so that none can be lost."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise UserError("prctl(PR_SET_CHILD_SUBREAPER) failed; expected Linux 3.4 or later")


def descendants(root: int) -> set[Process]:
    """All living processes below `root`."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except (OSError, IndexError):
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found: set[Process] = set()
    todo = [root]
    while todo:
        for pid in children.get(todo.pop(), ()):
            process = process_of(pid)
            if process is not None:
                found.add(process)
            todo.append(pid)
    return found


def reap() -> None:
    """Collect adopted children that have ended."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
