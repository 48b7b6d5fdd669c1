"""Who lacks the run's secret, or belongs to another start, is refused, and the log says so without secrets."""

from __future__ import annotations

import asyncio
import base64
import importlib.util
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from miles_hpc.control import greeting
from miles_hpc.control.auth import MAX_HANDSHAKE_BYTES, Dialer, SessionKeys, StaleListener, new_secret
from miles_hpc.control.frames import HEAD_BYTES, TAG_BYTES, Frame, Limits, Sealer
from miles_hpc.control.opening import open_blocking_transport, open_transport
from miles_hpc.core.errors import AuthenticationError, FencedError, MilesError
from miles_hpc.core.messages import EndSession, Heartbeat, encode
from miles_hpc.core.transport import Credentials, PeerIdentity
from miles_hpc.core.version import PROTOCOL_VERSION
from tools.fuzz_control.sockets import CHALLENGE_BYTES, RawClient, message

SECRET = new_secret()
WAIT_S = 60.0  # a bound against hanging, not an expectation
FACES = ["asyncio", "blocking"]
HAS_UCX = any(map(importlib.util.find_spec, ("ucxx", "ucp")))
KINDS = [
    "tcp",
    "tcp-only",
    pytest.param("ucx", marks=pytest.mark.skipif(not HAS_UCX, reason="neither ucxx nor ucx-py is here")),
]


def credentials(name: str, *, secret: bytes = SECRET, attempt: int = 1, term: int = 1) -> Credentials:
    identity = PeerIdentity(role="trainer", name=name, host="host", pid=7, attempt=attempt, term=term)
    return Credentials(secret, identity)


class Listening:
    """A listener of either face in a thread of its own."""

    def __init__(self, face: str, who: Credentials, kind: str) -> None:
        self.handled: list[str] = []
        self.joined: list[str] = []
        self.address = ""
        self.half_open = 0
        self.kind = kind
        self._who = who
        self._stop = threading.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._blocking if face == "blocking" else self._asyncio)

    def _handle(self, endpoint: Any, received: Any, payload: memoryview) -> None:
        self.handled.append(f"{endpoint.peer.name}: {received}")

    def _blocking(self) -> None:
        transport = open_blocking_transport(self.kind, self._who, spin_s=0.0)
        listener = transport.listen(self._handle, on_connect=lambda endpoint: self.joined.append(endpoint.peer.name))
        self.address = listener.address
        self._ready.set()
        while not self._stop.is_set():
            transport.serve(lambda: False, deadline_s=0.02)
            self.half_open = len(listener._greeter._half_open)  # type: ignore[attr-defined]
        transport.close()

    def _asyncio(self) -> None:
        async def on_connect(endpoint: Any) -> None:
            self.joined.append(endpoint.peer.name)

        async def main() -> None:
            listener = await open_transport(self.kind, self._who).listen(self._handle, on_connect=on_connect)
            self.address = listener.address
            self._ready.set()
            while not self._stop.is_set():
                await asyncio.sleep(0.02)
                self.half_open = len(listener._greeter._half_open)  # type: ignore[attr-defined]
            await listener.close()

        asyncio.run(main())

    def start(self) -> None:
        self._thread.start()
        assert self._ready.wait(WAIT_S)

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


@contextmanager
def listening(face: str, who: Credentials | None = None, *, kind: str = "tcp") -> Iterator[Listening]:
    """It has to serve an honest peer when the attack is over, or the test proves nothing."""
    listener = Listening(face, who or credentials("listener"), kind)
    listener.start()
    try:
        yield listener
        same = listener._who.identity
        call(listener, credentials("honest", attempt=same.attempt, term=same.term))
        assert listener.joined[-1] == "honest"
    finally:
        listener.stop()


def call(listener: Listening, who: Credentials, *, version: int = PROTOCOL_VERSION) -> None:
    """Connect and call once."""
    transport = open_blocking_transport(listener.kind, who, spin_s=0.0, version=version)
    try:
        endpoint = transport.connect(listener.address, deadline_s=WAIT_S)
        endpoint.call(Heartbeat(), deadline_s=WAIT_S)
    finally:
        transport.close()


