"""Serving a run from outside its job: attempts come and go under one process, which joins each anew."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import pytest

from checkpoints.publish import publish_bytes
from launchers.join import unique_host
from miles_hpc.cli.main import main as cli
from miles_hpc.control.agent import AgentApp, AgentIdentity
from miles_hpc.control.joining import Joining, read_outcome
from miles_hpc.control.terms import claim_incarnation, newest_attempt
from miles_hpc.controller.steps import Step, StepStarter
from miles_hpc.controller.supervisor import Supervisor
from miles_hpc.core import exits
from miles_hpc.core.errors import DeadlineExpired, FencedError, MilesError
from miles_hpc.core.messages import Ack, RestartHost
from miles_hpc.core.paths import RunPaths
from miles_hpc.core.telemetry import read_events
from tests.fakes.virtual_time import run_virtually
from tests.unit.runs import make_run, make_site
from tests.unit.test_joining import CONTROL, FOLLOW_S, LEASE_S, SECRET, App, World

WAIT_S = 100.0


class LentHost:
    """A joining process, and the apps that it made."""

    def __init__(self, world: World, *, wait_s: float = WAIT_S, app: type[App] = App) -> None:
        self.apps: list[App] = []
        self.identities: list[AgentIdentity] = []

        def make_app(identity: AgentIdentity) -> AgentApp:
            self.identities.append(identity)
            self.apps.append(app(identity.attempt))
            return self.apps[-1]

        joining = Joining(world.paths, CONTROL, SECRET, role="rollout", host="n9-j7", make_app=make_app, wait_s=wait_s)
        self.task = asyncio.create_task(joining.run())
        self.ended_at = float("inf")
        self.task.add_done_callback(lambda _: setattr(self, "ended_at", world.now))

    @property
    def met(self) -> list[int]:
        """Terms that were joined, in order."""
        return [term for app in self.apps for _, term in app.met]

    async def close(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


def end_attempt(world: World, outcome: str, *, shut_down: bool) -> asyncio.Task[None]:
    """What controller and supervisor do at an attempt's end."""

    async def end() -> None:
        controller = world.controllers[-1]
        controller.down_at = world.now
        await controller.members.close("over", shut_down=shut_down)
        await asyncio.sleep(3.0)  # the supervisor ends the steps first
        record = msgspec.json.encode({"attempt": controller.attempt, "outcome": outcome})
        publish_bytes(world.paths.outcome(controller.attempt), record)

    return asyncio.create_task(end())


def test_it_serves_attempt_after_attempt_until_the_run_is_complete(tmp_path: Path) -> None:
    async def main() -> None:
        world = World(tmp_path)
        lent = LentHost(world)
        await asyncio.sleep(30.0)  # before there is any allocation
        await world.attempt()
        await asyncio.sleep(20.0)
        await world.publish()
        await asyncio.sleep(FOLLOW_S)
        assert lent.met == [1]
        await end_attempt(world, "continue", shut_down=True)
        await asyncio.sleep(60.0)  # the next allocation is in the queue
        assert not lent.task.done() and len(lent.apps) == 1, "joined an attempt that had told it to end"
        await world.attempt()
        await world.publish()
        await asyncio.sleep(FOLLOW_S)
        await world.kill()
        await world.publish()  # the controller was restarted: a new term of the same attempt
        await asyncio.sleep(FOLLOW_S)
        assert lent.met == [1, 2, 3]
        await end_attempt(world, "completed", shut_down=True)
        await asyncio.sleep(FOLLOW_S)
        assert lent.task.result() == exits.DONE
        assert [(i.attempt, i.incarnation, i.name) for i in lent.identities] == [
            (1, 1, "rollout-n9-j7"),
            (2, 1, "rollout-n9-j7"),
        ]
        assert [app.closed for app in lent.apps] == [1, 1]
        await world.close()

    run_virtually(main())


