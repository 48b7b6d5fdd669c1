"""Playing trajectories: an environment's episode, a session record and an engine, turn by turn.

    run_group ── n tasks ──▶ run_trajectory:  engine.generate ─▶ record ─▶ episode.step ─▶ record ─▶ ...
                             (a generation slot is held from the first turn to the last)

| end | status | reward |
|---|---|---|
| the environment says done | completed | the environment's |
| turns, tokens or time are used up, a turn hits its length limit | truncated | 0 |
| engine or sandbox fails | raises; the group's attempt fails | |

A run with an agent function plays through agent_player.py instead, which the caller passes as `play_agent`.

A trajectory's seed follows from (group seed, index) and a turn's from that, so the same group gives the same tokens
wherever it is sampled, if the engine keeps its promise about seeds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from miles_hpc.core.config import RunConfig
from miles_hpc.core.deadline import Deadline
from miles_hpc.core.errors import DeadlineExpired, MilesError, PeerLost, RemoteError, UserError
from miles_hpc.core.messages import GenerateGroup
from miles_hpc.core.types import (
    FinishReason,
    GroupPurpose,
    RoutedExpertsRef,
    SampleStatus,
    Trajectory,
    VersionSpan,
)
from miles_hpc.dataflow.source import derive_seed, turn_seed
from miles_hpc.rollout.engine import Generation, RolloutEngine
from miles_hpc.rollout.environments.base import Environment, Episode, Sandboxes
from miles_hpc.rollout.session.record import SessionRecord
from miles_hpc.rollout.session.tokenizer import ChatTokenizer

__all__ = [
    "Bounds",
    "EngineFailed",
    "Lease",
    "PlayAgent",
    "Played",
    "TrainingRecord",
    "run_group",
    "run_trajectory",
    "trajectory_name",
]

#: Gives an engine with a free generation slot, and takes the slot back at the end.
Lease = Callable[[], AbstractAsyncContextManager[RolloutEngine]]

# How long an engine may take to answer an abort, beyond the trajectory's deadline, before it counts as failed.
_ABORT_GRACE_S = 10.0
_FREE_SESSION_S = 5.0


class EngineFailed(MilesError):
    """An engine didn't do its part. `engine` is its name; with `gone` it isn't worth another request."""

    def __init__(self, engine: str, text: str, *, gone: bool = False) -> None:
        super().__init__(f"engine {engine}: {text}")
        self.engine = engine
        self.gone = gone


@dataclass(frozen=True)
class Bounds:
    """Limits of one trajectory. `max_tokens` counts prompt, outputs and sampled tokens."""

    max_turns: int
    max_tokens: int

    @classmethod
    def of(cls, run: RunConfig, purpose: GroupPurpose) -> Bounds:
        """Those of a run; an evaluation may have its own number of turns."""
        max_turns = (run.eval.max_turns if purpose is GroupPurpose.EVAL else 0) or run.rollout.max_turns
        return cls(max_turns=max_turns, max_tokens=run.rollout.max_trajectory_tokens)


class TrainingRecord(Protocol):
    """What spooling needs of a finished trajectory: `SessionRecord`, or a session server's sample."""

    @property
    def n_tokens(self) -> int:
        """All tokens."""

    @property
    def n_sampled(self) -> int:
        """Tokens with mask 1."""

    @property
    def versions(self) -> tuple[VersionSpan, ...]:
        """Which weights sampled which tokens."""

    def routed_experts(self) -> npt.NDArray[np.unsignedinteger] | None:
        """Rows [n_tokens - 1, moe_layers, top_k], or None."""

    def to_trajectory(
        self,
        *,
        group_id: int,
        index: int,
        reward: float,
        status: SampleStatus,
        label: str = "",
        routed_experts: RoutedExpertsRef | None = None,
        metadata: dict[str, object] | None = None,
    ) -> Trajectory:
        """As the trainer takes it."""


