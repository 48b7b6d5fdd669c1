"""Tiny backends: what a router needs to see of SGLang's HTTP surface, at next to no cost. A program of its own.

    python -m tools.bench_session.backend N            prints {"urls": [...]}, serves on N loopback ports

POST /generate is answered at once with the same 16 tokens and log-probs; every GET with what a health check or a router's
look at a worker wants. HTTP/1.1 with keep-alive and Content-Length, nothing else.
"""  # noqa: E501

from __future__ import annotations

import argparse
import asyncio
import json

__all__ = ["ANSWER", "OUTPUT_TOKENS", "STOP_ID", "main"]

OUTPUT_TOKENS = 16
STOP_ID = 2

_OUTPUT = [*range(10, 10 + OUTPUT_TOKENS - 1), STOP_ID]

#: The answer to every generation.
ANSWER = json.dumps(
    {
        "text": "",
        "output_ids": _OUTPUT,
        "meta_info": {
            "id": "tiny",
            "finish_reason": {"type": "stop", "matched": STOP_ID},
            "completion_tokens": OUTPUT_TOKENS,
            "cached_tokens": 0,
            "weight_version": "1.1",
            "output_token_logprobs": [[-1.0, token, None] for token in _OUTPUT],
        },
    }
).encode()
_ABOUT = json.dumps(
    {"status": "ok", "is_generation": True, "weight_version": "1.1", "tp_size": 1, "dp_size": 1}
).encode()


def _response(body: bytes) -> bytes:
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


_GENERATED, _TOLD = _response(ANSWER), _response(_ABOUT)


class _Connection(asyncio.Protocol):
    def __init__(self) -> None:
        self._seen = bytearray()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        self._seen += data
        while (end := self._seen.find(b"\r\n\r\n")) >= 0:
            head = bytes(self._seen[:end])
            length = _content_length(head)
            if len(self._seen) < end + 4 + length:
                return
            del self._seen[: end + 4 + length]
            self._transport.write(_GENERATED if head.startswith(b"POST /generate ") else _TOLD)


def _content_length(head: bytes) -> int:
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length":
            return int(value)
    return 0


async def _serve(n: int) -> None:
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(_Connection, "127.0.0.1", 0) for _ in range(n)]
    ports = [server.sockets[0].getsockname()[1] for server in servers]
    print(json.dumps({"urls": [f"http://127.0.0.1:{port}" for port in ports]}), flush=True)
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(prog="backend")
    parser.add_argument("n", type=int)
    asyncio.run(_serve(parser.parse_args().n))


if __name__ == "__main__":
    main()
