"""When a term ends early: the allocation's clock, and looking after it while something else is awaited."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from miles_hpc.control.terms import claim_attempt, claim_term
from miles_hpc.controller.ending import AllocationEnds, Clock, Fence, looking_after
from miles_hpc.core.errors import FencedError
from miles_hpc.core.paths import RunPaths


@pytest.mark.parametrize(
    ("remaining_s", "told", "step_s", "save_s", "room", "wait"),
    [
        (None, False, 1e6, 1e6, True, True),
        (None, True, 1.0, 1.0, False, False),
        (100.0, False, 10.0, 10.0, True, True),
        (100.0, False, 60.0, 30.0, False, True),
        (100.0, True, 10.0, 10.0, False, False),
        (16.0, False, 0.0, 0.0, False, False),  # hanging up and requeueing take that long
    ],
)
def test_what_still_fits_into_an_allocation(
    remaining_s: float | None, told: bool, step_s: float, save_s: float, room: bool, wait: bool
) -> None:
    ending = asyncio.Event()
    if told:
        ending.set()
    clock = Clock(ending, lambda: remaining_s)
    assert (clock.has_room_for(step_s, save_s), clock.has_room_to_wait()) == (room, wait)


def test_looking_after_something_gives_its_result_or_ends_it() -> None:
    looks: list[int] = []
    cut: list[str] = []

    async def look() -> None:
        looks.append(1)
        if len(looks) == 2:
            raise AllocationEnds("now")

    async def work(seconds: float) -> str:
        try:
            await asyncio.sleep(seconds)
            return "done"
        except asyncio.CancelledError:
            cut.append("cut")
            raise

    async def scene() -> None:
        assert await looking_after(look, work(0.0)) == "done" and looks == []
        with pytest.raises(AllocationEnds, match="now"):
            await looking_after(look, work(60.0))
        await asyncio.sleep(0)
        assert cut == ["cut"] and len(looks) == 2
        with pytest.raises(ZeroDivisionError):
            await looking_after(look, _fails())

    asyncio.run(scene())


async def _fails() -> None:
    raise ZeroDivisionError


def test_a_newer_attempt_is_seen_without_anything_to_publish(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    attempt = claim_attempt(paths)
    fence = Fence(paths, claim_term(paths, attempt), attempt)

    async def scene() -> None:
        seen: list[FencedError] = []
        watch = asyncio.create_task(fence.watch(seen.append))
        await asyncio.sleep(0.05)
        assert not watch.done()
        claim_attempt(paths)
        await asyncio.wait_for(watch, 10.0)
        assert len(seen) == 1

    fence.check()
    asyncio.run(scene())
    with pytest.raises(FencedError):
        fence.check()
