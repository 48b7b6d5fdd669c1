"""The session server while things happen: engines fail, clients leave, streams, long prompts, restarts."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from miles_hpc.rollout.scripted import Faults
from miles_hpc.rollout.session import conversation
from miles_hpc.rollout.session.settings import SessionLimits
from tests.fakes.session import said
from tests.fakes.session_service import Served, check_samples, play, until

HI = [said("hi")]
CALL = '<tool_call>{"name": "run", "arguments": {"command": "ls"}}</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "run", "description": "d", "parameters": {"type": "object"}}}]


# ------------------------------------------------------------------------------------------------ engines


def test_without_engine_a_request_waits_and_then_is_told(tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        session = await served.open()
        url, headers = session
        async with served.http.post(f"{url}/v1/messages", headers=headers, json={"messages": HI, "max_tokens": 5}) as r:
            body = await r.json()
            assert (r.status, body["error"]["type"], r.headers["x-should-retry"]) == (503, "overloaded_error", "true")
        assert served.book.n_in_flight == 0

    play(tmp_path, scenario, engines=0, limits=SessionLimits(request_s=0.2))


def test_an_engine_that_is_lost_in_a_session_is_not_noticed_by_the_client(tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        sessions = [await served.open() for _ in range(6)]
        talks = [[*HI, await served.chat(session, HI), said("go on")] for session in sessions]
        await served.engines[0].close()
        await asyncio.gather(*(served.chat(s, t) for s, t in zip(sessions, talks, strict=True)))
        assert served.gateway.engines == ("e1",)
        for session in sessions:
            samples = await served.samples(session)
            assert len(samples) == 1 and len(samples[0].meta.turns) == 2
            check_samples(samples, served.script.seen)

    play(tmp_path, scenario, engines=2)


def test_a_client_that_goes_away_frees_the_engine(tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        url, headers = session = await served.open()
        for stream in (False, True):
            served.engines[0].faults.hold_after_tokens = 1
            before = served.engines[0].calls
            body = {"messages": HI, "stream": stream}
            async with aiohttp.ClientSession() as leaving:
                asking = asyncio.create_task(leaving.post(f"{url}/v1/chat/completions", headers=headers, json=body))
                await until(lambda before=before: served.engines[0].calls > before)
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
            await until(lambda: not served.engines[0]._requests and served.book.n_in_flight == 0)
        served.engines[0].faults.hold_after_tokens = None
        await served.chat(session, HI)
        (sample,) = await served.samples(session)
        assert len(sample.meta.turns) == 1
        check_samples([sample], served.script.seen)

    play(tmp_path, scenario, slots=1)


def test_engines_deadline_gives_what_was_sampled(tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        served.script.default = "some words and more"
        session = await served.open()
        url, headers = session
        status, body = await served.post(f"{url}/v1/chat/completions", headers, {"messages": HI})
        assert status == 200 and body["choices"][0]["finish_reason"] == "length"
        (sample,) = await served.samples(session)
        assert sample.meta.status == "aborted" and sample.loss_mask.sum() == 2

    play(tmp_path, scenario, faults=Faults(hold_after_tokens=2), limits=SessionLimits(request_s=0.3))


# ------------------------------------------------------------------------------------------------ streams


async def events_of(response: aiohttp.ClientResponse) -> tuple[int, list[tuple[str, Any]]]:
    """(comments, events) of a stream, as a client reads it."""
    comments, found = 0, []
    for block in (await response.text()).split("\n\n")[:-1]:
        if block.startswith(":"):
            comments += 1
            continue
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        found.append((fields.get("event", ""), fields["data"]))
    return comments, [(name, data if data == "[DONE]" else json.loads(data)) for name, data in found]


def test_streams_hear_something_until_the_turn_is_there(tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        served.script.texts = [f"I look.\n{CALL}", "so"]
        url, headers = await served.open()
        body = {"messages": HI, "tools": TOOLS, "stream": True, "stream_options": {"include_usage": True}}
        async with served.http.post(f"{url}/v1/chat/completions", headers=headers, json=body) as response:
            assert response.status == 200 and response.content_type == "text/event-stream"
            comments, events = await events_of(response)
        assert comments >= 1 and events[-1] == ("", "[DONE]")
        chunks = [data for _, data in events[:-1]]
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert chunks[-1]["usage"]["completion_tokens"] == len(served.script.seen[-1][1])
        assert chunks[-2]["choices"][0]["finish_reason"] == "tool_calls" and chunks[-2]["session"]["recorded"]
        (url, headers) = await served.open()
        body = {"messages": HI, "max_tokens": 50, "stream": True}
        async with served.http.post(f"{url}/v1/messages", headers=headers, json=body) as response:
            comments, events = await events_of(response)
        assert comments >= 1 and [name for name, _ in events] == [
            "message_start",
            "content_block_start",
            "content_block_delta",
            "content_block_stop",
            "message_delta",
            "message_stop",
        ]

    play(tmp_path, scenario, limits=SessionLimits(keep_alive_s=0.02), token_delay_s=0.01)


def test_errors_of_streams(tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        url, headers = await served.open()
        for path, more in (("/v1/chat/completions", {}), ("/v1/messages", {"max_tokens": 5})):
            body = {"messages": [said("x", "assistant")], "stream": True, **more}
            async with served.http.post(url + path, headers=headers, json=body) as response:
                assert response.status == 400  # before the stream began
            body = {"messages": HI, "stream": True, **more}
            async with served.http.post(url + path, headers=headers, json=body) as response:
                assert response.status == 200
                comments, events = await events_of(response)
            assert comments >= 1 and len(events) == 1 and "none of 0 engines" in events[0][1]["error"]["message"]

    play(tmp_path, scenario, engines=0, limits=SessionLimits(request_s=0.2, keep_alive_s=0.02))


# ------------------------------------------------------------------------------------------------ the loop


def test_long_prompts_are_rendered_in_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a client that goes away meanwhile leaves the session in order."""
    monkeypatch.setattr(conversation, "THREAD_BYTES", 1000)

    async def scenario(served: Served) -> None:
        session = await served.open()
        url, headers = session
        long = [said("a few words of it " * 2000)]
        async with aiohttp.ClientSession() as leaving:
            asking = asyncio.create_task(
                leaving.post(f"{url}/v1/chat/completions", headers=headers, json={"messages": long})
            )
            await until(lambda: served.book.n_in_flight == 1)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        message = await served.chat(session, long)
        await served.chat(session, [*long, message, said("go on")])
        samples = await served.samples(session)
        assert len(samples) == 1
        check_samples(samples, served.script.seen)

    play(tmp_path, scenario)


def test_a_restarted_server_goes_on(tmp_path: Path) -> None:
    kept: dict[str, Any] = {}

    async def before(served: Served) -> None:
        kept["linear"] = await served.open(metadata={"task": 1})
        kept["tree"] = await served.open(history="tree")
        kept["talk"] = {}
        for name in ("linear", "tree"):
            kept["talk"][name] = [*HI, await served.chat(kept[name], HI), said("go on")]
        gone = await served.open()
        async with served.http.delete(gone[0], headers=gone[1]) as response:
            assert response.status == 204
        kept["seen"], kept["url"] = served.script.seen, served.url

    async def after(served: Served) -> None:
        assert len(served.book) == 2
        for name in ("linear", "tree"):
            url, headers = kept[name]
            session = (url.replace(kept["url"], served.url), headers)
            await served.chat(session, kept["talk"][name])
            samples = await served.samples(session)
            assert len(samples) == 1 and len(samples[0].meta.turns) == 2
            check_samples(samples, [*kept["seen"], *served.script.seen])
            assert (samples[0].routed_experts == served.engines[0]._experts(samples[0].tokens[:-1])).all()

    play(tmp_path, before, experts=8)
    play(tmp_path, after, experts=8)
