"""A peer that holds the secret and has a bug: validly sealed frames that make no sense.

    connect ─▶ up to 64 frames that a listener must bear ─▶ one that it must not ─▶ CLOSE with a reason, then the end

The first kind is odd but allowed: unknown fields, cancelled calls that never were, credit for streams that have ended.
If it ended the connection, a slow answer or a newer peer's field would, too. The second kind must end this connection,
with a reason that names what was wrong, and nothing else.
"""

from __future__ import annotations

import re
import struct
import time
from collections.abc import Callable
from random import Random

import msgspec

from miles_hpc.control.auth import SessionKeys
from miles_hpc.control.frames import Failure, Frame, Limits, Opener, Sealer
from miles_hpc.control.greeting import Dialing, Terms
from miles_hpc.control.plain_loop import PlainLoop
from miles_hpc.control.wire import Carrier, Wire
from miles_hpc.core.messages import encode
from miles_hpc.core.transport import Credentials
from tools.fuzz_control.mutate import (
    broken_header,
    odd_but_valid_header,
    random_object,
    slow_message,
    streamed_message,
    valid_message,
)
from tools.fuzz_control.tally import Tally
from tools.fuzz_control.target import LIMITS, identity

__all__ = ["misbehave"]

_PARALLEL = 16
_MAX_BORNE = 64
_PATIENCE_S = 30.0
_CREDIT = struct.Struct("<IQ")
_HUGE = Limits(header_bytes=1 << 32, payload_bytes=1 << 63)
_failures = msgspec.msgpack.Decoder(Failure)


class _Peer:
    """One connection; what the target says to it is only counted."""

    def __init__(self, rng: Random, wire: Wire, keys: SessionKeys, tally: Tally) -> None:
        self._rng = rng
        self._wire = wire
        self._tally = tally
        self._borne_left = rng.randrange(_MAX_BORNE)
        self._in_work = 0  # messages that haven't been answered or credited
        self._streams: list[int] = []
        self._id = rng.getrandbits(63)
        self._admitted = False
        self.reason = ""
        self.fatal = ""  # the frame that must end it
        self.over = False
        wire.on_frame = self._frame
        wire.on_lost = self._lost
        wire.on_violated = self._unverified
        wire.start_frames(Sealer(keys.send_key, _HUGE), Opener(keys.receive_key, Limits()))

    def _frame(self, kind: int, call_id: int, header: bytes, payload: memoryview) -> None:
        if kind in (Frame.REPLY, Frame.FAILURE):
            self._in_work -= 1
            if call_id in self._streams:
                self._streams.remove(call_id)
        elif kind == Frame.CREDIT:
            self._in_work -= _CREDIT.unpack(header)[0]
        elif kind == Frame.ADMIT:
            self._admitted = True
        elif kind in (Frame.CLOSE, Frame.REFUSE):
            self.reason = _failures.decode(header).text

    def _lost(self, reason: str) -> None:
        self.over = True
        if not self.fatal:
            self._tally.violated(f"a connection ended that had sent nothing wrong: {self.reason or reason}")

    def _unverified(self, reason: str) -> None:
        self.over = True
        self._tally.violated(f"the target's frames don't verify: {reason}")

    def go_on(self) -> None:
        """Send some more."""
        if not self._admitted or self.fatal or self.over:
            return
        rng = self._rng
        for _ in range(min(self._borne_left, 32)):
            if self._in_work > LIMITS.window_messages - 40:
                break
            self._borne_left -= 1
            self._bear()
        if not self._borne_left:
            # The overrun of the window takes hundreds of frames: seldom is enough.
            self.fatal = rng.choices(list(_FATAL), [0.1 if f is _more_than_the_window else 1 for f in _FATAL.values()])[
                0
            ]
            n = _FATAL[self.fatal](self)
            self._tally.frames += n
            self._tally.counts["must end it"] += 1
        self._wire.flush()

    def send(self, kind: int, call_id: int, header: bytes, payload: bytes = b"", *, claimed: int = -1) -> None:
        """One sealed frame; `claimed` is a payload length to announce without sending it."""
        if claimed >= 0:
            self._wire.send(kind, call_id, header, [], claimed)
        else:
            self._wire.send(kind, call_id, header, [memoryview(payload)] if payload else [], len(payload))

    def next_id(self) -> int:
        self._id = (self._id + 1) % (1 << 64)
        return self._id

    def _bear(self) -> None:
        """Send a frame that must be borne."""
        rng = self._rng
        self._tally.frames += 1
        self._tally.counts["borne"] += 1
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
    peer.send(peer._rng.choice((0, *range(12, 256))), 1, b"", b"")
    return 1


def _answer_to_no_call(peer: _Peer) -> int:
    header = encode(valid_message(peer._rng)) if peer._rng.random() < 0.5 else broken_header(peer._rng)
    peer.send(peer._rng.choice((Frame.REPLY, Frame.ITEM)), peer._rng.getrandbits(64), header)
    return 1


