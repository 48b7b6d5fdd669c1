"""Fan-out in one process: the plan, delivery, failures, ids, cancellation."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_hpc.control.links import Links
from miles_hpc.control.opening import open_transport
from miles_hpc.control.relay import RelayHandler
from miles_hpc.control.tree import Node, plan_branches, plan_tree
from miles_hpc.core.errors import DeadlineExpired, FencedError, PeerLost, RemoteError, UserError
from miles_hpc.core.messages import (
    Ack,
    ChildEvent,
    EndSession,
    Generate,
    Heartbeat,
    Message,
    Relay,
    RelayDone,
    RelayOutcome,
    RelayTarget,
    Shutdown,
    encode,
)
from miles_hpc.core.transport import Endpoint, Reply
from miles_hpc.core.types import SamplingParams
from tests.exploring import examples
from tests.fakes.fleet import FATES, Peer, credentials, fleet
from tests.fakes.virtual_time import run_virtually

WAIT_S = 60.0  # a bound against hanging, not an expectation
GENERATE = Generate(
    request_id="r", session_id="s", n_input=0, sampling=SamplingParams(max_new_tokens=1)
)  # may be stopped


def run(main: Callable[[], Awaitable[None]]) -> None:
    """On a clock that jumps: times are exact, however busy the machine is."""

    async def bounded() -> None:
        async with asyncio.timeout(WAIT_S * 2):
            await main()

    run_virtually(bounded())


# ------------------------------------------------------------------------------------------------ the plan


def depth(nodes: tuple[Node[Any], ...]) -> int:
    return max((1 + depth(node.children) for node in nodes), default=0)


def flatten(nodes: tuple[Node[Any], ...]) -> list[Any]:
    return [target for node in nodes for target in (node.target, *flatten(node.children))]


@pytest.mark.parametrize(
    ("n", "arity", "sent_by_root", "levels"),
    [
        (0, 8, 0, 0),
        (1, 8, 1, 1),
        (2, 2, 2, 1),
        (3, 2, 2, 2),
        (7, 2, 2, 3),
        (8, 8, 8, 1),
        (9, 8, 8, 2),
        (64, 8, 8, 2),
        (72, 8, 8, 2),
        (73, 8, 8, 3),
        (512, 8, 8, 3),
        (512, 2, 2, 9),
        (584, 8, 8, 3),
        (10_000, 8, 8, 5),
    ],
)
def test_plan(n: int, arity: int, sent_by_root: int, levels: int) -> None:
    tree = plan_tree(range(n), arity)
    assert len(tree) == sent_by_root
    assert depth(tree) == levels
    assert flatten(tree) == list(range(n))


@given(st.integers(0, 3000), st.integers(2, 40))
def test_plan_has_every_target_once_in_few_levels_with_few_children(n: int, arity: int) -> None:
    tree = plan_tree(range(n), arity)
    assert sorted(flatten(tree)) == list(range(n))
    assert depth(tree) <= (math.ceil(math.log(n, arity) - 1e-9) + 1 if n else 0)

    def widest(nodes: tuple[Node[int], ...]) -> int:
        return max((len(nodes), *(widest(node.children) for node in nodes)))

    assert widest(tree) <= arity
    sizes = [1 + len(branch.rest) for branch in plan_branches(range(n), arity)]
    assert not sizes or max(sizes) - min(sizes) <= 1


def test_arity_below_two_is_refused() -> None:
    with pytest.raises(UserError, match="arity 1: expected at least 2"):
        plan_branches([1, 2], 1)


# ------------------------------------------------------------------------------------------------ delivery


@pytest.mark.parametrize("arity", [2, 8])
@pytest.mark.parametrize("n", [0, 1, 2, 7, 64, 200])
def test_everybody_runs_it_once_and_answers(n: int, arity: int) -> None:
    payload = [b"weights ", bytearray(b"of "), memoryview(b"version 7")]

    async def main() -> None:
        async with fleet(n, arity=arity) as some:
            for number in range(3):
                message = EndSession(session_id=str(number))
                result = await some.root.call(message, some.targets, payload=payload, deadline_s=WAIT_S)
                assert result.errors == {}
                assert list(result.outcomes) == [peer.name for peer in some.peers]
                for name, reply in result.replies.items():
                    assert reply.message == ChildEvent(child=name, exit_code=20)
                    assert bytes(reply.payload) == b"weights of version 7" + name.encode()
                    assert reply.payload.readonly
                assert result.sent == min(arity, n)
                assert all(0 <= outcome.latency_s <= result.elapsed_s for outcome in result.outcomes.values())
                assert all([peer.ran[number]] == peer.ran[number:] == [message] for peer in some.peers)
            some.check_links(arity)

    run(main)


def test_the_tree_is_the_planned_one() -> None:
    async def main() -> None:
        async with fleet(40, arity=3) as some:
            result = await some.root.call(Heartbeat(), some.targets, deadline_s=WAIT_S)
            via = {name: outcome.via for name, outcome in result.outcomes.items()}

            def check(nodes: tuple[Node[RelayTarget], ...], parent: str) -> None:
                for node in nodes:
                    assert via.pop(node.target.name) == parent
                    check(node.children, node.target.name)

            check(plan_tree(some.targets, 3), "root")
            assert via == {}

    run(main)


def test_few_targets_are_all_sent_to_from_the_root() -> None:
    async def main() -> None:
        async with fleet(17, arity=2, direct_up_to=16) as some:
            few = await some.root.call(Heartbeat(), some.targets[:16], deadline_s=WAIT_S)
            more = await some.root.call(Heartbeat(), some.targets, deadline_s=WAIT_S)
            assert (few.sent, more.sent) == (16, 2)
            assert few.errors == more.errors == {}

    run(main)


def test_targets_without_address_get_the_bare_message_over_the_known_endpoint() -> None:
    seen: list[Message] = []

    async def handler(endpoint: Any, message: Message, payload: memoryview) -> Message:
        seen.append(message)
        return ChildEvent(child="old", exit_code=len(payload))

    async def main() -> None:
        known: dict[str, Any] = {}
        async with fleet(12, arity=2, links={"known": known.get}) as some:
            listener = await open_transport("loopback", credentials("old")).listen(handler)
            transport = open_transport("loopback", credentials("root"))
            known["old"] = await transport.connect(listener.address, deadline_s=WAIT_S)
            targets = [*some.targets[:6], RelayTarget("old"), *some.targets[6:], RelayTarget("unknown")]
            result = await some.root.call(Heartbeat(), targets, payload=[b"abc"], deadline_s=WAIT_S)
            assert seen == [Heartbeat()]
            assert result.outcomes["old"].reply is not None
            assert result.outcomes["old"].reply.message == ChildEvent(child="old", exit_code=3)
            assert list(result.errors) == ["unknown"]
            assert "unknown: not connected, and it has published no address" in str(result.errors["unknown"])
            await listener.close()
            known["old"] = None
            result = await some.root.call(Heartbeat(), targets, deadline_s=WAIT_S)
            assert sorted(result.errors) == ["old", "unknown"]

    run(main)


def test_names_that_come_twice_are_refused() -> None:
    async def main() -> None:
        async with fleet(2) as some:
            with pytest.raises(UserError, match="3 targets with 2 names"):
                await some.root.call(Heartbeat(), [*some.targets, some.targets[0]], deadline_s=WAIT_S)
            assert all(peer.ran == [] for peer in some.peers)

    run(main)


def test_what_cannot_be_sent_raises_at_the_caller() -> None:
    async def main() -> None:
        async with fleet(30, arity=2) as some:
            with pytest.raises(TypeError):
                await some.root.call(Heartbeat(), some.targets, payload=["text"], deadline_s=WAIT_S)  # type: ignore
            every_other = memoryview(bytes(8))[::2]
            with pytest.raises(TypeError):
                await some.root.call(Heartbeat(), some.targets, payload=[every_other], deadline_s=WAIT_S)

    run(main)


class Recording(Endpoint):
    """Keeps what it was given, and answers with what it was made with."""

    def __init__(self, reply: Reply) -> None:
        self.peer = credentials("somebody").identity
        self.closed = asyncio.Event()
        self.payload: Any = None
        self._reply = reply

    async def call(self, message: Message, *, payload: Any = (), deadline_s: float) -> Reply:
        self.payload = payload
        return self._reply

    def stream(self, message: Message, **options: Any) -> Any:
        raise NotImplementedError

    async def notify(self, message: Message, **options: Any) -> None:
        raise NotImplementedError

    async def close(self, reason: str = "") -> None:
        self.closed.set()


def test_payloads_are_passed_on_without_a_copy() -> None:
    down, up = bytes(range(200)), bytes(1000)

    async def main() -> None:
        done = RelayDone(outcomes=(RelayOutcome("leaf", "head", 0.0, encode(Ack()), len(up)),), took_s=0.0)
        leaf = Recording(Reply(done, memoryview(up)))
        links = Links(open_transport("loopback", credentials("head")), known={"leaf": leaf}.get)
        handler = RelayHandler(lambda endpoint, message, payload: (Ack(), [payload]), links, name="head")
        command = relay(1, targets=(RelayTarget("leaf", ("loopback://0",)),))
        answer: Any = handler(leaf, command, memoryview(down))
        _, payload = await answer
        assert [buffer.obj is down for buffer in leaf.payload] == [True]
        assert [buffer.obj for buffer in payload] == [down, up]
        assert payload[0].obj is down and payload[1].obj is up

    run(main)


# ------------------------------------------------------------------------------------------------ failures


def test_a_handler_that_raises_is_reported_in_its_own_slot() -> None:
    async def refuse(peer: Peer, message: Message, payload: memoryview) -> None:
        raise FencedError("term 2 exists") if peer.name == "peer000" else KeyError("x" * 100_000)

    async def main() -> None:
        async with fleet(30, arity=3) as some:
            for number in (0, 1, 29):
                some.peers[number].behave = refuse
            result = await some.root.call(Shutdown(reason="done"), some.targets, deadline_s=WAIT_S)
            assert sorted(result.errors) == ["peer000", "peer001", "peer029"]
            error = result.errors["peer000"]
            assert isinstance(error, RemoteError)
            assert (error.peer, error.kind, error.text) == ("peer000", "FencedError", "term 2 exists")
            other = result.errors["peer029"]
            assert isinstance(other, RemoteError)
            assert (other.peer, other.kind) == ("peer029", "KeyError")
            assert len(other.text) < 5000
            assert len(result.replies) == 27
            assert all(len(peer.ran) == 1 for peer in some.peers)

    run(main)


def test_a_slow_peer_keeps_nobody_from_running_it() -> None:
    release = asyncio.Event()

    async def wait(peer: Peer, message: Message, payload: memoryview) -> None:
        await release.wait()

    async def main() -> None:
        async with fleet(30, arity=2) as some:
            some.peers[0].behave = some.peers[29].behave = wait  # a head and a leaf
            call = asyncio.create_task(some.root.call(Heartbeat(), some.targets, deadline_s=WAIT_S))
            while not all(peer.ran for peer in some.peers):
                await asyncio.sleep(0.001)
            assert not call.done()
            release.set()
            result = await call
            assert result.errors == {}
            assert all(len(peer.ran) == 1 for peer in some.peers)

    run(main)


def test_at_the_deadline_the_missing_ones_are_named() -> None:
    async def never(peer: Peer, message: Message, payload: memoryview) -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        async with fleet(40, arity=3, fates=["", "mute"], silent_s=0.2) as some:
            for number in (0, 20):
                some.peers[number].behave = never
            started = time.monotonic()
            result = await some.root.call(Heartbeat(), some.targets, deadline_s=4.0)
            assert result.elapsed_s == pytest.approx(time.monotonic() - started)
            assert 3.0 < result.elapsed_s <= 4.0
            assert sorted(result.errors) == ["peer000", "peer001", "peer020"]
            for name, error in result.errors.items():
                assert isinstance(error, DeadlineExpired)
                assert f"{name}: Heartbeat: nothing after" in str(error)
            assert len(result.replies) == 37
            assert all(len(peer.ran) == 1 for peer in some.peers if not peer.fate)

    run(main)


def test_no_time_at_all() -> None:
    async def main() -> None:
        async with fleet(40, arity=3) as some:
            result = await some.root.call(Heartbeat(), some.targets, deadline_s=0.0)
            assert len(result.errors) == 40

    run(main)


@pytest.mark.parametrize("fate", ["gone", "mute", "dies_before", "dies_after"])
@pytest.mark.parametrize("number", [0, 1, 5, 99], ids=["head", "head_of_second_level", "leaf", "last"])
def test_a_lost_peer_takes_nobody_along(fate: str, number: int) -> None:
    async def main() -> None:
        fates = [fate if n == number else "" for n in range(100)]
        async with fleet(100, arity=4, fates=fates, silent_s=0.2) as some:
            lost = some.peers[number]
            call = asyncio.create_task(some.root.call(Heartbeat(), some.targets, deadline_s=WAIT_S))
            started = time.monotonic()
            await everybody_else_ran_it([lost], some.peers)
            assert time.monotonic() - started <= (0.41 if fate == "mute" else 0.01)
            if fate == "mute":
                assert not call.done()
                await lost.kill()  # as the roster's verdict on it would
            result = await call
            assert time.monotonic() - started <= 0.5
            assert list(result.errors) == [lost.name]
            assert isinstance(result.errors[lost.name], PeerLost)
            assert lost.name in str(result.errors[lost.name])
            assert all(len(peer.ran) == 1 for peer in some.peers if peer is not lost)

    run(main)


async def everybody_else_ran_it(lost: list[Peer], peers: list[Peer]) -> None:
    while not all(peer.ran for peer in peers if peer not in lost):
        await asyncio.sleep(0.001)


@settings(max_examples=examples(60))
@given(
    n=st.integers(1, 60),
    arity=st.integers(2, 9),
    fates=st.lists(st.sampled_from(["", "", *FATES]), max_size=60),
    message=st.sampled_from([Heartbeat(), GENERATE]),
)
def test_random_losses(n: int, arity: int, fates: list[str], message: Message) -> None:
    async def main() -> None:
        async with fleet(n, arity=arity, fates=fates, silent_s=0.3) as some:
            result = await some.root.call(message, some.targets, deadline_s=WAIT_S)
            for peer in some.peers:
                outcome = result.outcomes[peer.name]
                if peer.fate:
                    assert isinstance(outcome.error, DeadlineExpired if peer.fate == "mute" else PeerLost), peer.name
                    assert len(peer.ran) <= 1
                else:
                    assert outcome.reply is not None, (peer.name, outcome.error)
                    assert len(peer.ran) == 1

    run(main)


def test_a_connection_that_ends_under_a_command_is_made_anew() -> None:
    """As when the other side closes it at the same moment: the process is fine, so nobody is reported."""

    async def main() -> None:
        async with fleet(20, arity=2) as some:
            await some.root.call(Heartbeat(), some.targets, deadline_s=WAIT_S)
            hung_up: list[str] = []

            def hang_up_first(peer: Peer) -> Any:
                def receive(endpoint: Any, message: Message, payload: memoryview) -> Any:
                    if peer.name in hung_up:
                        return peer._received(endpoint, message, payload)
                    hung_up.append(peer.name)
                    return endpoint.close("as if by chance")

                return receive

            for number in (0, 1, 19):
                some.peers[number].receive = hang_up_first(some.peers[number])
            result = await some.root.call(Heartbeat(), some.targets, deadline_s=WAIT_S)
            assert result.errors == {}
            assert all(len(peer.ran) == 2 for peer in some.peers)
            assert sorted(hung_up) == ["peer000", "peer001", "peer019"]

    run(main)


@settings(max_examples=examples(20))
@given(n=st.integers(1, 40), arity=st.integers(2, 5), mute=st.sets(st.integers(0, 39), max_size=3))
def test_random_silence(n: int, arity: int, mute: set[int]) -> None:
    """A stopped process is waited for until it is declared lost, but what is behind it isn't."""

    async def main() -> None:
        fates = ["mute" if number in mute else "" for number in range(n)]
        async with fleet(n, arity=arity, fates=fates, silent_s=0.05) as some:
            call = asyncio.create_task(some.root.call(Heartbeat(), some.targets, deadline_s=WAIT_S))
            silent = [peer for peer in some.peers if peer.fate]
            await everybody_else_ran_it(silent, some.peers)
            for peer in silent:
                await peer.kill()
            result = await call
            assert sorted(result.errors) == [peer.name for peer in silent]
            assert all(len(peer.ran) == (0 if peer.fate else 1) for peer in some.peers)

    run(main)


