"""The trainer role as it runs in a job: launchers.trainer under mpiexec, with this test as its controller."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from checkpoints.publish import publish_bytes
from miles_hpc.control.auth import load_secret, new_secret
from miles_hpc.control.membership import ServiceAddress, publish_service
from miles_hpc.control.multihomed import connect_any, split_addresses
from miles_hpc.control.opening import open_transport
from miles_hpc.control.terms import claim_term
from miles_hpc.core import exits, toml
from miles_hpc.core.config import ControlConfig, GroupConfig, GroupsConfig, RunConfig, SiteConfig
from miles_hpc.core.deadline import Deadline
from miles_hpc.core.errors import PeerLost, RemoteError
from miles_hpc.core.messages import (
    Ack,
    CheckpointWritten,
    LoadState,
    Message,
    SaveCheckpoint,
    ScoreTokens,
    Shutdown,
    StageWeights,
)
from miles_hpc.core.paths import RunPaths
from miles_hpc.core.telemetry import read_events
from miles_hpc.core.transport import Credentials, Endpoint, Listener, PeerIdentity
from miles_hpc.core.types import MicrobatchPlan, PackedItem, WeightVersion
from miles_hpc.routing.store import write_group
from miles_hpc.weights.broadcast import fetch
from tests.conformance.training_task import LAYERS, fake_routing, make_items, pack, run_config, train_step

MPIEXEC = Path(sys.executable).with_name("mpiexec")
ROOT = Path(__file__).parents[2]
ATTEMPT = 1

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.slow,
    pytest.mark.skipif(not MPIEXEC.exists(), reason=f"{MPIEXEC} is missing: pip install mpi4py mpich"),
]
pytest.importorskip("torch")
pytest.importorskip("transformers")


def make_run_dir(root: Path, **changes: Any) -> RunConfig:
    one = GroupConfig(nodes=1)
    run = msgspec.structs.replace(
        run_config(),
        groups=GroupsConfig(trainer=GroupConfig(nodes=1, ranks_per_node=2), rollout=one, sandbox=one),
        control=ControlConfig(lease_s=3.0, heartbeat_interval_s=0.2, start_deadline_s=120.0),
    )
    run = msgspec.structs.replace(run, **changes)
    paths = RunPaths(root)
    paths.resolved_toml.write_text(toml.dumps(run))
    paths.site_toml.write_text(toml.dumps(SiteConfig(name="test", scheduler="none")))
    paths.attempt(ATTEMPT).mkdir(parents=True)
    publish_bytes(paths.secret, new_secret(), mode=0o600)
    return run


def make_batch(root: Path) -> tuple[list[PackedItem], list[list[MicrobatchPlan]]]:
    """Payloads and routed experts on disk, and a plan for two ranks with one and two microbatches."""
    items = make_items(root)
    placed: list[PackedItem] = []
    for group_id in sorted({i.group_id for i in items}):
        group = [i for i in items if i.group_id == group_id]
        refs = write_group(
            root,
            [fake_routing(i.routed_experts) for i in group if i.routed_experts is not None],
            group_id=group_id,
            attempt=0,
            term=1,
            version=WeightVersion(1, 0),
            durable=False,
        )
        placed += [msgspec.structs.replace(i, routed_experts=r) for i, r in zip(group, refs, strict=True)]
    return placed, [[pack(placed[:5])], [pack(placed[5:8]), pack(placed[8:])]]


class Controller:
    """One term: listens, and keeps what the trainer sends."""

    def __init__(self, paths: RunPaths) -> None:
        self.paths = paths
        self.term = claim_term(paths, ATTEMPT)
        self.secret = load_secret(paths.secret)
        self.trainer: Endpoint
        self.joined = asyncio.Event()
        self.written: asyncio.Queue[CheckpointWritten] = asyncio.Queue()
        self.listener: Listener

    def credentials(self, role: str) -> Credentials:
        identity = PeerIdentity(role=role, name=role, host="test", pid=os.getpid(), attempt=ATTEMPT, term=self.term)
        return Credentials(self.secret, identity)

    async def open(self) -> Controller:
        self.listener = await open_transport("tcp", self.credentials("controller")).listen(
            self._handle, on_connect=self._join
        )
        publish_service(
            self.paths,
            ServiceAddress(name="controller", addresses=(self.listener.address,), attempt=ATTEMPT, term=self.term),
        )
        return self

    async def _join(self, endpoint: Endpoint) -> None:
        self.trainer = endpoint
        self.joined.set()

    async def _handle(self, endpoint: Endpoint, message: Message, payload: memoryview) -> Message:
        assert isinstance(message, CheckpointWritten)
        self.written.put_nowait(message)
        return Ack()

    async def ask(self, message: Message, payload: bytes = b"") -> tuple[Any, bytes]:
        reply = await self.trainer.call(message, payload=[payload] if payload else (), deadline_s=60.0)
        return reply.message, bytes(reply.payload)

    async def refused(self, message: Message, payload: bytes = b"") -> str:
        with pytest.raises(RemoteError) as caught:
            await self.ask(message, payload)
        assert caught.value.kind == "ProtocolError"
        return caught.value.text


@asynccontextmanager
async def world(root: Path) -> AsyncIterator[tuple[subprocess.Popen[str], Controller]]:
    """Two ranks and their first controller; whatever is left at the end is killed."""
    controller = await Controller(RunPaths(root)).open()
    process = start(root)
    try:
        await asyncio.wait_for(controller.joined.wait(), 120)
        yield process, controller
    finally:
        await controller.listener.close()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def start(root: Path) -> subprocess.Popen[str]:
    command = [str(MPIEXEC), "-n", "2", sys.executable, "-P", "-m", "launchers.trainer", "--run-dir", str(root)]
    return subprocess.Popen(
        [*command, "--attempt", str(ATTEMPT), "--incarnation", "0", "--host", "here"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=(root / "out.log").open("w"),
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


async def ended(process: subprocess.Popen[str], timeout_s: float = 60.0) -> int:
    return await asyncio.wait_for(asyncio.to_thread(process.wait), timeout_s)


def run_async(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 170))  # type: ignore[arg-type]


async def pull(controller: Controller, staged: Any) -> dict[str, bytes]:
    """Fetch a staged version as an engine does."""
    got: dict[str, bytes] = {}

    def take(pieces: Any, data: memoryview) -> None:
        offset = 0
        for piece in pieces:
            got[piece.name] = bytes(data[offset : offset + piece.n_bytes])
            offset += piece.n_bytes

    transport = open_transport("tcp", controller.credentials("engine"))
    endpoint = await connect_any(transport, split_addresses(staged.source), deadline_s=10)
    await fetch(endpoint.call, staged.version, staged.plan_digest, take, deadline=Deadline(60, "fetch"))
    await endpoint.close()
    return got


def test_a_session_over_two_terms(tmp_path: Path) -> None:
    make_run_dir(tmp_path)
    items, plans = make_batch(tmp_path)
    probe = np.arange(1, 21, dtype=np.int32).reshape(2, 10)

    async def scenario() -> None:
        async with world(tmp_path) as (process, c):
            peer = c.trainer.peer
            assert (peer.role, peer.name, peer.host, peer.rank) == ("trainer", "trainer-rank0", "here", 0)
            assert "LoadState" in await c.refused(train_step(1, plans))
            ready, _ = await c.ask(LoadState(checkpoint="", deadline_s=60))
            assert (ready.step, ready.world_size, ready.shape.moe_layers) == (0, 2, (0, 1))

            first, _ = await c.ask(train_step(1, plans))
            assert first.step == 1
            expected = sum(i.n_tokens - 1 for i in items) * LAYERS
            assert first.replayed_positions == first.recorded_positions == expected
            assert (await c.ask(train_step(1, plans)))[0] == first  # from memory, timings and all
            assert "expected 2" in await c.refused(train_step(3, plans))
            assert "expected sft or grpo for 2" in await c.refused(train_step(2, plans[:1]))
            assert "doesn't take Ack" in await c.refused(Ack())

            assert "expected 1" in await c.refused(StageWeights(version=WeightVersion(c.term, 7), deadline_s=60))
            version = WeightVersion(c.term, 1)
            staged, _ = await c.ask(StageWeights(version=version, deadline_s=60))
            assert (await c.ask(StageWeights(version=version, deadline_s=60)))[0] == staged
            assert staged.n_bytes == 4 * ready.n_parameters
            # The source answers while a step runs, and serves the bytes of the version, not of the step under way.
            (second, _), weights = await asyncio.gather(c.ask(train_step(2, plans)), pull(c, staged))
            assert second.step == 2 and weights.keys() == staged.digests.keys()

            message, data = await c.ask(ScoreTokens(n=2, length=10), probe.tobytes())
            scores = np.frombuffer(data, np.float32).reshape(2, 9)
            assert message.version is None and (scores < 0).all()
            assert "vocabulary" in await c.refused(ScoreTokens(n=1, length=10), np.full(10, 99, np.int32).tobytes())
            assert "bytes" in await c.refused(ScoreTokens(n=3, length=10), probe.tobytes())

            # A save that can't be written is reported, not fatal.
            bad = SaveCheckpoint(step=2, folder="resolved.toml/below", deadline_s=60)
            assert (await c.ask(bad))[0] == Ack()
            written = await asyncio.wait_for(c.written.get(), 60)
            assert written.folder == bad.folder and "rank 0" in written.error and "rank 1" in written.error

            save = SaveCheckpoint(step=2, folder="checkpoints/two", deadline_s=60)
            (tmp_path / save.folder).mkdir(parents=True)
            assert (await c.ask(save))[0] == Ack()
            third, _ = await c.ask(train_step(3, plans))
            written = await asyncio.wait_for(c.written.get(), 60)
            assert (written.step, written.folder, written.error) == (2, "checkpoints/two", "")
            found = {p.name: p.stat().st_size for p in (tmp_path / "checkpoints/two").iterdir()}
            assert written.files == found and len(found) >= 5
            assert (await c.ask(save))[0] == Ack()  # told once more: not written again
            assert "expected 3" in await c.refused(msgspec.structs.replace(save, folder="checkpoints/other"))

            # The controller goes away; a new term takes the same world over.
            successor = await Controller(c.paths).open()
            await asyncio.wait_for(successor.joined.wait(), 30)
            assert successor.term == 2 and successor.trainer.peer.term == 2
            with pytest.raises(PeerLost):
                await c.ask(train_step(4, plans))
            assert (await successor.ask(train_step(3, plans)))[0] == third
            ready, _ = await successor.ask(LoadState(checkpoint="checkpoints/two", deadline_s=60))
            assert ready.step == 2
            again, _ = await successor.ask(train_step(3, plans))
            assert again.metrics == third.metrics  # same state, same batch, same world: same bits
            staged, _ = await successor.ask(StageWeights(version=WeightVersion(2, 3), deadline_s=60))
            assert (await pull(successor, staged)).keys() == weights.keys()
            message, _ = await successor.ask(ScoreTokens(n=2, length=10), probe.tobytes())
            assert message.version == WeightVersion(2, 3)
            assert (await successor.ask(Shutdown(reason="done")))[0] == Ack()
            assert await ended(process) == exits.DONE, (tmp_path / "out.log").read_text()
            await successor.listener.close()

    run_async(scenario)
    spans = [e for e in read_events(RunPaths(tmp_path).events) if e["kind"] == "span"]
    assert {"load_state", "train_step", "stage_weights", "save_checkpoint", "score_tokens"} <= {
        s["name"] for s in spans
    }
    assert {s["term"] for s in spans} == {1, 2}


def test_an_error_on_one_rank_is_told_and_ends_the_world(tmp_path: Path) -> None:
    make_run_dir(tmp_path)
    items, plans = make_batch(tmp_path)
    (tmp_path / items[-1].payload.path).write_bytes(b"damaged")

    async def scenario() -> None:
        async with world(tmp_path) as (process, c):
            await c.ask(LoadState(checkpoint="", deadline_s=60))
            with pytest.raises(RemoteError) as caught:
                await c.ask(train_step(1, plans))
            assert caught.value.kind == "IntegrityError"
            assert "trainer rank 1" in caught.value.text and "Traceback" in caught.value.text
            assert await ended(process) != 0

    run_async(scenario)


def test_a_killed_rank_ends_the_world(tmp_path: Path) -> None:
    make_run_dir(tmp_path)
    _, plans = make_batch(tmp_path)

    async def scenario() -> None:
        async with world(tmp_path) as (process, c):
            await c.ask(LoadState(checkpoint="", deadline_s=60))
            os.kill(rank_pid(process.pid, c.trainer.peer.pid), signal.SIGKILL)
            assert await ended(process) != 0
            with pytest.raises(PeerLost):
                await c.ask(train_step(1, plans))

    run_async(scenario)


def test_a_lost_controller_ends_the_world(tmp_path: Path) -> None:
    make_run_dir(tmp_path)

    async def scenario() -> None:
        async with world(tmp_path) as (process, c):
            await c.listener.close()
            assert await ended(process) != 0
            assert "waiting for it or a newer one" in (tmp_path / "out.log").read_text()

    run_async(scenario)


def rank_pid(mpiexec: int, rank0: int) -> int:
    """The rank that isn't rank 0, found among the descendants of mpiexec."""
    parents = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        parents[int(status.parent.name)] = int(fields[1])
    of_proxy = [pid for pid, parent in parents.items() if parent == parents[rank0] and pid != rank0]
    assert len(of_proxy) == 1 and parents[parents[rank0]] == mpiexec
    return of_proxy[0]


def test_a_model_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    run = make_run_dir(tmp_path)
    missing = msgspec.structs.replace(run.model, path=str(tmp_path / "nowhere"), config={})
    RunPaths(tmp_path).resolved_toml.write_text(toml.dumps(msgspec.structs.replace(run, model=missing)))
    process = start(tmp_path)
    try:
        assert process.wait(120) == exits.USER_ERROR
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    lines = [line for line in (tmp_path / "out.log").read_text().splitlines() if line.startswith("trainer: error: ")]
    assert lines and "nowhere: no such folder" in lines[0]
