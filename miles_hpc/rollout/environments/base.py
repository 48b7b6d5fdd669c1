"""The environment contract: what a task is, what one turn does, what it is worth.

An environment runs in the rollout host (no torch). It is stateless itself; what a trajectory needs lives in its
`Episode`. Real commands run on sandbox hosts through the `Sandboxes` that it is given.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

from miles_hpc.core.messages import SandboxResult
from miles_hpc.core.types import ChatMessage, Prompt
from miles_hpc.rollout.sandbox_files import SandboxFile

__all__ = ["Environment", "Episode", "Sandboxes", "Turn"]


class Sandboxes(Protocol):
    """Isolated working folders somewhere; every call has a deadline of its own."""

    async def create(self, sandbox_id: str, files: dict[str, str]) -> None:
        """A new sandbox with these text files in its working folder."""

    async def execute(
        self,
        sandbox_id: str,
        command: str,
        *,
        timeout_s: float | None = None,
        max_output_bytes: int | None = None,
    ) -> SandboxResult:
        """Run one command; the run's own limits (rollout.sandbox_*) where none are given."""

    async def put(
        self, sandbox_id: str, folder: str, files: Mapping[str, SandboxFile], *, replace: bool = False
    ) -> SandboxResult:
        """Write files below `folder` ("" = the working folder), as `SandboxHost.put` does."""

    async def get(self, sandbox_id: str, path: str, max_bytes: int) -> bytes | None:
        """A plain file's bytes, as `SandboxHost.get` gives them."""

    async def destroy(self, sandbox_id: str) -> None:
        """End the sandbox; unknown names are fine."""


@dataclass(frozen=True)
class Turn:
    """What the environment says to one assistant message.

    With `done` the trajectory ends with `reward`; otherwise `messages` are appended and the model goes on.
    """

    messages: tuple[ChatMessage, ...] = ()
    done: bool = False
    reward: float = 0.0


class Episode(ABC):
    """One trajectory's state in its environment. Used by one task at a time."""

    @abstractmethod
    async def step(self, text: str) -> Turn:
        """The assistant said `text`. May run commands; bounded by the sandbox's limits."""

    @abstractmethod
    async def close(self) -> None:
        """Free everything; idempotent, called on every path."""

    def demonstrate(self) -> str | None:
        """The next assistant message of a scripted demonstration; None when the demonstration ends.

        Seeded by the prompt. Environments without demonstrations return None at once.
        """
        return None


class Environment(ABC):
    """A family of tasks. Made from `environment.options` of the run file; bad ones raise UserError."""

    name: str
    #: Options that are paths: submit makes them absolute, because roles start in other folders.
    path_options: ClassVar[tuple[str, ...]] = ()
    #: What a user should know before the run starts, a line each; submit shows them.
    warnings: tuple[str, ...] = ()
    #: Assistant messages that an episode may take; rollout.max_turns should be no less. 0 = no matter.
    max_turns: int = 0
    #: Seconds that an episode may spend here, the model's own time apart; rollout.trajectory_deadline_s should be more.
    episode_s: float = 0.0

    @abstractmethod
    def prompt(self, seed: int, *, split: str) -> Prompt:
        """The task of this seed; pure. `split` is train, eval or demo; equal seeds of two splits share no task.

        Raises UserError for a split that has no tasks.
        """

    @abstractmethod
    def start(self, prompt: Prompt, sandboxes: Sandboxes, *, episode_id: str, seed: int) -> Episode:
        """A new episode; `episode_id` is unique in the run. Doesn't block: work starts with the first step."""
