"""The parts on their own, where a broken frame costs microseconds instead of a connection.

wires          StreamWire on a socket pair: a stream of frames, broken at one place, in pieces of any size
seals          Opener: one broken frame against one honest one
handshakes     Acceptor and Dialer: broken messages at every step
conversations  Conversation on a wire of its own making: any frames in any order, in both roles, with calls in flight
"""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from random import Random

import msgspec

from miles_hpc.control.auth import Acceptor, Dialer, SessionKeys
from miles_hpc.control.conversation import Conversation, Face
from miles_hpc.control.exchange import STREAM_WINDOW, Exchange, Incoming
from miles_hpc.control.frames import (
    HEAD_BYTES,
    INLINE_BYTES,
    TAG_BYTES,
    Failure,
    Frame,
    Limits,
    Opener,
    Sealer,
    read_head,
)
from miles_hpc.control.plain_loop import PlainLoop
from miles_hpc.control.stream_wire import StreamWire
from miles_hpc.control.wire import Wire
from miles_hpc.core.errors import AuthenticationError, MilesError, ProtocolError
from miles_hpc.core.messages import EndSession, encode
from miles_hpc.core.transport import Credentials, Reply
from tools.fuzz_control.mutate import (
    broken_header,
    changed,
    odd_but_valid_header,
    streamed_message,
    valid_message,
)
from tools.fuzz_control.tally import Tally
from tools.fuzz_control.target import LIMITS, identity

__all__ = ["PaperWire", "fuzz_conversations", "fuzz_handshakes", "fuzz_seals", "fuzz_wires"]

_KEY = bytes(range(32))


def _frame(sealer: Sealer, kind: int, number: int, header: bytes, payload: bytes) -> bytes:
    if HEAD_BYTES + len(header) + len(payload) + TAG_BYTES <= INLINE_BYTES:
        return sealer.small(kind, number, header, payload)
    start, mac = sealer.large(kind, number, header, len(payload))
    mac.update(header)
    mac.update(payload)
    return start + header + payload + mac.tag()


# ------------------------------------------------------------------------------------------------ wires


def fuzz_wires(rng: Random, frames: int, tally: Tally) -> None:
    """Exactly the frames before the first changed byte are delivered, and then nothing more."""
    start = time.monotonic()
    loop = PlainLoop()
    room = memoryview(bytearray(64 * 1024))
    for _ in range(frames):
        _one_wire(rng, loop, room, tally)
    loop.close()
    tally.frames += frames
    tally.duration_s += time.monotonic() - start


def _one_wire(rng: Random, loop: PlainLoop, room: memoryview, tally: Tally) -> None:
    sealer = Sealer(_KEY, Limits())
    whole = []
    for n in range(rng.randrange(1, 5)):
        payload = rng.randbytes(rng.choice((0, 5, 300, 16_000, 16_400, 40_000) if rng.random() < 0.2 else (0, 5, 300)))
        whole.append(_frame(sealer, rng.randrange(1, 12), n, b"header", payload))
    data = b"".join(whole)
    target = rng.randrange(len(whole))
    before = sum(map(len, whole[:target]))
    broken = changed(rng, whole[target])
    tail = b"".join(whole[target + 1 :])
    if (broken + tail).startswith(whole[target]):
        return  # a change that only adds to a frame leaves that frame good
    data = data[:before] + broken + tail

    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    got: list[int] = []
    ended: list[str] = []
    wire = StreamWire(loop, ours, "fuzz", room)
    wire.on_frame = lambda kind, call_id, header, payload: got.append(call_id)
    wire.on_lost = ended.append
    wire.on_violated = ended.append
    wire.start_frames(Sealer(_KEY, LIMITS), Opener(_KEY, LIMITS))
    position = 0
    while position < len(data) and not ended:
        step = rng.choice((1, 7, 24, 40, 1000, 100_000))
        try:
            position += theirs.send(data[position : position + step])
        except BlockingIOError:
            pass
        loop.run_until(lambda: True, 0.0)
        wire._readable()
    theirs.close()
    for _ in range(4):
        if not ended:
            wire._readable()
    if not ended:
        tally.violated("a wire outlived a broken stream and its end")
    if got != list(range(target)):
        tally.violated(f"of {target} good frames before a broken one were delivered: {got}")
    if wire._open:
        wire._readable()  # more input after a violation
    if got != list(range(target)):
        tally.violated("a frame was delivered after a violation")
    wire.abandon()


