"""What is sent, in which order and in which buckets: pure functions of the pieces, so every side plans alike."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from miles_hpc.core.types import WeightPiece, WeightVersion

__all__ = ["DEFAULT_BUCKET_BYTES", "plan_buckets", "plan_digest"]

#: Large enough that a bucket's round trip doesn't count, small enough to hold two of them beside a model.
DEFAULT_BUCKET_BYTES = 64 * 1024 * 1024


def plan_buckets(pieces: Sequence[WeightPiece], bucket_bytes: int) -> tuple[tuple[int, int], ...]:
    """Cut `pieces` into consecutive runs [first, last) of at most `bucket_bytes` each.

    Order is kept and every piece is in exactly one run; a piece that is larger than a bucket gets a run of its own.
    Raises ValueError when `bucket_bytes` isn't positive.
    """
    if bucket_bytes <= 0:
        raise ValueError(f"bucket_bytes={bucket_bytes}: expected a positive number")
    buckets: list[tuple[int, int]] = []
    first, filled = 0, 0
    for i, piece in enumerate(pieces):
        if i > first and filled + piece.n_bytes > bucket_bytes:
            buckets.append((first, i))
            first, filled = i, 0
        filled += piece.n_bytes
    if first < len(pieces):
        buckets.append((first, len(pieces)))
    return tuple(buckets)


def plan_digest(version: WeightVersion, pieces: Sequence[WeightPiece]) -> bytes:
    """BLAKE2b-128 over the version and the name, dtype, shape and digest of every piece, in order.

    Each field goes in with its length before it, so that no two different lists give the same bytes.
    """
    digest = hashlib.blake2b(digest_size=16)

    def field(data: bytes) -> None:
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)

    field(str(version).encode())
    for piece in pieces:
        field(piece.name.encode())
        field(piece.dtype.encode())
        field(",".join(map(str, piece.shape)).encode())
        field(piece.digest)
    return digest.digest()
