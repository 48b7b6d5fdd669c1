"""Agent functions: loaded, called, cancelled, judged. Their session is an HTTP server that answers by rote."""

from __future__ import annotations

import asyncio
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from miles_hpc.core.deadline import Deadline
from miles_hpc.core.errors import UserError
from miles_hpc.core.types import ChatMessage, SampleStatus, SamplingParams
from miles_hpc.rollout.agent_function import (
    AgentOutcome,
    AgentRunner,
    AgentSession,
    AgentTask,
    load_agent,
    read_outcome,
    request_kwargs,
)

TOKEN = "token-of-one-session"
TASK = AgentTask(
    prompt=(ChatMessage(role="user", content="What is 3 + 4?"),),
    sampling=SamplingParams(max_new_tokens=50, temperature=0.5, top_p=0.9, seed=7),
    metadata={"row": 5, "nested": {"a": [1]}},
)


class Endpoint(BaseHTTPRequestHandler):
    """Answers chat completions with a boxed 7, to whoever has the token; keeps what it was asked."""

    asked: list[dict[str, Any]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        allowed = (
            self.headers.get("Authorization") == f"Bearer {TOKEN}" and self.path == "/sessions/s1/v1/chat/completions"
        )
        if allowed:
            self.asked.append(body)
        answer = {"choices": [{"message": {"role": "assistant", "content": r"It is \boxed{7}."}}]}
        data = json.dumps(answer if allowed else {"error": {"message": "no"}}).encode()
        self.send_response(200 if allowed else 401)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def asked() -> Iterator[tuple[AgentSession, list[dict[str, Any]]]]:
    handler = type("Handler", (Endpoint,), {"asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_port}/sessions/s1/v1"
        yield AgentSession(url, TOKEN), handler.asked  # type: ignore[attr-defined]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def post(url: str, body: dict[str, Any], headers: dict[str, str]) -> str:
    request = urllib.request.Request(f"{url}/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=20) as answer:
        return str(json.load(answer)["choices"][0]["message"]["content"])


# ------------------------------------------------------------------------------------------------ agents


async def with_key(base_url: str, prompt: Any, request_kwargs: Any, metadata: Any, **kwargs: Any) -> dict[str, Any]:
    """Asks twice, as an agent that was written for this project."""
    headers = {"Authorization": f"Bearer {kwargs['api_key']}"}
    body = {"model": "policy", "messages": prompt, **request_kwargs}
    first = await asyncio.to_thread(post, base_url, body, headers)
    body["messages"] = [*prompt, {"role": "assistant", "content": first}, {"role": "user", "content": "Sure?"}]
    second = await asyncio.to_thread(post, base_url, body, headers)
    metadata["nested"]["a"].append("mine")  # its own copy
    style = kwargs.get("style", "none")
    return {"reward": 0.5, "said": second, "style": style, "agent_metrics": {"total_tool_time": 1.5, "turns": 2}}


async def as_for_miles(base_url: str, prompt: Any, request_kwargs: Any = None, metadata: Any = None) -> None:
    """Knows nothing of tokens; hands request_kwargs on, as OpenAI's client takes them."""
    kwargs = dict(request_kwargs)
    headers = kwargs.pop("extra_headers")
    await asyncio.to_thread(post, base_url, {"messages": prompt, **kwargs}, headers)


async def raises(base_url: str, prompt: Any, request_kwargs: Any, metadata: Any, **kwargs: Any) -> None:
    raise ValueError(f"no luck\nwith {kwargs['api_key']}")


async def exits(base_url: str, prompt: Any, request_kwargs: Any, metadata: Any, **kwargs: Any) -> None:
    raise SystemExit(3)


async def waits(base_url: str, prompt: Any, request_kwargs: Any, metadata: Any, **kwargs: Any) -> None:
    metadata["events"].append("begin")
    try:
        await asyncio.sleep(60)
    finally:
        metadata["events"].append("end")


async def swallows(base_url: str, prompt: Any, request_kwargs: Any, metadata: Any, **kwargs: Any) -> None:
    for _ in range(40):
        try:
            await asyncio.sleep(0.05)
        except asyncio.CancelledError:
            pass


async def blocks(base_url: str, prompt: Any, request_kwargs: Any, metadata: Any, **kwargs: Any) -> None:
    time.sleep(1.5)


class Callable_:
    async def __call__(self, base_url: str, prompt: Any, request_kwargs: Any, metadata: Any) -> None:
        return None


as_object = Callable_()


def not_async(base_url: str, prompt: Any, request_kwargs: Any, metadata: Any) -> None:
    return None


async def too_few(base_url: str, prompt: Any) -> None:
    return None


NOWHERE = AgentSession("http://127.0.0.1:9/sessions/s/v1", TOKEN)


def play(function: Any, scene: Callable[[AgentRunner], Awaitable[None]], **options: Any) -> None:
    async def main() -> None:
        runner = AgentRunner(function, **options)
        try:
            async with asyncio.timeout(60):
                await scene(runner)
        finally:
            await runner.close()
            await runner.close()

    asyncio.run(main())


# ------------------------------------------------------------------------------------------------ calls


def test_an_agent_talks_to_its_session(asked: tuple[AgentSession, list[dict[str, Any]]]) -> None:
    session, requests = asked

    async def scene(runner: AgentRunner) -> None:
        outcome = await runner.run(TASK, session, Deadline(30, "agent"))
        assert (outcome.status, outcome.reward, outcome.tool_time_s) == (SampleStatus.COMPLETED, 0.5, 1.5)
        assert outcome.metadata["said"] == r"It is \boxed{7}." and outcome.metadata["style"] == "terse"
        assert "reward" not in outcome.metadata and outcome.duration_s > 0

    play(with_key, scene, options={"style": "terse"})
    expected = {"model": "policy", "max_tokens": 50, "temperature": 0.5, "top_p": 0.9, "seed": 7}
    assert [{k: v for k, v in r.items() if k != "messages"} for r in requests] == [expected, expected]
    assert requests[0]["messages"] == [{"role": "user", "content": "What is 3 + 4?"}]
    assert TASK.metadata == {"row": 5, "nested": {"a": [1]}}


def test_an_agent_that_knows_no_token_sends_it_all_the_same(asked: tuple[AgentSession, list[dict[str, Any]]]) -> None:
    session, requests = asked

    async def scene(runner: AgentRunner) -> None:
        outcome = await runner.run(TASK, session, Deadline(30, "agent"))
        assert outcome.status is SampleStatus.COMPLETED, outcome.error
        assert outcome.reward is None and outcome.metadata == {}
        wrong = await runner.run(TASK, AgentSession(session.base_url, "other"), Deadline(30, "agent"))
        assert wrong.status is SampleStatus.FAILED and "401" in wrong.error

    play(as_for_miles, scene)
    assert len(requests) == 1 and "extra_headers" not in requests[0]


def test_what_an_agent_raises_is_one_line_without_the_token() -> None:
    async def scene(runner: AgentRunner) -> None:
        outcome = await runner.run(TASK, NOWHERE, Deadline(30, "agent"))
        assert outcome.status is SampleStatus.FAILED
        assert outcome.error == "agent function raised ValueError: no luck with ***"
        assert TOKEN not in repr(NOWHERE)

    play(raises, scene)


def test_an_agent_that_exits_ends_neither_the_process_nor_the_others() -> None:
    async def scene(runner: AgentRunner) -> None:
        for _ in range(2):
            outcome = await runner.run(TASK, NOWHERE, Deadline(30, "agent"))
            assert outcome.status is SampleStatus.FAILED and "SystemExit: 3" in outcome.error

    play(exits, scene)


async def openai_with_key(
    base_url: str, prompt: Any, request_kwargs: Any, metadata: Any, api_key: str
) -> dict[str, Any]:
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        answer = await client.chat.completions.create(model="policy", messages=prompt, **request_kwargs)
    return {"said": answer.choices[0].message.content}


async def openai_for_miles(base_url: str, prompt: Any, request_kwargs: Any, metadata: Any) -> dict[str, Any]:
    """As an agent that was written for an open endpoint: any key will do there."""
    return await openai_with_key(base_url, prompt, request_kwargs, metadata, "EMPTY")


@pytest.mark.parametrize("function", [openai_with_key, openai_for_miles])
def test_openais_client_is_let_in_both_ways(function: Any, asked: tuple[AgentSession, list[dict[str, Any]]]) -> None:
    pytest.importorskip("openai")
    session, requests = asked

    async def scene(runner: AgentRunner) -> None:
        outcome = await runner.run(TASK, session, Deadline(60, "agent"))
        assert outcome.status is SampleStatus.COMPLETED, outcome.error
        assert outcome.metadata == {"said": r"It is \boxed{7}."}
        refused = await runner.run(TASK, AgentSession(session.base_url, "other"), Deadline(60, "agent"))
        assert refused.status is SampleStatus.FAILED and "401" in refused.error

    play(function, scene)
    (body,) = requests
    assert {"model": "policy", "max_tokens": 50, "temperature": 0.5, "top_p": 0.9, "seed": 7}.items() <= body.items()


# ------------------------------------------------------------------------------------------------ ends


def shared(events: list[str]) -> AgentTask:
    return AgentTask(prompt=TASK.prompt, sampling=TASK.sampling, metadata={"events": _List(events)})


class _List(list[str]):
    """A list whose deep copy writes through to the original."""

    def __init__(self, original: list[str]) -> None:
        super().__init__()
        self.original = original

    def append(self, item: str) -> None:
        self.original.append(item)

    def __deepcopy__(self, memo: Any) -> _List:
        return self


def test_the_deadline_ends_an_agent_and_waits_for_its_end() -> None:
    events: list[str] = []

    async def scene(runner: AgentRunner) -> None:
        outcome = await runner.run(shared(events), NOWHERE, Deadline(0.2, "agent of group 5"))
        assert outcome.status is SampleStatus.TRUNCATED and "agent of group 5: nothing after" in outcome.error
        assert events == ["begin", "end"] and runner.left_behind == 0

    play(waits, scene)


def test_a_deadline_that_is_over_already() -> None:
    async def scene(runner: AgentRunner) -> None:
        outcome = await runner.run(TASK, NOWHERE, Deadline(0.0, "agent"))
        assert outcome.status is SampleStatus.TRUNCATED and runner.left_behind == 0

    play(waits, scene, grace_s=5.0)


def test_cancelling_the_caller_ends_the_agent() -> None:
    events: list[str] = []

    async def scene(runner: AgentRunner) -> None:
        running = asyncio.create_task(runner.run(shared(events), NOWHERE, Deadline(30, "agent")))
        while not events:
            await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert events == ["begin", "end"]

    play(waits, scene)


def test_closing_ends_what_runs() -> None:
    events: list[str] = []

    async def main() -> None:
        runner = AgentRunner(waits)
        running = asyncio.create_task(runner.run(shared(events), NOWHERE, Deadline(30, "agent")))
        while not events:
            await asyncio.sleep(0.01)
        await runner.close()
        assert (await running).status is SampleStatus.FAILED and events == ["begin", "end"]

    asyncio.run(main())


@pytest.mark.parametrize("function", [swallows, blocks])
def test_an_agent_that_does_not_end_is_left_and_the_next_one_runs(function: Any) -> None:
    async def scene(runner: AgentRunner) -> None:
        beats = asyncio.create_task(_longest_pause())
        began = time.monotonic()
        outcome = await runner.run(TASK, NOWHERE, Deadline(0.2, "agent"))
        assert outcome.status is SampleStatus.TRUNCATED and runner.left_behind == 1
        assert time.monotonic() - began < 1.2
        runner._function = with_nothing
        assert (await runner.run(TASK, NOWHERE, Deadline(1.0, "agent"))).status is SampleStatus.COMPLETED
        beats.cancel()
        assert await beats < 0.5  # the host's loop went on

    play(function, scene, grace_s=0.2)


async def with_nothing(base_url: str, prompt: Any, request_kwargs: Any, metadata: Any, **kwargs: Any) -> None:
    return None


async def _longest_pause() -> float:
    longest, last = 0.0, time.monotonic()
    try:
        while True:
            await asyncio.sleep(0.01)
            longest, last = max(longest, time.monotonic() - last), time.monotonic()
    except asyncio.CancelledError:
        return longest


def test_agents_wait_for_room_no_longer_than_their_deadline() -> None:
    events: list[str] = []

    async def scene(runner: AgentRunner) -> None:
        first = asyncio.create_task(runner.run(shared(events), NOWHERE, Deadline(30, "first")))
        while not events:
            await asyncio.sleep(0.01)
        second = await runner.run(shared(events), NOWHERE, Deadline(0.1, "second"))
        assert second.status is SampleStatus.TRUNCATED and "second" in second.error and events == ["begin"]
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        third = await runner.run(shared(events), NOWHERE, Deadline(0.1, "third"))
        assert third.status is SampleStatus.TRUNCATED and events == ["begin", "end"] * 2

    play(waits, scene, max_concurrent=1)


# ------------------------------------------------------------------------------------------------ what it says


def test_what_is_returned_and_kept() -> None:
    assert read_outcome(None, 1.0) == AgentOutcome(SampleStatus.COMPLETED, duration_s=1.0)
    returned = {"reward": 1, "x": [1, "é"], "agent_metrics": {"total_tool_time": 0}}
    outcome = read_outcome(returned, 1.0)
    assert outcome.reward == 1.0 and outcome.metadata == {"x": [1, "é"], "agent_metrics": {"total_tool_time": 0}}
    returned["x"].append("later")  # type: ignore[attr-defined]
    assert outcome.metadata["x"] == [1, "é"]


@pytest.mark.parametrize(
    ("returned", "error"),
    [
        (5, "returned 5: expected a table or None"),
        ([("reward", 1)], "expected a table or None"),
        ({1: 2}, "expected a table or None"),
        ({"reward": "1"}, "reward '1': expected a finite number"),
        ({"reward": True}, "reward True"),
        ({"reward": float("nan")}, "reward nan"),
        ({"reward": {"a": 1}}, "expected a finite number"),
        ({"agent_metrics": [1]}, "agent_metrics [1]: expected a table"),
        ({"agent_metrics": {"total_tool_time": -1}}, "expected seconds, 0 or more"),
        ({"agent_metrics": {"total_tool_time": "1"}}, "expected seconds, 0 or more"),
        ({"x": object()}, "can't be kept"),
        ({"x": 2**70}, "can't be kept"),
        ({"x": "y" * 70_000}, "expected at most 65536"),
    ],
)
def test_wrong_returns_are_failures_that_say_so(returned: Any, error: str) -> None:
    outcome = read_outcome(returned, 0.0)
    assert outcome.status is SampleStatus.FAILED and error in outcome.error and "\n" not in outcome.error


# ------------------------------------------------------------------------------------------------ loading


def test_both_ways_to_name_a_function() -> None:
    assert load_agent(f"{__name__}:with_key", {"style": 1}) is with_key
    assert load_agent(f"{__name__}.as_for_miles") is as_for_miles
    assert load_agent(f"{__name__}:as_object") is as_object


@pytest.mark.parametrize(
    ("path", "options", "complaint"),
    [
        ("run", {}, "expected module:function"),
        (":run", {}, "expected module:function"),
        ("nosuchmodule:run", {}, "can't be loaded: No module named"),
        (f"{__name__}:nothing", {}, "can't be loaded"),
        (f"{__name__}:TOKEN", {}, "expected an async function"),
        (f"{__name__}:not_async", {}, "expected an async function"),
        (f"{__name__}:too_few", {}, "doesn't take request_kwargs, metadata by name"),
        (f"{__name__}:as_for_miles", {"style": 1}, "doesn't take style by name"),
    ],
)
def test_functions_that_can_not_be_used(path: str, options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UserError) as caught:
        load_agent(path, options)
    assert complaint in str(caught.value)


def test_request_kwargs_have_openais_names() -> None:
    assert request_kwargs(SamplingParams(max_new_tokens=5)) == {"max_tokens": 5, "temperature": 1.0, "top_p": 1.0}
