"""What listeners share: the life of an accepted endpoint, from authentication to on_close.

authenticated ─▶ on_connect ─▶ ADMIT ─▶ served until closed ─▶ on_close
                    └─ raises ─▶ REFUSE, closed, no on_close
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from miles_hpc.control.calls import CallEndpoint, EndpointHook
from miles_hpc.core.errors import MilesError

__all__ = ["Accepted"]

logger = logging.getLogger(__name__)


class Accepted:
    """The accepted endpoints of one listener and the tasks that look after them."""

    def __init__(self, address: str, on_connect: EndpointHook | None, on_close: EndpointHook | None) -> None:
        self._address = address
        self._on_connect = on_connect
        self._on_close = on_close
        self._endpoints: set[CallEndpoint] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopped = False

    def add(self, endpoint: CallEndpoint) -> None:
        """Admit an authenticated endpoint and serve it until it closes."""
        self._endpoints.add(endpoint)
        endpoint.on_lost = lambda: self._endpoints.discard(endpoint)
        self._start(self._serve(endpoint))
        if self._stopped:
            self._start(endpoint.close("listener closed"))

    async def close(self) -> None:
        """Close all endpoints; later ones are closed as they come."""
        self._stopped = True
        await asyncio.gather(*(endpoint.close("listener closed") for endpoint in list(self._endpoints)))

    async def _serve(self, endpoint: CallEndpoint) -> None:
        try:
            await endpoint.admit(self._on_connect)
        except MilesError as error:
            logger.warning("%s: %s refused: %s", self._address, endpoint.peer.name, error)
            return
        except Exception:
            logger.exception("%s: %s refused: on_connect failed", self._address, endpoint.peer.name)
            return
        await endpoint.closed.wait()
        if self._on_close is not None:
            await self._on_close(endpoint)

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
