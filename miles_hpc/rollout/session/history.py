"""Where a request's messages continue what was recorded. One contract, two shapes of history.

    linear    u1 a1 ── t1 a2 ── t2 a3          one path; a request goes on from its end, or from at most
                          ╰── t2' ...          `max_rollback` turns before it: what lies behind is then replaced
    tree      u1 a1 ┬─ t1 a2 ── t2 a3          nothing is ever removed; a request goes on from the deepest turn
                    ├─ t1 a2'                  whose whole path it repeats, so that a retry, an edited message or
              v1 b1 ╰─ t3 a4                   two generations at once become siblings, and a new topic a new root

| | linear | tree |
|---|---|---|
| messages that fit nowhere | BadHistory (400) | a new root |
| other tools than those recorded | BadHistory (400) | a new root |
| nothing new after an assistant turn | BadHistory (400) | BadHistory (400) |
| goes on from a turn that was cut | CannotExtend (409) | CannotExtend (409) |
| the point moved between `attach` and `append` | `append` says why not | never happens |
| too many turns | no bound | BadHistory (400) at `max_turns` |

`attach` changes nothing; only `append` does. A turn's path never changes once it is recorded. Not thread-safe, never
blocks. `attach` compares every message of the request once (a tree: once per turn that may match).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from miles_hpc.rollout.session.errors import BadHistory, CannotExtend, SessionFull
from miles_hpc.rollout.session.matching import Matcher, Message
from miles_hpc.rollout.session.turn import Tools, Turn, path_of

__all__ = ["Attachment", "History", "LinearHistory", "TreeHistory"]


@dataclass(frozen=True)
class Attachment:
    """Where a request goes on. `stamp` tells `append` whether the history has changed since."""

    parent: Turn | None  # None: a prompt of its own
    n_matched: int  # messages of the request that the parent's path holds
    stamp: int = 0


class History(ABC):
    """The recorded turns of one session. See the module's table for what it refuses."""

    def __init__(self, matcher: Matcher) -> None:
        self.matcher = matcher
        self._next = 0

    @property
    def next_number(self) -> int:
        """The number that the next turn gets; numbers of replaced turns aren't used again."""
        return self._next

    @abstractmethod
    def attach(self, messages: Sequence[Message], tools: Tools) -> Attachment:
        """Where `messages` go on. Raises BadHistory, CannotExtend or MatcherFailed."""

    @abstractmethod
    def after(self, turn: Turn | None) -> Attachment:
        """Go on from a turn of this history that the caller knows, None for its beginning, without any matching.

        Raises BadHistory for a turn that isn't (or no longer) here, CannotExtend for one that was cut.
        """

    @abstractmethod
    def append(self, attachment: Attachment, turn: Turn) -> str:
        """Record `turn`, whose parent is the attachment's. Returns "" or the reason why it wasn't recorded."""

    @abstractmethod
    def turns(self) -> list[Turn]:
        """All recorded turns in order of recording."""

    @abstractmethod
    def leaves(self) -> list[Turn]:
        """The turns that nothing goes on from, in order of recording: each ends one path."""

    def _repeats(self, turn: Turn, messages: Sequence[Message], start: int) -> bool:
        """Whether the turn's own messages stand in `messages` from `start` on."""
        own = turn.messages
        end = start + len(own)
        if end > len(messages):
            return False
        if self.matcher.reflexive and own == messages[start:end]:
            return True
        return all(self.matcher(recorded, messages[start + i]) for i, recorded in enumerate(own))

    @staticmethod
    def _check(parent: Turn | None, messages: Sequence[Message], n_matched: int) -> None:
        """What holds for both shapes once the place is known."""
        if parent is not None and len(messages) == n_matched:
            raise BadHistory(
                f"all {n_matched} messages are recorded already and the last is an assistant's turn: "
                "append at least one message"
            )
        _check_ended(parent)