def test_a_node_that_was_lost_with_its_attempt_leads_to_the_next_one(tmp_path: Path) -> None:
    """No outcome, no shutdown: the controller is silent, then a newer attempt exists."""

    async def main() -> None:
        world = World(tmp_path)
        await world.attempt()
        await world.publish()
        lent = LentHost(world)
        await asyncio.sleep(FOLLOW_S)
        await world.kill()
        await asyncio.sleep(LEASE_S + FOLLOW_S)  # the lease is over: its engines have been ended meanwhile
        assert lent.apps[0].closed == 1 and not lent.task.done()
        await world.attempt()
        await world.publish()
        await asyncio.sleep(FOLLOW_S)
        assert lent.met == [1, 2]
        await lent.close()
        assert [app.closed for app in lent.apps] == [1] * len(lent.apps)
        await world.close()

    run_virtually(main())


def test_an_attempt_that_fences_the_one_it_serves_is_joined_at_once(tmp_path: Path) -> None:
    async def main() -> None:
        world = World(tmp_path)
        await world.attempt()
        await world.publish()
        lent = LentHost(world)
        await asyncio.sleep(FOLLOW_S)
        await world.attempt()  # started elsewhere; the old controller runs on, cut off
        await world.publish()
        await asyncio.sleep(FOLLOW_S)
        assert lent.met == [1, 2]
        await lent.close()
        await world.close()

    run_virtually(main())


@pytest.mark.parametrize("outcome", ["failed", "continue", ""])
def test_it_leaves_when_nothing_more_comes(tmp_path: Path, outcome: str) -> None:
    async def main() -> None:
        world = World(tmp_path)
        await world.attempt()
        await world.publish()
        lent = LentHost(world)
        await asyncio.sleep(FOLLOW_S)
        if outcome:
            await end_attempt(world, outcome, shut_down=outcome == "continue")
        else:
            await world.kill()
        begun = world.now
        await asyncio.sleep(2 * WAIT_S)
        assert lent.task.result() == exits.DONE  # it has served
        assert WAIT_S - 10.0 < lent.ended_at - begun < WAIT_S + LEASE_S + FOLLOW_S
        await world.close()

    run_virtually(main())


@pytest.mark.parametrize("events", [(), ("attempt",), ("attempt", "claim"), ("attempt", "publish", "kill")])
def test_it_gives_up_when_nobody_takes_it_in(tmp_path: Path, events: tuple[str, ...]) -> None:
    async def main() -> None:
        world = World(tmp_path)
        for name in events:
            await getattr(world, name)()
        lent = LentHost(world)
        await asyncio.sleep(WAIT_S + FOLLOW_S)
        with pytest.raises(DeadlineExpired, match="rollout host n9-j7: waiting to be taken in by"):
            lent.task.result()
        assert WAIT_S - 1.0 < lent.ended_at < WAIT_S + FOLLOW_S
        assert lent.met == []
        await world.close()

    run_virtually(main())


def test_an_attempt_that_ends_before_it_took_us_in_is_not_waited_for(tmp_path: Path) -> None:
    async def main() -> None:
        world = World(tmp_path)
        await world.attempt()
        lent = LentHost(world)
        await asyncio.sleep(20.0)
        publish_bytes(world.paths.outcome(1), b'{"outcome":"completed"}')
        await asyncio.sleep(FOLLOW_S)
        assert lent.task.result() == exits.DONE
        await world.close()

    run_virtually(main())


def test_two_under_one_name_fence_each_other_and_the_newer_stays(tmp_path: Path) -> None:
    async def main() -> None:
        world = World(tmp_path)
        await world.attempt()
        await world.publish()
        first = LentHost(world)
        await asyncio.sleep(FOLLOW_S)
        second = LentHost(world)
        await asyncio.sleep(FOLLOW_S)
        assert second.identities[0].incarnation == 2 and not second.task.done()
        with pytest.raises(FencedError, match="incarnation 1"):
            first.task.result()
        await second.close()
        await world.close()

    run_virtually(main())


class Broken(App):
    async def start(self) -> None:
        self.failed.set_result(exits.FAILED)


