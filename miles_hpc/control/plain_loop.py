"""The event loop of the blocking face: descriptors, timers and callbacks, run only while somebody waits.

It has the few methods of asyncio's loops that wires and conversations use (wire.Loop). `run_until` may be called from a
callback: the inner call serves everything, the outer one goes on after it.

    ready callbacks ─▶ due timers ─▶ pollers ─▶ done()? ─▶ sleep: until a descriptor, a timer, a poller's next look
"""

from __future__ import annotations

import heapq
import itertools
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from miles_hpc.control.polling import BackOff

__all__ = ["PlainLoop"]

_READ = select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR | select.EPOLLRDHUP
_WRITE = select.EPOLLOUT
_WRITABLE = select.EPOLLOUT | select.EPOLLHUP | select.EPOLLERR
_LONGEST_WAIT_S = 1.0  # then `done` is asked again: a signal's handler may have made it true, and ends no sleep
_MAX_CANCELLED = 100  # timers that are kept though they were cancelled, however few the others are
_STUCK_S = 0.05  # without any event, before what was put off is called all the same
_FOLLOWERS = 1  # callbacks that these callbacks plan and that run before the next look: a flush of what they sent
_TAKEN_S = 0.0005  # a core that comes back later than this was taken by somebody who computes
_KEPT_S = 1.0  # spins keep the core for so long then
_EPOLL_STEP_S = 0.001  # what epoll rounds up to


