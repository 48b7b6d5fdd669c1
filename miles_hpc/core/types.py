"""The vocabulary that every layer shares: frozen, tagged, readable from Python 3.11 to 3.13.

Arrays travel as `Array` (dtype, shape, raw little-endian bytes), so that a payload file written by a rollout
host in one Python environment is read by a trainer rank in another without pickle.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:  # a process that only talks starts without numpy: 0.1 s of processor time
    import numpy.typing as npt

__all__ = [
    "Array",
    "ChatMessage",
    "FinishReason",
    "GroupPurpose",
    "GroupSummary",
    "MicrobatchPlan",
    "ModelShape",
    "PackedItem",
    "PayloadRef",
    "Prompt",
    "RoutedExpertsRef",
    "SampleStatus",
    "SamplingParams",
    "SandboxLimit",
    "Trajectory",
    "TrajectoryGroup",
    "TrajectorySummary",
    "VersionSpan",
    "WeightPiece",
    "WeightVersion",
]


class Struct(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the vocabulary: frozen, keyword-only, unknown fields refused."""


class WeightVersion(msgspec.Struct, frozen=True, order=True, array_like=True):
    """(term, step): the weights after optimizer step `step`, as trained under claim `term`. Never reused.

    Versions of one lineage are ordered by `step`; staleness is counted in steps.
    """

    term: int
    step: int

    def __str__(self) -> str:
        return f"{self.term}.{self.step}"

    @classmethod
    def parse(cls, text: str) -> WeightVersion:
        """Inverse of str(); raises ValueError."""
        term, _, step = text.partition(".")
        return cls(int(term), int(step))


class SampleStatus(enum.StrEnum):
    """How a trajectory ended (Miles' Sample.Status values)."""

    COMPLETED = "completed"
    TRUNCATED = "truncated"  # a bound on turns, tokens or time ended it; it is trained
    ABORTED = "aborted"  # ended from outside; its group isn't trained
    FAILED = "failed"  # environment or engine failed; its group isn't trained


class SandboxLimit(enum.StrEnum):
    """The bound of its sandbox that a command met (rollout/sandbox_bounds.py)."""

    NONE = ""
    TIME = "time"  # the caller's
    OUTPUT = "output"  # it wrote on and on
    CPU = "cpu"  # of one process
    FILE = "file"  # size of one
    FOLDER = "folder"  # bytes or files of the working folder or /tmp
    PROCESSES = "processes"  # of the sandbox together, threads included


class FinishReason(enum.StrEnum):
    """Why an engine stopped one generation."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class GroupPurpose(enum.StrEnum):
    """What a trajectory group is for."""

    TRAIN = "train"
    EVAL = "eval"
    DEMO = "demo"  # a scripted demonstration, for the SFT warm start


class Array(Struct, frozen=True, kw_only=True):
    """A numpy array as raw bytes. `dtype` is numpy's name of a little-endian or one-byte type."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, array: npt.NDArray[Any]) -> Array:
        import numpy as np

        little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
        return cls(dtype=little.dtype.name, shape=little.shape, data=little.tobytes())

    def numpy(self) -> npt.NDArray[Any]:
        """A read-only view; raises ValueError when bytes and shape disagree."""
        import numpy as np

        return np.frombuffer(self.data, dtype=np.dtype(self.dtype).newbyteorder("<")).reshape(self.shape)


class SamplingParams(Struct, frozen=True, kw_only=True):
    """How an engine draws tokens. `temperature` 0 means greedy."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None  # with a seed the result doesn't depend on what else is in the batch


class ChatMessage(Struct, frozen=True, kw_only=True):
    """One message of a conversation; `role` is system, user, assistant or tool."""

    role: str
    content: str


class Prompt(Struct, frozen=True, kw_only=True):
    """A task input. `data` is the environment's own description of the task, made from `seed` alone."""

    environment: str
    messages: tuple[ChatMessage, ...]
    data: dict[str, Any] = {}
    label: str = ""  # task kind, for statistics
    seed: int = 0


class VersionSpan(Struct, frozen=True, kw_only=True):
    """Tokens [start, end) of a trajectory were sampled by `version`."""

    version: WeightVersion
    start: int
    end: int


