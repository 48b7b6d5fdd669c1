"""The sandbox host: isolated working folders on this node, in which commands are executed for real.

    SandboxHost ── start/clear/stop ──▶ launcher (its own namespaces, no network)
         │                                 └─ one bash per sandbox, PID 1 of its own namespaces
         └── control socket, output pipe ──▶ that bash: reads commands, runs each in a subshell, tells its status

| promise | how |
|---|---|
| a command's status is true | told by PID 1, undumpable, over a socket that the command can't inherit or open |
| its output is complete | the pipe is drained after the status arrived; what was written before is in it |
| time limit | everything in the sandbox but PID 1 is killed (kill(-1) inside its PID namespace); files stay |
| output limit | kept bytes are cut at the caller's limit; a command that writes on and on is killed |
| any doubt | the sandbox is killed and made anew from its first files; the caller is told by exit code 137 |
| destroy | PID 1 ends, and with it its PID namespace, its processes and its tmpfs |

Not bounded here: the sum over sandboxes of memory (each process is bounded); Slurm's cgroup bounds the job.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import resource
import socket
import struct
import termios
import time
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Literal

from miles_hpc.core.errors import MilesError, ProtocolError, UserError
from miles_hpc.core.messages import (
    Message,
    SandboxCreate,
    SandboxDestroy,
    SandboxExec,
    SandboxHostStatus,
    SandboxResult,
    SandboxStatus,
)
from miles_hpc.rollout.sandbox_driver import Sandbox, SandboxLimits, driver, exec_request, files_request
from miles_hpc.rollout.sandbox_launcher import NOBODY, SANDBOX_UID
from miles_hpc.rollout.sandbox_link import LauncherLink

__all__ = ["SandboxError", "SandboxHost", "SandboxLimits"]

#: `auto` takes the first of unshare and bubblewrap that works here. `none` isn't isolation at all (see SandboxHost).
Isolation = Literal["auto", "unshare", "bubblewrap", "none"]


_QUICK_DEATHS = 5  # of the launcher in a row, each within ten seconds of its start


class SandboxError(MilesError):
    """A sandbox couldn't be made or kept; the command's effect is unknown."""


class SandboxHost:
    """Creates sandboxes, executes commands in them, destroys them; `handle` answers the messages.

    Call `start` once, `close` at the end. Everything runs in one event loop and nothing blocks it for long.

    With isolation `none`, for nodes without user namespaces and for trusted models only, commands run as this user in a
    folder under TMPDIR: limits of time, output and size hold, nothing else of the table above does.
    """

    def __init__(
        self,
        *,
        isolation: Isolation = "auto",
        limits: SandboxLimits | None = None,
        idle_limit_s: float = 900.0,
        max_live: int = 512,
    ) -> None:
        self.limits = limits or SandboxLimits()
        self.isolation: str = ""
        self._wanted = isolation
        self._idle_limit_s = idle_limit_s
        self._max_live = max_live
        self._link: LauncherLink | None = None
        self._sandboxes: dict[str, Sandbox] = {}
        self._incarnations = 0
        self._executed = 0
        self._executing_s = 0.0
        self._keepers: list[asyncio.Task[None]] = []

    # ------------------------------------------------------------------------------------------- life

    async def start(self) -> None:
        """Start the launcher and prove isolation with a real command. Raises UserError when this node can't do it."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft < hard:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        kinds = ("unshare", "bubblewrap") if self._wanted == "auto" else (self._wanted,)
        failures = []
        for kind in kinds:
            try:
                await self._open_link(kind)
                await self._probe(kind)
                break
            except UserError as error:
                failures.append(f"{kind}: {error}")
                await self.close()
        else:
            raise UserError(
                f"this node can't isolate sandboxes ({'; '.join(failures)}): allow user namespaces "
                "(sysctl user.max_user_namespaces) or choose isolation 'none' for commands that are trusted"
            )
        self._keepers = [asyncio.create_task(self._sweep()), asyncio.create_task(self._keep_launcher(kind))]

    async def close(self) -> None:
        """End all sandboxes and the launcher; idempotent."""
        for keeper in self._keepers:
            keeper.cancel()
        self._keepers = []
        for sandbox_id in list(self._sandboxes):
            self.destroy(sandbox_id)
        link, self._link = self._link, None
        if link is not None:
            await link.close()

    # ------------------------------------------------------------------------------------------- messages

    async def handle(self, message: Message, payload: memoryview | bytes = b"") -> Message | None:
        """Answer one message; None means Ack. Raises ProtocolError for a message that isn't for sandbox hosts."""
        if isinstance(message, SandboxExec):
            return await self.execute(
                message.sandbox_id,
                message.command,
                timeout_s=message.timeout_s,
                max_output_bytes=message.max_output_bytes,
            )
        if isinstance(message, SandboxCreate):
            self.create(message.sandbox_id, message.files)
            return None
        if isinstance(message, SandboxDestroy):
            self.destroy(message.sandbox_id)
            return None
        if isinstance(message, SandboxStatus):
            return self.status()
        raise ProtocolError(f"a sandbox host doesn't take {type(message).__name__}")

    def status(self) -> SandboxHostStatus:
        return SandboxHostStatus(
            isolation=self.isolation,
            live=len(self._sandboxes),
            executed=self._executed,
            executing_s=self._executing_s,
        )

    # ------------------------------------------------------------------------------------------- sandboxes

    def create(self, sandbox_id: str, files: Mapping[str, str]) -> None:
        """A new sandbox with these files in its working folder; returns at once, the start goes on by itself.

        An existing sandbox of that name is replaced. Raises UserError for names that leave the folder or contents
        that can't be written; SandboxError when the host is full.
        """
        self._check_files(files)
        self.destroy(sandbox_id)
        if len(self._sandboxes) >= self._max_live:
            raise SandboxError(f"{len(self._sandboxes)} sandboxes are live, the limit of this host")
        sandbox = Sandbox(sandbox_id, files)
        self._sandboxes[sandbox_id] = sandbox
        self._launch(sandbox)

    async def execute(self, sandbox_id: str, command: str, *, timeout_s: float, max_output_bytes: int) -> SandboxResult:
        """Run `command` with bash in the sandbox's working folder and wait for its end.

        Commands of one sandbox run one after the other. Raises UserError for an unknown sandbox, SandboxError when
        the sandbox can't be kept.
        """
        sandbox = self._sandboxes.get(sandbox_id)
        if sandbox is None:
            raise UserError(f"no sandbox {sandbox_id!r} on this host: create it first")
        data = command.encode("utf-8", "surrogateescape")
        if b"\0" in data or len(data) > self.limits.command_bytes:
            problem = "holds a NUL byte" if b"\0" in data else f"is longer than {self.limits.command_bytes} bytes"
            return SandboxResult(
                exit_code=2, output=f"bash: the command {problem}\n", truncated=False, timed_out=False, duration_s=0.0
            )
        async with sandbox.lock:
            begin = time.monotonic()
            try:
                return await self._execute(sandbox, data, timeout_s, max_output_bytes, begin)
            finally:
                sandbox.used = time.monotonic()
                self._executed += 1
                self._executing_s += sandbox.used - begin

    def destroy(self, sandbox_id: str) -> None:
        """End a sandbox with everything in it; unknown names are fine."""
        sandbox = self._sandboxes.pop(sandbox_id, None)
        if sandbox is not None:
            sandbox.destroyed = True
            self._end(sandbox)

    # ------------------------------------------------------------------------------------------- execution

    async def _execute(
        self, sandbox: Sandbox, data: bytes, timeout_s: float, max_output_bytes: int, begin: float
    ) -> SandboxResult:
        if sandbox.destroyed:
            raise SandboxError(f"sandbox {sandbox.id} was destroyed")
        if sandbox.control is None:
            self._launch(sandbox)
        await self._ready(sandbox)
        self._drain(sandbox)  # late words of earlier background processes belong to nobody
        await self._is_clear(sandbox)
        if sandbox.destroyed:
            raise SandboxError(f"sandbox {sandbox.id} was destroyed")
        sandbox.kept.clear()
        sandbox.n_output, sandbox.limit, sandbox.overflow = 0, max_output_bytes, False
        timed_out = False
        status = self._expect_status(sandbox)
        try:
            await self._send(sandbox, exec_request(data), timeout_s)
            try:
                code = await asyncio.wait_for(asyncio.shield(status), timeout_s)
            except TimeoutError:
                timed_out = True
                self._clear(sandbox)
                try:
                    code = 137 if await asyncio.wait_for(status, 5.0) >= 0 else -1
                except TimeoutError:
                    code = -1
            if not await self._is_clear(sandbox):
                code = -1
        except asyncio.CancelledError:
            self._end(sandbox)  # nobody waits for what runs; the next command begins anew
            raise
        sandbox.status = None
        self._drain(sandbox)
        if code < 0:  # PID 1 is gone or doesn't answer: begin anew from the first files
            code = 137
            if sandbox.control is not None:
                self._stop(sandbox)
                self._end(sandbox)
            if not sandbox.destroyed:
                self._launch(sandbox)
        return SandboxResult(
            exit_code=code,
            output=bytes(sandbox.kept).decode("utf-8", "replace"),
            truncated=sandbox.n_output > max_output_bytes,
            timed_out=timed_out,
            duration_s=time.monotonic() - begin,
        )

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
            self._end(sandbox)
            reason = "its files don't fit" if code > 0 else "it didn't start"
            raise SandboxError(f"sandbox {sandbox.id}: {reason}")

    def _launch(self, sandbox: Sandbox) -> None:
        if self._link is None or not self._link.is_open:
            raise SandboxError(
                "no sandbox launcher: the host isn't started, or its launcher ended and is being replaced"
            )
        self._incarnations += 1
        sandbox.name = f"{self._incarnations}"
        ours, theirs = socket.socketpair()
        output, output_theirs = os.pipe()
        if os.getuid() == 0:  # the sandbox's user is another one then, and /dev/stderr is opened by permission
            os.fchown(output_theirs, NOBODY, NOBODY)
        self._link.start(sandbox.name, theirs.detach(), output_theirs)
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

    def _end(self, sandbox: Sandbox) -> None:
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
        if self._link is not None:
            sandbox.cleared = self._link.clear(sandbox.name)

    def _stop(self, sandbox: Sandbox) -> None:
        if self._link is not None:
            self._link.stop(sandbox.name)

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

    # ------------------------------------------------------------------------------------------- start and care

    async def _open_link(self, kind: str) -> None:
        # Since Linux 5.14 the process limit counts per user namespace; before, it would count all of the user's.
        kernel = tuple(int(part) for part in re.findall(r"\d+", os.uname().release)[:2])
        program = driver(self.limits, count_processes=kind != "none" and kernel >= (5, 14))
        self._link = await LauncherLink.open(kind, program, self.limits.folder_bytes)
        self.isolation = kind

    async def _probe(self, kind: str) -> None:
        """One real command, before any is trusted to the sandbox."""
        user = os.getuid() if kind == "none" else SANDBOX_UID
        self.create("probe", {"a": "1\n"})
        try:
            result = await self.execute("probe", "cat a; id -u", timeout_s=20.0, max_output_bytes=4096)
        except SandboxError as error:
            raise UserError(str(error)) from error
        finally:
            self.destroy("probe")
        if result.exit_code != 0 or result.output != f"1\n{user}\n":
            raise UserError(f"the probe answered {result.output[:200]!r} with exit code {result.exit_code}")

    async def _keep_launcher(self, kind: str) -> None:
        """Start the launcher again when it ends. Its sandboxes ended with it; each begins anew at its next command."""
        quick = 0
        while quick < _QUICK_DEATHS:
            link = self._link
            if link is None:
                return
            began = time.monotonic()
            await link.process.wait()
            quick = quick + 1 if time.monotonic() - began < 10.0 else 0
            link.disconnect()
            for sandbox in self._sandboxes.values():
                if not sandbox.lock.locked():
                    self._end(sandbox)
            try:
                await self._open_link(kind)
            except UserError:
                return  # creating and executing say that there is no launcher

    async def _sweep(self) -> None:
        """End sandboxes that nobody has used for long: their rollout host is gone."""
        while True:
            await asyncio.sleep(min(30.0, self._idle_limit_s))
            for sandbox in list(self._sandboxes.values()):
                if not sandbox.lock.locked() and time.monotonic() - sandbox.used > self._idle_limit_s:
                    self.destroy(sandbox.id)

    def _check_files(self, files: Mapping[str, str]) -> None:
        total = 0
        for name, text in files.items():
            path = PurePosixPath(name)
            if not name or path.is_absolute() or ".." in path.parts or "\0" in name or "\n" in name:
                raise UserError(f"sandbox file {name!r}: expected a path inside the folder")
            if "\0" in text:
                raise UserError(f"sandbox file {name!r}: contents with NUL bytes can't be written")
            total += len(text)
        if total > self.limits.files_bytes:
            raise UserError(f"sandbox files of {total} characters: the limit is {self.limits.files_bytes}")
