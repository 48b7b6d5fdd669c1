"""What the agents of rollout and sandbox nodes run: engines as children with a RolloutHost, or a SandboxHost.

RolloutApp   engine child ─▶ address file ─▶ endpoint ─▶ RolloutHost.add_engine
             engine ended ─▶ remove_engine ─▶ ChildEvent ─▶ started again (a bounded number of times in a row)
             with an agent function: a session server as a child (session_keeper.py)
             sandbox hosts: their addresses are read from the term's rendezvous, lost ones are looked up again
SandboxApp   SandboxHost ─▶ listener ─▶ address in each term's rendezvous
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence

from miles_hpc.control.addresses import local_addresses
from miles_hpc.control.agent import AgentApp, AgentIdentity
from miles_hpc.control.children import ChildProcess
from miles_hpc.control.membership import ServiceAddress, list_services, publish_service, towards_controller
from miles_hpc.control.multihomed import Listening, connect_any, listen_on
from miles_hpc.control.opening import open_transport
from miles_hpc.core import exits
from miles_hpc.core.config import RunConfig
from miles_hpc.core.deadline import Deadline
from miles_hpc.core.errors import MilesError, PeerLost
from miles_hpc.core.messages import ChildEvent, Message, SessionEngine
from miles_hpc.core.paths import RunPaths
from miles_hpc.core.telemetry import EventLog
from miles_hpc.core.transport import Buffer, Credentials, Endpoint, HandlerResult, PeerIdentity, Reply
from miles_hpc.rollout.engine_client import RemoteEngine
from miles_hpc.rollout.role import RolloutHost
from miles_hpc.rollout.sandbox import SandboxClient
from miles_hpc.rollout.sandbox_host import SandboxHost, SandboxLimits
from miles_hpc.rollout.session_keeper import SessionKeeper

__all__ = ["RolloutApp", "SandboxApp"]

_REPORT_S = 30.0
_SANDBOX_POLL_S = 0.3
_UTILISATION_S = 2.0
_ENGINE_CHECK_S = 5.0
_ENGINE_SILENT_S = 60.0
_QUICK_DEATHS = 5


class RolloutApp(AgentApp):
    """One rollout node."""

    def __init__(self, run: RunConfig, paths: RunPaths, identity: AgentIdentity, secret: bytes) -> None:
        self._run = run
        self._paths = paths
        self._identity = identity
        self._secret = secret
        self._term = 0
        self._endpoint: Endpoint | None = None
        self._engines: dict[str, ChildProcess] = {}
        self._addresses: dict[str, str] = {}  # of the engines that the host has
        self._tasks: list[asyncio.Task[None]] = []
        self._events = EventLog(paths.events, f"{identity.name}-work", attempt=identity.attempt)
        rollout = run.rollout
        self._sandboxes = SandboxClient(
            timeout_s=rollout.sandbox_timeout_s, max_output_bytes=rollout.sandbox_max_output_bytes
        )
        self._host = RolloutHost(
            run,
            paths,
            identity.host,
            self._sandboxes,
            self._report,
            events=self._events,
            on_engines=self._engines_changed,
        )
        self._sessions: SessionKeeper | None = None
        if rollout.custom_agent_function_path:
            self._sessions = SessionKeeper(
                run,
                paths,
                identity,
                secret,
                self._host.sessions,
                engines=self._session_engines,
                term=lambda: self._term,
                ended=self._tell_end,
                events=self._events,
            )

    async def start(self) -> None:
        for number in range(self._run.rollout.engines_per_host):
            self._tasks.append(asyncio.create_task(self._keep_engine(number)))
        if self._sessions is not None:
            self._tasks.append(asyncio.create_task(self._sessions.keep()))
        self._tasks.append(asyncio.create_task(self._keep_sandboxes()))
        self._tasks.append(asyncio.create_task(self._tell_utilisation()))
        for task in self._tasks:
            task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None and not self.failed.done():
            print(f"rollout agent: {type(task.exception()).__name__}: {task.exception()}", file=sys.stderr, flush=True)
            self.failed.set_result(1)

    async def joined(self, endpoint: Endpoint, term: int) -> None:
        self._endpoint, self._term = endpoint, term
        self._events.term = term
        await self._host.reset(term)
        self._host.announce()  # to the session server too: it has to come under the new term

    async def left(self) -> None:
        self._endpoint = None

    async def handle(self, message: Message, payload: memoryview) -> HandlerResult:
        answer: Message | tuple[Message, Sequence[Buffer]] = await self._host.handle(message, payload)
        return answer

    def children(self) -> tuple[str, ...]:
        sessions = self._sessions.child if self._sessions is not None else None
        servers = {} if sessions is None else {sessions.name: sessions}
        return tuple(name for name, child in (self._engines | servers).items() if child.exit_code is None)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._host.close()
        if self._sessions is not None:
            await self._sessions.close()
        await asyncio.gather(*(child.end(grace_s=3.0) for child in self._engines.values()))
        self._events.close()

    async def _report(self, message: Message) -> Reply:
        endpoint = self._endpoint
        if endpoint is None:
            raise PeerLost("no controller at the moment")
        return await endpoint.call(message, deadline_s=_REPORT_S)

    # ------------------------------------------------------------------------------------------ engines

    async def _keep_engine(self, number: int) -> None:
        """Start engine `number`, and again whenever it ends. Gives up when it dies quickly several times in a row."""
        name = f"{self._identity.host}-e{number}"
        set_aside = number >= self._run.rollout.engines_per_host - self._run.eval.engines_per_host
        start, quick = 0, 0
        while True:
            start += 1
            began = time.monotonic()
            child, address_file = self._start_engine(name, number, start)
            self._engines[name] = child
            serving = asyncio.create_task(self._serve_engine(name, child, address_file, set_aside=set_aside))
            guard = asyncio.create_task(child.kill_when_stopped(self._run.control.lost_after_s))
            try:
                code = await child.wait()
            finally:
                guard.cancel()
                serving.cancel()
                await asyncio.gather(guard, serving, return_exceptions=True)
            joined = self._host.has_engine(name)
            self._addresses.pop(name, None)
            self._host.remove_engine(name)
            at_once = time.monotonic() - began < _UTILISATION_S or not joined
            quick = quick + 1 if at_once else 0
            await self._tell_end(name, code, child.log_tail())
            if quick >= _QUICK_DEATHS:
                raise MilesError(f"engine {name} ended {quick} times right after its start, last with {code}")

    def _start_engine(self, name: str, number: int, start: int):  # type: ignore[no-untyped-def]
        me = self._identity
        logs = self._paths.logs(me.attempt)
        address_file = logs / f"{name}-i{me.incarnation}.{start}.address"
        gpus = self._run.groups.rollout.gpus_per_node
        command = [sys.executable, "-P", "-m", "launchers.engine", "--run-dir", str(self._paths.root)]
        command += ["--attempt", str(me.attempt), "--term", str(self._term), "--name", name, "--host", me.host]
        command += ["--device", f"cuda:{number}" if gpus else "cpu", "--address-file", str(address_file)]
        return ChildProcess(name, command, log=logs / f"{name}-i{me.incarnation}.log"), address_file

    async def _serve_engine(self, name: str, child: ChildProcess, address_file, *, set_aside: bool) -> None:  # type: ignore[no-untyped-def]
        """Connect to a started engine and hand it to the host; then see that it stays responsive."""
        deadline = Deadline(self._run.control.start_deadline_s, f"waiting for engine {name} to listen")
        try:
            while not address_file.exists():
                deadline.check()
                await asyncio.sleep(0.1)
            address = address_file.read_text()
            transport = open_transport("tcp", Credentials(self._secret, self._identity.peer(self._term)))
            endpoint = await transport.connect(address, deadline_s=deadline.remaining_s)
            engine = RemoteEngine(endpoint, name=name)
            self._addresses[name] = address
            await self._host.add_engine(engine, set_aside=set_aside)
            while not endpoint.closed.is_set():
                await asyncio.sleep(_ENGINE_CHECK_S)
                await asyncio.wait_for(engine.describe(), _ENGINE_SILENT_S)
                if self._host.gave_up(name):
                    raise PeerLost("its requests fail though it answers")
        except (MilesError, TimeoutError) as error:
            self._events.verdict("engine_unresponsive", peer=name, evidence=f"{type(error).__name__}: {error}")
        child.kill()

    def _engines_changed(self) -> None:
        if self._sessions is not None:
            self._sessions.changed()

    def _session_engines(self) -> tuple[SessionEngine, ...]:
        """Those that the session server may use: it knows of no purposes, so none that is set aside."""
        return tuple(
            SessionEngine(name=engine.name, address=self._addresses[engine.name], version=engine.version)
            for engine in self._host.status().engines
            if engine.alive and not engine.set_aside and engine.name in self._addresses
        )

    async def _tell_end(self, name: str, code: int, log_tail: str) -> None:
        self._events.verdict("child_ended", peer=name, evidence=f"exit code {code}", log_tail=log_tail)
        try:
            await self._report(ChildEvent(child=name, exit_code=code, log_tail=log_tail))
        except MilesError:
            pass  # the event file has it

    # ------------------------------------------------------------------------------------------ sandboxes

    async def _keep_sandboxes(self) -> None:
        """Stay connected to every sandbox host of the term."""
        connected: dict[str, tuple[tuple[str, ...], Endpoint]] = {}
        while True:
            for name, (_, endpoint) in list(connected.items()):
                if endpoint.closed.is_set():
                    self._sandboxes.remove_host(name)
                    del connected[name]
            for service in list_services(self._paths, self._term, "sandbox-") if self._term else ():
                known = connected.get(service.name)
                if known is not None and known[0] == service.addresses:
                    continue
                try:
                    transport = open_transport(
                        self._run.control.transport, Credentials(self._secret, self._identity.peer(self._term))
                    )
                    endpoint = await connect_any(transport, service.addresses, deadline_s=5.0, name=service.name)
                except MilesError:
                    continue  # gone already, or not yet of this term; looked up again
                if known is not None:
                    await known[1].close("the sandbox host listens elsewhere now")
                connected[service.name] = (service.addresses, endpoint)
                self._sandboxes.add_host(service.name, endpoint)
            await asyncio.sleep(_SANDBOX_POLL_S)

    async def _tell_utilisation(self) -> None:
        """How much of the time trajectories were in flight, for the report."""
        while True:
            busy, window = 0.0, time.monotonic()
            while time.monotonic() - window < _UTILISATION_S:
                before = time.monotonic()
                in_flight = self._host.groups_in_flight > 0
                await asyncio.sleep(0.1)
                busy += time.monotonic() - before if in_flight else 0.0
            self._events.note("utilisation", role="rollout", busy_s=busy, window_s=time.monotonic() - window)


class SandboxApp(AgentApp):
    """One sandbox node."""

    def __init__(self, run: RunConfig, paths: RunPaths, identity: AgentIdentity, secret: bytes, interface: str) -> None:
        self._run = run
        self._paths = paths
        self._identity = identity
        self._secret = secret
        self._interface = interface
        self._host = SandboxHost(isolation=run.sandbox.isolation, limits=SandboxLimits.of(run.sandbox))
        self._listening: Listening | None = None
        self._events = EventLog(paths.events, f"{identity.name}-work", attempt=identity.attempt)
        self._teller: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self._host.start()
        me = self._identity
        credentials = Credentials(self._secret, me.peer(0), on_newer=self._on_newer)
        bind = local_addresses(self._interface, towards=towards_controller(self._paths, me.attempt))
        transport = open_transport(self._run.control.transport, credentials)
        self._listening = await listen_on(transport, self._serve, bind, any_term=True)
        self._teller = asyncio.create_task(self._tell_utilisation())

    def _on_newer(self, peer: PeerIdentity) -> None:
        """A process of a newer attempt came by: this host was left over."""
        if not self.failed.done():
            reason = f"{peer.name} belongs to attempt {peer.attempt}, this host to attempt {self._identity.attempt}"
            self._events.verdict("fenced", peer=self._identity.name, evidence=reason)
            self.failed.set_result(exits.FENCED)

    async def _serve(self, endpoint: Endpoint, message: Message, payload: memoryview) -> HandlerResult:
        return await self._host.handle(message, payload)

    async def joined(self, endpoint: Endpoint, term: int) -> None:
        while self._listening is None:
            await asyncio.sleep(0.05)
        self._events.term = term
        me = self._identity
        publish_service(
            self._paths,
            ServiceAddress(name=me.name, addresses=self._listening.addresses, attempt=me.attempt, term=term),
        )

    async def left(self) -> None:
        """Nothing: sandboxes serve whoever of this attempt asks."""

    async def handle(self, message: Message, payload: memoryview) -> HandlerResult:
        return None

    async def close(self) -> None:
        if self._teller is not None:
            self._teller.cancel()
        if self._listening is not None:
            await self._listening.close()
        await self._host.close()
        self._events.close()

    async def _tell_utilisation(self) -> None:
        """Time with at least one command running, for the report; from the host's own counter."""
        executed, at = 0.0, time.monotonic()
        while True:
            await asyncio.sleep(_UTILISATION_S)
            status, now = self._host.status(), time.monotonic()
            busy = min(now - at, status.executing_s - executed)
            self._events.note("utilisation", role="sandbox", busy_s=busy, window_s=now - at)
            executed, at = status.executing_s, now
