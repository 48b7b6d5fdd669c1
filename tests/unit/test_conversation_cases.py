"""The protocol core in single cases: windows, credit, giving up, and answers that can't be sent or read."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from miles_hpc.control.exchange import STREAM_WINDOW, Exchange
from miles_hpc.control.frames import Frame, Limits
from miles_hpc.core.errors import DeadlineExpired, PeerLost, RemoteError
from miles_hpc.core.messages import Ack, EndSession, Generate, Heartbeat, Message, Shutdown
from miles_hpc.core.transport import Reply
from miles_hpc.core.types import SamplingParams
from tests.fakes.scripted_wire import FakeLoop, Party, parties

NARROW = Limits(window_messages=8, window_bytes=8000)
CANCELLABLE = Generate(request_id="", session_id="", n_input=0, sampling=SamplingParams(max_new_tokens=1))


class NotInTheVocabulary(Message, frozen=True, kw_only=True):
    """A message that no decoder knows."""


def exchange_all(loop: FakeLoop, *sides: Party) -> None:
    """Move frames until nothing moves any more."""
    while any(side.wire.queue or side.wire.arriving for side in sides) or loop._ready:
        for side in sides:
            side.wire.transmit()
            side.wire.deliver()
        loop.run_ready()


def call(side: Party, name: str = "x", n_bytes: int = 0, deadline_s: float = 10.0) -> Exchange:
    payload = [bytes(n_bytes)] if n_bytes else []
    return side.conversation.begin(EndSession(session_id=name), payload, deadline_s)


def names(side: Party) -> list[str]:
    return [i.message.session_id for i in side.seen if isinstance(i.message, EndSession)]


def counters(side: Party) -> dict[str, int]:
    c = side.conversation
    return {
        "used": c._used_messages,
        "used_bytes": c._used_bytes,
        "taken": c._taken_messages,
        "taken_bytes": c._taken_bytes,
        "owed": c._owed_messages,
        "owed_bytes": c._owed_bytes,
    }


# ------------------------------------------------------------------------------------------------ windows


def test_calls_wait_for_the_window_in_order() -> None:
    loop, dialer, listener = parties(NARROW)
    calls = [call(dialer, str(n)) for n in range(20)]
    exchange_all(loop, dialer, listener)
    assert names(listener) == [str(n) for n in range(8)]
    while listener.incoming:
        listener.conversation.answer(listener.incoming.pop(0), None)
        exchange_all(loop, dialer, listener)
    assert names(listener) == [str(n) for n in range(20)]
    assert all(isinstance(one.result, Reply) for one in calls)
    assert not any(counters(dialer).values())
    assert not any(counters(listener).values())


def test_an_expired_call_that_waited_does_not_hold_back_smaller_ones() -> None:
    """Half the window is in use for long; what waits in front is too large for the rest, and gives up."""
    loop, dialer, listener = parties(NARROW)
    call(dialer, "long", 4500, deadline_s=1000)
    large = call(dialer, "large", 4500, deadline_s=1)
    small = call(dialer, "small", 10, deadline_s=1000)
    exchange_all(loop, dialer, listener)
    assert names(listener) == ["long"]
    loop.advance(2)
    assert isinstance(large.result, DeadlineExpired)
    exchange_all(loop, dialer, listener)
    assert names(listener) == ["long", "small"]
    assert small.call_id


def test_a_cancelled_call_that_waited_does_not_hold_back_smaller_ones() -> None:
    loop, dialer, listener = parties(NARROW)
    call(dialer, "long", 4500)
    large = call(dialer, "large", 4500)
    call(dialer, "small", 10)
    dialer.conversation.give_up(large, DeadlineExpired("enough"))
    exchange_all(loop, dialer, listener)
    assert names(listener) == ["long", "small"]


def test_an_urgent_message_passes_a_payload_larger_than_the_window() -> None:
    loop, dialer, listener = parties(NARROW)
    call(dialer, "huge", 3 << 20)
    beat = dialer.conversation.begin(Heartbeat(), [], 10)
    waits = call(dialer, "waits")
    exchange_all(loop, dialer, listener)
    assert not listener.conversation.is_closed, listener.conversation.close_reason
    assert [type(i.message) for i in listener.seen] == [EndSession, Heartbeat]
    listener.conversation.answer(listener.incoming[1], None)
    exchange_all(loop, dialer, listener)
    assert beat.result == Reply(Ack(), memoryview(b""))
    listener.conversation.answer(listener.incoming[0], None)
    exchange_all(loop, dialer, listener)
    assert waits.call_id


@pytest.mark.parametrize("n_bytes", [0, 3000])
def test_many_urgent_messages_to_a_peer_that_does_not_answer_harm_nobody(n_bytes: int) -> None:
    """A process that is stopped for an hour gets a heartbeat every second; when it goes on, it gets them at once."""
    loop, dialer, listener = parties(NARROW)
    calls = [call(dialer, str(n), 900, deadline_s=5000) for n in range(20)]
    beats = []
    for _ in range(1000):
        payload = [bytes(n_bytes)] if n_bytes else []
        beats.append(dialer.conversation.begin(Heartbeat(), payload, 5))
        loop.advance(1)
    assert len(dialer.wire.queue) < 1000
    exchange_all(loop, dialer, listener)
    assert not listener.conversation.is_closed, listener.conversation.close_reason
    assert all(isinstance(beat.result, DeadlineExpired) for beat in beats[:900])
    while listener.incoming:
        listener.conversation.answer(listener.incoming.pop(0), None)
        exchange_all(loop, dialer, listener)
    assert all(isinstance(one.result, Reply) for one in calls)
    assert not any(counters(dialer).values())
    assert not any(counters(listener).values())


def test_what_notifies_took_is_given_back_while_calls_use_the_rest() -> None:
    """Finished notifies don't count against a sender that needs the room."""
    loop, dialer, listener = parties(NARROW)
    for n in range(3):
        dialer.conversation.notify(EndSession(session_id=str(n)), [])
    exchange_all(loop, dialer, listener)
    for incoming in listener.incoming[:3]:
        listener.conversation.answer(incoming, None)
    calls = [call(dialer, f"c{n}") for n in range(8)]
    exchange_all(loop, dialer, listener)
    assert all(one.call_id for one in calls)


