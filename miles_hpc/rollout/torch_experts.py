"""Experts whose result for a token doesn't depend on the other tokens of the batch, bit for bit.

A matrix product's rows are equal to the last bit as long as the same kernel computes them, and which one depends
on the number of rows. Grouped kernels give every expert as many rows as the batch happens to send there. Here each
expert's rows are padded to a multiple of ROWS, which takes the small kernels out; that this is enough is what
tests/conformance/test_batch_invariance.py checks, on the machine that it runs on. Slower: for tests of equality.
"""

from __future__ import annotations

import torch

from miles_hpc.core.errors import UserError

__all__ = ["INVARIANT_EXPERTS", "ROWS", "check_experts", "invariant_experts"]

INVARIANT_EXPERTS = "miles_hpc_invariant"
ROWS = 16


def check_experts(module: torch.nn.Module, name: str) -> None:
    """Raises UserError for a layout of expert weights other than gate and up in one, out x in, without bias."""
    plain = getattr(module, "has_gate", False) and not module.has_bias and not module.is_transposed
    if not plain or getattr(module, "has_post_expert_norm", False):
        raise UserError(f"batch_invariant: experts '{name}' have another layout than Qwen3-MoE's: switch it off")


def invariant_experts(
    module: torch.nn.Module, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """transformers' experts interface: hidden [N, h], choice and weights [N, top_k] -> [N, h]."""
    n, top_k = top_k_index.shape
    chosen = top_k_index.reshape(-1)
    out = hidden.new_empty(n * top_k, hidden.shape[-1])
    for expert in torch.unique(chosen).tolist():
        pairs = (chosen == expert).nonzero()[:, 0]
        rows = hidden[pairs // top_k]
        rows = torch.nn.functional.pad(rows, (0, 0, 0, -len(pairs) % ROWS))
        rows = module._apply_gate(torch.nn.functional.linear(rows, module.gate_up_proj[expert]))
        out[pairs] = torch.nn.functional.linear(rows, module.down_proj[expert])[: len(pairs)]
    return (out.view(n, top_k, -1) * top_k_weights[..., None]).sum(1).to(hidden.dtype)
