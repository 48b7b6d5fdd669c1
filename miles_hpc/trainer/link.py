"""Rank 0's connection to the outside: a thread with an event loop beside the thread that trains.

    engines ──DescribeWeights, FetchPieces──▶ WeightSource          answered here, also while a step runs
    controller ──TrainStep, ...──▶ inbox ──▶ main thread ──▶ all ranks ──▶ answer()
    controller ◀──CheckpointWritten── report()
    failure board (any rank's exception) ──▶ the call under way fails with it

| who waits | for | bound |
|---|---|---|
| link, at its start | the controller's address, then a connection | start_deadline_s |
| link, after a loss | the same or a newer controller | lease_s, then `Ended` |
| controller's call | the main thread's answer | the caller's deadline; a rank's failure ends it at once |
| main thread | the next request | nothing: it idles until a request or `Ended` comes |

Whatever ends the link puts one `Ended` into the inbox, with the exit code for the process.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from miles_hpc.control.addresses import local_addresses
from miles_hpc.control.membership import (
    ServiceAddress,
    find_controller,
    overtaken,
    towards_controller,
    wait_for_controller,
)
from miles_hpc.control.multihomed import connect_any, join_addresses, listen_on
from miles_hpc.control.opening import open_transport
from miles_hpc.core import exits
from miles_hpc.core.config import ControlConfig
from miles_hpc.core.deadline import Deadline
from miles_hpc.core.errors import AuthenticationError, DeadlineExpired, FencedError, MilesError, PeerLost
from miles_hpc.core.messages import Ack, CheckpointWritten, DescribeWeights, FetchPieces, Message, Shutdown
from miles_hpc.core.paths import RunPaths
from miles_hpc.core.transport import Credentials, Endpoint, HandlerResult, PeerIdentity
from miles_hpc.trainer.commands import Answer

__all__ = ["ControllerLink", "Ended", "Failures", "Request"]

_FAILURE_POLL_S = 0.25
_RETRY_S = 0.2
_LAST_RESORT_S = 10.0


class Failures(Protocol):
    """The failure board as the link needs it; both may block for a moment."""

    def read(self) -> MilesError | None: ...
    def acknowledge(self) -> None: ...


@dataclass
class Request:
    """A call of the controller that waits for `ControllerLink.answer` or `fail`."""

    message: Message
    payload: memoryview
    term: int
    future: asyncio.Future[Answer]


@dataclass
class Ended:
    """Nothing more will come."""

    reason: str
    exit_code: int


class ControllerLink:
    """Runs its own thread. Methods are for the main thread unless they say otherwise.

    `identity(term)` says who this process is under a term; `serve_weights` is a weight source's handler;
    `failures` is asked again and again in a thread of its own, and told when a failure was passed on.
    """

    def __init__(
        self,
        control: ControlConfig,
        paths: RunPaths,
        secret: bytes,
        identity: Callable[[int], PeerIdentity],
        serve_weights: Callable[[Endpoint, Message, memoryview], Awaitable[HandlerResult]],
        *,
        interface: str = "",
        failures: Failures,
    ) -> None:
        self._control = control
        self._paths = paths
        self._secret = secret
        self._identity = identity
        self._serve_weights = serve_weights
        self._interface = interface
        self._failures = failures
        self.term = 0  # of the newest controller that was followed
        self.inbox: queue.Queue[Request | Ended] = queue.Queue()
        self.source_address = ""
        self._loop: asyncio.AbstractEventLoop
        self._listening = threading.Event()
        self._start_error: BaseException | None = None
        self._endpoint: Endpoint | None = None
        self._pending: set[asyncio.Future[Answer]] = set()
        self._background: set[asyncio.Task[None]] = set()
        self._stop: asyncio.Event
        self._thread = threading.Thread(target=self._run, name="controller-link", daemon=True)

    # ------------------------------------------------------------------------------------------ main thread

    def start(self) -> None:
        """Start and return when the weight source listens. Raises what listening raised."""
        self._thread.start()
        if not self._listening.wait(self._control.connect_deadline_s):
            raise DeadlineExpired(f"weight source: not listening after {self._control.connect_deadline_s:.0f} s")
        if self._start_error is not None:
            raise self._start_error

    def answer(self, request: Request, answer: Answer) -> None:
        self._loop.call_soon_threadsafe(_settle, request.future, answer, None)

    def fail(self, request: Request, error: BaseException) -> None:
        self._loop.call_soon_threadsafe(_settle, request.future, None, error)

    def report(self, message: CheckpointWritten) -> None:
        """Tell the controller; when it is gone meanwhile, nobody waits for this any more."""
        self._loop.call_soon_threadsafe(self._report, message)

    def close(self, timeout_s: float = 5.0) -> None:
        """Hang up and end the thread. Answers that were given before are sent first."""
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(timeout_s)

    # ------------------------------------------------------------------------------------------ link thread

    def _run(self) -> None:
        asyncio.run(self._main())

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        try:
            credentials = Credentials(self._secret, self._identity(0), on_newer=self._on_newer)
            transport = open_transport(self._control.transport, credentials)
            # Engines outlive terms and so does the source: it serves peers of any term of this attempt.
            towards = towards_controller(self._paths, self._attempt)
            bind = local_addresses(self._interface, towards=towards)
            listening = await listen_on(transport, self._serve_weights, bind, any_term=True)
        except BaseException as error:
            self._start_error = error
            self._listening.set()
            return
        self.source_address = join_addresses(listening.addresses)
        self._listening.set()
        tasks = [asyncio.create_task(self._follow()), asyncio.create_task(self._watch_failures())]
        await self._stop.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *self._background, return_exceptions=True)
        if self._endpoint is not None:
            await self._endpoint.close("trainer ends")
        await listening.close()

    def _on_newer(self, peer: PeerIdentity) -> None:
        """A process of a newer attempt looked for its own weight source here: this trainer was left over."""
        reason = f"{peer.name} belongs to attempt {peer.attempt}, this trainer to attempt {self._attempt}"
        self.inbox.put(Ended(reason, exits.FENCED))

    async def _follow(self) -> None:
        """Stay with a controller; look for the same or a newer one after a loss, for as long as the lease lasts."""
        deadline = Deadline(self._control.start_deadline_s, "trainer: waiting for a controller")
        term = 0
        try:
            while True:
                address = await wait_for_controller(self._paths, self._attempt, newer_than=term - 1, deadline=deadline)
                try:
                    endpoint = await self._connect(address, deadline)
                except FencedError:
                    if not overtaken(self._paths, self._attempt, address.term):
                        raise
                    continue
                except (PeerLost, AuthenticationError, DeadlineExpired):
                    deadline.check()
                    await asyncio.sleep(_RETRY_S)
                    continue
                term = self.term = address.term
                self._endpoint = endpoint
                reason = await self._stay(endpoint, term)
                self._endpoint = None
                what = f"trainer: lost the controller of term {term} ({reason}), waiting for it or a newer one"
                deadline = Deadline(self._control.lease_s, what)
        except FencedError as error:
            self.inbox.put(Ended(str(error), exits.FENCED))
        except Exception as error:
            self.inbox.put(Ended(f"{type(error).__name__}: {error}", exits.FAILED))

    @property
    def _attempt(self) -> int:
        return self._identity(0).attempt

    async def _connect(self, address: ServiceAddress, deadline: Deadline) -> Endpoint:
        transport = open_transport(self._control.transport, Credentials(self._secret, self._identity(address.term)))

        async def handle(endpoint: Endpoint, message: Message, payload: memoryview) -> HandlerResult:
            return await self._handle(address.term, endpoint, message, payload)

        limit = min(self._control.connect_deadline_s, max(0.5, deadline.remaining_s))
        return await connect_any(transport, address.addresses, handle, deadline_s=limit, name=address.name)

    async def _stay(self, endpoint: Endpoint, term: int) -> str:
        """Until the endpoint closes or a newer term was claimed; returns why."""
        while True:
            try:
                await asyncio.wait_for(endpoint.closed.wait(), self._control.heartbeat_interval_s)
                return endpoint.close_reason
            except TimeoutError:
                newest = find_controller(self._paths, self._attempt)
                if newest is not None and newest.term > term:
                    await endpoint.close(f"term {newest.term} was claimed")
                    return f"term {newest.term} was claimed"

    async def _handle(self, term: int, endpoint: Endpoint, message: Message, payload: memoryview) -> HandlerResult:
        if isinstance(message, DescribeWeights | FetchPieces):
            return await self._serve_weights(endpoint, message, payload)
        if isinstance(message, Shutdown):
            self.inbox.put(Ended(message.reason, exits.DONE))
            return Ack()
        request = Request(message, payload, term, self._loop.create_future())
        self._pending.add(request.future)
        request.future.add_done_callback(self._pending.discard)
        self.inbox.put(request)
        reply, buffers = await request.future
        return reply, buffers

    def _report(self, message: CheckpointWritten) -> None:
        endpoint = self._endpoint
        if endpoint is None:
            return

        async def send() -> None:
            try:
                await endpoint.call(message, deadline_s=self._control.call_deadline_s)
            except MilesError:
                pass  # the controller journals its own refusal; a lost one has its successor load a manifest

        task = self._loop.create_task(send())
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _watch_failures(self) -> None:
        """A rank that failed may leave the main thread in a collective: its error is reported from here."""
        while True:
            await asyncio.sleep(_FAILURE_POLL_S)
            error = await asyncio.to_thread(self._failures.read)
            if error is not None:
                for future in list(self._pending):
                    _settle(future, None, error)
                await asyncio.sleep(_FAILURE_POLL_S)  # lets the answers go out
                await asyncio.to_thread(self._failures.acknowledge)
                self.inbox.put(Ended(str(error).splitlines()[0], exits.FAILED))
                await asyncio.sleep(_LAST_RESORT_S)
                os._exit(exits.FAILED)  # the main thread hangs in a collective with ranks that are gone


def _settle(future: asyncio.Future[Answer], answer: Answer | None, error: BaseException | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    elif answer is not None:
        future.set_result(answer)
