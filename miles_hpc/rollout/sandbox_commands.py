"""Commands in sandboxes: a sandbox is started, asked, read out and ended through its two descriptors.

    launch ─▶ ready (its files are written) ─▶ run: request ─▶ status, output drained ─▶ run ... ─▶ end
                                                └─ too long, too loud: clear, everything but PID 1 is killed

`SandboxHost` owns one runner, keeps its link to the launcher alive and holds a sandbox's lock around each call.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import struct
import termios
import time

from miles_hpc.core.errors import MilesError
from miles_hpc.core.messages import SandboxResult
from miles_hpc.rollout.sandbox_bounds import Use, limit_met
from miles_hpc.rollout.sandbox_driver import Sandbox, SandboxLimits, exec_request, files_request
from miles_hpc.rollout.sandbox_link import LauncherLink
from miles_hpc.rollout.sandbox_root import NOBODY, becomes_nobody

__all__ = ["CommandRunner", "SandboxError"]


class SandboxError(MilesError):
    """A sandbox couldn't be made or kept; the command's effect is unknown."""


class CommandRunner:
    """Starts sandboxes and runs their commands. Belongs to one event loop; `link` is set by who keeps the launcher."""

    def __init__(self, limits: SandboxLimits) -> None:
        self.limits = limits
        self.link: LauncherLink | None = None
        self.processes = 0  # that a sandbox may have, as far as this is bounded here; set with the link
        self.executed = 0  # commands
        self.executing_s = 0.0
        self._other_user = becomes_nobody()
        self._incarnations = 0

    async def run(self, sandbox: Sandbox, data: bytes, timeout_s: float, max_output_bytes: int) -> SandboxResult:
        """One command (the caller holds the sandbox's lock). Raises SandboxError when the sandbox can't be kept."""
        begin = time.monotonic()
        try:
            return await self._execute(sandbox, data, timeout_s, max_output_bytes, begin)
        finally:
            sandbox.used = time.monotonic()
            self.executed += 1
            self.executing_s += sandbox.used - begin

    async def end_the_rest(self, sandbox: Sandbox) -> None:
        """Kill everything in the sandbox but its PID 1."""
        if sandbox.control is None:
            return  # it hasn't begun, or begins anew
        await self._ready(sandbox)
        self._clear(sandbox)
        if not await self._is_clear(sandbox):
            self._stop(sandbox)
            self.end(sandbox)

    async def _execute(
        self, sandbox: Sandbox, data: bytes, timeout_s: float, max_output_bytes: int, begin: float
    ) -> SandboxResult:
        if sandbox.destroyed:
            raise SandboxError(f"sandbox {sandbox.id} was destroyed")
        if sandbox.control is None:
            self.launch(sandbox)
        await self._ready(sandbox)
        self._drain(sandbox)  # late words of earlier background processes belong to nobody
        await self._is_clear(sandbox)
        if sandbox.destroyed:
            raise SandboxError(f"sandbox {sandbox.id} was destroyed")
        sandbox.kept.clear()
        sandbox.n_output, sandbox.limit, sandbox.overflow = 0, max_output_bytes, False
        timed_out = False
        looked: asyncio.Future[str] | None = None
        status = self._expect_status(sandbox)
        try:
            await self._send(sandbox, exec_request(data), timeout_s)
            try:
                code = await asyncio.wait_for(asyncio.shield(status), timeout_s)
            except TimeoutError:
                timed_out = True
                looked = self._look(sandbox)  # before what there is to see is killed
                self._clear(sandbox)
                try:
                    code = 137 if await asyncio.wait_for(status, 5.0) >= 0 else -1
                except TimeoutError:
                    code = -1
            if not await self._is_clear(sandbox):
                code = -1
            if code > 0 and looked is None and not sandbox.overflow:
                looked = self._look(sandbox)
            use = await self._seen(looked)
        except asyncio.CancelledError:
            self.end(sandbox)  # nobody waits for what runs; the next command begins anew
            raise
        sandbox.status = None
        self._drain(sandbox)
        if code < 0:  # PID 1 is gone or doesn't answer: begin anew from the first files
            code = 137
            if sandbox.control is not None:
                self._stop(sandbox)
                self.end(sandbox)
            if not sandbox.destroyed:
                self.launch(sandbox)
        anew, sandbox.anew = sandbox.anew, False
        return SandboxResult(
            exit_code=code,
            output=bytes(sandbox.kept).decode("utf-8", "replace"),
            truncated=sandbox.n_output > max_output_bytes,
            timed_out=timed_out,
            duration_s=time.monotonic() - begin,
            anew=anew,
            limit=limit_met(
                code, use, processes=self.processes, timed_out=timed_out, overflow=sandbox.overflow and not timed_out
            ),
        )

    def _look(self, sandbox: Sandbox) -> asyncio.Future[str] | None:
        return None if self.link is None else self.link.look(sandbox.name)

    async def _seen(self, looked: asyncio.Future[str] | None) -> Use:
        """What the launcher saw; unknown when it was not asked or takes long."""
        if looked is None:
            return Use()
        try:
            return Use.parse(await asyncio.wait_for(asyncio.shield(looked), 5.0))
        except TimeoutError:
            return Use()

    async def _is_clear(self, sandbox: Sandbox) -> bool:
        """Wait until no `clear` is under way, which would kill the next command as well; False when it takes long."""
        if sandbox.cleared is None:
            return True
        try:
            await asyncio.wait_for(asyncio.shield(sandbox.cleared), 5.0)
        except TimeoutError:
            return False
        finally:
            sandbox.cleared = None
        return True

    async def _ready(self, sandbox: Sandbox) -> None:
        """Wait until the sandbox's bash has written its files."""
        if sandbox.status is None:
            return
        try:
            code = await asyncio.wait_for(asyncio.shield(sandbox.status), 30.0)
        except TimeoutError:
            code = -1
        sandbox.status = None
        if code != 0:
            self.end(sandbox)
            reason = "its files don't fit" if code > 0 else "it didn't start"
            raise SandboxError(f"sandbox {sandbox.id}: {reason}")

    def launch(self, sandbox: Sandbox) -> None:
        """Have it started; its files go in by themselves. Raises SandboxError when there is no launcher."""
        if self.link is None or not self.link.is_open:
            raise SandboxError(
                "no sandbox launcher: the host isn't started, or its launcher ended and is being replaced"
            )
        self._incarnations += 1
        sandbox.anew = sandbox.name != ""
        sandbox.name = f"{self._incarnations}"
        ours, theirs = socket.socketpair()
        output, output_theirs = os.pipe()
        if self._other_user:  # the sandbox's user is another one then, and /dev/stderr is opened by permission
            os.fchown(output_theirs, NOBODY, NOBODY)
        self.link.start(sandbox.name, theirs.detach(), output_theirs)
        ours.setblocking(False)
        os.set_blocking(output, False)
        sandbox.control, sandbox.output = ours, output
        sandbox.lines.clear()
        loop = asyncio.get_running_loop()
        loop.add_reader(ours.fileno(), self._on_control, sandbox)
        loop.add_reader(output, self._on_output, sandbox)
        self._expect_status(sandbox)
        data = files_request(sandbox.files)
        try:
            sent = ours.send(data)
        except OSError:
            return  # seen as the end of the sandbox
        if sent < len(data):
            sandbox.rest = asyncio.create_task(self._send(sandbox, data[sent:], 30.0))

    def end(self, sandbox: Sandbox) -> None:
        """Close its descriptors, and kill it unless it is idle, which ends by itself; idempotent."""
        if sandbox.control is None:
            return
        loop = asyncio.get_running_loop()
        loop.remove_reader(sandbox.control.fileno())
        loop.remove_writer(sandbox.control.fileno())  # of a send under way, which nothing else would take back
        if sandbox.rest is not None:
            sandbox.rest.cancel()
        if sandbox.output >= 0:
            loop.remove_reader(sandbox.output)
            os.close(sandbox.output)
        sandbox.control.close()  # an idle bash ends by itself
        sandbox.control, sandbox.output = None, -1
        if sandbox.status is not None:  # still starting, or a command is running
            self._stop(sandbox)
            if not sandbox.status.done():
                sandbox.status.set_result(-1)
            sandbox.status = None

    def _expect_status(self, sandbox: Sandbox) -> asyncio.Future[int]:
        sandbox.status = asyncio.get_running_loop().create_future()
        return sandbox.status

    async def _send(self, sandbox: Sandbox, data: bytes, timeout_s: float) -> None:
        if sandbox.control is None:
            return
        try:
            await asyncio.wait_for(asyncio.get_running_loop().sock_sendall(sandbox.control, data), timeout_s)
        except (OSError, TimeoutError):
            if sandbox.status is not None and not sandbox.status.done():
                sandbox.status.set_result(-1)

    def _clear(self, sandbox: Sandbox) -> None:
        if self.link is not None:
            sandbox.cleared = self.link.clear(sandbox.name)

    def _stop(self, sandbox: Sandbox) -> None:
        if self.link is not None:
            self.link.stop(sandbox.name)

    def _on_control(self, sandbox: Sandbox) -> None:
        assert sandbox.control is not None
        try:
            data = sandbox.control.recv(256)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            asyncio.get_running_loop().remove_reader(sandbox.control.fileno())
            code = -1
        else:
            sandbox.lines += data
            if not sandbox.lines.endswith(b"\n"):
                return
            try:
                code = int(sandbox.lines)
            except ValueError:
                code = -1
            sandbox.lines.clear()
        if sandbox.status is not None and not sandbox.status.done():
            sandbox.status.set_result(code)

    def _on_output(self, sandbox: Sandbox) -> None:
        try:
            data = os.read(sandbox.output, 65536)
        except BlockingIOError:
            return
        if not data:
            asyncio.get_running_loop().remove_reader(sandbox.output)
            return
        room = sandbox.limit - len(sandbox.kept)
        if room > 0:
            sandbox.kept += data[:room]
        sandbox.n_output += len(data)
        if sandbox.n_output > sandbox.limit + self.limits.discard_bytes and not sandbox.overflow:
            sandbox.overflow = True
            self._clear(sandbox)

    def _drain(self, sandbox: Sandbox) -> None:
        if sandbox.output < 0:
            return
        waiting = struct.unpack("i", fcntl.ioctl(sandbox.output, termios.FIONREAD, b"\0\0\0\0"))[0]
        while waiting > 0:
            before = sandbox.n_output
            self._on_output(sandbox)
            if sandbox.n_output == before:
                return
            waiting -= sandbox.n_output - before