@dataclass(frozen=True)
class Played:
    """A trajectory that came to its end."""

    index: int
    record: TrainingRecord
    reward: float
    status: SampleStatus
    generation_s: float  # waited for the engine
    environment_s: float  # waited for the environment
    rollout_id: int | None = None  # of the group's rollouts; None: index
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def rollout(self) -> int:
        """Which of the group's rollouts it is a trajectory of."""
        return self.index if self.rollout_id is None else self.rollout_id


#: Plays one rollout of a group with an agent function: a trajectory per branch of its session.
PlayAgent = Callable[[GenerateGroup, int], Awaitable[list[Played]]]


def trajectory_name(job: GenerateGroup, index: int) -> str:
    """Of the trajectory's sandbox and of its session on an engine or a session server.

    With its purpose: ids of training groups and of evaluations overlap, and both are played at once.
    """
    return f"{job.purpose.value}-{job.group_id}-{job.attempt}-{index}"


async def run_group(
    job: GenerateGroup,
    *,
    tokenizer: ChatTokenizer,
    environment: Environment,
    sandboxes: Sandboxes,
    bounds: Bounds,
    lease: Lease | None,
    play_agent: PlayAgent | None = None,
) -> list[Played]:
    """All trajectories of one group, in order of their rollouts, played concurrently.

    The first failure cancels the others and is raised (EngineFailed, PeerLost, UserError, ...). `lease` may be
    None for demonstrations. With `play_agent` a generation slot is held while the agent is at work; which engine
    serves it is then its session server's choice.
    """

    async def play(index: int) -> list[Played]:
        if job.purpose is GroupPurpose.DEMO:
            return [await run_trajectory(job, index, tokenizer, environment, sandboxes, bounds, None)]
        if lease is None:
            raise UserError(f"group {job.group_id}: purpose {job.purpose} needs an engine")
        async with lease() as engine:
            if play_agent is not None:
                return await play_agent(job, index)
            return [await run_trajectory(job, index, tokenizer, environment, sandboxes, bounds, engine)]

    tasks = [asyncio.create_task(play(index)) for index in range(job.n_samples)]
    try:
        return [played for rollout in await asyncio.gather(*tasks) for played in rollout]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def run_trajectory(
    job: GenerateGroup,
    index: int,
    tokenizer: ChatTokenizer,
    environment: Environment,
    sandboxes: Sandboxes,
    bounds: Bounds,
    engine: RolloutEngine | None,
) -> Played:
    """One trajectory; without an engine, the episode's demonstration is played."""
    name = trajectory_name(job, index)
    seed = derive_seed(job.seed, "trajectory", index)
    record = SessionRecord(tokenizer, job.prompt.messages)
    if record.n_tokens >= bounds.max_tokens:
        raise UserError(
            f"group {job.group_id}: its prompt has {record.n_tokens} tokens, "
            f"no room below rollout.max_trajectory_tokens={bounds.max_tokens}"
        )
    deadline = Deadline(job.deadline_s, f"trajectory {name}")
    episode = environment.start(job.prompt, sandboxes, episode_id=name, seed=seed)
    player = _Player(job, name, seed, record, episode, bounds, deadline, engine)
    try:
        reward, status = await player.play()
    finally:
        await episode.close()
        if engine is not None:
            await _free(engine, name)
    record.trim()
    return Played(
        index=index,
        record=record,
        reward=reward,
        status=status,
        generation_s=player.generation_s,
        environment_s=player.environment_s,
    )


