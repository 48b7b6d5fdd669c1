"""The core of the transport contract, asyncio face: what every kind of transport promises."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import numpy as np
import pytest

from miles_hpc.core.errors import DeadlineExpired, FencedError, RemoteError
from miles_hpc.core.messages import Ack, DescribeWeights, EndSession, Heartbeat, Message, Shutdown
from miles_hpc.core.transport import Endpoint
from miles_hpc.core.types import WeightVersion
from tests.conformance.transport_kinds import CANCELLABLE, WAIT_S, echo, pair, run


def test_identities_are_exchanged(kind: str) -> None:
    async def main() -> None:
        async with pair(kind) as (dialer, accepted, listener):
            assert listener.address.startswith(f"{kind.removesuffix('-only')}://")
            assert dialer.peer.name == "listener"
            assert accepted.peer.name == "dialer"
            assert accepted.peer.pid == os.getpid()

    run(main)


def test_none_answers_ack_and_messages_survive(kind: str) -> None:
    seen: list[Message] = []

    async def handler(endpoint: Endpoint, message: Message, payload: memoryview) -> None:
        seen.append(message)

    async def main() -> None:
        async with pair(kind, handler) as (dialer, _, _):
            sent = DescribeWeights(version=WeightVersion(3, 7))
            reply = await dialer.call(sent, deadline_s=WAIT_S)
            assert reply.message == Ack()
            assert len(reply.payload) == 0
            assert seen == [sent]

    run(main)


@pytest.mark.parametrize("sizes", [(0,), (1,), (5, 0, 7), (1000, 1), (70_000,), (65_536 - 16,), (3, 200_000, 4096)])
def test_payload_both_ways(kind: str, sizes: tuple[int, ...]) -> None:
    rng = np.random.default_rng(1)
    buffers = [rng.integers(0, 256, n, dtype=np.uint8).tobytes() for n in sizes]
    expected = b"".join(buffers)

    async def handler(endpoint: Endpoint, message: Message, payload: memoryview) -> Any:
        assert payload.readonly
        assert bytes(payload) == expected
        return Ack(), [payload[: len(payload) // 2], bytearray(payload[len(payload) // 2 :])]

    async def main() -> None:
        async with pair(kind, handler, handler) as (dialer, accepted, _):
            for endpoint in (dialer, accepted, dialer):
                reply = await endpoint.call(Heartbeat(), payload=buffers, deadline_s=WAIT_S)
                assert reply.payload.readonly
                assert bytes(reply.payload) == expected

    run(main)


def test_typed_buffers_are_sent_as_their_bytes(kind: str) -> None:
    array = np.arange(100_000, dtype=np.int32)

    async def main() -> None:
        async with pair(kind) as (dialer, _, _):
            reply = await dialer.call(Heartbeat(), payload=[array.data], deadline_s=WAIT_S)
            assert np.array_equal(np.frombuffer(reply.payload, np.int32), array)

    run(main)


def test_64_mib(kind: str) -> None:
    block = os.urandom(1 << 20)
    buffers = [block, memoryview(block)] * 32

    async def main() -> None:
        async with pair(kind, echo, echo) as (dialer, accepted, _):
            for endpoint in (dialer, accepted):
                reply = await endpoint.call(Heartbeat(), payload=buffers, deadline_s=WAIT_S)
                assert len(reply.payload) == 64 << 20
                assert all(reply.payload[i << 20 : (i + 1) << 20] == block for i in range(64))

    run(main)


def test_large_header(kind: str) -> None:
    async def main() -> None:
        async with pair(kind) as (dialer, _, _):
            sent = Shutdown(reason="x" * 300_000)
            for payload in ([], [b"y" * 10], [b"z" * 100_000]):
                reply = await dialer.call(sent, payload=payload, deadline_s=WAIT_S)
                assert reply.message == sent
                assert bytes(reply.payload) == b"".join(payload)

    run(main)


def test_concurrent_calls_in_both_directions(kind: str) -> None:
    async def handler(endpoint: Endpoint, message: Message, payload: memoryview) -> Any:
        assert isinstance(message, EndSession)
        await asyncio.sleep(int(message.session_id) % 7 / 1000)
        return message, [payload]

    async def main() -> None:
        async with pair(kind, handler, handler) as (dialer, accepted, _):

            async def one(endpoint: Endpoint, n: int) -> None:
                message = EndSession(session_id=str(n))
                data = bytes([n % 256]) * (n * 997 % 40_000)
                reply = await endpoint.call(message, payload=[data], deadline_s=WAIT_S)
                assert reply.message == message
                assert bytes(reply.payload) == data

            await asyncio.gather(*(one(e, n) for n in range(100) for e in (dialer, accepted)))

    run(main)


def test_notifies_keep_their_order(kind: str) -> None:
    seen: list[int] = []
    done = asyncio.Event()

    async def handler(endpoint: Endpoint, message: Message, payload: memoryview) -> None:
        assert isinstance(message, EndSession)
        seen.append(int(message.session_id))
        if len(seen) == 500:
            done.set()

    async def main() -> None:
        async with pair(kind, handler) as (dialer, _, _):
            for n in range(500):
                await dialer.notify(EndSession(session_id=str(n)), payload=[b"p" * (n % 3 * 50_000)])
            await asyncio.wait_for(done.wait(), WAIT_S)
            assert seen == list(range(500))

    run(main)


def test_small_messages_do_not_overtake_large_ones(kind: str) -> None:
    sizes = [3 << 20, 0, 10, 2 << 20, 1 << 20, 100_000, 5, (1 << 20) - 1, 5 << 20, 1]
    seen: list[int] = []
    done = asyncio.Event()

    async def handler(endpoint: Endpoint, message: Message, payload: memoryview) -> None:
        assert bytes(payload[-3:]) == (b"end"[-len(payload) :] if payload else b"")
        seen.append(len(payload))
        if len(seen) == 3 * len(sizes):
            done.set()

    async def main() -> None:
        async with pair(kind, handler) as (dialer, _, _):
            payloads = [(b"x" * n)[: max(n - 3, 0)] + b"end"[-n:] if n else b"" for n in sizes * 3]
            await asyncio.gather(*(dialer.notify(Heartbeat(), payload=[p]) for p in payloads))
            await asyncio.wait_for(done.wait(), WAIT_S)
            assert seen == sizes * 3

    run(main)


def test_the_loop_stays_responsive_while_a_large_payload_travels(kind: str) -> None:
    async def main() -> None:
        async with pair(kind) as (dialer, _, _):
            beats = 0

            async def beat() -> None:
                nonlocal beats
                while True:
                    await asyncio.sleep(0)
                    beats += 1

            task = asyncio.create_task(beat())
            await dialer.call(Heartbeat(), payload=[bytes(64 << 20)], deadline_s=WAIT_S)
            task.cancel()
            assert beats > 8 or kind == "loopback"  # loopback copies in one go

    run(main)


def test_a_handler_may_call_back(kind: str) -> None:
    async def handler(endpoint: Endpoint, message: Message, payload: memoryview) -> Message:
        return (await endpoint.call(EndSession(session_id="back"), deadline_s=WAIT_S)).message

    async def main() -> None:
        async with pair(kind, handler, echo) as (dialer, _, _):
            assert (await dialer.call(Heartbeat(), deadline_s=WAIT_S)).message == EndSession(session_id="back")

    run(main)


def test_handler_exception_becomes_remote_error(kind: str) -> None:
    async def handler(endpoint: Endpoint, message: Message, payload: memoryview) -> None:
        raise FencedError("term 2 exists")

    async def main() -> None:
        async with pair(kind, handler) as (dialer, accepted, _):
            with pytest.raises(RemoteError, match="term 2 exists") as caught:
                await dialer.call(Heartbeat(), deadline_s=WAIT_S)
            assert caught.value.kind == "FencedError"
            assert caught.value.peer == "listener"
            assert not dialer.closed.is_set()
            with pytest.raises(RemoteError, match="nobody handles") as caught:
                await accepted.call(Heartbeat(), deadline_s=WAIT_S)
            assert caught.value.kind == "ProtocolError"

    run(main)


def test_expired_deadline_names_peer_message_and_time(kind: str) -> None:
    release = asyncio.Event()

    async def handler(endpoint: Endpoint, message: Message, payload: memoryview) -> None:
        if isinstance(message, Shutdown):
            await release.wait()

    async def main() -> None:
        async with pair(kind, handler) as (dialer, _, _):
            with pytest.raises(DeadlineExpired, match=r"listener: Shutdown: nothing after \d+\.\d s \(limit 0\.2 s\)"):
                await dialer.call(Shutdown(reason=""), deadline_s=0.2)
            release.set()  # the late answer is dropped and harms nobody
            for _ in range(3):
                await dialer.call(Heartbeat(), deadline_s=WAIT_S)

    run(main)


def test_cancelled_call_is_forgotten(kind: str) -> None:
    async def handler(endpoint: Endpoint, message: Message, payload: memoryview) -> None:
        if isinstance(message, Shutdown):
            await asyncio.sleep(0.05)

    async def main() -> None:
        async with pair(kind, handler) as (dialer, _, _):
            task = asyncio.create_task(dialer.call(Shutdown(reason=""), deadline_s=WAIT_S))
            await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.sleep(0.1)
            await dialer.call(Heartbeat(), deadline_s=WAIT_S)

    run(main)


def test_a_deadline_of_nothing_expires(kind: str) -> None:
    async def never(endpoint: Endpoint, message: Message, payload: memoryview) -> None:
        await asyncio.sleep(600)

    async def main() -> None:
        async with pair(kind, never) as (dialer, _, _):
            for deadline_s in (0.0, -1.0):
                with pytest.raises(DeadlineExpired):
                    await dialer.call(CANCELLABLE, deadline_s=deadline_s)

    run(main)


@pytest.mark.parametrize("answer", [5, "text", [Ack()], (5, []), (Ack(), [5])])
def test_a_handler_that_answers_nonsense_fails_its_caller_only(kind: str, answer: Any) -> None:
    async def handler(endpoint: Endpoint, message: Message, payload: memoryview) -> Any:
        return answer if isinstance(message, Heartbeat) else message

    async def main() -> None:
        async with pair(kind, handler) as (dialer, _, _):
            with pytest.raises(RemoteError, match="TypeError"):
                await dialer.call(Heartbeat(), deadline_s=WAIT_S)
            assert (await dialer.call(Shutdown(reason="x"), deadline_s=WAIT_S)).message == Shutdown(reason="x")

    run(main)


def test_buffers_that_cannot_be_sent_are_refused_at_once(kind: str) -> None:
    async def main() -> None:
        async with pair(kind) as (dialer, _, _):
            for size in (100, 200_000):
                with pytest.raises(TypeError, match="isn't contiguous"):
                    await dialer.call(Heartbeat(), payload=[memoryview(bytes(size))[::2]], deadline_s=WAIT_S)
            assert (await dialer.call(Heartbeat(), deadline_s=WAIT_S)).message == Heartbeat()

    run(main)