def test_a_head_that_was_only_slow_costs_nothing_but_messages() -> None:
    """The probe goes unanswered for a while, so its branch is asked twice: still everybody runs it once."""

    async def main() -> None:
        async with fleet(50, arity=2, silent_s=0.05) as some:
            head = some.peers[0]
            deliver = head._received

            async def late(endpoint: Any, message: Message, payload: memoryview) -> Any:
                await asyncio.sleep(0.5)
                answer = deliver(endpoint, message, payload)
                return await answer if asyncio.iscoroutine(answer) else answer

            await head.listener.close()
            head.listener = await open_transport("loopback", credentials(head.name)).listen(late)
            result = await some.root.call(Heartbeat(), some.targets, deadline_s=WAIT_S)
            assert result.errors == {}
            assert all(len(peer.ran) == 1 for peer in some.peers)
            assert result.sent > 2

    run(main)


def test_the_root_tries_what_others_cannot_reach() -> None:
    """The way between two peers may be cut while the root has one."""

    async def main() -> None:
        known: dict[str, Any] = {}
        async with fleet(20, arity=2) as some:
            cut = some.peers[7]
            transport = open_transport("loopback", credentials("root"))
            known[cut.name] = await transport.connect(cut.listener.address, deadline_s=WAIT_S)
            some.links._known = known.get
            targets = [t if t.name != cut.name else RelayTarget(t.name, ("loopback://0",)) for t in some.targets]
            result = await some.root.call(Heartbeat(), targets, deadline_s=WAIT_S)
            assert result.errors == {}
            assert result.outcomes[cut.name].via == "root"
            assert len(cut.ran) == 1

    run(main)


