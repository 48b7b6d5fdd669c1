"""Streamed replies, blocking face: both ends in one thread and on one loop, for every kind."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from miles_hpc.control.exchange import STREAM_WINDOW
from miles_hpc.core.errors import DeadlineExpired, PeerLost, RemoteError
from miles_hpc.core.messages import Ack, Heartbeat, Message
from miles_hpc.core.transport import BlockingEndpoint
from tests.conformance.transport_kinds import WAIT_S, numbered, plain_echo, plain_pair


def _item(i: int) -> Any:
    return numbered(i), [bytes([i % 256]) * i]


def _generated(n: int) -> Iterator[Any]:
    for i in range(n):
        yield _item(i)


SOURCES: dict[str, Callable[[int], Any]] = {
    "generator": _generated,
    "list iterator": lambda n: iter([_item(i) for i in range(n)]),
    "map": lambda n: map(_item, range(n)),
}


class Producer:
    """A stream that tells how far it is, endless unless `last` is given."""

    def __init__(self, last: int = 1 << 30) -> None:
        self.made = 0
        self.stopped = 0
        self.last = last
        self.alive: list[weakref.ref[Any]] = []

    def __call__(self, endpoint: BlockingEndpoint, message: Message, payload: memoryview) -> Iterator[Message]:
        items = self._items()
        self.alive.append(weakref.ref(items))
        return items

    def _items(self) -> Iterator[Message]:
        try:
            while self.made < self.last:
                self.made += 1
                yield numbered(self.made - 1)
            raise ValueError("no more")
        finally:
            self.stopped += 1

    def gone(self) -> bool:
        gc.collect()
        return self.stopped == len(self.alive) and all(ref() is None for ref in self.alive)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("n", [0, 1, STREAM_WINDOW, 5 * STREAM_WINDOW + 3])
def test_items_arrive_in_order(kind: str, source: str, n: int) -> None:
    def handler(endpoint: BlockingEndpoint, message: Message, payload: memoryview) -> Any:
        return SOURCES[source](n)

    with plain_pair(kind, handler, handler) as (dialer, accepted, _, _):
        for endpoint in (dialer, accepted):
            with endpoint.stream(Heartbeat(), deadline_s=WAIT_S) as items:
                got = [(item.message, bytes(item.payload)) for item in items]
            assert got == [(numbered(i), bytes([i % 256]) * i) for i in range(n)]


def test_items_of_any_size(kind: str) -> None:
    sizes = [0, 3 << 20, 10, 100_000, 1, 1 << 20, 20_000] * 4

    def handler(endpoint: BlockingEndpoint, message: Message, payload: memoryview) -> Iterator[Any]:
        yield None
        for n in sizes:
            yield numbered(n), [bytes(n)]

    with plain_pair(kind, handler) as (dialer, _, _, _):
        with dialer.stream(Heartbeat(), deadline_s=WAIT_S) as items:
            got = [(item.message, len(item.payload)) for item in items]
        assert got == [(Ack(), 0), *((numbered(n), n) for n in sizes)]


def test_streams_within_streams_and_calls_between(kind: str) -> None:
    def handler(endpoint: BlockingEndpoint, message: Message, payload: memoryview) -> Any:
        return _generated(40) if isinstance(message, Heartbeat) else message

    with plain_pair(kind, handler) as (dialer, _, _, _):
        with dialer.stream(Heartbeat(), deadline_s=WAIT_S) as one, dialer.stream(Heartbeat(), deadline_s=WAIT_S) as two:
            for n, (left, right) in enumerate(zip(one, two, strict=True)):
                assert left.message == right.message == numbered(n)
                assert dialer.call(numbered(n), deadline_s=WAIT_S).message == numbered(n)
            assert n == 39


@pytest.mark.parametrize("n", [0, 1, 3 * STREAM_WINDOW])
def test_an_error_comes_after_the_items_before_it(kind: str, n: int) -> None:
    producer = Producer(last=n)
    with plain_pair(kind, producer) as (dialer, _, _, _):
        got: list[Message] = []
        with pytest.raises(RemoteError, match="no more") as caught:
            with dialer.stream(Heartbeat(), deadline_s=WAIT_S) as items:
                for item in items:
                    got.append(item.message)
        assert caught.value.kind == "ValueError"
        assert got == [numbered(i) for i in range(n)]
        assert producer.stopped == 1


def test_the_wrong_kind_of_question_is_an_error(kind: str) -> None:
    def handler(endpoint: BlockingEndpoint, message: Message, payload: memoryview) -> Any:
        return _generated(3) if isinstance(message, Heartbeat) else message

    with plain_pair(kind, handler) as (dialer, _, _, _):
        with pytest.raises(RemoteError, match=r"answer is a stream; ask with stream\(\)"):
            dialer.call(Heartbeat(), deadline_s=WAIT_S)
        with pytest.raises(RemoteError, match=r"answer isn't a stream; ask with call\(\)"):
            with dialer.stream(numbered(1), deadline_s=WAIT_S) as items:
                list(items)
        assert dialer.call(numbered(1), deadline_s=WAIT_S).message == numbered(1)


def test_a_producer_is_at_most_a_window_ahead_of_its_reader(kind: str) -> None:
    producer = Producer()
    with plain_pair(kind, producer) as (dialer, _, _, transport):
        with dialer.stream(Heartbeat(), deadline_s=WAIT_S) as items:
            for read in range(1, 3 * STREAM_WINDOW):
                assert next(items).message == numbered(read - 1)
                transport.serve(lambda: False, deadline_s=0.01 if read % 4 == 0 else 0.0)
                assert producer.made - read <= STREAM_WINDOW
            assert producer.made - read >= STREAM_WINDOW // 2  # but it doesn't wait for each item
        assert transport.serve(producer.gone, deadline_s=WAIT_S)


@pytest.mark.parametrize("after", [0, 1, STREAM_WINDOW, 2 * STREAM_WINDOW])
def test_leaving_early_stops_the_producer_and_frees_it(kind: str, after: int) -> None:
    producer = Producer()
    with plain_pair(kind, producer) as (dialer, _, _, transport):
        for n in range(1, 3):
            producer.made = 0
            with dialer.stream(Heartbeat(), deadline_s=WAIT_S) as items:
                for i in range(after):
                    assert next(items).message == numbered(i)
                if not after:
                    assert transport.serve(lambda: producer.made > 0, deadline_s=WAIT_S)
            assert transport.serve(producer.gone, deadline_s=WAIT_S)
            assert producer.stopped == n
            assert producer.made <= after + STREAM_WINDOW
        assert not dialer.closed


@pytest.mark.parametrize("end", ["leave", "close", "leave within"])
def test_a_generator_that_somebody_holds_is_closed_all_the_same(kind: str, end: str) -> None:
    held: list[Any] = []
    ended: list[str] = []
    within: list[Callable[[], None]] = []

    def endless() -> Iterator[Message]:
        try:
            for n in itertools.count():
                if within and n == 3:
                    within[0]()
                yield Ack()
        finally:
            ended.append("ended")

    def handler(endpoint: BlockingEndpoint, message: Message, payload: memoryview) -> Any:
        held.append(endless())
        return held[-1]

    with plain_pair(kind, handler) as (dialer, _, _, transport):
        context = dialer.stream(Heartbeat(), deadline_s=WAIT_S)
        items = context.__enter__()

        def leave() -> None:
            context.__exit__(None, None, None)
            transport.serve(lambda: False, deadline_s=0.05)

        if end == "leave within":
            within.append(leave)
        next(items)
        if end == "close":
            dialer.close("enough")
        if end != "leave within":
            context.__exit__(None, None, None)
        assert transport.serve(lambda: ended == ["ended"], deadline_s=WAIT_S)


@pytest.mark.parametrize("end", ["leave", "close"])
def test_an_iterator_without_an_end_is_left_alone_when_its_reader_is_gone(kind: str, end: str) -> None:
    """Nothing but its items tells that nobody reads them: it has no `close`."""
    made = itertools.count()

    def handler(endpoint: BlockingEndpoint, message: Message, payload: memoryview) -> Any:
        return map(numbered, made)

    with plain_pair(kind, handler) as (dialer, accepted, _, transport):
        with dialer.stream(Heartbeat(), deadline_s=WAIT_S) as items:
            next(items)
            if end == "close":
                accepted.close("enough")
        transport.serve(lambda: False, deadline_s=0.1)
        assert next(made) <= 2 * STREAM_WINDOW


def test_an_error_of_the_reader_is_its_own(kind: str) -> None:
    producer = Producer()
    with plain_pair(kind, producer) as (dialer, _, _, transport):
        with pytest.raises(LookupError):
            with dialer.stream(Heartbeat(), deadline_s=WAIT_S) as items:
                for _ in items:
                    raise LookupError
        assert transport.serve(producer.gone, deadline_s=WAIT_S)


def test_the_deadline_is_for_the_whole_stream(kind: str) -> None:
    producer = Producer()
    with plain_pair(kind, producer) as (dialer, _, _, transport):
        with pytest.raises(DeadlineExpired, match=r"both: Heartbeat: nothing after \d\.\d s \(limit 0\.4 s\)"):
            with dialer.stream(Heartbeat(), deadline_s=0.4) as items:
                for n, item in enumerate(items):
                    assert item.message == numbered(n)
                    transport.serve(lambda: False, deadline_s=0.005)
        assert n > 0
        assert transport.serve(producer.gone, deadline_s=WAIT_S)
        assert not dialer.closed


@pytest.mark.parametrize("who", ["dialer", "accepted"])
def test_the_end_of_the_endpoint_ends_both_sides_of_a_stream(kind: str, who: str) -> None:
    producer = Producer()
    with plain_pair(kind, producer) as (dialer, accepted, _, transport):
        with pytest.raises(PeerLost, match="enough"):
            with dialer.stream(Heartbeat(), deadline_s=WAIT_S) as items:
                next(items)
                (dialer if who == "dialer" else accepted).close("enough")
                list(items)
        assert transport.serve(producer.gone, deadline_s=WAIT_S)


@pytest.mark.parametrize("end", ["read", "leave", "close"])
def test_a_producer_may_call_while_it_makes_an_item(kind: str, end: str) -> None:
    """The reader reads on, leaves, or closes within that call: the iterator is running then."""
    leave: list[Callable[[], None]] = []

    def server(endpoint: BlockingEndpoint, message: Message, payload: memoryview) -> Iterator[Any]:
        def items() -> Iterator[Any]:
            try:
                for n in range(3 * STREAM_WINDOW):
                    yield endpoint.call(numbered(n), deadline_s=WAIT_S).message
            finally:
                ended.append("ended")

        return items()

    def client(endpoint: BlockingEndpoint, message: Message, payload: memoryview) -> Any:
        if message == numbered(5) and leave:
            leave[0]()
        return plain_echo(endpoint, message, payload)

    ended: list[str] = []
    with plain_pair(kind, server, client) as (dialer, _, _, transport):
        context = dialer.stream(Heartbeat(), deadline_s=WAIT_S)
        items = context.__enter__()
        if end == "read":
            assert [item.message for item in items] == [numbered(n) for n in range(3 * STREAM_WINDOW)]
        elif end == "leave":
            leave.append(lambda: context.__exit__(None, None, None))
        else:
            leave.append(lambda: dialer.close("enough"))
        if end != "read":
            with pytest.raises((DeadlineExpired, PeerLost)):
                for _ in items:
                    pass
        if end == "close":
            context.__exit__(None, None, None)
        assert transport.serve(lambda: ended == ["ended"], deadline_s=WAIT_S)
