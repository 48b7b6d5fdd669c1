"""What roles say to each other. Tagged msgspec structs, MessagePack on the wire; roles meet here and nowhere else.

    controller -> rollout host   GenerateGroup AbortGroups SyncWeights ScoreTokens Shutdown
    rollout host -> controller   HostStatus GroupDone
    controller -> trainer rank 0 LoadState TrainStep StageWeights SaveCheckpoint ScoreTokens Shutdown
    trainer rank 0 -> controller CheckpointWritten
    rollout host -> trainer      FetchPieces            (weights, pulled piece by piece)
    rollout host -> engine       EngineInfo Generate AbortGeneration EngineSync ScoreTokens
    session server -> engine     EngineInfo Generate AbortGeneration EndSession
    rollout host -> session srv. SessionEngines Shutdown
    rollout host -> sandbox host SandboxCreate SandboxExec SandboxDestroy
    agent -> controller          Heartbeat ChildEvent
    controller -> supervisor     RestartHost RestartRole RunEnded
    controller -> agent          OpenRelay
    anybody -> anybody           Relay RelayProbe      (a command on its way to many)

A reply is a struct as well. Arrays in a message travel in the payload behind the header wherever they are large.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Union

import msgspec

from miles_hpc.core.types import (
    FinishReason,
    GroupPurpose,
    GroupSummary,
    MicrobatchPlan,
    ModelShape,
    Prompt,
    SamplingParams,
    SandboxLimit,
    VersionSpan,
    WeightPiece,
    WeightVersion,
)

__all__ = ["MESSAGE_TYPES", "Message", "decode", "encode"]


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="_"):
    """Base of every message."""

    #: The handler may be stopped when its caller gives up. Off for what would be left half done.
    cancellable: ClassVar[bool] = False
    #: Isn't held back when the peer's window is used up: a full window must not look like a dead process.
    urgent: ClassVar[bool] = False


# ---------------------------------------------------------------------------------------------- general


class Ack(Message, frozen=True, kw_only=True):
    """Done, nothing to tell."""


class Heartbeat(Message, frozen=True, kw_only=True):
    """An agent is alive and so are these children; sent every heartbeat interval.

    The reply (Ack) is what renews the agent's lease. `notice` says that the agent was told from outside to end soon.
    """

    urgent: ClassVar[bool] = True

    children: tuple[str, ...] = ()
    notice: str = ""


class ChildEvent(Message, frozen=True, kw_only=True):
    """A child of an agent ended. `exit_code` is negative for a signal, as subprocess has it."""

    child: str
    exit_code: int
    log_tail: str = ""


class Shutdown(Message, frozen=True, kw_only=True):
    """End now; everything that counts has been saved."""

    urgent: ClassVar[bool] = True

    reason: str


class RelayTarget(msgspec.Struct, frozen=True, array_like=True):
    """A process that a command is for: its name, and where it listens (tried in this order)."""

    name: str
    addresses: tuple[str, ...] = ()


class Relay(Message, frozen=True, kw_only=True):
    """A command for this process and for `targets`, to which this process passes it on. Reply: RelayDone.

    `message` is the command itself, encoded. `(root, number)` is its id: a process runs one id once and answers it
    again from memory. The payload behind this message is the command's.
    """

    cancellable: ClassVar[bool] = True

    root: str  # the process that gave the command, with its start: numbers of one root rise
    number: int
    message: bytes
    targets: tuple[RelayTarget, ...] = ()
    arity: int  # the most processes that one process passes it on to, unless it stands in for a lost one
    deadline_s: float  # from the arrival of this message on
    silent_s: float  # a process that passes on and doesn't answer a probe for so long is stood in for


class OpenRelay(Message, frozen=True, kw_only=True):
    """Listen on `interface` (as the site says it), so that others can pass commands on to this process.

    Reply: RelayOpen.
    """

    interface: str


class RelayOpen(Message, frozen=True, kw_only=True):
    addresses: tuple[str, ...]


class RelayProbe(Message, frozen=True, kw_only=True):
    """Is the process that passes a command on still there? Answered without delay."""

    urgent: ClassVar[bool] = True


class RelayOutcome(msgspec.Struct, frozen=True, array_like=True):
    """What became of a command at one process: the encoded reply, or the error that kept it from coming."""

    name: str
    via: str  # who asked it
    latency_s: float  # from the start at the process that reports this
    message: bytes = b""
    payload_bytes: int = 0
    error: str = ""  # class of core.errors; empty for a reply
    kind: str = ""  # of a RemoteError: the class of the exception there
    text: str = ""


class RelayDone(Message, frozen=True, kw_only=True):
    """Outcomes of the process itself and of `targets`. Payload: the replies' payloads, in this order."""

    outcomes: tuple[RelayOutcome, ...]
    took_s: float


