"""A session server put together from a run: journal, sessions, gateway, HTTP.

start   read the journal ─▶ sessions as they were ─▶ HTTP on a socket that is listening already
close   no new requests ─▶ those under way, for a while ─▶ what is pending into the journal
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

from aiohttp import web

from miles_hpc.core.config import RunConfig
from miles_hpc.core.errors import UserError
from miles_hpc.core.messages import SessionServerStatus
from miles_hpc.core.paths import RunPaths
from miles_hpc.core.telemetry import EventLog
from miles_hpc.rollout.session.book import SessionBook
from miles_hpc.rollout.session.chat import SamplingWish
from miles_hpc.rollout.session.gateway import EngineGateway
from miles_hpc.rollout.session.journal import SessionJournal
from miles_hpc.rollout.session.matching import load_matcher
from miles_hpc.rollout.session.server import SessionServer
from miles_hpc.rollout.session.settings import SessionLimits, SessionSettings
from miles_hpc.rollout.session.template import CHAT_FAMILIES, HuggingFaceTemplate
from miles_hpc.rollout.session.tokenizer import ChatTokenizer
from miles_hpc.rollout.session.tool_calls import load_tool_parser

__all__ = ["SessionService", "limits_of", "settings_of"]

_SHUTDOWN_S = 5.0  # for requests under way


def settings_of(run: RunConfig) -> SessionSettings:
    """What a session is opened with when its owner doesn't say."""
    sessions = run.sessions
    return SessionSettings(
        history=sessions.history,
        max_rollback=sessions.max_rollback,
        matcher=sessions.matcher,
        tool_parser=sessions.tool_parser,
        chat_family=sessions.chat_family,
        sampling=SamplingWish(temperature=run.rollout.temperature, top_p=run.rollout.top_p),
    )


def limits_of(run: RunConfig) -> SessionLimits:
    """The server's bounds."""
    sessions = run.sessions
    return SessionLimits(
        body_bytes=sessions.max_body_bytes,
        messages=sessions.max_messages,
        sessions=sessions.max_sessions,
        in_flight=sessions.max_in_flight,
        context_tokens=run.rollout.max_trajectory_tokens,
        session_tokens=sessions.max_session_tokens,
        turns=sessions.max_turns,
        ttl_s=sessions.ttl_s,
        request_s=sessions.request_deadline_s,
    )


class SessionService:
    """One server and all that it owns but its engines. Call `start` and `close` in its loop."""

    def __init__(
        self,
        run: RunConfig,
        paths: RunPaths,
        name: str,
        *,
        token: str,
        events: EventLog,
        journal: Path | None = None,
    ) -> None:
        """Reads the model's tokenizer and the journal: blocks. Raises UserError, IntegrityError, OSError.

        `journal` is the folder; default: the run's own for a server of this name.
        """
        self._events = events
        settings = settings_of(run)
        tokenizer = ChatTokenizer(paths.model, append_only=False)
        _check(settings, tokenizer)
        self._journal, self._stored = SessionJournal.open(
            journal or paths.session_journal(name),
            segment_bytes=run.sessions.journal_segment_bytes,
            fsync=run.sessions.journal_fsync,
        )
        limits = limits_of(run)
        # The router forgets what it can; sessions are this server's to forget.
        self.gateway = EngineGateway(max_sessions=2 * limits.sessions, session_ttl_s=2 * limits.ttl_s)
        self._book = SessionBook(tokenizer, self.gateway, self._journal, limits)
        self._server = SessionServer(
            self._book, defaults=settings, token=token, routed_experts=run.rollout.routing_replay
        )
        # A client that went away is told to the handler, which aborts its generation.
        self._runner: Any = web.AppRunner(
            self._server.application, access_log=None, handler_cancellation=True, shutdown_timeout=_SHUTDOWN_S
        )

    @property
    def instance_id(self) -> str:
        """Another one for every start."""
        return self._server.instance_id

    def status(self) -> SessionServerStatus:
        """For the agent."""
        routing = self.gateway.stats()
        return SessionServerStatus(
            sessions=len(self._book),
            in_flight=self._book.n_in_flight,
            engines=self.gateway.engines,
            trouble=self._journal.trouble,
            moved=routing.moved,
            failovers=self.gateway.failovers,
            slowest_failover_s=self.gateway.slowest_failover_s,
            load_imbalance=routing.load_imbalance,
            prefix_hit_rate=routing.prefix_hit_rate,
            prefix_bound=routing.prefix_bound,
        )

    async def start(self, listening: socket.socket, *, new_owner: bool = False) -> None:
        """Go on with the journal's sessions, then serve. With `new_owner` nobody knows these any more: close them."""
        self._journal.start()
        if new_owner:
            self._book.discard(self._stored, "its owner is gone")
            self._stored = {}
        failed = self._book.restore(self._stored)
        self._stored = {}
        self._events.note(
            "sessions_restored", sessions=len(self._book), failed=len(failed), torn_bytes=self._journal.torn_bytes
        )
        for session_id, reason in failed.items():
            self._events.verdict("session_lost", peer=session_id, evidence=reason)
        await self._runner.setup()
        await web.SockSite(self._runner, listening).start()

    async def close(self) -> None:
        """Idempotent."""
        await self._runner.cleanup()
        await self.gateway.close()
        await self._journal.close()


def _check(settings: SessionSettings, tokenizer: ChatTokenizer) -> None:
    """What a run file got wrong is said at the start, not to the first agent. Raises UserError."""
    load_matcher(settings.matcher)
    load_tool_parser(settings.tool_parser)
    if settings.chat_family not in CHAT_FAMILIES:
        raise UserError(
            f"sessions.chat_family={settings.chat_family!r}: expected one of {', '.join(sorted(CHAT_FAMILIES))}"
        )
    HuggingFaceTemplate(tokenizer, CHAT_FAMILIES[settings.chat_family]).check()
