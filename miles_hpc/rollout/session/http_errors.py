"""Errors as HTTP answers: each API's own shape, one status for one kind of error, no detail to strangers.

| error | status |
|---|---|
| SessionError | its own (session/errors.py) |
| a body beyond the bound | 413 |
| UserError elsewhere | 400 |
| anything else | 500, with its class alone; the log has the rest |

OpenAI's and Anthropic's own clients try again on 409, 429 and from 500 on; `x-should-retry` tells them where it helps
(429, 503).
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web

from miles_hpc.core.errors import UserError
from miles_hpc.rollout.session import anthropic_api, openai_api
from miles_hpc.rollout.session.errors import SessionError, TooLarge

__all__ = ["RETRY_STATUSES", "error_response", "errors_as_answers", "json_response", "status_of"]

logger = logging.getLogger(__name__)

#: Where the same request may go well a moment later.
RETRY_STATUSES = (429, 503)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def status_of(error: Exception) -> tuple[int, str, str | None]:
    """HTTP status, text for the client, and the name of the field that it is about."""
    if isinstance(error, SessionError):
        return error.status, str(error), getattr(error, "param", None)
    if isinstance(error, UserError):
        return 400, str(error), None
    logger.error("session server: a request failed", exc_info=error)
    return 500, f"the session server failed ({type(error).__name__}); its log says more", None


def error_response(path: str, error: Exception) -> web.Response:
    """The answer in the shape of the API that `path` belongs to."""
    status, text, param = status_of(error)
    shape = anthropic_api.error_body if path.endswith("/v1/messages") else openai_api.error_body
    return json_response(shape(status, text, param), status)


def json_response(body: dict[str, Any], status: int = 200) -> web.Response:
    """JSON with the header that tells clients whether to try again."""
    headers = {} if status < 400 else {"x-should-retry": "true" if status in RETRY_STATUSES else "false"}
    data = msgspec.json.encode(body)
    return web.Response(body=data, status=status, headers=headers, content_type="application/json", charset="utf-8")


def errors_as_answers() -> Any:
    """The middleware."""

    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except web.HTTPRequestEntityTooLarge as error:
            return error_response(request.path, TooLarge(f"request body: {error.text}"))
        except web.HTTPException as error:  # no such path, or another method
            body = openai_api.error_body(error.status, f"{request.method} {request.path}: {error.reason}")
            return json_response(body, error.status)
        except Exception as error:
            return error_response(request.path, error)

    return web.middleware(middleware)
