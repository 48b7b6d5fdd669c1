"""Back-pressure, asyncio face: what a peer that doesn't answer takes from us, and what passes it nevertheless."""

from __future__ import annotations

import asyncio
import threading
import tracemalloc
from typing import Any

import pytest

from miles_hpc.control.frames import Limits
from miles_hpc.core.errors import DeadlineExpired, PeerLost
from miles_hpc.core.messages import Ack, EndSession, Heartbeat, Message, Shutdown
from miles_hpc.core.transport import Endpoint
from tests.conformance.transport_kinds import CANCELLABLE, WAIT_S, AsyncServer, make, numbered, pair, run, until

NARROW = Limits(window_messages=8, window_bytes=100_000)


class Gate:
    """A handler that answers nothing but urgent messages before it's opened."""

    def __init__(self) -> None:
        self.seen: list[Message] = []
        self.n_bytes = 0
        self.most_bytes = 0
        self.at_work = 0
        self.most_at_work = 0
        self.open = asyncio.Event()

    async def __call__(self, endpoint: Endpoint, message: Message, payload: memoryview) -> Any:
        self.seen.append(message)
        if message.urgent:
            return message
        self.at_work += 1
        self.n_bytes += len(payload)
        self.most_at_work = max(self.most_at_work, self.at_work)
        self.most_bytes = max(self.most_bytes, self.n_bytes)
        try:
            await self.open.wait()
        finally:
            self.at_work -= 1
            self.n_bytes -= len(payload)
        return message, [payload[:1]]

    @property
    def numbers(self) -> list[int]:
        return [int(message.session_id) for message in self.seen if isinstance(message, EndSession)]


@pytest.mark.parametrize("notify", [False, True], ids=["calls", "notifies"])
@pytest.mark.parametrize("size", [0, 30_000])
def test_messages_in_work_are_bounded_and_in_order(kind: str, notify: bool, size: int) -> None:
    most = min(8, 100_000 // size if size else 8)

    async def main() -> None:
        gate = Gate()
        async with pair(kind, gate, limits=NARROW) as (dialer, _, _):

            async def one(n: int) -> None:
                if notify:
                    await dialer.notify(numbered(n), payload=[bytes(size)])
                else:
                    assert (
                        await dialer.call(numbered(n), payload=[bytes(size)], deadline_s=WAIT_S)
                    ).message == numbered(n)

            tasks = [asyncio.create_task(one(n)) for n in range(60)]
            await until(lambda: gate.at_work == most)
            await asyncio.sleep(0.05)
            assert gate.at_work == most
            gate.open.set()
            await asyncio.gather(*tasks)
            await until(lambda: len(gate.seen) == 60)
            assert gate.numbers == list(range(60))
            assert gate.most_at_work <= 8
            assert gate.most_bytes <= NARROW.window_bytes

    run(main)


def test_urgent_messages_pass_a_full_window(kind: str) -> None:
    async def main() -> None:
        gate = Gate()
        async with pair(kind, gate, limits=NARROW) as (dialer, accepted, _):
            calls = [asyncio.create_task(dialer.call(numbered(n), deadline_s=WAIT_S)) for n in range(20)]
            await until(lambda: gate.at_work == 8)
            for _ in range(200):
                assert (await dialer.call(Heartbeat(), deadline_s=WAIT_S)).message == Heartbeat()
            await dialer.notify(Shutdown(reason="x" * 10_000))
            await until(lambda: isinstance(gate.seen[-1], Shutdown))
            assert gate.at_work == 8
            gate.open.set()
            await asyncio.gather(*calls)
            assert gate.numbers == list(range(20))
            assert not accepted.closed.is_set()

    run(main)


@pytest.mark.parametrize("size", [100_001, 5 << 20])
def test_a_payload_larger_than_the_window_travels_alone(kind: str, size: int) -> None:
    async def main() -> None:
        gate = Gate()
        async with pair(kind, gate, limits=NARROW) as (dialer, _, _):
            calls = [
                asyncio.create_task(dialer.call(numbered(n), payload=[bytes(size)], deadline_s=WAIT_S))
                for n in range(3)
            ]
            await until(lambda: gate.at_work == 1)
            assert (await dialer.call(Heartbeat(), deadline_s=WAIT_S)).message == Heartbeat()
            await asyncio.sleep(0.05)
            assert gate.at_work == 1
            gate.open.set()
            await asyncio.gather(*calls)
            assert gate.most_at_work == 1 or size < NARROW.window_bytes
            assert gate.numbers == [0, 1, 2]

    run(main)


def test_a_call_that_waits_for_room_expires_in_time_and_is_never_begun(kind: str) -> None:
    async def main() -> None:
        gate = Gate()
        async with pair(kind, gate, limits=NARROW) as (dialer, _, _):
            calls = [asyncio.create_task(dialer.call(numbered(n), deadline_s=WAIT_S)) for n in range(8)]
            await until(lambda: gate.at_work == 8)
            with pytest.raises(DeadlineExpired, match=r"listener: EndSession: nothing after 0\.\d s \(limit 0\.2 s\)"):
                await dialer.call(numbered(100), deadline_s=0.2)
            waiting = asyncio.create_task(dialer.call(numbered(101), deadline_s=WAIT_S))
            await asyncio.sleep(0.01)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            gone = asyncio.create_task(dialer.notify(numbered(102)))
            await asyncio.sleep(0.01)
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)
            last = asyncio.create_task(dialer.call(numbered(103), deadline_s=WAIT_S))
            gate.open.set()
            await asyncio.gather(*calls, last)
            assert gate.numbers == [*range(8), 103]

    run(main)


