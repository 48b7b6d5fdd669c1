"""The agent: one torch-free process per node (per rank in the trainer group); it owns the heavy ones and holds a lease.

                  ┌───────────── controller found within the lease ────────────┐
                  ▼                                                            │
    find controller ─▶ connect ─▶ app.joined ─▶ heartbeat, renews the lease ─▶ lost ─▶ lease over ─▶ app.close, exit

| who waits | for whom | bound |
|---|---|---|
| agent at its start | controller's address | start_deadline_s |
| agent that has joined | an answer, a connection, its app | lease_s since the controller's last answer |
| controller | agent's heartbeat | lost_after_s |

The children of an agent never outlive it (`children.py`), and an agent never outlives its lease, so a node that was cut
off falls silent by itself. Heartbeats don't wait for the file system: a stalled one must not look like a dead process.
"""

from __future__ import annotations

import asyncio
import os
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass

from miles_hpc.control.addresses import local_addresses
from miles_hpc.control.membership import (
    ServiceAddress,
    find_controller,
    overtaken,
    towards_controller,
    wait_for_controller,
)
from miles_hpc.control.multihomed import connect_any
from miles_hpc.control.opening import open_transport
from miles_hpc.control.relay import CommandMemory, RelayPoint
from miles_hpc.core.config import ControlConfig
from miles_hpc.core.deadline import Deadline
from miles_hpc.core.errors import AuthenticationError, DeadlineExpired, FencedError, MilesError, PeerLost, RemoteError
from miles_hpc.core.messages import Ack, Heartbeat, Message, OpenRelay, RelayOpen, Shutdown
from miles_hpc.core.paths import RunPaths
from miles_hpc.core.telemetry import EventLog
from miles_hpc.core.transport import Credentials, Endpoint, HandlerResult, PeerIdentity

__all__ = ["Agent", "AgentApp", "AgentIdentity"]

#: How long an agent that ends may take to pass the order on.
_DRAIN_S = 5.0


@dataclass(frozen=True)
class AgentIdentity:
    """What an agent is told on its command line."""

    role: str
    name: str
    host: str
    attempt: int
    incarnation: int
    rank: int = 0

    def peer(self, term: int) -> PeerIdentity:
        return PeerIdentity(
            role=self.role,
            name=self.name,
            host=self.host,
            pid=os.getpid(),
            attempt=self.attempt,
            term=term,
            incarnation=self.incarnation,
            rank=self.rank,
        )


class AgentApp(ABC):
    """What a role does on its node. All methods run in the agent's event loop."""

    #: Set by the app when it can't go on; the agent then ends with this exit code.
    failed: asyncio.Future[int]

    @abstractmethod
    async def start(self) -> None:
        """Start children; must not wait long for them."""

    @abstractmethod
    async def joined(self, endpoint: Endpoint, term: int) -> None:
        """A controller of `term` accepted this agent. State of older terms is forgotten."""

    @abstractmethod
    async def left(self) -> None:
        """The controller was lost; it may come back within the lease."""

    @abstractmethod
    async def handle(self, message: Message, payload: memoryview) -> HandlerResult:
        """A message of the controller."""

    @abstractmethod
    async def close(self) -> None:
        """End all children and free everything; called on every way out."""

    def children(self) -> tuple[str, ...]:
        """Names of the living children, for heartbeats."""
        return ()