# ------------------------------------------------------------------------------------------------ strangers


@pytest.mark.parametrize(
    ("who", "kind"),
    [({"secret": b"s" * 32}, "AuthenticationError"), ({"attempt": 2}, "FencedError"), ({"term": 2}, "FencedError")],
)
def test_relays_authenticate(who: dict[str, Any], kind: str) -> None:
    async def main() -> None:
        async with fleet(30, arity=3) as some:
            for number in (0, 5):
                await some.peers[number].listener.close()
                stranger = open_transport("loopback", credentials(some.peers[number].name, **who))
                some.peers[number].listener = await stranger.listen(some.peers[number].relay)
            result = await some.root.call(Heartbeat(), some.targets, deadline_s=WAIT_S)
            assert {name: type(error).__name__ for name, error in result.errors.items()} == {
                "peer000": kind,
                "peer005": kind,
            }
            assert all("peer" in str(error) for error in result.errors.values())
            assert [len(peer.ran) for peer in some.peers] == [0 if n in (0, 5) else 1 for n in range(30)]

    run(main)


def test_an_address_that_somebody_else_has_by_now() -> None:
    async def main() -> None:
        async with fleet(10, arity=2) as some:
            targets = some.targets
            targets[4] = RelayTarget(targets[4].name, (targets[5].addresses[0],))
            result = await some.root.call(Heartbeat(), targets, deadline_s=WAIT_S)
            assert list(result.errors) == ["peer004"]
            assert "is peer005, not peer004" in str(result.errors["peer004"])
            assert [len(peer.ran) for peer in some.peers] == [1, 1, 1, 1, 0, 1, 1, 1, 1, 1]
            # A process with several addresses is reached over the first that works.
            targets[4] = RelayTarget("peer004", ("loopback://0", targets[5].addresses[0], some.targets[4].addresses[0]))
            result = await some.root.call(Heartbeat(), targets, deadline_s=WAIT_S)
            assert result.errors == {}

    run(main)


