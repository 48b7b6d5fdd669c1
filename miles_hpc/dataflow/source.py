"""Where group ids come from: consecutive integers, the resumed ones first.

A group's prompt and seeds follow from (run seed, group id) alone, so that a group that has to be sampled again,
by whatever host in whatever allocation, gets the same task. Pure: same state, same ids.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import msgspec

from miles_hpc.core.errors import UserError

__all__ = ["PromptSource", "SourceState", "derive_seed"]


class SourceState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The cursor: ids in `pending` are handed out first, in order, then `next_group_id` and on."""

    next_group_id: int = 0
    pending: tuple[int, ...] = ()


def derive_seed(run_seed: int, *path: int | str) -> int:
    """A seed in [0, 2**63) for this place in the run, by BLAKE2b (RFC 7693) over the parts.

    `derive_seed(seed, "prompt", group_id)` is the prompt's; different paths give independent seeds.
    """
    text = "\x1f".join((str(run_seed), *(f"{type(part).__name__}:{part}" for part in path)))
    digest = hashlib.blake2b(text.encode(), digest_size=8, person=b"miles_hpc.seed").digest()
    return int.from_bytes(digest, "little") >> 1


def turn_seed(trajectory_seed: int, turn: int) -> int:
    """The seed of a trajectory's request `turn`, from 0: 31 bits, which is what engines take."""
    return derive_seed(trajectory_seed, "turn", turn) & 0x7FFFFFFF


class PromptSource:
    """Hands out group ids. Not thread-safe; the controller's loop owns it."""

    def __init__(self, next_group_id: int = 0, pending: Iterable[int] = ()) -> None:
        """`pending` are ids below `next_group_id`, without repeats; UserError otherwise."""
        self._pending = sorted(pending)
        self._next = next_group_id
        wrong = [i for i in self._pending if not 0 <= i < next_group_id]
        if wrong or len(set(self._pending)) != len(self._pending):
            raise UserError(
                f"prompt source: pending ids {wrong or self._pending}: expected distinct ids below {next_group_id}"
            )

    @classmethod
    def resumed(cls, next_group_id: int, pending: Iterable[int], taken_over: Iterable[int] = ()) -> PromptSource:
        """Continue from a manifest when groups in `taken_over` exist already and needn't be sampled.

        They may have been handed out after the manifest was written; ids skipped thereby become pending.
        """
        taken = set(taken_over)
        following = max([next_group_id, *(i + 1 for i in taken)])
        waiting = set(pending) | set(range(next_group_id, following))
        return cls(following, waiting - taken)

    @property
    def state(self) -> SourceState:
        """The cursor as a manifest stores it."""
        return SourceState(next_group_id=self._next, pending=tuple(self._pending))

    @property
    def next_group_id(self) -> int:
        """No id from here on was ever handed out."""
        return self._next

    def take(self, n: int) -> tuple[int, ...]:
        """The next `n` group ids."""
        resumed = self._pending[:n]
        del self._pending[:n]
        new = range(self._next, self._next + n - len(resumed))
        self._next = new.stop
        return (*resumed, *new)
