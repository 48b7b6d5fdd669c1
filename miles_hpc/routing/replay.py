"""Routing replay (R3): the trainer's forward takes the experts that the engine recorded.

    router(hidden) -> logits, scores, ids          the model's own choice
         hook      -> logits, scores', ids'        recorded ids; scores' from the trainer's own probabilities

The trainer's router logits are computed as always. Where a token has a record, its probabilities are gathered at the
recorded ids and normalised the way the model does, so the router still gets gradient; where it has none (padding,
the last token of a trajectory) the model's own choice stands. Same idea as Miles' rollout routing replay and
Megatron's RouterReplay.

Ids must have been checked before (trainer/replay.py). What was really replayed is counted inside the hook from the
ids that leave it. A forward that is run again for recomputation in the backward sees the same record, and isn't
counted twice. Not thread-safe: one forward at a time.

The hook also sees router logits when a load-balancing loss asks for them (`collect_logits`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from miles_hpc.core.errors import IntegrityError, UserError

__all__ = ["RouterTap", "find_routers"]

RouterOutput = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def find_routers(layers: Iterable[nn.Module]) -> dict[int, nn.Module]:
    """Layer number -> router, for decoder layers that have one; a dense model gives an empty result.

    A router is a module with `top_k` and a weight [n_experts, hidden], as in transformers' Qwen3-MoE and Mixtral.
    """
    found: dict[int, nn.Module] = {}
    for number, layer in enumerate(layers):
        for module in layer.modules():
            weight = getattr(module, "weight", None)
            if (
                isinstance(getattr(module, "top_k", None), int)
                and isinstance(weight, nn.Parameter)
                and weight.ndim == 2
            ):
                found[number] = module
                break
    return found


class RouterTap:
    """Hooks on all routers of a model, in layer order. Install before the parameters are sharded.

    Raises UserError when `replay` is wanted and a router doesn't compute softmax probabilities with top-k selection:
    its scores couldn't be rebuilt for other ids.
    """

    def __init__(self, routers: dict[int, nn.Module], *, replay: bool = True) -> None:
        self.layers = tuple(routers)
        self.n_experts = 0
        self.top_k = 0
        self._ids: torch.Tensor | None = None  # [tokens, layers, top_k]
        self._recorded: torch.Tensor | None = None  # bool [tokens]
        self._counts: dict[int, torch.Tensor] = {}
        self._logits: dict[int, torch.Tensor] | None = None
        self._normalise: list[bool] = []
        for slot, (number, router) in enumerate(routers.items()):
            self._normalise.append(replay and _normalises(router, number))
            self.n_experts = int(router.weight.shape[0])
            self.top_k = int(router.top_k)
            router.register_forward_hook(partial(self._hook, slot))

    @contextmanager
    def replay(self, ids: torch.Tensor, recorded: torch.Tensor) -> Iterator[Callable[[], int]]:
        """Force `ids` [tokens, layers, top_k] where `recorded` [tokens]; must span forward and backward.

        Yields a function that tells how many (token, layer) pairs left the routers with their recorded experts.
        """
        self._ids, self._recorded, self._counts = ids, recorded, {}
        try:
            yield self._replayed
        finally:
            self._ids = self._recorded = None

    @contextmanager
    def collect_logits(self) -> Iterator[dict[int, torch.Tensor]]:
        """Yields a dict that fills with router logits [tokens, n_experts] by position in `layers`."""
        self._logits = {}
        try:
            yield self._logits
        finally:
            self._logits = None

    def _replayed(self) -> int:
        return sum(int(count) for count in self._counts.values())

    def _hook(self, slot: int, module: nn.Module, inputs: Any, output: RouterOutput) -> RouterOutput | None:
        logits, scores, own = output
        if self._logits is not None:
            self._logits.setdefault(slot, logits)
        if self._ids is None or self._recorded is None:
            return None
        if self._ids.shape[0] != logits.shape[0]:
            raise IntegrityError(
                f"MoE layer {self.layers[slot]}: the record spans {self._ids.shape[0]} tokens, "
                f"the forward {logits.shape[0]}"
            )
        target, take = self._ids[:, slot], self._recorded[:, None]
        rebuilt = _scores(logits, target, self._normalise[slot]).to(scores.dtype)
        ids = torch.where(take, target.to(own.dtype), own)
        if slot not in self._counts:
            self._counts[slot] = ((ids == target).all(-1) & self._recorded).sum()
        return logits, torch.where(take, rebuilt, scores), ids


def _scores(logits: torch.Tensor, ids: torch.Tensor, normalise: bool) -> torch.Tensor:
    """softmax(logits) in float32 at `ids`, optionally normalised to sum 1: [tokens, top_k]."""
    chosen = logits.softmax(-1, dtype=torch.float32).gather(-1, ids)
    return chosen / chosen.sum(-1, keepdim=True) if normalise else chosen


@torch.no_grad()
def _normalises(router: nn.Module, number: int) -> bool:
    """Whether the router normalises its top-k probabilities, found by running it once on random input."""
    weight = router.weight
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(16, weight.shape[1], generator=generator).to(weight.device, weight.dtype)
    output = router(hidden)
    if isinstance(output, tuple) and len(output) == 3:
        logits, scores, ids = output
        if logits.shape == (16, weight.shape[0]) and scores.shape == ids.shape == (16, router.top_k):
            for normalise in (True, False):
                if torch.allclose(_scores(logits, ids, normalise).to(scores.dtype), scores, rtol=1e-2, atol=1e-4):
                    return normalise
    raise UserError(
        f"routing replay: layer {number}'s router {type(router).__name__} doesn't return (logits, softmax scores, "
        "ids); set rollout.routing_replay = false for this model"
    )
