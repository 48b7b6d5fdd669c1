"""Large payloads within a host: how two wires come to a ring, what they do with it, and what they refuse."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import resource
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from miles_hpc.control import shared_ring
from miles_hpc.control.frames import Frame, Limits, Opener, Sealer
from miles_hpc.control.plain_loop import PlainLoop
from miles_hpc.control.shared_ring import LEAST_BYTES, PassedIn, RingIn, RingOut, is_for_sender
from miles_hpc.control.stream_wire import INPUT_BYTES, StreamWire
from miles_hpc.core.errors import ProtocolError

WAIT_S = 30.0
RING = shared_ring._RING_BYTES
LIMITS = Limits(payload_bytes=64 << 20)
Frames = list[tuple[int, int, bytes, bytes]]


class Ends:
    """Two wires on a pair of Unix sockets."""

    def __init__(self) -> None:
        self.loop = PlainLoop()
        room = memoryview(bytearray(INPUT_BYTES))
        pair = socket.socketpair()
        self.wires = []
        self.got: tuple[Frames, Frames] = ([], [])
        self.ended: tuple[list[str], list[str]] = ([], [])
        keys = b"a" * 32, b"b" * 32
        for n, sock in enumerate(pair):
            sock.setblocking(False)
            wire = StreamWire(self.loop, sock, f"end {n}", room)
            wire.on_frame = lambda kind, call_id, header, payload, got=self.got[n]: got.append(  # type: ignore[misc]
                (kind, call_id, header, bytes(payload))
            )
            wire.on_lost = wire.on_violated = self.ended[n].append
            wire.start_frames(Sealer(keys[n], LIMITS), Opener(keys[1 - n], LIMITS))
            self.wires.append(wire)

    def send(self, payload: bytes, *, end: int = 0, call_id: int = 1, parts: int = 1) -> None:
        view, size = memoryview(payload), -(-len(payload) // parts)
        views = [view[at : at + size] for at in range(0, len(payload), size or 1)]
        self.wires[end].send(Frame.CALL, call_id, b"header", views, len(payload))
        self.wires[end].flush()

    def run(self, n: int, *, end: int = 1) -> None:
        """Until so many frames have arrived at this end."""
        done = lambda: len(self.got[end]) >= n or bool(self.ended[end])  # noqa: E731
        assert self.loop.run_until(done, self.loop.time() + WAIT_S)

    def open_ring(self, end: int = 0) -> None:
        ring = self.wires[end]._ring_out
        assert ring is not None
        self.send(bytes(LEAST_BYTES), end=end)
        assert self.loop.run_until(lambda: ring.is_open, self.loop.time() + WAIT_S)
        self.got[1 - end].clear()

    def close(self) -> None:
        for wire in self.wires:
            wire.abandon()
        self.loop.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    ends = Ends()
    yield ends
    ends.close()


def n_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def n_pieces_put(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of what goes into a ring from now on."""
    sizes: list[int] = []
    put = RingOut.put

    def counted(self: RingOut, data: memoryview) -> bytes:
        sizes.append(data.nbytes)
        return put(self, data)

    monkeypatch.setattr(RingOut, "put", counted)
    return sizes


@pytest.mark.parametrize("end", [0, 1])
@pytest.mark.parametrize("parts", [1, 2, 7])
@pytest.mark.parametrize("size", [LEAST_BYTES, LEAST_BYTES + 1, RING, RING + 1, 5 * RING + 12345])
def test_payloads_go_through_the_ring(
    ends: Ends, monkeypatch: pytest.MonkeyPatch, size: int, parts: int, end: int
) -> None:
    ends.open_ring(end)
    sizes = n_pieces_put(monkeypatch)
    payload = os.urandom(size)
    for call_id in range(3):
        ends.send(b"small", end=end, call_id=call_id)
        ends.send(payload, end=end, call_id=call_id, parts=parts)
    ends.run(6, end=1 - end)
    small, large = (Frame.CALL, b"header", b"small"), (Frame.CALL, b"header", payload)
    assert [(kind, header, data) for kind, _, header, data in ends.got[1 - end]] == [small, large] * 3
    assert [call_id for _, call_id, _, _ in ends.got[1 - end]] == [0, 0, 1, 1, 2, 2]
    assert sum(sizes) == 3 * size
    wire = ends.wires[end]
    ring = wire._ring_out
    assert ring is not None
    assert ends.loop.run_until(lambda: ring.n_free == shared_ring.SLOTS, ends.loop.time() + WAIT_S)
    assert wire.queued_bytes == 0