@pytest.mark.parametrize("message", [CANCELLABLE, numbered(0)], ids=["cancellable", "not cancellable"])
def test_a_call_that_was_given_up_gives_its_room_back(kind: str, message: Message) -> None:
    """At once when its handler is stopped, else when the handler has finished."""

    async def main() -> None:
        gate = Gate()
        async with pair(kind, gate, limits=NARROW) as (dialer, _, _):
            for _ in range(3):
                before = len(gate.seen)
                calls = [asyncio.create_task(dialer.call(message, deadline_s=WAIT_S)) for _ in range(8)]
                await until(lambda: len(gate.seen) == before + 8)  # noqa: B023
                for call in calls:
                    call.cancel()
                await asyncio.gather(*calls, return_exceptions=True)
                if not message.cancellable:
                    gate.open.set()
                await until(lambda: gate.at_work == 0)
            gate.open.set()
            assert (await dialer.call(numbered(7), deadline_s=WAIT_S)).message == numbered(7)

    run(main)


def test_both_directions_have_windows_of_their_own(kind: str) -> None:
    async def main() -> None:
        gates = Gate(), Gate()
        async with pair(kind, gates[0], gates[1], limits=NARROW) as (dialer, accepted, _):
            both = (dialer, accepted)
            calls = [asyncio.create_task(e.call(numbered(n), deadline_s=WAIT_S)) for n in range(30) for e in both]
            await until(lambda: gates[0].at_work == 8 and gates[1].at_work == 30)  # the dialer announced more
            gates[0].open.set()
            gates[1].open.set()
            await asyncio.gather(*calls)
            assert gates[0].numbers == gates[1].numbers == list(range(30))

    run(main)


@pytest.mark.parametrize("how", ["close", "lost"])
def test_what_waits_for_room_ends_with_the_endpoint(kind: str, how: str) -> None:
    async def main() -> None:
        gate = Gate()
        async with pair(kind, gate, limits=NARROW) as (dialer, accepted, _):
            tasks: list[asyncio.Task[Any]] = []
            for n in range(20):
                tasks.append(asyncio.create_task(dialer.call(numbered(n), deadline_s=WAIT_S)))
                tasks.append(asyncio.create_task(dialer.notify(numbered(n), payload=[bytes(50_000)])))
            await until(lambda: gate.at_work > 0)
            await (dialer if how == "close" else accepted).close("enough")
            results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), WAIT_S)
            assert sum(isinstance(result, PeerLost) for result in results) >= 30
            assert all(result is None or isinstance(result, PeerLost) for result in results)

    run(main)


def test_a_peer_that_reads_nothing_takes_bounded_memory(elastic_kind: str) -> None:
    """Its loop stands still; the sender gets stuck after a window of notifies, and goes on when the peer does."""
    limits = Limits(window_messages=1000, window_bytes=4 << 20)
    stuck, go_on = threading.Event(), threading.Event()
    seen: list[int] = []

    def handler(endpoint: Endpoint, message: Message, payload: memoryview) -> None:
        if isinstance(message, Heartbeat):
            stuck.set()
            go_on.wait(WAIT_S)
        elif payload:
            seen.append(payload[0])

    async def main(address: str) -> None:
        dialer = await make(elastic_kind, "dialer").connect(address, deadline_s=WAIT_S)
        sent = 0

        async def send() -> None:
            nonlocal sent
            for n in range(200):
                await dialer.notify(numbered(n), payload=[bytes([n]) * 100_000])
                sent += 1

        await dialer.notify(Heartbeat())
        await asyncio.to_thread(stuck.wait, WAIT_S)
        tracemalloc.start()
        task = asyncio.create_task(send())
        await asyncio.sleep(0.3)
        before = -1
        while before != sent:
            before = sent
            await asyncio.sleep(0.3)
        used = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert sent <= limits.window_bytes // 100_000 + 1
        assert used < 4 * limits.window_bytes
        go_on.set()
        await task
        await dialer.call(numbered(0), deadline_s=WAIT_S)
        assert seen == list(range(200))
        await dialer.close()

    with AsyncServer(elastic_kind, handler, who={"limits": limits}) as server:
        try:
            asyncio.run(main(server.address))
        finally:
            go_on.set()


def test_a_plain_function_answers_without_a_task(kind: str) -> None:
    def handler(endpoint: Endpoint, message: Message, payload: memoryview) -> Any:
        if isinstance(message, Shutdown):
            raise LookupError(message.reason)
        return None if isinstance(message, Heartbeat) else (message, [payload])

    async def main() -> None:
        async with pair(kind, handler, limits=NARROW) as (dialer, _, _):
            for n in range(100):
                reply = await dialer.call(numbered(n), payload=[bytes([n])], deadline_s=WAIT_S)
                assert (reply.message, bytes(reply.payload)) == (numbered(n), bytes([n]))
                assert (await dialer.call(Heartbeat(), deadline_s=WAIT_S)).message == Ack()
                await dialer.notify(numbered(n), payload=[bytes(20_000)])
            with pytest.raises(Exception, match="LookupError: gone"):
                await dialer.call(Shutdown(reason="gone"), deadline_s=WAIT_S)

    run(main)