# ------------------------------------------------------------------------------------------------ ids


def relay(number: int, message: Message | None = None, **fields: Any) -> Relay:
    fields = {"deadline_s": WAIT_S, "arity": 2, "silent_s": 2.0, **fields}
    return Relay(root="root", number=number, message=encode(message or EndSession(session_id="s")), **fields)


def test_an_id_runs_once_and_is_answered_again() -> None:
    async def main() -> None:
        async with fleet(1) as some:
            peer = some.peers[0]
            transport = open_transport("loopback", credentials("asker"))
            ends = [await transport.connect(peer.listener.address, deadline_s=WAIT_S) for _ in range(2)]
            calls = [end.call(relay(1), payload=[b"abc"], deadline_s=WAIT_S) for end in ends * 3]
            for reply in [*await asyncio.gather(*calls), await ends[0].call(relay(1), deadline_s=WAIT_S)]:
                assert isinstance(reply.message, RelayDone)
                assert reply.message.outcomes[0].message == encode(ChildEvent(child="peer000", exit_code=3))
                assert bytes(reply.payload) == b"abcpeer000"
            assert len(peer.ran) == 1
            await ends[0].call(relay(2), deadline_s=WAIT_S)
            assert len(peer.ran) == 2

    run(main)


def test_an_answer_in_a_buffer_that_is_used_again_is_kept_as_it_was() -> None:
    buffer = bytearray(b"first")

    async def reuse(peer: Peer, message: Message, payload: memoryview) -> Any:
        return Ack(), [buffer]

    async def main() -> None:
        async with fleet(1) as some:
            some.peers[0].behave = reuse
            transport = open_transport("loopback", credentials("asker"))
            end = await transport.connect(some.peers[0].listener.address, deadline_s=WAIT_S)
            for _ in range(2):
                assert bytes((await end.call(relay(1), deadline_s=WAIT_S)).payload) == b"first"
                buffer[:] = b"other"

    run(main)


