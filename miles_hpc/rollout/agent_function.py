"""Agent programs from outside: an async function plays a task against a session, as an OpenAI client.

    async def run(base_url, prompt, request_kwargs, metadata, **kwargs) -> dict | None

| argument | content |
|---|---|
| base_url | the session's: http://HOST:PORT/sessions/ID/v1 |
| prompt | the task's messages, [{"role", "content"}, ...] |
| request_kwargs | sampling for each request: max_tokens, temperature, top_p, seed |
| metadata | the task's own table, a copy |
| api_key | the session's token, when the function takes it, by name or by **kwargs |
| episode | the task's [AgentEpisode](agent_player.py), when the function takes it |
| max_turns | rollout.max_turns or eval.max_turns, when the function takes it by name and `options` don't say it |
| others | `options` of the run, by their names |

A function that doesn't take `api_key` finds the token in `request_kwargs["extra_headers"]`, which OpenAI's client
takes with each request. It returns a table or None: `reward` (a number), `truncated` (true: it gave up at a limit),
`agent_metrics` (`total_tool_time`: seconds that it spent outside of requests), and whatever should stay with the
trajectory. The shape and these names are those of Miles' `--custom-agent-function-path`
(miles/rollout/generate_hub/agentic_tool_call.py), all but `truncated`; a function written for it runs.

    AgentRunner.run ── call_soon_threadsafe ──▶ a thread with an event loop of its own: all agents of the runner
         │ deadline over, or cancelled: cancel it, wait `grace_s`; still there: leave that thread, start another
         ▼
    AgentOutcome

The thread is there because a function that blocks must not hold up the host's heartbeats; it holds up other agents.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import importlib
import inspect
import math
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec

from miles_hpc.core.deadline import Deadline
from miles_hpc.core.errors import UserError
from miles_hpc.core.types import ChatMessage, SampleStatus, SamplingParams

__all__ = [
    "AgentFunction",
    "AgentOutcome",
    "AgentRunner",
    "AgentSession",
    "AgentTask",
    "load_agent",
    "read_outcome",
    "request_kwargs",
]

AgentFunction: TypeAlias = Callable[..., Awaitable[Any]]

_ARGUMENTS = ("base_url", "prompt", "request_kwargs", "metadata")
_METADATA_BYTES = 64 << 10
_ERROR_CHARS = 500


@dataclass(frozen=True, slots=True)
class AgentSession:
    """Where an agent talks to, and the token that lets it: one session's, worth nothing elsewhere."""

    base_url: str
    token: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class AgentTask:
    """What an agent is given."""

    prompt: tuple[ChatMessage, ...]
    sampling: SamplingParams
    metadata: Mapping[str, Any] = field(default_factory=dict)
    episode: Any = None  # usable in the agent's thread
    max_turns: int = 0  # 0: no bound


@dataclass(frozen=True, slots=True)
class AgentOutcome:
    """How it went: completed; truncated when the deadline was over; failed with an `error`, one line."""

    status: SampleStatus
    reward: float | None = None  # None: the agent doesn't judge itself
    metadata: dict[str, Any] = field(default_factory=dict)  # what it returned, without the reward
    tool_time_s: float = 0.0
    duration_s: float = 0.0
    error: str = ""


def load_agent(path: str, options: Mapping[str, Any] | None = None) -> AgentFunction:
    """The function at `module:function`, or `module.function` as Miles writes it. Imports the module.

    Raises UserError for one that isn't there, isn't async, or doesn't take its arguments (those of the table above,
    and `options`) by name.
    """
    module, _, name = path.rpartition(":") if ":" in path else path.rpartition(".")
    if not module or not name:
        raise UserError(f"agent function '{path}': expected module:function")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UserError(f"agent function '{path}': can't be loaded: {error}") from error
    call = function if inspect.isroutine(function) else getattr(function, "__call__", None)  # noqa: B004
    if not callable(function) or not inspect.iscoroutinefunction(call):
        raise UserError(f"agent function '{path}': {function!r:.80}: expected an async function")
    missing = [key for key in (*_ARGUMENTS, *(options or {})) if not _takes(function, key)]
    if missing:
        raise UserError(f"agent function '{path}': it doesn't take {', '.join(missing)} by name; add it or **kwargs")
    return function  # type: ignore[no-any-return]


def request_kwargs(sampling: SamplingParams) -> dict[str, Any]:
    """Sampling under the names of OpenAI's chat completions."""
    kwargs: dict[str, Any] = {
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
    }
    return kwargs if sampling.seed is None else {**kwargs, "seed": sampling.seed}


