"""The sessions of one server: who may use which, how many there are, and what the journal knows of them.

    open ──▶ OpenSession ──▶ closed: deleted by its owner, or idle for `ttl_s`
      │            ╰ requests: conversation.answer
      ╰──────────── restore(stored): as it was, with its id and its token, after a restart

| who waits | for what | how long |
|---|---|---|
| open, close | the journal | the request's deadline, then NotStored |
| close | the session's lock: a prompt being rendered, a turn being recorded | as long as that takes |

A session's token is random and known to its owner alone: here and in the journal there is its SHA-256, and comparing
takes the same time for every wrong one. Everything belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

import msgspec

from miles_hpc.core.deadline import Deadline
from miles_hpc.core.errors import MilesError
from miles_hpc.rollout.session.core import Session
from miles_hpc.rollout.session.errors import BadRequest, SessionGone, TooMany, Unauthorized
from miles_hpc.rollout.session.gateway import EngineGateway
from miles_hpc.rollout.session.history import History, LinearHistory, TreeHistory
from miles_hpc.rollout.session.journal import SessionJournal
from miles_hpc.rollout.session.matching import load_matcher
from miles_hpc.rollout.session.records import SessionClosed, SessionOpened, StoredSession, replay
from miles_hpc.rollout.session.settings import SessionLimits, SessionSettings
from miles_hpc.rollout.session.template import CHAT_FAMILIES, HuggingFaceTemplate
from miles_hpc.rollout.session.tokenizer import ChatTokenizer
from miles_hpc.rollout.session.tool_calls import ToolParser, load_tool_parser

__all__ = ["OpenSession", "SessionBook", "digest_of"]


def digest_of(token: str) -> bytes:
    """What is kept of a token."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


@dataclass(eq=False)
class OpenSession:
    """One session and what its requests share. `lock` is held while the record is read or changed."""

    session_id: str
    token_digest: bytes
    settings: SessionSettings
    session: Session
    template: HuggingFaceTemplate
    parser: ToolParser
    opened_s: float  # epoch
    used_s: float  # the book's clock, at its last request's end
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    in_flight: int = 0
    n_tokens: int = 0  # recorded, over all branches
    largest_body: int = 0  # of the requests that were rendered
    n_asked: int = 0  # requests that were given a seed
    refused: int = 0  # requests for which there is no room: in the context, or in what a session may hold


