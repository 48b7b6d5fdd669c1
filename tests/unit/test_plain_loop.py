"""The event loop of the blocking face: timers."""

from __future__ import annotations

from random import Random

from miles_hpc.control.plain_loop import PlainLoop


def test_timers_run_in_the_order_of_their_times() -> None:
    loop = PlainLoop()
    ran: list[int] = []
    for n in (3, 1, 2, 0):
        loop.call_later(n / 1000, ran.append, n)
    assert loop.run_until(lambda: len(ran) == 4, loop.time() + 60)
    assert ran == [0, 1, 2, 3]
    loop.close()


def test_cancelled_timers_do_not_pile_up() -> None:
    """Each refused connection leaves one behind: kept for their seconds, they'd hold a stranger's flood in memory."""
    loop = PlainLoop()
    kept = [loop.call_later(1000.0, lambda: None) for _ in range(50)]
    for _ in range(10_000):
        loop.call_later(1000.0, lambda: None).cancel()
    assert len(loop._timers) < 300
    assert sum(entry[2].callback is not None for entry in loop._timers) == len(kept)
    loop.close()


def test_throwing_timers_out_loses_none() -> None:
    rng = Random(1)
    loop = PlainLoop()
    ran: list[int] = []
    expected = []
    timers = []
    for n in range(2000):
        timers.append(loop.call_later(rng.random() / 20, ran.append, n))
    for n, timer in enumerate(timers):
        if rng.random() < 0.8:
            timer.cancel()
            timer.cancel()  # twice is once
        else:
            expected.append(n)
    assert loop.run_until(lambda: len(ran) >= len(expected), loop.time() + 60)
    loop.run_until(lambda: False, loop.time() + 0.1)
    assert sorted(ran) == expected
    for timer in timers:
        timer.cancel()  # after it has run: nothing
    assert loop._n_cancelled == 0
    assert not loop._timers
    loop.close()


def test_a_timer_may_cancel_others_while_timers_run() -> None:
    loop = PlainLoop()
    ran: list[int] = []
    later = []

    def cancel_all() -> None:
        ran.append(-1)
        for timer in later:
            timer.cancel()

    loop.call_later(0.0, cancel_all)
    later += [loop.call_later(0.001, ran.append, n) for n in range(1000)]
    loop.run_until(lambda: False, loop.time() + 0.05)
    assert ran == [-1]
    loop.close()
