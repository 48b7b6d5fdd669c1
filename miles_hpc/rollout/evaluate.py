"""Held-out evaluation outside a run: an exported model plays the run's own evaluation episodes, all in one process.

    exports/step_.../ ─▶ weight source ──loopback──▶ engine ◀── run_trajectory ──▶ environment ──▶ SandboxHost here

Prompts and seeds are those of the run's own evaluations (`eval.seed`, episode number), so the numbers can be compared
with those that the run has reported. An agent function plays through a session server in this process.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from miles_hpc.control.opening import open_transport
from miles_hpc.core.config import RunConfig, SiteConfig
from miles_hpc.core.errors import IntegrityError, UserError
from miles_hpc.core.load import load_prepared
from miles_hpc.core.paths import RunPaths
from miles_hpc.core.registry import resolve
from miles_hpc.core.telemetry import EventLog
from miles_hpc.core.transport import Credentials, Endpoint, PeerIdentity, Transport
from miles_hpc.core.types import SampleStatus, WeightVersion
from miles_hpc.dataflow.evaluation import Outcome, evaluation_group, score
from miles_hpc.rollout.agent_player import load_player
from miles_hpc.rollout.engine import EngineSpec, RolloutEngine
from miles_hpc.rollout.engine_options import engine_options
from miles_hpc.rollout.environments.base import Environment, Sandboxes
from miles_hpc.rollout.sampler import Bounds, PlayAgent, Played, run_group
from miles_hpc.rollout.sandbox import LocalSandboxes
from miles_hpc.rollout.sandbox_host import SandboxHost, SandboxLimits
from miles_hpc.rollout.session.assembly import SessionService
from miles_hpc.rollout.session.client import SessionClient
from miles_hpc.rollout.session.listening import bind
from miles_hpc.rollout.session.tokenizer import ChatTokenizer
from miles_hpc.rollout.slots import EngineSlots
from miles_hpc.weights.broadcast import WeightSource
from miles_hpc.weights.bucket import tensor_bytes

__all__ = ["evaluate_folder", "summary"]

_VERSION = WeightVersion(1, 1)
_SYNC_S = 600.0


@dataclass(frozen=True)
class _Tensor:
    """A weight as WeightSource takes it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview


def evaluate_folder(
    run_dir: str, folder: str, n_episodes: int | None = None, device: str = "cpu", threads: int = 1
) -> dict[str, Any]:
    """Play `n_episodes` prompts (default: the run file's eval.n_episodes) with the Hugging Face model in `folder`.

    Each prompt is played eval.n_samples_per_eval_prompt times. Returns mean reward, means by label, pass@k, numbers of
    episodes, of truncated ones and of sampled tokens. One failing episode fails the evaluation. Raises UserError for
    bad input and for a node that can't isolate sandboxes, EngineFailed and IntegrityError.
    """
    paths = RunPaths(Path(run_dir))
    run, site = load_prepared(paths.root)
    wanted = run.eval.n_episodes if n_episodes is None else n_episodes
    if wanted < 1:
        raise UserError(f"evaluation: n_episodes = {wanted}: expected 1 or more")
    sys.path[:0] = run.python_path  # for environments and agent functions by dotted path
    return asyncio.run(_evaluate(run, site, paths, Path(folder), wanted, device, threads))


async def _evaluate(
    run: RunConfig, site: SiteConfig, paths: RunPaths, folder: Path, n_episodes: int, device: str, threads: int
) -> dict[str, Any]:
    environment: Environment = resolve("environment", run.environment.name)(run.environment.options)
    tokenizer = ChatTokenizer(paths.model, append_only=not run.rollout.custom_agent_function_path)
    host = SandboxHost(isolation=run.sandbox.isolation, limits=SandboxLimits.of(run.sandbox))
    await host.start()
    try:
        sandboxes = LocalSandboxes(
            host,
            timeout_s=run.rollout.sandbox_timeout_s,
            max_output_bytes=run.rollout.sandbox_max_output_bytes,
        )
        async with (
            _engine(run, site, folder, device, threads) as engine,
            _agents(run, paths, engine, tokenizer, environment, sandboxes) as play_agent,
        ):
            slots = EngineSlots()
            slots.add(engine, slots=run.rollout.slots_per_engine, shape=None, version=_VERSION)
            room = asyncio.Semaphore(run.rollout.slots_per_engine)

            async def play(number: int) -> tuple[str, list[Played]]:
                group = evaluation_group(run, number)
                prompt = environment.prompt(group.prompt.seed, split=group.purpose.value)
                async with room:
                    played = await run_group(
                        msgspec.structs.replace(group, prompt=prompt),
                        tokenizer=tokenizer,
                        environment=environment,
                        sandboxes=sandboxes,
                        bounds=Bounds.of(run, group.purpose),
                        lease=lambda: slots.lease(run.control.step_deadline_s),
                        play_agent=play_agent,
                    )
                return prompt.label, played

            async with asyncio.TaskGroup() as tasks:
                episodes = [tasks.create_task(play(number)) for number in range(n_episodes)]
    finally:
        await host.close()
    return summary([task.result() for task in episodes], success_reward=run.eval.success_reward)


