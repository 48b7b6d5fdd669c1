"""Streamed replies, asyncio face: order, early ends, deadlines, and how far a producer may be ahead."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from miles_hpc.control.exchange import STREAM_WINDOW
from miles_hpc.core.errors import DeadlineExpired, PeerLost, RemoteError
from miles_hpc.core.messages import Ack, Heartbeat, Message
from miles_hpc.core.transport import Endpoint
from tests.conformance.transport_kinds import WAIT_S, numbered, pair, run, until


async def _async_items(n: int) -> AsyncIterator[Any]:
    for i in range(n):
        if i % 5 == 0:
            await asyncio.sleep(0)
        yield numbered(i), [bytes([i % 256]) * i]


def _plain_items(n: int) -> Iterator[Any]:
    return ((numbered(i), [bytes([i % 256]) * i]) for i in range(n))


async def _later(items: Any) -> Any:
    await asyncio.sleep(0.01)
    return items


SOURCES: dict[str, Callable[[int], Any]] = {
    "async generator": _async_items,
    "plain generator": _plain_items,
    "plain iterator": lambda n: iter(list(_plain_items(n))),
    "awaited async generator": lambda n: _later(_async_items(n)),
    "awaited plain generator": lambda n: _later(_plain_items(n)),
}


class Producer:
    """An endless stream that tells how far it is."""

    def __init__(self, *, pause_s: float = 0.0, last: int = 1 << 30) -> None:
        self.made = 0
        self.stopped = asyncio.Event()
        self.pause_s = pause_s
        self.last = last
        self.alive: list[weakref.ref[Any]] = []

    async def __call__(self, endpoint: Endpoint, message: Message, payload: memoryview) -> AsyncIterator[Message]:
        items = self._items()
        self.alive.append(weakref.ref(items))
        return items

    async def _items(self) -> AsyncIterator[Message]:
        try:
            while self.made < self.last:
                if self.pause_s:
                    await asyncio.sleep(self.pause_s)
                self.made += 1
                yield numbered(self.made - 1)
            raise ValueError("no more")
        finally:
            self.stopped.set()

    async def freed(self) -> None:
        """Wait until the generator has ended and is gone."""
        await asyncio.wait_for(self.stopped.wait(), WAIT_S)

        def gone() -> bool:
            gc.collect()
            return all(ref() is None for ref in self.alive)

        await until(gone)


# ------------------------------------------------------------------------------------------------ items


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("n", [0, 1, STREAM_WINDOW, 5 * STREAM_WINDOW + 3])
def test_items_arrive_in_order(kind: str, source: str, n: int) -> None:
    def handler(endpoint: Endpoint, message: Message, payload: memoryview) -> Any:
        return SOURCES[source](n)

    async def main() -> None:
        async with pair(kind, handler, handler) as (dialer, accepted, _):
            for endpoint in (dialer, accepted):
                async with endpoint.stream(Heartbeat(), deadline_s=WAIT_S) as items:
                    got = [(item.message, bytes(item.payload)) async for item in items]
                assert got == [(numbered(i), bytes([i % 256]) * i) for i in range(n)]

    run(main)


def test_items_of_any_size(kind: str) -> None:
    sizes = [0, 3 << 20, 10, 100_000, 1, 1 << 20, 20_000] * 4

    async def handler(endpoint: Endpoint, message: Message, payload: memoryview) -> AsyncIterator[Any]:
        yield None
        for n in sizes:
            yield numbered(n), [bytes(n)]

    async def main() -> None:
        async with pair(kind, lambda *args: handler(*args)) as (dialer, _, _):
            async with dialer.stream(Heartbeat(), deadline_s=WAIT_S) as items:
                got = [(item.message, len(item.payload)) async for item in items]
            assert got == [(Ack(), 0), *((numbered(n), n) for n in sizes)]

    run(main)


def test_streams_and_calls_share_an_endpoint(kind: str) -> None:
    async def handler(endpoint: Endpoint, message: Message, payload: memoryview) -> Any:
        return _async_items(40) if isinstance(message, Heartbeat) else message

    async def main() -> None:
        async with pair(kind, handler, handler) as (dialer, accepted, _):

            async def stream(endpoint: Endpoint) -> None:
                async with endpoint.stream(Heartbeat(), deadline_s=WAIT_S) as items:
                    assert [item.message async for item in items] == [numbered(i) for i in range(40)]

            async def call(endpoint: Endpoint, n: int) -> None:
                assert (await endpoint.call(numbered(n), deadline_s=WAIT_S)).message == numbered(n)

            both = (dialer, accepted)
            await asyncio.gather(*(stream(e) for e in both * 4), *(call(e, n) for e in both for n in range(50)))

    run(main)


@pytest.mark.parametrize("n", [0, 1, 3 * STREAM_WINDOW])
def test_an_error_comes_after_the_items_before_it(kind: str, n: int) -> None:
    async def main() -> None:
        producer = Producer(last=n)
        async with pair(kind, producer) as (dialer, _, _):
            got: list[Message] = []
            with pytest.raises(RemoteError, match="no more") as caught:
                async with dialer.stream(Heartbeat(), deadline_s=WAIT_S) as items:
                    async for item in items:
                        got.append(item.message)
            assert caught.value.kind == "ValueError"
            assert got == [numbered(i) for i in range(n)]
            assert producer.stopped.is_set()

    run(main)


def test_the_wrong_kind_of_question_is_an_error(kind: str) -> None:
    async def handler(endpoint: Endpoint, message: Message, payload: memoryview) -> Any:
        return _async_items(3) if isinstance(message, Heartbeat) else message

    async def main() -> None:
        async with pair(kind, handler) as (dialer, _, _):
            with pytest.raises(RemoteError, match=r"answer is a stream; ask with stream\(\)"):
                await dialer.call(Heartbeat(), deadline_s=WAIT_S)
            with pytest.raises(RemoteError, match=r"answer isn't a stream; ask with call\(\)"):
                async with dialer.stream(numbered(1), deadline_s=WAIT_S) as items:
                    async for _ in items:
                        raise AssertionError("an item")
            assert (await dialer.call(numbered(1), deadline_s=WAIT_S)).message == numbered(1)

    run(main)


# ------------------------------------------------------------------------------------------------ how far ahead


def test_a_producer_is_at_most_a_window_ahead_of_a_slow_reader(kind: str) -> None:
    async def main() -> None:
        producer = Producer()
        async with pair(kind, producer) as (dialer, _, _):
            async with dialer.stream(Heartbeat(), deadline_s=WAIT_S) as items:
                for read in range(1, 3 * STREAM_WINDOW):
                    assert (await anext(items)).message == numbered(read - 1)
                    if read % 4 == 0:
                        await asyncio.sleep(0.02)
                    assert producer.made - read <= STREAM_WINDOW
                await until(lambda: producer.made - read >= STREAM_WINDOW // 2)  # but it doesn't wait for each item
            await producer.freed()

    run(main)


# ------------------------------------------------------------------------------------------------ early ends


@pytest.mark.parametrize("after", [0, 1, STREAM_WINDOW, 2 * STREAM_WINDOW])
@pytest.mark.parametrize("pause_s", [0.0, 0.001])
def test_leaving_early_stops_the_producer_and_frees_it(kind: str, after: int, pause_s: float) -> None:
    async def main() -> None:
        producer = Producer(pause_s=pause_s)
        async with pair(kind, producer) as (dialer, accepted, _):
            async with dialer.stream(Heartbeat(), deadline_s=WAIT_S) as items:
                for i in range(after):
                    assert (await anext(items)).message == numbered(i)
                if not after:
                    await until(lambda: producer.made > 0)
            await producer.freed()
            made = producer.made
            assert made <= after + STREAM_WINDOW
            await asyncio.sleep(0.02)
            assert producer.made == made
            assert not accepted.closed.is_set()

    run(main)


@pytest.mark.parametrize("end", ["leave", "close"])
def test_a_generator_that_somebody_holds_is_closed_all_the_same(kind: str, end: str) -> None:
    """What it holds is given back at once, not when it's thrown away."""
    held: list[Any] = []
    ended: list[str] = []

    async def endless() -> AsyncIterator[Message]:
        try:
            while True:
                yield Ack()
        finally:
            ended.append("asynchronous")

    def plainly_endless() -> Iterator[Message]:
        try:
            while True:
                yield Ack()
        finally:
            ended.append("plain")

    def handler(endpoint: Endpoint, message: Message, payload: memoryview) -> Any:
        held.append(endless() if isinstance(message, Heartbeat) else plainly_endless())
        return held[-1]

    async def main() -> None:
        async with pair(kind, handler) as (dialer, _, _):
            for message in (Heartbeat(), numbered(1)):
                async with dialer.stream(message, deadline_s=WAIT_S) as items:
                    await anext(items)
                    if end == "close" and message != Heartbeat():
                        await dialer.close()
            await until(lambda: sorted(ended) == ["asynchronous", "plain"])

    run(main)


