"""Peers: forked from one process that has imported the library, so that 64 of them cost little to start.

    caller ── stdin: one line per request ──▶ python -m tools.bench_control.peers ── fork ──▶ peer 0, 1, ...
       ◀───────────── stdout: pids ─────────────┘                                    each publishes an address

A peer publishes its address as <folder>/<index> by rename. Peers end with the process that forked them, and that one
ends with its caller.
"""

from __future__ import annotations

import argparse
import importlib
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

import msgspec

from miles_hpc.core.deadline import Deadline

__all__ = ["ForkedPeers", "addresses", "die_with", "failed", "publish"]

_START_S = 30.0


def publish(folder: Path, index: int, address: str) -> None:
    """Tell the caller where peer `index` listens."""
    temporary = folder / f"{index}.tmp"
    temporary.write_text(address)
    temporary.replace(folder / str(index))


def failed(folder: Path, index: int, error: BaseException) -> None:
    """Tell the caller why peer `index` doesn't listen; the traceback goes to the log."""
    traceback.print_exception(error)
    temporary = folder / f"{index}.tmp"
    temporary.write_text(f"{type(error).__name__}: {error}")
    temporary.replace(folder / f"{index}.error")


def addresses(folder: Path, n: int, deadline_s: float = _START_S) -> list[str]:
    """Where peers 0 to n-1 listen, as soon as all have published.

    Raises DeadlineExpired naming the missing, RuntimeError with the reason of one that failed.
    """
    deadline = Deadline(deadline_s, "peers to listen")
    while missing := [i for i in range(n) if not (folder / str(i)).exists()]:
        for report in folder.glob("*.error"):
            raise RuntimeError(f"peer {report.stem}: {report.read_text()}")
        deadline.what = f"peers {missing} of {n} to listen"
        deadline.check()
        time.sleep(0.002)
    return [(folder / str(i)).read_text() for i in range(n)]


class _Request(msgspec.Struct, frozen=True):
    n: int
    folder: str
    function: str
    options: tuple[str, ...]


class ForkedPeers:
    """The caller's side. `module` is imported before anything is forked."""

    def __init__(self, module: str, log: Path) -> None:
        command = [sys.executable, "-P", "-m", "tools.bench_control.peers", module]
        command += ["--parent", str(os.getpid())]
        with open(log, "ab") as output:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output, bufsize=0
            )

    def start(self, n: int, folder: Path, function: str, *options: str) -> list[int]:
        """Fork n peers that run `function(index, folder, *options)` of the module; returns their pids.

        Peers of an earlier start end.
        """
        return self._ask(_Request(n, str(folder), function, options))

    def stop(self) -> None:
        """End the peers."""
        self._ask(_Request(0, "", "", ()))

    def close(self) -> None:
        """End the peers and the process that forked them."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(5.0)

    def _ask(self, request: _Request) -> list[int]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(msgspec.json.encode(request) + b"\n")
        answers = select.poll()
        answers.register(self._process.stdout, select.POLLIN)
        line = self._process.stdout.readline() if answers.poll(_START_S * 1000) else b""
        if not line:
            raise RuntimeError("the peers' process ended or hangs; see the arm's log")
        return msgspec.json.decode(line, type=list[int])


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent does (prctl(2), PR_SET_PDEATHSIG)."""
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def main() -> int:
    parser = argparse.ArgumentParser(prog="peers")
    parser.add_argument("module")
    parser.add_argument("--parent", type=int, required=True)
    args = parser.parse_args()
    die_with(args.parent)
    module = importlib.import_module(args.module)
    preload = getattr(module, "preload", None)
    if preload is not None:
        preload()
    living: list[int] = []
    for line in sys.stdin.buffer:
        request = msgspec.json.decode(line, type=_Request)
        _end(living)
        living = [_fork(module, index, request) for index in range(request.n)]
        sys.stdout.buffer.write(msgspec.json.encode(living) + b"\n")
        sys.stdout.flush()
    _end(living)
    return 0


def _fork(module: object, index: int, request: _Request) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        die_with(parent)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)
        getattr(module, request.function)(index, Path(request.folder), *request.options)
        code = 0
    except BaseException as error:
        failed(Path(request.folder), index, error)
    finally:
        os._exit(code)


def _end(pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)  # a zombie of ours at worst: we haven't waited for it yet
    for pid in pids:
        os.waitpid(pid, 0)


if __name__ == "__main__":
    sys.exit(main())
