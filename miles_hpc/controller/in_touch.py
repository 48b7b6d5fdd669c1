"""The supervisor's side of the control layer: in touch with whichever controller this allocation has."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable

from miles_hpc.control.children import ChildProcess
from miles_hpc.control.membership import find_controller, overtaken
from miles_hpc.control.multihomed import connect_any
from miles_hpc.control.opening import open_transport
from miles_hpc.core.config import RunConfig
from miles_hpc.core.errors import DeadlineExpired, FencedError, MilesError
from miles_hpc.core.messages import Heartbeat
from miles_hpc.core.paths import RunPaths
from miles_hpc.core.transport import Credentials, Handler, PeerIdentity

__all__ = ["stay_in_touch"]

_CONNECT_S = 5.0
_LOOK_S = 0.1
_RETRY_S = 0.2


async def stay_in_touch(
    run: RunConfig,
    paths: RunPaths,
    attempt: int,
    secret: bytes,
    controller: ChildProcess,
    handler: Handler,
    on_silent: Callable[[str], None],
) -> None:
    """Be a member of the controller's roster while it lives: it tells `handler` which host or role to restart.

    A controller that is there and answers nothing for `control.lease_s` is killed, after `on_silent` got the evidence.
    Raises FencedError when this allocation is over.
    """
    term = 0
    answered: float | None = None  # None: not in touch, or it hung up, which only a living process does
    while controller.exit_code is None:
        try:
            found = find_controller(paths, attempt)
            if found is None or found.term < term:
                await asyncio.sleep(_LOOK_S)
                continue
            term = found.term
            identity = PeerIdentity(
                role="supervisor",
                name="supervisor",
                host=socket.gethostname(),
                pid=os.getpid(),
                attempt=attempt,
                term=term,
            )
            transport = open_transport(run.control.transport, Credentials(secret, identity))
            endpoint = await connect_any(transport, found.addresses, handler, deadline_s=_CONNECT_S, name=found.name)
            try:
                while not endpoint.closed.is_set():
                    await endpoint.call(Heartbeat(), deadline_s=run.control.lost_after_s)
                    answered = time.monotonic()
                    await asyncio.sleep(run.control.heartbeat_interval_s)
            finally:
                await endpoint.close("supervisor left")
        except FencedError:
            if not overtaken(paths, attempt, term):
                raise
        except DeadlineExpired as error:
            silent_s = 0.0 if answered is None else time.monotonic() - answered
            if silent_s > run.control.lease_s:  # agents have given up as well: nothing is lost with it
                on_silent(f"no answer for {silent_s:.1f} s: {error}")
                controller.kill()
                return
            await asyncio.sleep(_RETRY_S)
        except MilesError:
            answered = None
            await asyncio.sleep(_RETRY_S)
