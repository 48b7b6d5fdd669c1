"""The agent's lease over loopback sockets: what renews it, what can't hold it up, a file system that stalls."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from pathlib import Path

import msgspec
import pytest

from checkpoints.publish import publish_bytes
from launchers.agent import until_terminated
from miles_hpc.control import agent as agent_module
from miles_hpc.control.agent import Agent, AgentApp, AgentIdentity
from miles_hpc.control.auth import load_secret, new_secret
from miles_hpc.control.membership import ServiceAddress, find_controller, publish_service
from miles_hpc.control.opening import open_transport
from miles_hpc.control.terms import claim_attempt, claim_term
from miles_hpc.core.config import ControlConfig
from miles_hpc.core.errors import DeadlineExpired, FencedError
from miles_hpc.core.messages import Heartbeat
from miles_hpc.core.paths import RunPaths
from miles_hpc.core.telemetry import read_events
from miles_hpc.core.transport import Credentials, PeerIdentity

WAIT_S = 30.0
CONTROL = ControlConfig(heartbeat_interval_s=0.05, lost_after_s=0.6, lease_s=1.5, connect_deadline_s=5.0)
IDENTITY = AgentIdentity(role="rollout-agent", name="rollout-h", host="h", attempt=1, incarnation=0)


class Controller:
    """Counts heartbeats, and answers them for as long as it is told to."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths
        self.heartbeats = 0
        self.notices: list[str] = []
        self.answers = True
        self.heard = asyncio.Event()

    async def open(self) -> None:
        self.term = claim_term(self._paths, 1)
        me = PeerIdentity(role="controller", name="controller", host="c", pid=1, attempt=1, term=self.term)
        transport = open_transport("tcp", Credentials(load_secret(self._paths.secret), me))
        self.listener = await transport.listen(self._handle, on_connect=self._admit)
        address = ServiceAddress(name="controller", addresses=(self.listener.address,), attempt=1, term=self.term)
        publish_service(self._paths, address)

    async def _admit(self, endpoint):
        if not self.answers:
            await asyncio.sleep(WAIT_S)

    async def _handle(self, endpoint, message, payload):
        if isinstance(message, Heartbeat):
            self.heartbeats += 1
            self.notices += [message.notice] if message.notice else []
            self.heard.set()
            if not self.answers:
                await asyncio.sleep(WAIT_S)

    async def beats(self, n: int) -> None:
        """Wait for `n` more heartbeats."""
        goal = self.heartbeats + n
        async with asyncio.timeout(WAIT_S):
            while self.heartbeats < goal:
                self.heard.clear()
                await self.heard.wait()


class App(AgentApp):
    def __init__(self) -> None:
        self.closed = 0
        self.hold_up: asyncio.Event | None = None  # `joined` waits for it
        self.in_joined = asyncio.Event()

    async def start(self):
        pass

    async def joined(self, endpoint, term):
        self.in_joined.set()
        if self.hold_up is not None:
            await self.hold_up.wait()

    async def left(self):
        pass

    async def handle(self, message, payload):
        return None

    async def close(self):
        self.closed += 1


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    paths = RunPaths(tmp_path)
    publish_bytes(paths.secret, new_secret(), mode=0o600)
    assert claim_attempt(paths) == 1
    return paths


@contextlib.asynccontextmanager
async def running(paths: RunPaths, app: App):
    controller = Controller(paths)
    await controller.open()
    agent = Agent(IDENTITY, app, paths, CONTROL, load_secret(paths.secret))
    task = asyncio.create_task(agent.run())
    try:
        yield controller, task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await controller.listener.close()


def verdicts(paths: RunPaths) -> list[tuple[str, str]]:
    return [(e["name"], e["evidence"]) for e in read_events(paths.events) if e["kind"] == "verdict"]


