"""What a session refuses, each with the HTTP status that its server answers with.

SessionError
├── BadRequest       400  a field of the request can't be read, or can't be honoured
├── BadHistory       400  the messages don't continue what was recorded, or aren't messages
│   └── SessionFull  400  the history holds as many turns as it may
├── Unauthorized     401  no token, or a wrong one
├── SessionGone      404  no such session, or it is closed
├── CannotExtend     409  the turn to go on from was cut off: no conversation continues it
├── TooLarge         413  more bytes, messages or tokens than this server takes
├── NoSample         422  the record doesn't give the samples asked for
├── TooMany          429  as many sessions, or requests of this session, as there may be at a time
├── BrokenInvariant  500  tokens that were recorded aren't a prefix of the next prompt; a template that can't be used
├── MatcherFailed    500  a matcher raised, or answered something else than True or False
├── ParserFailed     500  a tool parser raised, or lost a part of the text
├── BadGeneration    502  what the engine returned contradicts itself
├── EngineFailure    502  engines failed this request, one after the other
├── NoEngine         503  no engine can take the request now
├── NotStored        503  the journal can't be written at the moment
└── OutOfTime        504  the engine didn't answer within the request's time
"""

from __future__ import annotations

from typing import ClassVar

from miles_hpc.core.errors import MilesError

__all__ = [
    "BadGeneration",
    "BadHistory",
    "BadRequest",
    "BrokenInvariant",
    "CannotExtend",
    "EngineFailure",
    "MatcherFailed",
    "NoEngine",
    "NoSample",
    "NotStored",
    "OutOfTime",
    "ParserFailed",
    "SessionError",
    "SessionFull",
    "SessionGone",
    "TooLarge",
    "TooMany",
    "Unauthorized",
]


class SessionError(MilesError):
    """Root of the above. The text is one line for the client; `status` is the HTTP status of the answer."""

    status: ClassVar[int] = 500


class BadRequest(SessionError):
    """A field of the request; `param` names it where there is one."""

    status = 400

    def __init__(self, text: str, *, param: str | None = None) -> None:
        super().__init__(text)
        self.param = param


class BadHistory(SessionError):
    """The request's messages can't be placed in the session's history."""

    status = 400


class SessionFull(BadHistory):
    """Nothing more can be recorded in this session."""


class Unauthorized(SessionError):
    """Who asks hasn't shown the token that this place needs. The text never says more."""

    status = 401


class SessionGone(SessionError):
    """The session isn't there, or no longer."""

    status = 404


class CannotExtend(SessionError):
    """The turn that the request continues has no end: its length limit or an abort cut it."""

    status = 409


class TooLarge(SessionError):
    """A bound on sizes; the text says which."""

    status = 413


class TooMany(SessionError):
    """A bound on how many at a time; trying again later may help."""

    status = 429


class NoSample(SessionError):
    """The samples asked for can't be made from the record."""

    status = 422


class BrokenInvariant(SessionError):
    """Token-exactness would be lost; nothing was recorded."""


class MatcherFailed(SessionError):
    """A matcher is broken: mend it or name another one."""


class ParserFailed(SessionError):
    """A tool parser is broken: mend it or name another one."""


class BadGeneration(SessionError):
    """An engine's answer can't be recorded."""

    status = 502


class EngineFailure(SessionError):
    """As many engines as may be tried failed the request."""

    status = 502


class NoEngine(SessionError):
    """No engine with the current weights, until the request's time was over. Trying again later may help."""

    status = 503


class NotStored(SessionError):
    """The answer is recorded in memory, but storage didn't take it in time, so the client doesn't get it."""

    status = 503


class OutOfTime(SessionError):
    """The request's time was over."""

    status = 504
