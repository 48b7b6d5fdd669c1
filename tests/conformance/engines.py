"""What the engine suite runs on: tiny models, a weight source behind a real transport, and an engine of each kind."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen3Config, Qwen3MoeConfig

from miles_hpc.control.opening import open_transport
from miles_hpc.core.messages import Message, PieceBucket, WeightManifest
from miles_hpc.core.transport import Credentials, Endpoint, PeerIdentity, Transport
from miles_hpc.core.types import SamplingParams, WeightVersion
from miles_hpc.rollout.engine import EngineSpec, Generation, RolloutEngine
from miles_hpc.weights.broadcast import WeightSource
from miles_hpc.weights.bucket import tensor_bytes

VOCAB = 48
MAX_LENGTH = 96
SECRET = bytes(range(32))

_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,  # far from uniform, so that a wrong mask or position shows
}


def config_of(kind: str):
    """moe: Qwen3-MoE, tied; qwen3: dense, untied, GQA; llama: dense, tied, three
    query heads to a key head, as SmolLM2."""
    if kind == "moe":
        return Qwen3MoeConfig(
            **_COMMON,
            head_dim=16,
            num_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            norm_topk_prob=True,
            tie_word_embeddings=True,
        )
    if kind == "qwen3":
        return Qwen3Config(**_COMMON, head_dim=16, tie_word_embeddings=False)
    return LlamaConfig(**(_COMMON | {"num_attention_heads": 6, "hidden_size": 96}), tie_word_embeddings=True)


def save_config(kind: str, folder: Path) -> Path:
    config = config_of(kind)
    config.architectures = {"moe": ["Qwen3MoeForCausalLM"], "qwen3": ["Qwen3ForCausalLM"]}.get(
        kind, ["LlamaForCausalLM"]
    )
    config.save_pretrained(folder)
    return folder


def make_model(folder: Path, seed: int) -> PreTrainedModel:
    """The reference: transformers' own model in float32 with weights by `seed`."""
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32).eval()


@dataclass(frozen=True)
class Tensor:
    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview


def tensors_of(model: PreTrainedModel) -> list[Tensor]:
    return [
        Tensor(n, str(p.dtype).removeprefix("torch."), tuple(p.shape), tensor_bytes(p))
        for n, p in model.named_parameters()
    ]


def transport(role: str = "engine", *, term: int = 1) -> Transport:
    identity = PeerIdentity(role=role, name=role, host="here", pid=1, attempt=1, term=term)
    return open_transport("loopback", Credentials(secret=SECRET, identity=identity))


@dataclass
class Source:
    """A weight source that listens, and can be made to send wrong bytes for some replies."""

    source: WeightSource = field(default_factory=WeightSource)
    address: str = ""
    corrupt_replies: int = 0
    manifests: dict[WeightVersion, WeightManifest] = field(default_factory=dict)

    def stage(self, step: int, model: PreTrainedModel) -> WeightVersion:
        version = WeightVersion(1, step)
        self.manifests[version] = self.source.stage(version, tensors_of(model))
        return version

    async def handle(self, endpoint: Endpoint, message: Message, payload: memoryview):
        answer = await self.source.handle(endpoint, message, payload)
        if isinstance(answer, tuple) and isinstance(answer[0], PieceBucket) and self.corrupt_replies > 0:
            self.corrupt_replies -= 1
            first = bytearray(answer[1][0])
            first[0] ^= 1
            return answer[0], [memoryview(first), *answer[1][1:]]
        return answer


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[Source]:
    source = Source()
    listener = await transport("weights").listen(source.handle)
    source.address = listener.address
    try:
        yield source
    finally:
        await listener.close()


def spec_of(folder: Path, **changes) -> EngineSpec:
    async def connect(address: str, deadline_s: float) -> Endpoint:
        return await transport().connect(address, deadline_s=deadline_s)

    values = {"name": "engine-0", "model_path": folder, "connect": connect, "slots": 4, "max_length": MAX_LENGTH}
    return EngineSpec(**(values | changes))


@contextlib.asynccontextmanager
async def running(make: Callable[[], RolloutEngine]) -> AsyncIterator[RolloutEngine]:
    engine = make()
    try:
        yield engine
    finally:
        await engine.close()


async def sync(engine: RolloutEngine, source: Source, version: WeightVersion):
    return await engine.sync(version, source.address, source.manifests[version].plan_digest, deadline_s=60)


async def generate(
    engine: RolloutEngine,
    prompt,
    *,
    session: str = "",
    request: str = "",
    start: int = 0,
    deadline_s: float = 60,
    **params,
) -> Generation:
    """One request with a session of its own unless named; greedy, 12 tokens unless said otherwise."""
    session = session or f"s{id(prompt)}-{params.get('seed')}"
    sampling = SamplingParams(**({"max_new_tokens": 12, "temperature": 0.0} | params))
    return await engine.generate(
        request or f"r-{session}",
        session,
        np.asarray(prompt, np.int32),
        sampling,
        routed_experts_start=start,
        deadline_s=deadline_s,
    )


def prompts(n: int, *, seed: int = 0, shortest: int = 3, longest: int = 40) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, rng.integers(shortest, longest + 1)).astype(np.int32) for _ in range(n)]


@torch.no_grad()
def reference_log_probs(
    model: PreTrainedModel, tokens: np.ndarray, n_output: int, temperature: float = 1.0
) -> np.ndarray:
    """Log-probs of the last `n_output` tokens by one full forward in float64."""
    ids = torch.from_numpy(tokens.astype(np.int64))[None]
    exact = AutoModelForCausalLM.from_config(model.config, dtype=torch.float64).eval()
    exact.load_state_dict(model.state_dict())
    if hasattr(exact.config, "num_experts"):
        exact.set_experts_implementation("eager")
    logits = exact(input_ids=ids, use_cache=False).logits[0].double() / (temperature or 1.0)
    log_probs = torch.log_softmax(logits, -1)[:-1].gather(-1, ids[0, 1:, None])[:, 0]
    return log_probs[-n_output:].numpy()


@torch.no_grad()
def reference_experts(model: PreTrainedModel, tokens: np.ndarray) -> np.ndarray:
    """The routers' choices, in their order, for every token: [n, moe_layers, top_k]."""
    chosen: list[torch.Tensor] = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda module, args, out: chosen.append(out[2]))
        for layer in model.model.layers
        if hasattr(layer.mlp, "gate")
    ]
    model(input_ids=torch.from_numpy(tokens.astype(np.int64))[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.stack(chosen, 1).numpy()


async def until(condition: Callable[[], bool], seconds: float = 30) -> None:
    """Wait for something that has no event of its own."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.002)
