"""Connections to peers by name: made when they are needed, kept for the next command, closed when idle.

    use(target) ─┬─ an endpoint that is there already (a roster's, or one kept here) ─▶ used at once
                 └─ dialed, by one task however many wait for it
    last user leaves ─▶ kept ─┬─ used again
                              ├─ idle_s over ─▶ closed
                              └─ more than `keep` are kept ─▶ the one that was left first is closed

| waits | for | bounded by |
|---|---|---|
| use() | the connection | its deadline, `connect_s` of the dialing task |
| a dialing task | a place among `dialing` | what dials before it, each for connect_s |

A connection in use is never closed from here, so the number of open ones is at most `keep` plus those in use.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from miles_hpc.control.multihomed import connect_any
from miles_hpc.core.errors import AuthenticationError, FencedError, MilesError, PeerLost
from miles_hpc.core.messages import RelayTarget
from miles_hpc.core.transport import Endpoint, Transport

__all__ = ["Link", "Links"]


@dataclass(eq=False, slots=True)
class Link:
    """One connection. `fresh` is False when it was there before its user asked for it."""

    endpoint: Endpoint
    fresh: bool


@dataclass(eq=False, slots=True)
class _Kept:
    """A connection of ours. While nobody uses it a timer runs."""

    addresses: tuple[str, ...]
    endpoint: Endpoint
    users: int = 0
    timer: asyncio.TimerHandle | None = None


@dataclass(eq=False, slots=True)
class _Opening:
    """A connection that is being made, and how many wait for it."""

    task: asyncio.Task[Endpoint]
    waiters: int = 0
    kept: _Kept | None = None


class Links:
    """Connections of one process; belongs to one event loop.

    `known` gives endpoints that exist for another reason, by name, or None: they are used first and never closed here.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        known: Callable[[str], Endpoint | None] | None = None,
        keep: int = 64,
        idle_s: float = 60.0,
        connect_s: float = 5.0,
        dialing: int = 32,
    ) -> None:
        self._transport = transport
        self._known = known
        self._keep = keep
        self._idle_s = idle_s
        self._connect_s = connect_s
        self._dialing = asyncio.Semaphore(dialing)
        self._kept: dict[str, _Kept] = {}  # those without users in the order in which they were left
        self._opening: dict[RelayTarget, _Opening] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    def has(self, name: str) -> bool:
        """Whether the process can be reached without dialing."""
        return self._existing(name) is not None

    @property
    def open_links(self) -> int:
        """Connections that were dialed here and are open."""
        return sum(not kept.endpoint.closed.is_set() for kept in self._kept.values())

    @asynccontextmanager
    async def use(self, target: RelayTarget, *, deadline_s: float) -> AsyncIterator[Link]:
        """A connection to `target` for the time of the block.

        Raises PeerLost when it can't be reached in time, or is somebody else; AuthenticationError, FencedError.
        """
        existing = self._existing(target.name)
        if existing is not None:
            yield Link(existing, fresh=False)
            return
        kept = self._usable(target)
        fresh = kept is None
        if kept is None:
            kept = await self._dialed(target, deadline_s)
        else:
            self._take(kept)
        try:
            yield Link(kept.endpoint, fresh=fresh)
        finally:
            self._leave(target.name, kept)

    async def close(self) -> None:
        """Close all connections, also those in use; later uses raise PeerLost."""
        self._closed = True
        opening = [entry.task for entry in self._opening.values()]
        for task in opening:
            task.cancel()
        await asyncio.gather(*opening, return_exceptions=True)
        kept, self._kept = self._kept, {}
        for link in kept.values():
            if link.timer is not None:
                link.timer.cancel()
        closing = [link.endpoint.close("the links of this process were closed") for link in kept.values()]
        await asyncio.gather(*closing, *self._tasks, return_exceptions=True)

    # ------------------------------------------------------------------------------ finding and making

    def _existing(self, name: str) -> Endpoint | None:
        endpoint = self._known(name) if self._known is not None else None
        return None if endpoint is None or endpoint.closed.is_set() else endpoint

    def _usable(self, target: RelayTarget) -> _Kept | None:
        """The kept connection, unless it has ended or leads to where the process doesn't listen any more."""
        kept = self._kept.get(target.name)
        if kept is None:
            return None
        if kept.endpoint.closed.is_set() or kept.addresses != target.addresses:
            self._drop(target.name, kept, "the process listens elsewhere")
            return None
        return kept

    async def _dialed(self, target: RelayTarget, deadline_s: float) -> _Kept:
        """Dial, or wait for who dials it already. The caller counts as a user of what is returned."""
        if self._closed:
            raise PeerLost(f"{target.name}: not connected: the links of this process were closed")
        opening = self._opening.get(target)
        if opening is None:
            opening = _Opening(asyncio.create_task(self._dial(target)))
            opening.task.add_done_callback(lambda _: self._opened(target, opening))
            self._opening[target] = opening
        opening.waiters += 1
        try:
            # Others may wait for it as well, so it isn't cancelled with us.
            await asyncio.wait({opening.task}, timeout=deadline_s)
        except asyncio.CancelledError:
            if opening.kept is not None:
                self._leave(target.name, opening.kept)
            raise
        finally:
            opening.waiters -= 1
        if opening.kept is not None:
            return opening.kept
        if not opening.task.done():
            raise PeerLost(f"{target.name}: not connected after {deadline_s:.1f} s to {', '.join(target.addresses)}")
        if opening.task.cancelled():
            raise PeerLost(f"{target.name}: not connected: the links of this process were closed")
        raise opening.task.exception() or PeerLost(f"{target.name}: the links of this process were closed")

    async def _dial(self, target: RelayTarget) -> Endpoint:
        if not target.addresses:
            raise PeerLost(f"{target.name}: not connected, and it has published no address")
        async with self._dialing:
            try:
                return await connect_any(
                    self._transport, target.addresses, deadline_s=self._connect_s, name=target.name
                )
            except (AuthenticationError, FencedError) as error:
                raise type(error)(f"{target.name}: {error}") from error
            except MilesError as error:
                raise PeerLost(f"{target.name}: can't be reached: {error}") from error

    def _opened(self, target: RelayTarget, opening: _Opening) -> None:
        """Runs when the dialing task is done and before those who wait for it go on."""
        self._opening.pop(target, None)
        task = opening.task
        if task.cancelled() or task.exception() is not None:
            return
        endpoint = task.result()
        if self._closed:
            self._start_closing(endpoint, "the links of this process were closed")
            return
        before = self._kept.get(target.name)
        if before is not None:
            self._drop(target.name, before, "a newer connection exists")
        kept = opening.kept = _Kept(target.addresses, endpoint, users=1 + opening.waiters)
        self._kept[target.name] = kept
        self._leave(target.name, kept)

    # ------------------------------------------------------------------------------ keeping

    def _take(self, kept: _Kept) -> None:
        kept.users += 1
        if kept.timer is not None:
            kept.timer.cancel()
            kept.timer = None

    def _leave(self, name: str, kept: _Kept) -> None:
        kept.users -= 1
        if kept.users or self._kept.get(name) is not kept:
            if not kept.users:
                self._start_closing(kept.endpoint, "replaced")
            return
        if kept.endpoint.closed.is_set():
            del self._kept[name]
            return
        kept.timer = asyncio.get_running_loop().call_later(self._idle_s, self._drop, name, kept, "idle")
        self._kept[name] = self._kept.pop(name)  # the last in order
        if len(self._kept) > self._keep:
            for other, candidate in self._kept.items():
                if not candidate.users and candidate is not kept:
                    self._drop(other, candidate, "too many connections")
                    break

    def _drop(self, name: str, kept: _Kept, reason: str) -> None:
        """Forget a connection; its last user closes it if it has any."""
        if self._kept.get(name) is kept:
            del self._kept[name]
        if kept.timer is not None:
            kept.timer.cancel()
            kept.timer = None
        if not kept.users:
            self._start_closing(kept.endpoint, reason)

    def _start_closing(self, endpoint: Endpoint, reason: str) -> None:
        if endpoint.closed.is_set():
            return
        task = asyncio.get_running_loop().create_task(endpoint.close(reason))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