class ScoreTokens(Message, frozen=True, kw_only=True):
    """Log-probabilities of given tokens under the current weights, for the probe batch.

    Payload: int32 [n, length], no padding. Reply: Scores, with payload float32 [n, length - 1].
    """

    n: int
    length: int
    engine: str = ""  # rollout host only: which engine


class Scores(Message, frozen=True, kw_only=True):
    version: WeightVersion | None
    n: int
    length: int


# ---------------------------------------------------------------------------------------------- rollout


class GenerateGroup(Message, frozen=True, kw_only=True):
    """Sample one group. Acknowledged at once; the result is a GroupDone later.

    A prompt without messages is made by the host from its seed: the environment's own task of that seed, in the
    split that the purpose names.
    """

    group_id: int
    attempt: int
    purpose: GroupPurpose
    prompt: Prompt
    n_samples: int
    sampling: SamplingParams
    seed: int  # trajectory i uses a seed derived from (seed, i)
    deadline_s: float  # bound on one trajectory
    set_aside: bool = False  # on the engines that serve evaluations only, or on the others
    at_least: WeightVersion | None = None  # on engines that hold this version or a newer one


class AbortGroups(Message, frozen=True, kw_only=True):
    """Forget these groups; what is in flight for them is dropped without a GroupDone."""

    group_ids: tuple[int, ...]
    reason: str
    purpose: GroupPurpose = GroupPurpose.TRAIN


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One engine as its host sees it. `version` is None until a sync was verified; such an engine isn't routed to."""

    name: str
    slots: int
    version: WeightVersion | None
    alive: bool
    shape: ModelShape | None = None
    set_aside: bool = False  # for evaluations only


class HostStatus(Message, frozen=True, kw_only=True):
    """Sent after joining and whenever an engine's state changed."""

    engines: tuple[EngineStatus, ...]
    ready: bool


class GroupDone(Message, frozen=True, kw_only=True):
    """A group is finished and spooled. Sent until acknowledged; the controller acknowledges after journaling."""

    summary: GroupSummary


class GroupFailed(Message, frozen=True, kw_only=True):
    """A group can't be produced by this host (an engine died, the environment failed)."""

    group_id: int
    attempt: int
    purpose: GroupPurpose
    reason: str


class SyncWeights(Message, frozen=True, kw_only=True):
    """Bring one engine to `version`: fetch, load while paused, verify digests, continue."""

    engine: str
    version: WeightVersion
    source: str  # addresses of the trainer's weight source, the best one first, separated by commas
    plan_digest: bytes
    deadline_s: float


class WeightsSynced(Message, frozen=True, kw_only=True):
    """The engine holds `version`; `digests` were computed from its live parameters."""

    engine: str
    version: WeightVersion
    digests: dict[str, bytes]
    n_bytes: int
    paused_s: float
    total_s: float


# ---------------------------------------------------------------------------------------------- engine


class EngineInfo(Message, frozen=True, kw_only=True):
    """Reply: EngineDescription."""


class EngineDescription(Message, frozen=True, kw_only=True):
    shape: ModelShape
    slots: int
    version: WeightVersion | None
    device: str
    dtype: str


class Generate(Message, frozen=True, kw_only=True):
    """Continue `input_ids` (payload int32 [n_input]). A session's earlier tokens may be reused from the KV cache.

    Reply: Generated; payload = int32 [n] output ids, float32 [n] log-probs, then routed experts
    [n_rows, moe_layers, top_k] (uint8 up to 256 experts, uint16 above) for rows from `routed_experts_start`
    to n_input + n - 1: the routing of each token as an input, so the last sampled token has none yet.
    """

    cancellable: ClassVar[bool] = True

    request_id: str
    session_id: str
    n_input: int
    sampling: SamplingParams
    routed_experts_start: int = 0
    deadline_s: float = 60.0


class Generated(Message, frozen=True, kw_only=True):
    request_id: str
    n_output: int
    finish_reason: FinishReason
    versions: tuple[VersionSpan, ...]  # over output tokens, [0, n_output)
    n_rows: int
    cached_tokens: int
    queue_s: float = 0.0


