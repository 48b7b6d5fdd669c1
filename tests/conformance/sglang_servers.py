"""Real SGLang for the suites: one server for each kind of model, started when first needed and kept for the session.

MILES_HPC_SGLANG_PYTHON names the interpreter of an environment with SGLang (`make test-sglang` makes one that serves
without a GPU); without it the tests that need it are skipped. Every forward takes STEP_S longer than it would, so that
requests can be met while they are under way, and is counted (tools/sglang_cpu/plugin).
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from miles_hpc.rollout.engine import EngineSpec
from miles_hpc.rollout.session.tokenizer import shape_of
from miles_hpc.rollout.sglang.engine import SglangEngine
from miles_hpc.rollout.sglang.server import SglangServer
from miles_hpc.rollout.sglang.settings import SglangOptions

__all__ = ["STEP_S", "end_servers", "forwards", "options", "shared_engine", "start_server"]

STEP_S = 0.03
_STEPS = Path(tempfile.gettempdir()) / f"miles-hpc-test-sglang-{os.getpid()}.steps"
_servers: dict[str, SglangServer] = {}


def options(**changes: object) -> dict[str, object]:
    """Options of an engine on the SGLang that was named; skips the test without one."""
    python = os.environ.get("MILES_HPC_SGLANG_PYTHON", "")
    if not python:
        pytest.skip("no SGLang: set MILES_HPC_SGLANG_PYTHON, or use make test-sglang")
    log = Path(tempfile.gettempdir()) / f"miles-hpc-test-sglang-{os.getpid()}.log"
    return {"python": python, "log": log, "start_deadline_s": 300.0} | changes


async def start_server(spec: EngineSpec, *, step_s: float = STEP_S) -> SglangServer:
    """One of the caller's own."""
    told = {"MILES_HPC_SGLANG_STEPS": str(_STEPS), "MILES_HPC_SGLANG_STEP_S": str(step_s)}
    with mock.patch.dict(os.environ, told):
        server = SglangServer(spec, SglangOptions.of(spec.options), shape_of(spec.model_path))
    await server.start()
    return server


async def shared_engine(kind: str, spec: EngineSpec) -> SglangEngine:
    """An engine that holds nothing, on the session's server for this kind of model; not started yet."""
    spec = replace(spec, options=options() | spec.options)
    server = _servers.get(kind)
    if server is None or server.exit_code is not None:
        _servers[kind] = server = await start_server(spec)
    client = server.connect()
    try:
        await client.go_on(30.0)
        await client.abort("", 30.0)
        assert await client.flush_cache(30.0)
    finally:
        await client.close()
    return SglangEngine(spec, server)


def forwards() -> int:
    """Forwards of all servers so far."""
    return _STEPS.stat().st_size if _STEPS.exists() else 0


def end_servers() -> None:
    """At the session's end."""
    _STEPS.unlink(missing_ok=True)
    for server in _servers.values():
        server.kill()
    _servers.clear()
