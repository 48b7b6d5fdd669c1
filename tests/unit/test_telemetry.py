"""The log of events on storage that refuses some of them."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from miles_hpc.core.telemetry import EventLog, read_events


@pytest.mark.parametrize(
    ("room", "read", "lost"),
    [
        ([None, None, None], ["a", "b", "c"], None),
        ([None, 0, None], ["a", "c"], 1),
        ([0, 0, None], ["c"], 2),
        ([None, 7, None], ["a", "c"], 1),  # cut off within the line
        ([7, 0, None], ["c"], 2),
        ([None, None, 0], ["a", "b"], None),  # nothing came after it
    ],
)
def test_a_full_file_system_loses_events_and_ends_nothing(
    room: list[int | None], read: list[str], lost: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`room`: bytes that the storage takes of each event's line; 0 is a refusal, None all of it."""
    log = EventLog(tmp_path, "trainer", attempt=1)
    write = os.write
    left: int | None = None

    def bounded(fd: int, data: bytes) -> int:
        if left is None:
            return write(fd, data)
        if left == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, data[:left])

    monkeypatch.setattr(os, "write", bounded)
    for name, left in zip("abc", room, strict=True):  # noqa: B007
        log.note(name)
    log.close()
    events = read_events(tmp_path)
    assert [e["name"] for e in events if e["name"] != "events_lost"] == read
    assert [e["count"] for e in events if e["name"] == "events_lost"] == ([] if lost is None else [lost])
