"""What a session refuses, each with the HTTP status that its server answers with.

SessionError
├── BadHistory       400  the messages don't continue what was recorded, or aren't messages
├── SessionGone      404  no such session, or it is closed
├── CannotExtend     409  the turn to go on from was cut off: no conversation continues it
├── NoSample         422  the record doesn't give the samples asked for
├── BrokenInvariant  500  tokens that were recorded aren't a prefix of the next prompt; a template that can't be used
├── MatcherFailed    500  a matcher raised, or answered something else than True or False
├── ParserFailed     500  a tool parser raised, or lost a part of the text
└── BadGeneration    502  what the engine returned contradicts itself
"""

from __future__ import annotations

from typing import ClassVar

from miles_hpc.core.errors import MilesError

__all__ = [
    "BadGeneration",
    "BadHistory",
    "BrokenInvariant",
    "CannotExtend",
    "MatcherFailed",
    "NoSample",
    "ParserFailed",
    "SessionError",
    "SessionGone",
]


class SessionError(MilesError):
    """Root of the above. The text is one line for the client; `status` is the HTTP status of the answer."""

    status: ClassVar[int] = 500


class BadHistory(SessionError):
    """The request's messages can't be placed in the session's history."""

    status = 400


class SessionGone(SessionError):
    """The session isn't there, or no longer."""

    status = 404


class CannotExtend(SessionError):
    """The turn that the request continues has no end: its length limit or an abort cut it."""

    status = 409


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