def _check_ended(parent: Turn | None) -> None:
    if parent is not None and not parent.ended:
        raise CannotExtend(
            f"turn {parent.number} was cut (finish reason '{parent.finish_reason}' after {len(parent.output_ids)} "
            "tokens), so no conversation goes on after it: repeat its request without it, or end the session"
        )


class LinearHistory(History):
    """One path. `max_rollback` assistant turns may be taken back by one request, to the beginning if they reach."""

    def __init__(self, matcher: Matcher, *, max_rollback: int = 1) -> None:
        super().__init__(matcher)
        if max_rollback < 0:
            raise ValueError(f"max_rollback {max_rollback}: expected 0 or more")
        self.max_rollback = max_rollback
        self._path: list[Turn] = []
        self._messages: list[Message] = []  # of the whole path
        self._stamp = 0

    def attach(self, messages: Sequence[Message], tools: Tools) -> Attachment:
        if self._path and self._path[0].tools != tools:
            raise BadHistory(
                f"the request has {len(tools)} tools that differ from the {len(self._path[0].tools)} recorded: "
                "send the same ones in every request of a session"
            )
        kept, position = self._repeated(messages)
        back = len(self._path) - kept
        if back > self.max_rollback:
            raise BadHistory(
                f"the request repeats {kept} of {len(self._path)} recorded assistant turns (message {position} of "
                f"{len(messages)} on is other than recorded): at most {self.max_rollback} may be taken back; "
                "send the history as it was returned, or use history 'tree'"
            )
        parent = self._path[kept - 1] if kept else None
        self._check(parent, messages, position)
        return Attachment(parent, position, self._stamp)

    def after(self, turn: Turn | None) -> Attachment:
        back = len(self._path) if turn is None else len(self._path) - turn.depth
        if turn is not None and not (back >= 0 and self._path[turn.depth - 1] is turn):
            raise BadHistory(f"turn {turn.number} isn't in this history: it was replaced, or is another session's")
        if back > self.max_rollback:
            raise BadHistory(f"going on from there takes {back} turns back: at most {self.max_rollback} may be")
        _check_ended(turn)
        return Attachment(turn, 0 if turn is None else turn.n_messages, self._stamp)

    def append(self, attachment: Attachment, turn: Turn) -> str:
        if attachment.stamp != self._stamp:
            return "another turn was recorded meanwhile"
        kept = 0 if attachment.parent is None else attachment.parent.depth
        del self._path[kept:]
        del self._messages[0 if attachment.parent is None else attachment.parent.n_messages :]
        self._path.append(turn)
        self._messages += turn.messages
        self._stamp += 1
        self._next = turn.number + 1
        return ""

    def turns(self) -> list[Turn]:
        return list(self._path)

    def leaves(self) -> list[Turn]:
        return self._path[-1:]

    def _repeated(self, messages: Sequence[Message]) -> tuple[int, int]:
        """How many turns of the path `messages` repeats, and how many messages these have."""
        for kept in (len(self._path), len(self._path) - 1):  # going on, and the last turn again: at C's speed
            n = self._path[kept - 1].n_messages if kept > 0 else 0
            if self.matcher.reflexive and 0 < n <= len(messages) and self._messages[:n] == messages[:n]:
                return self._longest(messages, kept)
        kept = position = 0
        for turn in self._path:
            if not self._repeats(turn, messages, position):
                break
            kept += 1
            position = turn.n_messages
        return kept, position

    def _longest(self, messages: Sequence[Message], kept: int) -> tuple[int, int]:
        """So many turns are repeated for certain; the one after them may match without being equal."""
        position = self._path[kept - 1].n_messages
        if kept < len(self._path) and self._repeats(self._path[kept], messages, position):
            kept, position = kept + 1, self._path[kept].n_messages
        return kept, position


