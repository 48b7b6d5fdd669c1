"""The ucx carrier: cutting payloads, what a stranger or a liar can do, loss, release; the ucx-py arm over a fake."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoints.publish import publish_bytes
from miles_hpc.control import ucx as ucx_carrier
from miles_hpc.control import ucx_wire, ucx_worker
from miles_hpc.control.opening import open_carrier
from miles_hpc.control.ucx_api import devices, find_ucx
from miles_hpc.control.ucx_pieces import PACK_BYTES, PIECE_BYTES, header_inline, piece_bytes, take_piece
from miles_hpc.control.ucx_wire import UcxWire
from miles_hpc.core.errors import AuthenticationError, DeadlineExpired, PeerLost, UserError
from miles_hpc.core.messages import EndSession, Heartbeat, Message
from miles_hpc.core.transport import Endpoint, Listener
from tests.conformance.transport_kinds import SECRET, WAIT_S, echo, make, make_plain, pair, plain_echo, plain_pair
from tools.detection.stage import Program


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(2 * WAIT_S):
            await main()

    asyncio.run(bounded())


@pytest.fixture
def ucx() -> None:
    try:
        open_carrier("ucx")
    except UserError as error:
        pytest.skip(str(error))


def the_wire(endpoint: Any) -> UcxWire:
    wire = endpoint.conversation._wire
    assert isinstance(wire, UcxWire)
    return wire


# ------------------------------------------------------------------------------------------ pure parts


@pytest.mark.parametrize(
    ("n_header", "n_payload", "expected"),
    [
        (100, 0, []),
        (100, 20_000, [20_000]),
        (100, PIECE_BYTES, [PIECE_BYTES]),
        (100, 2 * PIECE_BYTES + 1, [PIECE_BYTES, PIECE_BYTES, 1]),
        (PACK_BYTES, 5, [PACK_BYTES, 5]),
        (PIECE_BYTES + 7, PIECE_BYTES, [PIECE_BYTES, 7, PIECE_BYTES]),
        (300_000, 0, [300_000]),
    ],
)
def test_pieces_of_a_frame(n_header: int, n_payload: int, expected: list[int]) -> None:
    assert list(piece_bytes(n_header, n_payload)) == expected


def test_a_header_travels_in_the_first_message_when_that_stays_small() -> None:
    longest = next(n for n in range(PACK_BYTES, 0, -1) if header_inline(n))
    assert longest + 24 + 16 == PACK_BYTES
    assert not header_inline(longest + 1)


@given(st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=12), st.data())
def test_taken_pieces_are_the_views_cut_anew(buffers: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(buffers)
    views = deque(memoryview(b) for b in buffers)
    left, taken = len(whole), b""
    while left:
        n = data.draw(st.integers(1, left))
        piece = take_piece(views, n)
        assert memoryview(piece).nbytes == n
        taken += piece
        left -= n
    assert taken == whole
    assert not views


def test_a_piece_within_one_view_is_not_copied() -> None:
    whole = bytearray(10)
    views = deque([memoryview(whole)])
    piece, rest = take_piece(views, 4), take_piece(views, 6)
    whole[:] = b"0123456789"
    assert (bytes(piece), bytes(rest)) == (b"0123", b"456789")


def test_devices_are_read_from_what_ucx_prints() -> None:
    text = (
        "#\n# UCP context\n#\n#     component 0  :  self\n#            md 1  :  component 1  tcp \n"
        "#      resource 1  :  md 1  dev 1  flags -- tcp/eth0\n"
        "#      resource 2  :  md 2  dev 2  flags -- rc_mlx5/mlx5_0:1\n"
    )
    assert devices(text) == ["tcp/eth0", "rc_mlx5/mlx5_0:1"]


def test_an_old_ucxx_is_refused(monkeypatch: pytest.MonkeyPatch, ucx: None) -> None:
    import ucxx._lib.libucxx as api

    class OldEndpoint:
        pass

    monkeypatch.setattr(api, "UCXEndpoint", OldEndpoint)
    with pytest.raises(UserError, match=r"too old; install ucxx 0\.47"):
        open_carrier("ucx")


# ------------------------------------------------------------------------------------------ addresses


@pytest.mark.parametrize("address", ["", "ucx://", "ucx://host:1", "ucx://1.2.3.4:x", "tcp://1.2.3.4:1", "ucx://::1:5"])
def test_bad_addresses_are_user_errors(address: str, ucx: None) -> None:
    async def main() -> None:
        with pytest.raises(UserError, match="expected ucx://address:port"):
            await make("ucx", "dialer").connect(address, deadline_s=WAIT_S)

    run(main)


def test_a_port_where_nobody_listens_is_known_at_once(ucx: None) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # bound, so that nobody else listens there
        address = f"ucx://127.0.0.1:{held.getsockname()[1]}"

        async def main() -> None:
            with pytest.raises(PeerLost, match="can't connect: Connection refused"):
                await make("ucx", "dialer").connect(address, deadline_s=WAIT_S)

        run(main)
        transport = make_plain("ucx", "dialer")
        with pytest.raises(PeerLost, match="can't connect"):
            transport.connect(address, deadline_s=WAIT_S)
        transport.close()


def test_ipv6(ucx: None) -> None:
    async def main() -> None:
        try:
            listener = await make("ucx", "listener").listen(echo, bind="::1")
        except UserError as error:
            pytest.skip(f"no IPv6 loopback here: {error}")
        assert listener.address.startswith("ucx://[::1]:")
        await still_serves(listener)
        await listener.close()

    run(main)


# ------------------------------------------------------------------------------------------ strangers and liars


async def still_serves(listener: Listener) -> None:
    friend = await make("ucx", "friend").connect(listener.address, deadline_s=WAIT_S)
    reply = await friend.call(Heartbeat(), payload=[bytes(100_000)], deadline_s=WAIT_S)
    assert reply.payload == bytes(100_000)
    await friend.close()


def test_messages_with_unknown_tags_are_dropped(ucx: None) -> None:
    """Somebody who knows where UCX listens: nothing of it is kept, and large ones aren't even transferred."""
    import ucxx._lib.libucxx as api
    from ucxx._lib.arr import Array
    from ucxx.types import Tag

    async def main() -> None:
        async with pair("ucx") as (dialer, accepted, listener):
            victim = the_wire(accepted)._worker.api
            context = api.UCXContext({}, feature_flags=(api.Feature.TAG, api.Feature.WAKEUP))
            worker = api.UCXWorker(context, enable_delayed_submission=False, enable_python_future=False)
            where = api.UCXAddress.create_from_buffer(bytearray(victim.address))
            stranger = api.UCXEndpoint.create_from_worker_address(worker, where, True)
            large = bytearray(16 << 20)
            buffers = [Array(b""), Array(b"x" * 100), Array(bytearray(15_000)), Array(large)]
            requests = [stranger.tag_send(buffer, Tag(tag)) for tag in (0, 7, 2**64 - 1) for buffer in buffers]
            async with asyncio.timeout(WAIT_S):
                while not all(request.completed for request in requests):
                    worker.progress()
                    await dialer.call(Heartbeat(), deadline_s=WAIT_S)
            assert not victim._worker.tag_probe(victim._any, victim._no_mask, False).matched
            assert not victim._dropping
            await still_serves(listener)
            stranger.close_blocking(period=10**8, max_attempts=1)

    run(main)


