"""The journal for an event loop: records of concurrent callers share one write and one fsync, in a thread.

The fence is asked before each write, so that a controller whose run was started elsewhere neither records anything more
nor acknowledges it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from checkpoints.journal import JournalWriter, Record
from miles_hpc.core.errors import FencedError

__all__ = ["DurableJournal"]


class DurableJournal:
    """`append` returns when its records are on storage. Records keep the order of the calls."""

    def __init__(self, writer: JournalWriter, *, fence: Callable[[], None]) -> None:
        """`fence` raises FencedError when a newer term or attempt exists; it may block, and runs in a thread."""
        self._writer = writer
        self._fence = fence
        self._waiting: list[tuple[tuple[Record, ...], asyncio.Future[None]]] = []
        self._pump: asyncio.Task[None] | None = None

    @property
    def offset(self) -> int:
        """Position after everything that is durable now."""
        return self._writer.offset

    @property
    def idle(self) -> bool:
        """Whether everything that was handed in is durable."""
        return not self._waiting and (self._pump is None or self._pump.done())

    async def flush(self) -> None:
        """Wait until the journal is idle."""
        while self._pump is not None and not self._pump.done():
            await asyncio.shield(self._pump)

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

    async def _drain(self) -> None:
        while self._waiting:
            taken, self._waiting = self._waiting, []
            records = [record for group, _ in taken for record in group]
            try:
                await asyncio.to_thread(self._write, records)
            except (OSError, FencedError) as error:
                for _, future in taken:
                    if not future.done():
                        future.set_exception(error)
                continue
            for _, future in taken:
                if not future.done():
                    future.set_result(None)
