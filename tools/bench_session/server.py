"""A real session server on loopback over engines that answer at once, as a program of its own.

    python -m tools.bench_session.server FOLDER        a model folder; the journal goes beside it

Prints one JSON object, {"url", "token"}, and serves until it is ended.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
from pathlib import Path

from aiohttp import web

from miles_hpc.rollout.session.book import SessionBook
from miles_hpc.rollout.session.gateway import EngineGateway
from miles_hpc.rollout.session.journal import SessionJournal
from miles_hpc.rollout.session.listening import bind
from miles_hpc.rollout.session.server import SessionServer
from miles_hpc.rollout.session.settings import SessionLimits, SessionSettings
from tools.bench_session.engines import V1, InstantEngine
from tools.fuzz_session.templates import folder_template

__all__ = ["main"]

_ENGINES = 4
_ANSWER_TOKENS = 99
_ANSWER = "the tool said that a file is a call and a user wants another answer, then it ends\n" * 8


async def serve(folder: Path) -> None:
    tokenizer, template = folder_template(folder)
    gateway = EngineGateway()
    output = [*tokenizer.encode(_ANSWER)[:_ANSWER_TOKENS], template.stop_ids[0]]
    for i in range(_ENGINES):
        gateway.add_engine(f"e{i}", InstantEngine(f"e{i}", output), V1)
    journal, stored = SessionJournal.open(folder.parent / "journal")
    book = SessionBook(tokenizer, gateway, journal, SessionLimits(context_tokens=1 << 18))
    token = secrets.token_urlsafe(32)
    server = SessionServer(book, defaults=SessionSettings(tool_parser="hermes"), token=token, routed_experts=False)
    runner = web.AppRunner(server.application, access_log=None, handler_cancellation=True, shutdown_timeout=1)
    listening, url = bind("127.0.0.1:0")
    journal.start()
    book.restore(stored)
    await runner.setup()
    await web.SockSite(runner, listening).start()
    print(json.dumps({"url": url, "token": token}), flush=True)
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(prog="server")
    parser.add_argument("folder", type=Path)
    asyncio.run(serve(parser.parse_args().folder))


if __name__ == "__main__":
    main()