def _failure_of_no_call(peer: _Peer) -> int:
    header = peer._rng.choice((msgspec.msgpack.encode(Failure("X", "y" * 100_000)), b"", b"\x92\x01\x02"))
    peer.send(Frame.FAILURE, peer._rng.getrandbits(64), header)
    return 1


def _decision_of_a_dialer(peer: _Peer) -> int:
    peer.send(peer._rng.choice((Frame.ADMIT, Frame.REFUSE)), 0, msgspec.msgpack.encode(Failure("FencedError", "x")))
    return 1


def _credit_never_earned(peer: _Peer) -> int:
    peer.send(Frame.CREDIT, 0, _CREDIT.pack(*peer._rng.choice(((1, 0), (0, 1), ((1 << 32) - 1, (1 << 64) - 1)))))
    return 1


def _credit_without_numbers(peer: _Peer) -> int:
    peer.send(Frame.CREDIT, peer._rng.choice((0, 1)), peer._rng.randbytes(peer._rng.choice((0, 1, 11, 13, 5000))))
    return 1


def _broken_message(peer: _Peer) -> int:
    kind = peer._rng.choice((Frame.CALL, Frame.NOTIFY, Frame.STREAM))
    peer.send(kind, peer.next_id(), broken_header(peer._rng), peer._rng.randbytes(peer._rng.choice((0, 20))))
    return 1


def _random_object(peer: _Peer) -> int:
    header = msgspec.msgpack.encode([random_object(peer._rng)])  # an array is no message, whatever is in it
    peer.send(Frame.CALL, peer.next_id(), header)
    return 1


def _long_header(peer: _Peer) -> int:
    peer.send(Frame.CALL, peer.next_id(), bytes(LIMITS.header_bytes + 1))
    return 1


def _endless_payload(peer: _Peer) -> int:
    claimed = peer._rng.choice((LIMITS.payload_bytes + 1, 1 << 40, 1 << 62))
    peer.send(Frame.CALL, peer.next_id(), encode(valid_message(peer._rng)), claimed=claimed)
    return 1


def _same_call_twice(peer: _Peer) -> int:
    number, header = peer.next_id(), encode(slow_message(peer._rng))
    for _ in range(3):  # together in one segment: none is answered before the next is there
        peer.send(Frame.CALL, number, header)
    return 3 + _unknown_kind(peer)


def _more_than_the_window(peer: _Peer) -> int:
    header, n = encode(slow_message(peer._rng)), LIMITS.window_messages + 100
    for _ in range(n):
        peer.send(Frame.CALL, peer.next_id(), header)
    return n + _unknown_kind(peer)


def _bad_goodbye(peer: _Peer) -> int:
    peer.send(Frame.CLOSE, 0, peer._rng.choice((b"", b"\x90", b"\x92\x01\x02", peer._rng.randbytes(40) + b"\xc1")))
    return 1


_FATAL: dict[str, Callable[[_Peer], int]] = {
    "unknown kind": _unknown_kind,
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
    start = time.monotonic()
    loop = PlainLoop()
    opened = carrier(loop)
    terms = Terms(Credentials(secret, identity("broken")))
    peers: dict[_Peer, float] = {}
    dialing = 0

    def connected(wire: Wire, keys: SessionKeys) -> None:
        nonlocal dialing
        dialing -= 1
        peers[_Peer(rng, wire, keys, tally)] = loop.time()

    def failed(error: Exception) -> None:
        nonlocal dialing
        dialing -= 1
        tally.violated(f"a peer with the secret can't connect: {error}")

    end_of_dialing = frames
    while tally.frames < end_of_dialing or peers or dialing:
        while len(peers) + dialing < _PARALLEL and tally.frames < end_of_dialing and tally.n_violations < 50:
            dialing += 1
            tally.connections += 1
            Dialing(opened, address, terms, connected, failed)
        if tally.n_violations >= 50:
            end_of_dialing = 0
        loop.run_until(_once(), loop.time() + 0.01)
        now = loop.time()
        for peer, since in list(peers.items()):
            peer.go_on()
            if peer.over:
                _judge(peer, tally, reasons)
                del peers[peer]
            elif now - since > _PATIENCE_S:
                tally.violated(f"not ended within {_PATIENCE_S:.0f} s after: {peer.fatal or 'nothing wrong'}")
                peer._wire.abandon()
                del peers[peer]
    opened.close()
    loop.close()
    tally.duration_s += time.monotonic() - start


def _once() -> Callable[[], bool]:
    """True at the second question: after one look at the descriptors."""
    asked = 0

    def done() -> bool:
        nonlocal asked
        asked += 1
        return asked > 1

    return done


def _judge(peer: _Peer, tally: Tally, reasons: dict[str, set[str]]) -> None:
    if peer.fatal:
        tally.counts["ended with a reason"] += bool(peer.reason)
        if not peer.reason:
            tally.counts[f"no reason heard after: {peer.fatal}"] += 1
        reasons.setdefault(peer.fatal, set())
        if len(reasons[peer.fatal]) < 8:
            reasons[peer.fatal].add(re.sub(r"\d{2,}", "N", peer.reason)[:160])
