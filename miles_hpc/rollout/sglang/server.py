"""SGLang's process: started in its own environment, with keys that are drawn for each start."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
import tempfile
from pathlib import Path

from miles_hpc.control.children import ChildProcess
from miles_hpc.core.deadline import Deadline
from miles_hpc.core.errors import DeadlineExpired, PeerLost, UserError
from miles_hpc.core.types import ModelShape
from miles_hpc.rollout.engine import EngineSpec
from miles_hpc.rollout.sglang.checkpoint import architecture_override
from miles_hpc.rollout.sglang.client import EngineRefused, SglangClient
from miles_hpc.rollout.sglang.settings import SglangOptions, server_arguments, server_environment

__all__ = ["SglangServer"]

_POLL_S = 0.25
_HEALTH_S = 20.0
_END_GRACE_S = 10.0
_WORDS = 600  # of the log's end, in an error


class SglangServer:
    """One server, loopback only. `start` it; it can't outlive this process."""

    def __init__(self, spec: EngineSpec, options: SglangOptions, shape: ModelShape) -> None:
        """Raises UserError for options that can't be (see settings)."""
        self.name = spec.name
        self._options = options
        self._port = _free_port()
        # Hexadecimal: SGLang makes arguments of them, and one that began with a dash would be taken for a flag.
        self._keys = {"api-key": secrets.token_hex(32), "admin-api-key": secrets.token_hex(32)}
        self._command = [options.python, "-m", "sglang.launch_server"]
        model = architecture_override(json.loads((spec.model_path / "config.json").read_text()))
        self._command += server_arguments(spec, options, shape, port=self._port, model=model)
        self._environment = server_environment(spec, options, os.environ)
        self._child: ChildProcess | None = None

    async def start(self) -> None:
        """Returns when it computes. Raises UserError when it ends instead, DeadlineExpired."""
        options = self._options
        deadline = Deadline(options.start_deadline_s, f"engine {self.name}: waiting for SGLang to serve")
        if options.log is not None:  # SGLang writes its arguments there, keys among them
            os.close(os.open(options.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
            options.log.chmod(0o600)
        client = self.connect()
        try:
            with tempfile.TemporaryDirectory(prefix="miles-hpc-keys-") as folder:  # 0700
                keys = Path(folder) / "keys.yaml"
                keys.write_text(json.dumps(self._keys))
                command = [*self._command, "--config", str(keys)]
                self._child = ChildProcess(f"{self.name}-sglang", command, log=options.log, env=self._environment)
                await self._until_healthy(client, deadline)
        finally:
            await client.close()

    async def _until_healthy(self, client: SglangClient, deadline: Deadline) -> None:
        while True:
            await asyncio.sleep(_POLL_S)
            if self.exit_code is not None:
                raise UserError(
                    f"engine {self.name}: SGLang ended with {self.exit_code} before it served; "
                    f"see {self._options.log or 'its output'}: {self.last_words()}"
                )
            deadline.check()
            try:
                if await client.healthy(min(_HEALTH_S, deadline.remaining_s)):
                    return
            except (PeerLost, DeadlineExpired, EngineRefused):
                continue

    def connect(self) -> SglangClient:
        """A client with both keys. Within an event loop."""
        return SglangClient(
            self._port, name=self.name, data_key=self._keys["api-key"], admin_key=self._keys["admin-api-key"]
        )

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return None if self._child is None else self._child.exit_code

    def last_words(self) -> str:
        """The end of its log."""
        return "" if self._child is None else self._child.log_tail().strip()[-_WORDS:]

    def kill(self) -> None:
        """End it and its ranks at once."""
        if self._child is not None:
            self._child.kill()

    async def end(self) -> None:
        """End it and its ranks. Idempotent."""
        if self._child is not None and self._child.exit_code is None:
            await self._child.end(_END_GRACE_S)


def _free_port() -> int:
    """A port that is free now. Should somebody take it first, SGLang ends, and is started again with another."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port
