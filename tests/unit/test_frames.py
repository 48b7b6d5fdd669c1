"""Frames and their MACs: what was changed, replayed, reordered or reflected isn't read."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from miles_hpc.control.frames import (
    HEAD_BYTES,
    INLINE_BYTES,
    MAX_KIND,
    TAG_BYTES,
    Frame,
    Limits,
    Opener,
    Sealer,
    aligned_buffer,
    byte_views,
    read_head,
)
from miles_hpc.core.errors import AuthenticationError, ProtocolError
from tests.exploring import examples

KEY = b"k" * 32
KINDS = [kind for kind in Frame if kind <= MAX_KIND]
LIMITS = Limits()
#: Header and payload of the largest small frame.
ROOM = INLINE_BYTES - HEAD_BYTES - TAG_BYTES

#: Those of conversations.
KINDS = [kind for kind in Frame if kind <= MAX_KIND]
Item = tuple[Frame, int, bytes, bytes]
frames = st.tuples(
    st.sampled_from(KINDS),
    st.integers(0, 2**64 - 1),
    st.binary(max_size=200),
    st.one_of(st.binary(max_size=300), st.integers(ROOM - 210, ROOM + 10).map(lambda n: b"p" * n)),
)


def sealer(key: bytes = KEY, limits: Limits = LIMITS) -> Sealer:
    return Sealer(key, limits)


def opener(key: bytes = KEY, limits: Limits = LIMITS) -> Opener:
    return Opener(key, limits)


def sealed(by: Sealer, kind: Frame, call_id: int, header: bytes, payload: bytes) -> bytes:
    """A whole frame, in the layout that its size asks for."""
    if len(header) + len(payload) <= ROOM:
        return by.small(kind, call_id, header, payload)
    prefix, mac = by.large(kind, call_id, header, len(payload))
    mac.update(header)
    mac.update(payload)
    return prefix + header + payload + mac.tag()


def opened(by: Opener, data: bytes) -> Item:
    """Read one whole frame as a wire does; raises on anything else."""
    if len(data) < HEAD_BYTES + TAG_BYTES:
        raise ProtocolError("short")
    kind, n_header, n_payload, call_id = head = read_head(data)
    total = HEAD_BYTES + n_header + n_payload + TAG_BYTES
    if total <= INLINE_BYTES:
        if len(data) != total:
            raise ProtocolError("length")
        by.small(data)
        body = data[HEAD_BYTES:-TAG_BYTES]
    else:
        begin = HEAD_BYTES + TAG_BYTES
        mac = by.large(head, data[:HEAD_BYTES], data[HEAD_BYTES:begin])
        body = data[begin:-TAG_BYTES]
        if len(body) != n_header + n_payload:
            raise ProtocolError("length")
        mac.update(body[: len(body) // 3])
        mac.update(body[len(body) // 3 :])
        mac.check(data[-TAG_BYTES:])
    return Frame(kind), call_id, body[:n_header], body[n_header:]


@given(st.lists(frames, max_size=5))
def test_round_trip(items: list[Item]) -> None:
    ours, theirs = sealer(), opener()
    for item in items:
        assert opened(theirs, sealed(ours, *item)) == item


@pytest.mark.parametrize("n", [0, 1, ROOM - 11, ROOM - 10, ROOM - 9, ROOM, 3 * INLINE_BYTES])
def test_both_layouts_around_the_limit(n: int) -> None:
    item = (Frame.CALL, 7, b"0123456789", b"x" * n)
    data = sealed(sealer(), *item)
    small = n <= ROOM - 10
    assert len(data) == HEAD_BYTES + 10 + n + TAG_BYTES * (1 if small else 2)
    assert (len(data) <= INLINE_BYTES) == small
    assert opened(opener(), data) == item
    for position in range(0, len(data), max(1, len(data) // 97)):
        changed = bytearray(data)
        changed[position] ^= 1
        with pytest.raises((AuthenticationError, ProtocolError)):
            opened(opener(), bytes(changed))


@settings(max_examples=examples(500))
@given(frame=frames, position=st.integers(0, 20_000), flip=st.integers(1, 255))
def test_any_flipped_byte_is_refused(frame: Item, position: int, flip: int) -> None:
    data = bytearray(sealed(sealer(), *frame))
    data[position % len(data)] ^= flip
    with pytest.raises((AuthenticationError, ProtocolError)):
        opened(opener(), bytes(data))


@given(frame=frames, cut=st.integers(1, 100), data=st.data())
def test_shortened_and_prolonged_frames_are_refused(frame: Item, cut: int, data: st.DataObject) -> None:
    whole = sealed(sealer(), *frame)
    for wrong in (whole[: -min(cut, len(whole))], whole + data.draw(st.binary(min_size=1, max_size=50))):
        with pytest.raises((AuthenticationError, ProtocolError)):
            opened(opener(), wrong)


@given(st.lists(frames, min_size=2, max_size=5), st.data())
def test_replayed_reordered_and_skipped_frames_are_refused(items: list[Item], data: st.DataObject) -> None:
    ours = sealer()
    stream = [sealed(ours, *item) for item in items]
    good = data.draw(st.integers(0, len(stream) - 1))
    wrong = data.draw(st.integers(0, len(stream) - 1).filter(lambda n: n != good))
    theirs = opener()
    for n in range(good):
        opened(theirs, stream[n])
    with pytest.raises(AuthenticationError):
        opened(theirs, stream[wrong])


@given(frames)
def test_reflected_frames_are_refused(frame: Item) -> None:
    ours, theirs = b"1" * 32, b"2" * 32  # a handshake yields one key per direction
    with pytest.raises(AuthenticationError):
        opened(opener(theirs), sealed(sealer(ours), *frame))


@pytest.mark.parametrize("n", [4, 2 * INLINE_BYTES])
def test_body_of_another_frame_is_refused(n: int) -> None:
    ours = sealer()
    first = sealed(ours, Frame.CALL, 1, b"head", b"a" * n)
    second = sealed(ours, Frame.CALL, 1, b"head", b"b" * n)
    cut = HEAD_BYTES + TAG_BYTES if n > INLINE_BYTES else HEAD_BYTES
    with pytest.raises(AuthenticationError):
        opened(opener(), first[:cut] + second[cut:])


def test_a_mac_of_one_use_is_none_of_another() -> None:
    """The tag of a large frame's head doesn't make a small frame of the same bytes, nor the other way round."""
    head = struct.pack("<BxxxIQQ", Frame.CALL, 0, 0, 1)
    prefix, _ = sealer().large(Frame.CALL, 1, b"", 0)
    assert prefix[:HEAD_BYTES] == head
    with pytest.raises(AuthenticationError):
        opener().small(prefix)
    small = sealer().small(Frame.CALL, 1, b"", b"")
    with pytest.raises(AuthenticationError):
        opener().large(read_head(small), small[:HEAD_BYTES], small[HEAD_BYTES:])


def test_a_second_channel_has_a_key_and_a_sequence_of_its_own() -> None:
    main, beside = sealer(), sealer().beside()
    theirs = opener()
    theirs_beside = theirs.beside()
    for n in range(3):
        theirs.small(main.small(Frame.CALL, n, b"frames", b""))
        theirs_beside.small(beside.small(Frame.NOTIFY, 0, b"beside", b""))
    with pytest.raises(AuthenticationError):
        theirs.small(beside.small(Frame.NOTIFY, 0, b"beside", b""))
    with pytest.raises(AuthenticationError):
        theirs_beside.small(main.small(Frame.CALL, 3, b"frames", b""))


def test_sizes_are_checked_when_sealing_and_when_opening() -> None:
    narrow = Limits(header_bytes=10, payload_bytes=20)
    with pytest.raises(ProtocolError, match="header of 11 bytes, limit 10"):
        sealer(limits=narrow).large(Frame.CALL, 1, b"x" * 11, 0)
    with pytest.raises(ProtocolError, match="payload of 21 bytes, limit 20"):
        sealer(limits=narrow).large(Frame.CALL, 1, b"x", 21)
    for header, n_payload in ((b"x" * 11, 0), (b"x", 21)):
        prefix, _ = sealer().large(Frame.CALL, 1, header, n_payload)
        with pytest.raises(ProtocolError, match="limit"):
            opener(limits=narrow).large(read_head(prefix), prefix[:HEAD_BYTES], prefix[HEAD_BYTES:])


def test_a_refused_frame_does_not_use_up_a_sequence_number() -> None:
    ours = sealer(limits=Limits(header_bytes=10))
    with pytest.raises(ProtocolError):
        ours.large(Frame.CALL, 1, b"x" * 11, 0)
    assert opened(opener(), sealed(ours, Frame.CALL, 2, b"fine", b""))[1] == 2


def test_unauthenticated_lengths_are_not_believed() -> None:
    data = struct.pack("<BxxxIQQ", Frame.CALL, 1 << 20, 1 << 31, 1)
    with pytest.raises(AuthenticationError):
        opener().large(read_head(data), data, bytes(TAG_BYTES))


@pytest.mark.parametrize("kind", [0, 12, 255])
def test_unknown_kinds_are_refused(kind: int) -> None:
    with pytest.raises(ProtocolError, match=f"unknown kind {kind}"):
        read_head(struct.pack("<BxxxIQQ", kind, 0, 0, 1))


def test_pieces_beside_a_frame_have_its_number() -> None:
    """Reserved numbers are used later but sent before what was sealed meanwhile; a piece's MAC is of its own one."""
    sealing, opening = sealer(), opener()
    pieces = [b"first" * 1000, b"second" * 1000]
    number = sealing.reserve(2)
    following = sealing.small(Frame.CALL, 1, b"following", b"")
    sent = [
        sealing.reserved(number + n, Frame.PIECE, b"where", sealing.piece_tag(number + n, piece))
        for n, piece in enumerate(pieces)
    ]
    for frame, piece in zip(sent, pieces, strict=True):
        opening.small(frame)
        tag = frame[-2 * TAG_BYTES : -TAG_BYTES]
        opening.check_piece(memoryview(piece), tag)
        for wrong in (piece + b"x", piece[:-1], pieces[0] + pieces[1]):
            with pytest.raises(AuthenticationError):
                opening.check_piece(wrong, tag)
    opening.small(following)
    with pytest.raises(AuthenticationError):
        opening.check_piece(pieces[1], tag)


