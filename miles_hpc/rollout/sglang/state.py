"""What the parts of one SGLang engine share: its server, the weights it holds, whether requests may start."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from miles_hpc.core.errors import PeerLost, ProtocolError
from miles_hpc.core.types import ModelShape, WeightVersion
from miles_hpc.rollout.engine import EngineSpec
from miles_hpc.rollout.sglang.capabilities import Capabilities
from miles_hpc.rollout.sglang.client import SglangClient
from miles_hpc.rollout.sglang.server import SglangServer
from miles_hpc.rollout.sglang.settings import SglangOptions

__all__ = ["CONTROL_S", "EngineState"]

#: One control call that moves no weights.
CONTROL_S = 60.0

_MOST_SESSIONS = 100_000


@dataclass(eq=False)
class EngineState:
    """Belongs to one event loop. `connected` is called once, when the server serves."""

    spec: EngineSpec
    options: SglangOptions
    shape: ModelShape
    server: SglangServer
    version: WeightVersion | None = None  # what all ranks were found to hold
    lost: str = ""  # why the server is gone
    heard: float = 0.0  # monotonic; when it last showed that it lives
    # Cleared while an update has the server to itself, or memory is given back.
    may_start: asyncio.Event = field(default_factory=asyncio.Event)
    released: set[str] = field(default_factory=set)  # device memory that was given back, by tag
    awaits_weights: bool = False  # their memory was given back, and no sync has filled it since
    born: dict[str, WeightVersion] = field(default_factory=dict)  # session -> version of its first request

    def __post_init__(self) -> None:
        self.may_start.set()
        self.max_length = min(
            self.spec.max_length or self.shape.max_position_embeddings, self.shape.max_position_embeddings
        )
        self.client: SglangClient
        self.can: Capabilities

    @property
    def name(self) -> str:
        return self.spec.name

    def connected(self, client: SglangClient, can: Capabilities) -> None:
        """From now on the server can be asked."""
        self.client, self.can = client, can

    def check_alive(self) -> None:
        """Raises PeerLost when the server has ended or was given up."""
        if self.lost or self.server.exit_code is not None:
            raise PeerLost(f"engine {self.name}: {self.lost or 'SGLang ended'}")

    def check_serving(self) -> WeightVersion:
        """The version that it serves. Raises PeerLost, and ProtocolError while it holds none."""
        self.check_alive()
        if self.version is None:
            raise ProtocolError(f"engine {self.name} holds no verified weights: sync it first")
        return self.version

    def open_again(self) -> None:
        """Requests may start, unless memory that they need is given back or undefined."""
        if not self.released and not self.awaits_weights:
            self.may_start.set()

    def end_server(self, why: str) -> None:
        """It holds nothing that anybody knows: end it."""
        self.version = None
        self.lost = why
        self.released, self.awaits_weights = set(), False  # who waits shall hear of it
        self.may_start.set()
        self.server.kill()

    def namespace(self, session_id: str, version: WeightVersion) -> str:
        """Of the version that a session began with. It keeps its prefix over updates; a session that begins later must
        not find what older weights left there, which for a prompt that all share would be for ever."""
        if session_id not in self.born and len(self.born) >= _MOST_SESSIONS:
            del self.born[next(iter(self.born))]  # the oldest computes its prefix anew
        return str(self.born.setdefault(session_id, version))
