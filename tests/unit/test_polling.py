"""Polling on both loops: what a poller is asked, and when the loop sleeps."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Callable

import pytest

from miles_hpc.control.plain_loop import PlainLoop
from miles_hpc.control.polling import EAGER_LOOKS, AsyncPolling, BackOff, polling_of

WAIT_S = 60.0


def test_back_off_yields_and_then_sleeps_longer_and_longer_up_to_the_bound() -> None:
    back_off = BackOff(0.002)
    assert [back_off.pause_s() for _ in range(EAGER_LOOKS)] == [0.0] * EAGER_LOOKS
    sleeps = [back_off.pause_s() for _ in range(40)]
    assert all(0 < a <= b <= 1.3 * a for a, b in itertools.pairwise(sleeps))
    assert sleeps[0] < 1e-4 and sleeps[-1] == 0.002
    back_off.reset()
    assert back_off.pause_s() == 0.0
    never = BackOff(0.0)
    assert {never.pause_s() for _ in range(EAGER_LOOKS + 5)} == {0.0}


class Source:
    """Counts the looks; does something at those of `works`."""

    def __init__(self, works: Callable[[int], bool] = lambda n: False) -> None:
        self.looks = 0
        self._works = works

    def progress(self) -> bool:
        self.looks += 1
        return self._works(self.looks)


@pytest.fixture
def loop() -> PlainLoop:
    return PlainLoop()


def test_a_wait_sees_what_a_poller_did(loop: PlainLoop) -> None:
    seen: list[int] = []
    source = Source(lambda n: n == 2 * EAGER_LOOKS and not seen.append(n))
    loop.add_poller(source.progress, max_sleep_s=0.002)
    assert loop.busy
    assert loop.run_until(lambda: bool(seen), loop.time() + WAIT_S)
    loop.remove_poller(source.progress)
    loop.remove_poller(source.progress)
    assert not loop.busy
    looks = source.looks
    assert not loop.run_until(lambda: False, loop.time() + 0.01)
    assert source.looks == looks


def test_a_wait_ends_in_time_though_a_poller_always_works(loop: PlainLoop) -> None:
    loop.add_poller(lambda: True, max_sleep_s=0.002)
    assert not loop.run_until(lambda: False, loop.time() + 0.05)


def test_an_idle_poller_lets_the_loop_sleep(loop: PlainLoop) -> None:
    source = Source()
    loop.add_poller(source.progress, max_sleep_s=0.01)
    assert not loop.run_until(lambda: False, loop.time() + 0.5)
    assert EAGER_LOOKS < source.looks < EAGER_LOOKS + 100  # 50 sleeps of 10 ms and the short ones before


def test_a_poller_with_a_descriptor_does_not_bound_sleeps(loop: PlainLoop) -> None:
    source = Source()
    loop.add_poller(source.progress)
    assert not loop.busy
    assert not loop.run_until(lambda: False, loop.time() + 0.2)
    assert source.looks <= 3
    spinning = PlainLoop(spin_s=0.05)
    spinning.add_poller(source.progress)
    for _ in range(50):  # a machine that is busy elsewhere may leave no time for looks
        before = source.looks
        assert not spinning.run_until(lambda: False, spinning.time() + 0.2)
        if source.looks > before + 20:
            return
    raise AssertionError(f"{source.looks} looks: expected more than 20 while it spins")


def test_descriptors_and_timers_wake_a_loop_that_polls(loop: PlainLoop) -> None:
    read, write = os.pipe()
    order: list[str] = []

    def readable() -> None:
        os.read(read, 1)
        order.append("read")

    loop.add_poller(lambda: False, max_sleep_s=5.0)
    loop.add_reader(read, readable)
    loop.call_later(0.2, os.write, write, b"x")
    start = time.monotonic()
    assert loop.run_until(lambda: bool(order), loop.time() + WAIT_S)
    assert time.monotonic() - start >= 0.2
    loop.remove_reader(read)
    os.close(read)
    os.close(write)
    loop.close()


def test_an_error_of_a_poller_is_logged_and_survived(loop: PlainLoop, caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> bool:
        raise RuntimeError("no such rank")

    loop.add_poller(broken, max_sleep_s=0.01)
    assert not loop.run_until(lambda: False, loop.time() + 0.02)
    assert "no such rank" in caplog.text


def test_polling_on_asyncio() -> None:
    async def main() -> None:
        polling = polling_of(asyncio.get_running_loop())
        assert isinstance(polling, AsyncPolling)
        done = asyncio.Event()
        source = Source(lambda n: n == EAGER_LOOKS + 20 and not done.set())
        polling.add_poller(source.progress, max_sleep_s=0.002)
        await asyncio.wait_for(done.wait(), WAIT_S)
        before = source.looks
        await asyncio.sleep(0.5)
        assert 10 < source.looks - before < EAGER_LOOKS + 400
        polling.hurry()
        before = source.looks
        while source.looks < before + EAGER_LOOKS:  # without a sleep in between: a round of the loop each
            await asyncio.sleep(0)
        polling.remove_poller(source.progress)
        before = source.looks
        await asyncio.sleep(0.05)
        assert source.looks == before

    asyncio.run(main())
    assert polling_of(loop := PlainLoop()) is loop
