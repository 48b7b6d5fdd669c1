"""Anthropic's messages: request JSON in, response JSON or events out (docs.anthropic.com/en/api/messages).

| Anthropic's | recorded as OpenAI's |
|---|---|
| system | a first message of role system |
| user: text blocks | one user message; texts joined by line breaks |
| user: tool_result | a message of role tool, before and after as it stands |
| assistant: text, thinking, tool_use | content, reasoning_content, tool_calls |
| tools: name, description, input_schema | function tools |

Honoured: max_tokens (required), temperature, top_p, stream. Refused unless they ask for nothing: stop_sequences, top_k,
tool_choice, thinking. Passed over: metadata, service_tier, cache_control, is_error. Anything else: 400 with its name.
Events are made of the finished turn.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from miles_hpc.core.types import FinishReason
from miles_hpc.rollout.session.chat import (
    Answer,
    ChatRequest,
    SamplingWish,
    boolean,
    check_fields,
    number,
    slices,
    sse_event,
    whole,
)
from miles_hpc.rollout.session.errors import BadRequest
from miles_hpc.rollout.session.matching import Message

__all__ = ["error_body", "error_event", "message", "message_events", "read_request"]

_HONOURED = ("messages", "system", "tools", "max_tokens", "temperature", "top_p", "stream", "model")
_IGNORED = ("metadata", "service_tier")
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "stop_sequences": ([],),
    "thinking": ({"type": "disabled"},),
    "tool_choice": ({"type": "auto"},),
    "top_k": (),
}
_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def read_request(body: Any) -> ChatRequest:
    """Raises BadRequest."""
    given = check_fields(body, honoured=_HONOURED, neutral=_NEUTRAL, ignored=_IGNORED)
    if "max_tokens" not in given:
        raise BadRequest("max_tokens: expected a whole number of at least 1; it isn't there", param="max_tokens")
    top_p = number(given, "top_p", 0, 1)
    if top_p == 0:
        raise BadRequest("top_p=0: expected a number above 0; temperature 0 samples greedily", param="top_p")
    model = given.get("model")
    return ChatRequest(
        messages=_messages(given),
        tools=[_tool(tool) for tool in _objects(given.get("tools", []), "tools")],
        sampling=SamplingWish(
            max_new_tokens=whole(given, "max_tokens", 1), temperature=number(given, "temperature", 0, 2), top_p=top_p
        ),
        model=model if isinstance(model, str) else "",
        stream=boolean(given, "stream"),
    )


def _messages(given: Mapping[str, Any]) -> list[Message]:
    messages: list[Message] = []
    if system := given.get("system"):
        messages.append({"role": "system", "content": _texts(system, "system")})
    for i, item in enumerate(_objects(given.get("messages"), "messages")):
        where, role, content = f"messages.{i}", item.get("role"), item.get("content")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if role == "user":
            messages += _user(_objects(blocks, f"{where}.content"), where)
        elif role == "assistant":
            messages.append(_assistant(_objects(blocks, f"{where}.content"), where))
        else:
            raise BadRequest(f"{where}.role={role!r:.40}: expected user or assistant", param=f"{where}.role")
    return messages


def _user(blocks: list[dict[str, Any]], where: str) -> list[Message]:
    messages: list[Message] = []
    texts: list[str] = []

    def close_texts() -> None:
        if texts:
            messages.append({"role": "user", "content": "\n".join(texts)})
            texts.clear()

    for block in blocks:
        if block.get("type") == "text":
            texts.append(_text(block, "text", where))
        elif block.get("type") == "tool_result":
            close_texts()
            content = block.get("content") or ""
            call = _text(block, "tool_use_id", where)
            messages.append({"role": "tool", "tool_call_id": call, "content": _texts(content, f"{where}.content")})
        else:
            raise _bad_block(block, where, "text or tool_result")
    close_texts()
    if not messages:
        raise BadRequest(f"{where}.content: expected at least one block", param=f"{where}.content")
    return messages


def _assistant(blocks: list[dict[str, Any]], where: str) -> Message:
    texts: dict[str, list[str]] = {"text": [], "thinking": []}
    calls: list[dict[str, Any]] = []
    for block in blocks:
        kind = block.get("type")
        if kind in ("text", "thinking"):
            texts[kind].append(_text(block, kind, where))
        elif kind == "tool_use":
            arguments = block.get("input", {})
            if not isinstance(arguments, dict):
                raise BadRequest(f"{where}.content: input of a tool_use: expected an object", param=f"{where}.content")
            # As tool_calls.assistant_message writes them: what a client sends back unchanged is what was recorded.
            function = {"name": _text(block, "name", where), "arguments": json.dumps(arguments, ensure_ascii=False)}
            calls.append({"id": _text(block, "id", where), "type": "function", "function": function})
        else:
            raise _bad_block(block, where, "text, thinking or tool_use")
    answer: dict[str, Any] = {"role": "assistant", "content": "".join(texts["text"]) or ("" if not calls else None)}
    if any(texts["thinking"]):
        answer["reasoning_content"] = "".join(texts["thinking"])
    return {**answer, "tool_calls": calls} if calls else answer


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type", "custom") not in ("custom", None):
        raise BadRequest(f"tools: type {tool['type']!r:.40} runs at Anthropic: expected tools of yours", param="tools")
    function: dict[str, Any] = {"name": _text(tool, "name", "tools")}
    if isinstance(tool.get("description"), str):
        function["description"] = tool["description"]
    schema = tool.get("input_schema")
    if not isinstance(schema, dict):
        raise BadRequest("tools: input_schema: expected an object", param="tools")
    return {"type": "function", "function": {**function, "parameters": schema}}


def _texts(value: Any, where: str) -> str:
    if isinstance(value, str):
        return value
    texts = []
    for block in _objects(value, where):
        if block.get("type") != "text":
            raise _bad_block(block, where, "text")
        texts.append(_text(block, "text", where))
    return "\n".join(texts)


def _objects(value: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise BadRequest(f"{where}: expected a list of objects, found {type(value).__name__}", param=where)
    return value


def _text(fields: Mapping[str, Any], name: str, where: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str):
        raise BadRequest(f"{where}: {name}={value!r:.40}: expected text", param=where)
    return value


def _bad_block(block: Mapping[str, Any], where: str, expected: str) -> BadRequest:
    return BadRequest(f"{where}: block of type {block.get('type')!r:.40}: expected {expected}", param=where)


# ------------------------------------------------------------------------------------------------ answers


def message(answer: Answer) -> dict[str, Any]:
    """The response object."""
    whole_message = {**_head(answer), "content": _blocks(answer), "stop_reason": _stop(answer), "usage": _usage(answer)}
    return whole_message if answer.session is None else {**whole_message, "session": dict(answer.session)}


def message_events(answer: Answer) -> Iterator[bytes]:
    """The same as server-sent events."""
    usage = _usage(answer)
    begun = {**_head(answer), "content": [], "stop_reason": None, "usage": {**usage, "output_tokens": 0}}
    yield _event("message_start", message=begun)
    for index, block in enumerate(_blocks(answer)):
        start, deltas = _in_parts(block)
        yield _event("content_block_start", index=index, content_block=start)
        for delta in deltas:
            yield _event("content_block_delta", index=index, delta=delta)
        yield _event("content_block_stop", index=index)
    ended = {"stop_reason": _stop(answer), "stop_sequence": None}
    note = {} if answer.session is None else {"session": dict(answer.session)}
    yield _event("message_delta", delta=ended, usage={"output_tokens": usage["output_tokens"]}, **note)
    yield _event("message_stop")


def error_body(status: int, text: str, param: str | None = None) -> dict[str, Any]:
    """An error in Anthropic's shape; it has no place for the field's name but the text."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": text}}


