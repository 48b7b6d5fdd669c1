"""A peer that holds the secret and has a bug: validly sealed frames that make no sense.

    connect ─▶ up to 64 frames that a listener must bear ─▶ one that it must not ─▶ CLOSE with a reason, then the end

The first kind is odd but allowed: unknown fields, cancelled calls that never were, credit for streams that have ended.
If it ended the connection, a slow answer or a newer peer's field would, too. The second kind must end this connection,
with a reason that names what was wrong, and nothing else.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from random import Random

import msgspec

from miles_hpc.control.auth import SessionKeys
from miles_hpc.control.frames import Failure, Frame, Limits
from miles_hpc.control.plain_loop import PlainLoop
from miles_hpc.control.wire import Carrier, Wire
from miles_hpc.core.messages import encode
from tools.fuzz_control.mutate import (
    broken_header,
    odd_but_valid_header,
    random_object,
    slow_message,
    streamed_message,
    valid_message,
)
from tools.fuzz_control.swarm import Attacker, put_raw, swarm
from tools.fuzz_control.tally import Tally
from tools.fuzz_control.target import LIMITS

__all__ = ["misbehave"]

_MAX_BORNE = 64
_CREDIT = struct.Struct("<IQ")
_PASSED, _PIECE = struct.Struct("<BxxxxxxxQ"), struct.Struct("<II")
_HUGE = Limits(header_bytes=1 << 32, payload_bytes=1 << 63)


class _Peer(Attacker):
    """One connection; what the target answers is only counted."""

    def __init__(self, rng: Random, wire: Wire, keys: SessionKeys, tally: Tally) -> None:
        super().__init__(wire, keys, tally, _HUGE)
        self.rng = rng
        self._borne_left = rng.randrange(_MAX_BORNE)
        self._in_work = 0  # messages that haven't been answered or credited
        self._streams: list[int] = []
        self._id = rng.getrandbits(63)

    def took(self, kind: int, call_id: int, header: bytes) -> None:
        if kind in (Frame.REPLY, Frame.FAILURE):
            self._in_work -= 1
            if call_id in self._streams:
                self._streams.remove(call_id)
        elif kind == Frame.CREDIT:
            self._in_work -= _CREDIT.unpack(header)[0]

    def go_on(self) -> None:
        rng = self.rng
        for _ in range(min(self._borne_left, 32)):
            if self._in_work > LIMITS.window_messages - 40:
                break
            self._borne_left -= 1
            self._bear()
        if not self._borne_left:
            # The overrun of the window takes hundreds of frames: seldom is enough.
            weights = [0.1 if frame is _more_than_the_window else 1 for frame in _FATAL.values()]
            self.fatal = rng.choices(list(_FATAL), weights)[0]
            self.tally.frames += _FATAL[self.fatal](self)
            self.tally.counts["must end it"] += 1
        self.wire.flush()

    def send(self, kind: int, call_id: int, header: bytes, payload: bytes = b"", *, claimed: int = -1) -> None:
        """One sealed frame; `claimed` is a payload length to announce without sending it."""
        if claimed >= 0:
            start, _ = self.sealer.large(kind, call_id, header, claimed)
            put_raw(self.wire, start + header)
        else:
            self.wire.send(kind, call_id, header, [memoryview(payload)] if payload else [], len(payload))

    def next_id(self) -> int:
        self._id = (self._id + 1) % (1 << 64)
        return self._id

    def _bear(self) -> None:
        """Send a frame that must be borne."""
        rng = self.rng
        self.tally.frames += 1
        self.tally.counts["borne"] += 1
        how = rng.randrange(20)
        if how <= 9:
            header = encode(valid_message(rng)) if how <= 4 else odd_but_valid_header(rng)
            payload = rng.randbytes(rng.choice((0, 0, 1, 100, 3000) if rng.random() < 0.97 else (20_000, 60_000)))
            self._in_work += 1
            if rng.random() < 0.3:
                self.send(Frame.NOTIFY, rng.getrandbits(64), header, payload)
            else:
                self.send(Frame.STREAM if how == 0 else Frame.CALL, self.next_id(), header, payload)
        elif how <= 11:
            number = self.next_id()
            self._in_work += 1
            self.send(Frame.CALL, number, encode(slow_message(rng)))
            if rng.random() < 0.5:
                for _ in range(rng.randrange(1, 3)):
                    self.send(Frame.CANCEL, number, rng.randbytes(rng.randrange(20)))
        elif how == 12:
            number = self.next_id()
            self._in_work += 1
            self._streams.append(number)
            self.send(Frame.STREAM, number, encode(streamed_message(rng)))
        elif how <= 14 and self._streams:
            number = rng.choice(self._streams)
            if how == 13:
                self.send(Frame.CREDIT, number, _CREDIT.pack(rng.choice((0, 1, 8, (1 << 32) - 1)), rng.getrandbits(64)))
            else:
                self.send(Frame.CANCEL, number, b"")
        elif how <= 16:
            self.send(Frame.CANCEL, rng.getrandbits(64), rng.randbytes(rng.randrange(50)), rng.randbytes(10))
        elif how <= 18:
            self.send(Frame.CREDIT, rng.getrandbits(64) | 1, _CREDIT.pack(rng.getrandbits(32), rng.getrandbits(64)))
        else:
            self.send(Frame.CREDIT, 0, _CREDIT.pack(0, 0))


# Each sends at least one frame that ends the connection, and returns how many it sent. Where the blocking face may have
# answered one before it reads the next, a frame of unknown kind follows.


def _unknown_kind(peer: _Peer) -> int:
    peer.send(peer.rng.choice((0, *range(16, 256))), 1, b"", b"")
    return 1


def _shared_memory_out_of_order(peer: _Peer) -> int:
    """Between wires of one host these kinds are known; elsewhere any of them ends it."""
    rng = peer.rng
    how = rng.randrange(8)
    if how == 0:
        peer.send(Frame.RING, 0, rng.choice((b"N", b"O", b"X", b"H", b"z")) + rng.randbytes(rng.choice((0, 16, 32))))
    elif how == 1:
        peer.send(Frame.PASSED, 1, b"", rng.randbytes(rng.choice((0, 15, 16, 17))))
    elif how == 2:
        size = rng.choice((0, LIMITS.payload_bytes + 1, (1 << 64) - 1))
        peer.send(Frame.PASSED, 1, encode(valid_message(rng)), _PASSED.pack(Frame.CALL, size))
    elif how == 3:
        peer.send(Frame.PIECE, 0, rng.randbytes(rng.choice((0, 8, 9))), rng.randbytes(16))
    elif how == 4:
        peer.send(Frame.FREED, 0, b"")
    elif how == 5:  # a payload, and no memory that it could come through
        peer.send(Frame.PASSED, 1, encode(valid_message(rng)), _PASSED.pack(Frame.CALL, rng.randrange(1, 1 << 20)))
        peer.send(Frame.PIECE, 0, _PIECE.pack(rng.randrange(5), rng.randrange(1 << 20)), rng.randbytes(16))
    elif how == 6:
        for _ in range(2):  # the first may be asked
            _ask_for_a_ring(peer)
    else:
        _ask_for_a_ring(peer)
        peer.send(Frame.RING, 0, b"H" + rng.randbytes(rng.choice((0, 16, 40))))
        return 2 + _unknown_kind(peer)
    return 1


def _ask_for_a_ring(peer: _Peer) -> None:
    ring = getattr(peer.wire, "_ring_out", None)
    if ring is not None:
        ring.ask()  # it expects an answer
    peer.send(Frame.RING, 0, b"?")


def _answer_to_no_call(peer: _Peer) -> int:
    header = encode(valid_message(peer.rng)) if peer.rng.random() < 0.5 else broken_header(peer.rng)
    peer.send(peer.rng.choice((Frame.REPLY, Frame.ITEM)), peer.rng.getrandbits(64), header)
    return 1


def _failure_of_no_call(peer: _Peer) -> int:
    header = peer.rng.choice((msgspec.msgpack.encode(Failure("X", "y" * 100_000)), b"", b"\x92\x01\x02"))
    peer.send(Frame.FAILURE, peer.rng.getrandbits(64), header)
    return 1


def _decision_of_a_dialer(peer: _Peer) -> int:
    peer.send(peer.rng.choice((Frame.ADMIT, Frame.REFUSE)), 0, msgspec.msgpack.encode(Failure("FencedError", "x")))
    return 1


def _credit_never_earned(peer: _Peer) -> int:
    peer.send(Frame.CREDIT, 0, _CREDIT.pack(*peer.rng.choice(((1, 0), (0, 1), ((1 << 32) - 1, (1 << 64) - 1)))))
    return 1


def _credit_without_numbers(peer: _Peer) -> int:
    peer.send(Frame.CREDIT, peer.rng.choice((0, 1)), peer.rng.randbytes(peer.rng.choice((0, 1, 11, 13, 5000))))
    return 1


def _broken_message(peer: _Peer) -> int:
    kind = peer.rng.choice((Frame.CALL, Frame.NOTIFY, Frame.STREAM))
    peer.send(kind, peer.next_id(), broken_header(peer.rng), peer.rng.randbytes(peer.rng.choice((0, 20))))
    return 1


def _random_object(peer: _Peer) -> int:
    header = msgspec.msgpack.encode([random_object(peer.rng)])  # an array is no message, whatever is in it
    peer.send(Frame.CALL, peer.next_id(), header)
    return 1


def _long_header(peer: _Peer) -> int:
    peer.send(Frame.CALL, peer.next_id(), bytes(LIMITS.header_bytes + 1))
    return 1


def _endless_payload(peer: _Peer) -> int:
    claimed = peer.rng.choice((LIMITS.payload_bytes + 1, 1 << 40, 1 << 62))
    peer.send(Frame.CALL, peer.next_id(), encode(valid_message(peer.rng)), claimed=claimed)
    return 1


def _same_call_twice(peer: _Peer) -> int:
    number, header = peer.next_id(), encode(slow_message(peer.rng))
    for _ in range(3):  # together in one segment: none is answered before the next is there
        peer.send(Frame.CALL, number, header)
    return 3 + _unknown_kind(peer)


def _more_than_the_window(peer: _Peer) -> int:
    header, n = encode(slow_message(peer.rng)), LIMITS.window_messages + 100
    for _ in range(n):
        peer.send(Frame.CALL, peer.next_id(), header)
    return n + _unknown_kind(peer)


def _bad_goodbye(peer: _Peer) -> int:
    peer.send(Frame.CLOSE, 0, peer.rng.choice((b"", b"\x90", b"\x92\x01\x02", peer.rng.randbytes(40) + b"\xc1")))
    return 1


_FATAL: dict[str, Callable[[_Peer], int]] = {
    "unknown kind": _unknown_kind,
    "shared memory out of order": _shared_memory_out_of_order,
    "answer to no call": _answer_to_no_call,
    "failure of no call": _failure_of_no_call,
    "decision of a dialer": _decision_of_a_dialer,
    "credit never earned": _credit_never_earned,
    "credit without numbers": _credit_without_numbers,
    "broken message": _broken_message,
    "random object": _random_object,
    "long header": _long_header,
    "endless payload": _endless_payload,
    "same call twice": _same_call_twice,
    "more than the window": _more_than_the_window,
    "bad goodbye": _bad_goodbye,
}


def misbehave(
    rng: Random,
    carrier: Callable[[PlainLoop], Carrier],
    address: str,
    secret: bytes,
    frames: int,
    tally: Tally,
    reasons: dict[str, set[str]],
) -> None:
    """At least `frames` frames over many connections, a few at a time. `reasons` collects what the target said."""

    def judge(peer: Attacker) -> None:
        if not peer.fatal:
            return
        tally.counts["ended with a reason"] += bool(peer.reason)
        if not peer.reason:
            tally.counts[f"no reason heard after: {peer.fatal}"] += 1
        texts = reasons.setdefault(peer.fatal, set())
        if len(texts) < 8:
            texts.add(re.sub(r"\d{2,}", "N", peer.reason)[:160])

    def make(wire: Wire, keys: SessionKeys) -> _Peer:
        return _Peer(rng, wire, keys, tally)

    swarm(carrier, address, secret, "broken", make, tally, frames, judge)
