"""Names of a trainer's parameters -> names of a Hugging Face checkpoint, which is what SGLang's models load. Pure.

transformers 5 holds the experts of a layer in two tensors; checkpoints, and so SGLang's loaders, have them one by one.
An expert's matrix is a run of bytes within the fused tensor, so nothing is copied: a name, a shape and an offset.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from miles_hpc.core.errors import UserError
from miles_hpc.core.types import WeightPiece
from miles_hpc.weights.bucket import ITEM_BYTES

__all__ = ["StagedTensor", "architecture_override", "checkpoint_tensors"]

#: transformers' class of a model type, which SGLang chooses its own by; a config made from a table has none.
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
}


def architecture_override(config: Mapping[str, Any]) -> dict[str, Any]:
    """What SGLang must be told beside this config.json. Raises UserError for a model type without a known class."""
    if config.get("architectures"):
        return {}
    kind = str(config.get("model_type", ""))
    if kind not in _ARCHITECTURES:
        raise UserError(
            f"config.json has no 'architectures', and for model type '{kind}' none is known: add it; "
            f"known types: {', '.join(_ARCHITECTURES)}"
        )
    return {"architectures": [_ARCHITECTURES[kind]]}


@dataclass(frozen=True)
class StagedTensor:
    """A tensor of a checkpoint within the bytes of all pieces, laid one after the other in the manifest's order."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int  # bytes


@dataclass(frozen=True)
class _Experts:
    """How a family's checkpoints call one expert's matrices, below the layer."""

    fused: str  # the module that holds the fused tensors
    gate: str
    up: str
    down: str


_USUAL = _Experts("mlp.experts", "{e}.gate_proj.weight", "{e}.up_proj.weight", "{e}.down_proj.weight")
#: By model_type of config.json. Mixtral's w1 is the gate, w3 goes up, w2 down.
_FAMILIES = {
    "qwen2_moe": _USUAL,
    "qwen3_moe": _USUAL,
    "qwen3_next": _USUAL,
    "deepseek_v2": _USUAL,
    "deepseek_v3": _USUAL,
    "glm4_moe": _USUAL,
    "olmoe": _USUAL,
    "mixtral": _Experts("mlp.experts", "{e}.w1.weight", "{e}.w3.weight", "{e}.w2.weight"),
}
_EMBEDDING, _OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
#: Modules that checkpoints of a family call otherwise.
_RENAMED = {"mixtral": ("mlp.", "block_sparse_moe.")}


def checkpoint_tensors(pieces: Sequence[WeightPiece], model_type: str, *, tied: bool) -> list[StagedTensor]:
    """What to load, in the pieces' order. Raises UserError for fused experts of a family that isn't known.

    `tied` (config.json's tie_word_embeddings): the embedding is the output layer as well. Some of SGLang's models have
    an output layer of their own all the same, so it is sent under both names.
    """
    found: list[StagedTensor] = []
    offset = 0
    for piece in pieces:
        found += _of_piece(piece, offset, model_type)
        offset += piece.n_bytes
    if tied and not any(t.name == _OUTPUT for t in found):
        found += [replace(t, name=_OUTPUT) for t in found if t.name == _EMBEDDING]
    return found


def _of_piece(piece: WeightPiece, offset: int, model_type: str) -> Iterator[StagedTensor]:
    stem, _, kind = piece.name.rpartition(".")
    if kind not in ("gate_up_proj", "down_proj") or len(piece.shape) != 3:
        yield StagedTensor(_renamed(piece.name, model_type), piece.dtype, tuple(piece.shape), offset)
        return
    family = _FAMILIES.get(model_type)
    if family is None or not stem.endswith(family.fused):
        raise UserError(
            f"weight '{piece.name}' {list(piece.shape)} holds all experts of a layer: SGLang's names for those of "
            f"model type '{model_type}' aren't known; expected one of {', '.join(sorted(_FAMILIES))}"
        )
    experts, rows, columns = piece.shape
    size = ITEM_BYTES[piece.dtype] * rows * columns
    for e in range(experts):
        at = offset + e * size
        if kind == "down_proj":
            yield _expert(stem, family.down, e, piece.dtype, (rows, columns), at, model_type)
            continue
        half = rows // 2
        yield _expert(stem, family.gate, e, piece.dtype, (half, columns), at, model_type)
        yield _expert(stem, family.up, e, piece.dtype, (half, columns), at + size // 2, model_type)


def _expert(
    stem: str, form: str, expert: int, dtype: str, shape: tuple[int, ...], offset: int, model_type: str
) -> StagedTensor:
    assert math.prod(shape) > 0
    return StagedTensor(_renamed(f"{stem}.{form.format(e=expert)}", model_type), dtype, shape, offset)


def _renamed(name: str, model_type: str) -> str:
    here, there = _RENAMED.get(model_type, ("", ""))
    return name.replace(f".{here}", f".{there}") if here else name
