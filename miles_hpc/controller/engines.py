"""Bringing every engine to the weight version that is wanted of it, each at its own pace.

    wanted version ──▶ one task per engine: SyncWeights ─▶ digests equal? ─▶ probe ─▶ (newer wanted? again)

| engines | are brought to |
|---|---|
| for training | the newest version, by `want` |
| set aside for evaluations | the version that `pin` was called for, and no other until its next call |

There is no barrier over engines: a slow or dead one holds up nobody. A version that was overtaken while an engine was
busy is skipped. An engine counts as holding a version only after its digests equal the trainer's. What asks for engines
means those for training unless it says `set_aside`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from miles_hpc.core.errors import IntegrityError, MilesError, ProtocolError
from miles_hpc.core.messages import EngineStatus, ScoreTokens, SyncWeights, WeightsStaged, WeightsSynced
from miles_hpc.core.telemetry import EventLog
from miles_hpc.core.transport import Endpoint
from miles_hpc.core.types import WeightVersion
from miles_hpc.weights.broadcast import KEPT_VERSIONS

__all__ = ["EngineFleet", "Probe", "SyncRecord"]


@dataclass(frozen=True)
class Probe:
    """A fixed batch and the trainer's log-probs of it under one version."""

    tokens: npt.NDArray[np.int32]  # [n, length]
    log_probs: npt.NDArray[np.float32]  # [n, length - 1]


@dataclass(frozen=True)
class SyncRecord:
    """One verified sync of one engine."""

    engine: str
    version: WeightVersion
    total_s: float
    paused_s: float
    probe_abs_diff_mean: float | None


@dataclass(frozen=True, eq=False)
class _Target:
    """A version that engines can be brought to."""

    staged: WeightsStaged
    probe: Probe | None

    @property
    def version(self) -> WeightVersion:
        return self.staged.version


@dataclass
class _Engine:
    host: str
    status: EngineStatus
    task: asyncio.Task[None] | None = None


