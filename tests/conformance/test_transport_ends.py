"""How endpoints begin and end, asyncio face: admission, orderly ends, and what they do to whoever waits."""

from __future__ import annotations

import asyncio

import pytest

from miles_hpc.core.errors import DeadlineExpired, PeerLost
from miles_hpc.core.messages import ChildEvent, Heartbeat, Message
from miles_hpc.core.transport import Endpoint
from tests.conformance.transport_kinds import WAIT_S, NotInTheVocabulary, echo, make, pair, run, until


def test_unknown_message_closes_the_endpoint(kind: str) -> None:
    async def main() -> None:
        async with pair(kind) as (dialer, accepted, _):
            with pytest.raises(PeerLost, match=r"protocol error.*NotInTheVocabulary"):
                await dialer.call(NotInTheVocabulary(), deadline_s=WAIT_S)
            await asyncio.wait_for(accepted.closed.wait(), WAIT_S)
            assert dialer.closed.is_set()
            with pytest.raises(PeerLost):
                await dialer.notify(Heartbeat())

    run(main)


@pytest.mark.parametrize("who", ["dialer", "accepted", "listener"])
def test_close_fails_pending_calls_on_both_sides(kind: str, who: str) -> None:
    entered: asyncio.Queue[None] = asyncio.Queue()

    async def never(endpoint: Endpoint, message: Message, payload: memoryview) -> None:
        entered.put_nowait(None)
        await asyncio.Event().wait()

    async def main() -> None:
        async with pair(kind, never, never) as (dialer, accepted, listener):
            calls = [asyncio.create_task(e.call(Heartbeat(), deadline_s=WAIT_S)) for e in (dialer, accepted) * 2]
            for _ in calls:
                await entered.get()
            if who == "listener":
                await listener.close()
            else:
                await (dialer if who == "dialer" else accepted).close("enough")
            for result in await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), WAIT_S):
                assert isinstance(result, PeerLost)
                assert ("listener closed" if who == "listener" else "enough") in str(result)
            for endpoint in (dialer, accepted):
                await asyncio.wait_for(endpoint.closed.wait(), WAIT_S)
                await endpoint.close()  # idempotent
                with pytest.raises(PeerLost):
                    await endpoint.call(Heartbeat(), deadline_s=WAIT_S)
            if who == "listener":
                with pytest.raises((PeerLost, DeadlineExpired)):
                    await make(kind, "late").connect(listener.address, deadline_s=2.0)

    run(main)


def test_on_close_runs_once_per_accepted_endpoint(kind: str) -> None:
    closed: list[str] = []

    async def on_close(endpoint: Endpoint) -> None:
        closed.append(endpoint.peer.name)

    async def main() -> None:
        async with pair(kind, on_close=on_close) as (dialer, _, listener):
            other = await make(kind, "other").connect(listener.address, deadline_s=WAIT_S)
            await other.close()
            await dialer.close()
            async with asyncio.timeout(WAIT_S):
                while len(closed) < 2:
                    await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        assert sorted(closed) == ["dialer", "other"]

    run(main)


def test_who_accepted_an_endpoint_hears_of_its_end_although_it_ended_meanwhile(kind: str) -> None:
    """Else a member would stay in the owner's books for ever."""
    events: list[str] = []

    async def on_connect(endpoint: Endpoint) -> None:
        events.append("accepting")
        await endpoint.closed.wait()
        events.append("accepted")

    async def on_close(endpoint: Endpoint) -> None:
        events.append("closed")

    async def main() -> None:
        listener = await make(kind, "listener").listen(echo, on_connect=on_connect, on_close=on_close)
        with pytest.raises(DeadlineExpired):
            await make(kind, "dialer").connect(listener.address, deadline_s=1.0)
        await until(lambda: len(events) == 3)
        assert events == ["accepting", "accepted", "closed"]
        await listener.close()

    run(main)


def test_a_notify_to_a_dead_peer_raises(kind: str) -> None:
    async def main() -> None:
        async with pair(kind) as (dialer, accepted, _):
            await accepted.close("enough")
            await asyncio.wait_for(dialer.closed.wait(), WAIT_S)
            for payload in ([], [bytes(1 << 20)]):
                with pytest.raises(
                    PeerLost, match=r"listener \(trainer on host, pid \d+\): closed by the peer: enough"
                ):
                    await dialer.notify(Heartbeat(), payload=payload)
            with pytest.raises(PeerLost):
                async with dialer.stream(Heartbeat(), deadline_s=WAIT_S):
                    raise AssertionError("a stream")

    run(main)


def test_what_was_sent_before_the_close_arrives(kind: str) -> None:
    seen: list[int] = []

    async def handler(endpoint: Endpoint, message: Message, payload: memoryview) -> None:
        seen.append(len(payload))

    async def main() -> None:
        for _ in range(5):
            seen.clear()
            async with pair(kind, handler) as (dialer, accepted, _):
                sizes = [0, 100, 300_000, 5, 2 << 20, 7] * 3
                for size in sizes:
                    await dialer.notify(Heartbeat(), payload=[bytes(size)])
                await dialer.close("all told")
                await asyncio.wait_for(accepted.closed.wait(), WAIT_S)
                assert accepted.close_reason == "closed by the peer: all told"
                assert seen == sizes

    run(main)


def test_an_answer_outside_the_vocabulary_ends_the_endpoint_and_no_call_hangs(kind: str) -> None:
    async def handler(endpoint: Endpoint, message: Message, payload: memoryview) -> Message:
        return NotInTheVocabulary()

    async def main() -> None:
        async with pair(kind, handler) as (dialer, accepted, _):
            calls = [dialer.call(Heartbeat(), deadline_s=WAIT_S) for _ in range(3)]
            results = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), WAIT_S / 2)
            assert all(isinstance(result, PeerLost) and "NotInTheVocabulary" in str(result) for result in results)
            await asyncio.wait_for(accepted.closed.wait(), WAIT_S)

    run(main)


def test_on_connect_may_call_the_dialer_before_it_is_admitted(kind: str) -> None:
    order: list[str] = []

    async def handler(endpoint: Endpoint, message: Message, payload: memoryview) -> None:
        order.append("handled")

    async def on_connect(endpoint: Endpoint) -> None:
        await endpoint.call(Heartbeat(), deadline_s=WAIT_S)
        await asyncio.sleep(0.05)
        order.append("admitted")

    async def client(endpoint: Endpoint, message: Message, payload: memoryview) -> None:
        await endpoint.notify(ChildEvent(child="early", exit_code=0))

    async def main() -> None:
        listener = await make(kind, "listener").listen(handler, on_connect=on_connect)
        dialer = await make(kind, "dialer").connect(listener.address, client, deadline_s=WAIT_S)
        await dialer.call(Heartbeat(), deadline_s=WAIT_S)
        assert order == ["admitted", "handled", "handled"]
        await dialer.close()
        await listener.close()

    run(main)
