"""The rollout agent's part of a session server: starts it, tells it the engines, starts it again.

    start ─▶ address file ─▶ SessionClient.serve_at ─▶ SessionEngines, every `TELL_S` and whenever engines change
      ▲                                                    │ no answer for `SILENT_S`: killed
      ╰──── after its end, at the same port, so that agents with open sessions find it again

| who waits | for what | how long |
|---|---|---|
| the keeper | a started server's address | control.start_deadline_s, then it is killed |
| the keeper | an answer to what it tells | `SILENT_S` in all, then it is killed |
| the next start, after an end without an answer | | `_PAUSE_S` |
| a server | word of its agent | its lease, then it ends itself |

A journal that can't be read, or was written by another version, is moved aside and kept: the sessions in it belong to
groups that are then sampled again. While storage takes nothing, the server is started again and again.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from miles_hpc.control.agent import AgentIdentity
from miles_hpc.control.children import ChildProcess
from miles_hpc.control.opening import open_transport
from miles_hpc.core import exits
from miles_hpc.core.config import RunConfig
from miles_hpc.core.deadline import Deadline
from miles_hpc.core.errors import MilesError
from miles_hpc.core.messages import SessionEngine, SessionEngines, SessionServerStatus
from miles_hpc.core.paths import RunPaths
from miles_hpc.core.telemetry import EventLog
from miles_hpc.core.transport import Credentials, Endpoint
from miles_hpc.rollout.session.client import SessionClient
from miles_hpc.rollout.session.listening import ServerAddress, read_address, read_token

__all__ = ["SILENT_S", "TELL_S", "SessionKeeper"]

#: The engines are told so often, also when nothing changed: it keeps the server's lease.
TELL_S = 2.0
#: A server that answers nothing for so long is killed.
SILENT_S = 30.0

_POLL_S = 0.1
_PAUSE_S = 0.5
_USELESS_ENDS = 8
_NOTE_S = 30.0


class SessionKeeper:
    """One node's session server. `engines` lists the node's engines, `term` is the agent's at the moment."""

    def __init__(
        self,
        run: RunConfig,
        paths: RunPaths,
        identity: AgentIdentity,
        secret: bytes,
        client: SessionClient,
        *,
        engines: Callable[[], tuple[SessionEngine, ...]],
        term: Callable[[], int],
        ended: Callable[[str, int, str], Awaitable[None]],
        events: EventLog,
    ) -> None:
        """`ended` is told each end: name, exit code, the log's last lines."""
        self.name = f"{identity.host}-sessions"
        self.child: ChildProcess | None = None
        self.status: SessionServerStatus | None = None  # its newest answer
        self._run = run
        self._paths = paths
        self._identity = identity
        self._secret = secret
        self._client = client
        self._engines = engines
        self._term = term
        self._ended = ended
        self._events = events
        self._port = 0  # of the last server; 0: any
        self._changed = asyncio.Event()
        self._noted = 0.0
        self._answered = False  # the server that runs now
        self._owns = False  # some server of ours has answered: what is in the journal is ours
        self._telling: set[asyncio.Task[None]] = set()

    def changed(self) -> None:
        """The engines may be others, or hold other weights: tell the server now."""
        self._changed.set()

    async def keep(self) -> None:
        """Until cancelled. Raises MilesError when one server after the other ends before it has answered."""
        start, useless = 0, 0
        while True:
            start += 1
            self._answered = False
            address_file = self._start(start)
            assert self.child is not None
            child = self.child
            serving = asyncio.create_task(self._serve(child, address_file))
            guard = asyncio.create_task(child.kill_when_stopped(self._run.control.lost_after_s))
            try:
                code = await child.wait()
            finally:
                self._client.serve_at("", "")
                guard.cancel()
                serving.cancel()
                await asyncio.gather(guard, serving, return_exceptions=True)
            self._report(code, child.log_tail())
            if self._answered:
                useless = 0
                continue
            if code == exits.UNREADABLE:
                await asyncio.to_thread(self._set_aside, start)
            elif code == exits.USER_ERROR:
                self._port = 0  # somebody else may have taken it
            useless += code != exits.NO_STORAGE
            if useless >= _USELESS_ENDS:
                raise MilesError(
                    f"session server {self.name} ended {useless} times before it answered, last with {code}"
                )
            await asyncio.sleep(_PAUSE_S)

    def _report(self, code: int, log_tail: str) -> None:
        """In the background: agents with open sessions wait for the next server, whatever the controller does."""

        async def tell() -> None:
            await self._ended(self.name, code, log_tail)

        task = asyncio.create_task(tell())
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def close(self) -> None:
        """End the server; call it after `keep` was cancelled. Idempotent."""
        for task in set(self._telling):
            task.cancel()
        if self.child is not None:
            await self.child.end(grace_s=3.0)

    # ------------------------------------------------------------------------------------------- one server

    def _start(self, start: int) -> Path:
        me = self._identity
        logs = self._paths.logs(me.attempt)
        address_file = logs / f"{self.name}-i{me.incarnation}.{start}.address"
        command = [sys.executable, "-P", "-m", "launchers.session_server", "--run-dir", str(self._paths.root)]
        command += ["--attempt", str(me.attempt), "--term", str(self._term()), "--name", self.name, "--host", me.host]
        if not self._owns:  # sessions belong to an agent's process: those of an earlier one are played by nobody
            command += ["--new-owner"]
        command += ["--listen", f"127.0.0.1:{self._port}", "--address-file", str(address_file)]
        self.child = ChildProcess(self.name, command, log=logs / f"{self.name}-i{me.incarnation}.log")
        return address_file

    async def _serve(self, child: ChildProcess, address_file: Path) -> None:
        """From the server's address on, tell it the engines; kill it when it doesn't answer."""
        deadline = Deadline(self._run.control.start_deadline_s, f"waiting for session server {self.name} to listen")
        try:
            while not address_file.exists():
                deadline.check()
                await asyncio.sleep(_POLL_S)
            address = read_address(address_file)
            self._port = int(address.http.rpartition(":")[2])
            told = False
            silent = Deadline(SILENT_S, f"telling session server {self.name} its engines")
            while True:
                try:
                    async for status in self._tell(address):
                        self._note(status)
                        if not told:  # only now can a session be served
                            self._client.serve_at(address.http, read_token(address_file))
                            told = self._answered = self._owns = True
                        silent = Deadline(SILENT_S, silent.what)
                except MilesError as error:
                    if silent.expired:
                        raise MilesError(f"{silent.error()}: {error}") from error
                await asyncio.sleep(_PAUSE_S)
        except MilesError as error:
            self._events.verdict("session_server_unresponsive", peer=self.name, evidence=f"{error}")
            child.kill()

    async def _tell(self, address: ServerAddress) -> AsyncIterator[SessionServerStatus]:
        """Its answers, for as long as the term lasts. Raises MilesError when it is lost."""
        term = self._term()
        transport = open_transport("tcp", Credentials(self._secret, self._identity.peer(term)))
        endpoint: Endpoint = await transport.connect(address.control, deadline_s=SILENT_S / 3)
        try:
            while self._term() == term:
                self._changed.clear()
                reply = await endpoint.call(SessionEngines(engines=self._engines()), deadline_s=SILENT_S / 3)
                if isinstance(reply.message, SessionServerStatus):
                    yield reply.message
                try:
                    await asyncio.wait_for(self._changed.wait(), TELL_S)
                except TimeoutError:
                    pass
        finally:
            await endpoint.close("the agent's term has ended" if self._term() != term else "the agent lets go")

    def _note(self, status: SessionServerStatus) -> None:
        before, self.status = self.status, status
        if status.trouble and (before is None or before.trouble != status.trouble):
            self._events.verdict("session_journal_trouble", peer=self.name, evidence=status.trouble)
        if before is not None and status.failovers > before.failovers:
            self._events.note(
                "sessions_moved",
                requests=status.failovers - before.failovers,
                slowest_s=round(status.slowest_failover_s, 3),
            )
        if time.monotonic() - self._noted >= _NOTE_S:
            self._noted = time.monotonic()
            self._events.note(
                "session_server",
                sessions=status.sessions,
                in_flight=status.in_flight,
                moved=status.moved,
                load_imbalance=status.load_imbalance,
                prefix_hit_rate=status.prefix_hit_rate,
                prefix_bound=status.prefix_bound,
            )

    def _set_aside(self, start: int) -> None:
        journal = self._paths.session_journal(self.name)
        aside = journal.with_name(f"{journal.name}.unreadable-{self._identity.attempt}.{start}")
        try:
            journal.rename(aside)
        except OSError as error:
            evidence = f"{journal} can't be moved: {error.strerror}"
        else:
            evidence = f"moved to {aside.name}"
        self._events.verdict("session_journal_set_aside", peer=self.name, evidence=evidence)
