"""The event loop of the blocking face: timers, callbacks, descriptors, waits within one another, other threads."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import socket
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import pytest

from miles_hpc.control import plain_loop
from miles_hpc.control.plain_loop import PlainLoop

WAIT_S = 60.0


@pytest.fixture(params=[0.0, 0.0002], ids=["sleeping", "spinning"])
def loop(request: pytest.FixtureRequest) -> Iterator[PlainLoop]:
    loop = PlainLoop(spin_s=request.param)
    yield loop
    loop.close()


@contextmanager
def connected() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    with ours, theirs:
        yield ours, theirs


def turn(loop: PlainLoop, n: int = 1) -> None:
    """Let everything happen that can, without waiting."""
    for _ in range(n):
        loop.run_until(lambda: False, loop.time())


# ------------------------------------------------------------------------------------------------ timers


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


def test_timers_of_one_time_run_in_the_order_of_their_making(loop: PlainLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "time", lambda: 5.0)
    ran: list[int] = []
    for n in range(100):
        loop.call_later(0.0, ran.append, n)
    loop.run_until(lambda: True)
    assert ran == list(range(100))


def test_a_timer_runs_no_earlier_than_it_should(loop: PlainLoop) -> None:
    late: list[float] = []
    for delay_s in (0.0, 0.001, 0.0104, 0.03):
        at = loop.time() + delay_s
        loop.call_later(delay_s, lambda at=at: late.append(loop.time() - at))
    assert loop.run_until(lambda: len(late) == 4, loop.time() + WAIT_S)
    assert min(late) >= 0.0


def test_a_timer_that_makes_timers_does_not_keep_others_waiting(loop: PlainLoop) -> None:
    ran: list[str] = []

    def again() -> None:
        loop.call_later(0.0, again)

    again()
    loop.call_later(0.01, ran.append, "timer")
    loop.call_soon(ran.append, "callback")
    assert loop.run_until(lambda: len(ran) == 2, loop.time() + WAIT_S)


# ------------------------------------------------------------------------------------------------ run_until


def test_it_ends_by_its_condition_or_by_its_time(loop: PlainLoop) -> None:
    assert loop.run_until(lambda: True, loop.time() - 1)  # the condition comes first
    start = loop.time()
    assert not loop.run_until(lambda: False, start - 1)
    assert not loop.run_until(lambda: False, start + 0.02)
    assert loop.time() >= start + 0.02


def test_what_is_ready_runs_before_the_time_is_over(loop: PlainLoop) -> None:
    ran: list[int] = []
    loop.call_soon(ran.append, 1)
    assert not loop.run_until(lambda: False, loop.time() - 1)
    assert ran == [1]


def test_a_callback_that_plans_itself_does_not_keep_the_end_waiting(loop: PlainLoop) -> None:
    n = 0

    def again() -> None:
        nonlocal n
        n += 1
        loop.call_soon(again)

    with connected() as (ours, theirs):
        read: list[bytes] = []
        loop.add_reader(ours.fileno(), lambda: read.append(ours.recv(10)))
        again()
        theirs.send(b"x")
        assert loop.run_until(lambda: bool(read), loop.time() + WAIT_S)
        assert not loop.run_until(lambda: False, loop.time() + 0.02)
        loop.remove_reader(ours.fileno())
    assert n > 3


@pytest.mark.parametrize("spin_s", [0.0, 0.005])
def test_a_descriptor_that_is_always_ready_does_not_keep_the_end_waiting(spin_s: float) -> None:
    loop = PlainLoop(spin_s=spin_s)
    with connected() as (ours, theirs):
        calls: list[str] = []
        loop.add_reader(ours.fileno(), lambda: calls.append("reader"))
        theirs.send(b"x")
        loop.call_later(0.01, calls.append, "timer")
        limit = loop.time() + WAIT_S
        assert not loop.run_until(lambda: loop.time() > limit, loop.time() + 0.02)
        assert "timer" in calls
        assert calls.count("reader") > 1
        loop.remove_reader(ours.fileno())
    loop.close()


def test_an_error_in_a_callback_is_logged_and_survived(loop: PlainLoop, caplog: pytest.LogCaptureFixture) -> None:
    ran: list[str] = []

    def broken() -> None:
        raise LookupError("of a callback")

    with connected() as (ours, theirs):
        theirs.send(b"x")
        loop.call_soon(broken)
        loop.call_soon(ran.append, "callback")
        loop.call_later(0.0, broken)
        loop.call_later(0.0, ran.append, "timer")
        loop.add_reader(ours.fileno(), broken)
        loop.add_writer(theirs.fileno(), lambda: ran.append("writer"))
        assert loop.run_until(lambda: {"callback", "timer", "writer"} <= set(ran), loop.time() + WAIT_S)
        loop.remove_reader(ours.fileno())
        loop.remove_writer(theirs.fileno())
    assert sum(record.exc_info is not None for record in caplog.records) >= 3
    assert loop.depth == 0


def test_an_error_in_the_condition_is_the_callers(loop: PlainLoop) -> None:
    def broken() -> bool:
        raise LookupError

    with pytest.raises(LookupError):
        loop.run_until(broken)
    assert loop.depth == 0
    assert loop.run_until(lambda: True)


def test_a_keyboard_interrupt_gets_out_and_loses_nothing(loop: PlainLoop) -> None:
    ran: list[int] = []

    def interrupted() -> None:
        raise KeyboardInterrupt

    loop.call_soon(interrupted)
    loop.call_soon(ran.append, 1)
    with pytest.raises(KeyboardInterrupt):
        loop.run_until(lambda: False)
    assert loop.run_until(lambda: ran == [1], loop.time() + WAIT_S)
    assert loop.depth == 0


def test_what_a_callback_held_is_free_while_the_loop_sleeps(loop: PlainLoop) -> None:
    class Payload:
        pass

    alive: list[bool] = []
    payload = Payload()
    seen = weakref.ref(payload)
    loop.call_soon(lambda held: None, payload)
    del payload

    def asked() -> bool:
        gc.collect()
        alive.append(seen() is not None)
        return True

    loop.run_until(asked)
    assert alive == [False]


# ------------------------------------------------------------------------------------------------ within one another


def test_a_wait_within_a_callback_serves_everything(loop: PlainLoop) -> None:
    ran: list[str] = []

    def outer() -> None:
        ran.append("outer begins")
        loop.call_soon(ran.append, "planned within")
        loop.call_later(0.001, ran.append, "timer within")
        assert loop.run_until(lambda: len(ran) == 4, loop.time() + WAIT_S)
        ran.append("outer ends")

    loop.call_soon(outer)
    loop.call_soon(ran.append, "planned before")
    assert loop.run_until(lambda: len(ran) == 5, loop.time() + WAIT_S)
    assert ran == ["outer begins", "planned before", "planned within", "timer within", "outer ends"]


def test_waits_within_waits_end_inside_out_and_in_time(loop: PlainLoop) -> None:
    ended: list[int] = []

    def wait(n: int) -> None:
        if n < 5:
            loop.call_soon(wait, n + 1)
        assert not loop.run_until(lambda: False, loop.time() + 0.01)
        ended.append(n)
        assert loop.depth == n

    loop.call_soon(wait, 1)
    assert loop.run_until(lambda: len(ended) == 5, loop.time() + WAIT_S)
    assert ended == [5, 4, 3, 2, 1]
    assert loop.depth == 0


def test_what_was_put_off_runs_when_waits_have_ended(loop: PlainLoop) -> None:
    ran: list[tuple[str, bool, int]] = []

    def put_off(name: str) -> None:
        def callback(stuck: bool) -> None:
            ran.append((name, stuck, loop.depth))
            loop.resume()

        loop.put_off(callback, 1)

    def deep() -> None:
        for name in "abc":
            put_off(name)
        loop.call_later(0.001, lambda: None)
        assert not loop.run_until(lambda: False, loop.time() + 0.01)
        assert not ran

    loop.call_soon(deep)
    assert loop.run_until(lambda: len(ran) == 3, loop.time() + WAIT_S)
    assert ran == [("a", False, 1), ("b", False, 1), ("c", False, 1)]


def test_what_was_put_off_runs_when_nothing_else_can_happen(loop: PlainLoop) -> None:
    ran: list[tuple[str, bool]] = []

    def deep() -> None:
        for name in "ab":
            loop.put_off(lambda stuck, name=name: ran.append((name, stuck)), 1)  # type: ignore[misc]
        assert loop.run_until(lambda: bool(ran), loop.time() + WAIT_S)  # waits for what was put off
        assert ran == [("b", True)]  # the newest: the innermost wait is the newest as well

    loop.call_soon(deep)
    assert loop.run_until(lambda: len(ran) == 2, loop.time() + WAIT_S)
    assert ran == [("b", True), ("a", False)]


def test_a_signals_handler_ends_an_idle_wait(loop: PlainLoop) -> None:
    """It runs in the middle of the sleep and ends it not: the condition is asked again soon all the same."""
    stop: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, _: stop.append(number))
    ours, theirs = socket.socketpair()
    try:
        with ours, theirs:
            loop.add_reader(ours.fileno(), int)
            thread = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR2))
            thread.start()
            assert loop.run_until(lambda: bool(stop), loop.time() + WAIT_S)
            thread.join()
            loop.remove_reader(ours.fileno())
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_a_loop_that_is_closed_within_a_wait_ends_it(loop: PlainLoop) -> None:
    inner = PlainLoop()
    inner.call_soon(inner.close)
    assert not inner.run_until(lambda: False)
    inner.close()


# ------------------------------------------------------------------------------------------------ descriptors


def test_readers_and_writers(loop: PlainLoop) -> None:
    with connected() as (ours, theirs):
        got: list[bytes] = []
        written: list[int] = []
        assert not loop.busy
        loop.add_reader(ours.fileno(), lambda: got.append(ours.recv(10)))
        loop.add_writer(ours.fileno(), lambda: written.append(1))
        assert loop.busy
        theirs.send(b"x")
        turn(loop, 3)
        assert got == [b"x"]
        assert len(written) == 3
        loop.remove_writer(ours.fileno())
        theirs.send(b"y")
        turn(loop)
        assert got == [b"x", b"y"]
        assert len(written) == 3
        loop.remove_reader(ours.fileno())
        loop.remove_reader(ours.fileno())  # fine for one that isn't there
        theirs.send(b"z")
        turn(loop)
        assert len(got) == 2
        assert not loop.busy


def test_a_reader_hears_of_the_end(loop: PlainLoop) -> None:
    with connected() as (ours, theirs):
        got: list[bytes] = []
        loop.add_reader(ours.fileno(), lambda: got.append(ours.recv(10)))
        theirs.close()
        assert loop.run_until(lambda: bool(got), loop.time() + WAIT_S)
        assert got[0] == b""
        loop.remove_reader(ours.fileno())


def test_a_descriptor_that_is_used_again_after_a_close(loop: PlainLoop) -> None:
    """The callback of one connection closes another, whose event waits in the same batch, and opens a new one."""
    for _ in range(20):
        with connected() as (first, first_peer):
            second, second_peer = socket.socketpair()
            second.setblocking(False)
            number = second.fileno()
            new: list[socket.socket] = []
            calls: list[str] = []

            def swap(
                first: socket.socket = first,
                second: socket.socket = second,
                peer: socket.socket = second_peer,
                new: list[socket.socket] = new,
                calls: list[str] = calls,
            ) -> None:
                first.recv(10)
                if new:
                    return
                loop.remove_reader(second.fileno())
                second.close()
                peer.close()
                new.extend(socket.socketpair())
                for one in new:
                    one.setblocking(False)
                loop.add_reader(new[0].fileno(), lambda: calls.append("new" if _has_input(new[0]) else "stale"))

            loop.add_reader(first.fileno(), swap)
            loop.add_reader(number, lambda calls=calls: calls.append("old"))  # type: ignore[misc]
            first_peer.send(b"x")
            second_peer.send(b"y")
            assert loop.run_until(lambda new=new: bool(new), loop.time() + WAIT_S)  # type: ignore[misc]
            turn(loop, 2)
            assert "stale" not in calls
            assert calls in ([], ["old"])  # by the order in which the kernel told
            new[1].send(b"z")
            assert loop.run_until(lambda calls=calls: calls[-1:] == ["new"], loop.time() + WAIT_S)  # type: ignore[misc]
            loop.remove_reader(new[0].fileno())
            loop.remove_reader(first.fileno())
            for one in new:
                one.close()


def _has_input(sock: socket.socket) -> bool:
    try:
        return bool(sock.recv(10))
    except BlockingIOError:
        return False


def test_a_reader_that_removes_its_descriptor_is_not_called_as_its_writer(loop: PlainLoop) -> None:
    with connected() as (ours, theirs):
        calls: list[str] = []

        def read() -> None:
            calls.append("read")
            loop.remove_reader(ours.fileno())
            loop.remove_writer(ours.fileno())

        loop.add_reader(ours.fileno(), read)
        loop.add_writer(ours.fileno(), lambda: calls.append("write"))
        theirs.send(b"x")
        turn(loop, 3)
        assert calls == ["read"]


# ------------------------------------------------------------------------------------------------ other threads


def test_another_thread_ends_a_sleep() -> None:
    ran: list[int] = []
    reached = threading.Event()
    loops: list[PlainLoop] = []

    def sleep() -> None:
        loop = PlainLoop()
        loop.wakeable()
        loop.wakeable()  # twice is once
        loops.append(loop)
        reached.set()
        assert not loop.busy
        assert loop.run_until(lambda: len(ran) == 2000)
        loop.close()

    thread = threading.Thread(target=sleep)
    thread.start()
    assert reached.wait(WAIT_S)
    for n in range(2000):
        loops[0].call_soon_threadsafe(ran.append, n)
        if n % 100 == 0:
            threading.Event().wait(0.001)
    thread.join(WAIT_S)
    assert not thread.is_alive()
    assert ran == list(range(2000))


def test_calls_from_other_threads_while_it_closes_write_nowhere() -> None:
    """The descriptor's number may belong to somebody else by then."""
    for _ in range(30):
        loop = PlainLoop()
        loop.wakeable()
        stop = threading.Event()

        def call(loop: PlainLoop = loop, stop: threading.Event = stop) -> None:
            while not stop.is_set():
                loop.call_soon_threadsafe(int)

        threads = [threading.Thread(target=call) for _ in range(2)]
        for thread in threads:
            thread.start()
        loop.close()
        read_end, write_end = os.pipe2(os.O_NONBLOCK)
        events = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(3)]
        stop.set()
        for thread in threads:
            thread.join(WAIT_S)
        for event in events:
            with pytest.raises(BlockingIOError):
                os.eventfd_read(event)
            os.close(event)
        os.close(read_end)
        os.close(write_end)