class EndSession(Message, frozen=True, kw_only=True):
    """The engine may free what it keeps for this session."""

    session_id: str


class AbortGeneration(Message, frozen=True, kw_only=True):
    """Empty `request_id`: all. An aborted request answers with what it has and finish reason abort."""

    request_id: str = ""


class EngineSync(Message, frozen=True, kw_only=True):
    """As SyncWeights, to the engine process itself. Reply: WeightsSynced."""

    version: WeightVersion
    source: str
    plan_digest: bytes
    deadline_s: float


# ---------------------------------------------------------------------------------------------- session server


class SessionEngine(msgspec.Struct, frozen=True, kw_only=True):
    """An engine of this node and where it listens. With version None nothing is sent to it."""

    name: str
    address: str
    version: WeightVersion | None


class SessionEngines(Message, frozen=True, kw_only=True):
    """All engines that a session server may use, from its agent; those that aren't listed are let go.

    The same list again changes nothing, so it is also how an agent says that it is there: a server that was told
    once and then hears nothing for longer than the lease ends itself. Reply: SessionServerStatus.
    """

    engines: tuple[SessionEngine, ...]


class SessionServerStatus(Message, frozen=True, kw_only=True):
    """`engines` are those in use at the moment; `trouble` says why the journal can't be written, "" when it can.

    `load_imbalance` is the largest number of active tokens of an engine over the mean. Of all prompt tokens,
    `prefix_hit_rate` came from engines' caches, and `prefix_bound` would have from engines that forget nothing; None
    before there were any.
    """

    sessions: int
    in_flight: int
    engines: tuple[str, ...]
    trouble: str = ""
    moved: int = 0  # sessions that went on with another engine
    failovers: int = 0  # requests that were answered though their engine was lost in the middle
    slowest_failover_s: float = 0.0  # of them, from the loss to the answer
    load_imbalance: float = 1.0
    prefix_hit_rate: float | None = None
    prefix_bound: float | None = None


# ---------------------------------------------------------------------------------------------- weights


class DescribeWeights(Message, frozen=True, kw_only=True):
    """Ask a weight source for the pieces of a version. Reply: WeightManifest."""

    version: WeightVersion


class WeightManifest(Message, frozen=True, kw_only=True):
    version: WeightVersion
    pieces: tuple[WeightPiece, ...]
    plan_digest: bytes  # over names, dtypes, shapes and piece digests in order


class FetchPieces(Message, frozen=True, kw_only=True):
    """Ask for pieces [first, last) in one bucket. Reply: PieceBucket; payload = their bytes, in order."""

    version: WeightVersion
    first: int
    last: int


class PieceBucket(Message, frozen=True, kw_only=True):
    version: WeightVersion
    first: int
    last: int


# ---------------------------------------------------------------------------------------------- trainer


class LoadState(Message, frozen=True, kw_only=True):
    """Start from a checkpoint folder (relative to the run directory), or afresh when it is empty."""

    checkpoint: str
    deadline_s: float


class TrainerReady(Message, frozen=True, kw_only=True):
    step: int  # optimizer steps done
    world_size: int
    shape: ModelShape
    n_parameters: int


class TrainStep(Message, frozen=True, kw_only=True):
    """Run optimizer step `step`. The trainer accepts last+1 and answers last again.

    `microbatches[r]` is what data-parallel rank r takes, in order. `total_loss_tokens` is the number of
    loss tokens over all ranks and microbatches: the denominator of the token mean.
    """

    step: int
    loss: str  # sft | grpo
    lr: float
    microbatches: tuple[tuple[MicrobatchPlan, ...], ...]
    total_loss_tokens: int
    routing_replay: bool
    deadline_s: float


class StepDone(Message, frozen=True, kw_only=True):
    """`metrics` are global means over loss tokens unless the name says otherwise."""

    step: int
    metrics: dict[str, float]
    phases_s: dict[str, float]
    replayed_positions: int  # (token, MoE layer) pairs that took the recorded experts
    recorded_positions: int  # (token, MoE layer) pairs for which experts were recorded and needed


class StageWeights(Message, frozen=True, kw_only=True):
    """Make the current weights fetchable as `version`; earlier versions may be dropped. Reply: WeightsStaged."""

    version: WeightVersion
    deadline_s: float


class WeightsStaged(Message, frozen=True, kw_only=True):
    version: WeightVersion
    source: str
    plan_digest: bytes
    digests: dict[str, bytes]
    n_bytes: int
    stage_s: float


