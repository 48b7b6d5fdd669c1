"""The sandbox host: isolated working folders on this node, in which commands are executed for real.

    SandboxHost ── start/clear/stop ──▶ launcher (its own namespaces, no network)
         │                                 └─ one bash per sandbox, PID 1 of its own namespaces
         └── control socket, output pipe ──▶ that bash: reads commands, runs each in a subshell, tells its status

| promise | how |
|---|---|
| a command's status is true | told by PID 1, undumpable, over a socket that the command can't inherit or open |
| its output is complete | the pipe is drained after the status arrived; what was written before is in it |
| time limit | everything in the sandbox but PID 1 is killed (kill(-1) inside its PID namespace); files stay |
| which bound was met | `limit` of the result, by the table of sandbox_bounds.py |
| output limit | kept bytes are cut at the caller's limit; a command that writes on and on is killed |
| any doubt | the sandbox is killed and made anew from its first files; the caller is told by `anew` |
| destroy | PID 1 ends, and with it its PID namespace, its processes and its tmpfs |

Not bounded here: the sum over sandboxes of memory (each process is bounded); Slurm's cgroup bounds the job.
"""

from __future__ import annotations

import asyncio
import os
import re
import resource
import time
from collections.abc import Iterable, Mapping
from typing import Literal

from miles_hpc.core.errors import ProtocolError, UserError
from miles_hpc.core.messages import (
    Message,
    SandboxCreate,
    SandboxDestroy,
    SandboxExec,
    SandboxGet,
    SandboxGot,
    SandboxHostStatus,
    SandboxPut,
    SandboxResult,
    SandboxStatus,
)
from miles_hpc.core.transport import HandlerResult
from miles_hpc.rollout.sandbox_commands import CommandRunner, SandboxError
from miles_hpc.rollout.sandbox_driver import Sandbox, SandboxLimits, driver
from miles_hpc.rollout.sandbox_files import (
    SandboxFile,
    check_contents,
    check_files,
    get_command,
    put_commands,
    put_request,
)
from miles_hpc.rollout.sandbox_link import LauncherLink
from miles_hpc.rollout.sandbox_root import SANDBOX_UID
from miles_hpc.rollout.sandbox_site import missing

__all__ = ["SandboxError", "SandboxHost", "SandboxLimits"]

#: `auto` takes the first of unshare and bubblewrap that works here. `none` isn't isolation at all (see SandboxHost).
Isolation = Literal["auto", "unshare", "bubblewrap", "none"]