# ------------------------------------------------------------------------------------------------ seals


def fuzz_seals(rng: Random, frames: int, tally: Tally) -> None:
    """No changed frame verifies, and a refused one doesn't advance the number that is expected."""
    start = time.monotonic()
    opener = Opener(_KEY, LIMITS)
    sealer = Sealer(_KEY, LIMITS)
    small = _frame(sealer, Frame.CALL, 7, b"header", b"payload" * 9)
    large = _frame(Sealer(_KEY, LIMITS), Frame.CALL, 7, b"header", b"payload" * 9000)[: HEAD_BYTES + TAG_BYTES]
    for n in range(frames):
        if n % 4:
            broken = changed(rng, small)
            try:
                head = read_head(broken.ljust(HEAD_BYTES, b"\0"))
                if HEAD_BYTES + head.header_bytes + head.payload_bytes + TAG_BYTES == len(broken):
                    tally.counts["of the right length"] += 1
                opener.small(broken)
            except (AuthenticationError, ProtocolError):
                continue
        else:
            broken = changed(rng, large)[: HEAD_BYTES + TAG_BYTES].ljust(HEAD_BYTES + TAG_BYTES, b"\0")
            if broken == large:
                continue
            try:
                opener.large(read_head(broken), broken[:HEAD_BYTES], broken[HEAD_BYTES:])
            except (AuthenticationError, ProtocolError):
                continue
        tally.violated(f"a changed frame verified: {broken.hex()}")
    opener.small(small)  # still the next one
    tally.frames += frames
    tally.duration_s += time.monotonic() - start


# ------------------------------------------------------------------------------------------------ handshakes


def fuzz_handshakes(rng: Random, frames: int, secret: bytes, tally: Tally) -> None:
    """Whatever is broken in a handshake, neither side comes to keys, and only MilesErrors are raised."""
    start = time.monotonic()
    credentials = Credentials(secret, identity("fuzz"))
    for _ in range(frames):
        step = rng.randrange(4)
        dialer, acceptor = Dialer(credentials), Acceptor(credentials)
        keys: list[SessionKeys | None] = []
        try:
            opening = dialer.opening()
            challenge = acceptor.challenge(changed(rng, opening) if step == 0 else opening)
            proof = dialer.proof(changed(rng, challenge) if step == 1 else challenge)
            welcome, accepted = acceptor.welcome(changed(rng, proof) if step == 2 else proof)
            if step < 3:
                keys.append(accepted)
            keys.append(dialer.finish(changed(rng, welcome) if step == 3 else welcome))
        except MilesError:
            pass
        if any(key is not None for key in keys):
            tally.violated(f"a handshake broken at step {step} gave keys")
    tally.frames += frames
    tally.duration_s += time.monotonic() - start


# ------------------------------------------------------------------------------------------------ conversations


class PaperWire(Wire):
    """Takes what is sent and remembers the last: kind, call id, header."""

    def __init__(self) -> None:
        super().__init__("paper")
        self.ended = False
        self.sent: deque[tuple[int, int, bytes]] = deque(maxlen=50)
        self.queued = 0

    @property
    def queued_bytes(self) -> int:
        return self.queued

    def send_message(self, data: bytes) -> None:
        return

    def start_frames(self, sealer: Sealer, opener: Opener) -> None:
        return

    def send(
        self,
        kind: int,
        call_id: int,
        header: bytes,
        views: Sequence[memoryview],
        n_bytes: int,
        handed_over: Callable[[], None] | None = None,
    ) -> bool:
        self.sent.append((kind, call_id, header))
        return True

    def flush(self) -> None:
        return

    def close(self, flush_s: float) -> None:
        self.abandon()

    def abandon(self) -> None:
        self.silence()
        self.ended = True


