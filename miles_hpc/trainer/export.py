"""A checkpoint as a Hugging Face folder: safetensors, config, tokenizer; compared before it shows.

checkpoints/step_000100.t000002/ ──DCP──▶ model ──save_pretrained──▶ exports/.step_....tmp/ ──load, compare──▶ rename
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from checkpoints.publish import publish_folder
from miles_hpc.cluster.side_tasks import find_checkpoint
from miles_hpc.core.errors import IntegrityError, UserError
from miles_hpc.core.load import load_prepared
from miles_hpc.core.paths import RunPaths
from miles_hpc.trainer.model import load_model

__all__ = ["export_checkpoint"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
#: What the run's model folder has and save_pretrained doesn't write.
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def export_checkpoint(
    run_dir: str, step: int | None = None, output: str = "", dtype: Literal["float32", "bfloat16"] = "float32"
) -> dict[str, Any]:
    """Write a checkpoint's weights as a folder that transformers and engines load.

    `step`: default is the newest complete one. `output`: default <run_dir>/exports/<checkpoint's name>. `dtype` of the
    files: float32, as trained, or bfloat16 (rounded). The whole model is held in host memory twice. A folder that is
    there already is compared, not written. Returns folder, step, dtype, number of tensors, parameters and bytes.
    Raises UserError for bad input, IntegrityError for a checkpoint that can't be read and for an export that differs.
    """
    if dtype not in _DTYPES:
        raise UserError(f"export: dtype '{dtype}': expected one of {', '.join(_DTYPES)}")
    paths = RunPaths(Path(run_dir))
    run, _ = load_prepared(paths.root)
    checkpoint = find_checkpoint(paths.checkpoints, step)
    final = Path(output) if output else paths.exports / checkpoint.path.name
    if not final.is_absolute():
        raise UserError(f"export: output '{output}': expected an absolute path")
    model = load_model(run, paths.root)
    _read_weights(checkpoint.path, model)
    model.to(_DTYPES[dtype])
    if not final.exists():
        _write(model, paths, final)
    else:
        _compare(final, model)
    files = sorted(final.glob("*.safetensors"))
    return {
        "folder": str(final),
        "step": checkpoint.step,
        "dtype": dtype,
        "tensors": sum(1 for _ in model.named_parameters()),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "n_bytes": sum(file.stat().st_size for file in files),
    }


def _read_weights(folder: Path, model: Any) -> None:
    """Fill the model from a checkpoint that any world size wrote, in this process alone."""
    tensors = {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    try:
        stored = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        missing = sorted(set(tensors) - set(stored))
        if missing:
            raise IntegrityError(f"checkpoint {folder}: {len(missing)} tensors are missing, the first is {missing[0]}")
        dcp.load(tensors, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    except IntegrityError:
        raise
    except (Exception, CheckpointException) as error:  # the latter is no Exception
        raise IntegrityError(f"checkpoint {folder}: can't be read: {type(error).__name__}: {error}") from error


def _write(model: Any, paths: RunPaths, final: Path) -> None:
    """Beside its place, compared, synced, then renamed."""
    final.parent.mkdir(parents=True, exist_ok=True)
    temporary = final.with_name(f".{final.name}.{os.getpid()}.tmp")
    try:
        model.save_pretrained(temporary)
        for name in _TOKENIZER:
            if (paths.model / name).is_file():
                shutil.copyfile(paths.model / name, temporary / name)
        _compare(temporary, model)
        for file in temporary.iterdir():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
        publish_folder(temporary, final)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _compare(folder: Path, model: Any) -> None:
    """Raise IntegrityError unless transformers reads the model's very weights from the folder."""
    import transformers

    try:
        found = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=model.dtype, local_files_only=True)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise IntegrityError(f"export {folder}: can't be loaded: {' '.join(str(error).split())}") from error
    read = dict(found.named_parameters())
    expected = dict(model.named_parameters())
    if read.keys() != expected.keys():
        different = sorted(read.keys() ^ expected.keys())
        raise IntegrityError(f"export {folder}: {len(different)} tensors more or less, the first is {different[0]}")
    for name, parameter in expected.items():
        if read[name].dtype != parameter.dtype or not torch.equal(read[name], parameter):
            raise IntegrityError(f"export {folder}: tensor {name} differs from the checkpoint's")
