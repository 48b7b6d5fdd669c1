"""Which steps a supervisor starts again: per layout, after lost hosts, and after nodes that Slurm gave up."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from miles_hpc.cluster.placement import Placement
from miles_hpc.control.auth import new_secret
from miles_hpc.control.children import ChildProcess
from miles_hpc.controller.steps import SlurmStarter, Step, StepStarter
from miles_hpc.controller.supervisor import Supervisor
from miles_hpc.core import exits
from miles_hpc.core.messages import RestartHost, RestartRole
from miles_hpc.core.paths import RunPaths
from miles_hpc.core.telemetry import read_events
from tests.fakes.fake_slurm import FakeSlurm
from tests.unit.runs import make_run, make_site

WAIT_S = 30.0


class Process:
    """A step's srun: ends when the test says so."""

    def __init__(self) -> None:
        self.exit_code: int | None = None
        self._ended = asyncio.Event()

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.exit_code is not None
        return self.exit_code

    def finish(self, code: int) -> None:
        self.exit_code = code
        self._ended.set()


class Starter(StepStarter):
    """Starts nothing, and says what it was asked for. Its nodes are t1-t3, r1-r3, s1: one spare each but for s."""

    def __init__(self, root: Path, *, span: bool = False, spares: bool = True) -> None:
        super().__init__(make_run(), make_site(), RunPaths(root), 1)
        hosts = {"trainer": ("t1", "t2"), "rollout": ("r1", "r2"), "sandbox": ("s1",)}
        kept = {"trainer": ("t3",), "rollout": ("r3",), "sandbox": ()} if spares else {}
        self.placement = Placement("hetjob", hosts, {role: kept.get(role, ()) for role in hosts}, whole=False)
        self.span = span
        self.started: list[dict[str, tuple[str, ...]]] = []
        self.steps: list[Step] = []
        self.down: dict[str, str] = {}
        self.changed = asyncio.Event()

    @property
    def units(self) -> tuple[tuple[str, ...], ...]:
        return (self.roles,) if self.span else super().units

    def hosts(self, role: str) -> tuple[str, ...]:
        return self.placement.hosts[role]

    def start(self, hosts: Mapping[str, Sequence[str]], incarnation: int) -> list[Step]:
        asked = {role: tuple(some) for role, some in hosts.items()}
        step = Step(f"step-{len(self.steps)}", asked, incarnation, Process())  # type: ignore[arg-type]
        self.started.append(asked)
        self.steps.append(step)
        self.changed.set()
        return [step]

    async def end(self, step: Step) -> None:
        if step.process.exit_code is None:
            step.process.finish(143)  # type: ignore[attr-defined]

    async def failed_nodes(self) -> dict[str, str]:
        return dict(self.down)

    def replace(self, role: str, host: str) -> str | None:
        self.placement, spare = self.placement.replaced(role, host)
        return spare

    async def until(self, n: int) -> None:
        async with asyncio.timeout(WAIT_S):
            while len(self.started) < n:
                self.changed.clear()
                await self.changed.wait()


def opened(starter: Starter) -> Supervisor:
    supervisor = Supervisor(starter, new_secret(), end_time=None, job_id=None)
    supervisor._failed = asyncio.get_running_loop().create_future()
    for unit in starter.units:
        supervisor._start({role: starter.hosts(role) for role in unit})
    return supervisor


async def tell(supervisor: Supervisor, message: RestartHost | RestartRole) -> None:
    await supervisor._handle(None, message, memoryview(b""))  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("miles_hpc.controller.supervisor._RESTART_PAUSE_S", 0.01)
    monkeypatch.setattr("miles_hpc.controller.supervisor._LONGEST_PAUSE_S", 0.02)
    monkeypatch.setattr("miles_hpc.controller.supervisor._SHUTDOWN_S", 0.05)


ALL = {"trainer": ("t1", "t2"), "rollout": ("r1", "r2"), "sandbox": ("s1",)}


def test_a_role_of_its_own_starts_again_alone(tmp_path: Path) -> None:
    async def main() -> None:
        starter = Starter(tmp_path)
        opened(starter)
        assert starter.started == [{role: hosts} for role, hosts in ALL.items()]
        starter.steps[0].process.finish(1)  # type: ignore[attr-defined]
        await starter.until(4)
        assert starter.started[3] == {"trainer": ("t1", "t2")}

    asyncio.run(main())


