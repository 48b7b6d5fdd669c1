"""Who has how much to do, and whose turn it is: bookkeeping of what was handed out, without I/O.

A host's engines form two pools: those for training, and those that are set aside for evaluations. A pool takes a group
when its generation slots are free for it, counting a small reserve, so that a slot is refilled the moment a trajectory
ends. Evaluations beside training share the first pool where no engine is set aside; `Turns` divides it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from miles_hpc.core.types import GroupPurpose

__all__ = ["Key", "Loads", "Turns"]

#: More trajectories than slots that a pool may have, as a share of its slots: what is ready when a slot gets free.
_RESERVE = 0.25

#: A group under way: what it is for, and its number among those.
Key = tuple[GroupPurpose, int]


@dataclass(frozen=True)
class _Given:
    host: str
    set_aside: bool
    n: int


class Loads:
    """Trajectories that were given to hosts and aren't back. Belongs to the controller's event loop."""

    def __init__(self) -> None:
        self._given: dict[Key, _Given] = {}
        self._load: dict[tuple[str, bool], int] = {}

    def load(self, host: str, *, set_aside: bool = False) -> int:
        """Trajectories that this pool of the host has to do."""
        return self._load.get((host, set_aside), 0)

    def give(self, key: Key, host: str, n: int, *, set_aside: bool = False) -> None:
        """A group of n trajectories was given to the host."""
        self._given[key] = _Given(host, set_aside, n)
        self._load[host, set_aside] = self.load(host, set_aside=set_aside) + n

    def take_back(self, key: Key, host: str) -> None:
        """This host has the group no more. Does nothing when it hadn't: it was lost, or the group went elsewhere."""
        given = self._given.get(key)
        if given is not None and given.host == host:
            del self._given[key]
            self._load[host, given.set_aside] -= given.n

    def lose(self, host: str) -> None:
        """The host is gone with everything that it was given."""
        self._given = {key: given for key, given in self._given.items() if given.host != host}
        self._load = {pool: n for pool, n in self._load.items() if pool[0] != host}

    def held(self, keys: Collection[Key]) -> list[tuple[str, GroupPurpose, tuple[int, ...]]]:
        """Those of these groups that hosts have: (host, purpose, ids), sorted."""
        found: dict[tuple[str, GroupPurpose], list[int]] = {}
        for purpose, group_id in keys:
            given = self._given.get((purpose, group_id))
            if given is not None:
                found.setdefault((given.host, purpose), []).append(group_id)
        return [(host, purpose, tuple(sorted(ids))) for (host, purpose), ids in sorted(found.items())]

    def choose(self, places: Iterable[tuple[str, int]], n: int, *, set_aside: bool = False) -> str | None:
        """Of (host, slots), the host with the largest share of free slots that has room for n trajectories.

        A host that has nothing to do takes a group of any size. None when there is no room.
        """
        best: tuple[float, str] | None = None
        for host, slots in places:
            load = self.load(host, set_aside=set_aside)
            if slots == 0 or (load and load + n > slots * (1.0 + _RESERVE)):
                continue
            if best is None or load / slots < best[0]:
                best = (load / slots, host)
        return None if best is None else best[1]


class Turns:
    """Whose turn it is on engines that training and evaluations share, while groups of both wait.

    Counts trajectories, whatever the sizes of groups: of those given while both waited, evaluations get `share`. When
    only one of them has something to give, it gives, and nothing is counted.
    """

    def __init__(self, share: float) -> None:
        """`share` is above 0 and at most 1; with 1, training waits until no evaluation does."""
        self._share = share
        self._training = 0
        self._evaluation = 0

    @property
    def evaluations(self) -> bool:
        """Whether it is the turn of evaluations."""
        return self._evaluation * (1.0 - self._share) <= self._training * self._share

    def gave(self, n: int, *, evaluation: bool) -> None:
        """A group of n trajectories was given to a host while the other side waited."""
        if evaluation:
            self._evaluation += n
        else:
            self._training += n
