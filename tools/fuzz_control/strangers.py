"""Attacks before the handshake is done: by somebody who can connect, and who has recorded or may change honest bytes.

    wave of 64   connect all ─▶ send all ─▶ (those that want it: read the challenge, answer) ─▶ end, read until closed

A stranger never gets more than the challenge, and no handler runs.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

from miles_hpc.control.auth import MAX_HANDSHAKE_BYTES, Dialer, new_secret
from miles_hpc.control.frames import Frame, Limits, Sealer
from miles_hpc.core.messages import EndSession, encode
from miles_hpc.core.transport import Credentials
from miles_hpc.core.version import PROTOCOL_VERSION
from tools.fuzz_control.mutate import changed
from tools.fuzz_control.sockets import CHALLENGE_BYTES, RawClient, message
from tools.fuzz_control.tally import Tally
from tools.fuzz_control.target import identity

__all__ = ["besiege", "knock", "knock_at_ucx"]

_WAVE = 64
_FORGED = encode(EndSession(session_id="forged-0"))


class Stranger:
    """Makes what is sent. It holds the secret only to make the best possible raw material for mutations."""

    def __init__(self, rng: Random, secret: bytes) -> None:
        self._rng = rng
        self._credentials = Credentials(secret, identity("stranger"))
        self._impostor = Credentials(new_secret(), identity("stranger"))
        self.recorded: list[tuple[bytes, bytes]] = []  # openings and proofs of honest handshakes with the target

    def dialer(self) -> Dialer:
        return Dialer(self._credentials)

    def record(self, address: str) -> None:
        """Watch an honest handshake, as somebody does who can read the network."""
        client, dialer = RawClient(address), self.dialer()
        opening = dialer.opening()
        client.send(message(opening))
        proof = dialer.proof(client.receive_message())
        client.send(message(proof))
        client.receive_message()
        client.finish()
        self.recorded.append((opening, proof))

    # One of these per connection: bytes to send at once, and what to answer to the challenge, if anything.

    def first_words(self) -> bytes:
        """Instead of an opening."""
        rng = self._rng
        opening = self.dialer().opening()
        how = rng.randrange(10)
        if how == 0:
            return rng.randbytes(rng.randrange(200))
        if how == 1:
            return message(rng.randbytes(rng.choice((0, 1, 37, 38, 39, rng.randrange(400)))))
        if how == 2:
            return rng.choice((b"\0\0", b"\x01\x10", b"\xff\xff")) + rng.randbytes(rng.randrange(5000))
        if how == 3:
            return changed(rng, message(opening))
        if how == 4:
            version = rng.choice((0, PROTOCOL_VERSION + 1, 65535, rng.randrange(65536)))
            return message(opening[:4] + version.to_bytes(2, "little") + opening[6:])
        if how == 5:
            return message(opening)[: rng.randrange(40)]  # and then silence
        if how == 6:
            return message(opening[: rng.randrange(38)])
        if how == 7:
            return message(opening) + message(rng.choice(self.recorded)[1])  # without waiting for the challenge
        if how == 8:
            frames = Sealer(rng.randbytes(32), Limits())
            return message(opening) + frames.small(Frame.CALL, 1, _FORGED, b"") + rng.randbytes(rng.randrange(3000))
        return b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"

    def answer(self) -> Callable[[Dialer, bytes], bytes]:
        """What to do with a challenge."""
        rng = self._rng
        how = rng.randrange(9)
        if how <= 2:
            return lambda dialer, challenge: message(changed(rng, dialer.proof(challenge)))
        if how == 3:
            return lambda dialer, challenge: changed(rng, message(dialer.proof(challenge)))[: 2 + MAX_HANDSHAKE_BYTES]
        if how == 4:
            return lambda dialer, challenge: message(rng.choice(self.recorded)[1])
        if how == 5:
            return lambda dialer, challenge: message(challenge)
        if how == 6:
            return lambda dialer, challenge: self._wrong_secret(challenge)
        if how == 7:
            return lambda dialer, challenge: message(dialer.proof(challenge))[: rng.randrange(30)]
        frame = Sealer(rng.randbytes(32), Limits()).small(Frame.CALL, 1, _FORGED, b"")
        return lambda dialer, challenge: message(changed(rng, dialer.proof(challenge))) + frame

    def _wrong_secret(self, challenge: bytes) -> bytes:
        impostor = Dialer(self._impostor)
        impostor.opening()
        return message(impostor.proof(challenge))


def knock(rng: Random, address: str, secret: bytes, frames: int, tally: Tally) -> None:
    """`frames` connections with one mutated message each (some are merely opened and dropped, and aren't counted)."""
    start = time.monotonic()
    stranger = Stranger(rng, secret)
    for _ in range(8):
        stranger.record(address)
    done = 0
    while done < frames:
        done += _wave(rng, stranger, address, min(_WAVE, frames - done), tally)
    tally.frames += done
    tally.duration_s += time.monotonic() - start


def _wave(rng: Random, stranger: Stranger, address: str, n: int, tally: Tally) -> int:
    clients: list[RawClient] = []
    answering: list[tuple[RawClient, Dialer]] = []
    silent = 0
    for _ in range(n + n // 16):
        client = RawClient(address)
        clients.append(client)
        if len(clients) > n:
            silent += 1
            if rng.random() < 0.5:
                client.reset()
                clients.pop()
                silent -= 1
            tally.connections += 1
            continue
        if rng.random() < 0.5:
            dialer = stranger.dialer()
            client.send(message(dialer.opening()))
            answering.append((client, dialer))
        else:
            client.send(stranger.first_words())
    for client, dialer in answering:
        challenge = client.receive_message()
        if len(challenge) != CHALLENGE_BYTES - 2:
            tally.violated(f"a good opening was answered by {len(challenge)} bytes")
            continue
        words = stranger.answer()(dialer, challenge)
        cut = rng.randrange(len(words)) if words and rng.random() < 0.2 else len(words)
        client.send(words[:cut])
        client.send(words[cut:])
    for client in clients:
        if rng.random() < 0.05:
            client.reset()
            tally.counts["reset by us"] += 1
            continue
        try:
            client.finish()
        except TimeoutError:
            tally.violated("a stranger's connection wasn't closed after its end")
        tally.counts["bytes to strangers"] += client.got
        tally.counts["challenges"] += client.got > 0
        if client.got > CHALLENGE_BYTES:
            tally.violated(f"a stranger got {client.got} bytes, more than the challenge")
    tally.connections += n
    return n


def knock_at_ucx(rng: Random, pid: int, address: str, frames: int, tally: Tally) -> None:
    """Connections with random bytes to the ports that UCX itself has opened, which know no authentication."""
    start = time.monotonic()
    ports = [port for port in _listening_ports(pid) if not address.endswith(f":{port}")]
    for n in range(frames if ports else 0):
        client = RawClient(f"ucx://127.0.0.1:{ports[n % len(ports)]}")
        client.send(rng.randbytes(rng.choice((0, 1, 8, 16, 200, 5000))))
        client.reset() if n % 2 else client.sock.close()
        tally.counts["frames to UCX's own ports"] += 1
    tally.duration_s += time.monotonic() - start


def _listening_ports(pid: int) -> list[int]:
    """TCP ports of a process that 127.0.0.1 reaches."""
    inodes = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since it was listed
            link = str(path.readlink())
            if link.startswith("socket:"):
                inodes.add(link.removeprefix("socket:[").removesuffix("]"))
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    local = [row[1].split(":") for row in rows if row[3] == "0A" and row[9] in inodes]
    return [int(port, 16) for host, port in local if host in ("0100007F", "00000000")]


def besiege(address: str, secret: bytes, tally: Tally, half_open: Callable[[], int], *, limit: int) -> None:
    """More connections than a listener keeps in their handshake, silent ones and refused ones, and slow ones.

    `half_open` asks the target. All must be gone soon after the handshake's deadline.
    """
    start = time.monotonic()
    stranger = Stranger(Random(0), secret)
    opening = stranger.dialer().opening()
    other_version = message(opening[:4] + b"\xff\xff" + opening[6:])
    crowd: list[RawClient] = []
    most = 0
    for n in range(limit + limit // 4):
        client = RawClient(address)
        if n % 3 == 1:
            client.send(other_version)  # refused after the challenge, and kept open by us
        elif n % 3 == 2:
            client.send(message(opening)[:20])
        crowd.append(client)
        if n % 200 == 199:
            most = max(most, half_open())
    most = max(most, half_open())
    slow_until = time.monotonic() + 12
    while time.monotonic() < slow_until and half_open():
        for client in crowd[-40:]:
            client.send(b"\0")  # a byte at a time doesn't extend the deadline
        time.sleep(0.25)
    left = half_open()
    tally.counts["half-open, most"] = max(tally.counts["half-open, most"], most)
    if most > limit:
        tally.violated(f"{most} connections in their handshake, limit {limit}")
    if left:
        tally.violated(f"{left} connections still in their handshake after 12 s")
    for client in crowd:
        client.reset()
    tally.connections += len(crowd)
    tally.frames += 2 * len(crowd) // 3
    tally.duration_s += time.monotonic() - start