_QUICK_DEATHS = 5  # of the launcher in a row, each within ten seconds of its start


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
        self.runner = CommandRunner(self.limits)
        self._sandboxes: dict[str, Sandbox] = {}
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
            settings = "; ".join(missing()) or "no sysctl forbids them, a seccomp filter or security module may"
            raise UserError(
                f"this node can't isolate sandboxes ({'; '.join(failures)}): have namespaces allowed ({settings}), "
                "or choose isolation 'none' for commands that are trusted"
            )
        self._keepers = [asyncio.create_task(self._sweep()), asyncio.create_task(self._keep_launcher(kind))]

    async def close(self) -> None:
        """End all sandboxes and the launcher; idempotent."""
        for keeper in self._keepers:
            keeper.cancel()
        self._keepers = []
        for sandbox_id in list(self._sandboxes):
            self.destroy(sandbox_id)
        link, self.runner.link = self.runner.link, None
        if link is not None:
            await link.close()

    # ------------------------------------------------------------------------------------------- messages

    async def handle(self, message: Message, payload: memoryview | bytes = b"") -> HandlerResult:
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
        if isinstance(message, SandboxPut):
            files = put_request(message, payload)
            return await self.put(
                message.sandbox_id, message.folder, files, replace=message.replace, timeout_s=message.timeout_s
            )
        if isinstance(message, SandboxGet):
            data = await self.get(message.sandbox_id, message.path, message.max_bytes, timeout_s=message.timeout_s)
            return SandboxGot(found=data is not None), [data or b""]
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
            executed=self.runner.executed,
            executing_s=self.runner.executing_s,
        )

    # ------------------------------------------------------------------------------------------- sandboxes

    def create(self, sandbox_id: str, files: Mapping[str, str]) -> None:
        """A new sandbox with these files in its working folder; returns at once, the start goes on by itself.

        An existing sandbox of that name is replaced. Raises UserError for names that leave the folder or contents
        that can't be written; SandboxError when the host is full.
        """
        check_contents(files, self.limits)
        self.destroy(sandbox_id)
        if len(self._sandboxes) >= self._max_live:
            raise SandboxError(f"{len(self._sandboxes)} sandboxes are live, the limit of this host")
        sandbox = Sandbox(sandbox_id, files)
        self._sandboxes[sandbox_id] = sandbox
        self.runner.launch(sandbox)

    async def execute(self, sandbox_id: str, command: str, *, timeout_s: float, max_output_bytes: int) -> SandboxResult:
        """Run `command` with bash in the sandbox's working folder and wait for its end.

        Commands of one sandbox run one after the other. Raises UserError for an unknown sandbox, SandboxError when
        the sandbox can't be kept.
        """
        sandbox = self._known(sandbox_id)
        data = command.encode("utf-8", "surrogateescape")
        if b"\0" in data or len(data) > self.limits.command_bytes:
            problem = "holds a NUL byte" if b"\0" in data else f"is longer than {self.limits.command_bytes} bytes"
            return SandboxResult(
                exit_code=2, output=f"bash: the command {problem}\n", truncated=False, timed_out=False, duration_s=0.0
            )
        async with sandbox.lock:
            return await self.runner.run(sandbox, data, timeout_s, max_output_bytes)

    async def execute_alone(
        self, sandbox_id: str, commands: Iterable[str], *, timeout_s: float, max_output_bytes: int
    ) -> tuple[SandboxResult, bytes]:
        """Kill what earlier commands left running, then run these, one after the other, until one fails.

        Gives the last one's result and its output as it is. `timeout_s` is for all of them. Raises as `execute`.
        """
        sandbox = self._known(sandbox_id)
        end = time.monotonic() + timeout_s
        async with sandbox.lock:
            await self.runner.end_the_rest(sandbox)
            for command in commands:
                left = max(end - time.monotonic(), 0.0)
                result = await self.runner.run(sandbox, command.encode(), left, max_output_bytes)
                if result.exit_code != 0:
                    break
            return result, bytes(sandbox.kept)

    async def put(
        self,
        sandbox_id: str,
        folder: str,
        files: Mapping[str, SandboxFile],
        *,
        replace: bool = False,
        timeout_s: float = 30.0,
    ) -> SandboxResult:
        """Write files below `folder` ("" = the working folder), which is made anew with `replace`.

        Exit code 0 when all are written; what is there before a failure stays. Raises UserError for names that leave
        the folder and for too many or too large files; else as `execute`.
        """
        check_files(folder, files, self.limits, isolated=self.isolation != "none")
        commands = put_commands(folder, files, replace=replace)
        result, _ = await self.execute_alone(sandbox_id, commands, timeout_s=timeout_s, max_output_bytes=1024)
        return result

    async def get(self, sandbox_id: str, path: str, max_bytes: int, *, timeout_s: float = 30.0) -> bytes | None:
        """A plain file's bytes; None when there is none (a link, folder or pipe isn't), or it is larger.

        `path` is relative to the working folder, or absolute. Raises UserError for a bad one; else as `execute`.
        """
        if not 0 < max_bytes <= self.limits.file_bytes:
            raise UserError(f"sandbox file {path!r}: max_bytes = {max_bytes}: expected 1 to {self.limits.file_bytes}")
        command = get_command(path, max_bytes, isolated=self.isolation != "none")
        result, data = await self.execute_alone(
            sandbox_id, [command], timeout_s=timeout_s, max_output_bytes=max_bytes + 1
        )
        return data if result.exit_code == 0 and not result.anew and len(data) <= max_bytes else None

    def destroy(self, sandbox_id: str) -> None:
        """End a sandbox with everything in it; unknown names are fine."""
        sandbox = self._sandboxes.pop(sandbox_id, None)
        if sandbox is not None:
            sandbox.destroyed = True
            self.runner.end(sandbox)

    def _known(self, sandbox_id: str) -> Sandbox:
        sandbox = self._sandboxes.get(sandbox_id)
        if sandbox is None:
            raise UserError(f"no sandbox {sandbox_id!r} on this host: create it first")
        return sandbox

    # ------------------------------------------------------------------------------------------- start and care

    async def _open_link(self, kind: str) -> None:
        # Since Linux 5.14 the process limit counts per user namespace; before, it would count all of the user's.
        kernel = tuple(int(part) for part in re.findall(r"\d+", os.uname().release)[:2])
        self.runner.processes = self.limits.processes if kind != "none" and kernel >= (5, 14) else 0
        program = driver(self.limits, count_processes=self.runner.processes > 0)
        self.runner.link = await LauncherLink.open(kind, program, self.limits.folder_bytes)
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
            link = self.runner.link
            if link is None:
                return
            began = time.monotonic()
            await link.process.wait()
            quick = quick + 1 if time.monotonic() - began < 10.0 else 0
            link.disconnect()
            for sandbox in self._sandboxes.values():
                if not sandbox.lock.locked():
                    self.runner.end(sandbox)
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
