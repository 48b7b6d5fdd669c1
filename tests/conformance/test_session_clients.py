"""Outside agent programs as they are: the `openai` and `anthropic` packages against the session server."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from miles_hpc.rollout.session.settings import SessionLimits
from tests.fakes.session_service import Served, check_samples, play

openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")

CALL = '<tool_call>{"name": "run", "arguments": {"command": "ls", "n": 2.0}}</tool_call>'
PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "run", "description": "d", "parameters": PARAMETERS}}]
ANTHROPIC_TOOLS = [{"name": "run", "description": "d", "input_schema": PARAMETERS}]


def openai_client(session: tuple[str, dict[str, str]], **more: Any) -> Any:
    url, headers = session
    key = headers["Authorization"].removeprefix("Bearer ")
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, timeout=60, **more)


def anthropic_client(session: tuple[str, dict[str, str]], **more: Any) -> Any:
    url, headers = session
    key = headers["Authorization"].removeprefix("Bearer ")
    return anthropic.AsyncAnthropic(base_url=url, api_key=key, timeout=60, **more)


async def openai_agent(client: Any, *, stream: bool) -> list[Any]:
    """Two turns with a tool between them, as agent programs do it; returns the messages."""
    messages: list[Any] = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "what is there?"}]
    while True:
        if stream:
            message = await streamed(client, messages)
        else:
            done = await client.chat.completions.create(model="m", messages=messages, tools=TOOLS, temperature=0.7)
            message = done.choices[0].message.model_dump(exclude_none=True)
            assert done.choices[0].finish_reason == ("tool_calls" if message.get("tool_calls") else "stop")
            assert done.usage.total_tokens == done.usage.prompt_tokens + done.usage.completion_tokens
        messages.append(message)
        if not message.get("tool_calls"):
            return messages
        for call in message["tool_calls"]:
            command = json.loads(call["function"]["arguments"])["command"]
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": f"ran {command}"})


async def streamed(client: Any, messages: list[Any]) -> dict[str, Any]:
    """The message that a client puts together from chunks."""
    content, calls, finish = "", {}, None
    async for chunk in await client.chat.completions.create(model="m", messages=messages, tools=TOOLS, stream=True):
        choice = chunk.choices[0]
        content += choice.delta.content or ""
        for part in choice.delta.tool_calls or ():
            call = calls.setdefault(part.index, {"type": "function", "function": {"name": "", "arguments": ""}})
            if part.id:
                call["id"] = part.id
            call["function"]["name"] += part.function.name or ""
            call["function"]["arguments"] += part.function.arguments or ""
        finish = choice.finish_reason or finish
    assert finish == ("tool_calls" if calls else "stop")
    message: dict[str, Any] = {"role": "assistant", "content": content}
    return {**message, "tool_calls": [calls[i] for i in sorted(calls)]} if calls else message


async def anthropic_agent(client: Any, *, stream: bool) -> list[Any]:
    """The same through the other API."""
    messages: list[Any] = [{"role": "user", "content": "what is there?"}]
    while True:
        asked = {"model": "m", "max_tokens": 200, "messages": messages, "tools": ANTHROPIC_TOOLS, "system": "be brief"}
        if stream:
            async with client.messages.stream(**asked) as events:
                async for _ in events:
                    pass
                done = await events.get_final_message()
        else:
            done = await client.messages.create(**asked)
        messages.append(
            {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in done.content]}
        )
        calls = [block for block in done.content if block.type == "tool_use"]
        assert done.stop_reason == ("tool_use" if calls else "end_turn")
        assert done.usage.output_tokens > 0
        if not calls:
            return messages
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": f"ran {call.input['command']}"} for call in calls
        ]
        messages.append({"role": "user", "content": results})


AGENTS = [
    (openai_client, openai_agent, "strict"),
    (openai_client, openai_agent, "loose_tool_call"),
    (anthropic_client, anthropic_agent, "strict"),
    (anthropic_client, anthropic_agent, "loose_tool_call"),
]


@pytest.mark.parametrize(("client", "agent", "matcher"), AGENTS)
@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_plays_a_session(tmp_path: Path, client: Any, agent: Any, matcher: str, stream: bool) -> None:
    async def scenario(served: Served) -> None:
        served.script.texts = [f"I look.\n{CALL}", f"{CALL}\n{CALL}", "a.txt is there"]
        session = await served.open(matcher=matcher)
        async with client(session) as connected:
            messages = await agent(connected, stream=stream)
        assert "a.txt is there" in json.dumps(messages[-1])
        samples = await served.samples(session)
        assert len(samples) == 1 and len(samples[0].meta.turns) == 3
        assert samples[0].loss_mask.sum() == sum(len(output) for _, output in served.script.seen)
        check_samples(samples, served.script.seen)
        # What came between is the template's: one prompt, with the tools' results in it.
        text = served.script.tokenizer.decode(samples[0].tokens)
        assert text.count("ran ls") == 3 and text.count("be brief") == 1

    play(tmp_path, scenario)


def test_reasoning_comes_back_through_anthropics_blocks(tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        served.script.texts = [f"<think>\nhm\n</think>\n\n{CALL}", "so"]
        session = await served.open()
        async with anthropic_client(session) as client:
            messages = await anthropic_agent(client, stream=False)
        assert [block["type"] for block in messages[1]["content"]] == ["thinking", "tool_use"]
        (sample,) = await served.samples(session)
        assert len(sample.meta.turns) == 2
        check_samples([sample], served.script.seen)

    play(tmp_path, scenario)


def test_clients_raise_what_they_have_for_each_status(tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        session = await served.open()
        hi = [{"role": "user", "content": "hi"}]
        async with openai_client(session) as client:
            with pytest.raises(openai.BadRequestError, match="n=2 can't be honoured"):
                await client.chat.completions.create(model="m", messages=hi, n=2)
            cut = await client.chat.completions.create(model="m", messages=hi, max_tokens=1)
            talk = [*hi, cut.choices[0].message.model_dump(exclude_none=True), *hi]
            before = served.engines[0].calls
            with pytest.raises(openai.ConflictError, match="was cut"):  # and isn't asked again
                await client.chat.completions.create(model="m", messages=talk)
            assert served.engines[0].calls == before
        async with anthropic_client(session) as client:
            with pytest.raises(anthropic.BadRequestError, match="stop_sequences"):
                await client.messages.create(model="m", max_tokens=5, messages=hi, stop_sequences=["x"])
        wrong = (session[0], {"Authorization": "Bearer wrong"})
        async with openai_client(wrong) as client:
            with pytest.raises(openai.AuthenticationError):
                await client.chat.completions.create(model="m", messages=hi)
        async with anthropic_client(wrong) as client:
            with pytest.raises(anthropic.AuthenticationError):
                await client.messages.create(model="m", max_tokens=5, messages=hi)

    play(tmp_path, scenario)


def test_clients_try_again_while_there_is_no_engine(tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        session = await served.open()
        engine = served.engines[0]
        served.gateway.remove_engine("e0")
        hi = [{"role": "user", "content": "hi"}]
        async with openai_client(session, max_retries=6) as client, anthropic_client(session, max_retries=6) as other:
            asking = asyncio.create_task(client.chat.completions.create(model="m", messages=hi))
            await asyncio.sleep(0.5)
            assert not asking.done()
            served.gateway.add_engine("e0", engine, served.gateway.current)
            assert (await asking).choices[0].message.content == "yes"
            assert (await other.messages.create(model="m", max_tokens=9, messages=hi)).content[0].text == "yes"

    play(tmp_path, scenario, limits=SessionLimits(request_s=0.1))


def test_errors_within_a_stream_are_raised(tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        session = await served.open()
        hi = [{"role": "user", "content": "hi"}]
        async with openai_client(session) as client:
            with pytest.raises(openai.APIError, match="none of 0 engines"):
                async for _ in await client.chat.completions.create(model="m", messages=hi, stream=True):
                    pass
        async with anthropic_client(session) as client:
            with pytest.raises(anthropic.APIError, match="none of 0 engines"):
                async with client.messages.stream(model="m", max_tokens=5, messages=hi) as events:
                    async for _ in events:
                        pass

    play(tmp_path, scenario, engines=0, limits=SessionLimits(request_s=0.2, keep_alive_s=0.02))