def test_the_trainers_end_starts_a_step_over_all_roles_again(tmp_path: Path) -> None:
    async def main() -> None:
        starter = Starter(tmp_path, span=True)
        supervisor = opened(starter)
        assert starter.started == [ALL]
        await tell(supervisor, RestartHost(role="rollout", host="r2", incarnation=1, reason="lost"))
        assert starter.started[1:] == [{"rollout": ("r2",)}]  # alone, beside the step that runs on
        await tell(supervisor, RestartRole(role="trainer", incarnation=1, reason="rank 1 died"))
        await starter.until(3)
        assert starter.started[2] == ALL
        assert starter.steps[2].incarnation > starter.steps[1].incarnation
        assert starter.steps[1].process.exit_code == 143  # r2 is in the whole step again
        await asyncio.sleep(0.2)
        assert len(starter.started) == 3  # and its old step's end starts nothing

    asyncio.run(main())


def test_a_spare_takes_the_place_of_a_node_that_slurm_gave_up(tmp_path: Path) -> None:
    async def main() -> None:
        starter = Starter(tmp_path)
        supervisor = opened(starter)
        starter.down = {"r2": "down: power", "t1": "down: power"}
        await tell(supervisor, RestartHost(role="rollout", host="r2", incarnation=1, reason="lost"))
        assert starter.started[3] == {"rollout": ("r3",)}
        starter.steps[0].process.finish(0)  # what srun said after a node failure
        await starter.until(5)
        assert starter.started[4] == {"trainer": ("t3", "t2")}
        assert supervisor.lost_nodes == {"r2": "down: power", "t1": "down: power"}

    asyncio.run(main())
    told = {e["peer"]: e["evidence"] for e in read_events(tmp_path / "events") if e["name"] == "node_failed"}
    assert told == {"r2": "down: power; r3 in its place", "t1": "down: power; t3 in its place"}


def test_without_a_spare_rollout_goes_on_with_the_rest_and_the_trainer_needs_the_next_allocation(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        starter = Starter(tmp_path, spares=False)
        supervisor = opened(starter)
        starter.down = {"r2": "down"}
        await tell(supervisor, RestartHost(role="rollout", host="r2", incarnation=1, reason="lost"))
        assert (len(starter.started), starter.hosts("rollout")) == (3, ("r1",))
        assert supervisor._failed is not None and not supervisor._failed.done()
        starter.down = {"t2": "down"}
        starter.steps[0].process.finish(0)  # type: ignore[attr-defined]
        code, why = await asyncio.wait_for(supervisor._failed, WAIT_S)
        assert code == exits.NEXT_ALLOCATION
        assert why.startswith("a node of the trainer failed and no spare is left: step step-0 ended with 0")

    asyncio.run(main())


@pytest.mark.parametrize("trains", [True, False])
def test_a_save_under_way_is_waited_for_when_the_supervisor_gives_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trains: bool
) -> None:
    """For no longer than a save's own deadline, and only while a trainer is there to save."""
    monkeypatch.setattr("miles_hpc.controller.supervisor._END_GRACE_S", 0.2)
    saving = f"trap 'sleep 1.5; touch {tmp_path}/saved; exit 10' TERM; touch {tmp_path}/up; while :; do sleep 0.1; done"

    async def main() -> None:
        starter = Starter(tmp_path)
        supervisor = opened(starter)
        controller = ChildProcess("controller", ["bash", "-c", saving], log=None)
        monkeypatch.setattr(supervisor, "_start_controller", lambda: controller)
        ending = asyncio.create_task(supervisor._keep_controller())
        async with asyncio.timeout(WAIT_S):
            while not (tmp_path / "up").exists():
                await asyncio.sleep(0.02)
        if not trains:
            starter.steps[0].process.exit_code = 1
        supervisor._fail(exits.FAILED, "role rollout was started too often")
        assert await asyncio.wait_for(ending, WAIT_S) == (exits.FAILED, "role rollout was started too often")
        assert controller.exit_code == (10 if trains else -9)

    asyncio.run(main())
    assert (tmp_path / "saved").exists() == trains


def test_hosts_that_start_again_and_again_are_named(tmp_path: Path) -> None:
    async def main() -> None:
        starter = Starter(tmp_path)
        supervisor = opened(starter)
        for n in range(3):
            lost = RestartHost(role="rollout", host="r1", incarnation=n + 1, reason=f"loss {n}")
            await tell(supervisor, lost)
        await tell(supervisor, RestartHost(role="rollout", host="r2", incarnation=1, reason="once"))
        assert supervisor.troubled_hosts == {"r1": "loss 2"}

    asyncio.run(main())