def test_heartbeats_renew_the_lease_and_silence_ends_it(paths: RunPaths) -> None:
    async def main() -> None:
        app = App()
        async with running(paths, app) as (controller, task):
            await controller.beats(60)  # at 0.05 s each: longer than the lease
            assert not task.done()
            controller.answers = False
            with pytest.raises(DeadlineExpired, match="lease of rollout-h: "):
                await asyncio.wait_for(task, WAIT_S)
            assert app.closed == 1
            assert verdicts(paths)[-1][0] == "lease_over"

    asyncio.run(main())


def test_an_app_that_never_comes_back_from_joined_does_not_outlive_the_lease(paths: RunPaths) -> None:
    async def main() -> None:
        app = App()
        app.hold_up = asyncio.Event()
        async with running(paths, app) as (_, task):
            with pytest.raises(DeadlineExpired, match="lease of"):
                await asyncio.wait_for(task, WAIT_S)
            assert app.in_joined.is_set() and app.closed == 1

    asyncio.run(main())


def test_a_file_system_that_stalls_holds_up_neither_heartbeats_nor_the_lease(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    stalled, release = threading.Event(), threading.Event()

    def stall(*args):
        stalled.set()
        assert release.wait(WAIT_S)
        return find_controller(*args)

    monkeypatch.setattr(agent_module, "find_controller", stall)

    async def main() -> None:
        app = App()
        try:
            async with running(paths, app) as (controller, task):
                await controller.beats(60)
                assert stalled.is_set() and not task.done()
                controller.answers = False
                with pytest.raises(DeadlineExpired, match="lease of"):
                    await asyncio.wait_for(task, WAIT_S)
                assert app.closed == 1
        finally:
            release.set()

    asyncio.run(main())


def test_a_newer_term_is_followed_and_a_newer_attempt_fences(paths: RunPaths) -> None:
    async def main() -> None:
        app = App()
        async with running(paths, app) as (first, task):
            await first.beats(1)
            second = Controller(paths)
            await second.open()
            await second.beats(3)
            assert not task.done()
            claim_attempt(paths)
            with pytest.raises(FencedError, match="attempt 1 is over: attempt 2 has started"):
                await asyncio.wait_for(task, WAIT_S)
            assert app.closed == 1
            assert [name for name, _ in verdicts(paths)] == ["controller_lost", "fenced"]
            await second.listener.close()

    asyncio.run(main())


def test_a_notice_reaches_the_controller_at_once_and_the_agent_goes_on(paths: RunPaths) -> None:
    """Slurm's SIGTERM before a preemption: heartbeats carry it; told to nobody it is refused, and the agent may end."""

    async def main() -> None:
        slow = msgspec.structs.replace(CONTROL, heartbeat_interval_s=20.0, lost_after_s=25.0, lease_s=60.0)
        alone = Agent(IDENTITY, App(), paths, slow, load_secret(paths.secret))
        assert not alone.notice("SIGTERM")
        controller = Controller(paths)
        await controller.open()
        agent = Agent(IDENTITY, App(), paths, slow, load_secret(paths.secret))
        task = asyncio.create_task(until_terminated(agent.run(), agent.notice, 30.0))
        await controller.beats(1)
        os.kill(os.getpid(), signal.SIGTERM)
        await controller.beats(1)  # long before the next one is due
        assert (controller.notices, task.done()) == (["SIGTERM"], False)
        os.kill(os.getpid(), signal.SIGTERM)  # a second one means it
        assert await asyncio.wait_for(task, WAIT_S) == 128 + signal.SIGTERM
        await controller.listener.close()

    asyncio.run(main())


def test_without_anybody_to_tell_sigterm_ends_the_agent(paths: RunPaths) -> None:
    async def main() -> None:
        app = App()
        agent = Agent(IDENTITY, app, paths, CONTROL, load_secret(paths.secret))
        task = asyncio.create_task(until_terminated(agent.run(), agent.notice, 30.0))
        await asyncio.sleep(0.1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert await asyncio.wait_for(task, WAIT_S) == 128 + signal.SIGTERM
        assert app.closed == 1

    asyncio.run(main())
