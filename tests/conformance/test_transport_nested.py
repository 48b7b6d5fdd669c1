"""Waits within waits, blocking face: handlers that call, serve or close while their own caller waits."""

from __future__ import annotations

from typing import Any

import pytest

from miles_hpc.core.errors import DeadlineExpired, PeerLost, RemoteError
from miles_hpc.core.messages import Heartbeat, Message, Shutdown
from miles_hpc.core.transport import BlockingEndpoint, BlockingTransport
from tests.conformance.transport_kinds import WAIT_S, number_of, numbered, plain_echo, plain_pair


def test_a_handler_may_call_back_to_any_depth_that_makes_sense(kind: str) -> None:
    def handler(endpoint: BlockingEndpoint, message: Message, payload: memoryview) -> Message:
        n = number_of(message)
        return (
            numbered(0)
            if n == 0
            else numbered(1 + number_of(endpoint.call(numbered(n - 1), deadline_s=WAIT_S).message))
        )

    with plain_pair(kind, handler, handler) as (dialer, accepted, _, _):
        for endpoint in (dialer, accepted):
            assert endpoint.call(numbered(10), deadline_s=WAIT_S).message == numbered(10)


def test_hundreds_of_handlers_that_call_back(kind: str) -> None:
    """All of them wait at once, each within the wait of another; the stack must not run out."""
    begun: list[int] = []

    def server(endpoint: BlockingEndpoint, message: Message, payload: memoryview) -> Message:
        begun.append(number_of(message))
        return endpoint.call(message, payload=[payload], deadline_s=WAIT_S).message

    with plain_pair(kind, server, plain_echo) as (dialer, _, _, _):
        pending = [dialer.begin(numbered(n), payload=[bytes(100)], deadline_s=WAIT_S) for n in range(700)]
        assert [one.result().message for one in pending] == [numbered(n) for n in range(700)]
        assert begun == list(range(700))
        assert not dialer.closed


def test_too_many_waits_within_one_another_are_an_error_and_not_a_broken_stack(kind: str) -> None:
    def handler(endpoint: BlockingEndpoint, message: Message, payload: memoryview) -> Message:
        return endpoint.call(numbered(number_of(message) - 1), deadline_s=WAIT_S).message

    with plain_pair(kind, handler, handler) as (dialer, _, _, _):
        with pytest.raises(RemoteError, match="64 handlers wait within one another already"):
            dialer.call(numbered(1000), deadline_s=WAIT_S)
        assert not dialer.closed


def test_a_handler_may_serve_others_while_it_waits(kind: str) -> None:
    seen: list[Message] = []
    transports: list[BlockingTransport] = []

    def handler(endpoint: BlockingEndpoint, message: Message, payload: memoryview) -> Any:
        seen.append(message)
        if isinstance(message, Shutdown):
            assert transports[0].serve(lambda: len(seen) == 3, deadline_s=WAIT_S)
        return message

    with plain_pair(kind, handler) as (dialer, _, _, transport):
        transports.append(transport)
        waits = dialer.begin(Shutdown(reason=""), deadline_s=WAIT_S)
        others = [dialer.begin(numbered(n), deadline_s=WAIT_S) for n in range(2)]
        assert [one.result().message for one in [waits, *others]] == [Shutdown(reason=""), numbered(0), numbered(1)]
        assert seen == [Shutdown(reason=""), numbered(0), numbered(1)]


def test_a_handler_may_close_its_endpoint(kind: str) -> None:
    def handler(endpoint: BlockingEndpoint, message: Message, payload: memoryview) -> Message:
        endpoint.close("enough")
        return message

    with plain_pair(kind, handler) as (dialer, accepted, listener, transport):
        with pytest.raises(PeerLost, match="enough"):
            dialer.call(Heartbeat(), deadline_s=WAIT_S)
        assert accepted.closed
        assert transport.serve(lambda: not listener.endpoints, deadline_s=WAIT_S)


def test_an_expired_call_raises_when_the_wait_in_its_way_has_ended(kind: str) -> None:
    transports: list[BlockingTransport] = []

    def handler(endpoint: BlockingEndpoint, message: Message, payload: memoryview) -> None:
        transports[0].serve(lambda: False, deadline_s=0.4)

    with plain_pair(kind, handler) as (dialer, _, _, transport):
        transports.append(transport)
        with pytest.raises(DeadlineExpired, match=r"both: EndSession: nothing after \d\.\d s \(limit 0\.2 s\)"):
            dialer.call(numbered(1), deadline_s=0.2)


def test_a_transport_that_was_closed_within_a_handler_ends_the_waits(kind: str) -> None:
    transports: list[BlockingTransport] = []

    def handler(endpoint: BlockingEndpoint, message: Message, payload: memoryview) -> None:
        transports[0].close()

    with plain_pair(kind, handler) as (dialer, _, _, transport):
        transports.append(transport)
        with pytest.raises(PeerLost):
            dialer.call(Heartbeat(), deadline_s=WAIT_S)
        assert not transport.serve(lambda: False, deadline_s=WAIT_S)
