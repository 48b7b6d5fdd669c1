"""Ray: synchronous actor calls, batches of asynchronous ones, numpy arrays as argument and result.

What Ray is given: numpy arrays, which its workers map from shared memory without a copy; an object store of 1 GiB; no
dashboard, no log forwarding, no usage report. Its token authentication is on, as ours is. Where a cell says apart, all
threads of caller and actor are pinned; its servers never are, and they stay up while other arms are measured.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.bench_control.arm import DEADLINE_S, Arm
from tools.bench_control.plan import Cell
from tools.bench_control.raw import pattern


class RayArm(Arm):
    """Actors are kept from stage to stage: more are added when a stage needs more."""

    def __init__(self, folder: Path, cores: list[int]) -> None:
        import numpy
        import ray

        super().__init__(folder, cores)
        self._ray: Any = ray
        self._array = numpy.frombuffer
        self._byte = numpy.uint8
        self._temporary = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # its unix sockets need a short path
        start = time.perf_counter()
        ray.init(
            address="local",
            num_cpus=len(cores),
            object_store_memory=1 << 30,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            configure_logging=False,
            _temp_dir=str(self._temporary),
        )
        self._init_s = time.perf_counter() - start
        self._actors: list[Any] = []
        self._actors_s: dict[str, str] = {}

    def start(self, n_peers: int) -> None:
        have = len(self._actors)
        if n_peers > have:
            start = time.perf_counter()
            actor = self._ray.remote(num_cpus=0)(_Peer)
            more = [actor.remote() for _ in range(n_peers - have)]
            self._ray.get([one.ping.remote() for one in more], timeout=DEADLINE_S * 2)
            self._actors_s[f"start of actors {have + 1} to {n_peers}"] = f"{time.perf_counter() - start:.2f} s"
            self._actors += more
        self.peer_pids = self._ray.get([one.pid.remote() for one in self._actors[:n_peers]], timeout=DEADLINE_S)

    def operation(self, cell: Cell) -> Callable[[], object]:
        get = self._ray.get
        data = self._array(pattern(cell.argument_bytes), dtype=self._byte)
        begin: Callable[[Any], Any]
        if cell.argument_bytes:
            begin = lambda actor: actor.take.remote(data)  # noqa: E731
        elif cell.result_bytes:
            begin = lambda actor: actor.give.remote(cell.result_bytes)  # noqa: E731
        else:
            begin = lambda actor: actor.ping.remote()  # noqa: E731
        if cell.calls == 1:
            actor = self._actors[0]
            return lambda: get(begin(actor), timeout=DEADLINE_S)
        actors = self._actors[: cell.peers] * cell.window
        return lambda: get([begin(actor) for actor in actors], timeout=DEADLINE_S)

    def echo(self, peer: int, data: bytes) -> bytes:
        sent = self._array(data, dtype=self._byte)
        return bytes(self._ray.get(self._actors[peer].echo.remote(sent), timeout=DEADLINE_S))

    def fetch(self, peer: int, n_bytes: int) -> bytes:
        return bytes(self._ray.get(self._actors[peer].give.remote(n_bytes), timeout=DEADLINE_S))

    def stop(self) -> None:
        pass

    def describe(self) -> dict[str, str]:
        chosen = {"ray": importlib.metadata.version("ray"), "ray.init": f"{self._init_s:.2f} s"}
        return chosen | self._actors_s

    def close(self) -> None:
        self._ray.shutdown()
        shutil.rmtree(self._temporary, ignore_errors=True)


class _Peer:
    """The actor."""

    def __init__(self) -> None:
        self._patterns: dict[int, Any] = {}

    def ping(self) -> None:
        return None

    def take(self, data: Any) -> None:
        return None

    def give(self, n_bytes: int) -> Any:
        import numpy

        if n_bytes not in self._patterns:
            self._patterns[n_bytes] = numpy.frombuffer(pattern(n_bytes), dtype=numpy.uint8)
        return self._patterns[n_bytes]

    def echo(self, data: Any) -> Any:
        return data

    def pid(self) -> int:
        return os.getpid()
