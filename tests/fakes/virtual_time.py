"""An asyncio loop whose clock jumps to the next timer when nothing else is to do: minutes of protocol in no time."""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Callable, Coroutine
from typing import Any
from unittest import mock

from miles_hpc.core.deadline import Deadline

__all__ = ["run_virtually"]


#: What one round of the loop takes: a clock that stood still would let a wait for less than its resolution spin.
_INSTANT_S = 1e-8


class _Selector(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    """Looks at real descriptors without waiting; what would have been waited for is added to the clock."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        events = super().select(0)
        if not events and timeout is None:
            raise RuntimeError("nothing is left to do and no timer is set: everybody waits for ever")
        self.now += _INSTANT_S if events or timeout is None else max(timeout, _INSTANT_S)
        return events


class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._clock = _Selector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """At once and here: in a thread it would take real time, during which the clock would jump far ahead."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future


def run_virtually(main: Coroutine[Any, Any, Any]) -> Any:
    """As asyncio.run; `time.monotonic` and new Deadlines go by the loop's clock meanwhile."""
    loop = _VirtualLoop()
    defaults = Deadline.__init__.__kwdefaults__
    with mock.patch.object(time, "monotonic", loop.time), mock.patch.dict(defaults, {"clock": loop.time}):
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            return runner.run(main)
