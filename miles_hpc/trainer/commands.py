"""What the controller may ask of the trainer world, as a table; every rank runs the same orders in the same order.

    rank 0: check(message) ─▶ stored answer | ProtocolError | None ─▶ broadcast ─▶ execute on every rank ─▶ answer

| message | accepted when | asked again |
|---|---|---|
| LoadState | always; forgets what came before | loads again |
| TrainStep | its step is the last one + 1 | the last step is answered from memory |
| StageWeights | its version is of the current step | answered from memory |
| SaveCheckpoint | it is of the current step | acknowledged, written once |
| ScoreTokens | a state is loaded | computed again |

`check` refuses without touching any state, so the world goes on. What fails in `execute` leaves ranks in unknown
states: the world must end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from checkpoints.manifest import ManifestError, read_manifest
from checkpoints.verify import verify_checkpoint
from miles_hpc.core.errors import IntegrityError, ProtocolError
from miles_hpc.core.messages import (
    Ack,
    CheckpointWritten,
    LoadState,
    Message,
    SaveCheckpoint,
    Scores,
    ScoreTokens,
    StageWeights,
    StepDone,
    TrainerReady,
    TrainStep,
    WeightManifest,
    WeightsStaged,
)
from miles_hpc.core.paths import RunPaths
from miles_hpc.core.transport import Buffer
from miles_hpc.core.types import WeightVersion
from miles_hpc.trainer.backend import HostTensor, SaveHandle, TrainBackend

__all__ = ["Answer", "Commands", "SavePart", "Stage"]

Answer = tuple[Message, Sequence[Buffer]]
#: Makes tensors fetchable as a version; on rank 0 only.
Stage = Callable[[WeightVersion, Iterable[HostTensor]], WeightManifest]


class SavePart(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's view of the oldest save that is under way."""

    folder: str
    done: bool
    files: dict[str, int] = {}
    crc32: dict[str, int] = {}
    error: str = ""


class _Save:
    """A save under way on this rank."""

    def __init__(self, message: SaveCheckpoint, handle: SaveHandle) -> None:
        self.message = message
        self.handle = handle
        self.started = time.monotonic()


