"""The process under attack: a listening endpoint of either face, and what it looks like from the inside.

    stdin  "stats" | "settle" | "quit"  ──▶  one JSON object per line on stdout

Reports go over pipes, so that they don't depend on what is attacked. "settle" collects garbage first and counts the
objects of the control layer that are left.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import json
import logging
import os
import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from miles_hpc.control.auth import load_secret
from miles_hpc.control.frames import Limits
from miles_hpc.control.opening import open_blocking_transport, open_transport
from miles_hpc.core.errors import UserError
from miles_hpc.core.messages import (
    AbortGeneration,
    Ack,
    DescribeWeights,
    EndSession,
    Generate,
    Message,
)
from miles_hpc.core.transport import Credentials, PeerIdentity

__all__ = ["LIMITS", "N_STREAM_ITEMS", "identity"]

#: Smaller than the defaults, so that an overrun is cheap to make.
LIMITS = Limits(header_bytes=1 << 20, payload_bytes=16 << 20, window_messages=512, window_bytes=4 << 20)
N_STREAM_ITEMS = 20
_CONTROL_OBJECTS = frozenset(
    {"StreamWire", "UcxWire", "Conversation", "Exchange", "Incoming", "_Welcome", "AsyncEndpoint", "PlainEndpoint"}
)


def identity(name: str) -> PeerIdentity:
    """Everybody in this test is of attempt 1 and term 1."""
    return PeerIdentity(role="trainer", name=name, host="host", pid=os.getpid(), attempt=1, term=1)


class _LogCount(logging.Handler):
    """Counts lines by logger, and those that hold something secret."""

    def __init__(self, secret: bytes) -> None:
        super().__init__()
        self.lines: Counter[str] = Counter()
        self.n_bytes = 0
        self.leaks = 0
        self.first: list[str] = []
        self._secrets = (secret.hex(), repr(secret)[2:-1])

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        self.lines[f"{record.name}:{record.levelname}"] += 1
        self.n_bytes += len(text)
        self.leaks += any(secret in text for secret in self._secrets)
        if len(self.first) < 20 or (record.levelno >= logging.ERROR and len(self.first) < 40):
            self.first.append(text[:2000])


class Target:
    """Handlers that count who made them run."""

    def __init__(self) -> None:
        self.handled: Counter[str] = Counter()  # peer's name up to its first dash, then what the message claims to be
        self.out_of_order = 0
        self._honest: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def handle(self, endpoint: Any, message: Message, payload: memoryview) -> Any:
        sender = endpoint.peer.name.split("-")[0]
        if isinstance(message, EndSession):
            claim, _, number = message.session_id.partition("-")
            if claim not in ("good", "honest", "forged"):
                claim = "other"
            self.handled[f"{sender}:{claim}"] += 1
            if claim == "honest":
                expected = self._honest.get(endpoint, 0)
                self.out_of_order += number != str(expected)
                self._honest[endpoint] = expected + 1
            return message, [payload[:64]]
        self.handled[f"{sender}:other"] += 1
        if isinstance(message, DescribeWeights):
            return self._items()
        if isinstance(message, Generate):
            return self.wait()
        if isinstance(message, AbortGeneration):
            raise UserError("no such request")
        return None

    def wait(self) -> Any:
        return None

    @staticmethod
    def _items() -> Iterator[Message]:
        for _ in range(N_STREAM_ITEMS):
            yield Ack()


class AsyncTarget(Target):
    """Some messages take a while."""

    async def wait(self) -> None:
        await asyncio.sleep(0.05)


def _rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _report(target: Target, log: _LogCount, listener: Any, loop: Any, command: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if command == "settle":
        gc.collect()
        try:
            ctypes.CDLL(None).malloc_trim(0)  # what is free goes back, so that only what is kept counts
        except AttributeError:
            pass  # not glibc
        kinds = Counter(type(thing).__name__ for thing in gc.get_objects())
        found["objects"] = sum(kinds[name] for name in _CONTROL_OBJECTS)
        found["log_first"] = log.first
    open_ones = listener._endpoints if hasattr(listener, "_endpoints") else listener._open
    is_asyncio = isinstance(loop, asyncio.AbstractEventLoop)
    return found | {
        "rss_bytes": _rss_bytes(),
        "descriptors": sum(1 for _ in Path("/proc/self/fd").iterdir()),
        "tasks": len(asyncio.all_tasks(loop)) if is_asyncio else 0,
        "timers": len(loop._scheduled if is_asyncio else loop._timers),  # type: ignore[attr-defined]
        "half_open": len(listener._greeter._half_open),
        "endpoints": len(open_ones),
        "handled": dict(target.handled),
        "out_of_order": target.out_of_order,
        "log_lines": dict(log.lines),
        "log_bytes": log.n_bytes,
        "log_leaks": log.leaks,
    }


def _answer_requests(target: Target, log: _LogCount, listener: Any, loop: Any, stop: Any) -> None:
    """Called when stdin is readable."""
    for line in os.read(0, 4096).decode().split() or ["quit"]:
        if line == "quit":
            stop()
            return
        print(json.dumps(_report(target, log, listener, loop, line)), flush=True)


async def _serve_asyncio(kind: str, credentials: Credentials, log: _LogCount) -> None:
    target = AsyncTarget()
    over = asyncio.Event()

    async def on_connect(endpoint: Any) -> None:
        name = endpoint.peer.name
        if name.startswith("slow"):
            await asyncio.sleep(0.05)
        elif name.startswith("unwelcome"):
            raise UserError("not wanted here")

    listener = await open_transport(kind, credentials, limits=LIMITS).listen(target.handle, on_connect=on_connect)
    loop = asyncio.get_running_loop()
    loop.add_reader(0, _answer_requests, target, log, listener, loop, over.set)
    print(listener.address, flush=True)
    await over.wait()
    loop.remove_reader(0)
    await listener.close()


def _serve_blocking(kind: str, credentials: Credentials, log: _LogCount) -> None:
    target = Target()
    over: list[bool] = []

    def on_connect(endpoint: Any) -> None:
        if endpoint.peer.name.startswith("unwelcome"):
            raise UserError("not wanted here")

    transport = open_blocking_transport(kind, credentials, limits=LIMITS, spin_s=0.0)
    listener = transport.listen(target.handle, on_connect=on_connect)
    loop = transport._loop
    loop.add_reader(0, lambda: _answer_requests(target, log, listener, loop, lambda: over.append(True)))
    print(listener.address, flush=True)
    transport.serve(lambda: bool(over))
    loop.remove_reader(0)
    transport.close()


def main() -> None:
    """Serve until stdin says quit or ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", required=True)
    parser.add_argument("--face", choices=("asyncio", "blocking"), required=True)
    parser.add_argument("--secret", type=Path, required=True)
    args = parser.parse_args()
    secret = load_secret(args.secret)
    log = _LogCount(secret)
    logging.basicConfig(level=logging.INFO, handlers=[log])
    credentials = Credentials(secret, identity("target"))
    if args.face == "asyncio":
        asyncio.run(_serve_asyncio(args.kind, credentials, log))
    else:
        _serve_blocking(args.kind, credentials, log)


if __name__ == "__main__":
    sys.exit(main())
