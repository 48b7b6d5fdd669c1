"""A generation that the server returned in several parts, because updates ended it in between. Pure."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from miles_hpc.core.errors import MilesError
from miles_hpc.core.types import FinishReason, VersionSpan
from miles_hpc.rollout.engine import Generation

__all__ = ["Parts", "Request"]


@dataclass(eq=False)
class Request:
    """One generate under way. It may take several requests to the server."""

    request_id: str
    session_id: str
    task: asyncio.Future[Generation] | None = None
    aborted: bool = False  # by its caller or its deadline
    failure: MilesError | None = None  # the weights under it were lost
    rid: str = ""  # at the server, now


@dataclass
class Parts:
    """What the server returned for one request so far."""

    output_ids: list[npt.NDArray[np.int32]] = field(default_factory=list)
    log_probs: list[npt.NDArray[np.float32]] = field(default_factory=list)
    rows: list[npt.NDArray[np.unsignedinteger]] = field(default_factory=list)
    versions: list[VersionSpan] = field(default_factory=list)
    cached_tokens: int | None = None

    @property
    def n_output(self) -> int:
        return sum(map(len, self.output_ids))

    @property
    def n_rows(self) -> int:
        return sum(map(len, self.rows))

    def add(self, part: Generation) -> None:
        """The next part; its spans count from its own first token."""
        at = self.n_output
        for span in part.versions:
            before = self.versions[-1] if self.versions else None
            if before is not None and before.version == span.version:
                self.versions[-1] = VersionSpan(version=span.version, start=before.start, end=at + span.end)
            else:
                self.versions.append(VersionSpan(version=span.version, start=at + span.start, end=at + span.end))
        self.output_ids.append(part.output_ids)
        self.log_probs.append(part.log_probs)
        if part.routed_experts is not None:
            self.rows.append(part.routed_experts)
        if self.cached_tokens is None:
            self.cached_tokens = part.cached_tokens

    def whole(self, reason: FinishReason, *, no_rows: npt.NDArray[np.unsignedinteger] | None) -> Generation:
        """All parts as one generation. `no_rows`: routed experts of no token; None for a model without."""
        return Generation(
            output_ids=np.concatenate([np.empty(0, np.int32), *self.output_ids]),
            log_probs=np.concatenate([np.empty(0, np.float32), *self.log_probs]),
            versions=tuple(self.versions),
            finish_reason=reason,
            routed_experts=None if no_rows is None else np.concatenate([no_rows, *self.rows]),
            cached_tokens=self.cached_tokens or 0,
        )
