"""Scripted engines that hold weights, without torch: a small weight source in this process gives them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from miles_hpc.control.opening import open_transport
from miles_hpc.core.messages import WeightManifest
from miles_hpc.core.transport import Credentials, Endpoint, PeerIdentity, Transport
from miles_hpc.core.types import WeightVersion
from miles_hpc.rollout.engine import EngineSpec
from miles_hpc.rollout.scripted import Faults, Script, ScriptedEngine
from miles_hpc.weights.broadcast import WeightSource

__all__ = ["V1", "EngineWorld", "Tensor", "engine_world", "write_config"]

V1 = WeightVersion(1, 1)
SECRET = bytes(range(32))


@dataclass(frozen=True)
class Tensor:
    """What a weight source stages."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview


def write_config(folder: Path, *, vocab_size: int = 64, positions: int = 100_000, experts: int = 0) -> Path:
    """config.json of a model that nobody needs to run."""
    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
        "model_type": "qwen3_moe",
        "vocab_size": vocab_size,
        "max_position_embeddings": positions,
        "num_hidden_layers": 3,
        "num_experts": experts,
        "num_experts_per_tok": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _transport(role: str) -> Transport:
    identity = PeerIdentity(role=role, name=role, host="here", pid=1, attempt=1, term=1)
    return open_transport("loopback", Credentials(secret=SECRET, identity=identity))


class EngineWorld:
    """Makes engines of one model folder and brings them to a version."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.engines: list[ScriptedEngine] = []
        self.source = WeightSource()
        self.address = ""
        self._manifests: dict[WeightVersion, WeightManifest] = {}

    async def engine(
        self,
        name: str,
        script: Script,
        *,
        version: WeightVersion | None = V1,
        faults: Faults | None = None,
        slots: int = 64,
        **options: Any,
    ) -> ScriptedEngine:
        async def connect(address: str, deadline_s: float) -> Endpoint:
            return await _transport("engine").connect(address, deadline_s=deadline_s)

        spec = EngineSpec(name=name, model_path=self.folder, connect=connect, slots=slots, options=options)
        engine = ScriptedEngine(spec, script=script, faults=faults)
        self.engines.append(engine)
        if version is not None:
            await self.sync(engine, version)
        return engine

    async def sync(self, engine: ScriptedEngine, version: WeightVersion) -> None:
        if version not in self._manifests:
            data = memoryview(np.full(4, version.step, np.float32).tobytes())
            self._manifests[version] = self.source.stage(version, [Tensor("w", "float32", (4,), data)])
        await engine.sync(version, self.address, self._manifests[version].plan_digest, deadline_s=30)


@contextlib.asynccontextmanager
async def engine_world(folder: Path) -> AsyncIterator[EngineWorld]:
    """Engines that were made are closed at the end."""
    world = EngineWorld(folder)
    listener = await _transport("weights").listen(world.source.handle)
    world.address = listener.address
    try:
        yield world
    finally:
        for engine in world.engines:
            await engine.close()
        await listener.close()
