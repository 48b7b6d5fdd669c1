"""Agents and controllers find each other whatever the order: real files, agents and rosters, a virtual clock.

A schedule is a list of (pause, event). Controllers come, publish late, die and leave their files; attempts start; files
are half written or copied from an older term; agents start in between. Whatever happens, an agent follows the newest
controller of its own attempt, and ends exactly when a newer attempt exists or nobody was there for too long.
"""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from miles_hpc.control.agent import Agent, AgentApp, AgentIdentity
from miles_hpc.control.membership import ServiceAddress, find_controller, list_services, publish_service
from miles_hpc.control.terms import claim_attempt, claim_term, newest_attempt, newest_term
from miles_hpc.controller.members import Members
from miles_hpc.core.config import ControlConfig
from miles_hpc.core.errors import DeadlineExpired, FencedError
from miles_hpc.core.messages import Ack, Message
from miles_hpc.core.paths import RunPaths
from miles_hpc.core.telemetry import EventLog
from miles_hpc.core.transport import Credentials, Endpoint, HandlerResult, PeerIdentity
from tests.exploring import examples
from tests.fakes.virtual_time import run_virtually
from tests.unit.runs import make_run, make_site

SECRET = bytes(range(32))
START_S, LEASE_S, LOST_S = 60.0, 10.0, 5.0
#: How long an agent may take to follow: a heartbeat, a call that runs out, retries and polls.
FOLLOW_S = 9.0
CONTROL = ControlConfig(
    transport="loopback",  # type: ignore[arg-type]
    start_deadline_s=START_S,
    lease_s=LEASE_S,
    lost_after_s=LOST_S,
)


@dataclass
class Controller:
    """A controller as far as agents see it: a claim, a roster, an address."""

    term: int
    attempt: int
    members: Members
    claimed_at: float
    up_since: float | None = None
    down_at: float | None = None
    fenced_by: list[PeerIdentity] = field(default_factory=list)

    def up(self, at: float, *, stay_s: float = 0.0) -> bool:
        """Whether it listened then; with `stay_s`, whether it stayed up so long in all."""
        if self.up_since is None or at < self.up_since:
            return False
        return self.down_at is None or (at < self.down_at and self.down_at - self.up_since >= stay_s)


class App(AgentApp):
    """Writes down which controllers it met."""

    def __init__(self, attempt: int) -> None:
        self.attempt = attempt
        self.met: list[tuple[float, int]] = []  # when, which term
        self.here: Endpoint | None = None
        self.began = asyncio.get_running_loop().time()
        self.closed = 0

    async def start(self) -> None: ...

    async def joined(self, endpoint: Endpoint, term: int) -> None:
        assert (endpoint.peer.role, endpoint.peer.attempt, endpoint.peer.term) == ("controller", self.attempt, term)
        self.met.append((asyncio.get_running_loop().time(), term))
        self.here = endpoint

    async def left(self) -> None:
        self.here = None

    async def handle(self, message: Message, payload: memoryview) -> HandlerResult:
        return Ack()

    async def close(self) -> None:
        self.closed += 1


