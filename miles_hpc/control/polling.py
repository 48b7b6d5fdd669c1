"""Asking again and again, without burning a core: for sources of events that have no descriptor, such as MPI.

    progress() ── did something ─▶ ask again at once
               └─ nothing ─▶ looks ─▶ looks, the processor yielded after each ─▶ sleeps that grow up to max_sleep_s

`polling_of(loop)` gives the same three methods on either loop: PlainLoop has them itself, for asyncio's loops they are
built from call_soon and call_later, whose shortest sleep is 1 ms.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from miles_hpc.control.wire import Loop, TimerHandle

__all__ = ["EAGER_LOOKS", "AsyncPolling", "BackOff", "Polling", "polling_of"]

#: Looks without success before the first sleep.
EAGER_LOOKS = 100

_UNYIELDING_LOOKS = 10  # the first of them: on a loaded machine, a yield can take milliseconds
_FIRST_SLEEP_S = 20e-6
_GROWTH = 1.25  # a sleep is at most a quarter of the wait so far: two ends can't keep each other asleep


class BackOff:
    """How long to sleep before the next look: nothing for a while, then a bit longer each time, up to a bound."""

    __slots__ = ("_looks", "_next_s", "max_sleep_s")

    def __init__(self, max_sleep_s: float) -> None:
        self.max_sleep_s = max_sleep_s
        self.reset()

    def reset(self) -> None:
        """Something happened: begin anew."""
        self._looks = 0
        self._next_s = _FIRST_SLEEP_S

    def pause_s(self) -> float:
        """The next pause in seconds; 0.0 while it's too early to sleep. Yields the processor itself."""
        if self._looks < EAGER_LOOKS:
            self._looks += 1
            if self._looks > _UNYIELDING_LOOKS:
                os.sched_yield()
            return 0.0
        pause = min(self._next_s, self.max_sleep_s)
        self._next_s = _GROWTH * pause
        return pause


class Polling(Protocol):
    """What asks."""

    def add_poller(self, progress: Callable[[], bool], *, max_sleep_s: float | None = None) -> None:
        """Call `progress` in every round of the loop; it returns whether it did something, and doesn't wait."""

    def remove_poller(self, progress: Callable[[], bool]) -> None:
        """Stop; fine for one that isn't there."""

    def hurry(self) -> None:
        """Something is about to happen: back to eager looks."""


class AsyncPolling:
    """Polling on an asyncio loop. Each poller has a back-off of its own."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._pollers: dict[Callable[[], bool], _Rounds] = {}

    def add_poller(self, progress: Callable[[], bool], *, max_sleep_s: float | None = None) -> None:
        if max_sleep_s is None:
            raise ValueError("asyncio's loops wait for descriptors by themselves: max_sleep_s is needed")
        if progress not in self._pollers:
            self._pollers[progress] = _Rounds(self._loop, progress, max_sleep_s)

    def remove_poller(self, progress: Callable[[], bool]) -> None:
        rounds = self._pollers.pop(progress, None)
        if rounds is not None:
            rounds.stop()

    def hurry(self) -> None:
        for rounds in self._pollers.values():
            rounds.hurry()


class _Rounds:
    """The looks of one poller: one per round of the loop, or one per timer."""

    def __init__(self, loop: Loop, progress: Callable[[], bool], max_sleep_s: float) -> None:
        self._loop = loop
        self._progress = progress
        self._back_off = BackOff(max_sleep_s)
        self._timer: TimerHandle | None = None  # while it sleeps
        self._stopped = False
        loop.call_soon(self._round)

    def _round(self) -> None:
        self._timer = None
        if self._stopped:
            return
        try:
            if self._progress():
                self._back_off.reset()
        finally:  # an error is logged by the loop, and must not end the looks
            pause = self._back_off.pause_s()
            if not self._stopped:
                if pause:
                    self._timer = self._loop.call_later(pause, self._round)
                else:
                    self._loop.call_soon(self._round)

    def hurry(self) -> None:
        self._back_off.reset()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._loop.call_soon(self._round)

    def stop(self) -> None:
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()


def polling_of(loop: Any) -> Polling:
    """The loop itself when it can poll, else what polls on it."""
    polling: Polling = loop if hasattr(loop, "add_poller") else AsyncPolling(loop)
    return polling
