"""What a node tells, and how it gets through srun in one piece. Pure.

srun passes output on in messages of at most 1,024 bytes, whole lines only where they are shorter: longer lines of
several tasks come out mixed (seen on Slurm 22.05 with two tasks). So the JSON travels in short lines:

    miles-hpc-doctor <node> <number>/<of> <base64>
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator
from typing import Any

import msgspec

from miles_hpc.cluster.preflight.contract import Status

__all__ = ["NodeLine", "NodeResult", "Reassembly", "framed"]

_PIECE_BYTES = 600  # 800 characters of base64
_FRAME = re.compile(r"miles-hpc-doctor (\S+) (\d+)/(\d+) ([A-Za-z0-9+/=]+)\s*\Z")


class NodeResult(msgspec.Struct, frozen=True, kw_only=True):
    """One finding as it travels."""

    check: str
    status: Status
    saw: str
    do: str = ""


class NodeLine(msgspec.Struct, frozen=True, kw_only=True):
    """What a node tells. `now` is its wall clock just before it is told, epoch seconds."""

    node: str
    job: str = ""
    now: float = 0.0
    results: tuple[NodeResult, ...] = ()
    facts: dict[str, Any] = msgspec.field(default_factory=dict)
    error: str = ""  # the checks couldn't begin: why


def framed(line: NodeLine) -> Iterator[str]:
    """`line` as lines that srun keeps whole."""
    data = msgspec.json.encode(line)
    pieces = [data[at : at + _PIECE_BYTES] for at in range(0, len(data), _PIECE_BYTES)]
    for number, piece in enumerate(pieces, 1):
        yield f"miles-hpc-doctor {line.node} {number}/{len(pieces)} {base64.b64encode(piece).decode()}"


class Reassembly:
    """Puts the lines of all nodes together again; what profiles and prologs print among them is passed over."""

    def __init__(self) -> None:
        self._pieces: dict[str, dict[int, bytes]] = {}

    def add(self, text: str) -> NodeLine | None:
        """One line of output; returns what a node tells when this was its last missing piece."""
        found = _FRAME.search(text)
        if found is None:
            return None
        node, number, of = found[1], int(found[2]), int(found[3])
        try:
            self._pieces.setdefault(node, {})[number] = base64.b64decode(found[4], validate=True)
            if set(self._pieces[node]) < set(range(1, of + 1)):
                return None
            data = b"".join(piece for _, piece in sorted(self._pieces.pop(node).items()))
            return msgspec.json.decode(data, type=NodeLine)
        except (binascii.Error, msgspec.MsgspecError):
            return None