class World:
    """One run directory and everybody who works on it."""

    def __init__(self, root: Path) -> None:
        self.paths = RunPaths(root)
        self.controllers: list[Controller] = []
        self.agents: list[tuple[App, asyncio.Task[int]]] = []
        self.ended: dict[App, float] = {}
        self.attempts: list[float] = []  # when each began
        self.events = EventLog(self.paths.events, "controller", attempt=0)

    @property
    def now(self) -> float:
        return asyncio.get_running_loop().time()

    # ---------------------------------------------------------------- what can happen

    async def attempt(self) -> None:
        claim_attempt(self.paths)
        self.attempts.append(self.now)

    async def claim(self) -> None:
        """The newest attempt claims a term; its controller doesn't listen yet."""
        attempt = newest_attempt(self.paths)
        term = claim_term(self.paths, attempt)
        who = PeerIdentity(role="controller", name="controller", host="h", pid=1, attempt=attempt, term=term)
        run = msgspec.structs.replace(make_run(), control=CONTROL)
        controller = Controller(term, attempt, None, self.now)  # type: ignore[arg-type]

        async def on_message(peer: PeerIdentity, message: Message) -> HandlerResult:
            return Ack()

        controller.members = Members(
            run,
            make_site(),
            self.paths,
            Credentials(SECRET, who, on_newer=controller.fenced_by.append),
            self.events,
            oldest_incarnation={},
            on_message=on_message,
            on_joined=lambda peer: None,
            on_lost=lambda peer, evidence: None,
        )
        self.controllers.append(controller)

    async def publish(self) -> None:
        """The newest controller that doesn't listen yet binds and publishes, also when it is fenced by now."""
        waiting = [c for c in self.controllers if c.up_since is None]
        if not waiting:
            await self.claim()
            waiting = self.controllers[-1:]
        await waiting[-1].members.open()
        waiting[-1].up_since = self.now

    async def kill(self) -> None:
        """The oldest controller that still listens is gone; its file stays."""
        for controller in self.controllers:
            if controller.up(self.now):
                controller.down_at = self.now
                await controller.members.close("killed", shut_down=False)
                return

    async def tear(self) -> None:
        """A file that was cut off, at the place of the newest term."""
        term = newest_term(self.paths)
        if term and not any(c.term == term and c.up_since is not None for c in self.controllers):
            folder = self.paths.rendezvous(term)
            folder.mkdir(exist_ok=True)
            (folder / "controller.json").write_bytes(b'{"name":"controller","addresses":["loopback://1"')

    async def copy(self) -> None:
        """The file of an older term at the place of the newest one, as a careless restore of a backup leaves it."""
        term = newest_term(self.paths)
        older = [c for c in self.controllers if c.term < term and c.up_since is not None]
        if older and not any(c.term == term and c.up_since is not None for c in self.controllers):
            text = (self.paths.rendezvous(older[-1].term) / "controller.json").read_bytes()
            (self.paths.rendezvous(term) / "controller.json").write_bytes(text)

    async def agent(self) -> None:
        attempt = newest_attempt(self.paths)
        name = f"rollout-n{len(self.agents)}"
        identity = AgentIdentity(role="rollout-agent", name=name, host="n", attempt=attempt, incarnation=1)
        app = App(attempt)
        task = asyncio.create_task(Agent(identity, app, self.paths, CONTROL, SECRET).run())
        task.add_done_callback(lambda _: self.ended.setdefault(app, self.now))
        self.agents.append((app, task))

    # ---------------------------------------------------------------- what must be so

    def unserved(self, app: App, begin: float, end: float) -> float:
        """The longest time without anybody in [begin, end] whom an agent of this attempt could have joined."""
        own = [c for c in self.controllers if c.attempt == app.attempt]
        ticks = [begin + 0.25 * i for i in range(int((end - begin) / 0.25) + 1)]
        longest = last = 0.0
        for tick in ticks:
            claimed = [c for c in own if c.claimed_at <= tick]
            newest = max(claimed, key=lambda c: c.term, default=None)
            last = 0.0 if newest is not None and newest.up(tick, stay_s=1.0) else last + 0.25
            longest = max(longest, last)
        return longest

    def check_end(self, app: App, task: asyncio.Task[int]) -> None:
        """An agent that ended had one of the two reasons for it."""
        error = task.exception()
        at = self.ended[app]
        newer = [begun for begun in self.attempts[app.attempt :] if begun <= at]
        if isinstance(error, FencedError):
            assert newer, f"fenced without a newer attempt: {error}"
        else:
            assert isinstance(error, DeadlineExpired), error
            limit_s = LEASE_S if app.met else START_S
            assert self.unserved(app, app.began, at) >= limit_s - FOLLOW_S, (
                f"gave up while a controller was there: {error}"
            )
        assert app.closed == 1
        if newer:
            assert at <= newer[0] + FOLLOW_S, "worked on for a run that was started elsewhere"

    def check_now(self) -> None:
        """Some time after the last event: everybody who is alive is with the one who counts."""
        for app, task in self.agents:
            assert app.met == sorted(app.met), "went back to an older term"
            if task.done():
                self.check_end(app, task)
                continue
            assert newest_attempt(self.paths) == app.attempt, "should have been fenced"
            found = find_controller(self.paths, app.attempt)
            serving = [c for c in self.controllers if found is not None and c.term == found.term and c.up(self.now)]
            if serving:
                assert app.here is not None and app.here.peer.term == serving[0].term
                assert not app.here.closed.is_set()
            else:
                assert app.here is None or app.here.peer.term < newest_term(self.paths, app.attempt)

    async def close(self) -> None:
        for _, task in self.agents:
            task.cancel()
        await asyncio.gather(*(task for _, task in self.agents), return_exceptions=True)
        for controller in self.controllers:
            await controller.members.close("over", shut_down=False)
        self.events.close()