def summary(prompts: list[tuple[str, list[Played]]], *, success_reward: float) -> dict[str, Any]:
    """Label and episodes of each prompt in numbers, as in the run's own evaluations. `pass_at` is by k, as text."""
    # Branches of a rollout share its outcome, which counts once.
    rollouts = [(label, {p.rollout: p for p in reversed(played)}.values()) for label, played in prompts]
    scores = score(
        [[Outcome(p.reward, p.status, label) for p in own] for label, own in rollouts], success_reward=success_reward
    )
    episodes = [p for _, own in rollouts for p in own]
    return {
        "episodes": len(episodes),
        "prompts": scores.n,
        "mean": scores.mean,
        "by_label": scores.by_label,
        "pass_at": {str(k): value for k, value in scores.pass_at.items()},
        "truncated": sum(p.status is SampleStatus.TRUNCATED for p in episodes),
        "sampled_tokens": sum(p.record.n_sampled for _, played in prompts for p in played),
    }


@asynccontextmanager
async def _agents(
    run: RunConfig,
    paths: RunPaths,
    engine: RolloutEngine,
    tokenizer: ChatTokenizer,
    environment: Environment,
    sandboxes: Sandboxes,
) -> AsyncIterator[PlayAgent | None]:
    """How the run's agent function plays, on a session server of this process; None for a run without one."""
    sessions = SessionClient()
    player = load_player(run, sessions, tokenizer=tokenizer, environment=environment, sandboxes=sandboxes)
    if player is None:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="miles-hpc-evaluation-") as text:  # its sessions outlive nothing
        folder, token = Path(text), secrets.token_urlsafe(32)
        events = EventLog(folder / "events", "evaluation", attempt=1)
        service = SessionService(run, paths, "evaluation", token=token, events=events, journal=folder / "journal")
        listening, url = bind("127.0.0.1:0")
        await service.start(listening)
        service.gateway.add_engine(engine.name, engine, _VERSION)
        sessions.serve_at(url, token)
        try:
            yield player.play
        finally:
            await player.close()
            await sessions.close()
            await service.close()
            events.close()


@asynccontextmanager
async def _engine(
    run: RunConfig, site: SiteConfig, folder: Path, device: str, threads: int
) -> AsyncIterator[RolloutEngine]:
    """The run's engine with the weights of `folder`: synced and verified like any other, from a source beside it."""
    source = WeightSource()
    manifest = source.stage(_VERSION, _read_tensors(folder, run.model.dtype))
    secret = secrets.token_bytes(32)

    def transport(role: str) -> Transport:
        identity = PeerIdentity(
            role=role, name=role, host=socket.gethostname(), pid=os.getpid(), attempt=1, term=_VERSION.term
        )
        return open_transport("loopback", Credentials(secret=secret, identity=identity))

    async def connect(address: str, deadline_s: float) -> Endpoint:
        return await transport("engine").connect(address, deadline_s=deadline_s)

    listener = await transport("weights").listen(source.handle)
    engine: RolloutEngine = resolve("engine", run.rollout.engine)(
        EngineSpec(
            name="evaluation",
            model_path=folder,
            connect=connect,
            slots=run.rollout.slots_per_engine,
            max_length=run.rollout.max_trajectory_tokens,
            dtype=run.model.dtype,
            device=device,
            threads=threads,
            experts_implementation=run.model.experts_implementation,
            options=engine_options(run, site, log=None),
        )
    )
    try:
        await engine.start()
        await engine.sync(_VERSION, listener.address, manifest.plan_digest, deadline_s=_SYNC_S)
        yield engine
    finally:
        await engine.close()
        await listener.close()


def _read_tensors(folder: Path, dtype: str) -> list[_Tensor]:
    """The folder's weights in the engine's names and number format. Raises IntegrityError when it can't be loaded."""
    import torch
    import transformers

    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), local_files_only=True
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise IntegrityError(f"model folder {folder}: can't be loaded: {' '.join(str(error).split())}") from error
    return [
        _Tensor(name, str(parameter.dtype).removeprefix("torch."), tuple(parameter.shape), tensor_bytes(parameter))
        for name, parameter in model.named_parameters()
    ]
