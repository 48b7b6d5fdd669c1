"""The protocol core under any order of events: two conversations over a wire on which a script moves the frames."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from miles_hpc.control import conversation
from miles_hpc.control.exchange import STREAM_WINDOW, Exchange, Incoming
from miles_hpc.control.frames import Frame, Limits
from miles_hpc.core.errors import DeadlineExpired, PeerLost, RemoteError
from miles_hpc.core.messages import EndSession, Generate, Heartbeat, Message
from miles_hpc.core.transport import Reply
from miles_hpc.core.types import SamplingParams
from tests.exploring import examples
from tests.fakes.scripted_wire import Party, ScriptedWire, SentFrame, parties

SAMPLING = SamplingParams(max_new_tokens=1)
ASKING = (Frame.CALL, Frame.STREAM, Frame.NOTIFY)
ENDING = (Frame.REPLY, Frame.FAILURE)
GIVEN_UP = "the script gave it up"
HIGH_WATER_BYTES = 60_000
LOW_WATER_BYTES = 10_000
WINDOW_BYTES = st.sampled_from([1, 1000, 3000, 30_000])


def message_of(what: str, name: str) -> Message:
    if what == "urgent":
        return Heartbeat(children=(name,))
    if what == "cancellable":
        return Generate(request_id=name, session_id="", n_input=0, sampling=SAMPLING)
    return EndSession(session_id=name)


def name_of(message: Message) -> str:
    if isinstance(message, Heartbeat):
        return message.children[0]
    if isinstance(message, Generate):
        return message.request_id
    assert isinstance(message, EndSession)
    return message.session_id


@dataclass
class Ours:
    """What one side has begun."""

    name: str
    what: str
    kind: str  # call | stream | notify
    number: int  # in the order of their beginning
    exchange: Exchange
    ended: int = 0
    given_up: bool = False
    items: list[Reply] = field(default_factory=list)
    read: int = 0

    @property
    def passes(self) -> bool:
        return self.what == "urgent" and self.exchange.cost <= 64 << 10


class TwoConversations(RuleBasedStateMachine):
    """Rules do what faces, wires and clocks may do; invariants are what must be true whenever."""

    @initialize(
        limits=st.tuples(
            st.builds(Limits, window_messages=st.sampled_from([1, 3, 6, 12]), window_bytes=WINDOW_BYTES),
            st.builds(Limits, window_messages=st.sampled_from([1, 3, 6, 12]), window_bytes=WINDOW_BYTES),
        ),
        admit=st.sampled_from([True, True, False]),
    )
    def start(self, limits: tuple[Limits, Limits], admit: bool) -> None:
        self.patches = [
            mock.patch.object(conversation, "HIGH_WATER_BYTES", HIGH_WATER_BYTES),
            mock.patch.object(ScriptedWire, "low_water_bytes", LOW_WATER_BYTES),
        ]
        for patch in self.patches:
            patch.start()
        self.loop, dialer, listener = parties(limits[0], listener_limits=limits[1], admit=admit)
        self.sides = (dialer, listener)
        self.limits = limits
        self.admitted = admit
        self.decided: list[Exception | None] = []
        dialer.conversation.when_admitted(self.decided.append)
        self.ours: tuple[list[Ours], list[Ours]] = ([], [])
        self.sent_items: dict[str, list[str]] = {}
        self.blocked: dict[int, tuple[int, Incoming]] = {}  # streams that wait for their reader or for the wire

    # ------------------------------------------------------------------------------ what a face does

    side = st.integers(0, 1)
    size = st.sampled_from([0, 0, 50, 300, 600, 900, 2000, 20_000, 70_000])
    what = st.sampled_from(["plain", "plain", "cancellable", "urgent"])
    some = st.integers(0, 1000)

    def _open(self, side: int) -> bool:
        return not self.sides[side].conversation.is_closed

    def _begin(self, side: int, what: str, kind: str, size: int, deadline_s: float) -> None:
        core = self.sides[side].conversation
        mine = self.ours[side]
        name = f"{'dl'[side]}{len(mine)}"
        payload = [bytes(size)] if size else []

        def done(exchange: Exchange) -> None:
            record.ended += 1
            error = exchange.result
            if isinstance(error, DeadlineExpired) and GIVEN_UP not in str(error):
                assert self.loop.now >= exchange.end - 1e-9

        record = Ours(name, what, kind, len(mine), None)  # type: ignore[arg-type]
        message = message_of(what, name)
        if kind == "notify":
            record.exchange = core.notify(message, payload, done)
        else:
            record.exchange = core.begin(
                message,
                payload,
                deadline_s,
                stream=kind == "stream",
                on_done=done,
                on_item=record.items.append if kind == "stream" else None,
            )
        mine.append(record)

    @rule(side=side, what=what, kind=st.sampled_from(["call", "stream", "notify"]), size=size, t=st.floats(0, 20))
    def begin(self, side: int, what: str, kind: str, size: int, t: float) -> None:
        if self._open(side):
            self._begin(side, what, kind, size, t)

    @rule(side=side, what=what, kind=st.sampled_from(["call", "notify"]), n=st.integers(2, 8), size=size)
    def begin_many(self, side: int, what: str, kind: str, n: int, size: int) -> None:
        for _ in range(n):
            if self._open(side):
                self._begin(side, what, kind, size, 10.0)

    @rule(side=side, some=some, deliver=st.booleans())
    def give_up(self, side: int, some: int, deliver: bool) -> None:
        unsettled = [o for o in self.ours[side] if o.exchange.result is None and o.kind != "notify"]
        if unsettled:
            record = unsettled[some % len(unsettled)]
            record.given_up = True
            peer = self.sides[1 - side]
            at_work = [i for i in peer.incoming if name_of(i.message) == record.name]
            self.sides[side].conversation.give_up(record.exchange, DeadlineExpired(GIVEN_UP))
            assert record.ended == 1
            if deliver:
                self.move(side)
                for incoming in at_work:
                    assert (incoming in peer.stopped) == (incoming.wants_stream or incoming.message.cancellable)

    @rule(side=side, some=some, size=size, how=st.sampled_from(["none", "echo", "echo", "fail", "wrong"]))
    def answer(self, side: int, some: int, size: int, how: str) -> None:
        incoming = self.sides[side].incoming
        if incoming:
            self._answer(side, incoming.pop(some % len(incoming)), how, size)

    def _answer(self, side: int, incoming: Incoming, how: str, size: int = 0) -> None:
        core = self.sides[side].conversation
        name = name_of(incoming.message)
        if how == "fail":
            core.fail(incoming, ValueError(f"re {name}"))
        elif how == "wrong":
            core.answer(incoming, 5)  # type: ignore[arg-type]
        elif how == "none" or incoming.wants_stream:
            core.answer(incoming, None)
        else:
            core.answer(incoming, (EndSession(session_id=f"re {name}"), [bytes(size)]))

    @rule(side=side, some=some, size=size, n=st.sampled_from([1, 5, 20]))
    def send_items(self, side: int, some: int, size: int, n: int) -> None:
        streams = [i for i in self.sides[side].incoming if i.wants_stream]
        if not streams:
            return
        incoming = streams[some % len(streams)]
        core = self.sides[side].conversation
        name = name_of(incoming.message)
        sent = self.sent_items.setdefault(name, [])
        for _ in range(n):
            if not core.ready_for_item(incoming):
                self.blocked[id(incoming)] = (side, incoming)
                self.sides[side].told_more.discard(id(incoming))
                break
            else:
                core.item(incoming, (EndSession(session_id=f"{name}.{len(sent)}"), [bytes(size)]))
                sent.append(f"{name}.{len(sent)}")

    @rule(side=side, some=some, n=st.sampled_from([1, 3, STREAM_WINDOW]))
    def read_items(self, side: int, some: int, n: int) -> None:
        unread = [o for o in self.ours[side] if o.read < len(o.items)]
        if unread:
            record = unread[some % len(unread)]
            n = min(n, len(record.items) - record.read)
            record.read += n
            self.sides[side].conversation.item_taken(record.exchange, n)

    # ------------------------------------------------------------------------------ what wires, clocks and owners do

    @rule(side=side, taken=st.integers(0, 30), arrives=st.integers(0, 30))
    def move_some(self, side: int, taken: int, arrives: int) -> None:
        self.sides[side].wire.transmit(taken)
        self.loop.run_ready()
        self.sides[1 - side].wire.deliver(arrives)

    def move(self, side: int) -> None:
        self.move_some(side, 1 << 30, 1 << 30)

    @rule(n=st.integers(1, 5))
    def move_all(self, n: int) -> None:
        for _ in range(n):
            self.move(0)
            self.move(1)

    @rule(seconds=st.floats(0, 5))
    def advance(self, seconds: float) -> None:
        self.loop.advance(seconds)
        for mine in self.ours:
            for record in mine:
                late = record.kind != "notify" and record.exchange.end < self.loop.now
                assert record.exchange.result is not None or not late

    @precondition(lambda self: not self.admitted and self._open(1))
    @rule()
    def admit(self) -> None:
        self.admitted = True
        self.sides[1].conversation.admit()

    @precondition(lambda self: self._open(0) and self._open(1))
    @rule(side=side, how=st.sampled_from([*["not"] * 18, "close", "lose", "refuse"]))
    def end(self, side: int, how: str) -> None:
        party = self.sides[side]
        if how == "close":
            party.conversation.close("enough")
        elif how == "lose":
            party.wire.lose()
            self.sides[1 - side].wire.lose()
        elif how == "refuse" and not self.admitted:
            self.sides[1].conversation.refuse(RuntimeError("no"))
            assert not self.sides[1].seen

    # ------------------------------------------------------------------------------ what must be true

    @invariant()
    def every_exchange_ends_once(self) -> None:
        for side, mine in enumerate(self.ours):
            for record in mine:
                result = record.exchange.result
                assert record.ended == (result is not None)
                if record.given_up:
                    assert isinstance(result, DeadlineExpired)
                if isinstance(result, PeerLost):
                    assert not self._open(side)
                if isinstance(result, RemoteError) and result.kind == "ValueError":
                    assert result.text == f"re {record.name}"
                if isinstance(result, Reply) and isinstance(result.message, EndSession):
                    assert result.message.session_id == f"re {record.name}"
                if not self._open(side):
                    assert result is not None

    @invariant()
    def everything_arrives_once_and_in_order(self) -> None:
        for side, mine in enumerate(self.ours):
            seen = [name_of(i.message) for i in self.sides[1 - side].seen]
            assert len(seen) == len(set(seen))
            by_name = {record.name: record for record in mine}
            for passes in (True, False):  # what is urgent and small may pass others
                numbers = [by_name[n].number for n in seen if by_name[n].passes == passes]
                assert numbers == sorted(numbers) or len(numbers) > 64
            for record in mine:
                names = [name_of(reply.message) for reply in record.items]
                assert names == self.sent_items.get(record.name, [])[: len(names)]
                assert len(self.sent_items.get(record.name, [])) - record.read <= STREAM_WINDOW

    @invariant()
    def only_what_may_be_stopped_is_and_once(self) -> None:
        for party in self.sides:
            assert len(party.stopped) == len({id(i) for i in party.stopped})
            assert all(i.wants_stream or i.message.cancellable for i in party.stopped)
            assert party.times_ended == party.conversation.is_closed

    @invariant()
    def who_waits_for_room_hears_of_it(self) -> None:
        """Between the two water marks a stream may go on, and nobody needs to say so yet."""
        self.loop.run_ready()
        for side, incoming in self.blocked.values():
            party = self.sides[side]
            has_room = party.conversation.ready_for_item(incoming) and party.wire.queued_bytes < LOW_WATER_BYTES
            if has_room and incoming in party.incoming:
                assert id(incoming) in party.told_more

    @invariant()
    def both_sides_count_the_same(self) -> None:
        """What a sender counts as used is on its way, in work, owed, or on its way back."""
        if not (self._open(0) and self._open(1)):
            return
        for side in (0, 1):
            ours, theirs = self.sides[side], self.sides[1 - side]
            us, them = ours.conversation, theirs.conversation
            costs = {o.exchange.call_id: o.exchange.cost for o in self.ours[side] if o.exchange.call_id}
            messages = them._taken_messages + them._owed_messages
            n_bytes = them._taken_bytes + them._owed_bytes
            for frame in _moving(ours, theirs):
                if frame.kind in ASKING:
                    messages += 1
                    n_bytes += frame.n_bytes
            for frame in _moving(theirs, ours):
                if frame.kind in ENDING:
                    messages += 1
                    n_bytes += costs[frame.call_id]
                elif frame.kind == Frame.CREDIT and frame.call_id == 0:
                    credit = conversation._CREDIT.unpack(frame.header)
                    messages += credit[0]
                    n_bytes += credit[1]
            assert (us._used_messages, us._used_bytes) == (messages, n_bytes)

    @invariant()
    def the_window_is_kept(self) -> None:
        for side in (0, 1):
            core, limits = self.sides[side].conversation, self.limits[1 - side]
            if core.is_closed:
                continue
            urgent = sum(o.what == "urgent" for o in self.ours[side])
            assert core._used_messages <= limits.window_messages + min(urgent, 64)
            largest = max([0, *(o.exchange.cost for o in self.ours[side])])
            assert core._used_bytes <= limits.window_bytes + largest + urgent * (64 << 10)
            if core._waiting:  # else it would wait for nothing
                head = core._waiting[0].cost
                assert core._used_messages >= limits.window_messages or (
                    core._used_bytes + head > limits.window_bytes and 2 * core._used_bytes >= limits.window_bytes
                )

    @invariant()
    def nobody_is_accused(self) -> None:
        for party in self.sides:
            assert "protocol error" not in party.conversation.close_reason
            assert " while a frame was taken" not in party.conversation.close_reason

    # ------------------------------------------------------------------------------ the end of each run

    def teardown(self) -> None:
        if not hasattr(self, "sides"):
            return
        try:
            self._settle()
            self._close()
        finally:
            for patch in self.patches:
                patch.stop()

    def _settle(self) -> None:
        """Everybody answers, and all arrives."""
        if self._open(0) and self._open(1) and not self.admitted:
            self.admit()
        for _ in range(10_000):
            moving = False
            for side, party in enumerate(self.sides):
                party.wire.transmit()
                party.wire.deliver()
                self.loop.run_ready()
                while party.incoming:
                    self._answer(side, party.incoming.pop(0), "echo")
                    moving = True
            if not moving and not any(party.wire.queue or party.wire.arriving for party in self.sides):
                break
        else:
            raise AssertionError("it never comes to rest")
        self._check()
        if self._open(0) and self._open(1):
            for side in (0, 1):
                us, them = self.sides[side].conversation, self.sides[1 - side].conversation
                assert (them._taken_messages, them._taken_bytes) == (0, 0)
                assert (us._used_messages, us._used_bytes) == (them._owed_messages, them._owed_bytes)
                assert 2 * us._used_messages < self.limits[1 - side].window_messages or us._used_messages == 0
                assert not us._exchanges
                assert not us._notifies
                assert not us._serving
            assert all(record.exchange.result is not None for mine in self.ours for record in mine)
            seen = {name_of(i.message) for party in self.sides for i in party.seen}
            for record in (o for mine in self.ours for o in mine):
                if not isinstance(record.exchange.result, DeadlineExpired):
                    assert record.name in seen

    def _close(self) -> None:
        self.sides[0].conversation.close("the run is over")
        self.sides[0].wire.transmit()
        self.sides[1].wire.deliver()
        if not self.sides[1].conversation.is_closed:  # the goodbye got lost
            self.sides[1].wire.lose()
        self.loop.run_ready()
        self._check()
        assert self.loop.live_timers == 0
        assert len(self.decided) == 1
        for party in self.sides:
            core: Any = party.conversation
            for rest in (core._exchanges, core._waiting, core._notifies, core._serving, core._held):
                assert not rest

    def _check(self) -> None:
        self.every_exchange_ends_once()
        self.everything_arrives_once_and_in_order()
        self.only_what_may_be_stopped_is_and_once()
        self.both_sides_count_the_same()
        self.nobody_is_accused()


def _moving(sender: Party, receiver: Party) -> list[SentFrame]:
    return [*sender.wire.queue, *receiver.wire.arriving]


TwoConversations.TestCase.settings = settings(max_examples=examples(120), stateful_step_count=60)
test_two_conversations = TwoConversations.TestCase
