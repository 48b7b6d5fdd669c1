"""Nodes that fail at once or one after the other, in every order: spares while there are any, then the layout's rest.

Whatever the order, it ends in one of two ways: each role runs on just the hosts of its placement, none of them down and
the trainer's as many as at the start; or the next allocation is asked for, which has to have a reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from itertools import permutations
from pathlib import Path

import pytest

from miles_hpc.controller.steps import Step
from miles_hpc.controller.supervisor import Supervisor
from miles_hpc.core import exits
from miles_hpc.core.messages import RestartHost
from tests.unit.test_supervisor_steps import Starter, opened, quick, tell

__all__ = ["quick"]  # a fixture

ORDERS = [
    ("t1", "t2"),
    ("t1", "r2"),
    ("t1", "t3"),  # the spare that has taken t1's place
    ("r2", "r3"),
    ("r2", "r1", "r3"),
    ("t1", "r2", "r1"),
    ("t1", "r2", "r3"),
    ("t1", "s1"),
    ("t2", "t3", "r1"),
]


class Slow(Starter):
    """Ends and looks take a moment, in which something else may fail; srun can't start on a node that is down."""

    def start(self, hosts: Mapping[str, Sequence[str]], incarnation: int) -> list[Step]:
        steps = super().start(hosts, incarnation)
        if set(self.down) & {host for some in hosts.values() for host in some}:
            steps[0].process.finish(1)  # type: ignore[attr-defined]
        return steps

    async def end(self, step: Step) -> None:
        await asyncio.sleep(0.01)
        await super().end(step)

    async def failed_nodes(self) -> dict[str, str]:
        down = await super().failed_nodes()
        await asyncio.sleep(0.01)
        self.placement = self.placement.without_spares(down)
        return down


def role_of(host: str) -> str:
    return {"t": "trainer", "r": "rollout", "s": "sandbox"}[host[0]]


def running(starter: Starter, role: str) -> list[str]:
    """The role's hosts that a step runs on, as often as there are steps on them; of down nodes nothing is left."""
    steps = [s for s in starter.steps if s.process.exit_code is None]
    return sorted(host for s in steps for host in s.hosts.get(role, ()) if host not in starter.down)


async def fail(supervisor: Supervisor, starter: Starter, host: str) -> None:
    """What is seen of a lost node: the trainer's world ends; of other roles' hosts the controller tells."""
    starter.down[host] = "down: power"
    for step in list(starter.steps):
        if step.process.exit_code is None and host in step.hosts.get(role_of(host), ()):
            if role_of(host) == "trainer" or step.hosts == {role_of(host): (host,)}:
                step.process.finish(0)  # type: ignore[attr-defined]
            else:
                lost = RestartHost(role=role_of(host), host=host, incarnation=step.incarnation, reason="lost")
                await tell(supervisor, lost)


async def settled(supervisor: Supervisor, starter: Starter) -> None:
    """Until nothing has been started for a while, or the supervisor has given up."""
    assert supervisor._failed is not None
    n = -1
    while n != len(starter.started) and not supervisor._failed.done():
        n = len(starter.started)
        await asyncio.sleep(0.2)


@pytest.mark.parametrize("pause_s", [None, 0.0, 0.015, 0.2], ids=["at once", "next", "meanwhile", "after"])
@pytest.mark.parametrize("span", [False, True], ids=["steps", "span"])
@pytest.mark.parametrize("hosts", ORDERS, ids="-".join)
def test_any_order_of_failures(tmp_path: Path, hosts: tuple[str, ...], span: bool, pause_s: float | None) -> None:
    async def one(order: tuple[str, ...], root: Path) -> None:
        starter = Slow(root, span=span)
        supervisor = opened(starter)
        told = []
        if pause_s is None:
            starter.down = dict.fromkeys(order, "down: power")
        for host in order:
            told.append(asyncio.create_task(fail(supervisor, starter, host)))
            await asyncio.sleep(pause_s or 0.0)
        await asyncio.gather(*told)
        await settled(supervisor, starter)
        failed = supervisor._failed
        assert failed is not None
        sizes = {role: len(starter.hosts(role)) for role in starter.roles}
        if failed.done():
            assert failed.result()[0] == exits.NEXT_ALLOCATION, failed.result()
            assert sizes["trainer"] < 2 or not all(sizes.values())
            return
        assert sizes["trainer"] == 2
        for role in starter.roles:
            assert running(starter, role) == sorted(starter.hosts(role)), (order, role, starter.started)
            assert not set(starter.hosts(role)) & set(starter.down)

    async def main() -> None:
        orders = enumerate(permutations(hosts))
        await asyncio.gather(*(one(order, tmp_path / str(i)) for i, order in orders))

    asyncio.run(main())


def test_a_step_that_cannot_be_started_ends_the_allocation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        starter = Starter(tmp_path)
        supervisor = opened(starter)

        def broken(*args: object) -> list[Step]:
            raise OSError("no processes are left")

        monkeypatch.setattr(starter, "start", broken)
        starter.steps[0].process.finish(1)  # type: ignore[attr-defined]
        assert supervisor._failed is not None
        code, why = await asyncio.wait_for(supervisor._failed, 10.0)
        assert (code, why) == (exits.FAILED, "a step could not be started again: OSError: no processes are left")

    asyncio.run(main())