def read_outcome(returned: Any, duration_s: float) -> AgentOutcome:
    """What an agent's return value means; a wrong one is a failure that says what was expected."""

    def failed(text: str) -> AgentOutcome:
        return AgentOutcome(SampleStatus.FAILED, duration_s=duration_s, error=f"agent function: {text}")

    if returned is None:
        return AgentOutcome(SampleStatus.COMPLETED, duration_s=duration_s)
    if not isinstance(returned, Mapping) or not all(isinstance(key, str) for key in returned):
        return failed(f"returned {_shown(returned)}: expected a table or None")
    truncated = returned.get("truncated", False)
    if not isinstance(truncated, bool):
        return failed(f"truncated {_shown(truncated)}: expected true or false")
    reward = returned.get("reward")
    if reward is not None and not _is_number(reward):
        return failed(f"reward {_shown(reward)}: expected a finite number")
    metrics = returned.get("agent_metrics") or {}
    if not isinstance(metrics, Mapping):
        return failed(f"agent_metrics {_shown(metrics)}: expected a table")
    tool_time = metrics.get("total_tool_time")
    if tool_time is not None and not (_is_number(tool_time) and tool_time >= 0):
        return failed(f"agent_metrics.total_tool_time {_shown(tool_time)}: expected seconds, 0 or more")
    metadata = {key: value for key, value in returned.items() if key != "reward"}
    try:
        data = msgspec.msgpack.encode(metadata)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        return failed(f"what it returned can't be kept: {error}: expected texts, numbers, lists and tables")
    if len(data) > _METADATA_BYTES:
        return failed(f"what it returned has {len(data)} bytes: expected at most {_METADATA_BYTES}")
    return AgentOutcome(
        SampleStatus.TRUNCATED if truncated else SampleStatus.COMPLETED,
        reward=None if reward is None else float(reward),
        metadata=msgspec.msgpack.decode(data),  # a copy that the agent doesn't hold
        tool_time_s=0.0 if tool_time is None else float(tool_time),
        duration_s=duration_s,
        error="the agent gave up at a limit" if truncated else "",
    )


class AgentRunner:
    """Runs one agent function for many sessions at once. Belongs to the event loop that calls `run` and `close`."""

    def __init__(
        self,
        function: AgentFunction,
        *,
        options: Mapping[str, Any] | None = None,
        max_concurrent: int = 64,
        grace_s: float = 5.0,
    ) -> None:
        self._function = function
        self._options = dict(options or {})
        self._takes_key = _takes(function, "api_key")
        self._takes_episode = _takes(function, "episode")
        self._takes_turns = _takes(function, "max_turns", by_name=True) and "max_turns" not in self._options
        self._room = asyncio.Semaphore(max_concurrent)
        self._grace_s = grace_s
        self._thread: _LoopThread | None = None
        self.left_behind = 0  # threads with an agent that doesn't end

    async def run(self, task: AgentTask, session: AgentSession, deadline: Deadline) -> AgentOutcome:
        """Play one task. Whatever the function does is an outcome; only the caller's own cancellation is raised."""
        try:
            await asyncio.wait_for(self._room.acquire(), deadline.remaining_s)
        except TimeoutError:
            return AgentOutcome(SampleStatus.TRUNCATED, duration_s=deadline.elapsed_s, error=str(deadline.error()))
        began = time.monotonic()
        try:
            running = self._open_thread().start(lambda: self._function(**self._arguments(task, session)))
            ended = asyncio.wrap_future(running.ended)
            try:
                done, _ = await asyncio.wait({ended}, timeout=deadline.remaining_s)
            except asyncio.CancelledError:
                await self._cancel(running, ended)
                raise
            if not done:
                await self._cancel(running, ended)
                duration_s = time.monotonic() - began
                return AgentOutcome(SampleStatus.TRUNCATED, duration_s=duration_s, error=str(deadline.error()))
            duration_s = time.monotonic() - began
            returned, error = ended.result()
            if error is not None:
                text = " ".join(f"{type(error).__name__}: {_told(error)}".split()).replace(session.token, "***")
                text = f"agent function raised {text}"[:_ERROR_CHARS]
                return AgentOutcome(SampleStatus.FAILED, duration_s=duration_s, error=text)
            return read_outcome(returned, duration_s)
        finally:
            self._room.release()

    async def close(self) -> None:
        """End the thread and cancel what runs on it; idempotent."""
        thread, self._thread = self._thread, None
        if thread is not None:
            await asyncio.to_thread(thread.stop, self._grace_s)

    def _arguments(self, task: AgentTask, session: AgentSession) -> dict[str, Any]:
        kwargs = request_kwargs(task.sampling)
        arguments: dict[str, Any] = {
            "base_url": session.base_url,
            "prompt": [{"role": message.role, "content": message.content} for message in task.prompt],
            "request_kwargs": kwargs,
            "metadata": copy.deepcopy(dict(task.metadata)),
            **copy.deepcopy(self._options),
        }
        if self._takes_episode:
            arguments["episode"] = task.episode
        if self._takes_turns:
            arguments["max_turns"] = task.max_turns
        if self._takes_key:
            arguments["api_key"] = session.token
        else:
            kwargs["extra_headers"] = {"Authorization": f"Bearer {session.token}"}
        return arguments

    async def _cancel(self, running: _Running, ended: asyncio.Future[Any]) -> None:
        """Cancel the agent and wait for its end; leave its thread when it doesn't come."""
        running.cancel()
        done, _ = await asyncio.wait({ended}, timeout=self._grace_s)
        if not done:
            self.left_behind += 1
            if running.thread is self._thread:
                self._thread = None
            running.thread.retire()

    def _open_thread(self) -> _LoopThread:
        if self._thread is None:
            self._thread = _LoopThread()
        return self._thread