class Commands:
    """The state of one rank between orders. `stage` and `source_address` are given on rank 0."""

    def __init__(
        self,
        backend: TrainBackend,
        paths: RunPaths,
        *,
        world_size: int,
        rank: int = 0,
        stage: Stage | None = None,
        source: str = "",
    ) -> None:
        self._backend = backend
        self._paths = paths
        self._world_size = world_size
        self._rank = rank
        self._stage = stage
        self._source = source
        self._step: int | None = None  # None until a state is loaded
        self._last_step: StepDone | None = None
        self._staged: WeightsStaged | None = None
        self._saves: list[_Save] = []
        self._saved_folders: set[str] = set()
        self._table: dict[type[Message], Callable[[Any, memoryview], Answer]] = {
            LoadState: self._load,
            TrainStep: self._train_step,
            StageWeights: self._stage_weights,
            SaveCheckpoint: self._save,
            ScoreTokens: self._score,
        }

    # ------------------------------------------------------------------------------------------ rank 0, before

    def check(self, message: Message, payload: memoryview) -> Answer | None:
        """The answer that needs no work, or None when the order must be executed. Raises ProtocolError."""
        name = type(message).__name__
        if type(message) not in self._table:
            raise ProtocolError(f"the trainer doesn't take {name}")
        if isinstance(message, LoadState):
            return None
        if self._step is None:
            raise ProtocolError(f"{name} before LoadState: the trainer has no state yet")
        if isinstance(message, TrainStep):
            if self._last_step is not None and message.step == self._last_step.step:
                return self._last_step, ()
            self._expect(name, "step", message.step, self._step + 1)
            if message.loss not in ("sft", "grpo") or len(message.microbatches) != self._world_size:
                raise ProtocolError(
                    f"TrainStep with loss '{message.loss}' for {len(message.microbatches)} ranks: expected sft or grpo "
                    f"for {self._world_size}"
                )
        elif isinstance(message, StageWeights):
            if self._staged is not None and self._staged.version == message.version:
                return self._staged, ()
            self._expect(name, "version of step", message.version.step, self._step)
        elif isinstance(message, SaveCheckpoint):
            if message.folder in self._saved_folders:
                return Ack(), ()
            self._expect(name, "step", message.step, self._step)
        elif isinstance(message, ScoreTokens):
            _tokens(message, payload, self._backend.shape.vocab_size, self._backend.shape.max_position_embeddings)
        return None

    def _expect(self, name: str, what: str, seen: int, expected: int) -> None:
        if seen != expected:
            raise ProtocolError(f"{name} of {what} {seen}: the trainer has done step {self._step}, expected {expected}")

    # ------------------------------------------------------------------------------------------ every rank

    def execute(self, message: Message, payload: memoryview) -> Answer:
        """Run one order; collective. The answer counts on rank 0."""
        return self._table[type(message)](message, payload)

    @property
    def saving(self) -> bool:
        """Whether a save is under way; equal on all ranks."""
        return bool(self._saves)

    def poll_save(self) -> SavePart:
        """How far this rank's oldest save is. Only while `saving`."""
        save = self._saves[0]
        if not save.handle.done():
            return SavePart(folder=save.message.folder, done=False)
        try:
            files = save.handle.result()
            return SavePart(folder=save.message.folder, done=True, files=files, crc32=save.handle.crc32())
        except Exception as error:
            return SavePart(folder=save.message.folder, done=True, error=f"{type(error).__name__}: {error}")

    def settle_save(self, parts: Sequence[SavePart]) -> CheckpointWritten | None:
        """Given every rank's part: forget the oldest save when all are done, and tell what to report."""
        if not all(part.done for part in parts):
            return None
        save = self._saves.pop(0)
        files: dict[str, int] = {}
        crc32: dict[str, int] = {}
        for part in parts:
            files |= part.files
            crc32 |= part.crc32
        failed = [f"rank {rank}: {part.error}" for rank, part in enumerate(parts) if part.error]
        if failed:
            self._saved_folders.discard(save.message.folder)
        return CheckpointWritten(
            step=save.message.step,
            folder=save.message.folder,
            files=files,
            crc32=crc32,
            duration_s=time.monotonic() - save.started,
            error="; ".join(failed),
        )

    # ------------------------------------------------------------------------------------------ the table

    def _load(self, message: LoadState, payload: memoryview) -> Answer:
        folder = self._paths.root / message.checkpoint if message.checkpoint else None
        if folder is not None:
            self._verify(folder)
        self._step = self._backend.load(folder)
        self._last_step = self._staged = None
        self._saved_folders.clear()
        ready = TrainerReady(
            step=self._step,
            world_size=self._world_size,
            shape=self._backend.shape,
            n_parameters=self._backend.n_parameters,
        )
        return ready, ()

    def _verify(self, folder: Path) -> None:
        """Read this rank's share of a checkpoint's files against the manifest's CRCs. Raises IntegrityError."""
        try:
            manifest = read_manifest(folder)
        except FileNotFoundError:
            return  # a folder that a user brought along has no manifest
        except ManifestError as error:
            raise IntegrityError(str(error)) from error
        mine = sorted(manifest.files)[self._rank :: self._world_size]
        share = msgspec.structs.replace(manifest, files={name: manifest.files[name] for name in mine})
        problems = verify_checkpoint(folder, share)
        if problems:
            raise IntegrityError(f"checkpoint {folder}: {problems[0]}")

    def _train_step(self, message: TrainStep, payload: memoryview) -> Answer:
        result = self._backend.train_step(message)
        self._step = message.step
        self._last_step = StepDone(
            step=message.step,
            metrics=result.metrics,
            phases_s=result.phases_s,
            replayed_positions=result.replayed_positions,
            recorded_positions=result.recorded_positions,
        )
        return self._last_step, ()

    def _stage_weights(self, message: StageWeights, payload: memoryview) -> Answer:
        start = time.monotonic()
        tensors = list(self._backend.export_weights())
        if self._stage is None:
            return Ack(), ()
        manifest = self._stage(message.version, tensors)
        self._staged = WeightsStaged(
            version=message.version,
            source=self._source,
            plan_digest=manifest.plan_digest,
            digests={piece.name: piece.digest for piece in manifest.pieces},
            n_bytes=sum(piece.n_bytes for piece in manifest.pieces),
            stage_s=time.monotonic() - start,
        )
        return self._staged, ()

    def _save(self, message: SaveCheckpoint, payload: memoryview) -> Answer:
        self._saves.append(_Save(message, self._backend.save(self._paths.root / message.folder)))
        self._saved_folders.add(message.folder)
        return Ack(), ()

    def _score(self, message: ScoreTokens, payload: memoryview) -> Answer:
        shape = self._backend.shape
        tokens = _tokens(message, payload, shape.vocab_size, shape.max_position_embeddings)
        scores = np.ascontiguousarray(self._backend.score(tokens), np.float32)
        staged = None if self._staged is None else self._staged.version
        current = staged if staged is not None and staged.step == self._step else None
        return Scores(version=current, n=message.n, length=message.length), (scores.data.cast("B"),)


def _tokens(message: ScoreTokens, payload: memoryview, vocabulary: int, longest: int) -> np.ndarray[Any, Any]:
    """The payload as int32 [n, length]. Raises ProtocolError."""
    if message.n < 1 or not 2 <= message.length <= longest or payload.nbytes != 4 * message.n * message.length:
        raise ProtocolError(
            f"ScoreTokens of {message.n} x {message.length} tokens with {payload.nbytes} bytes: expected n >= 1, "
            f"length 2..{longest} and 4 bytes per token"
        )
    tokens = np.frombuffer(payload, "<i4").reshape(message.n, message.length)
    if tokens.min() < 0 or tokens.max() >= vocabulary:
        raise ProtocolError(f"ScoreTokens: ids span {tokens.min()}..{tokens.max()}, the vocabulary has {vocabulary}")
    return tokens
