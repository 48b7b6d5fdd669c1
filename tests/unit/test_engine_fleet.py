"""Engines for training follow the newest weights; those set aside hold what they were pinned to."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from miles_hpc.controller.engines import EngineFleet
from miles_hpc.core.errors import ProtocolError
from miles_hpc.core.types import WeightVersion
from tests.fakes.rollout_hosts import FakeHost, FakeMembers, Told, staged, until


def v(step: int) -> WeightVersion:
    return WeightVersion(1, step)


class Stage:
    def __init__(self, *hosts: FakeHost) -> None:
        self.hosts, self.told = hosts, Told()
        members = FakeMembers(hosts)
        self.fleet = EngineFleet(
            members.endpoint,
            self.told,  # type: ignore[arg-type]
            deadline_s=5.0,
            changed=lambda: None,
        )
        for host in hosts:
            self.fleet.update(host.name, host.status())

    async def want(self, step: int) -> None:
        """The trainer serves weights `step`; returns when the engines for training hold them."""
        self.fleet.want(staged(1, step), None)
        await until(lambda: len(self.fleet.serving(v(step))) == self.fleet.count(), f"weights {step}")


def play(scene: Callable[[Stage], Awaitable[None]], *hosts: FakeHost) -> None:
    async def main() -> None:
        stage = Stage(*hosts)
        try:
            await scene(stage)
        finally:
            stage.fleet.close()

    asyncio.run(main())


def test_engines_set_aside_are_no_part_of_training() -> None:
    host = FakeHost("h", 3, slots=8, n_set_aside=1)

    async def scene(s: Stage) -> None:
        await s.want(4)
        fleet = s.fleet
        assert (fleet.count(), fleet.count(set_aside=True)) == (2, 1)
        assert fleet.serving() == ["h-e0", "h-e1"] and fleet.serving(set_aside=True) == []
        assert (fleet.slots("h"), fleet.slots("h", set_aside=True)) == (16, 0)
        fleet.pin()
        await until(lambda: fleet.pin_held, "the pinned version")
        await s.want(7)
        assert fleet.oldest_step() == 7  # though the engine that is set aside holds 4
        assert fleet.serving(v(4), set_aside=True) == ["h-e2"]
        assert fleet.slots("h", set_aside=True) == 8
        assert {one for one in host.fetches if one[0] == "h-e2"} == {("h-e2", v(4))}

    play(scene, host)


def test_only_engines_that_are_new_enough_count() -> None:
    slow, fast = FakeHost("slow"), FakeHost("fast")
    slow.syncs = lambda engine, version: version.step < 5

    async def scene(s: Stage) -> None:
        await s.want(4)
        s.fleet.want(staged(1, 5), None)
        await until(lambda: s.fleet.serving(v(5)) == ["fast-e0"], "the fast one")
        assert [s.fleet.slots(name, at_least=v(5)) for name in ("slow", "fast")] == [0, 8]
        assert [s.fleet.slots(name) for name in ("slow", "fast")] == [8, 8]
        # weights of an older term are not newer, whatever their step
        assert s.fleet.slots("fast", at_least=WeightVersion(2, 3)) == 0

    play(scene, slow, fast)


def test_a_pinned_version_can_be_got_as_long_as_the_trainer_serves_it() -> None:
    host = FakeHost("h", 2, n_set_aside=1)
    host.syncs = lambda engine, version: engine == "h-e0"

    async def scene(s: Stage) -> None:
        fleet = s.fleet
        assert not fleet.pin_lasts
        await s.want(4)
        assert fleet.pin() == v(4)
        await until(lambda: s.told.named("sync_failed"), "a failure")
        assert fleet.pin_lasts and not fleet.pin_held
        await s.want(5)
        assert fleet.pin_lasts  # the trainer keeps one earlier version
        await s.want(6)
        assert not fleet.pin_lasts
        host.syncs = lambda engine, version: True
        assert fleet.pin() == v(6)
        await until(lambda: fleet.pin_held, "the pinned version")
        assert fleet.serving(v(6), set_aside=True) == ["h-e1"]

    play(scene, host)


def test_an_engine_that_comes_back_gets_the_pinned_version_again_or_nothing() -> None:
    host = FakeHost("h", 2, n_set_aside=1)

    def restart(s: Stage) -> None:
        host.versions["h-e1"] = None
        s.fleet.update("h", tuple(e for e in host.status() if e.name != "h-e1"))
        s.fleet.update("h", host.status())

    async def scene(s: Stage) -> None:
        await s.want(4)
        s.fleet.pin()
        await until(lambda: s.fleet.pin_held, "the pinned version")
        restart(s)
        assert not s.fleet.pin_held
        await until(lambda: s.fleet.pin_held, "the pinned version again")
        await s.want(5)
        await s.want(6)
        fetches = len(host.fetches)
        restart(s)
        await asyncio.sleep(0.05)
        assert not s.fleet.pin_held and not s.fleet.pin_lasts and len(host.fetches) == fetches

    play(scene, host)


def test_nothing_can_be_pinned_before_weights_are_staged() -> None:
    async def scene(s: Stage) -> None:
        with pytest.raises(ProtocolError, match="no weights were staged"):
            s.fleet.pin()

    play(scene, FakeHost("h", 2, n_set_aside=1))
