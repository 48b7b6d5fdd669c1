"""The controller's members over loopback sockets: verdicts are events, and none of them waits for another."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from miles_hpc.control.auth import new_secret
from miles_hpc.control.membership import find_controller
from miles_hpc.control.opening import open_transport
from miles_hpc.control.terms import claim_attempt, claim_term
from miles_hpc.controller.members import Members
from miles_hpc.core.config import ControlConfig, GroupConfig, GroupsConfig, ModelConfig, RunConfig, SiteConfig
from miles_hpc.core.errors import FencedError, MilesError, RemoteError
from miles_hpc.core.messages import Ack, Heartbeat, HostStatus
from miles_hpc.core.paths import RunPaths
from miles_hpc.core.telemetry import EventLog, read_events
from miles_hpc.core.transport import Credentials, Endpoint, PeerIdentity

WAIT_S = 30.0
SECRET = new_secret()


class Stage:
    """Members of one term with what they told."""

    def __init__(self, root: Path, lost_after_s: float, oldest: dict[str, int]) -> None:
        self.paths = RunPaths(root)
        claim_attempt(self.paths)
        term = claim_term(self.paths, 1)
        one = GroupConfig(nodes=1)
        control = ControlConfig(interface="lo", lost_after_s=lost_after_s, heartbeat_interval_s=lost_after_s / 10)
        run = RunConfig(
            name="r", model=ModelConfig(), groups=GroupsConfig(trainer=one, rollout=one, sandbox=one), control=control
        )
        me = PeerIdentity(role="controller", name="controller", host="c", pid=1, attempt=1, term=term)
        self.lost: list[str] = []
        self.messages: list[str] = []
        self.changed = asyncio.Event()

        def on_lost(peer: PeerIdentity, evidence: str) -> None:
            self.lost.append(peer.name)
            self.changed.set()

        async def on_message(peer: PeerIdentity, message: Any) -> Ack:
            self.messages.append(peer.name)
            return Ack()

        self.members = Members(
            run,
            SiteConfig(name="s"),
            self.paths,
            Credentials(SECRET, me),
            EventLog(self.paths.events, "controller", attempt=1, term=term),
            oldest_incarnation=oldest,
            on_message=on_message,
            on_joined=lambda peer: None,
            on_lost=on_lost,
        )

    async def join(self, name: str, incarnation: int = 0, role: str = "rollout-agent") -> Endpoint:
        return await connect(self.paths, name, incarnation, role)

    async def until_lost(self, *names: str) -> None:
        async with asyncio.timeout(WAIT_S):
            while not set(names) <= set(self.lost):
                self.changed.clear()
                await self.changed.wait()

    def verdicts(self, *names: str) -> list[tuple[str, str, str]]:
        events = read_events(self.paths.events)
        return [(e["name"], e["peer"], e["evidence"]) for e in events if e["kind"] == "verdict" and e["name"] in names]


async def connect(paths: RunPaths, name: str, incarnation: int = 0, role: str = "rollout-agent") -> Endpoint:
    identity = PeerIdentity(
        role=role, name=name, host=f"host-of-{name}", pid=7, attempt=1, term=1, incarnation=incarnation
    )
    found = find_controller(paths, 1)
    assert found is not None
    return await open_transport("tcp", Credentials(SECRET, identity)).connect(found.addresses[0], deadline_s=WAIT_S)


@contextlib.asynccontextmanager
async def stage(root: Path, *, lost_after_s: float = 0.4, oldest: dict[str, int] | None = None):
    opened = Stage(root, lost_after_s, oldest or {})
    await opened.members.open()
    try:
        yield opened
    finally:
        await opened.members.close("test ended", shut_down=False)


def test_silence_is_told_as_an_event_with_evidence_and_heartbeats_prevent_it(tmp_path: Path) -> None:
    async def main() -> None:
        async with stage(tmp_path) as s:
            silent, alive = await s.join("silent"), await s.join("alive")

            async def beat() -> None:
                while True:
                    await alive.call(Heartbeat(), deadline_s=WAIT_S)
                    await asyncio.sleep(0.02)

            beating = asyncio.create_task(beat())
            await s.until_lost("silent")
            await asyncio.wait_for(silent.closed.wait(), WAIT_S)
            assert "no heartbeat for 0." in silent.close_reason
            assert s.lost == ["silent"] and s.members.endpoint("silent") is None
            assert [(n, p) for n, p, _ in s.verdicts("lost")] == [("lost", "silent")]
            assert s.verdicts("lost")[0][2].startswith("no heartbeat for 0.")
            beating.cancel()
            await s.join("silent")
            assert s.verdicts("rejoined")[0][2].startswith("was lost: no heartbeat for 0.")

    asyncio.run(main())


def test_a_verdict_does_not_wait_for_hanging_up_on_another_member(tmp_path: Path) -> None:
    async def main() -> None:
        async with stage(tmp_path) as s:
            for name in "abcd":
                await s.join(name)
            never = asyncio.Event()

            async def hang_up(reason: str = "") -> None:
                await never.wait()

            for name in "abcd":
                s.members.endpoint(name).close = hang_up
            await s.until_lost(*"abcd")
            never.set()

    asyncio.run(main())


def test_a_controller_that_was_held_up_hears_what_arrived_before_it_judges(tmp_path: Path) -> None:
    """Its loop is blocked for longer than lost_after_s, while a member in another thread goes on beating."""
    joined, stop = threading.Event(), threading.Event()
    failure: list[BaseException] = []

    def member() -> None:
        async def beat() -> None:
            endpoint = await connect(RunPaths(tmp_path), "member")
            joined.set()
            while not stop.is_set():
                await endpoint.notify(Heartbeat())
                await asyncio.sleep(0.05)

        try:
            asyncio.run(beat())
        except BaseException as error:
            failure.append(error)

    async def main() -> None:
        async with stage(tmp_path, lost_after_s=3.0) as s:
            thread = threading.Thread(target=member)
            thread.start()
            try:
                assert await asyncio.to_thread(joined.wait, WAIT_S)
                for _ in range(2):
                    await asyncio.sleep(0.2)
                    time.sleep(3.5)  # the loop stands still
                await asyncio.sleep(0.5)
                assert s.lost == []
            finally:
                stop.set()
                await asyncio.to_thread(thread.join)
            assert not failure

    asyncio.run(main())


def test_a_replaced_connection_counts_for_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        async with stage(tmp_path, lost_after_s=WAIT_S) as s:
            old = await s.join("a")
            before = s.members.endpoint("a")
            kept_open = asyncio.Event()

            async def hang_up(reason: str = "") -> None:
                await kept_open.wait()

            before.close = hang_up
            new = await s.join("a", incarnation=1)
            with pytest.raises(RemoteError, match="this connection was given up"):
                await old.call(HostStatus(engines=(), ready=True), deadline_s=WAIT_S)
            assert s.messages == []
            await new.call(HostStatus(engines=(), ready=True), deadline_s=WAIT_S)
            assert s.messages == ["a"] and s.lost == []
            kept_open.set()
            (superseded,) = s.verdicts("superseded")
            assert superseded[2] == "incarnation 1 joined from host-of-a, pid 7"
            with pytest.raises(FencedError):
                await s.join("a", incarnation=0)
            (refused,) = s.verdicts("refused")
            assert refused[1] == "a" and "is older than incarnation 1 of term 1" in refused[2]

    asyncio.run(main())


def test_incarnations_of_a_lost_trainer_are_refused_with_evidence(tmp_path: Path) -> None:
    async def main() -> None:
        async with stage(tmp_path, lost_after_s=WAIT_S, oldest={"trainer": 2}) as s:
            with pytest.raises(FencedError, match="incarnation 1 of trainer-h-0 was declared lost; 2 is expected"):
                await s.join("trainer-h-0", incarnation=1, role="trainer-agent")
            (refused,) = s.verdicts("refused")
            assert "host host-of-trainer-h-0, pid 7: incarnation 1" in refused[2]
            await s.join("trainer-h-0", incarnation=2, role="trainer-agent")

    asyncio.run(main())


def test_a_closed_endpoint_is_a_loss_at_once(tmp_path: Path) -> None:
    async def main() -> None:
        async with stage(tmp_path, lost_after_s=WAIT_S) as s:
            with contextlib.suppress(MilesError):
                await (await s.join("a")).close("leaves")
            await s.until_lost("a")
            assert s.verdicts("lost") == [("lost", "a", "endpoint closed: closed by the peer: leaves")]

    asyncio.run(main())


def test_a_notice_is_handed_on(tmp_path: Path) -> None:
    async def main() -> None:
        noticed: list[tuple[str, str]] = []
        opened = Stage(tmp_path, 5.0, {})
        opened.members._on_notice = lambda peer, notice: noticed.append((peer.name, notice))
        await opened.members.open()
        a = await opened.join("a")
        await a.call(Heartbeat(), deadline_s=WAIT_S)
        await a.call(Heartbeat(notice="SIGTERM"), deadline_s=WAIT_S)
        assert noticed == [("a", "SIGTERM")]
        await opened.members.close("test ended", shut_down=False)

    asyncio.run(main())