class _Player:
    """The turns of one trajectory."""

    def __init__(
        self,
        job: GenerateGroup,
        name: str,
        seed: int,
        record: SessionRecord,
        episode: Episode,
        bounds: Bounds,
        deadline: Deadline,
        engine: RolloutEngine | None,
    ) -> None:
        self.job, self.name, self.seed = job, name, seed
        self.record, self.episode, self.bounds = record, episode, bounds
        self.deadline, self.engine = deadline, engine
        self.generation_s = 0.0
        self.environment_s = 0.0

    async def play(self) -> tuple[float, SampleStatus]:
        truncated = (0.0, SampleStatus.TRUNCATED)
        record = self.record
        while True:
            text = await self._assistant_turn()
            if text is None or record.closed:
                return truncated
            began = self.deadline.elapsed_s
            try:
                turn = await asyncio.wait_for(self.episode.step(text), self.deadline.remaining_s)
            except TimeoutError:
                return truncated
            finally:
                self.environment_s += self.deadline.elapsed_s - began
            if turn.done:
                return turn.reward, SampleStatus.COMPLETED
            if record.turns >= self.bounds.max_turns or self.deadline.expired:
                return truncated
            if record.n_tokens + record.suffix_length(turn.messages) >= self.bounds.max_tokens:
                return truncated
            record.append_messages(turn.messages)

    async def _assistant_turn(self) -> str | None:
        """What the assistant says, recorded; None when it says nothing more."""
        if self.engine is None:
            text = self.episode.demonstrate()
            return None if text is None else self.record.append_scripted(text)
        began = self.deadline.elapsed_s
        try:
            generation = await self._generate(self.engine)
        finally:
            self.generation_s += self.deadline.elapsed_s - began
        try:
            text = self.record.append_generation(generation)
        except MilesError as error:
            raise EngineFailed(self.engine.name, str(error)) from error
        if generation.finish_reason is FinishReason.ABORT:
            if self.deadline.expired:
                return None
            raise EngineFailed(self.engine.name, f"aborted {self.name} after {len(generation.output_ids)} tokens")
        return text

    async def _generate(self, engine: RolloutEngine) -> Generation:
        """One request. At the deadline the engine is told to abort and answers with what it has."""
        record, turn = self.record, self.record.turns
        request = f"{self.name}-{turn}"
        sampling = msgspec.structs.replace(
            self.job.sampling,
            max_new_tokens=min(self.job.sampling.max_new_tokens, self.bounds.max_tokens - record.n_tokens),
            stop_token_ids=self.job.sampling.stop_token_ids or record.stop_ids,
            seed=turn_seed(self.seed, turn),
        )
        remaining = self.deadline.remaining_s
        answer = asyncio.ensure_future(
            engine.generate(
                request,
                self.name,
                record.input_ids(),
                sampling,
                routed_experts_start=record.n_rows,
                deadline_s=remaining + _ABORT_GRACE_S,
            )
        )
        try:
            done, _ = await asyncio.wait({answer}, timeout=remaining)
            if not done:
                await engine.abort(request)
                done, _ = await asyncio.wait({answer}, timeout=_ABORT_GRACE_S)
            if not done:
                text = f"no answer to {request} {_ABORT_GRACE_S:.0f} s after its abort"
                raise EngineFailed(engine.name, text, gone=True)
            return answer.result()
        except (MilesError, OSError) as error:
            if isinstance(error, EngineFailed):
                raise
            told = error.kind if isinstance(error, RemoteError) else type(error).__name__  # by an engine's own process
            gone = isinstance(error, OSError) or told in (PeerLost.__name__, DeadlineExpired.__name__)
            raise EngineFailed(engine.name, f"{type(error).__name__}: {error}", gone=gone) from error
        except asyncio.CancelledError:
            await _quietly(engine.abort(request))
            raise
        finally:
            answer.cancel()


async def _free(engine: RolloutEngine, session: str) -> None:
    await _quietly(engine.end_session(session))


async def _quietly(call: asyncio.Future[None] | object) -> None:
    """Wait a little for something whose failure changes nothing here: a dead engine frees everything anyway."""
    try:
        await asyncio.wait_for(call, _FREE_SESSION_S)  # type: ignore[arg-type]
    except (MilesError, OSError, TimeoutError):
        pass
