"""Who may join: the run's secret, a mutual handshake, and one key per direction afterwards.

    dialer                                                     listener
    opening    version, nonce D                        ──────▶
                                                       ◀──────  version, nonce L                          challenge
    proof      identity D, window, MAC("dialer", all)  ──────▶  refuses in silence when the MAC is wrong
                                                       ◀──────  verdict, identity L, window, MAC("listener", all)

Each MAC covers every byte sent so far, so both nonces and both identities (with attempt and term) are part of the
transcript, and a message can't be replayed into another connection or reflected to its sender. The session keys come
from the secret and the whole transcript, one per direction. All of this is a pure state machine: bytes in, bytes out.

After the proofs the older side gives way, by (attempt, term):

| the dialer is | at the dialer | at the listener |
|---|---|---|
| of the listener's attempt and term | keys | keys |
| older | FencedError: it must end itself | goes on, `error` is set |
| newer | StaleListener, a PeerLost: it looks on for its own listener | fenced: `Credentials.on_newer` is called |

MAC and key derivation: keyed BLAKE2b (RFC 7693); `person` separates the uses. Nothing is encrypted.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
import struct
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

import msgspec

from miles_hpc.core.errors import AuthenticationError, FencedError, PeerLost, UserError
from miles_hpc.core.transport import Credentials, PeerIdentity
from miles_hpc.core.version import PROTOCOL_VERSION

if TYPE_CHECKING:
    from pathlib import Path

__all__ = [
    "DEFAULT_WINDOW",
    "MAX_HANDSHAKE_BYTES",
    "SECRET_BYTES",
    "Acceptor",
    "Dialer",
    "SessionKeys",
    "StaleListener",
    "load_secret",
    "new_secret",
]

#: Length of the run's secret.
SECRET_BYTES = 32
#: No handshake message is longer; a peer that hasn't authenticated can't make us allocate more.
MAX_HANDSHAKE_BYTES = 4096
#: What a side lets the other send before it has answered: messages, bytes.
DEFAULT_WINDOW = (4096, 64 << 20)

_NONCE_BYTES = 32
_MAC_BYTES = 32
_OPENING = struct.Struct(f"<4sH{_NONCE_BYTES}s")
_OPENING_MAGIC = b"MHo1"
_CHALLENGE_MAGIC = b"MHc1"


#: At least one message and one byte: a window of nothing would block the peer for ever.
_Size: TypeAlias = Annotated[int, msgspec.Meta(ge=1)]


class _Hello(msgspec.Struct, frozen=True, kw_only=True):
    """Who a side is, and how much it takes from the other before it has answered."""

    identity: PeerIdentity
    window_messages: _Size
    window_bytes: _Size


class _Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What the listener answers to a valid proof. `refusal` is empty when the dialer is welcome."""

    hello: _Hello
    refusal: str = ""
    refusal_kind: Literal["", "fenced", "stale"] = ""  # which side is the older one: dialer, listener


_encoder = msgspec.msgpack.Encoder()
_hello_decoder = msgspec.msgpack.Decoder(_Hello)
_verdict_decoder = msgspec.msgpack.Decoder(_Verdict)


class StaleListener(PeerLost):
    """The listener belongs to an older attempt or term than the dialer, and has been told so."""


class SessionKeys(msgspec.Struct, frozen=True):
    """What a finished handshake yields: the proven peer, one MAC key per direction, the peer's receive window."""

    peer: PeerIdentity
    send_key: bytes
    receive_key: bytes
    peer_window: tuple[int, int] = DEFAULT_WINDOW  # messages, bytes

    def __repr__(self) -> str:
        return f"SessionKeys(peer={self.peer!r})"  # never the keys


def new_secret() -> bytes:
    """A fresh run secret. Its file has mode 0600 and holds it as 64 hexadecimal digits and a newline, or raw."""
    return os.urandom(SECRET_BYTES)


