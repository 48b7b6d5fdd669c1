"""The owner's side of a node's session server: opens sessions, reads their records, closes them.

    serve_at ─▶ open ─▶ SessionHandle ─▶ an agent talks to it ─▶ state, samples ─▶ delete

| a request meets | what becomes of it |
|---|---|
| no server yet, one that was killed, 503; 429 on opening | asked again, with pauses of 0.1 to 1 s, until its deadline |
| another error | SessionServerFailed, with the server's words |

A server that is started again goes on with its sessions, at the same port if it can; so the agents of these sessions
bridge its restart with the retries of their own clients. Their owner finds them at whatever port it has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from miles_hpc.core.deadline import Deadline
from miles_hpc.core.errors import IntegrityError, MilesError
from miles_hpc.core.types import FinishReason
from miles_hpc.rollout.session.payload import WireSample, read_samples

__all__ = ["SessionClient", "SessionHandle", "SessionServerFailed", "SessionState"]

_PAUSES_S = (0.1, 0.2, 0.5, 1.0)
_DELETE_S = 120.0  # longer than a server with a long journal takes to start again


class SessionServerFailed(MilesError):
    """The session server didn't do what was asked, or isn't there."""


@dataclass(frozen=True, slots=True)
class SessionHandle:
    """One open session: where its server was when it was opened, and the token that lets its agent in."""

    server: str  # http://127.0.0.1:PORT
    session_id: str
    token: str = field(repr=False)

    @property
    def path(self) -> str:
        """Below the server's address."""
        return f"/sessions/{self.session_id}"

    @property
    def base_url(self) -> str:
        """For clients of OpenAI's protocol."""
        return f"{self.server}{self.path}/v1"


class _Turn(msgspec.Struct, frozen=True):
    turn: int
    finish_reason: FinishReason


class _Shown(msgspec.Struct, frozen=True):
    """What is read of GET /sessions/{id}."""

    turns: tuple[_Turn, ...]
    refused: int
    starved: bool


@dataclass(frozen=True, slots=True)
class SessionState:
    """What a session has come to."""

    n_turns: int
    refused: bool  # a request was refused because there was no room for it
    cut: bool  # its newest turn was ended by a limit
    starved: bool  # its newest request has no answer because engines failed or weren't there


class SessionClient:
    """Belongs to one event loop. `serve_at` says where the server is, as often as that changes."""

    def __init__(self) -> None:
        self._url = ""
        self._token = ""
        self._there = asyncio.Event()
        self.interruptions = 0  # how often the server went away
        self._http: aiohttp.ClientSession | None = None
        self._deleting: set[asyncio.Task[None]] = set()

    def serve_at(self, url: str, token: str) -> None:
        """From now on the server is at this address (http://HOST:PORT); "" means that there is none at the moment."""
        self.interruptions += bool(self._url and not url)
        self._url, self._token = url, token
        if url:
            self._there.set()
        else:
            self._there.clear()

    async def open(self, settings: dict[str, Any], deadline: Deadline) -> SessionHandle:
        """A new session; `settings` are SessionSettings as JSON has them. Raises SessionServerFailed.

        When it is cancelled, a session that was opened all the same is closed.
        """
        opening = asyncio.create_task(self._open(settings, deadline))
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            self._later(self._close_when_open(opening))
            raise

    async def _close_when_open(self, opening: asyncio.Task[SessionHandle]) -> None:
        try:
            session = await opening
        except SessionServerFailed:
            return
        await self._delete(session)

    async def _open(self, settings: dict[str, Any], deadline: Deadline) -> SessionHandle:
        try:
            await asyncio.wait_for(self._there.wait(), deadline.remaining_s)
        except TimeoutError:
            raise SessionServerFailed(f"{deadline.error()}: this node's session server isn't there") from None
        server, data = await self._ask("POST", "/sessions", None, deadline, settings)
        try:
            opened = msgspec.json.decode(data, type=dict[str, str])
            return SessionHandle(server=server, session_id=opened["session_id"], token=opened["token"])
        except (msgspec.MsgspecError, KeyError) as error:
            raise SessionServerFailed(f"session server: answered {data[:80]!r}: expected a session's id") from error

    async def state(self, session: SessionHandle, deadline: Deadline) -> SessionState:
        """Raises SessionServerFailed."""
        _, data = await self._ask("GET", session.path, session.token, deadline)
        try:
            shown = msgspec.json.decode(data, type=_Shown)
        except msgspec.MsgspecError as error:
            raise SessionServerFailed(f"session server: {error}: expected a session's state") from error
        last = max(shown.turns, key=lambda turn: turn.turn, default=None)
        return SessionState(
            n_turns=len(shown.turns),
            refused=shown.refused > 0,
            cut=last is not None and last.finish_reason is not FinishReason.STOP,
            starved=shown.starved,
        )

    async def samples(self, session: SessionHandle, deadline: Deadline) -> list[WireSample]:
        """What the session gives to training, in order of recording. Raises SessionServerFailed, IntegrityError."""
        _, data = await self._ask("POST", f"{session.path}/samples", session.token, deadline, {})
        meta, samples = read_samples(data)
        if meta.session_id != session.session_id:
            raise IntegrityError(f"samples of session {meta.session_id}, asked for {session.session_id}")
        return samples

    def delete(self, session: SessionHandle) -> None:
        """Close it in the background, if that can be done: what nobody closes ends by itself."""
        self._later(self._delete(session))

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._deleting.add(task)
        task.add_done_callback(self._deleting.discard)

    async def _delete(self, session: SessionHandle) -> None:
        deadline = Deadline(_DELETE_S, "closing a session")
        try:
            await self._ask("DELETE", session.path, session.token, deadline)
        except SessionServerFailed:
            pass

    async def close(self) -> None:
        """Idempotent."""
        deleting = set(self._deleting)
        for task in deleting:
            task.cancel()
        await asyncio.gather(*deleting, return_exceptions=True)
        http, self._http = self._http, None
        if http is not None:
            await http.close()

    async def _ask(
        self, method: str, path: str, token: str | None, deadline: Deadline, body: Any = None
    ) -> tuple[str, bytes]:
        """One request until it is answered: the server that did, and the body. Address and, with None, the server's own
        token are looked at anew for each try."""
        trouble, n = "", 0
        while not deadline.expired:
            server = self._url
            if server:
                try:
                    status, data = await self._send(
                        method, server + path, self._token if token is None else token, deadline.remaining_s, body
                    )
                except (aiohttp.ClientError, OSError, TimeoutError) as error:
                    trouble = f"{type(error).__name__}: {error}"
                else:
                    if status < 300:
                        return server, data
                    trouble = f"status {status}: {data[:300].decode(errors='replace')}"
                    # Opening: 429 is a server whose sessions must end first, 401 one that was started again meanwhile.
                    if status != 503 and not (token is None and status in (401, 429)):
                        raise SessionServerFailed(f"session server: {method} {path}: {trouble}")
            await asyncio.sleep(min(_PAUSES_S[min(n, len(_PAUSES_S) - 1)], deadline.remaining_s))
            n += 1
        raise SessionServerFailed(f"{deadline.error()}: {trouble or 'there is no session server'}")

    async def _send(self, method: str, url: str, token: str, timeout_s: float, body: Any) -> tuple[int, bytes]:
        if self._http is None:
            # Sessions are many and short; the bound on how many there are is that of generation slots.
            self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), trust_env=False)
        async with self._http.request(
            method,
            url,
            headers={"Authorization": f"Bearer {token}"},
            json=body,
            timeout=aiohttp.ClientTimeout(total=timeout_s),
        ) as response:
            return response.status, await response.read()
