"""OpenAI's chat completions: request JSON in, response JSON or chunks out (platform.openai.com/docs/api-reference).

| field | here |
|---|---|
| messages, tools | the session's business; other content than text is refused there |
| max_tokens, max_completion_tokens, temperature, top_p, seed | honoured |
| stop_token_ids | honoured; as SGLang and vLLM have it |
| stream, stream_options.include_usage, logprobs | honoured |
| n, stop, top_logprobs, logit_bias, penalties, tool_choice, response_format, ... | only values that ask for nothing |
| model, user, metadata, store, service_tier, ... | passed over; `model` is given back |
| anything else | 400 with its name |

Chunks are made of the finished turn.
"""

from __future__ import annotations

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
    token_ids,
    whole,
)
from miles_hpc.rollout.session.errors import BadRequest

__all__ = ["completion", "completion_events", "error_body", "error_event", "read_request", "read_sampling"]

_SAMPLING = ("max_tokens", "max_completion_tokens", "temperature", "top_p", "stop_token_ids")
_HONOURED = (*_SAMPLING, "messages", "tools", "seed", "stream", "stream_options", "logprobs")
_IGNORED = (
    "metadata",
    "model",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
    "verbosity",
)
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "chat_template_kwargs": ({},),
    "frequency_penalty": (0,),
    "functions": ([],),
    "logit_bias": ({},),
    "min_p": (0,),
    "modalities": (["text"],),
    "n": (1,),
    "parallel_tool_calls": (True,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "stop": ([], ""),
    "tool_choice": ("auto",),
    "top_k": (-1,),
    "top_logprobs": (0,),
}
_TYPES = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


def read_request(body: Any) -> ChatRequest:
    """Raises BadRequest; messages themselves are looked at by the session."""
    given = check_fields(body, honoured=_HONOURED, neutral=_NEUTRAL, ignored=_IGNORED)
    messages, tools = given.get("messages"), given.get("tools", [])
    for name, value in (("messages", messages), ("tools", tools)):
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise BadRequest(f"{name}: expected a list of objects", param=name)
    options = given.get("stream_options", {})
    if not isinstance(options, dict):
        raise BadRequest("stream_options: expected an object", param="stream_options")
    return ChatRequest(
        messages=messages or [],
        tools=tools,
        sampling=_sampling(given, seed=whole(given, "seed", -(2**63), 2**63 - 1)),
        model=_text(body, "model"),
        stream=boolean(given, "stream"),
        include_usage=boolean(options, "include_usage"),
        log_probs=boolean(given, "logprobs"),
    )


def read_sampling(body: Any) -> SamplingWish:
    """Sampling defaults of a session, in the names above. A seed belongs to a request. Raises BadRequest."""
    return _sampling(check_fields(body, honoured=_SAMPLING, neutral=_NEUTRAL, ignored=()), seed=None)


def _sampling(given: Mapping[str, Any], *, seed: int | None) -> SamplingWish:
    limits = [v for name in ("max_tokens", "max_completion_tokens") if (v := whole(given, name, 1)) is not None]
    return SamplingWish(
        max_new_tokens=min(limits, default=None),
        temperature=number(given, "temperature", 0, 2),
        top_p=_share(given),
        seed=None if seed is None else seed & 0x7FFFFFFF,  # engines take 31 bits
        stop_token_ids=token_ids(given, "stop_token_ids"),
    )


def _share(given: Mapping[str, Any]) -> float | None:
    top_p = number(given, "top_p", 0, 1)
    if top_p == 0:
        raise BadRequest("top_p=0: expected a number above 0; temperature 0 samples greedily", param="top_p")
    return top_p


def _text(body: Mapping[str, Any], name: str) -> str:
    value = body.get(name)
    return value if isinstance(value, str) else ""


# ------------------------------------------------------------------------------------------------ answers


def completion(answer: Answer) -> dict[str, Any]:
    """The response object."""
    choice: dict[str, Any] = {
        "index": 0,
        "message": dict(answer.message),
        "finish_reason": _finish(answer),
        "logprobs": _log_probs(answer),
    }
    return {**_head(answer, "chat.completion"), "choices": [choice], "usage": _usage(answer), **_session(answer)}


def completion_events(answer: Answer, *, include_usage: bool = False) -> Iterator[bytes]:
    """The same as server-sent events: role, reasoning, content, tool calls, finish, usage if asked, `[DONE]`."""
    yield _chunk(answer, {"role": "assistant", "content": ""})
    for text in slices(answer.message.get("reasoning_content") or ""):
        yield _chunk(answer, {"reasoning_content": text})
    for text in slices(answer.message.get("content") or ""):
        yield _chunk(answer, {"content": text})
    for index, call in enumerate(answer.message.get("tool_calls") or ()):
        function = call["function"]
        head = {"index": index, "id": call["id"], "type": "function"}
        yield _chunk(answer, {"tool_calls": [{**head, "function": {"name": function["name"], "arguments": ""}}]})
        for text in slices(function["arguments"]):
            yield _chunk(answer, {"tool_calls": [{"index": index, "function": {"arguments": text}}]})
    yield _chunk(answer, {}, finish=_finish(answer), log_probs=_log_probs(answer), **_session(answer))
    if include_usage:
        yield sse_event({**_head(answer, "chat.completion.chunk"), "choices": [], "usage": _usage(answer)})
    yield sse_event("[DONE]")


def error_body(status: int, text: str, param: str | None = None) -> dict[str, Any]:
    """An error in OpenAI's shape."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": text, "type": kind, "param": param, "code": None}}


def error_event(status: int, text: str) -> bytes:
    """An error after the stream began; clients raise on a chunk with `error`."""
    return sse_event(error_body(status, text))


def _chunk(
    answer: Answer, delta: dict[str, Any], *, finish: str | None = None, log_probs: Any = None, **more: Any
) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": log_probs}
    return sse_event({**_head(answer, "chat.completion.chunk"), "choices": [choice], **more})


def _head(answer: Answer, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{answer.answer_id}",
        "object": kind,
        "created": answer.created_s,
        "model": answer.model,
    }


def _session(answer: Answer) -> dict[str, Any]:
    return {} if answer.session is None else {"session": dict(answer.session)}


def _finish(answer: Answer) -> str:
    if answer.finish_reason is not FinishReason.STOP:
        return "length"
    return "tool_calls" if answer.message.get("tool_calls") else "stop"


def _usage(answer: Answer) -> dict[str, Any]:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
    }


def _log_probs(answer: Answer) -> dict[str, Any] | None:
    if answer.log_probs is None:
        return None
    tokens = [
        {
            "token": token.text,
            "logprob": token.log_prob,
            # A part of a character has no text of its own, so its bytes aren't known here.
            "bytes": None if "\ufffd" in token.text else list(token.text.encode()),
            "top_logprobs": [],
        }
        for token in answer.log_probs
    ]
    return {"content": tokens, "refusal": None}