def test_the_memory_of_ids_is_bounded_and_never_forgets_that_something_ran() -> None:
    async def main() -> None:
        async with fleet(1) as some:
            peer = some.peers[0]
            transport = open_transport("loopback", credentials("asker"))
            end = await transport.connect(peer.listener.address, deadline_s=WAIT_S)
            for number in range(1, 201):
                await end.call(relay(number), deadline_s=WAIT_S)
            assert len(peer.relay._memory) == 64
            with pytest.raises(RemoteError, match="command 1 of root is too old"):
                await end.call(relay(1), deadline_s=WAIT_S)
            await end.call(relay(200), deadline_s=WAIT_S)
            await end.call(relay(137), deadline_s=WAIT_S)
            assert len(peer.ran) == 200

    run(main)


def test_kept_answers_are_bounded_in_bytes() -> None:
    async def large(peer: Peer, message: Message, payload: memoryview) -> Any:
        return Ack(), [bytes(1 << 20)]

    async def main() -> None:
        async with fleet(1) as some:
            peer = some.peers[0]
            peer.behave = large
            transport = open_transport("loopback", credentials("asker"))
            end = await transport.connect(peer.listener.address, deadline_s=WAIT_S)
            for number in range(1, 31):
                assert len((await end.call(relay(number), deadline_s=WAIT_S)).payload) == 1 << 20
            assert 14 << 20 < peer.relay._memory.kept_bytes <= 18 << 20
            reply = await end.call(relay(1), deadline_s=WAIT_S)
            assert isinstance(reply.message, RelayDone)
            assert reply.message.outcomes[0].kind == "ProtocolError"
            assert "ran here already" in reply.message.outcomes[0].text
            assert len((await end.call(relay(30), deadline_s=WAIT_S)).payload) == 1 << 20
            assert len(peer.ran) == 30

    run(main)


