"""Everything at once: random calls, streams, notifies, cancellations in both directions, and the books at rest."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import closing
from typing import Any

import pytest

from miles_hpc.control.exchange import STREAM_WINDOW
from miles_hpc.control.frames import Limits
from miles_hpc.core.errors import DeadlineExpired, RemoteError
from miles_hpc.core.messages import EndSession, Generate, Heartbeat, Message, Shutdown
from miles_hpc.core.transport import BlockingEndpoint, Endpoint
from miles_hpc.core.types import SamplingParams
from tests.conformance.transport_kinds import (
    WAIT_S,
    AsyncServer,
    BlockingServer,
    make,
    make_plain,
    numbered,
    pair,
    run,
    server_of,
    until,
)

NARROW = Limits(window_messages=12, window_bytes=200_000)
SIZES = [0, 0, 10, 2000, 20_000, 150_000, 400_000]
SAMPLING = SamplingParams(max_new_tokens=1)


def books(core: Any) -> dict[str, int]:
    """Everything of a conversation that must be nothing when nobody wants anything any more."""
    return {
        "in flight": len(core._exchanges),
        "waiting": len(core._waiting),
        "notifies": len(core._notifies),
        "at work": len(core._serving),
        "held": len(core._held),
        "taken": core._taken_messages,
        "taken bytes": core._taken_bytes,
    }


def at_rest(ours: Any, theirs: Any) -> bool:
    """Nothing is left, and what a sender counts as used is what its receiver owes."""
    return (
        not any(books(ours).values())
        and not any(books(theirs).values())
        and (ours._used_messages, ours._used_bytes) == (theirs._owed_messages, theirs._owed_bytes)
        and (theirs._used_messages, theirs._used_bytes) == (ours._owed_messages, ours._owed_bytes)
    )


class Side:
    """A handler that takes its time, and what it was asked."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.notified: list[int] = []
        self.at_work = 0

    async def handle(self, endpoint: Endpoint, message: Message, payload: memoryview) -> Any:
        if isinstance(message, Shutdown):
            self.notified.append(int(message.reason.split()[0]))
            return None
        self.at_work += 1
        try:
            if self.random.random() < 0.5:
                await asyncio.sleep(self.random.random() / 100)
            if isinstance(message, Generate):
                await asyncio.sleep(WAIT_S)
            if isinstance(message, Heartbeat):
                return self.items(int(message.children[0]))
        finally:
            self.at_work -= 1
        if self.random.random() < 0.1:
            raise LookupError("by chance")
        return message, [payload]

    async def items(self, n: int) -> AsyncIterator[Any]:
        self.at_work += 1
        try:
            for i in range(n):
                if self.random.random() < 0.2:
                    await asyncio.sleep(0.001)
                yield numbered(i), [bytes(self.random.choice(SIZES) // 10)]
        finally:
            self.at_work -= 1


class Asker:
    """Asks for things in random order; each answer is checked."""

    def __init__(self, endpoint: Endpoint, seed: int) -> None:
        self.endpoint = endpoint
        self.random = random.Random(seed)
        self.notified = 0

    async def one(self, n: int) -> None:
        what = self.random.choice(["call", "call", "call", "stream", "stream", "cancellable", "notify", "urgent"])
        payload = [bytes([n % 256]) * self.random.choice(SIZES)]
        deadline_s = WAIT_S if self.random.random() < 0.8 else self.random.random() / 20
        try:
            await getattr(self, f"_{what}")(n, payload, deadline_s)
        except DeadlineExpired:
            assert deadline_s < WAIT_S or what == "cancellable"
        except RemoteError as error:
            assert error.kind == "LookupError"

    async def _call(self, n: int, payload: list[bytes], deadline_s: float) -> None:
        work = asyncio.create_task(self.endpoint.call(numbered(n), payload=payload, deadline_s=deadline_s))
        if self.random.random() < 0.2:
            await asyncio.sleep(self.random.random() / 50)
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            return
        reply = await work
        assert (reply.message, bytes(reply.payload)) == (numbered(n), payload[0])

    async def _urgent(self, n: int, payload: list[bytes], deadline_s: float) -> None:
        async with self.endpoint.stream(Heartbeat(children=("3",)), deadline_s=deadline_s) as items:
            assert [item.message async for item in items] == [numbered(i) for i in range(3)]

    async def _stream(self, n: int, payload: list[bytes], deadline_s: float) -> None:
        wanted = self.random.choice([0, 1, 5, 3 * STREAM_WINDOW])
        read = 0 if self.random.random() < 0.2 else self.random.randrange(1, 4 * STREAM_WINDOW)
        got = []
        question = Heartbeat(children=(str(wanted),))
        async with self.endpoint.stream(question, payload=payload, deadline_s=deadline_s) as items:
            async for item in items:
                got.append(item.message)
                if len(got) >= read:
                    break
        assert got == [numbered(i) for i in range(len(got))]
        assert len(got) == min(wanted, max(read, 1))

    async def _cancellable(self, n: int, payload: list[bytes], deadline_s: float) -> None:
        question = Generate(request_id="", session_id="", n_input=0, sampling=SAMPLING)
        await self.endpoint.call(question, payload=payload, deadline_s=min(deadline_s, 0.05))

    async def _notify(self, n: int, payload: list[bytes], deadline_s: float) -> None:
        number, self.notified = self.notified, self.notified + 1
        await self.endpoint.notify(Shutdown(reason=f"{number} {'x' * (100_000 if n % 7 == 0 else 0)}"))


@pytest.mark.parametrize("seed", range(3))
def test_any_mixture_leaves_nothing_behind(kind: str, seed: int) -> None:
    async def main() -> None:
        sides = Side(seed), Side(seed + 100)
        async with pair(kind, sides[0].handle, sides[1].handle, limits=NARROW) as (dialer, accepted, _):
            askers = [Asker(dialer, seed + 200), Asker(accepted, seed + 300)]
            ours, theirs = (endpoint.conversation for endpoint in (dialer, accepted))  # type: ignore[attr-defined]
            for burst in range(4):
                async with asyncio.timeout(WAIT_S):
                    await asyncio.gather(*(asker.one(n) for n in range(60) for asker in askers))
                await until(lambda: at_rest(ours, theirs))
                assert sides[0].at_work == sides[1].at_work == 0
                for asker, side in zip(askers, sides, strict=True):
                    assert sorted(side.notified) == list(range(asker.notified)), burst
            assert not dialer.closed.is_set()
        # What is left are those that watch the listener and this test itself.
        await until(lambda: len(asyncio.all_tasks()) <= 2)

    run(main)


@pytest.mark.parametrize("face", ["asyncio", "blocking"])
@pytest.mark.parametrize("seed", range(3))
def test_any_mixture_of_a_blocking_client_leaves_nothing_behind(elastic_kind: str, face: str, seed: int) -> None:
    rng = random.Random(seed)
    side = Side(seed)

    def plainly(endpoint: BlockingEndpoint, message: Message, payload: memoryview) -> Any:
        if isinstance(message, Heartbeat):
            return ((numbered(i), [bytes(i * 100)]) for i in range(int(message.children[0])))
        if isinstance(message, EndSession) and int(message.session_id) % 10 == 0:
            raise LookupError("by number")
        if isinstance(message, EndSession) and int(message.session_id) % 5 == 0:
            return endpoint.call(message, payload=[payload], deadline_s=WAIT_S).message, [payload]
        return message, [payload]

    def client(endpoint: BlockingEndpoint, message: Message, payload: memoryview) -> Any:
        return message, [payload]

    handler = side.handle if face == "asyncio" else plainly
    server = server_of(face, elastic_kind, handler, who={"limits": NARROW})
    with server, closing(make_plain(elastic_kind, "dialer")) as transport:
        endpoint = transport.connect(server.address, client, deadline_s=WAIT_S)
        core = endpoint.conversation  # type: ignore[attr-defined]
        for _ in range(150):
            pending = []
            for n in range(rng.randrange(1, 30)):
                payload = [bytes([n]) * rng.choice(SIZES)]
                pending.append((n, payload, endpoint.begin(numbered(n), payload=payload, deadline_s=WAIT_S)))
            rng.shuffle(pending)
            if rng.random() < 0.3:
                with endpoint.stream(Heartbeat(children=("40",)), deadline_s=WAIT_S) as items:
                    for i in range(rng.choice([0, 1, 40])):
                        assert next(items).message == numbered(i)
            for n, payload, one in pending:
                if rng.random() < 0.2:
                    one.cancel()
                    continue
                try:
                    reply = one.result()
                except RemoteError as error:
                    assert error.kind == "LookupError"
                else:
                    assert (reply.message, bytes(reply.payload)) == (numbered(n), payload[0])
        transport.serve(lambda: not any(books(core).values()), deadline_s=WAIT_S)
        assert not any(books(core).values())
        assert 2 * core._used_messages < NARROW.window_messages
        assert not endpoint.closed
        their_books = _books_of(server)
        transport.serve(lambda: False, deadline_s=0.05)
        assert not any(their_books.values())


def _books_of(server: AsyncServer | BlockingServer) -> dict[str, int]:
    listener: Any = server.listener
    if isinstance(server, BlockingServer):
        return server.do(lambda: books(listener.endpoints["dialer"].conversation))

    async def look() -> dict[str, int]:
        (endpoint,) = listener._endpoints
        return books(endpoint.conversation)

    return server.do(look())


def test_endpoints_that_end_in_the_middle_of_everything(kind: str) -> None:
    """Every call ends in some way, nothing hangs, and nothing is left of either side."""

    async def main() -> None:
        for seed in range(6):
            sides = Side(seed), Side(seed + 100)
            async with pair(kind, sides[0].handle, sides[1].handle, limits=NARROW) as (dialer, accepted, _):
                askers = [Asker(dialer, seed + 200), Asker(accepted, seed + 300)]
                tasks = [asyncio.create_task(asker.one(n)) for n in range(40) for asker in askers]
                await asyncio.sleep(seed / 100)
                await (dialer, accepted)[seed % 2].close("in the middle")
                async with asyncio.timeout(WAIT_S):
                    await asyncio.gather(*tasks, return_exceptions=True)
                await until(lambda: dialer.closed.is_set() and accepted.closed.is_set())
                for endpoint in (dialer, accepted):
                    core: Any = endpoint.conversation  # type: ignore[attr-defined]
                    assert not (core._exchanges or core._waiting or core._notifies or core._serving or core._held)
                await until(lambda: sides[0].at_work == sides[1].at_work == 0)  # noqa: B023
        await until(lambda: len(asyncio.all_tasks()) <= 2)

    run(main)


def test_many_endpoints_of_one_listener(elastic_kind: str) -> None:
    async def main() -> None:
        side = Side(1)
        listener = await make(elastic_kind, "listener", limits=NARROW).listen(side.handle)
        dialer = make(elastic_kind, "dialer")
        endpoints = [await dialer.connect(listener.address, side.handle, deadline_s=WAIT_S) for _ in range(20)]
        askers = [Asker(endpoint, seed) for seed, endpoint in enumerate(endpoints)]
        await asyncio.gather(*(asker.one(n) for n in range(10) for asker in askers))
        for endpoint in endpoints[::2]:
            await endpoint.close()
        await asyncio.gather(*(asker.one(n) for n in range(10) for asker in askers[1::2]))
        await listener.close()
        await until(lambda: all(endpoint.closed.is_set() for endpoint in endpoints))

    run(main)
