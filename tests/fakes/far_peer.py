"""A peer on another host, told what to do: one endpoint of a transport, of either face, driven by JSON lines.

    python -m tests.fakes.far_peer KIND FACE NAME SECRET_FILE

| order (stdin) | answer (stdout, with the order's `id`, `elapsed_s`, `error`, `text`) |
|---|---|
| {"do": "listen", "bind": A} | `address` |
| {"do": "connect", "address": A, "deadline_s": X} | |
| {"do": "call", "bytes": N, "deadline_s": X} | `intact`: the echo is what was sent |
| {"do": "hang", "deadline_s": X} | a call that the other side never answers |
| {"do": "notify", "bytes": N, "times": M, "deadline_s": X} | `sent`: how many were taken before the time was over |
| {"do": "close"} | |
| {"do": "leave"} | ucx: leaves the path as if it were stuck, without a word to the peer |
| {"do": "sockets"} | `open`: TCP sockets of this process, listeners not counted |

With the asyncio face orders run at the same time, with the blocking face one after the other; `hang` is begun there and
answered when it is over. Unasked: {"event": "accepted" | "closed", "text": reason}.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from miles_hpc.control.auth import load_secret
from miles_hpc.control.opening import open_blocking_transport, open_transport
from miles_hpc.core.errors import DeadlineExpired, MilesError
from miles_hpc.core.messages import Ack, EndSession, Heartbeat, Message, Shutdown
from miles_hpc.core.transport import (
    BlockingEndpoint,
    BlockingListener,
    Buffer,
    Credentials,
    Endpoint,
    Listener,
    PeerIdentity,
    PendingCall,
)

_POLL_S = 0.02
_out = 1


def _say(**fields: Any) -> None:
    os.write(_out, (json.dumps({"at": time.monotonic(), **fields}) + "\n").encode())


def _tell_answer(order: dict[str, Any], began: float, error: Exception | None, result: dict[str, Any]) -> None:
    _say(
        event="answer",
        id=order["id"],
        elapsed_s=time.monotonic() - began,
        error=type(error).__name__ if error is not None else "",
        text=str(error) if error is not None else "",
        **result,
    )


def _tcp_sockets() -> int:
    """Connected sockets of this process, whatever library made them."""
    inodes = set()
    for fd in Path("/proc/self/fd").iterdir():
        try:
            inodes.add(str(fd.readlink()))
        except FileNotFoundError:
            pass  # the listing's own
    lines = Path("/proc/self/net/tcp").read_text().splitlines()[1:]
    lines += Path("/proc/self/net/tcp6").read_text().splitlines()[1:]
    rows = [line.split() for line in lines]
    return sum(row[3] != "0A" and f"socket:[{row[9]}]" in inodes for row in rows)  # 0A = LISTEN


# ------------------------------------------------------------------------------------------ asyncio


class AsyncPeer:
    """Has at most one listener and one endpoint: the one it dialled, or the newest accepted."""

    def __init__(self, kind: str, credentials: Credentials) -> None:
        self._transport = open_transport(kind, credentials)
        self._listener: Listener | None = None
        self._endpoint: Endpoint | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        _say(event="ready")
        while line := await reader.readline():
            self._start(self._answer(json.loads(line)))

    def _start(self, coroutine: Any) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, order: dict[str, Any]) -> None:
        began, error, result = time.monotonic(), None, {}
        try:
            result = await self._obey(**order)
        except MilesError as caught:
            error = caught
        _tell_answer(order, began, error, result)

    async def _handle(
        self, endpoint: Endpoint, message: Message, payload: memoryview
    ) -> tuple[Message, Sequence[Buffer]] | None:
        if isinstance(message, Shutdown):
            await asyncio.sleep(3600)
        return None if isinstance(message, EndSession) else (Ack(), [payload])

    def _adopt(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._start(self._watch(endpoint))

    async def _watch(self, endpoint: Endpoint) -> None:
        await endpoint.closed.wait()
        _say(event="closed", text=endpoint.close_reason)

    async def _accepted(self, endpoint: Endpoint) -> None:
        self._adopt(endpoint)
        _say(event="accepted")

    async def _obey(
        self,
        do: str,
        id: int,
        bind: str = "",
        address: str = "",
        bytes: int = 0,
        times: int = 1,
        deadline_s: float = 0.0,
    ) -> dict[str, Any]:
        if do == "listen":
            self._listener = await self._transport.listen(self._handle, bind=bind, on_connect=self._accepted)
            return {"address": self._listener.address}
        if do == "connect":
            self._adopt(await self._transport.connect(address, self._handle, deadline_s=deadline_s))
            return {}
        if do == "sockets":
            return {"open": _tcp_sockets()}
        endpoint, data = self._endpoint, os.urandom(bytes)
        assert endpoint is not None
        if do == "call":
            reply = await endpoint.call(Heartbeat(), payload=[data], deadline_s=deadline_s)
            return {"intact": reply.payload == data}
        if do == "hang":
            await endpoint.call(Shutdown(reason=""), deadline_s=deadline_s)
        elif do == "notify":
            sent, end = 0, time.monotonic() + deadline_s
            try:
                while sent < times:
                    async with asyncio.timeout(end - time.monotonic()):
                        await endpoint.notify(EndSession(session_id="x"), payload=[data])
                    sent += 1
            except TimeoutError:
                return {"sent": sent, "held_back": True}
            return {"sent": sent, "held_back": False}
        elif do == "leave":
            _leave_path(endpoint)
        elif do == "close":
            await endpoint.close("told to")
        return {}


# ------------------------------------------------------------------------------------------ blocking


class BlockingPeer:
    """The same with the blocking face. A thread reads the orders; all else is done by the main thread."""

    def __init__(self, kind: str, credentials: Credentials) -> None:
        self._transport = open_blocking_transport(kind, credentials)
        self._listener: BlockingListener | None = None
        self._endpoint: BlockingEndpoint | None = None
        self._orders: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._hanging: list[tuple[dict[str, Any], float, PendingCall]] = []
        self._told_closed = True

    def serve(self) -> None:
        threading.Thread(target=self._read, daemon=True).start()
        _say(event="ready")
        while True:
            self._transport.serve(lambda: not self._orders.empty() or self._over(), deadline_s=_POLL_S)
            self._tell_what_is_over()
            if not self._orders.empty():
                line = self._orders.get()
                if not line:
                    return
                self._answer(json.loads(line))

    def _read(self) -> None:
        for line in sys.stdin:
            self._orders.put(line)
        self._orders.put("")

    def _over(self) -> bool:
        return any(call.done for _, _, call in self._hanging)

    def _tell_what_is_over(self) -> None:
        if self._endpoint is not None and self._endpoint.closed and not self._told_closed:
            self._told_closed = True
            _say(event="closed", text=self._endpoint.close_reason)
        over = [hanging for hanging in self._hanging if hanging[2].done]
        self._hanging = [hanging for hanging in self._hanging if not hanging[2].done]
        for order, began, call in over:
            _tell_answer(order, began, _error_of(call.result), {})

    def _answer(self, order: dict[str, Any]) -> None:
        began, error, result = time.monotonic(), None, {}
        try:
            answer = self._obey(**order)
        except MilesError as caught:
            error = caught
        else:
            if answer is None:  # `hang`
                return
            result = answer
        _tell_answer(order, began, error, result)

    def _handle(self, endpoint: BlockingEndpoint, message: Message, payload: memoryview) -> Any:
        if isinstance(message, Shutdown):  # would wait for ever: serves until the other side has given up
            self._transport.serve(lambda: endpoint.closed, deadline_s=3600)
        return None if isinstance(message, EndSession) else (Ack(), [payload])

    def _adopt(self, endpoint: BlockingEndpoint) -> None:
        self._endpoint, self._told_closed = endpoint, False

    def _accepted(self, endpoint: BlockingEndpoint) -> None:
        self._adopt(endpoint)
        _say(event="accepted")

    def _obey(
        self,
        do: str,
        id: int,
        bind: str = "",
        address: str = "",
        bytes: int = 0,
        times: int = 1,
        deadline_s: float = 0.0,
    ) -> dict[str, Any] | None:
        if do == "listen":
            self._listener = self._transport.listen(self._handle, bind=bind, on_connect=self._accepted)
            return {"address": self._listener.address}
        if do == "connect":
            self._adopt(self._transport.connect(address, self._handle, deadline_s=deadline_s))
            return {}
        if do == "sockets":
            return {"open": _tcp_sockets()}
        endpoint, data = self._endpoint, os.urandom(bytes)
        assert endpoint is not None
        if do == "call":
            return {"intact": endpoint.call(Heartbeat(), payload=[data], deadline_s=deadline_s).payload == data}
        if do == "hang":
            call = endpoint.begin(Shutdown(reason=""), deadline_s=deadline_s)
            order = {"do": do, "id": id, "deadline_s": deadline_s}
            self._hanging.append((order, time.monotonic(), call))
            return None
        if do == "notify":
            sent, end = 0, time.monotonic() + deadline_s
            try:
                while sent < times:
                    left = max(0.0, end - time.monotonic())
                    endpoint.notify(EndSession(session_id="x"), payload=[data], deadline_s=left)
                    sent += 1
            except DeadlineExpired:
                return {"sent": sent, "held_back": True}
            return {"sent": sent, "held_back": False}
        if do == "leave":
            _leave_path(endpoint)
        elif do == "close":
            endpoint.close("told to")
        return {}


def _leave_path(endpoint: Any) -> None:
    shared = endpoint.conversation._wire.shared
    shared.wires.clear()
    shared.leave("")


def _error_of(result: Callable[[], Any]) -> Exception | None:
    try:
        result()
    except MilesError as error:
        return error
    return None


def main() -> None:
    global _out
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind")
    parser.add_argument("face", choices=("asyncio", "blocking"))
    parser.add_argument("name")
    parser.add_argument("secret", type=Path)
    args = parser.parse_args()
    _out = os.dup(1)  # libraries print to stdout
    os.dup2(2, 1)
    identity = PeerIdentity(
        role="rollout", name=args.name, host=os.uname().nodename, pid=os.getpid(), attempt=1, term=1
    )
    credentials = Credentials(load_secret(args.secret), identity)
    if args.face == "blocking":
        BlockingPeer(args.kind, credentials).serve()
        return

    async def run() -> None:
        await AsyncPeer(args.kind, credentials).serve()

    asyncio.run(run())


if __name__ == "__main__":
    main()