class Agent:
    """Runs an app under a lease. `run` returns the process's exit code."""

    def __init__(
        self, identity: AgentIdentity, app: AgentApp, paths: RunPaths, control: ControlConfig, secret: bytes
    ) -> None:
        self._identity = identity
        self._app = app
        self._paths = paths
        self._control = control
        self._secret = secret
        self._events = EventLog(paths.events, identity.name, attempt=identity.attempt)
        self._shutdown = asyncio.Event()
        self._renewed = time.monotonic()
        self._accepted = asyncio.Event()
        self._in_touch = False
        self._notice = ""
        self._noticed = asyncio.Event()
        self._commands = CommandMemory()
        self._relay: RelayPoint | None = None  # of the term that it joins or has joined

    @property
    def served(self) -> bool:
        """Whether a controller has ever accepted this agent."""
        return self._accepted.is_set()

    def notice(self, text: str) -> bool:
        """Tell the controller that this process was told to end soon; False when there is no controller to tell."""
        self._notice = text
        self._noticed.set()
        return self._in_touch

    async def run(self) -> int:
        """Serve until told to shut down (0), or until the app fails (its code).

        Raises FencedError, and DeadlineExpired when no controller was found in time or the lease is over. Children are
        ended before anything else is done, whatever the reason.
        """
        self._app.failed = asyncio.get_running_loop().create_future()
        service = asyncio.create_task(self._serve())
        lease = asyncio.create_task(self._watch_lease())
        verdict = ("", "")
        try:
            await self._app.start()
            done, _ = await asyncio.wait({service, lease, self._app.failed}, return_when=asyncio.FIRST_COMPLETED)
            for ended in (service, lease):
                if ended in done:
                    return ended.result()
            return self._app.failed.result()
        except FencedError as error:
            verdict = ("fenced", str(error))
            raise
        except DeadlineExpired as error:
            verdict = ("lease_over", str(error))
            raise
        finally:
            service.cancel()
            lease.cancel()
            await self._app.close()
            await asyncio.gather(service, lease, return_exceptions=True)
            if verdict[0]:
                self._events.verdict(verdict[0], peer=self._identity.name, evidence=verdict[1])
            self._events.close()

    async def _watch_lease(self) -> int:
        """Raises DeadlineExpired when the lease is over, whatever `_serve` waits for at that moment."""
        await self._accepted.wait()
        lease_s = self._control.lease_s
        while (silent_s := time.monotonic() - self._renewed) < lease_s:
            await asyncio.sleep(lease_s - silent_s)
        raise DeadlineExpired(f"lease of {self._identity.name}: no answer of a controller for {silent_s:.1f} s")

    async def _serve(self) -> int:
        deadline = Deadline(self._control.start_deadline_s, "waiting for the controller's address")
        term = 0
        while True:
            address = await self._find(term, deadline)
            try:
                endpoint = await self._connect(address, deadline)
            except FencedError:
                if not overtaken(self._paths, self._identity.attempt, address.term):
                    raise
                continue  # a newer controller of this attempt answered where the older one had been
            except (PeerLost, AuthenticationError, DeadlineExpired) as error:
                if deadline.expired:
                    raise DeadlineExpired(f"{deadline.error()}; the last try: {error}") from error
                await asyncio.sleep(0.2)
                continue
            term = address.term
            self._events.term = term
            self._renewed = time.monotonic()
            self._accepted.set()
            reason = await self._stay(endpoint, term)
            await self._app.left()
            if self._shutdown.is_set():
                return 0
            self._events.verdict("controller_lost", peer="controller", evidence=reason)
            left = self._control.lease_s - (time.monotonic() - self._renewed)
            deadline = Deadline(max(0.5, left), f"lease of {self._identity.name}: waiting for a controller")

    async def _find(self, term: int, deadline: Deadline) -> ServiceAddress:
        """The controller of a term not older than `term`: after a loss the same one may still be there."""
        return await wait_for_controller(self._paths, self._identity.attempt, newer_than=term - 1, deadline=deadline)

    async def _connect(self, address: ServiceAddress, deadline: Deadline) -> Endpoint:
        transport = open_transport(
            self._control.transport, Credentials(self._secret, self._identity.peer(address.term))
        )
        limit = min(self._control.connect_deadline_s, max(0.5, deadline.remaining_s))
        self._relay = RelayPoint(transport, self._handle, name=self._identity.name, memory=self._commands)
        handler = self._relay.handler
        return await connect_any(transport, address.addresses, handler, deadline_s=limit, name=address.name)

    async def _stay(self, endpoint: Endpoint, term: int) -> str:
        """Heartbeat until the endpoint is lost or a newer term exists; returns why."""
        newer = asyncio.create_task(self._look_for_newer(term))
        try:
            await self._app.joined(endpoint, term)
            self._in_touch = True
            while not endpoint.closed.is_set() and not self._shutdown.is_set():
                self._noticed.clear()
                beat = Heartbeat(children=self._app.children(), notice=self._notice)
                await endpoint.call(beat, deadline_s=self._control.lost_after_s)
                self._renewed = time.monotonic()
                if newer.done():
                    await endpoint.close(f"term {newer.result()} was claimed")
                    return f"term {newer.result()} was claimed"
                await self._pause(endpoint, newer, self._control.heartbeat_interval_s)
            return endpoint.close_reason or "shut down"
        except FencedError:
            raise
        except RemoteError as error:
            if error.kind == "FencedError":
                raise FencedError(error.text) from error
            return str(error)
        except MilesError as error:
            return str(error)
        finally:
            self._in_touch = False
            newer.cancel()
            newer.add_done_callback(_mark_retrieved)
            if self._relay is not None:
                await self._relay.close(drain_s=_DRAIN_S if self._shutdown.is_set() else 0.0)
            await endpoint.close("agent left")

    async def _look_for_newer(self, term: int) -> int:
        """Poll until this attempt has a controller of a newer term; returns that term. Raises FencedError."""
        while True:
            # In a thread: on a file system that stalls (or was cut off as well) this takes as long as that lasts.
            found = await asyncio.to_thread(find_controller, self._paths, self._identity.attempt)
            if found is not None and found.term > term:
                return found.term
            await asyncio.sleep(self._control.heartbeat_interval_s)

    async def _pause(self, endpoint: Endpoint, newer: asyncio.Task[int], seconds: float) -> None:
        """Sleep, but wake up when the endpoint is lost, a newer term exists, or a shutdown or a notice arrived."""
        events = (endpoint.closed, self._shutdown, self._noticed)
        waits = [asyncio.create_task(event.wait()) for event in events]
        try:
            await asyncio.wait({*waits, newer}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def _handle(self, endpoint: Endpoint, message: Message, payload: memoryview) -> HandlerResult:
        if isinstance(message, Shutdown):
            self._shutdown.set()
            return Ack()
        if isinstance(message, OpenRelay) and self._relay is not None:
            towards = towards_controller(self._paths, self._identity.attempt)
            return RelayOpen(addresses=await self._relay.listen(local_addresses(message.interface, towards=towards)))
        return await self._app.handle(message, payload)


def _mark_retrieved(task: asyncio.Task[int]) -> None:
    """What it found out too late is found again by whoever looks next."""
    if not task.cancelled():
        task.exception()