def error_event(status: int, text: str) -> bytes:
    """An error after the stream began."""
    return sse_event(error_body(status, text), "error")


def _event(name: str, **fields: Any) -> bytes:
    return sse_event({"type": name, **fields}, name)


def _head(answer: Answer) -> dict[str, Any]:
    return {
        "id": f"msg_{answer.answer_id}",
        "type": "message",
        "role": "assistant",
        "model": answer.model,
        "stop_sequence": None,
    }


def _blocks(answer: Answer) -> list[dict[str, Any]]:
    said = answer.message
    blocks: list[dict[str, Any]] = []
    if thinking := said.get("reasoning_content"):
        blocks.append({"type": "thinking", "thinking": thinking, "signature": ""})
    if text := said.get("content"):
        blocks.append({"type": "text", "text": text})
    for call in said.get("tool_calls") or ():
        function = call["function"]
        arguments = json.loads(function["arguments"])
        blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": arguments})
    return blocks


def _in_parts(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A block as its stream starts it, and its deltas."""
    if block["type"] == "tool_use":
        text = json.dumps(block["input"], ensure_ascii=False)
        return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": part} for part in slices(text)]
    kind = block["type"]
    return {**block, kind: ""}, [{"type": f"{kind}_delta", kind: part} for part in slices(block[kind])]


def _stop(answer: Answer) -> str:
    if answer.finish_reason is not FinishReason.STOP:
        return "max_tokens"
    return "tool_use" if answer.message.get("tool_calls") else "end_turn"


def _usage(answer: Answer) -> dict[str, Any]:
    return {
        "input_tokens": answer.prompt_tokens - answer.cached_tokens,
        "output_tokens": answer.completion_tokens,
        "cache_read_input_tokens": answer.cached_tokens,
        "cache_creation_input_tokens": 0,
    }
