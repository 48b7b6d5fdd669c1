"""The journal for an event loop: records of concurrent callers share one write and one fsync, in a thread.

The fence is asked before each write, so that a controller whose run was started elsewhere neither records anything more
nor acknowledges it. While storage is full, records wait in their order, and with them whoever must not be told before
they are durable: what memory holds and the journal doesn't would be lost to the next term. A journal that refused
records for good takes none behind the gap.
"""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Callable

from checkpoints.journal import JournalWriter, Record
from miles_hpc.core.errors import FencedError

__all__ = ["NO_SPACE", "DurableJournal"]

#: What a full file system, or a quota, says. It passes when somebody makes room.
NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})

_LOOK_AGAIN_S = 0.5


def _impatient() -> bool:
    return False


def _ignore(_: object) -> None:
    return


class DurableJournal:
    """`append` returns when its records are on storage. Records keep the order of the calls."""

    def __init__(
        self,
        writer: JournalWriter,
        *,
        fence: Callable[[], None],
        patient: Callable[[], bool] = _impatient,
        patience_s: float = 0.0,
        on_full: Callable[[OSError], None] = _ignore,
        on_room: Callable[[float], None] = _ignore,
        on_refused: Callable[[OSError], None] = _ignore,
    ) -> None:
        """`fence` raises FencedError when a newer term or attempt exists; it may block, and runs in a thread.

        On full storage `on_full` is called, then the write is repeated for up to `patience_s` while `patient` says so;
        `on_room` gets the seconds that it took. `on_refused` is called once, when records could not be written.
        """
        self._writer = writer
        self._fence = fence
        self._patient = patient
        self._patience_s = patience_s
        self._on_full, self._on_room, self._on_refused = on_full, on_room, on_refused
        self._waiting: list[tuple[tuple[Record, ...], asyncio.Future[None]]] = []
        self._pump: asyncio.Task[None] | None = None
        self._refused: OSError | None = None

    @property
    def offset(self) -> int:
        """Position after everything that is durable now."""
        return self._writer.offset

    @property
    def idle(self) -> bool:
        """Whether everything that was handed in is durable, or refused."""
        return not self._waiting and (self._pump is None or self._pump.done())

    async def flush(self) -> None:
        """Wait until everything that was handed in is durable. Raises OSError when storage refused any of it."""
        while self._pump is not None and not self._pump.done():
            await asyncio.shield(self._pump)
        if self._refused is not None:
            raise self._refused

    async def append(self, *records: Record) -> None:
        """Make these records durable. Raises OSError when storage refuses them, FencedError when the fence does."""
        if not records:
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((records, future))
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._drain())
        await future

    def _write(self, records: list[Record]) -> None:
        self._fence()
        self._writer.append(*records)

    async def _write_when_there_is_room(self, records: list[Record]) -> None:
        if self._refused is not None:
            raise self._refused
        full_since: float | None = None
        while True:
            try:
                await asyncio.to_thread(self._write, records)
                break
            except OSError as error:
                now = time.monotonic()
                if full_since is None:
                    full_since = now
                    if error.errno in NO_SPACE:
                        self._on_full(error)
                if error.errno not in NO_SPACE or not self._patient() or now - full_since > self._patience_s:
                    self._refused = error
                    self._on_refused(error)
                    raise
            await asyncio.sleep(_LOOK_AGAIN_S)
        if full_since is not None:
            self._on_room(time.monotonic() - full_since)

    async def _drain(self) -> None:
        while self._waiting:
            taken, self._waiting = self._waiting, []
            records = [record for group, _ in taken for record in group]
            try:
                await self._write_when_there_is_room(records)
            except (OSError, FencedError) as error:
                for _, future in taken:
                    if not future.done():
                        future.set_exception(error)
                continue
            for _, future in taken:
                if not future.done():
                    future.set_result(None)
