"""Bytes of tensors: their digest, and pieces laid one after the other in a bucket.

A bucket is nothing but the concatenation of its pieces' bytes; where each begins follows from the sizes in the
manifest, so a bucket carries no header of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from miles_hpc.core.errors import IntegrityError
from miles_hpc.core.types import WeightPiece

if TYPE_CHECKING:
    import torch

__all__ = ["ITEM_BYTES", "byte_view", "digest_bytes", "expected_bytes", "pack", "tensor_bytes", "unpack", "verify"]

#: Bytes per element of what engines hold, by torch's name without the prefix.
ITEM_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "float32": 4,
    "int64": 8,
    "float64": 8,
}


def byte_view(data: memoryview | bytes | bytearray) -> memoryview:
    """`data` as a flat view of bytes, not copied. Raises TypeError unless it is C-contiguous."""
    view = memoryview(data)
    return view.cast("B") if view.nbytes else memoryview(b"")  # cast refuses a zero in the shape


def digest_bytes(data: memoryview | bytes | bytearray) -> bytes:
    """BLAKE2b-128 (RFC 7693) of the bytes; releases the interpreter lock while it runs."""
    return hashlib.blake2b(data, digest_size=16).digest()


def expected_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Size of a tensor. Raises IntegrityError for a dtype that isn't in ITEM_BYTES."""
    if dtype not in ITEM_BYTES:
        raise IntegrityError(f"dtype '{dtype}' can't be transferred: expected one of {', '.join(ITEM_BYTES)}")
    n = ITEM_BYTES[dtype]
    for extent in shape:
        n *= extent
    return n


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor, C order, as a flat view of type B; a copy only where it is not contiguous host memory."""
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return byte_view(memoryview(flat.view(torch.uint8).numpy()))


def pack(views: Sequence[memoryview], buffer: bytearray | memoryview) -> memoryview:
    """Copy `views` one after the other into `buffer` and return the filled part; ValueError if it is too small."""
    target = memoryview(buffer)
    total = sum(view.nbytes for view in views)
    if total > target.nbytes:
        raise ValueError(f"{total} bytes don't fit into a bucket of {target.nbytes}")
    at = 0
    for view in views:
        target[at : at + view.nbytes] = byte_view(view)
        at += view.nbytes
    return target[:total]


def unpack(pieces: Sequence[WeightPiece], data: memoryview) -> Iterator[tuple[WeightPiece, memoryview]]:
    """Each piece with its bytes, as views into `data`. Raises IntegrityError when sizes don't add up."""
    total = sum(piece.n_bytes for piece in pieces)
    if total != data.nbytes:
        raise IntegrityError(f"bucket of {len(pieces)} pieces has {data.nbytes} bytes: expected {total}")
    flat = byte_view(data)
    at = 0
    for piece in pieces:
        yield piece, flat[at : at + piece.n_bytes]
        at += piece.n_bytes


def verify(pieces: Sequence[WeightPiece], data: memoryview) -> None:
    """Compare every piece's bytes with its digest. Raises IntegrityError naming the first that differs."""
    for piece, view in unpack(pieces, data):
        seen = digest_bytes(view)
        if seen != piece.digest:
            raise IntegrityError(
                f"weight piece '{piece.name}': digest {seen.hex()} of {piece.n_bytes} bytes, "
                f"expected {piece.digest.hex()} as its manifest says"
            )
