"""The UCX worker of a loop, and the paths from it to other workers.

**One path per pair of workers.** UCX matches the endpoints of two workers by the order in which they were made, so the
wires between two workers share one endpoint, told apart by random tags of 64 bits. It stays when wires end. It is
left when the last wire's end isn't answered, since it may be stuck behind a broken link, and closed when UCX reports
its failure: UCX 1.21 may crash when an endpoint is closed that still has something to send.

Each side numbers its paths and tells, over the wire's line, the number of the one that it takes and the number of the
peer's that goes with it as far as it knows, until each has heard from the other that these two go together. So a side
learns that the other has left the path which it still holds, and takes another one. Numbers count up, since each wire
has a line of its own: one that was overtaken by a later one of another wire is old news, and so is one that goes with a
path which we have left. The later one follows.
"""

from __future__ import annotations

import enum
import itertools
import logging
import threading
from collections.abc import Callable
from typing import Any, Protocol

from miles_hpc.control.ucx_api import Path, UcxApi, lanes
from miles_hpc.control.wire import Loop, TimerHandle

__all__ = ["IDLE_S", "News", "PathUser", "SharedPath", "UcxWorker", "agree_on_path"]

#: A worker without wires is released after so long.
IDLE_S = 5.0

_ROUNDS = 64  # of progress per event

#: Workers whose owners have closed them before they could be released; each is used by its own thread only.
_unreleased: list[UcxWorker] = []


class News(enum.Enum):
    """What the numbers that the peer tells mean."""

    AGREED = "the other end of our path, and the peer knows that it is"
    HEARD = "the other end of our path, and the peer doesn't know yet"
    LEFT = "the peer has left the path that we hold, and taken another one"
    OLD = "the peer has taken another one since, or has yet to learn that we have, and will tell"


class PathUser(Protocol):
    """A wire, as its path sees it."""

    shared: SharedPath | None

    @property
    def is_new(self) -> bool:
        """Whether nothing was sent yet, so that it can still move to another path."""

    def take_path(self, address: bytes) -> None:
        """Move to the path to this worker."""

    def tell_numbers(self) -> None:
        """Tell the peer our path's `numbers` if it wasn't told them over this wire."""

    def fail(self, reason: str) -> None:
        """The connection is gone."""


def agree_on_path(wire: PathUser, numbers: tuple[int, int]) -> SharedPath | None:
    """What follows for a wire from the `numbers` that its peer tells: the path that both take now, or None, as later
    numbers or the wire's end decide."""
    shared = wire.shared
    assert shared is not None
    news = shared.told(*numbers)
    if news is News.LEFT:
        reason = "endpoint closed: the peer has left this connection's path"
        if not wire.is_new:
            wire.fail(reason)
            return None
        shared.leave(reason)  # takes another one for the wire
        shared = wire.shared
        if shared is None:
            return None
        news = shared.told(*numbers)
    wire.tell_numbers()
    return shared if news is News.AGREED else None


