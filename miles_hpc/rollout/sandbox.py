"""Sandboxes as an environment uses them: a client over the endpoints of the run's sandbox hosts.

New sandboxes go to the host with the fewest live ones. A host that is lost before a sandbox's first command was
answered costs nothing: the sandbox is made again elsewhere from its files and the command runs there. After that its
state is gone with the host, and the trajectory fails.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from miles_hpc.core.deadline import Deadline
from miles_hpc.core.errors import PeerLost, ProtocolError, UserError
from miles_hpc.core.messages import (
    SandboxCreate,
    SandboxDestroy,
    SandboxExec,
    SandboxGet,
    SandboxGot,
    SandboxPut,
    SandboxResult,
)
from miles_hpc.core.transport import Buffer, Endpoint, Reply
from miles_hpc.rollout.sandbox_files import SandboxFile, put_message
from miles_hpc.rollout.sandbox_host import SandboxHost

__all__ = ["LocalSandboxes", "SandboxClient"]

# What a call may take beyond the command's own time limit: the start of a sandbox on a busy node.
_OVERHEAD_S = 30.0


@dataclass
class _Placed:
    """Where a sandbox lives."""

    host: str
    endpoint: Endpoint | None
    files: dict[str, str]
    used: bool = False  # a command was answered


class SandboxClient:
    """Implements `environments.base.Sandboxes`. Belongs to one event loop.

    `timeout_s` and `max_output_bytes` bound each command. When no host is connected, calls wait up to
    `host_deadline_s` for one and raise DeadlineExpired.
    """

    def __init__(
        self,
        *,
        timeout_s: float = 5.0,
        max_output_bytes: int = 256,
        host_deadline_s: float = 60.0,
        max_moves: int = 2,
    ) -> None:
        self._timeout_s = timeout_s
        self._max_output_bytes = max_output_bytes
        self._host_deadline_s = host_deadline_s
        self._max_moves = max_moves
        self._hosts: dict[str, Endpoint] = {}
        self._load: dict[str, int] = {}
        self._placed: dict[str, _Placed] = {}
        self._arrived = asyncio.Event()

    # ------------------------------------------------------------------------------------------- hosts

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(self._hosts)

    def add_host(self, name: str, endpoint: Endpoint) -> None:
        """A sandbox host is connected; a later one of the same name replaces the earlier."""
        self._hosts[name] = endpoint
        self._load[name] = 0
        self._arrived.set()

    def remove_host(self, name: str) -> None:
        """The host is gone; unknown names are fine."""
        self._hosts.pop(name, None)
        self._load.pop(name, None)
        if not self._hosts:
            self._arrived.clear()

    # ------------------------------------------------------------------------------------------- sandboxes

    async def create(self, sandbox_id: str, files: dict[str, str]) -> None:
        """A new sandbox with these text files in its working folder."""
        placed = _Placed(host="", endpoint=None, files=files)
        for move in range(self._max_moves + 1):
            try:
                await self._place(sandbox_id, placed)
                break
            except PeerLost:
                if move == self._max_moves:
                    raise
        self._placed[sandbox_id] = placed

    async def execute(
        self,
        sandbox_id: str,
        command: str,
        *,
        timeout_s: float | None = None,
        max_output_bytes: int | None = None,
    ) -> SandboxResult:
        """Run one command and wait for its end. Raises PeerLost when the sandbox's state is lost with its host."""
        message = SandboxExec(
            sandbox_id=sandbox_id,
            command=command,
            timeout_s=self._timeout_s if timeout_s is None else timeout_s,
            max_output_bytes=self._max_output_bytes if max_output_bytes is None else max_output_bytes,
        )
        reply = await self._call(message, timeout_s=message.timeout_s)
        return _result(reply)

    async def put(
        self, sandbox_id: str, folder: str, files: Mapping[str, SandboxFile], *, replace: bool = False
    ) -> SandboxResult:
        """As `SandboxHost.put`. Raises RemoteError for what that refuses, else as `execute`."""
        message = put_message(sandbox_id, folder, files, replace=replace)
        reply = await self._call(message, [file.data for file in files.values()], timeout_s=message.timeout_s)
        return _result(reply)

    async def get(self, sandbox_id: str, path: str, max_bytes: int) -> bytes | None:
        """As `SandboxHost.get`. Raises RemoteError for what that refuses, else as `execute`."""
        message = SandboxGet(sandbox_id=sandbox_id, path=path, max_bytes=max_bytes)
        reply = await self._call(message, timeout_s=message.timeout_s)
        if not isinstance(reply.message, SandboxGot):
            raise ProtocolError(f"a sandbox host answered a get with {type(reply.message).__name__}")
        return bytes(reply.payload) if reply.message.found else None

    async def _call(
        self, message: SandboxExec | SandboxPut | SandboxGet, payload: Sequence[Buffer] = (), *, timeout_s: float
    ) -> Reply:
        """Ask the sandbox's host. While nothing was answered yet, a lost host's sandbox is made again elsewhere."""
        sandbox_id = message.sandbox_id
        placed = self._placed.get(sandbox_id)
        if placed is None:
            raise UserError(f"no sandbox {sandbox_id!r}: create it first")
        moves = 0
        while True:
            try:
                endpoint = placed.endpoint
                if endpoint is None or self._hosts.get(placed.host) is not endpoint:
                    raise PeerLost(f"sandbox host {placed.host} is gone, and sandbox {sandbox_id} with it")
                reply = await endpoint.call(message, payload=payload, deadline_s=timeout_s + _OVERHEAD_S)
                placed.used = True
                return reply
            except PeerLost:
                self._lost(placed)
                moves += 1
                if placed.used or moves > self._max_moves:
                    raise
                await self._place(sandbox_id, placed)

    async def destroy(self, sandbox_id: str) -> None:
        """End the sandbox; not waited for, and unknown names are fine (a lost host's sandboxes end with it)."""
        placed = self._placed.pop(sandbox_id, None)
        if placed is None or placed.endpoint is None or self._hosts.get(placed.host) is not placed.endpoint:
            return
        self._load[placed.host] -= 1
        try:
            await placed.endpoint.notify(SandboxDestroy(sandbox_id=sandbox_id))
        except PeerLost:
            self._lost(placed)

    # ------------------------------------------------------------------------------------------- details

    async def _place(self, sandbox_id: str, placed: _Placed) -> None:
        deadline = Deadline(self._host_deadline_s, f"sandbox {sandbox_id}: waiting for a sandbox host")
        while not self._hosts:
            try:
                await asyncio.wait_for(self._arrived.wait(), deadline.remaining_s)
            except TimeoutError:
                raise deadline.error() from None
        placed.host = min(self._hosts, key=lambda name: self._load[name])
        placed.endpoint = self._hosts[placed.host]
        self._load[placed.host] += 1
        try:
            message = SandboxCreate(sandbox_id=sandbox_id, files=placed.files)
            await placed.endpoint.call(message, deadline_s=_OVERHEAD_S)
        except PeerLost:
            self._lost(placed)
            raise
        except BaseException:
            if self._hosts.get(placed.host) is placed.endpoint:
                self._load[placed.host] -= 1
            raise

    def _lost(self, placed: _Placed) -> None:
        """The endpoint that served this sandbox failed: forget the host, unless a newer endpoint took its place."""
        endpoint = placed.endpoint
        if endpoint is not None and self._hosts.get(placed.host) is endpoint and endpoint.closed.is_set():
            self.remove_host(placed.host)