def test_a_message_has_no_bytes_of_the_one_before(ucx: None) -> None:
    open_api = find_ucx()
    one, other = open_api(), open_api()
    there, back = one.connect(other.address, lambda _: None), other.connect(one.address, lambda _: None)
    arrived: list[bytes] = []
    inbox = other.inbox(7, lambda _: None)
    inbox.listen(lambda data: arrived.append(bytes(data)))
    inbox.attach(back)
    sent = [b"the first one is long", b"short", b""]
    for message in sent:
        there.send(7, message, lambda: None)
        deadline = time.monotonic() + WAIT_S
        while len(arrived) < len(sent) and arrived[-1:] != [message] and time.monotonic() < deadline:
            one.progress()
            other.progress()
    assert arrived == sent
    there.close()
    back.close()
    one.close()
    other.close()


class Liar:
    """Stands in for a wire's path and changes what is sent; `change` gets the number of the message."""

    def __init__(self, wire: UcxWire, change: Callable[[int, bytes], list[bytes]]) -> None:
        self._path = wire._path
        self._change = change
        self._n = 0
        wire._path = self  # type: ignore[assignment]

    def send(self, tag: int, data: Any, done: Callable[[], None]) -> bool:
        assert self._path is not None
        messages = self._change(self._n, bytes(data))
        self._n += 1
        for message in messages[:-1]:
            self._path.send(tag, message, lambda: None)
        return self._path.send(tag, messages[-1], done) if messages else True


