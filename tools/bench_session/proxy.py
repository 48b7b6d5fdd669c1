"""Our router as an HTTP proxy of its own, as nobody uses it: for comparing it with a router that is one.

    python -m tools.bench_session.proxy URL [URL ...]      prints {"url"}; POST /generate with X-SMG-Routing-Key

Bodies pass unread; their length stands for their tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time

import aiohttp
from aiohttp import web

from miles_hpc.rollout.routing import SessionRouter
from miles_hpc.rollout.session.listening import bind
from tools.bench_session.engines import V1

__all__ = ["main"]

_DEADLINE_S = 30.0


async def serve(urls: list[str]) -> None:
    router = SessionRouter(V1)
    for url in urls:
        router.join(url, V1)
    # Without an idle time that ends: the backends never hang up.
    http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), auto_decompress=False)
    timeout = aiohttp.ClientTimeout(total=_DEADLINE_S)

    async def generate(request: web.Request) -> web.Response:
        key, body = request.headers.get("X-SMG-Routing-Key"), await request.read()
        route = router.route(key, prompt_tokens=len(body), new_tokens=len(body), now_s=time.monotonic())
        try:
            headers = {"Content-Type": "application/json"}
            async with http.post(f"{route.engine}/generate", data=body, headers=headers, timeout=timeout) as answer:
                return web.Response(body=await answer.read(), status=answer.status, content_type="application/json")
        finally:
            router.finish(route, context_tokens=len(body), cached_tokens=None, now_s=time.monotonic())

    application = web.Application(client_max_size=64 << 20)
    application.add_routes([web.post("/generate", generate)])
    runner = web.AppRunner(application, access_log=None)
    listening, url = bind("127.0.0.1:0")
    await runner.setup()
    await web.SockSite(runner, listening).start()
    print(json.dumps({"url": url}), flush=True)
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(prog="proxy")
    parser.add_argument("urls", nargs="+")
    asyncio.run(serve(parser.parse_args().urls))


if __name__ == "__main__":
    main()
