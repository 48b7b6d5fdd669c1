"""The controller's members are told through each other: real agents and the real roster, over tcp in one process."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from miles_hpc.control.agent import Agent, AgentApp, AgentIdentity
from miles_hpc.control.auth import new_secret
from miles_hpc.control.opening import open_transport
from miles_hpc.control.terms import claim_attempt, claim_term
from miles_hpc.controller.members import DIRECT_UP_TO, Members
from miles_hpc.core.config import ControlConfig
from miles_hpc.core.deadline import Deadline
from miles_hpc.core.errors import RemoteError
from miles_hpc.core.messages import AbortGroups, Ack, Message
from miles_hpc.core.paths import RunPaths
from miles_hpc.core.telemetry import EventLog
from miles_hpc.core.transport import Credentials, Endpoint, HandlerResult, PeerIdentity
from tests.fakes.fleet import credentials
from tests.unit.runs import make_run, make_site

SECRET = new_secret()
WAIT_S = 60.0  # a bound against hanging, not an expectation
CONTROL = ControlConfig(transport="tcp", interface="lo", heartbeat_interval_s=0.5, lost_after_s=30.0, lease_s=60.0)


class App(AgentApp):
    """Writes down what it was told."""

    def __init__(self) -> None:
        self.told: list[Message] = []
        self.payload = b""

    async def start(self) -> None: ...

    async def joined(self, endpoint: Endpoint, term: int) -> None: ...

    async def left(self) -> None: ...

    async def handle(self, message: Message, payload: memoryview) -> HandlerResult:
        self.told.append(message)
        self.payload = bytes(payload)
        return Ack()

    async def close(self) -> None: ...


def open_members(paths: RunPaths, events: EventLog, joined: list[str]) -> Members:
    attempt = claim_attempt(paths)
    term = claim_term(paths, attempt)
    who = PeerIdentity(role="controller", name="controller", host="h", pid=1, attempt=attempt, term=term)

    async def on_message(peer: PeerIdentity, message: Message) -> HandlerResult:
        return Ack()

    return Members(
        msgspec.structs.replace(make_run(), control=CONTROL),
        make_site(),
        paths,
        Credentials(SECRET, who),
        events,
        oldest_incarnation={},
        on_message=on_message,
        on_joined=lambda peer: joined.append(peer.name),
        on_lost=lambda peer, evidence: None,
    )


@pytest.mark.parametrize("n", [3, 40])
def test_agents_pass_on_what_the_controller_tells_them(n: int, tmp_path: Path) -> None:
    async def main() -> None:
        paths = RunPaths(tmp_path)
        paths.events.mkdir()
        paths.terms.mkdir(exist_ok=True)
        events = EventLog(paths.events, "controller", attempt=1)
        joined: list[str] = []
        members = open_members(paths, events, joined)
        await members.open()
        apps = [App() for _ in range(n)]
        tasks = []
        for number, app in enumerate(apps):
            name = f"rollout-n{number:02}"
            identity = AgentIdentity(role="rollout-agent", name=name, host="n", attempt=1, incarnation=1)
            tasks.append(asyncio.create_task(Agent(identity, app, paths, CONTROL, SECRET).run()))
        await members.wait(lambda: len(joined) == n, Deadline(WAIT_S, "agents"))
        many = n > DIRECT_UP_TO
        while many and not all(addresses for _, addresses in members._relays.values()):
            await asyncio.sleep(0.01)
        assert len(members._relays) == (n if many else 0)

        message = AbortGroups(group_ids=(1, 2), reason="test")
        result = await members.tell(message, payload=[b"payload"], deadline_s=WAIT_S)
        assert result.errors == {}
        assert len(result.replies) == n
        assert result.sent == (8 if many else n)
        assert all((app.told, app.payload) == ([message], b"payload") for app in apps)
        some = await members.tell(message, ["rollout-n01"], deadline_s=WAIT_S)
        assert list(some.replies) == ["rollout-n01"]
        nobody = await members.tell(message, ["rollout-n77"], deadline_s=WAIT_S)
        assert list(nobody.errors) == ["rollout-n77"]

        if many:  # where agents listen for each other, nobody else is served
            transport = open_transport("tcp", credentials("somebody", secret=SECRET))
            endpoint = await transport.connect(members._relays["rollout-n01"][1][0], deadline_s=WAIT_S)
            with pytest.raises(RemoteError, match="AbortGroups: only commands that are passed on"):
                await endpoint.call(message, deadline_s=WAIT_S)
            await endpoint.close()

        tasks[0].cancel()  # an agent that is gone: its branch hears of the end all the same
        await asyncio.gather(tasks[0], return_exceptions=True)
        await members.close("test ended", shut_down=True)
        assert await asyncio.wait_for(asyncio.gather(*tasks[1:]), WAIT_S) == [0] * (n - 1)
        events.close()
        told = "".join(file.read_text() for file in paths.events.iterdir())
        assert "shutdown_unanswered" not in told
        assert "no_relay" not in told

    asyncio.run(main())