def test_a_spinning_loop_sees_events_timers_and_threads() -> None:
    loop = PlainLoop(spin_s=0.005)
    loop.wakeable()
    ran: list[Any] = []
    with connected() as (ours, theirs):
        loop.add_reader(ours.fileno(), lambda: ran.append(ours.recv(10)))
        loop.call_later(0.002, theirs.send, b"by a timer")
        assert loop.run_until(lambda: bool(ran), loop.time() + WAIT_S)
        thread = threading.Timer(0.002, loop.call_soon_threadsafe, (ran.append, "by a thread"))
        thread.start()
        assert loop.run_until(lambda: len(ran) == 2, loop.time() + WAIT_S)
        thread.join()
        loop.remove_reader(ours.fileno())
    assert ran == [b"by a timer", "by a thread"]
    loop.close()


@pytest.mark.parametrize(("away_s", "yields"), [(0.0, range(3, 100_000)), (0.002, range(1, 2))])
def test_a_spin_gives_the_core_away_unless_somebody_computes_on_it(
    away_s: float, yields: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer on the same core gives it back soon; what computes takes its whole slice, again and again."""
    calls: list[float] = []
    clock = itertools.count(step=5)  # microseconds, so that nobody else's work on this machine counts
    away_us = 0

    def sched_yield() -> None:
        nonlocal away_us
        calls.append(away_s)
        away_us += round(away_s * 1e6)

    monkeypatch.setattr(plain_loop.os, "sched_yield", sched_yield)
    loop = PlainLoop(spin_s=0.01)
    loop.time = lambda: 1.0 + (next(clock) + away_us) * 1e-6  # type: ignore[method-assign]
    for _ in range(3):
        assert not loop.run_until(lambda: False, loop.time() + 0.011)
    assert len(calls) in yields
    loop.close()


def test_what_callbacks_plan_runs_before_the_next_look_but_does_not_keep_it_off(loop: PlainLoop) -> None:
    ours, theirs = socket.socketpair()
    ran: list[str] = []

    def again() -> None:
        ran.append("again")
        loop.call_soon(again)

    with ours, theirs:
        theirs.send(b"x")
        loop.add_reader(ours.fileno(), lambda: ran.append("reader"))
        loop.call_soon(again)
        assert loop.run_until(lambda: "reader" in ran, loop.time() + WAIT_S)
        assert ran[: ran.index("reader")] == ["again"] * 2
        loop.remove_reader(ours.fileno())


def test_what_a_poller_does_while_the_loop_spins_ends_the_wait() -> None:
    loop = PlainLoop(spin_s=30.0)
    looks: list[int] = []

    def progress() -> bool:
        looks.append(1)
        return len(looks) == 5

    loop.add_poller(progress)
    assert loop.run_until(lambda: len(looks) >= 5, loop.time() + 60.0)
    assert len(looks) < 10  # and doesn't sleep, nor spin on
    loop.close()


@pytest.mark.parametrize("spin_s", [0.0, 0.001])
def test_the_loop_arms_before_it_sleeps_and_not_before_it_looks(spin_s: float) -> None:
    """The first time something is there already; then the descriptor is watched, and tells."""
    loop = PlainLoop(spin_s=spin_s)
    told: list[str] = []
    reader, writer = os.pipe()

    def arm() -> bool:
        told.append("arm")
        if len(told) == 1:
            return False
        loop.add_reader(reader, lambda: told.append("woken"))
        os.write(writer, b"x")
        return True

    loop.add_poller(lambda: False, arm=arm)
    assert loop.run_until(lambda: True)
    assert told == []
    assert loop.run_until(lambda: "woken" in told, loop.time() + 60.0)
    assert told[:2] == ["arm", "arm"]
    loop.remove_poller(loop._pollers.copy().popitem()[0])
    loop.remove_reader(reader)
    assert not loop._arms
    loop.close()
    os.close(reader)
    os.close(writer)
