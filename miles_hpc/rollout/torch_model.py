"""A Hugging Face causal language model as an engine uses it: ragged forwards, routed experts, loading in place."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.integrations.moe import ExpertsInterface

from miles_hpc.core.errors import IntegrityError, UserError
from miles_hpc.core.messages import WeightManifest
from miles_hpc.core.types import ModelShape, WeightPiece
from miles_hpc.rollout.torch_cache import ATTENTION_NAME, Chunk, SlotCache, StepLayout, slot_attention
from miles_hpc.rollout.torch_experts import INVARIANT_EXPERTS, check_experts, invariant_experts
from miles_hpc.weights.bucket import digest_bytes, tensor_bytes, unpack

__all__ = ["SlotModel"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

#: Logits kept at once while scoring, in elements: 64 MiB of float32.
_SCORE_ELEMENTS = 16 * 1024 * 1024
#: Tokens at the end of a scored row that are decoded one by one.
_SCORE_DECODED = 8


class SlotModel:
    """Model, cache and staging memory of one engine. Everything but `stage` belongs to the engine's thread."""

    def __init__(
        self,
        path: Path,
        *,
        dtype: str,
        device: str,
        slots: int,
        max_length: int | None,
        experts_implementation: str,
        batch_invariant: bool = False,
    ) -> None:
        """Build the model from `path`/config.json; its weights are random until the first load.

        With `batch_invariant` a decoding row's result is the same, bit for bit, whatever rows are beside it; `forward`
        then takes either decoding rows or one chunk. It costs time: every decoding forward has `slots` tokens.

        Raises UserError for a folder without a readable config, an unknown dtype, or a model whose attention isn't
        ordinary (sliding windows shorter than `max_length`, linear attention).
        """
        if dtype not in _DTYPES:
            raise UserError(f"engine dtype '{dtype}': expected one of {', '.join(_DTYPES)}")
        self.dtype = _DTYPES[dtype]
        self.device = torch.device(device)
        config = _read_config(path)
        text = config.get_text_config()
        limit = int(text.max_position_embeddings)
        self.max_length = min(max_length or limit, limit)
        _refuse_unusual_attention(text, self.max_length, path)
        # No mask function is registered with it: transformers then passes no mask, and the layout brings its own.
        AttentionInterface.register(ATTENTION_NAME, slot_attention)
        ExpertsInterface.register(INVARIANT_EXPERTS, invariant_experts)
        self.model = AutoModelForCausalLM.from_config(config, dtype=self.dtype, attn_implementation=ATTENTION_NAME)
        self.model.requires_grad_(False).eval().to(self.device)
        self._experts = [(n, m) for n, m in self.model.named_modules() if _takes_expert_choice(m)]
        self.batch_invariant = batch_invariant
        if self._experts:
            if batch_invariant:
                for name, module in self._experts:
                    check_experts(module, name)
            self.model.set_experts_implementation(INVARIANT_EXPERTS if batch_invariant else experts_implementation)
        self._choices: list[torch.Tensor] = []
        for _, module in self._experts:
            module.register_forward_pre_hook(self._keep_choice, with_kwargs=True)
        self.shape = ModelShape(
            vocab_size=int(text.vocab_size),
            max_position_embeddings=limit,
            moe_layers=tuple(_layer_number(name) for name, _ in self._experts),
            n_experts=int(self._experts[0][1].num_experts) if self._experts else 0,
            top_k=int(text.num_experts_per_tok) if self._experts else 0,
        )
        self.row_dtype = np.dtype(np.uint8 if self.shape.n_experts <= 256 else np.uint16)
        heads = int(text.num_attention_heads)
        self._new_cache = partial(
            SlotCache,
            n_layers=int(text.num_hidden_layers),
            kv_heads=int(getattr(text, "num_key_value_heads", None) or heads),
            head_dim=int(getattr(text, "head_dim", None) or text.hidden_size // heads),
            dtype=self.dtype,
            device=self.device,
        )
        self.cache = self._new_cache(slots=slots, max_length=self.max_length)
        self.parameters: dict[str, torch.nn.Parameter] = dict(self.model.named_parameters())
        self._staging: dict[str, torch.Tensor] = {}

    # ------------------------------------------------------------------------------------------ forward

    def forward(
        self,
        chunks: Sequence[Chunk],
        tokens: npt.NDArray[np.int64],
        sampled: npt.NDArray[np.int64],
        cache: SlotCache | None = None,
    ) -> tuple[torch.Tensor, npt.NDArray[np.unsignedinteger] | None]:
        """Run the chunks' tokens [N] (decoding rows first) through the model and into the cache.

        Returns logits [len(sampled), vocab] at the packed positions `sampled`, and the experts of all N tokens
        [N, moe_layers, top_k] as the routers ordered them; None for a dense model. `cache` is used instead of the
        engine's own.
        """
        cache = self.cache if cache is None else cache
        n, n_sampled = len(tokens), len(sampled)
        padding = cache.slots - n if self.batch_invariant and chunks[0].n_tokens == 1 else 0
        layout = StepLayout(cache, chunks, padding=padding, whole_length=self.batch_invariant)
        if padding:
            tokens = np.pad(tokens, (0, padding))
            sampled = np.concatenate((sampled, np.full(cache.slots - n_sampled, n, np.int64)))
        self._choices.clear()
        output = self.model(
            input_ids=torch.from_numpy(tokens).to(self.device)[None],
            position_ids=layout.position_ids,
            use_cache=False,
            logits_to_keep=torch.from_numpy(sampled).to(self.device),
            layout=layout,
        )
        return output.logits[0, :n_sampled], self._take_choices(n)

    def score(self, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        """Log-probs of tokens[:, 1:] at temperature 1, computed as they are served. [n, length - 1]

        Two prefill chunks, then the last tokens one by one, through a slot cache of its own: a comparison with the
        trainer's full forward thereby covers what sampling really uses.
        """
        n, length = tokens.shape
        rows = max(1, _SCORE_ELEMENTS // (self.shape.vocab_size * length))
        parts = [self._score_rows(tokens[at : at + rows].astype(np.int64)) for at in range(0, n, rows)]
        self._choices.clear()
        return np.concatenate(parts).astype(np.float32)

    def _score_rows(self, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        n, length = tokens.shape
        inputs = length - 1
        prefilled = max(0, inputs - _SCORE_DECODED)
        bounds = sorted({0, prefilled // 2, prefilled, *range(prefilled, inputs + 1)})
        cache = self._new_cache(slots=n, max_length=inputs)
        parts = []
        for start, end in pairwise(bounds):
            chunks = [Chunk(slot, start, end - start) for slot in range(n)]
            logits, _ = self.forward(chunks, tokens[:, start:end].ravel(), np.arange(n * (end - start)), cache)
            targets = torch.from_numpy(tokens[:, start + 1 : end + 1].ravel()).to(self.device)
            log_probs = torch.log_softmax(logits.float(), -1).gather(-1, targets[:, None])
            parts.append(log_probs.reshape(n, end - start).cpu().numpy())
        return np.concatenate(parts, axis=1)

    def _keep_choice(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._choices.append(kwargs["top_k_index"] if "top_k_index" in kwargs else args[1])

    def _take_choices(self, n: int) -> npt.NDArray[np.unsignedinteger] | None:
        if not self._choices:
            return None
        rows = np.asarray(torch.stack(self._choices, 1)[:n].cpu().numpy(), self.row_dtype)  # [N, moe_layers, top_k]
        self._choices.clear()
        return rows

    # ------------------------------------------------------------------------------------------ weights

    def check_manifest(self, manifest: WeightManifest) -> None:
        """Refuse a manifest that isn't exactly this model's parameters. Raises IntegrityError naming the first."""
        ours = {n: (str(p.dtype).removeprefix("torch."), tuple(p.shape)) for n, p in self.parameters.items()}
        theirs = {p.name: (p.dtype, tuple(p.shape)) for p in manifest.pieces}
        for name in (*sorted(ours.keys() ^ theirs.keys()), *ours):  # what only one side has says most
            if ours.get(name) != theirs.get(name):
                raise IntegrityError(
                    f"weight '{name}' of {manifest.version}: source has {theirs.get(name, 'no such weight')}, "
                    f"this engine's model has {ours.get(name, 'no such weight')}"
                )

    def stage(self, pieces: Sequence[WeightPiece], data: memoryview) -> None:
        """Copy a bucket into staging memory; live parameters aren't touched. May run in any thread."""
        for piece, view in unpack(pieces, data):
            target = self._staging.get(piece.name)
            if target is None:
                target = torch.empty_like(self.parameters[piece.name], device="cpu", requires_grad=False)
                self._staging[piece.name] = target
            tensor_bytes(target)[:] = view

    def load_staged(self) -> None:
        """Copy staging memory into the live parameters, in place."""
        for name, tensor in self._staging.items():
            self.parameters[name].copy_(tensor)

    def digests(self) -> dict[str, bytes]:
        """BLAKE2b-128 of every live parameter's bytes."""
        return {name: digest_bytes(tensor_bytes(p)) for name, p in self.parameters.items()}


def _read_config(path: Path) -> Any:
    file = path / "config.json"
    try:
        raw = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"engine model {file}: {error}: expected a Hugging Face config.json") from error
    if "auto_map" in raw:
        raise UserError(f"engine model {file}: it names its own code (auto_map): only models of transformers are run")
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True)
    except (ValueError, KeyError) as error:
        kind = raw.get("model_type")
        raise UserError(f"engine model {file}: model_type {kind!r}: this transformers doesn't know it") from error


def _refuse_unusual_attention(text: Any, max_length: int, path: Path) -> None:
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    window = getattr(text, "sliding_window", None)
    if kinds - {"full_attention", "sliding_attention"}:
        raise UserError(
            f"engine model {path}: layers of kind {sorted(kinds)}: the torch engine runs full attention only"
        )
    if window is not None and window < max_length and (kinds != {"full_attention"} or not hasattr(text, "layer_types")):
        raise UserError(
            f"engine model {path}: sliding window of {window} tokens, shorter than max_length {max_length}: "
            f"the torch engine runs full attention only"
        )


def _takes_expert_choice(module: torch.nn.Module) -> bool:
    """Whether this is a layer's set of experts: MoE models of transformers 5 call it with the router's choice."""
    return hasattr(module, "num_experts") and "top_k_index" in inspect.signature(module.forward).parameters


def _layer_number(name: str) -> int:
    found = re.search(r"\.layers\.(\d+)\.", name)
    if found is None:
        raise UserError(f"MoE module '{name}': no layer number in its name")
    return int(found.group(1))
