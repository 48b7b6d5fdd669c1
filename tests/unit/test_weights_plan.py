"""Bucket plans and digests: every piece exactly once, in order; any change shows in the digest."""

from __future__ import annotations

import hashlib

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_hpc.core.errors import IntegrityError
from miles_hpc.core.types import WeightPiece, WeightVersion
from miles_hpc.weights.bucket import ITEM_BYTES, digest_bytes, expected_bytes, pack, tensor_bytes, unpack, verify
from miles_hpc.weights.plan import plan_buckets, plan_digest

V1 = WeightVersion(1, 1)


def piece(name: str, data: bytes) -> WeightPiece:
    return WeightPiece(name=name, dtype="uint8", shape=(len(data),), n_bytes=len(data), digest=digest_bytes(data))


blobs = st.lists(st.binary(max_size=40), max_size=12)


@given(blobs, st.integers(1, 100))
def test_buckets_cover_every_piece_once_in_order_and_hold_what_fits(data: list[bytes], size: int) -> None:
    pieces = [piece(f"p{i}", d) for i, d in enumerate(data)]
    buckets = plan_buckets(pieces, size)
    assert [i for first, last in buckets for i in range(first, last)] == list(range(len(pieces)))
    for first, last in buckets:
        filled = sum(p.n_bytes for p in pieces[first:last])
        assert filled <= size or last == first + 1
    for first, last in buckets[:-1]:
        assert sum(p.n_bytes for p in pieces[first : last + 1]) > size, "the next piece would have fitted"


def test_a_bucket_size_that_is_not_positive_is_refused() -> None:
    with pytest.raises(ValueError, match="bucket_bytes=0"):
        plan_buckets([], 0)


@pytest.mark.parametrize(
    "change",
    [
        {"name": "other"},
        {"dtype": "int8"},
        {"shape": (3, 1)},
        {"digest": b"\0" * 16},
    ],
)
def test_plan_digest_changes_with_every_field(change: dict) -> None:
    pieces = [piece("a", b"xyz"), piece("b", b"uv")]
    digest = plan_digest(V1, pieces)
    assert len(digest) == 16
    assert plan_digest(V1, list(pieces)) == digest
    assert plan_digest(V1, [msgspec.structs.replace(pieces[0], **change), pieces[1]]) != digest
    assert plan_digest(V1, pieces[::-1]) != digest
    assert plan_digest(V1, pieces[:1]) != digest
    assert plan_digest(WeightVersion(1, 2), pieces) != digest
    assert plan_digest(WeightVersion(2, 1), pieces) != digest


def test_plan_digest_knows_where_a_field_ends() -> None:
    one = [piece("ab", b""), piece("c", b"")]
    other = [piece("a", b""), piece("bc", b"")]
    assert plan_digest(V1, one) != plan_digest(V1, other)


@given(blobs)
def test_unpack_undoes_pack(data: list[bytes]) -> None:
    pieces = [piece(f"p{i}", d) for i, d in enumerate(data)]
    buffer = bytearray(sum(map(len, data)) + 5)
    packed = pack([memoryview(d) for d in data], buffer)
    assert [bytes(view) for _, view in unpack(pieces, packed)] == data
    verify(pieces, packed)


@given(blobs.filter(lambda d: sum(map(len, d)) > 0), st.data())
def test_verify_names_the_piece_with_the_wrong_byte(data: list[bytes], draw: st.DataObject) -> None:
    pieces = [piece(f"p{i}", d) for i, d in enumerate(data)]
    damaged = bytearray(b"".join(data))
    at = draw.draw(st.integers(0, len(damaged) - 1))
    damaged[at] ^= draw.draw(st.integers(1, 255))
    ends = np.cumsum([len(d) for d in data])
    with pytest.raises(IntegrityError, match=f"'p{int(np.searchsorted(ends, at, side='right'))}'"):
        verify(pieces, memoryview(damaged))


def test_sizes_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(IntegrityError, match="expected 3"):
        list(unpack([piece("a", b"xyz")], memoryview(b"xy")))
    with pytest.raises(ValueError, match="don't fit"):
        pack([memoryview(b"xyz")], bytearray(2))


def test_digest_is_blake2b_of_128_bits() -> None:
    assert digest_bytes(b"abc") == hashlib.blake2b(b"abc", digest_size=16).digest()
    assert digest_bytes(memoryview(bytearray(b"abc"))) == digest_bytes(b"abc")


def test_item_sizes_and_bytes_are_those_of_torch() -> None:
    torch = pytest.importorskip("torch")
    for name, n_bytes in ITEM_BYTES.items():
        tensor = torch.zeros(2, 3, dtype=getattr(torch, name))
        assert tensor.element_size() == n_bytes
        assert tensor_bytes(tensor).nbytes == expected_bytes(name, (2, 3)) == 6 * n_bytes
    with pytest.raises(IntegrityError, match="float4"):
        expected_bytes("float4", (1,))
    values = torch.arange(6, dtype=torch.float32).view(2, 3)
    assert bytes(tensor_bytes(values.t())) == values.t().contiguous().numpy().tobytes()
    assert bytes(tensor_bytes(torch.tensor(1.5))) == np.float32(1.5).tobytes()
    shared = tensor_bytes(values)
    values[0, 0] = 7.0
    assert np.frombuffer(shared, np.float32)[0] == 7.0, "a view of host memory, not a copy"