EVENTS = ("attempt", "claim", "publish", "kill", "tear", "copy", "agent")


def play(schedule: list[tuple[float, str]]) -> World:
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder))

        async def main() -> None:
            await world.attempt()
            try:
                for pause_s, name in schedule:
                    await asyncio.sleep(pause_s)
                    await getattr(world, name)()
                await asyncio.sleep(FOLLOW_S)
                world.check_now()
            finally:
                await world.close()

        run_virtually(main())
    return world


@settings(max_examples=examples(120))
@given(
    st.lists(
        st.tuples(st.sampled_from([0.0, 0.05, 0.7, 4.0, 11.0, 45.0]), st.sampled_from(EVENTS)),
        min_size=2,
        max_size=12,
    )
)
@example([(0.0, "agent"), (45.0, "publish")])  # agents first, with a skew of most of the deadline
@example([(0.0, "agent"), (11.0, "claim"), (45.0, "publish")])  # claimed long before it listens
@example([(0.0, "publish"), (45.0, "agent")])
@example([(0.0, "publish"), (0.0, "kill"), (0.0, "agent"), (45.0, "publish")])  # a file whose listener died
@example([(0.0, "publish"), (0.0, "agent"), (4.0, "claim"), (0.7, "tear"), (0.7, "publish")])  # half a file first
@example([(0.0, "publish"), (0.0, "agent"), (4.0, "claim"), (0.0, "copy"), (4.0, "publish"), (0.0, "kill")])
@example([(0.0, "agent"), (0.0, "publish"), (0.0, "kill")])  # gone while the agent's connection is on its way
@example([(0.0, "publish"), (0.0, "agent"), (0.7, "attempt"), (0.0, "publish"), (0.0, "agent")])
def test_whatever_the_order_everybody_ends_up_with_the_newest(schedule: list[tuple[float, str]]) -> None:
    play(schedule)


def test_the_skew_may_be_all_of_the_deadline_but_no_more() -> None:
    for skew_s, joined in ((START_S - 2.0, True), (START_S + 2.0, False)):
        world = play([(0.0, "agent"), (skew_s, "publish")])
        (app, task) = world.agents[0]
        assert bool(app.met) is joined
        assert joined or isinstance(task.exception(), DeadlineExpired)


def test_a_restarted_controller_is_found_within_the_lease_and_a_gap_longer_than_it_ends_the_agent() -> None:
    world = play([(0.0, "agent"), (0.0, "publish"), (4.0, "kill"), (LEASE_S - 2.0, "publish")])
    assert [term for _, term in world.agents[0][0].met] == [1, 2]
    world = play([(0.0, "agent"), (0.0, "publish"), (4.0, "kill"), (LEASE_S + 2.0, "publish")])
    (app, task) = world.agents[0]
    assert [term for _, term in app.met] == [1]
    assert isinstance(task.exception(), DeadlineExpired)


