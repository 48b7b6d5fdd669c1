"""The bytes of one array in the Zarr v3 format, written and read directly.

The format is the Zarr core specification 3.0 with the codecs `sharding_indexed` (1.0), `bytes`, `zstd` and `crc32c`
(zarr-specs.readthedocs.io); any Zarr v3 reader opens the result. Going there directly instead of through zarr-python's
arrays costs a tenth of the CPU time per group (README.md has the numbers) and starts no event-loop thread, which
wouldn't survive a fork.

    Zarr shard  = Zarr chunk* | index | crc32c of the index
    Zarr chunk  = zstd frame | crc32c of it                  full rows; the last one is padded with zeros
    index       = (offset u64, nbytes u64) per chunk, little-endian; 2**64-1 twice for an absent chunk
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import numpy.typing as npt
from google_crc32c import value as crc32c
from numcodecs.zstd import compress, decompress

from miles_hpc.core.errors import IntegrityError
from miles_hpc.routing.layout import ArrayLayout

__all__ = ["decode_chunk", "decode_index", "encode_metadata", "encode_shard", "index_bytes", "parse_metadata"]

ZSTD_LEVEL = 1
_CRC_BYTES = 4
_ABSENT = (1 << 64) - 1


def _codecs(dtype: str) -> list[dict[str, Any]]:
    plain: dict[str, Any] = {"name": "bytes"}
    if np.dtype(dtype).itemsize > 1:
        plain["configuration"] = {"endian": "little"}
    zstd = {"name": "zstd", "configuration": {"level": ZSTD_LEVEL, "checksum": False}}
    return [plain, zstd, {"name": "crc32c"}]


def _metadata(layout: ArrayLayout) -> dict[str, Any]:
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [layout.rows, *layout.row_shape],
        "data_type": layout.dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [layout.shard_rows, *layout.row_shape]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "fill_value": 0,
        "codecs": [
            {
                "name": "sharding_indexed",
                "configuration": {
                    "chunk_shape": [layout.chunk_rows, *layout.row_shape],
                    "codecs": _codecs(layout.dtype),
                    "index_codecs": [
                        {"name": "bytes", "configuration": {"endian": "little"}},
                        {"name": "crc32c"},
                    ],
                    "index_location": "end",
                },
            }
        ],
        "dimension_names": ["row", "moe_layer", "slot"],
    }


def encode_metadata(layout: ArrayLayout, attributes: dict[str, Any]) -> bytes:
    """zarr.json of an array with this layout."""
    return json.dumps(_metadata(layout) | {"attributes": attributes}, separators=(",", ":")).encode()


def parse_metadata(data: bytes) -> tuple[ArrayLayout, dict[str, Any]]:
    """Inverse of `encode_metadata`. Raises IntegrityError for anything that this module wouldn't have written."""
    try:
        seen = json.loads(data)
        attributes = seen.pop("attributes", {})
        rows, layers, top_k = seen["shape"]
        shard_rows = seen["chunk_grid"]["configuration"]["chunk_shape"][0]
        chunk_rows = seen["codecs"][0]["configuration"]["chunk_shape"][0]
        layout = ArrayLayout(rows, layers, top_k, seen["data_type"], chunk_rows, shard_rows // chunk_rows)
        if seen != _metadata(layout):
            raise ValueError("another layout or codec")
    except (ValueError, KeyError, IndexError, TypeError, ZeroDivisionError) as error:
        raise IntegrityError(f"zarr.json is not of a routed-experts array: {error!r}") from error
    return layout, attributes


def _little(dtype: str) -> np.dtype[Any]:
    return np.dtype(dtype).newbyteorder("<")


def _with_crc(data: bytes) -> bytes:
    checksum: int = crc32c(data)
    return data + checksum.to_bytes(_CRC_BYTES, "little")


def _without_crc(data: bytes | memoryview, what: str) -> bytes:
    body = bytes(data[:-_CRC_BYTES])
    expected = int.from_bytes(data[-_CRC_BYTES:], "little")
    if len(data) <= _CRC_BYTES or crc32c(body) != expected:
        raise IntegrityError(f"{what}: CRC-32C doesn't match; its {len(data)} bytes are damaged")
    return body


def encode_shard(layout: ArrayLayout, rows: npt.NDArray[np.unsignedinteger]) -> bytes:
    """One Zarr shard: `rows` [at most shard_rows, layers, top_k] of type layout.dtype."""
    parts: list[bytes] = []
    index = np.full((layout.shard_chunks, 2), _ABSENT, dtype="<u8")
    offset = 0
    for number, first in enumerate(range(0, len(rows), layout.chunk_rows)):
        chunk = np.ascontiguousarray(rows[first : first + layout.chunk_rows], dtype=_little(layout.dtype))
        if len(chunk) < layout.chunk_rows:
            padded = np.zeros((layout.chunk_rows, *layout.row_shape), dtype=chunk.dtype)
            padded[: len(chunk)] = chunk
            chunk = padded
        part = _with_crc(compress(chunk, ZSTD_LEVEL, False))
        index[number] = (offset, len(part))
        parts.append(part)
        offset += len(part)
    parts.append(_with_crc(index.tobytes()))
    return b"".join(parts)


def index_bytes(layout: ArrayLayout) -> int:
    """Size of the index at the end of a Zarr shard, with its CRC."""
    return layout.shard_chunks * 16 + _CRC_BYTES


def decode_index(layout: ArrayLayout, data: bytes, what: str) -> npt.NDArray[np.uint64]:
    """The index [shard_chunks, 2] of a Zarr shard. Raises IntegrityError."""
    if len(data) != index_bytes(layout):
        raise IntegrityError(f"{what}: the index has {len(data)} bytes, expected {index_bytes(layout)}")
    return np.frombuffer(_without_crc(data, what), dtype="<u8").reshape(layout.shard_chunks, 2)


def decode_chunk(layout: ArrayLayout, data: bytes, what: str) -> npt.NDArray[np.unsignedinteger]:
    """Rows [chunk_rows, layers, top_k] of one Zarr chunk, read-only. Raises IntegrityError."""
    body = _without_crc(data, what)
    try:
        plain = decompress(body)
        return np.frombuffer(plain, dtype=_little(layout.dtype)).reshape(layout.chunk_rows, *layout.row_shape)
    except (RuntimeError, ValueError) as error:
        raise IntegrityError(f"{what}: good CRC-32C, yet not a Zarr chunk of this array: {error}") from error
