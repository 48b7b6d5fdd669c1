"""What this server can do, found by asking it: versions of SGLang differ, and patched builds don't tell by a number."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np

from miles_hpc.core.deadline import Deadline
from miles_hpc.core.errors import UserError
from miles_hpc.core.types import SamplingParams
from miles_hpc.rollout.sglang.api import Layers, generate_request
from miles_hpc.rollout.sglang.client import SglangClient

__all__ = ["Capabilities", "probe"]

#: More than a page of the cache holds, whatever its size.
_PROMPT_TOKENS = 300


@dataclass(frozen=True)
class Capabilities:
    """`spans`: versions are told by token. `update_session`: updates lie between begin and end (0.5.23 refuses others,
    0.5.15 has none). `namespaces`: prefixes of one namespace aren't found from another."""

    spans: bool
    update_session: bool
    namespaces: bool

    @property
    def updates_in_place(self) -> bool:
        """Whether requests may stand still during an update: their tokens' versions are told, and later requests don't
        find what older weights cached."""
        return self.spans and self.namespaces


async def probe(client: SglangClient, layers: Layers | None, max_length: int, deadline: Deadline) -> Capabilities:
    """Look at the endpoints and at one small generation. Raises UserError when it lacks something that is needed.

    Routed experts have to come from a late row on when that is asked for: a server that ignores the start would return
    rows that belong to other tokens.
    """
    paths = await client.paths(deadline.remaining_s)
    needed = ("/generate", "/pause_generation", "/continue_generation", "/update_weights_from_tensor")
    missing = [path for path in (*needed, "/update_weight_version", "/abort_request") if path not in paths]
    if missing:
        raise UserError(f"engine {client.name}: this SGLang has no {', '.join(missing)}: use 0.5.15 or newer")
    prompt = np.zeros(min(_PROMPT_TOKENS, max_length - 4), np.int32)
    metas = []
    for number, namespace in enumerate(("probe-a", "probe-a", "probe-b")):
        body = generate_request(
            f"probe.{number}",
            prompt,
            SamplingParams(max_new_tokens=2),
            max_new_tokens=2,
            routed_experts_start=len(prompt) - 1 if layers else None,
            namespace=namespace,
        )
        metas.append(msgspec.json.decode(await client.generate(body, deadline)).get("meta_info", {}))
    meta = metas[-1]
    if layers is not None:
        if meta.get("routed_experts") is None:
            raise UserError(
                f"engine {client.name}: this SGLang returns no routed experts: set rollout.routing_replay = false"
            )
        layers.decode(meta["routed_experts"], 2)
    return Capabilities(
        spans=bool(meta.get("weight_versions")),
        update_session="/begin_weight_update" in paths,
        namespaces=meta.get("cached_tokens", 0) == 0,  # where the second found the first's prefix
    )