class EngineFleet:
    """All engines of a term, by name."""

    def __init__(
        self,
        endpoint_of: Callable[[str], Endpoint | None],
        events: EventLog,
        *,
        deadline_s: float,
        changed: Callable[[], None],
    ) -> None:
        """`endpoint_of` maps a rollout host's member name to its endpoint; `changed` is called after each sync."""
        self._endpoint_of = endpoint_of
        self._events = events
        self._deadline_s = deadline_s
        self._changed = changed
        self._engines: dict[str, _Engine] = {}
        self._staged: deque[_Target] = deque(maxlen=KEPT_VERSIONS)  # what the trainer still serves, oldest first
        self._pinned: _Target | None = None
        self._records: list[SyncRecord] = []

    # ------------------------------------------------------------------------------------------ roster

    def update(self, host: str, statuses: tuple[EngineStatus, ...]) -> None:
        """A host told which engines it has."""
        names = {s.name for s in statuses if s.alive}
        for name in [n for n, e in self._engines.items() if e.host == host and n not in names]:
            self._forget(name)
        for status in statuses:
            if not status.alive:
                continue
            known = self._engines.get(status.name)
            if known is None:
                self._engines[status.name] = _Engine(host, status)
            else:
                known.host, known.status = host, status
        self._start_syncs()

    def lose_host(self, host: str) -> None:
        for name in [n for n, e in self._engines.items() if e.host == host]:
            self._forget(name)

    def _forget(self, name: str) -> None:
        engine = self._engines.pop(name)
        if engine.task is not None:
            engine.task.cancel()
        self._changed()

    def _pool(self, set_aside: bool) -> Iterator[tuple[str, _Engine]]:
        return ((name, e) for name, e in self._engines.items() if e.status.set_aside is set_aside)

    def serving(self, version: WeightVersion | None = None, *, set_aside: bool = False) -> list[str]:
        """Engines that hold `version` (any version when None), sorted."""
        held = [(name, e.status.version) for name, e in self._pool(set_aside) if e.status.version is not None]
        return sorted(name for name, v in held if version is None or v == version)

    def slots(
        self, host: str, *, serving: bool = True, set_aside: bool = False, at_least: WeightVersion | None = None
    ) -> int:
        """Generation slots of a host's engines.

        With `serving` only of those that hold a version, with `at_least` of those that hold it or a newer one.
        """
        mine = [e.status for _, e in self._pool(set_aside) if e.host == host]
        if at_least is not None:
            mine = [s for s in mine if s.version is not None and s.version >= at_least]
        return sum(s.slots for s in mine if s.version is not None or not serving)

    def oldest_step(self) -> int | None:
        """Step of the oldest weights that an engine for training serves; None when none serves."""
        steps = [e.status.version.step for _, e in self._pool(False) if e.status.version is not None]
        return min(steps, default=None)

    def count(self, *, set_aside: bool = False) -> int:
        """How many engines there are."""
        return sum(1 for _ in self._pool(set_aside))

    def take_records(self) -> list[SyncRecord]:
        """The syncs since the last call."""
        taken, self._records = self._records, []
        return taken

    # ------------------------------------------------------------------------------------------ syncs

    def want(self, staged: WeightsStaged, probe: Probe | None) -> None:
        """From now on engines for training are brought to this version."""
        self._staged.append(_Target(staged, probe))
        self._start_syncs()

    def pin(self) -> WeightVersion:
        """From now on engines that are set aside are brought to the newest version, and stay there.

        Raises ProtocolError when no version was ever wanted.
        """
        if not self._staged:
            raise ProtocolError("engines are set aside for an evaluation, but no weights were staged yet")
        self._pinned = self._staged[-1]
        self._start_syncs()
        return self._pinned.version

    @property
    def pin_lasts(self) -> bool:
        """Whether an engine that is set aside holds the pinned version, or could still get it from the trainer."""
        return self._target(True) is not None or self.pin_held

    @property
    def pin_held(self) -> bool:
        """Whether an engine that is set aside holds the pinned version."""
        return self._pinned is not None and bool(self.serving(self._pinned.version, set_aside=True))

    def close(self) -> None:
        for engine in self._engines.values():
            if engine.task is not None:
                engine.task.cancel()

    def _target(self, set_aside: bool) -> _Target | None:
        """What engines of this pool are to hold; None when there is none, or the trainer doesn't serve it any more."""
        if not set_aside:
            return self._staged[-1] if self._staged else None
        return self._pinned if self._pinned in self._staged else None

    def _start_syncs(self) -> None:
        for name, engine in self._engines.items():
            target = self._target(engine.status.set_aside)
            if target is not None and engine.task is None and engine.status.version != target.version:
                engine.task = asyncio.create_task(self._follow(name, engine))

    async def _follow(self, name: str, engine: _Engine) -> None:
        """Sync one engine until it holds the version that is wanted of it."""
        failures = 0
        try:
            while (target := self._target(engine.status.set_aside)) and engine.status.version != target.version:
                try:
                    await self._sync(name, engine, target)
                    failures = 0
                except MilesError as error:
                    failures += 1
                    if self._target(engine.status.set_aside) is target:
                        self._events.verdict("sync_failed", peer=name, evidence=str(error), count=failures)
                    if self._endpoint_of(engine.host) is None:
                        return
                    await asyncio.sleep(min(2.0, 0.1 * 2**failures))
        finally:
            engine.task = None

    async def _sync(self, name: str, engine: _Engine, target: _Target) -> None:
        staged, probe = target.staged, target.probe
        endpoint = self._endpoint_of(engine.host)
        if endpoint is None:
            return
        message = SyncWeights(
            engine=name,
            version=staged.version,
            source=staged.source,
            plan_digest=staged.plan_digest,
            deadline_s=self._deadline_s,
        )
        with self._events.span("sync", engine=name, step=staged.version.step):
            reply = (await endpoint.call(message, deadline_s=self._deadline_s + 5.0)).message
        if not isinstance(reply, WeightsSynced) or reply.version != staged.version:
            raise IntegrityError(f"engine {name} answered {reply} to a sync to {staged.version}")
        if reply.digests != staged.digests:
            wrong = [k for k, v in staged.digests.items() if reply.digests.get(k) != v]
            raise IntegrityError(
                f"engine {name} holds other bytes than the trainer for {len(wrong)} tensors: {wrong[:3]}"
            )
        engine.status = msgspec.structs.replace(engine.status, version=reply.version, alive=True)
        self._changed()
        difference = None
        if probe is not None:
            difference = await self._probe(name, endpoint, staged.version, probe)
        record = SyncRecord(name, reply.version, reply.total_s, reply.paused_s, difference)
        self._records.append(record)
        self._events.verdict(
            "engine_synced",
            peer=name,
            version=str(reply.version),
            digests=len(reply.digests),
            probe_abs_diff_mean=difference,
            total_s=round(reply.total_s, 4),
            paused_s=round(reply.paused_s, 4),
        )

    async def _probe(self, name: str, endpoint: Endpoint, version: WeightVersion, probe: Probe) -> float | None:
        """Mean |log-prob difference| between engine and trainer on the probe batch; None when overtaken."""
        n, length = probe.tokens.shape
        ask = ScoreTokens(n=n, length=length, engine=name)
        reply = await endpoint.call(ask, payload=[probe.tokens.tobytes()], deadline_s=self._deadline_s)
        scored_version = getattr(reply.message, "version", None)
        if scored_version != version:
            return None
        scores = np.frombuffer(reply.payload, np.float32).reshape(n, length - 1)
        return float(np.abs(scores.astype(np.float64) - probe.log_probs.astype(np.float64)).mean())
