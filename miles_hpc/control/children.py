"""Child processes that can't outlive their parent: owned by pidfd, ended by process group, killed when the parent dies.

PR_SET_PDEATHSIG (prctl(2)) makes the kernel kill the child when the thread that started it dies, so children are
started from the main thread only. A child's own children are in its session and are ended with it, also when it ended
by itself: an engine that crashed must not leave workers on the GPU of the next one.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

__all__ = ["ChildProcess", "die_with_parent"]

_PR_SET_PDEATHSIG = 1
_LOG_TAIL_BYTES = 4000


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to kill this process when its parent dies; exit at once when it died already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)


def _has_ended(pid: int) -> bool:
    """Whether a child of ours has ended, without reaping it."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _preparation(parent_pid: int) -> Callable[[], None]:
    def prepare() -> None:
        die_with_parent(parent_pid)

    return prepare


class ChildProcess:
    """One child. `name` names it in messages, `log` is the file that gets its output (appended)."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        log: Path | None,
        env: Mapping[str, str] | None = None,
        inherit_fds: bool = False,
    ) -> None:
        """Start it. `inherit_fds` passes open descriptors on (a rank needs the PMI descriptor of its starter).

        Raises RuntimeError outside the main thread: the child would be killed when the thread ends.
        """
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(f"child '{name}': started from thread '{threading.current_thread().name}', not the main")
        self.name = name
        self.log = log
        output = None if log is None else open(log, "ab")
        try:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=None if output is None else subprocess.STDOUT,
                env=None if env is None else dict(env),
                close_fds=not inherit_fds,
                start_new_session=True,
                preexec_fn=_preparation(os.getpid()),
            )
        finally:
            if output is not None:
                output.close()
        self.pid = self._process.pid
        self._pidfd = os.pidfd_open(self.pid)
        self._ended: asyncio.Future[int] | None = None

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative for a signal, as subprocess has it."""
        return self._poll()

    def _poll(self) -> int | None:
        """Its exit code once it has ended. What it left behind is killed before it is reaped: until then nobody else
        can have its pid for a process group."""
        if self._process.returncode is None and _has_ended(self.pid):
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        return self._process.poll()

    @property
    def stopped(self) -> bool:
        """Whether it is stopped by a signal (state T, proc(5)): alive for its parent, dead for everybody else."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return False
        return stat.rsplit(")", 1)[1].split()[0] in ("T", "t")

    async def kill_when_stopped(self, after_s: float) -> None:
        """Kill it once it has been stopped for `after_s`. Returns when it has ended."""
        since: float | None = None
        while self.exit_code is None:
            now = time.monotonic()
            since = None if not self.stopped else since if since is not None else now
            if since is not None and now - since >= after_s:
                self.kill()
            await asyncio.sleep(min(0.5, after_s))

    async def wait(self) -> int:
        """Wait for its end and return the exit code. Several tasks may wait."""
        if self._ended is None:
            loop = asyncio.get_running_loop()
            self._ended = loop.create_future()
            loop.add_reader(self._pidfd, self._on_end)
        return await asyncio.shield(self._ended)

    def _on_end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        self._poll()
        code = self._process.wait()
        os.close(self._pidfd)
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(code)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the child alone; a child that has ended is left alone."""
        if self._poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it and all that is in its session's process group."""
        if self._poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    async def end(self, grace_s: float) -> int:
        """Terminate, wait for `grace_s`, then kill. Returns the exit code."""
        self.signal(signal.SIGTERM)
        try:
            return await asyncio.wait_for(self.wait(), grace_s)
        except TimeoutError:
            self.kill()
            return await self.wait()

    def log_tail(self) -> str:
        """The last lines of its log, for verdicts."""
        if self.log is None or not self.log.exists():
            return ""
        with open(self.log, "rb") as file:
            file.seek(max(0, self.log.stat().st_size - _LOG_TAIL_BYTES))
            return file.read().decode(errors="replace")
