"""The core of the transport contract, blocking face: both ends in one thread and on one loop, for every kind."""

from __future__ import annotations

import os
import random
from typing import Any

import numpy as np
import pytest

from miles_hpc.control.frames import Limits
from miles_hpc.core.errors import DeadlineExpired, FencedError, PeerLost, ProtocolError, RemoteError, UserError
from miles_hpc.core.messages import Ack, DescribeWeights, Heartbeat, Message, Shutdown
from miles_hpc.core.transport import BlockingEndpoint, PendingCall
from miles_hpc.core.types import WeightVersion
from tests.conformance.transport_kinds import (
    CANCELLABLE,
    WAIT_S,
    NotInTheVocabulary,
    make_plain,
    number_of,
    numbered,
    plain_echo,
    plain_pair,
)

NARROW = Limits(window_messages=8, window_bytes=100_000)


# ------------------------------------------------------------------------------------------------ calls


def test_identities_and_addresses(kind: str) -> None:
    with plain_pair(kind) as (dialer, accepted, listener, transport):
        assert listener.address.startswith(f"{kind.removesuffix('-only')}://")
        assert dialer.peer.name == accepted.peer.name == "both"
        assert accepted.peer.pid == os.getpid()
        assert listener.endpoints == {"both": accepted}
        assert transport.chosen()["transport"]


def test_messages_and_payloads_both_ways(kind: str) -> None:
    rng = np.random.default_rng(1)
    cases = [(), (0,), (1,), (5, 0, 7), (16_000,), (70_000,), (3, 200_000, 4096), (1 << 20, 3 << 20)]

    def handler(endpoint: BlockingEndpoint, message: Message, payload: memoryview) -> Any:
        assert payload.readonly
        half = len(payload) // 2
        return message, [payload[:half], bytearray(payload[half:])]

    with plain_pair(kind, handler, handler) as (dialer, accepted, _, _):
        for n, sizes in enumerate(cases):
            buffers = [rng.integers(0, 256, size, dtype=np.uint8).data for size in sizes]
            for endpoint in (dialer, accepted):
                sent = DescribeWeights(version=WeightVersion(3, n))
                reply = endpoint.call(sent, payload=buffers, deadline_s=WAIT_S)
                assert reply.message == sent
                assert reply.payload.readonly
                assert bytes(reply.payload) == b"".join(buffers)


def test_64_mib(kind: str) -> None:
    block = os.urandom(1 << 20)
    with plain_pair(kind) as (dialer, _, _, _):
        reply = dialer.call(Heartbeat(), payload=[block, memoryview(block)] * 32, deadline_s=WAIT_S)
        assert len(reply.payload) == 64 << 20
        assert all(reply.payload[i << 20 : (i + 1) << 20] == block for i in range(64))


def test_none_answers_ack_and_errors_come_back(kind: str) -> None:
    def handler(endpoint: BlockingEndpoint, message: Message, payload: memoryview) -> Any:
        if isinstance(message, Shutdown):
            raise FencedError(message.reason)
        return None if isinstance(message, Heartbeat) else 5

    with plain_pair(kind, handler) as (dialer, accepted, _, _):
        for _ in range(2):
            assert dialer.call(Heartbeat(), deadline_s=WAIT_S).message == Ack()
            with pytest.raises(RemoteError, match="term 2 exists") as caught:
                dialer.call(Shutdown(reason="term 2 exists"), deadline_s=WAIT_S)
            assert (caught.value.kind, caught.value.peer) == ("FencedError", "both")
            with pytest.raises(RemoteError, match="TypeError"):
                dialer.call(numbered(1), deadline_s=WAIT_S)
            with pytest.raises(RemoteError, match="nobody handles"):
                accepted.call(Heartbeat(), deadline_s=WAIT_S)
        assert not dialer.closed


@pytest.mark.parametrize("where", ["question", "answer"])
def test_messages_outside_the_vocabulary_end_the_endpoint(kind: str, where: str) -> None:
    def handler(endpoint: BlockingEndpoint, message: Message, payload: memoryview) -> Any:
        return NotInTheVocabulary()

    with plain_pair(kind, handler) as (dialer, accepted, _, transport):
        with pytest.raises(PeerLost, match="NotInTheVocabulary"):
            dialer.call(NotInTheVocabulary() if where == "question" else Heartbeat(), deadline_s=WAIT_S)
        assert transport.serve(lambda: dialer.closed and accepted.closed, deadline_s=WAIT_S)
        for send in (dialer.call, dialer.begin, dialer.notify):
            with pytest.raises(PeerLost):
                send(Heartbeat(), deadline_s=WAIT_S)


def test_notifies_keep_their_order_and_arrive_before_a_close(kind: str) -> None:
    seen: list[int] = []

    def handler(endpoint: BlockingEndpoint, message: Message, payload: memoryview) -> None:
        seen.append(number_of(message))

    with plain_pair(kind, handler, limits=NARROW) as (dialer, accepted, _, transport):
        for n in range(500):
            dialer.notify(numbered(n), payload=[bytes(n % 3 * 30_000)], deadline_s=WAIT_S)
        dialer.close("all told")
        assert transport.serve(lambda: accepted.closed, deadline_s=WAIT_S)
        assert transport.serve(lambda: len(seen) == 500, deadline_s=WAIT_S)
        assert seen == list(range(500))
        assert accepted.close_reason == "closed by the peer: all told"


