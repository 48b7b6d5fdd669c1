"""The session server over real HTTP and scripted engines: who is let in, what is answered, what is recorded."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from miles_hpc.rollout.session.payload import read_samples
from miles_hpc.rollout.session.settings import SessionLimits
from tests.fakes.session import said
from tests.fakes.session_service import Served, check_samples, play, until

HI = [said("hi")]
CALL = '<tool_call>{"name": "run", "arguments": {"command": "ls"}}</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "run", "description": "d", "parameters": {"type": "object"}}}]

# ------------------------------------------------------------------------------------------------ letting in


def test_everything_but_health_needs_a_token(tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        http, url = served.http, served.url
        async with http.get(f"{url}/health") as response:
            body = await response.json()
            assert response.status == 200
            assert body == {"status": "ok", "session_server_instance_id": served.server.instance_id}
        session, headers = await served.open()
        _, other = await served.open()
        good = headers["Authorization"].removeprefix("Bearer ")
        for wrong in ({}, other, {"Authorization": "Bearer "}, {"Authorization": f"Basic {good}"}, {"x-api-key": "é"}):
            for method, path, api in [
                ("GET", "", "openai"),
                ("DELETE", "", "openai"),
                ("POST", "/v1/chat/completions", "openai"),
                ("POST", "/v1/messages", "anthropic"),
                ("POST", "/samples", "openai"),
            ]:
                async with http.request(method, session + path, headers=wrong, data=b"{}") as response:
                    body = await response.json()
                    assert response.status == 401 and response.headers["x-should-retry"] == "false"
                    assert body["error"]["type"] == "authentication_error"
                    assert (body.get("type") == "error") == (api == "anthropic")
                    assert good not in json.dumps(body)
        for wrong in ({}, headers):
            async with http.post(f"{url}/sessions", headers=wrong) as response:
                assert response.status == 401
        for right in (headers, {"x-api-key": good}):
            async with http.get(session, headers=right) as response:
                assert response.status == 200
        assert len(served.book) == 2

    play(tmp_path, scenario)


def test_other_paths_and_methods(tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        for method, path, status in [
            ("GET", "/", 404),
            ("PUT", "/sessions", 405),
            ("GET", "/sessions/nobody", 404),
            ("POST", "/sessions/nobody/v1/chat/completions", 404),
        ]:
            headers = {"Authorization": "Bearer x"}
            async with served.http.request(method, served.url + path, headers=headers, json={}) as response:
                body = await response.json()
                assert (response.status, "message" in body["error"]) == (status, True)

    play(tmp_path, scenario)


BAD_SETTINGS = [
    ({"history": "circle"}, "history"),
    ({"matcher": "os:system"}, "matcher"),  # a dotted path is for the run file only
    ({"tool_parser": "builtins:eval"}, "tool_parser"),
    ({"chat_family": "nobody"}, "chat_family"),
    ({"max_rollback": -1}, "max_rollback"),
    ({"max_rollback": True}, "max_rollback"),
    ({"metadata": []}, "metadata"),
    ({"metadata": {"x": "y" * 100_000}}, "metadata"),
    ({"sampling": {"n": 2}}, "n"),
    ({"colour": "red"}, "colour"),
    ([], None),
]


@pytest.mark.parametrize(("settings", "param"), BAD_SETTINGS, ids=str)
def test_bad_settings_open_nothing(tmp_path: Path, settings: Any, param: str | None) -> None:
    async def scenario(served: Served) -> None:
        headers = {"Authorization": "Bearer the-servers-own"}
        status, body = await served.post(f"{served.url}/sessions", headers, settings)
        assert (status, body["error"]["param"], len(served.book)) == (400, param, 0)

    play(tmp_path, scenario)


def test_a_family_that_the_template_needs_is_told_when_a_session_is_opened(tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        headers = {"Authorization": "Bearer the-servers-own"}
        status, body = await served.post(f"{served.url}/sessions", headers, {})
        assert (status, len(served.book)) == (400, 0)
        assert "of the chat families, qwen3 would do" in body["error"]["message"]
        session = await served.open(chat_family="qwen3")
        message = await served.chat(session, HI)
        await served.chat(session, [*HI, message, said("and now?")])

    play(tmp_path, scenario, style="thinking")


# ------------------------------------------------------------------------------------------------ conversations


def test_a_conversation_with_tools(tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        served.script.texts = [f"I look.\n{CALL}", "<think>\nwell\n</think>\n\nthere"]
        session = await served.open(metadata={"task": 7}, sampling={"temperature": 0.5, "max_tokens": 200})
        talk = [said("be brief", "system"), said("what is there?")]
        message = await served.chat(session, talk, tools=TOOLS)
        (call,) = message["tool_calls"]
        assert (message["content"], call["function"]["name"]) == ("I look.\n", "run")
        assert json.loads(call["function"]["arguments"]) == {"command": "ls"} and call["id"].startswith("call_")
        talk += [message, said("a.txt", "tool", tool_call_id=call["id"])]
        url, headers = session
        body = {"messages": talk, "tools": TOOLS, "logprobs": True, "model": "m"}
        status, body = await served.post(f"{url}/v1/chat/completions", headers, body)
        assert status == 200 and body["model"] == "m"
        choice = body["choices"][0]
        assert choice["message"] == {"role": "assistant", "content": "there", "reasoning_content": "well"}
        assert choice["finish_reason"] == "stop"
        played = served.script.seen[-1]
        assert "".join(t["token"] for t in choice["logprobs"]["content"]).endswith("there<|im_end|>")
        usage = body["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(played[0]), len(played[1]))
        assert usage["prompt_tokens_details"]["cached_tokens"] > 0
        assert body["session"]["recorded"] and body["session"]["turn"] == 1
        assert body["session"]["weight_versions"] == [["1.1", 0, len(played[1])]]
        async with served.http.get(f"{url}?tokens=1", headers=headers) as response:
            shown = await response.json()
        assert [turn["parent"] for turn in shown["turns"]] == [None, 0] and shown["metadata"] == {"task": 7}
        assert shown["leaves"][0]["accumulated_token_ids"] == [*played[0], *played[1]]
        (sample,) = await served.samples(session)
        assert sample.tokens.tolist() == [*played[0], *played[1]]
        check_samples([sample], served.script.seen)

    play(tmp_path, scenario)


def test_a_tree_gives_a_sample_for_each_branch(tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        served.script.texts = ["a", "b", "c"]
        session = await served.open(history="tree")
        message = await served.chat(session, HI)
        talk = [*HI, message]
        await asyncio.gather(*(served.chat(session, [*talk, said(text)]) for text in ("one", "two")))
        samples = await served.samples(session)
        assert len(samples) == 2
        check_samples(samples, served.script.seen)
        assert sum(int(sample.loss_mask.sum()) for sample in samples) == sum(len(o) for _, o in served.script.seen)
        assert len(await served.samples(session, drop_retries=True)) == 1
        shortest = min(len(sample.tokens) for sample in samples)
        assert all(
            len(sample.tokens) <= shortest - 1 for sample in await served.samples(session, max_seq_len=shortest - 1)
        )

    play(tmp_path, scenario, token_delay_s=0.002)


def test_routed_experts_come_with_the_samples(tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        session = await served.open()
        message = await served.chat(session, HI)
        await served.chat(session, [*HI, message, said("go on")])
        (sample,) = await served.samples(session)
        rows = sample.routed_experts
        assert rows is not None and rows.shape == (len(sample.tokens) - 1, 3, 2)
        expected = served.engines[0]._experts(sample.tokens[:-1])
        assert rows.dtype == expected.dtype and (rows == expected).all()
        turns = next(iter(served.book._sessions.values())).session.history.turns()
        assert [turn.routed_experts.in_memory for turn in turns] == [False, False]  # the journal has them

    play(tmp_path, scenario, experts=8)


REFUSALS = [
    ({"messages": [said("x"), said("y", "assistant")]}, 400, "the assistant's"),
    ({"messages": HI, "n": 3}, 400, "n=3"),
    ({"messages": [said("hi", "robot")]}, 400, "role 'robot'"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "type 'text'"),
    ({"messages": [said("x" * 4000)]}, 400, "the prompt has"),
    ({"messages": [said("x")] * 40}, 413, "40 messages"),
]


@pytest.mark.parametrize(("body", "status", "text"), REFUSALS)
def test_refused_requests_record_nothing(tmp_path: Path, body: Any, status: int, text: str) -> None:
    async def scenario(served: Served) -> None:
        url, headers = await served.open()
        seen, answered = await served.post(f"{url}/v1/chat/completions", headers, body)
        assert (seen, text in answered["error"]["message"]) == (status, True), answered
        assert served.engines[0].calls == 0
        async with served.http.get(url, headers=headers) as response:
            assert (await response.json())["turns"] == []

    play(tmp_path, scenario, limits=SessionLimits(context_tokens=500, messages=32))


@pytest.mark.parametrize("data", [b"", b"{", b'{"messages": NaN}', b"[" * 100_000, b'{"messages": "\\ud800"}', b"\xff"])
def test_a_body_that_is_no_json(tmp_path: Path, data: bytes) -> None:
    async def scenario(served: Served) -> None:
        url, headers = await served.open()
        for path in ("/v1/chat/completions", "/v1/messages"):
            async with served.http.post(url + path, headers=headers, data=data) as response:
                body = await response.json()
                assert response.status == 400 and "isn't JSON" in body["error"]["message"]

    play(tmp_path, scenario)


def test_bounds(tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        session = await served.open()
        url, headers = session
        async with served.http.post(f"{url}/v1/messages", headers=headers, data=b" " * 5000) as response:
            body = await response.json()
            assert (response.status, body["error"]["type"]) == (413, "request_too_large")
        await served.open()
        status, body = await served.post(f"{served.url}/sessions", {"x-api-key": "the-servers-own"}, {})
        assert status == 429 and "2 sessions" in body["error"]["message"]
        served.engines[0].faults.hold_after_tokens = 0
        waiting = [asyncio.create_task(served.chat(session, HI)) for _ in range(2)]
        await until(lambda: served.engines[0].calls == 2)
        async with served.http.post(f"{url}/v1/chat/completions", headers=headers, json={"messages": HI}) as response:
            assert (response.status, response.headers["x-should-retry"]) == (429, "true")
        served.engines[0].faults.hold_after_tokens = None
        served.engines[0]._asked.set()
        await asyncio.gather(*waiting)
        await served.chat(session, HI)
        message = await served.chat(session, HI)
        status, body = await served.post(
            f"{url}/v1/chat/completions", headers, {"messages": [*HI, message, said("x" * 300)]}
        )
        assert status == 200
        status, body = await served.post(f"{url}/v1/chat/completions", headers, {"messages": HI})
        assert status == 413 and "recorded tokens" in body["error"]["message"]

    limits = SessionLimits(body_bytes=4096, sessions=2, in_flight=2, session_tokens=150)
    play(tmp_path, scenario, limits=limits, settings=None)


def test_a_turn_that_was_cut_is_not_gone_on_from(tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        served.script.default = "a long answer that goes on"
        session = await served.open()
        url, headers = session
        chat = f"{url}/v1/chat/completions"
        status, body = await served.post(chat, headers, {"messages": HI, "max_tokens": 3})
        assert status == 200 and body["choices"][0]["finish_reason"] == "length"
        cut = body["choices"][0]["message"]
        status, body = await served.post(chat, headers, {"messages": [*HI, cut, said("go on")]})
        assert status == 409 and "was cut" in body["error"]["message"]
        status, body = await served.post(chat, headers, {"messages": [said("no"), cut, said("go on")]})
        assert status == 200  # nothing is repeated: one turn is taken back

    play(tmp_path, scenario)


def test_closed_sessions_are_gone_and_late_answers_are_not_recorded(tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        session = await served.open()
        url, headers = session
        served.engines[0].faults.hold_after_tokens = 1
        chat = f"{url}/v1/chat/completions"
        asking = asyncio.create_task(served.post(chat, headers, {"messages": HI}))
        await until(lambda: bool(served.engines[0]._requests))
        entry = served.book.find(url.rsplit("/", 1)[1], headers["Authorization"].removeprefix("Bearer "))
        async with served.http.delete(url, headers=headers) as response:
            assert response.status == 204
        status, body = await asking  # its engine was told that the session is over: it answers with what it has
        assert status == 200 and body["session"]["reason"] == "the session is closed"
        assert not body["session"]["recorded"] and body["session"]["turn"] is None
        assert entry.session.history.turns() == [] and len(served.book) == 0
        for method, path in [("GET", ""), ("DELETE", ""), ("POST", "/v1/chat/completions"), ("POST", "/samples")]:
            async with served.http.request(method, url + path, headers=headers, json={"messages": HI}) as response:
                assert response.status == 404

    play(tmp_path, scenario)


def test_a_linear_history_that_moved_on_answers_and_does_not_record(tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        url, headers = await served.open()
        chat = f"{url}/v1/chat/completions"
        results = await asyncio.gather(*(served.post(chat, headers, {"messages": HI}) for _ in range(3)))
        assert [status for status, _ in results] == [200] * 3
        notes = [body["session"] for _, body in results]
        assert sorted(note["recorded"] for note in notes) == [False, False, True]
        assert {note["reason"] for note in notes} == {"", "another turn was recorded meanwhile"}
        check_samples(await served.samples((url, headers)), served.script.seen)

    play(tmp_path, scenario, token_delay_s=0.01)


def test_sessions_without_requests_expire(tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        session = await served.open()
        await served.chat(session, HI)
        await until(lambda: len(served.book) == 0)
        async with served.http.get(session[0], headers=session[1]) as response:
            assert response.status == 404

    play(tmp_path, scenario, limits=SessionLimits(ttl_s=0.3))


def test_samples_that_cannot_be_made(tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        url, headers = session = await served.open(metadata={"task": 1, "reward": 0})
        assert await served.samples(session) == []
        await served.chat(session, HI)
        for body, status in [
            ({"max_seq_len": 0}, 400),
            ({"max_seq_len": "x"}, 400),
            ({"reward": 1}, 400),
            ([1], 400),
            ({"metadata": 1}, 400),
        ]:
            seen, answered = await served.post(f"{url}/samples", headers, body)
            assert seen == status, answered
        assert await served.samples(session, max_seq_len=1) == []
        async with served.http.post(f"{url}/samples", headers=headers, json={"metadata": {"reward": 0.5}}) as response:
            meta, _ = read_samples(await response.read())
        assert meta.metadata == {"task": 1, "reward": 0.5} and url.endswith(meta.session_id)

    play(tmp_path, scenario)