class UcxWorker:
    """One UCX worker on one loop: progressed when its descriptor is readable, armed before the loop sleeps.

    While no wire is open nothing is watched, and after IDLE_S the worker is released if UCX has nothing left to send;
    the next use opens another one. For a peer that is out of reach that takes until the kernel gives up its sockets.
    """

    def __init__(self, loop: Loop, open_api: Callable[[], UcxApi]) -> None:
        self.loop = loop
        self._open_api = open_api
        self._api: UcxApi | None = None
        self._paths: dict[bytes, SharedPath] = {}
        self._left: set[SharedPath] = set()  # given up by us, not by UCX
        self.numbers = itertools.count(1)  # of our paths
        self.newest: dict[bytes, int] = {}  # number that we were told of a path here, by the peer's worker
        self._n_wires = 0
        self._inside = False
        self._planned = False
        self._polled = False
        self._idle: TimerHandle | None = None
        self._thread = threading.get_ident()

    @property
    def api(self) -> UcxApi:
        """The worker, opened when it isn't."""
        if self._api is None:
            _release_others()
            self._api = self._open_api()
            if not self._n_wires:
                self._idle = self.loop.call_later(IDLE_S, self._idled)
        return self._api

    # ------------------------------------------------------------------------------ wires and paths

    def enter(self) -> None:
        """A wire is open."""
        self._n_wires += 1
        if self._n_wires == 1:
            if self._idle is not None:
                self._idle.cancel()
                self._idle = None
            loop: Any = self.loop
            if hasattr(loop, "add_poller"):  # asked in every round; armed, and watched, only for a sleep
                loop.add_poller(self._progress, arm=self._arm)
                self._polled = True
            else:
                loop.add_reader(self.api.fd, self._turn)

    def leave(self) -> None:
        """A wire is closed."""
        self._n_wires -= 1
        if not self._n_wires:
            loop: Any = self.loop
            loop.remove_reader(self.api.fd)
            if hasattr(loop, "remove_poller"):
                loop.remove_poller(self._progress)
                self._polled = False
            self._idle = self.loop.call_later(IDLE_S, self._idled)

    def path_to(self, address: bytes) -> SharedPath:
        """The path to another worker. Raises ConnectionError when UCX knows no way there."""
        path = self._paths.get(address)
        if path is None:
            path = self._paths[address] = SharedPath(self, address)
        return path

    def forget(self, path: SharedPath, *, failed: bool) -> None:
        """No wire takes this path any more. Unless UCX has given it up, it stays open until UCX does."""
        if self._paths.get(path.address) is path:
            del self._paths[path.address]
        if failed:
            self._left.discard(path)
        else:
            self._left.add(path)

    def in_use(self) -> list[str]:
        """The transports and devices of all paths."""
        found = (lane for path in self._paths.values() for lane in lanes(path.path.handle()))
        return sorted(set(found))

    # ------------------------------------------------------------------------------ progress

    def kick(self) -> None:
        """Something was handed to UCX that isn't done: look at it soon, and arm again. A poller does by itself."""
        if not self._planned and not self._polled:
            self._planned = True
            self.loop.call_soon(self._kicked)

    def _kicked(self) -> None:
        self._planned = False
        if self._api is not None:
            self._turn()

    def drain(self) -> None:
        """Deliver what has arrived."""
        self._progress()

    def _progress(self) -> bool:
        """Returns whether there was anything."""
        if self._inside:
            return False
        self._inside = True
        try:
            return self.api.progress()
        finally:
            self._inside = False

    def _arm(self) -> bool:
        """For loops that poll: whether they may sleep. Until it's armed the descriptor may be readable all the time."""
        if not self.api.arm():
            return False
        self.loop.add_reader(self.api.fd, self._woken)
        return True

    def _woken(self) -> None:
        self.loop.remove_reader(self.api.fd)

    def _turn(self) -> None:
        """Progress until nothing is left to do and the descriptor is armed."""
        if self._inside:
            return
        for _ in range(_ROUNDS):
            if not self._progress() and self.api.arm():
                return
        self.kick()  # still busy: let others run in between

    # ------------------------------------------------------------------------------ the end

    def _idled(self) -> None:
        self._idle = None
        if self._api is not None and not self._release():
            self._idle = self.loop.call_later(IDLE_S, self._idled)

    def _release(self) -> bool:
        """Give the UCX worker back, unless it still has something to send. No wire is open."""
        assert self._api is not None
        for _ in range(_ROUNDS):
            if not self._progress():
                break
        if self._left or any(path.unheard or path.path.busy for path in self._paths.values()):
            return False
        for path in list(self._paths.values()):
            path.fail("endpoint closed: the worker is released")
        self._api.close()
        self._api = None
        self.newest.clear()
        return True

    def close(self) -> None:
        """Release it now if that can be done safely; else when this thread opens or closes another one."""
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
        for path in [*self._paths.values(), *self._left]:
            path.end_wires("endpoint closed: the transport is closed")
        _release_others()
        if self._api is not None and not self._release():
            _unreleased.append(self)

    def release_if_possible(self) -> bool:
        """Once more, after `close`. Returns whether nothing is left to do here."""
        return self._thread == threading.get_ident() and (self._api is None or self._release())


def _release_others() -> None:
    _unreleased[:] = [worker for worker in _unreleased if not worker.release_if_possible()]


class SharedPath:
    """The UCX endpoint to one other worker, and the wires over it."""

    def __init__(self, worker: UcxWorker, address: bytes) -> None:
        self.address = address
        self.number = next(worker.numbers)
        self.peer_number = 0
        self._agreed = False
        self.wires: set[PathUser] = set()
        self.unheard = False  # something was sent of which we don't know that it arrived
        self._worker = worker
        self.heard = False
        self.path: Path = worker.api.connect(address, self.fail)

    def hear(self, remote: str) -> None:
        """The first message has come, so UCX has settled on its transports."""
        self.heard = True
        logging.getLogger(__name__).info("%s: UCX uses %s", remote, ", ".join(lanes(self.path.handle())))

    @property
    def numbers(self) -> tuple[int, int]:
        """Ours, and the peer's that goes with it, 0 while we don't know it: what a wire tells the peer."""
        return self.number, self.peer_number

    def told(self, number: int, goes_with: int) -> News:
        """The peer tells its `numbers`."""
        newest = self._worker.newest
        if number < newest.get(self.address, 0) or goes_with not in (0, self.number):
            return News.OLD
        newest[self.address] = number
        if self.peer_number != number:
            if self._agreed:
                return News.LEFT
            self.peer_number = number  # it moved before anything was sent over ours
        self._agreed = self._agreed or goes_with == self.number
        return News.AGREED if goes_with == self.number else News.HEARD

    def leave(self, reason: str) -> None:
        """Don't use it any more: its other end is gone, or it may be stuck. New wires move on, others end."""
        self._worker.forget(self, failed=False)
        moving = [wire for wire in self.wires if wire.is_new]
        self.wires.difference_update(moving)
        self.end_wires(reason)
        for wire in moving:
            wire.take_path(self.address)

    def fail(self, reason: str) -> None:
        """UCX has given it up."""
        self._worker.forget(self, failed=True)
        self.end_wires(reason)
        self.path.close()

    def end_wires(self, reason: str) -> None:
        wires = list(self.wires)
        self.wires.clear()
        for wire in wires:
            wire.fail(reason)