@pytest.mark.parametrize("inner", [b"", b"\xc1", b"\x80", encode(relay(1))])
def test_a_relay_without_a_command_is_refused(inner: bytes) -> None:
    async def main() -> None:
        async with fleet(1) as some:
            transport = open_transport("loopback", credentials("asker"))
            end = await transport.connect(some.peers[0].listener.address, deadline_s=WAIT_S)
            bad = Relay(root="root", number=1, message=inner, arity=2, deadline_s=WAIT_S, silent_s=2.0)
            with pytest.raises(RemoteError) as caught:
                await end.call(bad, deadline_s=WAIT_S)
            assert caught.value.kind == "ProtocolError"
            assert some.peers[0].ran == []

    run(main)


def test_streams_cannot_be_relayed() -> None:
    async def items(peer: Peer, message: Message, payload: memoryview) -> Any:
        return iter([Ack()])

    async def main() -> None:
        async with fleet(3, arity=2) as some:
            some.peers[2].behave = items
            result = await some.root.call(Heartbeat(), some.targets, deadline_s=WAIT_S)
            assert list(result.errors) == ["peer002"]
            assert "a streamed answer can't be relayed" in str(result.errors["peer002"])

    run(main)


# ------------------------------------------------------------------------------------------------ cancellation


@pytest.mark.parametrize("cancellable", [True, False])
def test_cancelling_the_call_reaches_the_handlers_that_may_be_stopped(cancellable: bool) -> None:
    message = GENERATE if cancellable else Heartbeat()
    assert type(message).cancellable is cancellable
    release = asyncio.Event()

    async def wait(peer: Peer, message: Message, payload: memoryview) -> None:
        await release.wait()

    async def main() -> None:
        async with fleet(20, arity=2) as some:
            for peer in some.peers:
                peer.behave = wait
            call = asyncio.create_task(some.root.call(message, some.targets, deadline_s=WAIT_S))
            while not all(peer.ran for peer in some.peers):
                await asyncio.sleep(0.001)
            assert not await some.peers[0].relay.drain(deadline_s=0.01)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            for peer in some.peers:
                assert await peer.relay.drain(deadline_s=WAIT_S)
            if cancellable:
                while not all(peer.cancelled for peer in some.peers):
                    await asyncio.sleep(0.001)
            else:
                await asyncio.sleep(0.05)
                assert not any(peer.cancelled for peer in some.peers)
            release.set()
            result = await some.root.call(Heartbeat(), some.targets, deadline_s=WAIT_S)
            assert result.errors == {}

    run(main)