def test_counters_after_notifies_differ_by_what_is_owed_only() -> None:
    loop, dialer, listener = parties(NARROW)
    for n in range(101):
        dialer.conversation.notify(EndSession(session_id=str(n)), [bytes(10)])
        exchange_all(loop, dialer, listener)
        while listener.incoming:
            listener.conversation.answer(listener.incoming.pop(0), None)
    exchange_all(loop, dialer, listener)
    ours, theirs = counters(dialer), counters(listener)
    assert (ours["used"], ours["used_bytes"]) == (theirs["owed"], theirs["owed_bytes"])
    assert theirs["taken"] == theirs["taken_bytes"] == 0
    assert 2 * ours["used"] < NARROW.window_messages
    assert 2 * ours["used_bytes"] < NARROW.window_bytes
    assert len(names(listener)) == 101


# ------------------------------------------------------------------------------------------------ answers


def test_an_answer_that_nobody_can_read_fails_its_caller() -> None:
    loop, dialer, listener = parties(NARROW)
    pending = [call(dialer), call(dialer)]
    exchange_all(loop, dialer, listener)
    listener.conversation.answer(listener.incoming[0], NotInTheVocabulary())
    exchange_all(loop, dialer, listener)
    assert all(isinstance(one.result, PeerLost) for one in pending)
    assert "NotInTheVocabulary" in dialer.conversation.close_reason
    assert dialer.conversation.is_closed
    assert listener.conversation.is_closed
    assert loop.live_timers == 0


@pytest.mark.parametrize("answer", [5, 0, [Ack()], (5, []), "text", (Ack(), [5])])
def test_an_answer_of_a_wrong_type_is_an_error_of_that_call(answer: Any) -> None:
    loop, dialer, listener = parties(NARROW)
    one = call(dialer)
    exchange_all(loop, dialer, listener)
    listener.conversation.answer(listener.incoming[0], answer)
    exchange_all(loop, dialer, listener)
    assert isinstance(one.result, RemoteError)
    assert one.result.kind == "TypeError"
    assert not dialer.conversation.is_closed
    assert not any(counters(dialer).values())


