"""The engine as its own process: started as an agent starts it, used over tcp, ended in each of its ways."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from miles_hpc.cluster.site import data_folder
from miles_hpc.control.auth import new_secret
from miles_hpc.control.opening import open_transport
from miles_hpc.core.errors import FencedError, MilesError, RemoteError
from miles_hpc.core.load import load_site, resolved_toml
from miles_hpc.core.messages import SandboxStatus, Shutdown
from miles_hpc.core.paths import RunPaths
from miles_hpc.core.transport import Credentials, PeerIdentity, Transport
from miles_hpc.core.types import SamplingParams
from miles_hpc.rollout.engine_client import RemoteEngine
from tests.conformance.engines import Source, make_model, save_config, sync

ROOT = Path(__file__).parents[2]
SCRIPTED = "tests.conformance.scripted_engine:build"

RUN = """
name = "t"
[model]
path = "{path}"
[rollout]
engine = "{engine}"
slots_per_engine = 3
max_trajectory_tokens = 64
[groups.trainer]
nodes = 1
[groups.rollout]
nodes = 1
[groups.sandbox]
nodes = 1
"""


class Run:
    """A run directory with an engine's command line."""

    def __init__(self, folder: Path, engine: str) -> None:
        self.paths = RunPaths(folder)
        save_config("moe", self.paths.model)
        self.paths.resolved_toml.write_text(RUN.format(path=self.paths.model, engine=engine))
        self.paths.site_toml.write_text(resolved_toml(load_site("laptop", [data_folder("site_configs")])))
        self.secret = new_secret()
        self.paths.secret.touch(mode=0o600)
        self.paths.secret.write_bytes(self.secret)
        self.address_file = folder / "engine.address"

    def command(self, term: int = 1) -> list[str]:
        options = {"run-dir": self.paths.root, "attempt": 1, "term": term, "name": "engine-x", "device": "cpu"}
        line = [sys.executable, "-P", "-m", "launchers.engine", "--address-file", str(self.address_file)]
        return line + [part for key, value in options.items() for part in (f"--{key}", str(value))]

    def transport(self, role: str = "rollout", term: int = 1) -> Transport:
        identity = PeerIdentity(role=role, name=role, host="here", pid=os.getpid(), attempt=1, term=term)
        return open_transport("tcp", Credentials(secret=self.secret, identity=identity))

    def address(self, process: subprocess.Popen[bytes], seconds: float = 100) -> str:
        limit = time.monotonic() + seconds
        while not self.address_file.exists():
            assert process.poll() is None, f"the engine ended with {process.returncode}"
            assert time.monotonic() < limit, "no address"
            time.sleep(0.02)
        return self.address_file.read_text()


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}


@contextlib.contextmanager
def started(command: list[str], **more) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, cwd=ROOT, env=environment(), **more)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(30)