# ------------------------------------------------------------------------------------- who hears that it is left over


@pytest.mark.parametrize("newer", ["term", "attempt"])
def test_a_controller_that_was_left_over_hears_it_from_whoever_looks_for_its_successor(
    tmp_path: Path, newer: str
) -> None:
    """A port was taken over, or a file points to it: its visitor goes on looking, and it learns that it is fenced."""

    async def main() -> None:
        world = World(tmp_path)
        await world.attempt()
        await world.publish()
        if newer == "attempt":
            await world.attempt()
        await world.claim()
        old, new = world.controllers
        (address,) = find_old_addresses(world.paths, old.term)
        misled = ServiceAddress(name="controller", addresses=address, attempt=new.attempt, term=new.term)
        publish_service(world.paths, misled)
        await world.agent()
        await asyncio.sleep(FOLLOW_S)
        app, task = world.agents[0]
        assert not task.done() and app.met == []  # not fenced by somebody older than itself
        assert {peer.name for peer in old.fenced_by} == {"rollout-n0"}
        await world.publish()
        await asyncio.sleep(FOLLOW_S)
        assert [term for _, term in app.met] == [new.term]
        assert new.fenced_by == []
        await world.close()

    run_virtually(main())


def find_old_addresses(paths: RunPaths, term: int) -> list[tuple[str, ...]]:
    return [service.addresses for service in list_services(paths, term, "controller")]


def test_an_agent_that_is_refused_by_a_newer_term_of_its_attempt_follows_it(tmp_path: Path) -> None:
    """The file of term 1 leads to the listener of term 2, as when a port is used again."""

    async def main() -> None:
        world = World(tmp_path)
        await world.attempt()
        await world.publish()
        await world.kill()
        await world.publish()
        (address,) = find_old_addresses(world.paths, 2)
        publish_service(world.paths, ServiceAddress(name="controller", addresses=address, attempt=1, term=1))
        agent_saw: list[int] = []

        class Late(Agent):
            async def _find(self, term: int, deadline: object) -> ServiceAddress:  # looked before term 2 was claimed
                found = await super()._find(term, deadline)  # type: ignore[arg-type]
                if not agent_saw:
                    (found,) = list_services(world.paths, 1, "controller")
                agent_saw.append(found.term)
                return found

        app = App(1)
        identity = AgentIdentity(role="rollout-agent", name="rollout-n", host="n", attempt=1, incarnation=1)
        task = asyncio.create_task(Late(identity, app, world.paths, CONTROL, SECRET).run())
        await asyncio.sleep(FOLLOW_S)
        assert agent_saw == [1, 2] and [term for _, term in app.met] == [2]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await world.close()

    run_virtually(main())


# ------------------------------------------------------------------------------------- files that don't count


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'{"name":"controller"}',
        b'{"name":"controller","addresses":[],"attempt":1,"term":1}',
        b'{"name":"controller","addresses":["tcp://a:1"],"attempt":1,"term":2}',
        b'{"name":"controller","addresses":["tcp://a:1"],"attempt":2,"term":1}',
        b'{"name":"controller","addresses":["tcp://a:1"],"attempt":"1","term":1}',
        b"\xff\xfe\x00",
    ],
)
def test_what_is_not_whole_or_not_of_this_term_is_not_there(tmp_path: Path, content: bytes) -> None:
    paths = RunPaths(tmp_path)
    attempt = claim_attempt(paths)
    term = claim_term(paths, attempt)
    (paths.rendezvous(term) / "controller.json").write_bytes(content)
    assert find_controller(paths, attempt) is None
    right = ServiceAddress(name="controller", addresses=("tcp://a:1",), attempt=attempt, term=term)
    publish_service(paths, right)
    assert find_controller(paths, attempt) == right