def flipped(data: bytes, at: int) -> bytes:
    changed = bytearray(data)
    changed[at] ^= 0x40
    return bytes(changed)


LIES: dict[str, Callable[[int, bytes], list[bytes]]] = {
    "length of the message": lambda n, data: [flipped(data, 1) if n == 1 else data],
    "kind of a small frame": lambda n, data: [flipped(data, 4) if n == 0 else data],
    "small frame": lambda n, data: [flipped(data, -20) if n == 0 else data],
    "MAC of a small frame": lambda n, data: [flipped(data, -1) if n == 0 else data],
    "head of a large frame": lambda n, data: [flipped(data, 12) if n == 1 else data],
    "header of a large frame": lambda n, data: [flipped(data, -1) if n == 1 else data],
    "first piece": lambda n, data: [flipped(data, 0) if n == 2 else data],
    "last piece": lambda n, data: [flipped(data, -1) if n == 3 else data],
    "MAC of a large frame": lambda n, data: [flipped(data, 3) if n == 4 else data],
    "a piece that is too short": lambda n, data: [data[:-1] if n == 2 else data],
    "a piece that is too long": lambda n, data: [data + b"x" if n == 2 else data],
    "a message that is too long": lambda n, data: [data + bytes(30_000) if n == 0 else data],
    "twice": lambda n, data: [data, data] if n == 0 else [data],
    "left out": lambda n, data: [] if n == 0 else [data],
    "nothing at all": lambda n, data: [b""] if n == 0 else [data],
}


@pytest.mark.parametrize("towards_listener", [True, False])
@pytest.mark.parametrize("what", list(LIES))
def test_a_changed_message_ends_the_endpoint(what: str, towards_listener: bool, ucx: None) -> None:
    """Small frame, then a large one of two pieces, from one side to the other."""
    seen: list[Message] = []

    async def handler(endpoint: Endpoint, message: Message, payload: memoryview) -> None:
        assert payload == bytes(len(payload))
        seen.append(message)

    async def main() -> None:
        async with pair("ucx", handler, handler) as (dialer, accepted, listener):
            liar, honest = (dialer, accepted) if towards_listener else (accepted, dialer)
            await liar.call(EndSession(session_id="first"), deadline_s=WAIT_S)
            Liar(the_wire(liar), LIES[what])
            with pytest.raises(PeerLost):
                await liar.notify(EndSession(session_id="small"))
                await liar.call(
                    EndSession(session_id="large"), payload=[bytes(PIECE_BYTES), bytes(5000)], deadline_s=WAIT_S
                )
                await liar.call(EndSession(session_id="last"), deadline_s=WAIT_S)
            await asyncio.wait_for(honest.closed.wait(), WAIT_S)
            assert EndSession(session_id="last") not in seen
            assert seen.count(EndSession(session_id="small")) <= 1
            friend = await make("ucx", "friend").connect(listener.address, deadline_s=WAIT_S)
            await friend.call(Heartbeat(), deadline_s=WAIT_S)
            await friend.close()

    run(main)