# ------------------------------------------------------------------------------------------------ many in flight


@pytest.mark.parametrize("limits", [Limits(), NARROW], ids=["wide", "narrow"])
def test_many_calls_in_flight_and_results_in_any_order(kind: str, limits: Limits) -> None:
    with plain_pair(kind, plain_echo, plain_echo, limits=limits) as (dialer, accepted, _, _):
        pending = {}
        for n in range(200):
            for endpoint in (dialer, accepted):
                payload = [bytes([n % 256]) * (n * 97 % 30_000)]
                pending[n, endpoint is dialer] = endpoint.begin(numbered(n), payload=payload, deadline_s=WAIT_S)
        order = list(pending)
        random.Random(3).shuffle(order)
        for key in order:
            reply = pending[key].result()
            assert pending[key].done
            assert reply.message == numbered(key[0])
            assert bytes(reply.payload) == bytes([key[0] % 256]) * (key[0] * 97 % 30_000)
            assert pending[key].result() is reply  # asked again


def test_a_pending_call_is_done_when_somebody_waited_for_another(kind: str) -> None:
    with plain_pair(kind) as (dialer, _, _, transport):
        first = dialer.begin(numbered(1), deadline_s=WAIT_S)
        assert not first.done
        dialer.call(numbered(2), deadline_s=WAIT_S)
        assert first.done
        second = dialer.begin(numbered(3), deadline_s=WAIT_S)
        assert transport.serve(lambda: second.done, deadline_s=WAIT_S)
        assert second.result().message == numbered(3)


def test_a_cancelled_pending_call(kind: str) -> None:
    seen: list[Message] = []

    def handler(endpoint: BlockingEndpoint, message: Message, payload: memoryview) -> None:
        seen.append(message)

    with plain_pair(kind, handler) as (dialer, _, _, _):
        kept, gone = (dialer.begin(message, deadline_s=WAIT_S) for message in (numbered(1), CANCELLABLE))
        gone.cancel()
        gone.cancel()
        assert gone.done
        with pytest.raises(DeadlineExpired, match="cancelled"):
            gone.result()
        assert kept.result().message == Ack()
        kept.cancel()
        assert kept.result().message == Ack()
        dialer.call(Heartbeat(), deadline_s=WAIT_S)
        assert seen == [numbered(1), Heartbeat()]  # what was given up before it began isn't begun


def test_a_deadline_of_nothing_expires(kind: str) -> None:
    with plain_pair(kind) as (dialer, _, _, _):
        for deadline_s in (0.0, -1.0):
            pending = dialer.begin(numbered(1), deadline_s=deadline_s)
            try:
                pending.result()
            except DeadlineExpired as error:
                assert "EndSession" in str(error)
        assert dialer.call(Heartbeat(), deadline_s=WAIT_S).message == Heartbeat()


# ------------------------------------------------------------------------------------------------ serving, ends


def test_serve_ends_by_its_condition_or_by_its_deadline(kind: str) -> None:
    seen: list[Message] = []

    def handler(endpoint: BlockingEndpoint, message: Message, payload: memoryview) -> None:
        seen.append(message)

    with plain_pair(kind, handler) as (dialer, _, _, transport):
        assert transport.serve(lambda: True, deadline_s=0.0)
        assert transport.serve(lambda: True)
        assert not transport.serve(lambda: False, deadline_s=0.0)
        assert not transport.serve(lambda: bool(seen), deadline_s=0.05)
        dialer.notify(Heartbeat(), deadline_s=WAIT_S)
        assert transport.serve(lambda: bool(seen), deadline_s=WAIT_S)
        dialer.notify(Heartbeat(), deadline_s=WAIT_S)
        assert transport.serve(lambda: len(seen) == 2)

        def broken() -> bool:
            raise LookupError

        with pytest.raises(LookupError):
            transport.serve(broken, deadline_s=WAIT_S)
        assert dialer.call(Heartbeat(), deadline_s=WAIT_S).message == Ack()


@pytest.mark.parametrize("who", ["dialer", "accepted", "listener", "transport"])
def test_close_fails_calls_in_flight(kind: str, who: str) -> None:
    closed: list[str] = []
    options: dict[str, Any] = {"on_close": lambda endpoint: closed.append(endpoint.close_reason)}
    with plain_pair(kind, **options) as (dialer, accepted, listener, transport):
        pending: list[PendingCall] = [dialer.begin(numbered(n), deadline_s=WAIT_S) for n in range(5)]
        pending.append(dialer.begin(numbered(5), payload=[bytes(1 << 20)], deadline_s=WAIT_S))
        {
            "dialer": lambda: dialer.close("enough"),
            "accepted": lambda: accepted.close("enough"),
            "listener": listener.close,
            "transport": transport.close,
        }[who]()
        if who != "transport":
            assert transport.serve(lambda: dialer.closed and accepted.closed, deadline_s=WAIT_S)
        assert dialer.closed
        assert accepted.closed
        for one in pending:
            assert one.done
            with pytest.raises(PeerLost):
                one.result()
        dialer.close()  # idempotent
        accepted.close()
        with pytest.raises(PeerLost):
            dialer.call(Heartbeat(), deadline_s=WAIT_S)
        if who != "transport":
            assert transport.serve(lambda: len(closed) == 1, deadline_s=WAIT_S)
            assert not transport.serve(lambda: len(closed) > 1, deadline_s=0.05)
            assert listener.endpoints == {}