class SessionBook:
    """See the module's text. `clock` is monotonic, in seconds."""

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        gateway: EngineGateway,
        journal: SessionJournal,
        limits: SessionLimits,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tokenizer = tokenizer
        self.gateway = gateway
        self.journal = journal
        self.limits = limits
        self._clock = clock
        self._sessions: dict[str, OpenSession] = {}
        self._checked_families: set[str] = set()

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def n_in_flight(self) -> int:
        """Requests of all sessions."""
        return sum(entry.in_flight for entry in self._sessions.values())

    # ------------------------------------------------------------------------------------------- open and close

    async def open(self, settings: SessionSettings) -> tuple[str, str]:
        """A new session's id and token, once the journal has it. Raises TooMany, BadRequest, NotStored, UserError."""
        if len(self._sessions) >= self.limits.sessions:
            raise TooMany(f"this server holds {len(self._sessions)} sessions, the most that it may: delete some")
        stored = msgspec.json.encode(settings)
        if len(stored) > self.limits.metadata_bytes:
            raise BadRequest(
                f"the session's settings have {len(stored)} bytes: expected at most {self.limits.metadata_bytes}",
                param="metadata",
            )
        session_id, token = secrets.token_hex(16), secrets.token_urlsafe(32)
        record = SessionOpened(
            session=session_id, token_digest=digest_of(token), settings=stored, opened_s=round(time.time(), 3)
        )
        entry = self._make(record, settings)
        if settings.chat_family not in self._checked_families:
            entry.template.check()
            self._checked_families.add(settings.chat_family)
        self._sessions[session_id] = entry  # counts before the journal has it
        try:
            await self.journal.append(record, deadline=Deadline(self.limits.request_s, "opening a session"))
        except BaseException:
            self._drop(entry)
            self.journal.put(SessionClosed(session=session_id, reason="its owner wasn't told")).add_done_callback(_seen)
            raise
        return session_id, token

    def restore(self, stored: Mapping[str, StoredSession]) -> dict[str, str]:
        """Go on with the sessions of an earlier process; returns those that can't be, with the reason.

        These are closed in the journal, so call it after the journal's start.
        """
        failed: dict[str, str] = {}
        for session_id, one in stored.items():
            try:
                settings = one.settings
                assert one.opened is not None  # settings raises without it
                entry = self._make(one.opened, settings)
                replay(one.turns, entry.session.history, partial(self.journal.rows, session_id))
            except MilesError as error:
                failed[session_id] = str(error)
                self.journal.put(SessionClosed(session=session_id, reason=str(error))).add_done_callback(_seen)
                continue
            turns = entry.session.history.turns()
            entry.n_tokens = sum(len(turn.new_ids) + len(turn.output_ids) for turn in turns)
            # Which requests were lost with the process isn't known: none of their seeds is given again.
            entry.n_asked = len(turns) + secrets.randbelow(1 << 30)
            self._sessions[session_id] = entry
            if turns:
                self.gateway.restore(session_id, context_tokens=max(turn.n_tokens for turn in turns))
        return failed

    def discard(self, stored: Iterable[str], reason: str) -> None:
        """Close sessions of an earlier process in the journal, without going on with them."""
        for session_id in stored:
            self.journal.put(SessionClosed(session=session_id, reason=reason)).add_done_callback(_seen)

    async def close(self, entry: OpenSession, reason: str) -> None:
        """Nothing more is recorded for the session; requests under way are still answered. Raises NotStored."""
        async with entry.lock:
            self._drop(entry)
        deadline = Deadline(self.limits.request_s, f"closing session {entry.session_id}")
        await self.journal.append(SessionClosed(session=entry.session_id, reason=reason), deadline=deadline)

    async def expire(self) -> list[str]:
        """Close the sessions that were idle for too long; returns their ids."""
        ended = [e for e in self._sessions.values() if not e.in_flight and self._idle_s(e) >= self.limits.ttl_s]
        for entry in ended:
            await self.close(entry, f"no request for {self.limits.ttl_s:.0f} s")
        return [entry.session_id for entry in ended]

    # ------------------------------------------------------------------------------------------- use

    def find(self, session_id: str, token: str | None) -> OpenSession:
        """Raises SessionGone for an unknown or closed session, Unauthorized without its token."""
        entry = self._sessions.get(session_id)
        if entry is None:
            raise SessionGone("there is no such session here: it was closed, was idle for too long, or never was")
        if token is None or not hmac.compare_digest(digest_of(token), entry.token_digest):
            raise Unauthorized("expected the session's token, as 'Authorization: Bearer ...' or x-api-key")
        return entry

    def entered(self, entry: OpenSession) -> None:
        """A request of the session begins. Raises TooMany; call `left` when it ended."""
        if entry.in_flight >= self.limits.in_flight:
            raise TooMany(
                f"session {entry.session_id} has {entry.in_flight} requests under way, the most that it may: "
                "wait for one to end"
            )
        entry.in_flight += 1

    def left(self, entry: OpenSession) -> None:
        """A request of the session ended."""
        entry.in_flight -= 1
        entry.used_s = self._clock()

    # ------------------------------------------------------------------------------------------- inside

    def _make(self, opened: SessionOpened, settings: SessionSettings) -> OpenSession:
        family = CHAT_FAMILIES.get(settings.chat_family)
        if family is None:
            raise BadRequest(f"chat_family '{settings.chat_family}': expected one of {', '.join(CHAT_FAMILIES)}")
        template = HuggingFaceTemplate(self.tokenizer, family)
        return OpenSession(
            session_id=opened.session,
            token_digest=opened.token_digest,
            settings=settings,
            session=Session(template, self._history(settings), session_id=opened.session),
            template=template,
            parser=load_tool_parser(settings.tool_parser),
            opened_s=opened.opened_s,
            used_s=self._clock(),
        )

    def _history(self, settings: SessionSettings) -> History:
        matcher = load_matcher(settings.matcher)
        if settings.history == "tree":
            return TreeHistory(matcher, max_turns=self.limits.turns)
        return LinearHistory(matcher, max_rollback=settings.max_rollback)

    def _drop(self, entry: OpenSession) -> None:
        entry.session.close()
        self._sessions.pop(entry.session_id, None)
        self.gateway.end(entry.session_id)

    def _idle_s(self, entry: OpenSession) -> float:
        return self._clock() - entry.used_s


def _seen(future: asyncio.Future[None]) -> None:
    """For a record that nobody waits for: its failure isn't to be reported as forgotten."""
    if not future.cancelled():
        future.exception()