class TreeHistory(History):
    """A forest that only grows, to at most `max_turns` turns."""

    def __init__(self, matcher: Matcher, *, max_turns: int = 1024) -> None:
        super().__init__(matcher)
        if max_turns < 1:
            raise ValueError(f"max_turns {max_turns}: expected 1 or more")
        self.max_turns = max_turns
        self._turns: list[Turn] = []
        self._children: dict[int, list[Turn]] = {-1: []}  # by the parent's number, -1 for roots
        self._forks: set[int] = set()  # keys of _children with several
        self._newest: list[Message] = []  # all messages of the newest turn's path

    def attach(self, messages: Sequence[Message], tools: Tools) -> Attachment:
        self._check_room()
        best, open_turns = self._start(messages, tools)
        while open_turns:
            turn = open_turns.pop()
            if not self._repeats(turn, messages, turn.n_messages - len(turn.messages)):
                continue
            if best is None or (turn.n_messages, turn.number) > (best.n_messages, best.number):
                best = turn
            open_turns += self._children[turn.number]
        matched = 0 if best is None else best.n_messages
        self._check(best, messages, matched)
        return Attachment(best, matched)

    def after(self, turn: Turn | None) -> Attachment:
        self._check_room()
        if turn is not None and not (turn.number < len(self._turns) and self._turns[turn.number] is turn):
            raise BadHistory(f"turn {turn.number} isn't in this history: it is another session's")
        _check_ended(turn)
        return Attachment(turn, 0 if turn is None else turn.n_messages)

    def append(self, attachment: Attachment, turn: Turn) -> str:
        if len(self._turns) >= self.max_turns:
            return f"the session holds {self.max_turns} turns, the most that it may"
        parent = attachment.parent
        newest = self._turns[-1] if self._turns else None
        if newest is not None and parent is newest.parent:
            del self._newest[0 if parent is None else parent.n_messages :]
        elif parent is not newest:
            self._newest = [message for above in path_of(parent) for message in above.messages]
        self._newest += turn.messages
        self._turns.append(turn)
        siblings = self._children[-1 if parent is None else parent.number]
        siblings.append(turn)
        if len(siblings) > 1:
            self._forks.add(-1 if parent is None else parent.number)
        self._children[turn.number] = []
        self._next = turn.number + 1
        return ""

    def turns(self) -> list[Turn]:
        return list(self._turns)

    def leaves(self) -> list[Turn]:
        return [turn for turn in self._turns if not self._children[turn.number]]

    def siblings(self, turn: Turn) -> list[Turn]:
        """The turns with the same parent, `turn` among them, in order of recording."""
        return list(self._children[-1 if turn.parent is None else turn.parent.number])

    def _start(self, messages: Sequence[Message], tools: Tools) -> tuple[Turn | None, list[Turn]]:
        """A turn that matches for certain, and those that are still to be looked at.

        Most requests repeat the newest turn's path, or ask for that turn again: then this is compared in one go, at
        C's speed, and only what forks off it is left.
        """
        roots = [turn for turn in self._children[-1] if turn.tools == tools]
        newest = self._turns[-1] if self._turns else None
        if newest is None or newest.tools != tools or not self.matcher.reflexive:
            return None, roots
        for turn in (newest, newest.parent):
            n = 0 if turn is None else turn.n_messages
            if turn is not None and n <= len(messages) and self._newest[:n] == messages[:n]:
                return turn, self._forking_off(turn, roots)
        return None, roots

    def _forking_off(self, turn: Turn, roots: list[Turn]) -> list[Turn]:
        """Turns that go on from `turn`, and those beside its path."""
        others = list(self._children[turn.number])
        below = turn
        if self._forks:
            for above in path_of(turn.parent)[::-1]:
                if above.number in self._forks:
                    others += [child for child in self._children[above.number] if child is not below]
                below = above
            others += [root for root in roots if root is not below]
        return others

    def _check_room(self) -> None:
        if len(self._turns) >= self.max_turns:
            raise SessionFull(f"the session holds {self.max_turns} turns, the most that it may: open another session")
