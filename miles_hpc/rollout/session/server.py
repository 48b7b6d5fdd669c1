"""The session server's HTTP surface: what Miles users know, over this project's sessions.

| route | token | answer |
|---|---|---|
| GET /health | none | `{"status": "ok", "session_server_instance_id"}`; nothing else is told to strangers |
| POST /sessions | the server's | `{"session_id", "token"}`; the body, if any, is settings.SessionSettings |
| GET /sessions/{id} | the session's | settings and turns; with `?tokens=1` the token ids of every path |
| DELETE /sessions/{id} | the session's | 204 |
| POST /sessions/{id}/v1/chat/completions | the session's | OpenAI's (openai_api.py) |
| POST /sessions/{id}/v1/messages | the session's | Anthropic's (anthropic_api.py) |
| POST /sessions/{id}/samples | the session's | safetensors (payload.py); body: max_seq_len, drop_retries, metadata |

Engines don't stream to this server: a streaming client gets the finished turn in pieces, and comments (`: keep-alive`)
until then. An error that comes before the first comment has its own status; later ones are events.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
from aiohttp import web

from miles_hpc.rollout.session import anthropic_api, openai_api
from miles_hpc.rollout.session.book import OpenSession, SessionBook, digest_of
from miles_hpc.rollout.session.chat import Answer, ChatRequest, boolean, whole
from miles_hpc.rollout.session.conversation import answer
from miles_hpc.rollout.session.errors import BadRequest, Unauthorized
from miles_hpc.rollout.session.http_errors import errors_as_answers, json_response, status_of
from miles_hpc.rollout.session.payload import write_samples
from miles_hpc.rollout.session.settings import SessionSettings, read_settings
from miles_hpc.rollout.session.turn import input_ids

__all__ = ["SessionServer"]

_EXPIRE_S = 5.0  # how often idle sessions are looked for
_THREADS = 4


class SessionServer:
    """One server. `application` is an aiohttp application; `token` opens sessions and nothing else."""

    def __init__(
        self, book: SessionBook, *, defaults: SessionSettings, token: str, routed_experts: bool = True
    ) -> None:
        self.instance_id = secrets.token_hex(8)
        self._book = book
        self._defaults = defaults
        self._token_digest = digest_of(token)
        self._routed_experts = routed_experts
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="session-render")
        self._expiring: asyncio.Task[None] | None = None
        self.application = self._build()

    def _build(self) -> web.Application:
        application = web.Application(middlewares=[errors_as_answers()], client_max_size=self._book.limits.body_bytes)
        application.add_routes(
            [
                web.get("/health", self._health),
                web.post("/sessions", self._open),
                web.get("/sessions/{id}", self._show),
                web.delete("/sessions/{id}", self._delete),
                web.post("/sessions/{id}/v1/chat/completions", self._chat),
                web.post("/sessions/{id}/v1/messages", self._messages),
                web.post("/sessions/{id}/samples", self._samples),
            ]
        )
        application.on_startup.append(self._start)
        application.on_cleanup.append(self._stop)
        return application

    async def _start(self, application: web.Application) -> None:
        self._expiring = asyncio.create_task(self._expire())

    async def _stop(self, application: web.Application) -> None:
        if self._expiring is not None:
            self._expiring.cancel()
            await asyncio.gather(self._expiring, return_exceptions=True)
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(min(_EXPIRE_S, self._book.limits.ttl_s / 4))
            try:
                await self._book.expire()
            except Exception as error:
                status_of(error)  # into the log; looked for again

    # ------------------------------------------------------------------------------------------- sessions

    async def _health(self, request: web.Request) -> web.Response:
        return json_response({"status": "ok", "session_server_instance_id": self.instance_id})

    async def _open(self, request: web.Request) -> web.Response:
        token = _token(request)
        if token is None or not hmac.compare_digest(digest_of(token), self._token_digest):
            raise Unauthorized("expected this server's token, as 'Authorization: Bearer ...' or x-api-key")
        settings = read_settings(await _json(request, optional=True), self._defaults)
        session_id, session_token = await self._book.open(settings)
        return json_response({"session_id": session_id, "token": session_token})

    async def _show(self, request: web.Request) -> web.Response:
        entry = self._entry(request)
        async with entry.lock:
            body = _described(entry, with_tokens=request.query.get("tokens") == "1")
            body["starved"] = self._book.gateway.starved(entry.session_id)
        return json_response(body)

    async def _delete(self, request: web.Request) -> web.Response:
        await self._book.close(self._entry(request), "deleted")
        return web.Response(status=204)

    async def _samples(self, request: web.Request) -> web.Response:
        entry = self._entry(request)
        body = await _json(request, optional=True) or {}
        if not isinstance(body, dict):
            raise BadRequest(f"request body: expected a JSON object or nothing, found {type(body).__name__}")
        for name in body:
            if name not in ("max_seq_len", "drop_retries", "metadata"):
                raise BadRequest(f"field '{name}': expected max_seq_len, drop_retries or metadata", param=name)
        most, drop_retries = whole(body, "max_seq_len", 1), boolean(body, "drop_retries")
        more = body.get("metadata") or {}
        if not isinstance(more, dict):
            raise BadRequest("metadata: expected an object", param="metadata")

        def assemble() -> bytes:
            samples = entry.session.samples(most, drop_retries=drop_retries)
            return write_samples(entry.session_id, samples, {**entry.settings.metadata, **more})

        async with entry.lock:
            making = asyncio.get_running_loop().run_in_executor(self._threads, assemble)
            try:
                data = await asyncio.shield(making)
            finally:
                await asyncio.wait({making})  # the session is the thread's until it is done
        return web.Response(body=data, content_type="application/octet-stream")

    def _entry(self, request: web.Request) -> OpenSession:
        return self._book.find(request.match_info["id"], _token(request))

    # ------------------------------------------------------------------------------------------- conversations

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        entry = self._entry(request)
        wanted = openai_api.read_request(await _json(request))
        work = self._answer(entry, wanted, len(await request.read()))
        if not wanted.stream:
            return json_response(openai_api.completion(await work))

        def events(finished: Answer) -> Iterator[bytes]:
            return openai_api.completion_events(finished, include_usage=wanted.include_usage)

        return await self._stream(request, work, events, openai_api.error_event)

    async def _messages(self, request: web.Request) -> web.StreamResponse:
        entry = self._entry(request)
        wanted = anthropic_api.read_request(await _json(request))
        work = self._answer(entry, wanted, len(await request.read()))
        if not wanted.stream:
            return json_response(anthropic_api.message(await work))
        return await self._stream(request, work, anthropic_api.message_events, anthropic_api.error_event)

    def _answer(self, entry: OpenSession, wanted: ChatRequest, body_bytes: int) -> Coroutine[Any, Any, Answer]:
        return answer(
            self._book,
            entry,
            wanted,
            body_bytes=body_bytes,
            threads=self._threads,
            routed_experts=self._routed_experts,
        )

    async def _stream(
        self,
        request: web.Request,
        work: Coroutine[Any, Any, Answer],
        events: Callable[[Answer], Iterator[bytes]],
        error_event: Callable[[int, str], bytes],
    ) -> web.StreamResponse:
        """Comments while the turn is made, then the turn. When the client goes away, so does the work."""
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        )
        task = asyncio.create_task(work)
        try:
            done, _ = await asyncio.wait({task}, timeout=self._book.limits.keep_alive_s)
            if done and task.exception() is not None:
                task.result()
            await response.prepare(request)
            while not done:
                await response.write(b": keep-alive\n\n")
                done, _ = await asyncio.wait({task}, timeout=self._book.limits.keep_alive_s)
            if (error := task.exception()) is not None:
                status, text, _ = status_of(error if isinstance(error, Exception) else RuntimeError(str(error)))
                await response.write(error_event(status, text))
            else:
                for event in events(task.result()):
                    await response.write(event)
            await response.write_eof()
            return response
        except ConnectionError:  # the client went away while it was written to
            return response
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def _token(request: web.Request) -> str | None:
    """OpenAI's clients send their key as Bearer, Anthropic's as x-api-key."""
    kind, _, token = request.headers.get("Authorization", "").partition(" ")
    if kind.lower() == "bearer" and token.strip():
        return str(token.strip())
    key = request.headers.get("x-api-key")
    return None if key is None else str(key)


async def _json(request: web.Request, *, optional: bool = False) -> Any:
    data = await request.read()
    if optional and not data:
        return None
    try:
        return msgspec.json.decode(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise BadRequest(f"request body of {len(data)} bytes isn't JSON: {error}") from error


def _described(entry: OpenSession, *, with_tokens: bool) -> dict[str, Any]:
    """What its owner sees of a session."""
    session = entry.session
    leaves = [
        {"turn": leaf.number, "n_tokens": leaf.n_tokens}
        | ({"accumulated_token_ids": input_ids(leaf).tolist()} if with_tokens else {})
        for leaf in session.history.leaves()
    ]
    turns = [
        {
            "turn": turn.number,
            "parent": None if turn.parent is None else turn.parent.number,
            "messages": turn.messages,
            "n_new": len(turn.new_ids),
            "n_output": len(turn.output_ids),
            "n_tokens": turn.n_tokens,
            "finish_reason": turn.finish_reason.value,
            "weight_versions": [[str(s.version), s.start, s.end] for s in turn.versions],
        }
        for turn in session.history.turns()
    ]
    settings = entry.settings
    return {
        "session_id": entry.session_id,
        "history": settings.history,
        "max_rollback": settings.max_rollback,
        "matcher": settings.matcher,
        "tool_parser": settings.tool_parser,
        "chat_family": settings.chat_family,
        "seed": settings.seed,
        "metadata": settings.metadata,
        "max_trim_tokens": entry.template.max_trim_tokens,
        "n_tokens": entry.n_tokens,
        "refused": entry.refused,
        "turns": turns,
        "leaves": leaves,
    }
