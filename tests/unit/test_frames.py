"""Frames and their MACs: what was changed, replayed, reordered or reflected isn't read."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_hpc.control.frames import (
    BULK_BYTES,
    HEAD_BYTES,
    TAG_BYTES,
    Frame,
    Limits,
    Opener,
    Sealer,
    byte_views,
    check_body,
)
from miles_hpc.core.errors import AuthenticationError, ProtocolError

KEY = b"k" * 32
Opened = tuple[Frame, int, bytes, bytes]
frames = st.tuples(
    st.sampled_from(list(Frame)),
    st.integers(0, 2**64 - 1),
    st.binary(max_size=200),
    st.lists(st.binary(max_size=100), max_size=4),
)


def sealed(sealer: Sealer, kind: Frame, call_id: int, header: bytes, payload: list[bytes]) -> bytes:
    return b"".join(bytes(piece) for piece in sealer.seal(kind, call_id, header, payload))


def opened(opener: Opener, data: bytes) -> Opened:
    """Read one whole frame, as a transport does; raises on anything else."""
    if len(data) < HEAD_BYTES:
        raise ProtocolError("short")
    head = opener.head(data[:HEAD_BYTES])
    body = data[HEAD_BYTES:]
    if len(body) != head.body_bytes:
        raise ProtocolError("length")
    if body:
        head.mac.update(body[:-TAG_BYTES])
        check_body(head.mac, body[-TAG_BYTES:])
    return head.kind, head.call_id, body[: head.header_bytes], body[head.header_bytes : len(body) - TAG_BYTES]


@settings(deadline=None)
@given(st.lists(frames, max_size=5))
def test_round_trip(items: list[tuple[Frame, int, bytes, list[bytes]]]) -> None:
    sealer, opener = Sealer(KEY), Opener(KEY)
    for kind, call_id, header, payload in items:
        data = sealed(sealer, kind, call_id, header, payload)
        assert opened(opener, data) == (kind, call_id, header, b"".join(payload))


@pytest.mark.parametrize("n", [BULK_BYTES - 11, BULK_BYTES - 10, BULK_BYTES, 3 * BULK_BYTES])
def test_round_trip_across_the_bulk_limit(n: int) -> None:
    data = sealed(Sealer(KEY), Frame.CALL, 1, b"0123456789", [b"x" * (n // 2), b"y" * (n - n // 2)])
    assert opened(Opener(KEY), data)[3] == b"x" * (n // 2) + b"y" * (n - n // 2)
    for position in (HEAD_BYTES, HEAD_BYTES + 10, len(data) - 17, len(data) - 1):
        changed = bytearray(data)
        changed[position] ^= 1
        with pytest.raises(AuthenticationError):
            opened(Opener(KEY), bytes(changed))


@settings(max_examples=500, deadline=None)
@given(frame=frames, position=st.integers(0, 10_000), flip=st.integers(1, 255))
def test_any_flipped_byte_is_refused(frame: tuple[Frame, int, bytes, list[bytes]], position: int, flip: int) -> None:
    data = bytearray(sealed(Sealer(KEY), *frame))
    data[position % len(data)] ^= flip
    with pytest.raises(AuthenticationError):
        opened(Opener(KEY), bytes(data))


@settings(deadline=None)
@given(st.lists(frames, min_size=2, max_size=5), st.data())
def test_replayed_reordered_and_skipped_frames_are_refused(
    items: list[tuple[Frame, int, bytes, list[bytes]]], data: st.DataObject
) -> None:
    sealer = Sealer(KEY)
    stream = [sealed(sealer, *item) for item in items]
    good = data.draw(st.integers(0, len(stream) - 1))
    wrong = data.draw(st.integers(0, len(stream) - 1).filter(lambda n: n != good))
    opener = Opener(KEY)
    for n in range(good):
        opened(opener, stream[n])
    with pytest.raises(AuthenticationError):
        opened(opener, stream[wrong])


@settings(deadline=None)
@given(frames)
def test_reflected_frames_are_refused(frame: tuple[Frame, int, bytes, list[bytes]]) -> None:
    ours, theirs = b"1" * 32, b"2" * 32  # a handshake yields one key per direction
    with pytest.raises(AuthenticationError):
        opened(Opener(theirs), sealed(Sealer(ours), *frame))


def test_body_of_another_frame_is_refused() -> None:
    sealer = Sealer(KEY)
    first = sealed(sealer, Frame.CALL, 1, b"head", [b"aaaa"])
    second = sealed(sealer, Frame.CALL, 1, b"head", [b"bbbb"])
    with pytest.raises(AuthenticationError):
        opened(Opener(KEY), first[:HEAD_BYTES] + second[HEAD_BYTES:])


def test_sizes_are_checked_when_sealing_and_when_opening() -> None:
    small = Limits(header_bytes=10, payload_bytes=20)
    with pytest.raises(ProtocolError, match="header of 11 bytes, limit 10"):
        Sealer(KEY, small).seal(Frame.CALL, 1, b"x" * 11)
    with pytest.raises(ProtocolError, match="payload of 21 bytes, limit 20"):
        Sealer(KEY, small).seal(Frame.CALL, 1, b"x", [b"y" * 11, b"z" * 10])
    for header, payload in ((b"x" * 11, []), (b"x", [b"y" * 21])):
        data = sealed(Sealer(KEY), Frame.CALL, 1, header, payload)
        with pytest.raises(ProtocolError, match="limit"):
            Opener(KEY, small).head(data[:HEAD_BYTES])


def test_a_refused_frame_does_not_use_up_a_sequence_number() -> None:
    sealer = Sealer(KEY, Limits(header_bytes=10))
    with pytest.raises(ProtocolError):
        sealer.seal(Frame.CALL, 1, b"x" * 11)
    assert opened(Opener(KEY), sealed(sealer, Frame.CALL, 2, b"fine", []))[1] == 2


def test_unauthenticated_lengths_are_not_believed() -> None:
    data = struct.pack("<BxxxIQQ", Frame.CALL, 1 << 20, 1 << 31, 1) + bytes(TAG_BYTES)
    with pytest.raises(AuthenticationError):
        Opener(KEY).head(data)


def test_views_are_flat_and_not_copied() -> None:
    array = bytearray(b"abcdefgh")
    views, n = byte_views([memoryview(array).cast("i"), b"", b"xy"])
    assert n == 10
    assert [bytes(v) for v in views] == [b"abcdefgh", b"xy"]
    array[0] = ord("A")
    assert bytes(views[0]) == b"Abcdefgh"