def load_secret(path: Path) -> bytes:
    """Read the run's secret. Raises UserError unless the file is ours alone and has the right length."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe of that name must not hang us
    except OSError as error:
        raise UserError(f"secret {path}: {error.strerror}; submit the run again or name its folder") from error
    try:
        status = os.fstat(fd)  # of what was opened, so that the file can't be exchanged between check and read
        mode = stat.S_IMODE(status.st_mode)
        if not stat.S_ISREG(status.st_mode):
            raise UserError(f"secret {path}: not a regular file; expected {SECRET_BYTES} bytes with mode 0600")
        if status.st_uid != os.getuid():
            raise UserError(f"secret {path}: owned by uid {status.st_uid}, expected {os.getuid()}; make your own run")
        if mode & 0o077:
            raise UserError(f"secret {path}: mode {mode:04o} lets others in, expected 0600; run: chmod 600 {path}")
        data = os.read(fd, 2 * SECRET_BYTES + 2)
    finally:
        os.close(fd)
    if len(data) == SECRET_BYTES:
        return data
    digits = data.removesuffix(b"\n")
    if len(digits) == 2 * SECRET_BYTES and not digits.strip(b"0123456789abcdef"):
        return bytes.fromhex(digits.decode())
    raise UserError(
        f"secret {path}: {status.st_size} bytes, expected {2 * SECRET_BYTES} hexadecimal digits or "
        f"{SECRET_BYTES} raw bytes; the file is damaged, make a new run"
    )


def _mac(secret: bytes, person: bytes, *parts: bytes) -> bytes:
    state = hashlib.blake2b(key=secret, person=person, digest_size=_MAC_BYTES)
    for part in parts:
        state.update(struct.pack("<I", len(part)))
        state.update(part)
    return state.digest()


def _check_secret(credentials: Credentials) -> bytes:
    if len(credentials.secret) < SECRET_BYTES:
        raise UserError(f"run secret: {len(credentials.secret)} bytes, expected {SECRET_BYTES}; use load_secret")
    return hashlib.blake2b(credentials.secret, person=b"mhpc run", digest_size=32).digest()


def _version_error(ours: int, theirs: int) -> AuthenticationError:
    return AuthenticationError(
        f"protocol version {theirs} at the peer, {ours} here; all processes of a run must use the same miles_hpc"
    )


class Dialer:
    """The connecting side. Call `opening`, then `proof`, then `finish`, each once."""

    def __init__(
        self,
        credentials: Credentials,
        *,
        version: int = PROTOCOL_VERSION,
        window: tuple[int, int] = DEFAULT_WINDOW,
    ) -> None:
        """`window` is what the other side may send us before we have answered: messages, bytes."""
        self._secret = _check_secret(credentials)
        self._hello = _hello(credentials.identity, window)
        self._version = version
        self._transcript: list[bytes] = []

    def opening(self) -> bytes:
        """The first message, to the listener."""
        message = _OPENING.pack(_OPENING_MAGIC, self._version, os.urandom(_NONCE_BYTES))
        self._transcript = [message]
        return message

    def proof(self, challenge: bytes) -> bytes:
        """Answer the challenge. Raises AuthenticationError for another version or for something else's port."""
        if len(challenge) != _OPENING.size:
            raise AuthenticationError(
                f"challenge of {len(challenge)} bytes, expected {_OPENING.size}: not a miles_hpc port"
            )
        magic, version, _ = _OPENING.unpack(challenge)
        if magic != _CHALLENGE_MAGIC:
            raise AuthenticationError(f"challenge starts with {magic!r}: not a miles_hpc port")
        if version != self._version:
            raise _version_error(self._version, version)
        hello = _encoder.encode(self._hello)
        self._transcript += [challenge, hello]
        message = _mac(self._secret, b"mhpc dialer", *self._transcript) + hello
        if len(message) > MAX_HANDSHAKE_BYTES:
            raise UserError(f"identity of {len(hello)} bytes is too long for a handshake; shorten name or host")
        return message

    def finish(self, welcome: bytes) -> SessionKeys:
        """Check the listener's proof and verdict. Raises AuthenticationError, FencedError, StaleListener."""
        mac, body = welcome[:_MAC_BYTES], welcome[_MAC_BYTES:]
        expected = _mac(self._secret, b"mhpc listener", *self._transcript, body)
        if not hmac.compare_digest(mac, expected):
            raise AuthenticationError("the listener didn't prove that it knows this run's secret")
        try:
            verdict = _verdict_decoder.decode(body)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise AuthenticationError(f"the listener's identity can't be read: {error}") from error
        if verdict.refusal_kind == "stale":
            raise StaleListener(verdict.refusal)
        if verdict.refusal_kind == "fenced":
            raise FencedError(verdict.refusal)
        to_listener, to_dialer = _session_keys(self._secret, self._transcript, body)
        hello = verdict.hello
        window = (hello.window_messages, hello.window_bytes)
        return SessionKeys(hello.identity, send_key=to_listener, receive_key=to_dialer, peer_window=window)


