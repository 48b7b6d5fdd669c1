"""A rollout node as its agent runs it: engine and session server are processes of their own, this one is the agent."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from miles_hpc.cluster.site import data_folder
from miles_hpc.control.auth import new_secret
from miles_hpc.control.opening import open_transport
from miles_hpc.core.load import load_site, resolved_toml
from miles_hpc.core.messages import SessionEngine, SessionEngines, SessionServerStatus
from miles_hpc.core.paths import RunPaths
from miles_hpc.core.transport import Credentials, Endpoint, Listener, PeerIdentity, Transport
from miles_hpc.core.types import WeightVersion
from miles_hpc.rollout.engine_client import RemoteEngine
from miles_hpc.rollout.session.listening import ServerAddress, read_address, read_token
from miles_hpc.weights.broadcast import WeightSource
from tests.fakes.scripted_engines import V1, Tensor, write_config
from tools.fuzz_session.templates import style_template

__all__ = ["SessionNode", "node"]

ROOT = Path(__file__).parents[2]

RUN = """
name = "t"
[model]
path = "{model}"
[rollout]
engine = "tests.conformance.drift_engine:build"
slots_per_engine = 64
max_trajectory_tokens = 4096
[groups.trainer]
nodes = 1
[groups.rollout]
nodes = 1
[groups.sandbox]
nodes = 1
"""


class SessionNode:
    """`close` ends what was started, by its process."""

    def __init__(self, folder: Path, more: str = "") -> None:
        self.paths = RunPaths(folder)
        self.tokenizer, _ = style_template("chatml", self.paths.model)
        write_config(self.paths.model, vocab_size=self.tokenizer.vocab_size, experts=8)
        self.paths.resolved_toml.write_text(RUN.format(model=self.paths.model) + more)
        self.paths.site_toml.write_text(resolved_toml(load_site("laptop", [data_folder("site_configs")])))
        self.secret = new_secret()
        self.paths.secret.touch(mode=0o600)
        self.paths.secret.write_bytes(self.secret)
        self.address_file = folder / "sessions.address"
        self.engines: dict[str, tuple[subprocess.Popen[bytes], str]] = {}
        self.server: subprocess.Popen[bytes] | None = None
        self.source = WeightSource()
        self._listener: Listener | None = None
        self._started: list[subprocess.Popen[bytes]] = []

    # ------------------------------------------------------------------------------------------- processes

    def start(self, module: str, *options: str, term: int = 1) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", "-m", f"launchers.{module}", "--run-dir", str(self.paths.root)]
        command += ["--attempt", "1", "--term", str(term), *options]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE)
        self._started.append(process)
        return process

    async def start_engine(self, name: str) -> str:
        """An engine that holds V1; its address."""
        file = self.paths.root / f"{name}.{len(self._started)}.address"
        process = self.start("engine", "--name", name, "--address-file", str(file))
        address = await self._appears(file, process)
        remote = RemoteEngine(await self.transport().connect(address, deadline_s=30))
        if self._listener is None:
            self._listener = await self.transport("weights").listen(self.source.handle)
            data = memoryview(np.ones(4, np.float32).tobytes())
            self._manifest = self.source.stage(V1, [Tensor("w", "float32", (4,), data)])
        await remote.sync(V1, self._listener.address, self._manifest.plan_digest, deadline_s=30)
        await remote.close()
        self.engines[name] = (process, address)
        return address

    async def start_server(self, *options: str, term: int = 1) -> ServerAddress:
        self.address_file.unlink(missing_ok=True)
        self.server = self.start(
            "session_server", "--name", "node-s", "--address-file", str(self.address_file), *options, term=term
        )
        await self._appears(self.address_file, self.server)
        return read_address(self.address_file)

    async def kill_server(self) -> None:
        assert self.server is not None
        self.server.kill()
        await asyncio.to_thread(self.server.wait, 30)

    async def close(self) -> None:
        if self._listener is not None:
            await self._listener.close()
        for process in self._started:
            if process.poll() is None:
                process.kill()
            process.wait(30)
            if process.stderr is not None:
                process.stderr.close()

    @staticmethod
    async def _appears(file: Path, process: subprocess.Popen[bytes], seconds: float = 100) -> str:
        limit = time.monotonic() + seconds
        while not file.exists():
            assert process.poll() is None, process.stderr.read().decode() if process.stderr else process.returncode
            assert time.monotonic() < limit, f"no {file}"
            await asyncio.sleep(0.02)
        return file.read_text()

    # ------------------------------------------------------------------------------------------- the agent's part

    def transport(self, role: str = "rollout", *, term: int = 1) -> Transport:
        identity = PeerIdentity(role=role, name=role, host="here", pid=os.getpid(), attempt=1, term=term)
        return open_transport("tcp", Credentials(secret=self.secret, identity=identity))

    async def connect(self, *, term: int = 1) -> Endpoint:
        """The agent's connection to the server."""
        return await self.transport(term=term).connect(read_address(self.address_file).control, deadline_s=30)

    def listed(self, version: WeightVersion | None = V1) -> SessionEngines:
        return SessionEngines(
            engines=tuple(
                SessionEngine(name=name, address=address, version=version)
                for name, (_, address) in self.engines.items()
            )
        )

    async def tell(self, endpoint: Endpoint, message: SessionEngines | None = None) -> SessionServerStatus:
        reply = await endpoint.call(message or self.listed(), deadline_s=30)
        assert isinstance(reply.message, SessionServerStatus)
        return reply.message

    async def ready(self, endpoint: Endpoint, *names: str) -> SessionServerStatus:
        """Tell the engines, as an agent does again and again, until the server uses exactly these."""
        async with asyncio.timeout(60):
            while True:
                status = await self.tell(endpoint)
                if status.engines == names:
                    return status
                await asyncio.sleep(0.05)

    # ------------------------------------------------------------------------------------------- a client's part

    async def open(self, http: aiohttp.ClientSession, **settings: Any) -> tuple[str, dict[str, str]]:
        """A new session's path and its headers."""
        headers = {"Authorization": f"Bearer {read_token(self.address_file)}"}
        async with http.post(f"{self.url}/sessions", headers=headers, json=settings) as response:
            body = await response.json()
            assert response.status == 200, body
        return f"/sessions/{body['session_id']}", {"Authorization": f"Bearer {body['token']}"}

    @property
    def url(self) -> str:
        """Of the server that runs now."""
        http = read_address(self.address_file).http
        return "http://localhost" if http.startswith("unix:") else http


@contextlib.asynccontextmanager
async def node(folder: Path, more: str = "") -> AsyncIterator[SessionNode]:
    made = SessionNode(folder, more)
    try:
        yield made
    finally:
        await made.close()
