"""The two chat APIs as pure functions: what is honoured, what is refused by name, what a finished turn becomes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from miles_hpc.core.types import FinishReason
from miles_hpc.rollout.session import anthropic_api, openai_api
from miles_hpc.rollout.session.chat import Answer, SamplingWish, TokenLogProb
from miles_hpc.rollout.session.errors import BadRequest

HI = [{"role": "user", "content": "hi"}]
CALL = {"id": "c1", "type": "function", "function": {"name": "run", "arguments": '{"command": "ls é"}'}}
ASSISTANT = {"role": "assistant", "content": "so", "reasoning_content": "why", "tool_calls": [CALL]}


def answer(message: dict[str, Any] | None = None, **changes: Any) -> Answer:
    values: dict[str, Any] = {
        "answer_id": "x1",
        "created_s": 5,
        "model": "m",
        "message": message or {"role": "assistant", "content": "yes"},
        "finish_reason": FinishReason.STOP,
        "prompt_tokens": 10,
        "completion_tokens": 3,
        "cached_tokens": 4,
    }
    return Answer(**(values | changes))


def events(stream: list[bytes]) -> list[tuple[str, Any]]:
    """(name, data) of server-sent events, read as a client reads them."""
    found = []
    for block in b"".join(stream).decode().split("\n\n")[:-1]:
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        data = fields["data"]
        found.append((fields.get("event", ""), data if data == "[DONE]" else json.loads(data)))
    return found


# ------------------------------------------------------------------------------------------------ OpenAI


def test_openai_fields_are_honoured() -> None:
    tools = [{"type": "function", "function": {"name": "run"}}]
    request = openai_api.read_request(
        {
            "messages": HI,
            "tools": tools,
            "model": "m",
            "max_tokens": 9,
            "max_completion_tokens": 7,
            "temperature": 0,
            "top_p": 0.5,
            "seed": 2**40 + 3,
            "stop_token_ids": [4, 5],
            "stream": True,
            "stream_options": {"include_usage": True},
            "logprobs": True,
            "n": 1,
            "stop": None,
            "frequency_penalty": 0,
            "tool_choice": "auto",
            "user": "me",
            "metadata": {"a": "b"},
        }
    )
    assert (request.messages, request.tools, request.model) == (HI, tools, "m")
    assert request.sampling == SamplingWish(max_new_tokens=7, temperature=0.0, top_p=0.5, seed=3, stop_token_ids=(4, 5))
    assert request.stream and request.include_usage and request.log_probs
    plain = openai_api.read_request({"messages": HI})
    assert plain.sampling == SamplingWish()
    assert not (plain.stream or plain.include_usage or plain.log_probs or plain.tools)


REFUSED = [
    ({"n": 2}, "n"),
    ({"n": True}, "n"),
    ({"stop": ["x"]}, "stop"),
    ({"logit_bias": {"5": 1}}, "logit_bias"),
    ({"presence_penalty": 0.1}, "presence_penalty"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"parallel_tool_calls": False}, "parallel_tool_calls"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"reasoning_effort": "low"}, "reasoning_effort"),
    ({"best_of": 2}, "best_of"),
    ({"temperature": 2.5}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"seed": "a"}, "seed"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": list(range(100))}, "stop_token_ids"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": []}, "stream_options"),
    ({"messages": "hi"}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": ["hi"]}, "messages"),
    ({"tools": {}}, "tools"),
]


@pytest.mark.parametrize(("fields", "name"), REFUSED)
def test_openai_refuses_what_it_cannot_honour(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(BadRequest) as caught:
        openai_api.read_request({"messages": HI, **fields})
    assert caught.value.param == name
    assert name in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("body", [[], "x", None, 3])
def test_a_body_is_an_object(body: Any) -> None:
    for read in (openai_api.read_request, anthropic_api.read_request, openai_api.read_sampling):
        with pytest.raises(BadRequest, match="expected a JSON object"):
            read(body)


def test_wishes_over_defaults_within_the_room() -> None:
    session = SamplingWish(max_new_tokens=50, temperature=0.7, stop_token_ids=(9,))
    wish = SamplingWish(temperature=0.0, seed=3).over(session)
    assert wish == SamplingWish(max_new_tokens=50, temperature=0.0, seed=3, stop_token_ids=(9,))
    params = wish.params(room_tokens=20, stop_ids=(2, 9))
    assert (params.max_new_tokens, params.temperature, params.top_p) == (20, 0.0, 1.0)
    assert (params.stop_token_ids, params.seed) == ((2, 9), 3)
    assert SamplingWish().params(room_tokens=8, stop_ids=()).max_new_tokens == 8
    with pytest.raises(BadRequest, match="seed"):
        openai_api.read_sampling({"seed": 3})


# message, finish reason of the engine, OpenAI's, Anthropic's
FINISHED = [
    ({"content": "a"}, FinishReason.STOP, "stop", "end_turn"),
    ({"content": None, "tool_calls": [CALL]}, FinishReason.STOP, "tool_calls", "tool_use"),
    ({"content": None, "tool_calls": [CALL]}, FinishReason.LENGTH, "length", "max_tokens"),
    ({"content": "a"}, FinishReason.LENGTH, "length", "max_tokens"),
    ({"content": "a"}, FinishReason.ABORT, "length", "max_tokens"),
]


@pytest.mark.parametrize(("message", "reason", "openai", "anthropic"), FINISHED)
def test_finish_reasons(message: dict[str, Any], reason: FinishReason, openai: str, anthropic: str) -> None:
    turn = answer({"role": "assistant", **message}, finish_reason=reason)
    assert openai_api.completion(turn)["choices"][0]["finish_reason"] == openai
    assert anthropic_api.message(turn)["stop_reason"] == anthropic


def test_completion() -> None:
    log_probs = (TokenLogProb("y", -0.5), TokenLogProb("\ufffd", -1.0))
    body = openai_api.completion(answer(ASSISTANT, log_probs=log_probs, session={"turn": 0}))
    assert body["id"] == "chatcmpl-x1" and body["object"] == "chat.completion" and body["created"] == 5
    assert body["choices"][0]["message"] == ASSISTANT
    assert body["choices"][0]["logprobs"]["content"] == [
        {"token": "y", "logprob": -0.5, "bytes": [121], "top_logprobs": []},
        {"token": "\ufffd", "logprob": -1.0, "bytes": None, "top_logprobs": []},
    ]
    assert body["usage"] == {
        "prompt_tokens": 10,
        "completion_tokens": 3,
        "total_tokens": 13,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    assert body["session"] == {"turn": 0}


@pytest.mark.parametrize("length", [0, 1, 255, 256, 257, 1000])
def test_chunks_join_to_the_completion(length: int) -> None:
    said = ASSISTANT | {"content": "é" * length, "reasoning_content": "r" * length}
    turn = answer(said, log_probs=(TokenLogProb("y", -0.5),))
    chunks = [data for _, data in events(list(openai_api.completion_events(turn, include_usage=True)))]
    assert chunks[-1] == "[DONE]"
    whole = openai_api.completion(turn)
    assert chunks[-2]["choices"] == [] and chunks[-2]["usage"] == whole["usage"]
    choices = [chunk["choices"][0] for chunk in chunks[:-2]]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    for name in ("content", "reasoning_content"):
        assert "".join(choice["delta"].get(name, "") for choice in choices) == said[name]
    calls = [call for choice in choices for call in choice["delta"].get("tool_calls", ())]
    assert calls[0]["id"] == "c1" and calls[0]["function"]["name"] == "run"
    assert "".join(call["function"]["arguments"] for call in calls) == CALL["function"]["arguments"]
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["tool_calls"]
    assert choices[-1]["logprobs"] == whole["choices"][0]["logprobs"]
    assert {chunk["object"] for chunk in chunks[:-1]} == {"chat.completion.chunk"}


# ------------------------------------------------------------------------------------------------ Anthropic


def test_anthropic_becomes_openai() -> None:
    request = anthropic_api.read_request(
        {
            "model": "m",
            "max_tokens": 20,
            "temperature": 0.5,
            "top_p": 0.9,
            "stream": True,
            "metadata": {"user_id": "x"},
            "system": [{"type": "text", "text": "be"}, {"type": "text", "text": "brief", "cache_control": {}}],
            "tools": [{"name": "run", "description": "d", "input_schema": {"type": "object"}}],
            "messages": [
                {"role": "user", "content": "hi"},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "why", "signature": ""},
                        {"type": "text", "text": "so"},
                        {"type": "tool_use", "id": "c1", "name": "run", "input": {"command": "ls é"}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "out"}]},
                        {"type": "tool_result", "tool_use_id": "c2"},
                        {"type": "text", "text": "a"},
                        {"type": "text", "text": "b"},
                    ],
                },
            ],
        }
    )
    assert request.messages == [
        {"role": "system", "content": "be\nbrief"},
        {"role": "user", "content": "hi"},
        ASSISTANT,
        {"role": "tool", "tool_call_id": "c1", "content": "out"},
        {"role": "tool", "tool_call_id": "c2", "content": ""},
        {"role": "user", "content": "a\nb"},
    ]
    function = {"name": "run", "description": "d", "parameters": {"type": "object"}}
    assert request.tools == [{"type": "function", "function": function}]
    assert request.sampling == SamplingWish(max_new_tokens=20, temperature=0.5, top_p=0.9)
    assert request.stream and request.model == "m"


ANTHROPIC_REFUSED = [
    ({"max_tokens": None}, "max_tokens"),
    ({"stop_sequences": ["x"]}, "stop_sequences"),
    ({"top_k": 5}, "top_k"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "thinking"),
    ({"container": "x"}, "container"),
    ({"messages": [{"role": "system", "content": "x"}]}, "role"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "image"),
    ({"messages": [{"role": "user", "content": []}]}, "at least one block"),
    ({"messages": [{"role": "user", "content": 5}]}, "expected a list"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id"),
    ({"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking"}]}]}, "redacted_thinking"),
    ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "input": []}]}]}, "expected an object"),
    ({"system": [{"type": "image"}]}, "image"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "runs at Anthropic"),
    ({"tools": [{"name": "x"}]}, "input_schema"),
]


@pytest.mark.parametrize(("fields", "text"), ANTHROPIC_REFUSED)
def test_anthropic_refuses_what_it_cannot_honour(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(BadRequest, match=text):
        anthropic_api.read_request({"messages": HI, "max_tokens": 5, **fields})


def test_what_an_anthropic_client_sends_back_is_what_was_recorded() -> None:
    turn = answer(ASSISTANT)
    blocks = json.loads(json.dumps(anthropic_api.message(turn)["content"]))
    messages = [*HI, {"role": "assistant", "content": blocks}, *HI]
    assert anthropic_api.read_request({"messages": messages, "max_tokens": 5}).messages[1] == ASSISTANT


@pytest.mark.parametrize("length", [0, 1, 256, 1000])
def test_anthropic_events(length: int) -> None:
    turn = answer(ASSISTANT | {"content": "é" * length}, session={"turn": 3})
    whole = anthropic_api.message(turn)
    assert whole["session"] == {"turn": 3}
    found = events(list(anthropic_api.message_events(turn)))
    names = [name for name, _ in found]
    assert all(name == data["type"] for name, data in found)
    assert names[0] == "message_start" and names[-2:] == ["message_delta", "message_stop"]
    assert found[0][1]["message"]["content"] == [] and found[0][1]["message"]["stop_reason"] is None
    assert found[-2][1]["session"] == {"turn": 3}
    assert found[-2][1]["delta"]["stop_reason"] == whole["stop_reason"] == "tool_use"
    blocks: list[dict[str, Any]] = []
    for name, data in found[1:-2]:
        if name == "content_block_start":
            assert data["index"] == len(blocks)
            blocks.append({**data["content_block"], "json": ""})
        elif name == "content_block_delta":
            delta, block = data["delta"], blocks[data["index"]]
            kind, text = next((k, v) for k, v in delta.items() if k != "type")
            block["json" if kind == "partial_json" else kind] += text
        else:
            assert name == "content_block_stop"
    for block in blocks:
        text = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(text)
    assert blocks == whole["content"]
    assert whole["usage"]["input_tokens"] == 6 and whole["usage"]["cache_read_input_tokens"] == 4


@pytest.mark.parametrize(("status", "openai", "anthropic"), [
    (400, "invalid_request_error", "invalid_request_error"),
    (401, "authentication_error", "authentication_error"),
    (409, "invalid_request_error", "invalid_request_error"),
    (429, "rate_limit_error", "rate_limit_error"),
    (500, "server_error", "api_error"),
    (503, "server_error", "overloaded_error"),
])  # fmt: skip
def test_errors_have_each_apis_own_shape(status: int, openai: str, anthropic: str) -> None:
    assert openai_api.error_body(status, "t", "p") == {
        "error": {"message": "t", "type": openai, "param": "p", "code": None}
    }
    assert anthropic_api.error_body(status, "t") == {"type": "error", "error": {"type": anthropic, "message": "t"}}
    assert events([openai_api.error_event(status, "t")])[0][1]["error"]["message"] == "t"
    assert events([anthropic_api.error_event(status, "t")])[0][0] == "error"
