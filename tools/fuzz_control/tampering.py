"""Attacks on an authenticated connection by somebody on its path, who holds no key: the proxy in the middle.

    honest client ── sealed frames ──▶ proxy: flips, cuts, repeats, reorders, drops, splices, reflects ──▶ target

The client numbers its frames, so that the target sees whether one was left out or came twice. What follows the first
tampered byte says "forged" and must never be handled.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from random import Random
from typing import Any, cast

from miles_hpc.control.auth import Dialer, SessionKeys
from miles_hpc.control.frames import HEAD_BYTES, INLINE_BYTES, TAG_BYTES, Frame, Limits, Sealer
from miles_hpc.control.plain_loop import PlainLoop
from miles_hpc.control.wire import Carrier, Wire
from miles_hpc.core.messages import EndSession, encode
from miles_hpc.core.transport import Credentials
from tools.fuzz_control.mutate import changed
from tools.fuzz_control.sockets import RawClient, message
from tools.fuzz_control.swarm import Attacker, put_raw, swarm
from tools.fuzz_control.tally import Tally
from tools.fuzz_control.target import identity

__all__ = ["tamper", "tamper_over_ucx"]

_WAVE = 32
_LENGTH = struct.Struct("<I")  # before the frames of a UCX message


class _Client:
    """An honest client up to its last honest frame."""

    def __init__(self, address: str, secret: bytes, number: int) -> None:
        self.raw = RawClient(address)
        self.dialer = Dialer(Credentials(secret, identity(f"honest-{number}")))
        self.raw.send(message(self.dialer.opening()))
        self.sealer: Sealer
        self.admission: bytes  # the listener's first frame
        self.sent = 0
        self.call_id = 0

    def prove(self) -> None:
        self.raw.send(message(self.dialer.proof(self.raw.receive_message())))

    def join(self) -> None:
        keys = self.dialer.finish(self.raw.receive_message())
        self.sealer = Sealer(keys.send_key, Limits())
        self.admission = self.raw.receive(HEAD_BYTES + TAG_BYTES)

    def frame(self, session_id: str, payload: bytes = b"") -> bytes:
        """A call as the client sends it."""
        header = encode(EndSession(session_id=session_id))
        self.call_id += 1
        if HEAD_BYTES + len(header) + len(payload) + TAG_BYTES <= INLINE_BYTES:
            return self.sealer.small(Frame.CALL, self.call_id, header, payload)
        start, mac = self.sealer.large(Frame.CALL, self.call_id, header, len(payload))
        mac.update(header)
        mac.update(payload)
        return start + header + payload + mac.tag()

    def honest(self, rng: Random) -> bytes:
        data = self.frame(f"honest-{self.sent}", rng.randbytes(rng.choice((0, 10, 500))))
        self.sent += 1
        return data


def tamper(rng: Random, address: str, secret: bytes, frames: int, tally: Tally) -> None:
    """At least `frames` tampered frames, a few per connection; each connection must end, and nothing forged be handled.

    The number of honest frames that left is in `tally.counts["honest frames"]`.
    """
    start = time.monotonic()
    while tally.frames < frames:
        clients = [_Client(address, secret, n) for n in range(_WAVE)]
        for client in clients:
            client.prove()
        for client in clients:
            client.join()
        for n, client in enumerate(clients):
            for _ in range(rng.randrange(4)):
                client.raw.send(client.honest(rng))
            data, n_frames = _tampered(rng, client, clients[n - 1] if n else None)
            client.raw.send(data)
            tally.frames += n_frames
        for client in clients:
            tally.counts["honest frames"] += client.sent
            try:
                client.raw.finish()
            except TimeoutError:
                tally.violated("a connection with tampered frames wasn't closed")
        tally.connections += len(clients)
    tally.duration_s += time.monotonic() - start


def _tampered(rng: Random, client: _Client, other: _Client | None) -> tuple[bytes, int]:
    """Bytes of which nothing may be handled, and the number of frames in them."""
    payload = rng.randbytes(rng.choice((0, 0, 30, 900, 30_000)))
    frame = client.frame("forged-0", payload)
    rest = client.frame("forged-1", payload[:100]) + client.frame("forged-2")
    how = rng.randrange(9)
    if how <= 2:
        return changed(rng, frame) + rest, 3
    if how == 3:
        return frame[: rng.randrange(len(frame))], 1  # cut off, then the end
    if how == 4:
        return rest + frame, 3  # out of order: the first comes last
    if how == 5:
        return rest, 2  # the first was dropped
    if how == 6 and other is not None:
        return other.frame("forged-0") + rest, 3  # from another connection, which is done with its own
    if how == 7:
        return client.admission + frame + rest, 4  # reflected
    return rng.randbytes(rng.randrange(1, 100)) + frame + rest, 4


# ------------------------------------------------------------------------------------------------ over UCX


class _UcxClient(Attacker):
    """An honest client over UCX, whose messages are changed between its wire and UCX."""

    def __init__(self, rng: Random, wire: Any, keys: SessionKeys, tally: Tally) -> None:
        super().__init__(wire, keys, tally, Limits())
        self._rng = rng
        self._sent = 0

    def _frame_of(self, session_id: str, payload: bytes = b"") -> bytes:
        return self.sealer.small(Frame.CALL, self._sent + 1, encode(EndSession(session_id=session_id)), payload)

    def go_on(self) -> None:
        rng, wire = self._rng, cast(Any, self.wire)
        if wire._path is None:
            return  # the target may send already, we may not
        how = rng.randrange(8)
        for _ in range(rng.randrange(4)):
            put_raw(wire, self._frame_of(f"honest-{self._sent}", rng.randbytes(rng.choice((0, 10, 500)))))
            self._sent += 1
            # What is said beside the frames may overtake them.
            self.tally.counts["honest frames, overtaken perhaps" if how in (3, 4) else "honest frames"] += 1
        wire.flush()
        frame = self._frame_of("forged-0", rng.randbytes(rng.choice((0, 0, 30, 900))))
        rest = self._frame_of("forged-1") + self._frame_of("forged-2")
        self.fatal = f"tampering {how}"
        if how <= 1:
            wire._post(wire._path, _LENGTH.pack(len(frame)) + changed(rng, frame), len(frame))
        elif how == 2:
            message = changed(rng, _LENGTH.pack(len(frame)) + frame)
            while message[_LENGTH.size :].startswith(frame):  # only the length, which isn't part of the frame
                message = changed(rng, _LENGTH.pack(len(frame)) + frame)
            wire._post(wire._path, message, len(frame))
        elif how == 3:
            wire._line.send(rng.randbytes(rng.randrange(30)))
        elif how == 4:
            record = self.sealer.beside().small(Frame.NOTIFY, 0, b"P" + rng.randbytes(8), b"")
            wire._line.send(changed(rng, record) if rng.randrange(2) else record)  # forged, or replayed: a first one
        elif how == 5:
            wire._post(wire._path, rng.randbytes(rng.choice((0, 1, 3, 4, 60, 30_000, 2_000_000))), 0)
        elif how == 6:
            put_raw(wire, frame[: rng.randrange(len(frame))])
        put_raw(wire, rest)
        wire.flush()
        self.tally.frames += 3


def tamper_over_ucx(
    rng: Random, carrier: Callable[[PlainLoop], Carrier], address: str, secret: bytes, frames: int, tally: Tally
) -> None:
    """As `tamper`: at least `frames` frames, on UCX's side of the wire and beside it."""

    def make(wire: Wire, keys: SessionKeys) -> _UcxClient:
        return _UcxClient(rng, wire, keys, tally)

    swarm(carrier, address, secret, "honest", make, tally, tally.frames + frames)
