"""The trainer group's agent: one per rank, because Slurm hands each task its own PMI connection.

The agent starts the rank as its child and passes that connection on (the open descriptor that PMI_FD names, or the
PMIx variables). When the rank ends, the agent ends with its exit code, and `srun --kill-on-bad-exit=1` ends the rest of
the world: one rank's death ends the role's step.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

from miles_hpc.control.agent import AgentApp, AgentIdentity
from miles_hpc.control.children import ChildProcess
from miles_hpc.core.messages import Message
from miles_hpc.core.paths import RunPaths
from miles_hpc.core.transport import Endpoint, HandlerResult

__all__ = ["TrainerApp"]

_OWN_END_S = 2.0


class TrainerApp(AgentApp):
    """Owns one rank."""

    def __init__(self, paths: RunPaths, identity: AgentIdentity, *, stopped_s: float, world: int = 0) -> None:
        """A rank that is stopped for `stopped_s` seconds is killed: the others wait for it in a collective.

        `world` is the number of tasks of a step over all roles; 0 when the step is the trainer's own.
        """
        self._stopped_s = stopped_s
        self._world = world
        self._paths = paths
        self._identity = identity
        self._rank: ChildProcess | None = None
        self._watcher: asyncio.Task[None] | None = None

    async def start(self) -> None:
        me = self._identity
        command = [sys.executable, "-P", "-m", "launchers.trainer", "--run-dir", str(self._paths.root)]
        command += ["--attempt", str(me.attempt), "--incarnation", str(me.incarnation), "--host", me.host]
        command += ["--world", str(self._world)]
        log = self._log()
        self._rank = ChildProcess(f"rank{me.rank}", command, log=log, env=os.environ, inherit_fds=True)
        self._watcher = asyncio.create_task(self._watch(self._rank))

    def _log(self) -> Path:
        me = self._identity
        return self._paths.logs(me.attempt) / f"trainer-rank{me.rank}-i{me.incarnation}.log"

    async def _watch(self, rank: ChildProcess) -> None:
        guard = asyncio.create_task(rank.kill_when_stopped(self._stopped_s))
        code = await rank.wait()
        guard.cancel()
        if not self.failed.done():
            # A signal's number becomes a shell's exit code; a rank that ended by itself was told to.
            self.failed.set_result(128 - code if code < 0 else code)

    async def joined(self, endpoint: Endpoint, term: int) -> None:
        """The rank follows the terms by itself."""

    async def left(self) -> None:
        """Nothing: the rank looks for the newer term as well, and the lease bounds both."""

    async def handle(self, message: Message, payload: memoryview) -> HandlerResult:
        return None

    def children(self) -> tuple[str, ...]:
        return () if self._rank is None or self._rank.exit_code is not None else (self._rank.name,)

    async def close(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
        if self._rank is not None and self._rank.exit_code is None:
            # It is told to end as this agent is, and ends MPI with the others; a rank that is killed there keeps them.
            try:
                await asyncio.wait_for(self._rank.wait(), _OWN_END_S)
                return
            except TimeoutError:
                pass
            self._rank.signal(signal.SIGINT)  # it leaves SIGTERM to those who decide (launchers/trainer.py)
            await self._rank.end(grace_s=3.0)