def test_a_message_as_the_answer_to_a_stream_is_an_error() -> None:
    loop, dialer, listener = parties(NARROW)
    one = dialer.conversation.begin(Heartbeat(), [], 10, stream=True)
    exchange_all(loop, dialer, listener)
    listener.conversation.answer(listener.incoming[0], EndSession(session_id="lost otherwise"))
    exchange_all(loop, dialer, listener)
    assert isinstance(one.result, RemoteError)
    assert "stream" in one.result.text


@pytest.mark.parametrize("text", ["", "odd \udcff name", "x" * 100_000, "ж" * 20_000])
def test_any_text_of_an_error_arrives(text: str) -> None:
    loop, dialer, listener = parties(NARROW)
    one = call(dialer)
    exchange_all(loop, dialer, listener)
    listener.conversation.fail(listener.incoming[0], ValueError(text))
    exchange_all(loop, dialer, listener)
    assert isinstance(one.result, RemoteError)
    assert one.result.kind == "ValueError"
    assert one.result.text == text.replace("\udcff", "?")[: len(one.result.text)]
    assert len(one.result.text) >= min(len(text), 10_000)


def test_a_handler_that_was_cancelled_says_so() -> None:
    loop, dialer, listener = parties(NARROW)
    one = call(dialer)
    exchange_all(loop, dialer, listener)
    listener.conversation.fail(listener.incoming[0], asyncio.CancelledError())
    exchange_all(loop, dialer, listener)
    assert str(one.result) == "listener: CancelledError: the handler was cancelled"


def test_a_close_with_any_reason_reaches_the_peer() -> None:
    loop, dialer, listener = parties(NARROW)
    one = call(dialer)
    exchange_all(loop, dialer, listener)
    listener.conversation.close("odd \udcff reason")
    exchange_all(loop, dialer, listener)
    assert dialer.conversation.close_reason == "closed by the peer: odd ? reason"
    assert isinstance(one.result, PeerLost)
    assert (dialer.times_ended, listener.times_ended) == (1, 1)


# ------------------------------------------------------------------------------------------------ giving up


@pytest.mark.parametrize("message", [CANCELLABLE])
def test_a_handler_hears_once_that_nobody_waits(message: Message) -> None:
    loop, dialer, listener = parties(NARROW)
    one = dialer.conversation.begin(CANCELLABLE, [], 1)
    exchange_all(loop, dialer, listener)
    loop.advance(2)
    dialer.conversation.give_up(one, DeadlineExpired("again"))
    exchange_all(loop, dialer, listener)
    assert listener.stopped == listener.seen
    listener.conversation.close("over")
    assert len(listener.stopped) == 1


@pytest.mark.parametrize("end", ["give up", "expire", "close"])
def test_a_handler_that_must_not_be_stopped_is_not(end: str) -> None:
    loop, dialer, listener = parties(NARROW)
    one = call(dialer, deadline_s=1)
    exchange_all(loop, dialer, listener)
    if end == "give up":
        dialer.conversation.give_up(one, DeadlineExpired("enough"))
    elif end == "expire":
        loop.advance(2)
    else:
        dialer.conversation.close("enough")
    exchange_all(loop, dialer, listener)
    assert not listener.stopped


def test_a_cancel_for_what_the_face_has_not_begun_is_seen_in_time() -> None:
    """CALL and CANCEL arrive together; a face that runs its handlers later has not set `stop` yet."""
    loop, dialer, listener = parties(NARROW)
    listener.serve = listener.seen.append  # type: ignore[method-assign, assignment]
    for stream in (False, True):
        message = Heartbeat() if stream else CANCELLABLE
        one = dialer.conversation.begin(message, [], 10, stream=stream)
        dialer.conversation.give_up(one, DeadlineExpired("enough"))
    one = call(dialer)
    dialer.conversation.give_up(one, DeadlineExpired("enough"))
    exchange_all(loop, dialer, listener)
    assert [incoming.unwanted for incoming in listener.seen] == [True, True, False]