def is_alive(pid: int) -> bool:
    """Whether it runs; a zombie that nobody waits for doesn't."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["torch", SCRIPTED])
def test_serves_over_tcp_and_ends_on_sigterm(engine: str, tmp_path: Path) -> None:
    run = Run(tmp_path, engine)

    async def scenario(address: str) -> None:
        source = Source()
        listener = await run.transport("weights").listen(source.handle)
        source.address = listener.address
        remote = RemoteEngine(await run.transport().connect(address, deadline_s=30))
        assert remote.name == "engine-x" and remote.endpoint.peer.role == "engine"
        seen = await remote.describe()
        assert (seen.slots, seen.version, seen.shape.n_experts, seen.device) == (3, None, 8, "cpu")
        version = source.stage(1, make_model(run.paths.model, seed=1))
        await sync(remote, source, version)
        result = await remote.generate(
            "r",
            "s",
            np.array([1, 2, 3], np.int32),
            SamplingParams(max_new_tokens=7),
            routed_experts_start=1,
            deadline_s=30,
        )
        assert len(result.output_ids) == 7 and result.versions[0].version == version
        assert result.routed_experts is not None and result.routed_experts.shape == (3 + 7 - 1 - 1, 2, 2)
        assert (await remote.score(np.ones((2, 5), np.int32), deadline_s=30)).shape == (2, 4)
        await remote.end_session("s")
        with pytest.raises(RemoteError) as caught:
            await remote.endpoint.call(SandboxStatus(), deadline_s=10)
        assert caught.value.kind == "ProtocolError"
        await remote.close()
        await listener.close()

    with started(run.command()) as process:
        asyncio.run(scenario(run.address(process)))
        process.terminate()
        assert process.wait(30) == 0


def test_newer_term_takes_over_and_older_ones_are_fenced(tmp_path: Path) -> None:
    run = Run(tmp_path, SCRIPTED)

    async def scenario(address: str) -> None:
        old = RemoteEngine(await run.transport(term=1).connect(address, deadline_s=30))
        await old.describe()
        new = RemoteEngine(await run.transport(term=2).connect(address, deadline_s=30))
        with pytest.raises(RemoteError) as caught:
            await old.describe()
        assert caught.value.kind == "FencedError"
        with pytest.raises(FencedError):
            await run.transport(term=1).connect(address, deadline_s=30)
        source = Source()  # of the new term, which refuses peers of any other
        listener = await run.transport("weights", term=2).listen(source.handle)
        source.address = listener.address
        await sync(new, source, source.stage(1, make_model(run.paths.model, seed=1)))
        await new.endpoint.call(Shutdown(reason="test"), deadline_s=10)
        await new.close()
        await listener.close()

    with started(run.command()) as process:
        asyncio.run(scenario(run.address(process)))
        assert process.wait(30) == 0


def test_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    run = Run(tmp_path, SCRIPTED)
    parent = (
        "import json, subprocess, sys, time\n"
        "child = subprocess.Popen(json.loads(sys.argv[1]))\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(300)\n"
    )
    with started([sys.executable, "-c", parent, json.dumps(run.command())], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        run.address(process)
        assert is_alive(pid)
        process.kill()
        process.wait(30)
        limit = time.monotonic() + 30
        while is_alive(pid) and time.monotonic() < limit:
            time.sleep(0.05)
        alive = is_alive(pid)
        if alive:
            os.kill(pid, signal.SIGKILL)
        assert not alive


def test_wrong_secret_is_not_let_in(tmp_path: Path) -> None:
    run = Run(tmp_path, SCRIPTED)
    with started(run.command()) as process:
        address = run.address(process)
        run.secret = new_secret()
        with pytest.raises(MilesError):
            asyncio.run(run.transport().connect(address, deadline_s=5))
        assert process.poll() is None


def test_bad_run_is_one_line_and_exit_code_two(tmp_path: Path) -> None:
    run = Run(tmp_path, "no-such-engine")
    with started(run.command(), stderr=subprocess.PIPE) as process:
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert errors.decode().count("\n") == 1
    assert "no-such-engine" in errors.decode()


def test_ends_when_its_agent_is_silent_for_longer_than_the_lease(tmp_path: Path) -> None:
    """A stopped agent is alive for the kernel; its engine must give the device back all the same."""
    run = Run(tmp_path, SCRIPTED)
    text = run.paths.resolved_toml.read_text()
    run.paths.resolved_toml.write_text(text + "[control]\nheartbeat_interval_s = 0.5\nlease_s = 1.0\n")
    with started(run.command(), stderr=subprocess.PIPE) as process:

        async def agent() -> None:
            endpoint = await run.transport().connect(run.address(process), deadline_s=20)
            await RemoteEngine(endpoint, name="engine-x").describe()
            assert process.poll() is None
            await asyncio.to_thread(process.wait, 60)  # connected, but without a word

        asyncio.run(agent())
        assert process.returncode == 0
        assert process.stderr is not None and b"no word of its agent" in process.stderr.read()
