"""When a term ends before the run is complete: by the allocation's clock, by notice from outside, by a newer term."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from miles_hpc.cluster.lifecycle import should_continue
from miles_hpc.control.terms import check_newest
from miles_hpc.core.errors import FencedError, MilesError
from miles_hpc.core.paths import RunPaths

__all__ = ["DRAIN_S", "AllocationEnds", "Clock", "Fence", "looking_after"]

T = TypeVar("T")

#: How long what hosts have under way may still come in, once the allocation ends.
DRAIN_S = 5.0
#: Seconds that the end of an allocation needs besides one step and one save: hanging up, ending the steps, requeueing.
_END_MARGIN_S = 12.0
_FENCE_S = 1.0
_LOOK_S = 0.5


class AllocationEnds(MilesError):
    """State is saved; the run goes on in the next allocation."""


class Clock:
    """How long the allocation lasts, and whether it was told to end before."""

    def __init__(self, ending: asyncio.Event, remaining_s: Callable[[], float | None]) -> None:
        """`remaining_s` are the seconds left, None when nothing ends it; `ending` is set when it was told to end."""
        self.ending = ending
        self.remaining_s = remaining_s

    def has_room_for(self, step_s: float, save_s: float) -> bool:
        """Whether one more step and a save fit, and nobody told it to end."""
        remaining = self.remaining_s()
        fits = remaining is None or should_continue(remaining, step_s, save_s, _END_MARGIN_S + DRAIN_S)
        return fits and not self.ending.is_set()

    def has_room_to_wait(self) -> bool:
        """Whether it lasts long enough to wait until a full file system has room."""
        remaining = self.remaining_s()
        return not self.ending.is_set() and (remaining is None or remaining > _END_MARGIN_S + DRAIN_S)


class Fence:
    """Whether this attempt and term are still the newest ones."""

    def __init__(self, paths: RunPaths, term: int, attempt: int) -> None:
        self._paths = paths
        self._term = term
        self._attempt = attempt

    def check(self) -> None:
        """Blocks for a look at the file system. Raises FencedError when there is a newer one."""
        check_newest(self._paths, self._term, self._attempt)

    async def watch(self, fenced: Callable[[FencedError], None]) -> None:
        """Call `fenced` when a newer one exists, also while nothing is there to be published."""
        while True:
            await asyncio.sleep(_FENCE_S)
            try:
                await asyncio.to_thread(self.check)
            except FencedError as error:
                fenced(error)
                return


async def looking_after(look: Callable[[], Awaitable[None]], awaitable: Coroutine[Any, Any, T]) -> T:
    """Await it, and call `look` every half second meanwhile; what that raises ends both."""
    task = asyncio.create_task(awaitable)
    try:
        while not task.done():
            await asyncio.wait({task}, timeout=_LOOK_S)
            if not task.done():
                await look()
        return task.result()
    finally:
        task.cancel()
