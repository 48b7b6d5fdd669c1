"""Attacks on an authenticated connection by somebody on its path, who holds no key: the proxy in the middle.

    honest client ── sealed frames ──▶ proxy: flips, cuts, repeats, reorders, drops, splices, reflects ──▶ target

The client numbers its frames, so that the target sees whether one was left out or came twice. What follows the first
tampered byte says "forged" and must never be handled.
"""

from __future__ import annotations

import time
from random import Random

from miles_hpc.control.auth import Dialer
from miles_hpc.control.frames import HEAD_BYTES, INLINE_BYTES, TAG_BYTES, Frame, Limits, Sealer
from miles_hpc.core.messages import EndSession, encode
from miles_hpc.core.transport import Credentials
from tools.fuzz_control.mutate import changed
from tools.fuzz_control.sockets import RawClient, message
from tools.fuzz_control.tally import Tally
from tools.fuzz_control.target import identity

__all__ = ["tamper"]

_WAVE = 32


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