def test_after_the_end_no_stream_is_ready_for_items() -> None:
    loop, dialer, listener = parties(NARROW)
    dialer.conversation.begin(Heartbeat(), [], 10, stream=True)
    exchange_all(loop, dialer, listener)
    (incoming,) = listener.incoming
    assert listener.conversation.ready_for_item(incoming)
    listener.conversation.close("over")
    assert not listener.conversation.ready_for_item(incoming)


def test_items_beyond_the_window_wait_for_credit() -> None:
    loop, dialer, listener = parties(NARROW)
    got: list[Reply] = []
    one = dialer.conversation.begin(Heartbeat(), [], 10, stream=True, on_item=got.append)
    exchange_all(loop, dialer, listener)
    (incoming,) = listener.incoming
    sent = 0
    for taken in (0, 3, 1, 16):
        if taken:
            dialer.conversation.item_taken(one, taken)
            exchange_all(loop, dialer, listener)
        while listener.conversation.ready_for_item(incoming):
            listener.conversation.item(incoming, EndSession(session_id=str(sent)))
            sent += 1
        exchange_all(loop, dialer, listener)
    assert sent == 2 * STREAM_WINDOW + 4
    assert [reply.message.session_id for reply in got] == [str(n) for n in range(sent)]  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------------------------ admission


def test_messages_wait_for_admission_and_are_gone_with_a_refusal() -> None:
    loop, dialer, listener = parties(NARROW, admit=False)
    decided: list[Exception | None] = []
    dialer.conversation.when_admitted(decided.append)
    one = call(dialer)
    exchange_all(loop, dialer, listener)
    assert not listener.seen
    listener.conversation.refuse(RuntimeError("no room"))
    exchange_all(loop, dialer, listener)
    assert not listener.seen
    assert isinstance(decided[0], RemoteError)
    assert isinstance(one.result, PeerLost)


def test_a_call_given_up_before_admission_is_never_begun() -> None:
    loop, dialer, listener = parties(NARROW, admit=False)
    one = call(dialer, "gone")
    dialer.conversation.give_up(one, DeadlineExpired("enough"))
    call(dialer, "stays")
    exchange_all(loop, dialer, listener)
    listener.conversation.admit()
    exchange_all(loop, dialer, listener)
    assert names(listener) == ["stays"]
    assert counters(dialer)["used"] == 1


# ------------------------------------------------------------------------------------------------ notifies and the wire


def test_a_large_notify_ends_when_its_buffers_are_free() -> None:
    loop, dialer, _ = parties(Limits())
    one = dialer.conversation.notify(Heartbeat(), [bytes(100_000)])
    small = dialer.conversation.notify(Heartbeat(), [bytes(10)])
    loop.run_ready()
    assert one.result is None
    assert isinstance(small.result, Reply)
    dialer.wire.transmit(1)
    loop.run_ready()
    assert isinstance(one.result, Reply)


@pytest.mark.parametrize("how", ["lost", "closed here", "closed there"])
def test_the_end_settles_everything(how: str) -> None:
    loop, dialer, listener = parties(NARROW)
    everything = [call(dialer, str(n), 900) for n in range(20)]
    everything.append(dialer.conversation.begin(Heartbeat(), [], 10, stream=True))
    everything += [dialer.conversation.notify(Shutdown(reason=""), [bytes(50_000)]) for _ in range(3)]
    exchange_all(loop, dialer, listener)
    late = dialer.conversation.notify(Heartbeat(), [bytes(50_000)])  # its buffers are still needed
    if how == "lost":
        dialer.wire.lose()
    elif how == "closed here":
        dialer.conversation.close("enough")
    else:
        listener.conversation.close("enough")
        exchange_all(loop, dialer, listener)
    assert all(one.result is not None for one in [*everything, late])
    assert isinstance(late.result, PeerLost)
    assert dialer.times_ended == 1
    assert loop.live_timers == 0
    with pytest.raises(PeerLost):
        call(dialer)
    assert all(frame.kind != Frame.CALL for frame in dialer.wire.queue)
