"""The run's secret and the handshake."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_hpc.control.auth import (
    DEFAULT_WINDOW,
    MAX_HANDSHAKE_BYTES,
    SECRET_BYTES,
    Acceptor,
    Dialer,
    SessionKeys,
    StaleListener,
    load_secret,
    new_secret,
)
from miles_hpc.core.errors import AuthenticationError, FencedError, MilesError, PeerLost, UserError
from miles_hpc.core.transport import Credentials, PeerIdentity
from tests.exploring import examples

SECRET = bytes(range(32))


def credentials(name: str = "a", *, secret: bytes = SECRET, attempt: int = 1, term: int = 1) -> Credentials:
    who = PeerIdentity(role="trainer", name=name, host="host", pid=7, attempt=attempt, term=term, incarnation=2, rank=3)
    return Credentials(secret, who)


def shake(dialer: Dialer, acceptor: Acceptor) -> tuple[SessionKeys, SessionKeys]:
    challenge = acceptor.challenge(dialer.opening())
    welcome, accepted = acceptor.welcome(dialer.proof(challenge))
    keys = dialer.finish(welcome)
    assert accepted is not None
    return keys, accepted


# ------------------------------------------------------------------------------------- the secret's file


def test_secret_file_round_trip(tmp_path: Path) -> None:
    secret = new_secret()
    assert len(secret) == SECRET_BYTES
    assert secret != new_secret()
    path = tmp_path / "secret.key"
    path.write_bytes(secret)
    path.chmod(0o600)
    assert load_secret(path) == secret
    path.chmod(0o400)
    assert load_secret(path) == secret
    for text in (secret.hex(), secret.hex() + "\n"):
        path.chmod(0o600)
        path.write_text(text)
        assert load_secret(path) == secret


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o610, 0o660, 0o666, 0o644])
def test_secret_that_others_can_reach_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "secret.key"
    path.write_bytes(new_secret())
    path.chmod(mode)
    with pytest.raises(UserError, match=f"mode 0{mode:o} .*expected 0600"):
        load_secret(path)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_secret_of_somebody_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "secret.key"
    path.write_bytes(new_secret())
    path.chmod(0o600)
    os.chown(path, 12345, -1)
    with pytest.raises(UserError, match="owned by uid 12345"):
        load_secret(path)


@pytest.mark.parametrize("n", [0, 31, 33, 64, 65, 200])
def test_secret_of_another_length_is_refused(tmp_path: Path, n: int) -> None:
    path = tmp_path / "secret.key"
    path.write_bytes(b"x" * n)
    path.chmod(0o600)
    with pytest.raises(UserError, match=f"{n} bytes, expected 64 hexadecimal"):
        load_secret(path)


def test_missing_secret_and_folder_are_user_errors(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        load_secret(tmp_path / "none")
    with pytest.raises(UserError, match="not a regular file"):
        load_secret(tmp_path)
    with pytest.raises(UserError, match="not a regular file"):
        load_secret(Path("/dev/zero"))


def test_a_pipe_in_place_of_the_secret_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "secret.key", 0o600)
    with pytest.raises(UserError, match="not a regular file"):
        load_secret(tmp_path / "secret.key")


def test_a_link_is_judged_by_what_it_leads_to(tmp_path: Path) -> None:
    secret, link = new_secret(), tmp_path / "link"
    target = tmp_path / "secret.key"
    target.write_bytes(secret)
    target.chmod(0o600)
    link.symlink_to(target)
    assert load_secret(link) == secret
    target.chmod(0o644)
    with pytest.raises(UserError, match="mode 0644 lets others in"):
        load_secret(link)
    target.chmod(0o600)
    if os.getuid() == 0:  # only root can give a file away
        os.chown(target, 12345, -1)
        with pytest.raises(UserError, match="owned by uid 12345"):
            load_secret(link)
    target.unlink()
    with pytest.raises(UserError, match="No such file"):
        load_secret(link)


def test_the_error_does_not_show_a_damaged_secret(tmp_path: Path) -> None:
    secret = new_secret()
    path = tmp_path / "secret.key"
    for damaged in (secret.hex()[:-1], secret.hex() + "\n\n", secret.hex().upper(), secret.hex() + "00"):
        path.write_text(damaged)
        path.chmod(0o600)
        with pytest.raises(UserError) as seen:
            load_secret(path)
        assert secret.hex()[:16] not in str(seen.value).lower()


# ------------------------------------------------------------------------------------- the handshake


def test_both_sides_agree_on_keys_and_identities() -> None:
    dialer, acceptor = credentials("dialer"), credentials("listener")
    keys, accepted = shake(Dialer(dialer), Acceptor(acceptor))
    assert keys.peer == acceptor.identity
    assert accepted.peer == dialer.identity
    assert keys.send_key == accepted.receive_key
    assert keys.receive_key == accepted.send_key
    assert keys.send_key != keys.receive_key
    again, _ = shake(Dialer(dialer), Acceptor(acceptor))
    assert len({keys.send_key, keys.receive_key, again.send_key, again.receive_key}) == 4


def test_wrong_secret_gets_no_answer() -> None:
    dialer, acceptor = Dialer(credentials(secret=new_secret())), Acceptor(credentials())
    proof = dialer.proof(acceptor.challenge(dialer.opening()))
    with pytest.raises(AuthenticationError, match="didn't prove"):
        acceptor.welcome(proof)


def test_listener_without_the_secret_is_refused() -> None:
    dialer, impostor = Dialer(credentials()), Acceptor(credentials(secret=new_secret()))
    proof = dialer.proof(impostor.challenge(dialer.opening()))
    forged = bytes(32) + proof[32:]
    with pytest.raises(AuthenticationError, match="listener didn't prove"):
        dialer.finish(forged)


def test_a_short_secret_is_refused() -> None:
    with pytest.raises(UserError, match="5 bytes, expected 32"):
        Dialer(credentials(secret=b"short"))


def test_each_side_learns_the_receive_window_of_the_other() -> None:
    dialer = Dialer(credentials("dialer"), window=(7, 1 << 20))
    keys, accepted = shake(dialer, Acceptor(credentials("listener"), window=(9, 1 << 40)))
    assert keys.peer_window == (9, 1 << 40)
    assert accepted.peer_window == (7, 1 << 20)
    keys, accepted = shake(Dialer(credentials()), Acceptor(credentials()))
    assert keys.peer_window == accepted.peer_window == DEFAULT_WINDOW == (4096, 64 << 20)


@pytest.mark.parametrize("window", [(0, 1), (1, 0), (-1, 5), (5, -1)])
def test_a_window_of_nothing_is_refused_on_both_sides_of_the_wire(window: tuple[int, int]) -> None:
    with pytest.raises(UserError, match="at least one of each"):
        Dialer(credentials(), window=window)
    with pytest.raises(UserError, match="at least one of each"):
        Acceptor(credentials(), window=window)
    honest = Dialer(credentials())
    honest._hello = msgspec.structs.replace(honest._hello, window_messages=window[0], window_bytes=window[1])
    acceptor = Acceptor(credentials())
    with pytest.raises(AuthenticationError, match="can't be read"):
        acceptor.welcome(honest.proof(acceptor.challenge(honest.opening())))


@pytest.mark.parametrize(
    ("dialer", "listener", "any_term", "refused"),
    [
        ({}, {}, False, None),
        ({"term": 2}, {"term": 1}, True, None),
        ({"term": 1}, {"term": 2}, True, None),
        ({"term": 1}, {"term": 2}, False, FencedError),
        ({"term": 3}, {"term": 2}, False, StaleListener),
        ({"attempt": 1}, {"attempt": 2}, False, FencedError),
        ({"attempt": 1}, {"attempt": 2}, True, FencedError),
        ({"attempt": 2}, {"attempt": 1}, False, StaleListener),
        ({"attempt": 2}, {"attempt": 1}, True, StaleListener),
        # attempts come before terms: a late claim of an old attempt is no evidence against a newer one
        ({"attempt": 2, "term": 4}, {"attempt": 1, "term": 5}, False, StaleListener),
        ({"attempt": 1, "term": 5}, {"attempt": 2, "term": 4}, False, FencedError),
    ],
)
def test_the_older_side_gives_way(
    dialer: dict[str, int], listener: dict[str, int], any_term: bool, refused: type[MilesError] | None
) -> None:
    newer: list[PeerIdentity] = []
    ours = msgspec.structs.replace(credentials("l", **listener), on_newer=newer.append)
    d, a = Dialer(credentials("d", **dialer)), Acceptor(ours, any_term=any_term)
    if refused is None:
        shake(d, a)
        assert newer == []
        return
    welcome, accepted = a.welcome(d.proof(a.challenge(d.opening())))
    assert accepted is None
    assert isinstance(a.error, FencedError)
    with pytest.raises(refused) as seen:
        d.finish(welcome)
    for side in (dialer, listener):
        assert f"attempt {side.get('attempt', 1)}, term {side.get('term', 1)}" in str(seen.value)
    # a listener that was shown to be left over hears it, with who proved it; nobody else does
    assert [peer.name for peer in newer] == (["d"] if refused is StaleListener else [])
    assert isinstance(seen.value, PeerLost) == (refused is StaleListener)


def test_nobody_without_the_secret_makes_a_listener_believe_that_it_is_fenced() -> None:
    newer: list[PeerIdentity] = []
    listener = Acceptor(msgspec.structs.replace(credentials(), on_newer=newer.append))
    stranger = Dialer(credentials(secret=new_secret(), attempt=9, term=9))
    with pytest.raises(AuthenticationError):
        listener.welcome(stranger.proof(listener.challenge(stranger.opening())))
    assert newer == []


def test_no_secret_is_in_what_is_logged() -> None:
    secret = new_secret()
    keys, _ = shake(Dialer(credentials(secret=secret)), Acceptor(credentials(secret=secret)))
    text = repr(credentials(secret=secret)) + repr(keys)
    assert "trainer" in text
    for hidden in (secret, keys.send_key, keys.receive_key):
        assert repr(hidden) not in text
        assert hidden.hex() not in text


def test_other_protocol_version_is_named_on_both_sides() -> None:
    dialer, acceptor = Dialer(credentials(), version=3), Acceptor(credentials(), version=4)
    challenge = acceptor.challenge(dialer.opening())
    assert acceptor.error is not None
    assert "version 3 at the peer, 4 here" in str(acceptor.error)
    with pytest.raises(AuthenticationError, match="version 4 at the peer, 3 here"):
        dialer.proof(challenge)
    with pytest.raises(AuthenticationError, match="version 3"):
        acceptor.welcome(b"x" * 100)


def test_replayed_proof_is_refused() -> None:
    dialer, first, second = Dialer(credentials()), Acceptor(credentials()), Acceptor(credentials())
    opening = dialer.opening()
    proof = dialer.proof(first.challenge(opening))
    second.challenge(opening)
    first.welcome(proof)
    with pytest.raises(AuthenticationError):
        second.welcome(proof)


def test_reflected_messages_are_refused() -> None:
    dialer = Dialer(credentials())
    opening = dialer.opening()
    with pytest.raises(AuthenticationError, match="not a miles_hpc port"):
        dialer.proof(opening)
    acceptor = Acceptor(credentials())
    proof = dialer.proof(acceptor.challenge(opening))
    with pytest.raises(AuthenticationError):
        dialer.finish(proof)


def test_man_in_the_middle_cannot_join_two_honest_sides_with_changed_identities() -> None:
    dialer, acceptor = Dialer(credentials("d", term=1)), Acceptor(credentials("l", term=2))
    proof = dialer.proof(acceptor.challenge(dialer.opening()))
    hello = msgspec.msgpack.decode(proof[32:])
    assert hello["identity"]["term"] == 1
    hello["identity"]["term"] = 2
    raised = msgspec.msgpack.encode(hello)
    with pytest.raises(AuthenticationError):
        acceptor.welcome(proof[:32] + raised)


@given(step=st.integers(0, 3), position=st.integers(0, 10_000), flip=st.integers(1, 255))
def test_any_flipped_byte_of_the_handshake_is_refused(step: int, position: int, flip: int) -> None:
    def change(number: int, message: bytes) -> bytes:
        if number != step:
            return message
        changed = bytearray(message)
        changed[position % len(changed)] ^= flip
        return bytes(changed)

    dialer, acceptor = Dialer(credentials()), Acceptor(credentials())
    with pytest.raises(AuthenticationError):
        challenge = acceptor.challenge(change(0, dialer.opening()))
        proof = dialer.proof(change(1, challenge))
        if acceptor.error is not None:
            raise acceptor.error
        welcome, _ = acceptor.welcome(change(2, proof))
        dialer.finish(change(3, welcome))


@settings(max_examples=examples(300))
@given(st.binary(max_size=MAX_HANDSHAKE_BYTES), st.binary(max_size=MAX_HANDSHAKE_BYTES))
def test_garbage_is_refused_and_nothing_else_happens(first: bytes, second: bytes) -> None:
    acceptor = Acceptor(credentials())
    with pytest.raises(AuthenticationError):
        acceptor.challenge(first)
    acceptor.challenge(Dialer(credentials()).opening())
    with pytest.raises(MilesError):
        acceptor.welcome(second)
    dialer = Dialer(credentials())
    dialer.opening()
    with pytest.raises(AuthenticationError):
        dialer.proof(first)
    with pytest.raises(AuthenticationError):
        dialer.finish(second)
