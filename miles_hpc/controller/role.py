"""The controller process: one term after the other until the run is complete or the allocation ends.

    claim term ─▶ plan_start ─▶ TermLoop.run ─▶ completed ─▶ exit 0
        ▲                          │ │ └─ allocation ends ─▶ drained and saved ─▶ exit 10
        └──── trainer lost ────────┘ └─ fenced ─▶ exit 75

A trainer that was lost takes its optimizer state with it, so the run goes back to the newest manifest. Weight versions
are never reused, hence a new term; agents follow it, engines keep running and get the older weights as a new version.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from pathlib import Path

from checkpoints.journal import JournalWriter, read_journals
from checkpoints.manifest import list_checkpoints, started_after
from miles_hpc.control.terms import claim_term
from miles_hpc.controller.ending import AllocationEnds
from miles_hpc.controller.loop import TermLoop
from miles_hpc.controller.recovery import choose_checkpoint, plan_start
from miles_hpc.controller.trainer_calls import TrainerLost
from miles_hpc.core import exits
from miles_hpc.core.config import RunConfig, SiteConfig
from miles_hpc.core.paths import RunPaths
from miles_hpc.core.telemetry import EventLog
from miles_hpc.core.transport import Credentials, PeerIdentity

__all__ = ["ControllerRole"]


class ControllerRole:
    """Runs terms. One instance per process."""

    def __init__(
        self,
        run: RunConfig,
        site: SiteConfig,
        paths: RunPaths,
        secret: bytes,
        *,
        attempt: int,
        end_time: float | None,
    ) -> None:
        self._run = run
        self._site = site
        self._paths = paths
        self._secret = secret
        self._attempt = attempt
        self._end_time = end_time
        self._oldest_incarnation: dict[str, int] = {}
        self._unreadable: set[Path] = set()
        self._ending = asyncio.Event()
        self._warned = asyncio.Event()
        self._terminated = False

    async def run(self) -> int:
        """Returns an exit code of core.exits; raises what the caller reports."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR1, self._on_warning)
        loop.add_signal_handler(signal.SIGTERM, self._on_termination)
        while True:
            try:
                await self._term()
                return exits.DONE
            except AllocationEnds as end:
                print(f"controller: {end}", file=sys.stderr, flush=True)
                return exits.NEXT_ALLOCATION
            except TrainerLost as lost:
                if self._terminated:  # everything ends, the trainer before us
                    print(f"controller: terminated: {lost}", file=sys.stderr, flush=True)
                    return exits.FAILED
                print(f"controller: {lost}; back to the newest readable checkpoint", file=sys.stderr, flush=True)
                self._oldest_incarnation["trainer"] = lost.incarnation + 1
                if lost.unreadable is not None:
                    self._unreadable.add(lost.unreadable)

    async def _term(self) -> None:
        term = claim_term(self._paths, self._attempt)
        events = EventLog(self._paths.events, "controller", attempt=self._attempt, term=term)
        try:
            plan = plan_start(
                choose_checkpoint(list_checkpoints(self._paths.checkpoints), self._unreadable),
                read_journals(self._paths.journal),
                reuse=self._run.rollout.reuse_after_restart,
            )
            started = started_after(plan.manifest, term=term, attempt=self._attempt)
            events.note("term", base_term=started.base_term, base_step=started.base_step)
            identity = PeerIdentity(
                role="controller",
                name="controller",
                host=socket.gethostname(),
                pid=os.getpid(),
                attempt=self._attempt,
                term=term,
            )
            with JournalWriter.create(self._paths.journal, started) as journal:
                loop = TermLoop(
                    self._run,
                    self._site,
                    self._paths,
                    Credentials(self._secret, identity),
                    plan,
                    journal,
                    events,
                    oldest_incarnation=self._oldest_incarnation,
                    ending=self._ending,
                    warned=self._warned,
                    remaining_s=self._remaining_s,
                )
                await loop.run()
        finally:
            events.close()

    def _on_warning(self) -> None:
        """Slurm's signal before the limit, which it sends up to a minute early: the state is saved at the next step,
        and when to stop is decided by the clock, where the end is known."""
        self._warned.set()
        if self._end_time is None:
            self._ending.set()

    def _on_termination(self) -> None:
        self._terminated = True
        self._ending.set()

    def _remaining_s(self) -> float | None:
        """Seconds left of the allocation; None when nothing ends it."""
        return None if self._end_time is None else self._end_time - time.time()