def test_an_app_that_fails_again_and_again_is_given_up(tmp_path: Path) -> None:
    async def main() -> None:
        world = World(tmp_path)
        await world.attempt()
        lent = LentHost(world, app=Broken)
        await asyncio.sleep(60.0)
        with pytest.raises(MilesError, match="failed 5 times in a row: the agent ended with exit code 1"):
            lent.task.result()
        assert [i.incarnation for i in lent.identities] == [1, 2, 3, 4, 5]
        await world.close()

    run_virtually(main())


def test_incarnations_count_up_over_processes_and_per_name(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    assert [claim_incarnation(paths, 1, "rollout-a") for _ in range(3)] == [1, 2, 3]
    assert claim_incarnation(paths, 1, "rollout-b") == 1
    assert claim_incarnation(paths, 2, "rollout-a") == 1
    assert newest_attempt(paths) == 2


@pytest.mark.parametrize("record", [b"", b"{", b"[]", b"{}"])
def test_a_record_that_is_not_whole_is_no_outcome(tmp_path: Path, record: bytes) -> None:
    paths = RunPaths(tmp_path)
    assert read_outcome(paths, 1) == ""
    paths.attempt(1).mkdir(parents=True)
    paths.outcome(1).write_bytes(record)
    assert read_outcome(paths, 1) == ""


# ------------------------------------------------------------------------------------- names, command line, supervisor


def test_names_of_joined_hosts_are_unique(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_LOCALID", "SLURMD_NODENAME"):
        monkeypatch.delenv(name, raising=False)
    assert unique_host().endswith(f"-p{os.getpid()}")
    monkeypatch.setenv("SLURM_JOB_ID", "71")
    monkeypatch.setenv("SLURMD_NODENAME", "gpu3")
    assert unique_host() == "gpu3-j71"
    monkeypatch.setenv("SLURM_LOCALID", "0")
    assert unique_host() == "gpu3-j71"
    monkeypatch.setenv("SLURM_LOCALID", "2")
    assert unique_host() == "gpu3-j71.2"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "no such run directory"),
        (["{run}"], "is not a run directory"),
        (["{run}", "--wait", "-1"], "--wait -1.0: expected seconds"),
        (["{run}", "--wait", "nan"], "--wait nan: expected seconds"),
        (["{run}", "--host", "a/b"], "--host 'a/b': expected a name"),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli(["join", *(a.format(run=tmp_path) for a in arguments)]) == exits.USER_ERROR
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


class Starter(StepStarter):
    """Starts nothing, and says what it was asked for."""

    started: list[tuple[str, tuple[str, ...]]]

    def hosts(self, role: str) -> tuple[str, ...]:
        return {"trainer": ("n0",), "rollout": ("n1", "n2")}.get(role, ("n3",))

    def start(self, hosts: Mapping[str, Sequence[str]], incarnation: int) -> list[Step]:
        self.started += [(role, tuple(some)) for role, some in hosts.items()]
        return []

    async def end(self, step: Step) -> None: ...


def test_the_supervisor_starts_its_own_hosts_again_and_nobody_elses(tmp_path: Path) -> None:
    async def main() -> None:
        starter = Starter(make_run(), make_site(), RunPaths(tmp_path), 1)
        starter.started = []
        supervisor = Supervisor(starter, SECRET, end_time=None, job_id=None)
        supervisor._failed = asyncio.get_running_loop().create_future()
        for host in ("n9-j7", "n2"):
            lost = RestartHost(role="rollout", host=host, incarnation=1, reason=f"{host}: endpoint closed")
            assert await supervisor._handle(None, lost, memoryview(b"")) == Ack()  # type: ignore[arg-type]
        assert starter.started == [("rollout", ("n2",))]

    asyncio.run(main())
    (left,) = [e for e in read_events(tmp_path / "events") if e["name"] == "left"]
    assert (left["peer"], left["evidence"]) == ("n9-j7", "n9-j7: endpoint closed")