def test_smaller_payloads_and_the_first_one_go_through_the_socket(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = n_pieces_put(monkeypatch)
    ends.send(bytes(LEAST_BYTES - 1))
    ends.run(1)
    ring = ends.wires[0]._ring_out
    assert ring is not None and not ring._asked
    ends.send(bytes(LEAST_BYTES))
    ends.run(2)
    assert ends.loop.run_until(lambda: ring.is_open, ends.loop.time() + WAIT_S)
    ends.send(bytes(LEAST_BYTES - 1))
    ends.run(3)
    assert sizes == []


@pytest.mark.parametrize("rings", [(0, 1), (0,), (1,)])
def test_both_ends_send_more_than_a_ring_at_once(ends: Ends, rings: tuple[int, ...]) -> None:
    """Each waits for the other to free slots: that must not wait behind what waits, nor get into a frame's middle."""
    for end in (0, 1):
        if end in rings:
            ends.open_ring(end)
        else:
            ring = ends.wires[end]._ring_out
            assert ring is not None
            ring.ask()  # and never does
    payload = os.urandom(5 * RING)
    for call_id in range(3):
        for end in (0, 1):
            ends.send(payload, end=end, call_id=call_id)
            ends.send(b"small", end=end, call_id=call_id)
    for end in (0, 1):
        ends.run(6, end=end)
        assert [call_id for _, call_id, _, _ in ends.got[end]] == [0, 0, 1, 1, 2, 2]
        assert [data for *_, data in ends.got[end]] == [payload, b"small"] * 3
    idle = lambda: not any(wire.queued_bytes for wire in ends.wires)  # noqa: E731
    assert ends.loop.run_until(idle, ends.loop.time() + WAIT_S)
    for wire in ends.wires:
        ring = wire._ring_out
        assert ring is not None
        free = lambda ring=ring: ring.n_free == shared_ring.SLOTS  # noqa: E731
        assert ends.loop.run_until(free, ends.loop.time() + WAIT_S)
    assert ends.ended == ([], [])


def test_a_payload_of_many_small_views_goes_through_the_socket(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the ring each would take a slot and a frame of its own in both directions: ten times as long."""
    ends.open_ring()
    sizes = n_pieces_put(monkeypatch)
    payload = os.urandom(RING)
    ends.send(payload, parts=RING // 1000)
    ends.run(1)
    assert ends.got[1][0][3] == payload
    assert sizes == []


def test_buffers_are_given_back_and_waiters_told(ends: Ends) -> None:
    ends.open_ring()
    told: list[str] = []
    wire = ends.wires[0]
    wire.on_drained = lambda: told.append("drained")
    payload = memoryview(os.urandom(3 * RING))
    assert not wire.send(Frame.CALL, 1, b"", [payload], len(payload), lambda: told.append("handed over"))
    wire.flush()
    assert told == [] and wire.queued_bytes > RING
    ends.run(1)
    assert ends.loop.run_until(lambda: len(told) == 2, ends.loop.time() + WAIT_S)
    assert sorted(told) == ["drained", "handed over"]


@pytest.mark.parametrize("what", ["no memory", "no descriptor arrives", "no name", "no socket", "no seals there"])
def test_without_a_ring_the_socket_does(ends: Ends, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    def fails(*_: object) -> None:
        raise OSError("as on a host that has none")

    if what == "no memory":
        monkeypatch.setattr(shared_ring, "_pass_memory", fails)
    elif what == "no descriptor arrives":
        monkeypatch.setattr(shared_ring, "_received_memory", lambda *_: None)
    elif what == "no socket":
        monkeypatch.setattr(socket, "socket", fails)
    elif what == "no seals there":
        hear = RingIn.hear

        def without(self: RingIn, words: bytes) -> bytes | None:
            with monkeypatch.context() as there:
                there.setattr(shared_ring, "_SEALS", 0)
                return hear(self, words)

        monkeypatch.setattr(RingIn, "hear", without)
    else:
        monkeypatch.setattr(shared_ring, "_address", lambda _: b"/nowhere/at/all")
    payload = os.urandom(2 * RING)
    for n in range(4):
        ends.send(payload)
        ends.run(n + 1)
        ends.loop.run_until(lambda: False, ends.loop.time() + 0.01)
    assert [data for *_, data in ends.got[1]] == [payload] * 4
    ring = ends.wires[0]._ring_out
    assert ring is not None and ring._asked and not ring.is_open
    taking = ends.wires[1]._ring_in
    assert taking is not None and taking._port is None  # nothing more is waited for
    assert ends.ended == ([], [])


@pytest.mark.parametrize("n_left", range(6))
def test_a_process_without_descriptors_keeps_its_connections(ends: Ends, n_left: int) -> None:
    ends.open_ring(1)  # what is imported late is there
    before = n_descriptors()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    held: list[int] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before + 20, limits[1]))
        with contextlib.suppress(OSError):
            while True:
                held.append(os.dup(0))
        for _ in range(n_left):
            os.close(held.pop())
        payload = os.urandom(2 * RING)
        for n in range(3):
            ends.send(payload)
            ends.run(n + 1)
        ends.loop.run_until(lambda: False, ends.loop.time() + 0.01)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for fd in held:
            os.close(fd)
    ring = ends.wires[0]._ring_out
    assert ring is not None
    assert [data for *_, data in ends.got[1]] == [payload] * 3
    assert ends.ended == ([], [])
    gc.collect()
    assert n_descriptors() == before + (2 if ring.is_open else 0)


def test_a_changed_byte_in_the_memory_ends_the_connection(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    ends.open_ring()
    put = RingOut.put

    def changed(self: RingOut, data: memoryview) -> bytes:
        assert self._memory is not None
        words = put(self, data)
        self._memory[(self._slot - 1) % shared_ring.SLOTS * shared_ring._SLOT_BYTES + 77] ^= 1
        return words

    monkeypatch.setattr(RingOut, "put", changed)
    ends.send(os.urandom(RING))
    ends.run(1)
    assert ends.got[1] == []
    assert ends.ended[1] == ["a piece in shared memory doesn't carry the peer's MAC"]


def test_what_was_sent_before_the_close_arrives(ends: Ends) -> None:
    """Though the ring is much smaller, and the peer has to free it again and again."""
    ends.open_ring()
    payload = os.urandom(7 * RING)
    ends.send(payload)
    ends.wires[0].close(WAIT_S)
    ends.run(1)
    assert [data for *_, data in ends.got[1]] == [payload]
    assert ends.loop.run_until(lambda: bool(ends.ended[1]), ends.loop.time() + WAIT_S)
    assert ends.ended[1] == ["endpoint closed: the peer's socket is gone"]


def test_a_peer_that_reads_nothing_costs_a_ring_and_no_more(ends: Ends) -> None:
    ends.open_ring()
    sending, deaf = ends.wires
    ends.loop.remove_reader(deaf._fd)
    payload = memoryview(bytes(3 * RING))
    for _ in range(5):
        sending.send(Frame.CALL, 1, b"", [payload], len(payload))
    sending.flush()
    ends.loop.run_until(lambda: False, ends.loop.time() + 0.02)
    assert sending._ring_out is not None and sending._ring_out.n_free == 0
    assert sending.queued_bytes >= 14 * RING
    assert not sending._writing  # nothing to look for before a slot is free: a writable socket would spin
    sending.close(0.01)
    assert ends.loop.run_until(lambda: not sending._open, ends.loop.time() + WAIT_S)


def test_nothing_is_left_of_a_ring(ends: Ends) -> None:
    gc.collect()
    before = n_descriptors()
    ends.open_ring(0)
    ends.open_ring(1)
    assert n_descriptors() == before + 4  # each mapping keeps a descriptor
    for wire in ends.wires:
        wire.abandon()
    gc.collect()
    assert n_descriptors() == before - 2


# ------------------------------------------------------------------------------------------------ what is refused


def memory(*, seals: int = shared_ring._SEALS, size: int = RING) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def offered(data: bytes, fds: list[int], *, strays: int = 0, nonce: bytes = b"n" * 16) -> bytes | None:
    """What a receiver says to memory that comes with `data`."""
    ring = RingIn()
    words = ring.hear(b"?")
    assert words is not None and is_for_sender(words)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        for _ in range(strays):
            sender.sendto(b"stray", shared_ring._address(words[1:]))
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(fds)}i", *fds))] if fds else []
        sender.sendmsg([data], rights, 0, shared_ring._address(words[1:]))
    for fd in fds:
        os.close(fd)
    answer = ring.hear(b"H" + nonce)
    ring.close()
    return answer


def test_only_sealed_memory_of_the_right_size_with_the_nonce_is_mapped() -> None:
    assert offered(b"n" * 16, [memory()]) == b"O"
    assert offered(b"n" * 16, [memory()], strays=5) == b"O"
    assert offered(b"n" * 16, [memory(seals=0)]) == b"X"
    assert offered(b"n" * 16, [memory(seals=fcntl.F_SEAL_GROW)]) == b"X"
    assert offered(b"n" * 16, [memory(size=RING // 2)]) == b"X"
    assert offered(b"n" * 16, [memory(size=2 * RING)]) == b"X"
    assert offered(b"n" * 16, [os.open("/dev/null", os.O_RDWR)]) == b"X"
    assert offered(b"m" * 16, [memory()]) == b"X"
    assert offered(b"n" * 15, [memory()]) == b"X"
    assert offered(b"n" * 16, []) == b"X"


def test_memory_that_was_passed_can_not_shrink() -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(memory(), 10)


@pytest.mark.parametrize("words", [b"", b"H", b"H" + bytes(16), b"z", b"??"])
def test_a_receiver_hears_nothing_out_of_order(words: bytes) -> None:
    with pytest.raises(ProtocolError):
        RingIn().hear(words)


def test_a_sender_hears_nothing_out_of_order() -> None:
    for words in (b"N" + b"0" * 32, b"O", b"X"):
        with pytest.raises(ProtocolError):
            RingOut().hear(words)  # it hasn't asked
    ring = RingOut()
    assert ring.ask() == b"?" and ring.ask() is None
    with pytest.raises(ProtocolError):
        ring.hear(b"O")  # no memory was passed
    assert ring.hear(b"X") is None and not ring.is_open
    for words in (b"N" + b"0" * 32, b"O"):
        with pytest.raises(ProtocolError):
            ring.hear(words)  # it has been settled
    with pytest.raises(ProtocolError):
        ring.freed()


@pytest.mark.parametrize(
    ("slot", "n_bytes"),
    [(shared_ring.SLOTS, 1), (2**32 - 1, 1), (0, 0), (0, shared_ring._SLOT_BYTES + 1), (0, 1001)],
)
def test_pieces_out_of_bounds_are_refused(slot: int, n_bytes: int) -> None:
    ring = RingIn()
    ring._memory = memoryview(bytes(RING))
    with pytest.raises(ProtocolError):
        ring.take(struct.pack("<II", slot, n_bytes), memoryview(bytearray(1000)))
    with pytest.raises(struct.error):
        ring.take(b"\0" * 7, memoryview(bytearray(1000)))


def test_announced_payloads_are_checked_before_they_get_memory() -> None:
    def announced(kind: int, n_bytes: int) -> PassedIn:
        return PassedIn(RingIn(), LIMITS, 1, b"", memoryview(struct.pack("<BxxxxxxxQ", kind, n_bytes)))

    assert announced(Frame.CALL, 1000).body.nbytes == 1000
    for kind, n_bytes in ((0, 5), (Frame.RING, 5), (Frame.PASSED, 5), (255, 5), (1, 0), (1, LIMITS.payload_bytes + 1)):
        with pytest.raises(ProtocolError):
            announced(kind, n_bytes)
    with pytest.raises(struct.error):
        PassedIn(RingIn(), LIMITS, 1, b"", memoryview(b"short"))


@pytest.mark.parametrize(
    ("kind", "header", "payload"),
    [
        (Frame.RING, b"", b""),
        (Frame.RING, b"O", b""),
        (Frame.PASSED, b"", b"short"),
        (Frame.PIECE, bytes(8), bytes(16)),
        (Frame.FREED, b"", b""),
        (16, b"", b""),
        (Frame.RING, b"?", bytes(20_000)),
    ],
)
def test_frames_out_of_order_end_the_connection(ends: Ends, kind: int, header: bytes, payload: bytes) -> None:
    ends.wires[0].send(kind, 0, header, [memoryview(payload)] if payload else [], len(payload))
    ends.wires[0].flush()
    ends.run(1)
    assert ends.got[1] == [] and len(ends.ended[1]) == 1
    ends.loop.run_until(lambda: True)
    assert ends.ended[0] == []


def test_a_peer_that_waits_for_no_slot_is_refused(ends: Ends) -> None:
    """And reads nothing: what it's told of its slots would pile up."""
    ends.open_ring()
    bad, taking = ends.wires
    sealer, ring = bad._sealer, bad._ring_out
    assert sealer is not None and ring is not None and ring._memory is not None
    ends.loop.remove_reader(bad._fd)
    data = bytearray(sealer.small(Frame.PASSED, 1, b"", struct.pack("<BxxxxxxxQ", Frame.CALL, RING)))
    while not ends.ended[1]:
        sequence = sealer.reserve(1)
        tag = sealer.piece_tag(sequence, ring._memory[:1])
        data += sealer.reserved(sequence, Frame.PIECE, struct.pack("<II", 0, 1), tag)
        if len(data) > 1000:
            with contextlib.suppress(BlockingIOError):
                del data[: bad._sock.send(data)]
            ends.loop.run_until(lambda: False, ends.loop.time())
        assert sequence < 100_000
    assert ends.ended[1] == ["a piece in a slot that wasn't freed"]
    assert taking.queued_bytes < 1000


def test_tcp_connections_know_nothing_of_rings() -> None:
    loop = PlainLoop()
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    ended: list[str] = []
    room = memoryview(bytearray(INPUT_BYTES))
    for sock in (ours, theirs):
        sock.setblocking(False)
    sending, taking = StreamWire(loop, ours, "a", room), StreamWire(loop, theirs, "b", room)
    taking.on_violated = ended.append
    for wire in (sending, taking):
        wire.start_frames(Sealer(b"k" * 32, LIMITS), Opener(b"k" * 32, LIMITS))
        assert wire._ring_out is None and wire._ring_in is None
    sending.send(Frame.RING, 0, b"?", [], 0)
    sending.flush()
    assert loop.run_until(lambda: bool(ended), loop.time() + WAIT_S)
    assert ended == ["frame of unknown kind 12"]
    for wire in (sending, taking):
        wire.abandon()
    loop.close()