class _Timer:
    __slots__ = ("args", "at", "callback", "loop")

    def __init__(self, loop: PlainLoop, at: float, callback: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.loop = loop
        self.at = at
        self.callback: Callable[..., Any] | None = callback  # None once it has run or was cancelled
        self.args = args

    def cancel(self) -> None:
        if self.callback is not None:
            self.callback, self.args = None, ()
            self.loop._timer_cancelled()


class PlainLoop:
    """One thread's loop. Only `call_soon_threadsafe` may be called from elsewhere.

    `spin_s`: how long a wait looks for events again and again before it sleeps; lower latency, but a busy core.
    """

    def __init__(self, *, spin_s: float = 0.0) -> None:
        self.spin_s = spin_s
        self._epoll = select.epoll()
        self._readers: dict[int, Callable[..., Any]] = {}
        self._writers: dict[int, Callable[..., Any]] = {}
        self._fresh: set[int] = set()  # registered since the last look: its events are those of a descriptor before
        self._ready: deque[tuple[Callable[..., Any], tuple[Any, ...]]] = deque()
        self._timers: list[tuple[float, int, _Timer]] = []
        self._n_cancelled = 0  # of them
        self._pollers: dict[Callable[[], bool], float | None] = {}
        self._arms: dict[Callable[[], bool], Callable[[], bool]] = {}  # by the poller that needs it
        self._back_off: BackOff | None = None  # when a poller bounds the sleeps
        self._numbers = itertools.count()
        self._yield_from = 0.0  # the time from which on a spin may give the core away
        self.depth = 0  # how many run_until lie within one another
        self._put_off: deque[Callable[[bool], Any]] = deque()
        self._put_off_depth = 0
        self._wake_fd = -1
        self._wake_lock = threading.Lock()  # a descriptor that is being closed must not be written to
        self._thread = threading.get_ident()
        self.time = time.monotonic

    # ------------------------------------------------------------------------------ what asyncio's loops have

    def call_soon(self, callback: Callable[..., Any], *args: Any) -> None:
        self._ready.append((callback, args))

    def call_soon_threadsafe(self, callback: Callable[..., Any], *args: Any) -> None:
        self._ready.append((callback, args))  # a deque's append is atomic
        if threading.get_ident() != self._thread:
            with self._wake_lock:
                if self._wake_fd >= 0:
                    os.eventfd_write(self._wake_fd, 1)

    def call_later(self, delay: float, callback: Callable[..., Any], *args: Any) -> _Timer:
        timer = _Timer(self, self.time() + delay, callback, args)
        heapq.heappush(self._timers, (timer.at, next(self._numbers), timer))
        return timer

    def add_reader(self, fd: int, callback: Callable[..., Any]) -> None:
        self._readers[fd] = callback
        self._register(fd)

    def remove_reader(self, fd: int) -> None:
        if self._readers.pop(fd, None) is not None:
            self._register(fd)

    def add_writer(self, fd: int, callback: Callable[..., Any]) -> None:
        self._writers[fd] = callback
        self._register(fd)

    def remove_writer(self, fd: int) -> None:
        if self._writers.pop(fd, None) is not None:
            self._register(fd)

    def _register(self, fd: int) -> None:
        mask = (_READ if fd in self._readers else 0) | (_WRITE if fd in self._writers else 0)
        if not mask:
            self._epoll.unregister(fd)
            return
        try:
            self._epoll.modify(fd, mask)
        except FileNotFoundError:
            self._epoll.register(fd, mask)
            self._fresh.add(fd)

    # ------------------------------------------------------------------------------ what they don't have

    def add_poller(
        self,
        progress: Callable[[], bool],
        *,
        max_sleep_s: float | None = None,
        arm: Callable[[], bool] | None = None,
    ) -> None:
        """Call `progress` in every round, before the loop sleeps; it returns whether it did something: then the next
        round follows at once. It must not wait.

        `max_sleep_s` is for a source of events without a descriptor: the loop's sleeps back off up to it. None is for a
        source that has one, given to add_reader as well: sleeps aren't bounded, and while the loop spins it's asked
        again and again. `arm` is called before the loop really sleeps, and makes the descriptor tell of what comes;
        False means that something is there already.
        """
        self._pollers[progress] = max_sleep_s
        if arm is not None:
            self._arms[progress] = arm
        self._bound_sleeps()

    def remove_poller(self, progress: Callable[[], bool]) -> None:
        """Stop calling it; fine for one that isn't there."""
        self._pollers.pop(progress, None)
        self._arms.pop(progress, None)
        self._bound_sleeps()

    def hurry(self) -> None:
        """Something is about to happen: pollers are asked without sleeps for a while."""
        if self._back_off is not None:
            self._back_off.reset()

    def _bound_sleeps(self) -> None:
        bounds = [bound for bound in self._pollers.values() if bound is not None]
        self._back_off = BackOff(min(bounds)) if bounds else None

    def put_off(self, callback: Callable[[bool], Any], depth: int) -> None:
        """Call it with False when at most `depth` run_until lie within one another. Before that with True, the newest
        first, when nothing else has happened for a while: whoever waits may wait for it.
        """
        self._put_off.append(callback)
        self._put_off_depth = depth

    def resume(self) -> None:
        """Call the oldest of what was put off if that may be; it calls `resume` when it's finished."""
        if self._put_off and self.depth <= self._put_off_depth:
            self._ready.appendleft((self._put_off.popleft(), (False,)))

    @property
    def busy(self) -> bool:
        """Whether a descriptor is watched, a source without one is polled, or a callback waits; timers don't count."""
        watched = self._writers or self._readers.keys() - {self._wake_fd}
        return bool(self._ready or watched or self._back_off is not None)

    # ------------------------------------------------------------------------------ running

    def wakeable(self) -> None:
        """Let `call_soon_threadsafe` end a wait; for wires whose other end is another thread."""
        if self._wake_fd < 0:
            self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self.add_reader(self._wake_fd, self._woken)

    def _woken(self) -> None:
        try:
            os.eventfd_read(self._wake_fd)
        except BlockingIOError:
            pass

    def run_until(self, done: Callable[[], bool], end: float | None = None) -> bool:
        """Serve until `done()`, asked after every event: True; or until the time `end` of this loop's clock: False.

        What is there already is served in any case.
        """
        ready, timers, time = self._ready, self._timers, self.time
        readers, writers = self._readers, self._writers
        if self._pollers:
            self.hurry()
        spins = self.spin_s > 0.0 and self._back_off is None  # a back-off has eager looks of its own
        looked = False  # at the descriptors: once in any case, so that a caller without time can have them served
        stuck_at = 0.0  # when what was put off is called all the same; 0 while something happens
        self.depth += 1
        try:
            while True:
                for _ in range(len(ready) + _FOLLOWERS):
                    if not ready:
                        break
                    callback, args = ready.popleft()
                    try:
                        callback(*args)
                    except Exception:
                        _report(callback)
                callback, args = _nothing, ()  # or the last one would live through the sleep, with a payload perhaps
                if timers and timers[0][0] <= time():
                    self._fire_timers()
                worked = self._poll() if self._pollers else False
                if done():
                    return True
                if looked and end is not None and time() >= end:
                    return False
                self._fresh.clear()
                busy = bool(ready) or worked
                try:
                    events: list[tuple[int, int]] = []
                    if spins and not busy:
                        events, busy = self._spin()
                    if not events:
                        timeout = 0.0 if busy or ready else _LONGEST_WAIT_S
                        if end is not None or timers:
                            now = time()
                            if end is not None:
                                timeout = min(timeout, max(0.0, end - now))
                            if timers:
                                timeout = min(timeout, max(0.0, timers[0][0] - now))
                        if self._put_off and not busy and not ready:
                            stuck_at = stuck_at or time() + _STUCK_S
                            timeout = min(timeout, _STUCK_S)
                        else:
                            stuck_at = 0.0
                        events = self._look(timeout)
                except ValueError:
                    if self._epoll.closed:  # by a callback: nothing can happen any more
                        return done()
                    raise
                looked = True
                if stuck_at and (events or ready or time() >= stuck_at):
                    stuck_at = 0.0
                    if not events and not ready:
                        ready.append((self._put_off.pop(), (True,)))
                for fd, mask in events:
                    if fd in self._fresh:
                        continue
                    try:
                        if mask & _READ:
                            callback = readers.get(fd, _nothing)
                            callback()
                        if mask & _WRITABLE:
                            callback = writers.get(fd, _nothing)
                            callback()
                    except Exception:
                        _report(callback)
        finally:
            self.depth -= 1
            if self._put_off:
                self.resume()

    def _spin(self) -> tuple[list[tuple[int, int]], bool]:
        """Look again and again for `spin_s`, until something is there. Returns also whether a poller did something."""
        poll, time = self._epoll.poll, self.time
        events = poll(0)
        if events:
            return events, False
        now = time()
        end = now + self.spin_s
        while not events and not self._ready and now < end:
            if self._pollers and self._poll():
                return [], True
            if now >= self._yield_from:  # the one that is to answer may wait for this very core
                before = now
                os.sched_yield()
                now = time()
                if now - before > _TAKEN_S:  # somebody who computes has taken it: don't offer it again soon
                    self._yield_from = now + _KEPT_S
            events = poll(0)
            now = time()
        return events, False

    def _look(self, timeout: float) -> list[tuple[int, int]]:
        """Look once, and sleep until something is there or the time is over."""
        if timeout and self._arms and not self._arm():
            return []
        if timeout and self._back_off is not None:
            timeout = min(timeout, self._back_off.pause_s())
            if 0.0 < timeout < _EPOLL_STEP_S:
                time.sleep(timeout)
                timeout = 0.0
        if not timeout and not self._readers and not self._writers:
            return []
        return self._epoll.poll(timeout)

    def _arm(self) -> bool:
        """Whether the loop may sleep."""
        for arm in list(self._arms.values()):
            try:
                if not arm():
                    return False
            except Exception:
                _report(arm)
        return True

    def _poll(self) -> bool:
        worked = False
        for progress in list(self._pollers):
            try:
                worked = progress() or worked
            except Exception:
                _report(progress)
        if worked:
            self.hurry()
        return worked

    def _fire_timers(self) -> None:
        now = self.time()
        while self._timers and self._timers[0][0] <= now:
            timer = heapq.heappop(self._timers)[2]
            callback, timer.callback = timer.callback, None
            if callback is None:
                self._n_cancelled -= 1
                continue
            try:
                callback(*timer.args)
            except Exception:
                _report(callback)

    def _timer_cancelled(self) -> None:
        """Throw cancelled timers out when most are: they'd stay until their time, with all they hold."""
        self._n_cancelled += 1
        if self._n_cancelled > _MAX_CANCELLED and 2 * self._n_cancelled > len(self._timers):
            self._timers[:] = [entry for entry in self._timers if entry[2].callback is not None]
            heapq.heapify(self._timers)
            self._n_cancelled = 0

    def close(self) -> None:
        """Release the descriptors."""
        with self._wake_lock:
            if self._wake_fd >= 0:
                os.close(self._wake_fd)
                self._wake_fd = -1
        self._epoll.close()


def _nothing() -> None:
    return


def _report(callback: Callable[..., Any]) -> None:
    """As asyncio does: an error of one callback must not end what others wait for."""
    import logging

    logging.getLogger(__name__).exception("callback %r failed", callback)
