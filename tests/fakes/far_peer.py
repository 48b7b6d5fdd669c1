"""A peer on another host, told what to do: one endpoint of a transport, driven by JSON lines.

    python -m tests.fakes.far_peer KIND NAME SECRET_FILE [--term N]

| order (stdin) | answer (stdout, with the order's `id`, `elapsed_s`, `error`, `text`) |
|---|---|
| {"do": "listen", "bind": A} | `address` |
| {"do": "connect", "address": A, "deadline_s": X} | |
| {"do": "call", "bytes": N, "deadline_s": X} | `intact`: the echo is what was sent; N = 0 sends no payload |
| {"do": "hang", "deadline_s": X} | a call that the other side never answers |
| {"do": "notify", "bytes": N, "times": M, "deadline_s": X} | `sent`: how many returned before the time was over |
| {"do": "close"} | |
| {"do": "sockets"} | `open`: descriptors of this process that are sockets |

Orders run at the same time. Unasked: {"event": "accepted" | "closed", "text": reason}.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from miles_hpc.control.auth import load_secret
from miles_hpc.control.opening import open_transport
from miles_hpc.core.errors import MilesError
from miles_hpc.core.messages import Ack, EndSession, Heartbeat, Message, Shutdown
from miles_hpc.core.transport import Buffer, Credentials, Endpoint, Listener, PeerIdentity

_out = 1


def _say(**fields: Any) -> None:
    os.write(_out, (json.dumps({"at": time.monotonic(), **fields}) + "\n").encode())


class FarPeer:
    """Has at most one listener and one endpoint: the one it dialled, or the newest accepted."""

    def __init__(self, kind: str, credentials: Credentials) -> None:
        self._transport = open_transport(kind, credentials)
        self._listener: Listener | None = None
        self._endpoint: Endpoint | None = None
        self._watchers: set[asyncio.Task[None]] = set()

    async def _handle(
        self, endpoint: Endpoint, message: Message, payload: memoryview
    ) -> tuple[Message, Sequence[Buffer]] | None:
        if isinstance(message, Shutdown):
            await asyncio.sleep(3600)
        return None if isinstance(message, EndSession) else (Ack(), [payload])

    def _adopt(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._watchers.add(asyncio.create_task(self._watch(endpoint)))

    async def _watch(self, endpoint: Endpoint) -> None:
        await endpoint.closed.wait()
        _say(event="closed", text=endpoint.close_reason)

    async def _accepted(self, endpoint: Endpoint) -> None:
        self._adopt(endpoint)
        _say(event="accepted")

    async def obey(self, order: dict[str, Any]) -> dict[str, Any]:
        match order["do"]:
            case "listen":
                self._listener = await self._transport.listen(
                    self._handle, bind=order["bind"], on_connect=self._accepted
                )
                return {"address": self._listener.address}
            case "connect":
                self._adopt(
                    await self._transport.connect(order["address"], self._handle, deadline_s=order["deadline_s"])
                )
                return {}
            case "sockets":
                targets = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_there(fd)]
                return {"open": sum(target.startswith("socket:") for target in targets)}
        endpoint = self._endpoint
        assert endpoint is not None
        match order["do"]:
            case "call":
                data = os.urandom(order["bytes"])
                reply = await endpoint.call(
                    Heartbeat(), payload=[data] if data else [], deadline_s=order["deadline_s"]
                )
                return {"intact": hashlib.blake2b(reply.payload).digest() == hashlib.blake2b(data).digest()}
            case "hang":
                await endpoint.call(Shutdown(reason=""), deadline_s=order["deadline_s"])
                return {}
            case "notify":
                return await self._notify(endpoint, **{k: order[k] for k in ("bytes", "times", "deadline_s")})
            case "close":
                await endpoint.close("told to")
                return {}
            case other:
                raise ValueError(other)

    async def _notify(self, endpoint: Endpoint, bytes: int, times: int, deadline_s: float) -> dict[str, Any]:
        sent, data = 0, os.urandom(bytes)
        try:
            async with asyncio.timeout(deadline_s):
                for sent in range(times):  # noqa: B007
                    await endpoint.notify(EndSession(session_id="x"), payload=[data])
                sent = times
        except TimeoutError:
            return {"sent": sent, "blocked": True}
        return {"sent": sent, "blocked": False}


def _is_there(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


async def _serve(peer: FarPeer) -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    running: set[asyncio.Task[None]] = set()
    _say(event="ready")
    while line := await reader.readline():
        task = asyncio.create_task(_answer(peer, json.loads(line)))
        running.add(task)
        task.add_done_callback(running.discard)


async def _answer(peer: FarPeer, order: dict[str, Any]) -> None:
    began, error, result = time.monotonic(), None, {}
    try:
        result = await peer.obey(order)
    except MilesError as caught:
        error = caught
    _say(
        event="answer",
        id=order["id"],
        elapsed_s=time.monotonic() - began,
        error=type(error).__name__ if error is not None else "",
        text=str(error) if error is not None else "",
        **result,
    )


def main() -> None:
    global _out
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind")
    parser.add_argument("name")
    parser.add_argument("secret", type=Path)
    parser.add_argument("--term", type=int, default=1)
    args = parser.parse_args()
    _out = os.dup(1)  # libraries print to stdout
    os.dup2(2, 1)
    identity = PeerIdentity(
        role="rollout", name=args.name, host=os.uname().nodename, pid=os.getpid(), attempt=1, term=args.term
    )

    async def run() -> None:
        await _serve(FarPeer(args.kind, Credentials(load_secret(args.secret), identity)))

    asyncio.run(run())


if __name__ == "__main__":
    main()
