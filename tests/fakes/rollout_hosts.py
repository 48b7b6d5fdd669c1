"""Rollout hosts as a controller sees them: endpoints that answer at once, and what they were told.

A test decides when a host's groups are done (`FakeHost.play`), whether its engines get weights (`FakeHost.syncs`), and
calls the dispatcher's handlers as the controller's loop would.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from miles_hpc.core.deadline import Deadline
from miles_hpc.core.errors import PeerLost, ProtocolError
from miles_hpc.core.messages import (
    AbortGroups,
    Ack,
    EngineStatus,
    GenerateGroup,
    Message,
    SyncWeights,
    WeightsStaged,
    WeightsSynced,
)
from miles_hpc.core.transport import Reply
from miles_hpc.core.types import (
    GroupSummary,
    PayloadRef,
    SampleStatus,
    TrajectorySummary,
    WeightVersion,
)

__all__ = ["FakeHost", "FakeMembers", "Told", "finished", "staged", "until"]


class Told:
    """An event log that keeps what it is told."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str, dict[str, Any]]] = []  # kind, name, fields
        self.metrics: list[tuple[int, dict[str, float]]] = []

    def note(self, name: str, **fields: Any) -> None:
        self.events.append(("note", name, fields))

    def verdict(self, name: str, **fields: Any) -> None:
        self.events.append(("verdict", name, fields))

    def metric(self, step: int, values: dict[str, float]) -> None:
        self.metrics.append((step, values))

    def span(self, name: str, **fields: Any) -> Any:
        class _Span:
            def __enter__(self) -> None: ...
            def __exit__(self, *_: object) -> None: ...

        self.events.append(("span", name, fields))
        return _Span()

    def named(self, name: str) -> list[dict[str, Any]]:
        return [fields for _, found, fields in self.events if found == name]


class FakeHost:
    """One host; its engines are `<name>-e0`, ... with `slots` each, the last `n_set_aside` of them set aside."""

    def __init__(self, name: str, n_engines: int = 1, *, slots: int = 8, n_set_aside: int = 0) -> None:
        self.name = name
        self.versions: dict[str, WeightVersion | None] = {f"{name}-e{i}": None for i in range(n_engines)}
        self.slots = slots
        self.set_aside = set(sorted(self.versions)[n_engines - n_set_aside :])
        self.lost = False
        self.syncs: Callable[[str, WeightVersion], bool] = lambda engine, version: True
        self.fetches: list[tuple[str, WeightVersion]] = []
        self.groups: list[GenerateGroup] = []  # under way, in order
        self.aborted: list[AbortGroups] = []

    def status(self) -> tuple[EngineStatus, ...]:
        return tuple(
            EngineStatus(name=n, slots=self.slots, version=v, alive=True, set_aside=n in self.set_aside)
            for n, v in self.versions.items()
        )

    async def call(self, message: Message, *, payload: Sequence[Any] = (), deadline_s: float) -> Reply:
        await asyncio.sleep(0)
        if self.lost:
            raise PeerLost(f"{self.name} is gone")
        return Reply(message=self._answer(message), payload=memoryview(b""))

    def _answer(self, message: Message) -> Message:
        if isinstance(message, GenerateGroup):
            self.groups.append(message)
            return Ack()
        if isinstance(message, AbortGroups):
            self.aborted.append(message)
            gone = {(message.purpose, group_id) for group_id in message.group_ids}
            self.groups = [g for g in self.groups if (g.purpose, g.group_id) not in gone]
            return Ack()
        if isinstance(message, SyncWeights):
            self.fetches.append((message.engine, message.version))
            if not self.syncs(message.engine, message.version):
                raise ProtocolError(f"weight version {message.version} isn't staged here")
            self.versions[message.engine] = message.version
            return WeightsSynced(
                engine=message.engine, version=message.version, digests={}, n_bytes=0, paused_s=0.0, total_s=0.0
            )
        raise AssertionError(f"unexpected {type(message).__name__}")

    def sampling_version(self, message: GenerateGroup) -> WeightVersion:
        """What an engine that may take this group holds; the group's host would wait for one."""
        held = [v for n, v in self.versions.items() if (n in self.set_aside) is message.set_aside and v is not None]
        fitting = [v for v in held if message.at_least is None or v >= message.at_least]
        assert fitting, f"{self.name} was given {message} but holds {self.versions}"
        return max(fitting)


def finished(host: FakeHost, message: GenerateGroup, reward: float = 1.0) -> GroupSummary:
    """The group as its host announces it, played by what it holds now."""
    version = host.sampling_version(message)
    return GroupSummary(
        group_id=message.group_id,
        attempt=message.attempt,
        purpose=message.purpose,
        payload=PayloadRef(path=f"journal/spool/{message.purpose}-{message.group_id}", n_bytes=1, crc32=0),
        trajectories=tuple(
            TrajectorySummary(
                index=i,
                n_tokens=10,
                n_loss_tokens=4,
                reward=reward,
                status=SampleStatus.COMPLETED,
                turns=1,
                oldest_version=version,
                label="a",
                sampled=((version, 4),),
            )
            for i in range(message.n_samples)
        ),
        duration_s=1.0,
        generation_s=1.0,
        environment_s=0.0,
        host=host.name,
    )


class FakeMembers:
    """The roster of these hosts."""

    def __init__(self, hosts: Sequence[FakeHost]) -> None:
        self.hosts = {host.name: host for host in hosts}

    def with_role(self, role: str) -> list[Any]:
        assert role == "rollout-agent"
        return [self.peer(host) for host in self.hosts.values() if not host.lost]

    def peer(self, host: FakeHost) -> Any:
        return SimpleNamespace(name=host.name, role="rollout-agent")

    def endpoint(self, name: str) -> Any:
        host = self.hosts.get(name)
        return None if host is None or host.lost else host

    def touch(self) -> None:
        return None

    async def wait(self, ready: Callable[[], bool], deadline: Deadline) -> None:
        while not ready():
            deadline.check()
            await asyncio.sleep(0.005)


def staged(term: int, step: int) -> WeightsStaged:
    """What the trainer says of a version that it serves."""
    return WeightsStaged(
        version=WeightVersion(term, step), source="here", plan_digest=b"", digests={}, n_bytes=0, stage_s=0.0
    )


async def until(condition: Callable[[], Any], what: str) -> None:
    """Wait for it, a few seconds at most."""
    deadline = Deadline(10.0, what)
    while not condition():
        deadline.check()
        await asyncio.sleep(0.005)
