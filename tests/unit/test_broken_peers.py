"""Peers that hold the secret and have a bug: only their own connection ends, with a reason; nobody waits for ever."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from miles_hpc.control.auth import SessionKeys
from miles_hpc.control.conversation import HIGH_WATER_BYTES, Conversation, Face
from miles_hpc.control.exchange import STREAM_WINDOW, Exchange, Incoming
from miles_hpc.control.frames import Failure, Frame, Limits
from miles_hpc.control.plain_loop import PlainLoop
from miles_hpc.core.errors import DeadlineExpired, PeerLost, RemoteError
from miles_hpc.core.messages import Ack, EndSession, Generate, Heartbeat, encode
from miles_hpc.core.transport import PeerIdentity, Reply
from miles_hpc.core.types import SamplingParams
from tools.fuzz_control.in_process import PaperWire

IDENTITY = PeerIdentity(role="trainer", name="peer", host="host", pid=7, attempt=1, term=1)
EMPTY = memoryview(b"")
ACK = encode(Ack())
CREDIT = struct.Struct("<IQ")


class Owner(Face):
    def __init__(self) -> None:
        self.served: list[Incoming] = []
        self.n_ended = 0
        self.on_serve: Callable[[Incoming], None] = lambda incoming: None

    def serve(self, incoming: Incoming) -> None:
        self.served.append(incoming)
        self.on_serve(incoming)

    def ended(self) -> None:
        self.n_ended += 1


class Side:
    """A conversation, what it sends, and a way to let frames arrive."""

    def __init__(self, *, dialer: bool = True, limits: Limits | None = None) -> None:
        self.loop = PlainLoop()
        self.wire = PaperWire()
        self.owner = Owner()
        keys = SessionKeys(IDENTITY, bytes(32), bytes(32), (100, 1 << 20))
        self.conversation = Conversation(self.loop, self.wire, keys, limits or Limits(), self.owner, dialer=dialer)
        self.arrive = self.wire.on_frame

    def frame(self, kind: Frame, call_id: int = 0, header: bytes = b"", payload: memoryview = EMPTY) -> None:
        self.arrive(kind, call_id, header, payload)

    @property
    def goodbye(self) -> str:
        """The reason in the last frame that left."""
        kind, _, header = self.wire.sent[-1]
        assert kind == Frame.CLOSE
        return msgspec.msgpack.decode(header, type=Failure).text

    def sent(self, kind: Frame) -> list[tuple[int, bytes]]:
        return [(call_id, header) for k, call_id, header in self.wire.sent if k == kind]


@pytest.fixture
def side() -> Side:
    return Side()


def ended(side: Side, reason: str) -> None:
    assert side.conversation.is_closed
    assert reason in side.conversation.close_reason
    assert reason in side.goodbye
    assert side.owner.n_ended == 1
    assert side.wire.ended


def generate() -> bytes:
    return encode(Generate(request_id="r", session_id="s", n_input=1, sampling=SamplingParams(max_new_tokens=1)))


# ------------------------------------------------------------------------------------- answers


@pytest.mark.parametrize("header", [b"", b"\xc1", encode(Heartbeat())[:-1], b"\x81\xa1_\xa4None"])
def test_an_answer_that_cannot_be_read_ends_the_call(side: Side, header: bytes) -> None:
    done: list[Exchange] = []
    exchange = side.conversation.begin(Heartbeat(), [], 60.0, on_done=done.append)
    side.frame(Frame.REPLY, exchange.call_id, header)
    ended(side, "protocol error in REPLY")
    assert isinstance(exchange.result, PeerLost)
    assert done == [exchange]


def test_answers_to_no_call(side: Side) -> None:
    side.frame(Frame.REPLY, 77, ACK)
    ended(side, "answer to call 77, which isn't open")


def test_a_second_answer(side: Side) -> None:
    exchange = side.conversation.begin(Heartbeat(), [], 60.0)
    side.frame(Frame.REPLY, exchange.call_id, ACK)
    assert isinstance(exchange.result, Reply)
    side.frame(Frame.REPLY, exchange.call_id, ACK)
    ended(side, f"answer to call {exchange.call_id}, which isn't open")


@pytest.mark.parametrize("header", [b"", b"\x90", b"\x92\x01\x02", b"\xc1"])
def test_a_failure_that_cannot_be_read_ends_the_call(side: Side, header: bytes) -> None:
    exchange = side.conversation.begin(Heartbeat(), [], 60.0)
    side.frame(Frame.FAILURE, exchange.call_id, header)
    ended(side, "protocol error in FAILURE")
    assert isinstance(exchange.result, PeerLost)


def test_a_failure_of_any_length_is_cut(side: Side) -> None:
    exchange = side.conversation.begin(Heartbeat(), [], 60.0)
    side.frame(Frame.FAILURE, exchange.call_id, msgspec.msgpack.encode(Failure("K" * 9999, "x" * 1_000_000)))
    assert isinstance(exchange.result, RemoteError)
    assert 10_000 < len(str(exchange.result)) < 20_000
    assert not side.conversation.is_closed


# ------------------------------------------------------------------------------------- streams


def test_a_stream_that_runs_ahead_of_its_reader_ends_the_connection(side: Side) -> None:
    items: list[Reply] = []
    exchange = side.conversation.begin(Heartbeat(), [], 60.0, stream=True, on_item=items.append)
    for _ in range(STREAM_WINDOW):
        side.frame(Frame.ITEM, exchange.call_id, ACK)
    assert len(items) == STREAM_WINDOW
    side.conversation.item_taken(exchange, 3)
    for _ in range(3):
        side.frame(Frame.ITEM, exchange.call_id, ACK)
    assert not side.conversation.is_closed
    side.frame(Frame.ITEM, exchange.call_id, ACK)
    ended(side, f"stream {exchange.call_id} is more than {STREAM_WINDOW} items ahead of its reader")
    assert len(items) == STREAM_WINDOW + 3
    assert isinstance(exchange.result, PeerLost)


def test_a_stream_that_was_left_may_not_go_on_for_ever_either(side: Side) -> None:
    exchange = side.conversation.begin(Heartbeat(), [], 60.0, stream=True)
    side.conversation.give_up(exchange, DeadlineExpired("left"))
    for _ in range(STREAM_WINDOW):  # on their way when it was left
        side.frame(Frame.ITEM, exchange.call_id, ACK)
    assert not side.conversation.is_closed
    side.frame(Frame.ITEM, exchange.call_id, ACK)
    ended(side, "items ahead of its reader")


def test_items_of_what_is_no_stream(side: Side) -> None:
    exchange = side.conversation.begin(Heartbeat(), [], 60.0)
    side.frame(Frame.ITEM, exchange.call_id, ACK)
    ended(side, f"item of stream {exchange.call_id}, which isn't open")


# ------------------------------------------------------------------------------------- windows


@pytest.mark.parametrize("credit", [(2, 0), (0, 1 << 40), (1, 1 << 40), ((1 << 32) - 1, (1 << 64) - 1)])
def test_credit_that_was_not_earned(side: Side, credit: tuple[int, int]) -> None:
    side.conversation.notify(Heartbeat(), [])
    for _ in range(5):
        side.conversation.begin(Heartbeat(), [], 60.0)  # an answer gives these back, credit doesn't
    side.frame(Frame.CREDIT, 0, CREDIT.pack(*credit))
    ended(side, "which weren't sent")


def test_credit_that_was_earned(side: Side) -> None:
    n = len(encode(Heartbeat()))
    for _ in range(100):
        side.conversation.notify(Heartbeat(), [])
    waiting = side.conversation.notify(EndSession(session_id="x"), [])
    assert waiting.result is None
    side.frame(Frame.CREDIT, 0, CREDIT.pack(100, 100 * n))
    assert waiting.result is not None
    assert not side.conversation.is_closed


@pytest.mark.parametrize("header", [b"", bytes(11), bytes(13)])
def test_credit_without_its_numbers(side: Side, header: bytes) -> None:
    side.frame(Frame.CREDIT, 0, header)
    ended(side, "protocol error in CREDIT")


def test_more_messages_than_the_window() -> None:
    side = Side(limits=Limits(window_messages=10))
    for n in range(10):
        side.frame(Frame.CALL, n + 1, ACK)
    for n in range(5):  # urgent ones may go beyond
        side.frame(Frame.CALL, n + 20, encode(Heartbeat()))
    assert not side.conversation.is_closed
    side.frame(Frame.CALL, 1000, ACK)
    ended(side, "16 messages of")


def test_more_urgent_messages_than_anybody_needs() -> None:
    side = Side(limits=Limits(window_messages=10))
    for n in range(1000):
        side.frame(Frame.CALL, n + 1, encode(Heartbeat()))
    ended(side, "messages of")
    assert 10 < len(side.owner.served) < 200


def test_a_peer_that_reads_nothing_cannot_make_our_queue_grow_by_cancelling(side: Side) -> None:
    side.wire.queued = HIGH_WATER_BYTES + 1
    before = len(side.wire.sent)
    for n in range(1, 40):
        side.frame(Frame.CALL, n, ACK, memoryview(b"x" * 1000))
        side.frame(Frame.CANCEL, n)
    assert len(side.wire.sent) == before
    assert not side.owner.served
    side.wire.queued = 0
    side.wire.on_drained()
    assert [call_id for call_id, _ in side.sent(Frame.FAILURE)] == list(range(1, 40))
    assert not side.owner.served


# ------------------------------------------------------------------------------------- calls


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (b"", "truncated"),
        (b"\x82\xa1_\xaaEndSession\xa1x" + b"\x91" * 100_000, "recursion"),
        (b"\x83\xa1_\xabAbortGroups\xa9group_ids\xdd\xff\xff\xff\xff", "truncated"),
        (b"\x82\xa1_\xaaEndSession\xaasession_id\xa2\xff\xfe", "UTF-8"),
        (encode(Heartbeat()) + b"x", "trailing"),
        (msgspec.msgpack.encode({"_": "N" * 100_000}), "Invalid value 'NNN"),
    ],
)
@pytest.mark.parametrize("kind", [Frame.CALL, Frame.NOTIFY, Frame.STREAM])
def test_messages_that_cannot_be_read(
    kind: Frame, header: bytes, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    side = Side()
    side.frame(kind, 5, header)
    ended(side, reason)
    assert f"protocol error in {kind.name}" in side.goodbye
    assert not side.owner.served
    assert len(caplog.text) < 1000


def test_the_same_call_twice(side: Side) -> None:
    side.frame(Frame.CALL, 5, ACK)
    side.frame(Frame.CALL, 5, ACK)
    ended(side, "call 5 twice")


@pytest.mark.parametrize("kind", [Frame.ADMIT, Frame.REFUSE])
def test_a_dialer_that_decides(kind: Frame) -> None:
    side = Side(dialer=False)
    side.frame(kind, 0, b"")
    ended(side, f"unexpected {kind.name}")


def test_cancelling_twice_stops_once(side: Side) -> None:
    stops: list[int] = []

    def on_serve(incoming: Incoming) -> None:
        incoming.stop = lambda: stops.append(incoming.call_id)

    side.owner.on_serve = on_serve
    side.frame(Frame.CALL, 5, generate())
    for _ in range(3):
        side.frame(Frame.CANCEL, 5)
    side.conversation.abandon("end")
    assert stops == [5]


def test_a_bug_of_ours_ends_that_connection_with_its_name(side: Side, caplog: pytest.LogCaptureFixture) -> None:
    def on_done(exchange: Exchange) -> None:
        raise ZeroDivisionError("oops")

    exchange = side.conversation.begin(Heartbeat(), [], 60.0, on_done=on_done)
    side.frame(Frame.REPLY, exchange.call_id, ACK)
    ended(side, "ZeroDivisionError while a frame was taken: oops")
    assert "Traceback" in caplog.text


def test_an_error_about_an_odd_file_name_reaches_the_caller(side: Side) -> None:
    """Python keeps bytes that aren't UTF-8 as lone surrogates, which no encoder takes."""

    def on_serve(incoming: Incoming) -> None:
        side.conversation.fail(incoming, FileNotFoundError(b"caf\xe9.txt".decode(errors="surrogateescape")))

    side.owner.on_serve = on_serve
    side.frame(Frame.CALL, 5, ACK)
    ((call_id, header),) = side.sent(Frame.FAILURE)
    assert call_id == 5
    assert msgspec.msgpack.decode(header, type=Failure) == Failure("FileNotFoundError", "caf?.txt")


def test_nothing_is_done_after_the_end(side: Side) -> None:
    side.frame(Frame.CLOSE, 0, msgspec.msgpack.encode(Failure("", "bye")))
    assert side.conversation.close_reason == "closed by the peer: bye"
    n = len(side.wire.sent)
    frames: list[Any] = [(Frame.CALL, 1, ACK), (Frame.REPLY, 1, ACK), (Frame.CLOSE, 0, b""), (Frame.CREDIT, 0, b"")]
    for kind, call_id, header in frames:
        side.frame(kind, call_id, header)
    assert not side.owner.served
    assert len(side.wire.sent) == n
    assert side.owner.n_ended == 1