class _Owner(Face):
    """Answers some of what arrives, at once or later."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self.conversation: Conversation
        self.in_work: list[Incoming] = []
        self.stopped = 0
        self.n_ended = 0

    def serve(self, incoming: Incoming) -> None:
        if self._rng.random() < 0.6:
            self.conversation.answer(incoming, None)
            return
        self.in_work.append(incoming)

        def stop() -> None:
            self.stopped += 1
            self.conversation.fail(incoming, ProtocolError("stopped"))

        incoming.stop = stop
        incoming.more = lambda: None

    def ended(self) -> None:
        self.n_ended += 1


def fuzz_conversations(rng: Random, frames: int, tally: Tally) -> None:
    """Nothing is raised into the wire, whatever frames come; the end settles every call and says why."""
    start = time.monotonic()
    loop = PlainLoop()
    while tally.frames < frames:
        _one_conversation(rng, loop, tally)
        loop.run_until(lambda: True, 0.0)
    loop.close()
    tally.duration_s += time.monotonic() - start


def _one_conversation(rng: Random, loop: PlainLoop, tally: Tally) -> None:
    wire, owner = PaperWire(), _Owner(rng)
    keys = SessionKeys(identity("peer"), _KEY, _KEY, (20, 10_000))
    dialer = rng.random() < 0.5
    conversation = owner.conversation = Conversation(loop, wire, keys, LIMITS, owner, dialer=dialer)
    take = wire.on_frame
    if not dialer and rng.random() < 0.8:
        conversation.admit()
    settled: list[Exchange] = []
    unread: dict[int, list[Reply]] = {}
    exchanges: list[Exchange] = []
    for _ in range(rng.randrange(4)):
        items: list[Reply] = []
        exchange = conversation.begin(
            valid_message(rng),
            [rng.randbytes(50)],
            60.0,
            stream=rng.random() < 0.5,
            on_done=settled.append,
            on_item=items.append,
        )
        exchanges.append(exchange)
        unread[id(exchange)] = items
        if rng.random() < 0.2:
            conversation.give_up(exchange, ProtocolError("given up"))
    for _ in range(rng.randrange(3)):
        exchanges.append(conversation.notify(valid_message(rng), [], settled.append))
    for _ in range(rng.randrange(1, 40)):
        kind, number, header = _any_frame(rng, exchanges, owner)
        tally.frames += 1
        try:
            take(kind, number, header, memoryview(rng.randbytes(rng.choice((0, 0, 9)))))
        except Exception as error:
            tally.violated(f"a frame of kind {kind} raised {type(error).__name__}: {error}")
            return
        if rng.random() < 0.1 and owner.in_work:
            conversation.answer(owner.in_work.pop(rng.randrange(len(owner.in_work))), None)
        if max(map(len, unread.values()), default=0) > STREAM_WINDOW:
            tally.violated("more items than the window were taken")
            return
        if conversation._used_messages < 0 or conversation._used_bytes < 0 or conversation._taken_messages < 0:
            tally.violated("a window has become negative")
            return
    conversation.abandon("end of the test")
    tally.connections += 1
    tally.counts["ended by a frame"] += conversation.close_reason != "end of the test"
    if not conversation.close_reason or not conversation.is_closed or owner.n_ended != 1 or not wire.ended:
        tally.violated(f"ended {owner.n_ended} times, reason {conversation.close_reason!r}")
    if any(exchange.result is None for exchange in exchanges) or len(settled) != len(exchanges):
        tally.violated(f"{len(exchanges)} calls, of which {len(settled)} were settled")


def _any_frame(rng: Random, exchanges: list[Exchange], owner: _Owner) -> tuple[int, int, bytes]:
    kind = rng.randrange(1, 12)
    numbers = [e.call_id for e in exchanges] + [i.call_id for i in owner.in_work] + [0, 1, rng.getrandbits(64)]
    number = rng.choice(numbers)
    how = rng.randrange(10)
    if how <= 5:
        if kind in (Frame.FAILURE, Frame.REFUSE, Frame.CLOSE):
            header = msgspec.msgpack.encode(Failure("X", "why"))
        elif kind == Frame.CREDIT:
            header = rng.choice((0, 1, 40)).to_bytes(4, "little") + rng.choice((0, 1, 90)).to_bytes(8, "little")
        elif kind == Frame.STREAM:
            header = encode(streamed_message(rng))
        else:
            header = encode(valid_message(rng))
        if kind in (Frame.CLOSE, Frame.REFUSE, Frame.ADMIT) and rng.random() < 0.8:
            kind = Frame.ITEM
            header = encode(EndSession(session_id="x"))
    elif how <= 7:
        header = odd_but_valid_header(rng)
    elif how == 8:
        header = rng.randbytes(rng.randrange(30))
    else:
        header = broken_header(rng)
    return kind, number, header