def test_all_kinds_of_conversations_are_known() -> None:
    assert KINDS[-1] == Frame.CREDIT
    for kind in KINDS:
        assert read_head(b"??" + struct.pack("<BxxxIQQ", kind, 3, 4, 5), 2) == (kind, 3, 4, 5)
    for unknown in (0, MAX_KIND + 1, 255):
        with pytest.raises(ProtocolError):
            read_head(struct.pack("<BxxxIQQ", unknown, 3, 4, 5))


def test_views_are_flat_and_not_copied() -> None:
    array = bytearray(b"abcdefgh")
    views, n = byte_views([memoryview(array).cast("i"), b"", b"xy"])
    assert n == 10
    assert [bytes(v) for v in views] == [b"abcdefgh", b"xy"]
    array[0] = ord("A")
    assert bytes(views[0]) == b"Abcdefgh"


def test_views_of_any_shape_that_is_contiguous() -> None:
    array = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    views, n = byte_views([array.data, array[1].data, array[:, :, :0].data])
    assert n == 96 + 48
    assert b"".join(views) == array.tobytes() + array[1].tobytes()
    for wrong in (array[:, 1].data, array.transpose().data, memoryview(b"abcdef")[::2]):
        with pytest.raises(TypeError, match="isn't contiguous"):
            byte_views([b"first", wrong])


@given(st.integers(0, 500), st.integers(0, 500))
def test_payloads_are_aligned(header_bytes: int, rest_bytes: int) -> None:
    assume(rest_bytes)
    view = aligned_buffer(header_bytes, rest_bytes)
    assert len(view) == header_bytes + rest_bytes
    assert np.frombuffer(view[header_bytes:], np.uint8).ctypes.data % 64 == 0
