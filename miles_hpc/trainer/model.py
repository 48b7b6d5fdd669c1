"""The policy as a transformers model: from a configuration and a seed, a safetensors folder or a GGUF file's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from miles_hpc.core.config import RunConfig
from miles_hpc.core.errors import UserError

__all__ = ["decoder_layers", "load_model"]


def load_model(run: RunConfig, root: Path) -> Any:
    """A float32 `PreTrainedModel` on the CPU, equal on every caller.

    With `model.path` the weights come from there. Otherwise the configuration is that of `<run_dir>/model` when it
    exists, else the run file's, and the seed decides the weights. Every rank holds the whole model in host memory
    until it is sharded. Raises UserError.
    """
    import transformers

    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "sdpa"}
    try:
        if run.model.path:
            model = transformers.AutoModelForCausalLM.from_pretrained(**_weights(Path(run.model.path)), **options)
        else:
            config = _config(run, root)
            seed = run.seed if run.model.init_seed is None else run.model.init_seed
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                model = transformers.AutoModelForCausalLM.from_config(config, **options)
    except (OSError, ValueError, KeyError, TypeError) as error:
        line = " ".join(str(error).split())
        raise UserError(f"model {run.model.path or run.model.config}: can't be loaded: {line}") from error
    if run.model.experts_implementation and _has_experts(model):
        model.set_experts_implementation(run.model.experts_implementation)
    return model


def decoder_layers(model: Any) -> list[nn.Module]:
    """The repeated layers, in order. Raises UserError for a model that hides them."""
    layers = getattr(model.base_model, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise UserError(
            f"model class {type(model).__name__}: no list `layers` in its base model; the fsdp backend needs one"
        )
    return list(layers)


def _config(run: RunConfig, root: Path) -> Any:
    import transformers

    folder = root / "model"
    if (folder / "config.json").exists():
        return transformers.AutoConfig.from_pretrained(folder)
    fields = dict(run.model.config)
    return transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)


def _weights(path: Path) -> dict[str, Any]:
    """Arguments of from_pretrained for a folder with safetensors, or with one GGUF file, or that file itself."""
    if path.suffix == ".gguf":
        return {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    found = sorted(path.glob("*.gguf"))
    if found and not any(path.glob("*.safetensors")):
        if len(found) > 1:
            raise UserError(f"model.path {path}: {len(found)} GGUF files, expected one; name the file itself")
        return {"pretrained_model_name_or_path": path, "gguf_file": found[0].name}
    if not path.is_dir():
        raise UserError(f"model.path {path}: no such folder; expected safetensors files or one GGUF file in it")
    return {"pretrained_model_name_or_path": path, "local_files_only": True}


def _has_experts(model: nn.Module) -> bool:
    return any(name.endswith(".experts") for name, _ in model.named_modules())
