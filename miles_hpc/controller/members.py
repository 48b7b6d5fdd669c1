"""Who is here: the controller's listener, its roster, and the endpoints that it calls.

    agents, rank 0, supervisor ──connect──▶ admit (attempt, incarnation) ──▶ roster ──▶ on_message / on_lost

A loss is declared by a closed endpoint at once, by missed heartbeats lost_after_s after the last one was heard: by a
timer for that very moment. Only agents and the supervisor send heartbeats; rank 0 of the trainer is vouched for by its
agent and by its own endpoint. Verdicts, each an event with evidence: joined, rejoined, superseded, refused, lost.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from miles_hpc.control.addresses import local_addresses
from miles_hpc.control.fanout import FanOut, FanOutResult
from miles_hpc.control.links import Links
from miles_hpc.control.membership import ServiceAddress, publish_service
from miles_hpc.control.multihomed import Listening, listen_on
from miles_hpc.control.opening import open_transport
from miles_hpc.control.roster import Roster, Verdict
from miles_hpc.core.config import RunConfig, SiteConfig
from miles_hpc.core.deadline import Deadline
from miles_hpc.core.errors import FencedError, MilesError, PeerLost
from miles_hpc.core.messages import Ack, Heartbeat, Message, OpenRelay, RelayOpen, RelayTarget, Shutdown
from miles_hpc.core.paths import RunPaths
from miles_hpc.core.telemetry import EventLog
from miles_hpc.core.transport import Buffer, Credentials, Endpoint, HandlerResult, PeerIdentity, Reply, Transport

__all__ = ["DIRECT_UP_TO", "TRAINER_RANK0", "Members"]

#: Name of the endpoint that takes the trainer world's commands.
TRAINER_RANK0 = "trainer-rank0"

#: Up to so many members are told from here; with more, agents pass commands on.
DIRECT_UP_TO = 16

#: So long after a deadline it is this process that was held up: what arrived meanwhile is heard before it judges.
_LATE_S = 0.1

_SUPERVISOR_S = 10.0


class Members:
    """The roster of one term, with its endpoints."""

    def __init__(
        self,
        run: RunConfig,
        site: SiteConfig,
        paths: RunPaths,
        credentials: Credentials,
        events: EventLog,
        *,
        oldest_incarnation: dict[str, int],
        on_message: Callable[[PeerIdentity, Message], Awaitable[HandlerResult]],
        on_joined: Callable[[PeerIdentity], None],
        on_lost: Callable[[PeerIdentity, str], None],
        on_notice: Callable[[PeerIdentity, str], None] = lambda peer, notice: None,
    ) -> None:
        """`oldest_incarnation` maps a role's name prefix to the oldest incarnation that is still admitted.

        `on_notice` is called for every heartbeat of a member that was told from outside to end soon.
        """
        self._run = run
        self._site = site
        self._paths = paths
        self._credentials = credentials
        self._events = events
        self._oldest = oldest_incarnation
        self._on_message = on_message
        self._on_joined = on_joined
        self._on_lost = on_lost
        self._on_notice = on_notice
        self._roster = Roster(lost_after_s=run.control.lost_after_s)
        self._endpoints: dict[str, Endpoint] = {}
        self._listening: Listening | None = None
        self._transport: Transport | None = None  # until what it runs on was noted
        self._watcher: asyncio.Task[None] | None = None
        self._hanging_up: set[asyncio.Task[None]] = set()
        self._links: Links | None = None
        self._fan_out: FanOut | None = None
        self._relays: dict[str, tuple[Endpoint, tuple[str, ...]]] = {}  # members that pass commands on, and where
        self._asking: set[asyncio.Task[None]] = set()
        self._telling: set[asyncio.Task[Reply]] = set()
        self._changed = asyncio.Event()
        self._closing = False

    async def open(self) -> None:
        """Bind, publish the address, start to watch heartbeats."""
        transport = open_transport(self._run.control.transport, self._credentials)
        bind = local_addresses(self._run.control.interface or self._site.interface)
        self._listening = await listen_on(transport, self._handle, bind, on_connect=self._admit, on_close=self._closed)
        me = self._credentials.identity
        self._links = Links(transport, known=self.endpoint)
        self._fan_out = FanOut(self._links, name=me.name, direct_up_to=DIRECT_UP_TO)
        publish_service(
            self._paths,
            ServiceAddress(name=me.name, addresses=self._listening.addresses, attempt=me.attempt, term=me.term),
        )
        self._transport = transport
        self._events.note("transport", **transport.chosen())
        self._watcher = asyncio.create_task(self._watch())

    async def close(self, reason: str, *, shut_down: bool) -> None:
        """Tell everybody to end (`shut_down`), or just hang up so that they look for the next term."""
        self._closing = True
        for task in (self._watcher, *self._asking):
            if task is not None:
                task.cancel()
        if shut_down:
            result = await self.tell(Shutdown(reason=reason), deadline_s=5.0)
            if result.errors:
                self._events.note("shutdown_unanswered", errors={n: str(error) for n, error in result.errors.items()})
        if self._links is not None:
            await self._links.close()
        if self._listening is not None:
            await self._listening.close()
        await asyncio.gather(*self._hanging_up, return_exceptions=True)

    # ------------------------------------------------------------------------------------------ questions

    def endpoint(self, name: str) -> Endpoint | None:
        """The member's endpoint, or None when it isn't here."""
        return self._endpoints.get(name)

    def with_role(self, role: str) -> list[PeerIdentity]:
        """Members of a role, sorted by name."""
        found = [e.peer for e in self._endpoints.values() if e.peer.role == role]
        return sorted(found, key=lambda peer: peer.name)

    async def tell(
        self, message: Message, names: Sequence[str] | None = None, *, payload: Sequence[Buffer] = (), deadline_s: float
    ) -> FanOutResult:
        """Have members (default: all) handle `message`; see FanOut.call. Many are told through each other."""
        if self._fan_out is None:
            raise PeerLost("no members: not open yet")
        targets = [self._target(name) for name in (self._endpoints if names is None else names)]
        return await self._fan_out.call(message, targets, payload=payload, deadline_s=deadline_s)

    def _target(self, name: str) -> RelayTarget:
        endpoint, addresses = self._relays.get(name, (None, ()))
        return RelayTarget(name, addresses if endpoint is self._endpoints.get(name) else ())

    async def wait(self, ready: Callable[[], bool], deadline: Deadline) -> None:
        """Wait until `ready()`; it is asked again after every change of the roster. Raises DeadlineExpired."""
        while not ready():
            deadline.check()
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), min(1.0, deadline.remaining_s + 0.01))
            except TimeoutError:
                pass

    def touch(self) -> None:
        """Something changed that a waiter of `wait` may be interested in."""
        self._changed.set()

    def tell_supervisor(self, message: Message) -> None:
        """Best effort, in the background: the supervisor sees ended steps by itself as well."""
        endpoint = self.endpoint("supervisor")
        if endpoint is None:
            return
        task = asyncio.create_task(endpoint.call(message, deadline_s=_SUPERVISOR_S))
        self._telling.add(task)

        def done(finished: asyncio.Task[Reply]) -> None:
            self._telling.discard(finished)
            if not finished.cancelled() and finished.exception() is not None:
                self._events.note("supervisor_deaf", error=str(finished.exception()))

        task.add_done_callback(done)

    # ------------------------------------------------------------------------------------------ events

    async def _admit(self, endpoint: Endpoint) -> None:
        peer = endpoint.peer
        try:
            verdicts = self._welcome(peer)
        except FencedError as error:
            self._events.verdict("refused", peer=peer.name, evidence=f"host {peer.host}, pid {peer.pid}: {error}")
            raise
        before = self._endpoints.get(peer.name)
        self._endpoints[peer.name] = endpoint
        if before is not None:
            self._hang_up(before, "a newer connection of this member exists")
        for verdict in verdicts:
            self._events.verdict(type(verdict).__name__.lower(), peer=peer.name, evidence=verdict.evidence)
        self._events.verdict("joined", peer=peer.name, evidence=f"host {peer.host}, incarnation {peer.incarnation}")
        if len(self._endpoints) > DIRECT_UP_TO:
            self._ask_for_relays()
        self._note_transport()
        self._on_joined(peer)
        self.touch()

    def _note_transport(self) -> None:
        """What the first member's connection really runs on, where the transport chooses."""
        in_use = self._transport.chosen().get("in_use", "") if self._transport is not None else ""
        if in_use:
            self._events.note("transport_in_use", in_use=in_use)
            self._transport = None

    def _ask_for_relays(self) -> None:
        """With so many members, each agent shall pass commands on."""
        for name, endpoint in self._endpoints.items():
            if endpoint.peer.role.endswith("-agent") and self._relays.get(name, (None,))[0] is not endpoint:
                self._relays[name] = (endpoint, ())
                task = asyncio.create_task(self._ask_for_relay(name, endpoint))
                self._asking.add(task)
                task.add_done_callback(self._asking.discard)

    async def _ask_for_relay(self, name: str, endpoint: Endpoint) -> None:
        message = OpenRelay(interface=self._run.control.interface or self._site.interface)
        try:
            reply = (await endpoint.call(message, deadline_s=self._run.control.call_deadline_s)).message
        except MilesError as error:  # it's told directly
            self._events.note("no_relay", member=name, error=str(error))
            return
        if isinstance(reply, RelayOpen):
            self._relays[name] = (endpoint, reply.addresses)

    def _welcome(self, peer: PeerIdentity) -> list[Verdict]:
        """Raises FencedError for a process that others have taken the place of."""
        oldest = self._oldest.get(peer.role.split("-")[0], 0)
        if peer.incarnation < oldest and peer.role != "supervisor":
            raise FencedError(f"incarnation {peer.incarnation} of {peer.name} was declared lost; {oldest} is expected")
        return [] if peer.name == TRAINER_RANK0 else self._roster.joined(peer, time.monotonic())

    async def _closed(self, endpoint: Endpoint) -> None:
        peer = endpoint.peer
        if self._endpoints.get(peer.name) is not endpoint:
            return
        del self._endpoints[peer.name]
        if self._closing:
            return
        reason = endpoint.close_reason.removeprefix("endpoint closed: ")
        self._roster.closed(peer.name, reason, time.monotonic())
        self._lost(peer, f"endpoint closed: {reason}")

    def _lost(self, peer: PeerIdentity, evidence: str) -> None:
        self._relays.pop(peer.name, None)
        self._events.verdict("lost", peer=peer.name, evidence=evidence)
        self._on_lost(peer, evidence)
        self.touch()

    async def _handle(self, endpoint: Endpoint, message: Message, payload: memoryview) -> HandlerResult:
        if self._endpoints.get(endpoint.peer.name) is not endpoint:
            raise PeerLost(f"{endpoint.peer.name}: this connection was given up; join again")
        self._roster.heard(endpoint.peer.name, time.monotonic())
        if isinstance(message, Heartbeat):
            if message.notice:
                self._on_notice(endpoint.peer, message.notice)
            return Ack()
        return await self._on_message(endpoint.peer, message)

    async def _watch(self) -> None:
        """Declare members lost at the moment of their deadlines.

        While this sleeps, no deadline earlier than the one it sleeps for can come up: hearing or admitting a member
        makes one that is later than all others.
        """
        while True:
            now = time.monotonic()
            due = self._roster.next_loss(now)
            await asyncio.sleep(max(0.0, due - now))
            if time.monotonic() - due > _LATE_S:
                await asyncio.sleep(_LATE_S)
            for verdict in self._roster.tick(time.monotonic()):
                endpoint = self._endpoints.pop(verdict.name, None)
                if endpoint is not None:
                    self._lost(endpoint.peer, verdict.evidence)
                    self._hang_up(endpoint, verdict.evidence)

    def _hang_up(self, endpoint: Endpoint, reason: str) -> None:
        """Close without waiting: to a silent peer that takes a while, and nobody else's verdict may wait for it."""
        task = asyncio.create_task(endpoint.close(reason))
        self._hanging_up.add(task)
        task.add_done_callback(self._hung_up)

    def _hung_up(self, task: asyncio.Task[None]) -> None:
        self._hanging_up.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._events.note("close_failed", error=str(task.exception()))
