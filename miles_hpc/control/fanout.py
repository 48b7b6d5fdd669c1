"""One command for many processes in O(log N) hops: each process that gets it passes it on to a few others.

    FanOut.call ─▶ Spread ─┬─ Relay(command, rest of branch 1) ─▶ RelayHandler ─┬─▶ its own handler
                           │                                                   └─▶ Spread ─▶ ...
                           ├─ Relay(command, rest of branch 2) ─▶ ...
                           └─◀─ RelayDone: the outcomes of a whole branch

Delivery is at least once: whoever sent to a process that can't be reached, dies or falls silent sends to the rest of
that branch itself. Execution is at most once per process: a command has an id, and `relay.py` remembers ids.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from miles_hpc.control.links import Links
from miles_hpc.control.spread import Spread
from miles_hpc.core.deadline import Deadline
from miles_hpc.core.errors import (
    AuthenticationError,
    DeadlineExpired,
    FencedError,
    MilesError,
    PeerLost,
    ProtocolError,
    RemoteError,
    UserError,
)
from miles_hpc.core.messages import Message, Relay, RelayOutcome, RelayTarget, decode, encode
from miles_hpc.core.transport import Buffer, Reply

__all__ = ["FanOut", "FanOutResult", "Outcome"]

_ERRORS: dict[str, type[MilesError]] = {
    error.__name__: error for error in (AuthenticationError, DeadlineExpired, FencedError, PeerLost, ProtocolError)
}
_starts = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of the command at one target: either `reply` or `error` is there.

    `error` is a RemoteError when the handler there raised, with the exception's class name in `kind`; PeerLost when the
    target can't be reached or was lost; DeadlineExpired when it didn't answer in time; AuthenticationError, FencedError
    when the two refused each other. `latency_s` is from the start of the call until whoever asked the target had its
    answer. `via` is who asked it.
    """

    reply: Reply | None
    error: MilesError | None
    latency_s: float
    via: str


@dataclass(frozen=True, slots=True)
class FanOutResult:
    """Outcomes by the target's name, in the order of the targets."""

    outcomes: dict[str, Outcome]
    elapsed_s: float
    sent: int  # messages that the caller's process sent for it

    @property
    def replies(self) -> dict[str, Reply]:
        """Of the targets that answered."""
        return {name: outcome.reply for name, outcome in self.outcomes.items() if outcome.reply is not None}

    @property
    def errors(self) -> dict[str, MilesError]:
        """Of the targets that failed."""
        return {name: outcome.error for name, outcome in self.outcomes.items() if outcome.error is not None}


class FanOut:
    """Commands of this process to many. Belongs to one event loop; calls may run at the same time.

    A target with addresses has a RelayHandler and may be asked to pass the command on. A target without is sent the
    bare message over the connection that `links` knows for it.
    """

    def __init__(
        self, links: Links, *, name: str, arity: int = 8, direct_up_to: int = 16, silent_s: float = 2.0
    ) -> None:
        """`direct_up_to`: so many targets or fewer are all sent to from here."""
        if arity < 2:
            raise UserError(f"fan-out: arity {arity}: expected at least 2")
        self._links = links
        self._name = name
        self._arity = arity
        self._direct_up_to = direct_up_to
        self._silent_s = silent_s
        self._root = f"{name}/{os.getpid()}.{next(_starts)}.{os.urandom(6).hex()}"
        self._numbers = itertools.count(1)

    async def call(
        self, message: Message, targets: Sequence[RelayTarget], *, payload: Sequence[Buffer] = (), deadline_s: float
    ) -> FanOutResult:
        """Have every target handle `message`, and collect the answers. Raises UserError for a name that comes twice.

        No target's failure raises: see Outcome. Returns at the deadline at the latest. Cancelling it tells the targets.
        Payload buffers must stay as they are until it returns; where a target failed, for longer, as bytes do.
        """
        names = {target.name for target in targets}
        if len(names) != len(targets):
            raise UserError(f"fan-out: {len(targets)} targets with {len(names)} names: expected every name once")
        if isinstance(message, Relay):
            raise UserError("fan-out: message Relay: expected the command itself")
        deadline = Deadline(deadline_s, type(message).__name__)
        command = Relay(
            root=self._root,
            number=next(self._numbers),
            message=encode(message),
            arity=self._arity,
            deadline_s=deadline_s,
            silent_s=self._silent_s,
        )
        flat = len(targets) <= self._direct_up_to
        spread = Spread(self._links, command, tuple(payload), deadline, me=self._name, insist=True)
        try:
            spread.start(
                [target for target in targets if target.addresses and not flat],
                direct=[target for target in targets if flat or not target.addresses],
            )
            await spread.finish()
        finally:
            await spread.stop()
        outcomes = {target.name: _outcome(*spread.found[target.name]) for target in targets}
        return FanOutResult(outcomes, deadline.elapsed_s, spread.sent)


def _outcome(found: RelayOutcome, payload: Buffer) -> Outcome:
    if not found.error:
        try:
            reply = Reply(decode(found.message), memoryview(payload).toreadonly())
            return Outcome(reply, None, found.latency_s, found.via)
        except msgspec.MsgspecError as failure:
            error: MilesError = ProtocolError(f"{found.name}: a reply that can't be decoded: {failure}")
    elif found.error == "RemoteError":
        error = RemoteError(found.text, kind=found.kind, peer=found.name)
    else:
        error = _ERRORS.get(found.error, MilesError)(found.text)
    return Outcome(None, error, found.latency_s, found.via)