@pytest.mark.parametrize("cancel", [False, True])
def test_a_command_that_may_be_stopped_outlives_its_relay(cancel: bool) -> None:
    """A lost relay is no cancellation; a cancellation after it reaches everybody all the same."""
    message = GENERATE
    release = asyncio.Event()

    async def wait(peer: Peer, message: Message, payload: memoryview) -> None:
        await release.wait()

    async def main() -> None:
        async with fleet(30, arity=2) as some:
            for peer in some.peers:
                peer.behave = wait
            call = asyncio.create_task(some.root.call(message, some.targets, deadline_s=WAIT_S))
            while not all(peer.ran for peer in some.peers):
                await asyncio.sleep(0.001)
            victims = [some.peers[0], some.peers[16]]
            for victim in victims:
                await victim.kill()
            living = [peer for peer in some.peers if peer not in victims]
            await asyncio.sleep(0.2)
            assert not any(peer.cancelled for peer in living)
            if cancel:
                call.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await call
                while not all(peer.cancelled for peer in living):
                    await asyncio.sleep(0.001)
            release.set()
            if not cancel:
                result = await call
                assert sorted(result.errors) == [victim.name for victim in victims]
                assert not any(peer.cancelled for peer in living)
            assert all(len(peer.ran) == 1 for peer in some.peers)
            for peer in living:
                assert await peer.relay.drain(deadline_s=WAIT_S)

    run(main)


def test_one_asker_that_gives_up_does_not_stop_it_for_the_other() -> None:
    release = asyncio.Event()

    async def wait(peer: Peer, message: Message, payload: memoryview) -> None:
        await release.wait()

    async def main() -> None:
        async with fleet(1) as some:
            peer = some.peers[0]
            peer.behave = wait
            command = relay(
                1, Generate(request_id="r", session_id="s", n_input=0, sampling=SamplingParams(max_new_tokens=1))
            )
            transport = open_transport("loopback", credentials("asker"))
            end = await transport.connect(peer.listener.address, deadline_s=WAIT_S)
            calls = [asyncio.create_task(end.call(command, deadline_s=WAIT_S)) for _ in range(2)]
            while not peer.ran:
                await asyncio.sleep(0.001)
            calls[0].cancel()
            await asyncio.sleep(0.05)
            assert peer.cancelled == 0
            release.set()
            reply = await calls[1]
            assert isinstance(reply.message, RelayDone)
            assert reply.message.outcomes[0].error == ""

    run(main)
