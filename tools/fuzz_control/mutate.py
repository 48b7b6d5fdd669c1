"""How bytes and messages are broken: blindly, and with knowledge of their structure."""

from __future__ import annotations

import struct
from random import Random
from typing import Any

import msgspec

from miles_hpc.core.messages import (
    AbortGeneration,
    AbortGroups,
    DescribeWeights,
    EndSession,
    Generate,
    Heartbeat,
    Message,
    Shutdown,
    encode,
)
from miles_hpc.core.types import SamplingParams, WeightVersion

__all__ = ["broken_header", "changed", "odd_but_valid_header", "random_object", "valid_message"]

_INTERESTING = (0, 1, 0x7F, 0x80, 0xFF, 0xC1, 0xDF, 0xDD, 0xDB)


def changed(rng: Random, data: bytes) -> bytes:
    """`data` with something changed, never merely with something behind it: that would leave it whole."""
    while True:
        out = bytearray(data)
        for _ in range(1 if rng.random() < 0.7 else rng.randrange(2, 6)):
            _change_once(rng, out)
        if not out.startswith(data):
            return bytes(out)


def _change_once(rng: Random, out: bytearray) -> None:
    how = rng.randrange(8)
    at = rng.randrange(len(out)) if out else 0
    if how <= 2 and out:
        out[at] ^= 1 << rng.randrange(8)
    elif how == 3 and out:
        out[at] = rng.choice(_INTERESTING)
    elif how == 4 and out:
        del out[at : at + rng.randrange(1, 1 + len(out) - at)]
    elif how == 5:
        out[at:at] = rng.randbytes(rng.randrange(1, 40))
    elif how == 6 and len(out) > 4:
        size = rng.choice((2, 4, 8))
        number = rng.choice((0, 1, (1 << 8 * size) - 1, 1 << (8 * size - 1), rng.getrandbits(8 * size)))
        out[at : at + size] = number.to_bytes(size, "little")
    else:
        other = rng.randrange(len(out)) if out else 0
        out[at : at + 8] = out[other : other + 8]


def valid_message(rng: Random, *, text: str = "") -> Message:
    """One of the messages that the target knows how to answer at once."""
    choice = rng.randrange(6)
    if choice <= 1:
        return EndSession(session_id=text or rng.randbytes(rng.randrange(12)).hex())
    if choice == 2:
        return Heartbeat(children=tuple(rng.randbytes(4).hex() for _ in range(rng.randrange(5))))
    if choice == 3:
        return AbortGeneration(request_id=rng.randbytes(3).hex())
    if choice == 4:
        return AbortGroups(group_ids=tuple(rng.getrandbits(63) for _ in range(rng.randrange(20))), reason="x" * 20)
    return Shutdown(reason="r" * rng.randrange(300))


def slow_message(rng: Random) -> Message:
    """One that the asyncio target works on for a while."""
    return Generate(
        request_id=rng.randbytes(3).hex(), session_id="s", n_input=1, sampling=SamplingParams(max_new_tokens=1)
    )


def streamed_message(rng: Random) -> Message:
    """One that is answered by items."""
    return DescribeWeights(version=WeightVersion(1, rng.randrange(1 << 30)))


def random_object(rng: Random, depth: int = 0) -> Any:
    """Anything that MessagePack can hold."""
    kind = rng.randrange(11 if depth < 4 else 7)
    if kind == 0:
        return rng.choice((None, True, False))
    if kind == 1:
        return rng.getrandbits(64) - (rng.getrandbits(1) << 63) if rng.random() < 0.5 else rng.randrange(-40, 300)
    if kind == 2:
        return rng.choice((0.0, -1.5, float("inf"), float("nan"), 1e308))
    if kind <= 4:
        return rng.randbytes(rng.randrange(30)).hex()
    if kind <= 6:
        return rng.randbytes(rng.randrange(60))
    if kind <= 8:
        return [random_object(rng, depth + 1) for _ in range(rng.randrange(6))]
    return {rng.randbytes(2).hex(): random_object(rng, depth + 1) for _ in range(rng.randrange(6))}


def odd_but_valid_header(rng: Random, *, text: str = "") -> bytes:
    """A message in an unusual encoding: unknown fields, long forms, another order. A reader must take it."""
    fields = msgspec.msgpack.decode(encode(valid_message(rng, text=text)))
    extra = {f"x{rng.getrandbits(16)}": random_object(rng) for _ in range(rng.randrange(4))}
    items = [*fields.items(), *extra.items()]
    rng.shuffle(items)
    out = [b"\xdf" + struct.pack(">I", len(items)) if rng.random() < 0.5 else b"\xde" + struct.pack(">H", len(items))]
    for key, value in items:
        raw = key.encode()
        out.append(rng.choice((b"\xdb" + struct.pack(">I", len(raw)), b"\xd9" + bytes([len(raw)]))) + raw)
        out.append(msgspec.msgpack.encode(value))
    return b"".join(out)


def broken_header(rng: Random, *, text: str = "") -> bytes:
    """A header that no decoder may take: always an error, whatever the kind of frame that carries a message."""
    text = text or "forged"
    how = rng.randrange(9)
    if how == 0:
        return rng.randbytes(rng.randrange(1, 80)) + b"\xc1"  # ends in the one byte that MessagePack never uses
    if how == 1:
        return msgspec.msgpack.encode({"_": rng.choice(("", "Nothing", "x" * 3000, "ack")), "session_id": text})
    if how == 2:
        return msgspec.msgpack.encode({"_": "EndSession", "session_id": rng.choice((1, None, 1.5, [], {}, b"x"))})
    if how == 3:
        size = struct.pack(">I", rng.choice((1 << 16, 1 << 28, (1 << 31) - 1, (1 << 32) - 1)))
        start = b"\x83" + msgspec.msgpack.encode("_") + msgspec.msgpack.encode("AbortGroups")
        return start + msgspec.msgpack.encode("group_ids") + rng.choice((b"\xdd", b"\xdf", b"\xdb", b"\xc6")) + size
    if how == 4:
        start = b"\x82" + msgspec.msgpack.encode("_") + msgspec.msgpack.encode("EndSession")
        return start + msgspec.msgpack.encode("x") + rng.choice((b"\x91", b"\x81\xa1k")) * rng.choice((2000, 100_000))
    if how == 5:
        return encode(EndSession(session_id=text)) + rng.randbytes(rng.randrange(1, 20))  # trailing bytes
    if how == 6:
        whole = encode(EndSession(session_id=text))
        return whole[: rng.randrange(len(whole))]
    if how == 7:
        return b"\x82" + b"\xa1_" + b"\xaaEndSession" + b"\xaasession_id" + b"\xa4\xff\xfe\xfd\xfc"  # no UTF-8
    return msgspec.msgpack.encode(rng.choice((None, 1, "EndSession", [], {}, [{"_": "Ack"}], {"session_id": text})))