class RoutedExpertsRef(Struct, frozen=True, kw_only=True):
    """Where a trajectory's routed experts lie: rows [start, end) of array `key` in the store `store`.

    `store` is relative to the run directory. The array has shape [rows, moe_layers, top_k]; row i of the
    trajectory is the routing of token i as an input, so there is one row fewer than there are tokens.
    """

    store: str
    key: str
    start: int
    end: int


class Trajectory(Struct, frozen=True, kw_only=True):
    """The token record of one generation over all its turns. T is its number of tokens."""

    group_id: int
    index: int
    tokens: Array  # int32 [T]
    loss_mask: Array  # uint8 [T], 1 only on sampled tokens
    log_probs: Array  # float32 [T], the engine's, of the sampled tokens; 0 elsewhere
    versions: tuple[VersionSpan, ...]  # cover exactly the sampled tokens, in order
    reward: float
    status: SampleStatus
    turns: int
    label: str = ""
    routed_experts: RoutedExpertsRef | None = None
    metadata: dict[str, Any] = {}
    rollout_id: int | None = None  # branches of one agent's session share it; None: index


class TrajectoryGroup(Struct, frozen=True, kw_only=True):
    """All trajectories of one prompt; the content of a payload file."""

    group_id: int
    attempt: int  # which try of this group, from 0
    purpose: GroupPurpose
    prompt: Prompt
    trajectories: tuple[Trajectory, ...]


class PayloadRef(Struct, frozen=True, kw_only=True):
    """A payload file: path relative to the run directory, size and CRC-32 of its bytes."""

    path: str
    n_bytes: int
    crc32: int


class TrajectorySummary(Struct, frozen=True, kw_only=True):
    """What the controller needs of a trajectory without opening its payload."""

    index: int
    n_tokens: int
    n_loss_tokens: int
    reward: float
    status: SampleStatus
    turns: int
    oldest_version: WeightVersion | None  # None when nothing was sampled by an engine (a demonstration)
    label: str = ""
    routed_experts: RoutedExpertsRef | None = None
    rollout_id: int | None = None  # as Trajectory's
    sampled: tuple[tuple[WeightVersion, int], ...] = ()  # sampled tokens by version, oldest first

    @property
    def rollout(self) -> int:
        """Which of the group's rollouts this is a trajectory of."""
        return self.index if self.rollout_id is None else self.rollout_id


class GroupSummary(Struct, frozen=True, kw_only=True):
    """A finished group as its host announces it."""

    group_id: int
    attempt: int
    purpose: GroupPurpose
    payload: PayloadRef
    trajectories: tuple[TrajectorySummary, ...]
    duration_s: float
    generation_s: float  # summed over trajectories: waiting for an engine
    environment_s: float  # summed over trajectories: waiting for the environment
    host: str = ""

    @property
    def rollouts(self) -> tuple[TrajectorySummary, ...]:
        """One trajectory of each rollout, the first: its reward and status are those of all its branches."""
        return tuple({t.rollout: t for t in reversed(self.trajectories)}.values())[::-1]

    @property
    def oldest_version(self) -> WeightVersion | None:
        """Oldest version of any sampled token; None when no engine sampled."""
        versions = [t.oldest_version for t in self.trajectories if t.oldest_version is not None]
        return min(versions, key=lambda v: v.step) if versions else None


class PackedItem(Struct, frozen=True, kw_only=True):
    """One trajectory at its place in a microbatch: tokens [offset, offset + n_tokens) of row `row`."""

    payload: PayloadRef
    group_id: int
    index: int
    n_tokens: int
    n_loss_tokens: int
    row: int
    offset: int
    advantage: float
    routed_experts: RoutedExpertsRef | None = None


class MicrobatchPlan(Struct, frozen=True, kw_only=True):
    """What one forward takes: `rows` rows of `row_tokens` tokens with several trajectories in each row."""

    rows: int
    row_tokens: int
    items: tuple[PackedItem, ...]


class WeightPiece(Struct, frozen=True, kw_only=True):
    """One tensor of a weight version as engines hold it, after any transform; `digest` is BLAKE2b-128 of its bytes."""

    name: str
    dtype: str  # torch's name without the prefix: float32, bfloat16
    shape: tuple[int, ...]
    n_bytes: int
    digest: bytes


class ModelShape(Struct, frozen=True, kw_only=True):
    """What other roles need to know of a model without importing torch."""

    vocab_size: int
    max_position_embeddings: int
    moe_layers: tuple[int, ...] = ()  # model layer number of each MoE layer, in order
    n_experts: int = 0
    top_k: int = 0