def test_endpoints_are_the_newest_of_each_name(kind: str) -> None:
    accepted: list[BlockingEndpoint] = []
    closed: list[BlockingEndpoint] = []
    transport = make_plain(kind, "both")
    listener = transport.listen(plain_echo, on_connect=accepted.append, on_close=closed.append)
    assert listener.endpoints == {}
    first = transport.connect(listener.address, deadline_s=WAIT_S)
    second = transport.connect(listener.address, deadline_s=WAIT_S)
    assert transport.serve(lambda: len(accepted) == 2, deadline_s=WAIT_S)
    assert listener.endpoints == {"both": accepted[1]}
    first.close()
    assert transport.serve(lambda: closed == accepted[:1], deadline_s=WAIT_S)
    assert listener.endpoints == {"both": accepted[1]}
    assert second.call(Heartbeat(), deadline_s=WAIT_S).message == Heartbeat()
    second.close()
    assert transport.serve(lambda: listener.endpoints == {}, deadline_s=WAIT_S)
    transport.close()
    transport.close()  # idempotent


@pytest.mark.parametrize("error", [FencedError("incarnation 2 exists"), UserError("no room")])
def test_on_connect_refuses(kind: str, error: Exception) -> None:
    handled: list[Message] = []
    closed: list[BlockingEndpoint] = []

    def refuse(endpoint: BlockingEndpoint) -> None:
        raise error

    def handler(endpoint: BlockingEndpoint, message: Message, payload: memoryview) -> None:
        handled.append(message)

    transport = make_plain(kind, "both")
    listener = transport.listen(handler, on_connect=refuse, on_close=closed.append)
    expected = FencedError if isinstance(error, FencedError) else RemoteError
    for _ in range(2):
        with pytest.raises(expected, match=str(error)):
            transport.connect(listener.address, deadline_s=WAIT_S)
    assert listener.endpoints == {}
    transport.close()
    assert not handled
    assert not closed


def test_on_connect_may_call_the_dialer_before_it_is_admitted(kind: str) -> None:
    order: list[str] = []

    def on_connect(endpoint: BlockingEndpoint) -> None:
        endpoint.call(Heartbeat(), deadline_s=WAIT_S)
        order.append("admitted")

    def client(endpoint: BlockingEndpoint, message: Message, payload: memoryview) -> None:
        endpoint.notify(numbered(1), deadline_s=WAIT_S)
        order.append("asked")

    def server(endpoint: BlockingEndpoint, message: Message, payload: memoryview) -> None:
        order.append("handled")

    transport = make_plain(kind, "both")
    listener = transport.listen(server, on_connect=on_connect)
    dialer = transport.connect(listener.address, client, deadline_s=WAIT_S)
    dialer.call(Heartbeat(), deadline_s=WAIT_S)
    assert order == ["asked", "admitted", "handled", "handled"]
    transport.close()


def test_who_accepted_an_endpoint_hears_of_its_end_although_it_ended_meanwhile(kind: str) -> None:
    events: list[str] = []
    transport = make_plain(kind, "both")

    def on_connect(endpoint: BlockingEndpoint) -> None:
        endpoint.close("changed my mind")
        transport.serve(lambda: False, deadline_s=0.05)
        events.append("accepted")

    listener = transport.listen(plain_echo, on_connect=on_connect, on_close=lambda endpoint: events.append("closed"))
    with pytest.raises(PeerLost, match="changed my mind"):
        transport.connect(listener.address, deadline_s=WAIT_S)
    assert transport.serve(lambda: len(events) == 2, deadline_s=WAIT_S)
    assert events == ["accepted", "closed"]
    assert listener.endpoints == {}
    transport.close()


def test_a_closed_transport_says_so(kind: str) -> None:
    with plain_pair(kind) as (_, _, listener, transport):
        transport.close()
        with pytest.raises(ProtocolError, match="this transport is closed"):
            transport.connect(listener.address, deadline_s=WAIT_S)
        with pytest.raises(ProtocolError, match="this transport is closed"):
            transport.listen(plain_echo)


def test_a_payload_is_a_list_of_buffers(kind: str) -> None:
    with (
        plain_pair(kind) as (dialer, _, _, _),
        pytest.raises(TypeError, match="expected a list of buffers"),
    ):
        dialer.call(Heartbeat(), payload=b"abc", deadline_s=WAIT_S)  # type: ignore[arg-type]