class SaveCheckpoint(Message, frozen=True, kw_only=True):
    """Start writing the state after `step` into `folder` (relative to the run directory).

    Acknowledged when the state is copied and training may go on; CheckpointWritten follows.
    """

    step: int
    folder: str
    deadline_s: float


class CheckpointWritten(Message, frozen=True, kw_only=True):
    """Everything of `folder` is on storage; `error` is empty on success."""

    step: int
    folder: str
    files: dict[str, int]  # name -> bytes
    crc32: dict[str, int] = {}  # of the same files, where the back-end told it
    duration_s: float
    error: str = ""


# ---------------------------------------------------------------------------------------------- sandbox


class SandboxCreate(Message, frozen=True, kw_only=True):
    """A fresh, empty, isolated working folder with these text files. Reply: Ack."""

    sandbox_id: str
    files: dict[str, str]
    deadline_s: float = 60.0


class SandboxExec(Message, frozen=True, kw_only=True):
    """Run one shell command in the sandbox. Reply: SandboxResult."""

    sandbox_id: str
    command: str
    timeout_s: float
    max_output_bytes: int


class SandboxResult(Message, frozen=True, kw_only=True):
    exit_code: int  # 128 + signal for a killed command
    output: str  # standard output and error together, truncated to the limit
    truncated: bool
    timed_out: bool
    duration_s: float
    anew: bool = False  # the sandbox was made anew from its first files: what earlier commands wrote is gone
    limit: SandboxLimit = SandboxLimit.NONE  # the bound that it met, where that can be known


class SandboxFileEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A file of a SandboxPut; `path` is relative to its folder, `mode` as chmod(2) takes it."""

    path: str
    n_bytes: int
    mode: int


class SandboxPut(Message, frozen=True, kw_only=True):
    """Write files below `folder` ("" = the working folder); payload: their contents in order. Reply: SandboxResult.

    What earlier commands left running is killed first. With `replace` the folder is made anew.
    """

    sandbox_id: str
    folder: str
    files: tuple[SandboxFileEntry, ...]
    replace: bool = False
    timeout_s: float = 30.0


class SandboxGet(Message, frozen=True, kw_only=True):
    """Read one plain file. What earlier commands left running is killed first. Reply: SandboxGot."""

    sandbox_id: str
    path: str
    max_bytes: int
    timeout_s: float = 30.0


class SandboxGot(Message, frozen=True, kw_only=True):
    """Payload: the file's bytes. Not `found`: nothing there, or a link, a folder, a pipe, or more than `max_bytes`."""

    found: bool


class SandboxDestroy(Message, frozen=True, kw_only=True):
    sandbox_id: str


class SandboxStatus(Message, frozen=True, kw_only=True):
    """Reply: SandboxHostStatus."""


class SandboxHostStatus(Message, frozen=True, kw_only=True):
    isolation: str  # bubblewrap | unshare | none
    live: int
    executed: int
    executing_s: float


# ---------------------------------------------------------------------------------------------- supervisor


class RestartHost(Message, frozen=True, kw_only=True):
    """Start a fresh agent for `role` on `host`; the one of `incarnation` was declared lost.

    Ignored when a newer incarnation was started there already.
    """

    role: str
    host: str
    incarnation: int
    reason: str


class RestartRole(Message, frozen=True, kw_only=True):
    """End the role's step and start it anew on the same nodes. Ignored when it is newer than `incarnation` already."""

    role: str
    incarnation: int
    reason: str


class RunEnded(Message, frozen=True, kw_only=True):
    """The controller is finished: `outcome` is completed, continue (another allocation is needed) or failed."""

    outcome: str
    reason: str


class JobSignal(Message, frozen=True, kw_only=True):
    """Supervisor -> controller: the allocation ends soon; drain, save and answer."""

    signal: str
    remaining_s: float


def _all_messages() -> tuple[type[Message], ...]:
    return tuple(sorted(Message.__subclasses__(), key=lambda t: t.__name__))


#: Every message type. The decoder accepts exactly these.
MESSAGE_TYPES: tuple[type[Message], ...] = _all_messages()

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(
    Union[MESSAGE_TYPES]  # noqa: UP007
)


# The methods themselves, not functions around them: they run twice in every call.
encode: Callable[[Message], bytes] = _encoder.encode
"""MessagePack of a message, with its type tag."""

decode: Callable[[bytes | memoryview], Message] = _decoder.decode
"""Inverse of encode; raises msgspec.DecodeError or ValidationError on anything else."""
