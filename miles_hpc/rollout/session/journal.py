"""A session server's journal: what clients were told is on storage before they are told it.

    append(record) ─▶ pending ─▶ one thread: write all that is pending ─▶ everybody who waits goes on
                                    │ storage refuses: again after RETRY_S, nobody goes on meanwhile

| after | what is there |
|---|---|
| kill -9 of the process | every record whose `append` returned |
| the end of the node | what the kernel had written; with `fsync` every record whose `append` returned |
| a torn last record | all records before it |

Segments, their deletion and the bound on their size: segments.py. Records and how they become sessions again:
records.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy.typing as npt

from miles_hpc.core.deadline import Deadline
from miles_hpc.rollout.session.errors import NotStored
from miles_hpc.rollout.session.records import Record, StoredSession
from miles_hpc.rollout.session.segments import SegmentStore

__all__ = ["RETRY_S", "SessionJournal"]

#: After storage refused a write.
RETRY_S = 1.0


class SessionJournal:
    """Appends in order. Belongs to one event loop; storage is a thread's business. Call `start` in the loop."""

    def __init__(self, store: SegmentStore) -> None:
        """Owns the store."""
        self.trouble = ""  # why storage refuses at the moment
        self._store = store
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="session-journal")
        self._pending: list[tuple[Record, asyncio.Future[None]]] = []
        self._wake = asyncio.Event()
        self._closing = False
        self._writer: asyncio.Task[None] | None = None
        self._in_thread: Future[None] | None = None

    @classmethod
    def open(
        cls, folder: Path, *, segment_bytes: int = 64 << 20, fsync: bool = False
    ) -> tuple[SessionJournal, dict[str, StoredSession]]:
        """The journal below `folder` and the sessions that were open in it. Blocks; raises what SegmentStore raises."""
        store = SegmentStore(folder, segment_bytes=segment_bytes, fsync=fsync)
        sessions, store.sessions = store.sessions, {}
        return cls(store), sessions

    @property
    def torn_bytes(self) -> int:
        """Cut off the ends of segments when they were read."""
        return self._store.torn_bytes

    def start(self) -> None:
        """Begin to write."""
        self._writer = asyncio.create_task(self._write())

    def put(self, record: Record) -> asyncio.Future[None]:
        """Queue a record; it will be written in its turn, whether or not anybody waits for the future."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._closing:
            future.set_exception(NotStored("the session server is ending: ask the next one"))
            return future
        self._pending.append((record, future))
        self._wake.set()
        return future

    async def append(self, record: Record, *, deadline: Deadline) -> None:
        """Returns when the record is written. Raises NotStored at the deadline; the record stays queued then."""
        try:
            await asyncio.wait_for(self.put(record), deadline.remaining_s)
        except TimeoutError:
            raise NotStored(
                f"session {record.session}: storage hasn't taken the record after {deadline.elapsed_s:.0f} s"
                f"{': ' + self.trouble if self.trouble else ''}; try again later"
            ) from None

    def rows(self, session: str, number: int) -> npt.NDArray[Any]:
        """Routed experts of a stored turn of an open session. Blocks for a file; any thread. Raises IntegrityError."""
        return self._store.rows(session, number).numpy()

    async def close(self, *, deadline_s: float = 10.0) -> None:
        """Write what is pending, for so long at most, and let go of the files. Idempotent."""
        self._closing = True
        self._wake.set()
        if self._writer is not None:
            await asyncio.wait({self._writer}, timeout=deadline_s)
            self._writer.cancel()
            await asyncio.gather(self._writer, return_exceptions=True)
            self._writer = None
        for _, future in self._pending:
            if not future.done():
                future.set_exception(NotStored("the session server ended before storage took the record"))
        self._pending.clear()
        stuck = self._in_thread is not None and not self._in_thread.done()
        self._thread.shutdown(wait=not stuck, cancel_futures=True)
        if not stuck:  # else the thread still has the file; it ends with the process
            self._store.close()

    async def _write(self) -> None:
        while self._pending or not self._closing:
            if not self._pending:
                self._wake.clear()
                await self._wake.wait()
                continue
            batch = self._pending
            records = [record for record, _ in batch]
            self._pending = []
            try:
                await self._run(self._store.write, records)
            except OSError as error:
                self.trouble = f"{type(error).__name__}: {error}"
                self._pending = [*batch, *self._pending]
                await asyncio.sleep(RETRY_S)
                continue
            except Exception as error:  # a record that can't be written must not keep others from it
                for _, future in batch:
                    if not future.done():
                        future.set_exception(NotStored(f"session journal: {type(error).__name__}: {error}"))
                continue
            self.trouble = ""
            for _, future in batch:
                if not future.done():
                    future.set_result(None)
            try:
                await self._run(self._store.reclaim)
            except OSError as error:
                self.trouble = f"{type(error).__name__}: {error}"

    async def _run(self, work: Callable[..., None], *args: object) -> None:
        self._in_thread = self._thread.submit(work, *args)
        await asyncio.wrap_future(self._in_thread)