@pytest.mark.parametrize(("code", "told"), [(-15, exits.FAILED), (143, exits.FAILED), (1, exits.FAILED), (10, 10)])
def test_a_controller_that_sigterm_ends_in_its_own_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, told: int
) -> None:
    """While it starts it has no handler yet; whatever its exit code then is, the chain must go on."""

    async def main() -> None:
        starter = Starter(tmp_path)
        supervisor = opened(starter)
        process = Process()
        process.signal = lambda number: process.finish(code)  # type: ignore[attr-defined]
        process.log_tail = lambda: ""  # type: ignore[attr-defined]
        monkeypatch.setattr(supervisor, "_start_controller", lambda: process)
        kept = asyncio.create_task(supervisor._keep_controller())
        await asyncio.sleep(0.05)
        supervisor._on_signal(signal.SIGTERM)
        async with asyncio.timeout(WAIT_S):
            assert await kept == (told, "")
        assert supervisor.terminated

    asyncio.run(main())


def test_a_spare_that_failed_while_it_waited_is_no_spare(tmp_path: Path) -> None:
    run = make_run("groups.trainer.spare_nodes=2", "groups.rollout.spare_nodes=1", "groups.sandbox.spare_nodes=1")
    nodes = ("t[1-4]", "r[1-3]", "s[1-2]")
    environ = {f"SLURM_JOB_NODELIST_HET_GROUP_{i}": some for i, some in enumerate(nodes)} | {"SLURM_HET_SIZE": "3"}
    slurm = FakeSlurm(down={"t2": "down: power", "t3": "down: power", "r3": "down: power"})
    starter = SlurmStarter(run, make_site(), RunPaths(tmp_path), 1, slurm=slurm, job_id=1, environ=environ)  # type: ignore[arg-type]
    assert asyncio.run(starter.failed_nodes()).keys() == {"t2", "t3", "r3"}
    assert (starter.replace("trainer", "t2"), starter.hosts("trainer")) == ("t4", ("t1", "t4"))
    assert (starter.replace("rollout", "r1"), starter.hosts("rollout")) == (None, ("r2",))


def test_a_node_that_another_watcher_has_replaced_already(tmp_path: Path) -> None:
    async def main() -> None:
        starter = Starter(tmp_path)
        supervisor = opened(starter)
        starter.down = {"t2": "down: power", "r2": "down: power"}
        await supervisor._give_up_nodes()  # on behalf of the trainer's step
        await supervisor._restart_hosts("rollout", ("r2",), "its step ended", after=1)
        assert starter.started[-1] == {"rollout": ("r3",)}

    asyncio.run(main())


def test_what_an_allocation_says_and_when_it_looks_after_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    looks: list[int] = []
    monkeypatch.setattr("miles_hpc.controller.supervisor._LOOK_EVERY_S", 0.05)

    async def main() -> int:
        starter = Starter(tmp_path)
        supervisor = Supervisor(starter, new_secret(), end_time=None, job_id=17, look=lambda: looks.append(1))
        controller = Process()
        controller.log_tail = lambda: ""  # type: ignore[attr-defined]
        controller.signal = lambda number: None  # type: ignore[attr-defined]
        monkeypatch.setattr(supervisor, "_start_controller", lambda: controller)
        ran = asyncio.create_task(supervisor.run())
        async with asyncio.timeout(WAIT_S):
            while not looks:
                await asyncio.sleep(0.01)
            starter.down = {"r2": "down: power"}
            await tell(supervisor, RestartHost(role="rollout", host="r2", incarnation=1, reason="lost"))
            monkeypatch.setattr("miles_hpc.controller.supervisor._LOOK_EVERY_S", 1e6)
            await asyncio.sleep(0.2)
            looks.clear()
            for step in starter.steps:  # as agents do that are told to end
                step.process.exit_code = 0
                step.process._ended.set()  # type: ignore[attr-defined]
            supervisor._on_signal(signal.SIGUSR1)
            while not looks:  # the end was announced
                await asyncio.sleep(0.01)
            controller.finish(10)
            return await ran

    assert asyncio.run(main()) == exits.NEXT_ALLOCATION
    assert looks == [1]
    assert capsys.readouterr().out.splitlines() == [
        "supervisor: run tiny, attempt 1, job 17: trainer t[1-2]; rollout r[1-2]; sandbox s1",
        f"supervisor: time left: no limit; logs are in {RunPaths(tmp_path).logs(1)}",
        "supervisor: node r2 of rollout failed: down: power; r3 in its place",
        "supervisor: starting again: rollout on r3: lost",
        "supervisor: attempt 1 ended: continue",
    ]