def test_a_plain_generator_is_closed_when_its_reader_leaves(kind: str) -> None:
    ended: list[str] = []

    def endless() -> Iterator[Message]:
        try:
            while True:
                yield Ack()
        except GeneratorExit:
            ended.append("closed")
            raise

    async def main() -> None:
        async with pair(kind, lambda *_: endless()) as (dialer, _, _):
            async with dialer.stream(Heartbeat(), deadline_s=WAIT_S) as items:
                await anext(items)
            await until(lambda: ended == ["closed"])

    run(main)


def test_an_error_of_the_reader_is_its_own(kind: str) -> None:
    async def main() -> None:
        producer = Producer()
        async with pair(kind, producer) as (dialer, _, _):
            with pytest.raises(LookupError):
                async with dialer.stream(Heartbeat(), deadline_s=WAIT_S) as items:
                    async for _ in items:
                        raise LookupError
            await producer.freed()

    run(main)


def test_a_cancelled_reader_stops_the_producer(kind: str) -> None:
    async def main() -> None:
        producer = Producer(pause_s=600)
        async with pair(kind, producer) as (dialer, _, _):

            async def read() -> None:
                async with dialer.stream(Heartbeat(), deadline_s=WAIT_S) as items:
                    await anext(items)

            task = asyncio.create_task(read())
            await until(lambda: bool(producer.alive))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await producer.freed()

    run(main)


def test_the_deadline_is_for_the_whole_stream(kind: str) -> None:
    async def main() -> None:
        producer = Producer(pause_s=0.02)
        async with pair(kind, producer) as (dialer, accepted, _):
            got = 0
            with pytest.raises(DeadlineExpired, match=r"listener: Heartbeat: nothing after \d\.\d s \(limit 0\.4 s\)"):
                async with dialer.stream(Heartbeat(), deadline_s=0.4) as items:
                    async for item in items:
                        assert item.message == numbered(got)
                        got += 1
            assert got > 0
            await producer.freed()
            assert not accepted.closed.is_set()

    run(main)


@pytest.mark.parametrize("who", ["dialer", "accepted"])
def test_the_end_of_the_endpoint_ends_both_sides_of_a_stream(kind: str, who: str) -> None:
    async def main() -> None:
        producer = Producer(pause_s=0.001)
        async with pair(kind, producer) as (dialer, accepted, _):
            with pytest.raises(PeerLost, match="enough"):
                async with dialer.stream(Heartbeat(), deadline_s=WAIT_S) as items:
                    await anext(items)
                    await (dialer if who == "dialer" else accepted).close("enough")
                    async for _ in items:
                        pass
            await producer.freed()

    run(main)