# ------------------------------------------------------------------------------------------------ the thread


class _Running:
    """An agent on its thread. `ended` gives (returned, error) when its coroutine is over, however it ended."""

    def __init__(self, thread: _LoopThread) -> None:
        self.thread = thread
        self.ended: Future[tuple[Any, BaseException | None]] = Future()
        self.task: asyncio.Task[None] | None = None

    def cancel(self) -> None:
        """From any thread."""
        with contextlib.suppress(RuntimeError):  # its loop is closed: so it has ended
            self.thread.loop.call_soon_threadsafe(lambda: self.task is not None and self.task.cancel())


class _LoopThread:
    """A daemon thread with an event loop: a function that never ends doesn't keep the process alive."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._stopping = False
        self._n_running = 0  # agents; in the thread
        self._retired = False
        self._thread = threading.Thread(target=self._serve, name="agent functions", daemon=True)
        self._thread.start()

    def start(self, call: Callable[[], Awaitable[Any]]) -> _Running:
        running = _Running(self)

        async def guarded() -> None:
            try:
                running.ended.set_result((await call(), None))
            except BaseException as error:  # also SystemExit, which would end the loop and all other agents with it
                running.ended.set_result((None, error))

        def begin() -> None:
            self._n_running += 1
            running.task = self.loop.create_task(guarded())
            running.task.add_done_callback(settle)

        def settle(task: asyncio.Task[None]) -> None:
            if not running.ended.done():  # cancelled before its first step
                running.ended.set_result((None, asyncio.CancelledError()))
            self._n_running -= 1
            self._end_if_retired()

        self.loop.call_soon_threadsafe(begin)
        return running

    def retire(self) -> None:
        """From any thread: nothing more is started; it ends with the last agent that is on it."""

        def mark() -> None:
            self._retired = True
            self._end_if_retired()

        with contextlib.suppress(RuntimeError):  # it has ended meanwhile
            self.loop.call_soon_threadsafe(mark)

    def _end_if_retired(self) -> None:
        if self._retired and self._n_running == 0 and not self._stopping:
            self._cancel_all()

    def stop(self, grace_s: float) -> None:
        """Cancel everything, wait so long for it. Blocks."""
        self.loop.call_soon_threadsafe(self._cancel_all)
        self._thread.join(grace_s)

    def _cancel_all(self) -> None:
        self._stopping = True
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        ending = self.loop.create_task(_wait_all(tasks))
        ending.add_done_callback(lambda _: self.loop.stop())

    def _serve(self) -> None:
        while not self._stopping:
            try:
                self.loop.run_forever()
            except (SystemExit, KeyboardInterrupt):  # of a task that an agent started: others go on
                continue
        self.loop.close()


async def _wait_all(tasks: set[asyncio.Task[Any]]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)


# ------------------------------------------------------------------------------------------------ details


def _shown(value: Any) -> str:
    """A value in an error's text, also one whose own words fail."""
    try:
        return f"{value!r:.80}"
    except Exception as error:
        return f"a {type(value).__name__} whose repr raises {type(error).__name__}"


def _told(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as worse:
        return f"its text can't be made: {type(worse).__name__}"


def _takes(function: AgentFunction, name: str, *, by_name: bool = False) -> bool:
    """Whether the function takes this argument by name; with `by_name` not through **kwargs."""
    parameters = inspect.signature(function).parameters
    if not by_name and any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return True
    found = parameters.get(name)
    return found is not None and found.kind in (found.POSITIONAL_OR_KEYWORD, found.KEYWORD_ONLY)


def _is_number(value: Any) -> bool:
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # a whole number beyond what a float holds
        return False
