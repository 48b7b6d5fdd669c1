"""Key-value cache with fixed slots, and the attention that reads it for a ragged batch of tokens.

One forward takes the tokens of all active rows side by side, without padding: [1, n_tokens]. Rows that decode
bring one token and come first; rows that prefill bring a chunk each. Linear layers, norms and experts see one flat
list of tokens; only attention knows rows:

    tokens     d d d d | p p p p p p | p p p          d: one token of a decoding row, p: chunk of a prefilling row
    attention  one call over all d   | one call over all chunks, padded to the longest

Every key and value is written at its own (slot, position) before it is read, so rows of any length share a forward
and a row's slot never moves. `StepLayout` is the plan of one forward; the model hands it, as a keyword argument, to
`slot_attention`, which SlotModel registers with transformers under `ATTENTION_NAME`. Models that take their attention
function from that registry work unchanged; tested are Llama, Qwen3 and Qwen3-MoE.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward

__all__ = ["ATTENTION_NAME", "Chunk", "SlotCache", "StepLayout", "slot_attention"]

ATTENTION_NAME = "miles_hpc_slots"

#: Keys are read up to the longest row, rounded up to this many, so that shapes repeat from step to step.
_LENGTH_STEP = 16


@dataclass(frozen=True, slots=True)
class Chunk:
    """`n_tokens` tokens of the row in `slot`, the first of them at position `start`."""

    slot: int
    start: int
    n_tokens: int


class SlotCache:
    """Keys and values of all layers: [2, slots, max_length, kv_heads, head_dim] each, allocated once.

    Not thread-safe: it belongs to the engine's thread. A slot's old content needs no clearing, since positions are
    written before they are read; except that NaN would survive masking (0 * NaN), so `clear` exists for that.
    """

    def __init__(
        self,
        *,
        n_layers: int,
        slots: int,
        max_length: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (2, slots, max_length, kv_heads, head_dim)
        self.layers = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(n_layers)]
        self.flat = [layer.view(2, slots * max_length, kv_heads, head_dim) for layer in self.layers]
        self.slots = slots
        self.max_length = max_length
        self.dtype = dtype
        self.device = device
        self.positions = torch.arange(max_length, device=device)

    @property
    def n_bytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)

    def clear(self, slot: int) -> None:
        for layer in self.layers:
            layer[:, slot].zero_()


class StepLayout:
    """The plan of one forward over a cache: where each token's key goes and what each row reads.

    `chunks` must have the decoding rows (one token each) first. D decoding rows, P prefilling rows of at most
    C tokens, N tokens in all. `padding` tokens may follow, which write nothing and whose attention is zero; with
    `whole_length` keys are read up to the cache's length, whatever the longest row: both keep shapes independent of
    what is in the batch.
    """

    __slots__ = (
        "cache",
        "chunk_mask",
        "chunk_pad",
        "chunk_slots",
        "chunk_unpad",
        "flat_index",
        "n_chunks",
        "n_decoding",
        "n_tokens",
        "padding",
        "position_ids",
        "row_mask",
        "row_slots",
        "whole_length",
    )

    def __init__(
        self, cache: SlotCache, chunks: Sequence[Chunk], *, padding: int = 0, whole_length: bool = False
    ) -> None:
        self.cache = cache
        self.padding = padding
        self.whole_length = whole_length
        device = cache.device
        self.n_decoding = n_decoding = next((i for i, c in enumerate(chunks) if c.n_tokens != 1), len(chunks))
        tail = chunks[n_decoding:]
        self.n_chunks = len(tail)
        slots = np.fromiter((c.slot for c in chunks), np.int64, len(chunks))
        starts = np.fromiter((c.start for c in chunks), np.int64, len(chunks))
        if not tail:
            positions, flat = starts, slots * cache.max_length + starts
        else:
            lengths = np.fromiter((c.n_tokens for c in chunks), np.int64, len(chunks))
            first = np.cumsum(lengths) - lengths
            row = np.repeat(np.arange(len(chunks)), lengths)
            positions = starts[row] + np.arange(len(row)) - first[row]
            flat = slots[row] * cache.max_length + positions
        self.n_tokens = len(positions)
        both = torch.from_numpy(np.stack((positions, flat))).to(device)
        self.position_ids = torch.nn.functional.pad(both[:1], (0, padding)) if padding else both[:1]  # [1, N + padding]
        self.flat_index = both[1]  # [N]
        if n_decoding:
            length = self._rounded(int(starts[:n_decoding].max()) + 1)
            self.row_slots = self._select(slots[:n_decoding])
            self.row_mask = self._mask(both[0, :n_decoding], length)[:, None, None, :]  # [D, 1, 1, length]
        if tail:
            self._plan_chunks(slots[n_decoding:], starts[n_decoding:], lengths[n_decoding:])

    def _plan_chunks(self, slots: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> None:
        """Pad indices: chunk tokens to [P, C] and back. Padding repeats the chunk's last token."""
        device = self.cache.device
        widest = int(lengths.max())
        first = self.n_decoding + np.cumsum(lengths) - lengths
        offset = np.minimum(np.arange(widest)[None, :], lengths[:, None] - 1)  # [P, C]
        real = np.arange(widest)[None, :] < lengths[:, None]
        self.chunk_slots = self._select(slots)
        self.chunk_pad = torch.from_numpy((first[:, None] + offset).reshape(-1)).to(device)  # [P * C]
        self.chunk_unpad = torch.from_numpy(np.flatnonzero(real)).to(device)
        positions = torch.from_numpy(starts[:, None] + offset).to(device)
        self.chunk_mask = self._mask(positions, self._rounded(int((starts + lengths).max())))  # [P, C, length]

    def _rounded(self, length: int) -> int:
        if self.whole_length:
            return self.cache.max_length
        return min(-(-length // _LENGTH_STEP) * _LENGTH_STEP, self.cache.max_length)

    def _select(self, slots: np.ndarray) -> slice | torch.Tensor:
        """A slice where the slots are neighbours in order: reading those needs no copy."""
        n, low = len(slots), int(slots[0])
        if n == 1 or (int(slots[-1]) == low + n - 1 and bool((np.diff(slots) == 1).all())):
            return slice(low, low + n)
        return torch.from_numpy(slots).to(self.cache.device)

    def _mask(self, positions: torch.Tensor, length: int) -> torch.Tensor:
        """Additive causal mask: a query at position p reads keys 0..p. [...] -> [..., length]."""
        hidden = self.cache.positions[:length] > positions[..., None]
        return torch.zeros(hidden.shape, dtype=self.cache.dtype, device=self.cache.device).masked_fill_(
            hidden, -torch.inf
        )

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        """Write keys and values [1, kv_heads, N, head_dim], read for `query` [1, heads, N, head_dim].

        Returns [1, N, heads, head_dim]. Query heads that share a key head are folded into the query length, so keys
        are never repeated.
        """
        flat = self.cache.flat[layer]
        flat[0].index_copy_(0, self.flat_index, key[0, :, : self.n_tokens].transpose(0, 1))
        flat[1].index_copy_(0, self.flat_index, value[0, :, : self.n_tokens].transpose(0, 1))
        heads, kv_heads, head_dim = query.shape[1], key.shape[1], query.shape[3]
        group = heads // kv_heads
        tokens = query[0].transpose(0, 1)  # [N, heads, head_dim]
        parts = []
        if self.n_decoding:
            q = tokens[: self.n_decoding].reshape(self.n_decoding, kv_heads, group, head_dim)
            k, v = self._read(layer, self.row_slots, self.row_mask.shape[-1])
            out = scaled_dot_product_attention(q, k, v, attn_mask=self.row_mask, scale=scale)
            parts.append(out.reshape(self.n_decoding, heads, head_dim))
        if self.n_chunks:
            rows, width, length = self.chunk_mask.shape
            q = tokens.index_select(0, self.chunk_pad).view(rows, width, kv_heads, group, head_dim)
            q = q.permute(0, 2, 3, 1, 4).reshape(rows, kv_heads, group * width, head_dim)
            k, v = self._read(layer, self.chunk_slots, length)
            mask = self.chunk_mask[:, None].repeat(1, 1, group, 1)  # [P, 1, group * C, length]
            out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
            out = out.view(rows, kv_heads, group, width, head_dim).permute(0, 3, 1, 2, 4)
            parts.append(out.reshape(rows * width, heads, head_dim).index_select(0, self.chunk_unpad))
        if self.padding:
            parts.append(query.new_zeros(self.padding, heads, head_dim))
        return (parts[0] if len(parts) == 1 else torch.cat(parts))[None]

    def _read(self, layer: int, select: slice | torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        both = self.cache.layers[layer][:, :, :length]
        both = both[:, select] if isinstance(select, slice) else both.index_select(1, select)
        k, v = both.transpose(2, 3).unbind(0)  # [rows, kv_heads, length, head_dim]
        return k, v


def slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *args: Any,
    layout: StepLayout | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """transformers' attention interface. Without a layout (scoring) it is plain causal attention."""
    if layout is None:
        result: tuple[torch.Tensor, torch.Tensor | None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, *args, **kwargs
        )
        return result
    return layout.attend(int(module.layer_idx), query, key, value, kwargs.get("scaling")), None