def test_a_liar_about_its_address_is_refused(ucx: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What travels beside the frames is sealed as well."""

    async def main() -> None:
        listener = await make("ucx", "listener").listen(echo)
        sent = ucx_wire.Line.send

        def send(line: Any, message: bytes) -> None:
            sent(line, flipped(message, -20) if len(message) > 150 and message[0] == 4 else message)

        with monkeypatch.context() as patched:
            patched.setattr(ucx_wire.Line, "send", send)
            with pytest.raises((PeerLost, AuthenticationError)):
                await make("ucx", "dialer").connect(listener.address, deadline_s=WAIT_S)
        await still_serves(listener)
        await listener.close()

    run(main)


# ------------------------------------------------------------------------------------------ paths and release


def test_wires_between_two_workers_share_a_path(ucx: None) -> None:
    async def main() -> None:
        listener = await make("ucx", "listener").listen(echo)
        transport = make("ucx", "dialer")
        first, second = [await transport.connect(listener.address, deadline_s=WAIT_S) for _ in range(2)]
        assert the_wire(first).shared is the_wire(second).shared
        large = asyncio.gather(*(first.call(Heartbeat(), payload=[bytes(3 << 20)], deadline_s=WAIT_S) for _ in "abc"))
        for n in range(50):
            message = EndSession(session_id=str(n))
            assert (await second.call(message, deadline_s=WAIT_S)).message == message
        assert all(reply.payload == bytes(3 << 20) for reply in await large)
        await first.close()
        await second.call(Heartbeat(), deadline_s=WAIT_S)
        assert not second.closed.is_set()
        await second.close()
        await listener.close()

    run(main)


def test_a_transport_may_connect_to_itself(ucx: None) -> None:
    with plain_pair("ucx") as (dialer, accepted, _, _):
        for endpoint in (dialer, accepted):
            if endpoint is dialer:
                reply = endpoint.call(Heartbeat(), payload=[bytes(5 << 20)], deadline_s=WAIT_S)
                assert reply.payload == bytes(5 << 20)
        assert the_wire(dialer).shared is the_wire(accepted).shared


@pytest.mark.parametrize("whose", [0, 1])
def test_a_path_that_only_one_side_has_left_is_taken_anew(whose: int, ucx: None) -> None:
    accepted: list[Endpoint] = []

    async def on_connect(endpoint: Endpoint) -> None:
        accepted.append(endpoint)

    async def main() -> None:
        listener = await make("ucx", "listener").listen(echo, on_connect=on_connect)
        transport = make("ucx", "dialer")
        endpoint = await transport.connect(listener.address, deadline_s=WAIT_S)
        await endpoint.call(Heartbeat(), deadline_s=WAIT_S)
        shared = the_wire((endpoint, accepted[0])[whose]).shared
        assert shared is not None
        shared.leave("endpoint closed: as if it were stuck")
        with pytest.raises(PeerLost):
            await endpoint.call(Heartbeat(), deadline_s=WAIT_S)
        endpoints = await asyncio.gather(*(transport.connect(listener.address, deadline_s=WAIT_S) for _ in range(3)))
        for n, again in enumerate([*endpoints, *endpoints]):
            reply = await again.call(Heartbeat(), payload=[bytes(n * 300_000)], deadline_s=WAIT_S)
            assert len(reply.payload) == n * 300_000
        paths = {the_wire(again).shared for again in endpoints}
        assert len(paths) == 1 and shared not in paths
        for again in endpoints:
            await again.close()
        await listener.close()

    run(main)


def test_the_next_connection_works_though_the_peer_has_not_noticed_that_a_path_was_left(
    ucx: None, tmp_path: Path
) -> None:
    """What the peer tells on its line and what it sends over UCX race: two processes, since one loop has one order."""
    publish_bytes(tmp_path / "secret", SECRET, mode=0o600)
    with ExitStack() as undo:

        def start(name: str) -> Program:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "tests.fakes.far_peer", "ucx", "blocking", name, str(tmp_path / "secret")],
                env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            program = Program(name, process, tmp_path / f"{name}.log")
            undo.callback(program.end)
            return program

        listener, dialer = start("listener"), start("dialer")
        address = listener.ask(WAIT_S, do="listen", bind="127.0.0.1")["address"]
        for _ in range(60):  # one of ten failed before each side knew that the other knew
            for order in (
                {"do": "connect", "address": address, "deadline_s": WAIT_S},
                {"do": "call", "bytes": 100, "deadline_s": WAIT_S},
                {"do": "leave"},
                {"do": "close"},
            ):
                answer = dialer.ask(WAIT_S, **order)
                assert not answer["error"], answer


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_an_idle_worker_is_released_and_opened_again(ucx: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ucx_worker, "IDLE_S", 0.2)

    async def main() -> None:
        gc.collect()
        listener = await make("ucx", "listener").listen(echo)
        before = descriptors()
        transport: Any = make("ucx", "dialer")
        for _ in range(3):
            endpoint = await transport.connect(listener.address, deadline_s=WAIT_S)
            await endpoint.call(Heartbeat(), payload=[bytes(3 << 20)], deadline_s=WAIT_S)
            assert descriptors() > before + 4
            await endpoint.close()
            async with asyncio.timeout(WAIT_S):
                while descriptors() > before:
                    await asyncio.sleep(0.05)
        await listener.close()

    run(main)


def test_chosen_names_what_ucx_really_uses(ucx: None, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    transport = make_plain("ucx", "both")
    listener = transport.listen(plain_echo)
    before = transport.chosen()
    endpoint = transport.connect(listener.address, deadline_s=WAIT_S)
    endpoint.call(Heartbeat(), deadline_s=WAIT_S)
    after = transport.chosen()
    transport.close()
    assert before["in_use"] == ""
    assert "libucp.so" in after["library"]
    assert after["ucx"].count(".") == 2 and after["package"].startswith("ucxx ")
    assert set(after) >= {"TLS", "NET_DEVICES"}
    assert "tcp/lo" in after["devices"].split()
    assert after["in_use"] and set(after["in_use"].split()) <= set(after["devices"].split())
    (told,) = [record.message for record in caplog.records if "UCX uses" in record.message]
    assert set(told.rpartition("uses ")[2].split(", ")) == set(after["in_use"].split())


def test_a_look_at_ucx_says_what_it_would_use(ucx: None) -> None:
    text = ucx_carrier.look()
    assert "libucp.so" in text and "TLS=" in text and "\n" not in text
    assert text.rpartition("within this host: ")[2].startswith("tcp/")


# ------------------------------------------------------------------------------------------ loss

PEER = """
import os, sys
from miles_hpc.control.opening import open_blocking_transport
from miles_hpc.core.messages import Heartbeat
from tests.conformance.transport_kinds import credentials
secret = bytes.fromhex(sys.stdin.readline())
transport = open_blocking_transport("ucx", credentials("peer", secret=secret))
listener = transport.listen(lambda endpoint, message, payload: (message, [payload]))
print(listener.address, flush=True)
transport.serve(lambda: False, deadline_s=600)
"""


class Peer:
    """A process with a ucx listener that echoes."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PEER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(SECRET.hex() + "\n")
        self.process.stdin.flush()
        self.address = self.process.stdout.readline().strip()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.mark.parametrize("n_bytes", [0, 64 << 20])
def test_a_killed_peer_is_lost_alone(n_bytes: int, ucx: None) -> None:
    """With nothing on its way, and in the middle of a large payload."""
    with Peer() as victim, Peer() as other:
        transport = make_plain("ucx", "dialer")
        doomed = transport.connect(victim.address, deadline_s=WAIT_S)
        healthy = transport.connect(other.address, deadline_s=WAIT_S)
        calls = [doomed.begin(Heartbeat(), payload=[bytes(n_bytes)], deadline_s=WAIT_S) for _ in range(4)]
        healthy.call(Heartbeat(), deadline_s=WAIT_S)
        if not n_bytes:
            for call in calls:
                call.result()
        victim.signal(signal.SIGKILL)
        start = time.monotonic()
        assert transport.serve(lambda: doomed.closed, deadline_s=WAIT_S)
        assert time.monotonic() - start < 10.0  # it's there within milliseconds, on a machine with time for it
        assert "endpoint closed" in doomed.close_reason
        if n_bytes:
            with pytest.raises(PeerLost):
                for call in calls:  # the first ones may be through
                    call.result()
        for _ in range(20):
            healthy.call(Heartbeat(), payload=[bytes(100_000)], deadline_s=WAIT_S)
        transport.close()


def test_a_stopped_peer_takes_bounded_memory_and_comes_back(ucx: None) -> None:
    with Peer() as peer:
        transport = make_plain("ucx", "dialer")
        endpoint = transport.connect(peer.address, deadline_s=WAIT_S)
        endpoint.call(Heartbeat(), deadline_s=WAIT_S)
        peer.signal(signal.SIGSTOP)
        data = bytes(1 << 20)
        calls = []
        with pytest.raises(DeadlineExpired):
            for _ in range(1000):
                calls.append(endpoint.begin(EndSession(session_id=""), payload=[data], deadline_s=3.0))
        assert len(calls) < 200
        assert the_wire(endpoint)._on_its_way < 2 * ucx_wire.IN_FLIGHT_BYTES
        peer.signal(signal.SIGCONT)
        assert endpoint.call(Heartbeat(), payload=[data], deadline_s=WAIT_S).payload == data
        transport.close()


def test_closing_waits_shortly_for_a_peer_that_is_stopped(ucx: None) -> None:
    with Peer() as peer:
        transport = make_plain("ucx", "dialer")
        endpoint = transport.connect(peer.address, deadline_s=WAIT_S)
        endpoint.call(Heartbeat(), deadline_s=WAIT_S)
        peer.signal(signal.SIGSTOP)
        for _ in range(20):
            endpoint.begin(Heartbeat(), payload=[bytes(1 << 20)], deadline_s=WAIT_S)
        start = time.monotonic()
        transport.close()
        assert time.monotonic() - start < 30.0
