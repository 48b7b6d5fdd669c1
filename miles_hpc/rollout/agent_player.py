"""A trajectory that an agent program plays: a session of the node's server, the environment's episode, a verdict.

    open a session ─▶ the agent function ─▶ what the session recorded ─▶ reward ─▶ one Played per branch
                        │        │
                        ▼        ▼
             requests to the   episode.step(text): the environment's own turn, if the agent wants it
             session, as an
             OpenAI client

| the agent | status | reward |
|---|---|---|
| returns with a reward | completed | that one |
| returns after a step that ended the episode | completed | the episode's |
| returns | completed, or truncated when the episode isn't over | that of `episode.step(last response)` |
| returns without a reward after a limit cut its last response | truncated | 0 |
| isn't through at the deadline | truncated | 0 |
| says that it gave up: `truncated = True` | truncated | 0 |
| fails after a limit of tokens cut or refused a request | truncated | 0 |
| fails otherwise | AgentFailed; an evaluation counts it: failed | 0 |
| ends without a request that was recorded | AgentFailed; an evaluation counts it, failed or truncated | 0 |

What isn't the agent's doing is an error, also of an evaluation, and the group is played again: an episode that failed;
a session server that went away and engines that were lost, where the agent didn't complete in spite of it.

Branches of a session are trajectories of one rollout: they share its reward, and each completion is trained once.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import msgspec

from miles_hpc.core.config import RunConfig
from miles_hpc.core.deadline import Deadline
from miles_hpc.core.errors import MilesError, UserError
from miles_hpc.core.messages import GenerateGroup
from miles_hpc.core.types import GroupPurpose, SampleStatus
from miles_hpc.dataflow.source import derive_seed
from miles_hpc.rollout.agent_function import AgentOutcome, AgentRunner, AgentSession, AgentTask, load_agent
from miles_hpc.rollout.environments.base import Environment, Episode, Sandboxes, Turn
from miles_hpc.rollout.sampler import Bounds, Played, TrainingRecord, trajectory_name
from miles_hpc.rollout.session.client import SessionClient, SessionHandle, SessionState
from miles_hpc.rollout.session.payload import WireSample
from miles_hpc.rollout.session.record import SessionRecord
from miles_hpc.rollout.session.sampled_record import SampledRecord
from miles_hpc.rollout.session.tokenizer import ChatTokenizer

__all__ = ["AgentEpisode", "AgentFailed", "AgentPlayer", "load_player"]

#: How long a session's record may take to come, once its agent has ended: the server may just be started again.
_COLLECT_S = 60.0


class AgentFailed(MilesError):
    """An agent function raised, returned something wrong, or made no request."""


class AgentEpisode:
    """What an agent function gets as `episode`: the environment's side of its task. Usable in any event loop's thread.

    `await episode.step(text)` plays one turn as the environment defines it, for example a command in the task's
    sandbox, and returns its Turn: `messages` to go on with, or `done` and `reward`.
    """

    def __init__(self, episode: Episode) -> None:
        """Made in the loop that the environment works in."""
        self._episode = episode
        self._loop = asyncio.get_running_loop()
        self._lock = asyncio.Lock()
        self.reward: float | None = None  # once the episode is over
        self.failure: Exception | None = None  # of the environment
        self.spent_s = 0.0
        self._closed = False

    async def step(self, text: str) -> Turn:
        """The assistant said `text`. Raises UserError when the episode is over."""
        return await self._there(self._step(text))

    async def _there(self, work: Coroutine[Any, Any, Turn]) -> Turn:
        if asyncio.get_running_loop() is self._loop:
            return await work
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    async def _step(self, text: str) -> Turn:
        async with self._lock:
            if self.reward is not None or self._closed:
                raise UserError("episode.step: the episode is over")
            began = time.monotonic()
            try:
                turn = await self._episode.step(text)
            except Exception as error:
                self.failure = error
                raise
            finally:
                self.spent_s += time.monotonic() - began
            if turn.done:
                self.reward = turn.reward
            return turn

    async def close(self) -> None:
        """Free everything. What of the agent is still there gets no more of it."""
        self._closed = True
        async with self._lock:  # a step under way may be making what is freed here
            await self._episode.close()


@dataclass(frozen=True)
class AgentPlayer:
    """Plays trajectories with one agent function. Belongs to the host's event loop."""

    runner: AgentRunner
    sessions: SessionClient
    tokenizer: ChatTokenizer
    environment: Environment
    sandboxes: Sandboxes
    bounds: Callable[[GroupPurpose], Bounds]

    async def play(self, job: GenerateGroup, index: int) -> list[Played]:
        """Rollout `index` of a group, one Played per branch, the first with the rollout's number.

        Raises AgentFailed, SessionServerFailed, IntegrityError, and what the environment raises.
        """
        name = trajectory_name(job, index)
        seed = derive_seed(job.seed, "trajectory", index)
        deadline = Deadline(job.deadline_s, f"trajectory {name}")
        session = await self.sessions.open(_settings(job, name, seed), deadline)
        try:
            episode = AgentEpisode(self.environment.start(job.prompt, self.sandboxes, episode_id=name, seed=seed))
            try:
                return await self._play(job, index, session, episode, deadline)
            finally:
                await episode.close()
        finally:
            self.sessions.delete(session)

    async def close(self) -> None:
        """Ends the agents that are at work."""
        await self.runner.close()

    async def _play(
        self, job: GenerateGroup, index: int, session: SessionHandle, episode: AgentEpisode, deadline: Deadline
    ) -> list[Played]:
        task = AgentTask(
            prompt=job.prompt.messages,
            sampling=msgspec.structs.replace(job.sampling, seed=None),  # the session has it
            metadata=job.prompt.data.get("metadata") or {},
            episode=episode,
            max_turns=self.bounds(job.purpose).max_turns,
        )
        before = self.sessions.interruptions
        outcome = await self.runner.run(task, AgentSession(session.base_url, session.token), deadline)
        collecting = Deadline(_COLLECT_S, "what the session recorded")
        state = await self.sessions.state(session, collecting)
        samples = await self.sessions.samples(session, collecting) if state.n_turns else []
        # By its definition the time of an agent's tools contains that of its steps.
        playing_s = max(outcome.tool_time_s, episode.spent_s)
        if episode.failure is not None and not isinstance(episode.failure, UserError):
            raise episode.failure
        if outcome.status is not SampleStatus.COMPLETED:
            if state.starved:
                raise AgentFailed(f"rollout {index}: engines failed or weren't there for its last request")
            if self.sessions.interruptions > before:
                raise AgentFailed(f"rollout {index}: the session server went away meanwhile: {outcome.error}")
        status, reward, why = await self._judge(outcome, episode, state, samples, deadline)
        if job.purpose is not GroupPurpose.EVAL and (status is SampleStatus.FAILED or not samples):
            raise AgentFailed(f"rollout {index}: {why}")
        metadata = dict(outcome.metadata)
        if why:
            metadata["error"] = why
        judging_s = max(0.0, episode.spent_s - playing_s)
        records: list[TrainingRecord] = [SampledRecord(sample) for sample in samples]
        records = records or [self._nothing(job)]
        return [
            Played(
                index=index if branch == 0 else job.n_samples * branch + index,
                rollout_id=index,
                record=record,
                reward=reward,
                status=status,
                generation_s=0.0 if branch else max(0.0, outcome.duration_s - playing_s),
                environment_s=0.0 if branch else playing_s + judging_s,
                metadata={} if branch else metadata,
            )
            for branch, record in enumerate(records)
        ]

    async def _judge(
        self,
        outcome: AgentOutcome,
        episode: AgentEpisode,
        state: SessionState,
        samples: list[WireSample],
        deadline: Deadline,
    ) -> tuple[SampleStatus, float, str]:
        """Status, reward, and why not completed; the module's table."""
        if outcome.status is SampleStatus.FAILED and (state.refused or state.cut):
            return SampleStatus.TRUNCATED, 0.0, outcome.error
        if outcome.status is not SampleStatus.COMPLETED:
            return outcome.status, 0.0, outcome.error
        if not samples:
            return SampleStatus.FAILED, 0.0, "agent function: it returned without a request that was recorded"
        if outcome.reward is not None:
            return SampleStatus.COMPLETED, outcome.reward, ""
        if episode.reward is None and state.cut:
            return SampleStatus.TRUNCATED, 0.0, "a limit cut the last response"
        if episode.reward is None:
            try:
                await asyncio.wait_for(episode.step(self._last_response(samples)), deadline.remaining_s)
            except TimeoutError:
                return SampleStatus.TRUNCATED, 0.0, str(deadline.error())
        if episode.reward is None:
            return SampleStatus.TRUNCATED, 0.0, "the agent returned before the episode was over"
        return SampleStatus.COMPLETED, episode.reward, ""

    def _last_response(self, samples: list[WireSample]) -> str:
        """What the assistant said last, over all branches, without its end-of-turn token."""
        sample = max(samples, key=lambda s: s.meta.turns[-1].number)
        ids = sample.tokens[len(sample.tokens) - sample.meta.turns[-1].n_output :].tolist()
        if ids and ids[-1] in self.tokenizer.stop_ids:
            ids.pop()
        return self.tokenizer.decode(ids)

    def _nothing(self, job: GenerateGroup) -> SessionRecord:
        """For an evaluation whose agent asked for nothing: its prompt, and no sampled token."""
        return SessionRecord(self.tokenizer, job.prompt.messages)


