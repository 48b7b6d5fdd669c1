"""Training state at rest: what one checkpoint folder holds and how it is written beside training.

    model.<name>                     weights, sharded (torch.distributed.checkpoint, DCP)
    optimizer.<name>.exp_avg|...     AdamW moments and step counts
    reference.<name>                 weights at the start of RL, only with a KL term
    rng_<rank>.msgpack               generator states of each rank
    trainer.json                     optimizer steps done, loss phase, world size

    training    ── copy ──▶ train on ───────────────▶ train on
    background          └──▶ shards, fsync, metadata ──▶ done

DCP keeps global tensor coordinates, so another world size reads the same folder. Its `.metadata` file is a pickle:
only folders of one's own run are read. Whether a folder is complete is told by the manifest that the controller
publishes afterwards, not here.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from checkpoints.publish import publish_bytes
from checkpoints.verify import crc32_of_file
from miles_hpc.core.errors import IntegrityError, MilesError, UserError
from miles_hpc.trainer.backend import SaveHandle

__all__ = ["DcpSaveHandle", "TrainerCounters", "load_counters", "load_state", "save_state", "state_tensors"]


class TrainerCounters(msgspec.Struct, frozen=True, kw_only=True):
    """What isn't a tensor. `loss` is the phase of the last step: "", sft or grpo."""

    step: int
    loss: str
    world_size: int
    n_parameters: int


class _RankRng(msgspec.Struct, frozen=True, kw_only=True):
    torch_cpu: bytes
    torch_cuda: bytes = b""


class DcpSaveHandle(SaveHandle):
    """One rank's part of a save: DCP's thread writes the tensors, one of our own the small files beside them."""

    def __init__(self, tensors: Future[Any], folder: Path, small: Mapping[str, bytes], rank: int) -> None:
        self._tensors = tensors
        self._folder = folder
        self._small = small
        self._rank = rank
        self._files: Future[dict[str, int]] = Future()
        self._crc32: dict[str, int] = {}
        threading.Thread(target=self._finish, name="save", daemon=True).start()

    def done(self) -> bool:
        return self._files.done()

    def result(self) -> dict[str, int]:
        return self._files.result()

    def crc32(self) -> dict[str, int]:
        return self._crc32

    def _finish(self) -> None:
        try:
            self._tensors.result()  # first: the save's collectives must be over when this handle is done
            for name, data in self._small.items():
                publish_bytes(self._folder / name, data)
            names = [*self._small, *(p.name for p in self._folder.glob(f"__{self._rank}_*.distcp"))]
            if self._rank == 0:
                names.append(".metadata")
            self._crc32 = {name: crc32_of_file(self._folder / name) for name in names}
            self._files.set_result({name: (self._folder / name).stat().st_size for name in sorted(names)})
        except (Exception, CheckpointException) as error:  # the latter is no Exception
            failed = MilesError(f"checkpoint {self._folder}: not written: {type(error).__name__}: {error}")
            failed.__cause__ = error
            self._files.set_exception(failed)


def state_tensors(
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    reference: Mapping[str, torch.Tensor] | None,
) -> dict[str, torch.Tensor]:
    """Everything that DCP writes, by its name in the folder; the tensors are the live ones."""
    tensors: dict[str, torch.Tensor] = {f"model.{name}": p.detach() for name, p in parameters.items()}
    for name, parameter in parameters.items():
        for moment, value in optimizer.state.get(parameter, {}).items():
            tensors[f"optimizer.{name}.{moment}"] = value
    for name, value in (reference or {}).items():
        tensors[f"reference.{name}"] = value
    return tensors


def save_state(
    folder: Path, tensors: dict[str, torch.Tensor], counters: TrainerCounters, *, rank: int, group: dist.ProcessGroup
) -> SaveHandle:
    """Copy `tensors` to host memory and write them in the background. Returns when the copy is made.

    `group` is a gloo group of its own, because the background thread runs collectives while training runs others.
    What goes wrong while writing is raised by the handle. Collective: every rank calls it.
    """
    cuda = torch.cuda.get_rng_state().numpy().tobytes() if torch.cuda.is_available() else b""
    generators = _RankRng(torch_cpu=torch.get_rng_state().numpy().tobytes(), torch_cuda=cuda)
    small = {f"rng_{rank:05d}.msgpack": msgspec.msgpack.encode(generators)}
    if rank == 0:
        small["trainer.json"] = msgspec.json.encode(counters)
    writer = dcp.FileSystemWriter(folder, single_file_per_rank=True, sync_files=True, thread_count=1)
    future = dcp.async_save(dict(tensors), storage_writer=writer, process_group=group)
    return DcpSaveHandle(future, folder, small, rank)


def load_counters(folder: Path, n_parameters: int) -> TrainerCounters:
    """The counters of a checkpoint. Raises UserError when the folder is another model's or no checkpoint."""
    path = folder / "trainer.json"
    try:
        counters = msgspec.json.decode(path.read_bytes(), type=TrainerCounters)
    except OSError as error:
        raise UserError(
            f"checkpoint {folder}: no readable trainer.json ({error}); expected a folder that a run saved"
        ) from error
    except msgspec.MsgspecError as error:
        raise IntegrityError(f"checkpoint {path}: {error}") from error
    if counters.n_parameters != n_parameters:
        raise UserError(
            f"checkpoint {folder}: holds a model of {counters.n_parameters} parameters, the run's model has "
            f"{n_parameters}; use the model that the checkpoint was made with"
        )
    return counters


def load_state(
    folder: Path,
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    *,
    rank: int,
) -> dict[str, torch.Tensor]:
    """Fill parameters and optimizer from `folder`, whatever world size wrote it; returns the reference, if any.

    A rank that the saving world had gets its generator states back; an additional one keeps its seeded ones.
    Collective. Raises IntegrityError when the folder can't be read.
    """
    try:
        stored = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    except Exception as error:
        raise IntegrityError(f"checkpoint {folder}: metadata can't be read: {error!r}") from error
    has_moments = any(key.startswith("optimizer.") for key in stored)
    reference = {name: torch.empty_like(p.detach()) for name, p in parameters.items() if f"reference.{name}" in stored}
    optimizer.state.clear()
    if has_moments:
        for parameter in parameters.values():
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter.detach()),
                "exp_avg_sq": torch.zeros_like(parameter.detach()),
            }
    tensors = state_tensors(parameters, optimizer, reference)
    missing = sorted(set(tensors) - set(stored))
    if missing:
        raise IntegrityError(f"checkpoint {folder}: {len(missing)} tensors are missing, the first is {missing[0]}")
    try:
        dcp.load(tensors, storage_reader=dcp.FileSystemReader(folder))
    except (Exception, CheckpointException) as error:
        raise IntegrityError(f"checkpoint {folder}: {error}") from error
    _load_rng(folder / f"rng_{rank:05d}.msgpack")
    return reference


def _load_rng(path: Path) -> None:
    if not path.exists():
        return
    try:
        state = msgspec.msgpack.decode(path.read_bytes(), type=_RankRng)
    except msgspec.MsgspecError as error:
        raise IntegrityError(f"checkpoint {path}: {error}") from error
    torch.set_rng_state(torch.frombuffer(bytearray(state.torch_cpu), dtype=torch.uint8))
    if state.torch_cuda and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.frombuffer(bytearray(state.torch_cuda), dtype=torch.uint8))