def _result(reply: Reply) -> SandboxResult:
    if not isinstance(reply.message, SandboxResult):
        raise ProtocolError(f"a sandbox host answered a command with {type(reply.message).__name__}")
    return reply.message


class LocalSandboxes:
    """Implements `environments.base.Sandboxes` on a SandboxHost of the same process, which it doesn't own."""

    def __init__(self, host: SandboxHost, *, timeout_s: float = 5.0, max_output_bytes: int = 256) -> None:
        self._host = host
        self._timeout_s = timeout_s
        self._max_output_bytes = max_output_bytes

    async def create(self, sandbox_id: str, files: dict[str, str]) -> None:
        self._host.create(sandbox_id, files)

    async def execute(
        self,
        sandbox_id: str,
        command: str,
        *,
        timeout_s: float | None = None,
        max_output_bytes: int | None = None,
    ) -> SandboxResult:
        return await self._host.execute(
            sandbox_id,
            command,
            timeout_s=self._timeout_s if timeout_s is None else timeout_s,
            max_output_bytes=self._max_output_bytes if max_output_bytes is None else max_output_bytes,
        )

    async def put(
        self, sandbox_id: str, folder: str, files: Mapping[str, SandboxFile], *, replace: bool = False
    ) -> SandboxResult:
        return await self._host.put(sandbox_id, folder, files, replace=replace)

    async def get(self, sandbox_id: str, path: str, max_bytes: int) -> bytes | None:
        return await self._host.get(sandbox_id, path, max_bytes)

    async def destroy(self, sandbox_id: str) -> None:
        self._host.destroy(sandbox_id)
