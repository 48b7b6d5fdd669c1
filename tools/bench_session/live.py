"""The real sglang-router as a policy of the replay: it routes each request of the trace, in simulated time.

    replay ─ choose ─▶ POST /generate ─▶ sglang-router ─▶ one of N backends here: "it came to me"
       │                                                        │ keeps the answer
       ╰──── finished ─▶ the backend answers ◀──────────────────╯

So the router sees as many requests in flight as the trace has then, and the caches are the replay's. A request's text
has a character for every 8 tokens, the same for the same pieces: what a cache-aware policy compares.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Coroutine, Sequence
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import aiohttp
import msgspec
from aiohttp import web

from miles_hpc.core.errors import ProtocolError
from miles_hpc.rollout.session.listening import bind
from tools.bench_session.backend import ANSWER
from tools.bench_session.peer import Router
from tools.bench_session.policies import Policy
from tools.bench_session.trace import Piece, TracedSession

__all__ = ["LiveRouter"]

_DEADLINE_S = 30.0
_TOKENS_PER_CHARACTER = 8
_LETTERS = "abcdefghijklmnopqrstuvwxyz "
_SILENT = logging.getLogger(f"{__name__}.backends")
_SILENT.addHandler(logging.NullHandler())
_SILENT.propagate = False
T = TypeVar("T")


class LiveRouter(Policy):
    """One router with `policy` over as many backends as engines. Close it. Raises what `Router` raises."""

    def __init__(
        self,
        engines: int,
        seed: int,
        trace: tuple[TracedSession, ...],
        *,
        python: Path,
        folder: Path,
        policy: str,
    ) -> None:
        super().__init__(engines, seed, trace)
        self._texts: dict[str, str] = {}
        self._numbers: dict[str, int] = {}  # of the request in flight, by session
        self._asked: dict[int, asyncio.Task[None]] = {}
        self._arrived: dict[int, asyncio.Future[int]] = {}
        self._answers: dict[int, asyncio.Event] = {}
        self._next = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="live-router", daemon=True)
        self._thread.start()
        self._runners: list[web.AppRunner] = []
        self._router: Router | None = None
        try:
            urls = self._do(self._serve())
            self._router = Router(python, urls, folder, policy=policy)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Idempotent."""
        if self._router is not None:
            self._router.close()
        if self._thread.is_alive():
            self._do(self._end())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_DEADLINE_S)

    def choose(self, key: str, prompt: Sequence[Piece], new_tokens: int, now_s: float) -> int:
        assert self._router is not None
        self._next += 1
        self._numbers[key] = self._next
        text = "".join(self._text(piece) for piece in prompt)
        return self._do(self._ask(self._next, f"{self._router.url}/generate", key, text))

    def finished(self, key: str, engine: int, context_tokens: int, cached_tokens: int, now_s: float) -> None:
        super().finished(key, engine, context_tokens, cached_tokens, now_s)
        self._do(self._answered(self._numbers.pop(key)))

    # ------------------------------------------------------------------------------------------- in the loop's thread

    async def _serve(self) -> list[str]:
        self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        urls = []
        for engine in range(self.engines):
            application = web.Application(client_max_size=64 << 20)
            application.add_routes([web.post("/generate", self._backend(engine)), web.get("/{any:.*}", _told)])
            # The router first tries whether a worker speaks gRPC: that is no request, and no error.
            runner = web.AppRunner(application, access_log=None, logger=_SILENT, shutdown_timeout=0.5)
            listening, url = bind("127.0.0.1:0")
            await runner.setup()
            await web.SockSite(runner, listening).start()
            self._runners.append(runner)
            urls.append(url)
        return urls

    def _backend(self, engine: int) -> Any:
        async def generate(request: web.Request) -> web.Response:
            number = int(msgspec.json.decode(await request.read())["rid"])
            self._arrived[number].set_result(engine)
            await self._answers[number].wait()
            return web.Response(body=ANSWER, content_type="application/json")

        return generate

    async def _ask(self, number: int, url: str, key: str, text: str) -> int:
        self._arrived[number] = asyncio.get_running_loop().create_future()
        self._answers[number] = asyncio.Event()
        body = msgspec.json.encode({"rid": str(number), "text": text, "sampling_params": {"max_new_tokens": 16}})
        self._asked[number] = asyncio.create_task(self._post(url, key, body))
        either: set[asyncio.Future[Any]] = {self._arrived[number], self._asked[number]}
        done, _ = await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if self._arrived[number] not in done:
            self._asked[number].result()
            raise ProtocolError(f"sglang-router answered request {number} itself")
        return self._arrived.pop(number).result()

    async def _post(self, url: str, key: str, body: bytes) -> None:
        headers = {"Content-Type": "application/json", "X-SMG-Routing-Key": key}
        async with self._http.post(url, data=body, headers=headers) as answer:
            content = await answer.read()
            if answer.status != 200:
                raise ProtocolError(f"sglang-router: status {answer.status}: {content[:200]!r}")

    async def _answered(self, number: int) -> None:
        self._answers.pop(number).set()
        await self._asked.pop(number)

    async def _end(self) -> None:
        for event in self._answers.values():
            event.set()
        for task in self._asked.values():
            task.cancel()
        await asyncio.gather(*self._asked.values(), return_exceptions=True)
        await self._http.close()
        for runner in self._runners:
            await runner.cleanup()

    # ------------------------------------------------------------------------------------------- inside

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(asyncio.wait_for(work, _DEADLINE_S), self._loop).result()

    def _text(self, piece: Piece) -> str:
        text = self._texts.get(piece.name)
        if text is None:
            n = max(piece.n_tokens // _TOKENS_PER_CHARACTER, 1)
            text = self._texts[piece.name] = "".join(Random(piece.name).choices(_LETTERS, k=n))
        return text


async def _told(request: web.Request) -> web.Response:
    return web.json_response({"status": "ok", "is_generation": True, "tp_size": 1, "dp_size": 1})