class Acceptor:
    """The listening side. Call `challenge`, then `welcome`; after each, send what it returned, then check `error`.

    `error` is set when the connection must be closed after that message. Until the dialer has proven itself the only
    thing that leaves is the challenge.
    """

    def __init__(
        self,
        credentials: Credentials,
        *,
        any_term: bool = False,
        version: int = PROTOCOL_VERSION,
        window: tuple[int, int] = DEFAULT_WINDOW,
    ) -> None:
        """`window` as for the dialer. With `any_term` only the attempts are compared."""
        self._secret = _check_secret(credentials)
        self._hello = _hello(credentials.identity, window)
        self._on_newer = credentials.on_newer
        self._any_term = any_term
        self._version = version
        self._transcript: list[bytes] = []
        self.error: AuthenticationError | FencedError | None = None

    def challenge(self, opening: bytes) -> bytes:
        """Answer an opening. Raises AuthenticationError (answer nothing) for anything that isn't one."""
        if len(opening) != _OPENING.size:
            raise AuthenticationError(f"opening of {len(opening)} bytes, expected {_OPENING.size}")
        magic, version, _ = _OPENING.unpack(opening)
        if magic != _OPENING_MAGIC:
            raise AuthenticationError("not an opening of this protocol")
        if version != self._version:
            self.error = _version_error(self._version, version)
        challenge = _OPENING.pack(_CHALLENGE_MAGIC, self._version, os.urandom(_NONCE_BYTES))
        self._transcript = [opening, challenge]
        return challenge

    def welcome(self, proof: bytes) -> tuple[bytes, SessionKeys | None]:
        """Check the proof; returns the last message and the keys, or None for the keys when `error` is set.

        Raises AuthenticationError (answer nothing) when the proof is wrong. A dialer that is newer than this listener
        is told so, and `Credentials.on_newer` hears who it is: it has proven that the listener is fenced.
        """
        if self.error is not None:
            raise self.error
        mac, raw_hello = proof[:_MAC_BYTES], proof[_MAC_BYTES:]
        self._transcript.append(raw_hello)
        if not hmac.compare_digest(mac, _mac(self._secret, b"mhpc dialer", *self._transcript)):
            raise AuthenticationError("the dialer didn't prove that it knows this run's secret")
        try:
            hello = _hello_decoder.decode(raw_hello)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise AuthenticationError(f"the dialer's identity can't be read: {error}") from error
        verdict = self._verdict(hello.identity)
        body = _encoder.encode(verdict)
        message = _mac(self._secret, b"mhpc listener", *self._transcript, body) + body
        if verdict.refusal:
            self.error = FencedError(verdict.refusal)
            if verdict.refusal_kind == "stale" and self._on_newer is not None:
                self._on_newer(hello.identity)
            return message, None
        to_listener, to_dialer = _session_keys(self._secret, self._transcript, body)
        window = (hello.window_messages, hello.window_bytes)
        return message, SessionKeys(hello.identity, send_key=to_dialer, receive_key=to_listener, peer_window=window)

    def _verdict(self, peer: PeerIdentity) -> _Verdict:
        ours = self._hello.identity
        theirs_age, our_age = _age(peer), _age(ours)
        if self._any_term:
            theirs_age, our_age = theirs_age[:1], our_age[:1]
        if theirs_age == our_age:
            return _Verdict(hello=self._hello)
        refusal = (
            f"{peer.name} (attempt {peer.attempt}, term {peer.term}) refused by {ours.name}, "
            f"which belongs to attempt {ours.attempt}, term {ours.term}"
        )
        return _Verdict(hello=self._hello, refusal=refusal, refusal_kind="fenced" if theirs_age < our_age else "stale")


def _hello(identity: PeerIdentity, window: tuple[int, int]) -> _Hello:
    messages, n_bytes = window
    if messages < 1 or n_bytes < 1:
        raise UserError(f"receive window of {messages} messages, {n_bytes} bytes: expected at least one of each")
    return _Hello(identity=identity, window_messages=messages, window_bytes=n_bytes)


def _age(identity: PeerIdentity) -> tuple[int, ...]:
    """Newer is greater. Attempts come first: a term that an old attempt still claimed fences nobody of a newer one."""
    return identity.attempt, identity.term


def _session_keys(secret: bytes, transcript: list[bytes], verdict: bytes) -> tuple[bytes, bytes]:
    """Keys for dialer-to-listener and listener-to-dialer."""
    to_listener = _mac(secret, b"mhpc d to l", *transcript, verdict)
    to_dialer = _mac(secret, b"mhpc l to d", *transcript, verdict)
    return to_listener, to_dialer