def load_player(
    run: RunConfig,
    sessions: SessionClient,
    *,
    tokenizer: ChatTokenizer,
    environment: Environment,
    sandboxes: Sandboxes,
) -> AgentPlayer | None:
    """The run's agent function, ready to play; None when the run has none. Imports its module. Raises UserError."""
    path, options = run.rollout.custom_agent_function_path, run.rollout.agent_options
    if not path:
        return None
    runner = AgentRunner(load_agent(path, options), options=options, max_concurrent=run.sessions.max_sessions)
    _exempt_loopback()
    return AgentPlayer(runner, sessions, tokenizer, environment, sandboxes, lambda purpose: Bounds.of(run, purpose))


def _exempt_loopback() -> None:
    """A site's HTTP proxy must not see what agents say to this node's server: most clients ask the environment."""
    for name in ("no_proxy", "NO_PROXY"):
        listed = [host for host in os.environ.get(name, "").split(",") if host]
        os.environ[name] = ",".join(dict.fromkeys([*listed, "127.0.0.1", "localhost"]))


def _settings(job: GenerateGroup, name: str, seed: int) -> dict[str, Any]:
    """What a session is opened with; the rest is the run file's `[sessions]`."""
    sampling: dict[str, Any] = {"temperature": job.sampling.temperature, "top_p": job.sampling.top_p}
    return {
        "sampling": sampling | {"max_tokens": job.sampling.max_new_tokens},
        "seed": seed,
        "metadata": {"trajectory": name},
    }
