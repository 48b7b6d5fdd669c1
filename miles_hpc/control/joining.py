"""Serving a run from outside its job: one fresh agent per attempt, for as long as the run goes on.

    newest attempt ─▶ fresh agent ─▶ told to shut down ──▶ completed? ─▶ done
         ▲                 │  lost, fenced                     │
         └──── wait_s ◀────┴───────────────────────────────────┘

An agent belongs to one attempt; the process that runs this belongs to none. It needs the run directory alone: the
rendezvous and the secret lie there. It may leave at any time: to the controller that is a lost host, whose groups are
given to others, and nobody starts it again.

| who waits | for whom | bound |
|---|---|---|
| a joining process | an attempt, and a controller that accepts it | wait_s without having been accepted |
| the controller | nobody: who has joined gets work, who has left is lost | |
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any

import msgspec

from miles_hpc.control.agent import Agent, AgentApp, AgentIdentity
from miles_hpc.control.terms import claim_incarnation, newest_attempt
from miles_hpc.core import exits
from miles_hpc.core.config import ControlConfig
from miles_hpc.core.deadline import Deadline
from miles_hpc.core.errors import DeadlineExpired, FencedError, MilesError
from miles_hpc.core.paths import RunPaths

__all__ = ["Joining", "read_outcome"]

_POLL_S = 0.5
_RETRY_S = 2.0
#: An agent whose app fails so often in a row without ever having been accepted won't get better by itself.
_FAILURES = 5


def read_outcome(paths: RunPaths, attempt: int) -> str:
    """How an attempt ended: completed, continue, failed or fenced; "" while it goes on, or when its node was lost."""
    try:
        record: Any = msgspec.json.decode(paths.outcome(attempt).read_bytes())
    except (FileNotFoundError, msgspec.DecodeError):
        return ""
    return str(record.get("outcome", "")) if isinstance(record, dict) else ""


class Joining:
    """A rollout or sandbox host of a run, started by whoever has the run directory and the right to read its secret."""

    def __init__(
        self,
        paths: RunPaths,
        control: ControlConfig,
        secret: bytes,
        *,
        role: str,
        host: str,
        make_app: Callable[[AgentIdentity], AgentApp],
        wait_s: float,
    ) -> None:
        """`host` must be unique in the run. `make_app` makes what the role does, once per attempt."""
        self._paths = paths
        self._control = control
        self._secret = secret
        self._role = role
        self._host = host
        self._make_app = make_app
        self._wait_s = wait_s
        self._over: set[int] = set()  # attempts that told us to end
        self._failures = 0
        self._last = "no allocation has started yet"

    async def run(self) -> int:
        """Serve until the run is complete (exits.DONE), or nobody took us for `wait_s`.

        That is DONE when we have served before, since a run may end for good without being complete; else raises
        DeadlineExpired. Raises FencedError when another process joined under the same name.
        """
        served = False
        deadline = self._deadline()
        while True:
            attempt = newest_attempt(self._paths)
            outcome = read_outcome(self._paths, attempt) if attempt else ""
            if outcome == "completed":
                return self._say(exits.DONE, "the run is complete")
            if attempt == 0 or outcome or attempt in self._over:
                self._last = f"attempt {attempt} ended: {outcome or 'it said so'}" if attempt else self._last
            elif await self._serve(attempt, deadline):
                served = True
                deadline = self._deadline()
                continue
            if deadline.expired:
                if served:
                    return self._say(exits.DONE, f"no further allocation after {self._wait_s:.0f} s; {self._last}")
                raise DeadlineExpired(f"{deadline.error()}; {self._last}")
            await asyncio.sleep(min(_POLL_S, deadline.remaining_s + 0.001))

    def _deadline(self) -> Deadline:
        return Deadline(self._wait_s, f"{self._role} host {self._host}: waiting to be taken in by {self._paths.root}")

    async def _serve(self, attempt: int, deadline: Deadline) -> bool:
        """Be a member of one attempt until it ends or loses us; returns whether its controller ever accepted us."""
        name = f"{self._role}-{self._host}"
        identity = AgentIdentity(
            role=f"{self._role}-agent",
            name=name,
            host=self._host,
            attempt=attempt,
            incarnation=claim_incarnation(self._paths, attempt, name),
        )
        control = msgspec.structs.replace(self._control, start_deadline_s=max(0.001, deadline.remaining_s))
        agent = Agent(identity, self._make_app(identity), self._paths, control, self._secret)
        work = asyncio.create_task(agent.run())
        try:
            while not work.done():
                await asyncio.wait({work}, timeout=_POLL_S)
                if not agent.served and read_outcome(self._paths, attempt):
                    work.cancel()  # it ended before it took us in
                    await asyncio.gather(work, return_exceptions=True)
                    return False
            code = work.result()
        except FencedError as error:
            if newest_attempt(self._paths) == attempt:
                raise
            self._last = str(error)
            return agent.served
        except DeadlineExpired as error:
            self._last = str(error)
            await asyncio.sleep(_POLL_S)
            return agent.served
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
        if code == exits.DONE:
            self._over.add(attempt)
        elif code != exits.FENCED:
            self._failures = 0 if agent.served else self._failures + 1
            self._last = f"the agent ended with exit code {code}"
            if self._failures >= _FAILURES:
                raise MilesError(f"{name}: failed {self._failures} times in a row: {self._last}")
            await asyncio.sleep(_RETRY_S)
        return agent.served

    def _say(self, code: int, text: str) -> int:
        print(f"join: {self._host}: {text}", file=sys.stderr, flush=True)
        return code
