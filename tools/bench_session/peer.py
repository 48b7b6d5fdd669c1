"""sglang-router as a peer: an environment of its own, and a started router.

Its package pins a web framework that nothing here needs, so it gets a virtual environment in a cache folder, made at the
first use by `install` (some 150 MB with what it needs) and used again.
"""  # noqa: E501

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import venv
from pathlib import Path

import msgspec

from miles_hpc.core.deadline import Deadline
from miles_hpc.core.errors import UserError
from tools.bench_session.processes import Child

__all__ = ["VERSION", "Router", "cache_folder", "find", "install"]

VERSION = "0.3.2"
_INSTALL_S = 600.0
_READY_S = 60.0


def cache_folder() -> Path:
    """Where environments of peers are kept: below the user's cache folder (XDG Base Directory Specification)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "miles_hpc_bench"


def find() -> Path | None:
    """The Python of the peer's environment, if it was made."""
    python = cache_folder() / f"sglang-router-{VERSION}" / "bin" / "python"
    return python if python.exists() else None


def install() -> Path:
    """The Python of the peer's environment, made if need be. Raises UserError with pip's last line."""
    python = find()
    if python is not None:
        return python
    folder = cache_folder() / f"sglang-router-{VERSION}"
    making = folder.with_name(f".{folder.name}.{os.getpid()}")  # becomes visible when it is whole
    making.parent.mkdir(parents=True, exist_ok=True)
    venv.EnvBuilder(with_pip=True, clear=True).create(making)
    command = [str(making / "bin" / "python"), "-m", "pip", "install", "-q", f"sglang-router=={VERSION}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_INSTALL_S)
        reason = (done.stderr.strip().splitlines() or ["no words"])[-1] if done.returncode else ""
    except subprocess.TimeoutExpired:
        reason = f"nothing within {_INSTALL_S:.0f} s"
    if reason:
        raise UserError(f"can't install sglang-router {VERSION}: {reason}; run without the peer (--no-peer)")
    making.rename(folder)
    return folder / "bin" / "python"


class Router:
    """A router over `urls`, ready when this returns. Close it.

    Retries, the circuit breaker and metrics of its own stay at their defaults; its log goes to a file. Policy `manual`
    is what Miles sets with sessions: a session stays where it is, a new one goes to the worker with the least load.
    """

    def __init__(self, python: Path, urls: list[str], folder: Path, *, policy: str = "manual") -> None:
        """Raises RuntimeError or DeadlineExpired when it doesn't serve."""
        port, metrics = _free_port(), _free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [str(python), "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--worker-urls", *urls, "--policy", policy, "--assignment-mode", "min_load"]
        command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics), "--log-level", "warn"]
        # Its own environment only: packages of this one must not be found.
        env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
        self._child = Child(command, folder / f"router-{policy}.log", tells=False, env=env)
        self.pid = self._child.pid
        try:
            self._wait_ready(len(urls))
        except BaseException:
            self._child.close()
            raise

    def close(self) -> None:
        """Idempotent."""
        self._child.close()

    def _wait_ready(self, n_workers: int) -> None:
        deadline = Deadline(_READY_S, f"sglang-router to take {n_workers} workers in")
        while True:
            if not self._child.alive:
                raise RuntimeError(f"sglang-router ended at its start: {self._child.last_words()}")
            try:
                with urllib.request.urlopen(f"{self.url}/readiness", timeout=2) as answer:
                    if msgspec.json.decode(answer.read()).get("healthy_workers") == n_workers:
                        return
            except (urllib.error.URLError, OSError, msgspec.DecodeError):
                pass
            deadline.check()
            time.sleep(0.1)


def _free_port() -> int:
    """The router can't be given a socket, so a port is tried; loopback only, and for the length of a benchmark."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> int:
    """`python -m tools.bench_session.peer`: make the environment, say where it is."""
    try:
        print(install())
    except UserError as error:
        print(f"bench_session: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
