"""Who belongs to the run right now, and why somebody doesn't any more: a pure state machine with an injected clock.

                 joined                        heard
    (unknown) ──────────▶ present ◀──────────────┐
                            │  closed(reason) ─▶ lost   "endpoint closed: ..."       at once
                            │  tick(now) ──────▶ lost   "no heartbeat for 5.2 s"     after lost_after_s
              joined        ▼
    same or newer incarnation ─▶ present again (Rejoined; Superseded when the older one still was present)
    older incarnation ─────────▶ FencedError; the newest incarnation of a name is remembered for ever

Every method returns the verdicts that follow from it; a verdict is given once. Time is any monotonic clock, in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

from miles_hpc.core.errors import FencedError
from miles_hpc.core.transport import PeerIdentity

__all__ = ["Lost", "Member", "Rejoined", "Roster", "Superseded", "Verdict"]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Something that was decided about a member, with the evidence for it."""

    name: str
    identity: PeerIdentity
    evidence: str
    at: float


@dataclass(frozen=True, kw_only=True)
class Lost(Verdict):
    """The member is gone; what it had in flight has to be given to others."""


@dataclass(frozen=True, kw_only=True)
class Rejoined(Verdict):
    """A member that was declared lost, or whose connection was replaced, is here (again)."""


@dataclass(frozen=True, kw_only=True)
class Superseded(Verdict):
    """A newer incarnation has taken the name of `identity`, which is fenced from now on."""

    by: PeerIdentity


@dataclass(frozen=True, kw_only=True)
class Member:
    """One name of the roster. `lost` holds the evidence; empty while the member is present."""

    identity: PeerIdentity
    joined_at: float
    last_heard: float
    lost: str = ""


class Roster:
    """Members by name. Not thread-safe; nothing here waits."""

    def __init__(self, *, lost_after_s: float) -> None:
        self.lost_after_s = lost_after_s
        self._members: dict[str, Member] = {}

    @property
    def members(self) -> dict[str, Member]:
        """All members ever seen, lost ones included: a copy."""
        return dict(self._members)

    def present(self, role: str | None = None) -> list[PeerIdentity]:
        """Identities of the members that aren't lost, sorted by name."""
        found = [m.identity for m in self._members.values() if not m.lost and role in (None, m.identity.role)]
        return sorted(found, key=lambda identity: identity.name)

    def joined(self, identity: PeerIdentity, now: float) -> list[Verdict]:
        """A member has connected. Raises FencedError when a newer incarnation of its name has been here."""
        before = self._members.get(identity.name)
        verdicts: list[Verdict] = []
        if before is not None:
            known = before.identity
            if _age(identity) < _age(known):
                raise FencedError(
                    f"{identity.name}: incarnation {identity.incarnation} of term {identity.term} is older than "
                    f"incarnation {known.incarnation} of term {known.term}, which has joined from {known.host}"
                )
            if _age(identity) > _age(known) and not before.lost:
                evidence = f"incarnation {identity.incarnation} joined from {identity.host}, pid {identity.pid}"
                verdicts.append(Superseded(name=known.name, identity=known, evidence=evidence, at=now, by=identity))
            else:
                evidence = f"was lost: {before.lost}" if before.lost else "connected again"
                verdicts.append(Rejoined(name=identity.name, identity=identity, evidence=evidence, at=now))
        self._members[identity.name] = Member(identity=identity, joined_at=now, last_heard=now)
        return verdicts

    def heard(self, name: str, now: float) -> None:
        """A heartbeat, or any other message, of a member. Of a lost one it changes nothing: it has to join again."""
        member = self._members.get(name)
        if member is not None and not member.lost and now > member.last_heard:
            self._members[name] = Member(identity=member.identity, joined_at=member.joined_at, last_heard=now)

    def closed(self, name: str, reason: str, now: float, *, incarnation: int | None = None) -> list[Verdict]:
        """A member's endpoint has closed. With `incarnation`, the end of an older one's endpoint is ignored."""
        member = self._members.get(name)
        if member is None or (incarnation is not None and incarnation != member.identity.incarnation):
            return []
        return self._lose(member, f"endpoint closed: {reason}", now)

    def next_loss(self, now: float) -> float:
        """When the next member is lost if nobody is heard any more: not before this moment `tick` has something to say.

        Without members it is `now + lost_after_s`, since whoever joins later can't be lost earlier.
        """
        heard = [member.last_heard for member in self._members.values() if not member.lost]
        return min(heard, default=now) + self.lost_after_s

    def tick(self, now: float) -> list[Verdict]:
        """Declare members lost that have been silent for `lost_after_s`. Call it at `next_loss`."""
        verdicts: list[Verdict] = []
        for member in list(self._members.values()):
            silent_s = now - member.last_heard
            if silent_s >= self.lost_after_s:
                verdicts += self._lose(member, f"no heartbeat for {silent_s:.1f} s", now)
        return verdicts

    def _lose(self, member: Member, evidence: str, now: float) -> list[Verdict]:
        if member.lost:
            return []
        self._members[member.identity.name] = Member(
            identity=member.identity, joined_at=member.joined_at, last_heard=member.last_heard, lost=evidence
        )
        return [Lost(name=member.identity.name, identity=member.identity, evidence=evidence, at=now)]


def _age(identity: PeerIdentity) -> tuple[int, int]:
    """Newer claims are greater: first the term, then the start within it."""
    return identity.term, identity.incarnation
