"""Deadlines: absolute limits that are made once and passed down, so that nested waits share one budget."""

from __future__ import annotations

import time
from collections.abc import Callable

from miles_hpc.core.errors import DeadlineExpired

__all__ = ["Deadline"]


class Deadline:
    """An absolute time limit on the monotonic clock.

    `what` names what is waited for and appears in the error. `clock` is replaced in tests.
    """

    __slots__ = ("_clock", "_end", "_start", "what")

    def __init__(self, seconds: float, what: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._start = clock()
        self._end = self._start + seconds
        self.what = what

    @property
    def remaining_s(self) -> float:
        """Seconds left, never below zero."""
        return max(0.0, self._end - self._clock())

    @property
    def elapsed_s(self) -> float:
        """Seconds since the deadline was made."""
        return self._clock() - self._start

    @property
    def expired(self) -> bool:
        return self._clock() >= self._end

    def check(self) -> None:
        """Raise DeadlineExpired when no time is left."""
        if self.expired:
            raise self.error()

    def error(self) -> DeadlineExpired:
        """The error to raise on expiry, with the elapsed time in its text."""
        limit = self._end - self._start
        return DeadlineExpired(f"{self.what}: nothing after {self.elapsed_s:.1f} s (limit {limit:.1f} s)")
