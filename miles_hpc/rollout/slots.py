"""Generation slots: room for one trajectory each on the engines of a host, refilled as soon as one ends.

A new session goes to the engine with the smallest share of its slots in use, among those that are alive and hold a
verified weight version; its turns stay there. Sessions that find no room wait in order of arrival. Engines that are set
aside for evaluations are a pool of their own.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from miles_hpc.core.deadline import Deadline
from miles_hpc.core.messages import EngineStatus
from miles_hpc.core.types import ModelShape, WeightVersion
from miles_hpc.rollout.engine import RolloutEngine

__all__ = ["EngineSlots"]


@dataclass
class _Entry:
    engine: RolloutEngine
    slots: int
    shape: ModelShape | None
    version: WeightVersion | None
    set_aside: bool
    alive: bool = True
    used: int = 0

    @property
    def has_room(self) -> bool:
        return self.alive and self.version is not None and self.used < self.slots


@dataclass
class _Place:
    """Somebody who waits for a slot, and on which engines."""

    future: asyncio.Future[_Entry]
    set_aside: bool
    at_least: WeightVersion | None

    def fits(self, entry: _Entry) -> bool:
        new_enough = self.at_least is None or (entry.version is not None and entry.version >= self.at_least)
        return entry.has_room and entry.set_aside is self.set_aside and new_enough


class EngineSlots:
    """The engines of one host and who uses them. Belongs to one event loop."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._waiting: deque[_Place] = deque()

    # ------------------------------------------------------------------------------------------- engines

    def add(
        self,
        engine: RolloutEngine,
        *,
        slots: int,
        shape: ModelShape | None,
        version: WeightVersion | None,
        set_aside: bool = False,
    ) -> None:
        """Take an engine in; one of the same name is replaced (its trajectories fail by themselves)."""
        self._entries[engine.name] = _Entry(engine, slots, shape, version, set_aside)
        self._hand_out()

    def remove(self, name: str) -> None:
        """Forget an engine; unknown names are fine."""
        self._entries.pop(name, None)

    def engine(self, name: str) -> RolloutEngine | None:
        entry = self._entries.get(name)
        return entry.engine if entry is not None else None

    def any_engine(self) -> RolloutEngine | None:
        """Some engine that holds a version."""
        return next((e.engine for e in self._entries.values() if e.alive and e.version is not None), None)

    def set_version(self, name: str, version: WeightVersion | None) -> None:
        """The engine holds this version from now on; with None nothing is sent to it."""
        entry = self._entries.get(name)
        if entry is not None:
            entry.version = version
            self._hand_out()

    def version(self, name: str) -> WeightVersion | None:
        entry = self._entries.get(name)
        return entry.version if entry is not None else None

    def set_alive(self, name: str, alive: bool) -> bool:
        """Returns whether that changed anything."""
        entry = self._entries.get(name)
        if entry is None or entry.alive is alive:
            return False
        entry.alive = alive
        self._hand_out()
        return True

    def is_dead(self, name: str) -> bool:
        """Whether this engine is here and was given up."""
        entry = self._entries.get(name)
        return entry is not None and not entry.alive

    def status(self) -> tuple[EngineStatus, ...]:
        return tuple(
            EngineStatus(
                name=name, slots=e.slots, version=e.version, alive=e.alive, shape=e.shape, set_aside=e.set_aside
            )
            for name, e in self._entries.items()
        )

    @property
    def used(self) -> int:
        """Slots in use over all engines."""
        return sum(e.used for e in self._entries.values())

    # ------------------------------------------------------------------------------------------- slots

    @asynccontextmanager
    async def lease(
        self, deadline_s: float, *, set_aside: bool = False, at_least: WeightVersion | None = None
    ) -> AsyncIterator[RolloutEngine]:
        """Hold one slot, on an engine of that pool which holds `at_least` or a newer version.

        Waits for one up to `deadline_s`; raises DeadlineExpired.
        """
        place = _Place(asyncio.get_running_loop().create_future(), set_aside, at_least)
        entry = await self._acquire(place, Deadline(deadline_s, "waiting for a generation slot"))
        try:
            yield entry.engine
        finally:
            entry.used -= 1
            self._hand_out()

    async def _acquire(self, place: _Place, deadline: Deadline) -> _Entry:
        self._waiting.append(place)
        self._hand_out()
        future = place.future
        try:
            return await asyncio.wait_for(asyncio.shield(future), deadline.remaining_s)
        except BaseException as error:
            if future.done():  # handed out just as the wait ended
                future.result().used -= 1
                self._hand_out()
            future.cancel()
            if isinstance(error, TimeoutError):
                raise deadline.error() from None
            raise

    def _hand_out(self) -> None:
        waiting = deque[_Place]()
        while self._waiting and any(e.has_room for e in self._entries.values()):
            place = self._waiting.popleft()
            if place.future.done():
                continue
            free = [e for e in self._entries.values() if place.fits(e)]
            if not free:
                waiting.append(place)
                continue
            entry = min(free, key=lambda e: e.used / e.slots)
            entry.used += 1
            place.future.set_result(entry)
        self._waiting.extendleft(reversed(waiting))