def refusals(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "refused" in r.getMessage() and r.levelno >= logging.WARNING]


def wait_for(condition: Any, what: str) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.01)


def open_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


class Recorder:
    """An honest peer on a raw socket, and everything that it sends, receives and derives."""

    def __init__(self, listener: Listening, who: Credentials) -> None:
        self.client = RawClient(listener.address)
        dialer = Dialer(who)
        self.opening = dialer.opening()
        self.client.send(message(self.opening))
        self.challenge = self.client.receive_message()
        self.proof = dialer.proof(self.challenge)
        self.client.send(message(self.proof))
        self.welcome = self.client.receive_message()
        self.keys: SessionKeys = dialer.finish(self.welcome)
        self.admission = self.client.receive(HEAD_BYTES + TAG_BYTES)
        self.call = Sealer(self.keys.send_key, Limits()).small(
            Frame.CALL, 1, encode(EndSession(session_id="once")), b""
        )
        self.client.send(self.call)
        self.reply = self.client.receive(HEAD_BYTES + TAG_BYTES)
        self.client.finish()

    @property
    def sent(self) -> bytes:
        return message(self.opening) + message(self.proof) + self.call


# ------------------------------------------------------------------------------------- refused, and logged


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("face", FACES)
def test_wrong_secret(face: str, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    with listening(face, kind=kind) as listener:
        with pytest.raises(AuthenticationError, match="another secret"):
            call(listener, credentials("stranger", secret=new_secret()))
        wait_for(lambda: refusals(caplog), "the refusal isn't logged")
        assert not listener.handled
        assert not listener.joined
    (line,) = refusals(caplog)
    who = f"pid {os.getpid()} (user {os.geteuid()}) of this host" if kind == "tcp" else "127.0.0.1"
    assert f"from {who} refused: the dialer didn't prove that it knows this run's secret" in line


@pytest.mark.parametrize("face", FACES)
def test_a_recorded_conversation_replayed(face: str, caplog: pytest.LogCaptureFixture) -> None:
    with listening(face) as listener:
        record = Recorder(listener, credentials("recorded"))
        assert len(listener.handled) == 1
        for pieces in ([record.sent], [bytes([byte]) for byte in record.sent]):
            client = RawClient(listener.address)
            for piece in pieces:
                client.send(piece)
            client.finish()
            assert client.got in (0, CHALLENGE_BYTES)  # 0: reset before it was read
        wait_for(lambda: len(refusals(caplog)) == 2, "the refusals aren't logged")
        assert listener.handled == [f"recorded: {EndSession(session_id='once')}"]
        assert listener.joined == ["recorded"]
    assert all("didn't prove" in line for line in refusals(caplog))


@pytest.mark.parametrize("face", FACES)
def test_what_the_listener_said_is_no_proof(face: str, caplog: pytest.LogCaptureFixture) -> None:
    """Reflection: its own challenge and its own proof, of this connection or of another one."""
    with listening(face) as listener:
        record = Recorder(listener, credentials("recorded"))
        before = list(listener.handled)
        for answer in (None, record.welcome, record.welcome[:32] + record.proof[32:], record.challenge):
            client = RawClient(listener.address)
            client.send(message(record.opening))
            challenge = client.receive_message()
            client.send(message(challenge if answer is None else answer))
            assert client.finish() == b""
        client = RawClient(listener.address)
        client.send(message(record.challenge))  # as an opening
        client.finish()
        assert client.got == 0
        wait_for(lambda: len(refusals(caplog)) == 5, "the refusals aren't logged")
        assert listener.handled == before
        assert listener.joined == ["recorded"]


@pytest.mark.parametrize("face", FACES)
def test_two_listeners_played_against_each_other(face: str, caplog: pytest.LogCaptureFixture) -> None:
    """Each is asked with the other's words; neither ever makes the proof that the other wants."""
    with listening(face) as one, listening(face, credentials("listener-2")) as two:
        left, right = RawClient(one.address), RawClient(two.address)
        opening = Dialer(credentials("x", secret=new_secret())).opening()
        left.send(message(opening))
        challenge = left.receive_message()
        right.send(message(opening[:6] + challenge[6:]))  # an opening with the nonce that the first has chosen
        counter = right.receive_message()
        assert len(counter) == CHALLENGE_BYTES - 2
        left.send(message(counter))
        right.send(message(challenge))
        assert left.finish() == right.finish() == b""
        assert left.got == right.got == CHALLENGE_BYTES
        # an honest proof for one of them, carried to the other
        honest = Dialer(credentials("honest-dialer"))
        first = honest.opening()
        left, right = RawClient(one.address), RawClient(two.address)
        left.send(message(first))
        right.send(message(first))
        left.receive_message()
        right.send(message(honest.proof(right.receive_message())))
        welcome = right.receive_message()
        left.send(message(welcome))
        assert left.finish() == b""
        right.finish()
        wait_for(lambda: len(refusals(caplog)) >= 3, "the refusals aren't logged")
        assert not one.handled
        assert not one.joined
        assert two.joined == ["honest-dialer"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("face", FACES)
def test_another_protocol_version(face: str, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    with listening(face, kind=kind) as listener:
        with pytest.raises(AuthenticationError, match=f"version {PROTOCOL_VERSION} at the peer, 77 here"):
            call(listener, credentials("old"), version=77)
        wait_for(lambda: refusals(caplog), "the refusal isn't logged")
        assert not listener.joined
    assert f"version 77 at the peer, {PROTOCOL_VERSION} here" in refusals(caplog)[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("face", FACES)
def test_messages_that_are_too_long_are_not_waited_for(face: str, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    with listening(face, kind=kind) as listener:
        client = RawClient(listener.address)
        client.send((MAX_HANDSHAKE_BYTES + 1).to_bytes(2, "little"))
        assert client.receive(1) == b""  # hung up, though nothing has followed
        client.sock.close()
        client = RawClient(listener.address)
        client.send(message(Dialer(credentials("x")).opening()))
        client.receive_message()
        client.send(b"\xff\xff")
        assert client.receive(1) == b""
        client.sock.close()
        wait_for(lambda: len(refusals(caplog)) == 2, "the refusals aren't logged")
        assert not listener.joined
    assert "message of 4097 bytes, limit 4096" in refusals(caplog)[0]
    assert "message of 65535 bytes, limit 4096" in refusals(caplog)[1]
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize(
    ("dialer", "error"),
    [
        ({"attempt": 1, "term": 5}, FencedError),
        ({"attempt": 2, "term": 4}, FencedError),
        ({"attempt": 2, "term": 6}, StaleListener),
        ({"attempt": 3, "term": 5}, StaleListener),
    ],
)
def test_another_attempt_or_term(
    face: str, dialer: dict[str, int], error: type[MilesError], caplog: pytest.LogCaptureFixture
) -> None:
    with listening(face, credentials("listener", attempt=2, term=5)) as listener:
        with pytest.raises(error):
            call(listener, credentials("other", **dialer))
        wait_for(lambda: refusals(caplog), "the refusal isn't logged")
        assert not listener.handled
        assert not listener.joined
    (line,) = refusals(caplog)
    assert f"other (attempt {dialer['attempt']}, term {dialer['term']}) refused by listener" in line
    assert "attempt 2, term 5" in line


# ------------------------------------------------------------------------------------- what the log must not hold


@pytest.mark.parametrize("face", FACES)
def test_no_secret_material_is_logged(face: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    hidden: list[bytes] = [SECRET]
    with listening(face) as listener:
        record = Recorder(listener, credentials("recorded"))
        hidden += [record.opening[6:], record.challenge[6:], record.proof[:32], record.welcome[:32]]
        hidden += [record.keys.send_key, record.keys.receive_key, record.call[-16:], record.reply[-16:]]
        assert record.keys.send_key.hex() not in repr(record.keys)

        stranger = Dialer(credentials("stranger", secret=new_secret()))
        client = RawClient(listener.address)
        opening = stranger.opening()
        client.send(message(opening))
        challenge = client.receive_message()
        proof = stranger.proof(challenge)
        client.send(message(proof))
        client.finish()
        hidden += [opening[6:], challenge[6:], proof[:32]]

        garbage = bytes(range(100, 138))
        for words in (message(garbage), message(opening[:4] + b"\x07\x07" + garbage[:32]), garbage):
            client = RawClient(listener.address)
            client.send(words)
            client.finish()
        hidden.append(garbage[:32])
        tampered = bytearray(record.call)
        tampered[30] ^= 1
        dialer = Dialer(credentials("tampered"))
        client = RawClient(listener.address)
        client.send(message(dialer.opening()))
        client.send(message(dialer.proof(client.receive_message())))
        client.receive_message()
        client.send(bytes(tampered))
        client.finish()
        wait_for(lambda: len(refusals(caplog)) == 4, "the refusals aren't logged")
        wait_for(lambda: "doesn't carry the peer's MAC" in caplog.text, "the tampered frame isn't logged")
    for secret in hidden:
        for form in (
            secret.hex(),
            secret.hex().upper(),
            repr(secret)[2:-1],
            repr(list(secret))[1:-1],
            base64.b64encode(secret).decode().rstrip("="),
            secret.decode("latin-1"),
            secret[:8].hex(),
            repr(secret[:8])[2:-1],
        ):
            assert form not in caplog.text


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("face", FACES)
def test_many_refusals_are_counted_instead_of_logged(
    face: str, kind: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(greeting, "MAX_LOGGED_REFUSALS", 5)
    monkeypatch.setattr(greeting, "LOG_INTERVAL_S", 3600.0)
    with listening(face, kind=kind) as listener:
        for n in range(200):
            client = RawClient(listener.address)
            client.send(message(b"junk" * (n % 3)))
            client.finish()
        assert len(refusals(caplog)) == 5
    lines = refusals(caplog)
    assert len(lines) == 6  # closing the listener tells the rest
    assert "195 more connections refused, last 127.0.0.1: opening of 4 bytes" in lines[-1]


def test_the_number_of_refusals_comes_by_itself(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(greeting, "MAX_LOGGED_REFUSALS", 0)
    monkeypatch.setattr(greeting, "LOG_INTERVAL_S", 0.05)
    with listening("asyncio") as listener:
        for _ in range(2):  # each interval starts anew
            before = len(refusals(caplog))
            client = RawClient(listener.address)
            client.send(message(b"junk"))
            client.finish()
            wait_for(lambda before=before: len(refusals(caplog)) > before, "the number wasn't told")
    assert all("1 more connections refused" in line for line in refusals(caplog))


# ------------------------------------------------------------------------------------- what they may take


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("face", FACES)
def test_refused_connections_that_stay_open_count_as_half_open(
    face: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refusal may linger until it has been read: not of more connections than may be half open."""
    monkeypatch.setattr(greeting, "MAX_HALF_OPEN", 5)
    monkeypatch.setattr(greeting, "_FLUSH_S", 3600.0)
    with listening(face, kind=kind) as listener:
        first = RawClient(listener.address)  # a worker of UCX is opened when somebody comes
        first.send(message(Dialer(credentials("x")).opening()))
        assert len(first.receive_message()) == CHALLENGE_BYTES - 2
        first.sock.close()
        before = open_descriptors()
        clients = []
        for n in range(30):
            client = RawClient(listener.address)
            opening = Dialer(credentials("x")).opening()
            client.send(message(opening if n % 2 else opening[:4] + b"\x07\x07" + opening[6:]))
            assert len(client.receive_message()) == CHALLENGE_BYTES - 2
            clients.append(client)
        for client in clients[:25]:
            assert client.receive(1) == b""  # crowded out
        assert open_descriptors() - before <= 30 + 5  # both ends are in this process
        for client in clients:
            client.sock.close()


def test_strangers_get_a_quarter_of_the_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(greeting.resource, "getrlimit", lambda what: (16, 16))
    with listening("blocking") as listener:
        clients = [RawClient(listener.address) for _ in range(12)]
        for client in clients[:8]:
            assert client.receive(1) == b""
        assert listener.half_open <= 4
        for client in clients:
            client.sock.close()
